"""The semi-parametric scaling law: loss by model size, steps and noise-batch ratio.

Source: "Scaling laws for differentially private language models", section 3.3. Between
measured sizes, steps and ratios, log loss is interpolated linearly in their logs, after
the measurements are made smooth and monotone. Only steps beyond the measured ones need
a formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator

from opacus_ext.accountants.solver import checked
from opacus_ext.planner import readings
from opacus_ext.planner.law import broadcast, positive
from opacus_ext.planner.readings import Cell, Curve
from opacus_ext.refused import Refused

_LEAST_READINGS = 4  # to extrapolate from: one more than the curve has parameters
_PER_DECADE = 16  # grid points of extrapolated steps; between, interpolation


@dataclass(frozen=True)
class Surface:
    """
    Loss as a function of model size, steps and noise-batch ratio; made by :meth:`fit`.

    It never rises with steps and never falls with the ratio, at grid points and between
    them.

    Attributes:
        parameters: sizes of the grid, ascending, ``[sizes]``
        steps: ``[steps]``
        ratio: ``[ratios]``; 0 first if there were noise-free runs
        log_loss: ``[sizes, steps, ratios]``
        best_rate: learning rate of the lowest loss there; nan where unknown
        measured_to: last measured steps of the curves, ``[sizes, ratios]``
        warnings: for people: curves that were continued in an odd way

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> grid = np.meshgrid([1e4, 1e5], [10, 100, 1000], [0, 0.01, 0.1])
        >>> size, steps, ratio = (x.ravel() for x in grid)
        >>> loss = 2 + 30 * size**-0.3 + 3 * steps**-0.5 + ratio
        >>> runs = Measurements(size, steps, ratio, loss)
        >>> surface = Surface.fit(runs, min_steps=10, window=1)
        >>> print(surface.loss(1e5, [100, 300, 1000], 0.01).round(3))
        [3.259 3.159 3.054]
    """

    parameters: np.ndarray
    steps: np.ndarray
    ratio: np.ndarray
    log_loss: np.ndarray
    best_rate: np.ndarray
    measured_to: np.ndarray
    warnings: Tuple[str, ...] = ()

    @classmethod
    def fit(
        cls,
        measurements: Any,
        *,
        min_steps: float = 1000,
        window: int = 10,
        fit_from: float = 16_000,
        steps_to: Optional[float] = None,
    ) -> Surface:
        """
        Makes measurements smooth and monotone, and extrapolates them.

        1. Readings before ``min_steps`` are dropped.
        2. Each reading becomes the mean of the ``window`` last ones of its run. Runs
           that differ only in their number (seeds) are averaged.
        3. Isotonic regression: loss does not rise with steps. At each size, ratio and
           number of steps, the learning rate of the lowest loss is used, or the lowest
           loss so far, if the runs of its learning rate were shorter.
        4. Isotonic regression: loss does not fall with the ratio.
        5. Curves shorter than the grid follow L = exp(m log T + b) + E with m <= 0 and
           E >= 0, fitted for each size and ratio to the steps from ``fit_from`` on,
           never above their last value, and again made not to fall with the ratio.

        The defaults are the paper's, except ``steps_to`` (128,000 to 8.2e6 there); for
        a small study see :func:`scaled_options`, and for errors :func:`hold_out`.

        Args:
            measurements: a :class:`~opacus_ext.planner.measurements.Measurements`
            min_steps: readings of fewer are dropped
            window: readings in a rolling mean
            fit_from: steps from which curves are fitted for extrapolation; a quarter
                of a curve's own, if that is less
            steps_to: end of the grid; by default that of the longest run

        Raises:
            Refused: for a grid of sizes and ratios with holes, runs with two readings
                at one step, options out of range, and too few readings to extrapolate
                from
        """
        checked("window", window, at_least=1)
        checked("min_steps", min_steps, at_least=0)
        checked("fit_from", fit_from, at_least=0)
        runs = readings.runs_of(measurements, min_steps)
        curves = readings.best_curves(runs, int(window), falling=True)
        return _fit(curves, fit_from, steps_to)

    @property
    def ranges(self) -> Dict[str, Tuple[float, float]]:
        """
        Lowest and highest value of each argument of :meth:`loss`; and of the steps
        that all curves were measured at, ``measured_steps``.
        """
        ends = {
            name: (float(x[0]), float(x[-1]))
            for name in ("parameters", "steps", "ratio")
            for x in [getattr(self, name)]
        }
        first, last = ends["steps"]
        measured = (first, min(last, float(self.measured_to.min())))
        return {**ends, "measured_steps": measured}

    def measured_steps(self, parameters: ArrayLike, ratio: ArrayLike) -> np.ndarray:
        """
        Steps to which all curves were measured that a loss is interpolated from. A
        curve of a higher ratio counts for lower ones: with less noise no loss is
        higher.

        Example:
            >>> from opacus_ext.planner.measurements import Measurements
            >>> runs = Measurements.read()
            >>> surface = Surface.fit(runs, **scaled_options(runs))
            >>> surface.measured_steps([2e4, 9e5], 0.01)
            array([2800.,  700.])
        """
        below, above = (
            np.broadcast_arrays(
                _neighbor(self.parameters, parameters, side),
                _neighbor(self.ratio, ratio, side),
            )
            for side in ("right", "left")
        )
        to = np.maximum.accumulate(self.measured_to[:, ::-1], axis=1)[:, ::-1]
        return np.minimum.reduce([to[at] for at in product(*zip(below, above))])

    def loss(
        self,
        parameters: ArrayLike,
        steps: ArrayLike,
        ratio: ArrayLike,
        *,
        outside: str = "raise",
    ) -> np.ndarray:
        """
        Expected loss, by linear interpolation of its log; the arguments broadcast.

        Args:
            parameters: model size
            steps: of training
            ratio: noise-batch ratio, 0 for noise-free. Between 0 and the lowest that
                was measured, log loss is linear in the ratio; without noise-free runs
                such a ratio counts as the lowest, which expects too high a loss rather
                than too low a one
            outside: ``"raise"`` or ``"nan"`` for points beyond :attr:`ranges`

        Raises:
            Refused: outside of the ranges, unless ``outside`` is ``"nan"``
        """
        points = self._points(parameters, steps, ratio, outside)
        return np.exp(self._interpolate(self.log_loss, points))

    def learning_rate(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike
    ) -> np.ndarray:
        """
        The learning rate that was best at the grid point nearest in logs, nan where it
        is unknown. Arguments and errors as of :meth:`loss`.
        """
        axes = self.parameters, self.steps, self.ratio
        points = self._points(parameters, steps, ratio, "raise")
        return self.best_rate[tuple(map(_nearest, axes, points))]

    def _scale(self, ratio: np.ndarray) -> np.ndarray:
        """Ratios in which log loss is linear: themselves to the lowest, then logs."""
        least = self.ratio[self.ratio > 0].min(initial=math.inf)
        if least == math.inf:
            return 0 * ratio
        return np.minimum(ratio / least, 1) + np.log(np.maximum(ratio / least, 1))

    def _interpolate(
        self, values: np.ndarray, points: Tuple[np.ndarray, ...]
    ) -> np.ndarray:
        """Interpolates ``[sizes, steps, ratios, ...]``; nan at points that are nan."""
        m, t, r = points
        axes = np.log(self.parameters), np.log(self.steps), self._scale(self.ratio)
        at = np.stack([np.log(m), np.log(t), self._scale(r)], -1)
        found = RegularGridInterpolator(axes, values, bounds_error=False)(at)
        return found.reshape(m.shape + values.shape[3:])

    def _points(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike, outside: str
    ) -> Tuple[np.ndarray, ...]:
        """The arguments, broadcast and checked; nan outside of the grid."""
        if outside not in ("raise", "nan"):
            raise Refused(
                f"outside must be 'raise' or 'nan'; got {outside!r}.",
                parameter="outside",
            )
        given = dict(parameters=parameters, steps=steps, ratio=ratio)
        m, t, r = broadcast({n: positive(n, x, n == "ratio") for n, x in given.items()})
        r = np.where(r > 0, np.maximum(r, self.ratio[0]), r)
        beyond = np.zeros(m.shape, dtype=bool)
        for name, x in zip(given, (m, t, r)):
            low, high = self.ranges[name]
            out = (x < low) | (x > high)
            if outside == "raise" and out.any():
                raise Refused(
                    f"{name} {x[out].flat[0]:g} is outside of what was measured, "
                    f"{low:g} to {high:g}.",
                    parameter=name,
                    remedy="Measure there, or pass outside='nan'.",
                )
            beyond |= out
        return tuple(np.where(beyond, np.nan, x) for x in (m, t, r))


def scaled_options(measurements: Any) -> Dict[str, float]:
    """
    Options of :meth:`Surface.fit` for measurements of any length: the paper's, which
    are for runs of 128,000 steps read 1280 times, in proportion; a window of a tenth of
    a run's readings at most, extrapolation fitted from a quarter of the longest run on,
    to four times its steps.

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> surface = Surface.fit(runs := Measurements.read(), **scaled_options(runs))
        >>> surface.ranges["steps"][1]
        11200.0
    """
    longest = float(measurements.steps.max())
    each = len(measurements.steps) / len(np.unique(measurements.run))
    return dict(
        min_steps=min(1000.0, longest / 128),
        window=max(1, min(10, int(each / 10))),
        fit_from=min(16_000.0, longest / 4),
        steps_to=4 * longest,
    )


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
    """The error of the runs' first quarter, continued; None if it is too short."""
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
        raise Refused("Hold out either parameters, ratio or steps.", parameter="steps")
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
    curves = readings.best_curves(readings.runs_of(seen, min_steps), int(window))
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
    m, t, r, seen = rows[:, inside]
    return HoldOut(m, t, r, seen, predicted[inside])


def _neighbor(axis: np.ndarray, values: ArrayLike, side: Any) -> np.ndarray:
    """Indices of the axis' last value not above ("right"), or first not below."""
    at = np.searchsorted(axis, values, side) - (side == "right")
    return np.clip(at, 0, len(axis) - 1)


def _nearest(axis: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Indices of the axis' values nearest in logs; 0 is nearest to 0 only."""
    positive = axis[axis > 0]
    at = np.searchsorted(np.sqrt(positive[1:] * positive[:-1]), x)
    return np.where(x > 0, at + len(axis) - len(positive), 0)


def _grid_of_steps(
    curves: Mapping[Cell, Curve], steps_to: Optional[float]
) -> np.ndarray:
    """Steps at which curves were read, and some beyond them, up to ``steps_to``."""
    first = max(c.steps[0] for c in curves.values())
    steps = np.unique(np.concatenate([c.steps for c in curves.values()]))
    steps = steps[steps >= first]
    end = steps[-1] if steps_to is None else float(steps_to)
    if not (math.isfinite(end) and end > first):
        raise Refused(
            f"steps_to must be above {first:g}, the first steps that all runs were "
            f"read at; got {end:g}.",
            parameter="steps_to",
        )
    if end <= steps[-1]:
        return np.append(steps[steps < end], end)
    decades = math.log10(end / steps[-1])
    more = np.geomspace(steps[-1], end, math.ceil(decades * _PER_DECADE) + 1)
    return np.append(steps, [*more[1:-1], end])


def _fit(
    curves: Mapping[Cell, Curve], fit_from: float, steps_to: Optional[float]
) -> Surface:
    sizes, ratios = (np.array(sorted({cell[i] for cell in curves})) for i in (0, 1))
    grid = _grid_of_steps(curves, steps_to)
    last = np.array([[curves[m, r].steps[-1] for r in ratios] for m in sizes])
    log_loss = np.empty((len(sizes), len(grid), len(ratios)))
    rate = np.empty_like(log_loss)
    odd: Dict[str, List[str]] = {}
    for i, m in enumerate(sizes):
        of_size = [curves[m, r] for r in ratios]
        loss = np.exp(
            [np.interp(np.log(grid), np.log(c.steps), np.log(c.loss)) for c in of_size]
        ).T
        measured = grid[:, None] <= last[i]
        loss[~measured] = np.nan
        loss = readings.not_falling_with_ratio(loss)
        for j, c in enumerate(of_size):
            rate[i, :, j] = c.rate[_nearest(c.steps, grid)]
            beyond = ~measured[:, j]
            if not beyond.any():
                continue
            start = min(fit_from, last[i, j] / 4)
            used = measured[:, j] & (grid >= start)
            if used.sum() < _LEAST_READINGS:
                raise Refused(
                    f"Runs of parameters {m:g}, ratio {ratios[j]:g} have {used.sum()} "
                    f"readings from {start:g} steps on; to extrapolate, "
                    f"{_LEAST_READINGS} are needed.",
                    parameter="fit_from",
                    remedy="Lower fit_from or steps_to, or measure longer.",
                )
            loss[beyond, j], note = readings.extrapolate(
                grid[used], loss[used, j], grid[beyond]
            )
            if note:
                curve = f"parameters {m:g}, ratio {ratios[j]:g}"
                odd.setdefault(note, []).append(curve)
        # A fit may begin above the last reading; and where curves end at different
        # steps, the end of one may let the others rise.
        loss = readings.not_falling_with_ratio(np.minimum.accumulate(loss, axis=0))
        log_loss[i] = np.log(loss)
    warnings = [
        f"{len(of)} curve{'s' * (len(of) > 1)}: {note} ({'; '.join(of)})"
        for note, of in odd.items()
    ]
    return Surface(sizes, grid, ratios, log_loss, rate, last, warnings=tuple(warnings))
