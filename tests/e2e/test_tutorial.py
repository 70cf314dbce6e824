"""The tutorial, followed as a new user would: its blocks in order, in an empty folder, with an empty HOME."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.support import guard
from tests.support.wait import until
from umt_durable import embedded

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = ROOT / "docs" / "tutorial" / "first-run.md"
NOT_RUN = ("console",)
"""What the reader does once for his machine and this test finds done: the package is installed."""

_BLOCK = re.compile(
    r"^```(?P<language>\w+)(?: title=\"(?P<title>[^\"]+)\")?\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_WAIT = re.compile(r"^<!-- wait: (?P<condition>.+) -->$", re.MULTILINE)
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TERMINAL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_SECONDS = 60.0


@dataclass(frozen=True)
class Act:
    """One thing the reader does. Shape: `kind` is the language of a block, or `wait`; `line` counts from 1."""

    line: int
    kind: str
    text: str
    title: str | None = None


def acts(text: str) -> list[Act]:
    """Return everything the tutorial has its reader do, in order."""
    found = [(one.start(), one["language"], one["text"], one["title"]) for one in _BLOCK.finditer(text)] + [
        (one.start(), "wait", one["condition"], None) for one in _WAIT.finditer(text)
    ]
    return [Act(text.count("\n", 0, at) + 1, *rest) for at, *rest in sorted(found)]


def is_shown(expected: str, output: str) -> bool:
    """Say whether an output is what the tutorial shows, blank lines and the widths of columns aside.

    Ids and numbers stand for any; an ellipsis on a line of its own for any lines, at the end of a line for its rest.
    """
    found = ""
    for line in _lines(expected):
        if line == "…":
            found += r"(?:.*\n)*?"
            continue
        text = re.escape(_UUID.sub("UUID", line.removesuffix("…").rstrip()))
        text = re.sub("─+", "─+", re.sub(r"\d+", r"\\d+", text)).replace("UUID", _UUID.pattern)
        found += text + (r".*\n" if line.endswith("…") else r"\n")
    return re.fullmatch(found, "".join(f"{line}\n" for line in _lines(output))) is not None


def _lines(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


class Reader:
    """A person with a terminal of 160 columns in an empty folder."""

    def __init__(self, folder: Path) -> None:
        home = folder / "home"
        self.folder = folder / "first-run"
        home.mkdir()
        self.folder.mkdir()
        guard.watch(self.folder)
        self._environ = {
            "HOME": str(home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.defpath]),
            "LANG": "C.UTF-8",
            "TERM": "xterm",
            "COLUMNS": "160",
            guard.TOKEN: guard.token(),
        }

    def run(self, script: str) -> tuple[int, str]:
        """Run a block as it was typed; return its exit status and what the terminal showed."""
        master, terminal = pty.openpty()
        process = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail", "-c", script],
            cwd=self.folder,
            env=self._environ,
            stdin=subprocess.DEVNULL,
            stdout=terminal,
            stderr=terminal,
        )
        os.close(terminal)
        shown: list[bytes] = []
        watching = threading.Thread(target=_read, args=(master, shown), daemon=True)
        watching.start()
        status = process.wait(timeout=_SECONDS)
        watching.join(timeout=_SECONDS)
        os.close(master)
        return status, _TERMINAL.sub("", b"".join(shown).decode().replace("\r\n", "\n"))

    def sees(self, condition: str) -> bool:
        """Say whether a shell condition holds by now."""
        return self.run(condition)[0] == 0


def _read(master: int, shown: list[bytes]) -> None:
    """Collect what a terminal shows until nobody writes to it any more."""
    while True:
        try:
            data = os.read(master, 4096)
        except OSError:  # Linux says so when the last writer has gone
            return
        if not data:
            return
        shown.append(data)


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path)
    yield reader
    pid = reader.folder / "worker.pid"
    if pid.exists():
        reader.run(f"kill -9 $(cat {pid}) || true")
    embedded.down(reader.folder / ".umt_durable", force=True)


def test_every_block_of_the_tutorial_does_what_it_says(reader: Reader) -> None:
    output = ""

    for act in acts(TUTORIAL.read_text(encoding="utf-8")):
        where = f"{TUTORIAL.name}:{act.line}"
        match act.kind:
            case "python":
                assert act.title, f"{where}: a file without a name"
                (reader.folder / act.title).write_text(act.text, encoding="utf-8")
            case "sh":
                status, output = reader.run(act.text)
                assert status == 0, f"{where}: status {status}\n{output}\n{_log(reader)}"
            case "text":
                assert is_shown(act.text, output), f"{where}: shows\n{output}\nnot\n{act.text}\n{_log(reader)}"
            case "wait":
                until(
                    partial(reader.sees, act.text),
                    timeout=_SECONDS,
                    what=f"{where}: {act.text}",
                    diagnose=partial(_log, reader),
                )
            case other:
                assert other in NOT_RUN, f"{where}: nobody runs a block of {other}"

    assert sorted(path.name for path in reader.folder.parent.joinpath("home").iterdir()) == []


def _log(reader: Reader) -> str:
    path = reader.folder / "worker.log"
    return path.read_text(encoding="utf-8")[-4000:] if path.exists() else "(no worker yet)"
