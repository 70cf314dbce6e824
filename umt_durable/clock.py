"""This machine's running time. It only measures ages; what decides is the database's clock, the SQL function `now`."""

from __future__ import annotations

import time

_BOOTTIME = getattr(time, "CLOCK_BOOTTIME", None)


def boottime() -> float:
    """Return seconds of running time that go on through a suspended machine, where the system has such a clock.

    The age of a proof and of a lease are measured with it (I7); elsewhere than on Linux it is the monotonic clock.
    """
    return time.monotonic() if _BOOTTIME is None else time.clock_gettime(_BOOTTIME)
