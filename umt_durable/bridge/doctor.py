"""`durable doctor`: what is wrong with a deployment, and the fix for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import click
import psycopg

from umt_durable import grants
from umt_durable.bridge import checks_broker, checks_database, checks_runs, checks_settings, checks_tasks
from umt_durable.bridge.chords import is_awaited_in, patience
from umt_durable.bridge.console import Section, emit, json_option, one_line
from umt_durable.bridge.durable import Durable
from umt_durable.bridge.findings import Finding, Findings, Level, fail, warn
from umt_durable.bridge.project import Project, project_of
from umt_durable.database import Connection
from umt_durable.errors import DatabaseUnavailableError, DurableError
from umt_durable.records import WorkerRecord
from umt_durable.redaction import redact_text, redact_url
from umt_durable.store import diagnosis, outbox, pauses, workers


@click.command()
@json_option
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check database, schema, broker, workers, settings and runs; exit with 1 when something fails.

    Cells: level (ok, warn or fail), check, what was found, the fix.
    """
    project = project_of(ctx)
    findings = [replace(found, fix=project.spelled(found.fix)) for found in examine(project)]
    worst = max(findings, key=lambda each: list(Level).index(each.level)).level
    document = {"level": worst, "findings": [asdict(finding) for finding in findings]}
    rows = [(str(each.level), each.check, one_line(each.what), one_line(each.fix)) for each in findings]
    emit(document, [Section("finding", ("", "check", "found", "fix"), rows)], as_json=as_json)
    ctx.exit(1 if worst is Level.FAIL else 0)


def examine(project: Project) -> Iterator[Finding]:
    """Look at everything that can be looked at; what depends on something that failed is left out."""
    try:
        durable = project.durable("all", tasks=True)
        settings, database = durable.settings, durable.database
        where = redact_url(database.url)
    except (DurableError, click.ClickException) as error:
        yield fail("configuration", redact_text(str(error)), "put that right first: nothing else was looked at")
        return
    yield from _of_project(project)
    longest = None
    live: list[str] = []
    used: dict[str, str] = {}
    try:
        with database.connect(application="umt_durable doctor") as conn:
            yield from _of_server(durable, conn, where)
            revision = next(checks_database.revision(database, settings))
            yield revision
            lacks = _lacking(conn) if revision.level is Level.OK else []
            if revision.level is Level.OK:
                yield from checks_database.rights(lacks)
            if revision.level is Level.OK and not lacks:
                longest = diagnosis.longest_parked(conn)
                records = workers.recent(conn)
                live = [checks_runs.name_of(one) for one in checks_runs.main_processes(records)]
                yield from _of_schema(durable, conn, records)
                yield from _of_chords(durable, conn)
                used = checks_runs.queues_with_priority(diagnosis.with_priority(conn), durable.app, durable.queue_of)
    except DatabaseUnavailableError as error:
        yield checks_database.unreachable(str(error))
    except psycopg.Error as error:
        yield checks_database.unreachable(redact_text(f"Postgres refuses a question: {error}"))
    broker = list(checks_broker.broker(durable.app))
    yield from broker
    if all(finding.level is not Level.FAIL for finding in broker):
        yield from checks_broker.workers(durable.app, live)
        yield from checks_broker.priorities(durable.app, used)
    yield from checks_settings.celery_settings(durable.app.conf, settings, longest_parked=longest)
    yield from checks_tasks.acks(durable.app)
    yield from checks_tasks.retries(durable)


def _lacking(conn: Connection) -> list[str]:
    return diagnosis.missing_rights(conn, *grants.needed(grants.Role.WORKER))


def _of_project(project: Project) -> Findings:
    if project.near:
        yield warn("app", project.unnamed, project.name_it)


def _of_chords(durable: Durable, conn: Connection) -> Findings:
    kept, setting = patience(durable.app.backend)
    if kept is not None:
        yield from checks_settings.chords(diagnosis.parked_in_chords(conn, kept, is_awaited_in), kept, setting)


def _of_server(durable: Durable, conn: Connection, where: str) -> Findings:
    found = diagnosis.server(conn)
    yield from checks_database.server(found, where)
    yield from checks_database.clock(found, durable.app.now().timestamp())
    yield from checks_database.pooler(found, durable.settings, conn.info.backend_pid)
    yield from checks_database.timeouts(diagnosis.timeouts(conn), durable.settings)
    yield from checks_database.transactions(diagnosis.oldest_transaction(conn))


def _of_schema(durable: Durable, conn: Connection, records: Sequence[WorkerRecord]) -> Findings:
    yield from checks_database.schema_clock(diagnosis.clock_offset(conn))
    yield from checks_database.payloads(*diagnosis.sealed(conn))
    live = checks_runs.main_processes(records)
    blocked = diagnosis.blocked(conn)
    pending, _, oldest = outbox.status(conn)
    waiting = sum(group.runs for group in blocked)
    yield from checks_runs.missing_services(records, durable.settings)
    yield from checks_runs.workers(live, durable.tasks.declared(), waiting)
    yield from checks_runs.outbox(pending, diagnosis.dead_events(conn), oldest, durable.settings)
    yield from checks_runs.still(blocked, diagnosis.quarantined(conn), is_staffed=bool(live))
    yield from checks_runs.pauses(pauses.listed(conn))
    yield from checks_runs.counters(workers.sum_counters(conn))
