"""Device hours and money that a training run costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Optional

from opacus_ext.accountants.solver import checked


class Cost(NamedTuple):
    """Hours of all devices together, on the clock, and their price if it is known."""

    device_hours: float
    hours: float
    money: Optional[float]


@dataclass(frozen=True)
class Device:
    """
    The devices of a run.

    Attributes:
        flops: floating-point operations a second of one device, its peak
        utilization: the share of it that *private* training reaches: that of plain
            training, divided by how much longer a private step takes
        price: of an hour of one device; None if it is not known
        count: number of devices, which share the work evenly

    Raises:
        Refused: for numbers that are not positive and finite, and a utilization
            above 1

    Example:
        >>> Device(flops=3e14, utilization=0.4, price=2.5, count=8).cost(8.64e20)
        Cost(device_hours=2000.0, hours=250.0, money=5000.0)
    """

    flops: float
    utilization: float = 0.3
    price: Optional[float] = None
    count: int = 1

    def __post_init__(self) -> None:
        checked("utilization", self.utilization, above=0, at_most=1)
        for name in ("flops", "price", "count"):
            if getattr(self, name) is not None:
                checked(name, getattr(self, name), above=0)

    def cost(self, flops: float) -> Cost:
        """The cost of a run of so many floating-point operations."""
        hours = flops / (self.flops * self.utilization) / 3600
        money = None if self.price is None else hours * self.price
        return Cost(hours, hours / self.count, money)
