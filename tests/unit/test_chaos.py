"""The chaos command's own logic: what it draws, and when it says that it has proven nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tools.chaos import __main__ as command
from tools.chaos.checking import SHOWN, ZEROS, Findings
from tools.chaos.faults import Faults
from tools.chaos.load import Start, history


def drawn(seed: int, number: int = 50) -> list[str]:
    """Return the faults that are drawn from a seed, none of which finds anybody to hit."""
    said: list[str] = []
    faults = Faults(cast("Any", SimpleNamespace(workers=[], serving=[])), seed, said.append)

    def note(name: str) -> bool:
        said.append(name)
        return False

    faults.table = {name: (weight, lambda name=name: note(name)) for name, (weight, _) in faults.table.items()}  # type: ignore[misc]
    for _ in range(number):
        faults.one()
    assert faults.done == Counter()
    return said


def test_a_seed_draws_the_same_faults_again() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert len(set(drawn(7, 500))) == 15


def reported(capsys: Any, found: Findings, *, faults: int = 100, left: list[str] | None = None) -> tuple[int, Any, str]:
    """Return the exit status, the last line and the whole text of a report on five minutes."""
    chosen = Namespace(seed=3, broker="redis", minutes=5.0)
    status = command._report(
        chosen,
        "python3 dev.py chaos --seed 3",
        cast("Faults", SimpleNamespace(done=Counter({"kill_child": faults}))),
        found,
        left or [],
        [Start("chaos-1", 1, acked=True)],
    )
    text = capsys.readouterr().out
    return status, json.loads(text.splitlines()[-1]), text


def test_zeros_and_enough_of_everything_pass(capsys: pytest.CaptureFixture[str]) -> None:
    status, told, text = reported(capsys, Findings(counts=Counter(runs=300)))

    assert status == 0
    assert {name: told[name] for name in ZEROS} == dict.fromkeys(ZEROS, 0)
    assert "To see it again" not in text


@pytest.mark.parametrize("kind", ZEROS)
def test_each_finding_fails_and_says_how_to_see_it_again(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    found = Findings(counts=Counter(runs=300))
    for number in range(SHOWN + 2):
        found.add(kind, f"number {number}")

    status, told, text = reported(capsys, found)

    assert (status, told[kind]) == (1, SHOWN + 2)
    assert f"{kind}: and 2 more" in text
    assert "To see it again: python3 dev.py chaos --seed 3" in text


def test_too_little_of_anything_proves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert reported(capsys, Findings(counts=Counter(runs=300)), faults=3)[0] == 1
    assert reported(capsys, Findings(counts=Counter(runs=3)))[0] == 1
    status, told, text = reported(capsys, Findings(counts=Counter(runs=300)), left=["chaos-9 waiting"])
    assert (status, told["unfinished"]) == (1, 1)
    assert "still under way: chaos-9 waiting" in text


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    assert history(file) == []
    file.write_text('{"run": "chaos-1", "number": 1, "acked": false}\n')
    assert history(file) == [Start("chaos-1", 1, acked=False)]


@pytest.mark.parametrize("argv", [["--minutes", "0"], ["--rate", "-1"], ["--broker", "kafka"], ["--seed", "x"]])
def test_wrong_use_ends_with_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        command.arguments(argv)
    assert exit.value.code == 2
