from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from umt_durable import telemetry
from umt_durable.telemetry import Counter

pytestmark = pytest.mark.usefixtures("zero")

ROOT = Path(telemetry.__file__).parent.parent

Told = tuple[str, Mapping[str, object]]


@pytest.fixture
def zero() -> Iterator[None]:
    telemetry.reset()
    yield
    telemetry.reset()


def test_every_counter_has_a_meaning() -> None:
    assert set(telemetry.MEANINGS) == set(Counter)


def test_a_count_shows_in_the_snapshot_beside_the_zeros() -> None:
    telemetry.count(Counter.FENCED_WRITE)
    telemetry.count("fenced_write", 4)

    counts = telemetry.snapshot()

    assert counts["fenced_write"] == 5
    assert counts["take_over"] == 0
    assert set(counts) == {counter.value for counter in Counter}


def test_a_name_that_is_not_declared_is_refused() -> None:
    with pytest.raises(KeyError):
        telemetry.count("fenced_writes")


def test_no_count_is_lost_between_threads() -> None:
    def publish() -> None:
        for _ in range(5_000):
            telemetry.count(Counter.PUBLISHED)

    with ThreadPoolExecutor(8) as threads:
        for _ in range(8):
            threads.submit(publish)

    assert telemetry.snapshot()["published"] == 40_000


def test_a_subscriber_hears_of_each_count_until_it_ends_that() -> None:
    told: list[Told] = []
    unsubscribe = telemetry.subscribe(lambda name, fields: told.append((name, fields)))

    telemetry.count(Counter.TAKE_OVER, 2, run="r-1")
    unsubscribe()
    telemetry.count(Counter.TAKE_OVER)

    assert told == [("take_over", {"amount": 2, "run": "r-1"})]


def test_a_subscriber_that_raises_is_logged_and_breaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    told: list[str] = []

    def broken(name: str, fields: Mapping[str, object]) -> None:
        raise RuntimeError("hook")

    ends = [telemetry.subscribe(broken), telemetry.subscribe(lambda name, fields: told.append(name))]
    with caplog.at_level(logging.ERROR):
        telemetry.count(Counter.LOST_REPLY)
    for end in ends:
        end()

    assert told == ["lost_reply"]
    assert telemetry.snapshot()["lost_reply"] == 1
    assert telemetry.snapshot()["hook_failed"] == 1
    assert "subscriber" in caplog.text


def test_a_forked_child_counts_from_zero() -> None:
    source = (
        "import os; from umt_durable import telemetry; telemetry.count('published', 3); child = os.fork()\n"
        "os.write(1, b'%d\\n' % telemetry.snapshot()['published']); child and os.waitpid(child, 0)"
    )

    done = subprocess.run([sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert sorted(done.stdout.split()) == ["0", "3"]
