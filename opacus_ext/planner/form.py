"""The formula of a parametric law, and the objective that its fits minimize."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property, reduce
from inspect import signature
from typing import Any, Callable, Mapping, NamedTuple, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused

#: Stands for log 0 where gradients must stay finite: a power of it is 0 all the same.
LOG_ZERO = -1e6

Values = Mapping[str, Any]


class Parameter(NamedTuple):
    """
    A parameter of a law.

    Attributes:
        name: in the law's formula
        starts: range of the starts of a fit, of the log of a positive parameter, in
            units in which inputs and target have geometric mean 1
        positive: the fit is over its log
        usual: a fit outside of this range is reported as degenerate
    """

    name: str
    starts: tuple[float, float]
    positive: bool = True
    usual: tuple[float, float] = (0.0, math.inf)

    @property
    def key(self) -> str:
        """Its name in the law's functions: ``log_A`` for a positive ``A``."""
        return f"log_{self.name}" if self.positive else self.name


_SHARE = math.log(0.02), math.log(1.0)
_ALPHA = math.log(0.02), math.log(1.5)
PARAMETERS = {
    **{c: Parameter(c, _SHARE) for c in "EABC"},
    **{e: Parameter(e, (0.05, 1.5), False, usual=(0.01, 3.0)) for e in "abg"},
    # Published: -0.07, noise hurts a larger model more.
    "a2": Parameter("a2", (-0.3, 0.3), False, usual=(-2.0, 2.0)),
    # The share of its term in the loss is (scale / 1)^alpha, at most 1.
    **{c: Parameter(c, (-6.0, 0.5)) for c in ("N_c", "D_c")},
    **{f"alpha_{x}": Parameter(f"alpha_{x}", _ALPHA, usual=(0.005, 3)) for x in "ND"},
    "B_star": Parameter("B_star", (-3.0, 3.0)),
    "alpha_B": Parameter("alpha_B", (math.log(0.05), 0.0), usual=(0.01, 5.0)),
}


@dataclass(frozen=True)
class Form:
    """
    The formula of a law, (sum_i c_i^k_i prod_j x_j^e_ij)^outer, of coefficients c and
    inputs x. Its functions take parameters and inputs as dicts of arrays that
    broadcast, positive parameters and inputs as logs.

    Attributes:
        name: in :data:`opacus_ext.planner.laws.LAWS`
        inputs: their names
        coefficients: their names, one for each term
        powers: function of the exponents, by name, to ``outer`` and, for each term,
            ``(k, {input: e})``
        target: name of what it predicts
        transforms: of inputs that the law takes otherwise than as logs
        may_be_zero: inputs that may be 0
    """

    name: str
    inputs: tuple[str, ...]
    coefficients: tuple[str, ...]
    powers: Callable[..., tuple[Any, Sequence[tuple[Any, Mapping[str, Any]]]]]
    target: str = "loss"
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )
    may_be_zero: tuple[str, ...] = ()

    @cached_property
    def parameters(self) -> list[Parameter]:
        """The coefficients, then the exponents."""
        names = *self.coefficients, *signature(self.powers).parameters
        return [PARAMETERS[name] for name in names]

    @property
    def keys(self) -> list[str]:
        """The names of the parameters in the law's functions."""
        return [p.key for p in self.parameters]

    def _terms(self, p: Values) -> tuple[Any, list[tuple[str, Any, Mapping[str, Any]]]]:
        """``outer``, and the coefficient's key, k and exponents of each term."""
        exponents = self.parameters[len(self.coefficients) :]
        named = {
            q.name: np.exp(p[q.key]) if q.positive else p[q.key] for q in exponents
        }
        outer, terms = self.powers(**named)
        return outer, [(q.key, *term) for q, term in zip(self.parameters, terms)]

    def log_target(self, p: Values, x: Values) -> Any:
        """The log of the target."""
        outer, terms = self._terms(p)
        return outer * _log_sum(_log_terms(p, x, terms))

    def slopes(self, p: Values, x: Values) -> tuple[Any, dict[str, Any]]:
        """The log of the target, and its derivative by each parameter, by key."""
        outer, terms = self._terms(p)
        logs = _log_terms(p, x, terms)
        total = _log_sum(logs)
        shares = [np.exp(log - total) for log in logs]
        found = {}
        for key in self.keys:
            # Derivatives of a few numbers: a complex step, exact to float64.
            moved_p = {**p, key: p[key] + 1e-30j}
            moved_outer, moved = self._terms(moved_p)
            slope = moved_outer.imag * 1e30 * total if moved_outer.imag else 0.0
            for share, (c, k, powers) in zip(shares, moved):
                changes = [(k * moved_p[c]).imag * 1e30]
                changes += [e.imag * 1e30 * x[n] for n, e in powers.items() if e.imag]
                if len(changes) > 1 or changes[0]:
                    slope = slope + outer * share * sum(changes)
            found[key] = slope
        return outer * total, found

    def in_units(
        self, p: Values, means: Mapping[str, float], mean: float
    ) -> dict[str, Any]:
        """
        Parameters of a law fitted in units in which inputs and target have geometric
        mean 1, in the user's units; ``means`` and ``mean`` are logs.
        """
        outer, terms = self._terms(p)
        moved = {
            c: p[c] + (mean / outer - sum(e * means[n] for n, e in powers.items())) / k
            for c, k, powers in terms
        }
        return {**p, **moved}

    def logs(self, inputs: Mapping[str, ArrayLike]) -> dict[str, np.ndarray]:
        """The inputs as the law's functions take them, checked."""
        if set(inputs) != set(self.inputs):
            raise Refused(
                f"{self.name} is a law of {', '.join(self.inputs)}; got "
                f"{', '.join(inputs) or 'nothing'}."
            )
        logs = {}
        for name in self.inputs:
            values = positive(name, inputs[name], name in self.may_be_zero)
            with np.errstate(divide="ignore"):
                x = self.transforms.get(name, np.log)(values)
            logs[name] = np.maximum(x, LOG_ZERO)
        return logs

    def read(
        self, target: ArrayLike, inputs: Mapping[str, ArrayLike]
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """The inputs and the target as logs, ``[rows]`` each."""
        outcome = positive(self.target, target)
        logs = self.logs(inputs)
        for name, x in {self.target: outcome, **logs}.items():
            if outcome.ndim != 1 or x.shape not in ((), outcome.shape):
                raise Refused(
                    f"{name} has shape {x.shape}, {self.target} {outcome.shape}: a "
                    "list with one row each is needed.",
                    parameter=name,
                )
        logs = {n: np.broadcast_to(x, outcome.shape) for n, x in logs.items()}
        return logs, np.log(outcome)

    def check_identifiable(
        self, logs: Mapping[str, np.ndarray], outcome: np.ndarray
    ) -> None:
        """Refuses rows that can't determine the parameters."""
        if len(outcome) < len(self.parameters):
            raise Refused(
                f"{self.name} has {len(self.parameters)} parameters; {len(outcome)} "
                "rows can't determine them.",
                remedy="Measure more, or fit a law of fewer parameters.",
            )
        # c, a and the constant of c x^-a + constant need three values of x.
        least = 3 if "E" in self.coefficients else 2
        for name in self.inputs:
            distinct = len(np.unique(logs[name]))
            if distinct < least:
                raise Refused(
                    f"{name} has {distinct} values, {self.name} needs {least}.",
                    parameter=name,
                    remedy="Measure more or choose a law without it.",
                )
        # A zero is somewhere below the others.
        columns = [
            np.where(x > LOG_ZERO, x, nonzero(x).min() - 1) for x in logs.values()
        ]
        matrix = np.stack([(x - x.mean()) / np.ptp(x) for x in columns])
        if np.linalg.matrix_rank(matrix, tol=1e-8 * len(outcome)) < len(matrix):
            raise Refused(
                f"{' and '.join(self.inputs)} vary only together: nothing tells their "
                "effects apart.",
                remedy=f"Measure {self.target} at other combinations.",
            )


def _log_terms(p: Values, x: Values, terms: Sequence[Any]) -> list[Any]:
    return [
        k * p[c] + sum(e * x[name] for name, e in powers.items())
        for c, k, powers in terms
    ]


def _log_sum(logs: Sequence[Any]) -> Any:
    """The log of the sum of exponentials, which broadcast."""
    top = reduce(np.maximum, logs)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(sum(np.exp(x - top) for x in logs)) + top


class Descent(NamedTuple):
    x: np.ndarray
    objective: float
    converged: bool


class Objective:
    """Huber's loss of rows, in units in which their geometric means are 1."""

    def __init__(
        self,
        law: Form,
        logs: Mapping[str, np.ndarray],
        outcome: np.ndarray,
        huber: float,
    ) -> None:
        self.law, self.huber = law, huber
        self.means = {n: float(nonzero(x).mean()) for n, x in logs.items()}
        self.mean = float(outcome.mean())
        self.logs = {n: x - self.means[n] for n, x in logs.items()}
        self.outcome = outcome - self.mean

    def at(self, rows: np.ndarray) -> Objective:
        """The objective of some rows, in the same units."""
        other = copy(self)
        other.logs = {n: x[rows] for n, x in self.logs.items()}
        other.outcome = self.outcome[rows]
        return other

    def _errors(self, x: Any) -> np.ndarray:
        values = dict(zip(self.law.keys, x))
        return self.law.log_target(values, self.logs) - self.outcome

    def _loss(self, error: np.ndarray) -> np.ndarray:
        size = np.abs(error)
        near = np.minimum(size, self.huber)
        return near * (size - near / 2)

    def slopes(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors ``[rows]``, and their derivatives ``[parameters, rows]``."""
        with np.errstate(all="ignore"):  # a start may be far off
            found, slopes = self.law.slopes(dict(zip(self.law.keys, x)), self.logs)
        shape = self.outcome.shape
        rows = [np.broadcast_to(slopes[key], shape) for key in self.law.keys]
        return found - self.outcome, np.stack(rows)

    def descend_from(self, starts: int, descents: int) -> list[Descent]:
        """Descents from the best of so many starts, the best end first."""
        from scipy.stats import qmc  # half a second, which only fits need

        low, high = np.array([p.starts for p in self.law.parameters]).T
        sobol = qmc.Sobol(len(low), scramble=False)
        # Without its first point, which is the lower corner.
        points = sobol.random(2 ** math.ceil(math.log2(starts + 1)))[1 : starts + 1]
        points = qmc.scale(points, low, high)
        part = max(1, 10**6 // len(self.outcome))  # fits in memory
        with np.errstate(all="ignore"):
            found = [
                self._loss(self._errors(points[i : i + part].T[..., None])).sum(-1)
                for i in range(0, len(points), part)
            ]
        losses = np.nan_to_num(np.concatenate(found), nan=math.inf)
        first = points[np.argsort(losses, kind="stable")[:descents]]
        return sorted(map(self.descend, first), key=lambda end: end.objective)

    def descend(
        self, start: np.ndarray, tolerance: float = 1e-10, evaluations: int = 500
    ) -> Descent:
        def scaled(x: np.ndarray) -> tuple[float, np.ndarray]:
            # In units of |error|: the objective itself is so small that L-BFGS would
            # mistake its first value for a minimum.
            error, slope = self.slopes(x)
            value = self._loss(error).sum() / self.huber
            slope = slope @ (np.clip(error, -self.huber, self.huber) / self.huber)
            if not (np.isfinite(value) and np.isfinite(slope).all()):
                return math.inf, np.zeros_like(x)
            return float(value), slope

        options = dict(maxiter=evaluations, maxfun=evaluations, maxcor=20, gtol=1e-8)
        options["ftol"] = tolerance
        end = minimize(scaled, start, jac=True, method="L-BFGS-B", options=options)
        # At the limit of float64 no step down may be found.
        flat = np.abs(end.jac).max() < 1e-4 * len(self.outcome)
        converged = math.isfinite(end.fun) and bool(end.success or flat)
        return Descent(end.x, float(end.fun) * self.huber, converged)

    def natural(self, x: np.ndarray) -> dict[str, np.ndarray]:
        """Parameters of a fit, ``[*, parameters]``, in the user's units by name."""
        values = dict(zip(self.law.keys, np.moveaxis(x, -1, 0)))
        p = self.law.in_units(values, self.means, self.mean)
        # The log of a degenerate fit may be any number; its parameter stays finite.
        return {
            q.name: np.exp(np.clip(p[q.key], -700, 700)) if q.positive else p[q.key]
            for q in self.law.parameters
        }


def nonzero(x: np.ndarray) -> np.ndarray:
    return x[x > LOG_ZERO]


def positive(name: str, values: ArrayLike, zero: bool = False) -> np.ndarray:
    """``values`` as doubles, all of them above 0 (or 0, with ``zero``) and finite."""
    return checked(name, values, at_least=0) if zero else checked(name, values, above=0)


def broadcast(given: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Arrays of one shape; refuses shapes that don't broadcast."""
    try:
        return np.broadcast_arrays(*given.values())
    except ValueError as e:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
        raise Refused(
            f"Shapes don't broadcast: {shapes}.", remedy="Pass shapes that do."
        ) from e
