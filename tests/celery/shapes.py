"""The shapes of Celery's canvas, and what was seen of one when it had run: its outcome, its family, its bodies.

A shape is built from the same tasks by name, once of the durable app and once of the plain one. Ids differ between two
runs; a family is therefore told in labels: `root` and `parent` by what they are called, a group by its members.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from celery import chain, chord, group
from celery.exceptions import TimeoutError as CeleryTimeoutError

from tests.support.bodylog import BodyLog, Entry
from tests.support.matrix_apps import BEGIN, Tasks
from tests.support.wait import patience

REPLACEMENTS = ("durable", "ordinary", "chain", "ordinary chain", "chord", "again")

Build = Callable[[Tasks, str], Any]


@dataclass(frozen=True)
class Shape:
    """A canvas by name: `build` makes it of an app's tasks with labels that begin with the name."""

    name: str
    build: Build
    value: Any = None
    """What it gives; None where it fails, since no shape gives that."""
    options: Callable[[Tasks, str], Mapping[str, Any]] = field(default=lambda tasks, name: {})


@dataclass(frozen=True)
class Seen:
    """What was seen of one shape.

    Shape: `families` holds for each label root, parent, group and stamps; `bodies` how often its body did its work.
    """

    outcome: tuple[str, Any]
    families: Mapping[str, str]
    bodies: Mapping[str, int]


SMALL = (
    *("chain", "upgrade", "chord of chains", "chord in a chord", "links", "stamps"),
    *("failure in a chain", "failure in a chord"),
    *("replaced, durable", "replaced in a chain, chain", "replaced in a chord, chord"),
)


def whole() -> Iterator[Shape]:
    """Yield all shapes, with members that are suspended never, once and three times."""
    for naps in (0, 1, 3):
        yield from each(naps)


def small() -> Iterator[Shape]:
    """Yield a shape of each kind, with members that are suspended once."""
    names = {f"{name} (1)" for name in SMALL}
    return (shape for shape in each(1) if shape.name in names)


def each(naps: int) -> Iterator[Shape]:
    """Yield the shapes whose durable members are suspended that often."""

    def shape(name: str, value: Any, options: Any = None) -> Callable[[Build], Shape]:
        given = {} if options is None else {"options": options}
        return lambda build: Shape(f"{name} ({naps})", build, value, **given)

    yield from _chains(shape, naps)
    yield from _chords(shape, naps)
    yield from _links(shape, naps)
    yield from _failures(shape, naps)
    yield from _replacing(shape, naps)


def _chains(shape: Any, n: int) -> Iterator[Shape]:
    yield shape("alone", 2)(lambda t, x: t.hop.s(1, label=f"{x}/a", naps=n))
    yield shape("chain", 14)(
        lambda t, x: chain(
            t.hop.s(1, label=f"{x}/a", naps=n), t.old.s(label=f"{x}/b", add=10), t.hop.s(label=f"{x}/c", naps=n, add=2)
        )
    )
    yield shape("chain that begins ordinary", 3)(
        lambda t, x: chain(t.old.s(0, label=f"{x}/a"), t.hop.s(label=f"{x}/b", naps=n), t.hop.s(label=f"{x}/c"))
    )
    yield shape("group", [2, 12, 3])(
        lambda t, x: group(
            t.hop.s(1, label=f"{x}/a", naps=n), t.old.s(2, label=f"{x}/b", add=10), t.hop.s(2, label=f"{x}/c", naps=n)
        )
    )
    yield shape("chain into a group", [3, 7])(
        lambda t, x: chain(
            t.hop.s(1, label=f"{x}/a", naps=n),
            group(t.hop.s(label=f"{x}/b", naps=n), t.old.s(label=f"{x}/c", add=5)),
        )
    )
    yield shape("upgrade", 10)(
        lambda t, x: chain(
            t.hop.s(1, label=f"{x}/a", naps=n),
            group(t.hop.s(label=f"{x}/b", naps=n), t.old.s(label=f"{x}/c", add=5)),
            t.total.s(label=f"{x}/d", naps=n),
        )
    )
    yield shape("group to group", 12)(
        lambda t, x: chain(
            group(t.hop.s(1, label=f"{x}/a", naps=n), t.hop.s(2, label=f"{x}/b")),
            t.total.s(label=f"{x}/c", naps=n),
            group(t.hop.s(label=f"{x}/d", naps=n), t.old.s(label=f"{x}/e")),
            t.old_total.s(label=f"{x}/f"),
        )
    )


def _chords(shape: Any, n: int) -> Iterator[Shape]:
    yield shape("chord", 9)(
        lambda t, x: chord(
            [t.hop.s(1, label=f"{x}/a", naps=n), t.old.s(1, label=f"{x}/b"), t.hop.s(4, label=f"{x}/c")],
            t.total.s(label=f"{x}/d", naps=n),
        )
    )
    yield shape("chord with an ordinary body", 5)(
        lambda t, x: chord(
            [t.hop.s(1, label=f"{x}/a", naps=n), t.hop.s(2, label=f"{x}/b", naps=n)], t.old_total.s(label=f"{x}/c")
        )
    )
    yield shape("chord of chains", 6)(
        lambda t, x: chord(
            [
                chain(t.hop.s(1, label=f"{x}/a", naps=n), t.old.s(label=f"{x}/b")),
                chain(t.old.s(1, label=f"{x}/c"), t.hop.s(label=f"{x}/d", naps=n)),
            ],
            t.total.s(label=f"{x}/e", naps=n),
        )
    )
    yield shape("chord in a chord", 9)(
        lambda t, x: chord(
            [
                chord(
                    [t.hop.s(1, label=f"{x}/a", naps=n), t.hop.s(2, label=f"{x}/b")],
                    t.total.s(label=f"{x}/c", naps=n),
                ),
                t.hop.s(3, label=f"{x}/d", naps=n),
            ],
            t.old_total.s(label=f"{x}/e"),
        )
    )
    yield shape("chord into a chain", 6)(
        lambda t, x: chord(
            [t.hop.s(1, label=f"{x}/a"), t.old.s(1, label=f"{x}/b")],
            chain(t.total.s(label=f"{x}/c"), t.old.s(label=f"{x}/d"), t.hop.s(label=f"{x}/e", naps=n)),
        )
    )
    yield shape("group in a group", 9)(
        lambda t, x: (
            group(
                t.hop.s(1, label=f"{x}/a"),
                group(t.hop.s(2, label=f"{x}/b", naps=n), t.hop.s(3, label=f"{x}/c", naps=n)),
            )
            | t.old_total.s(label=f"{x}/d")
        )
    )


def _links(shape: Any, n: int) -> Iterator[Shape]:
    yield shape("links", 2, _links_of(n))(lambda t, x: t.hop.s(1, label=f"{x}/a", naps=n))
    yield shape("links of an ordinary task", 2, _links_of(n))(lambda t, x: t.old.s(1, label=f"{x}/a"))
    yield shape("link in a chain", 4)(
        lambda t, x: chain(
            t.hop.s(1, label=f"{x}/a", naps=n).set(link=t.hop.s(label=f"{x}/b", naps=n)),
            t.old.s(label=f"{x}/c"),
            t.hop.s(label=f"{x}/d", naps=n).set(link=t.old.s(label=f"{x}/e")),
        )
    )
    yield shape("stamps", 6)(_stamped(n))


def _links_of(n: int) -> Callable[[Tasks, str], Mapping[str, Any]]:
    def options(t: Tasks, x: str) -> Mapping[str, Any]:
        return {
            "link": [
                t.hop.s(label=f"{x}/l1", naps=n),
                t.old.s(label=f"{x}/l2"),
                group(t.hop.s(label=f"{x}/l3"), t.old.s(label=f"{x}/l4")),
                chain(t.hop.s(label=f"{x}/l5", naps=n), t.old.s(label=f"{x}/l6")),
                chord([t.hop.s(label=f"{x}/l7"), t.hop.s(label=f"{x}/l8", naps=n)], t.total.s(label=f"{x}/l9")),
            ]
        }

    return options


def _stamped(n: int) -> Build:
    def build(t: Tasks, x: str) -> Any:
        made = chain(
            t.hop.s(1, label=f"{x}/a", naps=n),
            group(t.hop.s(label=f"{x}/b", naps=n), t.old.s(label=f"{x}/c")),
            t.total.s(label=f"{x}/d", naps=n),
        )
        made.stamp(tenant="acme", team=["north", "south"])
        return made

    return build


def _failures(shape: Any, n: int) -> Iterator[Shape]:
    def errbacks(t: Tasks, x: str) -> Mapping[str, Any]:
        return {"link_error": [t.errback.s(label=f"{x}/e1", naps=n), t.old_errback.s(label=f"{x}/e2")]}

    yield shape("failure", None, errbacks)(lambda t, x: t.fail.s(1, label=f"{x}/a", naps=n))
    yield shape("failure of an ordinary task", None, errbacks)(lambda t, x: t.old_fail.s(1, label=f"{x}/a"))
    yield shape("failure in a chain", None, errbacks)(
        lambda t, x: chain(
            t.hop.s(1, label=f"{x}/a"), t.fail.s(label=f"{x}/b", naps=n), t.hop.s(label=f"{x}/never"),
            t.old.s(label=f"{x}/nor this"),
        )
    )  # fmt: skip
    yield shape("failure in a chord", None)(
        lambda t, x: chord(
            [t.hop.s(1, label=f"{x}/a", naps=n), t.fail.s(3, label=f"{x}/b", naps=n)],
            t.total.s(label=f"{x}/never").on_error(t.errback.s(label=f"{x}/e1", naps=n)),
        )
    )
    yield shape("ordinary failure in a chord", None)(
        lambda t, x: chord(
            [t.hop.s(1, label=f"{x}/a", naps=n), t.old_fail.s(3, label=f"{x}/b")],
            t.total.s(label=f"{x}/never").on_error(t.old_errback.s(label=f"{x}/e1")),
        )
    )


def _replacing(shape: Any, n: int) -> Iterator[Shape]:
    for kind in REPLACEMENTS:
        yield shape(f"replaced, {kind}", 11, lambda t, x: {"link": t.hop.s(label=f"{x}/l", naps=n)})(
            lambda t, x, kind=kind: t.swap.s(1, label=f"{x}/a", kind=kind, naps=n)
        )
        yield shape(f"replaced in a chain, {kind}", 112)(
            lambda t, x, kind=kind: chain(
                t.classic_swap.s(1, label=f"{x}/a", kind=kind, naps=n),
                t.old.s(label=f"{x}/b", add=100),
                t.hop.s(label=f"{x}/c", naps=n),
            )
        )
        yield shape(f"replaced in a chord, {kind}", 12)(
            lambda t, x, kind=kind: chord(
                [t.swap.s(1, label=f"{x}/a", kind=kind, naps=n), t.hop.s(0, label=f"{x}/b", naps=n)],
                t.old_total.s(label=f"{x}/c"),
            )
        )


# -- what came of them ------------------------------------------------------------------------------------------------


def start(tasks: Tasks, shapes: Iterable[Shape]) -> dict[str, Any]:
    """Start shapes and return their results by name."""
    return {one.name: one.build(tasks, one.name).apply_async(**one.options(tasks, one.name)) for one in shapes}


def outcome(result: Any) -> tuple[str, Any]:
    """Wait for a result and return its value, or its error's type and text."""
    try:
        return "value", result.get(timeout=patience(120))
    except CeleryTimeoutError:
        return "nothing", result.state
    except Exception as error:  # noqa: BLE001 - whatever a shape fails with is compared
        return type(error).__name__, str(error)


def look(outcomes: Mapping[str, tuple[str, Any]], log: BodyLog) -> dict[str, Seen]:
    """Return what was seen of shapes that have come to their end."""
    kin = _Kin(log)
    families: dict[str, set[str]] = {}
    bodies: dict[str, int] = {}
    for entry in log.entries():
        if entry.mark == BEGIN:
            bodies[entry.step] = bodies.get(entry.step, 0) + 1
        else:
            families.setdefault(entry.step, set()).add(kin.family(entry))
    return {
        name: Seen(
            (kind, kin.read(what)),
            {label: " or ".join(sorted(found)) for label, found in families.items() if label.startswith(f"{name}/")},
            {label: times for label, times in bodies.items() if label.startswith(f"{name}/")},
        )
        for name, (kind, what) in outcomes.items()
    }


class _Kin:
    """The ids of one log in words: labels, which are the same in another run of the same shape."""

    def __init__(self, log: BodyLog) -> None:
        labels: dict[str, set[str]] = {}
        members: dict[str, set[str]] = {}
        joined: dict[str, str] = {}
        firsts: dict[str, set[str]] = {}
        for entry in log.entries():
            if entry.mark != BEGIN and entry.run:
                labels.setdefault(entry.run, set()).add(entry.step)
                root, _, group_id, _ = json.loads(entry.mark)
                if root == entry.run:
                    firsts.setdefault(_shape_of(entry), set()).add(entry.run)
                if group_id is not None:
                    members.setdefault(group_id, set()).add(entry.step)
                    joined[entry.run] = group_id
        self._names = {id: "=".join(sorted(found)) for id, found in labels.items()}
        self._members = {id: "{" + ", ".join(sorted(found)) + "}" for id, found in members.items()}
        self._joined, self._firsts = joined, firsts

    def family(self, entry: Entry) -> str:
        """Return root, parent, group and stamps of one entry."""
        root, parent, group_id, stamps = json.loads(entry.mark)
        members = self._members.get(group_id, "none")
        first = "itself" if root == entry.run else self._first(root, self._firsts.get(_shape_of(entry), set()))
        return f"root {first}, parent {self._one(parent)}, group {members}, stamps {stamps}"

    def read(self, what: Any) -> Any:
        """Return a text with the ids in it replaced."""
        if isinstance(what, str):
            for id, name in self._names.items():
                what = what.replace(id, name)
        return what

    def _one(self, id: str | None) -> str:
        if id is None:
            return "nobody"
        # Whichever part of a chord ends last is its body's parent.
        joined = self._joined.get(id)
        return self._names.get(id, "a stranger") if joined is None else f"one of {self._members[joined]}"

    def _first(self, root: str | None, firsts: set[str]) -> str:
        # Its root is the body's too, and one of several in a shape that begins with several tasks.
        if root in firsts:
            return "one of {" + ", ".join(sorted(self._names[id] for id in firsts)) + "}"
        return "nobody" if root is None else self._names.get(root, "a stranger")


def _shape_of(entry: Entry) -> str:
    return entry.step.partition("/")[0]


def compare(name: str, expected: Seen, seen: Seen) -> Iterator[str]:
    """Yield a line for each thing that differs between what was expected of a shape and what was seen."""
    if seen.outcome != expected.outcome:
        yield f"{name}: {expected.outcome} | {seen.outcome}"
    pairs = ((expected.families, seen.families), (expected.bodies, seen.bodies))
    for one, other in pairs:
        for label in sorted({*one, *other}):
            if one.get(label) != other.get(label):
                yield f"{label}: {one.get(label)} | {other.get(label)}"
