"""Errors of a surface for a size, a ratio or steps that it was fitted without."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.readings import best_curves, runs_of
from opacus_ext.planner.surface import Surface
from opacus_ext.refused import Refused


class HoldOut(NamedTuple):
    """
    Predictions for measurements that a surface was fitted without, ``[rows]`` each;
    ``measured`` is the rolling mean at the best learning rate, with its noise.
    """

    parameters: np.ndarray
    steps: np.ndarray
    ratio: np.ndarray
    measured: np.ndarray
    predicted: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Relative error: predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return float(np.abs(self.error).mean())

    @property
    def worst(self) -> float:
        """Largest absolute relative error."""
        return float(np.abs(self.error).max())


def continued(measurements: Any, **options: Any) -> Optional[HoldOut]:
    """
    The error of continuing curves to four times their length, estimated from the first
    quarter of the runs, continued, against the rest; None if a quarter is too short.

    Example:
        >>> from opacus_ext.planner import Measurements, scaled_options
        >>> runs = Measurements.read()
        >>> f"{continued(runs, **scaled_options(runs)).mean:.0%}"
        '3%'
    """
    quarter = float(np.max(measurements.steps)) / 4
    options = {**options, "fit_from": options.get("fit_from", 16_000) / 4}
    try:
        return hold_out(measurements, steps=quarter, **options)
    except Refused:
        return None


def hold_out(
    measurements: Any,
    *,
    parameters: Optional[float] = None,
    ratio: Optional[float] = None,
    steps: Optional[float] = None,
    **options: Any,
) -> HoldOut:
    """
    Fits a surface without one model size, one ratio or the steps beyond some, and
    predicts them. That shows the error of interpolating between sizes (ratios), over
    twice the distance of the whole surface; and of continuing curves.

    Args:
        measurements: as of :meth:`Surface.fit`
        parameters: the size to leave out, or
        ratio: the ratio to leave out, or
        steps: all readings of more than these are left out
        **options: of :meth:`Surface.fit`

    Raises:
        Refused: unless one of the three is given, measured and between others

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> grid = np.meshgrid([1e4, 3e4, 1e5], [10, 100, 1000], [0, 0.01, 0.1])
        >>> size, steps, ratio = (x.ravel() for x in grid)
        >>> loss = 2 + 30 * size**-0.3 + 3 * steps**-0.5 + ratio
        >>> runs = Measurements(size, steps, ratio, loss)
        >>> print(f"{hold_out(runs, parameters=3e4, min_steps=10, window=1).worst:.4f}")
        0.0142
    """
    given = dict(parameters=parameters, ratio=ratio, steps=steps)
    chosen = [(n, float(v)) for n, v in given.items() if v is not None]
    if len(chosen) != 1:
        raise Refused(
            "Hold out either parameters, a ratio or steps.", parameter="parameters"
        )
    ((name, value),) = chosen
    column = getattr(measurements, name)
    measured = np.unique(column)
    if name == "steps":
        options = {**options, "steps_to": measured[-1]}
        checked("steps", value, below=measured[-1])
    elif value not in measured[1:-1]:
        raise Refused(
            f"{name} {value:g} is not between two others of those measured: "
            f"{', '.join(f'{x:g}' for x in measured)}.",
            parameter=name,
        )
    out = column > value if name == "steps" else column == value
    surface = Surface.fit(measurements.select(~out), **options)
    min_steps, window = options.get("min_steps", 1000), options.get("window", 10)
    seen = measurements if name == "steps" else measurements.select(out)
    curves = best_curves(runs_of(seen, min_steps), int(window))
    columns = [
        [np.full(len(c.steps), m), c.steps, np.full(len(c.steps), r), c.loss]
        for (m, r), c in curves.items()
    ]
    rows = np.concatenate(columns, axis=1)
    if name == "steps":
        rows = rows[:, rows[1] > value]
    predicted = surface.loss(*rows[:3], outside="nan")
    inside = np.isfinite(predicted)
    if not inside.any():
        raise Refused(
            f"The runs of {name} {value:g} have no steps in common with the others.",
            parameter=name,
        )
    return HoldOut(*rows[:, inside], predicted[inside])
