-- The audit: what people did to runs. A row is written in the transaction of what it tells of, and never changed.

-- name: add_audit :count
-- Record an act, once: it has the id of the fact that asked for it.
-- Locks: audit. Index: audit_pkey.
INSERT INTO {schema}.audit (id, act, run, actor, reason, detail)
VALUES (%(id)s, %(act)s, %(run)s, %(actor)s, %(reason)s, %(detail)s)
ON CONFLICT ON CONSTRAINT audit_pkey DO NOTHING

-- name: audit_of_run :many
-- Read what people did to a run, the first act first.
-- Locks: none. Index: audit_run.
SELECT act, actor, reason, detail, at FROM {schema}.audit WHERE run = %(run)s ORDER BY at, id
