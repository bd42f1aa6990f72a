"""Parametric scaling laws: their formulas, how they are fitted, their predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from inspect import signature
from typing import Any, Callable, Mapping, NamedTuple, Optional, Sequence

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused

#: Stands for log 0 where gradients must stay finite: a power of it is 0 all the same.
LOG_ZERO = -1e6

_NO_EFFECT = 1e-4  # of a parameter on log loss: nobody can measure less
HUBER = 1e-3  # error of the log target beyond which Huber's loss is linear
STARTS = 256  # spread over the ranges of the parameters

Values = Mapping[str, Any]


class Parameter(NamedTuple):
    """A parameter of a law's formula."""

    name: str
    #: Of a fit, of the log if it is positive, in units in which inputs and target have
    #: geometric mean 1.
    starts: tuple[float, float]
    positive: bool = True  # fitted as its log
    usual: tuple[float, float] = (0.0, math.inf)  # outside, a fit is degenerate

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
class Law:
    """
    A parametric law, (sum_i c_i^k_i prod_j x_j^e_ij)^outer, of coefficients c and
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
    """

    name: str
    inputs: tuple[str, ...]
    coefficients: tuple[str, ...]
    powers: Callable[..., tuple[Any, Sequence[tuple[Any, Mapping[str, Any]]]]]
    target: str = "loss"
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )

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
        """Parameters in the user's units; ``means`` are logs of what was 1 so far."""
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
            values = positive(name, inputs[name], name == "ratio")
            with np.errstate(divide="ignore"):
                x = self.transforms.get(name, np.log)(values)
            logs[name] = np.maximum(x, LOG_ZERO)
        return logs

    def _read(
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

    def _check_identifiable(
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

    def fit(
        self,
        target: ArrayLike,
        /,
        *,
        descents: int = 24,
        **inputs: ArrayLike,
    ) -> Fit:
        """
        Fits the law to measurements: minimizes the sum over rows of Huber's loss of
        (log prediction - log target), in which outliers weigh little, with L-BFGS.

        Args:
            target: what was measured (a loss, for most laws), ``[rows]``
            descents: number of starts, of 256 the best, from which L-BFGS descends
            **inputs: by name, ``[rows]`` or a number

        Returns:
            see :class:`Fit`; read its ``warnings``

        Raises:
            Refused: for other inputs than the law's, values that are not positive and
                finite, lengths that differ, and rows that can't tell the parameters
                apart

        Example:
            >>> from opacus_ext.planner.laws import CHINCHILLA, chinchilla
            >>> size = np.array([1e6, 1e7, 1e8, 1e6, 1e7, 1e8])
            >>> tokens = np.array([1e8, 1e8, 1e8, 1e10, 1e9, 4e9])
            >>> loss = CHINCHILLA.predict(parameters=size, tokens=tokens)
            >>> fit = chinchilla.fit(loss, parameters=size, tokens=tokens)
            >>> {name: round(value, 2) for name, value in fit.parameters.items()}
            {'E': 1.69, 'A': 406.4, 'B': 410.7, 'a': 0.34, 'b': 0.28}
        """
        logs, outcome = self._read(target, inputs)
        checked("descents", descents, at_least=1)
        self._check_identifiable(logs, outcome)
        objective = Objective(self, logs, outcome)
        ends = objective.descend_from(descents)
        best = objective.descend(ends[0].x, tolerance=1e-14, evaluations=5000)
        close = ends[0].objective * 1.0001 + 1e-6 * HUBER
        values = {n: float(v) for n, v in objective.natural(best.x).items()}
        agreed = sum(end.objective <= close for end in ends)
        meta = best.objective, len(outcome), len(ends), agreed, best.converged
        fit = Fit(self, values, *meta)
        found = _warnings(fit, objective.slopes(best.x)[1].T)
        return replace(fit, warnings=tuple(found))

    def of(self, **parameters: float) -> Fit:
        """
        The law with given parameters, such as published ones.

        Raises:
            Refused: for other names than the law's, and values out of range

        Example:
            >>> from opacus_ext.planner.laws import chinchilla
            >>> law = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)
            >>> round(float(law.predict(parameters=70e9, tokens=1.4e12)), 3)
            1.937
        """
        names = [p.name for p in self.parameters]
        if set(parameters) != set(names):
            raise Refused(f"{self.name} has {names}; got {sorted(parameters)}.")
        for p in self.parameters:
            checked(p.name, parameters[p.name], above=0 if p.positive else -math.inf)
        return Fit(self, {n: float(parameters[n]) for n in names})


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
        self, law: Law, logs: Mapping[str, np.ndarray], outcome: np.ndarray
    ) -> None:
        self.law = law
        self.means = {n: float(nonzero(x).mean()) for n, x in logs.items()}
        self.mean = float(outcome.mean())
        self.logs = {n: x - self.means[n] for n, x in logs.items()}
        self.outcome = outcome - self.mean

    def _errors(self, x: Any) -> np.ndarray:
        values = dict(zip(self.law.keys, x))
        return self.law.log_target(values, self.logs) - self.outcome

    def _loss(self, error: np.ndarray) -> np.ndarray:
        size = np.abs(error)
        near = np.minimum(size, HUBER)
        return near * (size - near / 2)

    def slopes(self, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Errors ``[rows]``, and their derivatives ``[parameters, rows]``."""
        with np.errstate(all="ignore"):  # a start may be far off
            found, slopes = self.law.slopes(dict(zip(self.law.keys, x)), self.logs)
        shape = self.outcome.shape
        rows = [np.broadcast_to(slopes[key], shape) for key in self.law.keys]
        return found - self.outcome, np.stack(rows)

    def descend_from(self, descents: int) -> list[Descent]:
        """Descents from the best of all starts, the best end first."""
        from scipy.stats import qmc  # half a second, which only fits need

        low, high = np.array([p.starts for p in self.law.parameters]).T
        sobol = qmc.Sobol(len(low), scramble=False)
        # Without its first point, which is the lower corner.
        points = sobol.random(2 * STARTS)[1 : STARTS + 1]
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
            value = self._loss(error).sum() / HUBER
            slope = slope @ (np.clip(error, -HUBER, HUBER) / HUBER)
            if not (np.isfinite(value) and np.isfinite(slope).all()):
                return math.inf, np.zeros_like(x)
            return float(value), slope

        options = dict(maxiter=evaluations, maxfun=evaluations, maxcor=20, gtol=1e-8)
        options["ftol"] = tolerance
        end = minimize(scaled, start, jac=True, method="L-BFGS-B", options=options)
        # At the limit of float64 no step down may be found.
        flat = np.abs(end.jac).max() < 1e-4 * len(self.outcome)
        converged = math.isfinite(end.fun) and bool(end.success or flat)
        return Descent(end.x, float(end.fun) * HUBER, converged)

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


@dataclass(frozen=True)
class Fit:
    """
    A law with its parameters.

    Attributes:
        law: see :class:`Law`
        parameters: by name
        objective: sum of the Huber losses; None for parameters that were given
        rows: number of measurements of the fit
        starts: number of descents
        agreed: number of them that ended where the best one did
        converged: True if the best one did
        warnings: what is wrong with the fit, for people; read them
    """

    law: Law
    parameters: dict[str, float]
    objective: Optional[float] = None
    rows: int = 0
    starts: int = 0
    agreed: int = 0
    converged: bool = True
    warnings: tuple[str, ...] = ()

    def predict(self, **inputs: ArrayLike) -> np.ndarray:
        """
        The law's prediction from its inputs by name, which broadcast.

        Raises:
            Refused: for other inputs than the law's, and values that are not positive
                and finite (the noise-batch ratio may be 0)

        Example:
            >>> from opacus_ext.planner import KAPLAN
            >>> KAPLAN["critical_batch"].predict(loss=[3.0, 4.0]).round()
            array([1122570.,  285277.])
        """
        logs = self.law.logs(inputs)
        broadcast(logs)
        with np.errstate(divide="ignore"):
            values = {
                p.key: (np.log if p.positive else np.asarray)(self.parameters[p.name])
                for p in self.law.parameters
            }
        return np.asarray(np.exp(self.law.log_target(values, logs)))


def _warnings(fit: Fit, jacobian: np.ndarray) -> list[str]:
    """Sentences on the weaknesses of a fit."""
    found, parameters = [], fit.law.parameters
    if not fit.converged:
        found.append("L-BFGS stopped before it converged.")
    if fit.starts > 1 and fit.agreed == 1:
        found.append(f"Only one of {fit.starts} starts led to this fit.")
    effects = np.abs(jacobian).max(0)
    for p, effect in zip(parameters, effects):
        value = fit.parameters[p.name]
        if not p.usual[0] <= value <= p.usual[1]:
            found.append(
                f"{p.name} = {value:.4g} is degenerate: outside of "
                f"{p.usual[0]:g} to {p.usual[1]:g}."
            )
        if effect < _NO_EFFECT:
            found.append(
                f"{p.name} = {value:.4g} has no effect on {fit.law.target} at these "
                "measurements: they don't determine it."
            )
    used = effects >= _NO_EFFECT
    if used.any():
        _, s, v = np.linalg.svd(jacobian[:, used] / effects[used], full_matrices=False)
        if len(s) < used.sum() or s[-1] < 1e-6 * s[0]:
            names = [p.name for p, u in zip(parameters, used) if u]
            mixed = [n for n, w in zip(names, v[-1]) if abs(w) > 0.1]
            found.append(
                f"{', '.join(mixed)} can be traded for each other at these "
                "measurements: only together are they determined."
            )
    return found
