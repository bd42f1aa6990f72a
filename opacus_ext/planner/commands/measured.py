"""Measurements of several commands, and the surface fitted to them."""

from __future__ import annotations

from typing import Any, Dict, Sequence, Tuple

from opacus_ext.planner.measurements import EXAMPLE, Measurements
from opacus_ext.planner.prediction_error import HoldOut, continued, hold_out
from opacus_ext.planner.surface import Surface, scaled_options

#: The paper's names of the laws of private training.
PRIVATE_LAWS = {"L1": "private", "L2": "private_sigmoid"}


def read_measurements(name: str) -> Measurements:
    """The measurements of a file, or of the package."""
    return Measurements.read(EXAMPLE if name == "example" else name)


def fit_surface(
    measured: Measurements, left_out: Sequence[Tuple[str, float]], bootstrap: int = 0
) -> Dict[str, Any]:
    """Ranges, errors and warnings of a surface, by name."""

    def errors(found: HoldOut) -> Dict[str, Any]:
        readings = len(found.measured)
        return {
            "mean error": found.mean,
            "worst error": found.worst,
            "readings": readings,
        }

    options: Any = scaled_options(measured)
    surface = Surface.fit(measured, bootstrap=bootstrap, **options)
    result: Dict[str, Any] = dict(law="surface", runs=len(measured))
    result |= {name: list(ends) for name, ends in surface.ranges.items()}
    if bootstrap:
        last = surface.ranges["measured_steps"][1]
        at = surface.parameters[:, None], last, surface.ratio
        low, high = surface.interval(*at)
        width = (high - low) / surface.loss(*at) / 2
        result["95 % interval"] = (
            f"+-{width.mean():.2%} of the loss in the mean, +-{width.max():.2%} at "
            f"most (after {last:g} steps, of {surface.resampled})"
        )
    held = continued(measured, **options)
    if held is not None:
        result["first quarter continued"] = errors(held)
    result["warnings"] = list(surface.warnings)
    for name, value in left_out:
        left: Any = {name: value, **options}
        result[f"without {name}={value:g}"] = errors(hold_out(measured, **left))
    return result
