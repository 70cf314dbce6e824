-- The pause: tasks and queues whose ready runs are taken by nobody. A row that was resumed stays until maintenance has
-- made the runs due that waited. Runs are not touched by either: one that is being executed goes on.

-- name: pause_all :one
-- Pause a task or queue, with the row of the audit; whether that changed anything. Repeated with the same audit id it
-- says what it said.
-- Locks: pause, then audit. Index: pause_pkey, audit_pkey.
WITH p AS (
    INSERT INTO {schema}.pause AS p (scope, name, actor, reason)
    VALUES (%(scope)s::text, %(name)s::text, %(actor)s::text, %(reason)s::text)
    ON CONFLICT ON CONSTRAINT pause_pkey DO UPDATE
       SET actor = excluded.actor, reason = excluded.reason, at = excluded.at, resumed_at = NULL
     WHERE p.resumed_at IS NOT NULL
    RETURNING p.scope, p.name),
a AS (
    INSERT INTO {schema}.audit (id, act, actor, reason, detail)
    SELECT %(audit)s::uuid, 'pause', %(actor)s::text, %(reason)s::text, p.scope || ' ' || p.name FROM p
    RETURNING id)
SELECT EXISTS (SELECT 1 FROM a) OR EXISTS (SELECT 1 FROM {schema}.audit WHERE id = %(audit)s::uuid)

-- name: resume_all :one
-- Let the runs of a paused task or queue go on, with the row of the audit; whether it was paused.
-- Locks: pause, then audit. Index: pause_pkey, audit_pkey.
WITH p AS (
    UPDATE {schema}.pause SET resumed_at = {schema}.now()
     WHERE scope = %(scope)s AND name = %(name)s AND resumed_at IS NULL
    RETURNING scope, name),
a AS (
    INSERT INTO {schema}.audit (id, act, actor, reason, detail)
    SELECT %(audit)s::uuid, 'resume', %(actor)s::text, %(reason)s::text, p.scope || ' ' || p.name FROM p
    RETURNING id)
SELECT EXISTS (SELECT 1 FROM a) OR EXISTS (SELECT 1 FROM {schema}.audit WHERE id = %(audit)s::uuid)

-- name: list_pauses :many
-- Read what is paused, with the ready runs that wait for it to be resumed, the oldest pause first.
-- Locks: none. Index: none (a small table), run_ready.
SELECT p.scope, p.name, p.actor, p.reason, p.at,
       (SELECT count(*) FROM {schema}.run_view AS r
         WHERE r.state = 'ready' AND r.paused_at IS NULL
           AND CASE p.scope WHEN 'task' THEN r.task = p.name
                            ELSE r.queue = p.name AND NOT starts_with(r.task, 'umt_durable.') END)
  FROM {schema}.pause_view AS p WHERE p.resumed_at IS NULL ORDER BY p.at, p.scope, p.name

-- name: resumed_pauses :many
-- List what was resumed and whose runs may wait yet.
-- Locks: none. Index: none (a small table).
SELECT scope, name, resumed_at FROM {schema}.pause WHERE resumed_at IS NOT NULL ORDER BY resumed_at

-- name: forget_pause :count
-- Forget a pause whose runs go on, unless it was paused or resumed anew.
-- Locks: pause. Index: pause_pkey.
DELETE FROM {schema}.pause WHERE scope = %(scope)s AND name = %(name)s AND resumed_at = %(resumed_at)s

-- name: knows_queue :one
-- Say whether a live worker's task or a run that has not ended has a queue of this name.
-- Locks: none. Index: none (a scan; for people).
SELECT EXISTS (SELECT 1 FROM {schema}.worker_view AS w, jsonb_each_text(w.queues) AS one
                WHERE w.lease_until > {schema}.now() AND one.value = %(name)s)
       OR EXISTS (SELECT 1 FROM {schema}.run_view WHERE queue = %(name)s AND finished_at IS NULL)
