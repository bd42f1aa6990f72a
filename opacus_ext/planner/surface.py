"""The semi-parametric scaling law: loss by model size, steps and noise-batch ratio.

Source: "Scaling laws for differentially private language models", section 3.3. Between
measured sizes, steps and ratios, log loss is interpolated linearly in their logs; what
is interpolated are measurements made smooth and monotone. No formula is assumed but for
steps beyond the measured ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator
from scipy.optimize import isotonic_regression, minimize_scalar

from opacus_ext.refused import Refused

_PER_DECADE = 16  # grid points of extrapolated steps; between, interpolation
_LEAST_READINGS = 4  # to extrapolate from: one more than the curve has parameters

Cell = Tuple[float, float]  # size and ratio


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
        measured_to: steps to which the curves were measured, ``[sizes, ratios]``
        samples: log losses of the bootstrap, ``[bootstrap, sizes, steps, ratios]``
        resampled: what it resampled, ``"runs"`` or ``"readings"``
        warnings: for people, what had to be mended

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
    samples: Optional[np.ndarray] = field(default=None, repr=False)
    resampled: str = ""
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
        bootstrap: int = 0,
        seed: int = 0,
    ) -> Surface:
        """
        Makes measurements smooth and monotone, and extrapolates them.

        1. Readings before ``min_steps`` are dropped.
        2. Each reading becomes the mean of the ``window`` last ones of its run. Runs
           that differ in nothing but their number (seeds) are averaged.
        3. At each size, ratio and number of steps, the learning rate of the lowest loss
           is taken.
        4. Isotonic regression: loss does not rise with steps, then not fall with the
           ratio.
        5. Curves shorter than the grid follow L = exp(m log T + b) + E with m <= 0 and
           E >= 0, fitted for each size and ratio to the steps from ``fit_from`` on,
           never above their last value, and again made not to fall with the ratio.

        The defaults are the paper's, but for ``steps_to`` (it goes from 128,000 to
        8.2e6) and ``window``, whose number the text that we have lacks: 10 readings are
        1000 of its steps. A mean over a window lags by half of it, so in a small study
        a window should be short against the steps of interest.

        Intervals: where each size, ratio and learning rate has several runs, these are
        resampled. Otherwise the noise of readings about their curve is, estimated from
        each reading's distance to the line between its neighbours. That sees the noise
        of measuring and what follows from it (choosing learning rates, isotonic
        regression, extrapolation), **not** how another seed would have differed, nor
        the error of interpolating between sizes: :func:`hold_out` shows that one.

        Args:
            measurements: arrays ``parameters``, ``steps``, ``ratio``, ``loss``,
                ``learning_rate`` and ``run``, all ``[rows]``, as of
                :class:`~opacus_ext.planner.measurements.Measurements`
            min_steps: readings of fewer are dropped
            window: readings in a rolling mean
            fit_from: steps from which curves are fitted for extrapolation
            steps_to: end of the grid; by default that of the longest run
            bootstrap: number of resamples, for :meth:`interval`
            seed: of resampling

        Raises:
            ValueError: for sizes and ratios of which some combinations lack, runs with
                two readings at one step, options out of range, and too few readings to
                extrapolate from
        """
        for name, value, least in [
            ("min_steps", min_steps, 0),
            ("window", window, 1),
            ("fit_from", fit_from, 0),
            ("bootstrap", bootstrap, 0),
        ]:
            if not least <= value < math.inf:
                raise Refused(f"{name} must be {least} or more; got {value}.")
        runs = _runs(measurements, min_steps)
        options = dict(window=int(window), fit_from=fit_from, steps_to=steps_to)
        surface = _fit(runs, **options)
        if not bootstrap:
            return surface
        several = all(len(same) > 1 for same in _repeats(runs).values())
        resample = _resample_runs if several else _resample_readings
        rng = np.random.default_rng(seed)
        samples = [
            _fit(resample(runs, rng), **options, grid=surface.steps).log_loss
            for _ in range(bootstrap)
        ]
        return cls(
            **{
                **surface._fields(),
                "samples": np.stack(samples),
                "resampled": "runs" if several else "readings",
            }
        )

    def _fields(self) -> Dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @property
    def ranges(self) -> Dict[str, Tuple[float, float]]:
        """
        Lowest and highest value of each argument of :meth:`loss`; and of the steps to
        which every curve was measured, ``measured_steps``.
        """
        ends = {
            name: (float(x[0]), float(x[-1]))
            for name, x in [
                ("parameters", self.parameters),
                ("steps", self.steps),
                ("ratio", self.ratio),
            ]
        }
        first, last = ends["steps"]
        measured = (first, min(last, float(self.measured_to.min())))
        return {**ends, "measured_steps": measured}

    def loss(
        self,
        parameters: ArrayLike,
        steps: ArrayLike,
        ratio: ArrayLike,
        *,
        outside: str = "raise",
    ) -> np.ndarray:
        """
        Loss to expect, by linear interpolation of its log.

        Args:
            parameters: model size
            steps: of training
            ratio: noise-batch ratio. One between 0 and the lowest that was measured
                counts as that one, which expects too high a loss rather than too low a
                one. 0 is noise-free
            outside: what to do where nothing was measured, beyond :attr:`ranges`:
                ``"raise"`` or ``"nan"``

        Returns:
            of the shape to which the three broadcast

        Raises:
            ValueError: outside of the ranges, unless ``outside`` is ``"nan"``
        """
        return np.exp(self._query(self._expected, parameters, steps, ratio, outside))

    def interval(
        self,
        parameters: ArrayLike,
        steps: ArrayLike,
        ratio: ArrayLike,
        *,
        level: float = 0.95,
        outside: str = "raise",
    ) -> Tuple[np.ndarray, np.ndarray]:
        """
        Lower and upper percentile of the loss over the bootstrap; arguments as of
        :meth:`loss`. See :meth:`fit` for what it does and doesn't cover.

        Raises:
            ValueError: for a surface made without a bootstrap, and a level that is not
                between 0 and 1
        """
        if self.samples is None:
            raise Refused(
                "There are no intervals without a bootstrap: fit with bootstrap=200."
            )
        if not 0 < level < 1:
            raise Refused(f"level must be between 0 and 1; got {level}.")
        found = self._query(self._resamples, parameters, steps, ratio, outside)
        ends = 50 * (1 - level), 50 * (1 + level)
        low, high = np.exp(np.percentile(found, ends, axis=-1))
        return low, high

    def learning_rate(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike
    ) -> np.ndarray:
        """
        The learning rate that was best at the grid point nearest in logs, nan where it
        is unknown. Arguments as of :meth:`loss`.

        Raises:
            ValueError: outside of the ranges
        """
        m, t, r = self._arguments(parameters, steps, ratio, "raise")
        places = (self.parameters, m), (self.steps, t), (self.ratio, r)
        return self.best_rate[tuple(_nearest(grid, x) for grid, x in places)]

    @cached_property
    def _expected(self) -> List[Optional[RegularGridInterpolator]]:
        return self._interpolators(self.log_loss)

    @cached_property
    def _resamples(self) -> List[Optional[RegularGridInterpolator]]:
        return self._interpolators(np.moveaxis(self.samples, 0, -1))

    def _interpolators(
        self, values: np.ndarray
    ) -> List[Optional[RegularGridInterpolator]]:
        """Of noise-free training, and of that with noise; None where not measured."""
        axes = np.log(self.parameters), np.log(self.steps)
        free = int(self.ratio[0] == 0)
        noisy = self.ratio[free:]
        # Without a bound on ratio 0 the two can't be one grid: log 0 is far away.
        return [
            RegularGridInterpolator(axes, values[:, :, 0]) if free else None,
            (
                RegularGridInterpolator((*axes, np.log(noisy)), values[:, :, free:])
                if len(noisy)
                else None
            ),
        ]

    def _query(
        self,
        interpolators: List[Optional[RegularGridInterpolator]],
        parameters: ArrayLike,
        steps: ArrayLike,
        ratio: ArrayLike,
        outside: str,
    ) -> np.ndarray:
        m, t, r = self._arguments(parameters, steps, ratio, outside)
        inside = np.isfinite(m)
        free = inside & (r == 0)
        noisy = inside & (r > 0)
        parts = []
        for at, interpolate in zip((free, noisy), interpolators):
            if at.any():
                points = np.log([m[at], t[at], *([] if at is free else [r[at]])])
                parts.append((at, interpolate(points.T)))
        of_grid = next(i for i in interpolators if i is not None)
        tail = of_grid.values.shape[len(of_grid.grid) :]
        found = np.full(m.shape + tail, np.nan)
        for at, values in parts:
            found[at] = values
        return found

    def _arguments(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike, outside: str
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Broadcast and checked; nan where outside, ratios not below the lowest."""
        if outside not in ("raise", "nan"):
            raise Refused(f"outside must be 'raise' or 'nan'; got {outside!r}.")
        given = [np.asarray(x, dtype=float) for x in (parameters, steps, ratio)]
        names = "parameters", "steps", "ratio"
        for name, x in zip(names, given):
            bad = ~np.isfinite(x) | (x < 0) | ((x == 0) & (name != "ratio"))
            if bad.any():
                kind = "0 or more" if name == "ratio" else "positive"
                raise Refused(
                    f"{name} must be {kind} and finite; got {x[bad].flat[0]}."
                )
        try:
            m, t, r = np.broadcast_arrays(*given)
        except ValueError as e:
            shapes = ", ".join(f"{n} {x.shape}" for n, x in zip(names, given))
            raise Refused(f"Shapes don't broadcast: {shapes}.") from e
        positive = self.ratio[self.ratio > 0]
        if len(positive):
            r = np.where(r > 0, np.maximum(r, positive[0]), r)
        beyond = np.zeros(m.shape, dtype=bool)
        for name, x in zip(names, (m, t, r)):
            low, high = self.ranges[name]
            out = (x < low) | (x > high)
            if outside == "raise" and out.any():
                raise Refused(
                    f"{name} {x[out].flat[0]:g} is outside of what was measured, "
                    f"{low:g} to {high:g}. Measure there, or pass outside='nan'."
                )
            beyond |= out
        return tuple(np.where(beyond, np.nan, x) for x in (m, t, r))

    def to_dict(self) -> Dict[str, Any]:
        """As plain numbers, lists and strings, for JSON."""
        return {
            name: x.tolist() if isinstance(x, np.ndarray) else x
            for name, x in self._fields().items()
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Surface:
        """
        From what :meth:`to_dict` gave.

        Raises:
            ValueError: if something is missing
        """
        missing = [n for n in cls.__dataclass_fields__ if n not in plain]
        if missing:
            raise Refused(f"This is no surface: {', '.join(missing)} missing.")
        fields = {
            name: (
                np.array(plain[name], dtype=float)
                if isinstance(plain[name], list) and name != "warnings"
                else plain[name]
            )
            for name in cls.__dataclass_fields__
        }
        return cls(**{**fields, "warnings": tuple(plain["warnings"])})


def scaled_options(measurements: Any) -> Dict[str, float]:
    """
    Options of :meth:`Surface.fit` for measurements of any length.

    The paper's are for runs of 128,000 steps, read 1280 times. For shorter ones they
    are here in proportion, but for the window, a tenth of a run's readings at most, and
    the start of extrapolation, at a quarter; it goes to four times the longest run.

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> surface = Surface.fit(runs := Measurements.read(), **scaled_options(runs))
        >>> surface.ranges["steps"][1]
        2800.0
    """
    longest = float(measurements.steps.max())
    readings = len(measurements.steps) / len(np.unique(measurements.run))
    return dict(
        min_steps=min(1000.0, longest / 128),
        window=max(1, min(10, int(readings / 10))),
        fit_from=min(16_000.0, longest / 4),
        steps_to=4 * longest,
    )


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
        ValueError: unless one of the two is given, and for one that was not measured or
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
        raise Refused("Hold out either parameters or a ratio.")
    name, value = ("ratio", ratio) if parameters is None else ("parameters", parameters)
    column = np.asarray(getattr(measurements, name), dtype=float)
    known = np.unique(column[column > 0])
    if value not in known[1:-1]:
        values = ", ".join(f"{x:g}" for x in known)
        why = "at the edge of" if value in known or value == 0 else "not among"
        raise Refused(
            f"{name} {value:g} is {why} those measured ({values}): only one between "
            "two others can be interpolated."
        )
    out = column == value
    surface = Surface.fit(measurements.select(~out), **options)
    min_steps, window = options.get("min_steps", 1000), options.get("window", 10)
    curves = _curves(_runs(measurements.select(out), min_steps), int(window))
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
            f"The runs of {name} {value:g} have no steps in common with the others."
        )
    return HoldOut(*rows[:, inside], predicted[inside])


class _Run(NamedTuple):
    cell: Cell
    rate: Optional[float]  # None where unknown, as nan isn't equal to itself
    steps: np.ndarray
    loss: np.ndarray


class _Curve(NamedTuple):
    steps: np.ndarray
    loss: np.ndarray
    rate: np.ndarray


def _runs(measurements: Any, min_steps: float) -> List[_Run]:
    """The runs, each with its readings in order of steps."""
    columns = {
        name: np.asarray(getattr(measurements, name), dtype=float)
        for name in ("parameters", "steps", "ratio", "loss", "learning_rate", "run")
    }
    for name in ("parameters", "steps", "ratio", "loss"):
        x = columns[name]
        bad = ~np.isfinite(x) | (x < 0) | ((x == 0) & (name != "ratio"))
        if bad.any():
            kind = "0 or more" if name == "ratio" else "positive"
            raise Refused(f"{name} must be {kind} and finite; got {x[bad][0]}.")
    runs = []
    for number in np.unique(columns["run"]):
        at = np.flatnonzero(columns["run"] == number)
        at = at[np.argsort(columns["steps"][at], kind="stable")]
        m, t, r, loss, rate = (
            columns[n][at]
            for n in ("parameters", "steps", "ratio", "loss", "learning_rate")
        )
        for name, x in [("parameters", m), ("ratio", r), ("learning_rate", rate)]:
            if len(np.unique(x)) > 1:
                raise Refused(
                    f"Run {number:g} has several values of {name}: {x.min():g} to "
                    f"{x.max():g}. Give each run a number of its own."
                )
        if (np.diff(t) == 0).any():
            raise Refused(
                f"Run {number:g} (parameters {m[0]:g}, ratio {r[0]:g}) has two losses "
                f"at {t[1:][np.diff(t) == 0][0]:g} steps. Give each run its own number."
            )
        late = t >= min_steps
        known = None if math.isnan(rate[0]) else float(rate[0])
        runs.append(_Run((float(m[0]), float(r[0])), known, t[late], loss[late]))
    with_readings = {run.cell for run in runs if len(run.steps)}
    sizes, ratios = (sorted({run.cell[i] for run in runs}) for i in (0, 1))
    for cell in ((m, r) for m in sizes for r in ratios):
        if cell not in with_readings:
            raise Refused(
                f"Nothing was measured at parameters {cell[0]:g} with ratio "
                f"{cell[1]:g} and {min_steps:g} steps (min_steps) or more: sizes and "
                "ratios must be a whole grid. Measure it, or leave out the size or the "
                "ratio."
            )
    return [run for run in runs if len(run.steps)]


def _repeats(runs: List[_Run]) -> Dict[Tuple[Cell, Optional[float]], List[_Run]]:
    """Runs that differ in nothing but their seed."""
    found: Dict[Tuple[Cell, Optional[float]], List[_Run]] = {}
    for run in runs:
        found.setdefault((run.cell, run.rate), []).append(run)
    return found


def _rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """Of each element and those before it, ``window`` of them where there are."""
    total = np.concatenate([[0.0], np.cumsum(x)])
    last = np.arange(1, len(x) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _curves(runs: List[_Run], window: int) -> Dict[Cell, _Curve]:
    """Of each size and ratio: rolling mean, mean over seeds, best learning rate."""
    found: Dict[Cell, List[_Curve]] = {}
    for (cell, rate), same in _repeats(runs).items():
        # Steps that all have: those of the survivors only would look too good.
        steps = same[0].steps
        for run in same[1:]:
            steps = np.intersect1d(steps, run.steps)
        smooth = [
            _rolling_mean(run.loss, window)[np.isin(run.steps, steps)] for run in same
        ]
        rates = np.full(len(steps), np.nan if rate is None else rate)
        found.setdefault(cell, []).append(_Curve(steps, np.mean(smooth, 0), rates))
    best = {}
    for cell, curves in found.items():
        steps, loss, rate = (np.concatenate(x) for x in zip(*curves))
        if len(steps) == 0:
            raise Refused(
                f"Runs of parameters {cell[0]:g}, ratio {cell[1]:g} have no steps in "
                "common."
            )
        order = np.lexsort((loss, steps))
        steps, loss, rate = steps[order], loss[order], rate[order]
        first = np.concatenate([[True], np.diff(steps) > 0])
        best[cell] = _Curve(steps[first], loss[first], rate[first])
    return best


def _isotonic(loss: np.ndarray) -> np.ndarray:
    """``[steps, ratios]``, made not to fall with the ratio; nan is left out."""
    for row in np.flatnonzero(_falls(loss)):
        known = np.isfinite(loss[row])
        loss[row, known] = isotonic_regression(loss[row, known]).x
    return loss


def _falls(loss: np.ndarray) -> np.ndarray:
    """Which rows fall somewhere; nan is left out."""
    high = np.maximum.accumulate(np.where(np.isfinite(loss), loss, -np.inf), axis=1)
    return (loss < high).any(1)


def _fit(
    runs: List[_Run],
    window: int,
    fit_from: float,
    steps_to: Optional[float],
    grid: Optional[np.ndarray] = None,
) -> Surface:
    curves = {
        cell: c._replace(loss=isotonic_regression(c.loss, increasing=False).x)
        for cell, c in _curves(runs, window).items()
    }
    sizes, ratios = (np.array(sorted({cell[i] for cell in curves})) for i in (0, 1))
    if grid is None:
        grid = _grid(curves, steps_to)
    log_grid = np.log(grid)
    last = np.array([[curves[m, r].steps[-1] for r in ratios] for m in sizes])
    log_loss = np.empty((len(sizes), len(grid), len(ratios)))
    rate = np.empty_like(log_loss)
    mended = []
    for i, m in enumerate(sizes):
        of_size = [curves[m, r] for r in ratios]
        loss = np.stack(
            [np.interp(log_grid, np.log(c.steps), np.log(c.loss)) for c in of_size], 1
        )
        loss = np.exp(loss)
        measured = grid[:, None] <= last[i]
        loss[~measured] = np.nan
        loss = _isotonic(loss)
        for j, c in enumerate(of_size):
            rate[i, :, j] = c.rate[_nearest(c.steps, grid)]
            known = measured[:, j]
            if known.all():
                continue
            used = known & (grid >= fit_from)
            if used.sum() < _LEAST_READINGS:
                raise Refused(
                    f"Runs of parameters {m:g}, ratio {ratios[j]:g} end at "
                    f"{last[i, j]:g} steps with {used.sum()} readings from "
                    f"{fit_from:g} steps on; to extrapolate to {grid[-1]:g}, "
                    f"{_LEAST_READINGS} are needed. Lower fit_from or steps_to, or "
                    "measure longer."
                )
            beyond, note = _extrapolate(grid[used], loss[used, j], grid[~known])
            loss[~known, j] = beyond
            if note:
                mended.append(f"parameters {m:g}, ratio {ratios[j]:g}: {note}")
        # A fit may begin above the last reading; and where curves end at different
        # steps, the end of one may let the others rise.
        loss = _isotonic(np.minimum.accumulate(loss, axis=0))
        log_loss[i] = np.log(loss)
    return Surface(sizes, grid, ratios, log_loss, rate, last, warnings=tuple(mended))


def _grid(curves: Mapping[Cell, _Curve], steps_to: Optional[float]) -> np.ndarray:
    first = max(c.steps[0] for c in curves.values())
    steps = np.unique(np.concatenate([c.steps for c in curves.values()]))
    steps = steps[steps >= first]
    end = steps[-1] if steps_to is None else float(steps_to)
    if not (math.isfinite(end) and end > first):
        raise Refused(
            f"steps_to must be above {first:g}, the first steps that all runs were "
            f"read at; got {end:g}."
        )
    if end <= steps[-1]:
        return np.append(steps[steps < end], end)
    decades = math.log10(end / steps[-1])
    more = np.geomspace(steps[-1], end, math.ceil(decades * _PER_DECADE) + 1)
    return np.append(steps, [*more[1:-1], end])


def _extrapolate(
    steps: np.ndarray, loss: np.ndarray, to: np.ndarray
) -> Tuple[np.ndarray, str]:
    """
    L = c T^m + E, c being exp(b), fitted by least squares with m <= 0, c >= 0 and
    E >= 0, at further steps; and what is to be said about it.

    The paper's ``curve_fit`` finds the same where it converges and stays within these
    bounds, which it does not on noisy curves that are nearly flat. For a given m the
    best c and E have a closed form, so only m is searched for.
    """
    # Steps in units of the last: their powers are then at least 1, and not far from it.
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
    around = scan[min(i + 1, len(scan) - 1)], scan[max(i - 1, 0)]
    m = minimize_scalar(
        lambda m: float(best(np.array(m))[2]),
        bounds=around,
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


def _nearest(grid: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Indices of the grid's points that are nearest in logs; 0 is nearest to 0 only."""
    if grid[0] == 0:
        if len(grid) == 1:
            return np.zeros(np.shape(x), dtype=int)
        positive = np.where(x > 0, x, grid[1])
        return np.where(x > 0, 1 + _nearest(grid[1:], positive), 0)
    if len(grid) == 1:
        return np.zeros(np.shape(x), dtype=int)
    between = np.sqrt(grid[1:] * grid[:-1])
    return np.searchsorted(between, x)


def _resample_runs(runs: List[_Run], rng: np.random.Generator) -> List[_Run]:
    return [
        same[i]
        for same in _repeats(runs).values()
        for i in rng.integers(len(same), size=len(same))
    ]


def _resample_readings(runs: List[_Run], rng: np.random.Generator) -> List[_Run]:
    """Runs read again: their monotone curves with noise like that of their readings."""
    again = []
    for run in runs:
        y = np.log(run.loss)
        if len(y) < 3:
            raise Refused(
                f"A run of parameters {run.cell[0]:g}, ratio {run.cell[1]:g} has "
                f"{len(y)} readings; the bootstrap needs 3 to see their noise."
            )
        noise = _noise(np.log(run.steps), y)
        smooth = np.log(isotonic_regression(run.loss, increasing=False).x)
        loss = np.exp(smooth + rng.choice(noise, size=len(y)))
        again.append(run._replace(loss=loss))
    return again


def _noise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """
    Distances of readings to the line between their neighbours, of the noise's variance.

    Of independent noise, (y_i - w y_{i-1} - (1 - w) y_{i+1}) has 1 + w^2 + (1 - w)^2
    times the variance (Gasser, Sroka and Jennen-Steinmetz, 1986). Residuals of isotonic
    regression would be too small: where a curve is steep it follows the noise.
    """
    w = (x[2:] - x[1:-1]) / (x[2:] - x[:-2])
    error = y[1:-1] - w * y[:-2] - (1 - w) * y[2:]
    error /= np.sqrt(1 + w**2 + (1 - w) ** 2)
    return error - error.mean()
