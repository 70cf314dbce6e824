"""Property tests here have no time limit for one example: the machine is shared. In CI they are the same each time."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "unit",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("unit")
