"""`python3 dev.py celery-suite`: Celery's integration tests, plain and durable, and the difference.

The last line of the output is one JSON object. Exit status: 0 when every lost test is a known one, 1 when another one
was lost, 2 when the suite could not be run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.support import guard
from tools.celery_suite import outcomes, source
from tools.celery_suite.outcomes import Difference, KnownFileError
from tools.celery_suite.running import ROOT, RunError, Suite
from tools.celery_suite.servers import BROKERS, NoBrokerError

KNOWN = ROOT / "tests" / "celery" / "known.md"


def say(text: str) -> None:
    """Tell the person how far it is; the last line of stdout is for programs."""
    print(text, flush=True)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 dev.py celery-suite",
        description="Run the integration tests of the installed Celery, taken from its source distribution, once as "
        "they are and once with every task durable and suspended once; print the difference.",
        epilog="TEST_BROKER, TEST_BACKEND, REDIS_HOST and REDIS_PORT name servers to be used instead of private ones.",
    )
    parser.add_argument("--broker", choices=(*BROKERS, "both"), default="both", help="the broker (default: both)")
    parser.add_argument("-k", dest="words", metavar="EXPRESSION", help="only tests that fit, as pytest's -k")
    parser.add_argument("--only", action="append", metavar="FILE", help="only this file, such as test_canvas.py")
    parser.add_argument("--plain-from", type=Path, metavar="FILE", help="outcomes of an earlier plain run (.jsonl)")
    parser.add_argument("--durable-from", type=Path, metavar="FILE", help="the same of an earlier durable run")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where results go (default: a new folder)")
    parser.add_argument("--parts", type=int, default=1, metavar="N", help="run N parts at once (default: 1)")
    chosen = parser.parse_args(argv)
    if chosen.parts < 1:
        parser.error(f"--parts: at least one, not {chosen.parts}")
    for file in (chosen.plain_from, chosen.durable_from):
        if file is not None and (chosen.broker == "both" or not file.is_file()):
            parser.error(f"{file}: an earlier run is a file of outcomes, and needs its broker in --broker")
    return chosen


def selection(chosen: argparse.Namespace) -> list[str]:
    """Return what pytest is told to run."""
    files = [name if "/" in name else f"t/integration/{name}" for name in chosen.only or ["t/integration/"]]
    return [*files, *(["-k", chosen.words] if chosen.words else [])]


def run_broker(suite: Suite, chosen: argparse.Namespace, known: frozenset[str]) -> Difference:
    """Run both ways against one broker, repeat alone what differs, and say what is left of the difference."""
    wanted = selection(chosen)
    plain = outcomes.load(chosen.plain_from) if chosen.plain_from else suite.run("plain", wanted)
    durable = outcomes.load(chosen.durable_from) if chosen.durable_from else suite.run("durable", wanted)
    if (chosen.only or chosen.words) and (chosen.plain_from or chosen.durable_from):
        # The earlier run may be a whole one: of it that part alone is compared which the other one has.
        plain = {test: one for test, one in plain.items() if test in durable}
        durable = {test: one for test, one in durable.items() if test in plain}
    once_more, again = outcomes.to_repeat(plain, durable, known)
    if once_more or again:
        suite.say(f"{suite.broker}: {len(once_more) + len(again)} tests passed in one run only; each is repeated alone")
    plain = suite.repeat("plain", once_more, plain)
    durable = suite.repeat("durable", again, durable)
    difference = outcomes.compare(suite.broker, plain, durable, known)
    for label, tests in (("lost", difference.lost), ("gained", difference.gained)):
        for test in tests:
            suite.say(f"{suite.broker}: {label}: {test}{' (known)' if test in known and label == 'lost' else ''}")
    suite.say(f"{suite.broker}: {difference.plain_passed} passed plain, {difference.durable_passed} durable")
    return difference


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    chosen = arguments(argv)
    brokers = BROKERS if chosen.broker == "both" else (chosen.broker,)
    results = chosen.results or Path(tempfile.mkdtemp(prefix="celery-suite-"))
    results = results.absolute()
    try:
        known = frozenset(outcomes.read_known(KNOWN))
        version = source.installed_version()
        results.mkdir(parents=True, exist_ok=True)
        say(f"Celery {version}; results in {results}")
        folder = results / f"celery-{version}"
        if not folder.exists():
            source.unpack(source.fetch(Path(sys.prefix) / ".dev", version), folder)
        differences = [
            run_broker(Suite(folder, results, broker, say, chosen.parts), chosen, known) for broker in brokers
        ]
    except (KnownFileError, NoBrokerError, RunError, source.SourceError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        guard.kill_all(guard.strays())
        guard.end_watch()
    print(outcomes.last_line(differences))
    return 1 if any(difference.unknown for difference in differences) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
