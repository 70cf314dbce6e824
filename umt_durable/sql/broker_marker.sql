-- The broker marker: the incarnation of each broker that was last seen.

-- name: read_marker :maybe
-- Read the incarnation recorded for a broker.
-- Locks: none. Index: broker_marker_pkey.
SELECT incarnation FROM {schema}.broker_marker WHERE broker = %(broker)s

-- name: write_marker :count
-- Record the incarnation seen at a broker.
-- Locks: broker_marker. Index: broker_marker_pkey.
INSERT INTO {schema}.broker_marker (broker, incarnation) VALUES (%(broker)s, %(incarnation)s)
ON CONFLICT ON CONSTRAINT broker_marker_pkey DO UPDATE SET incarnation = excluded.incarnation, seen_at = {schema}.now()

-- name: swap_marker :maybe
-- Replace the incarnation of a broker if it is still the one expected; who gets no row was not the first to notice.
-- Locks: broker_marker. Index: broker_marker_pkey.
UPDATE {schema}.broker_marker SET incarnation = %(incarnation)s, seen_at = {schema}.now()
 WHERE broker = %(broker)s AND incarnation = %(expected)s
RETURNING broker
