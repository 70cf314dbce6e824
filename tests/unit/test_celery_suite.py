"""The suite's own logic: outcomes, repetitions, the difference of two runs, the list of known tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.celery_suite import __main__ as command
from tools.celery_suite import outcomes, parting, servers
from tools.celery_suite.outcomes import Outcome, Verdict
from tools.celery_suite.recording import Recorder, verdict
from tools.celery_suite.running import ROOT


def run(**verdicts: Verdict) -> dict[str, Outcome]:
    return {test: Outcome(test, found) for test, found in verdicts.items()}


PASSED, FAILED, ERROR, SKIPPED = Verdict.PASSED, Verdict.FAILED, Verdict.ERROR, Verdict.SKIPPED


# -- the difference ---------------------------------------------------------------------------------------------------


def test_a_lost_test_passes_plain_and_does_not_pass_durable() -> None:
    plain = run(same=PASSED, failed=PASSED, error=PASSED, skipped=PASSED, absent=PASSED, gained=FAILED, never=FAILED)
    durable = run(same=PASSED, failed=FAILED, error=ERROR, skipped=SKIPPED, gained=PASSED, never=FAILED)

    difference = outcomes.compare("redis", plain, durable, {"error", "never"})

    assert difference.lost == ("absent", "error", "failed", "skipped")
    assert difference.unknown == ("absent", "failed", "skipped")
    assert difference.gained == ("gained",)
    assert (difference.plain_passed, difference.durable_passed) == (5, 2)


def test_tests_that_celery_expects_to_fail_are_never_lost() -> None:
    plain = run(a=Verdict.XPASSED, b=Verdict.XFAILED)
    durable = run(a=Verdict.XFAILED, b=Verdict.FAILED)

    assert outcomes.compare("redis", plain, durable, set()).lost == ()


def test_only_what_passed_in_one_run_alone_is_repeated() -> None:
    plain = run(both=PASSED, lost=PASSED, absent=PASSED, skipped=PASSED, known=PASSED, gained=ERROR, neither=FAILED)
    durable = run(both=PASSED, lost=FAILED, skipped=SKIPPED, known=FAILED, gained=PASSED, neither=FAILED)

    assert outcomes.to_repeat(plain, durable, {"known"}) == (["gained"], ["lost", "absent"])


def test_the_last_line_is_one_object_for_one_broker_and_for_both() -> None:
    redis = outcomes.compare("redis", run(a=PASSED, b=PASSED), run(a=PASSED, b=FAILED), set())
    rabbit = outcomes.compare("rabbitmq", run(a=PASSED), run(a=PASSED), set())

    assert json.loads(outcomes.last_line([redis])) == {
        "command": "celery-suite",
        "broker": "redis",
        "plain_passed": 2,
        "durable_passed": 1,
        "lost": ["b"],
    }
    both = json.loads(outcomes.last_line([redis, rabbit]))
    assert both["broker"] == ["redis", "rabbitmq"]
    assert (both["plain_passed"], both["durable_passed"], both["lost"]) == ([2, 1], [1, 1], ["b"])
    assert [one["broker"] for one in both["results"]] == ["redis", "rabbitmq"]


# -- files ------------------------------------------------------------------------------------------------------------


def test_outcomes_survive_a_file_and_the_last_of_a_test_counts(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    first, second = Outcome("t::a[ü]", FAILED, 1.5, 2, "why"), Outcome("t::a[ü]", PASSED)
    file.write_text(f"{first.dump()}\n{Outcome('t::b', SKIPPED).dump()}\n{second.dump()}\n" + '{"test": "half')

    found = outcomes.load(file)

    assert found == {"t::a[ü]": second, "t::b": Outcome("t::b", SKIPPED)}
    assert Outcome.parse(first.dump()) == first
    assert outcomes.load(tmp_path / "none.jsonl") == {}


KNOWN = """# Title

Text that is no reason.

### `t::a`

Two words,
two lines.

### `t::b`
One.

## Another part

Text again.
"""


def test_known_tests_are_headings_with_a_reason_each(tmp_path: Path) -> None:
    file = tmp_path / "known.md"
    file.write_text(KNOWN)

    assert outcomes.read_known(file) == {"t::a": "Two words, two lines.", "t::b": "One."}


@pytest.mark.parametrize(
    ("text", "told"), [("### `t::a`\n\n### `t::b`\nWhy.\n", "t::a"), ("### `t::a`\nX.\n### `t::a`\nY.\n", "twice")]
)
def test_a_known_test_without_a_reason_or_named_twice_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "known.md"
    file.write_text(text)

    with pytest.raises(outcomes.KnownFileError, match=told):
        outcomes.read_known(file)


def test_the_projects_own_list_can_be_read() -> None:
    assert all(test.startswith("t/integration/") for test in outcomes.read_known(command.KNOWN))


# -- recording --------------------------------------------------------------------------------------------------------


def report(when: str = "call", outcome: str = "passed", **more: Any) -> Any:
    flags = {name: outcome == name for name in ("passed", "failed", "skipped")}
    return SimpleNamespace(
        nodeid="t::a", when=when, outcome=outcome, duration=0.5, longreprtext=outcome, **flags, **more
    )


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([report("setup"), report(), report("teardown")], PASSED),
        ([report("setup"), report(outcome="failed"), report("teardown")], FAILED),
        ([report("setup", "failed"), report("teardown")], ERROR),
        ([report("setup"), report(), report("teardown", "failed")], ERROR),
        ([report("setup", "skipped"), report("teardown")], SKIPPED),
        ([report("setup"), report(outcome="skipped", wasxfail="why"), report("teardown")], Verdict.XFAILED),
        ([report("setup"), report(wasxfail="why"), report("teardown")], Verdict.XPASSED),
        ([report("setup"), report(outcome="skipped", context="sub"), report(), report("teardown")], PASSED),
        ([report("setup"), report(outcome="failed", context="sub"), report(), report("teardown")], FAILED),
    ],
)
def test_the_reports_of_a_test_give_one_verdict(reports: list[Any], expected: Verdict) -> None:
    assert verdict(reports) is expected


def test_a_flaky_test_counts_as_it_ended_and_tells_its_reruns(tmp_path: Path) -> None:
    file = tmp_path / "run.jsonl"
    recorder = Recorder(file)

    first = report("setup"), report(outcome="rerun"), report("teardown")
    for one in (*first, report("setup"), report(), report("teardown")):
        recorder.pytest_runtest_logreport(one)

    assert outcomes.load(file) == {"t::a": Outcome("t::a", PASSED, 1.5, 1)}
    assert len(file.read_text().splitlines()) == 1


# -- the command line -------------------------------------------------------------------------------------------------


def test_the_selection_is_pytests_own() -> None:
    assert command.selection(command.arguments([])) == ["t/integration/"]
    chosen = command.arguments(["--only", "test_canvas.py", "--only", "t/integration/test_beat.py", "-k", "a or b"])
    assert command.selection(chosen) == ["t/integration/test_canvas.py", "t/integration/test_beat.py", "-k", "a or b"]


@pytest.mark.parametrize("option", ["--plain-from", "--durable-from"])
def test_an_earlier_run_is_of_one_broker(tmp_path: Path, option: str) -> None:
    file = tmp_path / "run.jsonl"
    file.touch()

    chosen = command.arguments(["--broker", "redis", option, str(file)])

    assert file in (chosen.plain_from, chosen.durable_from)
    for wrong in ([option, str(file)], ["--broker", "redis", option, str(tmp_path / "none")]):
        with pytest.raises(SystemExit):
            command.arguments(wrong)


def test_a_named_broker_is_used_for_its_kind_only() -> None:
    assert servers.given_broker({}) is None
    assert servers.given_broker({"TEST_BROKER": "redis://:secret@host:1/0"}) == ("redis", "redis://:secret@host:1/0")
    assert servers.given_broker({"TEST_BROKER": "pyamqp://host//"}) == ("rabbitmq", "pyamqp://host//")
    with pytest.raises(servers.NoBrokerError, match="sqs is not tested"):
        servers.given_broker({"TEST_BROKER": "sqs://"})


def test_each_test_is_in_one_of_the_parts(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text("\n".join(f"def test_{name}(): pass" for name in "abcde"))

    found = []
    for part in ("0/2", "1/2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), parting.VARIABLE: part}
        pytest_command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tools.celery_suite.parting",
            "--collect-only",
            "-q",
            ".",
        ]
        told = subprocess.run(
            pytest_command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout
        found.append([line.rpartition("_")[2] for line in told.splitlines() if "::" in line])

    assert found == [["a", "c", "e"], ["b", "d"]]


def test_a_run_has_at_least_one_part(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.arguments(["--parts", "0"])
    assert "--parts: at least one, not 0" in capsys.readouterr().err


def test_outcomes_that_were_saved_are_loaded(tmp_path: Path) -> None:
    found = run(a=PASSED, b=FAILED)
    outcomes.save(tmp_path / "all.jsonl", found)
    assert outcomes.load(tmp_path / "all.jsonl") == found
