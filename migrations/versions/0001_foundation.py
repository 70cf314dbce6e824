"""Tables, scans and functions of the foundation: runs, journal, facts, outbox, leases.

Revision ID: 0001
Revises:
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

from umt_durable.migrate import ddl

revision = "0001"
down_revision = None

CLOCK = """
-- The one clock (I25). Schemas made by umt_durable.testing replace it by a movable one.
CREATE FUNCTION {schema}.now() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
    RETURN clock_timestamp();

CREATE FUNCTION {schema}.event_id(run bigint, gen bigint, type text, ordinal int) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN encode(substr(sha256(convert_to(
               run || '/' || gen || '/' || type || '/' || ordinal, 'UTF8')), 1, 16), 'hex')::uuid;

-- The id of a fact that was said to one run, in another that takes up what the first had done.
CREATE FUNCTION {schema}.copied_fact(run bigint, fact uuid) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN encode(substr(sha256(convert_to(run || '/' || fact, 'UTF8')), 1, 16), 'hex')::uuid;

-- Its payload there: of a sealed one without its mark, in which the id of the first run is.
CREATE FUNCTION {schema}.copied_payload(payload bytea) RETURNS bytea
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN substr(payload, 1, 1) = '\\x00'
                THEN overlay(payload PLACING decode(repeat('00', 16), 'hex') FROM 3) ELSE payload END;

-- Which transactions a new run has seen the end of. Its own is never among them: a snapshot of Postgres has its own
-- transaction as over as soon as a later one has ended.
CREATE FUNCTION {schema}.snapshot() RETURNS pg_snapshot LANGUAGE plpgsql VOLATILE PARALLEL UNSAFE
    SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    seen pg_snapshot := pg_current_snapshot();
    own  xid8 := pg_current_xact_id();
BEGIN
    IF pg_visible_in_snapshot(own, seen) THEN
        seen := (pg_snapshot_xmin(seen) || ':' || pg_snapshot_xmax(seen) || ':' || (
            SELECT string_agg(x::text, ',' ORDER BY x) FROM (
                SELECT pg_snapshot_xip(seen) AS x UNION SELECT own) AS open))::pg_snapshot;
    END IF;
    RETURN seen;
END $$;

-- Whether a fact's transaction ended after a run had been made: by the order of commits, whatever the clocks do (I8,
-- I25). A number that this server has not reached is of another one, whose rows were restored here: it says nothing.
CREATE FUNCTION {schema}.ended_after(xid xid8, seen pg_snapshot) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN NOT pg_visible_in_snapshot(xid, seen) AND xid < pg_snapshot_xmax(pg_current_snapshot());

-- Whether two payloads are known to differ. Sealed ones are compared by their marks; one without a mark shows nothing,
-- nor do a sealed and a plain one. For the frame see `umt_durable/payloads.py`.
CREATE FUNCTION {schema}.differ(a bytea, b bytea) RETURNS boolean LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN substr(a, 1, 1) = '\\x00' AND substr(b, 1, 1) = '\\x00'
                THEN substr(a, 3, 16) <> substr(b, 3, 16)
                     AND decode(repeat('00', 16), 'hex') NOT IN (substr(a, 3, 16), substr(b, 3, 16))
                WHEN substr(a, 1, 1) = '\\x00' OR substr(b, 1, 1) = '\\x00' THEN false
                ELSE a IS DISTINCT FROM b END;
"""

RUN = """
CREATE TABLE {schema}.run (
    no               bigint GENERATED ALWAYS AS IDENTITY CONSTRAINT run_pkey PRIMARY KEY,
    id               text NOT NULL CONSTRAINT run_id_length CHECK (char_length(id) BETWEEN 1 AND 255),
    nesting          int NOT NULL DEFAULT 0,
    task             text NOT NULL,
    version          int,
    queue            text,
    priority         smallint,
    state            text NOT NULL DEFAULT 'ready' CONSTRAINT run_state_known CHECK (state IN ('ready', 'running',
                         'sleeping', 'waiting', 'retrying', 'quarantined', 'succeeded', 'failed', 'cancelled')),
    reason           text,
    paused_at        timestamptz,
    fence            bigint NOT NULL DEFAULT 0,
    claim            uuid,
    worker           uuid,
    args             bytea,
    codec            smallint NOT NULL DEFAULT 1,
    digest           bytea,
    envelope         bytea,
    failures         int NOT NULL DEFAULT 0,
    crashes          int NOT NULL DEFAULT 0,
    wake_at          timestamptz,
    deliver_by       timestamptz,
    redelivers       int NOT NULL DEFAULT 0,
    expires_at       timestamptz,
    deadline         timestamptz,
    attempt_deadline timestamptz,
    cancel_at        timestamptz,
    compensate_at    timestamptz,
    compensate_reason text,
    parent_no        bigint,
    parent_key       text,
    retry_of         bigint,
    fork_of          bigint,
    parent_index     int,
    on_parent_end    text CONSTRAINT run_end_known CHECK (on_parent_end IN ('cancel', 'abandon')),
    ref              text,
    attributes       jsonb,
    result           bytea,
    error            bytea,
    created_at       timestamptz NOT NULL DEFAULT {schema}.now(),
    generation       int NOT NULL DEFAULT 0,
    continued_at     timestamptz,
    finished_at      timestamptz,
    snapshot         pg_snapshot NOT NULL DEFAULT {schema}.snapshot(),
    CONSTRAINT run_id_nesting UNIQUE (id, nesting),
    CONSTRAINT run_finished_when_terminal CHECK (
        (finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'cancelled'))),
    CONSTRAINT run_owned_while_running CHECK ((state = 'running') = (claim IS NOT NULL)),
    CONSTRAINT run_due_while_asleep CHECK (state NOT IN ('sleeping', 'retrying') OR wake_at IS NOT NULL),
    CONSTRAINT run_delivered_while_ready CHECK (state <> 'ready' OR deliver_by IS NOT NULL)
) WITH (fillfactor = 70);
CREATE INDEX run_ready ON {schema}.run (deliver_by, queue) WHERE state = 'ready' AND paused_at IS NULL;
CREATE INDEX run_due ON {schema}.run (wake_at) WHERE state IN ('sleeping', 'waiting', 'retrying');
CREATE INDEX run_running ON {schema}.run (worker) WHERE state = 'running';
CREATE INDEX run_expiring ON {schema}.run (expires_at) WHERE expires_at IS NOT NULL;
CREATE INDEX run_finished ON {schema}.run (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX run_children ON {schema}.run (parent_no, parent_key) WHERE parent_no IS NOT NULL;
CREATE INDEX run_unfinished ON {schema}.run (parent_no, parent_key) WHERE parent_no IS NOT NULL AND finished_at IS NULL;
CREATE INDEX run_ref ON {schema}.run (ref) WHERE ref IS NOT NULL;

CREATE TABLE {schema}.attempt (
    run        bigint NOT NULL,
    fence      bigint NOT NULL,
    claim      uuid NOT NULL,
    worker     uuid NOT NULL,
    claimed_at timestamptz NOT NULL,
    ended_at   timestamptz,
    outcome    text CONSTRAINT attempt_outcome_known CHECK (
                   outcome IN ('completed', 'failed', 'suspended', 'lost', 'cancelled')),
    error      text,
    CONSTRAINT attempt_pkey PRIMARY KEY (run, fence),
    CONSTRAINT attempt_ended_with_outcome CHECK ((ended_at IS NULL) = (outcome IS NULL))
);

CREATE TABLE {schema}.worker (
    id            uuid CONSTRAINT worker_pkey PRIMARY KEY,
    node          uuid NOT NULL,
    pid           int NOT NULL,
    host          text NOT NULL,
    lease_until   timestamptz NOT NULL,
    started_at    timestamptz NOT NULL DEFAULT {schema}.now(),
    versions      text[] NOT NULL DEFAULT '{}',
    queues        jsonb NOT NULL DEFAULT '{}',
    reserved      jsonb NOT NULL DEFAULT '{}',
    counters      jsonb NOT NULL DEFAULT '{}',
    last_claim_at timestamptz,
    boottime      double precision
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01);
"""

JOURNAL = """
CREATE TABLE {schema}.step (
    run         bigint NOT NULL,
    key         text NOT NULL,
    seq         int NOT NULL,
    kind        text NOT NULL,
    state       text NOT NULL CONSTRAINT step_state_known CHECK (state IN ('started', 'done', 'failed')),
    fingerprint bytea,
    failures    int NOT NULL DEFAULT 0,
    fence       bigint NOT NULL,
    result      bytea,
    digest      bytea,
    error       bytea,
    wake_at     timestamptz,
    started_at  timestamptz,
    finished_at timestamptz,
    undo        text,
    CONSTRAINT step_pkey PRIMARY KEY (run, key)
);

-- What bodies say of how far they are: of the run itself under the key '', of its steps under theirs.
CREATE TABLE {schema}.progress (
    run     bigint NOT NULL,
    key     text NOT NULL,
    fence   bigint NOT NULL,
    turn    bigint NOT NULL,
    status  text,
    done    double precision,
    total   double precision,
    payload bytea,
    at      timestamptz NOT NULL,
    CONSTRAINT progress_pkey PRIMARY KEY (run, key)
) WITH (fillfactor = 70);

CREATE TABLE {schema}.wait (
    run        bigint NOT NULL,
    key        text NOT NULL,
    seq        int NOT NULL,
    name       text NOT NULL,
    address    text COLLATE "C" NOT NULL,
    mode       text NOT NULL,
    deadline   timestamptz,
    state      text NOT NULL DEFAULT 'pending'
                   CONSTRAINT wait_state_known CHECK (state IN ('pending', 'satisfied', 'timed_out', 'cancelled')),
    fact       uuid,
    payload    bytea,
    token      uuid,
    created_at timestamptz NOT NULL DEFAULT {schema}.now(),
    settled_at timestamptz,
    part_of    text,
    need       int,
    announced  boolean NOT NULL DEFAULT true,
    CONSTRAINT wait_pkey PRIMARY KEY (run, key),
    CONSTRAINT wait_settled_once CHECK ((state = 'pending') = (settled_at IS NULL))
);
CREATE INDEX wait_pending ON {schema}.wait (address) WHERE state = 'pending';
CREATE INDEX wait_parts ON {schema}.wait (run, part_of) WHERE part_of IS NOT NULL;

CREATE TABLE {schema}.fact (
    id        uuid CONSTRAINT fact_pkey PRIMARY KEY,
    address   text COLLATE "C" NOT NULL,
    name      text NOT NULL,
    payload   bytea,
    actor     text,
    dedupe    text,
    at        timestamptz NOT NULL DEFAULT {schema}.now(),
    routed_at timestamptz,
    xid       xid8 NOT NULL DEFAULT pg_current_xact_id(),
    CONSTRAINT fact_dedupe UNIQUE (address, dedupe)
);
CREATE INDEX fact_address ON {schema}.fact (address, at);
CREATE INDEX fact_keyed ON {schema}.fact (address, xid) WHERE address LIKE '["key",%';
CREATE INDEX fact_unrouted ON {schema}.fact (at) WHERE routed_at IS NULL;

-- Which facts a run has read in generations before its current one, whose waits are gone.
CREATE TABLE {schema}.fact_read (
    run  bigint NOT NULL,
    fact uuid NOT NULL,
    CONSTRAINT fact_read_pkey PRIMARY KEY (run, fact)
);
"""

LEDGER = """
CREATE TABLE {schema}.op_ledger (
    namespace      text NOT NULL,
    op_key         text NOT NULL,
    state          text NOT NULL DEFAULT 'open' CONSTRAINT op_ledger_state_known CHECK (state IN ('open', 'done',
                       'failed', 'uncertain')),
    run            bigint NOT NULL,
    fence          bigint NOT NULL,
    claim          uuid NOT NULL,
    token          uuid NOT NULL,
    turn           bigint NOT NULL DEFAULT 1,
    idem_key       uuid NOT NULL,
    request_digest bytea,
    is_clear       boolean NOT NULL DEFAULT false,
    commit_due     boolean NOT NULL DEFAULT false,
    result         bytea,
    digest         bytea,
    error          bytea,
    waiting        bigint[] NOT NULL DEFAULT '{}',
    actor          text,
    comment        text,
    began_at       timestamptz NOT NULL DEFAULT {schema}.now(),
    taken_at       timestamptz NOT NULL DEFAULT {schema}.now(),
    settled_at     timestamptz,
    CONSTRAINT op_ledger_pkey PRIMARY KEY (namespace, op_key),
    CONSTRAINT op_ledger_done_with_result CHECK ((state = 'done') = (result IS NOT NULL))
);
CREATE INDEX op_ledger_unsettled ON {schema}.op_ledger (namespace, op_key) WHERE state IN ('open', 'uncertain');
CREATE INDEX op_ledger_released ON {schema}.op_ledger (namespace, op_key)
    WHERE state <> 'uncertain' AND waiting <> '{}';
"""

OUTBOX = """
CREATE TABLE {schema}.outbox_event (
    id              uuid CONSTRAINT outbox_event_pkey PRIMARY KEY,
    type            text NOT NULL,
    run             bigint,
    ordinal         int NOT NULL DEFAULT 0,
    payload         bytea,
    status          text NOT NULL DEFAULT 'pending'
                        CONSTRAINT outbox_event_status_known CHECK (status IN ('pending', 'dispatched', 'dead')),
    priority        smallint NOT NULL DEFAULT 0,
    next_attempt_at timestamptz NOT NULL,
    aged_at         timestamptz,
    claim           uuid,
    attempts        int NOT NULL DEFAULT 0,
    reason          text,
    idempotency_key text,
    created_at      timestamptz NOT NULL DEFAULT {schema}.now(),
    published_at    timestamptz,
    trace           jsonb,
    step            text,
    once            boolean NOT NULL DEFAULT false,
    leaving_at      timestamptz,
    CONSTRAINT outbox_event_step_of_run CHECK (step IS NULL OR run IS NOT NULL)
) WITH (autovacuum_vacuum_scale_factor = 0.01);
CREATE INDEX outbox_event_due ON {schema}.outbox_event (priority DESC, next_attempt_at, id) WHERE status = 'pending';
CREATE INDEX outbox_event_dead ON {schema}.outbox_event (created_at, id) WHERE status = 'dead';

CREATE TABLE {schema}.idempotency_key (
    task       text NOT NULL,
    key        text NOT NULL,
    input_hash bytea,
    given_hash bytea,
    run        text NOT NULL,
    expires_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT {schema}.now(),
    CONSTRAINT idempotency_key_pkey PRIMARY KEY (task, key)
);
CREATE INDEX idempotency_key_open ON {schema}.idempotency_key (run) WHERE input_hash IS NULL AND task <> '';

CREATE TABLE {schema}.broker_marker (
    broker      text CONSTRAINT broker_marker_pkey PRIMARY KEY,
    incarnation text NOT NULL,
    seen_at     timestamptz NOT NULL DEFAULT {schema}.now()
);

CREATE TABLE {schema}.setting (
    name  text CONSTRAINT setting_pkey PRIMARY KEY,
    value jsonb NOT NULL
);
INSERT INTO {schema}.setting (name, value) VALUES
    ('min_writer', '1'), ('signing_key', to_jsonb(gen_random_uuid()::text || gen_random_uuid()::text));
"""

AUDIT = """
-- What people did to runs, written with what they did and never changed.
CREATE TABLE {schema}.audit (
    id     uuid CONSTRAINT audit_pkey PRIMARY KEY,
    act    text NOT NULL,
    run    bigint,
    actor  text NOT NULL,
    reason text,
    detail text,
    at     timestamptz NOT NULL DEFAULT {schema}.now()
);
CREATE INDEX audit_run ON {schema}.audit (run, at) WHERE run IS NOT NULL;

-- Tasks and queues whose ready runs are taken by nobody. One that was resumed stays until its runs were made due.
CREATE TABLE {schema}.pause (
    scope      text NOT NULL CONSTRAINT pause_scope_known CHECK (scope IN ('task', 'queue')),
    name       text NOT NULL,
    actor      text NOT NULL,
    reason     text,
    at         timestamptz NOT NULL DEFAULT {schema}.now(),
    resumed_at timestamptz,
    CONSTRAINT pause_pkey PRIMARY KEY (scope, name)
);
"""

# What callers run inside their own transactions: INSERT only, so that a transaction left open blocks no run (I23).
# Those that are SECURITY DEFINER are the whole of what an application's role may do: it has no rights on the tables.
# All have their search_path pinned: a caller's own would decide which operators they use.
FUNCTIONS = """
-- The queue that a live worker declares for a task, for runs that were started without one; null where none does.
CREATE FUNCTION {schema}.queue_of(task text) RETURNS text LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (SELECT w.queues ->> task FROM {schema}.worker AS w
             WHERE w.lease_until > {schema}.now() AND w.queues ? task ORDER BY w.started_at DESC, w.id LIMIT 1);

-- Whether a run has recorded steps whose undo is not recorded.
CREATE FUNCTION {schema}.has_undos(run bigint) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN EXISTS (SELECT 1 FROM {schema}.step AS s
                    WHERE s.run = has_undos.run AND s.state = 'done' AND s.undo IS NOT NULL
                      AND NOT EXISTS (SELECT 1 FROM {schema}.step AS u
                                       WHERE u.run = s.run AND u.key = 'umt.undo/' || s.key AND u.state = 'done'));

-- Whether a ready run of a task, in a queue, has to wait for somebody who resumes one of them. This package's own
-- tasks, which bring answers, do not wait for a queue.
CREATE FUNCTION {schema}.is_paused(task text, queue text) RETURNS boolean LANGUAGE sql STABLE PARALLEL SAFE
    RETURN EXISTS (SELECT 1 FROM {schema}.pause AS p
                    WHERE p.resumed_at IS NULL
                      AND CASE p.scope WHEN 'task' THEN p.name = task
                          ELSE p.name = coalesce(queue, {schema}.queue_of(task))
                               AND NOT starts_with(task, 'umt_durable.') END);

CREATE FUNCTION {schema}.enqueue_run(
    p_id text, p_nesting int, p_task text, p_version int, p_queue text, p_priority int, p_args bytea, p_codec int,
    p_digest bytea, p_envelope bytea, p_wake_at timestamptz, p_delay interval, p_expires_at timestamptz,
    p_expires_in interval, p_ref text,
    p_attributes jsonb, p_deliver interval, p_key text, p_key_hash bytea, p_key_ttl interval,
    p_key_given bytea DEFAULT NULL,
    OUT run text, OUT no bigint, OUT outcome text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at    timestamptz := {schema}.now();
    due   timestamptz := coalesce(p_wake_at, at + p_delay);
    hash  bytea;
    given bytea;
BEGIN
    run := p_id;
    IF p_key IS NOT NULL THEN
        INSERT INTO {schema}.idempotency_key AS k (task, key, input_hash, given_hash, run, expires_at)
            VALUES (p_task, p_key, p_key_hash, p_key_given, p_id, at + p_key_ttl)
        ON CONFLICT ON CONSTRAINT idempotency_key_pkey DO NOTHING;
        IF NOT FOUND THEN
            -- A key past its time is taken over; only then is a row locked.
            UPDATE {schema}.idempotency_key AS k
               SET input_hash = p_key_hash, given_hash = p_key_given, run = p_id, expires_at = at + p_key_ttl
             WHERE k.task = p_task AND k.key = p_key AND k.expires_at <= at;
        END IF;
        IF NOT FOUND THEN
            SELECT k.run, k.input_hash, k.given_hash INTO run, hash, given
              FROM {schema}.idempotency_key k WHERE k.task = p_task AND k.key = p_key;
            -- What is null on one side is not compared: SQL does not know how a task reads its arguments. A keyed hash
            -- and a plain one, of another length, show nothing.
            outcome := CASE WHEN (length(hash) = length(p_key_hash) AND hash <> p_key_hash)
                              OR (length(given) = length(p_key_given) AND given <> p_key_given) THEN 'conflict'
                            ELSE 'existing' END;
            RETURN;
        END IF;
    END IF;
    at := {schema}.now();  -- once for all that follows: read twice, a due time in between would be neither
    INSERT INTO {schema}.run AS r (id, nesting, task, version, queue, priority, state, args, codec, digest, envelope,
            wake_at, deliver_by, expires_at, ref, attributes)
        VALUES (p_id, p_nesting, p_task, p_version, p_queue, p_priority,
            CASE WHEN due > at THEN 'sleeping' ELSE 'ready' END, p_args, p_codec, p_digest, p_envelope,
            CASE WHEN due > at THEN due END, at + p_deliver,
            coalesce(p_expires_at, at + p_expires_in), p_ref, p_attributes)
        ON CONFLICT ON CONSTRAINT run_id_nesting DO NOTHING
        RETURNING r.no, r.state INTO no, outcome;
    IF NOT FOUND THEN
        outcome := 'existing';
    ELSE
        IF outcome = 'ready' THEN
            INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
                VALUES ({schema}.event_id(no, 0, 'run', 0), 'run', no, coalesce(p_priority, 0), at);
        END IF;
        outcome := 'created';
    END IF;
END $$;

-- The id of the fact: of the earlier one where its dedupe was used at this address before.
CREATE FUNCTION {schema}.say(p_address text, p_name text, p_payload bytea, p_actor text, p_dedupe text, p_fact uuid)
    RETURNS uuid LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    INSERT INTO {schema}.fact (id, address, name, payload, actor, dedupe)
        VALUES (p_fact, p_address, p_name, p_payload, p_actor, p_dedupe)
        ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN p_fact;
    END IF;
    -- In a statement of its own: the earlier one may have committed after the first began.
    RETURN coalesce((SELECT id FROM {schema}.fact WHERE address = p_address AND dedupe = p_dedupe), p_fact);
END $$;

-- Null when there is no such run; 0 rows are raised as an error by the caller, which keeps his transaction usable.
CREATE FUNCTION {schema}.ask_run(p_run text, p_name text, p_payload bytea, p_actor text, p_dedupe text, p_fact uuid)
    RETURNS uuid LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM FROM {schema}.run WHERE id = p_run LIMIT 1;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    RETURN {schema}.say(jsonb_build_array('run', p_run, p_name)::text, p_name, p_payload, p_actor, p_dedupe, p_fact);
END $$;

-- The same for whoever may only signal and cancel: what other reserved names ask is for operators (D7).
CREATE FUNCTION {schema}.signal_run(p_run text, p_name text, p_payload bytea, p_actor text, p_dedupe text, p_fact uuid)
    RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF starts_with(p_name, 'umt.') AND p_name <> 'umt.cancel' THEN
        RAISE EXCEPTION 'names under umt. are reserved: %', quote_literal(p_name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN {schema}.ask_run(p_run, p_name, p_payload, p_actor, p_dedupe, p_fact);
END $$;

CREATE FUNCTION {schema}.emit_fact(p_name text, p_key text, p_payload bytea, p_actor text, p_dedupe text, p_fact uuid)
    RETURNS uuid LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF starts_with(p_name, 'umt.') THEN
        RAISE EXCEPTION 'names under umt. are reserved: %', quote_literal(p_name)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN {schema}.say(jsonb_build_array('key', p_name, p_key)::text, p_name, p_payload, p_actor, p_dedupe, p_fact);
END $$;

-- What a begun step ended in: one fact at the address of its wait, and the first counts. `done`; `same`, where it was
-- said before, `used` with another payload; `expired`, `ended`, `stale` (another generation) and `unknown` say nothing.
CREATE FUNCTION {schema}.complete_step(p_run text, p_nesting int, p_key text, p_generation int, p_payload bytea,
    p_actor text, p_fact uuid, OUT fact uuid, OUT outcome text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    r     record;
    w     record;
    known record;
BEGIN
    SELECT no, generation, finished_at INTO r FROM {schema}.run WHERE id = p_run AND nesting = p_nesting;
    IF NOT FOUND THEN
        outcome := 'unknown';
        RETURN;
    ELSIF r.generation <> p_generation THEN
        outcome := 'stale';
        RETURN;
    END IF;
    SELECT name, address, state, deadline INTO w FROM {schema}.wait
     WHERE run = r.no AND key = p_key AND mode = 'begin';
    IF NOT FOUND THEN
        outcome := 'unknown';
        RETURN;
    ELSIF w.state = 'timed_out' THEN
        outcome := 'expired';
        RETURN;
    END IF;
    SELECT f.id, f.payload INTO known FROM {schema}.fact AS f WHERE f.address = w.address AND f.dedupe = 'complete';
    IF NOT FOUND THEN
        IF r.finished_at IS NOT NULL OR w.state <> 'pending' THEN
            outcome := 'ended';
            RETURN;
        ELSIF w.deadline <= {schema}.now() THEN
            outcome := 'expired';
            RETURN;
        END IF;
        fact := {schema}.say(w.address, (w.address::jsonb) ->> 2, p_payload, p_actor, 'complete', p_fact);
        SELECT f.id, f.payload INTO known FROM {schema}.fact AS f WHERE f.id = complete_step.fact;
        outcome := CASE WHEN fact = p_fact THEN 'done' END;
    END IF;
    fact := known.id;
    outcome := coalesce(outcome, CASE WHEN {schema}.differ(known.payload, p_payload) THEN 'used' ELSE 'same' END);
END $$;

-- The schema's own secret, which tokens of begun steps are signed with where the settings name no other. Whoever may
-- complete steps may read it; none of the tables says so.
CREATE FUNCTION {schema}.signing_key() RETURNS text
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT value #>> '{}' FROM {schema}.setting WHERE name = 'signing_key');
END $$;

-- A user's event. One of a type and key: its id is derived from them, so that the primary key decides. Without a key it
-- is the event of its id. `existing` gives the earlier event, `conflict` too, but that one has another payload.
CREATE FUNCTION {schema}.emit_event(p_type text, p_payload bytea, p_key text, p_event uuid, p_trace jsonb,
    OUT event uuid, OUT outcome text)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    known bytea;
BEGIN
    IF p_type IN ('run', 'result', 'callback', 'celery') OR p_type LIKE 'umt.%' OR p_type = '' THEN
        RAISE EXCEPTION 'the outbox type % is reserved', quote_literal(p_type)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    event := CASE WHEN p_key IS NULL THEN p_event ELSE encode(substr(sha256(convert_to(
                 jsonb_build_array('event', p_type, p_key)::text, 'UTF8')), 1, 16), 'hex')::uuid END;
    INSERT INTO {schema}.outbox_event AS o (id, type, payload, next_attempt_at, idempotency_key, trace)
        VALUES (event, p_type, p_payload, {schema}.now(), coalesce(p_key, 'outbox:' || event), p_trace)
        ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING;
    outcome := 'created';
    IF NOT FOUND THEN
        -- In a statement of its own: the earlier one may have committed after the first began.
        SELECT o.payload INTO known FROM {schema}.outbox_event AS o WHERE o.id = event;
        outcome := CASE WHEN {schema}.differ(known, p_payload) THEN 'conflict' ELSE 'existing' END;
    END IF;
END $$;

-- The same for SQL, triggers and other languages; a key that was used with another payload is an error.
CREATE FUNCTION {schema}.emit_outbox(p_type text, p_payload jsonb, p_key text DEFAULT NULL) RETURNS uuid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    made record;
BEGIN
    made := {schema}.emit_event(p_type, convert_to(p_payload::text, 'UTF8'), p_key, gen_random_uuid(), NULL);
    IF made.outcome = 'conflict' THEN
        RAISE EXCEPTION 'the idempotency key % of events % was used with another payload', quote_literal(p_key),
            quote_literal(p_type) USING ERRCODE = 'unique_violation';
    END IF;
    RETURN made.event;
END $$;

-- A message of ordinary Celery tasks, published when it is due. False where this id is there already.
CREATE FUNCTION {schema}.keep_message(p_id uuid, p_payload bytea, p_due timestamptz, p_delay interval, p_trace jsonb)
    RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    at timestamptz := {schema}.now();
BEGIN
    INSERT INTO {schema}.outbox_event (id, type, payload, next_attempt_at, created_at, trace)
        VALUES (p_id, 'celery', p_payload, greatest(at, coalesce(p_due, at + p_delay)), at, p_trace)
        ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING;
    RETURN FOUND;
END $$;
"""

# The functions and views that are documented for others: psql, triggers, other languages, pages.
API = Path(__file__).parent.parent / "sql" / "0001_api.sql"

PRIVILEGES = """
-- Postgres lets everybody call a new function; here each role is given what it may (`umt-durable grants`).
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {schema} FROM PUBLIC;
"""

SEALED = """
-- The id of the key that a payload is sealed with; null where it is in clear. See `umt_durable/payloads.py`.
CREATE FUNCTION {schema}.key_of(payload bytea) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN CASE WHEN substr(payload, 1, 1) = '\\x00'
                THEN convert_from(substr(payload, 20, get_byte(substr(payload, 19, 1), 0)), 'UTF8') END;

-- How many payloads each key has sealed, and how many are in clear (a null key). No payload and no part of one.
CREATE VIEW {schema}.payload_keys AS
    SELECT place, {schema}.key_of(payload) AS key, count(*) AS payloads
      FROM (SELECT 'run.args', args FROM {schema}.run
            UNION ALL SELECT 'run.envelope', envelope FROM {schema}.run
            UNION ALL SELECT 'run.result', result FROM {schema}.run
            UNION ALL SELECT 'run.error', error FROM {schema}.run
            UNION ALL SELECT 'attempt.error', decode(substr(error, 8), 'base64') FROM {schema}.attempt
                       WHERE starts_with(error, 'sealed:')
            UNION ALL SELECT 'step.result', result FROM {schema}.step
            UNION ALL SELECT 'step.error', error FROM {schema}.step
            UNION ALL SELECT 'progress.payload', payload FROM {schema}.progress
            UNION ALL SELECT 'progress.status', decode(substr(status, 8), 'base64') FROM {schema}.progress
                       WHERE starts_with(status, 'sealed:')
            UNION ALL SELECT 'wait.payload', payload FROM {schema}.wait
            UNION ALL SELECT 'fact.payload', payload FROM {schema}.fact
            UNION ALL SELECT 'op_ledger.result', result FROM {schema}.op_ledger
            UNION ALL SELECT 'op_ledger.error', error FROM {schema}.op_ledger
            UNION ALL SELECT 'outbox_event.payload', payload FROM {schema}.outbox_event) AS each (place, payload)
     WHERE payload IS NOT NULL
     GROUP BY place, key;
"""


def upgrade(schema: str) -> None:
    """Create everything of the first revision."""
    # What the texts below mean is decided by our schema and Postgres's own, not by whatever the migrator can see.
    op.execute("SET LOCAL search_path = pg_catalog")
    for part in (CLOCK, RUN, JOURNAL, LEDGER, OUTBOX, AUDIT, FUNCTIONS, API.read_text("utf-8"), SEALED, PRIVILEGES):
        op.execute(ddl(part, schema))
