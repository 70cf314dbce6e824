"""The how-to "Adopt": both apps of `examples/adopt` with real workers that are killed, and every step between them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from celery import Celery, states

from tests.support import guard
from tests.support.brokers import Broker
from tests.support.wait import until
from tests.support.workers import Worker
from umt_durable.bridge.message import hint
from umt_durable.records import event_id
from umt_durable.settings import Settings

pytestmark = [pytest.mark.processes, pytest.mark.redis_by_default]

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "how-to" / "adopt.md"
BEFORE, AFTER = "examples.adopt.before.shop", "examples.adopt.after.shop"
ORDER = "A-17"

_DIFF = re.compile(r"^```diff\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)
_HUNK = re.compile(r"^@@\n", re.MULTILINE)


class Shop:
    """The shop of one test, from outside: its books, its tables, and a caller that places orders."""

    def __init__(self, env: dict[str, str], folder: Path, start: Callable[..., Worker]) -> None:
        self.env = env
        self.books = folder / "books"
        self._start = start

    def work(self, app: str, *options: str) -> Worker:
        """Start a worker with one pool child."""
        return self._start(app=app, env=self.env, pool="prefork", concurrency=1, options=options)

    def call(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run Python in a process of its own, as a web server or a person would."""
        environ = guard.clean_environment(self.env)
        return subprocess.run(
            [sys.executable, *arguments], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    def place(self, app: str) -> str:
        """Place the order; return the id of the task that ships it."""
        done = self.call("-c", f"from {app} import place_order; print(place_order({ORDER!r}))")
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def rows(self, statement: str) -> list[tuple[object, ...]]:
        """Ask the shop's database."""
        with psycopg.connect(self.env["SHOP_DATABASE_URL"]) as conn:
            return conn.execute(statement.encode()).fetchall()

    def state(self) -> str:
        """Return the state of the order."""
        [(state,)] = self.rows("SELECT state FROM adopt.orders")
        return str(state)

    def mails(self) -> list[str]:
        """Return what the customer was told."""
        return sorted(str(words) for (words,) in self.rows("SELECT words FROM adopt.mail"))

    def wait_for(self, state: str) -> None:
        """Return once the order is in a state."""
        until(lambda: self.state() == state, timeout=60, what=f"the order to be {state}")

    def deals(self, kind: str) -> int:
        """Return how often somebody had to pay for the order."""
        return self.books.read_text().count(f'"kind": "{kind}"') if self.books.exists() else 0

    def kill_in(self, kind: str, worker: Worker, app: str) -> str:
        """Place an order and kill the pool child that has made its deal and waits for the answer."""
        slow = self.books.with_name(f"books.slow-{kind}")
        slow.touch()
        shipping = self.place(app)
        until(lambda: self.deals(kind) == 1, timeout=60, what=f"the {kind} to be made", diagnose=worker.tail)
        worker.kill_child()
        slow.unlink()
        return shipping


@pytest.fixture
def shop(
    worker_env: dict[str, str], settings: Settings, tmp_path: Path, start_worker: Callable[..., Worker]
) -> Iterator[Shop]:
    url = str(settings.database_url)
    more = {"SHOP_DATABASE_URL": url, "SHOP_BOOKS": str(tmp_path / "books"), "PYTHONPATH": str(ROOT)}
    shop = Shop({**worker_env, **more}, tmp_path, start_worker)
    made = shop.call("-m", "examples.adopt.store")
    assert made.returncode == 0, made.stderr
    yield shop
    with psycopg.connect(url) as conn:
        conn.execute("DROP SCHEMA adopt CASCADE")


# -- what the kills do -----------------------------------------------------------------------------------------------


def test_before_a_kill_behind_the_bank_charges_the_card_twice(shop: Shop, broker: Broker) -> None:
    shop.kill_in("charge", shop.work(BEFORE), BEFORE)
    shop.wait_for("shipped")

    assert shop.deals("charge") == 2


def test_after_a_kill_behind_the_bank_charges_the_card_once(shop: Shop, broker: Broker) -> None:
    shop.kill_in("charge", shop.work(AFTER), AFTER)
    shop.wait_for("shipped")

    assert shop.deals("charge") == 1
    assert shop.rows("SELECT payment FROM adopt.orders") == [("charge-1",)]
    until(lambda: len(shop.mails()) == 2, timeout=60, what="both mails to be out")
    assert shop.mails() == ["box of A-17 with label-2 is on its way", "thank you"]


def test_before_a_kill_behind_the_carrier_loses_the_order(shop: Shop, broker: Broker) -> None:
    shipping = shop.kill_in("label", shop.work(BEFORE), BEFORE)
    with Celery(backend=shop.env["CELERY_RESULT_BACKEND"], set_as_current=False) as asking:
        until(lambda: asking.AsyncResult(shipping).state == states.FAILURE, timeout=60, what="the chord to fail")

    assert shop.state() == "paid"
    assert shop.deals("label") == 1


def test_after_a_kill_behind_the_carrier_buys_one_label_and_ships(shop: Shop, broker: Broker) -> None:
    shipping = shop.kill_in("label", shop.work(AFTER), AFTER)
    shop.wait_for("shipped")

    assert shop.deals("label") == shop.deals("charge") == 1
    with Celery(backend=shop.env["CELERY_RESULT_BACKEND"], set_as_current=False) as asking:
        assert asking.AsyncResult(shipping).get(timeout=60) == f"box of {ORDER} with label-2"


# -- what a caller meets --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("app", [BEFORE, AFTER], ids=["before", "after"])
def test_an_order_that_is_taken_in_while_the_broker_is_down_is_fulfilled_only_after(
    shop: Shop, rabbit_broker: Broker, worker_env_for: Callable[[Broker], dict[str, str]], app: str
) -> None:
    shop.env.update(CELERY_BROKER_URL=rabbit_broker.url)
    rabbit_broker.stop()

    done = shop.call("-c", f"from {app} import place_order; place_order({ORDER!r})")

    assert shop.state() == "new"
    rabbit_broker.start()
    worker = shop.work(app, "--beat", f"--schedule={shop.books}.beat")
    if app == BEFORE:
        assert "OperationalError" in done.stderr
        shop.env.update(SHOP_REMIND_SECONDS="1")
        worker.close()
        shop.work(app, "--beat", f"--schedule={shop.books}.beat")
        until(lambda: shop.rows("SELECT 1 FROM adopt.reminder"), timeout=60, what="the reminder of beat")
        assert shop.state() == "new"
        assert shop.deals("charge") == 0
    else:
        assert done.returncode == 0, done.stderr
        shop.wait_for("shipped")


def test_a_customer_who_clicks_twice_is_charged_twice_only_before(shop: Shop, broker: Broker) -> None:
    shop.place(AFTER)
    shop.place(AFTER)
    worker = shop.work(AFTER)
    shop.wait_for("shipped")
    idle = "SELECT count(*) FROM {}.run WHERE finished_at IS NULL".format(shop.env["DURABLE_SCHEMA"])
    until(lambda: shop.rows(idle) == [(0,)], timeout=60, what="nothing to be under way")

    assert shop.deals("charge") == 1
    worker.close()
    shop.place(BEFORE)
    shop.work(BEFORE)
    until(lambda: shop.deals("charge") == 2, timeout=60, what="the other app to charge again")


@pytest.mark.parametrize("app", [BEFORE, AFTER], ids=["before", "after"])
def test_beat_goes_on_as_it_was(shop: Shop, broker: Broker, app: str) -> None:
    shop.env.update(SHOP_REMIND_SECONDS="1")

    shop.work(app, "--beat", f"--schedule={shop.books}.beat")

    until(lambda: shop.rows("SELECT 1 FROM adopt.reminder"), timeout=60, what="a reminder")


def test_a_worker_that_has_the_task_as_an_ordinary_one_leaves_the_run_to_others(
    shop: Shop, broker: Broker, tmp_path: Path
) -> None:
    (tmp_path / "shop_of_step_1.py").write_text(next(stages()), encoding="utf-8")
    shop.env.update(PYTHONPATH=f"{ROOT}:{tmp_path}")
    shop.place(AFTER)
    worker = shop.work("shop_of_step_1")
    with Celery(broker=broker.url, set_as_current=False) as other:
        [(no, run_id)] = shop.rows(f"SELECT no, id FROM {shop.env['DURABLE_SCHEMA']}.run")
        send_hint(other, int(str(no)), str(run_id))

    worker.wait_for(f"run {run_id!r} stays blocked")
    worker.close()

    assert shop.state() == "new"
    shop.work(AFTER)
    shop.wait_for("shipped")
    assert shop.deals("charge") == 1


def send_hint(app: Celery, no: int, run_id: str) -> None:
    """Hand the hint of a new run to whoever reads the shop's queue."""
    copy = hint(
        app,
        key=event_id(no, 0, "run", 0),
        run_id=run_id,
        nesting=0,
        task="shop.charge",
        queue="shop",
        priority=None,
        gen=0,
        envelope=None,
    )
    with app.connection_for_write() as connection, connection.Producer() as producer:
        producer.publish(
            copy.body,
            routing_key="shop",
            declare=[app.amqp.queues["shop"]],
            exchange=app.amqp.queues["shop"].exchange,
            content_type=copy.content_type,
            content_encoding=copy.content_encoding,
            headers=dict(copy.headers),
            correlation_id=run_id,
        )


# -- the page --------------------------------------------------------------------------------------------------------


def apply(text: str, diff: str) -> str:
    """Return a text after the hunks of a diff, each of which must fit in exactly one place."""
    for hunk in _HUNK.split(diff)[1:]:
        lines = hunk.splitlines(keepends=True)
        old = "".join(line[1:] or line for line in lines if line[0] in " -\n")
        new = "".join(line[1:] or line for line in lines if line[0] in " +\n")
        assert text.count(old) == 1, f"this fits {text.count(old)} times:\n{hunk}"
        text = text.replace(old, new)
    return text


def stages() -> Iterator[str]:
    """Yield the app after each step of the page."""
    text = (ROOT / "examples/adopt/before/shop.py").read_text(encoding="utf-8")
    for diff in _DIFF.finditer(PAGE.read_text(encoding="utf-8")):
        text = apply(text, diff["text"])
        yield text


def test_the_steps_of_the_page_lead_from_before_to_after() -> None:
    *_, last = stages()

    assert last == (ROOT / "examples/adopt/after/shop.py").read_text(encoding="utf-8")


@pytest.mark.parametrize("stage", range(4), ids=lambda number: f"step {number + 1}")
def test_each_step_of_the_page_is_an_app_that_works(
    shop: Shop, redis_broker: Broker, tmp_path: Path, stage: int
) -> None:
    name = f"shop_stage_{stage}"
    (tmp_path / f"{name}.py").write_text(list(stages())[stage], encoding="utf-8")
    shop.env.update(CELERY_BROKER_URL=redis_broker.url, PYTHONPATH=f"{ROOT}:{tmp_path}")

    shop.work(name)
    shop.place(name)

    shop.wait_for("shipped")
    assert shop.deals("charge") == shop.deals("label") == 1
