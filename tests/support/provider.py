"""A provider outside the database, in a process of its own: what it applied stands in a log that is only appended to.

`python -m tests.support.provider MODE LOG` serves one line of JSON after the other on a port that it prints.

    plain       applies each call it gets
    idempotent  applies each key once, and gives later calls the first answer
    fenced      applies what carries a turn not older than the newest it has seen, in a call or a look-up

`Provider` starts and asks one; `apply` and `look_up` are what the functions of an effect do. A call with `hold` waits
in the provider, as in a network, until the test lets it go on: it is applied then.
"""

from __future__ import annotations

import json
import os
import socket
import socketserver
import sys
import threading
from pathlib import Path
from typing import Any, Literal, Self

from tests.support import guard
from tests.support.wait import until

ADDRESS = "UMT_TEST_PROVIDER"
"""The environment variable that tells worker processes where the provider is."""

Mode = Literal["plain", "idempotent", "fenced"]


class StaleTurnError(Exception):
    """The provider has seen a newer turn."""


# -- the process ------------------------------------------------------------------------------------------------------


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, mode: Mode, log: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.mode, self.log = mode, log
        self.lock = threading.Lock()
        self.answers: dict[str, int] = {}
        self.turns: dict[str, int] = {}
        self.gate, self.held = threading.Event(), 0

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["what"]:
            case "release":
                self.gate.set()
                return {}
            case "held":
                return {"held": self.held}
        if request.get("hold"):
            with self.lock:
                self.held += 1
            self.gate.wait()
        with self.lock:
            return self._answer(request["what"], request["op"], request["key"], request["turn"])

    def _answer(self, what: str, op: str, key: str, turn: int) -> dict[str, Any]:
        if self.mode == "fenced":
            if turn < self.turns.get(op, 0):
                return {"stale": True}
            self.turns[op] = turn
        if what == "look_up":
            return {"found": self.answers.get(op)}
        if self.mode == "idempotent" and key in self.answers:
            return {"answer": self.answers[key]}
        self._append(op, key, turn)
        number = len(self.answers) + 1
        self.answers.setdefault(op, number)
        self.answers.setdefault(key, number)
        return {"answer": self.answers[op]}

    def _append(self, op: str, key: str, turn: int) -> None:
        descriptor = os.open(self.log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
        try:
            os.write(descriptor, (json.dumps({"op": op, "key": key, "turn": turn}) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        for line in self.rfile:
            self.wfile.write(json.dumps(self.server.answer(json.loads(line))).encode() + b"\n")


# -- its clients ------------------------------------------------------------------------------------------------------


def ask(address: str, **request: Any) -> dict[str, Any]:
    """Send one request and return its answer."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, connection.makefile("rwb") as file:
        file.write(json.dumps(request).encode() + b"\n")
        file.flush()
        answer: dict[str, Any] = json.loads(file.readline())
        return answer


def apply(info: Any, *, address: str = "", hold: bool = False) -> int:
    """Have the provider apply an effect; return the number of the application that its answer stands for."""
    answer = ask(
        address or os.environ[ADDRESS],
        what="apply",
        op=info.op_key,
        key=info.idempotency_key,
        turn=info.turn,
        hold=hold,
    )
    if answer.get("stale"):
        raise StaleTurnError(f"turn {info.turn} of {info.op_key} is not the newest")
    return int(answer["answer"])


def look_up(info: Any, *, address: str = "") -> int | None:
    """Ask the provider whether it has applied an effect, and with which answer."""
    answer = ask(
        address or os.environ[ADDRESS], what="look_up", op=info.op_key, key=info.idempotency_key, turn=info.turn
    )
    if answer.get("stale"):
        raise StaleTurnError(f"turn {info.turn} of {info.op_key} is not the newest")
    found: int | None = answer["found"]
    return found


class Provider:
    """A provider process of one mode, and what it has applied."""

    def __init__(self, mode: Mode, folder: Path) -> None:
        self.log = folder / f"provider-{mode}.log"
        self._output = folder / f"provider-{mode}.out"
        argv = [sys.executable, "-m", "tests.support.provider", mode, str(self.log)]
        self._process = guard.spawn(argv, self._output, guard.clean_environment({}))
        until(lambda: self._output.exists() and "\n" in self._output.read_text(), what="the provider to be ready")
        self.address = self._output.read_text().splitlines()[0]

    def applied(self, op: str) -> int:
        """Count how often an effect was applied."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return sum(json.loads(line)["op"] == op for line in lines)

    def keys(self, op: str) -> set[str]:
        """Return the idempotency keys under which an effect was applied."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return {found["key"] for line in lines if (found := json.loads(line))["op"] == op}

    def wait_held(self) -> None:
        """Return once a call waits inside the provider."""
        until(lambda: ask(self.address, what="held")["held"], what="a call to be held in the provider")

    def release(self) -> None:
        """Let the calls go on that are held."""
        ask(self.address, what="release")

    def close(self) -> None:
        """End the process."""
        guard.end(self._process, grace=0.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def main() -> None:
    """Be the provider process."""
    mode, log = sys.argv[1:]
    server = _Server(mode, Path(log))  # type: ignore[arg-type]  # the caller is typed
    print(f"127.0.0.1:{server.server_address[1]}", flush=True)  # how the test learns of it
    server.serve_forever()


if __name__ == "__main__":
    main()
