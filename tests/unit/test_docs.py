"""The documents, held to the code: what they name exists, and what exists and matters is named."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

import umt_durable
from umt_durable import Durable, RunState, Settings, TaskContext, failpoints
from umt_durable.bridge.async_verbs import AsyncVerbs
from umt_durable.bridge.cli import durable as command_line
from umt_durable.bridge.outbox import Outbox
from umt_durable.bridge.pausing import PauseVerbs
from umt_durable.engine.client import Client
from umt_durable.engine.ops import Ops
from umt_durable.engine.steps import Steps
from umt_durable.states import AttemptOutcome, Reason, StepState, WaitState

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [*DOCS.rglob("*.md"), *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "SECURITY.md"))]
)
IDS = [path.relative_to(ROOT).as_posix() for path in PAGES]
REQUIRED = {
    *("A3", "A4", "A5", "B1", "B2", "B3", "B4", "B5", "B6", "B7", "C1", "C2", "C3", "C4", "C5", "C6", "C7", "C8"),
    *("C9", "C10", "D1", "D2", "D3", "D4", "D5", "D6", "D7", "D8", "D9", "D10", "D11", "D12", "D13", "D14"),
    *("E1", "E2", "E3", "E4", "E5", "E6", "E7", "E8", "E9", "E10", "E11", "F1", "F2", "F3", "F4", "F5", "F6"),
    *("G1", "G2", "G3", "G4", "G5", "G6", "H1", "H2"),
    *("K2", "N4"),
    *("S01", "S02", "S03", "S04", "S05", "S06", "S08", "S09", "S10", "S11", "S12", "S13", "S14", "S15", "S16", "S18"),
}

_FENCE = re.compile(r"^```(?P<language>\w*)[^\n]*\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} +(?P<text>.+?) *$", re.MULTILINE)
_COMMAND = re.compile(r"(?:umt-durable|celery(?: -A \w+)? durable)(?P<options>(?: -A \w+)*) (?P<name>[a-z]+)\b")
_OPTION = re.compile(r"(?<![\w-])--?[a-z][a-z-]*")


def prose(path: Path) -> str:
    """Return a page without its code blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page, as GitHub and mkdocs make them from its headings."""
    texts = (heading["text"].replace("`", "").lower() for heading in _HEADING.finditer(prose(path)))
    return {re.sub(r"[^\w -]", "", text).replace(" ", "-") for text in texts}


def section(path: Path, title: str) -> str:
    """Return the text under one heading of a page."""
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"{path.name} has no section {title!r}"
    return found[2]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all tables in a text, without their heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    heads = {number - 1 for number, row in enumerate(cells) if all(set(cell) <= {"-"} for cell in row)}
    return [row for number, row in enumerate(cells) if number not in heads and not all(set(c) <= {"-"} for c in row)]


def code(text: str) -> list[str]:
    """Return what stands between single backticks."""
    return re.findall(r"`([^`\n]+)`", text)


@cache
def suite() -> dict[str, dict[str, str]]:
    """Return the name and source of every test function, by file."""
    found: dict[str, dict[str, str]] = {}
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        parts = re.split(r"^(?=(?:async )?def (?=\w))", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
        named = ((re.match(r"(?:async )?def (test_\w+)", part), part) for part in parts)
        found[file.relative_to(ROOT).as_posix()] = {match[1]: part for match, part in named if match}
    return found


# -- pages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in _LINK.finditer(prose(page)):
        target, _, anchor = link["target"].partition("#")
        if target.startswith(("http://", "https://")):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), link["target"]
        assert not anchor or anchor in anchors(path), link["target"]
        if page.is_relative_to(DOCS):
            assert path.is_relative_to(DOCS), f"{link['target']} leads out of the pages that mkdocs has"


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_python_block_compiles(page: Path) -> None:
    for block in _FENCE.finditer(page.read_text(encoding="utf-8")):
        if block["language"] == "python":
            compile(block["text"], page.name, "exec")


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_command_that_is_named_exists(page: Path) -> None:
    for command in _COMMAND.finditer(page.read_text(encoding="utf-8")):
        assert command["name"] in commands(), command[0]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_the_readme_begins_with_the_two_commands() -> None:
    top = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]

    assert "python3 dev.py demo" in top
    assert "python3 dev.py test" in top


def test_the_navigation_holds_every_page_once() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]

    assert sorted(leaves(nav)) == sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def leaves(nav: Any) -> Iterator[str]:
    """Yield the pages of a navigation."""
    match nav:
        case str():
            yield nav
        case list():
            for item in nav:
                yield from leaves(item)
        case dict():
            for item in nav.values():
                yield from leaves(item)


# -- reference --------------------------------------------------------------------------------------------------------


@cache
def commands() -> dict[str, click.Command]:
    """Return the commands of the command line by name."""
    context = click.Context(command_line)
    found = {name: command_line.get_command(context, name) for name in command_line.list_commands(context)}
    return {name: command for name, command in found.items() if command is not None}


def test_every_command_and_option_is_documented_and_no_other() -> None:
    page = DOCS / "reference" / "cli.md"
    titles = re.findall(r"^## `(\w+)(.*)`$", page.read_text(encoding="utf-8"), re.MULTILINE)

    assert [name for name, _ in titles] == list(commands())
    for name, rest in titles:
        text = section(page, f"`{name}{rest}`")
        named = {
            option for span in code(text) for option in _OPTION.findall(span) if not span.startswith("umt-durable")
        }
        shown = [one for one in parameters(commands()[name]) if not getattr(one, "hidden", False)]
        real = {option for one in shown for option in one.opts if option.startswith("-")}
        assert named >= real - {"--help"}, name
        assert named <= real | elsewhere(), f"{name}: {named - real}"


def parameters(command: click.Command) -> list[click.Parameter]:
    """Return what a command takes, and what its own commands take if it has some."""
    inner = command.commands.values() if isinstance(command, click.Group) else ()
    return [*command.params, *(one for each in inner for one in parameters(each))]


def elsewhere() -> set[str]:
    """Return the options of other commands, which a text may refer to."""
    return {option for command in commands().values() for one in parameters(command) for option in one.opts}


def test_every_setting_is_documented_with_its_default() -> None:
    page = (DOCS / "reference" / "settings.md").read_text(encoding="utf-8")
    documented = {row[0].strip("`"): row[1].strip("`") for row in rows(page.split("## Environment only")[0])}

    shown = {"None": "none", "True": "true", "False": "false"}
    real = {one.name: shown.get(str(one.default), str(one.default)) for one in dataclasses.fields(Settings)}
    assert {name: "none" if real[name] == "none" else value for name, value in documented.items()} == real


def test_b1_every_public_name_is_documented() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    words = {word for span in code(page) for word in re.findall(r"\w+", span)}

    assert set(umt_durable.__all__) - words == set()
    for owner in (Client, Steps, TaskContext, Outbox):
        assert {name for name in dir(owner) if not name.startswith("_")} - words <= {"enqueue", "value"}, owner
    assert {name for name in vars(Durable) if name in vars(Client) and not name.startswith("_")} <= words
    assert {name for name in vars(AsyncVerbs) if not name.startswith("_")} <= words | {"fork"}
    assert {name for name in vars(PauseVerbs) if not name.startswith("_")} <= words


def heads(page: str) -> set[str]:
    """Return the names that a page describes: what a table's row, a bold text, a heading or a line begins with."""
    bold = re.findall(r"^\*\*(.+?)\*\*", page, re.MULTILINE)
    titles = re.findall(r"^#+ (.*`.*)$", page, re.MULTILINE)
    lines = re.findall(r"^(?:\* )?(`[^`\n]+`)", page, re.MULTILINE)
    spans = [span for text in (*(row[0] for row in rows(page)), *bold, *titles, *lines) for span in code(text)]
    named = (re.match(r"@?(?:await )?([\w.]+)", span) for span in spans)
    return {name for match in named if match for name in match[1].split(".")}


@pytest.mark.parametrize("owner", [umt_durable, Client, Steps, TaskContext, Outbox, Ops])
def test_b1_every_public_name_has_a_description_of_its_own(owner: Any) -> None:
    described = heads((DOCS / "reference" / "api.md").read_text(encoding="utf-8"))
    public = owner.__all__ if owner is umt_durable else [name for name in dir(owner) if not name.startswith("_")]

    # What a call that `step.options` precedes returns is typed by this one; a body never names it.
    assert set(public) - described - ({"value"} if owner is Steps else set()) == set()


def test_every_option_of_a_verb_is_documented() -> None:
    page = (DOCS / "reference" / "api.md").read_text(encoding="utf-8")
    told = {word for span in code(page) for word in re.findall(r"\w+", span)}

    for owner in (Client, Steps, TaskContext, Outbox, Ops):
        for name, verb in vars(owner).items():
            if not name.startswith("_") and name != "value" and inspect.isfunction(verb):
                options = set(inspect.signature(verb).parameters) - {
                    "self",
                    "args",
                    "kwargs",
                    "new",
                    "run",
                    "parameters",
                }
                assert options - told == set(), f"{owner.__name__}.{name}"


def test_every_sql_function_that_apps_call_has_a_section() -> None:
    page = DOCS / "reference" / "sql.md"
    ddl = (ROOT / "migrations" / "sql" / "0001_api.sql").read_text(encoding="utf-8")
    found = dict(re.findall(r"^CREATE FUNCTION \{schema\}\.(\w+)\((.*?)\)\s+RETURNS", ddl, re.DOTALL | re.MULTILINE))

    for name in ("enqueue", "signal", "emit", "cancel", "lookup"):
        text = re.split(rf"^## `{name}`$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1].split("\n## ")[0]
        given = [one.split() for one in found[name].split(",")]
        parameters = {words[1] if words[0] == "INOUT" else words[0] for words in given if words[0] != "OUT"}
        assert parameters <= set(re.findall(r"\w+", text)), name


def test_b3_b4_every_table_and_column_is_documented() -> None:
    ddl = (ROOT / "migrations" / "versions" / "0001_foundation.py").read_text(encoding="utf-8")
    page = (DOCS / "reference" / "schema.md").read_text(encoding="utf-8")
    words = {word for span in code(page) for word in re.findall(r"\w+", span)}
    tables = re.findall(r"^CREATE TABLE \{schema\}\.(\w+) \((.*?)^\)", ddl, re.DOTALL | re.MULTILINE)

    assert len(tables) == 15
    for table, body in tables:
        columns = set(re.findall(r"^    ([a-z]\w*) +\w", body, re.MULTILINE))
        assert {table, *columns} - words == set(), table


def test_the_glossary_has_every_state() -> None:
    words = set(code((DOCS / "glossary.md").read_text(encoding="utf-8")))
    reasons = set(code((DOCS / "how-to" / "cancel-signal-inspect.md").read_text(encoding="utf-8")))

    assert {*RunState, *AttemptOutcome, *StepState, *WaitState} <= words
    assert set(Reason) <= reasons


# -- requirements -----------------------------------------------------------------------------------------------------


def carriers() -> dict[str, list[tuple[str, str]]]:
    """Return (file, function) of each test that requirements.md gives for an id."""
    page = DOCS / "reference" / "requirements.md"
    found = rows(section(page, "Behaviours")) + rows(section(page, "Scenarios"))
    return {row[0]: [split(span) for span in code(row[2])] for row in found}


def split(span: str) -> tuple[str, str]:
    """Return file and function of `file::function`."""
    file, _, function = span.partition("::")
    return file, function


def test_the_required_ids_are_listed() -> None:
    assert set(carriers()) == REQUIRED


@pytest.mark.parametrize("requirement", sorted(REQUIRED))
def test_every_requirement_has_a_test_that_carries_its_id(requirement: str) -> None:
    for file, function in carriers()[requirement]:
        assert function in suite().get(file, {}), f"{file}::{function} does not exist"
        names = f"_{requirement.lower()}_" in function or re.search(rf"\b{requirement}\b", suite()[file][function])
        assert names, f"{function} does not carry {requirement}"


def test_h2_each_acceptance_case_has_a_test() -> None:
    cases = rows(section(DOCS / "reference" / "requirements.md", "Acceptance cases of H2"))

    assert len(cases) == 6
    for _, test in cases:
        file, function = split(code(test)[0])
        assert function in suite().get(file, {}), test


# -- architecture -----------------------------------------------------------------------------------------------------

ARCHITECTURE = ROOT / "ARCHITECTURE.md"


def test_the_codemap_names_every_module_once() -> None:
    named = [span for row in rows(section(ARCHITECTURE, "Codemap")) for span in code(row[0])]
    named += code(section(ARCHITECTURE, "Codemap").rpartition("`testing/__init__.py`")[1])
    real = {path.relative_to(ROOT / "umt_durable").as_posix() for path in (ROOT / "umt_durable").rglob("*.py")}

    modules = [span for span in named if span.endswith(".py") and span != "dev.py"]
    assert sorted(modules) == sorted(real)


def test_every_invariant_that_holds_has_a_test_with_its_number_in_each_file_it_names() -> None:
    listed = rows(section(ARCHITECTURE, "Guarantees"))

    assert [row[0] for row in listed] == [f"I{number}" for number in range(1, 28)]
    for number, _, _, holds, files in listed:
        assert holds.startswith("yes") is bool(files), number
        for file in code(files):
            assert any(re.search(rf"_{number.lower()}_", name) for name in suite()[file]), f"{number} in {file}"


def test_the_crash_table_names_every_point() -> None:
    named = [span for row in rows(section(ARCHITECTURE, "Crash table")) for span in code(row[0])]

    assert len(named) == len(set(named))
    assert set(named) == set(failpoints.NAMES)


def test_the_statements_over_several_tables_are_those_of_the_sql_files() -> None:
    listed = rows(section(ARCHITECTURE, "Statements over several tables"))
    documented = {(code(row[0])[0], *sorted(code(row[2]))) for row in listed if len(code(row[2])) > 1}

    real: set[tuple[str, ...]] = set()
    for path in (ROOT / "umt_durable" / "sql").glob("*.sql"):
        for name, body in re.findall(
            r"^-- name: (\w+) :\w+\n(.*?)(?=^-- name: |\Z)", path.read_text(), re.DOTALL | re.MULTILINE
        ):
            written = set(
                re.findall(r"(?:INSERT INTO|UPDATE|DELETE FROM) \{schema\}\.(\w+)", re.sub(r"--.*", "", body))
            )
            if len(written) > 1:
                real.add((name, *sorted(written)))
    assert {entry for entry in documented if entry[0] != "enqueue_run"} == real
