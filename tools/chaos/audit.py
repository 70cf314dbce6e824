"""What the database itself is asked to note down: triggers of this command, beside the product's tables.

An outcome is a zombie's when it carries a fence that is not the run's own, or comes while nobody owns the run. The end
of a sleep is written by timers, which own no run: of these only that none is written over is looked at. The trigger
looks after the statement, in the writer's transaction, which holds the run's lock.
"""

from __future__ import annotations

from typing import Final

import psycopg

_TABLES: Final = """
CREATE TABLE {schema}.chaos_booking (run text NOT NULL, number int NOT NULL);
CREATE TABLE {schema}.chaos_audit (
    what text NOT NULL, run bigint NOT NULL, key text, fence bigint, found jsonb,
    at timestamptz DEFAULT clock_timestamp());

CREATE FUNCTION {schema}.chaos_step() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    owner {schema}.run;
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.state IN ('done', 'failed') THEN
        INSERT INTO {schema}.chaos_audit VALUES ('rewritten', NEW.run, NEW.key, NEW.fence, to_jsonb(OLD));
    END IF;
    IF NEW.state NOT IN ('done', 'failed') OR NEW.kind = 'sleep' THEN
        RETURN NULL;
    END IF;
    SELECT * INTO owner FROM {schema}.run WHERE no = NEW.run;
    IF owner.state <> 'running' OR owner.fence <> NEW.fence THEN
        INSERT INTO {schema}.chaos_audit VALUES ('zombie', NEW.run, NEW.key, NEW.fence, to_jsonb(owner));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_step AFTER INSERT OR UPDATE ON {schema}.step
    FOR EACH ROW EXECUTE FUNCTION {schema}.chaos_step();

CREATE FUNCTION {schema}.chaos_run() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.finished_at IS NOT NULL
       AND (NEW.state, NEW.result, NEW.error) IS DISTINCT FROM (OLD.state, OLD.result, OLD.error) THEN
        INSERT INTO {schema}.chaos_audit VALUES ('revived', NEW.no, NULL, NEW.fence, to_jsonb(OLD));
    END IF;
    IF NEW.fence < OLD.fence THEN
        INSERT INTO {schema}.chaos_audit VALUES ('fence', NEW.no, NULL, NEW.fence, to_jsonb(OLD));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_run AFTER UPDATE ON {schema}.run FOR EACH ROW EXECUTE FUNCTION {schema}.chaos_run();

CREATE FUNCTION {schema}.chaos_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF OLD.state <> 'pending'
       AND (NEW.state, NEW.fact, NEW.payload) IS DISTINCT FROM (OLD.state, OLD.fact, OLD.payload) THEN
        INSERT INTO {schema}.chaos_audit VALUES ('resettled', NEW.run, NEW.key, NULL, to_jsonb(OLD));
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER chaos_wait AFTER UPDATE ON {schema}.wait FOR EACH ROW EXECUTE FUNCTION {schema}.chaos_wait();
"""


def install(url: str, schema: str) -> None:
    """Make the tables and triggers in a migrated schema."""
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute(_TABLES.format(schema=f'"{schema}"').encode())
