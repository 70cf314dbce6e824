"""What a function takes and gives, by its signature."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Final
from weakref import WeakKeyDictionary

from umt_durable.codec import typed
from umt_durable.codec.arguments import encode_each, hash_arguments, parse_member, split
from umt_durable.codec.value import EMPTY, Codec, Encoded, adapter_or_none
from umt_durable.errors import DecodingError, DefinitionError, InputError

_POSITIONAL: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CACHED_RETURNS: WeakKeyDictionary[Callable[..., object], object] = WeakKeyDictionary()

Arguments = tuple[tuple[object, ...], dict[str, object]]
Convert = Callable[[object, object], object]


class InputSchema:
    """The parameters of a task's function.

    Shape: `skip_context` leaves out the first parameter, the context that the engine passes. Annotations are resolved
    at first use, so that a module may define its classes after its tasks.
    Errors: DefinitionError when there is no parameter for the context; at first use, when an annotation names something
    that is not defined.
    """

    def __init__(self, function: Callable[..., object], *, task: str, skip_context: bool = False) -> None:
        self.task = task
        self._function = function
        parameters = list(inspect.signature(function).parameters.values())
        if skip_context:
            parameters = _without_context(task, parameters)
        self._parameters = {parameter.name: parameter for parameter in parameters}
        self._positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        self._named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
        self._rest = _name_of_kind(parameters, inspect.Parameter.VAR_POSITIONAL)
        self._other = _name_of_kind(parameters, inspect.Parameter.VAR_KEYWORD)

    def bind_and_validate(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Arguments:
        """Give the arguments as the annotations have them, positional ones still positional.

        Shape: a default stays with the function: it is not filled in.
        Errors: InputError, naming every field that is missing, unknown, given twice or of a wrong type.
        """
        return self._convert(args, kwargs, _validate)

    def encode(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Encoded:
        """Turn validated arguments into bytes.

        Errors: EncodingError, naming the argument by its path, such as `$.kwargs.order.lines[3]`.
        """
        return encode_each(args, kwargs, self._of_index, self._of_name, where=f"the arguments of {self.task}")

    def decode(self, data: bytes, codec: int = Codec.JSON) -> Arguments:
        """Turn stored arguments, ours or written as plain JSON by others, into typed ones.

        Errors: DecodingError when the bytes hold no arguments; InputError, naming every field that does not fit.
        """
        args, kwargs = split(data, codec)
        return self._convert(args, kwargs, parse_member)

    def input_hash(self, data: bytes, codec: int = Codec.JSON) -> bytes:
        """Give the SHA-256 of stored arguments, to compare what two callers sent: by name or by place, in any order.

        Errors: DecodingError when the bytes hold no arguments.
        """
        args, kwargs = split(data, codec)
        first = next(
            (place for place, name in enumerate(self._positional) if name in self._named), len(self._positional)
        )
        by_place = dict(zip(self._positional[first:], args[first:], strict=False))
        return hash_arguments([*args[:first], *args[first + len(by_place) :]], {**by_place, **kwargs})

    def by_name(self, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[str, object]:
        """Give bound arguments by the names of their parameters.

        Shape: surplus positional arguments are a tuple under the name of the starred parameter; surplus keyword
        arguments stand beside the others.
        """
        named = dict(zip(self._positional, args, strict=False))
        if self._rest is not None:
            named[self._rest] = tuple(args[len(self._positional) :])
        return {**named, **kwargs}

    @functools.cached_property
    def annotations(self) -> dict[str, object]:
        """Give the resolved annotation of each parameter, in the order of the signature, EMPTY where it has none."""
        return {
            name: _resolve(self._function, parameter.annotation, f"parameter {name!r} of {self.task}")
            for name, parameter in self._parameters.items()
        }

    def _of_index(self, index: int) -> object:
        name = self._positional[index] if index < len(self._positional) else self._rest
        return EMPTY if name is None else self.annotations[name]

    def _of_name(self, name: str) -> object:
        field = name if name in self._named else self._other
        return EMPTY if field is None else self.annotations[field]

    def _convert(self, args: Sequence[object], kwargs: Mapping[str, object], convert: Convert) -> Arguments:
        problems = self._misbound(len(args), kwargs)
        converted_args = []
        for index, value in enumerate(args):
            name = (
                self._positional[index]
                if index < len(self._positional)
                else f"{self._rest}[{index - len(self._positional)}]"
            )
            converted_args.append(_converted(name, value, self._of_index(index), convert, problems))
        converted_kwargs = {
            name: _converted(name, value, self._of_name(name), convert, problems) for name, value in kwargs.items()
        }
        if problems:
            raise InputError(self.task, problems)
        return tuple(converted_args), converted_kwargs

    def _misbound(self, count: int, kwargs: Mapping[str, object]) -> list[tuple[str, str]]:
        """Find what Python would refuse at the call, all of it at once."""
        problems = []
        if count > len(self._positional) and self._rest is None:
            problems.append((f"argument {len(self._positional) + 1}", f"takes {len(self._positional)} positional"))
        given = set(self._positional[:count])
        for name in kwargs:
            if name in self._named and name in given:
                problems.append((name, "is given twice"))
            elif name not in self._named and self._other is None:
                problems.append((name, "is not a parameter"))
        for name, parameter in self._parameters.items():
            bound = name in given or (name in kwargs and name in self._named)
            if not bound and parameter.default is EMPTY and name not in (self._rest, self._other):
                problems.append((name, "is missing"))
        return problems


def return_annotation(function: Callable[..., object]) -> object:
    """Give the resolved return annotation of a function, EMPTY when it has none; a class returns itself.

    Errors: DefinitionError when it names something that is not defined.
    """
    if isinstance(function, type):
        return function
    function = _underlying(function)
    annotation = getattr(function, "__annotations__", {}).get("return", EMPTY)
    if annotation is EMPTY or isinstance(annotation, type):
        return annotation
    cached = _CACHED_RETURNS.get(function)
    if cached is None:
        name = getattr(function, "__qualname__", "a function")
        cached = _CACHED_RETURNS[function] = _resolve(function, annotation, f"the return of {name}")
    return cached


def first_annotation(function: Callable[..., object]) -> object:
    """Give the resolved annotation of a function's first parameter, EMPTY when it has none.

    Errors: DefinitionError when it names something that is not defined.
    """
    try:
        first = next(iter(inspect.signature(function).parameters.values()), None)
    except ValueError:  # a builtin that does not tell what it takes
        return EMPTY
    if first is None or first.annotation is inspect.Parameter.empty:
        return EMPTY
    return _resolve(function, first.annotation, f"parameter {first.name!r} of {getattr(function, '__qualname__', '')}")


def _validate(value: object, annotation: object) -> object:
    adapter = adapter_or_none(annotation)
    return value if adapter is None else typed.validate(value, adapter)


def _converted(
    name: str, value: object, annotation: object, convert: Convert, problems: list[tuple[str, str]]
) -> object:
    try:
        return convert(value, annotation)
    except DecodingError as error:
        problems.append((name, str(error)))
    except typed.FOREIGN_ERRORS as error:
        problems.extend((name + typed.path_of(place), reason) for place, reason in typed.problems(error))
    return None


def _resolve(function: Callable[..., object], annotation: object, what: str) -> object:
    if annotation is EMPTY or isinstance(annotation, type):
        return annotation
    holder = SimpleNamespace(__annotations__={"it": annotation})
    try:
        scope = getattr(_underlying(function), "__globals__", {})
        return typing.get_type_hints(holder, globalns=scope, include_extras=True)["it"]
    except (NameError, AttributeError, SyntaxError, TypeError) as error:
        raise DefinitionError(f"the annotation of {what} cannot be resolved: {error}") from error


def _underlying(function: Callable[..., object]) -> Callable[..., object]:
    """Find the function that was written, under partials, decorators, methods and callable objects."""
    while True:
        if isinstance(function, functools.partial):
            function = function.func
        elif hasattr(function, "__wrapped__"):
            function = function.__wrapped__
        elif hasattr(function, "__annotations__") or not hasattr(type(function).__call__, "__annotations__"):
            return getattr(function, "__func__", function)
        else:
            return type(function).__call__


def _without_context(task: str, parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    if parameters and parameters[0].kind in _POSITIONAL:
        return parameters[1:]
    if parameters and parameters[0].kind is inspect.Parameter.VAR_POSITIONAL:
        return parameters
    raise DefinitionError(f"the function of {task} must take the context as its first parameter")


def _name_of_kind(parameters: list[inspect.Parameter], kind: object) -> str | None:
    return next((parameter.name for parameter in parameters if parameter.kind is kind), None)
