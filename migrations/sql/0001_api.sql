-- What psql, triggers and programs in other languages use: functions that start, signal and cancel runs, and views
-- without payloads and tokens. docs/reference/sql.md is their reference. The functions check what they are given, and
-- then call what Python's own calls do, so that there is one way in. None of them commits: each is part of the caller's
-- transaction, and only inserts.

CREATE FUNCTION {schema}.check_text(field text, value text, shortest int DEFAULT 1) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    IF NOT char_length(value) BETWEEN shortest AND 255 THEN
        RAISE EXCEPTION '% must have % to 255 characters, not %', field, shortest, char_length(value)
            USING ERRCODE = 'invalid_parameter_value';
    ELSIF octet_length(convert_to(value, 'UTF8')) > 765 THEN
        RAISE EXCEPTION '% must have at most 765 bytes in UTF-8, not %', field, octet_length(convert_to(value, 'UTF8'))
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- A JSON value as a payload of ours; SQL's null is JSON's.
CREATE FUNCTION {schema}.check_payload(field text, value jsonb) RETURNS bytea
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    data bytea := convert_to(coalesce(value, 'null')::text, 'UTF8');
BEGIN
    IF octet_length(data) > 16777216 THEN
        RAISE EXCEPTION '% takes % bytes, more than the 16777216 allowed', field, octet_length(data)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    RETURN data;
END $$;

-- The same checks as of Python's `enqueue`, but for those that need the task's code.
CREATE FUNCTION {schema}.check_start(
    task text, args jsonb, task_id text, idempotency_key text, idempotency_ttl interval, idempotency_policy text,
    queue text, priority int, countdown interval, eta timestamptz, ref text, attributes jsonb) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    problem text;
BEGIN
    PERFORM {schema}.check_text('task', coalesce(task, '')), {schema}.check_text('task_id', task_id),
            {schema}.check_text('idempotency_key', idempotency_key), {schema}.check_text('queue', queue),
            {schema}.check_text('ref', ref, 0);
    problem := CASE
        WHEN position('@' IN task) > 0 THEN 'task must be a name without a version: no task name holds an ''@'''
        WHEN coalesce(jsonb_typeof(args), 'null') NOT IN ('object', 'array')
            THEN 'args must be a JSON object (arguments by name) or array (arguments by place), not '
                 || coalesce(jsonb_typeof(args), 'null')
        WHEN priority NOT BETWEEN 0 AND 9 THEN 'priority must be from 0 to 9, not ' || priority
        WHEN countdown IS NOT NULL AND eta IS NOT NULL THEN 'countdown and eta both say when: give one of them'
        WHEN coalesce(jsonb_typeof(attributes), 'object') <> 'object' THEN 'attributes must be a JSON object'
        WHEN coalesce(idempotency_policy, '') NOT IN ('attach', 'reject')
            THEN 'idempotency_policy must be one of attach, reject, not ' || coalesce(quote_literal(idempotency_policy), 'null')
        WHEN idempotency_ttl <= interval '0' THEN 'idempotency_ttl must be more than zero'
        WHEN idempotency_key IS NULL AND idempotency_ttl IS NOT NULL
            THEN 'idempotency_ttl is the lifetime of an idempotency_key; there is none'
        WHEN idempotency_key IS NULL AND idempotency_policy <> 'attach'
            THEN 'idempotency_policy says what an idempotency_key does; there is none'
    END;
    IF problem IS NOT NULL THEN
        RAISE EXCEPTION '%', problem USING ERRCODE = 'invalid_parameter_value';
    END IF;
END $$;

-- Start a run; its id. Version and queue are left to the worker that takes it first, and so is the check of the
-- arguments, which needs the task's code. With a key its digest stays open too: that worker then records what later
-- starts with the key are compared to.
CREATE FUNCTION {schema}.enqueue(
    task text, args jsonb DEFAULT '{}', task_id text DEFAULT NULL, idempotency_key text DEFAULT NULL,
    idempotency_ttl interval DEFAULT NULL, idempotency_policy text DEFAULT 'attach', queue text DEFAULT NULL,
    priority int DEFAULT NULL, countdown interval DEFAULT NULL, eta timestamptz DEFAULT NULL,
    expires timestamptz DEFAULT NULL, ref text DEFAULT NULL, attributes jsonb DEFAULT NULL) RETURNS text
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    id    text := coalesce(task_id, gen_random_uuid()::text);
    made  record;
    given bytea;
BEGIN
    PERFORM {schema}.check_start(task, args, task_id, idempotency_key, idempotency_ttl, idempotency_policy, queue,
                                 priority, countdown, eta, ref, attributes);
    given := {schema}.check_payload('args', CASE WHEN jsonb_typeof(args) = 'array'
        THEN jsonb_build_object('args', args, 'kwargs', '{}'::jsonb)
        ELSE jsonb_build_object('args', '[]'::jsonb, 'kwargs', args) END);
    made := {schema}.enqueue_run(
        p_id => id, p_nesting => 0, p_task => task, p_version => NULL, p_queue => queue, p_priority => priority,
        p_args => given, p_codec => 1, p_digest => CASE WHEN idempotency_key IS NULL THEN sha256(given) END,
        p_envelope => NULL, p_wake_at => eta, p_delay => countdown, p_expires_at => expires, p_expires_in => NULL,
        p_ref => ref, p_attributes => attributes, p_deliver => interval '30 s', p_key => idempotency_key,
        p_key_hash => NULL, p_key_ttl => idempotency_ttl,
        p_key_given => CASE WHEN idempotency_key IS NOT NULL THEN sha256(given) END);
    IF made.outcome = 'conflict' THEN
        RAISE EXCEPTION 'idempotency key % of % belongs to run %, which was made with other input',
            quote_literal(idempotency_key), task, made.run USING ERRCODE = 'unique_violation';
    ELSIF made.outcome = 'existing' AND idempotency_policy = 'reject' AND made.run <> id THEN
        RAISE EXCEPTION 'idempotency key % of % was used before, by run %', quote_literal(idempotency_key), task, made.run
            USING ERRCODE = 'unique_violation';
    END IF;
    RETURN made.run;
END $$;

-- Say a fact to one run; the fact's id.
CREATE FUNCTION {schema}.signal(
    run text, name text, payload jsonb DEFAULT NULL, actor text DEFAULT NULL, dedupe text DEFAULT NULL) RETURNS uuid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    fact uuid;
BEGIN
    PERFORM {schema}.check_text('name', coalesce(name, '')), {schema}.check_text('actor', actor),
            {schema}.check_text('dedupe', dedupe);
    IF starts_with(name, 'umt.') THEN
        RAISE EXCEPTION 'names under umt. are reserved: %', quote_literal(name) USING ERRCODE = 'invalid_parameter_value';
    END IF;
    fact := {schema}.signal_run(
        run, name, {schema}.check_payload('payload', payload), actor, dedupe, gen_random_uuid());
    IF fact IS NULL THEN
        RAISE EXCEPTION 'no run with id %', quote_nullable(run) USING ERRCODE = 'no_data_found';
    END IF;
    RETURN fact;
END $$;

-- Say a fact under a name and key, for every run that waits for it now or later; the fact's id.
CREATE FUNCTION {schema}.emit(
    name text, key text, payload jsonb DEFAULT NULL, actor text DEFAULT NULL, dedupe text DEFAULT NULL) RETURNS uuid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    PERFORM {schema}.check_text('name', coalesce(name, '')), {schema}.check_text('key', coalesce(key, '')),
            {schema}.check_text('actor', actor), {schema}.check_text('dedupe', dedupe);
    RETURN {schema}.emit_fact(
        name, key, {schema}.check_payload('payload', payload), actor, dedupe, gen_random_uuid());
END $$;

-- Ask that a run end as cancelled; the id of the fact that says so. One that has ended stays as it is. With `compensate`
-- the undos of what it has done are executed first.
CREATE FUNCTION {schema}.cancel(
    run text, reason text DEFAULT NULL, actor text DEFAULT NULL, compensate boolean DEFAULT false) RETURNS uuid
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    fact uuid;
BEGIN
    PERFORM {schema}.check_text('actor', actor);
    IF char_length(reason) > 1000 THEN
        RAISE EXCEPTION 'reason must have at most 1000 characters, not %', char_length(reason)
            USING ERRCODE = 'invalid_parameter_value';
    END IF;
    fact := {schema}.signal_run(
        run, 'umt.cancel',
        convert_to((jsonb_build_object('reason', reason)
                    || CASE WHEN compensate THEN '{"compensate": true}'::jsonb ELSE '{}'::jsonb END)::text, 'UTF8'),
        actor, NULL, gen_random_uuid());
    IF fact IS NULL THEN
        RAISE EXCEPTION 'no run with id %', quote_nullable(run) USING ERRCODE = 'no_data_found';
    END IF;
    RETURN fact;
END $$;

-- One run by its id, at its highest nesting, with its result and error: for whoever knows the id.
CREATE FUNCTION {schema}.lookup(
    INOUT id text, OUT no bigint, OUT nesting int, OUT task text, OUT version int, OUT queue text, OUT priority smallint,
    OUT state text, OUT reason text, OUT paused_at timestamptz, OUT failures int, OUT crashes int,
    OUT wake_at timestamptz, OUT cancel_at timestamptz, OUT ref text, OUT attributes jsonb, OUT result bytea,
    OUT error bytea, OUT codec smallint, OUT created_at timestamptz, OUT finished_at timestamptz, OUT retry_of text,
    OUT fork_of text, OUT generation int, OUT continued_at timestamptz, OUT compensate_at timestamptz, OUT status text,
    OUT done double precision, OUT total double precision, OUT noted_at timestamptz)
    RETURNS SETOF record LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp
BEGIN ATOMIC
    SELECT r.id, r.no, r.nesting, r.task, r.version, r.queue, r.priority, r.state, r.reason, r.paused_at, r.failures,
           r.crashes, r.wake_at, r.cancel_at, r.ref, r.attributes, r.result, r.error, r.codec, r.created_at,
           r.finished_at, (SELECT o.id FROM {schema}.run AS o WHERE o.no = r.retry_of),
           (SELECT o.id FROM {schema}.run AS o WHERE o.no = r.fork_of), r.generation, r.continued_at, r.compensate_at,
           p.status, p.done, p.total, p.at
      FROM {schema}.run AS r LEFT JOIN {schema}.progress AS p ON p.run = r.no AND p.key = '' WHERE r.id = lookup.id ORDER BY r.nesting DESC LIMIT 1;
END;

CREATE VIEW {schema}.run_view AS
    SELECT r.no, r.id, r.nesting, r.task, r.version, r.queue, r.priority, r.state, r.reason, r.paused_at, r.failures,
           r.crashes, r.wake_at, r.cancel_at, r.ref, r.attributes, r.created_at, r.finished_at, r.worker, r.deliver_by,
           r.redelivers, r.expires_at, r.parent_no, r.parent_key,
           (SELECT o.id FROM {schema}.run AS o WHERE o.no = r.retry_of) AS retry_of,
           (SELECT o.id FROM {schema}.run AS o WHERE o.no = r.fork_of) AS fork_of, r.generation, r.continued_at, r.compensate_at,
           p.status, p.done, p.total, p.at AS noted_at
      FROM {schema}.run AS r LEFT JOIN {schema}.progress AS p ON p.run = r.no AND p.key = '';

-- Of a failed attempt the type of what was raised, without its text; of a lost one why it counts as lost.
CREATE VIEW {schema}.attempt_view AS
    SELECT run, fence, worker, claimed_at, ended_at, outcome,
           CASE WHEN outcome = 'failed' THEN split_part(error, ':', 1) ELSE error END AS error
      FROM {schema}.attempt;

CREATE VIEW {schema}.step_view AS
    SELECT run, key, seq, kind, state, failures, fence, wake_at, started_at, finished_at, undo FROM {schema}.step;

CREATE VIEW {schema}.progress_view AS
    SELECT run, key, nullif(status, '') AS status, done, total, at FROM {schema}.progress;

CREATE VIEW {schema}.wait_view AS
    SELECT run, key, seq, name, address, mode, deadline, state, fact, part_of, need, created_at, settled_at
      FROM {schema}.wait;

CREATE VIEW {schema}.fact_view AS
    SELECT id, address, name, actor, dedupe, at, routed_at FROM {schema}.fact;

CREATE VIEW {schema}.outbox_view AS
    SELECT id, type, run, ordinal, status, priority, next_attempt_at, attempts, reason, idempotency_key, created_at,
           published_at, step, once, leaving_at
      FROM {schema}.outbox_event;

CREATE VIEW {schema}.op_view AS
    SELECT namespace, op_key, state, run, fence, turn, is_clear, cardinality(waiting) AS waiting, actor, comment, began_at,
           taken_at, settled_at
      FROM {schema}.op_ledger;

CREATE VIEW {schema}.worker_view AS
    SELECT id, node, pid, host, lease_until, started_at, versions, queues, reserved, counters, last_claim_at
      FROM {schema}.worker;

CREATE VIEW {schema}.key_view AS
    SELECT task, key, run, expires_at, created_at FROM {schema}.idempotency_key;

CREATE VIEW {schema}.pause_view AS
    SELECT scope, name, actor, reason, at, resumed_at FROM {schema}.pause;

CREATE VIEW {schema}.audit_view AS
    SELECT id, act, run, actor, reason, detail, at FROM {schema}.audit;
