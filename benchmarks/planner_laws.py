"""How the constants of the planner's laws were found, and how wrong the laws are.

    python benchmarks/planner_laws.py

The constants of L2, the paper's law (:data:`opacus_ext.planner.laws.PAPER`), are fitted
to the 16 rows of its table 2 by non-negative least squares on two kinds of equations,
both linear in E, A, B and C:

- the loss of each row is the law's;
- each row is the best of its compute, so that by the law an e-fold more of the size,
  of the batch and of the steps are worth the same. Rows of the smallest size are at the
  end of the range, so they have no such equation for the size.

The kappa of :mod:`opacus_ext.planner.noise_free` is fitted to the private runs of the
package's own study. The paper's three baselines (section 4.4) and sizes without privacy
(section 4.1) are then told by the law. About 20 seconds on one core.
"""

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy.optimize import least_squares, minimize_scalar, nnls

from opacus_ext.accountants.calibration import calibrate
from opacus_ext.planner import Budget, Candidates, Measurements, Surface, scaled_options
from opacus_ext.planner.laws import PAPER, Fit, private_sigmoid, squash
from opacus_ext.planner.loss_model import MOST_LOSS, PHYSICAL_BATCH, LossModel, compute
from opacus_ext.planner.noise_free import KAPPA, NoiseFree
from opacus_ext.planner.optimum import compute_optimal
from opacus_ext.tables import text_table

DELTA = 1e-8
RATIOS = 0.0, 2.0**-4  # of the runs that kappa is fitted to
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

#: Section 4.4: parameters, batch and steps of 1e19 FLOPs, of 1e7 users.
BASELINES = {
    "BertLarge": (335e6, 1295, 7500),
    "BertMedium": (41e6, 15_879, 5000),
    "BertTiny": (4.5e6, 283_061, 2500),
}
USERS, EPSILONS = 1e7, (1, 4, 16, 64)


@lru_cache(maxsize=64)
def _log_squashed(
    rows: Tuple[Row, ...], more_batch: float = 1.0, more_steps: float = 1.0
) -> np.ndarray:
    """log s' of rows, ``[rows]``, or of as much more of a batch and of steps."""
    table = np.array(rows).T
    steps, batch = np.round(table[5] * more_steps), table[6] * more_batch
    ratio = calibrate(table[1], DELTA, steps, batch, table[0]).ratio
    return squash(ratio)


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


def _fit(
    rows: Tuple[Row, ...],
    used: np.ndarray,
    slopes: float,
    shape: Optional[Dict[str, float]] = None,
) -> Fit:
    def exponents(log_b: float) -> Dict[str, float]:
        return {**(shape or SHAPE), "b": math.exp(log_b)}

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


def refit_paper(
    rows: Sequence[Row] = TABLE_2,
    slopes: float = SLOPES,
    shape: Optional[Dict[str, float]] = None,
) -> Fit:
    """
    The constants of L2 from rows of table 2, as the module says.

    Args:
        rows: of the table, five or more
        slopes: weight of an e-fold's worth against that of a relative error of the
            loss
        shape: a, g and a2; those that are used by default

    Example:
        >>> {name: float(f"{refit_paper().parameters[name]:.3g}") for name in "EABCb"}
        {'E': 0.36, 'A': 4350.0, 'B': 189.0, 'C': 2.31e-05, 'b': 0.327}
    """
    rows = tuple(rows)
    return _fit(rows, np.ones(len(rows), dtype=bool), slopes, shape)


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


class Baseline(NamedTuple):
    """
    A baseline of the paper, by a law.

    Attributes:
        name: of the model
        epsilon: of 1e7 users
        loss: by the law; above 10.3 it says that nothing is learnt
        saved: its compute by that of a plan with its loss; nan if nothing is learnt
    """

    name: str
    epsilon: float
    loss: float
    saved: float


def baselines(fit: Fit = PAPER) -> Iterator[Baseline]:
    """
    The three baselines of section 4.4 beside what is planned, by a law.

    Example:
        >>> first = next(baselines())
        >>> first.name, first.epsilon, f"{first.loss:.1f}"
        ('BertLarge', 1, '34.3')
    """

    def formula(size: Any, batch: Any, steps: Any, ratio: Any) -> np.ndarray:
        # Without enough steps a ratio may be inf.
        examples = np.multiply(steps, float(PHYSICAL_BATCH))
        ratio = np.minimum(ratio, 1.0)
        return fit.predict(parameters=size, examples=examples, ratio=ratio)

    law = replace(LossModel.of_paper(), loss=formula)
    tables = [Candidates(Budget(USERS, epsilon, DELTA), law) for epsilon in EPSILONS]
    for name, (size, batch, steps) in BASELINES.items():
        for table in tables:
            epsilon = table.budget.epsilon
            ratio = calibrate(epsilon, DELTA, steps, batch, USERS).ratio
            loss = float(formula(size, batch, steps, ratio))
            enough = table.flops[table.loss <= loss].min()
            saved = compute(size, batch, steps, table.budget.tokens) / enough
            yield Baseline(name, epsilon, loss, saved if loss < MOST_LOSS else math.nan)


def sizes_by_compute() -> Iterator[List[float]]:
    """
    Sizes that are best for a compute (section 4.1): FLOPs, then parameters for each
    epsilon, without noise by the same law, and by Chinchilla's.
    """
    tables = [
        Candidates(Budget(USERS, e, DELTA), LossModel.of_paper()) for e in EPSILONS
    ]
    for flops in (1e17, 1e18, 1e19, 1e20):
        free = tables[0].not_private(flops)
        private = [table.best(flops).parameters for table in tables]
        chinchilla = float(compute_optimal(flops).parameters)
        yield [flops, *private, free and free["parameters"], chinchilla]


class Refit(NamedTuple):
    """
    The law fitted to measured runs.

    Attributes:
        kappa: as :data:`KAPPA`
        error: relative, of each reading of private runs, ``[readings]``
    """

    kappa: float
    error: np.ndarray


def refit_kappa(measurements: Any = None, most: float = RATIOS[1]) -> Refit:
    """
    Fits kappa to private runs of sizes that were run without noise too.

    Args:
        measurements: of several ratios, 0 among them; None for those of the package
        most: ratios above are left out: of what they lose, much is the learning rate's,
            which was best for less noise

    Example:
        >>> f"{np.abs(refit_kappa().error).mean():.1%}"
        '2.4%'
    """
    runs = Measurements.read() if measurements is None else measurements
    # A mean over readings would lag, and more where the curve is steep.
    options: Any = {**scaled_options(runs), "window": 1, "steps_to": None}
    surface = Surface.fit(runs, **options)
    cells: List[Tuple[int, int, np.ndarray]] = []
    for i, j in np.ndindex(surface.measured_to.shape):
        if 0 < surface.ratio[j] <= most:
            to = min(surface.measured_to[i, j], surface.measured_to[i, 0])
            cells.append((i, j, surface.steps <= to))

    def errors(log_kappa: Any) -> np.ndarray:
        kappa = float(np.exp(log_kappa).item())
        found = []
        for i, j, at in cells:
            size, ratio = surface.parameters[i], surface.ratio[j]
            curve = NoiseFree(
                surface.steps[at], np.exp(surface.log_loss[i, at, 0]), kappa
            )
            told = curve.after(curve.steps, ratio * np.sqrt(size))
            found.append(np.log(told) - surface.log_loss[i, at, j])
        return np.concatenate(found)

    # Bends of single curves are no more than that.
    fit = least_squares(errors, np.log(KAPPA), loss="soft_l1", f_scale=0.02)
    return Refit(float(np.exp(fit.x[0])), np.expm1(errors(fit.x)))


def main() -> None:
    """Prints the constants and errors of both laws."""
    values = refit_paper().parameters
    print("paper:", ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
    for label, found in (
        ("of the 16 rows", errors()),
        ("of a row left out", left_out()),
        ("of an epsilon left out", left_out("epsilon")),
        ("of a number of users left out", left_out("users")),
    ):
        print(f"{label}: {np.abs(found).mean():.1%}, at most {np.abs(found).max():.1%}")
    shape = {name: PUBLISHED[name] for name in SHAPE}
    for label, fit in {
        "": PAPER,
        ", g and a2 published": refit_paper(shape=shape),
    }.items():
        rows = [
            (name, f"{epsilon:g}", f"{loss:.2f}", f"{saved:.1f}")
            for name, epsilon, loss, saved in baselines(fit)
        ]
        print(f"baselines of 1e19 FLOPs{label}:")
        print(text_table(["baseline", "epsilon", "loss", "saved"], rows, right=True))
    header = ["FLOPs", *(f"epsilon {e}" for e in EPSILONS), "no noise", "Chinchilla"]
    sizes = [[f"{x:.2g}" for x in row] for row in sizes_by_compute()]
    print("best sizes:", text_table(header, sizes, right=True), sep="\n")
    kappa = refit_kappa()
    worst = np.abs(kappa.error).max()
    print(f"kappa {kappa.kappa:.3g}: {np.abs(kappa.error).mean():.1%}, {worst:.0%}")


if __name__ == "__main__":
    main()
