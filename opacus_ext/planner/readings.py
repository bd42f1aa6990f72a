"""Runs and their readings: checked, smoothed to a curve each, and resampled."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from scipy.optimize import isotonic_regression

from opacus_ext.refused import Refused

Cell = Tuple[float, float]  # size and ratio


class Run(NamedTuple):
    """A run: its cell of the grid, and its readings in order of steps."""

    cell: Cell
    rate: Optional[float]  # None where unknown, as nan isn't equal to itself
    steps: np.ndarray
    loss: np.ndarray
    whole: bool  # as long as it was to be; if not, its loss was not finite any more


class Curve(NamedTuple):
    """Smoothed losses of a cell, each at its best learning rate, ``[steps]``."""

    steps: np.ndarray
    loss: np.ndarray
    rate: np.ndarray


def runs_of(measurements: Any, min_steps: float) -> List[Run]:
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
            raise Refused(
                f"{name} must be {kind} and finite; got {x[bad][0]}.",
                parameter=name,
                remedy="Leave such readings out.",
            )
    planned = np.asarray(
        getattr(measurements, "planned", np.full(len(columns["run"]), np.nan))
    )
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
                    f"{x.max():g}.",
                    parameter="run",
                    remedy="Give each run a number of its own.",
                )
        if (np.diff(t) == 0).any():
            raise Refused(
                f"Run {number:g} (parameters {m[0]:g}, ratio {r[0]:g}) has two losses "
                f"at {t[1:][np.diff(t) == 0][0]:g} steps.",
                parameter="run",
                remedy="Give each run its own number.",
            )
        late = t >= min_steps
        known = None if math.isnan(rate[0]) else float(rate[0])
        # The last reading may be some steps before the end: up to one more.
        each = np.diff(t).max() if len(t) > 1 else t[0]
        whole = not planned[at[0]] >= t[-1] + each
        cell = float(m[0]), float(r[0])
        runs.append(Run(cell, known, t[late], loss[late], whole))
    # One whose loss was not finite from the start stands for all of its kind.
    lost = {(r.cell, r.rate) for r in runs if not (r.whole or len(r.steps))}
    runs = [run for run in runs if (run.cell, run.rate) not in lost]
    with_readings = {run.cell for run in runs if len(run.steps)}
    sizes, ratios = (sorted({run.cell[i] for run in runs}) for i in (0, 1))
    for cell in ((m, r) for m in sizes for r in ratios):
        if cell not in with_readings:
            raise Refused(
                f"Nothing was measured at parameters {cell[0]:g} with ratio "
                f"{cell[1]:g} and {min_steps:g} steps (min_steps) or more: sizes and "
                "ratios must be a whole grid.",
                remedy="Measure it, or leave out the size or the ratio.",
            )
    return [run for run in runs if len(run.steps)]


def repeats(runs: List[Run]) -> Dict[Tuple[Cell, Optional[float]], List[Run]]:
    """Runs that differ in nothing but their seed."""
    found: Dict[Tuple[Cell, Optional[float]], List[Run]] = {}
    for run in runs:
        found.setdefault((run.cell, run.rate), []).append(run)
    return found


def _rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """Of each element and those before it, ``window`` of them where there are."""
    total = np.concatenate([[0.0], np.cumsum(x)])
    last = np.arange(1, len(x) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _mean_of_seeds(same: List[Run], window: int) -> Tuple[np.ndarray, np.ndarray]:
    """
    Steps that all runs have, and their mean loss.

    Where a run was shorter from the first, longer ones go on from the mean: a step of
    the curve there would be the seed's. Where one has no more loss that is finite the
    curve ends: the survivors' would look too good.
    """
    end = min((r.steps[-1] for r in same if not r.whole), default=math.inf)
    parts, known, mean = [(np.empty(0), np.empty(0))], None, 0.0
    for last in sorted({min(run.steps[-1], end) for run in same}):
        longer = [run for run in same if run.steps[-1] >= last]
        steps = reduce(np.intersect1d, [run.steps for run in longer])
        smooth = [
            _rolling_mean(run.loss, window)[np.isin(run.steps, steps)] for run in longer
        ]
        loss = np.mean(smooth, axis=0)
        new = steps <= last
        if known is not None:
            at = np.isin(steps, known)
            loss = loss * mean / loss[at] if at.any() else loss
            new &= steps > known
        if new.any():
            known, mean = steps[new][-1], loss[new][-1]
            parts.append((steps[new], loss[new]))
    steps, loss = (np.concatenate(x) for x in zip(*parts))
    return steps, loss


def best_curves(
    runs: List[Run], window: int, falling: bool = False
) -> Dict[Cell, Curve]:
    """
    Of each size and ratio: rolling mean, mean over seeds, best learning rate.

    Args:
        falling: makes each learning rate's curve one that does not rise, and holds the
            best loss so far where the one that reached it ends
    """
    found: Dict[Cell, List[Curve]] = {}
    for (cell, rate), same in repeats(runs).items():
        steps, loss = _mean_of_seeds(same, window)
        if falling and len(loss):
            loss = isotonic_regression(loss, increasing=False).x
        rates = np.full(len(steps), np.nan if rate is None else rate)
        found.setdefault(cell, []).append(Curve(steps, loss, rates))
    best = {}
    for cell, curves in found.items():
        steps, loss, rates = (np.concatenate(x) for x in zip(*curves))
        if len(steps) == 0:
            raise Refused(
                f"Runs of parameters {cell[0]:g}, ratio {cell[1]:g} have no steps in "
                "common.",
                remedy="Read them at the same steps.",
            )
        order = np.lexsort((loss, steps))
        steps, loss, rates = steps[order], loss[order], rates[order]
        first = np.concatenate([[True], np.diff(steps) > 0])
        steps, loss, rates = steps[first], loss[first], rates[first]
        if falling:
            low = np.minimum.accumulate(loss)
            held = np.maximum.accumulate(np.where(loss <= low, np.arange(len(loss)), 0))
            loss, rates = low, rates[held]
        best[cell] = Curve(steps, loss, rates)
    return best


def resample_runs(runs: List[Run], rng: np.random.Generator) -> List[Run]:
    """Of each size, ratio and learning rate as many runs as there are, drawn anew."""
    return [
        same[i]
        for same in repeats(runs).values()
        for i in rng.integers(len(same), size=len(same))
    ]


def resample_readings(runs: List[Run], rng: np.random.Generator) -> List[Run]:
    """Runs read again: their monotone curves with noise like that of their readings."""
    resampled = []
    for run in runs:
        y = np.log(run.loss)
        if len(y) < 3:
            raise Refused(
                f"A run of parameters {run.cell[0]:g}, ratio {run.cell[1]:g} has "
                f"{len(y)} readings; the bootstrap needs 3 to see their noise.",
                parameter="bootstrap",
                remedy="Read runs more often, or set bootstrap=0.",
            )
        noise = _reading_noise(np.log(run.steps), y)
        smooth = np.log(isotonic_regression(run.loss, increasing=False).x)
        loss = np.exp(smooth + rng.choice(noise, size=len(y)))
        resampled.append(run._replace(loss=loss))
    return resampled


def _reading_noise(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """
    Distances of readings to the line between their neighbors, of the noise's variance.

    Of independent noise, (y_i - w y_{i-1} - (1 - w) y_{i+1}) has 1 + w^2 + (1 - w)^2
    times the variance (Gasser, Sroka and Jennen-Steinmetz, 1986). Residuals of isotonic
    regression would be too small: where a curve is steep it follows the noise.
    """
    w = (x[2:] - x[1:-1]) / (x[2:] - x[:-2])
    error = y[1:-1] - w * y[:-2] - (1 - w) * y[2:]
    error /= np.sqrt(1 + w**2 + (1 - w) ** 2)
    return error - error.mean()
