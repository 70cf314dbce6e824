-- The op: one external effect, known by its key in a namespace, whatever run asks for it. Its `token` is new at each take
-- and each decision of a person, so comparing it compares everything; writes of an attempt also lock the run FOR SHARE
-- inside the statement and compare the fencing token, as for a step.

-- name: begin_op :maybe
-- Enter a new effect into the ledger. The reply: cancel pending (then nothing is written), and whether the row is new.
-- Locks: run FOR SHARE, then op_ledger. Index: run_pkey, op_ledger_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
i AS (
    INSERT INTO {schema}.op_ledger (namespace, op_key, run, fence, claim, token, idem_key, request_digest)
    SELECT %(namespace)s, %(op_key)s, no, %(fence)s, %(claim)s, %(token)s, %(idem_key)s, %(request_digest)s FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT op_ledger_pkey DO NOTHING
    RETURNING 1)
SELECT cancel_at IS NOT NULL, EXISTS (SELECT 1 FROM i) FROM r

-- name: read_op :maybe
-- Read an op, and whether its grant is still the current one of a running run. Once it is not, it never is again: so a
-- take that compares the token may rely on the answer.
-- Locks: none. Index: op_ledger_pkey, run_pkey.
SELECT o.namespace, o.op_key, o.state, o.run, o.fence, o.token, o.turn, o.idem_key, o.request_digest, o.is_clear, o.commit_due, o.result, o.digest, o.error,
       coalesce(r.state = 'running' AND r.fence = o.fence AND r.claim = o.claim, false), r.id, r.state,
       o.actor, o.comment, o.began_at, o.taken_at, o.settled_at, cardinality(o.waiting)
  FROM {schema}.op_ledger AS o LEFT JOIN {schema}.run AS r ON r.no = o.run
 WHERE o.namespace = %(namespace)s AND o.op_key = %(op_key)s

-- name: take_op :maybe
-- Take an open row of a grant that has ended, by compare-and-set, for the next turn. The reply: cancel pending, the turn
-- or null: somebody was faster.
-- Locks: run FOR SHARE, then op_ledger. Index: run_pkey, op_ledger_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
u AS (
    UPDATE {schema}.op_ledger AS o
       SET run = r.no, fence = %(fence)s, claim = %(claim)s, token = %(token)s, turn = o.turn + 1, is_clear = false, error = NULL,
           request_digest = coalesce(o.request_digest, %(request_digest)s), taken_at = {schema}.now()
      FROM r
     WHERE r.cancel_at IS NULL AND o.namespace = %(namespace)s AND o.op_key = %(op_key)s AND o.state = 'open' AND o.token = %(held)s
    RETURNING o.turn)
SELECT cancel_at IS NOT NULL, (SELECT turn FROM u) FROM r

-- name: clear_op :maybe
-- Note that nothing was applied by this turn nor before it: who takes the row next need not ask. Says whether a cancel is pending.
-- Locks: run FOR SHARE, then op_ledger. Index: run_pkey, op_ledger_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
u AS (
    UPDATE {schema}.op_ledger AS o SET is_clear = true, error = %(error)s
      FROM r WHERE o.namespace = %(namespace)s AND o.op_key = %(op_key)s AND o.state = 'open' AND o.token = %(token)s)
SELECT cancel_at IS NOT NULL FROM r

-- name: fail_op :maybe
-- Record that an effect was not applied and will not be. Says whether a cancel is pending.
-- Locks: run FOR SHARE, then op_ledger. Index: run_pkey, op_ledger_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
u AS (
    UPDATE {schema}.op_ledger AS o SET state = 'failed', error = %(error)s, settled_at = {schema}.now()
      FROM r WHERE o.namespace = %(namespace)s AND o.op_key = %(op_key)s AND o.state = 'open' AND o.token = %(token)s)
SELECT cancel_at IS NOT NULL FROM r

-- name: doubt_op :maybe
-- Leave an effect to a person: nobody can say whether it was applied, or what a person said of it cannot be read. Also
-- with a cancel pending, which the reply tells.
-- Locks: run FOR SHARE, then op_ledger. Index: run_pkey, op_ledger_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
u AS (
    UPDATE {schema}.op_ledger AS o
       SET state = 'uncertain', error = %(error)s, result = NULL, digest = NULL, commit_due = false, settled_at = NULL
      FROM r WHERE o.namespace = %(namespace)s AND o.op_key = %(op_key)s AND o.token = %(token)s
       AND (o.state = 'open' OR (o.state = 'done' AND o.actor IS NOT NULL)))
SELECT cancel_at IS NOT NULL FROM r

-- name: settle_op :maybe
-- Record the answer of an effect and the step that asked for it, in one go: under the grant that began or took the row;
-- or, for the answer of a person, by the first run that commits what belongs to it. The reply says whether a cancel is
-- pending; no row: the grant has ended, or the row is somebody else's.
-- Locks: run FOR SHARE, then op_ledger, then step. Index: run_pkey, op_ledger_pkey, step_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
o AS (
    UPDATE {schema}.op_ledger AS o
       SET state = 'done', result = %(result)s, digest = %(digest)s, error = NULL, is_clear = false, commit_due = false,
           settled_at = coalesce(o.settled_at, {schema}.now())
      FROM r
     WHERE o.namespace = %(namespace)s AND o.op_key = %(op_key)s AND o.token = %(token)s
       AND ((o.state = 'open' AND o.run = r.no AND o.fence = %(fence)s AND o.claim = %(claim)s)
            OR (o.state = 'done' AND o.commit_due))
    RETURNING 1)
INSERT INTO {schema}.step (run, key, seq, kind, state, fingerprint, failures, fence, result, digest, finished_at)
SELECT r.no, %(key)s, %(seq)s, %(kind)s, 'done', %(fingerprint)s, %(failures)s, %(fence)s, %(result)s, %(digest)s, {schema}.now() FROM r, o
ON CONFLICT ON CONSTRAINT step_pkey DO UPDATE
   SET state = excluded.state, fence = excluded.fence, failures = excluded.failures, result = excluded.result, digest = excluded.digest,
       error = NULL, wake_at = NULL, finished_at = excluded.finished_at
 WHERE step.state = 'started'
RETURNING (SELECT cancel_at IS NOT NULL FROM r)

-- name: wait_for_person :count
-- Note that a run, locked by the caller, is parked until a person has decided about an op. No row: somebody just has.
-- Locks: run (held), then op_ledger. Index: op_ledger_pkey.
UPDATE {schema}.op_ledger SET waiting = CASE WHEN %(run)s = ANY(waiting) THEN waiting ELSE waiting || %(run)s::bigint END
 WHERE namespace = %(namespace)s AND op_key = %(op_key)s AND state = 'uncertain'

-- name: list_ops :many
-- List ops by key, after a given one.
-- Locks: none. Index: op_ledger_unsettled for the unsettled ones, else op_ledger_pkey.
SELECT o.namespace, o.op_key, o.state, o.run, o.fence, o.token, o.turn, o.idem_key, o.request_digest, o.is_clear, o.commit_due, o.result, o.digest, o.error,
       coalesce(r.state = 'running' AND r.fence = o.fence AND r.claim = o.claim, false), r.id, r.state,
       o.actor, o.comment, o.began_at, o.taken_at, o.settled_at, cardinality(o.waiting)
  FROM {schema}.op_ledger AS o LEFT JOIN {schema}.run AS r ON r.no = o.run
 WHERE o.state = ANY(%(states)s) AND (%(unsettled)s::boolean IS NOT TRUE OR o.state IN ('open', 'uncertain'))
   AND o.namespace = %(namespace)s AND o.op_key > %(after)s
 ORDER BY o.op_key LIMIT %(limit)s

-- name: resolve_op :maybe
-- Record what a person says of an op that no grant holds. Repeated with its own token it changes nothing: read it then.
-- Locks: op_ledger. Index: op_ledger_pkey.
UPDATE {schema}.op_ledger
   SET state = %(state)s, token = %(token)s, turn = turn + 1, result = %(result)s, digest = %(digest)s, error = %(error)s, is_clear = (%(state)s = 'open'),
       commit_due = (%(state)s = 'done'), actor = %(actor)s, comment = %(comment)s,
       settled_at = CASE WHEN %(state)s = 'open' THEN NULL ELSE {schema}.now() END
 WHERE namespace = %(namespace)s AND op_key = %(op_key)s AND token = %(held)s AND state <> 'done'
RETURNING state

-- name: released_ops :many
-- List ops that a person has decided about, with the runs that are still parked for that.
-- Locks: none. Index: op_ledger_released.
SELECT namespace, op_key FROM {schema}.op_ledger
 WHERE state <> 'uncertain' AND waiting <> '{}' LIMIT %(limit)s

-- name: waiting_runs :maybe
-- List the runs parked for an op that a person has decided about, in the order in which they are to be locked.
-- Locks: none. Index: op_ledger_pkey.
SELECT ARRAY(SELECT unnest(waiting) ORDER BY 1) FROM {schema}.op_ledger
 WHERE namespace = %(namespace)s AND op_key = %(op_key)s AND state <> 'uncertain'

-- name: forget_waiting :count
-- Note that runs, locked by the caller, are not parked for an op any more.
-- Locks: run (held), then op_ledger. Index: op_ledger_pkey.
UPDATE {schema}.op_ledger SET waiting = ARRAY(SELECT unnest(waiting) EXCEPT SELECT unnest(%(runs)s::bigint[]))
 WHERE namespace = %(namespace)s AND op_key = %(op_key)s
