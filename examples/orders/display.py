"""What a person sees while the demo runs: live bars on a terminal, plain lines elsewhere, nothing at all when asked."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Final, Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

Mode = Literal["auto", "silent"]

COLOURS: Final[Mapping[str, str]] = {
    "ready": "cyan",
    "running": "yellow",
    "sleeping": "blue",
    "waiting": "magenta",
    "retrying": "dark_orange",
    "quarantined": "red",
    "succeeded": "green",
    "failed": "red",
    "cancelled": "red",
}
HIDDEN_WHEN_ZERO: Final = frozenset({"retrying", "quarantined", "failed", "cancelled"})
EVENTS_SHOWN: Final = 12
FRAME_LINES: Final = 3  # and the one the cursor stands on
FRAME_COLUMNS: Final = 4
PLAIN_SECONDS: Final = 2.0


@dataclass(frozen=True)
class Progress:
    """One look at the demo. Units: `seconds` since the first order."""

    seconds: float
    submitted: int
    orders: int
    states: Mapping[str, int] = field(default_factory=dict)
    bodies: int = 0
    kills: int = 0

    @property
    def line(self) -> str:
        """The same on one line."""
        states = ", ".join(f"{name} {n}" for name in COLOURS if (n := self.states.get(name, 0)))
        orders = f"{self.submitted}/{self.orders} orders in"
        return f"{self.seconds:5.1f}s  {orders}: {states or 'none yet'}; kills {self.kills}"


class Display:
    """Show progress and events. `say` may be called from any thread."""

    def __init__(self, mode: Mode = "auto", console: Console | None = None) -> None:
        self.console = console or Console(quiet=mode == "silent", highlight=False)
        self._live: Live | None = None
        self._events: deque[str] = deque(maxlen=EVENTS_SHOWN)
        self._lock = Lock()
        self._progress: Progress | None = None
        self._printed_at = float("-inf")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Keep the live picture on the screen for the time of the block."""
        if not self.console.is_terminal or self.console.quiet:
            yield
            return
        with Live(console=self.console, refresh_per_second=8, get_renderable=self._picture) as live:
            self._live = live
            try:
                yield
            finally:
                live.refresh()
                self._live = None

    def show(self, progress: Progress) -> None:
        """Take in the latest numbers."""
        with self._lock:
            self._progress = progress
            due = progress.seconds - self._printed_at >= PLAIN_SECONDS
        if self._live is None and due:
            self._printed_at = progress.seconds
            self.console.print(progress.line, markup=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Tell of one event."""
        if self._live is None:
            self.console.print(text, markup=False, soft_wrap=True)
            return
        with self._lock:
            self._events.append(text)

    def _picture(self) -> RenderableType:
        with self._lock:
            progress, events = self._progress, list(self._events)
        if progress is None:
            return Text("starting ...")
        title = (
            f"{progress.seconds:.1f} s   orders {progress.submitted}/{progress.orders}   "
            f"step bodies {progress.bodies}   kills {progress.kills}"
        )
        return _Picture(Panel(_bars(progress), title=title), events)


@dataclass(frozen=True)
class _Picture:
    """The bars, and below them the newest events, as many as the terminal has lines for: it cuts off what is below."""

    bars: Panel
    events: list[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.size.height - len(console.render_lines(self.bars, options)) - FRAME_LINES
        lines = [line for event in self.events for line in Text(event).wrap(console, options.max_width - FRAME_COLUMNS)]
        yield Group(self.bars, Panel(Text("\n").join(lines[-free:] if free > 0 else []), title="what happens to it"))


def _bars(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(width=12)
    table.add_column(justify="right", width=5)
    table.add_column(ratio=1)
    for state, colour in COLOURS.items():
        n = progress.states.get(state, 0)
        if n or state not in HIDDEN_WHEN_ZERO:
            bar = ProgressBar(total=max(1, progress.orders), completed=n, complete_style=colour, finished_style=colour)
            table.add_row(Text(state, style=colour), str(n), bar)
    return table
