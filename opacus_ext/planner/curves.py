"""Curves of a surface: a grid of steps, made monotone, and continued beyond it."""

from __future__ import annotations

import math
from typing import Mapping, Optional, Tuple

import numpy as np
from scipy.optimize import isotonic_regression, minimize_scalar

from opacus_ext.planner.readings import Cell, Curve
from opacus_ext.refused import Refused

_PER_DECADE = 16  # grid points of extrapolated steps; between, interpolation


def not_falling_with_ratio(loss: np.ndarray) -> np.ndarray:
    """``[steps, ratios]``, made not to fall with the ratio; nan is left out."""
    for row in np.flatnonzero(_falls(loss)):
        known = np.isfinite(loss[row])
        loss[row, known] = isotonic_regression(loss[row, known]).x
    return loss


def _falls(loss: np.ndarray) -> np.ndarray:
    """Which rows fall somewhere; nan is left out."""
    high = np.maximum.accumulate(np.where(np.isfinite(loss), loss, -np.inf), axis=1)
    return (loss < high).any(1)


def grid_of_steps(
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


def extrapolate(
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


def nearest(grid: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Indices of the grid's points that are nearest in logs; 0 is nearest to 0 only."""
    if grid[0] == 0:
        if len(grid) == 1:
            return np.zeros(np.shape(x), dtype=int)
        positive = np.where(x > 0, x, grid[1])
        return np.where(x > 0, 1 + nearest(grid[1:], positive), 0)
    if len(grid) == 1:
        return np.zeros(np.shape(x), dtype=int)
    between = np.sqrt(grid[1:] * grid[:-1])
    return np.searchsorted(between, x)
