-- Progress: what a body says of how far it is. One row per run, of key '', and one per step that has sent heartbeats.

-- name: note_progress :count
-- Keep what a body has said since it was kept last, beside what it has said nothing new of; what was said later, or under a later grant, is never overwritten.
-- No row: the grant has ended.
-- Locks: run FOR SHARE, then progress. Index: run_pkey, progress_pkey.
WITH r AS MATERIALIZED (
    SELECT no FROM {schema}.run
     WHERE no = %(run)s AND fence = %(fence)s AND claim = %(claim)s AND state = 'running'
       FOR SHARE)
INSERT INTO {schema}.progress AS p (run, key, fence, turn, status, done, total, payload, at)
SELECT r.no, n.key, %(fence)s, n.turn, n.status, n.done, n.total, n.payload, {schema}.now()
  FROM r, unnest(%(keys)s::text[], %(turns)s::bigint[], %(statuses)s::text[], %(dones)s::float8[], %(totals)s::float8[], %(payloads)s::bytea[])
          AS n (key, turn, status, done, total, payload)
 ORDER BY n.key
ON CONFLICT ON CONSTRAINT progress_pkey DO UPDATE
   SET fence = excluded.fence, turn = excluded.turn, status = coalesce(excluded.status, p.status), done = coalesce(excluded.done, p.done),
       total = CASE WHEN excluded.done IS NULL THEN p.total ELSE excluded.total END, payload = coalesce(excluded.payload, p.payload), at = excluded.at
 WHERE (p.fence, p.turn) < (excluded.fence, excluded.turn)

-- name: read_progress :many
-- Read what the bodies of a run have said, that of the run itself first.
-- Locks: none. Index: progress_pkey.
SELECT key, nullif(status, ''), done, total, payload, at FROM {schema}.progress WHERE run = %(run)s ORDER BY key
