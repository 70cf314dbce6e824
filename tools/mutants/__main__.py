"""`python3 dev.py mutants`: plant each bug of the catalogue in a copy of the project, and have the tests find it.

The last line of the output is one JSON object. Exit status: 0 when each was caught, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tools.mutants.catalogue import MUTANTS, Mutant

PROJECT: Final = Path(__file__).resolve().parents[2]
COPIED: Final = ("umt_durable", "migrations", "tests", "tools", "pyproject.toml", "examples", "celeryconfig.py")
AT_ONCE: Final = 2
PATIENCE_SECONDS: Final = 300
FAILED_TESTS: Final = 1
"""The status of pytest when tests failed; any other one is no catch."""


class CatalogueError(Exception):
    """A planted bug does not fit the code any more."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one planted bug: by which test it was caught first, or how the tests ended instead."""

    mutant: Mutant
    by: str | None
    told: str
    seconds: float


def planted(mutant: Mutant, text: str) -> str:
    """Return the text of a file with the bug in it.

    Errors: CatalogueError when its place is not there exactly once.
    """
    start, end = 0, len(text)
    if mutant.statement is not None:
        head = re.search(rf"^-- name: {mutant.statement} :", text, re.MULTILINE)
        if head is None:
            raise CatalogueError(f"{mutant.name}: there is no statement {mutant.statement} in {mutant.file}")
        start = head.start()
        following = text.find("\n-- name: ", start + 1)
        end = len(text) if following < 0 else following
    part = text[start:end]
    if part.count(mutant.old) != 1:
        raise CatalogueError(f"{mutant.name}: {mutant.old!r} is there {part.count(mutant.old)} times in {mutant.file}")
    return text[:start] + part.replace(mutant.old, mutant.new) + text[end:]


def check(mutant: Mutant) -> str:
    """Return the text of the mutant's file with the bug in it; see `planted`."""
    return planted(mutant, (PROJECT / "umt_durable" / mutant.file).read_text(encoding="utf-8"))


def copy(folder: Path, mutant: Mutant) -> None:
    """Copy the project, and plant the bug in the copy."""
    leave = shutil.ignore_patterns("__pycache__", "*.pyc", "_migrations")
    for name in COPIED:
        source = PROJECT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=leave, symlinks=True)
        elif source.exists():
            shutil.copy2(source, folder / name)
    (folder / "umt_durable" / mutant.file).write_text(check(mutant), encoding="utf-8")


def pass_without(chosen: Sequence[Mutant]) -> bool:
    """Say whether the tests pass where nothing is planted: else their failures would tell nothing."""
    tests = sorted({f"tests/integration/{one}.py" for mutant in chosen for one in mutant.tests})
    options = ["-q", "-n", str(AT_ONCE), "--tb=line", "--no-header", "-p", "no:cacheprovider"]
    return subprocess.run([sys.executable, "-m", "pytest", *options, *tests], check=False, cwd=PROJECT).returncode == 0


def judge(mutant: Mutant) -> Verdict:
    """Have the mutant's tests look for it; the first that fails ends that."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="umt-mutant-") as name:
        folder = Path(name)
        copy(folder, mutant)
        tests = [f"tests/integration/{one}.py" for one in mutant.tests]
        environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
        options = ["-q", "-x", "-n", "0", "--tb=line", "--no-header", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=folder, env=environ, check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            # A test that waits for ever has found it too; no other bug makes one do so.
            return Verdict(
                mutant, f"a test of {' '.join(mutant.tests)} that does not end", "", time.monotonic() - began
            )
        found = re.search(r"^(?:FAILED|ERROR) \S*?/(\S+)", done.stdout, re.MULTILINE)
        by = found[1] if done.returncode == FAILED_TESTS and found is not None else None
        return Verdict(mutant, by, done.stdout[-800:] + done.stderr[-800:], time.monotonic() - began)


def main(argv: Sequence[str]) -> int:
    """Judge all planted bugs, or those whose names are given, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python3 dev.py mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--list", action="store_true", help="only say which there are")
    options = parser.parse_args(argv)
    unknown = set(options.names) - {one.name for one in MUTANTS}
    if unknown:
        parser.error(f"there is no mutant {', '.join(sorted(unknown))}")
    chosen = [one for one in MUTANTS if not options.names or one.name in options.names]
    for one in chosen:
        check(one)
    if options.list:
        for one in chosen:
            print(f"{one.name:<36} {one.breaks:<10} {one.file}")
        return 0
    began = time.monotonic()
    if not pass_without(chosen):
        print("The tests do not pass as they are, so that they would find nothing.")
        return 1
    with ThreadPoolExecutor(AT_ONCE) as pool:
        verdicts = []
        for verdict in pool.map(judge, chosen):
            verdicts.append(verdict)
            by = f"caught by {verdict.by}" if verdict.by else "NOT CAUGHT"
            print(f"{verdict.mutant.name:<36} {verdict.mutant.breaks:<10} {verdict.seconds:5.0f} s  {by}", flush=True)
    left = [verdict for verdict in verdicts if verdict.by is None]
    for verdict in left:
        print(f"--- {verdict.mutant.name} ---\n{verdict.told}")
    names = [verdict.mutant.name for verdict in left]
    summary = {"command": "mutants", "mutants": len(verdicts), "caught": len(verdicts) - len(left), "survived": names}
    print(json.dumps({**summary, "seconds": round(time.monotonic() - began, 1)}))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
