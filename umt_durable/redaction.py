"""Keep secrets out of logs, stored errors and shown payloads.

A secret is known by the name beside it (`password=…`, `"api_key": …`, `Authorization: …`, `?token=…`) or by its place
in a URL (`amqp://user:secret@host`). What has neither cannot be told from other text. Where it is unclear how far a
secret reaches, more is masked rather than less.

Every pattern here is linear in the length of the text: possessive, and anchored so that no run of characters is scanned
from more than one start. A crafted message must not be able to stop a worker in its logging.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import unquote_plus

MASK: Final = "***"

DEFAULT_KEYS: Final[tuple[str, ...]] = (
    "passkey",
    "token",
    "secret",
    "password",
    "passwd",
    "passphrase",
    "pwd",
    "authorization",
    "cookie",
    "api_key",
    "apikey",
    "private_key",
    "access_key",
    "credential",
    "dsn",
)

# Secret anywhere in a longer name (`pgpassword`); the others only as whole words of it (`auth_token`, not `tokenizer`).
_ANYWHERE: Final = ("passkey", "secret", "password", "passwd", "passphrase", "authorization", "apikey", "privatekey")
_HEADERS: Final = ("authorization", "cookie")
_MAX_DEPTH: Final = 50
_ELLIPSIS: Final = "…"

_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_NOT_WORD = re.compile(r"[^a-z0-9]+")

_PLACE = re.compile(
    r"(?P<url>(?<![\w+.\-])[\w+.\-]++://(?:[^\s\"'<>]|[\"'](?![\s,;:)\]}>]|$))*+)"
    r"|(?<![\w.\-])(?P<key>[\w.\-]++)(?P<quote>\\?[\"']?)\s*+(?:=>|[=:])\s*+"
)
_QUOTED = re.compile(
    r"""(?P<open>\\?[bBrRuU]{0,2}["'])(?:(?<=")(?:[^"\\]|\\.)*+"?|(?<=')(?:[^'\\]|\\.)*+'?)""", re.DOTALL
)
_OPENING = re.compile(r"[\w.]{0,80}[\[({]")
_BRACKET = re.compile(r"""["'\[\](){}]""")
_UNTIL_SPACE = re.compile(r"(?:\\.|\S)*+", re.DOTALL)
_UNTIL_PARAMETER = re.compile(r"[^\s&#\"'<>]*+")
_UNTIL_MEMBER = re.compile(r"[^\s,}\])]*+")
_UNTIL_LINE = re.compile(r"[^\r\n]*+")
_NEXT_URL = re.compile(r"[,;|](?=[A-Za-z][A-Za-z0-9+.\-]{0,40}://)")
_HOST = r"(?:\[[^\]]*+\]|[^:\[\],]*+)(?::[0-9]*+)?"
_HOSTS = re.compile(rf"{_HOST}(?:,{_HOST})*+")
_END_OF_PATH = re.compile(r"[?#]")
_END_OF_AUTHORITY = re.compile(r"[/?#]")
_PARAMETER_END = re.compile(r"([&;#?])")


class Redactor:
    """Masks what stands beside the names in `keys`.

    Shape: a name matches whatever its case and word separators: `api_key` also means `apiKey`, `X-API-Key`, `API KEY`.
    """

    def __init__(self, extra_keys: Iterable[str] = ()) -> None:
        self.keys: frozenset[str] = frozenset(DEFAULT_KEYS)
        self.learn(extra_keys)

    def learn(self, extra_keys: Iterable[str]) -> None:
        """Mask what stands beside these names too, from now on."""
        self.keys = frozenset((*self.keys, *extra_keys))
        self._wanted = frozenset("".join(_words(key)) for key in self.keys) - {""}
        self._decided: dict[str, bool] = {}

    def is_secret(self, key: str) -> bool:
        """Say whether the value beside this name is to be masked."""
        decided = self._decided.get(key)
        if decided is None:
            decided = self._decide(key)
            if len(self._decided) < 1000 and len(key) < 100:
                self._decided[key] = decided
        return decided

    def redact(self, value: object) -> object:
        """Give a copy of nested data with every secret masked, other values as they are.

        Shape: mappings become dicts; lists, tuples and sets keep their kind; text and bytes are searched; an object of
        another type becomes its masked repr if that holds a secret. Below 50 levels, and where a container holds
        itself, there is an ellipsis.
        """
        return self._copy(value, {}, 0)

    def redact_field(self, name: object, value: object) -> object:
        """Give the value of a named field as it may be shown."""
        return self._member(name, value, {}, 0)

    def redact_text(self, text: str) -> str:
        """Mask the secrets in free text: URLs, conninfo strings, headers, JSON and Python literals."""
        pieces: list[str] = []
        position = 0
        while (found := _PLACE.search(text, position)) is not None:
            pieces.append(text[position : found.start()])
            position = found.end()
            if found["url"] is not None:
                pieces.append(self._urls(found["url"]))
                continue
            pieces.append(found[0])
            if self.is_secret(found["key"]):
                end = _end_of_secret(text, found)
                pieces.append(_masked(text[position:end]))
                position = end
        pieces.append(text[position:])
        return "".join(pieces)

    def redact_url(self, url: str) -> str:
        """Mask the user part of a connection URL and its secret parameters; a conninfo string is masked as text."""
        return self._urls(url) if "://" in url else self.redact_text(url)

    def _decide(self, key: str) -> bool:
        words = _words(key)
        joined = "".join(words)
        if any(part in joined for part in _ANYWHERE) or joined.endswith(("token", "cookie")):
            return True
        # Runs of whole words: "x-api-key" holds "apikey", "shipping" does not hold "pin".
        for start in range(len(words)):
            run = ""
            for word in words[start : start + 4]:
                run += word
                if run in self._wanted or run.removesuffix("s") in self._wanted:
                    return True
        return False

    def _urls(self, text: str) -> str:
        """Mask a URL, or several joined as kombu and libpq allow."""
        pieces: list[str] = []
        position = 0
        for join in _NEXT_URL.finditer(text):
            pieces += [self._url(text[position : join.start()]), join[0]]
            position = join.end()
        return "".join([*pieces, self._url(text[position:])])

    def _url(self, url: str) -> str:
        scheme, _, rest = url.partition("://")
        authority = _END_OF_AUTHORITY.split(rest, maxsplit=1)[0]
        path = _END_OF_PATH.split(rest, maxsplit=1)[0]
        if "@" in authority:
            rest = f"{MASK}@{rest[path.rfind('@') + 1 :]}"
        elif _HOSTS.fullmatch(authority) is None:
            # A user part with an unescaped slash reaches to the last "@"; without one the text was cut off inside it.
            rest = f"{MASK}@{rest.rpartition('@')[2]}" if "@" in rest else f"{MASK}{rest[len(authority) :]}"
        head = _END_OF_PATH.split(rest, maxsplit=1)[0]
        return f"{scheme}://{head}{self._parameters(rest[len(head) :])}"

    def _parameters(self, text: str) -> str:
        return "".join(self._parameter(part) for part in _PARAMETER_END.split(text))

    def _parameter(self, part: str) -> str:
        key, equals, value = part.partition("=")
        if not (equals and value):
            return part
        decoded = unquote_plus(value)
        # A URL inside a parameter may hide secrets of its own; it is not followed, so that nesting costs nothing.
        hides = "://" in decoded and ("@" in decoded or "?" in decoded or part.endswith(decoded))
        return f"{key}={MASK}" if hides or self.is_secret(unquote_plus(key)) else part

    def _copy(self, value: object, seen: dict[int, tuple[object, object]], depth: int) -> object:
        match value:
            case None | bool() | int() | float():
                return value
            case str():
                return self.redact_text(value)
            case bytes():
                return self.redact_text(value.decode("latin-1")).encode("latin-1")
            case Mapping() | list() | tuple() | set() | frozenset():
                return self._copy_container(value, seen, depth)
            case _:
                text = _text_of(value)
                masked = self.redact_text(text)
                return value if masked == text else masked

    def _copy_container(
        self,
        value: Mapping[object, object] | list[object] | tuple[object, ...] | set[object] | frozenset[object],
        seen: dict[int, tuple[object, object]],
        depth: int,
    ) -> object:
        if depth >= _MAX_DEPTH:
            return _ELLIPSIS
        if id(value) in seen:
            return seen[id(value)][1]
        # What a container that holds itself finds; replaced by the copy when that is complete.
        seen[id(value)] = (value, _ELLIPSIS)
        copied: object
        if isinstance(value, Mapping):
            copied = {
                self.redact_text(key) if isinstance(key, str) else key: self._member(key, item, seen, depth + 1)
                for key, item in value.items()
            }
        else:
            copied = _rebuild(value, [self._copy(item, seen, depth + 1) for item in value])
        seen[id(value)] = (value, copied)
        return copied

    def _member(self, name: object, value: object, seen: dict[int, tuple[object, object]], depth: int) -> object:
        if isinstance(name, bytes):
            name = name.decode("latin-1")
        if isinstance(name, str) and value is not None and self.is_secret(name):
            return MASK
        return self._copy(value, seen, depth)


class RedactingFilter(logging.Filter):
    """Masks secrets in a log record before a handler formats it: message, arguments, extra fields, traceback.

    Put it on handlers: a filter on a logger does not see the records of its children. It never drops a record.
    """

    def __init__(self, redactor: Redactor | None = None) -> None:
        super().__init__()
        self._redactor = DEFAULT if redactor is None else redactor

    def filter(self, record: logging.LogRecord) -> bool:
        """Mask the record in place; a record without secrets keeps its message and arguments apart."""
        self._mask_message(record)
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        if record.exc_text:
            record.exc_text = self._redactor.redact_text(record.exc_text)
        if record.stack_info:
            record.stack_info = self._redactor.redact_text(record.stack_info)
        for name in record.__dict__.keys() - _STANDARD_FIELDS:
            record.__dict__[name] = self._redactor.redact_field(name, record.__dict__[name])
        return True

    def _mask_message(self, record: logging.LogRecord) -> None:
        try:
            plain = record.getMessage()
            safe = str(record.msg)
            if record.args:
                safe %= self._redactor.redact(record.args)
        except Exception:  # noqa: BLE001 - foreign __str__ and wrong arguments; logging's own report would print both
            plain, safe = "", f"{_text_of(record.msg)} [the arguments do not fit this message]"
        safe = self._redactor.redact_text(safe)
        if safe != plain:
            record.msg, record.args = safe, ()


_STANDARD_FIELDS: Final = frozenset(logging.LogRecord("", 0, "", 0, "", (), None).__dict__) | {"message", "asctime"}


def _words(key: str) -> list[str]:
    return [word for word in _NOT_WORD.split(_CAMEL.sub("_", key).lower()) if word]


def _end_of_secret(text: str, found: re.Match[str]) -> int:
    """Find where the value after a secret's name ends."""
    start = found.end()
    quoted = _QUOTED.match(text, start)
    if quoted is not None:
        return quoted.end()
    opening = _OPENING.match(text, start)
    if opening is not None:
        return _end_of_bracket(text, opening.end() - 1)
    if text[max(found.start() - 1, 0) : found.start()] in ("?", "&"):
        pattern = _UNTIL_PARAMETER
    elif found["quote"]:
        pattern = _UNTIL_MEMBER
    elif any(part in found["key"].lower() for part in _HEADERS):
        pattern = _UNTIL_LINE
    else:
        pattern = _UNTIL_SPACE
    value = pattern.match(text, start)
    return start if value is None else value.end()


def _end_of_bracket(text: str, start: int) -> int:
    """Find the end of the literal that opens at `start`; the end of the text when it is not closed."""
    depth, position = 0, start
    while (found := _BRACKET.search(text, position)) is not None:
        position = found.end()
        if found[0] in "\"'":
            quoted = _QUOTED.match(text, found.start())
            position = found.end() if quoted is None else quoted.end()
        elif found[0] in "[({":
            depth += 1
        else:
            depth -= 1
            if depth == 0:
                return position
    return len(text)


def _masked(secret: str) -> str:
    """Give the mask for a value as it stands in text, keeping its quotes."""
    quoted = _QUOTED.match(secret)
    if quoted is not None:
        return f"{quoted['open']}{MASK}{quoted['open'][-1] if secret[-1] == quoted['open'][-1] else ''}"
    return MASK if secret else ""


def _rebuild(like: list[object] | tuple[object, ...] | set[object] | frozenset[object], items: list[object]) -> object:
    if isinstance(like, list):
        return items
    if isinstance(like, tuple):
        return tuple(items)
    try:
        return frozenset(items) if isinstance(like, frozenset) else set(items)
    except TypeError:
        return items


def _text_of(value: object) -> str:
    try:
        return repr(value)
    except Exception:  # noqa: BLE001 - a foreign __repr__ may raise anything; the record must still be written
        return f"<{type(value).__name__}>"


DEFAULT: Final = Redactor()

redact = DEFAULT.redact
redact_text = DEFAULT.redact_text
redact_url = DEFAULT.redact_url
