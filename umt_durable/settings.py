"""Every setting of this package: its name, default, unit and meaning, and where its value comes from."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_type_hints

from umt_durable.errors import ConfigurationError

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"0", "false", "no", "off"}
MIN_LEASE_SECONDS = 3.0
HOLD_SECONDS = 15.0
MOST_SECONDS = 86_400.0
MAX_NAMESPACE = 255
MIN_KEY_CHARACTERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of one `Durable` instance.

    Each is given to `Durable(...)`, or as `DURABLE_<NAME>` in the environment, or as `durable_<name>` in the Celery
    configuration; the first of these that is present counts.
    """

    database_url: str | None = None
    """Where Postgres is: a libpq URL or keyword string. None: the embedded server."""
    schema: str = "umt_durable"
    """The schema that holds our tables."""
    embedded: bool = True
    """Whether the embedded Postgres and Valkey may be started when neither database nor broker is configured."""
    lease_seconds: float = 15.0
    """How long a process may be silent before its runs are taken over; renewed at a third. At least 3."""
    poll_seconds: float = 0.5
    """How often relay and maintenance look for work when nothing wakes them."""
    deliver_seconds: float = 30.0
    """How long a hint may be on its way before it may count as lost; doubled each time, up to an hour."""
    hold_seconds: float = HOLD_SECONDS
    """How long who has taken messages out of the outbox, a relay or the process that finished a run, may take to send
    them before another relay does. At least 1."""
    max_crashes: int = 5
    """How many take-overs without progress a run survives before it is quarantined."""
    max_publish_attempts: int = 20
    """How often an outbox row may be refused for itself before it is dead."""
    notify: Literal["after_commit", "transaction", "off"] = "after_commit"
    """Whether callers wake the relay: after their commit, inside their transaction too, or never (poll only)."""
    pooler: bool = False
    """Whether the URL leads to PgBouncer in transaction mode: no LISTEN, no start-up options, no prepared names."""
    pool_size: int = 8
    """The most connections one process opens beside those of its lease and its relay."""
    worker_services: bool = True
    """Whether Celery workers run relay and maintenance themselves; off where `umt-durable serve` does."""
    op_namespace: str = "default"
    """Whose the keys of `step.effect` are. Apps that share a schema and not their keys need one each. It is a part of
    the idempotency keys that providers are given, so it stays the same for ever."""
    strict_queues: bool = True
    """Whether hints of a shared queue count in the depth gate. Off where ordinary tasks use the same queues."""
    strict_retry: bool = False
    """Whether a task without a retry policy of its own is refused: by a start of it, and by a worker that has it."""
    payload_codec: object | None = None
    """What seals arguments, results and facts before they are stored, or where it is, as `module:name`. None: nothing.
    Every process of the schema needs the same."""
    redact_keys: tuple[str, ...] | None = None
    """Further names whose values are masked in logs, stored errors and shown payloads; for the whole process."""
    signing_keys: tuple[str, ...] | None = field(default=None, repr=False)
    """The secrets that tokens of `step.begin` are signed with, 16 characters or more each, in the environment with
    spaces between: the first signs, all are known. None: the schema's own, which is made with it."""

    def __post_init__(self) -> None:
        for name in ("lease_seconds", "poll_seconds", "deliver_seconds", "hold_seconds"):
            # A comparison with NaN is never true, so it would pass each of the others.
            if not math.isfinite(getattr(self, name)) or getattr(self, name) > MOST_SECONDS:
                raise ConfigurationError(f"{name} must be a number up to {MOST_SECONDS:g}, not {getattr(self, name)!r}")
        if self.lease_seconds < MIN_LEASE_SECONDS:
            raise ConfigurationError(
                f"lease_seconds must be at least {MIN_LEASE_SECONDS:g}, not {self.lease_seconds:g}"
            )
        if self.hold_seconds < 1:
            raise ConfigurationError(f"hold_seconds must be at least 1, not {self.hold_seconds:g}")
        if not self.schema or "\0" in self.schema or len(self.schema.encode()) > 63:
            raise ConfigurationError(f"{self.schema!r} is no Postgres schema name (1 to 63 bytes)")
        if not 0 < len(self.op_namespace.encode("utf-8", "replace")) <= MAX_NAMESPACE or "\0" in self.op_namespace:
            raise ConfigurationError(f"{self.op_namespace!r} is no namespace for op keys (1 to {MAX_NAMESPACE} bytes)")
        if self.signing_keys is not None and not (
            self.signing_keys and all(len(key) >= MIN_KEY_CHARACTERS for key in self.signing_keys)
        ):
            raise ConfigurationError(
                f"signing_keys must be one secret or more, each of {MIN_KEY_CHARACTERS} characters at least"
            )
        for name in ("poll_seconds", "deliver_seconds", "max_crashes", "max_publish_attempts", "pool_size"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be more than zero, not {getattr(self, name)!r}")

    @property
    def channel(self) -> str:
        """Return the name of the NOTIFY channel; it holds the schema name, so installs do not wake each other."""
        return f"umt_durable.{self.schema}"[:63]

    @classmethod
    def load(
        cls,
        given: Mapping[str, Any] | None = None,
        conf: Mapping[str, Any] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> Settings:
        """Gather the settings: given ones before the environment before `durable_*` keys of `conf`.

        Errors: ConfigurationError names the setting, its value and where it came from.
        """
        given, conf = given or {}, conf or {}
        environ = os.environ if environ is None else environ
        hints = get_type_hints(cls)
        unknown = set(given) - set(hints)
        if unknown:
            raise ConfigurationError(
                f"unknown settings: {', '.join(sorted(unknown))} (known: {', '.join(sorted(hints))})"
            )
        values: dict[str, Any] = {}
        for one in fields(cls):
            variable, key = f"DURABLE_{one.name.upper()}", f"durable_{one.name}"
            if given.get(one.name) is not None:
                values[one.name] = _parse(given[one.name], hints[one.name], one.name)
            elif environ.get(variable, "") != "":
                values[one.name] = _parse(environ[variable], hints[one.name], variable)
            elif conf.get(key) is not None:
                values[one.name] = _parse(conf[key], hints[one.name], key)
        return cls(**values)


def _parse(value: Any, kind: Any, source: str) -> Any:
    """Read a setting as its type; texts come from the environment."""
    if kind == object | None:
        return value
    if kind == tuple[str, ...] | None:
        return _texts(value, source)
    try:
        if kind is bool:
            text = str(value).strip().lower()
            if text not in _TRUE | _FALSE:
                raise ValueError("neither yes nor no")
            return text in _TRUE
        if kind is int:
            return int(value)
        if kind is float:
            return float(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigurationError(f"{source}={value!r} is not a valid {kind.__name__}: {error}") from error
    if kind == Literal["after_commit", "transaction", "off"] and value not in ("after_commit", "transaction", "off"):
        raise ConfigurationError(f"{source}={value!r} must be after_commit, transaction or off")
    return str(value)


def _texts(value: Any, source: str) -> tuple[str, ...]:
    """Read several texts, secrets perhaps; no error shows them."""
    found = tuple(value.split() if isinstance(value, str) else value if isinstance(value, list | tuple) else ())
    if not found or not all(isinstance(one, str) for one in found):
        raise ConfigurationError(f"{source} must be a list of texts, or one text of them with spaces between")
    return found


def libpq_url(url: str) -> str:
    """Return a database URL in the form libpq reads, without SQLAlchemy's driver (`postgresql+psycopg://`)."""
    return re.sub(r"^postgres(?:ql)?\+[a-z0-9_]+://", "postgresql://", url)
