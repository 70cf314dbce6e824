"""What the commands print: tables for people on a terminal, tab-separated lines or one JSON document for programs."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from textwrap import wrap
from typing import Any, TypeVar
from uuid import UUID

import click

from umt_durable.redaction import redact_text

F = TypeVar("F", bound=Callable[..., Any])

WHOLE = ("id", "run", "no", "state", "outcome")
"""Columns whose cells are never folded: an id that is cannot be copied. The others give way to them."""

WIDE = 140
"""Terminals of fewer columns get narrow tables: without empty columns, and with short times and ids."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table: its title, the names of its columns, and its rows.

    Shape: in a narrow table the column `stacked[0]` stands under `stacked[1]`, and each time takes two lines.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    stacked: tuple[str, str] | None = None


def json_option(command: F) -> F:
    """Give a command the option `--json`, as the parameter `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(command)


def emit(document: object, sections: Iterable[Section], *, as_json: bool) -> None:
    """Print a document, or the sections that show it.

    Shape: without a terminal each row is a line of cells divided by tabs; where there are several sections, the first
    cell is the title of the section.
    """
    if as_json:
        click.echo(json.dumps(document, indent=2, default=_plain))
    elif sys.stdout.isatty():
        _emit_tables(list(sections))
    else:
        shown = list(sections)
        for section in shown:
            head = [section.title] if len(shown) > 1 else []
            for row in section.rows:
                click.echo("\t".join([*head, *map(cell, row)]))


def say(text: str) -> None:
    """Print one line, whatever stands in the values that are part of it."""
    click.echo(_safe(text))


def cell(value: object) -> str:
    """Return a value as the text of one cell: times in UTC to the second, nothing that could steer a terminal."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.1f}"
        case datetime():
            return value.astimezone(tz=UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
        case timedelta():
            return str(value)
        case dict() | list():
            return _safe(json.dumps(value, default=_plain))
        case _:
            return _safe(str(value))


def one_line(text: str) -> str:
    """Return a text without line breaks and without what could steer a terminal."""
    return _safe(" ".join(part.strip() for part in text.splitlines() if part.strip()))


def blame(error: Exception) -> str:
    """Return what a module of the user's raised, and where, in one line without secrets."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())] or frames
    place = f"{own[-1].filename}:{own[-1].lineno}"
    if isinstance(error, SyntaxError):
        place = f"{error.filename}:{error.lineno}"
    return one_line(redact_text(f"{type(error).__name__}: {error} ({place})"))


def _emit_tables(sections: list[Section]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    filled = [section for section in sections if section.rows]
    if not filled:
        console.print("none")
    narrow = console.width < WIDE
    for section in (_stack(section) if narrow else section for section in filled):
        table = Table(
            title=section.title if len(sections) > 1 else None,
            title_justify="left",
            box=box.SIMPLE_HEAD,
            show_edge=section.stacked is None,
            pad_edge=section.stacked is None,
        )
        shown = [place for place in range(len(section.columns)) if not narrow or _says_something(section, place)]
        for column in (section.columns[place] for place in shown):
            table.add_column(
                column,
                overflow="fold",
                no_wrap=column in (*WHOLE, *(section.stacked or ())),
                min_width=min(len(column), 8),
            )
        for row in section.rows:
            values = [row[place] for place in shown]
            texts = [_short(value, section) if narrow else cell(value) for value in values]
            table.add_row(*(Text(text, style=_style(value)) for text, value in zip(texts, values, strict=True)))
        console.print(table)


def _says_something(section: Section, place: int) -> bool:
    """Say whether a column of a narrow table is worth its width: not where every cell is empty or zero."""
    return place == 0 or any(cell(row[place]) not in ("", "0", "no") for row in section.rows)


def _stack(section: Section) -> Section:
    """Return a table in which one column stands under another, if the table says which."""
    if section.stacked is None:
        return section
    under, over = map(section.columns.index, section.stacked)
    columns = [name for place, name in enumerate(section.columns) if place != under]
    rows = [
        [_Stacked(value, row[under]) if place == over else value for place, value in enumerate(row) if place != under]
        for row in section.rows
    ]
    return Section(section.title, columns, rows, section.stacked)


@dataclass(frozen=True, slots=True)
class _Stacked:
    over: object
    under: object

    def __str__(self) -> str:
        return "\n".join([*wrap(cell(self.over), len(cell(self.under))), cell(self.under)])


def _short(value: object, section: Section) -> str:
    """Return a cell for a narrow table: times without their year, ids of processes by their first digits."""
    match value:
        case _Stacked():
            return str(value)
        case datetime():
            divider = " " if section.stacked is None else "\n"
            return value.astimezone(tz=UTC).strftime(f"%m-%d{divider}%H:%M:%S")
        case UUID():
            return value.hex[:8]
        case _:
            return cell(value)


def _style(value: object) -> str:
    styles = {
        "ok": "green",
        "succeeded": "green",
        "warn": "yellow",
        "quarantined": "yellow",
        "fail": "bold red",
        "failed": "red",
        "lost": "red",
        "cancelled": "dim",
    }
    return styles.get(str(value), "") if isinstance(value, str) else ""


def _safe(text: str) -> str:
    return "".join(char if char.isprintable() else _escape(char) for char in text)


def _escape(char: str) -> str:
    return {"\t": "\\t", "\n": "\\n", "\r": "\\r"}.get(char, f"\\x{ord(char):02x}")


def _plain(value: object) -> object:
    """Return what JSON can hold in the place of a value."""
    match value:
        case datetime():
            return value.astimezone(tz=UTC).isoformat().replace("+00:00", "Z")
        case UUID() | Enum():
            return str(value)
        case _:
            return repr(value)
