"""Which versions of its tasks a process takes."""

from __future__ import annotations

import pytest

from umt_durable import codec
from umt_durable.engine.registry import TaskDefinition, TaskRegistry
from umt_durable.errors import DefinitionError, UnknownTaskError
from umt_durable.states import OWN


def body(ctx: object) -> None:
    """Do nothing."""


@pytest.fixture
def tasks() -> TaskRegistry:
    registry = TaskRegistry()
    for name, version in [("charge", 1), ("charge", 2), ("import_a", 1), ("import_b", 3), (f"{OWN}answer", 1)]:
        schema = codec.InputSchema(body, task=name, skip_context=True)
        registry.add(TaskDefinition(name=name, version=version, body=body, schema=schema, function=body))
    return registry


def offered(tasks: TaskRegistry) -> list[str]:
    return [one for one in tasks.offered() if not one.startswith(OWN)]


@pytest.mark.parametrize(
    ("texts", "taken"),
    [
        (["charge@1"], ["charge@1"]),
        (["charge@2"], ["charge", "charge@2"]),
        (["charge"], ["charge", "charge@1", "charge@2"]),
        (["charge@1", " charge@2 "], ["charge", "charge@1", "charge@2"]),
        (["import_*"], ["import_a", "import_a@1", "import_b", "import_b@3"]),
        (["import_*@1", "import_*@3"], ["import_a", "import_a@1", "import_b", "import_b@3"]),
        (["*@1"], ["charge@1", "import_a", "import_a@1"]),
    ],
)
def test_f2_f4_new_runs_are_for_those_who_take_the_highest_version(
    tasks: TaskRegistry, texts: list[str], taken: list[str]
) -> None:
    tasks.take_only(texts)

    assert offered(tasks) == taken


def test_f2_answers_are_taken_whatever_else_is(tasks: TaskRegistry) -> None:
    tasks.take_only(["charge"])

    assert {f"{OWN}answer", f"{OWN}answer@1"} <= set(tasks.offered())


@pytest.mark.parametrize(
    "text", ["charge@3", "charge@", "charge@x", "charge@1@2", "charge@" + "9" * 5000, "@1", "imports_*", f"{OWN}answer"]
)
def test_f2_what_means_no_version_is_refused_and_says_which_there_are(tasks: TaskRegistry, text: str) -> None:
    with pytest.raises(UnknownTaskError, match=r"registered: charge@1, charge@2, import_a@1, import_b@3\)"):
        tasks.take_only(["charge", text])

    assert len(offered(tasks)) == 7


def test_f2_a_selection_of_nothing_is_refused(tasks: TaskRegistry) -> None:
    with pytest.raises(DefinitionError, match="name at least one of charge@1"):
        tasks.take_only(["", " "])
