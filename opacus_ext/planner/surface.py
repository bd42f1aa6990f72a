"""The semi-parametric scaling law: loss by model size, steps and noise-batch ratio.

Source: "Scaling laws for differentially private language models", section 3.3. Between
measured sizes, steps and ratios, log loss is interpolated linearly in their logs, after
the measurements are made smooth and monotone. Only steps beyond the measured ones need
a formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from itertools import product
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import isotonic_regression, minimize_scalar

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.laws import broadcast, positive
from opacus_ext.planner.measurements import Measurements
from opacus_ext.refused import Refused

_LEAST_READINGS = 4  # to extrapolate from: one more than the curve has parameters
_PER_DECADE = 16  # grid points of extrapolated steps; between, interpolation
_AXES = "parameters", "steps", "ratio"

Cell = Tuple[float, float]  # size and ratio


class Curve(NamedTuple):
    """Losses of a run or, smoothed, of a cell at its best rates, ``[steps]``."""

    steps: np.ndarray
    loss: np.ndarray
    rate: np.ndarray
    whole: bool = True  # False for a run that ended early: a loss was not finite


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
        warnings: for people: curves that were continued in an odd way, or interpolated
        interpolated: sizes and ratios that nothing was measured of

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
    interpolated: Tuple[Cell, ...] = ()

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
        4. Isotonic regression: loss does not fall with the ratio. A ratio that a size
           lacks, between two that it has, is interpolated and listed, if it may lack
           some.
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
        checked("fit_from", fit_from, at_least=0)
        curves = best_curves(measurements, min_steps, window, falling=True)
        sizes, ratios = (np.unique([cell[i] for cell in curves]) for i in (0, 1))
        holes = tuple(cell for cell in product(sizes, ratios) if cell not in curves)
        allowed = measurements.may_lack_ratios
        curves |= {cell: _between(curves, cell, allowed) for cell in holes}
        grid = _grid_of_steps(curves, steps_to)
        measured_to = np.empty((len(sizes), len(ratios)))
        log_loss = np.empty((len(sizes), len(grid), len(ratios)))
        rate = np.empty_like(log_loss)
        odd: Dict[str, List[str]] = {}
        if holes:
            cells = [f"parameters {size:g}, ratio {ratio:g}" for size, ratio in holes]
            odd["not measured, interpolated between other ratios."] = cells
        for i, size in enumerate(sizes):
            of_size = [curves[size, r] for r in ratios]
            measured_to[i] = [curve.steps[-1] for curve in of_size]
            measured = grid[:, None] <= measured_to[i]
            loss = np.full(measured.shape, np.nan)
            for j, curve in enumerate(of_size):
                known = np.interp(np.log(grid), np.log(curve.steps), np.log(curve.loss))
                loss[:, j] = np.where(measured[:, j], np.exp(known), np.nan)
                rate[i, :, j] = curve.rate[_nearest(curve.steps, grid)]
            loss = _not_falling_with_ratio(loss)
            for j in map(int, np.flatnonzero(~measured[-1])):
                cell = f"parameters {size:g}, ratio {ratios[j]:g}"
                start, beyond = min(fit_from, measured_to[i, j] / 4), ~measured[:, j]
                used = measured[:, j] & (grid >= start)
                if used.sum() < _LEAST_READINGS:
                    raise Refused(
                        f"Runs of {cell} have {used.sum()} readings from {start:g} "
                        f"steps on; to extrapolate, {_LEAST_READINGS} are needed.",
                        parameter="fit_from",
                        remedy="Lower fit_from or steps_to, or measure longer.",
                    )
                loss[beyond, j], note = extrapolate(
                    grid[used], loss[used, j], grid[beyond]
                )
                if note:
                    odd.setdefault(note, []).append(cell)
            # A fit may begin above the last reading; and where curves end at different
            # steps, the end of one may let the others rise.
            loss = _not_falling_with_ratio(np.minimum.accumulate(loss, axis=0))
            log_loss[i] = np.log(loss)
        warnings = tuple(
            f"{len(of)} curve{'s' * (len(of) > 1)}: {note} ({'; '.join(of)})"
            for note, of in odd.items()
        )
        return cls(sizes, grid, ratios, log_loss, rate, measured_to, warnings, holes)

    @property
    def ranges(self) -> Dict[str, Tuple[float, float]]:
        """
        Lowest and highest value of each argument of :meth:`loss`; and of the steps
        that all curves were measured at, ``measured_steps``.
        """
        axes = {name: getattr(self, name) for name in _AXES}
        ends = {name: (float(x[0]), float(x[-1])) for name, x in axes.items()}
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
        ends = [
            [np.clip(np.searchsorted(axis, x, "right") - 1, 0, len(axis) - 1)]
            + [np.clip(np.searchsorted(axis, x), 0, len(axis) - 1)]
            for axis, x in ((self.parameters, parameters), (self.ratio, ratio))
        ]
        to = np.maximum.accumulate(self.measured_to[:, ::-1], axis=1)[:, ::-1]
        return reduce(np.minimum, [to[at] for at in product(*ends)])

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
        axes = np.log(self.parameters), np.log(self.steps), self._scale(self.ratio)
        at = np.stack([*np.log(points[:2]), self._scale(points[2])], -1)
        interpolated = RegularGridInterpolator(axes, self.log_loss, bounds_error=False)
        return np.exp(interpolated(at)).reshape(points[0].shape)

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

    def _points(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike, outside: str
    ) -> np.ndarray:
        """The arguments, broadcast and checked; nan outside of the grid."""
        if outside not in ("raise", "nan"):
            raise Refused(
                f"outside must be 'raise' or 'nan'; got {outside!r}.",
                parameter="outside",
            )
        given = {
            name: positive(name, x, name == "ratio")
            for name, x in zip(_AXES, (parameters, steps, ratio))
        }
        given["ratio"] = np.where(
            given["ratio"] > 0,
            np.maximum(given["ratio"], self.ratio[0]),
            given["ratio"],
        )
        points = np.array(broadcast(given))
        for name, values in zip(given, points):
            low, high = self.ranges[name]
            out = (values < low) | (values > high)
            if outside == "raise" and out.any():
                raise Refused(
                    f"{name} {values[out].flat[0]:g} is outside of what was measured, "
                    f"{low:g} to {high:g}.",
                    parameter=name,
                    remedy="Measure there, or pass outside='nan'.",
                )
            points[:, out] = np.nan
        return points


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
    named = dict(parameters=parameters, ratio=ratio, steps=steps)
    chosen = [(name, float(x)) for name, x in named.items() if x is not None]
    if len(chosen) != 1:
        raise Refused("Hold out either parameters, ratio or steps.", parameter="steps")
    ((name, value),) = chosen
    column = getattr(measurements, name)
    measured = np.unique(column)
    if name == "steps":
        options = {**options, "steps_to": measured[-1]}
        checked("steps", value, below=measured[-1])
        out, kept = column > value, column == column
    elif value in measured[1:-1]:
        out = kept = column == value
    else:
        raise Refused(
            f"{name} {value:g} is not between two others of those measured: "
            f"{', '.join(f'{x:g}' for x in measured)}.",
            parameter=name,
        )
    surface = Surface.fit(measurements.select(~out), **options)
    min_steps, window = options.get("min_steps", 1000), options.get("window", 10)
    columns = [
        np.stack(np.broadcast_arrays(size, curve.steps, ratio, curve.loss))
        for (size, ratio), curve in best_curves(
            measurements.select(kept), min_steps, window
        ).items()
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
    return HoldOut(*[*rows[:, inside], predicted[inside]])


def _runs_of(
    measurements: Measurements, min_steps: float
) -> Dict[Tuple[Cell, float], List[Curve]]:
    """The runs of each cell and learning rate, from ``min_steps`` on."""
    m = measurements.select(np.lexsort((measurements.steps, measurements.run)))
    runs: Dict[Tuple[Cell, float], List[Curve]] = {}
    for at in np.split(np.arange(len(m.run)), np.flatnonzero(np.diff(m.run)) + 1):
        steps, first = m.steps[at], at[0]
        size, ratio, rate = m.parameters[first], m.ratio[first], m.learning_rate[first]
        settings = np.stack([m.parameters, m.ratio, np.nan_to_num(m.learning_rate)])
        if np.ptp(settings[:, at], axis=1).any() or not np.diff(steps).all():
            raise Refused(
                f"Run {m.run[first]:g} has several values of parameters, ratio or "
                f"learning rate (parameters {size:g}, ratio {ratio:g}), or two losses "
                "at a step.",
                parameter="run",
                remedy="Give each run a number of its own.",
            )
        # The last reading may be some steps before the end: up to one more.
        spacing = np.diff(steps, prepend=0.0)[-max(1, len(steps) - 1) :].max()
        whole = not m.planned[first] >= steps[-1] + spacing
        late = at[steps >= min_steps]
        # nan isn't equal to itself.
        kind = (float(size), float(ratio)), float(np.nan_to_num(rate, nan=-1))
        run = Curve(m.steps[late], m.loss[late], m.learning_rate[late], whole)
        runs.setdefault(kind, []).append(run)
    return runs


def _rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """The mean of each element and up to ``window`` - 1 before it."""
    total = np.append(0.0, np.cumsum(x))
    last = np.arange(1, len(x) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _mean_of_seeds(runs: List[Curve], window: int) -> Curve:
    """The mean loss of runs at the steps that all of them have."""
    # Where a run is shorter by plan, longer ones continue from the mean: a jump of the
    # curve there would be the seed's. Where the loss of one is not finite any more the
    # curve ends: the survivors would look too good.
    end = min((run.steps[-1] for run in runs if not run.whole), default=math.inf)
    steps, loss = np.empty((2, 0))
    for last in sorted({min(run.steps[-1], end) for run in runs}):
        longer = [run for run in runs if run.steps[-1] >= last]
        shared = reduce(np.intersect1d, [run.steps for run in longer])
        smooth = [
            _rolling_mean(run.loss, window)[np.isin(run.steps, shared)]
            for run in longer
        ]
        mean, new = np.mean(smooth, axis=0), shared <= last
        if len(steps):
            at = shared == steps[-1]
            mean = mean * loss[-1] / mean[at] if at.any() else mean
            new &= shared > steps[-1]
        steps, loss = np.append(steps, shared[new]), np.append(loss, mean[new])
    return Curve(steps, loss, np.full(len(steps), runs[0].rate[0]))


def best_curves(
    measurements: Measurements, min_steps: float, window: float, falling: bool = False
) -> Dict[Cell, Curve]:
    """
    The curve of each size and ratio: rolling mean, mean over seeds, best learning rate.
    ``falling`` ones don't rise, and keep the best loss where what reached it ends.
    """
    checked("window", window, at_least=1)
    checked("min_steps", min_steps, at_least=0)
    of_cell: Dict[Cell, List[Curve]] = {}
    for (cell, _), runs in _runs_of(measurements, min_steps).items():
        # A run whose loss was not finite from the start stands for all of its kind.
        lost = any(not (run.whole or len(run.steps)) for run in runs)
        runs = [run for run in runs if len(run.steps) and not lost]
        of_cell.setdefault(cell, [])
        if runs:
            of_cell[cell].append(_mean_of_seeds(runs, int(window)))
    best = {}
    sizes, ratios = (sorted({cell[i] for cell in of_cell}) for i in (0, 1))
    for cell in product(sizes, ratios):
        if cell not in of_cell:
            continue
        curves = of_cell[cell]
        if not curves:
            raise Refused(
                f"Nothing was measured at parameters {cell[0]:g} with ratio "
                f"{cell[1]:g} and {min_steps:g} steps (min_steps) or more.",
                remedy="Measure there, or leave out the size or the ratio.",
            )
        losses = [curve.loss for curve in curves]
        if falling:
            losses = [_isotonic(loss, increasing=False) for loss in losses]
        loss, steps = np.concatenate(losses), np.concatenate([c.steps for c in curves])
        if not len(steps):
            raise Refused(
                f"Runs of parameters {cell[0]:g}, ratio {cell[1]:g} share no steps.",
                remedy="Read them at the same steps.",
            )
        rate = np.concatenate([curve.rate for curve in curves])
        order = np.lexsort((loss, steps))
        order = order[np.diff(steps[order], prepend=0.0) > 0]
        if falling:
            lowest = np.minimum.accumulate(loss[order])
            held = np.where(loss[order] <= lowest, np.arange(len(order)), 0)
            loss[order], rate[order] = lowest, rate[order][np.maximum.accumulate(held)]
        best[cell] = Curve(steps[order], loss[order], rate[order])
    return best


def _between(curves: Mapping[Cell, Curve], cell: Cell, allowed: bool) -> Curve:
    """The curve of a ratio that a size lacks, between two that it has."""
    size, ratio = cell
    ratios = [r for m, r in curves if m == size]
    below = max((r for r in ratios if r < ratio), default=None)
    above = min((r for r in ratios if r > ratio), default=None)
    if not allowed or below is None or above is None:
        raise Refused(
            f"Nothing was measured at parameters {size:g} with ratio {ratio:g}.",
            remedy="Measure there, or leave out the size or the ratio.",
        )
    low, high = curves[size, below], curves[size, above]
    steps, of_low, of_high = np.intersect1d(low.steps, high.steps, return_indices=True)
    # As the surface: linear in the ratio from 0 on, else in its log.
    share = ratio / above
    if below:
        share = math.log(ratio / below) / math.log(above / below)
    loss = low.loss[of_low] ** (1 - share) * high.loss[of_high] ** share
    return Curve(steps, loss, high.rate[of_high])


def _isotonic(loss: np.ndarray, increasing: bool = True) -> np.ndarray:
    return isotonic_regression(loss, increasing=increasing).x if len(loss) else loss


def _not_falling_with_ratio(loss: np.ndarray) -> np.ndarray:
    """``[steps, ratios]``, made not to fall with the ratio; nan is left out."""
    for row in loss:
        finite = np.isfinite(row)
        if (np.diff(row[finite]) < 0).any():
            row[finite] = _isotonic(row[finite])
    return loss


def extrapolate(
    steps: np.ndarray, loss: np.ndarray, to: np.ndarray
) -> Tuple[np.ndarray, str]:
    """
    Losses at further steps by L = c T^m + E, fitted by least squares with m <= 0,
    c >= 0 and E >= 0; and a note for people.
    """
    # Only m is searched for: the best c and E of it have a closed form, which curve_fit
    # need not find on noisy curves that are nearly flat. Steps are in units of the
    # last: their powers are then at least 1, and not far from it.
    x = np.log(steps / steps[-1])

    def best(m: np.ndarray) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        z = np.exp(np.multiply.outer(m, x))
        level = z.mean(-1, keepdims=True)
        c = ((z - level) @ loss) / ((z - level) ** 2).sum(-1)
        c = np.maximum(c, 0)
        e = loss.mean() - c * level[..., 0]
        c = np.where(e < 0, (z @ loss) / (z**2).sum(-1), c)
        e = np.maximum(e, 0)
        error = c[..., None] * z + e[..., None] - loss
        return c, e, (error**2).sum(-1)

    scan = -np.geomspace(1e-3, 10, 80)
    i = int(np.argmin(best(scan)[2]))
    m = minimize_scalar(
        lambda m: float(best(np.array(m))[2]),
        bounds=(scan[min(i + 1, len(scan) - 1)], scan[max(i - 1, 0)]),
        method="bounded",
        options={"xatol": 1e-9},
    ).x
    c, e, _ = best(np.array(m))
    note = ""
    if c == 0:
        note = "the curve is flat, and continued flat."
    elif e == 0:
        note = "the curve doesn't flatten: it is continued as a power law without E."
    return c * (to / steps[-1]) ** m + e, note


def _nearest(axis: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Indices of the axis' values nearest in logs; 0 is nearest to 0 only."""
    above = axis[axis > 0]
    at = np.searchsorted(np.sqrt(above[1:] * above[:-1]), values)
    return np.where(values > 0, at + len(axis) - len(above), 0)


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
