"""The paper's law: its L2, with the constants fitted to what it published.

"Scaling laws for differentially private language models" publishes neither its
measurements nor the constants of its laws, but their exponents (appendix E) and the
best configuration of 16 budgets with its loss (table 2). :func:`refit` finds constants
from these, by non-negative least squares on two kinds of equations, both linear in E,
A, B and C:

- the law tells each row's loss;
- each row is the best of its compute, so that by the law an e-fold more of the size,
  of the batch and of the steps are worth the same. Rows of the smallest size say
  nothing of theirs: they are at the end of the range.

Of the exponents, a is the paper's, and b is fitted: with the published 0.12 most plans
would take the fewest steps there are, and the table's don't. g and a2 are conditions on
the shape: with the published ones more epsilon would often plan a smaller model, as
compute that larger batches can't use went into size. :data:`SHAPE` has them such that
at equal compute it never does (section 4.1), and the rows are still the plans. Examples
are counted in physical batches, 1,024 a step, as the losses were measured so.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Dict, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy.optimize import minimize_scalar, nnls

from opacus_ext.planner.budget import DELTA
from opacus_ext.planner.calibration import calibrate
from opacus_ext.planner.fit import Fit
from opacus_ext.planner.laws import private_sigmoid
from opacus_ext.refused import Refused

TOKENS, PHYSICAL_BATCH = 512, 1024
SIZES = 4.5e6, 7.78e8  # that were trained
STEPS = 1e3, 8.2e6  # that were asked for; runs ended at MEASURED_STEPS
MEASURED_STEPS = 128_000.0
MOST_LOSS = math.log(30_522)  # of a model that knows nothing; the formula goes beyond
RATIOS = 2.0**-20.25, 2.0**-8.5  # of the table's rows
SLOPES = 0.9  # weight of the second kind of equations
_STEP = 1.1  # of slopes


class Row(NamedTuple):
    """A row of table 2: a budget, and the least compute within 1 % of its best loss."""

    users: float
    epsilon: float
    flops: float
    loss: float
    parameters: float
    steps: float
    batch_size: float
    tokens_per_parameter: float


#: Table 2 of the paper, but for its rows of 1e9 users. Numbers have two digits.
TABLE_2: Tuple[Row, ...] = (
    Row(1e5, 1, 1.3e16, 7.28, 4.6e6, 1.8e3, 5.1e2, 1.0e2),
    Row(1e5, 4, 1.1e17, 6.65, 4.6e6, 1.8e3, 4.1e3, 8.5e2),
    Row(1e5, 16, 2.0e18, 5.60, 1.7e7, 2.7e3, 1.4e4, 1.1e3),
    Row(1e5, 64, 7.5e18, 4.63, 2.0e7, 6.3e3, 1.9e4, 3.2e3),
    Row(1e6, 1, 2.8e17, 5.89, 4.6e6, 2.5e3, 8.2e3, 2.3e3),
    Row(1e6, 4, 8.8e18, 4.62, 1.9e7, 6.5e3, 2.3e4, 4.1e3),
    Row(1e6, 16, 3.3e19, 3.61, 1.7e7, 1.4e4, 4.6e4, 1.9e4),
    Row(1e6, 64, 3.2e20, 2.82, 4.9e7, 1.2e4, 1.9e5, 2.2e4),
    Row(1e7, 1, 3.8e19, 3.73, 1.7e7, 9.6e3, 7.8e4, 2.3e4),
    Row(1e7, 4, 3.8e20, 2.81, 4.9e7, 1.1e4, 2.2e5, 2.6e4),
    Row(1e7, 16, 2.0e21, 2.15, 7.0e7, 1.2e4, 7.4e5, 6.7e4),
    Row(1e7, 64, 4.4e22, 1.66, 3.3e8, 4.9e4, 8.8e5, 6.7e4),
    Row(1e8, 1, 5.2e21, 2.26, 1.3e8, 5.8e4, 2.2e5, 4.9e4),
    Row(1e8, 4, 4.4e22, 1.66, 3.3e8, 4.9e4, 8.8e5, 6.7e4),
    Row(1e8, 16, 1.0e23, 1.32, 3.3e8, 9.3e4, 1.0e6, 1.5e5),
    Row(1e8, 64, 1.0e23, 1.23, 3.3e8, 1.1e5, 8.8e5, 1.5e5),
)

PUBLISHED = dict(a=0.47, b=0.12, g=0.95, a2=-0.07)
#: What is used: the harm of noise grows with the size itself.
SHAPE = dict(a=0.47, g=2.0, a2=-0.78)

#: What :func:`refit` finds.
PAPER = private_sigmoid.of(
    E=0.3597, A=4345.7, B=189.11, C=2.309e-05, a=0.47, b=0.3271, g=2.0, a2=-0.78
)


@lru_cache(maxsize=64)
def _log_squashed(
    rows: Tuple[Row, ...], more_batch: float = 1.0, more_steps: float = 1.0
) -> np.ndarray:
    """log s' of rows, ``[rows]``, or of as much more of a batch and of steps."""
    table = np.array(rows).T
    steps, batch = np.round(table[5] * more_steps), table[6] * more_batch
    ratio = calibrate(table[1], DELTA, steps, batch, table[0]).ratio
    return private_sigmoid.transforms["ratio"](ratio)


def _solve(
    rows: Tuple[Row, ...], used: np.ndarray, exponents: Dict[str, float], slopes: float
) -> Tuple[np.ndarray, float]:
    """E, A, B and C of the least squares over the rows used, and what is left."""
    table = np.array(rows).T
    log, less, more = _log_squashed(rows), 1 / _STEP, 2 * math.log(_STEP)
    by_b = (_log_squashed(rows, _STEP) - _log_squashed(rows, less)) / more
    by_t = (_log_squashed(rows, 1.0, _STEP) - _log_squashed(rows, 1.0, less)) / more
    loss, size, steps = (table[i] for i in (3, 4, 5))
    a, b, g, a2 = (exponents[n] for n in ("a", "b", "g", "a2"))
    zero = np.zeros(len(rows))
    data = (PHYSICAL_BATCH * steps) ** -b
    harm = np.exp(g * log) * size**-a2
    of_loss = np.stack([zero + 1, size**-a, data, harm], 1)
    by_size = np.stack([zero, -a * size**-a, zero, -a2 * harm], 1)
    by_batch = np.stack([zero, zero, zero, g * by_b * harm], 1)
    by_steps = np.stack([zero, zero, -b * data, g * by_t * harm], 1)
    inside = (size > min(row.parameters for row in TABLE_2))[:, None]
    relative = [
        of_loss,
        slopes * inside * (by_size - by_batch),
        slopes * (by_steps - by_batch),
    ]
    matrix = np.concatenate([(part / loss[:, None])[used] for part in relative])
    wanted = np.repeat([1.0, 0.0, 0.0], int(used.sum()))
    found, left = nnls(matrix, wanted)
    return found, float(left)


def _fit(rows: Tuple[Row, ...], used: np.ndarray, slopes: float) -> Fit:
    def exponents(log_b: float) -> Dict[str, float]:
        return {**SHAPE, "b": math.exp(log_b)}

    log_b = minimize_scalar(
        lambda x: _solve(rows, used, exponents(x), slopes)[1],
        bounds=(math.log(0.05), math.log(2.0)),
        method="bounded",
    ).x
    found = np.maximum(_solve(rows, used, exponents(log_b), slopes)[0], 1e-12)
    coefficients = dict(zip(("E", "A", "B", "C"), map(float, found)))  # E may be 0
    return Fit(
        private_sigmoid, {**coefficients, **exponents(log_b)}, rows=int(used.sum())
    )


def refit(rows: Sequence[Row] = TABLE_2, slopes: float = SLOPES) -> Fit:
    """
    The constants of L2 from rows of table 2, as the module says.

    Args:
        rows: of the table, five or more
        slopes: weight of an e-fold's worth against that of a relative error of the
            loss

    Raises:
        Refused: for fewer rows than constants

    Example:
        >>> {name: float(f"{refit().parameters[name]:.3g}") for name in "EABCb"}
        {'E': 0.36, 'A': 4350.0, 'B': 189.0, 'C': 2.31e-05, 'b': 0.327}
    """
    rows = tuple(rows)
    if len(rows) < 5:
        raise Refused(
            f"{len(rows)} rows can't determine five constants.",
            parameter="rows",
            remedy="Give five rows or more.",
        )
    return _fit(rows, np.ones(len(rows), dtype=bool), slopes)


def errors(fit: Fit = PAPER, rows: Sequence[Row] = TABLE_2) -> np.ndarray:
    """
    Relative errors of the losses of rows, predicted / published - 1, ``[rows]``.

    Example:
        >>> found = abs(errors())
        >>> f"{found.mean():.1%} in the mean, {found.max():.1%} at most"
        '2.9% in the mean, 6.3% at most'
    """
    rows = tuple(rows)
    table = np.array(rows).T
    log = _log_squashed(rows)
    values = fit.parameters
    loss = (
        values["E"]
        + values["A"] * table[4] ** -values["a"]
        + values["B"] * (PHYSICAL_BATCH * table[5]) ** -values["b"]
        + values["C"] * np.exp(values["g"] * log) * table[4] ** -values["a2"]
    )
    return loss / table[3] - 1


def left_out(by: Optional[str] = None) -> np.ndarray:
    """
    Errors of rows, each predicted by a fit without it, ``[rows]``.

    Args:
        by: leave out at once all rows of the same "users" or "epsilon"; by default,
            of the same configuration (one stands twice in the table)

    Example:
        >>> found = abs(left_out("epsilon"))
        >>> f"{found.mean():.1%} in the mean, {found.max():.1%} at most"
        '3.4% in the mean, 8.8% at most'
    """
    names = (by,) if by else ("parameters", "batch_size", "steps")
    keys = [tuple(getattr(row, name) for name in names) for row in TABLE_2]
    found = np.empty(len(TABLE_2))
    for key in set(keys):
        out = np.array([k == key for k in keys])
        found[out] = errors(_fit(TABLE_2, ~out, slopes=SLOPES))[out]
    return found
