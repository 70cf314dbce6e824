"""One run of the suite, or of some of its tests alone, in a pytest process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal

import psycopg

from tests.support import guard
from tests.support.postgres import PrivatePostgres, drop_schema, make_schema
from tools.celery_suite import outcomes, parting, recording
from tools.celery_suite.outcomes import Outcome, Verdict
from tools.celery_suite.servers import servers

Mode = Literal["plain", "durable"]

ROOT: Final = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS: Final = 600
"""How long a test may take that does not say so itself; a durable run does more per task than a plain one."""
REPEATS: Final = 3
NO_RERUNS: Final = ("-p", "no:rerunfailures")
"""A test that is repeated alone has no further tries by its own flaky mark."""
_SHOWN_SECONDS: Final = 60.0
_PLUGINS: Final = (
    "no:celery",
    "no:valkey",
    "celery.contrib.pytest",
    "tools.celery_suite.recording",
    "tools.celery_suite.parting",
)
_BROKEN_OFF: Final = 3
_NOTHING_SELECTED: Final = 5


class RunError(Exception):
    """A run ended before its tests did; the text says where its log is."""


@dataclass(frozen=True)
class Suite:
    """The suite laid in a folder, and where its results go."""

    source: Path
    results: Path
    broker: str
    say: Callable[[str], None]
    parts: int = 1
    """In how many parts a run is divided, which run at the same time, each against servers of its own."""

    def run(self, mode: Mode, selection: Sequence[str]) -> dict[str, Outcome]:
        """Run the selected tests, given as arguments of pytest, and return their outcomes.

        Errors: RunError; NoBrokerError.
        """
        name = f"{self.broker}-{mode}"
        names = [name] if self.parts == 1 else [f"{name}-{number}" for number in range(1, self.parts + 1)]
        self.say(f"{name}: running; log in {', '.join(f'{self.results / one}.log' for one in names)}")

        def run_part(number: int) -> dict[str, Outcome]:
            show, part = self._show_progress(names[number]), {parting.VARIABLE: f"{number}/{self.parts}"}
            return self._pytest(names[number], mode, selection, show, part)

        with ThreadPoolExecutor(self.parts) as pool:
            parts = list(pool.map(run_part, range(self.parts)))
        found = {test: outcome for part in parts for test, outcome in part.items()}
        outcomes.save(self.results / f"{name}.jsonl", found)
        counts = {verdict: sum(one.verdict is verdict for one in found.values()) for verdict in Verdict}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
        self.say(f"{name}: {told or 'no tests'}; outcomes in {self.results / name}.jsonl")
        return found

    def repeat(self, mode: Mode, tests: Sequence[str], found: dict[str, Outcome]) -> dict[str, Outcome]:
        """Run tests alone, each until it passes, and return the outcomes with what came of that."""
        result = dict(found)
        for number, test in enumerate(tests, start=1):
            for attempt in range(1, REPEATS + 1):
                name = f"{self.broker}-{mode}-alone-{number}-{attempt}"
                alone = self._pytest(name, mode, [*NO_RERUNS, test], lambda _outcomes: None).get(test)
                verdict = alone.verdict if alone is not None else "not run"
                self.say(f"{self.broker}-{mode}: {test} alone, attempt {attempt} of {REPEATS}: {verdict}")
                if alone is not None:
                    result[test] = alone
                    if alone.verdict is Verdict.PASSED:
                        break
        return result

    def _pytest(
        self,
        name: str,
        mode: Mode,
        selection: Sequence[str],
        show: Callable[[dict[str, Outcome]], None],
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> dict[str, Outcome]:
        file, log = self.results / f"{name}.jsonl", self.results / f"{name}.log"
        with ExitStack() as stack:
            where = stack.enter_context(servers(self.broker, self.results))
            journal: dict[str, str] = {}
            if mode == "durable":
                journal = stack.enter_context(_journal(self.results, self.say, name))
            plugins = [*_PLUGINS, *(["tools.celery_suite.durably"] if mode == "durable" else [])]
            options = [word for plugin in plugins for word in ("-p", plugin)]
            # Python's parser, by which pytest shows source, may break off in one thread because of another (3.11).
            chosen = ["-q", "-rfE", "--tb=native", f"--timeout={TIMEOUT_SECONDS}", "-o", "cache_dir=.pytest_cache"]
            command = [sys.executable, "-m", "pytest", *options, *chosen, *selection]
            process = guard.spawn(
                command, log, self._environment(file, {**where, **journal, **environment}), cwd=self.source
            )
            try:
                _wait(process, lambda: show(outcomes.load(file)))
            finally:
                guard.end(process)
        if process.returncode == _BROKEN_OFF:
            self.say(f"{name}: pytest broke off, see {log}; what has no outcome is repeated alone")
        elif process.returncode not in (0, 1, _NOTHING_SELECTED):
            raise RunError(f"{name}: pytest ended with status {process.returncode}; its log is {log}")
        return outcomes.load(file)

    def _environment(self, file: Path, extra: dict[str, str]) -> dict[str, str]:
        # The suite's folder comes first: it has an empty celeryconfig.py for the workers that tests start.
        path = os.pathsep.join([str(self.source), str(ROOT)])
        clean = guard.clean_environment(extra)
        return {**clean, "PYTHONPATH": path, recording.VARIABLE: str(file)}

    def _show_progress(self, name: str) -> Callable[[dict[str, Outcome]], None]:
        def show(found: dict[str, Outcome]) -> None:
            bad = [one for one in found.values() if one.verdict in outcomes.BAD]
            last = next(reversed(found)) if found else "none yet"
            self.say(f"{name}: {len(found)} tests over, {len(bad)} not passed; the last was {last}")

        return show


def _wait(process: subprocess.Popen[bytes], show: Callable[[], None]) -> None:
    """Wait for a process to end, and show now and then how far it is."""
    shown = time.monotonic()
    while True:
        try:
            process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            if time.monotonic() - shown >= _SHOWN_SECONDS:
                shown = time.monotonic()
                show()
        else:
            return


@contextmanager
def _journal(folder: Path, say: Callable[[str], None], name: str) -> Iterator[dict[str, str]]:
    """Give a migrated schema of a private Postgres, and tell at the end how often runs were suspended in it."""
    server = PrivatePostgres(folder / f"postgres-{name}")
    try:
        make_schema(server.url, "celery_suite")
        yield {
            "DURABLE_DATABASE_URL": server.url,
            "DURABLE_SCHEMA": "celery_suite",
            "DURABLE_EMBEDDED": "0",
            "DURABLE_POLL_SECONDS": "0.1",  # every run waits once for a timer, some of them in long chains
        }
        with psycopg.connect(server.url) as conn:
            row = conn.execute(
                "SELECT count(DISTINCT run), count(*) FILTER (WHERE outcome = 'suspended') FROM celery_suite.attempt"
            ).fetchone()
        assert row is not None
        say(f"{name}: {row[0]} runs were executed and suspended {row[1]} times")
        drop_schema(server.url, "celery_suite")
    finally:
        server.close()
