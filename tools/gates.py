"""Refuse what no linter refuses: wall clocks, unpickling, SQL made of strings, sleeping tests, open ends.

Run from anywhere as `python tools/gates.py`; prints one line a finding and exits with 1 when there is any.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SKIPPED = {"dist", "build", "site", "node_modules", "htmlcov"}
SHOWN = {".ci", ".github"}

NO_DATA_AS_CODE = "data must never become code (I27)"
NO_WALL_CLOCK = "the database's clock decides (I25)"
IN_PACKAGE = {
    **dict.fromkeys(
        ("pickle", "marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "eval", "exec", "__import__"),
        NO_DATA_AS_CODE,
    ),
    **dict.fromkeys(
        ("yaml.load", "yaml.unsafe_load", "kombu.utils.imports.symbol_by_name", "celery.utils.imports.symbol_by_name"),
        NO_DATA_AS_CODE,
    ),
    **dict.fromkeys(("time.time", "time.time_ns", "time.localtime", "time.gmtime"), NO_WALL_CLOCK),
    **dict.fromkeys(("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today"), NO_WALL_CLOCK),
    "datetime.date.today": NO_WALL_CLOCK,
}
SQL = re.compile(
    r"\s*(SELECT\s|INSERT\s+INTO\s|UPDATE\s+\S+\s+SET\s|DELETE\s+FROM\s|WITH\s+\S+\s+AS\s|MERGE\s+INTO\s|TRUNCATE\s|GRANT\s|REVOKE\s"
    r"|(CREATE|ALTER|DROP)\s+(TABLE|SCHEMA|INDEX|FUNCTION|ROLE|TYPE|VIEW|DATABASE)\s|LISTEN\s|NOTIFY\s)",
    re.IGNORECASE,
)
OPEN_END = re.compile(r"\b(TO[D]O|FIX[M]E)\b")


class Finding(NamedTuple):
    """One refused place: path relative to the project, line from 1, and what is wrong there."""

    path: str
    line: int
    text: str


def is_ours(folder: str) -> bool:
    """Tell whether a folder of this name holds files that people write."""
    return folder in SHOWN or not (folder.startswith(".") or folder in SKIPPED)


def files(root: Path) -> Iterator[Path]:
    """Yield every file of the project but those of caches, environments and builds."""
    for folder, names, found in os.walk(root):
        names[:] = sorted(name for name in names if is_ours(name))
        yield from (Path(folder, name) for name in sorted(found))


def imported(tree: ast.AST) -> dict[str, str]:
    """Return what each imported name stands for, as a dotted path."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.update((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """Return the dotted path that a name or attribute stands for, empty for any other expression."""
    match node:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=owner, attr=name):
            before = dotted(owner, names)
            return before and f"{before}.{name}"
        case _:
            return ""


def mentions(node: ast.AST, names: dict[str, str]) -> list[str]:
    """Return the dotted paths of everything that a node imports or refers to."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module)):
            return [module, *(f"{module}.{alias.name}" for alias in node.names)]
        case _:
            return [dotted(node, names)]


def is_made_sql(node: ast.AST) -> bool:
    """Tell whether an expression pastes values into SQL: an f-string, %, + or .format that starts like one."""
    match node:
        case ast.JoinedStr(values=[ast.Constant(value=str(text)), *rest]):
            return bool(rest and SQL.match(text))
        case ast.BinOp(left=ast.Constant(value=str(text)), op=ast.Mod() | ast.Add()):
            return bool(SQL.match(text))
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str(text)), attr="format")):
            return bool(SQL.match(text))
        case _:
            return False


def is_fixed_sleep(node: ast.AST, names: dict[str, str]) -> bool:
    """Tell whether an expression waits for a time that was written down, instead of for a row or a signal."""
    match node:
        case ast.Call(func=function, args=[ast.Constant()]):
            return dotted(function, names) == "time.sleep"
        case _:
            return False


def check_python(path: str, source: str) -> Iterator[Finding]:
    """Yield what is refused in one Python file; `path` decides which rules hold."""
    tree = ast.parse(source, path)
    names = imported(tree)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if path.startswith("umt_durable/"):
            used = next((name for name in mentions(node, names) if name in IN_PACKAGE), None)
            if used:
                yield Finding(path, line, f"{used}: {IN_PACKAGE[used]}")
            if is_made_sql(node):
                yield Finding(path, line, "SQL made of strings: statements live in sql/*.sql, values are parameters")
        elif path.startswith("tests/") and is_fixed_sleep(node, names):
            yield Finding(path, line, "a fixed sleep: wait for a row or a signal, or move the database's clock")


def check(root: Path) -> list[Finding]:
    """Return everything that is refused in a project folder, in order of path and line."""
    findings: list[Finding] = []
    for file in files(root):
        path = file.relative_to(root).as_posix()
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture or an archive
        findings += (
            Finding(path, number, "an open end: finish it or file an issue")
            for number, line in enumerate(text.splitlines(), start=1)
            if OPEN_END.search(line)
        )
        if file.suffix == ".py":
            findings += check_python(path, text)
    return sorted(findings)


def main() -> int:
    """Print the findings of this project; return 1 when there is any."""
    findings = check(Path(__file__).resolve().parent.parent)
    for finding in findings:
        print(f"{finding.path}:{finding.line}: {finding.text}")
    print(f"gates: {len(findings) or 'nothing'} found")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
