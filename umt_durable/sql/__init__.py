"""Named SQL statements, one file per table, rendered once per schema name.

A file holds statements headed by `-- name: NAME :ARITY` and a comment that says what they do, the locks they take in
order, and the index they use. `{schema}` is replaced by the quoted schema name; nothing else is ever formatted in.
Arities: `maybe` (at most one row), `one`, `many`, `count` (the number of rows changed).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Protocol, TypeAlias

from umt_durable.payloads import Vault

_HEAD = re.compile(r"^-- name: (?P<name>[a-z_]+) :(?P<arity>maybe|one|many|count)\s*$", re.MULTILINE)
_COMMENT = re.compile(r"--[^\n]*")

Row: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """One named statement, rendered for one schema."""

    name: str
    arity: str
    text: bytes


class Cursor(Protocol):
    """The part of a psycopg cursor that the loader uses."""

    rowcount: int

    def fetchone(self) -> Row | None: ...
    def fetchall(self) -> list[Row]: ...


class SchemaConnection(Protocol):
    """A connection of ours: it knows the schema its statements are rendered for, and how payloads are stored."""

    @property
    def schema(self) -> str: ...
    @property
    def vault(self) -> Vault: ...
    def execute(self, query: bytes, params: Any = ..., *, prepare: bool | None = ..., binary: bool = ...) -> Any: ...


def quote(schema: str) -> str:
    """Return a schema name as a quoted SQL identifier."""
    return '"' + schema.replace('"', '""') + '"'


def render(text: str, schema: str) -> str:
    """Put the quoted schema name into a text of SQL. A `%` in the name is doubled, as psycopg reads it."""
    return text.replace("{schema}", quote(schema).replace("%", "%%"))


@cache
def statements(schema: str) -> dict[str, Statement]:
    """Return every statement of `sql/*.sql` by name, rendered for a schema.

    Errors: ValueError when two files use one name.
    """
    return _read(resources.files(__package__), schema)


@cache
def elsewhere(schema: str) -> dict[str, Statement]:
    """Return the statements of `sql/elsewhere/*.sql`, which are for ledgers in other databases."""
    return _read(resources.files(__package__) / "elsewhere", schema)


def _read(folder: Traversable, schema: str) -> dict[str, Statement]:
    found: dict[str, Statement] = {}
    for file in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if not file.name.endswith(".sql"):
            continue
        source = file.read_text(encoding="utf-8")
        heads = list(_HEAD.finditer(source))
        for head, after in zip(heads, [*heads[1:], None], strict=True):
            name = head["name"]
            if name in found:
                raise ValueError(f"statement {name} is defined twice, the second time in {file.name}")
            body = _COMMENT.sub("", source[head.end() : after.start() if after else None]).strip().rstrip(";")
            text = f"/* {name} */ {render(body, schema)}"
            found[name] = Statement(name, head["arity"], text.encode())
    return found


def typed(row: Row, place: int, kind: Callable[[Any], Any]) -> Row:
    """Return a row with one of its values, if it is not null, made into its own type."""
    value = row[place]
    return (*row[:place], None if value is None else kind(value), *row[place + 1 :])


def there(conn: SchemaConnection, name: str, /, **params: Any) -> Row | None:
    """Run a statement of `sql/elsewhere/` in the database that it is for, and return its row, if it gives one."""
    statement = elsewhere(conn.schema)[name]
    row: Row | None = conn.execute(statement.text, conn.vault.sealed(params)).fetchone()
    return row


def _execute(conn: SchemaConnection, name: str, arity: str, params: Mapping[str, Any]) -> Any:
    statement = statements(conn.schema)[name]
    assert statement.arity == arity, f"{name} is :{statement.arity}, not :{arity}"
    return conn.execute(statement.text, conn.vault.sealed(params), binary=True)


def maybe(conn: SchemaConnection, name: str, /, **params: Any) -> Row | None:
    """Run a statement that gives at most one row."""
    row: Row | None = _execute(conn, name, "maybe", params).fetchone()
    return row


def one(conn: SchemaConnection, name: str, /, **params: Any) -> Row:
    """Run a statement that always gives one row."""
    row: Row | None = _execute(conn, name, "one", params).fetchone()
    assert row is not None, f"{name} gave no row"
    return row


def many(conn: SchemaConnection, name: str, /, **params: Any) -> list[Row]:
    """Run a statement that gives any number of rows."""
    rows: list[Row] = _execute(conn, name, "many", params).fetchall()
    return rows


def count(conn: SchemaConnection, name: str, /, **params: Any) -> int:
    """Run a statement and return the number of rows it changed."""
    rows: int = _execute(conn, name, "count", params).rowcount
    return rows
