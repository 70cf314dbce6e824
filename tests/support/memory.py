"""How much memory a process had at most."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

_PEAK = re.compile(r"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_bytes(pid: int) -> int:
    """Return the most resident memory a live process had so far, or has now where the system keeps no peak."""
    status = Path(f"/proc/{pid}/status")
    found = _PEAK.search(status.read_text()) if status.exists() else None
    return int(found[1]) * 1024 if found else int(psutil.Process(pid).memory_info().rss)
