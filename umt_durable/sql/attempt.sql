-- The attempt: one row per grant of a run. Written by the statements of run.sql that begin and end grants.

-- name: look_attempt :maybe
-- Say how an attempt of ours ended, after a lost reply.
-- Locks: none. Index: attempt_pkey.
SELECT outcome FROM {schema}.attempt WHERE run = %(run)s AND fence = %(fence)s AND claim = %(claim)s

-- name: list_attempts :many
-- Read the grants of a run, the first one first.
-- Locks: none. Index: attempt_pkey.
SELECT fence, worker, claimed_at, ended_at, outcome, error FROM {schema}.attempt WHERE run = %(run)s ORDER BY fence
