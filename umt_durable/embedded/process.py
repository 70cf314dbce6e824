"""Starting servers that outlive us, finding them again, and waiting for what they do."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from umt_durable.embedded.account import Account, ids

_PAUSE: Final = 0.005
_LAST_LINES: Final = 15
_PID_DIGITS: Final = 11
# The shell leaves at once, so the server is no child of ours: killing our tree or pressing Ctrl-C does not reach it.
_DETACH: Final = '"$@" &'


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Return True as soon as the condition holds, False when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() >= deadline:
            return False
        time.sleep(_PAUSE)
    return True


def environment(locale: str) -> dict[str, str]:
    """Return the environment of a server: none of our variables, which may hold secrets or redirect its tools."""
    kept = {name: value for name, value in os.environ.items() if name in {"PATH", "TZ"}}
    return {**kept, "LC_ALL": locale}


def spawn(
    command: Sequence[str], *, folder: Path, log: Path, lock: int, account: Account | None, env: dict[str, str]
) -> None:
    """Start a server in a session of its own, with `folder` as its working directory.

    It inherits the lock of descriptor `lock` and holds it as long as it lives. A program that cannot be started writes
    its reason into the log and drops the lock.
    """
    user, group, extra = ids(account)
    with open_log(log) as output:
        subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *command],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=env,
            user=user,
            group=group,
            extra_groups=extra,
            umask=0o077,
            pass_fds=(lock,),
            start_new_session=True,
            check=True,
        )


def open_log(path: Path) -> BinaryIO:
    """Open a log for appending, readable for us alone."""
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "ab")


def tail(log: Path) -> str:
    """Return the name of a log and its last lines, for an error message."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError as error:
        return f"its log {log} cannot be read: {error.strerror}"
    if not lines:
        return f"its log {log} is empty"
    return "\n".join([f"the last lines of {log}:", *(f"  {line}" for line in lines[-_LAST_LINES:])])


def find_server(pid: int | None, name: str, folder: Path) -> int | None:
    """Return the pid again if the live process behind it is a server called `name` that works in `folder`.

    A pid from a file proves nothing: after a restart of the machine or container it names somebody else.
    """
    import psutil

    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE or process.name() != name:
            return None
        return pid if os.path.samefile(process.cwd(), folder) else None
    except (psutil.Error, OSError):
        return None


def read_pid(path: Path) -> int | None:
    """Return the number in the first line of a pid file, if there is one."""
    try:
        first = path.read_text(errors="replace").partition("\n")[0].strip()
    except FileNotFoundError:
        return None
    return int(first) if first.isdecimal() and len(first) < _PID_DIGITS else None


def users_of(path: Path) -> list[int]:
    """Return the other processes that have a file open, as far as we may look; for messages, not for decisions."""
    import psutil

    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if any(opened.path == str(path) for opened in process.open_files()):
                found.append(process.pid)
        except (psutil.Error, OSError):
            continue
    return sorted(pid for pid in found if pid != os.getpid())
