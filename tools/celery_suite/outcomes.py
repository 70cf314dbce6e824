"""What became of each test of a run, how two runs differ, and which differences are known. It only knows files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self


class Verdict(StrEnum):
    """How a test ended. The two `x` ones are tests of which Celery itself says that they are expected to fail."""

    PASSED = "passed"
    FAILED = "failed"
    ERROR = "error"
    SKIPPED = "skipped"
    XFAILED = "xfailed"
    XPASSED = "xpassed"


BAD = frozenset({Verdict.FAILED, Verdict.ERROR})


class KnownFileError(Exception):
    """The list of known tests cannot be read; the text names the line."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one test ended. Units: `seconds` of all its phases; `reruns` by the suite's own flaky marks."""

    test: str
    verdict: Verdict
    seconds: float = 0.0
    reruns: int = 0
    text: str = ""

    @classmethod
    def parse(cls, line: str) -> Self:
        """Read a line that `dump` wrote."""
        fields = json.loads(line)
        return cls(**{**fields, "verdict": Verdict(fields["verdict"])})

    def dump(self) -> str:
        """Return one line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=True)


Outcomes = Mapping[str, Outcome]


def load(file: Path) -> dict[str, Outcome]:
    """Return what a run wrote, by test; of a test that was run several times in it, the last outcome.

    A half-written last line, left by a run that was killed, does not count.
    """
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    lines = text[: text.rfind("\n") + 1].splitlines()
    return {outcome.test: outcome for outcome in map(Outcome.parse, lines)}


def save(file: Path, outcomes: Outcomes) -> None:
    """Write outcomes so that `load` reads them."""
    file.write_text("".join(f"{outcome.dump()}\n" for outcome in outcomes.values()), encoding="utf-8")


def passed(outcomes: Outcomes) -> set[str]:
    """Return the tests that passed."""
    return {test for test, outcome in outcomes.items() if outcome.verdict is Verdict.PASSED}


def to_repeat(plain: Outcomes, durable: Outcomes, known: Set[str]) -> tuple[list[str], list[str]]:
    """Return which tests must be run alone before they count: those of the plain run, then those of the durable run.

    It is a test that passed in one of the two runs and did not in the other, in the order of the runs. A known loss
    fails by what it is, not by chance: it is not repeated.
    """
    plainly, durably = passed(plain), passed(durable)
    once_more = [test for test, outcome in plain.items() if outcome.verdict in BAD and test in durably]
    lost = [test for test in plain if test in plainly and test not in durably and test not in known]
    again = [test for test in lost if not _is_skipped(durable, test)]
    return once_more, again


def _is_skipped(outcomes: Outcomes, test: str) -> bool:
    return test in outcomes and outcomes[test].verdict is Verdict.SKIPPED


@dataclass(frozen=True, slots=True)
class Difference:
    """What the durable run lost and gained against the plain one, and which of the losses are known."""

    broker: str
    plain_passed: int
    durable_passed: int
    lost: tuple[str, ...]
    gained: tuple[str, ...]
    known: frozenset[str]

    @property
    def unknown(self) -> tuple[str, ...]:
        """The lost tests that the list of known ones does not name."""
        return tuple(test for test in self.lost if test not in self.known)

    def result(self) -> dict[str, object]:
        """Return the figures of the command's last line."""
        return {
            "broker": self.broker,
            "plain_passed": self.plain_passed,
            "durable_passed": self.durable_passed,
            "lost": list(self.lost),
        }


def compare(broker: str, plain: Outcomes, durable: Outcomes, known: Set[str]) -> Difference:
    """Return the difference of two runs: a lost test passes plain and does not pass durable."""
    plainly, durably = passed(plain), passed(durable)
    return Difference(
        broker=broker,
        plain_passed=len(plainly),
        durable_passed=len(durably),
        lost=tuple(sorted(plainly - durably)),
        gained=tuple(sorted(durably - plainly)),
        known=frozenset(known),
    )


def last_line(differences: Iterable[Difference]) -> str:
    """Return the one JSON object that the command ends with; with several brokers their figures are in `results`."""
    results = [difference.result() for difference in differences]
    found: dict[str, object] = {"command": "celery-suite"}
    if len(results) == 1:
        return json.dumps({**found, **results[0]})
    brokers = [result["broker"] for result in results]
    lost = sorted({str(test) for result in results for test in _texts(result["lost"])})
    totals = {name: [result[name] for result in results] for name in ("plain_passed", "durable_passed")}
    return json.dumps({**found, "broker": brokers, **totals, "lost": lost, "results": results})


def _texts(value: object) -> list[object]:
    return value if isinstance(value, list) else []


_KNOWN = re.compile(r"^### `(?P<test>[^`]+)`$")


def read_known(file: Path) -> dict[str, str]:
    """Return the tests that no durable system can pass, each with its reason: a heading with the test, then text.

    Errors: KnownFileError for a test without a reason, or named twice.
    """
    known: dict[str, list[str]] = {}
    current: list[str] | None = None
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
        heading = _KNOWN.match(line)
        if heading is not None:
            if heading["test"] in known:
                raise KnownFileError(f"{file.name}:{number}: {heading['test']} stands here twice")
            current = known[heading["test"]] = []
        elif line.startswith("#"):
            current = None
        elif current is not None and line.strip():
            current.append(line.strip())
    bare = [test for test, reason in known.items() if not reason]
    if bare:
        raise KnownFileError(f"{file.name}: no reason is given for {', '.join(bare)}")
    return {test: " ".join(reason) for test, reason in known.items()}
