"""What `durable doctor` looks for among runs: those that stand still, and whether anybody works."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from umt_durable.bridge.findings import Findings, counted, fail, many, ok, warn
from umt_durable.bridge.serve import SERVICES
from umt_durable.bridge.task import DurableTask
from umt_durable.records import WorkerRecord
from umt_durable.settings import Settings
from umt_durable.store.diagnosis import DeadEvents, RunsWithPriority, StillRuns
from umt_durable.store.pauses import Pause

LATE_SECONDS: Final = 60.0
DEFECTS: Final = ("system_retry", "rescan_hit", "duty_failed")


def name_of(worker: WorkerRecord) -> str:
    """Return a worker's name for people."""
    return f"{worker.host}:{worker.pid}"


def main_processes(records: Sequence[WorkerRecord]) -> list[WorkerRecord]:
    """Return the live workers that say which tasks they have; pool children and services say none."""
    return [worker for worker in records if worker.live and any(not each.startswith("@") for each in worker.versions)]


def missing_services(records: Sequence[WorkerRecord], settings: Settings) -> Findings:
    """Look for the loops that workers do not run where `umt-durable serve` is to run them."""
    if settings.worker_services:
        return
    served = {version for worker in records if worker.live for version in worker.versions}
    for service in SERVICES:
        if f"@{service}" not in served:
            yield fail(
                "services",
                f"durable_worker_services is off and no {service} is live",
                f"start `umt-durable serve --role {service}`, or let the workers do it",
            )


def workers(live: Sequence[WorkerRecord], declared: Sequence[str], waiting: int) -> Findings:
    """Look whether somebody works, and has the tasks that this app declares."""
    if not live:
        level = fail if waiting else warn
        yield level(
            "workers",
            f"no worker is live; {counted(waiting, 'run is ready', 'runs are ready')}",
            "start one: `celery worker`",
        )
        return
    yield ok("workers", f"{len(live)} live: {many([name_of(worker) for worker in live])}")
    had = {version for worker in live for version in worker.versions}
    missing = [version for version in declared if "@" in version and version not in had]
    if missing:
        yield warn(
            "versions",
            f"no live worker has {many(missing)}, which this app declares",
            "deploy this code to a worker, or wait until the deploy has got there",
        )


def outbox(pending: int, dead: Sequence[DeadEvents], oldest_seconds: float, settings: Settings) -> Findings:
    """Look whether messages leave, and which were given up."""
    if oldest_seconds > LATE_SECONDS:
        fix = (
            "start a worker, or `umt-durable serve --role relay`"
            if settings.worker_services
            else "durable_worker_services is off: start `umt-durable serve --role relay`"
        )
        waits = counted(pending, "message waits", "messages wait")
        yield fail("relay", f"{waits}, the oldest for {oldest_seconds:.0f} s: no relay takes them", fix)
    else:
        yield ok("relay", f"{counted(pending, 'message waits', 'messages wait')} in the outbox, none for long")
    for rows in dead:
        if rows.doubtful:
            yield fail(
                "outbox",
                f"{counted(rows.rows, 'message of an awaited task', 'messages of awaited tasks')} may have left or not,"
                " and may not leave twice",
                "find out of each, and say so: `umt-durable outbox list` has the commands",
            )
            continue
        yield fail(
            "outbox",
            f"{counted(rows.rows, f'message of type {rows.type} was', f'messages of type {rows.type} were')} given up:"
            f" {rows.reason or 'no reason was kept'}",
            f"remove the cause, then put them back: `umt-durable outbox replay --type {rows.type}`"
            " (`umt-durable outbox list` shows each)",
        )


def still(blocked: Sequence[StillRuns], quarantined: Sequence[StillRuns], *, is_staffed: bool) -> Findings:
    """Look for runs that nobody can take, and for runs that wait for a person."""
    for group in blocked if is_staffed else ():
        name = group.task if group.version is None else f"{group.task}@{group.version}"
        yield warn(
            "blocked",
            f"{counted(group.runs, f'ready run of {name} waits', f'ready runs of {name} wait')} for a worker that has"
            f" it (one is {group.example})",
            f"start a worker whose code still declares {name}",
        )
    for group in quarantined:
        yield warn(
            "quarantine",
            f"{counted(group.runs, f'run of {group.task} is', f'runs of {group.task} are')} parked for a person:"
            f" {group.reason} (one is {group.example})",
            f"look at it: `umt-durable show {group.example}`",
        )
    if not quarantined and not (blocked and is_staffed):
        yield ok("runs", "none is blocked or quarantined")


def pauses(found: Sequence[Pause]) -> Findings:
    """Tell of tasks and queues that stand still until somebody resumes them."""
    for one in found:
        runs = counted(one.runs, "ready run waits", "ready runs wait")
        yield warn("paused", f"{one}; {runs}", f"let it go on: `umt-durable {one.scope} resume {one.name}`")


def queues_with_priority(found: Sequence[RunsWithPriority], app: Any, queue_of: Callable[[str], str]) -> dict[str, str]:
    """Say for each queue that needs priorities who uses them: runs under way, and tasks whose runs all have one."""
    used = {}
    for task in app.tasks.values():
        if isinstance(task, DurableTask) and not task.is_ordinary and task.priority:
            used[queue_of(task.name)] = f"{task.name} has a priority"
    for group in found:
        runs = counted(group.runs, f"run of {group.task} has", f"runs of {group.task} have")
        used[group.queue or queue_of(group.task)] = f"{runs} a priority (one is {group.example})"
    return used


def counters(counts: Mapping[str, int]) -> Findings:
    """Look at the counters that only a defect of ours raises."""
    seen = [f"{name} {counts[name]}" for name in DEFECTS if counts.get(name)]
    if seen:
        yield warn(
            "defects",
            f"counted since the workers started: {', '.join(seen)}",
            "nothing was lost; please report it with the workers' logs",
        )
