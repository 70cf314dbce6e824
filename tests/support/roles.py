"""Database roles of a test's own: an owner who migrates, an app, a worker, a page; and the URL of each."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import psycopg
from psycopg import sql

from tests.support.postgres import address, drop_schema
from umt_durable.grants import Role, apply
from umt_durable.migrate import migrate_engine_schema
from umt_durable.settings import Settings

PASSWORD = "not-a-secret"


@dataclass(frozen=True)
class Roles:
    """The roles of one schema: `admin` is the settings of the server's superuser, `names` has the role of each kind."""

    admin: Settings
    owner: str
    names: dict[Role, str]

    def settings(self, who: Role | str) -> Settings:
        """Return the settings of a process that logs in as one of the roles."""
        host, port = address(str(self.admin.database_url))
        name = self.names[who] if isinstance(who, Role) else who
        with psycopg.connect(str(self.admin.database_url)) as conn:
            database = conn.info.dbname
        return replace(self.admin, database_url=f"postgresql://{name}:{PASSWORD}@{host}:{port}/{database}")

    def connect(self, who: Role | str) -> psycopg.Connection[tuple[object, ...]]:
        """Open a connection in autocommit as one of the roles."""
        return psycopg.connect(str(self.settings(who).database_url), autocommit=True)


@contextmanager
def four_roles(admin: Settings) -> Iterator[Roles]:
    """Make the roles, and a schema that the owner has migrated and granted; all of it is gone afterwards."""
    suffix = uuid.uuid4().hex[:12]
    roles = Roles(
        replace(admin, schema=f"test_roles_{suffix}"),
        f"owner_{suffix}",
        {role: f"{role}_{suffix}" for role in Role},
    )
    with psycopg.connect(str(admin.database_url), autocommit=True) as conn:
        for name in (roles.owner, *roles.names.values()):
            made = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}")
            conn.execute(made.format(sql.Identifier(name), sql.Literal(PASSWORD)))
        grant = sql.SQL("GRANT CREATE ON DATABASE {} TO {}")
        conn.execute(grant.format(sql.Identifier(conn.info.dbname), sql.Identifier(roles.owner)))
    try:
        url = str(roles.settings(roles.owner).database_url)
        migrate_engine_schema(url, roles.admin.schema)
        apply(url, roles.admin.schema, roles.names)
        yield roles
    finally:
        drop_schema(str(admin.database_url), roles.admin.schema)
        with psycopg.connect(str(admin.database_url), autocommit=True) as conn:
            for name in (roles.owner, *roles.names.values()):
                if conn.execute("SELECT FROM pg_roles WHERE rolname = %s", [name]).fetchone() is not None:
                    conn.execute(sql.SQL("DROP OWNED BY {}").format(sql.Identifier(name)))
                    conn.execute(sql.SQL("DROP ROLE {}").format(sql.Identifier(name)))
