"""Device hours and money that a training run costs."""

from __future__ import annotations

from typing import NamedTuple, Optional

from opacus_ext.accountants.solver import checked


class Cost(NamedTuple):
    """Hours of all devices together, on the clock, and their price if it is known."""

    device_hours: float
    hours: float
    money: Optional[float]


def cost(
    flops: float,
    device_flops: float,
    utilization: float = 0.3,
    price: Optional[float] = None,
    devices: int = 1,
) -> Cost:
    """
    The cost of a run of so many floating-point operations.

    Args:
        flops: C, of the run
        device_flops: operations a second of one device, its peak
        utilization: the share of it that *private* training reaches: that of plain
            training, divided by how much longer a private step takes
        price: of an hour of one device
        devices: that share the work evenly

    Raises:
        Refused: for numbers that are not positive and finite, and a utilization
            above 1

    Example:
        >>> cost(8.64e20, 3e14, utilization=0.4, price=2.5, devices=8)
        Cost(device_hours=2000.0, hours=250.0, money=5000.0)
    """
    checked("device_flops", device_flops, above=0)
    checked("utilization", utilization, above=0, at_most=1)
    checked("devices", devices, above=0)
    if price is not None:
        checked("price", price, above=0)
    hours = checked("flops", flops, at_least=0) / (device_flops * utilization) / 3600
    money = None if price is None else float(hours * price)
    return Cost(float(hours), float(hours / devices), money)
