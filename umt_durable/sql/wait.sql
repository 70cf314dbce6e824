-- The wait: a run's registered wait for a fact. It leaves `pending` once (I9), under the lock of its run.

-- name: lock_address :one
-- Serialise register and router of one address. Before any row lock; the look for the fact comes in a later statement.
-- Locks: the address. Index: none.
SELECT pg_advisory_xact_lock(hashtext(%(space)s), hashtext(%(address)s)) IS NULL

-- name: try_lock_address :one
-- The same without waiting.
-- Locks: the address. Index: none.
SELECT pg_try_advisory_xact_lock(hashtext(%(space)s), hashtext(%(address)s))

-- name: register_wait :maybe
-- Record a wait, once: a replayed one keeps its deadline and outcome. The reply says whether a cancel is pending.
-- Locks: the address (held), run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode, deadline)
    SELECT no, %(key)s, %(seq)s, %(name)s, %(address)s, %(mode)s, {schema}.now() + %(timeout)s::interval FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT wait_pkey DO NOTHING)
SELECT cancel_at IS NOT NULL FROM r

-- name: settle_wait :maybe
-- Give a pending wait of a run, whose row the caller has locked, its outcome.
-- Locks: run (held), then wait. Index: wait_pkey.
UPDATE {schema}.wait SET state = %(state)s, fact = %(fact)s, payload = %(payload)s, settled_at = {schema}.now()
 WHERE run = %(run)s AND key = %(key)s AND state = 'pending'
RETURNING run

-- name: settle_wait_by_check :maybe
-- Give a pending wait the answer of its check, under the grant.
-- Locks: run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (
    UPDATE {schema}.wait SET state = 'satisfied', payload = %(payload)s, settled_at = {schema}.now()
      FROM r WHERE wait.run = r.no AND wait.key = %(key)s AND wait.state = 'pending')
SELECT cancel_at IS NOT NULL FROM r

-- name: time_out_waits :many
-- Time out the pending waits of a run, whose row the caller has locked, whose deadline has passed.
-- Locks: run (held), then wait. Index: wait_pkey.
UPDATE {schema}.wait SET state = 'timed_out', settled_at = {schema}.now()
 WHERE run = %(run)s AND state = 'pending' AND deadline <= {schema}.now()
RETURNING key

-- name: pending_waits :many
-- List the pending waits at a fact's address that it satisfies, in the order of their runs. A fact said under a key is seen
-- by runs that were there when it committed; see look_for_fact.
-- Locks: none (the address is held). Index: wait_pending, run_pkey, fact_pkey.
SELECT w.run, w.key
  FROM {schema}.wait AS w JOIN {schema}.run AS r ON r.no = w.run JOIN {schema}.fact AS f ON f.id = %(fact)s
 WHERE w.address = f.address AND w.state = 'pending' AND r.finished_at IS NULL
   AND (f.address LIKE '["run",%%' OR f.at >= r.created_at OR {schema}.ended_after(f.xid, r.snapshot))
   AND (w.run, w.key) > (%(after_run)s, %(after_key)s)
 ORDER BY w.run, w.key LIMIT %(limit)s

-- name: count_settled :one
-- Of the waits a pass believes pending, count those that are not any more.
-- Locks: run (held). Index: wait_pkey.
SELECT count(*) FROM {schema}.wait WHERE run = %(run)s AND key = ANY(%(keys)s) AND state <> 'pending'

-- name: read_waits :many
-- Read the waits of a run with the payload that settled them, in the order they were registered.
-- Locks: none. Index: wait_pkey, fact_pkey.
SELECT w.key, w.seq, w.name, w.address, w.mode, w.deadline, w.state, w.fact, coalesce(f.payload, w.payload),
       coalesce(w.deadline <= {schema}.now(), false), w.created_at, w.settled_at
  FROM {schema}.wait AS w LEFT JOIN {schema}.fact AS f ON f.id = w.fact
 WHERE w.run = %(run)s ORDER BY w.seq

-- name: missed_waits :many
-- Of the next `limit` pending waits, list those that a routed fact already satisfies: each would be a lost wake-up (RG-9).
-- The last of them is listed in any case, as the place to go on from.
-- Locks: none. Index: wait_pending, fact_address, fact_keyed.
WITH t AS MATERIALIZED (SELECT {schema}.now() - interval '1 second' AS at),
w AS MATERIALIZED (
    SELECT address, run, key, row_number() OVER (ORDER BY address, run, key) AS n
      FROM {schema}.wait
     WHERE state = 'pending' AND address >= %(address)s AND (address, run, key) > (%(address)s, %(run)s, %(key)s)
     ORDER BY address, run, key LIMIT %(limit)s),
m AS (
    SELECT w.address, w.run, w.key, w.n,
           r.finished_at IS NULL AND (
               EXISTS (SELECT 1 FROM {schema}.fact AS f, t
                        WHERE f.address = w.address AND f.routed_at < t.at
                          AND f.at >= CASE WHEN w.address LIKE '["run",%%' THEN '-infinity' ELSE r.created_at END)
               OR EXISTS (SELECT 1 FROM {schema}.fact AS f, t
                           WHERE f.address = w.address AND f.address LIKE '["key",%%' AND f.routed_at < t.at
                             AND f.xid >= pg_snapshot_xmin(r.snapshot) AND {schema}.ended_after(f.xid, r.snapshot))) AS missed
      FROM w JOIN {schema}.run AS r ON r.no = w.run)
SELECT address, run, key, missed, (SELECT count(*) FROM w) FROM m WHERE missed OR n = (SELECT max(n) FROM m) ORDER BY n
