"""`python3 dev.py chaos`: real workers under load, while what can go wrong does; then everything is checked.

The last line of the output is one JSON object. Exit status: 0 when each of its zeros is zero and enough was done, 1
otherwise, 2 when it could not be run.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support import guard
from tests.support.rabbit import NoRabbitError
from tests.support.wait import until
from tools.chaos import checking
from tools.chaos.faults import Faults
from tools.chaos.load import Start, history
from tools.chaos.stage import Stage, stage

BROKERS: Final = ("redis", "rabbitmq")
RATE: Final = 3.0
PAUSE_SECONDS: Final = 2.0
SETTLE_SECONDS: Final = 240.0
LEAST_FAULTS_A_MINUTE: Final = 8
LEAST_RUNS_A_MINUTE: Final = 20


class LoadError(Exception):
    """The process that makes the load has failed, so that nothing is proven."""


def say(text: str) -> None:
    """Tell the person how far it is; the last line of stdout is for programs."""
    print(text, flush=True)


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python3 dev.py chaos",
        description="Run workers of three pools, relays and sweepers under load, kill, freeze and cut off what there "
        "is, and check afterwards that nothing was lost and nothing was done twice.",
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are done (default: 5)")
    parser.add_argument("--seed", type=int, help="what faults and load are drawn from (default: a new one)")
    parser.add_argument("--broker", choices=BROKERS, default="redis", help="the broker (default: redis)")
    parser.add_argument("--rate", type=float, default=RATE, help=f"runs started each second (default: {RATE:g})")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep logs, history and servers' data there")
    chosen = parser.parse_args(argv)
    if chosen.minutes <= 0 or chosen.rate <= 0:
        parser.error("--minutes and --rate are more than zero")
    if chosen.seed is None:
        chosen.seed = random.SystemRandom().randrange(1_000_000)
    return chosen


def disturb(place: Stage, faults: Faults, minutes: float, seed: int) -> None:
    """Do faults for so long, at moments that are drawn too; then heal everything."""
    pace, end = random.Random(seed + 1), time.monotonic() + 60 * minutes
    following = time.monotonic() + 5
    while time.monotonic() < end:
        faults.heal_due()
        if time.monotonic() >= following:
            faults.one()
            following = time.monotonic() + pace.expovariate(1 / PAUSE_SECONDS)
        time.sleep(0.05)
    faults.heal()


def settle(place: Stage, faults: Faults) -> list[str]:
    """Wait until nothing is under way; return what still is when nothing moves any more."""
    before, since = -1, time.monotonic()
    while True:
        faults.heal_due()
        left = checking.unfinished(place)
        if not left:
            return []
        if len(left) != before:
            before, since = len(left), time.monotonic()
        if time.monotonic() - since > SETTLE_SECONDS:
            return left
        time.sleep(0.5)


def run(chosen: argparse.Namespace, folder: Path) -> int:
    """Be the command; return its exit status."""
    command = f"python3 dev.py chaos --minutes {chosen.minutes:g} --seed {chosen.seed} --broker {chosen.broker}"
    command += f" --rate {chosen.rate:g}"
    say(f"{command}; logs in {folder}")
    written = folder / "history.jsonl"
    with stage(chosen.broker, folder) as place:
        argv = [sys.executable, "-m", "tools.chaos.load", str(written), str(chosen.rate), str(chosen.seed)]
        load = guard.spawn(argv, folder / "load.log", guard.clean_environment(place.caller()))
        faults = Faults(place, chosen.seed, say)
        try:
            disturb(place, faults, chosen.minutes, chosen.seed)
            say("everything is healed; waiting for the runs to end")
            load.terminate()
            until(lambda: load.poll() is not None, timeout=120, what="the load to say what is left to be said")
        finally:
            guard.end(load, grace=0.0)
        if load.returncode:
            raise LoadError(f"the load ended with status {load.returncode}; its log is {folder / 'load.log'}")
        left = settle(place, faults)
        started = history(written)
        found = _checked(place, started)
    return _report(chosen, command, faults, found, left, started)


def _checked(place: Stage, started: list[Start]) -> checking.Findings:
    from celery import Celery

    app = Celery("checker", backend=place.environment["CELERY_RESULT_BACKEND"], set_as_current=False)
    try:
        return checking.check(place, app, started)
    finally:
        app.close()


def _report(
    chosen: argparse.Namespace,
    command: str,
    faults: Faults,
    found: checking.Findings,
    left: list[str],
    started: list[Start],
) -> int:
    done = sum(faults.done.values())
    for line in found.shown():
        say(line)
    for line in left[: checking.SHOWN]:
        say(f"still under way: {line}")
    few = []
    if done < LEAST_FAULTS_A_MINUTE * chosen.minutes:
        few.append(f"only {done} faults were done")
    if found.counts["runs"] < LEAST_RUNS_A_MINUTE * chosen.minutes:
        few.append(f"only {found.counts['runs']} runs were made")
    for line in few:
        say(f"this proves too little: {line}")
    numbers = found.numbers()
    failed = bool(any(numbers.values()) or left or few)
    say(f"faults: {', '.join(f'{count} {name}' for name, count in sorted(faults.done.items()))}")
    if failed:
        say(f"To see it again: {command}")
    told = {
        "command": "chaos",
        "seed": chosen.seed,
        "broker": chosen.broker,
        "minutes": chosen.minutes,
        "started": len(started),
        "runs": found.counts["runs"],
        "steps": found.counts["steps"],
        "bodies": found.counts["bodies"],
        "faults": done,
        **numbers,
        "unfinished": len(left),
        "fenced_writes": found.counts["fenced_write"],
        "lost_replies": found.counts["lost_reply"],
        "takeovers": found.counts["attempts_lost"],
    }
    say(json.dumps(told))
    return 1 if failed else 0


def main(argv: Sequence[str]) -> int:
    """Run the command."""
    chosen = arguments(argv)
    try:
        if chosen.keep is not None:
            chosen.keep.mkdir(parents=True, exist_ok=True)
            return run(chosen, chosen.keep.resolve())
        with tempfile.TemporaryDirectory(prefix="umt-chaos-") as folder:
            return run(chosen, Path(folder))
    except (NoRabbitError, LoadError) as error:
        say(f"{error}")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
