from __future__ import annotations

import io
import logging
import sys
import time
from types import MappingProxyType

import pytest
from celery import Celery
from hypothesis import given
from hypothesis import strategies as st

from umt_durable import Durable, redaction
from umt_durable.redaction import DEFAULT, MASK, RedactingFilter, Redactor

CANARY = "c4n4ry"
KEYS = [
    "passkey",
    "token",
    "secret",
    "password",
    "passwd",
    "authorization",
    "cookie",
    "api_key",
    "apikey",
    "private_key",
]

HIDDEN = [
    f"postgresql://ann:{CANARY}@db:5432/shop?sslmode=require",
    f"postgresql+psycopg://ann:{CANARY}@db1,db2:5433/shop",
    f"amqp://guest:{CANARY}@h1//;amqp://guest:{CANARY}@h2//",
    f"redis://:{CANARY}/x@cache:6379/0",
    f"redis://:{CANARY}",
    f"rediss://u:{CANARY}'x@h/0",
    f"1odd://u:{CANARY}@h",
    f"could not reach 'postgres://u:{CANARY}@h/db': refused",
    f"https://h/x?page=1&access_token={CANARY}#top",
    f"https://h/x?pass%77ord={CANARY}",
    f"https://h/x?next=https%3A%2F%2Fu%3A{CANARY}%40h",
    f"https://h/#id_token={CANARY}",
    f"GET /x?token={CANARY}&page=2 HTTP/1.1",
    f"host=db password={CANARY} user=ann",
    f"password='{CANARY} it\\'s {CANARY}' user=ann",
    f"password=a\\ {CANARY} user=ann",
    f"password = {CANARY}",
    f"PGPASSWORD={CANARY} psql",
    f"dsn=postgres://u:{CANARY}@h/db",
    f'{{"api_key": "{CANARY}", "x": 1}}',
    f'{{"clientSecret":"{CANARY}"}}',
    f"{{'token': b'{CANARY} {CANARY}', 'n': 2}}",
    f"{{'cookies': {{'a': '{CANARY}', 'b': ['{CANARY}']}}, 'x': 1}}",
    f"login(user='a', password=SecretStr('x {CANARY}'))",
    f"Authorization: Bearer {CANARY}.{CANARY}",
    f"authorization=Basic {CANARY}",
    f"Set-Cookie: id={CANARY}; path=/; other={CANARY}",
    f"X-API-Key : {CANARY}",
    f"password:           {CANARY}",
    f"password='{CANARY} never closed",
    f'\\"password\\": \\"{CANARY}\\"',
]
SHOWN = [
    "",
    "run 7 finished in 3 s",
    "http://localhost:8080/@ann",
    "postgresql://db1:5432,db2:5433/shop?sslmode=require",
    "http://[::1]:80/x",
    "tokenizer=fast, shipping: 4",
    "key=value page=2",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_e11_a_secret_in_text_is_masked(text: str) -> None:
    masked = DEFAULT.redact_text(text)

    assert CANARY not in masked
    assert MASK in masked


@pytest.mark.parametrize("text", SHOWN)
def test_text_without_a_secret_stays_as_it_is(text: str) -> None:
    assert DEFAULT.redact_text(text) == text


@pytest.mark.parametrize("text", [*(text for text in HIDDEN if "SecretStr" not in text), *SHOWN])
def test_masking_twice_changes_nothing_more(text: str) -> None:
    once = DEFAULT.redact_text(text)

    assert DEFAULT.redact_text(once) == once


def test_what_stands_around_a_secret_stays_readable() -> None:
    assert (
        DEFAULT.redact_text(
            f"connect host=db password={CANARY} user=ann to amqp://u:{CANARY}@mq:5672/v?token={CANARY}&a=1"
        )
        == "connect host=db password=*** user=ann to amqp://***@mq:5672/v?token=***&a=1"
    )


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "form", [str, str.upper, lambda key: f"db_{key}", lambda key: key.replace("_", "-"), lambda key: key + "s"]
)
def test_e11_the_default_names_match_in_every_spelling(key: str, form: type[str]) -> None:
    assert DEFAULT.is_secret(form(key))


def test_extra_names_match_as_whole_words_only() -> None:
    redactor = Redactor(["pin", "card_number"])

    assert [redactor.is_secret(key) for key in ("PIN", "user-pin", "cardNumber", "shipping", "number")] == [
        True,
        True,
        True,
        False,
        False,
    ]


def test_nested_data_keeps_its_kinds_and_loses_its_secrets() -> None:
    data = {
        "Password": CANARY,
        "when": None,
        "rows": [("dsn", f"redis://:{CANARY}@h"), {"token": {"deep": CANARY}, "n": 1}],
        "raw": f"password={CANARY}".encode(),
        "proxy": MappingProxyType({"cookie": CANARY}),
        "set": {1, 2},
        b"secret": CANARY,
        "token": None,
    }

    assert DEFAULT.redact(data) == {
        "Password": MASK,
        "when": None,
        "rows": [("dsn", f"redis://{MASK}@h"), {"token": MASK, "n": 1}],
        "raw": f"password={MASK}".encode(),
        "proxy": {"cookie": MASK},
        "set": {1, 2},
        b"secret": MASK,
        "token": None,
    }


def test_an_object_whose_text_holds_a_secret_becomes_that_text_masked() -> None:
    class Login:
        def __repr__(self) -> str:
            return f"Login(password={CANARY!r})"

    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no text")

    broken = Broken()

    assert DEFAULT.redact([Login(), broken]) == [f"Login(password='{MASK}')", broken]


def test_data_that_holds_itself_or_is_very_deep_ends_in_an_ellipsis() -> None:
    loop: list[object] = [CANARY]
    loop.append(loop)
    deep: list[object] = []
    for _ in range(5_000):
        deep = [deep]

    assert DEFAULT.redact(loop) == [CANARY, "…"]
    assert "…" in repr(DEFAULT.redact(deep))


def test_a_url_or_conninfo_alone_is_masked() -> None:
    assert (
        DEFAULT.redact_url(f"postgresql://ann:{CANARY}@db/shop?password={CANARY}")
        == "postgresql://***@db/shop?password=***"
    )
    assert DEFAULT.redact_url(f"host=db password={CANARY}") == "host=db password=***"


def logged(log: logging.Logger, message: str, *args: object, **options: object) -> str:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.addFilter(RedactingFilter())
    handler.setFormatter(logging.Formatter("%(message)s %(dsn)s", defaults={"dsn": ""}))
    log.addHandler(handler)
    log.propagate = False
    try:
        log.error(message, *args, **options)  # type: ignore[arg-type]  # the options of logging, as the test gives them
    finally:
        log.removeHandler(handler)
    return stream.getvalue()


def test_e11_a_log_record_loses_its_secrets_wherever_they_are() -> None:
    log = logging.getLogger("tests.redaction")

    try:
        raise ValueError(f"password={CANARY}")
    except ValueError:
        text = logged(log, "login %s %s", {"token": CANARY}, f"redis://:{CANARY}@h", exc_info=sys.exc_info())
    text += logged(log, "login password=%s", CANARY)
    text += logged(log, "%(password)s", {"password": CANARY})
    text += logged(log, "connected", extra={"dsn": CANARY})
    text += logged(log, f"password={CANARY}", stack_info=True)

    assert CANARY not in text
    assert text.count(MASK) >= 6


def test_arguments_that_do_not_fit_are_not_printed() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "one %s two %s", (f"password={CANARY}",), None)

    RedactingFilter().filter(record)

    assert record.getMessage().endswith("[the arguments do not fit this message]")
    assert CANARY not in repr(record.__dict__)


def test_a_record_without_secrets_keeps_message_and_arguments_apart() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "run %s", ("r-1",), None)

    assert RedactingFilter().filter(record)
    assert (record.msg, record.args) == ("run %s", ("r-1",))


PIECES = ["a", "a.", "a:", 'password="', "token=", "a://", "a+", "password={", "=", " ", "?token=a://?", "password='\\"]
PIECES += ["@", ":", ",a", "_a", "aA", "token=a(", "\"'", "a=&", "x://,", 'token=["', "://", "[", "x://a:b@", "\\"]


@pytest.mark.parametrize("start", ["", "x://", "x://?", "password=", "password={"])
@pytest.mark.parametrize("piece", PIECES)
def test_masking_takes_time_in_proportion_to_the_text(start: str, piece: str) -> None:
    def seconds(length: int) -> float:
        text = start + piece * (length // len(piece))
        began = time.process_time()
        DEFAULT.redact_text(text)
        return time.process_time() - began

    # 20 times the length takes 400 times the time when it is quadratic.
    assert seconds(100_000) < 100 * max(min(seconds(5_000) for _ in range(3)), 0.001)


@given(st.text(), st.sampled_from(KEYS))
def test_no_text_around_it_uncovers_a_quoted_secret(around: str, key: str) -> None:
    masked = DEFAULT.redact_text(f'{around} {key}="{CANARY}" {around}')

    assert CANARY not in masked


def test_e11_names_that_an_app_adds_are_masked_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction.DEFAULT, "keys", redaction.DEFAULT.keys)
    monkeypatch.setattr(redaction.DEFAULT, "_wanted", redaction.DEFAULT._wanted)
    monkeypatch.setattr(redaction.DEFAULT, "_decided", {})
    assert redaction.redact({"iban": "DE00"}) == {"iban": "DE00"}
    durable = Durable(Celery("redacting", set_as_current=False), embedded=False, redact_keys=["iban"])

    assert durable.settings.redact_keys == ("iban",)
    assert redaction.redact({"iban": "DE00", "customerIban": "DE01"}) == {"iban": "***", "customerIban": "***"}
    assert redaction.redact_text("failed for iban=DE00") == "failed for iban=***"
