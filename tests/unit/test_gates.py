from __future__ import annotations

from pathlib import Path

import pytest

from tools import gates

REFUSED = [
    ("import pickle", "pickle"),
    ("from pickle import loads", "pickle"),
    ("from time import time", "time.time"),
    ("import time\nstarted = time.time()", "time.time"),
    ("import time as t\nclock = t.time", "time.time"),
    ("from datetime import datetime\nnow = datetime.now(tz)", "datetime.datetime.now"),
    ("import datetime\nnow = datetime.datetime.utcnow()", "datetime.datetime.utcnow"),
    ("eval('1')", "eval"),
    ("import yaml\nyaml.load(text)", "yaml.load"),
    ("run(f'SELECT * FROM {table}')", "SQL"),
    ("run('DELETE FROM %s' % table)", "SQL"),
    ("run('UPDATE {} SET a = 1'.format(table))", "SQL"),
    ("run('DROP SCHEMA ' + name)", "SQL"),
]
ALLOWED = [
    "import time\ntime.monotonic()",
    "REFUSED = {'pickle', 'yaml'}",
    "client.eval(script)",
    "log.info(f'Selected {name}')",
    "run('SELECT 1')",
    "'Update the schema: ' + command",
    "SQL('SELECT * FROM {}').format(Identifier(name))",
]


def findings(root: Path, path: str, text: str) -> list[gates.Finding]:
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return gates.check(root)


@pytest.mark.parametrize(("source", "what"), REFUSED)
def test_the_package_may_not_hold(tmp_path: Path, source: str, what: str) -> None:
    found = findings(tmp_path, "umt_durable/store/runs.py", source)

    assert found
    assert what in found[-1].text
    assert found[-1].line == len(source.splitlines())


@pytest.mark.parametrize("source", ALLOWED)
def test_the_package_may_hold(tmp_path: Path, source: str) -> None:
    assert findings(tmp_path, "umt_durable/codec.py", source) == []


def test_only_the_package_is_bound_to_the_databases_clock(tmp_path: Path) -> None:
    assert findings(tmp_path, "examples/orders/demo.py", "import time\ntime.time()") == []


@pytest.mark.parametrize("source", ["import time\ntime.sleep(0.5)", "from time import sleep\nsleep(1)"])
def test_a_test_may_not_sleep_for_a_fixed_time(tmp_path: Path, source: str) -> None:
    [found] = findings(tmp_path, "tests/unit/test_x.py", source)

    assert found.line == 2


@pytest.mark.parametrize("path", ["README.md", "umt_durable/sql/run.sql", ".ci/run", "docs/tutorial.md"])
def test_open_ends_are_refused_everywhere(tmp_path: Path, path: str) -> None:
    [found] = findings(tmp_path, path, "one\n# " + "TO" + "DO later\n")

    assert found == (path, 2, "an open end: finish it or file an issue")


def test_environments_caches_and_binary_files_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\xff\xfe\x00")

    assert findings(tmp_path, ".venv/lib/x.py", "import pickle  # FIX" + "ME") == []
