from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from umt_durable.engine.replay import (
    MAX_KEY_BYTES,
    Journal,
    KeyMaker,
    StepKey,
    beside,
    branches_of,
    former_names,
    is_patch,
    item_key,
)
from umt_durable.errors import DecodingError, DefinitionError, JournalCorruptError, NonDeterminismError
from umt_durable.records import StepEntry
from umt_durable.states import StepKind, StepState

NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), min_size=1, max_size=40) | st.text(
    "\\#[]ab2", min_size=1, max_size=8
)
KEYS = st.builds(StepKey, NAMES, NAMES | st.just("")) | st.builds(StepKey, NAMES, st.none(), st.integers(1, 10**6))


def entry(
    key: str, seq: int = 1, kind: str = StepKind.RUN, fingerprint: bytes | None = b"f" * 16, result: bytes | None = b"1"
) -> StepEntry:
    return StepEntry(
        key=key,
        seq=seq,
        kind=kind,
        state=StepState.DONE,
        fingerprint=fingerprint,
        failures=0,
        fence=1,
        result=result,
        digest=None if result is None else hashlib.sha256(result).digest(),
        error=None,
        wake_at=None,
        due=False,
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (StepKey("charge"), "charge"),
        (StepKey("charge", None, 2), "charge#2"),
        (StepKey("charge", "A-17"), "charge[A-17]"),
        (StepKey("charge", ""), "charge[]"),
        (StepKey("charge#2"), "charge\\#2"),
        (StepKey("a[b]"), "a\\[b]"),
        (StepKey("a\\", "]"), "a\\\\[\\]]"),
        (StepKey("a", "]/b[c"), "a[\\]/b[c]"),
    ],
)
def test_a_key_is_written_and_read(key: StepKey, text: str) -> None:
    assert key.text == text
    assert StepKey.parse(text) == key


@given(KEYS)
def test_every_key_reads_back_the_same(key: StepKey) -> None:
    assert StepKey.parse(key.text) == key


@given(KEYS, KEYS)
def test_no_two_keys_are_written_alike(one: StepKey, other: StepKey) -> None:
    assert (one.text == other.text) == (one == other)


@pytest.mark.parametrize("text", ["", "charge#", "charge#0", "charge#1", "charge#x", "charge[a", "a#2[b]", "\\", "\\x"])
def test_what_is_not_written_like_a_key_is_not_read(text: str) -> None:
    with pytest.raises(DecodingError):
        StepKey.parse(text)


def test_a_step_whose_name_was_forgotten_says_that_it_comes_first() -> None:
    with pytest.raises(DefinitionError, match="comes first"):
        KeyMaker().make(len)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["", "a\x00b", "\ud800", "x" * (MAX_KEY_BYTES + 1)])
def test_a_name_the_journal_cannot_store_is_refused(name: str) -> None:
    with pytest.raises(DefinitionError):
        KeyMaker().make(name)


def test_calls_of_one_name_are_counted_and_keys_are_not() -> None:
    keys = KeyMaker()

    assert [
        keys.make("charge"),
        keys.make("book"),
        keys.make("charge"),
        keys.make("charge", "a"),
        keys.make("charge"),
    ] == [
        "charge",
        "book",
        "charge#2",
        "charge[a]",
        "charge#3",
    ]


def test_a_key_may_be_a_number_or_a_uuid() -> None:
    keys = KeyMaker()

    assert keys.make("pick", 7) == "pick[7]"
    assert keys.make("pick", UUID(int=1)) == "pick[00000000-0000-0000-0000-000000000001]"


@pytest.mark.parametrize("key", [True, 1.5, b"a", ("a",)])
def test_a_key_of_another_type_is_refused(key: object) -> None:
    with pytest.raises(DefinitionError, match="must be text"):
        KeyMaker().make("pick", key)  # type: ignore[arg-type]  # what an untyped caller may pass


def test_the_same_key_twice_in_one_pass_is_refused_not_given_the_first_result() -> None:
    keys = KeyMaker()
    keys.make("pick", "A")
    keys.make("pack", "A")

    with pytest.raises(DefinitionError, match="twice with the key 'A'"):
        keys.make("pick", "A")


def test_of_two_threads_with_one_key_exactly_one_gets_it() -> None:
    keys = KeyMaker()

    def take(number: int) -> bool:
        try:
            keys.make("pick", number % 500)
        except DefinitionError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        taken = list(threads.map(take, range(2_000)))

    assert sum(taken) == 500


@given(KEYS, NAMES, KEYS)
def test_nothing_outside_a_branch_is_written_like_what_is_done_in_it(
    outer: StepKey, label: str, inner: StepKey
) -> None:
    prefix = f"{item_key(outer.text, label)}/"
    text = prefix + inner.text

    assert prefix in branches_of(text)
    with pytest.raises(DecodingError):
        StepKey.parse(text)


def test_items_of_one_key_are_refused_together() -> None:
    keys = KeyMaker()

    with pytest.raises(DefinitionError, match="'1' comes twice"):
        keys.items("pick", "pick", [1, 2, "1"])
    assert keys.items("pick", "pick", [1, 2]) == ["pick[1]", "pick[2]"]


def test_what_a_branch_did_that_has_been_asked_for_is_no_orphan() -> None:
    journal = Journal([entry("fan[a]", 1), entry("fan[a]/step", 2), entry("fan[b]/step", 3)])

    journal.lookup("fan[a]", StepKind.RUN, None)

    assert [left.key for left in journal.orphans()] == ["fan[b]/step"]


@given(KEYS, st.binary(max_size=16) | st.none())
def test_a_key_beside_another_is_written_like_no_other_and_reads_as_that_step(
    key: StepKey, inputs: bytes | None
) -> None:
    stamped = beside(key.text, StepKind.RUN, inputs)

    assert stamped != key.text
    assert StepKey.parse(stamped) == key
    assert beside(key.text, StepKind.RUN, inputs) == stamped
    assert beside(key.text, StepKind.SLEEP, inputs) != stamped
    assert branches_of(f"{beside(item_key(key.text, 'left'), StepKind.BRANCH, inputs)}/in")


@pytest.mark.parametrize(
    ("key", "says"),
    [
        (StepKey("ctx.patched", "tax").text, True),
        ("fan[left]/ctx.patched[tax]", True),
        ("ctx.patched", False),
        ("charge[ctx.patched[tax\\]]", False),
        ("charge[\\]/ctx.patched[tax\\]]", False),
        ("fan[left]/charge", False),
    ],
)
def test_the_answers_to_patches_are_known_by_their_keys(key: str, says: bool) -> None:
    assert is_patch(key) is says


def test_the_calls_that_were_renamed_are_counted_by_their_old_name() -> None:
    keys = KeyMaker("fan[left]/")

    assert [keys.former("bill", ["charge"]), keys.former("bill", ["charge", "pay"]), keys.former("bill", ["pay"])] == [
        ["fan[left]/charge"],
        ["fan[left]/charge#2", "fan[left]/pay"],
        ["fan[left]/pay#2"],
    ]
    assert keys.former("bill", ["charge"], "A") == ["fan[left]/charge[A]"]
    assert keys.former("bill", []) == []


def test_a_step_that_another_one_took_the_place_of_is_an_orphan() -> None:
    journal = Journal([entry("charge"), entry("ctx.patched[tax]", 2)])
    journal.lookup("charge", StepKind.RUN, b"f" * 16)

    journal.disown("charge")

    assert [left.key for left in journal.orphans()] == ["charge"]


def test_a_recorded_step_is_found_and_a_new_one_is_not() -> None:
    recorded = entry("charge")
    journal = Journal([recorded])

    assert journal.lookup("charge", StepKind.RUN, b"f" * 16) is recorded
    assert journal.lookup("book", StepKind.RUN, b"f" * 16) is None
    assert "charge" in journal
    assert len(journal) == 1


def test_f6_other_inputs_under_the_same_key_show_both_sides() -> None:
    journal = Journal([entry("charge", fingerprint=b"\xaa" * 16)])

    with pytest.raises(NonDeterminismError) as caught:
        journal.lookup("charge", StepKind.RUN, b"\xbb" * 16)

    assert caught.value.expected == "the run step 'charge' with inputs aaaaaaaaaaaa"
    assert caught.value.found == "the run step 'charge' with inputs bbbbbbbbbbbb"


def test_f6_another_kind_under_the_same_key_is_refused() -> None:
    journal = Journal([entry("pause", kind=StepKind.SLEEP, fingerprint=None)])

    with pytest.raises(NonDeterminismError, match=r"sleep step 'pause'.*run step 'pause'"):
        journal.lookup("pause", StepKind.RUN, None)


@pytest.mark.parametrize(("recorded", "asked"), [(None, b"f" * 16), (b"f" * 16, None), (None, None)])
def test_a_missing_fingerprint_is_not_compared(recorded: bytes | None, asked: bytes | None) -> None:
    journal = Journal([entry("charge[a]", fingerprint=recorded)])

    assert journal.lookup("charge[a]", StepKind.RUN, asked) is not None


def test_reordered_steps_of_one_name_are_detected_by_their_inputs() -> None:
    journal = Journal([entry("pick", 1, fingerprint=b"A" * 16), entry("pick#2", 2, fingerprint=b"B" * 16)])
    keys = KeyMaker()

    with pytest.raises(NonDeterminismError):
        journal.lookup(keys.make("pick"), StepKind.RUN, b"B" * 16)


def test_i6_a_flipped_byte_in_a_result_is_found() -> None:
    whole = entry("charge", result=b'{"paid":1}')
    journal = Journal([StepEntry(**{**{f: getattr(whole, f) for f in whole.__slots__}, "result": b'{"paid":9}'})])

    with pytest.raises(JournalCorruptError, match="charge"):
        journal.lookup("charge", StepKind.RUN, b"f" * 16)


def test_f6_inserted_and_appended_steps_are_new_and_renamed_ones_are_orphans() -> None:
    journal = Journal([entry("third", 3), entry("first", 1), entry("second", 2)])

    journal.lookup("first", StepKind.RUN, None)
    assert journal.lookup("inserted", StepKind.RUN, None) is None
    journal.add(entry("inserted", 4))

    assert [left.key for left in journal.orphans()] == ["second", "third"]
    assert journal.last_seq == 4


def test_an_empty_journal_has_no_orphans() -> None:
    assert Journal().orphans() == ()
    assert Journal().last_seq == 0


@pytest.mark.parametrize("given", [3, "", ["charge", 3], ["charge", ""], {"charge": 1}])
def test_what_is_no_former_name_is_refused(given: Any) -> None:
    with pytest.raises(DefinitionError, match="renamed_from= takes the name"):
        former_names(given)
