"""Which durable tasks this process has, in which versions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

from umt_durable.codec import EMPTY, Encoded, InputSchema, encode_arguments, return_annotation
from umt_durable.engine.failures import ExceptionRegistry
from umt_durable.engine.retry import RetryPolicy
from umt_durable.engine.selection import Selection
from umt_durable.errors import DefinitionError, DuplicateTaskError, UnknownTaskError
from umt_durable.texts import is_storable

MAX_NAME = 255

OnMismatch: TypeAlias = Literal["park", "fail", "warn"]
"""What becomes of a run whose code asks for another step than is recorded: it parks for a person, fails, or goes on."""

MISMATCH_POLICIES: Final = get_args(OnMismatch)


def _as_it_is(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskDefinition:
    """One version of a durable task.

    Shape: `body` takes the context first when `takes_context`; `schema` validates and types its other arguments;
    `function` is what was written, whose return annotation types the results where the body takes the context: of an
    existing task it was never more than a hint. `names_retry` is off where `retry` is only what a task without a policy
    of its own gets. `checks_calls` is off for a task that takes any call and fails for the
    wrong ones when it is executed, as with Celery's `typing=False`. `carry` gives an argument as the body will get it.
    Units: `limit_seconds` is the attempt's own deadline; None is none.
    """

    name: str
    version: int
    body: Callable[..., Any]
    schema: InputSchema
    function: Callable[..., Any]
    takes_context: bool = True
    retry: RetryPolicy = field(default_factory=lambda: RetryPolicy.NONE)
    names_retry: bool = True
    limit_seconds: float | None = None
    checks_calls: bool = True
    raises: tuple[type[Exception], ...] = ()
    on_mismatch: OnMismatch = "park"
    carry: Callable[[Any], Any] = _as_it_is
    owner: str = ""

    def __post_init__(self) -> None:
        name = self.name
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not is_storable(name) or "@" in name:
            raise DefinitionError(f"{self.name!r} is no task name: 1 to {MAX_NAME} characters, no '@'")
        if not isinstance(self.retry, RetryPolicy):
            raise DefinitionError(
                f"{self.name}: retry is a RetryPolicy, such as RetryPolicy.NETWORK, not {self.retry!r}"
            )
        if not isinstance(self.version, int) or self.version < 1:
            raise DefinitionError(f"{self.name}: versions count from 1, not {self.version!r}")
        if self.on_mismatch not in MISMATCH_POLICIES:
            raise DefinitionError(f"{self.name}: on_mismatch is park, fail or warn, not {self.on_mismatch!r}")

    @property
    def result(self) -> object:
        """Return the annotation results are typed by; resolved late: its class may be defined further down."""
        return return_annotation(self.function) if self.takes_context else EMPTY

    def encode_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Encoded:
        """Validate the arguments of a call, where the task wants that, and return them as they are stored.

        Errors: InputError, EncodingError.
        """
        given = tuple(map(self.carry, args))
        named = {name: self.carry(value) for name, value in kwargs.items()}
        if not self.checks_calls:
            return encode_arguments(given, named, where=f"the arguments of {self.name}")
        return self.schema.encode(*self.schema.bind_and_validate(given, named))


class TaskRegistry:
    """The durable tasks of one process, by name and version."""

    def __init__(self) -> None:
        self._tasks: dict[str, dict[int, TaskDefinition]] = {}
        self.exceptions = ExceptionRegistry()
        self.selection: Selection | None = None
        """What this process takes of them; None is all. What it enqueues is not bound by that."""

    def add(self, definition: TaskDefinition) -> None:
        """Register a version of a task.

        Errors: DuplicateTaskError names both owners.
        """
        if not isinstance(definition, TaskDefinition):
            raise DefinitionError(f"a registry holds what define_task gives, not {definition!r:.100}")
        versions = self._tasks.setdefault(definition.name, {})
        known = versions.get(definition.version)
        if known is not None and known.owner != definition.owner:
            raise DuplicateTaskError(
                f"{definition.name}@{definition.version} is declared by {known.owner} and by {definition.owner}"
            )
        versions[definition.version] = definition
        self.exceptions.add(*definition.raises, *definition.retry.exception_types)

    def has(self, name: str, version: int | None = None) -> bool:
        """Say whether a task (in a version) is registered."""
        versions = self._tasks.get(name, {})
        return bool(versions) if version is None else version in versions

    def get(self, name: str, version: int | None = None) -> TaskDefinition:
        """Return a task's definition: the highest version unless one is named.

        Errors: UnknownTaskError.
        """
        versions = self._tasks.get(name)
        if not versions or (version is not None and version not in versions):
            raise UnknownTaskError(name if version is None else f"{name}@{version}", self.declared())
        return versions[max(versions) if version is None else version]

    def without_retry(self) -> list[str]:
        """Return the versions that have no retry policy of their own, as `name@1`."""
        every = (one for versions in self._tasks.values() for one in versions.values())
        return sorted(f"{one.name}@{one.version}" for one in every if not one.names_retry)

    def versions(self, name: str) -> list[int]:
        """Return the registered versions of a task, the lowest first."""
        return sorted(self._tasks.get(name, ()))

    def declared(self) -> list[str]:
        """Return what is registered: `task` and `task@version` for each."""
        names = list(self._tasks)
        return sorted(names + [f"{name}@{version}" for name in names for version in self._tasks[name]])

    def take_only(self, texts: Iterable[str]) -> None:
        """Have this process take some versions only: `charge@1`, all of `charge`, all that match `import_*`.

        Errors: UnknownTaskError says what there is; DefinitionError where nothing is named.
        """
        self.selection = Selection.parse(
            texts, [(name, one) for name, versions in self._tasks.items() for one in versions]
        )

    def taken(self, name: str) -> list[int]:
        """Return the versions of a task that this process takes, the lowest first."""
        return [one for one in self.versions(name) if self.selection is None or self.selection.takes(name, one)]

    def takes_new(self, name: str) -> bool:
        """Say whether this process takes runs of a task that have no version yet: they get the highest there is."""
        return self.versions(name)[-1:] == self.taken(name)[-1:] != []

    def offered(self) -> list[str]:
        """Return what this process takes, for others to see: `task@version` for each, and `task` for new runs."""
        names = list(self._tasks)
        new = [name for name in names if self.takes_new(name)]
        return sorted(new + [f"{name}@{version}" for name in names for version in self.taken(name)])

    def __iter__(self) -> Iterator[TaskDefinition]:
        return (definition for versions in self._tasks.values() for definition in versions.values())
