-- The setting: facts about the schema itself.

-- name: read_setting :maybe
-- Read one setting as JSON text.
-- Locks: none. Index: setting_pkey.
SELECT value::text FROM {schema}.setting WHERE name = %(name)s

-- name: signing_key :one
-- Read the schema's own secret; null when it is lost.
-- Locks: none. Index: setting_pkey.
SELECT {schema}.signing_key()

-- name: now :one
-- Read the clock that decides.
-- Locks: none. Index: none.
SELECT {schema}.now()

-- name: read_server :one
-- Read when the server started and what time its own clock shows, in seconds. Not the schema's clock: a test moves that
-- one on purpose.
-- Locks: none. Index: none.
SELECT pg_postmaster_start_time(), extract(epoch FROM clock_timestamp())::float8

-- name: limit_lock_wait :one
-- Let the statements of this transaction wait for a lock no longer than that.
-- Locks: none. Index: none.
SELECT set_config('lock_timeout', %(limit)s, true)
