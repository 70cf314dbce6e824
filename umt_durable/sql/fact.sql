-- The fact: a statement that became true. Inserted by whoever says it, never updated but for `routed_at`.

-- name: signal_run :maybe
-- Say a fact to one run; null when there is no such run. Repeating it with the same id or dedupe changes nothing and
-- gives the id of the first.
-- Locks: none. Index: run_id_nesting, fact_pkey, fact_dedupe.
SELECT {schema}.signal_run(%(run)s::text, %(name)s::text, %(payload)s::bytea, %(actor)s::text, %(dedupe)s::text, %(fact)s::uuid)

-- name: ask_run :maybe
-- Say a fact of a reserved name to one run: what operators and the engine ask of it. Otherwise as signal_run.
-- Locks: none. Index: run_id_nesting, fact_pkey, fact_dedupe.
SELECT {schema}.ask_run(%(run)s::text, %(name)s::text, %(payload)s::bytea, %(actor)s::text, %(dedupe)s::text, %(fact)s::uuid)

-- name: complete_step :one
-- Say what a begun step ended in, once; the reply is the fact and what became of it.
-- Locks: none. Index: run_id_nesting, wait_pkey, fact_dedupe.
SELECT fact, outcome FROM {schema}.complete_step(%(run)s::text, %(nesting)s::int, %(key)s::text, %(generation)s::int, %(payload)s::bytea, %(actor)s::text, %(fact)s::uuid)

-- name: may_apply :one
-- Say whether this user may apply what a fact says; an application's may only say it.
-- Locks: none. Index: none.
SELECT has_table_privilege(c.oid, 'UPDATE')
  FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
 WHERE n.nspname = %(name)s AND c.relname = 'run'

-- name: emit_fact :one
-- Say a fact under a name and key, for whoever waits for it. Repeating it with the same id or dedupe changes nothing and
-- gives the id of the first.
-- Locks: none. Index: fact_pkey, fact_dedupe.
SELECT {schema}.emit_fact(%(name)s::text, %(key)s::text, %(payload)s::bytea, %(actor)s::text, %(dedupe)s::text, %(fact)s::uuid)

-- name: look_for_fact :maybe
-- Find the fact that satisfies a wait in the given mode, among those at its address. Of those under a key a run sees what
-- committed after it had been made, by the order of commits; by the clock as well, for rows restored from another server.
-- Mode `first` stays with what a wait of the run took as the first; `queue` takes the oldest that no wait refers to. What an
-- earlier generation of the run has read is not there any more.
-- Locks: the address (held). Index: fact_address, fact_keyed, fact_read_pkey, wait_pkey.
WITH r AS MATERIALIZED (SELECT created_at, snapshot FROM {schema}.run WHERE no = %(run)s AND NOT %(of_run)s),
f AS (
    SELECT id, at FROM {schema}.fact WHERE %(of_run)s AND address = %(address)s
    UNION ALL
    SELECT id, at FROM {schema}.fact WHERE address = %(address)s AND at >= (SELECT created_at FROM r)
    UNION ALL
    SELECT id, at FROM {schema}.fact
     WHERE address = %(address)s AND address LIKE '["key",%%' AND xid >= (SELECT pg_snapshot_xmin(snapshot) FROM r)
       AND {schema}.ended_after(xid, (SELECT snapshot FROM r)))
SELECT id FROM f
 WHERE NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = %(run)s AND d.fact = f.id)
   AND (%(mode)s <> 'queue' OR NOT EXISTS (SELECT 1 FROM {schema}.wait AS w WHERE w.run = %(run)s AND w.fact = f.id))
 ORDER BY %(mode)s = 'first' AND EXISTS (SELECT 1 FROM {schema}.wait AS w WHERE w.run = %(run)s AND w.mode = 'first' AND w.fact = f.id) DESC,
          CASE WHEN %(mode)s = 'latest' THEN at END DESC, at, id
 LIMIT 1

-- name: contradicting_facts :one
-- Count the facts at the address of one that say something else, and that a router has finished with; not those that an
-- earlier generation of the run has read.
-- Locks: the address (held). Index: fact_address, fact_pkey, fact_read_pkey.
SELECT count(*) FROM {schema}.fact AS f JOIN {schema}.fact AS g ON g.id = %(fact)s
 WHERE f.address = %(address)s AND f.id <> g.id AND f.routed_at IS NOT NULL AND {schema}.differ(f.payload, g.payload)
   AND NOT EXISTS (SELECT 1 FROM {schema}.fact_read AS d WHERE d.run = %(run)s AND d.fact = f.id)

-- name: unrouted_facts :many
-- List the oldest facts that no router has finished with. Ids are no cursor: late commits are found by state (RG-18).
-- Locks: none. Index: fact_unrouted.
SELECT id, address, name FROM {schema}.fact WHERE routed_at IS NULL ORDER BY at LIMIT %(limit)s

-- name: unrouted_fact :maybe
-- Re-check under the address lock that a fact is still to be routed.
-- Locks: the address (held). Index: fact_pkey.
SELECT id, address, name, payload, actor FROM {schema}.fact WHERE id = %(fact)s AND routed_at IS NULL

-- name: unrouted_at :many
-- List the unrouted facts of one address, under its lock.
-- Locks: the address (held). Index: fact_address.
SELECT id FROM {schema}.fact WHERE address = %(address)s AND routed_at IS NULL

-- name: cancels_of_children :many
-- List the unrouted cancels of the live children that end with a run which has ended.
-- Locks: none. Index: run_id_nesting, run_children, fact_address.
SELECT f.id
  FROM {schema}.run AS p
  JOIN {schema}.run AS c ON c.parent_no = p.no AND c.finished_at IS NULL AND c.on_parent_end = 'cancel'
  JOIN {schema}.fact AS f ON f.address = jsonb_build_array('run', c.id, 'umt.cancel')::text AND f.routed_at IS NULL
 WHERE p.id = %(run)s AND p.finished_at IS NOT NULL LIMIT %(limit)s

-- name: mark_all_routed :count
-- The same as mark_routed for several facts of one address.
-- Locks: the address (held), fact. Index: fact_pkey.
UPDATE {schema}.fact SET routed_at = {schema}.now() WHERE id = ANY(%(facts)s) AND routed_at IS NULL

-- name: mark_routed :count
-- Record that every wait a fact can satisfy has been dealt with.
-- Locks: the address (held), fact. Index: fact_pkey.
UPDATE {schema}.fact SET routed_at = {schema}.now() WHERE id = %(fact)s AND routed_at IS NULL

-- name: facts_of_run :many
-- Read the facts said to one run.
-- Locks: none. Index: fact_address.
SELECT id, name, actor, at, routed_at FROM {schema}.fact WHERE address LIKE %(pattern)s ORDER BY at
