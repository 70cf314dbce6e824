"""How Alembic runs the migrations: one transaction that holds an advisory lock from before the first look."""

from __future__ import annotations

import psycopg
from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from umt_durable import grants
from umt_durable.migrate import VERSION_TABLE, ddl

config = context.config
schema: str = config.attributes["schema"]
url: str = config.attributes["url"]


def run_offline() -> None:
    """Print the SQL."""
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # the driver's own style would double each % of the text
        version_table=VERSION_TABLE,
        version_table_schema=schema,
        literal_binds=True,
        transaction_per_migration=False,
    )
    with context.begin_transaction():
        context.execute(ddl("CREATE SCHEMA IF NOT EXISTS {schema}", schema))
        context.run_migrations(schema=schema)


def run_online() -> None:
    """Migrate. The lock comes before CREATE SCHEMA and the read of the revision: both race by themselves."""
    engine = create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(url), poolclass=NullPool)
    with engine.connect() as connection, connection.begin():
        connection.execute(text("SET LOCAL lock_timeout = '30s'"))
        connection.execute(
            text("SELECT pg_advisory_xact_lock(hashtext('umt_durable.migrate'), hashtext(:schema))"), {"schema": schema}
        )
        # Even IF NOT EXISTS it needs the right to create schemas, which the owner of one that is there may lack.
        known = connection.scalar(text("SELECT count(*) FROM pg_namespace WHERE nspname = :schema"), {"schema": schema})
        if not known:
            connection.execute(text(ddl("CREATE SCHEMA IF NOT EXISTS {schema}", schema)))
        context.configure(
            connection=connection,
            version_table=VERSION_TABLE,
            version_table_schema=schema,
            transactional_ddl=True,
            transaction_per_migration=False,
        )
        context.run_migrations(schema=schema)
        driver = connection.connection.driver_connection
        assert isinstance(driver, psycopg.Connection)
        grants.renew(driver, schema)


if context.is_offline_mode():
    run_offline()
else:
    run_online()
