"""An app whose workers and callers are under OpenTelemetry's and Sentry's Celery integrations, which write to files.

`celery -A tests.celery.traced:app worker` runs it; `python -m tests.celery.traced CALL [ARGUMENTS]` is a caller in a
process of its own, since both integrations change Celery for a whole process. Which of them are on stands in
`UMT_TEST_TRACERS`; without the file of one it is not switched on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from celery import chain

from tests.support import bodylog
from tests.support.apps import build, log_and_pass
from umt_durable import RetryPolicy, TaskContext

APP = "tests.celery.traced:app"
SPANS = "UMT_TEST_SPANS"
EVENTS = "UMT_TEST_SENTRY"


def write(file: str, record: Mapping[str, object]) -> None:
    """Append one record in one write, from whichever process."""
    with open(file, "ab", buffering=0) as out:
        out.write(json.dumps(record).encode() + b"\n")


def read(file: str | Path) -> list[dict[str, Any]]:
    """Return the records of a file; of one that does not exist yet, none."""
    path = Path(file)
    return [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []


def follow_with_opentelemetry(file: str) -> None:
    """Switch OpenTelemetry and its Celery instrumentation on, as its documentation says, with a file for the spans."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class ToFile(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            for span in spans:
                assert span.context is not None
                write(
                    file,
                    {
                        "name": span.name,
                        "trace": f"{span.context.trace_id:032x}",
                        "id": f"{span.context.span_id:016x}",
                        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
                        "status": span.status.status_code.name,
                        "attributes": {name: str(value) for name, value in (span.attributes or {}).items()},
                        "exceptions": [(event.attributes or {}).get("exception.type") for event in span.events],
                    },
                )
            return SpanExportResult.SUCCESS

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(ToFile()))
    trace.set_tracer_provider(provider)
    instrumentor: Any = CeleryInstrumentor
    instrumentor().instrument()


def follow_with_sentry(file: str) -> None:
    """Switch Sentry and its Celery integration on, with a transport that writes envelopes to a file."""
    import sentry_sdk
    from sentry_sdk.envelope import Envelope
    from sentry_sdk.integrations.celery import CeleryIntegration
    from sentry_sdk.transport import Transport

    class ToFile(Transport):
        def capture_envelope(self, envelope: Envelope) -> None:
            for item in envelope.items:
                sent = item.payload.json or {}
                failed = (sent.get("exception") or {}).get("values") or []
                write(
                    file,
                    {
                        "type": item.type,
                        "name": sent.get("transaction"),
                        "trace": (sent.get("contexts") or {}).get("trace", {}).get("trace_id"),
                        "exceptions": [one["type"] for one in failed],
                        "message": (sent.get("logentry") or {}).get("message"),
                        "steps": [one["description"] for one in sent.get("spans") or [] if one["op"] == "umt.step"],
                    },
                )

    sentry_sdk.init(
        dsn="http://key@127.0.0.1:9/1",
        transport=ToFile,
        traces_sample_rate=1.0,
        integrations=[CeleryIntegration()],
        default_integrations=True,
    )


class PaymentError(Exception):
    """What a body of these tasks raises."""


tasks = build()
app, durable = tasks.app, tasks.durable
app.set_current()  # OpenTelemetry's instrumentation looks for tasks in the current app
# After the `Durable`, which must not matter.
if os.environ.get(SPANS):
    follow_with_opentelemetry(os.environ[SPANS])
if os.environ.get(EVENTS):
    follow_with_sentry(os.environ[EVENTS])


def send(name: str, value: int) -> str:
    """Be a step that sends an ordinary task by its name."""
    return str(app.send_task(name, (value,)).id)


def refuse(value: int) -> int:
    """Be a step that fails."""
    raise PaymentError(f"{value} was refused")


@durable.task(name="traced.run")
def run(ctx: TaskContext, suspensions: int = 0) -> str:
    """Sleep as often as asked, sending an ordinary task in the end; return the id of the trace."""
    for number in range(suspensions):
        ctx.step.run(f"step-{number}", log_and_pass, f"step-{number}", number)
        ctx.step.sleep(f"nap-{number}", timedelta(seconds=2))
    ctx.step.run("send", send, "traced.sent", 1)
    return ctx.trace_id


@durable.task(name="traced.fail")
def fail(ctx: TaskContext, suspensions: int = 0) -> None:
    """Sleep as often as asked, then fail in a step."""
    for number in range(suspensions):
        ctx.step.sleep(f"nap-{number}", timedelta(seconds=2))
    ctx.step.run("refuse", refuse, 7)


@durable.task(name="traced.again", retry=RetryPolicy(max_attempts=2, initial=timedelta(seconds=3), jitter=0))
def again(ctx: TaskContext) -> str:
    """Fail at the first attempt."""
    if ctx.attempt == 1:
        raise PaymentError("not yet")
    return ctx.trace_id


@app.task(name="traced.sent", shared=False)
def sent(value: int) -> int:
    """Be an ordinary task that is sent by a step."""
    return value


@app.task(name="traced.member", shared=False)
def member(value: str) -> str:
    """Be the member of a chain after a run."""
    return value


@durable.task(name="traced.linked")
def linked(ctx: TaskContext, value: str) -> str:
    """Be a durable callback."""
    bodylog.write("linked", "begin", run=ctx.run_id)
    return ctx.trace_id


@app.task(name="traced.labelled", shared=False)
def labelled(value: int) -> int:
    """Be an ordinary task that a step awaits."""
    return value


@app.task(name="traced.packed", shared=False)
def packed(value: int) -> int:
    """Be the ordinary task of an event."""
    return value


@durable.task(name="traced.child")
def child(ctx: TaskContext, suspensions: int = 0) -> str:
    """Be a child run."""
    return ctx.step.run("trace", lambda: ctx.trace_id)


@durable.task(name="traced.paid")
def paid(ctx: TaskContext, value: int) -> str:
    """Be the durable task of an event."""
    bodylog.write("paid", ctx.trace_id, run=ctx.run_id)
    return ctx.trace_id


durable.outbox.route("traced.is_paid", paid)
durable.outbox.route("traced.is_packed", packed)


def keep(value: int) -> str:
    """Put a task and two events into the outbox; return the id of the event that starts a run."""
    durable.outbox.send(sent.s(value))
    durable.outbox.emit("traced.is_packed", value)
    return str(durable.outbox.emit("traced.is_paid", value))


@durable.task(name="traced.family")
def family(ctx: TaskContext) -> list[str]:
    """Await an ordinary task and a child, spawn another, keep things in the outbox; return the ids of the traces."""
    ctx.step.task("label", labelled.s(1))
    theirs = ctx.step.call("child", child)
    ctx.step.spawn("spawned", child)
    ctx.step.run("keep", keep, 1)
    return [ctx.trace_id, theirs]


def call(name: str, *numbers: str) -> str:
    """Start a run as a caller would, inside a trace of its own where that is followed; return the id of the run."""
    known: dict[str, Any] = {"run": run, "fail": fail, "again": again, "family": family}
    signature = known[name].s(*map(int, numbers))
    if name != "run":
        return str(signature.apply_async().id)
    signature.link(linked.s())
    return str(chain(signature, member.s()).apply_async().parent.id)


def enqueue(*numbers: str) -> str:
    """Start a run together with rows of the caller's own."""
    import psycopg

    with psycopg.connect(os.environ["DURABLE_DATABASE_URL"]) as conn:
        return str(run.enqueue(*map(int, numbers), conn=conn).id)


def main(verb: str, *arguments: str) -> str:
    """Make one call in a span that is there already, as that of a web request is."""
    import sentry_sdk
    from opentelemetry import trace

    with (
        trace.get_tracer("caller").start_as_current_span("request"),
        sentry_sdk.start_transaction(op="http.server", name="request"),
    ):
        match verb:
            case "enqueue":
                return enqueue(*arguments)
            case "keep":
                return keep(1)
            case _:
                return call(verb, *arguments)


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
    durable.stop()
