"""The unprivileged user that the servers run as when we are root: Postgres refuses to run as root.

The user is a number that no account has. Nothing is added to the system and no folder's mode is changed: the servers
enter their data folder as their working directory, which needs no right on any of its parents.
"""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from umt_durable.errors import EmbeddedError

# Where systemd takes the users of services that exist only while they run; containers map the first 65,536 numbers.
_FIRST: Final = 61184
_COUNT: Final = 65519 - _FIRST
_NOBODY: Final = ("nobody", "daemon", "bin")


@dataclass(frozen=True, slots=True)
class Account:
    """A user and a group, by number."""

    uid: int
    gid: int


def server_account(seed: str, folders: list[Path]) -> Account | None:
    """Return who the servers run as, or None for ourselves.

    The owner of the data that exists already comes first, so that the number never changes for one home.
    Errors: EmbeddedError when we are root and cannot become anybody else.
    """
    if os.geteuid() != 0:
        return None
    if sys.platform != "linux":
        raise EmbeddedError("the embedded Postgres does not run as root here: start this as an ordinary user")
    for folder in folders:
        if folder.exists() and (owner := folder.lstat()).st_uid != 0:
            return Account(owner.st_uid, owner.st_gid)
    for account in (_free(seed), named_account()):
        if account is not None and _can_become(account):
            return account
    raise EmbeddedError(
        "Postgres does not run as root, and this process may not change its user: "
        "start it as an ordinary user, or set DURABLE_DATABASE_URL and a broker of your own"
    )


def named_account() -> Account | None:
    """Return an unprivileged user that has a name, which initdb asks for; None where the system has none."""
    for name in _NOBODY:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        if entry.pw_uid != 0:
            return Account(entry.pw_uid, entry.pw_gid)
    return None


def has_name() -> bool:
    """Return whether our own user has an entry in the system's user database."""
    try:
        pwd.getpwuid(os.geteuid())
    except KeyError:
        return False
    return True


def ids(account: Account | None) -> tuple[int | None, int | None, list[int] | None]:
    """Return user, group and extra groups as `subprocess` takes them."""
    return (None, None, None) if account is None else (account.uid, account.gid, [])


def succeeds(command: list[str], account: Account | None) -> bool:
    """Return whether a command can be run as the account, and ends well."""
    user, group, extra = ids(account)
    try:
        subprocess.run(
            command,
            user=user,
            group=group,
            extra_groups=extra,
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def give(path: Path, account: Account | None) -> None:
    """Make a folder and everything in it belong to the account."""
    if account is None:
        return
    for folder, _, files in os.walk(path):
        for each in [folder, *(os.path.join(folder, name) for name in files)]:
            os.chown(each, account.uid, account.gid, follow_symlinks=False)


def _free(seed: str) -> Account | None:
    start = int(seed, 16) % _COUNT
    for offset in range(_COUNT):
        uid = _FIRST + (start + offset) % _COUNT
        try:
            pwd.getpwuid(uid)
        except KeyError:
            return Account(uid, uid)
    return None


def _can_become(account: Account) -> bool:
    return succeeds(["/bin/sh", "-c", ":"], account)
