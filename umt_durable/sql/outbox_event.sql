-- The outbox: what has to leave. Rows of ours are deleted when they have left, users' events are kept as dispatched.

-- name: claim_events :many
-- Take up to `limit` due rows for one relay for as long as `hold`. Committed before anything is published: a crash then
-- publishes twice, never zero times (I1). Of a message that may leave once the reply says whether a relay before this one
-- had begun to publish it.
-- Locks: outbox_event (SKIP LOCKED). Index: outbox_event_due.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker WHERE lease_until > {schema}.now()),
c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event
     WHERE status = 'pending' AND next_attempt_at <= (SELECT {schema}.now())
     ORDER BY priority DESC, next_attempt_at, id LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.outbox_event AS o
       SET claim = %(relay)s, next_attempt_at = {schema}.now() + %(hold)s::interval, attempts = attempts + 1
      FROM c WHERE o.id = c.id
    RETURNING o.id, o.type, o.run, o.ordinal, o.payload, o.priority, o.attempts, o.idempotency_key,
              o.created_at, o.trace, o.step, o.once, o.once AND o.leaving_at IS NOT NULL AS doubtful)
SELECT u.id, u.type, u.run, u.ordinal, u.payload, u.attempts, r.id, r.nesting, r.task,
       CASE WHEN r.queue IS NULL AND u.type = 'run' THEN {schema}.queue_of(r.task) ELSE r.queue END, r.priority, r.fence,
       r.state, r.paused_at IS NOT NULL, r.envelope,
       (CASE WHEN u.run IS NULL THEN '@outbox:' || u.type
             WHEN r.version IS NULL THEN r.task ELSE r.task || '@' || r.version END) IN (SELECT version FROM live)
       AND NOT (u.type = 'run' AND EXISTS (
               SELECT 1 FROM {schema}.pause AS p
                WHERE p.resumed_at IS NULL
                  AND CASE p.scope WHEN 'task' THEN p.name = r.task
                      ELSE p.name = coalesce(r.queue, {schema}.queue_of(r.task)) AND NOT starts_with(r.task, 'umt_durable.') END)),
       u.idempotency_key, extract(epoch FROM {schema}.now() - u.created_at)::float8, u.trace, u.step, u.once, u.doubtful
  FROM u LEFT JOIN {schema}.run AS r ON r.no = u.run
 ORDER BY u.priority DESC, u.id

-- name: age_events :count
-- Raise by one step the priority of rows that have been due, or at their step, for a minute while more urgent ones are
-- pending: up to `limit` of each priority, the oldest first. However many processes do it, a row rises once a minute.
-- Locks: outbox_event (ascending, SKIP LOCKED). Index: outbox_event_due, outbox_event_pkey.
WITH RECURSIVE t AS MATERIALIZED (SELECT {schema}.now() - interval '1 minute' AS at),
level AS (
    SELECT max(priority) AS priority FROM {schema}.outbox_event WHERE status = 'pending'
    UNION ALL
    SELECT (SELECT max(o.priority) FROM {schema}.outbox_event AS o WHERE o.status = 'pending' AND o.priority < level.priority)
      FROM level WHERE level.priority IS NOT NULL),
a AS MATERIALIZED (
    SELECT due.id
      FROM t, level,
           LATERAL (SELECT o.id FROM {schema}.outbox_event AS o
                     WHERE o.status = 'pending' AND o.priority = level.priority AND o.next_attempt_at <= t.at
                       AND (o.aged_at IS NULL OR o.aged_at <= t.at)
                     ORDER BY o.next_attempt_at, o.id LIMIT %(limit)s) AS due
     WHERE level.priority < (SELECT max(priority) FROM level)),
c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event
     WHERE id IN (SELECT id FROM a) AND status = 'pending' AND next_attempt_at <= (SELECT at FROM t)
       AND (aged_at IS NULL OR aged_at <= (SELECT at FROM t))
     ORDER BY id FOR UPDATE SKIP LOCKED)
UPDATE {schema}.outbox_event AS o SET priority = priority + 1, aged_at = {schema}.now() FROM c WHERE o.id = c.id

-- name: leave_events :many
-- Note that a relay is about to publish messages of awaited tasks which it has claimed, and hold them anew; those that it
-- may are named: their step still waits, and its run has neither ended nor is to be cancelled.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey, wait_pkey, run_pkey.
WITH c AS MATERIALIZED (
    SELECT o.id FROM {schema}.outbox_event AS o
     WHERE o.id = ANY(%(ids)s) AND o.claim = %(relay)s AND o.status = 'pending' ORDER BY o.id FOR UPDATE)
UPDATE {schema}.outbox_event AS o
   SET leaving_at = {schema}.now(), next_attempt_at = {schema}.now() + %(hold)s::interval
  FROM c, {schema}.wait AS w, {schema}.run AS r
 WHERE o.id = c.id AND w.run = o.run AND w.key = 'umt.task/' || o.step AND w.state = 'pending'
   AND r.no = o.run AND r.finished_at IS NULL AND r.cancel_at IS NULL
RETURNING o.id

-- name: doubt_event :count
-- Put aside a message of which nobody knows whether it left, and which must not leave twice.
-- Locks: run, wait (held), then outbox_event. Index: outbox_event_pkey.
UPDATE {schema}.outbox_event SET status = 'dead', claim = NULL, reason = %(reason)s
 WHERE id = %(id)s AND claim = %(relay)s AND status = 'pending' AND once

-- name: drop_left :count
-- Forget messages that have left and may not do so twice, whoever holds their rows by now.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event WHERE id = ANY(%(ids)s) AND once ORDER BY id FOR UPDATE)
DELETE FROM {schema}.outbox_event AS o USING c WHERE o.id = c.id

-- name: drop_answered :count
-- Forget messages that were put aside, of steps that wait no more.
-- Locks: outbox_event (SKIP LOCKED). Index: outbox_event_dead, wait_pkey.
WITH c AS MATERIALIZED (
    SELECT o.id FROM {schema}.outbox_event AS o
     WHERE o.status = 'dead' AND o.step IS NOT NULL
       AND NOT EXISTS (SELECT 1 FROM {schema}.wait AS w
                        WHERE w.run = o.run AND w.key = 'umt.task/' || o.step AND w.state = 'pending')
     LIMIT %(limit)s FOR UPDATE SKIP LOCKED)
DELETE FROM {schema}.outbox_event AS o USING c WHERE o.id = c.id

-- name: delete_events :count
-- Forget rows that have left, if no one has taken them since.
-- Locks: outbox_event (ascending: fresh hints after a loss lock the same rows). Index: outbox_event_pkey.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event WHERE id = ANY(%(ids)s) AND claim = %(relay)s ORDER BY id FOR UPDATE)
DELETE FROM {schema}.outbox_event AS o USING c WHERE o.id = c.id

-- name: delete_claimed :count
-- Forget the rows that finished attempts published themselves.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey (ids are derived from the finish).
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event WHERE id = ANY(%(ids)s) AND claim = ANY(%(claims)s) ORDER BY id FOR UPDATE)
DELETE FROM {schema}.outbox_event AS o USING c WHERE o.id = c.id

-- name: return_events :count
-- Give rows back after an outage of the broker, without using up one of their attempts. They have not left, but for those
-- that perhaps have.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event WHERE id = ANY(%(ids)s) AND claim = %(relay)s ORDER BY id FOR UPDATE)
UPDATE {schema}.outbox_event AS o
   SET claim = NULL, attempts = attempts - 1, next_attempt_at = {schema}.now() + %(delay)s::interval,
       leaving_at = CASE WHEN o.id = ANY(%(perhaps)s::uuid[]) THEN leaving_at END
  FROM c WHERE o.id = c.id

-- name: refuse_event :maybe
-- Put a row that alone was refused back for later, or, after its last attempt, aside as dead with the reason.
-- Locks: outbox_event. Index: outbox_event_pkey.
UPDATE {schema}.outbox_event
   SET claim = NULL, reason = %(reason)s, next_attempt_at = {schema}.now() + %(delay)s::interval, leaving_at = NULL,
       status = CASE WHEN attempts >= %(max_attempts)s THEN 'dead' ELSE 'pending' END
 WHERE id = %(id)s AND claim = %(relay)s AND status = 'pending'
RETURNING status

-- name: dispatch_events :count
-- Keep users' events as dispatched, with the run they started, if no one has taken them since. The claim stays, so that a
-- repetition finds them again.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey, run_id_nesting.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event
     WHERE id = ANY(%(ids)s) AND claim = %(relay)s AND status <> 'dead' ORDER BY id FOR UPDATE)
UPDATE {schema}.outbox_event AS o
   SET status = 'dispatched', reason = NULL, published_at = coalesce(o.published_at, {schema}.now()),
       run = coalesce((SELECT max(no) FROM {schema}.run WHERE run.id = %(run)s), o.run)
  FROM c WHERE o.id = c.id

-- name: replay_events :count
-- Put up to `limit` dead rows back, as if they had never been tried: one, those of some types, or those whose reason
-- begins with a text. One that may have left, and may not twice, is put back alone: somebody has looked.
-- Locks: outbox_event (ascending). Index: outbox_event_dead, outbox_event_pkey.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event
     WHERE status = 'dead' AND (%(id)s::uuid IS NULL OR id = %(id)s) AND (%(types)s::text[] IS NULL OR type = ANY(%(types)s))
       AND (%(prefix)s::text IS NULL OR starts_with(reason, %(prefix)s))
       AND (id = %(id)s OR NOT (once AND leaving_at IS NOT NULL))
     ORDER BY id LIMIT %(limit)s FOR UPDATE)
UPDATE {schema}.outbox_event AS o
   SET status = 'pending', attempts = 0, claim = NULL, aged_at = NULL, leaving_at = NULL, next_attempt_at = {schema}.now()
  FROM c WHERE o.id = c.id

-- name: get_event :maybe
-- Read one row, with the id of its run.
-- Locks: none. Index: outbox_event_pkey, run_pkey.
SELECT o.id, o.type, o.status, o.payload, r.id, o.attempts, o.reason, o.idempotency_key, o.created_at, o.next_attempt_at,
       o.published_at
  FROM {schema}.outbox_event AS o LEFT JOIN {schema}.run AS r ON r.no = o.run WHERE o.id = %(id)s

-- name: dead_rows :many
-- Read a page of dead rows, the newest first.
-- Locks: none. Index: outbox_event_dead, run_pkey.
SELECT o.id, o.type, o.status, o.payload, r.id, o.attempts, o.reason, o.idempotency_key, o.created_at, o.next_attempt_at,
       o.published_at
  FROM {schema}.outbox_event AS o LEFT JOIN {schema}.run AS r ON r.no = o.run
 WHERE o.status = 'dead' AND (%(type)s::text IS NULL OR o.type = %(type)s)
   AND (%(at)s::timestamptz IS NULL OR (o.created_at, o.id) < (%(at)s, %(before)s::uuid))
 ORDER BY o.created_at DESC, o.id DESC LIMIT %(limit)s

-- name: report_again :maybe
-- Put the result of a terminal run back into the outbox, also when its row is being deleted at this moment: the claim is
-- reset, so that the deletion misses it. A dead row is revived.
-- Locks: run (read), outbox_event. Index: run_pkey, outbox_event_pkey.
INSERT INTO {schema}.outbox_event (id, type, run, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'result', 0), 'result', no, {schema}.now() FROM {schema}.run WHERE no = %(run)s AND finished_at IS NOT NULL
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
   SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at
RETURNING run

-- name: keep_callback :count
-- Store a callback that stands in its row, for a run that this transaction has just ended, claimed by the finisher, who
-- publishes it.
-- Locks: run (held), outbox_event. Index: run_pkey, outbox_event_pkey.
INSERT INTO {schema}.outbox_event (id, type, run, payload, claim, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'callback', 0), 'callback', no, %(payload)s::bytea, %(claim)s::uuid,
       {schema}.now() + %(hold)s::interval
  FROM {schema}.run WHERE no = %(run)s AND finished_at IS NOT NULL
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING

-- name: emit_event :one
-- Keep a user's event; say whether it was made, was there, or was there with another payload.
-- Locks: outbox_event. Index: outbox_event_pkey.
SELECT event, outcome FROM {schema}.emit_event(%(type)s, %(payload)s, %(key)s, %(event)s, %(trace)s::text::jsonb)

-- name: keep_message :one
-- Keep a message of ordinary Celery tasks, to be published when it is due; false where its id is there already.
-- Locks: outbox_event. Index: outbox_event_pkey.
SELECT {schema}.keep_message(%(id)s, %(payload)s, %(due)s, %(delay)s::interval, %(trace)s::text::jsonb)

-- name: keep_step_message :count
-- Keep the message of a task that a step awaits, in the transaction that writes the step: it leaves while the step waits,
-- and `once` means that it must not leave twice.
-- Locks: run FOR SHARE (held), outbox_event. Index: outbox_event_pkey.
INSERT INTO {schema}.outbox_event (id, type, run, step, once, payload, next_attempt_at, created_at, trace)
SELECT %(id)s::uuid, 'celery', %(run)s::bigint, %(step)s::text, %(once)s::boolean, %(payload)s::bytea,
       greatest(t.at, coalesce(%(due)s::timestamptz, t.at + %(delay)s::interval)), t.at, %(trace)s::text::jsonb
  FROM (SELECT {schema}.now() AS at) AS t
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING

-- name: withdraw_message :maybe
-- Take back the message of an awaited task that no relay has begun to publish, under the grant. The reply: cancel pending,
-- taken back now.
-- Locks: run FOR SHARE, then outbox_event. Index: run_pkey, outbox_event_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
o AS (
    DELETE FROM {schema}.outbox_event AS o USING r
     WHERE o.id = %(id)s AND o.run = r.no AND o.leaving_at IS NULL
    RETURNING 1)
SELECT cancel_at IS NOT NULL, EXISTS (SELECT 1 FROM o) FROM r

-- name: forget_unsent :count
-- Forget messages of awaited tasks that no relay has begun to publish.
-- Locks: outbox_event (ascending). Index: outbox_event_pkey.
WITH c AS MATERIALIZED (
    SELECT id FROM {schema}.outbox_event WHERE id = ANY(%(ids)s) AND leaving_at IS NULL ORDER BY id FOR UPDATE)
DELETE FROM {schema}.outbox_event AS o USING c WHERE o.id = c.id

-- name: outbox_status :one
-- Count pending and dead rows and say how long the oldest due row has waited, in seconds. Events that were dispatched
-- may be many: they are not read.
-- Locks: none. Index: outbox_event_due, outbox_event_dead.
SELECT pending.rows, (SELECT count(*) FROM {schema}.outbox_view WHERE status = 'dead'), pending.seconds
  FROM (SELECT count(*) AS rows, coalesce(extract(epoch FROM {schema}.now() - min(next_attempt_at)), 0)::float8 AS seconds
          FROM {schema}.outbox_view WHERE status = 'pending') AS pending
