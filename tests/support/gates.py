"""Gates: a body stops at a closed one until the test opens it.

A gate is a file in the folder that `UMT_TEST_GATES` names: while it exists the gate is closed. A body that arrives
there leaves a mark first, so that the test knows it is inside before it kills something.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.wait import until

VARIABLE = "UMT_TEST_GATES"
_LONGEST = 120.0


def _file(folder: Path, name: str, kind: str) -> Path:
    assert name
    assert "/" not in name
    return folder / f"{name}.{kind}"


def pass_through(name: str) -> None:
    """Return at once where the gate is open; else say that this process is here and wait until it opens."""
    folder = os.environ.get(VARIABLE)
    if not folder or not name:
        return
    closed = _file(Path(folder), name, "closed")
    if not closed.exists():
        return
    _file(Path(folder), name, f"reached-{os.getpid()}").touch()
    until(lambda: not closed.exists(), timeout=_LONGEST, what=f"gate {name} to open")


class Gates:
    """The test's side of the gates of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o777)

    def close(self, name: str) -> None:
        """Make bodies stop at this gate from now on."""
        _file(self.folder, name, "closed").touch()

    def open(self, name: str) -> None:
        """Let those who wait, and all who come, pass."""
        _file(self.folder, name, "closed").unlink(missing_ok=True)

    def open_all(self) -> None:
        """Let everybody pass everywhere."""
        for file in self.folder.glob("*.closed"):
            file.unlink(missing_ok=True)

    def reached(self, name: str) -> set[int]:
        """Return the processes that stopped at this gate so far."""
        return {int(file.name.rsplit("-", 1)[1]) for file in self.folder.glob(f"{name}.reached-*")}

    def wait(self, name: str, *, processes: int = 1, timeout: float = 30.0) -> set[int]:
        """Return the ids of the processes at this gate once there are enough of them."""
        until(
            lambda: len(self.reached(name)) >= processes,
            timeout=timeout,
            what=f"{processes} process(es) to reach gate {name}",
        )
        return self.reached(name)

    def forget(self, name: str) -> None:
        """Forget who reached this gate, before somebody is to reach it again."""
        for file in self.folder.glob(f"{name}.reached-*"):
            file.unlink(missing_ok=True)
