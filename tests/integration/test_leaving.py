"""Who may say that a worker shuts down: its main process alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, uuid
from umt_durable.bridge import leaving

leaving.announce(uuid.uuid4())
child = os.fork()
if not child:
    leaving.leave()  # what the main process's signal handler does, inherited by a child that is ended as it begins
    os._exit(0)
os.waitpid(child, 0)
print(leaving.is_leaving())
leaving.leave()
print(leaving.is_leaving())
leaving.forget()
"""


def test_a_forked_child_that_is_ended_as_it_begins_does_not_say_that_its_worker_leaves(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={"TMPDIR": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )

    assert done.stdout.split() == ["False", "True"], done.stderr
    assert not list(tmp_path.iterdir())
