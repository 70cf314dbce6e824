"""Revoke is cancel: whichever way Celery is told to revoke a durable run, the run ends in the database.

    client    `broadcast` of the app's control client, through which `AsyncResult.revoke`, `GroupResult.revoke`,
              `control.terminate`, revoke by stamped headers and `celery control revoke` go: the cancel is committed
              before any worker hears of it, and where nobody has to be interrupted no broker is needed either
    worker    the commands of the control panel, for clients without this package, Flower among them; every worker gets
              the broadcast, and the first that comes writes the cancel

A worker's own list of revoked ids holds none that was a durable run when the revoke came. It still holds ids that no
run had yet, such as that of a later member of a chain: when their message comes, this is a cancel as well.
"""

from __future__ import annotations

import signal as signals_of_system
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from celery import signals
from celery.app.task import Context
from celery.platforms import signals as celery_signals
from celery.utils.functional import maybe_list
from celery.utils.imports import instantiate
from celery.utils.log import get_logger
from celery.worker import state as worker_state
from celery.worker.control import Panel

from umt_durable.bridge.envelope import Envelope
from umt_durable.bridge.request import DurableRequest
from umt_durable.bridge.runtime import CancelAsked
from umt_durable.errors import (
    DatabaseUnavailableError,
    DecodingError,
    PayloadKeyError,
    PrivilegeError,
    UnknownRunError,
)
from umt_durable.states import RunState
from umt_durable.store import runs

if TYPE_CHECKING:
    from umt_durable.bridge.durable import Durable

logger = get_logger(__name__)

Stamps = Mapping[str, object]
Command = Callable[..., Any]

REVOKED: Final = "revoked"
TERMINATED: Final = "terminated by "
EXPIRED: Final = "expired"
COMMANDS: Final = ("revoke", "terminate", "revoke_by_stamped_headers")
ANSWER_SECONDS: Final = 2.0
"""How long a worker's loop waits for the database before it goes on; the cancel is tried until it is written."""
PAGE: Final = 500

_OURS: Final = "umt_durable_stock"


# -- the client -------------------------------------------------------------------------------------------------------


class ControlMaker:
    """Makes the control client of an app, of whatever class it was to be, with a `broadcast` that cancels first.

    A class of its own, because an app is pickled with what makes its control client when children are spawned.
    """

    def __init__(self, kind: Any) -> None:
        self._kind = kind

    def __call__(self, app: Any) -> Any:
        """Make the client."""
        return watch_control(app, instantiate(self._kind, app=app))


def take_over(app: Any) -> None:
    """Have every revoke of this app's control client cancel durable runs first. Doing it twice changes nothing.

    The client itself is made late, as ever: making it reads the configuration.
    """
    if not isinstance(app.control_cls, ControlMaker):
        app.control_cls = ControlMaker(app.control_cls)
    if "control" in app.__dict__:
        watch_control(app, app.control)


def watch_control(app: Any, control: Any) -> Any:
    """Put a `broadcast` that cancels durable runs first before a client's own, and return the client."""
    stock = control.broadcast
    if hasattr(stock, _OURS):
        return control

    @wraps(stock)
    def broadcast(command: str, arguments: Mapping[str, Any] | None = None, *rest: Any, **options: Any) -> Any:
        durable = getattr(app, "umt_durable", None)
        if command not in COMMANDS or durable is None or durable.settings.database_url is None:
            return stock(command, arguments, *rest, **options)
        try:
            left = _cancel_first(durable, command, dict(arguments or {}), is_answered=bool(options.get("reply")))
        except DatabaseUnavailableError:
            # The workers are told all the same: they write the cancel as soon as they can, but that is no promise.
            stock(command, arguments, *rest, **options)
            raise
        return None if left is None else stock(command, left, *rest, **options)

    setattr(broadcast, _OURS, stock)
    control.broadcast = broadcast
    return control


def _cancel_first(
    durable: Durable, command: str, arguments: dict[str, Any], *, is_answered: bool
) -> dict[str, Any] | None:
    """Cancel what a command names; return the arguments for the workers, or None when none has to be told."""
    interrupts = command == "terminate" or bool(arguments.get("terminate"))
    reason = reason_of(arguments.get("signal") if interrupts else None, interrupts=interrupts)
    if command == "revoke_by_stamped_headers":
        try:
            cancel_all(durable, stamped(durable, headers_of(arguments.get("headers"))), reason)
        except PrivilegeError:  # an application's database user reads no stamps: the workers cancel what they are told
            logger.debug("a revoke by stamps is left to the workers")
        return arguments
    named = maybe_list(arguments.get("task_id")) or []
    ordinary = [one for one in named if not _cancelled(durable, one, reason)]
    if interrupts or is_answered or len(ordinary) == len(named):
        return arguments
    return {**arguments, "task_id": ordinary} if ordinary else None


def _cancelled(durable: Durable, run_id: Any, reason: str) -> bool:
    try:
        durable.client.cancel(run_id, reason=reason)
    except UnknownRunError:
        return False
    return True


# -- the worker -------------------------------------------------------------------------------------------------------


def take_over_panel() -> None:
    """Put our commands before Celery's on the control panel of this process. Doing it twice changes nothing."""
    if hasattr(Panel.data["revoke"], _OURS):
        return
    for name, command in (("revoke", _revoke), ("revoke_by_stamped_headers", _revoke_by_stamped_headers)):
        Panel.data[name] = _before(Panel.data[name], command)
    ours = Panel.data["revoke"]

    @wraps(Panel.data["terminate"])
    def terminate(state: Any, signal: Any, task_id: Any, **options: Any) -> Any:
        return ours(state, task_id, terminate=True, signal=signal, **options)

    Panel.data["terminate"] = terminate


def _before(stock: Command, ours: Command) -> Command:
    @wraps(stock)
    def command(state: Any, *args: Any, **options: Any) -> Any:
        if getattr(state.app, "umt_durable", None) is None:
            return stock(state, *args, **options)
        return ours(stock, state, *args, **options)

    setattr(command, _OURS, stock)
    return command


def _revoke(
    stock: Command, state: Any, task_id: Any, terminate: bool = False, signal: Any = None, **options: Any
) -> Any:
    """Cancel the durable runs among the ids, interrupt them if told to, and leave the others to Celery."""
    named = dict.fromkeys(maybe_list(task_id) or [])
    found = _ask(state.app, CancelAsked(reason_of(signal, interrupts=terminate), ids=tuple(named)))
    durable = [one for one in named if one in found]
    ordinary = [one for one in named if one not in found]
    said = _interrupt(state, durable, found, signal) if terminate else f"tasks {set(durable)} flagged as revoked"
    if not durable:
        return stock(state, task_id, terminate, signal, **options)
    if not ordinary:
        return {"ok": said}
    answer = stock(state, ordinary, terminate, signal, **options)
    return {"ok": f"{answer['ok']}; {said}"} if "ok" in answer else answer


def _revoke_by_stamped_headers(
    stock: Command, state: Any, headers: Any, terminate: bool = False, signal: Any = None, **options: Any
) -> Any:
    """Cancel the live durable runs with such stamps, then do what Celery does, which interrupts the active ones."""
    _ask(state.app, CancelAsked(reason_of(signal, interrupts=terminate), stamps=headers_of(headers)))
    return stock(state, headers, terminate, signal, **options)


def _ask(app: Any, asked: CancelAsked) -> Mapping[str, RunState | None]:
    """Have runs cancelled and return where those that are durable stand; None where the database did not say in time.

    A run that this worker has in hand is known to be durable without the database.
    """
    app.umt_durable.incidents.cancel_asked(asked)
    if asked.done.wait(ANSWER_SECONDS):
        return asked.found
    logger.warning("A revoke waits for the database; it is written when that answers")
    mine = {request.id for request in _in_hand()}
    return {one: None for one in asked.ids if one in mine}


def _interrupt(state: Any, ids: Iterable[str], found: Mapping[str, RunState | None], signal: Any) -> str:
    """Send a signal to those who execute these runs here, and say which there were.

    Celery's own table is by id, and a run's next delivery may have taken its place there: the requests are looked at.
    """
    wanted = {one for one in ids if found[one] in (RunState.RUNNING, None)}
    active = [one for one in _in_hand() if one.id in wanted and one in worker_state.active_requests]
    for request in active:
        request.terminate(state.consumer.pool, signal=signal)
    names = sorted({request.id for request in active})
    return f"terminate: {', '.join(names)}" if names else "terminate: tasks unknown"


def _in_hand() -> list[DurableRequest]:
    held = (*worker_state.active_requests, *worker_state.reserved_requests)
    return [one for one in dict.fromkeys(held) if isinstance(one, DurableRequest)]


def is_revoked(run_id: str, stamps: Stamps | None) -> bool:
    """Say whether this worker was told to revoke an id or a stamp before there was a run to cancel."""
    return run_id in worker_state.revoked or (
        bool(worker_state.revoked_stamps) and bool(stamps) and has_stamp(stamps or {}, worker_state.revoked_stamps)
    )


# -- both -------------------------------------------------------------------------------------------------------------


def cancel_all(durable: Durable, ids: Iterable[str], reason: str) -> dict[str, RunState]:
    """Cancel runs, as far as they are live and not asked to stop yet; return where those that exist stand then.

    Errors: DatabaseUnavailableError; repeating it is safe.
    """
    found: dict[str, RunState] = {}
    for run_id in ids:
        try:
            run = durable.client.get(run_id)
            if not run.state.is_terminal and run.cancel_at is None and run.compensate_at is None:
                durable.client.cancel(run_id, reason=reason)
                run = durable.client.get(run_id)
        except UnknownRunError:
            continue
        found[run_id] = run.state
    return found


def stamped(durable: Durable, wanted: Stamps) -> list[str]:
    """Return the ids of the live runs that carry one of these stamps.

    Errors: DatabaseUnavailableError.
    """
    ids: dict[str, None] = {}
    after: int | None = 0
    while after is not None:
        page = durable.database.do(partial(runs.stamped, after=after, limit=PAGE))
        for _, run_id, envelope in page:
            try:
                stamps = Envelope.from_bytes(envelope).stamps
            except (DecodingError, PayloadKeyError):
                continue
            if has_stamp(stamps, wanted):
                ids[run_id] = None
        after = page[-1][0] if len(page) == PAGE else None
    return list(ids)


def has_stamp(stamps: Stamps, wanted: Stamps) -> bool:
    """Say whether one stamp is among the wanted ones: of the same name, with a value in common.

    Source: `celery.worker.request.Request.revoked`.
    """
    return any(
        value is not None and not {str(one) for one in maybe_list(value)}.isdisjoint(map(str, maybe_list(wanted[name])))
        for name, value in stamps.items()
        if wanted.get(name) is not None
    )


def headers_of(given: Any) -> dict[str, object]:
    """Return stamps as a mapping; the command line gives them as `name=value`."""
    if isinstance(given, Mapping):
        return dict(given)
    pairs = [str(one).partition("=") for one in maybe_list(given) or []]
    return {name: [value for key, _, value in pairs if key == name] for name, _, _ in pairs}


def reason_of(signal: Any, *, interrupts: bool) -> str:
    """Return the reason that a cancelled run keeps: what the signal of the end of its task will say."""
    return f"{TERMINATED}{_signal(signal)}" if interrupts else REVOKED


def _signal(signal: Any) -> str:
    try:
        return signals_of_system.Signals(celery_signals.signum(signal or "TERM")).name
    except (AttributeError, TypeError, ValueError):
        return "SIGTERM"


_hostname: str | None = None


def speak_as(hostname: str) -> None:
    """Give the name under which this process tells monitors of runs that ended while nobody executed them."""
    global _hostname
    _hostname = hostname


def announce_revoked(app: Any, task: str, request: Context, reason: str | None) -> None:
    """Tell signal handlers and monitors that a run ended as cancelled: once per run, by whoever stores that result.

    Errors: none; a monitor that is not told must not make the result wait.
    """
    reason = reason or ""
    terminated = reason.startswith(TERMINATED)
    number = getattr(signals_of_system, reason.removeprefix(TERMINATED), None) if terminated else None
    facts = {
        "terminated": terminated,
        "signum": None if number is None else int(number),
        "expired": reason == EXPIRED,
    }
    known = app.tasks.get(task)
    if known is not None:
        signals.task_revoked.send(sender=known, request=request, **facts)
    host = request.hostname or _hostname or f"umt_durable@{socket.gethostname()}"
    try:
        with app.events.default_dispatcher(hostname=host) as dispatcher:
            dispatcher.send("task-revoked", uuid=request.id, **facts)
    except Exception as error:  # noqa: BLE001 - each transport raises its own; the event only informs
        logger.warning("the event of a cancelled run could not be sent: %s", type(error).__name__)
