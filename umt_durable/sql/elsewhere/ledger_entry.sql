-- The entry of a ledger in another database: one transaction step of a run. There is no run row to lock there: the entry
-- itself is what attempts of the step wait for, and by its fence a later one shuts out the earlier ones.

-- name: claim_entry :one
-- Claim a step for an attempt, unless it is done, or a later attempt has claimed it. Waits for whoever has it locked.
-- Locks: entry. Index: entry_pkey.
WITH c AS (
    INSERT INTO {schema}.entry AS e (ledger, run_id, step, fence, claim)
    VALUES (%(ledger)s, %(run_id)s, %(step)s, %(fence)s, %(claim)s)
    ON CONFLICT ON CONSTRAINT entry_pkey DO UPDATE
       SET fence = excluded.fence, claim = excluded.claim, claimed_at = clock_timestamp()
     WHERE e.done_at IS NULL AND e.fence <= excluded.fence
    RETURNING 1)
SELECT EXISTS (SELECT 1 FROM c)

-- name: read_entry :maybe
-- Read the result of a step that is done.
-- Locks: none. Index: entry_pkey.
SELECT result, digest FROM {schema}.entry
 WHERE ledger = %(ledger)s AND run_id = %(run_id)s AND step = %(step)s AND done_at IS NOT NULL

-- name: settle_entry :maybe
-- Record the result of a step under the claim that its transaction holds, once.
-- Locks: entry. Index: entry_pkey.
UPDATE {schema}.entry SET result = %(result)s, digest = %(digest)s, done_at = clock_timestamp()
 WHERE ledger = %(ledger)s AND run_id = %(run_id)s AND step = %(step)s AND fence = %(fence)s AND claim = %(claim)s
   AND done_at IS NULL
RETURNING true
