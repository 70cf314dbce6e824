-- What people look at: the server, and what stands still in the schema. Reads only, over several tables.

-- name: read_arguments :maybe
-- Read the stored arguments of a run.
-- Locks: none. Index: run_pkey.
SELECT args, codec FROM {schema}.run WHERE no = %(run)s

-- name: blocked_runs :many
-- Count, by task and version, the ready runs that no live worker can take, without those of tasks whose names begin with
-- `own`, and those whose task or queue is paused.
-- Locks: none. Index: run_ready.
WITH live AS MATERIALIZED (
    SELECT DISTINCT unnest(versions) AS version FROM {schema}.worker_view WHERE lease_until > {schema}.now())
SELECT task, version, count(*), min(id)
  FROM {schema}.run_view
 WHERE state = 'ready' AND paused_at IS NULL
   AND (CASE WHEN version IS NULL THEN task ELSE task || '@' || version END) NOT IN (SELECT version FROM live)
   AND (%(own)s::text IS NULL OR NOT starts_with(task, %(own)s))
   AND NOT EXISTS (SELECT 1 FROM {schema}.pause_view AS p
                    WHERE p.resumed_at IS NULL AND p.name = CASE p.scope WHEN 'task' THEN task ELSE queue END)
 GROUP BY task, version ORDER BY count(*) DESC, task, version

-- name: live_runs_by_version :many
-- Count by task, version and state the runs that have not ended, paused ones under their own name, without those of
-- tasks whose names begin with `own`.
-- Locks: none. Index: none (a scan; for people).
SELECT task, version, CASE WHEN paused_at IS NULL THEN state ELSE 'paused' END AS stands, count(*)
  FROM {schema}.run_view
 WHERE finished_at IS NULL AND (%(task)s::text IS NULL OR task = %(task)s)
   AND (%(own)s::text IS NULL OR NOT starts_with(task, %(own)s))
 GROUP BY task, version, stands ORDER BY task, version, stands

-- name: select_runs :many
-- List (no, id) of the next runs that people want something of, by task, queue, state or mark of a pause, whether
-- paused, and age, without those of tasks whose names begin with `own`.
-- Locks: none. Index: run_pkey.
SELECT no, id FROM {schema}.run
 WHERE no > %(after)s AND (state = ANY(%(states)s) OR (%(or_paused)s AND paused_at IS NOT NULL AND finished_at IS NULL))
   AND (%(own)s::text IS NULL OR NOT starts_with(task, %(own)s))
   AND (%(task)s::text IS NULL OR task = %(task)s) AND (%(queue)s::text IS NULL OR queue = %(queue)s)
   AND (%(paused)s::boolean IS NULL OR (paused_at IS NOT NULL) = %(paused)s)
   AND (%(age)s::interval IS NULL OR created_at <= (SELECT {schema}.now()) - %(age)s::interval)
 ORDER BY no LIMIT %(limit)s

-- name: quarantined_runs :many
-- Count the runs that wait for a person, by task and reason.
-- Locks: none. Index: none (a scan; for people).
SELECT task, reason, count(*), min(id) FROM {schema}.run_view WHERE state = 'quarantined' GROUP BY task, reason ORDER BY count(*) DESC, task

-- name: dead_events :many
-- Count the outbox rows that were given up, by type and reason; in one those of which nobody knows whether they left: the
-- reason of each is about its own run.
-- Locks: none. Index: outbox_event_dead.
SELECT type, CASE WHEN doubtful THEN '' ELSE coalesce(reason, '') END, count(*), doubtful
  FROM (SELECT type, reason, once AND leaving_at IS NOT NULL AS doubtful FROM {schema}.outbox_view WHERE status = 'dead') AS dead
 GROUP BY 1, 2, 4 ORDER BY 3 DESC

-- name: longest_parked :one
-- Say how many seconds pass from the enqueuing of a run to the end of the longest sleep or wait there is now.
-- Locks: none. Index: run_due, wait_pending.
SELECT greatest(
    (SELECT extract(epoch FROM max(wake_at - created_at)) FROM {schema}.run WHERE state IN ('sleeping', 'waiting', 'retrying')),
    (SELECT extract(epoch FROM max(w.deadline - r.created_at))
       FROM {schema}.wait AS w JOIN {schema}.run AS r ON r.no = w.run WHERE w.state = 'pending'))::float8

-- name: parked_in_chords :many
-- List the runs that chords wait for and that are parked for longer than a backend keeps a chord: id, and the seconds from
-- their enqueuing to the end of their sleep or wait. A wait without end has none. Of a run whose message is sealed that
-- is given as well: whether a chord waits for it is for the reader to see.
-- Locks: none. Index: run_due, wait_pending.
SELECT id, seconds, sealed
  FROM (SELECT r.id, CASE WHEN substr(r.envelope, 1, 1) = '\x00'::bytea THEN r.envelope END AS sealed,
               extract(epoch FROM greatest(r.wake_at, max(w.deadline), {schema}.now()) - r.created_at)::float8 AS seconds
          FROM {schema}.run AS r LEFT JOIN {schema}.wait AS w ON w.run = r.no AND w.state = 'pending'
         WHERE r.state IN ('sleeping', 'waiting', 'retrying') AND r.envelope IS NOT NULL
           AND CASE WHEN substr(r.envelope, 1, 1) = '\x00'::bytea THEN true
                    ELSE json_typeof(convert_from(r.envelope, 'UTF8')::json -> 'chord') = 'object'
                         OR EXISTS (SELECT FROM json_array_elements(convert_from(r.envelope, 'UTF8')::json -> 'chain') AS follower (one)
                                     WHERE json_typeof(follower.one -> 'options' -> 'chord') = 'object') END
         GROUP BY r.no) AS parked
 WHERE seconds > %(kept)s ORDER BY seconds DESC

-- name: runs_with_priority :many
-- Count by queue and task the runs under way that have a priority.
-- Locks: none. Index: none (a scan; for people).
SELECT queue, task, count(*), min(id) FROM {schema}.run WHERE priority > 0 AND finished_at IS NULL GROUP BY queue, task ORDER BY 1, 2

-- name: sealed_samples :many
-- Read the smallest arguments that each key has sealed, of the newest and of the oldest runs, up to `limit` of each. Where
-- payloads are sealed at all, arguments are.
-- Locks: none. Index: run_pkey.
WITH s AS MATERIALIZED (
    (SELECT args FROM {schema}.run ORDER BY no DESC LIMIT %(limit)s)
    UNION ALL (SELECT args FROM {schema}.run ORDER BY no LIMIT %(limit)s))
SELECT DISTINCT ON ({schema}.key_of(args)) args FROM s
 WHERE substr(args, 1, 1) = '\x00'::bytea ORDER BY {schema}.key_of(args), octet_length(args)

-- name: read_server_settings :one
-- Read what decides whether commits are kept, who is connected, and what this connection was given.
-- Locks: none. Index: none.
SELECT current_setting('server_version_num')::int, current_setting('server_encoding'), pg_is_in_recovery(),
       current_setting('fsync'), current_setting('synchronous_commit'), current_setting('full_page_writes'),
       pg_backend_pid(), extract(epoch FROM clock_timestamp())::float8,
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'), current_setting('max_connections')::int

-- name: read_clock_offset :one
-- Say by how many seconds the schema's clock is moved from the server's.
-- Locks: none. Index: none.
SELECT extract(epoch FROM {schema}.now() - clock_timestamp())::float8

-- name: read_timeouts :one
-- Read the time limits of this connection, in milliseconds; zero means none.
-- Locks: none. Index: none.
SELECT extract(epoch FROM current_setting('statement_timeout')::interval)::float8 * 1000,
       extract(epoch FROM current_setting('lock_timeout')::interval)::float8 * 1000,
       extract(epoch FROM current_setting('idle_in_transaction_session_timeout')::interval)::float8 * 1000

-- name: missing_rights :many
-- List which of the given rights on tables, and of those to call all functions, this user lacks. Rights on columns alone
-- do not count.
-- Locks: none. Index: none.
WITH s AS MATERIALIZED (
    SELECT oid, has_schema_privilege(oid, 'USAGE') AS usable FROM pg_namespace WHERE nspname = %(name)s)
SELECT needed.name || ' (' || string_agg(needed.right, ', ' ORDER BY needed.place) || ')'
  FROM unnest(%(tables)s::text[], %(rights)s::text[]) WITH ORDINALITY AS needed (name, "right", place), s, pg_class AS c
 WHERE c.relnamespace = s.oid AND c.relname = needed.name AND NOT (s.usable AND has_table_privilege(c.oid, needed.right))
 GROUP BY needed.name
UNION ALL
SELECT DISTINCT p.proname || ' (EXECUTE)'
  FROM pg_proc AS p JOIN s ON p.pronamespace = s.oid WHERE NOT (s.usable AND has_function_privilege(p.oid, 'EXECUTE'))
 ORDER BY 1

-- name: oldest_transaction :maybe
-- Find the transaction of this database that has been open longest. It keeps dead rows from being removed.
-- Locks: none. Index: none.
SELECT pid, coalesce(application_name, ''), coalesce(state, ''), extract(epoch FROM clock_timestamp() - xact_start)::float8
  FROM pg_stat_activity
 WHERE datname = current_database() AND backend_type = 'client backend' AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
 ORDER BY xact_start LIMIT 1

-- name: standing_of_run :maybe
-- Read what decides when a run goes on: the hint it waits for, the process that holds it, what of it is under way.
-- Locks: none. Index: run_pkey, worker_pkey, outbox_event_due and outbox_event_dead (all of them; for people), run_unfinished.
SELECT r.deliver_by, r.redelivers, r.expires_at, r.attempt_deadline, w.host, w.pid, coalesce(w.lease_until > {schema}.now(), false),
       (SELECT min(o.next_attempt_at) FROM {schema}.outbox_event AS o WHERE o.run = r.no AND o.type = 'run' AND o.status = 'pending'),
       (SELECT count(*) FROM {schema}.outbox_event AS o WHERE o.run = r.no AND o.type IN ('result', 'callback') AND o.status = 'pending'),
       EXISTS (SELECT 1 FROM {schema}.outbox_event AS o WHERE o.run = r.no AND o.type = 'run' AND o.status = 'dead'),
       (SELECT coalesce(jsonb_object_agg(c.parent_key, c.live), '{}')
          FROM (SELECT parent_key, count(*) AS live FROM {schema}.run
                 WHERE parent_no = r.no AND finished_at IS NULL AND parent_key IS NOT NULL GROUP BY parent_key) AS c),
       {schema}.now(), r.state, r.fence
  FROM {schema}.run AS r LEFT JOIN {schema}.worker AS w ON w.id = r.worker
 WHERE r.no = %(run)s

-- name: open_steps_of_run :many
-- Read the steps of a run that have begun and have no outcome yet.
-- Locks: none. Index: step_pkey.
SELECT key, kind, failures, wake_at, started_at FROM {schema}.step
 WHERE run = %(run)s AND state = 'started' ORDER BY seq LIMIT %(limit)s

-- name: open_waits_of_run :many
-- Read what a run waits for, a group before its parts.
-- Locks: none. Index: wait_pkey.
SELECT key, name, mode, address, deadline, need FROM {schema}.wait
 WHERE run = %(run)s AND state = 'pending' ORDER BY seq LIMIT %(limit)s
