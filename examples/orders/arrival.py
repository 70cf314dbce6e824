"""When the demo's orders come in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ORDERS_PER_SECOND: Final = 9.0
LEAST_SECONDS: Final = 12.0
KEPT_BACK: Final = 0.25
DRIP_SECONDS: Final = 16.0


@dataclass(frozen=True)
class Arrival:
    """Orders come in evenly, but while faults are still to come a quarter of them is kept back and drips in slowly.

    Otherwise a fast machine would be done with its work before the last fault, and there would be nothing to disturb.
    """

    orders: int

    @property
    def seconds(self) -> float:
        """Return how long all orders take to come in when none is kept back."""
        return max(LEAST_SECONDS, self.orders / ORDERS_PER_SECOND)

    def due(self, now: float, *, faults_to_come: bool) -> int:
        """Say how many orders have come in by now. Units: `now` in seconds since the first one."""
        planned = min(self.orders, 1 + int(now / self.seconds * self.orders))
        if not faults_to_come:
            return planned
        kept_back = int(self.orders * KEPT_BACK)
        dripping = max(0.0, now - self.seconds * (1 - KEPT_BACK))
        return min(planned, self.orders - kept_back + int(kept_back * dripping / DRIP_SECONDS))
