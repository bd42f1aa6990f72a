"""The semi-parametric scaling law: loss by model size, steps and noise-batch ratio.

Source: "Scaling laws for differentially private language models", section 3.3. Between
measured sizes, steps and ratios, log loss is interpolated linearly in their logs; what
is interpolated are measurements made smooth and monotone. No formula is assumed but for
steps beyond the measured ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, Dict, List, Mapping, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import RegularGridInterpolator

from opacus_ext.planner.curves import (
    extrapolate,
    grid_of_steps,
    nearest,
    not_falling_with_ratio,
)
from opacus_ext.planner.readings import (
    Run,
    best_curves,
    repeats,
    resample_readings,
    resample_runs,
    runs_of,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

_LEAST_READINGS = 4  # to extrapolate from: one more than the curve has parameters


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
        3. Isotonic regression: loss does not rise with steps. At each size, ratio and
           number of steps, the learning rate of the lowest loss is taken, or the lowest
           loss so far, if the runs of its learning rate were shorter.
        4. Isotonic regression: loss does not fall with the ratio.
        5. Curves shorter than the grid follow L = exp(m log T + b) + E with m <= 0 and
           E >= 0, fitted for each size and ratio to the steps from ``fit_from`` on,
           never above their last value, and again made not to fall with the ratio.

        The defaults are the paper's, but for ``steps_to`` (it goes from 128,000 to
        8.2e6) and ``window``, whose number the text that we have lacks: 10 readings are
        1000 of its steps. A mean over a window lags by half of it, so in a small study
        a window should be short against the steps of interest.

        Intervals: where each size, ratio and learning rate has several runs, these are
        resampled. Otherwise the noise of readings about their curve is, estimated from
        each reading's distance to the line between its neighbors. That sees the noise
        of measuring and what follows from it (choosing learning rates, isotonic
        regression, extrapolation), **not** how another seed would have differed, nor
        the error of interpolating between sizes: :func:`hold_out` shows that one.

        Args:
            measurements: arrays ``parameters``, ``steps``, ``ratio``, ``loss``,
                ``learning_rate`` and ``run``, all ``[rows]``, as of
                :class:`~opacus_ext.planner.measurements.Measurements`
            min_steps: readings of fewer are dropped
            window: readings in a rolling mean
            fit_from: steps from which curves are fitted for extrapolation; a quarter
                of a curve's own, if that is less
            steps_to: end of the grid; by default that of the longest run
            bootstrap: number of resamples, for :meth:`interval`
            seed: of resampling

        Raises:
            Refused: for sizes and ratios of which some combinations lack, runs with
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
                raise Refused(
                    f"{name} must be {least} or more; got {value}.", parameter=name
                )
        runs = runs_of(measurements, min_steps)
        options = dict(window=int(window), fit_from=fit_from, steps_to=steps_to)
        surface = _fit(runs, **options)
        if not bootstrap:
            return surface
        several = all(len(same) > 1 for same in repeats(runs).values())
        resample = resample_runs if several else resample_readings
        rng = np.random.default_rng(seed)
        samples = [
            _fit(resample(runs, rng), **options, grid=surface.steps).log_loss
            for _ in progress(range(bootstrap), "resampling")
        ]
        return replace(
            surface,
            samples=np.stack(samples),
            resampled="runs" if several else "readings",
        )

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

    def measured_steps(self, parameters: ArrayLike, ratio: ArrayLike) -> np.ndarray:
        """
        Steps to which the curves were measured that a loss lies between: the fewest of
        the next sizes and ratios, and of the outermost beyond those. Of a ratio those
        of higher ones count too: with less noise no loss is higher.

        Example:
            >>> from opacus_ext.planner.measurements import Measurements
            >>> runs = Measurements.read()
            >>> surface = Surface.fit(runs, **scaled_options(runs))
            >>> surface.measured_steps([2e4, 9e5], 0.01)
            array([2800.,  700.])
        """
        below, above = (
            np.broadcast_arrays(
                _beside(self.parameters, parameters, side),
                _beside(self.ratio, ratio, side),
            )
            for side in ("right", "left")
        )
        corners = product(*zip(below, above))
        known = np.maximum.accumulate(self.measured_to[:, ::-1], axis=1)[:, ::-1]
        return np.minimum.reduce([known[at] for at in corners])

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
            ratio: noise-batch ratio, 0 for noise-free. Between 0 and the lowest that
                was measured, log loss is linear in the ratio; without noise-free runs
                such a ratio counts as the lowest, which expects too high a loss rather
                than too low a one
            outside: what to do where nothing was measured, beyond :attr:`ranges`:
                ``"raise"`` or ``"nan"``

        Returns:
            of the shape to which the three broadcast

        Raises:
            Refused: outside of the ranges, unless ``outside`` is ``"nan"``
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
            Refused: for a surface made without a bootstrap, and a level that is not
                between 0 and 1
        """
        if self.samples is None:
            raise Refused(
                "There are no intervals without a bootstrap: fit with bootstrap=200.",
                parameter="bootstrap",
            )
        if not 0 < level < 1:
            raise Refused(
                f"level must be between 0 and 1; got {level}.",
                parameter="level",
                remedy="Take 0.95 for 95 %.",
            )
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
            Refused: outside of the ranges
        """
        m, t, r = self._arguments(parameters, steps, ratio, "raise")
        places = (self.parameters, m), (self.steps, t), (self.ratio, r)
        return self.best_rate[tuple(nearest(grid, x) for grid, x in places)]

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
        of_free, of_noisy = interpolators
        share = np.ones(m.shape)  # of the noisy ones
        if of_free is not None:
            share = np.minimum(r / self.least_ratio, 1.0) if of_noisy else 0 * r
        of_grid: Any = of_free or of_noisy
        tail = of_grid.values.shape[len(of_grid.grid) :]
        found = np.where(inside, 0.0, np.nan).reshape(m.shape + (1,) * len(tail))
        found = np.broadcast_to(found, m.shape + tail).copy()
        parts: List[Tuple[np.ndarray, Any]] = [(1 - share, of_free), (share, of_noisy)]
        for weight, interpolate in parts:
            at = inside & (weight > 0)
            if not at.any():
                continue
            points = [m[at], t[at]]
            if interpolate is of_noisy:
                points.append(np.maximum(r[at], self.least_ratio))
            values = interpolate(np.log(points).T)
            found[at] += weight[at].reshape((-1,) + (1,) * len(tail)) * values
        return found

    @property
    def least_ratio(self) -> float:
        """The lowest ratio with noise that was measured; inf if none was."""
        return float(self.ratio[self.ratio > 0].min(initial=math.inf))

    def _arguments(
        self, parameters: ArrayLike, steps: ArrayLike, ratio: ArrayLike, outside: str
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """
        Broadcast and checked; nan where outside, ratios not below the lowest of the
        grid.
        """
        if outside not in ("raise", "nan"):
            raise Refused(
                f"outside must be 'raise' or 'nan'; got {outside!r}.",
                parameter="outside",
            )
        given = [np.asarray(x, dtype=float) for x in (parameters, steps, ratio)]
        names = "parameters", "steps", "ratio"
        for name, x in zip(names, given):
            bad = ~np.isfinite(x) | (x < 0) | ((x == 0) & (name != "ratio"))
            if bad.any():
                kind = "0 or more" if name == "ratio" else "positive"
                raise Refused(
                    f"{name} must be {kind} and finite; got {x[bad].flat[0]}.",
                    parameter=name,
                )
        try:
            m, t, r = np.broadcast_arrays(*given)
        except ValueError as e:
            shapes = ", ".join(f"{n} {x.shape}" for n, x in zip(names, given))
            raise Refused(
                f"Shapes don't broadcast: {shapes}.", remedy="Give shapes that do."
            ) from e
        r = np.where(r > 0, np.maximum(r, self.ratio[0]), r)
        beyond = np.zeros(m.shape, dtype=bool)
        for name, x in zip(names, (m, t, r)):
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

    def to_dict(self) -> Dict[str, Any]:
        """As plain numbers, lists and strings, for JSON."""
        return {
            name: x.tolist() if isinstance(x := getattr(self, name), np.ndarray) else x
            for name in self.__dataclass_fields__
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Surface:
        """
        From what :meth:`to_dict` gave.

        Raises:
            Refused: if something is missing
        """
        missing = [n for n in cls.__dataclass_fields__ if n not in plain]
        if missing:
            raise Refused(
                f"This is no surface: {', '.join(missing)} missing.",
                remedy="Pass what Surface.to_dict gave.",
            )
        fields = {
            name: (
                np.array(plain[name], dtype=float)
                if isinstance(plain[name], list) and name != "warnings"
                else plain[name]
            )
            for name in cls.__dataclass_fields__
        }
        return cls(**{**fields, "warnings": tuple(plain["warnings"])})


def _beside(axis: np.ndarray, values: ArrayLike, side: Any) -> np.ndarray:
    """Indices of the axis' last value not above ("right"), or first not below."""
    at = np.searchsorted(axis, values, side) - (side == "right")
    return np.clip(at, 0, len(axis) - 1)


def scaled_options(measurements: Any) -> Dict[str, float]:
    """
    Options of :meth:`Surface.fit` for measurements of any length.

    The paper's are for runs of 128,000 steps, read 1280 times. For shorter ones they
    are here in proportion, but for the window, a tenth of a run's readings at most, and
    the start of extrapolation, at a quarter; it goes to four times the longest run, and
    what a plan takes of it to four times the runs of its size and ratio.

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> surface = Surface.fit(runs := Measurements.read(), **scaled_options(runs))
        >>> surface.ranges["steps"][1]
        11200.0
    """
    longest = float(measurements.steps.max())
    readings = len(measurements.steps) / len(np.unique(measurements.run))
    return dict(
        min_steps=min(1000.0, longest / 128),
        window=max(1, min(10, int(readings / 10))),
        fit_from=min(16_000.0, longest / 4),
        steps_to=4 * longest,
    )


def _fit(
    runs: List[Run],
    window: int,
    fit_from: float,
    steps_to: Optional[float],
    grid: Optional[np.ndarray] = None,
) -> Surface:
    curves = best_curves(runs, window, falling=True)
    sizes, ratios = (np.array(sorted({cell[i] for cell in curves})) for i in (0, 1))
    if grid is None:
        grid = grid_of_steps(curves, steps_to)
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
        loss = not_falling_with_ratio(loss)
        for j, c in enumerate(of_size):
            rate[i, :, j] = c.rate[nearest(c.steps, grid)]
            known = measured[:, j]
            if known.all():
                continue
            start = min(fit_from, last[i, j] / 4)
            used = known & (grid >= start)
            if used.sum() < _LEAST_READINGS:
                raise Refused(
                    f"Runs of parameters {m:g}, ratio {ratios[j]:g} end at "
                    f"{last[i, j]:g} steps with {used.sum()} readings from "
                    f"{start:g} steps on; to extrapolate to {grid[-1]:g}, "
                    f"{_LEAST_READINGS} are needed.",
                    parameter="fit_from",
                    remedy="Lower fit_from or steps_to, or measure longer.",
                )
            beyond, note = extrapolate(grid[used], loss[used, j], grid[~known])
            loss[~known, j] = beyond
            if note:
                mended.append(f"parameters {m:g}, ratio {ratios[j]:g}: {note}")
        # A fit may begin above the last reading; and where curves end at different
        # steps, the end of one may let the others rise.
        loss = not_falling_with_ratio(np.minimum.accumulate(loss, axis=0))
        log_loss[i] = np.log(loss)
    return Surface(sizes, grid, ratios, log_loss, rate, last, warnings=tuple(mended))
