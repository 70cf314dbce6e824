"""The lease of a process on a real Postgres: renewed, fenced by its own clock, never crossing a fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.integration import service_kit as kit
from tests.integration.service_kit import NODE, Attempt, empty_schema, make_lease  # noqa: F401  two are fixtures
from tests.support.proxy import Proxy
from tests.support.wait import until
from umt_durable import telemetry
from umt_durable.clock import boottime
from umt_durable.database import Connection, Database
from umt_durable.services import lease as lease_module
from umt_durable.services.lease import Lease
from umt_durable.settings import Settings
from umt_durable.store import workers

# What is promised here does not depend on the server's version, and most of it takes a second or two.
pytestmark = pytest.mark.private_postgres_only


def worker_row(conn: Connection, id: UUID, *columns: str) -> tuple[Any, ...]:
    return kit.table(conn, f"SELECT {', '.join(columns)} FROM {{}}.worker WHERE id = %s", id)[0]


def test_a_worker_id_comes_with_a_live_lease_and_stays_the_same(conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make(versions=["t", "t@1"])

    first, second = lease.ensure(), lease.ensure()

    assert first == second
    assert lease.alive()
    assert worker_row(
        conn, first, "node", "pid", "versions", "lease_until > {}.now()".replace("{}", f'"{conn.schema}"')
    ) == (
        NODE,
        os.getpid(),
        ["t", "t@1"],
        True,
    )


def test_a_main_process_has_its_lease_begun_without_waiting_for_it(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    make(versions=["t"]).start()

    until(lambda: kit.table(conn, "SELECT 1 FROM {}.worker"), what="the lease to be begun")


def test_rg4_two_processes_and_two_lives_of_one_never_share_an_id(make: Callable[..., Lease]) -> None:
    first, second = make(), make()
    ids = {first.ensure(), second.ensure()}
    first.stop()

    ids.add(first.ensure())

    assert len(ids) == 3


def test_a_lease_is_renewed_with_counts_and_hints_in_hand(conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make(versions=["t"], reserved=lambda: {"q": 3})
    id = lease.ensure()
    begun = worker_row(conn, id, "lease_until")[0]
    telemetry.count(telemetry.Counter.EXECUTED_STEP, 7)
    until(
        lambda: (
            worker_row(conn, id, "lease_until")[0] > begun
            and worker_row(conn, id, "counters")[0].get("executed_step", 0) >= 7
        ),
        what="the lease to be renewed",
    )

    assert worker_row(conn, id, "reserved") == ({"q": 3},)


def test_hints_that_cannot_be_counted_cost_no_lease(conn: Connection, make: Callable[..., Lease]) -> None:
    def broken() -> dict[str, int]:
        raise RuntimeError("no hub")

    lease = make(versions=["t"], reserved=broken)
    id = lease.ensure()
    begun = worker_row(conn, id, "lease_until")[0]

    until(lambda: worker_row(conn, id, "lease_until")[0] > begun, what="the lease to be renewed")


def test_a_lease_that_ended_in_the_database_is_lost_for_good_and_its_attempts_are_told(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease, attempt = make(), Attempt()
    old = lease.ensure()
    lease.hold(attempt)

    with kit.counted(telemetry.Counter.LEASE_LOST) as lost:
        kit.table(conn, "UPDATE {}.worker SET lease_until = '-infinity'")
        until(lambda: attempt.told, what="the attempt to be told")

        assert lost() == 1
    assert attempt.reasons == ["lease_lost"]
    assert not lease.alive()
    assert lease.ensure() != old
    lease.release(attempt)


def test_a_main_process_begins_another_lease_by_itself_when_one_is_lost(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease = make(versions=["t"])
    old = lease.ensure()

    kit.table(conn, "UPDATE {}.worker SET lease_until = '-infinity'")

    until(lambda: lease.term is not None and lease.term.id != old and lease.alive(), what="another lease")


def test_i7_a_process_cut_off_from_the_database_fences_itself_before_its_lease_ends(
    settings: Settings, proxied_url: str, database_proxy: Proxy, make: Callable[..., Lease], conn: Connection
) -> None:
    """The network swallows everything: no error ever comes, only the clock says so."""
    far = Database(replace(settings, database_url=proxied_url))
    lease, attempt = make(database=far), Attempt()
    old = lease.ensure()
    lease.hold(attempt)

    database_proxy.blackhole()
    cut_off = boottime()
    until(lambda: attempt.told, what="the attempt to be told")
    told_at = attempt.told[0][1]
    relied_on = not lease.alive() and lease.remaining() == 0.0
    database_proxy.heal()

    assert attempt.reasons == ["lease_lost"]
    assert relied_on
    assert told_at - cut_off < settings.lease_seconds
    assert lease.ensure() != old
    lease.stop()
    far.close()


def test_the_reach_of_a_lease_is_measured_from_before_its_renewal_was_sent(
    settings: Settings, proxied_url: str, database_proxy: Proxy, make: Callable[..., Lease]
) -> None:
    far = Database(replace(settings, database_url=proxied_url))
    lease = make(database=far)
    database_proxy.latency(0.3)

    lease.ensure()

    assert lease.remaining() <= settings.lease_seconds * 2 / 3 - 0.3
    database_proxy.heal()
    lease.stop()
    far.close()


def test_an_attempt_of_an_id_that_is_lost_already_is_told_at_once(make: Callable[..., Lease]) -> None:
    lease, late = make(), Attempt()
    old = lease.ensure()
    lease.lose()
    lease.ensure()

    lease.hold(late, old)

    assert late.reasons == ["lease_lost"]


def test_a_pool_child_without_work_lets_its_lease_go_and_begins_another_when_there_is_some(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease = make(idle_seconds=0.1)
    old, attempt = lease.ensure(), Attempt()
    lease.hold(attempt)
    begun = worker_row(conn, old, "lease_until")[0]
    until(lambda: worker_row(conn, old, "lease_until")[0] > begun, what="a renewal while something is held")

    lease.release(attempt)
    until(lambda: lease.term is None, what="the lease to be let go")
    ended = until(
        lambda: kit.table(conn, "SELECT 1 FROM {}.worker WHERE lease_until = '-infinity'"), what="the lease to end"
    )

    assert ended
    assert attempt.told == []
    assert lease.ensure() != old


def test_a_lease_is_not_let_go_between_the_look_at_it_and_the_work_it_is_needed_for(
    conn: Connection, make: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    lease = make(idle_seconds=3600.0)
    id = lease.ensure()
    assert lease.term is not None
    lease.term.until += 9000
    aside: list[kit.Beside] = []

    def slow_clock() -> float:
        """Show two hours later, and have the lease let go, if it can be, while `ensure` reads the clock."""
        if threading.current_thread().name.startswith("umt-durable"):
            return boottime()  # the real keeper is not to meddle
        if not aside:
            lock: Any = lease._lock  # a lock of the system, of which the lease itself uses less
            is_guarded = lock.locked()
            aside.append(kit.Beside(lease.let_go))
            if not is_guarded:
                aside[0].result()
        return boottime() + 7200

    monkeypatch.setattr(lease_module, "boottime", slow_clock)
    again = lease.ensure()
    gone = aside[0].result()

    assert gone is None
    assert again == id
    assert kit.table(conn, "SELECT lease_until > {}.now() FROM {}.worker WHERE id = %s", again) == [(True,)]


def test_i19_a_worker_brings_more_runs_than_one_batch(
    conn: Connection, make: Callable[..., Lease], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "BRING_BATCH", 2)
    for _ in range(7):
        kit.enqueue(conn)
    kit.table(conn, "UPDATE {}.run SET redelivers = 3, deliver_by = {}.now() + interval '1 hour'")

    make(versions=kit.DECLARED).ensure()

    late = "SELECT count(*) FROM {}.run WHERE redelivers > 0 OR deliver_by > {}.now()"
    until(lambda: kit.table(conn, late) == [(0,)], what="all runs to be due")


def test_a_main_process_keeps_its_lease_without_work(conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make(versions=["t"], idle_seconds=0.0)
    id = lease.ensure()
    begun = worker_row(conn, id, "lease_until")[0]

    until(lambda: worker_row(conn, id, "lease_until")[0] > begun, what="a renewal")

    assert lease.ensure() == id


def test_i19_a_worker_that_brings_a_version_makes_the_runs_due_that_waited_for_it(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    for version in (1, 2):
        kit.enqueue(conn, version=version)
    kit.table(conn, "UPDATE {}.run SET redelivers = 3, deliver_by = {}.now() + interval '1 hour'")

    make(versions=[kit.TASK, f"{kit.TASK}@2"]).ensure()

    assert kit.table(conn, "SELECT version, deliver_by <= {}.now() FROM {}.run ORDER BY version") == [
        (1, False),
        (2, True),
    ]


def test_ending_gives_the_lease_up_at_once_and_tells_what_is_still_held(
    conn: Connection, make: Callable[..., Lease]
) -> None:
    lease, attempt = make(), Attempt()
    id = lease.ensure()
    lease.hold(attempt)
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("umt-durable")]

    lease.stop()

    assert kit.table(conn, "SELECT 1 FROM {}.worker WHERE id = %s AND lease_until = '-infinity'", id)
    assert attempt.reasons == ["shutdown"]
    assert not any(thread.is_alive() for thread in threads)


def test_counts_of_a_process_are_summed_once_over_all_its_ids(conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make()
    telemetry.reset()
    lease.ensure()
    telemetry.count(telemetry.Counter.EXECUTED_STEP, 5)
    lease.stop()
    lease.ensure()
    telemetry.count(telemetry.Counter.EXECUTED_STEP, 2)

    lease.stop()

    assert workers.sum_counters(conn)["executed_step"] == 7


def test_the_keeper_survives_broken_connections_and_an_outage(
    settings: Settings, proxied_url: str, database_proxy: Proxy, make: Callable[..., Lease], conn: Connection
) -> None:
    far = Database(replace(settings, database_url=proxied_url))
    lease = make(database=far, versions=["t"])
    id = lease.ensure()
    for _ in range(3):
        database_proxy.reset()
        begun = worker_row(conn, id, "lease_until")[0]
        until(lambda: worker_row(conn, id, "lease_until")[0] > begun, what="a renewal after a reset")  # noqa: B023

    database_proxy.down()
    until(lambda: not lease.alive(), what="the lease to be lost")
    database_proxy.heal()
    until(lease.alive, what="another lease")

    assert lease.ensure() != id
    lease.stop()
    far.close()


@pytest.mark.parametrize("at", ["hb.send.b", "hb.reply.r"])
def test_i24_a_renewal_whose_reply_is_lost_is_sent_again(at: str, conn: Connection, make: Callable[..., Lease]) -> None:
    lease = make(versions=["t"])
    id = lease.ensure()
    begun = lease.term.sent if lease.term is not None else 0.0

    with kit.failing(f"{at}=raise:OperationalError;nth=1"):
        until(lambda: lease.term is not None and lease.term.sent > begun, what="a renewal")

    assert lease.ensure() == id


def test_a_defect_in_the_keeper_is_logged_and_the_lease_is_renewed(
    make: Callable[..., Lease],
    caplog: pytest.LogCaptureFixture,
    schema: str,
) -> None:
    lease = make(versions=["t"])
    id = lease.ensure()
    begun = lease.term.sent if lease.term is not None else 0.0

    with kit.failing("hb.send.b=raise:RuntimeError;nth=1"):
        until(lambda: lease.term is not None and lease.term.sent > begun, what="a renewal")

    assert "the lease thread failed and goes on" in caplog.text
    assert lease.ensure() == id


@contextmanager
def forked(work: Callable[[], str]) -> Iterator[str]:
    """Fork, have the child do the work, and give what it returned."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.alarm(20)
            os.write(write, work().encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    yield text


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_rg4_a_forked_child_has_a_lease_of_its_own_and_leaves_its_parent_s_alone(
    conn: Connection, make: Callable[..., Lease], database: Database
) -> None:
    lease, attempt = make(versions=["t"]), Attempt()
    mine = lease.ensure()
    lease.hold(attempt)
    database.do(lambda own: kit.table(own, "SELECT 1"))

    def work() -> str:
        was_alive = lease.alive()
        theirs = lease.ensure()
        renewed = lease.term is not None and lease.term.id == theirs and lease.alive()
        lease.stop()
        return f"{was_alive} {renewed} {theirs}"

    with forked(work) as answer:
        was_alive, renewed, theirs = answer.split()

    assert (was_alive, renewed) == ("False", "True")
    assert UUID(theirs) != mine
    assert worker_row(conn, UUID(theirs), "node") == (NODE,)
    assert attempt.told == []
    begun = lease.term.sent if lease.term is not None else 0.0
    until(lambda: lease.term is not None and lease.term.sent > begun, what="the parent's next renewal")
    assert lease.ensure() == mine
    lease.release(attempt)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_while_other_threads_hold_every_lock_leaves_the_child_able_to_work(
    make: Callable[..., Lease],
    database: Database,
    schema: str,
) -> None:
    lease = make()
    lease.ensure()

    with lease._lock, lease._registering, database._lock, forked(lambda: str(lease.ensure())) as answer:
        assert str(UUID(answer)) == answer


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_no_connection_crosses_a_fork(database: Database, schema: str) -> None:
    def session() -> str:
        return str(database.do(lambda own: own.info.backend_pid))

    mine = session()

    with forked(session) as theirs:
        assert theirs not in ("", mine)
    assert session() == mine
