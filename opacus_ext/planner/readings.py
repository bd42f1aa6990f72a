"""Readings of runs: checked, smoothed to monotone curves, and continued."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import numpy as np
from scipy.optimize import isotonic_regression, minimize_scalar

from opacus_ext.refused import Refused

Cell = Tuple[float, float]  # size and ratio


class RunReadings(NamedTuple):
    """A run: its cell of the grid, and its readings in order of steps."""

    cell: Cell
    rate: Optional[float]  # None where unknown, as nan isn't equal to itself
    steps: np.ndarray
    loss: np.ndarray
    whole: bool  # False if it ended early, as its loss was not finite any more


class Curve(NamedTuple):
    """Smoothed losses of a cell, each at its best learning rate, ``[steps]``."""

    steps: np.ndarray
    loss: np.ndarray
    rate: np.ndarray


def runs_of(measurements: Any, min_steps: float) -> List[RunReadings]:
    """The runs of a whole grid, each with its readings from ``min_steps`` on."""
    runs = []
    names = "parameters", "ratio", "learning_rate", "steps", "loss"
    for number in np.unique(measurements.run):
        at = np.flatnonzero(measurements.run == number)
        at = at[np.argsort(measurements.steps[at], kind="stable")]
        m, r, rate, t, loss = (getattr(measurements, name)[at] for name in names)
        several = any(len(np.unique(x)) > 1 for x in (m, r, rate))
        if several or (np.diff(t) == 0).any():
            raise Refused(
                f"Run {number:g} has several values of parameters, ratio or learning "
                f"rate (parameters {m[0]:g}, ratio {r[0]:g}), or two losses at a step.",
                parameter="run",
                remedy="Give each run a number of its own.",
            )
        late = t >= min_steps
        # The last reading may be some steps before the end: up to one more.
        each = np.diff(t).max() if len(t) > 1 else t[0]
        whole = not measurements.planned[at[0]] >= t[-1] + each
        cell = float(m[0]), float(r[0])
        run_rate = None if math.isnan(rate[0]) else float(rate[0])
        runs.append(RunReadings(cell, run_rate, t[late], loss[late], bool(whole)))
    # A run whose loss was not finite from the start stands for all of its kind.
    lost = {(r.cell, r.rate) for r in runs if not (r.whole or len(r.steps))}
    runs = [run for run in runs if (run.cell, run.rate) not in lost]
    with_readings = {run.cell for run in runs if len(run.steps)}
    sizes, ratios = (sorted({run.cell[i] for run in runs}) for i in (0, 1))
    for m, r in ((m, r) for m in sizes for r in ratios):
        if (m, r) not in with_readings:
            raise Refused(
                f"Nothing was measured at parameters {m:g} with ratio {r:g} and "
                f"{min_steps:g} steps (min_steps) or more.",
                remedy="Measure there, or leave out the size or the ratio.",
            )
    return [run for run in runs if len(run.steps)]


def _rolling_mean(x: np.ndarray, window: int) -> np.ndarray:
    """The mean of each element and up to ``window`` - 1 before it."""
    total = np.concatenate([[0.0], np.cumsum(x)])
    last = np.arange(1, len(x) + 1)
    first = np.maximum(last - window, 0)
    return (total[last] - total[first]) / (last - first)


def _mean_of_seeds(
    same: List[RunReadings], window: int
) -> Tuple[np.ndarray, np.ndarray]:
    """Steps that all runs have, and their mean loss."""
    # Where a run is shorter by plan, longer ones continue from the mean: a jump of the
    # curve there would be the seed's. Where the loss of one is not finite any more the
    # curve ends: the survivors would look too good.
    end = min((r.steps[-1] for r in same if not r.whole), default=math.inf)
    parts, last_step, mean = [(np.empty(0), np.empty(0))], None, 0.0
    for last in sorted({min(run.steps[-1], end) for run in same}):
        longer = [run for run in same if run.steps[-1] >= last]
        steps = reduce(np.intersect1d, [run.steps for run in longer])
        smooth = [
            _rolling_mean(run.loss, window)[np.isin(run.steps, steps)] for run in longer
        ]
        loss = np.mean(smooth, axis=0)
        new = steps <= last
        if last_step is not None:
            at = np.isin(steps, last_step)
            loss = loss * mean / loss[at] if at.any() else loss
            new &= steps > last_step
        if new.any():
            last_step, mean = steps[new][-1], loss[new][-1]
            parts.append((steps[new], loss[new]))
    steps, loss = (np.concatenate(x) for x in zip(*parts))
    return steps, loss


def best_curves(
    runs: List[RunReadings], window: int, falling: bool = False
) -> Dict[Cell, Curve]:
    """
    The curve of each size and ratio: rolling mean, mean over seeds, best learning rate.
    ``falling`` ones don't rise, and keep the best loss where what reached it ends.
    """
    seeds: Dict[Tuple[Cell, Optional[float]], List[RunReadings]] = {}
    for run in runs:
        seeds.setdefault((run.cell, run.rate), []).append(run)
    found: Dict[Cell, List[Curve]] = {}
    for (cell, rate), same in seeds.items():
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
                f"Runs of parameters {cell[0]:g}, ratio {cell[1]:g} share no steps.",
                remedy="Read them at the same steps.",
            )
        order = np.lexsort((loss, steps))
        order = order[np.append(True, np.diff(steps[order]) > 0)]
        steps, loss, rates = steps[order], loss[order], rates[order]
        if falling:
            low = np.minimum.accumulate(loss)
            held = np.maximum.accumulate(np.where(loss <= low, np.arange(len(loss)), 0))
            loss, rates = low, rates[held]
        best[cell] = Curve(steps, loss, rates)
    return best


def not_falling_with_ratio(loss: np.ndarray) -> np.ndarray:
    """``[steps, ratios]``, made not to fall with the ratio; nan is left out."""
    high = np.maximum.accumulate(np.where(np.isfinite(loss), loss, -np.inf), axis=1)
    for row in np.flatnonzero((loss < high).any(1)):
        finite = np.isfinite(loss[row])
        loss[row, finite] = isotonic_regression(loss[row, finite]).x
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
