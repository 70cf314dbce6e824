"""Celery's tests, taken from its source distribution: nothing of it is part of this project."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CONFIG = "# Empty, so that a worker which a test starts finds no configuration of anybody else.\n"


class SourceError(Exception):
    """The tests cannot be had; the text says what failed."""


def installed_version() -> str:
    """Return the version of Celery that is tested: the tests must be of the same one."""
    return importlib.metadata.version("celery")


def fetch(cache: Path, version: str) -> Path:
    """Return the source distribution of a version of Celery, downloaded once into a cache folder.

    Errors: SourceError.
    """
    file = cache / f"celery-{version}.tar.gz"
    if file.exists():
        return file
    cache.mkdir(parents=True, exist_ok=True)
    wanted = ["--no-deps", "--no-binary", "celery", f"celery=={version}"]
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *wanted]
        done = subprocess.run([*command, "-d", folder], capture_output=True, text=True, check=False)
        found = sorted(Path(folder).glob("celery-*.tar.gz"))
        if done.returncode != 0 or len(found) != 1:
            raise SourceError(f"Celery's source distribution cannot be downloaded: {done.stderr.strip()[-600:]}")
        found[0].replace(file)
    return file


def unpack(archive: Path, folder: Path) -> Path:
    """Lay the tests of a source distribution in a folder, without Celery itself: the installed one is tested.

    Errors: SourceError when the archive holds no integration tests.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        with tarfile.open(archive) as tar:
            tar.extractall(scratch, filter="data")
        [top] = Path(scratch).iterdir()
        if not (top / "t" / "integration").is_dir():
            raise SourceError(f"{archive.name} holds no t/integration")
        folder.mkdir()
        shutil.move(top / "t", folder / "t")
        shutil.move(top / "pyproject.toml", folder / "pyproject.toml")
    (folder / "celeryconfig.py").write_text(CONFIG, encoding="utf-8")
    return folder
