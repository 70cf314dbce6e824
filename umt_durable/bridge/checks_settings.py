"""Celery settings under which durable tasks do not do what they promise, or cost more than they should."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from umt_durable.bridge.bootsteps import EVENTLET, MANY_RESERVED, ServicesStep
from umt_durable.bridge.findings import Findings, counted, fail, ok, warn
from umt_durable.settings import Settings
from umt_durable.store.diagnosis import ParkedInChord

CODE: Final = {"pickle", "yaml", "application/x-python-serialize", "application/x-yaml"}
DAY: Final = 86400.0
SHORTEST_VISIBILITY: Final = 60.0


def celery_settings(conf: Any, settings: Settings, *, longest_parked: float | None) -> Findings:
    """Look at the configuration of an app.

    Units: `longest_parked` is how many seconds pass from the enqueuing of a run to the end of the longest sleep or wait
    there is now; None when there is none or it is not known.
    """
    bad = [
        *_execution(conf),
        *_serialisation(conf),
        *_results(conf),
        *_expiry(conf, longest_parked),
        *_broker(conf, settings),
    ]
    yield from bad
    if not bad:
        yield ok("settings", "no setting of Celery endangers durable tasks")


def chords(found: ParkedInChord | None, kept_seconds: float, setting: str) -> Findings:
    """Tell of chords that the result backend forgets before their members, as they are parked now, can have ended.

    Shape: `setting` is the one that the backend goes by, and `kept_seconds` what it says.
    """
    if found is None:
        return
    runs = counted(found.runs, "run that a chord waits for is", "runs that chords wait for are")
    yield fail(
        "chords",
        f"{setting} is {_span(kept_seconds)}, and {runs} parked for up to {_span(found.seconds)} (one is"
        f" {found.example}): the backend forgets the chord, whose body then never runs",
        f"set {setting} = 0 (keep), or to more than that, and restart the workers: it counts from the next part that"
        " comes in",
    )


def _execution(conf: Any) -> Findings:
    if conf.task_always_eager:
        yield fail(
            "task_always_eager",
            "tasks run in the caller, where nothing goes on after a crash",
            "take task_always_eager away outside tests",
        )
    if str(conf.worker_pool) == "eventlet":
        yield fail("worker_pool", EVENTLET, "set worker_pool to prefork, threads, gevent or solo")
    multiplier = conf.worker_prefetch_multiplier
    if conf.value_set_for("worker_prefetch_multiplier") and not 0 < multiplier <= MANY_RESERVED:
        yield warn(
            "worker_prefetch_multiplier",
            f"it is {multiplier}: a worker holds hints that others could run"
            + ("" if multiplier else " (0 means without limit)"),
            "set worker_prefetch_multiplier = 1",
        )


def _serialisation(conf: Any) -> Findings:
    for name in ("task_serializer", "result_serializer", "event_serializer"):
        if str(conf[name]).lower() in CODE:
            yield fail(name, f"{name} is {conf[name]}: durable tasks refuse such messages", f'set {name} = "json"')
    for name in ("accept_content", "result_accept_content"):
        unsafe = sorted(CODE & {str(item).lower() for item in conf[name] or ()})
        if unsafe:
            yield fail(
                name,
                f"{name} allows {', '.join(unsafe)}: whoever can write to the broker can run code here",
                f'set {name} = ["json"]',
            )


def _results(conf: Any) -> Findings:
    backend = conf.result_backend
    if conf.task_ignore_result:
        yield warn(
            "task_ignore_result",
            "results are not told to Celery: `get()` never returns and chords never run their body",
            "take it away; a single task can have ignore_result=True",
        )
    if not backend or str(backend).startswith("disabled"):
        yield warn(
            "result_backend",
            "there is none: results stay in Postgres, `AsyncResult.get()` and chords do not work",
            "set result_backend, for example to a Redis",
        )
    elif str(backend).startswith(("rpc", "amqp")):
        yield warn(
            "result_backend",
            "rpc:// gives a result only to the process that started the run, and only while it lives",
            "use Redis or a database where runs take longer than their callers",
        )


def _expiry(conf: Any, longest_parked: float | None) -> Findings:
    """Compare how long Celery keeps results with how long runs take. A run's own rows are not touched by these."""
    results = _seconds(conf.result_expires)
    chords = _seconds(conf.result_chord_expires) if conf.result_chord_expires is not None else results
    for name, kept, cost in (
        ("result_chord_expires", chords, "a chord with a member that takes longer never runs its body"),
        (
            "result_expires",
            results,
            "what Celery keeps of a run is gone before the run ends",
        ),
    ):
        if kept is None:
            continue
        if longest_parked is not None and longest_parked > kept:
            yield fail(
                name,
                f"it is {_span(kept)}, and runs are parked for up to {_span(longest_parked)}: {cost}",
                f"set {name} = 0 (keep), or to more than the longest sleep",
            )
        elif name == "result_chord_expires" and kept <= DAY:
            yield warn(
                name, f"it is {_span(kept)}: {cost}", f"set {name} = 0 (keep), or to more than the longest sleep"
            )


def _broker(conf: Any, settings: Settings) -> Findings:
    """Look at what the transport does with messages that are out, and at queues that a restart would lose."""
    options: Mapping[str, Any] = conf.broker_transport_options or {}
    yield from _visibility(options.get("visibility_timeout"), settings)
    weak = [queue.name for queue in conf.task_queues or () if not getattr(queue, "durable", True)]
    if weak or conf.task_default_delivery_mode in (1, "transient"):
        yield warn(
            "task_queues",
            f"a restart of the broker loses {'the queues ' + ', '.join(weak) if weak else 'transient messages'}:"
            " their runs wait for a redispatch",
            "declare queues durable and messages persistent",
        )


def _visibility(chosen: float | str | None, settings: Settings) -> Findings:
    """Compare how long Redis leaves a message with a worker with how long a worker may keep a hint."""
    if chosen is None:
        return
    visible = float(chosen)
    shortest = max(2 * ServicesStep.reserved_seconds, 2 * settings.lease_seconds)
    fix = (
        f"set broker_transport_options['visibility_timeout'] to {shortest:.0f} or more; plain tasks want more than"
        " their longest run"
    )
    if visible < max(SHORTEST_VISIBILITY, settings.lease_seconds):
        yield fail(
            "visibility_timeout",
            f"it is {visible:.0f} s: Redis hands each hint out again and again while workers still hold it, faster than"
            " a lost one is taken over, and plain tasks run twice",
            fix,
        )
    elif visible < shortest:
        yield warn(
            "visibility_timeout",
            f"it is {visible:.0f} s: Redis hands hints out again that a worker still holds (they find nothing to do,"
            " but plain tasks run twice)",
            fix,
        )


def _seconds(value: Any) -> float | None:
    """Return a time to live in seconds, None for one without end."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value or 0)
    return seconds or None


def _span(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
