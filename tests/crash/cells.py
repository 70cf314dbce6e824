"""Which cells there are: a point, what happens to the process that comes there, its pool, and the broker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from tests.support.workers import Pool

What = Literal["kill", "stop", "drop", "lose"]
"""What happens: SIGKILL; SIGSTOP for two leases; its connections are cut; the reply of a commit is lost."""

WHATS: Final[tuple[What, ...]] = ("kill", "stop", "drop")
POOLS: Final[tuple[Pool, ...]] = ("prefork", "threads", "gevent", "solo")
BROKERS: Final = ("redis", "rabbitmq")
CHOICES: Final = ("few", "ci", "pairwise", "full")

ACTS: Final[dict[str, tuple[str, ...]]] = {
    "ten_steps": (
        *("claim.b", "claim.a", "claim.r", "step.body.b", "step.body.a", "step.encode.a"),
        *("step.commit.b", "step.commit.a", "step.commit.r"),
        *("finish.commit.b", "finish.commit.a", "finish.commit.r", "finish.result.b", "finish.result.a"),
        *("relay.claim.b", "relay.claim.a", "relay.claim.r", "relay.publish.b", "relay.publish.a", "relay.confirm.r"),
        *("relay.delete.b", "relay.delete.a", "relay.delete.r"),
    ),
    "linked": ("finish.callback.b", "finish.callback.a"),
    "held": ("hb.send.b", "hb.reply.r"),
    "booking": (
        *("step.grant.b", "step.grant.a", "step.grant.r", "txstep.user_sql.a"),
        *("txstep.commit.b", "txstep.commit.a", "txstep.commit.r"),
    ),
    "elsewhere": (*("ledger.user_sql.a", "ledger.commit.b", "ledger.commit.a", "ledger.commit.r", "ledger.record.a"),),
    "shipping": (
        *("op.begin.b", "op.begin.a", "op.begin.r", "op.call.b", "op.call.a"),
        *("op.done.b", "op.done.a"),
    ),
    "sleeper": (
        *("sleep.suspend.b", "sleep.suspend.a", "sleep.suspend.r", "timer.select.a"),
        *("timer.commit.b", "timer.commit.a", "timer.commit.r", "claim.journal_read.b", "claim.journal_read.a"),
    ),
    "waiter": (
        *("wait.key_lock.a", "wait.look.a", "wait.commit.b", "wait.commit.a", "wait.commit.r", "wait.run_lock.a"),
        *("router.key_lock.a", "router.run_lock.a", "router.commit.b", "router.commit.a", "router.commit.r"),
    ),
    "announcer": ("wait.announce.b",),
    "picker": ("items.commit.b", "items.commit.a", "items.commit.r"),
    "flaky_run": ("retry.commit.b", "retry.commit.a", "retry.commit.r"),
    "looper": ("continue.commit.b", "continue.commit.a", "continue.commit.r"),
    "undoing": ("undo.commit.b", "undo.commit.a", "undo.commit.r"),
    "parent": ("child.insert.a",),
    "awaiter": ("task.send.b", "task.send.a"),
    "drifter": ("quarantine.commit.b", "quarantine.commit.a", "quarantine.commit.r"),
    "leaver": ("handover.commit.b", "handover.commit.a", "handover.commit.r"),
    "event": ("event.commit.b", "event.commit.a", "event.commit.r"),
    "foreign": (
        *(
            "intake.insert.b",
            "intake.insert.a",
            "intake.commit.b",
            "intake.commit.a",
            "intake.commit.r",
            "intake.ack.b",
        ),
    ),
    "orphan": ("sweep.select.a", "sweep.update.a", "sweep.commit.b", "sweep.commit.a", "sweep.commit.r"),
    "unheard": ("redispatch.select.a", "redispatch.commit.b", "redispatch.commit.a", "redispatch.commit.r"),
    "caller": (
        *("enqueue.commit.b", "enqueue.commit.a", "enqueue.commit.r"),
        *("signal.commit.b", "signal.commit.a", "signal.commit.r"),
        *("cancel.commit.b", "cancel.commit.a", "cancel.commit.r"),
    ),
}
"""What is done, and the points that it comes to."""

ELSEWHERE: Final[dict[str, str]] = {
    **dict.fromkeys(
        ("rescan.select.a", "rescan.commit.b", "rescan.commit.a", "rescan.commit.r"),
        "a re-scan finds something only where a router was wrong: tests/integration/test_lost_at_points.py",
    ),
    **dict.fromkeys(
        ("doubt.commit.b", "doubt.commit.a", "doubt.commit.r"),
        "a message that must not leave twice: tests/integration/test_lost_at_points.py",
    ),
    **dict.fromkeys(
        ("release.commit.b", "release.commit.a", "release.commit.r"),
        "a person's decision about an effect: tests/integration/test_lost_at_points.py",
    ),
    "ledger.claim.a": "a ledger step that an earlier try has begun: tests/integration/test_lost_at_points.py",
    "op.done.r": "an effect without a commit of the user's: tests/integration/test_lost_at_points.py",
    **dict.fromkeys(
        ("relay.marker.b", "relay.marker.a"),
        "a relay that meets its broker: tests/integration/test_service_loss_marker.py",
    ),
}
"""The points that no cell comes to, with the reason and the tests that do."""

FEW: Final = {
    *("claim.b", "step.commit.b", "txstep.commit.b", "txstep.commit.a", "ledger.commit.b", "ledger.commit.a"),
    *("wait.commit.a", "relay.publish.a", "op.call.a", "continue.commit.a"),
}
"""The points whose cell of a kill in prefork on Redis belongs to the default selection."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One thing that happens to one process."""

    act: str
    point: str
    what: What
    pool: Pool
    broker: str

    def __str__(self) -> str:
        return f"{self.point}-{self.what}-{self.pool}-{self.broker}"


def chosen(choice: str) -> list[Cell]:
    """Return the cells of a choice.

    Shape: `few` is one for each of FEW; `ci` two for each point, so that each meets two pools, two actions and both
    brokers, and one where only a lost reply matters; `pairwise` four, so that each pair of two factors meets, but for
    what a point cannot do; `full` all.
    """
    if choice == "few":
        return [Cell(act, point, "kill", "prefork", "redis") for act, point in _points() if point in FEW]
    if choice == "full":
        return [
            Cell(act, point, *rest) for act, point in _points() for rest in product(_whats(point), _pools(act), BROKERS)
        ]
    return [cell for number, (act, point) in enumerate(_points()) for cell in _some(choice, number, act, point)]


def _some(choice: str, number: int, act: str, point: str) -> Iterator[Cell]:
    pools, whats = _pools(act), _whats(point)
    for turn in range(min(2, len(whats)) if choice == "ci" else max(len(pools), len(whats), len(BROKERS))):
        place = number + turn
        # Three events, four pools, two brokers: taken in turn, over all points each meets each of the others.
        what = whats[place % len(whats)]
        yield Cell(act, point, what, pools[place % len(pools)], BROKERS[(turn + number // 2) % len(BROKERS)])


def _points() -> Iterator[tuple[str, str]]:
    for act, points in ACTS.items():
        for point in points:
            yield act, point


def _whats(point: str) -> tuple[What, ...]:
    return ("lose",) if point.endswith(".r") else WHATS


def _pools(act: str) -> tuple[Pool, ...]:
    """Return the pools that make a difference: the process of a caller has none."""
    return ("prefork",) if act == "caller" else POOLS
