"""Canvas with durable members that suspend, mixed with ordinary tasks: right values, every callback once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain, chord, group
from celery.result import AsyncResult

from tests.support import canvas_apps
from tests.support.bodylog import BodyLog
from tests.support.canvas_apps import Canvas, CanvasError
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.database import Connection
from umt_durable.states import RunState
from umt_durable.store import outbox

pytestmark = pytest.mark.processes

APP = "tests.support.canvas_apps:app"


@pytest.fixture
def canvas(worker_env: dict[str, str], start_worker: Callable[..., Worker]) -> Iterator[Canvas]:
    """Return the tasks of a worker that has been started."""
    start_worker(app=APP, pool="threads", concurrency=6)
    canvas = canvas_apps.build(worker_env)
    yield canvas
    canvas.durable.stop()
    canvas.app.close()


def shapes(canvas: Canvas) -> dict[str, tuple[Any, Any]]:
    """Return signatures by name, each with the value it must give."""
    hop, add, total, hop_total = canvas.hop, canvas.add, canvas.total, canvas.hop_total
    found: dict[str, tuple[Any, Any]] = {}
    for naps in (0, 1, 3):
        found |= {
            f"chain {naps}": (chain(hop.s(1, naps=naps), add.s(10), hop.s(naps=naps)), 13),
            f"group {naps}": (group(hop.s(n, naps=naps) for n in range(3)) | hop_total.s(), 6),
            f"chord {naps}": (chord([hop.s(1, naps=naps), add.s(1, 1), hop.s(4)], hop_total.s(naps=naps)), 9),
            f"ordinary body {naps}": (chord([hop.s(1, naps=naps), hop.s(2, naps=naps)], total.s()), 5),
        }
    return found | {
        "chord of chains": (
            chord([chain(hop.s(1, naps=1), add.s(1)), chain(add.s(1, 1), hop.s(naps=1))], hop_total.s(naps=1)),
            6,
        ),
        "nested chord": (
            chord([chord([hop.s(1, naps=1), hop.s(2)], total.s()), hop.s(3, naps=1)], hop_total.s()),
            9,
        ),
        "body that is a chain": (chord([hop.s(1), add.s(1, 1)], chain(hop_total.s(), add.s(1), hop.s(naps=1))), 6),
        "upgrade": (chain(hop.s(1, naps=1), group(hop.s(naps=1), add.s(5)), hop_total.s(naps=1)), 10),
        "chain of groups": (
            chain(group(hop.s(1), hop.s(2, naps=1)), hop_total.s(), group(hop.s(), add.s(1)), total.s()),
            12,
        ),
        "group in a group": (group(hop.s(1), group(hop.s(2, naps=1), hop.s(3))) | total.s(), 9),
    }


def test_i13_shapes_give_the_value_celery_gives(canvas: Canvas, body_log: BodyLog) -> None:
    table = shapes(canvas)

    results = {name: signature.apply_async() for name, (signature, _) in table.items()}

    found = {name: result.get(timeout=90) for name, result in results.items()}
    assert found == {name: value for name, (_, value) in table.items()}
    begun = [(entry.run, entry.step) for entry in body_log.entries(mark="begin") if entry.run]
    assert len(begun) == len(set(begun)), "a step was executed twice"


def test_replace_hands_over_id_links_chain_and_chord(canvas: Canvas, body_log: BodyLog, conn: Connection) -> None:
    kinds = ("durable", "ordinary", "chain", "ordinary-chain", "chord", "again")
    links = {kind: canvas.mark.s(name=f"link-{kind}") for kind in kinds}

    alone = {kind: canvas.swap.apply_async((1, kind, 1), link=links[kind]) for kind in kinds}
    classic = {kind: canvas.classic_swap.delay(1, kind) for kind in ("durable", "ordinary", "chain")}
    chained = {kind: chain(canvas.swap.s(1, kind), canvas.add.s(100), canvas.hop.s())() for kind in kinds}
    header = {kind: chord([canvas.swap.s(1, kind), canvas.hop.s(0, naps=1)], canvas.total.s())() for kind in kinds}
    grouped = canvas.swap.delay(1, "group")

    assert {kind: one.get(timeout=90) for kind, one in alone.items()} == dict.fromkeys(kinds, 11)
    assert {kind: one.get(timeout=90) for kind, one in classic.items()} == dict.fromkeys(classic, 11)
    assert {kind: one.get(timeout=90) for kind, one in chained.items()} == dict.fromkeys(kinds, 112)
    assert {kind: one.get(timeout=90) for kind, one in header.items()} == dict.fromkeys(kinds, 12)
    assert grouped.get(timeout=90) == [11, 11]
    until(
        lambda: all(body_log.count(step=f"mark-link-{kind}") for kind in kinds),
        timeout=30,
        what="the links of the replacements",
    )
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    assert [body_log.count(step=f"mark-link-{kind}") for kind in kinds] == [1] * len(kinds)
    assert canvas.durable.get(alone["durable"].id).nesting == 1
    assert canvas.durable.get(alone["again"].id).nesting == 2


def test_links_leave_once_each_and_keep_the_family(canvas: Canvas, body_log: BodyLog) -> None:
    hop, mark = canvas.hop, canvas.mark
    links = [
        hop.s(naps=1, label="link-1"),
        mark.s(name="plain"),
        group(hop.s(label="link-2"), mark.s(name="in-group")),
        chain(hop.s(label="link-3"), mark.s(name="after-chain")),
        chord([hop.s(), hop.s(naps=1)], mark.s(name="chord-body")),
    ]

    linked = hop.apply_async((1,), {"naps": 1, "label": "linker"}, link=links)
    whole = chain(hop.s(1, naps=3), hop.s(naps=1), group(hop.s(naps=1), hop.s()))()
    stamped = canvas.family.s(5, naps=1)
    stamped.stamp(tenant="acme")
    stamp_result = chain(stamped, canvas.mark.s(name="stamped")).apply_async(headers={"mine": "yes"})

    assert linked.get(timeout=90) == 2
    assert whole.get(timeout=90) == [4, 4]
    found = stamp_result.get(timeout=90)
    assert (found["value"], found["stamps"], found["headers"]["mine"]) == (5, {"tenant": "acme"}, "yes")
    marks = ("link-1", "link-2", "link-3", "mark-plain", "mark-in-group", "mark-after-chain", "mark-chord-body")
    until(lambda: all(body_log.count(step=name) for name in marks), timeout=60, what="every link")
    assert {name: body_log.count(step=name) for name in marks} == dict.fromkeys(marks, 1)
    families = {run: {entry.mark for entry in body_log.entries(run, "family")} for run in _runs(body_log)}
    assert all(len(marks) == 1 for marks in families.values()), families
    first = whole.parent.parent
    assert _roots(families, whole.parent.id, first.id) == {first.id}
    assert all(mark.split("|")[1] == whole.parent.id for one in whole.results for mark in families[one.id])


def test_maps_and_chunks_start_a_run_for_each_item(canvas: Canvas, body_log: BodyLog) -> None:
    mapped = canvas.hop.map([1, 2, 3]).delay()
    spread = canvas.hop.starmap([(1, 1), (2, 3), (3, 0)]).delay()
    chunked = canvas.hop.chunks([(n, 1) for n in range(5)], 2).group()()
    whole = canvas.hop.chunks([(n, 0) for n in range(3)], 2)()
    ordinary = canvas.add.starmap([(1, 1), (2, 2)]).delay()
    nothing = canvas.hop.map([]).delay()
    classic = canvas.classic.map([1, 2]).delay()

    assert mapped.get(timeout=90) == [2, 3, 4]
    assert spread.get(timeout=90) == [2, 3, 4]
    assert chunked.get(timeout=90) == [[1, 2], [3, 4], [5]]
    assert whole.get(timeout=90) == [[1, 2], [3]]
    assert (ordinary.get(timeout=90), nothing.get(timeout=90), classic.get(timeout=90)) == ([2, 4], [], [2, 3])
    assert body_log.count(step="hop") == 3 + 3 + 5 + 3


def test_failures_and_cancels_end_what_follows_visibly_and_call_errbacks_once(
    canvas: Canvas, body_log: BodyLog, conn: Connection
) -> None:
    hop, fail, total = canvas.hop, canvas.fail, canvas.total
    errbacks = [canvas.old_errback.s(), canvas.new_errback.s(), canvas.durable_errback.s()]

    failed = fail.apply_async((7, 1), link_error=errbacks)
    middle = chain(hop.s(1), fail.s(naps=1), hop.s(label="never"), canvas.add.s(1)).apply_async(
        link_error=canvas.old_errback.s()
    )
    body = total.s().on_error(canvas.old_errback.s())
    headed = chord([hop.s(1, naps=1), fail.s(3)], body)()
    ordinary = chord([hop.s(1, naps=1), canvas.boom.s()], canvas.hop_total.s())()
    sleeper = chain(canvas.long_nap.s(1, 3600), hop.s(label="never"), hop.s(label="never"))()
    member = canvas.long_nap.s(1, 3600)
    cancelled = chord([member, hop.s(1)], total.s())()

    first, part = sleeper.parent.parent, cancelled.parent.results[0]
    until(lambda: _state(canvas, first.id) is RunState.SLEEPING, timeout=60, what="the chain's member to sleep")
    until(lambda: _state(canvas, part.id) is RunState.SLEEPING, timeout=60, what="the chord's member to sleep")
    canvas.durable.cancel(first.id, reason="not wanted")
    canvas.durable.cancel(part.id)

    with pytest.raises(CanvasError, match="failed with 7"):
        failed.get(timeout=90)
    with pytest.raises(CanvasError, match="failed with 2"):
        middle.get(timeout=90)
    for later in (middle, middle.parent, middle.parent.parent):
        _wait_for(later, "FAILURE")
    for result in (headed, ordinary, cancelled):
        with pytest.raises(Exception, match=r"failed with 3|boom|cancelled|Revoked"):
            result.get(timeout=90)
        _wait_for(result, "FAILURE")
    for result in (sleeper, sleeper.parent, first):
        _wait_for(result, "REVOKED")
    wanted = [
        f"old-{failed.id}",
        f"new-{failed.id}-CanvasError",
        f"errback-{failed.id}",
        f"old-{middle.parent.parent.id}",
        f"old-{headed.id}",
    ]
    until(lambda: all(body_log.count(step=name) for name in wanted[:3]), timeout=30, what=f"{wanted}")
    until(lambda: outbox.status(conn)[0] == 0, timeout=60, what="the outbox to be empty")
    assert {name: body_log.count(step=name) for name in wanted} == dict.fromkeys(wanted, 1)
    assert body_log.count(step="never") == 0


def _wait_for(result: AsyncResult, state: str) -> None:
    until(lambda: result.state == state, timeout=30, what=f"the result of {result.id} to be {state}")


def _state(canvas: Canvas, run_id: str) -> RunState | None:
    found = [run for run in canvas.durable.list() if run.id == run_id]
    return found[0].state if found else None


def _runs(body_log: BodyLog) -> set[str]:
    return {entry.run for entry in body_log.entries(step="family")}


def _roots(families: dict[str, set[str]], *ids: str) -> set[str]:
    return {mark.split("|")[0] for one in ids for mark in families[one]}
