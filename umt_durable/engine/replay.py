"""Which recorded step answers a call, on replay. Pure: it works on journal entries that were read before.

A step is known by its key: its name, and either the key the caller gave or which call of that name it is in this pass.
With the kind and a fingerprint of the inputs that decides whether the code asks for what was recorded. Inserting and
appending steps is allowed; a step that says what it was called before is found under that name, any other renamed step
shows as an orphan, and other inputs or another kind under the same key as a NonDeterminismError.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from umt_durable.errors import DecodingError, DefinitionError, JournalCorruptError, NonDeterminismError
from umt_durable.records import StepEntry

MAX_KEY_BYTES: Final = 1000
PATCH: Final = "ctx.patched"
"""The name of the steps that say whether a run has a patch; code that asks no more does not miss them."""

UNDO: Final = "umt.undo/"
"""How the keys of undos begin; the key of the step that is undone follows."""

_SPECIAL = re.compile(r"[\\#\[]")
_SPECIAL_IN_KEY = re.compile(r"[\\\]]")
_FORM = re.compile(
    r"(?P<name>(?:\\[\\#\[]|[^\\#\[])+)(?:#(?P<occurrence>[1-9][0-9]*)|\[(?P<key>(?:\\[\\\]]|[^\\\]])*)\])?", re.DOTALL
)
_STAMP = re.compile(r"(\\.|[^\\])*?(?P<stamp>\\~[0-9a-f]+)", re.DOTALL)
_BRANCH = re.compile(r"\\.|\]/", re.DOTALL)


@dataclass(frozen=True, slots=True)
class StepKey:
    """The identity of a step in its run.

    Shape: written as `charge` (first call), `charge#2` (second call) or `charge[A-17]` (explicit key). A backslash
    stands before each backslash, `#` and `[` of the name, and before each backslash and `]` of an explicit key, so that
    no two keys are written alike. What a branch of a parallel step does stands behind its own key: `fan[left]/charge`.
    """

    name: str
    key: str | None = None
    occurrence: int = 1

    @property
    def text(self) -> str:
        """Give the key as the journal stores it.

        Errors: DefinitionError when the journal could not store it.
        """
        if isinstance(self.name, str) and self.name.startswith(UNDO):
            raise DefinitionError(f"step {self.name!r}: names that begin with {UNDO} are those of undos")
        if not isinstance(self.name, str) or not self.name:
            raise DefinitionError(f"a step needs a name, which comes first: text that is not empty, not {self.name!r}")
        name = _SPECIAL.sub(r"\\\g<0>", self.name)
        if self.key is not None:
            text = item_key(name, self.key)
        else:
            text = name if self.occurrence == 1 else f"{name}#{self.occurrence}"
        return _storable(text)

    @classmethod
    def parse(cls, text: str) -> StepKey:
        """Read a key from the journal.

        Shape: what tells it from a step recorded under the same key, see `beside`, is no part of it.
        Errors: DecodingError when no step key is written like this.
        """
        stamped = _STAMP.match(text)
        if stamped is not None:
            text = text[: stamped.start("stamp")] + text[stamped.end("stamp") :]
        found = _FORM.fullmatch(text)
        if found is None or found["occurrence"] == "1":
            raise DecodingError(f"{text!r} is not the key of a step")
        key = None if found["key"] is None else _plain(found["key"])
        return cls(_plain(found["name"]), key, int(found["occurrence"] or 1))


def item_key(of: str, key: str) -> str:
    """Give the key of one item or branch of a step, whose own key is given."""
    escaped = _SPECIAL_IN_KEY.sub(r"\\\g<0>", key)
    return f"{of}[{escaped}]"


def branches_of(key: str) -> list[str]:
    """Give the prefixes of all branches that an entry belongs to, the outermost first."""
    return [key[: found.end()] for found in _BRANCH.finditer(key) if found[0] == "]/"]


def beside(key: str, kind: str, fingerprint: bytes | None) -> str:
    """Give the key of a step that is executed although another one is recorded under its own key.

    It is the same for the same kind and inputs, so that every replay finds it, and nothing else is written like it.
    """
    stamp = f"\\~{hashlib.sha256(kind.encode() + b'/' + (fingerprint or b'')).hexdigest()[:12]}"
    return _storable(f"{key[:-1]}{stamp}]" if key.endswith("]") else f"{key}{stamp}")


def is_patch(key: str) -> bool:
    """Say whether a journal key is that of an answer of `ctx.patched`, of the body or of a branch."""
    return key.removeprefix((branches_of(key) or [""])[-1]).startswith(f"{PATCH}[")


def former_names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    """Give what `renamed_from=` says, as the names a step may be recorded under, the latest first.

    Errors: DefinitionError for what is no name.
    """
    names = () if given is None else (given,) if isinstance(given, str) or not isinstance(given, Sequence) else given
    for name in names:
        if not isinstance(name, str) or not name:
            raise DefinitionError(f"renamed_from= takes the name that a step had before, or several, not {given!r}")
    return tuple(names)


def undo_key(key: str) -> str:
    """Give the key of the undo of a step, whose own key is given.

    Errors: DefinitionError when the journal could not store it.
    """
    return _storable(UNDO + key)


@dataclass(frozen=True, slots=True, eq=False)
class _Claim:
    """Who has taken an explicit key: compared by identity."""

    name: str


class KeyMaker:
    """Gives the calls of one pass their keys.

    Only explicit keys may be made from several threads: the order of threads is not the same on replay. Each branch of
    a parallel step has a maker of its own, whose keys all begin with its prefix.
    """

    def __init__(self, prefix: str = "") -> None:
        self._prefix = prefix
        self._calls: Counter[str] = Counter()
        self._explicit: dict[str, _Claim] = {}
        self._renamed: dict[str, str] = {}
        self._former: Counter[str] = Counter()

    def make(self, name: str, key: str | int | UUID | None = None) -> str:
        """Give the journal key of the next call of this name.

        Errors: DefinitionError when an explicit key comes a second time in this pass: the second call would be given
        the result of the first; and for a name that another step of this pass was renamed from.
        """
        if key is None:
            if name in self._renamed:
                raise DefinitionError(_used_twice(name, self._renamed[name], name))
            self._calls[name] += 1
            return _storable(self._prefix + StepKey(name, None, self._calls[name]).text)
        return self._claim(_storable(self._prefix + StepKey(name, key_text(name, key)).text), name, key)

    def former(self, name: str, old_names: Sequence[str], key: str | int | UUID | None = None) -> list[str]:
        """Give the keys under which a call of this name may be recorded by code that called it otherwise.

        Shape: with an explicit key the old name and that key; without, the n-th call that was renamed from an old name
        is the n-th call of that name.
        Errors: DefinitionError for an old name (and key) that two steps of this pass have at once.
        """
        return [self._former_key(name, old, key) for old in old_names]

    def _former_key(self, name: str, old: str, key: str | int | UUID | None) -> str:
        if old == name:
            raise DefinitionError(
                f"step {name!r}: renamed_from= names what it was called before, not what it is called"
            )
        if key is not None:
            return self._claim(_storable(self._prefix + StepKey(old, key_text(name, key)).text), name, key)
        taken_by = old if self._calls[old] else self._renamed.setdefault(old, name)
        if taken_by != name:
            raise DefinitionError(_used_twice(old, name, taken_by))
        self._former[old] += 1
        return _storable(self._prefix + StepKey(old, None, self._former[old]).text)

    def items(self, name: str, of: str, keys: Iterable[object]) -> list[str]:
        """Give the journal keys of the items or branches of one step, whose own key is `of`.

        Errors: DefinitionError when two are alike, or one cannot be stored; none of them counts as made then.
        """
        given = list(keys)
        texts = {str(key): _storable(item_key(of, key_text(name, key))) for key in given}
        if len(texts) < len(given):
            twice = next(key for key, count in Counter(map(str, given)).items() if count > 1)
            raise DefinitionError(f"step {name!r}: the key {twice!r} comes twice; each item needs one of its own")
        return [self._claim(text, name, key) for key, text in texts.items()]

    def _claim(self, text: str, name: str, key: object) -> str:
        mine = _Claim(name)
        # One atomic call: two threads that come with the same key must not both find it new.
        first = self._explicit.setdefault(text, mine)
        if first is not mine and first.name != name:
            raise DefinitionError(
                f"steps {first.name!r} and {name!r} are both {text!r} in one pass: an old name belongs to one step"
            )
        if first is not mine:
            raise DefinitionError(f"step {name!r} was called twice with the key {str(key)!r} in one pass")
        return text


class Journal:
    """The recorded steps of a run, as one pass asks for them."""

    def __init__(self, entries: Iterable[StepEntry] = ()) -> None:
        self._entries = {entry.key: entry for entry in entries}
        self._asked: set[str] = set()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    @property
    def entries(self) -> list[StepEntry]:
        """Give all that is recorded, in no order."""
        return list(self._entries.values())

    @property
    def last_seq(self) -> int:
        """Give the highest sequence number recorded, 0 when nothing is."""
        return max((entry.seq for entry in self._entries.values()), default=0)

    def lookup(self, key: str, kind: str, fingerprint: bytes | None) -> StepEntry | None:
        """Find what is recorded for a call, or None when the step is new.

        A fingerprint is compared only where both sides have one: with an explicit key the inputs may be such that none
        can be made.
        Errors: NonDeterminismError when another kind or other inputs are recorded; JournalCorruptError when the
        recorded result does not match its digest.
        """
        self._asked.add(key)
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.kind != kind or differ(entry.fingerprint, fingerprint):
            raise NonDeterminismError(_describe(key, entry.kind, entry.fingerprint), _describe(key, kind, fingerprint))
        if entry.result is not None:
            check_digest(key, entry.result, entry.digest)
        return entry

    def add(self, entry: StepEntry) -> None:
        """Take in what this pass recorded."""
        self._entries[entry.key] = entry

    def disown(self, key: str) -> None:
        """Take a recorded step for one that was not asked for: the call under its key is another one."""
        self._asked.discard(key)

    def has_under(self, key: str) -> bool:
        """Say whether an item or a branch of the step of this key has recorded anything."""
        return any(recorded.startswith(f"{key}[") for recorded in self._entries)

    def orphans(self) -> tuple[StepEntry, ...]:
        """Give the recorded steps that this pass has not asked for, in the order they were recorded.

        Not those of a branch that has ended, which are not asked for again, nor the answers to `ctx.patched`: code that
        has no more need of a patch stops asking.
        """
        left = [
            entry
            for key, entry in self._entries.items()
            if key not in self._asked
            and not is_patch(key)
            and not any(branch[:-1] in self._asked for branch in branches_of(key))
        ]
        return tuple(sorted(left, key=lambda entry: entry.seq))


def _used_twice(old: str, name: str, other: str) -> str:
    return (
        f"step {name!r} says renamed_from={old!r}, but "
        + (f"a step {old!r} is called too" if other == old else f"so does step {other!r}")
        + ": an old name belongs to one step; give the steps keys, or ask ctx.patched"
    )


def _plain(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text, flags=re.DOTALL)


def check_digest(key: str, result: bytes, digest: bytes | None) -> None:
    """Compare a recorded result, as it is stored, with what was recorded of it.

    Errors: JournalCorruptError.
    """
    if digest is not None and hashlib.sha256(result).digest() != digest:
        raise JournalCorruptError(f"the recorded result of step {key!r} does not match its digest")


def differ(recorded: bytes | None, given: bytes | None) -> bool:
    """Say whether two hashes of inputs show that these differ. A keyed one and a plain one show nothing."""
    return recorded is not None and given is not None and len(recorded) == len(given) and recorded != given


def _describe(key: str, kind: str, fingerprint: bytes | None) -> str:
    inputs = "" if fingerprint is None else f" with inputs {fingerprint.hex()[:12]}"
    return f"the {kind} step {key!r}{inputs}"


def key_text(name: str, key: object) -> str:
    """Give an explicit key as text.

    Errors: DefinitionError.
    """
    if isinstance(key, bool) or not isinstance(key, str | int | UUID):
        raise DefinitionError(f"the key of step {name!r} must be text, a whole number or a UUID")
    return str(key)


def _storable(text: str) -> str:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise DefinitionError(f"the step key {text!r} holds a lone surrogate") from error
    if size > MAX_KEY_BYTES:
        raise DefinitionError(f"the step key {text[:40]!r}… is longer than {MAX_KEY_BYTES} bytes")
    if "\x00" in text:
        raise DefinitionError(f"the step key {text!r} holds U+0000")
    return text
