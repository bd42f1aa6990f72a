"""How well a surface predicts a size, or a ratio, that it was fitted without."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

import numpy as np

from opacus_ext.planner.readings import best_curves, runs_of
from opacus_ext.planner.surface import Surface
from opacus_ext.refused import Refused


class HoldOut(NamedTuple):
    """
    Predictions for measurements that a surface had not seen, ``[rows]`` each.

    ``measured`` is the rolling mean at the best learning rate, with its noise.
    """

    parameters: np.ndarray
    steps: np.ndarray
    ratio: np.ndarray
    measured: np.ndarray
    predicted: np.ndarray

    @property
    def error(self) -> np.ndarray:
        """Relative: predicted / measured - 1."""
        return self.predicted / self.measured - 1

    @property
    def mean(self) -> float:
        """Mean absolute relative error."""
        return float(np.abs(self.error).mean())

    @property
    def worst(self) -> float:
        """Largest absolute relative error."""
        return float(np.abs(self.error).max())


def hold_out(
    measurements: Any,
    *,
    parameters: Optional[float] = None,
    ratio: Optional[float] = None,
    **options: Any,
) -> HoldOut:
    """
    Fits a surface without one model size, or without one ratio, and predicts it.

    That shows the error of interpolating between sizes (ratios), over twice the
    distance of what the whole surface does.

    Args:
        measurements: as of :meth:`Surface.fit`
        parameters: the size to leave out, or
        ratio: the ratio to leave out
        **options: of :meth:`Surface.fit`

    Raises:
        Refused: unless one of the two is given, and for one that was not measured or
            is at the edge of the grid: nothing could be interpolated to there

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> grid = np.meshgrid([1e4, 3e4, 1e5], [10, 100, 1000], [0, 0.01, 0.1])
        >>> size, steps, ratio = (x.ravel() for x in grid)
        >>> loss = 2 + 30 * size**-0.3 + 3 * steps**-0.5 + ratio
        >>> runs = Measurements(size, steps, ratio, loss)
        >>> print(f"{hold_out(runs, parameters=3e4, min_steps=10, window=1).worst:.4f}")
        0.0142
    """
    if (parameters is None) == (ratio is None):
        raise Refused("Hold out either parameters or a ratio.", parameter="parameters")
    name, value = ("ratio", ratio) if parameters is None else ("parameters", parameters)
    column = np.asarray(getattr(measurements, name), dtype=float)
    known = np.unique(column[column > 0])
    if value not in known[1:-1]:
        values = ", ".join(f"{x:g}" for x in known)
        why = "at the edge of" if value in known or value == 0 else "not among"
        raise Refused(
            f"{name} {value:g} is {why} those measured ({values}): only one between "
            "two others can be interpolated.",
            parameter=name,
        )
    out = column == value
    surface = Surface.fit(measurements.select(~out), **options)
    min_steps, window = options.get("min_steps", 1000), options.get("window", 10)
    curves = best_curves(runs_of(measurements.select(out), min_steps), int(window))
    rows = np.concatenate(
        [
            np.stack(
                [np.full(len(c.steps), m), c.steps, np.full(len(c.steps), r), c.loss]
            )
            for (m, r), c in curves.items()
        ],
        axis=1,
    )
    predicted = surface.loss(*rows[:3], outside="nan")
    inside = np.isfinite(predicted)
    if not inside.any():
        raise Refused(
            f"The runs of {name} {value:g} have no steps in common with the others.",
            parameter=name,
            remedy="Leave out another one.",
        )
    return HoldOut(*rows[:, inside], predicted[inside])
