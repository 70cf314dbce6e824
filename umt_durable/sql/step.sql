-- The step: one journal entry of a run. Every write locks the run row FOR SHARE inside the statement and compares the
-- fencing token under that lock; a bare WHERE would let a zombie commit after a take-over that is not committed yet.

-- name: start_step :maybe
-- Ask for the grant to enter a body, and record that it starts. The reply says whether a cancel is pending (then nothing
-- is written), and whether the body may be entered: not where the step has its outcome already.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, started_at, undo)
    SELECT no, %(key)s, %(seq)s, %(kind)s, 'started', %(fingerprint)s, %(failures)s, %(fence)s, {schema}.now(), %(undo)s FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
       SET fence = excluded.fence, undo = excluded.undo, failures = excluded.failures, wake_at = NULL WHERE step.state = 'started'
    RETURNING 1)
SELECT cancel_at IS NOT NULL, EXISTS (SELECT 1 FROM s) FROM r

-- name: mark_started :count
-- Show a body that has been running for a while. Loses against its commit.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE)
INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, started_at, undo)
SELECT no, %(key)s, %(seq)s, %(kind)s, 'started', %(fingerprint)s, %(failures)s, %(fence)s, {schema}.now() - %(age)s::interval, %(undo)s FROM r
ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
   SET fence = excluded.fence, undo = excluded.undo, failures = excluded.failures, wake_at = NULL
 WHERE step.state = 'started' AND step.fence <> excluded.fence

-- name: commit_step :maybe
-- Record the outcome of a body, once (I6). The reply says whether a cancel is pending.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE)
INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, result, digest, error, finished_at, undo)
SELECT no, %(key)s, %(seq)s, %(kind)s, %(state)s, %(fingerprint)s, %(failures)s, %(fence)s, %(result)s, %(digest)s, %(error)s, {schema}.now(), %(undo)s FROM r
ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
   SET state = excluded.state, fence = excluded.fence, undo = excluded.undo, failures = excluded.failures, result = excluded.result, digest = excluded.digest,
       error = excluded.error, wake_at = NULL, finished_at = excluded.finished_at
 WHERE step.state = 'started'
RETURNING (SELECT cancel_at IS NOT NULL FROM r)

-- name: commit_steps :maybe
-- Record the outcomes of several bodies, each once (I6). The reply says whether a cancel is pending, and which were written.
-- Locks: run FOR SHARE, then steps. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, result, digest, error, finished_at)
    SELECT r.no, e.key, e.seq, e.kind, e.state, e.fingerprint, e.failures, %(fence)s, e.result, e.digest, e.error, {schema}.now()
      FROM r, unnest(%(keys)s::text[], %(seqs)s::int[], %(kinds)s::text[], %(states)s::text[], %(fingerprints)s::bytea[],
                     %(failures)s::int[], %(results)s::bytea[], %(digests)s::bytea[], %(errors)s::bytea[])
           AS e (key, seq, kind, state, fingerprint, failures, result, digest, error)
     ORDER BY e.key
    ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
       SET state = excluded.state, fence = excluded.fence, failures = excluded.failures, result = excluded.result,
           digest = excluded.digest, error = excluded.error, wake_at = NULL, finished_at = excluded.finished_at
     WHERE step.state = 'started'
    RETURNING key)
SELECT cancel_at IS NOT NULL, ARRAY(SELECT key FROM s) FROM r

-- name: look_steps :many
-- After a lost reply: list those of some steps whose recorded outcome is the one written under this grant.
-- Locks: none. Index: step_pkey, run_pkey.
SELECT s.key
  FROM {schema}.step AS s JOIN {schema}.run AS r ON r.no = s.run
 WHERE s.run = %(run)s AND s.key = ANY(%(keys)s::text[]) AND s.fence = %(fence)s AND s.state IN ('done', 'failed')
   AND r.fence = %(fence)s AND r.claim = %(claim)s

-- name: look_step :maybe
-- After a lost reply: say whether the outcome recorded for a step is the one written under this grant.
-- Locks: none. Index: step_pkey, run_pkey.
SELECT s.state
  FROM {schema}.step AS s JOIN {schema}.run AS r ON r.no = s.run
 WHERE s.run = %(run)s AND s.key = %(key)s AND s.fence = %(fence)s AND s.state IN ('done', 'failed')
   AND r.fence = %(fence)s AND r.claim = %(claim)s

-- name: start_sleep :maybe
-- Fix when a sleep ends, once; replays and repeats give the first answer, in seconds from now (I10).
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, fence, wake_at, started_at)
    SELECT no, %(key)s, %(seq)s, 'sleep', 'started', %(fingerprint)s, %(fence)s,
           coalesce(%(until)s::timestamptz, {schema}.now() + %(duration)s::interval), {schema}.now()
      FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE SET fence = excluded.fence WHERE step.state = 'started'
    RETURNING wake_at)
SELECT r.cancel_at IS NOT NULL, extract(epoch FROM s.wake_at - {schema}.now())::float8 FROM r LEFT JOIN s ON true

-- name: end_sleep :maybe
-- Record that a sleep is over, if it is by the database clock, which is read once: the reply and the row say the same.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
t AS MATERIALIZED (SELECT no, cancel_at, {schema}.now() AS at FROM r),
s AS (
    UPDATE {schema}.step SET state = 'done', fence = %(fence)s, finished_at = t.at
      FROM t WHERE step.run = t.no AND step.key = %(key)s AND step.state = 'started' AND step.wake_at <= t.at)
SELECT t.cancel_at IS NOT NULL, extract(epoch FROM step.wake_at - t.at)::float8
  FROM t JOIN {schema}.step ON step.run = t.no AND step.key = %(key)s

-- name: record_try :maybe
-- Record a failed try of a step that will be tried again, and when. The reply: cancel pending, seconds until then.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE)
INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, error, wake_at, started_at, undo)
SELECT no, %(key)s, %(seq)s, %(kind)s, 'started', %(fingerprint)s, %(failures)s, %(fence)s, %(error)s, {schema}.now() + %(delay)s::interval, {schema}.now() - %(age)s::interval, %(undo)s FROM r
ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
   SET failures = excluded.failures, fence = excluded.fence, undo = excluded.undo, error = excluded.error,
       wake_at = CASE WHEN step.failures = excluded.failures AND step.wake_at IS NOT NULL THEN step.wake_at ELSE excluded.wake_at END
 WHERE step.state = 'started'
RETURNING (SELECT cancel_at IS NOT NULL FROM r), extract(epoch FROM wake_at - {schema}.now())::float8

-- name: send_step :maybe
-- Record that a step's work is sent elsewhere, once, and when it is sent again without an answer (null: never). The reply:
-- cancel pending, recorded now. Only then does the caller's transaction write the message, so that a repeat sends no other.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
s AS (
    INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, fence, wake_at, started_at)
    SELECT no, %(key)s, %(seq)s, %(kind)s, 'started', %(fingerprint)s, %(fence)s, {schema}.now() + %(again)s::interval, {schema}.now()
      FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT step_pkey DO NOTHING
    RETURNING 1)
SELECT cancel_at IS NOT NULL, EXISTS (SELECT 1 FROM s) FROM r

-- name: resend_step :maybe
-- Count a message as lost and fix when the next one would be. The reply: cancel pending, counted now.
-- Locks: run FOR SHARE, then step. Index: run_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
s AS (
    UPDATE {schema}.step SET failures = failures + 1, fence = %(fence)s, wake_at = {schema}.now() + %(again)s::interval
      FROM r
     WHERE step.run = r.no AND step.key = %(key)s AND step.state = 'started' AND step.failures = %(failures)s AND r.cancel_at IS NULL
    RETURNING 1)
SELECT cancel_at IS NOT NULL, EXISTS (SELECT 1 FROM s) FROM r

-- name: read_journal :many
-- Read the journal of a run in the order of its steps. Only after the claim has committed: before, a zombie's last
-- commit can be missed. A result of more than `inline` bytes stays where it is, outside the row, and is not even read:
-- of such a value the row has the length.
-- Locks: none. Index: step_pkey.
SELECT key, seq, kind, state, fingerprint, failures, fence, CASE WHEN octet_length(result) <= %(inline)s THEN result END, digest, error, wake_at, coalesce(wake_at <= {schema}.now(), false), started_at, finished_at,
       extract(epoch FROM {schema}.now() - started_at)::float8, octet_length(result), undo
  FROM {schema}.step WHERE run = %(run)s ORDER BY seq

-- name: read_journal_under :many
-- Read what is recorded for some items or branches of a step, and for all that was done within them.
-- Locks: none. Index: step_pkey.
SELECT key, seq, kind, state, fingerprint, failures, fence, CASE WHEN octet_length(result) <= %(inline)s THEN result END, digest, error, wake_at, coalesce(wake_at <= {schema}.now(), false), started_at, finished_at,
       extract(epoch FROM {schema}.now() - started_at)::float8, octet_length(result), undo
  FROM {schema}.step
 WHERE run = %(run)s AND EXISTS (SELECT 1 FROM unnest(%(keys)s::text[]) AS k WHERE key = k OR starts_with(key, k || '/'))
 ORDER BY seq

-- name: read_result :one
-- Read one result that the journal was read without.
-- Locks: none. Index: step_pkey.
SELECT result FROM {schema}.step WHERE run = %(run)s AND key = %(key)s
