"""A pytest plug-in that writes the outcome of each test once it is over, so that a killed run leaves what it had."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from tools.celery_suite.outcomes import Outcome, Verdict

VARIABLE: Final = "CELERY_SUITE_OUTCOMES"
_LONGEST = 20_000


class Recorder:
    """Gathers the reports of one test and writes its outcome after the last of them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._reports: dict[str, list[pytest.TestReport]] = {}
        self._reruns: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take one report: a phase, a subtest, or a phase after which the suite's flaky mark repeats the test."""
        test = report.nodeid
        if str(report.outcome) == "rerun":
            self._reruns[test] = self._reruns.get(test, 0) + 1
            self._reports.pop(test, None)
            return
        if report.when == "setup":
            self._reports[test] = []
        elif test not in self._reports:
            return  # the teardown of a try that is repeated
        self._reports[test].append(report)
        if report.when == "teardown":
            self._write(test, self._reports.pop(test))

    def _write(self, test: str, reports: list[pytest.TestReport]) -> None:
        text = "\n".join(report.longreprtext for report in reports if report.failed)[-_LONGEST:]
        seconds = round(sum(report.duration for report in reports), 3)
        outcome = Outcome(test, verdict(reports), seconds, self._reruns.pop(test, 0), text)
        with self._file.open("a", encoding="utf-8") as output:
            output.write(outcome.dump() + "\n")


def verdict(reports: list[pytest.TestReport]) -> Verdict:
    """Return how a test ended of which these are all reports, subtests included."""
    if any(report.failed for report in reports):
        in_body = any(report.failed and report.when == "call" for report in reports)
        return Verdict.FAILED if in_body else Verdict.ERROR
    expected = any(hasattr(report, "wasxfail") for report in reports)
    if any(report.skipped and report.when in ("setup", "call") and not is_subtest(report) for report in reports):
        return Verdict.XFAILED if expected else Verdict.SKIPPED
    return Verdict.XPASSED if expected else Verdict.PASSED


def is_subtest(report: pytest.TestReport) -> bool:
    """Say whether a report is of a subtest: one that is skipped does not skip its test."""
    return hasattr(report, "context")


def pytest_configure(config: pytest.Config) -> None:
    """Record into the file that the environment names."""
    config.pluginmanager.register(Recorder(Path(os.environ[VARIABLE])), "celery-suite-recorder")
