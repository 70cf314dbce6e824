-- The worker: one row per process with a lease, the only row a heartbeat writes. Never locked together with another row.

-- name: register_worker :count
-- Begin a lease under a fresh id. Repeating it changes nothing.
-- Locks: none. Index: worker_pkey.
INSERT INTO {schema}.worker (id, node, pid, host, lease_until, versions, queues, boottime)
VALUES (%(id)s, %(node)s, %(pid)s, %(host)s, {schema}.now() + %(lease)s::interval, %(versions)s, %(queues)s::text::jsonb, %(boottime)s)
ON CONFLICT ON CONSTRAINT worker_pkey DO NOTHING

-- name: renew_lease :count
-- Prolong a lease that has not ended. No row: this worker id is lost for good.
-- Locks: worker. Index: worker_pkey.
UPDATE {schema}.worker
   SET lease_until = {schema}.now() + %(lease)s::interval, reserved = %(reserved)s::text::jsonb, counters = %(counters)s::text::jsonb,
       last_claim_at = CASE WHEN %(claimed)s THEN {schema}.now() ELSE last_claim_at END
 WHERE id = %(id)s AND lease_until > {schema}.now()

-- name: worker_is_live :one
-- Say whether the database holds a lease as live, whatever its process believes.
-- Locks: none. Index: worker_pkey.
SELECT EXISTS (SELECT 1 FROM {schema}.worker WHERE id = %(id)s AND lease_until > {schema}.now())

-- name: end_lease :count
-- Give a lease up at once.
-- Locks: worker. Index: worker_pkey.
UPDATE {schema}.worker SET lease_until = '-infinity', counters = coalesce(%(counters)s::text::jsonb, counters) WHERE id = %(id)s AND lease_until > '-infinity'

-- name: end_leases_of_process :many
-- End the leases of a process that was seen to have ended at a moment of its machine's running time. What began later
-- is another process to which the system has given the same number.
-- Locks: worker. Index: none (a small table).
UPDATE {schema}.worker SET lease_until = '-infinity' 
 WHERE node = %(node)s AND pid = %(pid)s AND (boottime IS NULL OR boottime <= %(seen)s)
RETURNING id

-- name: next_lease_end :one
-- Say in how many seconds the first lease that holds a run ends.
-- Locks: none. Index: run_running.
SELECT extract(epoch FROM min(w.lease_until) - {schema}.now())::float8
  FROM {schema}.worker AS w
 WHERE w.lease_until > {schema}.now() AND EXISTS (SELECT 1 FROM {schema}.run AS r WHERE r.state = 'running' AND r.worker = w.id)

-- name: live_versions :many
-- List what live workers declare: `task` and `task@version`.
-- Locks: none. Index: none (a small table).
SELECT DISTINCT unnest(versions) FROM {schema}.worker_view WHERE lease_until > {schema}.now()

-- name: reserved_hints :many
-- Sum the hints that live processes hold in hand, by queue.
-- Locks: none. Index: none (a small table).
SELECT entry.key, sum(entry.value::int)
  FROM {schema}.worker AS w, jsonb_each_text(w.reserved) AS entry
 WHERE w.lease_until > {schema}.now() GROUP BY entry.key

-- name: list_workers :many
-- Read the workers whose lease is live or ended less than an hour ago.
-- Locks: none. Index: none (a small table).
SELECT id, node, pid, host, lease_until > {schema}.now(), started_at, versions, counters
  FROM {schema}.worker_view
 WHERE lease_until > {schema}.now() OR started_at > {schema}.now() - interval '1 day'
 ORDER BY started_at DESC LIMIT %(limit)s

-- name: sum_counters :many
-- Sum the counters of all processes.
-- Locks: none. Index: none (a small table).
SELECT entry.key, sum(entry.value::bigint)::bigint
  FROM {schema}.worker_view AS w, jsonb_each_text(w.counters) AS entry GROUP BY entry.key ORDER BY entry.key

-- name: forget_workers :count
-- Delete workers whose lease ended more than a day ago and that hold nothing.
-- Locks: worker. Index: none (a small table).
DELETE FROM {schema}.worker AS w
 WHERE w.lease_until < {schema}.now() - interval '1 day'
   AND w.started_at < {schema}.now() - interval '1 day'
   AND NOT EXISTS (SELECT 1 FROM {schema}.run AS r WHERE r.state = 'running' AND r.worker = w.id)
