"""The API as the type checker of a user's project sees it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]

# A user's configuration: strict as ours, and none of our exemptions. Celery is untyped for everybody.
STRICT = """
[mypy]
strict = True
warn_unreachable = True
enable_error_code = ignore-without-code, truthy-bool, possibly-undefined
mypy_path = {project}
explicit_package_bases = True
[mypy-celery.*]
ignore_missing_imports = True
[mypy-umt_durable.*]
follow_imports = silent
"""


def reported(name: str, tmp_path: Path) -> set[tuple[int, str]]:
    """Return the (line, code) of each error that mypy reports for a file of this folder."""
    config = tmp_path / "mypy.ini"
    config.write_text(STRICT.format(project=PROJECT))
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "cache")]
    done = subprocess.run(
        [*command, "--no-error-summary", "--hide-error-context", str(HERE / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stderr == ""
    found = re.findall(r"^(.+?):(\d+): error: .*\[([a-z-]+)\]$", done.stdout, re.MULTILINE)
    assert bool(found) == bool(done.returncode), done.stdout
    assert all(Path(file).name == name for file, _, _ in found), done.stdout
    return {(int(line), code) for _, line, code in found}


def test_code_that_is_right_is_taken_without_a_word(tmp_path: Path) -> None:
    assert reported("user_code.py", tmp_path) == set()


def test_each_mistake_is_reported_where_it_is(tmp_path: Path) -> None:
    lines = (HERE / "user_mistakes.py").read_text().splitlines()
    wanted = {
        (number, code)
        for number, line in enumerate(lines, 1)
        if (found := re.search("expect: (.+)", line))
        for code in found[1].split(", ")
    }

    assert reported("user_mistakes.py", tmp_path) == wanted
