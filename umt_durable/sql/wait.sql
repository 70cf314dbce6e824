-- The wait: a run's registered wait for a fact. It leaves `pending` once (I9), under the lock of its run.

-- name: lock_address :one
-- Serialise register and router of one address. Before any row lock; the look for the fact comes in a later statement.
-- Locks: the address. Index: none.
SELECT pg_advisory_xact_lock(hashtext(%(space)s), hashtext(%(address)s)) IS NULL

-- name: lock_addresses :one
-- The same for several at once, in the ascending order of what is really locked: the hashes, not the texts.
-- Locks: the addresses, ascending. Index: none.
SELECT count(pg_advisory_xact_lock(hashtext(%(space)s), a.hash) IS NULL)
  FROM (SELECT DISTINCT hashtext(address) AS hash FROM unnest(%(addresses)s::text[]) AS address ORDER BY hash) AS a

-- name: try_lock_address :one
-- The same without waiting.
-- Locks: the address. Index: none.
SELECT pg_try_advisory_xact_lock(hashtext(%(space)s), hashtext(%(address)s))

-- name: register_wait :maybe
-- Record a wait, once: a replayed one keeps its deadline and outcome. A group is a wait that needs so many of its parts,
-- which name it in `part_of`. The reply says whether a cancel is pending.
-- Locks: the addresses (held), run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode, deadline, part_of, need, announced)
    SELECT no, %(key)s, %(seq)s, %(name)s, %(address)s, %(mode)s, coalesce(%(until)s::timestamptz, {schema}.now() + %(timeout)s::interval),
           %(part_of)s, %(need)s, %(announced)s
      FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT wait_pkey DO NOTHING)
SELECT cancel_at IS NOT NULL FROM r

-- name: announce_wait :maybe
-- Record that the address of a wait was handed out. The reply says whether a cancel is pending.
-- Locks: run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (UPDATE {schema}.wait SET announced = true FROM r WHERE wait.run = r.no AND wait.key = %(key)s)
SELECT cancel_at IS NOT NULL FROM r

-- name: settle_wait :maybe
-- Give a pending wait of a run, whose row the caller has locked, its outcome; the reply names the group it is a part of.
-- Locks: run (held), then wait. Index: wait_pkey.
UPDATE {schema}.wait SET state = %(state)s, fact = %(fact)s, payload = %(payload)s, settled_at = {schema}.now()
 WHERE run = %(run)s AND key = %(key)s AND state = 'pending'
RETURNING part_of

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

-- name: close_groups :many
-- Of some groups of a run, whose row the caller has locked, settle those that have as many parts as they need, and cancel
-- the parts that are left of any that is settled: the losers end in the transaction that settles the winner.
-- Locks: run (held), then wait. Index: wait_pkey, wait_parts.
WITH g AS (
    UPDATE {schema}.wait AS g SET state = 'satisfied', settled_at = {schema}.now()
     WHERE g.run = %(run)s AND g.key = ANY(%(groups)s::text[]) AND g.state = 'pending'
       AND g.need <= (SELECT count(*) FROM {schema}.wait AS p
                       WHERE p.run = g.run AND p.part_of = g.key AND p.state IN ('satisfied', 'timed_out'))
    RETURNING g.key),
l AS (
    UPDATE {schema}.wait AS l SET state = 'cancelled', settled_at = {schema}.now()
     WHERE l.run = %(run)s AND l.part_of = ANY(%(groups)s::text[]) AND l.state = 'pending'
       AND (l.part_of IN (SELECT key FROM g)
            OR EXISTS (SELECT 1 FROM {schema}.wait AS c WHERE c.run = l.run AND c.key = l.part_of AND c.state <> 'pending')))
SELECT key FROM g

-- name: await_answer :maybe
-- Record the wait for the answer that whoever has the token brings, once. The reply says whether a cancel is pending.
-- Locks: run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode, deadline, token)
    SELECT no, %(key)s, %(seq)s, %(name)s, %(address)s, 'task', {schema}.now() + %(timeout)s::interval, %(token)s
      FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT wait_pkey DO NOTHING)
SELECT cancel_at IS NOT NULL FROM r

-- name: awaited_answer :maybe
-- Read the wait for an answer of a run: of the given nesting, or, without one, of the highest.
-- Locks: none. Index: run_id_nesting, wait_pkey.
SELECT w.run, w.key, w.address, w.state, w.token
  FROM {schema}.wait AS w
 WHERE w.key = %(key)s AND w.token IS NOT NULL
   AND w.run = (SELECT r.no FROM {schema}.run AS r
                 WHERE r.id = %(id)s AND (%(nesting)s::int IS NULL OR r.nesting = %(nesting)s) ORDER BY r.nesting DESC LIMIT 1)

-- name: awaited_tasks :many
-- List the addresses at which a run still waits for an answer, or did so when it ended.
-- Locks: none. Index: wait_pkey.
SELECT address FROM {schema}.wait WHERE run = %(run)s AND mode = 'task' AND fact IS NULL AND payload IS NULL

-- name: give_up_answer :maybe
-- Make a pending wait for an answer that has no deadline due now, in a run whose row the caller has locked.
-- Locks: run (held), then wait. Index: wait_pkey.
UPDATE {schema}.wait SET deadline = {schema}.now()
 WHERE run = %(run)s AND key = 'umt.task/' || %(step)s AND state = 'pending' AND deadline IS NULL
RETURNING key

-- name: await_children :maybe
-- Record the one wait for all children of a step, once. The reply says whether a cancel is pending.
-- Locks: run FOR SHARE, then wait. Index: run_pkey, wait_pkey.
WITH r AS MATERIALIZED (
    SELECT no, cancel_at FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE),
w AS (
    INSERT INTO {schema}.wait (run, key, seq, name, address, mode)
    SELECT no, %(key)s, %(seq)s, %(name)s, %(address)s, 'join' FROM r WHERE cancel_at IS NULL
    ON CONFLICT ON CONSTRAINT wait_pkey DO NOTHING)
SELECT cancel_at IS NOT NULL FROM r

-- name: joining_wait :maybe
-- Find the pending wait for the children of a step.
-- Locks: none (the address is held). Index: wait_pending.
SELECT run, key FROM {schema}.wait WHERE address = %(address)s AND state = 'pending' AND mode = 'join'

-- name: time_out_waits :many
-- Time out the pending waits of a run, whose row the caller has locked, whose deadline has passed; groups apart. Not
-- those for an answer of an ordinary task: it may still come, and what its absence means is for the body to say. Nor a
-- begun step's that was completed in time: a router will bring what was said.
-- Locks: run (held), then wait. Index: wait_pkey, fact_address.
UPDATE {schema}.wait SET state = 'timed_out', settled_at = {schema}.now()
 WHERE run = %(run)s AND state = 'pending' AND deadline <= {schema}.now() AND part_of IS NULL AND need IS NULL AND mode <> 'task'
   AND NOT (mode = 'begin' AND EXISTS (SELECT 1 FROM {schema}.fact AS f WHERE f.address = wait.address))
RETURNING key

-- name: time_out_part :maybe
-- The same for the one of a group, or of its parts, that was due first: one at a time, so that one alone wins.
-- Locks: run (held), then wait. Index: wait_pkey.
UPDATE {schema}.wait SET state = 'timed_out', settled_at = {schema}.now()
 WHERE run = %(run)s AND key = (
           SELECT key FROM {schema}.wait
            WHERE run = %(run)s AND state = 'pending' AND deadline <= {schema}.now() AND (part_of IS NOT NULL OR need IS NOT NULL)
            ORDER BY deadline, need IS NOT NULL, seq LIMIT 1)
RETURNING key, coalesce(part_of, key)

-- name: contradicted_waits :many
-- List the waits of a run that took the first fact at a fact's address, while this one says something else.
-- Locks: none (the address is held). Index: fact_pkey, run_id_nesting, wait_pkey.
SELECT w.run, w.key
  FROM {schema}.fact AS f
  JOIN {schema}.run AS r ON r.id = %(run_id)s
  JOIN {schema}.wait AS w ON w.run = r.no AND w.address = f.address AND w.mode = 'first' AND w.state = 'satisfied'
  JOIN {schema}.fact AS g ON g.id = w.fact
 WHERE f.id = %(fact)s AND g.id <> f.id AND {schema}.differ(g.payload, f.payload)
   AND NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = w.run AND d.fact = f.id)

-- name: pending_waits :many
-- List the pending waits at a fact's address that it satisfies, in the order of their runs. A fact said under a key is seen
-- by runs that were there when it committed; see look_for_fact.
-- Locks: none (the address is held). Index: wait_pending, run_pkey, fact_pkey.
SELECT w.run, w.key, w.mode
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
-- Read the waits of a run, or some of them, with the payload that settled them, in the order they were registered. One
-- of more than `inline` bytes is not read: see read_journal.
-- Locks: none. Index: wait_pkey, fact_pkey.
SELECT w.key, w.seq, w.name, w.address, w.mode, w.deadline, w.state, w.fact,
       CASE WHEN octet_length(coalesce(f.payload, w.payload)) <= %(inline)s THEN coalesce(f.payload, w.payload) END,
       coalesce(w.deadline <= {schema}.now(), false), w.created_at, w.settled_at, w.part_of, w.need, w.announced,
       extract(epoch FROM {schema}.now() - w.created_at)::float8, octet_length(coalesce(f.payload, w.payload))
  FROM {schema}.wait AS w LEFT JOIN {schema}.fact AS f ON f.id = w.fact
 WHERE w.run = %(run)s AND (%(keys)s::text[] IS NULL OR w.key = ANY(%(keys)s::text[])) ORDER BY w.seq

-- name: read_payload :one
-- Read one payload that the waits were read without.
-- Locks: none. Index: wait_pkey, fact_pkey.
SELECT coalesce(f.payload, w.payload)
  FROM {schema}.wait AS w LEFT JOIN {schema}.fact AS f ON f.id = w.fact WHERE w.run = %(run)s AND w.key = %(key)s

-- name: missed_waits :many
-- Of the next `limit` pending waits, list those that a routed fact already satisfies: each would be a lost wake-up (RG-9).
-- The last of them is listed in any case, as the place to go on from.
-- Locks: none. Index: wait_pending, fact_address, fact_keyed.
WITH t AS MATERIALIZED (SELECT {schema}.now() - interval '1 second' AS at),
w AS MATERIALIZED (
    SELECT address, run, key, row_number() OVER (ORDER BY address, run, key) AS n
      FROM {schema}.wait
     WHERE state = 'pending' AND mode <> 'join' AND address >= %(address)s AND (address, run, key) > (%(address)s, %(run)s, %(key)s)
     ORDER BY address, run, key LIMIT %(limit)s),
m AS (
    SELECT w.address, w.run, w.key, w.n,
           r.finished_at IS NULL AND (
               EXISTS (SELECT 1 FROM {schema}.fact AS f, t
                        WHERE f.address = w.address AND f.routed_at < t.at
                          AND f.at >= CASE WHEN w.address LIKE '["run",%%' THEN '-infinity' ELSE r.created_at END
                           AND NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = w.run AND d.fact = f.id))
               OR EXISTS (SELECT 1 FROM {schema}.fact AS f, t
                           WHERE f.address = w.address AND f.address LIKE '["key",%%' AND f.routed_at < t.at
                             AND f.xid >= pg_snapshot_xmin(r.snapshot) AND {schema}.ended_after(f.xid, r.snapshot)
                              AND NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = w.run AND d.fact = f.id))) AS missed
      FROM w JOIN {schema}.run AS r ON r.no = w.run)
SELECT address, run, key, missed, (SELECT count(*) FROM w) FROM m WHERE missed OR n = (SELECT max(n) FROM m) ORDER BY n
