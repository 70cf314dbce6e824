"""Durable tasks for Celery: journaled steps in Postgres that survive crashes, deploys and a lost broker.

Importing this package imports neither Celery nor a database driver and starts nothing: each name is loaded when it is
first used. `app` is a Celery app made by this library, for `celery -A umt_durable worker`, and `durable` is its
`Durable`; both are made at first use, and read their configuration later still.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from umt_durable.bridge.app import app, durable
    from umt_durable.bridge.durable import Durable
    from umt_durable.bridge.engine_port import OutboxRelay, TaskEngine, create_default_registry, define_task
    from umt_durable.bridge.outbox import Outbox
    from umt_durable.bridge.task import DurableTask
    from umt_durable.engine.async_context import AsyncTaskContext
    from umt_durable.engine.awaiting import TaskInfo
    from umt_durable.engine.client import History
    from umt_durable.engine.context import TaskContext, current_context
    from umt_durable.engine.effects import Done, NotDone, OpInfo, Policy, Unknown, with_attempt_token
    from umt_durable.engine.explaining import Explanation
    from umt_durable.engine.parallel import ItemFailure
    from umt_durable.engine.registry import TaskDefinition, TaskRegistry
    from umt_durable.engine.retry import RetryAfter, RetryPolicy
    from umt_durable.engine.undoing import undo
    from umt_durable.engine.waitables import Fact, FactAddress, FactWait, PollPolicy, Timer
    from umt_durable.errors import (
        AutocommitError,
        BrokerUnavailableError,
        ChildrenFailedError,
        ConfigurationError,
        DatabaseUnavailableError,
        DecodingError,
        DefinitionError,
        DuplicateOutboxRouteError,
        DuplicateTaskError,
        DurableError,
        EmbeddedError,
        EncodingError,
        ExpiredTokenError,
        FactPayloadError,
        FactTimeoutError,
        FencingError,
        IdempotencyConflictError,
        InputError,
        InvalidTokenError,
        NonDeterminismError,
        NonRetryableError,
        NotAppliedError,
        OpConflictError,
        OpFailedError,
        OpStateError,
        PayloadKeyError,
        PrivilegeError,
        RunExistsError,
        SchemaError,
        StaleTokenError,
        StepFailedError,
        StepTimeoutError,
        TokenError,
        UncertainOpError,
        UncertainStepError,
        UndoError,
        UnknownEventError,
        UnknownOpError,
        UnknownQueueError,
        UnknownRunError,
        UnknownStepError,
        UnknownTaskError,
        UsedTokenError,
        WrongStatusError,
    )
    from umt_durable.ledger import Ledger, install_ledger, ledger_sql
    from umt_durable.migrate import migrate_engine_schema
    from umt_durable.payloads import PayloadCodec
    from umt_durable.records import Op, OutboxEvent, Progress, Run
    from umt_durable.settings import Settings
    from umt_durable.states import OpState, RunState

__all__ = [
    "AsyncTaskContext",
    "AutocommitError",
    "BrokerUnavailableError",
    "ChildrenFailedError",
    "ConfigurationError",
    "DatabaseUnavailableError",
    "DecodingError",
    "DefinitionError",
    "Done",
    "DuplicateOutboxRouteError",
    "DuplicateTaskError",
    "Durable",
    "DurableError",
    "DurableTask",
    "EmbeddedError",
    "EncodingError",
    "ExpiredTokenError",
    "Explanation",
    "Fact",
    "FactAddress",
    "FactPayloadError",
    "FactTimeoutError",
    "FactWait",
    "FencingError",
    "History",
    "IdempotencyConflictError",
    "InputError",
    "InvalidTokenError",
    "ItemFailure",
    "Ledger",
    "NonDeterminismError",
    "NonRetryableError",
    "NotAppliedError",
    "NotDone",
    "Op",
    "OpConflictError",
    "OpFailedError",
    "OpInfo",
    "OpState",
    "OpStateError",
    "Outbox",
    "OutboxEvent",
    "OutboxRelay",
    "PayloadCodec",
    "PayloadKeyError",
    "Policy",
    "PollPolicy",
    "PrivilegeError",
    "Progress",
    "RetryAfter",
    "RetryPolicy",
    "Run",
    "RunExistsError",
    "RunState",
    "SchemaError",
    "Settings",
    "StaleTokenError",
    "StepFailedError",
    "StepTimeoutError",
    "TaskContext",
    "TaskDefinition",
    "TaskEngine",
    "TaskInfo",
    "TaskRegistry",
    "Timer",
    "TokenError",
    "UncertainOpError",
    "UncertainStepError",
    "UndoError",
    "Unknown",
    "UnknownEventError",
    "UnknownOpError",
    "UnknownQueueError",
    "UnknownRunError",
    "UnknownStepError",
    "UnknownTaskError",
    "UsedTokenError",
    "WrongStatusError",
    "app",
    "create_default_registry",
    "current_context",
    "define_task",
    "durable",
    "install_ledger",
    "ledger_sql",
    "migrate_engine_schema",
    "undo",
    "with_attempt_token",
]

_HOMES: Final = {
    "bridge.app": ("app", "durable"),
    "bridge.durable": ("Durable",),
    "bridge.engine_port": ("OutboxRelay", "TaskEngine", "create_default_registry", "define_task"),
    "bridge.outbox": ("Outbox",),
    "bridge.task": ("DurableTask",),
    "engine.async_context": ("AsyncTaskContext",),
    "engine.client": ("History",),
    "engine.context": ("TaskContext", "current_context"),
    "engine.explaining": ("Explanation",),
    "engine.effects": ("Done", "NotDone", "OpInfo", "Policy", "Unknown", "with_attempt_token"),
    "engine.parallel": ("ItemFailure",),
    "engine.awaiting": ("TaskInfo",),
    "engine.registry": ("TaskDefinition", "TaskRegistry"),
    "engine.retry": ("RetryAfter", "RetryPolicy"),
    "engine.undoing": ("undo",),
    "engine.waitables": ("Fact", "FactAddress", "FactWait", "PollPolicy", "Timer"),
    "ledger": ("Ledger", "install_ledger", "ledger_sql"),
    "migrate": ("migrate_engine_schema",),
    "records": ("Op", "OutboxEvent", "Progress", "Run"),
    "payloads": ("PayloadCodec",),
    "settings": ("Settings",),
    "states": ("OpState", "RunState"),
}
_HOME_OF: Final = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("umt-durable")
    elif name in _HOME_OF or name in __all__:
        value = getattr(import_module(f"{__name__}.{_HOME_OF.get(name, 'errors')}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
