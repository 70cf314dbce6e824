-- The run: one row per durable call. Parameters that recur: run (its no), fence and claim (the fencing token of an
-- attempt), deliver (how long a hint may take before it counts as lost).

-- name: enqueue_run :one
-- Insert a ready (or, with a due time ahead, sleeping) run and its hint; or say which run owns the key or id already.
-- Locks: none that another transaction waits for but one with the same key or id. Index: run_id_nesting, idempotency_key_pkey.
SELECT run, no, outcome
  FROM {schema}.enqueue_run(%(id)s::text, %(nesting)s::int, %(task)s::text, %(version)s::int, %(queue)s::text, %(priority)s::int, %(args)s::bytea,
           %(codec)s::int, %(digest)s::bytea, %(envelope)s::bytea, %(wake_at)s::timestamptz, %(delay)s::interval, %(expires_at)s::timestamptz,
           %(expires_in)s::interval, %(ref)s::text, %(attributes)s::text::jsonb, %(deliver)s::interval, %(key)s::text, %(key_hash)s::bytea, %(key_ttl)s::interval)

-- name: intake_run :maybe
-- Insert the run of a foreign message, once per (id, nesting). The message in hand is its first hint, so none is written.
-- The clock is read once: read twice, a due time in between would make a sleeping run that is never due.
-- Locks: none. Index: run_id_nesting.
WITH t AS MATERIALIZED (SELECT {schema}.now() AS at, %(wake_at)s::timestamptz AS due)
INSERT INTO {schema}.run (id, nesting, task, queue, priority, state, args, codec, digest, envelope, wake_at, deliver_by, expires_at)
SELECT %(id)s::text, %(nesting)s::int, %(task)s::text, %(queue)s::text, %(priority)s::int,
       CASE WHEN due > at THEN 'sleeping' ELSE 'ready' END, %(args)s::bytea, %(codec)s::int, %(digest)s::bytea, %(envelope)s::bytea,
       CASE WHEN due > at THEN due END, at + %(deliver)s::interval, %(expires_at)s::timestamptz
  FROM t
ON CONFLICT ON CONSTRAINT run_id_nesting DO NOTHING
RETURNING no

-- name: claim_run :maybe
-- Give a ready run to a worker with a live lease and raise its fence. Repeated with the same claim it gives the same grant.
-- What `is_paused` says is asked here in its own words: a call would cost a tenth of a millisecond.
-- Locks: run, then attempt. Index: run_id_nesting.
WITH c AS (
    UPDATE {schema}.run
       SET state = 'running', fence = fence + (state = 'ready')::int, claim = %(claim)s, worker = %(worker)s,
           version = coalesce(version, %(version)s), queue = coalesce(queue, {schema}.queue_of(task)),
           wake_at = NULL, expires_at = NULL, redelivers = 0, attempt_deadline = {schema}.now() + %(limit)s::interval
     WHERE id = %(id)s AND nesting = %(nesting)s AND task = %(task)s
       AND (version = ANY(%(versions)s::int[]) OR (version IS NULL AND %(new)s))
       AND ((state = 'ready' AND paused_at IS NULL AND (wake_at IS NULL OR wake_at <= {schema}.now())
             AND (expires_at IS NULL OR expires_at > {schema}.now())
             AND NOT EXISTS (SELECT 1 FROM {schema}.pause AS p
                              WHERE p.resumed_at IS NULL
                                AND CASE p.scope WHEN 'task' THEN p.name = task
                                    ELSE p.name = coalesce(queue, {schema}.queue_of(task)) AND NOT starts_with(task, 'umt_durable.') END))
            OR (state = 'running' AND claim = %(claim)s))
       AND EXISTS (SELECT 1 FROM {schema}.worker WHERE id = %(worker)s AND lease_until > {schema}.now())  -- no fence: the sweeper finds a dead lease anyway
    RETURNING no, fence, cancel_at IS NOT NULL AS cancel, failures, crashes, version, priority, args, codec, digest, envelope,
              extract(epoch FROM {schema}.now() - created_at)::float8 AS age, queue, generation,
              extract(epoch FROM {schema}.now() - coalesce(continued_at, created_at))::float8 AS generation_age,
              compensate_at IS NOT NULL AND cancel_at IS NULL AS compensates),
a AS (
    INSERT INTO {schema}.attempt (run, fence, claim, worker, claimed_at)
    SELECT no, fence, %(claim)s, %(worker)s, {schema}.now() FROM c
    ON CONFLICT ON CONSTRAINT attempt_pkey DO NOTHING)
SELECT no, fence, cancel, failures, crashes, version, priority, args, codec, digest, envelope, age, queue, generation, generation_age, compensates FROM c

-- name: pin_input :maybe
-- Record what a run that SQL started was given, now that it is validated: its digest, and of its idempotency key the hash
-- that later starts are compared to. A key that somebody holds is being taken over after its time: it is left alone.
-- Locks: run FOR UPDATE, then idempotency_key (SKIP LOCKED). Index: run_pkey, idempotency_key_open.
WITH r AS MATERIALIZED (
    SELECT no, id, task FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR UPDATE),
k AS MATERIALIZED (
    SELECT k.task, k.key FROM {schema}.idempotency_key AS k, r
     WHERE k.run = r.id AND k.task = r.task AND k.input_hash IS NULL AND k.task <> ''
       FOR UPDATE OF k SKIP LOCKED),
h AS (
    UPDATE {schema}.idempotency_key AS i SET input_hash = %(key_hash)s FROM k WHERE i.task = k.task AND i.key = k.key)
UPDATE {schema}.run SET digest = %(digest)s FROM r WHERE run.no = r.no
RETURNING run.no

-- name: prove_grant :maybe
-- Say whether a cancel is pending, if the grant still holds. The row lock makes the answer a proof (I7).
-- Locks: run FOR SHARE. Index: run_pkey.
SELECT cancel_at IS NOT NULL
  FROM {schema}.run
 WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
   FOR SHARE

-- name: lock_grant :maybe
-- The same with the run locked against router, timers and take-over until the caller's commit.
-- Locks: run FOR UPDATE. Index: run_pkey.
SELECT cancel_at IS NOT NULL
  FROM {schema}.run
 WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
   FOR UPDATE

-- name: suspend_run :maybe
-- End the grant with the run parked until the earliest of the steps and waits it is blocked on, and of the next poll
-- (none: until a fact). A run that is to sleep for something which is over meanwhile is due at once.
-- Refuses, with no row, when the grant has ended or a cancel is pending.
-- Locks: run, then attempt. Index: run_pkey, step_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running' AND cancel_at IS NULL
       FOR UPDATE),
due AS (
    SELECT min(at) AS at
      FROM (SELECT wake_at AS at FROM {schema}.step WHERE run = %(run)s AND key = ANY(%(steps)s) AND state = 'started'
            UNION ALL
            SELECT deadline FROM {schema}.wait WHERE run = %(run)s AND key = ANY(%(waits)s) AND state = 'pending') AS open),
u AS (
    UPDATE {schema}.run
       SET state = %(state)s,
           wake_at = coalesce(least(due.at, {schema}.now() + %(poll)s::interval), CASE WHEN %(state)s <> 'waiting' THEN {schema}.now() END),
           fence = run.fence + 1, claim = NULL, worker = NULL, crashes = 0, attempt_deadline = NULL
      FROM r, due WHERE run.no = r.no
    RETURNING run.no, run.wake_at)
UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'suspended'
  FROM r, u WHERE attempt.run = r.no AND attempt.fence = r.fence
RETURNING u.wake_at

-- name: ripe_of_run :many
-- List those of the steps and waits that branches of a run are blocked on which are over, or due.
-- Locks: none. Index: step_pkey, wait_pkey.
SELECT key FROM {schema}.step
 WHERE run = %(run)s AND key = ANY(%(steps)s::text[]) AND (state <> 'started' OR wake_at <= {schema}.now())
UNION ALL
SELECT key FROM {schema}.wait
 WHERE run = %(run)s AND key = ANY(%(waits)s::text[]) AND (state <> 'pending' OR deadline <= {schema}.now())

-- name: hand_over_run :maybe
-- End the grant of a process that shuts down, with the run ready at once and a hint; its crashes stay as they are. Only
-- its owner says this, outside any body, so no proof outlives it. Refuses, with no row, when a cancel is pending.
-- Locks: run, then attempt, then outbox_event. Index: run_pkey, attempt_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running' AND cancel_at IS NULL
       FOR UPDATE),
u AS (
    UPDATE {schema}.run
       SET state = 'ready', wake_at = NULL, fence = run.fence + 1, claim = NULL, worker = NULL, redelivers = 0,
           attempt_deadline = NULL, deliver_by = {schema}.now() + %(deliver)s::interval
      FROM r WHERE run.no = r.no
    RETURNING run.no, run.fence, run.priority),
a AS (
    UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'suspended'
      FROM r WHERE attempt.run = r.no AND attempt.fence = r.fence)
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING
RETURNING run

-- name: retry_run :maybe
-- End the grant after a failure of the body, with the run due again after its back-off. The failure counts for the run.
-- Arguments that are given replace those of the run: the body asked to be tried again with others.
-- Locks: run, then attempt. Index: run_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running' AND cancel_at IS NULL
       FOR UPDATE),
u AS (
    UPDATE {schema}.run
       SET state = 'retrying', wake_at = {schema}.now() + %(delay)s::interval, failures = failures + 1, error = %(error)s,
           fence = run.fence + 1, claim = NULL, worker = NULL, crashes = 0, attempt_deadline = NULL,
           args = coalesce(%(args)s::bytea, args), codec = coalesce(%(codec)s::smallint, codec),
           digest = CASE WHEN %(args)s::bytea IS NULL THEN digest ELSE %(digest)s::bytea END
      FROM r WHERE run.no = r.no
    RETURNING run.no, run.wake_at)
UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'failed', error = %(summary)s
  FROM r, u WHERE attempt.run = r.no AND attempt.fence = r.fence
RETURNING u.wake_at

-- name: continue_run :maybe
-- End the grant with the run ready for its next generation: other arguments, and nothing of the one before it but the
-- facts it has not read. Those that a wait took and the body was given are noted as read; a wait of mode `latest` reads
-- all up to the one it took. `unread` are the waits that were settled without the body knowing. Of earlier attempts those
-- that were lost stay: their processes may live. Refuses, with no row, when the grant has ended or a cancel is pending.
-- Locks: run (held), then attempt, step, progress, wait, fact_read, then outbox_event. Index: run_pkey, attempt_pkey, step_pkey, progress_pkey, wait_pkey, fact_address.
WITH r AS MATERIALIZED (
    SELECT no, fence, created_at, snapshot FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running' AND cancel_at IS NULL
       FOR UPDATE),
u AS (
    UPDATE {schema}.run
       SET state = 'ready', generation = run.generation + 1, continued_at = {schema}.now(), version = coalesce(%(version)s::int, run.version),
           args = %(args)s, codec = %(codec)s, digest = %(digest)s, failures = 0, crashes = 0, reason = NULL, error = NULL,
           wake_at = NULL, fence = run.fence + 1, claim = NULL, worker = NULL, redelivers = 0, attempt_deadline = NULL,
           deliver_by = {schema}.now() + %(deliver)s::interval
      FROM r WHERE run.no = r.no
    RETURNING run.no, run.fence, run.priority, run.generation),
a AS (
    UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'suspended'
      FROM r WHERE attempt.run = r.no AND attempt.fence = r.fence),
b AS (
    DELETE FROM {schema}.attempt USING r WHERE attempt.run = r.no AND attempt.fence < r.fence AND attempt.outcome <> 'lost'),
s AS (
    DELETE FROM {schema}.step USING r WHERE step.run = r.no),
p AS (
    DELETE FROM {schema}.progress USING r WHERE progress.run = r.no),
w AS (
    DELETE FROM {schema}.wait USING r WHERE wait.run = r.no
    RETURNING wait.key, wait.address, wait.mode, wait.state, wait.fact, wait.part_of),
t AS (
    SELECT w.address, w.mode, w.fact FROM w LEFT JOIN w AS g ON g.key = w.part_of
     WHERE w.fact IS NOT NULL AND w.mode NOT IN ('join', 'task') AND NOT w.key = ANY(%(unread)s::text[])
       AND coalesce(g.state, w.state) = 'satisfied'),
f AS (
    INSERT INTO {schema}.fact_read (run, fact)
    SELECT r.no, t.fact FROM r, t
    UNION
    SELECT r.no, o.id
      FROM r CROSS JOIN t JOIN {schema}.fact AS l ON l.id = t.fact JOIN {schema}.fact AS o ON o.address = t.address AND o.at <= l.at
     WHERE t.mode = 'latest' AND (t.address LIKE '["run",%%' OR o.at >= r.created_at OR {schema}.ended_after(o.xid, r.snapshot))
    ON CONFLICT ON CONSTRAINT fact_read_pkey DO NOTHING),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT generation FROM u

-- name: quarantine_run :maybe
-- End the grant with the run parked for a person.
-- Locks: run, then attempt. Index: run_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running' AND cancel_at IS NULL
       FOR UPDATE),
u AS (
    UPDATE {schema}.run
       SET state = 'quarantined', reason = %(reason)s, error = %(error)s, wake_at = NULL,
           fence = run.fence + 1, claim = NULL, worker = NULL, attempt_deadline = NULL
      FROM r WHERE run.no = r.no)
UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'failed', error = %(summary)s
  FROM r WHERE attempt.run = r.no AND attempt.fence = r.fence
RETURNING attempt.run

-- name: insert_children :one
-- Insert the child runs of a step and their hints, under the parent's grant; repeated, nothing. Their number is given back.
-- Locks: run FOR SHARE (the parent), then run, outbox_event (new rows). Index: run_pkey, run_id_nesting.
WITH r AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
n AS (
    INSERT INTO {schema}.run (id, nesting, task, version, queue, priority, args, codec, digest, envelope, deliver_by,
                              parent_no, parent_key, parent_index, on_parent_end)
    SELECT c.id, 0, c.task, c.version, c.queue, c.priority, c.args, c.codec, c.digest, c.envelope,
           {schema}.now() + %(deliver)s::interval, r.no, %(key)s::text, %(first)s::int + c.place - 1, %(on_parent_end)s
      FROM r, unnest(%(ids)s::text[], %(tasks)s::text[], %(versions)s::int[], %(queues)s::text[], %(priorities)s::int[], %(args)s::bytea[],
                     %(codecs)s::int[], %(digests)s::bytea[], %(envelopes)s::bytea[])
             WITH ORDINALITY AS c (id, task, version, queue, priority, args, codec, digest, envelope, place)
    ON CONFLICT ON CONSTRAINT run_id_nesting DO NOTHING
    RETURNING no, priority),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, 0, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM n
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT count(*) FROM n

-- name: hand_on_parent :count
-- Make the run that takes a child's place the child, in the transaction that ends the other.
-- Locks: run (both, inserted or ended by this transaction). Index: run_id_nesting, run_pkey.
WITH o AS (
    SELECT no, parent_no, parent_key, parent_index, on_parent_end FROM {schema}.run WHERE no = %(run)s AND parent_no IS NOT NULL),
n AS (
    UPDATE {schema}.run SET parent_no = o.parent_no, parent_key = o.parent_key, parent_index = o.parent_index, on_parent_end = o.on_parent_end
      FROM o WHERE run.id = %(id)s AND run.nesting = %(nesting)s AND run.no <> o.no
    RETURNING 1)
UPDATE {schema}.run SET parent_key = NULL, on_parent_end = NULL FROM o WHERE run.no = o.no AND EXISTS (SELECT 1 FROM n)

-- name: children_of_step :many
-- Read the children of a step in the order they were asked for.
-- Locks: none. Index: run_children.
SELECT id, task, state, reason, result, error, codec FROM {schema}.run
 WHERE parent_no = %(run)s AND parent_key = %(key)s ORDER BY parent_index

-- name: is_joined :one
-- Say whether no child of a step is live.
-- Locks: none. Index: run_unfinished.
SELECT NOT EXISTS (SELECT 1 FROM {schema}.run WHERE parent_no = %(run)s AND parent_key = %(key)s AND finished_at IS NULL)

-- name: finish_run :maybe
-- Make the run terminal (cancelled if a cancel is pending or has been compensated), close the attempt, and store what has
-- to leave. Refuses, with no row, when something is to be undone first. What has to leave: the result
-- and one row per callback, claimed by the finisher, who publishes them itself; a second result row where an attempt was
-- lost, since its process may yet overwrite the backend.
-- Locks: run, then attempt, then outbox_event. Index: run_pkey, attempt_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence, cancel_at IS NOT NULL OR compensate_at IS NOT NULL AS cancel, compensate_at IS NOT NULL AND cancel_at IS NULL AS undone
      FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       AND NOT (compensate_at IS NOT NULL AND {schema}.has_undos(no))
       FOR UPDATE),
u AS (
    UPDATE {schema}.run
       SET cancel_at = CASE WHEN r.undone THEN compensate_at ELSE cancel_at END, reason = CASE WHEN r.undone THEN compensate_reason ELSE run.reason END,
           compensate_at = CASE WHEN r.undone THEN compensate_at END,
           state = CASE WHEN r.cancel THEN 'cancelled' ELSE %(state)s END, fence = run.fence + 1, claim = NULL, worker = NULL,
           result = CASE WHEN r.cancel THEN NULL ELSE %(result)s::bytea END, error = CASE WHEN r.cancel THEN run.error ELSE %(error)s::bytea END,
           failures = failures + (%(state)s = 'failed')::int, wake_at = NULL, attempt_deadline = NULL, finished_at = {schema}.now()
      FROM r WHERE run.no = r.no
    RETURNING run.no, run.fence, run.state),
a AS (
    UPDATE {schema}.attempt
       SET ended_at = {schema}.now(), error = %(summary)s,
           outcome = CASE u.state WHEN 'cancelled' THEN 'cancelled' WHEN 'failed' THEN 'failed' ELSE 'completed' END
      FROM r, u WHERE attempt.run = r.no AND attempt.fence = r.fence),
w AS (
    UPDATE {schema}.wait SET state = 'cancelled', settled_at = {schema}.now() FROM u WHERE wait.run = u.no AND wait.state = 'pending'),
f AS (
    -- One fact for whoever awaits this child, and a cancel for each child that is not to outlive it.
    INSERT INTO {schema}.fact (id, address, name, payload)
    SELECT {schema}.event_id(u.no, u.fence, 'join', 0), jsonb_build_array('join', run.parent_no, run.parent_key)::text, 'umt.join', NULL
      FROM u JOIN {schema}.run ON run.no = u.no WHERE run.parent_no IS NOT NULL AND run.parent_key IS NOT NULL
    UNION ALL
    SELECT {schema}.event_id(c.no, u.fence, 'close', 0), jsonb_build_array('run', c.id, 'umt.cancel')::text, 'umt.cancel',
           convert_to('{"reason": "its parent has ended"}', 'UTF8')
      FROM u JOIN {schema}.run AS c ON c.parent_no = u.no AND c.finished_at IS NULL AND c.on_parent_end = 'cancel'
    ON CONFLICT ON CONSTRAINT fact_pkey DO NOTHING),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, ordinal, claim, next_attempt_at)
    SELECT {schema}.event_id(u.no, u.fence, row.type, row.ordinal), row.type, u.no, row.ordinal, row.claim, {schema}.now() + row.due
      FROM u,
           (SELECT 'result' AS type, 0 AS ordinal, %(claim)s::uuid AS claim, %(hold)s::interval AS due WHERE %(report)s
            UNION ALL
            SELECT 'callback', n, %(claim)s::uuid, %(hold)s::interval
              FROM generate_series(0, %(callbacks)s::int - 1) AS n
            UNION ALL
            SELECT 'result', 1, NULL, %(repair)s::interval
             WHERE %(report)s AND EXISTS (SELECT 1 FROM {schema}.attempt WHERE run = %(run)s AND outcome = 'lost')) AS row
     WHERE row.type = 'result' OR u.state <> 'cancelled'
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT state FROM u

-- name: cancel_parked_run :maybe
-- Finalise a run nobody owns, whose row the caller has locked: terminal, waits closed, its result on the way. One that
-- has something to undo first is left as it is.
-- Locks: run (held), then wait, then outbox_event. Index: run_pkey.
WITH u AS (
    UPDATE {schema}.run
       SET state = 'cancelled', fence = fence + 1, claim = NULL, worker = NULL, wake_at = NULL, attempt_deadline = NULL,
           reason = CASE WHEN cancel_at IS NULL THEN %(reason)s::text ELSE coalesce(%(reason)s::text, reason) END,
           cancel_at = coalesce(cancel_at, {schema}.now()), compensate_at = NULL, finished_at = {schema}.now()
     WHERE no = %(run)s AND finished_at IS NULL AND NOT (compensate_at IS NOT NULL AND (cancel_at IS NULL OR {schema}.has_undos(no)))
    RETURNING no, fence),
a AS (
    UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'lost'
      FROM u WHERE attempt.run = u.no AND attempt.outcome IS NULL),
w AS (
    UPDATE {schema}.wait SET state = 'cancelled', settled_at = {schema}.now()
      FROM u WHERE wait.run = u.no AND wait.state = 'pending'),
f AS (
    -- One fact for whoever awaits this child, and a cancel for each child that is not to outlive it.
    INSERT INTO {schema}.fact (id, address, name, payload)
    SELECT {schema}.event_id(u.no, u.fence, 'join', 0), jsonb_build_array('join', run.parent_no, run.parent_key)::text, 'umt.join', NULL
      FROM u JOIN {schema}.run ON run.no = u.no WHERE run.parent_no IS NOT NULL AND run.parent_key IS NOT NULL
    UNION ALL
    SELECT {schema}.event_id(c.no, u.fence, 'close', 0), jsonb_build_array('run', c.id, 'umt.cancel')::text, 'umt.cancel',
           convert_to('{"reason": "its parent has ended"}', 'UTF8')
      FROM u JOIN {schema}.run AS c ON c.parent_no = u.no AND c.finished_at IS NULL AND c.on_parent_end = 'cancel'
    ON CONFLICT ON CONSTRAINT fact_pkey DO NOTHING),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, ordinal, next_attempt_at)
    SELECT {schema}.event_id(u.no, u.fence, 'result', row.ordinal), 'result', u.no, row.ordinal, {schema}.now() + row.due
      FROM u,
           (SELECT 0 AS ordinal, interval '0' AS due
            UNION ALL
            SELECT 1, %(repair)s::interval WHERE EXISTS (SELECT 1 FROM {schema}.attempt WHERE run = %(run)s)) AS row
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT no FROM u

-- name: flag_cancel :maybe
-- Ask the owner of a running run, whose row the caller has locked, to stop; what comes of it is fixed by the first who
-- asks: an end, or (`compensate`) the undos first. One whose undos are being executed is left to them.
-- Locks: run (held). Index: run_pkey.
UPDATE {schema}.run
   SET compensate_at = CASE WHEN %(compensate)s AND cancel_at IS NULL THEN {schema}.now() ELSE compensate_at END,
       compensate_reason = CASE WHEN %(compensate)s AND cancel_at IS NULL THEN %(reason)s::text ELSE compensate_reason END,
       cancel_at = coalesce(cancel_at, {schema}.now()), reason = coalesce(%(reason)s::text, reason)
 WHERE no = %(run)s AND state = 'running' AND NOT (compensate_at IS NOT NULL AND cancel_at IS NULL)
RETURNING no

-- name: compensate_run :maybe
-- Have the undos of what a run has done executed, where there are any: end its grant, if it has one, and make it ready,
-- with a hint; its waits are closed, a pause of it ends, and the children that are not to outlive it are cancelled. From
-- here on `compensate_at` without `cancel_at` says that its claims are for the undos alone. No row: there is nothing to
-- undo. The caller has locked the row, and compared the fencing token if it is the owner's.
-- Locks: run (held), then attempt, wait, then outbox_event. Index: run_pkey, attempt_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, fence FROM {schema}.run
     WHERE no = %(run)s AND finished_at IS NULL AND {schema}.has_undos(no)
       AND (compensate_at IS NULL) = (cancel_at IS NULL)),
u AS (
    UPDATE {schema}.run
       SET state = 'ready', compensate_reason = CASE WHEN compensate_at IS NULL THEN %(reason)s::text ELSE compensate_reason END,
           compensate_at = coalesce(compensate_at, {schema}.now()), cancel_at = NULL, reason = NULL, paused_at = NULL,
           fence = run.fence + 1, claim = NULL, worker = NULL, crashes = 0, redelivers = 0, attempt_deadline = NULL, expires_at = NULL,
           wake_at = greatest(CASE WHEN run.state = 'ready' THEN run.wake_at END, {schema}.now() + %(delay)s::interval),  -- after a take-over's delay
           deliver_by = {schema}.now() + %(deliver)s::interval
      FROM r WHERE run.no = r.no
    RETURNING run.no, run.fence, run.wake_at, run.priority),
a AS (
    UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = %(outcome)s
      FROM r WHERE attempt.run = r.no AND attempt.fence = r.fence AND attempt.outcome IS NULL),
w AS (
    UPDATE {schema}.wait SET state = 'cancelled', settled_at = {schema}.now() FROM u WHERE wait.run = u.no AND wait.state = 'pending'),
f AS (
    INSERT INTO {schema}.fact (id, address, name, payload)
    SELECT {schema}.event_id(c.no, u.fence, 'close', 0), jsonb_build_array('run', c.id, 'umt.cancel')::text, 'umt.cancel',
           convert_to('{"reason": "its parent has ended"}', 'UTF8')
      FROM u JOIN {schema}.run AS c ON c.parent_no = u.no AND c.finished_at IS NULL AND c.on_parent_end = 'cancel'
    ON CONFLICT ON CONSTRAINT fact_pkey DO NOTHING)
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), wake_at FROM u
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING
RETURNING run

-- name: wake_run :maybe
-- Make a parked run, whose row the caller has locked, ready, with a hint; sleeps that are over are recorded as done.
-- Locks: run (held), then step, then outbox_event. Index: run_pkey, step_pkey.
WITH u AS (
    UPDATE {schema}.run
       SET state = 'ready', fence = fence + 1, wake_at = NULL, redelivers = 0, deliver_by = {schema}.now() + %(deliver)s::interval
     WHERE no = %(run)s AND state IN ('sleeping', 'waiting', 'retrying')
    RETURNING no, fence, priority),
s AS (
    UPDATE {schema}.step SET state = 'done', finished_at = {schema}.now()
      FROM u WHERE step.run = u.no AND step.kind = 'sleep' AND step.state = 'started' AND step.wake_at <= {schema}.now())
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING
RETURNING run

-- name: release_run :maybe
-- Make a run that is quarantined for a given reason, whose row the caller has locked, ready, with a hint.
-- Locks: run (held), then outbox_event. Index: run_pkey.
WITH u AS (
    UPDATE {schema}.run
       SET state = 'ready', reason = NULL, error = NULL, fence = fence + 1, wake_at = NULL, crashes = 0, redelivers = 0,
           deliver_by = {schema}.now() + %(deliver)s::interval
     WHERE no = %(run)s AND state = 'quarantined' AND reason = %(reason)s
    RETURNING no, fence, priority)
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING
RETURNING run

-- name: release_quarantined_run :maybe
-- Make a quarantined run, whose row the caller has locked, ready with a new crash budget and a hint, with another version
-- if one is given. One whose input did not fit, and which has done nothing, gets one at its next claim, as a new run does.
-- The reply is why it was quarantined.
-- Locks: run (held), then outbox_event. Index: run_pkey, step_pkey, wait_pkey.
WITH o AS MATERIALIZED (
    SELECT no, reason FROM {schema}.run WHERE no = %(run)s AND state = 'quarantined'),
u AS (
    UPDATE {schema}.run
       SET state = 'ready', reason = NULL, crashes = 0, fence = fence + 1, wake_at = NULL, redelivers = 0,
           version = CASE WHEN %(version)s::int IS NOT NULL THEN %(version)s::int
                          WHEN o.reason <> 'bad_input' OR EXISTS (SELECT 1 FROM {schema}.step WHERE step.run = o.no)
                               OR EXISTS (SELECT 1 FROM {schema}.wait WHERE wait.run = o.no) THEN run.version END,
           deliver_by = {schema}.now() + %(deliver)s::interval
      FROM o WHERE run.no = o.no
    RETURNING run.no, run.fence, run.priority),
e AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT coalesce(o.reason, '') FROM o JOIN u USING (no)

-- name: pause_run :maybe
-- Have a run, whose row the caller has locked, neither claimed nor hinted until it is resumed. Its timers and facts go on.
-- Locks: run (held). Index: run_pkey.
UPDATE {schema}.run SET paused_at = {schema}.now()
 WHERE no = %(run)s AND paused_at IS NULL AND finished_at IS NULL
RETURNING no

-- name: resume_run :maybe
-- Let a paused run, whose row the caller has locked, go on, with a hint if it is ready. The reply is its state.
-- Locks: run (held), then outbox_event. Index: run_pkey.
WITH u AS (
    UPDATE {schema}.run
       SET paused_at = NULL, redelivers = CASE WHEN state = 'ready' THEN 0 ELSE redelivers END,
           deliver_by = CASE WHEN state = 'ready' THEN {schema}.now() + %(deliver)s::interval ELSE deliver_by END
     WHERE no = %(run)s AND paused_at IS NOT NULL AND finished_at IS NULL
    RETURNING no, fence, state, wake_at, priority),
e AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), greatest(wake_at, {schema}.now())
      FROM u WHERE state = 'ready'
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
       SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at)
SELECT state FROM u

-- name: run_to_retry :maybe
-- Read what decides how a run is retried, at its highest nesting.
-- Locks: none. Index: run_id_nesting.
SELECT no, id, nesting, state, envelope, compensate_at IS NOT NULL FROM {schema}.run WHERE id = %(run)s::text ORDER BY nesting DESC LIMIT 1

-- name: insert_retry :maybe
-- Insert the run that takes up a failed or cancelled one, which stays as it is: with what it had done, what it was said
-- and what of that its waits took, and a hint. Its fence begins at 1, so that its first grant reads the journal. No row:
-- it is there already. It is of the same generation: the body may ask for it, and begun steps are completed under it. Of
-- the facts under a key it sees what the first one would have seen. Waits for children or for an
-- awaited task stay behind: done, their steps have the outcome; else they begin anew, with children and a task of their own.
-- Facts said to the first one get ids derived from theirs, by which the waits that took them find them; of what begun steps
-- were completed with only that of its own: others of its id, or earlier generations, had steps of the same keys.
-- Locks: none that another transaction waits for but one with the same retry. Index: run_id_nesting, step_pkey, wait_pkey, fact_address.
WITH o AS MATERIALIZED (
    SELECT * FROM {schema}.run WHERE no = %(run)s::bigint AND state IN ('failed', 'cancelled') AND compensate_at IS NULL),
n AS (
    INSERT INTO {schema}.run (id, task, version, queue, priority, fence, args, codec, digest, envelope, deliver_by, ref, attributes, retry_of, generation, snapshot)
    SELECT %(id)s::text, task, coalesce(%(version)s::int, version), queue, priority, 1, args, codec, digest, %(envelope)s::bytea,
           {schema}.now() + %(deliver)s::interval, ref, attributes, no, generation, snapshot
      FROM o
    ON CONFLICT ON CONSTRAINT run_id_nesting DO NOTHING
    RETURNING no, id, fence, priority, retry_of),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, result, digest, wake_at, started_at, finished_at, undo)
    SELECT n.no, s.key, s.seq, s.kind, s.state, s.fingerprint, s.failures, n.fence, s.result, s.digest, s.wake_at, s.started_at, s.finished_at, s.undo
      FROM n JOIN {schema}.step AS s ON s.run = n.retry_of WHERE s.state = 'done'),
p AS (SELECT '["run", ' || to_jsonb(o.id)::text || ', ' AS old, '["run", ' || to_jsonb(n.id)::text || ', ' AS new FROM o, n),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode, deadline, state, fact, payload, created_at, settled_at, part_of, need, announced)
    SELECT n.no, w.key, w.seq, w.name, CASE WHEN starts_with(w.address, p.old) THEN p.new || substr(w.address, length(p.old) + 1) ELSE w.address END,
           w.mode, w.deadline, w.state, CASE WHEN starts_with(w.address, p.old) THEN {schema}.copied_fact(n.no, w.fact) ELSE w.fact END,
           w.payload, w.created_at, w.settled_at, w.part_of, w.need, w.announced
      FROM n, p, {schema}.wait AS w
     WHERE w.run = n.retry_of AND w.state <> 'pending' AND w.mode NOT IN ('join', 'task')
       AND (CASE WHEN w.part_of IS NULL THEN w.state
                 ELSE (SELECT g.state FROM {schema}.wait AS g WHERE g.run = w.run AND g.key = w.part_of) END) = 'satisfied'),
f AS (
    INSERT INTO {schema}.fact (id, address, name, payload, actor, dedupe, at, routed_at)
    SELECT {schema}.copied_fact(n.no, f.id), jsonb_build_array('run', n.id, f.name)::text, f.name, {schema}.copied_payload(f.payload), f.actor, f.dedupe, f.at, {schema}.now()
      FROM n, p, {schema}.fact AS f
     WHERE f.address >= p.old AND f.address < rtrim(p.old) || '!'
       AND (NOT starts_with(f.name, 'umt.')
            OR f.address IN (SELECT w.address FROM {schema}.wait AS w WHERE w.run = n.retry_of AND w.mode = 'begin'))
       AND NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = n.retry_of AND d.fact = f.id)),
d AS (
    INSERT INTO {schema}.fact_read (run, fact)
    SELECT n.no, d.fact FROM n JOIN {schema}.fact_read AS d ON d.run = n.retry_of JOIN {schema}.fact AS f ON f.id = d.fact WHERE f.address LIKE '["key",%%'),
a AS (
    INSERT INTO {schema}.audit (id, act, run, actor, reason, detail)
    SELECT %(audit)s::uuid, 'retry', retry_of, %(actor)s::text, %(reason)s::text, 'as run ' || id FROM n
    ON CONFLICT ON CONSTRAINT audit_pkey DO NOTHING),
e AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM n)
SELECT no FROM n

-- name: run_to_fork :maybe
-- Read what decides how a run is forked, at its highest nesting, and the place in its journal of the step or wait of a key;
-- of the key of a map or a parallel step the place of the first of what it did.
-- Locks: none. Index: run_id_nesting, step_pkey, wait_pkey.
SELECT r.no, r.id, r.nesting, r.state, r.envelope,
       coalesce((SELECT s.seq FROM {schema}.step AS s WHERE s.run = r.no AND s.key = %(step)s::text),
                (SELECT w.seq FROM {schema}.wait AS w WHERE w.run = r.no AND w.key = %(step)s::text AND w.mode NOT IN ('join', 'task')),
                (SELECT min(i.seq) FROM (SELECT s.key, s.seq FROM {schema}.step AS s WHERE s.run = r.no
                                         UNION ALL
                                         SELECT w.key, w.seq FROM {schema}.wait AS w WHERE w.run = r.no AND w.mode NOT IN ('join', 'task')) AS i
                  WHERE starts_with(i.key, %(step)s::text || '['))),
       r.compensate_at IS NOT NULL
  FROM {schema}.run AS r WHERE r.id = %(run)s::text ORDER BY r.nesting DESC LIMIT 1

-- name: insert_fork :maybe
-- Insert a run that begins where another was at a step: with the outcomes of the steps and waits before that place, which
-- are those of lower `seq`, but for the branches around it, and a hint. Its fence begins at 1, so that its first grant reads
-- the journal, and it is of the same generation. What the other has done is not the fork's to undo. Of the facts said to
-- the other it has those that these waits took; of those under a key it sees what the other one would have seen. No row: it
-- is there already, or the other goes on.
-- Locks: none that another transaction waits for. Index: run_id_nesting, step_pkey, wait_pkey, fact_pkey.
WITH o AS MATERIALIZED (
    SELECT * FROM {schema}.run WHERE no = %(run)s::bigint AND state IN ('succeeded', 'failed', 'cancelled', 'quarantined') AND compensate_at IS NULL),
n AS (
    INSERT INTO {schema}.run (id, task, version, queue, priority, fence, args, codec, digest, envelope, deliver_by, ref, attributes, fork_of, generation, snapshot)
    SELECT %(id)s::text, task, coalesce(%(version)s::int, version), queue, priority, 1, coalesce(%(args)s::bytea, args),
           coalesce(%(codec)s::smallint, codec), CASE WHEN %(args)s::bytea IS NULL THEN digest ELSE %(digest)s::bytea END, %(envelope)s::bytea,
           {schema}.now() + %(deliver)s::interval, ref, attributes, no, generation, snapshot
      FROM o
    ON CONFLICT ON CONSTRAINT run_id_nesting DO NOTHING
    RETURNING no, id, fence, priority, fork_of),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, result, digest, error, wake_at, started_at, finished_at)
    SELECT n.no, s.key, s.seq, s.kind, s.state, s.fingerprint, s.failures, n.fence, s.result, s.digest, s.error, s.wake_at, s.started_at, s.finished_at
      FROM n JOIN {schema}.step AS s ON s.run = n.fork_of
     WHERE s.state IN ('done', 'failed') AND s.seq < %(seq)s::int AND NOT s.key = ANY(%(around)s::text[])),
p AS (SELECT '["run", ' || to_jsonb(o.id)::text || ', ' AS old, '["run", ' || to_jsonb(n.id)::text || ', ' AS new FROM o, n),
c AS MATERIALIZED (
    SELECT w.*, starts_with(w.address, p.old) AS is_own, n.no AS new_no, p.old, p.new
      FROM n, p, {schema}.wait AS w
     WHERE w.run = n.fork_of AND w.state <> 'pending' AND w.mode NOT IN ('join', 'task') AND w.seq < %(seq)s::int
       AND (CASE WHEN w.part_of IS NULL THEN w.state
                 ELSE (SELECT g.state FROM {schema}.wait AS g WHERE g.run = w.run AND g.key = w.part_of) END) IN ('satisfied', 'timed_out')),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode, deadline, state, fact, payload, created_at, settled_at, part_of, need, announced)
    SELECT new_no, key, seq, name, CASE WHEN is_own THEN new || substr(address, length(old) + 1) ELSE address END, mode, deadline, state,
           CASE WHEN is_own THEN {schema}.copied_fact(new_no, fact) ELSE fact END, payload, created_at, settled_at, part_of, need, announced
      FROM c),
f AS (
    INSERT INTO {schema}.fact (id, address, name, payload, actor, dedupe, at, routed_at)
    SELECT {schema}.copied_fact(n.no, f.id), jsonb_build_array('run', n.id, f.name)::text, f.name, {schema}.copied_payload(f.payload), f.actor, f.dedupe, f.at, {schema}.now()
      FROM n, {schema}.fact AS f
     WHERE f.id IN (SELECT fact FROM c WHERE is_own)),
d AS (
    INSERT INTO {schema}.fact_read (run, fact)
    SELECT n.no, d.fact FROM n JOIN {schema}.fact_read AS d ON d.run = n.fork_of JOIN {schema}.fact AS f ON f.id = d.fact WHERE f.address LIKE '["key",%%'),
a AS (
    INSERT INTO {schema}.audit (id, act, run, actor, reason, detail)
    SELECT %(audit)s::uuid, 'fork', fork_of, %(actor)s::text, %(reason)s::text, 'as run ' || id || ' from ' || %(step)s::text FROM n
    ON CONFLICT ON CONSTRAINT audit_pkey DO NOTHING),
e AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM n)
SELECT no FROM n

-- name: wake_due_runs :many
-- Make up to `limit` sleeping or retrying runs whose time has come ready, each with a hint.
-- Locks: run (ascending, SKIP LOCKED), then step, then outbox_event. Index: run_due.
WITH c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE state IN ('sleeping', 'waiting', 'retrying') AND state <> 'waiting' AND wake_at <= (SELECT {schema}.now())
     ORDER BY wake_at LIMIT %(limit)s
       FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run
       SET state = 'ready', fence = fence + 1, wake_at = NULL, redelivers = 0, deliver_by = {schema}.now() + %(deliver)s::interval
      FROM c WHERE run.no = c.no
    RETURNING run.no, run.fence, run.priority),
s AS (
    UPDATE {schema}.step SET state = 'done', finished_at = {schema}.now()
      FROM u WHERE step.run = u.no AND step.kind = 'sleep' AND step.state = 'started' AND step.wake_at <= {schema}.now()),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), {schema}.now() FROM u
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT no FROM u

-- name: overdue_waiting_runs :many
-- List waiting runs whose earliest deadline has passed; a list only, to be locked and re-checked one by one.
-- Locks: none. Index: run_due.
SELECT no FROM {schema}.run
 WHERE state IN ('sleeping', 'waiting', 'retrying') AND state = 'waiting' AND wake_at <= (SELECT {schema}.now())
 ORDER BY wake_at LIMIT %(limit)s

-- name: expired_runs :many
-- List runs that were never started and may not start any more.
-- Locks: none. Index: run_expiring.
SELECT no FROM {schema}.run
 WHERE expires_at <= (SELECT {schema}.now()) AND state IN ('ready', 'sleeping') LIMIT %(limit)s

-- name: lock_run :maybe
-- Lock one run for a system transaction and say where it stands.
-- Locks: run. Index: run_pkey.
SELECT no, id, nesting, state, fence, cancel_at IS NOT NULL, paused_at IS NOT NULL,
       coalesce(wake_at <= {schema}.now(), false), coalesce(expires_at <= {schema}.now(), false), parent_no,
       compensate_at IS NOT NULL
  FROM {schema}.run WHERE no = %(run)s FOR UPDATE

-- name: runs_of_id :many
-- List the runs of one id, the highest nesting first.
-- Locks: none. Index: run_id_nesting.
SELECT no, state FROM {schema}.run_view WHERE id = %(id)s ORDER BY nesting DESC

-- name: arguments_of_run :maybe
-- Read what a run was called with.
-- Locks: none. Index: run_id_nesting.
SELECT args, codec FROM {schema}.run WHERE id = %(id)s AND nesting = %(nesting)s

-- name: stamped_runs :many
-- List the next live runs whose message carries stamps, or is sealed, so that only its reader can say. For a revoke by
-- stamps, which is rare: it reads the whole table.
-- Locks: none. Index: run_pkey.
SELECT no, id, envelope FROM {schema}.run
 WHERE no > %(after)s AND finished_at IS NULL
   AND (position(convert_to('"stamps":', 'UTF8') IN envelope) > 0 OR substr(envelope, 1, 1) = '\x00'::bytea)
 ORDER BY no LIMIT %(limit)s

-- name: lost_runs :many
-- List the next running runs whose worker has no valid lease, or whose attempt is past its own deadline. A list only (RG-1).
-- Locks: none. Index: run_running.
SELECT no, fence FROM {schema}.run AS r
 WHERE state = 'running' AND no > %(after)s
   AND (attempt_deadline <= (SELECT {schema}.now())
        OR NOT EXISTS (SELECT 1 FROM {schema}.worker AS w WHERE w.id = r.worker AND w.lease_until > (SELECT {schema}.now())))
 ORDER BY no LIMIT %(limit)s

-- name: owner_of_run :maybe
-- Say who holds a run under a fence, and the last step whose body is known to have started and not to have ended.
-- Locks: none. Index: run_pkey, worker_pkey, step_pkey.
SELECT r.worker, w.host, w.pid,
       (SELECT s.key FROM {schema}.step AS s
         WHERE s.run = r.no AND s.state = 'started' AND s.kind NOT IN ('sleep', 'task', 'call') AND s.wake_at IS NULL
         ORDER BY s.fence DESC, s.started_at DESC NULLS LAST, s.seq DESC LIMIT 1)
  FROM {schema}.run AS r LEFT JOIN {schema}.worker AS w ON w.id = r.worker
 WHERE r.no = %(run)s AND r.fence = %(fence)s AND r.state = 'running'

-- name: runs_of_workers :many
-- List the runs that given workers hold.
-- Locks: none. Index: run_running.
SELECT no, fence FROM {schema}.run WHERE state = 'running' AND worker = ANY(%(workers)s) ORDER BY no

-- name: run_of_claim :maybe
-- Find the run held under a claim.
-- Locks: none. Index: run_running.
SELECT no, fence FROM {schema}.run WHERE state = 'running' AND claim = %(claim)s

-- name: take_over_run :maybe
-- End the grant of a lost run: ready again after `delay`, quarantined when its crashes without progress are used up, or
-- cancelled when that was asked for. The row is locked first and the clock read after: a plain UPDATE would compute its
-- clock before it waits for the owner's FOR SHARE lock, and the delay would be gone. `counts`: the end was a crash; one
-- that an operator asked for leaves the crash budget as it is.
-- Locks: run (SKIP LOCKED), then attempt, then outbox_event. Index: run_pkey, step_pkey.
WITH c AS MATERIALIZED (
    SELECT r.no, r.fence, r.worker, r.crashes, r.cancel_at IS NOT NULL AS cancel
      FROM {schema}.run AS r
     WHERE r.no = %(run)s AND r.state = 'running' AND r.fence = %(fence)s
       AND (NOT %(only_dead)s OR r.attempt_deadline <= {schema}.now()
            OR NOT EXISTS (SELECT 1 FROM {schema}.worker AS w WHERE w.id = r.worker AND w.lease_until > {schema}.now()))
       FOR UPDATE OF r SKIP LOCKED),
p AS (
    SELECT c.*, CASE WHEN NOT %(counts)s THEN c.crashes
                     WHEN EXISTS (SELECT 1 FROM {schema}.step AS s WHERE s.run = c.no AND s.fence = c.fence AND s.state = 'done')
                     THEN 1 ELSE c.crashes + 1 END AS crashed
      FROM c),
u AS (
    UPDATE {schema}.run
       SET state = CASE WHEN p.crashed > %(budget)s THEN 'quarantined' ELSE 'ready' END,
           reason = CASE WHEN p.crashed > %(budget)s THEN 'crash_budget' ELSE run.reason END,
           error = CASE WHEN p.crashed > %(budget)s THEN %(error)s::bytea ELSE run.error END,
           fence = run.fence + 1, claim = NULL, worker = NULL, crashes = p.crashed, redelivers = 0, attempt_deadline = NULL,
           wake_at = CASE WHEN p.crashed > %(budget)s THEN NULL ELSE {schema}.now() + %(delay)s::interval END,
           deliver_by = {schema}.now() + %(deliver)s::interval
      FROM p WHERE run.no = p.no AND NOT p.cancel
    RETURNING run.no, run.fence, run.state, run.wake_at, run.priority),
a AS (
    UPDATE {schema}.attempt SET ended_at = {schema}.now(), outcome = 'lost', error = %(why)s
      FROM p WHERE attempt.run = p.no AND attempt.fence = p.fence AND NOT p.cancel),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), wake_at FROM u WHERE state = 'ready'
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO NOTHING)
SELECT p.no, p.cancel, coalesce(u.state, 'running') FROM p LEFT JOIN u USING (no)

-- name: rehint_run :maybe
-- Put the hint of a ready run back, even when the relay that published it has not deleted its row yet, or it is dead.
-- Locks: run (read), outbox_event. Index: run_id_nesting.
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), greatest(wake_at, {schema}.now())
  FROM {schema}.run WHERE id = %(id)s AND nesting = %(nesting)s AND state = 'ready'
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
   SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at
RETURNING run

-- name: overdue_ready_runs :many
-- List ready runs whose hint is overdue and not in the outbox (a dead row never strands a run), with their queue,
-- whether a live worker can take them (none those whose task or queue is paused), and whether their hint is known to be
-- nowhere (`redelivers` is negative then). Compared by the run and not by the hint's id, which would be hashed for each
-- of a backlog's rows; a hint of an older ready period delays its run until a relay has dropped it.
-- Locks: none. Index: run_ready, outbox_event_due.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker WHERE lease_until > {schema}.now())
SELECT r.no, coalesce(r.queue, {schema}.queue_of(r.task)), r.task,
       (CASE WHEN r.version IS NULL THEN r.task ELSE r.task || '@' || r.version END) IN (SELECT version FROM live)
       AND NOT {schema}.is_paused(r.task, r.queue),
       r.redelivers < 0
  FROM {schema}.run AS r
 WHERE r.state = 'ready' AND r.deliver_by <= (SELECT {schema}.now()) AND r.paused_at IS NULL
   AND NOT EXISTS (SELECT 1 FROM {schema}.outbox_event AS o WHERE o.run = r.no AND o.type = 'run' AND o.status = 'pending')
 ORDER BY r.deliver_by LIMIT %(limit)s

-- name: redispatch_runs :many
-- Write a new hint for given overdue ready runs and double the time it may take.
-- Locks: run (ascending, SKIP LOCKED), then outbox_event (ascending). Index: run_pkey.
WITH c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = ANY(%(runs)s) AND state = 'ready' AND deliver_by <= (SELECT {schema}.now())
     ORDER BY no FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run
       SET redelivers = greatest(redelivers, 0) + 1,
           deliver_by = {schema}.now() + least(%(deliver)s::interval * power(2, least(greatest(redelivers, 0) + 1, 20)), interval '1 hour')
      FROM c WHERE run.no = c.no
    RETURNING run.no, run.fence, run.wake_at, run.priority)
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), greatest(wake_at, {schema}.now()) FROM u ORDER BY 1
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
   SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at
 WHERE outbox_event.status = 'dead'
RETURNING run

-- name: postpone_redispatch :count
-- Give the hints of given ready runs more time, without a new one: they are still in the queue, or no worker can take them.
-- Locks: run (ascending, SKIP LOCKED). Index: run_pkey.
WITH c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = ANY(%(runs)s) AND state = 'ready' AND deliver_by <= (SELECT {schema}.now())
     ORDER BY no FOR UPDATE SKIP LOCKED)
UPDATE {schema}.run
   SET redelivers = CASE WHEN redelivers < 0 THEN redelivers - 1 ELSE redelivers + 1 END,
       deliver_by = {schema}.now() + least(%(deliver)s::interval * power(2, least(abs(redelivers) + 1, 20)), interval '1 hour')
  FROM c WHERE run.no = c.no

-- name: rehint_ready_runs :many
-- After a loss of the broker's data: a fresh hint for the next ready runs after a given one, whatever became of the old.
-- Locks: run (ascending, SKIP LOCKED), then outbox_event (ascending). Index: run_pkey.
WITH c AS MATERIALIZED (
    SELECT no FROM {schema}.run WHERE state = 'ready' AND paused_at IS NULL AND no > %(after)s ORDER BY no LIMIT %(limit)s FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run SET deliver_by = {schema}.now() + %(deliver)s::interval, redelivers = 0
      FROM c WHERE run.no = c.no
    RETURNING run.no, run.fence, run.wake_at, run.priority)
INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), greatest(wake_at, {schema}.now()) FROM u ORDER BY 1
ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
   SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at
RETURNING run

-- name: shelve_runs :many
-- Note that the hints of ready runs are dropped, since no live worker declares their version: the worker that brings it
-- makes them due; or since their task or queue is paused: the end of the pause does. One that has come since the rows
-- were claimed is seen here, and its runs are not among those returned.
-- Locks: run (ascending, SKIP LOCKED). Index: run_pkey.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker WHERE lease_until > {schema}.now()),
c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = ANY(%(runs)s) AND state = 'ready'
       AND ((CASE WHEN version IS NULL THEN task ELSE task || '@' || version END) NOT IN (SELECT version FROM live)
            OR {schema}.is_paused(task, queue))
     ORDER BY no FOR UPDATE SKIP LOCKED)
UPDATE {schema}.run SET redelivers = - greatest(abs(redelivers), 1) FROM c WHERE run.no = c.no
RETURNING run.no

-- name: refuse_hint :maybe
-- A hint came to a process that has not the code for its run: write it again for later if a live worker has that code,
-- or else note that it is nowhere, as where the run's task or queue is paused. `spread` is how much later at least; a
-- run's own time begins at half a second and doubles to 8. The reply: a hint was written; it is a pause that keeps the
-- run. No row: the run is not ready, or this process can take it.
-- Locks: run (SKIP LOCKED), then outbox_event. Index: run_id_nesting.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker WHERE lease_until > {schema}.now()),
c AS MATERIALIZED (
    SELECT no, greatest(%(spread)s::interval, interval '0.5 s' * power(2, least(abs(redelivers), 4))) AS later,
           (CASE WHEN version IS NULL THEN task ELSE task || '@' || version END) IN (SELECT version FROM live)
           AND NOT {schema}.is_paused(task, queue) AS live,
           {schema}.is_paused(task, queue) AS paused
      FROM {schema}.run
     WHERE id = %(id)s AND nesting = %(nesting)s AND state = 'ready' AND paused_at IS NULL
       AND (NOT coalesce(task = %(task)s::text AND (version = ANY(%(versions)s::int[]) OR (version IS NULL AND %(new)s)), false)
            OR {schema}.is_paused(task, queue))
       FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run
       SET redelivers = CASE WHEN c.live THEN greatest(abs(redelivers), least(abs(redelivers) + 1, 4)) ELSE - greatest(abs(redelivers), 1) END,
           deliver_by = CASE WHEN c.live THEN {schema}.now() + c.later + %(deliver)s::interval ELSE deliver_by END
      FROM c WHERE run.no = c.no
    RETURNING run.no, run.fence, run.wake_at, run.priority, c.later, c.live, c.paused),
o AS (
    INSERT INTO {schema}.outbox_event (id, type, run, priority, next_attempt_at)
    SELECT {schema}.event_id(no, fence, 'run', 0), 'run', no, coalesce(priority, 0), greatest(wake_at, {schema}.now() + later)
      FROM u WHERE live
    ON CONFLICT ON CONSTRAINT outbox_event_pkey DO UPDATE
       SET claim = NULL, status = 'pending', attempts = 0, next_attempt_at = excluded.next_attempt_at)
SELECT live, paused FROM u

-- name: bring_versions :one
-- A starting worker makes ready runs of what it brings due for delivery at once: those among the next `limit` ready runs
-- after a place. The reply is the place of the last one looked at (null: there are no more), and how many were brought.
-- Locks: run (SKIP LOCKED). Index: run_ready.
WITH s AS MATERIALIZED (
    SELECT no, deliver_by, redelivers <> 0 AND (CASE WHEN version IS NULL THEN task ELSE task || '@' || version END) = ANY(%(versions)s) AS brought
      FROM {schema}.run
     WHERE state = 'ready' AND paused_at IS NULL AND deliver_by > (SELECT {schema}.now()) AND (deliver_by, no) > (%(after)s, %(after_no)s)
     ORDER BY deliver_by, no LIMIT %(limit)s),
c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no IN (SELECT no FROM s WHERE brought) AND state = 'ready'
       FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run SET deliver_by = {schema}.now(), redelivers = CASE WHEN redelivers < 0 THEN -1 ELSE 0 END
      FROM c WHERE run.no = c.no
    RETURNING 1)
SELECT last.deliver_by, last.no, (SELECT count(*) FROM s), (SELECT count(*) FROM u)
  FROM (SELECT 1) AS one LEFT JOIN (SELECT deliver_by, no FROM s ORDER BY deliver_by DESC, no DESC LIMIT 1) AS last ON true

-- name: bring_resumed :one
-- Make ready runs of a task or queue that was resumed due for delivery at once: those whose hints were dropped, among the
-- next `limit` ready runs after a place. The reply is as for `bring_versions`.
-- Locks: run (SKIP LOCKED). Index: run_ready.
WITH s AS MATERIALIZED (
    SELECT no, deliver_by, redelivers < 0 AND (CASE %(scope)s WHEN 'task' THEN task ELSE coalesce(queue, {schema}.queue_of(task)) END) = %(name)s AS brought
      FROM {schema}.run
     WHERE state = 'ready' AND paused_at IS NULL AND deliver_by > (SELECT {schema}.now()) AND (deliver_by, no) > (%(after)s, %(after_no)s)
     ORDER BY deliver_by, no LIMIT %(limit)s),
c AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no IN (SELECT no FROM s WHERE brought) AND state = 'ready'
       FOR UPDATE SKIP LOCKED),
u AS (
    UPDATE {schema}.run SET deliver_by = {schema}.now(), redelivers = -1
      FROM c WHERE run.no = c.no
    RETURNING 1)
SELECT last.deliver_by, last.no, (SELECT count(*) FROM s), (SELECT count(*) FROM u)
  FROM (SELECT 1) AS one LEFT JOIN (SELECT deliver_by, no FROM s ORDER BY deliver_by DESC, no DESC LIMIT 1) AS last ON true

-- name: count_ready :many
-- Count, by queue and task, the ready runs whose hints should be with the broker: claimable, of a version that a live
-- worker declares, neither task nor queue paused, with no hint in the outbox.
-- Locks: none. Index: run_ready, outbox_event_due.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker WHERE lease_until > {schema}.now())
SELECT coalesce(queue, {schema}.queue_of(task)), task, runs
  FROM (SELECT r.queue, r.task, count(*) AS runs
          FROM {schema}.run AS r
         WHERE r.state = 'ready' AND r.paused_at IS NULL
           AND (CASE WHEN r.version IS NULL THEN r.task ELSE r.task || '@' || r.version END) IN (SELECT version FROM live)
           AND NOT EXISTS (SELECT 1 FROM {schema}.outbox_event AS o WHERE o.run = r.no AND o.type = 'run' AND o.status = 'pending')
         GROUP BY r.queue, r.task) AS waiting
 WHERE NOT {schema}.is_paused(task, queue)

-- name: asked_claims :many
-- Of the claims a process holds, list those whose runs were asked to stop, by a cancel or else by a pause. No proof: it
-- locks nothing.
-- Locks: none. Index: run_running.
SELECT claim, reason, CASE WHEN cancel_at IS NULL THEN 'pause' ELSE 'cancel' END
  FROM {schema}.run WHERE state = 'running' AND worker = %(worker)s AND (cancel_at IS NOT NULL OR paused_at IS NOT NULL)

-- name: get_run :maybe
-- Read one run by id, at its highest nesting.
-- Locks: none. Index: run_id_nesting.
SELECT no, id, nesting, task, version, queue, priority, state, reason, paused_at, failures, crashes, wake_at, cancel_at, ref,
       attributes, result, error, codec, created_at, finished_at, retry_of, fork_of, generation, continued_at, compensate_at,
       status, done, total, noted_at
  FROM {schema}.lookup(%(id)s::text)

-- name: list_runs :many
-- Read a page of runs, the newest first, below a given number: in one of these states, or paused. Without the tasks of a
-- package whose names begin so (`own`).
-- Locks: none. Index: run_pkey.
SELECT no, id, nesting, task, version, queue, priority, state, reason, paused_at, failures, crashes, wake_at, cancel_at, ref,
       attributes, NULL::bytea, NULL::bytea, 1::smallint, created_at, finished_at, retry_of, fork_of, generation, continued_at, compensate_at,
       status, done, total, noted_at
  FROM {schema}.run_view
 WHERE (%(before)s::bigint IS NULL OR no < %(before)s)
   AND (%(task)s::text IS NULL OR task = %(task)s)
   AND (%(states)s::text[] IS NULL OR state = ANY(%(states)s) OR (%(paused)s AND paused_at IS NOT NULL AND finished_at IS NULL))
   AND (%(own)s::text IS NULL OR NOT starts_with(task, %(own)s))
   AND (%(ref)s::text IS NULL OR ref = %(ref)s)
 ORDER BY no DESC LIMIT %(limit)s

-- name: count_by_state :many
-- Count runs by state, paused ones under their own name, without those of tasks whose names begin with `own`.
-- Locks: none. Index: none (a scan; for people).
SELECT CASE WHEN paused_at IS NOT NULL AND finished_at IS NULL THEN 'paused' ELSE state END, count(*)
  FROM {schema}.run_view WHERE %(own)s::text IS NULL OR NOT starts_with(task, %(own)s) GROUP BY 1 ORDER BY 1

-- name: due_work :one
-- Say in one look which duties have work: outbox rows, due runs, lost runs, unrouted facts, overdue hints, expired runs,
-- runs parked for an op that a person has decided about, runs that waited for a pause to end.
-- Locks: none. Index: outbox_event_due, run_due, run_running, fact_unrouted, run_ready, run_expiring, op_ledger_released.
SELECT EXISTS (SELECT 1 FROM {schema}.outbox_event WHERE status = 'pending' AND next_attempt_at <= (SELECT {schema}.now())),
       EXISTS (SELECT 1 FROM {schema}.run WHERE state IN ('sleeping', 'waiting', 'retrying') AND wake_at <= (SELECT {schema}.now())),
       EXISTS (SELECT 1 FROM {schema}.run AS r WHERE state = 'running'
                  AND (attempt_deadline <= (SELECT {schema}.now())
                       OR NOT EXISTS (SELECT 1 FROM {schema}.worker AS w WHERE w.id = r.worker AND w.lease_until > (SELECT {schema}.now())))),
       EXISTS (SELECT 1 FROM {schema}.fact WHERE routed_at IS NULL),
       EXISTS (SELECT 1 FROM {schema}.run WHERE state = 'ready' AND deliver_by <= (SELECT {schema}.now()) AND paused_at IS NULL),
       EXISTS (SELECT 1 FROM {schema}.run WHERE expires_at <= (SELECT {schema}.now()) AND state IN ('ready', 'sleeping')),
       EXISTS (SELECT 1 FROM {schema}.op_ledger WHERE state <> 'uncertain' AND waiting <> '{}'),
       EXISTS (SELECT 1 FROM {schema}.pause WHERE resumed_at IS NOT NULL)

-- name: run_for_report :maybe
-- Read what the result backend and callbacks of a terminal run need.
-- Locks: none. Index: run_pkey.
SELECT no, id, nesting, task, version, queue, priority, state, reason, result, error, codec, args, envelope
  FROM {schema}.run WHERE no = %(run)s AND finished_at IS NOT NULL
