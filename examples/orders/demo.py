"""The demo: a few hundred order lines, two workers, and everything that can go wrong, on one machine in under a minute.

    python -m examples.orders.demo [--orders N] [--seed N] [--json-only] [--keep]

The last line of its output is one JSON object. Exit status 0: all promises held and every planned fault happened.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Final

from examples.orders import bank, journal, steplog, tables
from examples.orders.arrival import Arrival
from examples.orders.display import Display, Progress
from examples.orders.faults import Saboteur, plan
from examples.orders.order import Order, Quote, Refusal, quote, read_orders, read_stock
from examples.orders.processes import ProcessError
from examples.orders.proof import Evidence, judge
from examples.orders.stage import LEASE_SECONDS, Stage, take_environment
from examples.orders.summary import Report, show
from umt_durable.errors import DurableError

if TYPE_CHECKING:
    from examples.orders.clients import Clients

LEAST_ORDERS: Final = 20
LIMIT_SECONDS: Final = 120.0
GRACE_SECONDS: Final = 6.0
TICK_SECONDS: Final = 0.1
FREEZE_SECONDS: Final = LEASE_SECONDS + 2.0


@dataclass(frozen=True)
class Options:
    orders: int | None
    seed: int
    json_only: bool
    keep: bool

    @classmethod
    def parse(cls, arguments: Sequence[str] | None) -> Options:
        """Read the command line."""
        parser = argparse.ArgumentParser(prog="demo", description=(__doc__ or "").split("\n", 1)[0])
        parser.add_argument("--orders", type=int, help=f"how many of the orders to take, at least {LEAST_ORDERS}")
        parser.add_argument(
            "--seed", type=int, default=1, help="draws the moments of all faults and the bank's latency"
        )
        parser.add_argument("--json-only", action="store_true", help="print nothing but the last line")
        parser.add_argument("--keep", action="store_true", help="leave logs and database in place and say where")
        given = parser.parse_args(arguments)
        if given.orders is not None and given.orders < LEAST_ORDERS:
            parser.error(f"--orders must be at least {LEAST_ORDERS}, or there is nothing to kill")
        return cls(given.orders, given.seed, given.json_only, given.keep)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    options = Options.parse(arguments)
    display = Display("silent" if options.json_only else "auto")
    signal.signal(signal.SIGTERM, _interrupt)
    orders, stray = read_orders()
    orders = orders[: options.orders]
    quotes = _quotes(orders)
    display.say(
        f"{len(orders)} orders, {sum(len(order.lines) for order in orders)} lines; {len(stray)} lines of the file"
        f" belong to no order: {', '.join(map(str, stray))}"
    )
    try:
        with Stage(seed=options.seed, keep=options.keep, say=display.say) as stage:
            report = _play(stage, options, orders, quotes, display)
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return 130
    except (ProcessError, DurableError) as error:
        print(f"the demo could not go on: {error}", file=sys.stderr)
        return 1
    show(report, display.console)
    print(report.json(), flush=True)
    return 0 if report.holds else 1


def _play(
    stage: Stage, options: Options, orders: Sequence[Order], quotes: Mapping[str, Quote | Refusal], display: Display
) -> Report:
    # The shop's Celery app reads the environment when it is imported, and the stage has just written it.
    take_environment(stage.environ)
    from examples.orders.clients import Clients

    arrival = Arrival(len(orders))
    saboteur = Saboteur(stage, plan(options.seed, arrival.seconds), freeze_seconds=FREEZE_SECONDS, say=display.say)
    clients = Clients(stage.conn, orders, quotes, options.seed)
    stage.start_workers()
    saboteur.start()
    try:
        with display.running():
            seconds = _drive(stage, clients, arrival, saboteur, display)
    finally:
        saboteur.stop()
    stage.stop_workers()
    evidence = _evidence(stage, clients, quotes)
    return Report(
        verdict=judge(evidence),
        totals=journal.totals(stage.conn),
        kills=saboteur.kills,
        freezes=saboteur.freezes,
        wipes=saboteur.wipes,
        calls=len(evidence.calls),
        missing=saboteur.missing,
        runs=len(clients.runs),
        seconds=seconds,
    )


def _drive(stage: Stage, clients: Clients, arrival: Arrival, saboteur: Saboteur, display: Display) -> float:
    """Let orders come in and approvals be given until every run has ended; give the seconds that took."""
    began = time.monotonic()
    all_ended: float | None = None
    bodies = steplog.Follower(stage.diary)
    while True:
        now = time.monotonic() - began
        clients.submit(arrival.due(now, faults_to_come=saboteur.to_come))
        states = journal.run_states(stage.conn)
        clients.approve(states, now)
        counts = Counter(states.values())
        bodies.advance()
        stage.supervise(at_work=bodies.entered > 0)
        display.show(Progress(now, len(clients.runs), clients.orders, counts, bodies.entered, len(saboteur.kills)))
        if len(clients.runs) == clients.orders and journal.TERMINAL.issuperset(counts):
            all_ended = now if all_ended is None else all_ended
            if saboteur.finished or now > all_ended + GRACE_SECONDS:
                return now
        if now > LIMIT_SECONDS:
            display.say(f"not everything has ended after {LIMIT_SECONDS:.0f} s; judging what there is")
            return now
        time.sleep(TICK_SECONDS)


def _evidence(stage: Stage, clients: Clients, quotes: Mapping[str, Quote | Refusal]) -> Evidence:
    return Evidence(
        quotes=quotes,
        ended=clients.ended(),
        calls=bank.read_log(stage.bank_log),
        bookings=tables.bookings(stage.conn),
        entries=steplog.read(stage.diary),
        journal=journal.completed(stage.conn, journal.clock_ahead(stage.conn)),
        stock=read_stock(),
        levels=tables.stock_levels(stage.conn),
    )


def _quotes(orders: Sequence[Order]) -> dict[str, Quote | Refusal]:
    catalogue = [item.sku for item in read_stock()]
    return {order.order_id: quote(order, catalogue) for order in orders}


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
