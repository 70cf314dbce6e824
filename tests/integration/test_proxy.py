"""The proxy in front of a real Postgres: what is lost is exactly what a test named."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from tests.support.proxy import Proxy
from umt_durable.database import Connection, Database
from umt_durable.settings import Settings

INSERT = "/* put */ INSERT INTO {schema}.put (v) VALUES (%s) RETURNING v"


@pytest.fixture
def insert(conn: Connection, schema: str) -> bytes:
    """Return a named statement that writes into a table without constraints."""
    conn.execute(f"CREATE TABLE {schema}.put (v int)".encode())
    return INSERT.replace("{schema}", schema).encode()


@pytest.fixture
def client(proxied_url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """Return a connection through the proxy, in autocommit."""
    with psycopg.connect(proxied_url, autocommit=True) as connection:
        yield connection


def rows(conn: Connection, schema: str) -> list[int]:
    return [row[0] for row in conn.execute(f"SELECT v FROM {schema}.put ORDER BY v".encode())]


@pytest.mark.parametrize("prepare", [True, False])
def test_a_lost_reply_leaves_the_row_and_breaks_the_connection(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection, prepare: bool
) -> None:
    client.execute(insert, (1,), prepare=prepare)
    rule = database_proxy.cut_reply("put")

    with pytest.raises(psycopg.OperationalError):
        client.execute(insert, (2,), prepare=prepare)

    assert client.broken
    assert rule.fired == 1
    assert rows(conn, schema) == [1, 2]


def test_a_statement_cut_before_it_arrives_leaves_nothing(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection
) -> None:
    database_proxy.cut_before("put")

    with pytest.raises(psycopg.OperationalError):
        client.execute(insert, (1,))

    assert rows(conn, schema) == []


def test_a_commit_whose_reply_is_lost_took_place(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection
) -> None:
    rule = database_proxy.cut_after_commit(match=b"/* put */")
    with client.transaction():
        client.execute("SELECT 'another transaction'")

    with pytest.raises(psycopg.OperationalError), client.transaction():
        client.execute(insert, (1,))

    assert rule.fired == 1
    assert rows(conn, schema) == [1]


def test_a_lost_reply_inside_a_transaction_rolls_it_back(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection
) -> None:
    database_proxy.cut_reply("put")

    with pytest.raises(psycopg.OperationalError), client.transaction():
        client.execute(insert, (1,))

    assert rows(conn, schema) == []


def test_a_pipelined_statement_loses_its_reply_after_it_is_committed(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection
) -> None:
    rule = database_proxy.cut_reply("put")

    def three_statements() -> None:
        with client.pipeline() as pipeline:
            client.execute("SELECT 1")
            pipeline.sync()
            client.execute(insert, (1,))
            pipeline.sync()
            client.execute("SELECT 2")

    with pytest.raises(psycopg.OperationalError):
        three_statements()

    assert rule.fired == 1
    assert rows(conn, schema) == [1]


def test_an_error_of_the_named_statement_reaches_the_client(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, client: Connection
) -> None:
    conn.execute(f"ALTER TABLE {schema}.put ADD CONSTRAINT put_once UNIQUE (v) DEFERRABLE INITIALLY DEFERRED".encode())
    client.execute(insert, (1,))
    rule = database_proxy.cut_reply("put")

    with pytest.raises(psycopg.errors.UniqueViolation):
        client.execute(insert, (1,))

    assert rule.fired == 0
    assert not client.broken


def test_the_products_own_retry_sees_every_lost_reply_as_one(
    conn: Connection, schema: str, settings: Settings, database_proxy: Proxy, proxied_url: str, insert: bytes
) -> None:
    database = Database(Settings(database_url=proxied_url, schema=schema))
    rule = database_proxy.cut_reply("put", times=3)

    database.do(lambda through: through.execute(insert, (1,)))

    database.close()
    assert rule.fired == 3
    assert rows(conn, schema) == [1, 1, 1, 1]


def test_messages_that_arrive_byte_by_byte_are_still_followed(
    conn: Connection, schema: str, database_proxy: Proxy, insert: bytes, proxied_url: str
) -> None:
    database_proxy.slice(1)
    rule = database_proxy.cut_reply("put")

    with (
        psycopg.connect(proxied_url, autocommit=True) as client,
        pytest.raises(psycopg.OperationalError),
    ):
        client.execute(insert, (1,))

    assert rule.fired == 1
    assert rows(conn, schema) == [1]


def test_a_stalled_connection_delivers_when_it_heals(database_proxy: Proxy, client: Connection) -> None:
    client.execute("SELECT 1")
    database_proxy.blackhole()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: client.execute("SELECT 7").fetchone())
        with pytest.raises(TimeoutError):
            answer.result(0.2)

        database_proxy.heal()

        assert answer.result(10) == (7,)


def test_reset_breaks_open_connections_and_takes_new_ones(
    database_proxy: Proxy, proxied_url: str, client: Connection
) -> None:
    client.execute("SELECT 1")

    assert database_proxy.reset() == 1

    with pytest.raises(psycopg.OperationalError):
        client.execute("SELECT 1")
    with psycopg.connect(proxied_url) as again:
        assert again.execute("SELECT 1").fetchone() == (1,)


def test_refused_connections_come_back_on_the_same_port(database_proxy: Proxy, proxied_url: str) -> None:
    database_proxy.down()
    with pytest.raises(psycopg.OperationalError, match="refused"):
        psycopg.connect(proxied_url)

    database_proxy.heal()

    with psycopg.connect(proxied_url) as again:
        assert again.execute("SELECT 1").fetchone() == (1,)


def test_latency_delays_each_direction(database_proxy: Proxy, client: Connection) -> None:
    client.execute("SELECT 1")
    database_proxy.latency(0.05)

    started = time.monotonic()
    client.execute("SELECT 1")

    assert time.monotonic() - started >= 0.1
