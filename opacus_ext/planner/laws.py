"""
Parametric scaling laws: formulas, published constants, fits and predictions.

A law is a function below: its formula, from which inputs and constants are read. M are
parameters, D tokens, N examples, s the noise-batch ratio, C compute in FLOPs. Sources:
Kaplan et al., "Scaling laws for neural language models" (2020); McCandlish et al., "An
empirical model of large-batch training" (2018); Hoffmann et al., "Training
compute-optimal large language models" (2022); "Scaling laws for differentially private
language models", appendix E. Published constants: :data:`KAPLAN`, :data:`CHINCHILLA`
and :data:`CHINCHILLA_REFIT`. Those of the private laws stand in no paper:
:data:`PAPER` is fitted to published results. What follows from laws, such as the best
size for a compute, is in :mod:`opacus_ext.planner.optimum`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, partial, reduce
from inspect import signature
from typing import (
    Any,
    Callable,
    Dict,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import numpy as np
from numpy import log
from numpy.typing import ArrayLike
from scipy.optimize import minimize

from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused

#: Stands for log 0 where gradients must stay finite: a power of it is 0 all the same.
LOG_ZERO = -1e6

#: FLOPs of a petaflop/s for a day, Kaplan et al.'s unit of compute.
PF_DAY = 1e15 * 24 * 3600

_NO_EFFECT = 1e-4  # of a constant on log loss: nobody can measure less
HUBER = 1e-3  # error of the log target beyond which Huber's loss is linear
STARTS = 256  # spread over the ranges of the constants

_SHARE = math.log(0.02), 0.0
_ALPHA = math.log(0.02), math.log(1.5)
#: Where fits start: the log of a term's share in the target, in the middle of the rows.
COEFFICIENTS = {
    **dict.fromkeys("EABC", _SHARE),
    **dict.fromkeys(("N_c", "D_c", "C_c", "S_c"), (-6.0, 0.5)),
    "scale": (-3.0, 3.0),
    "B_star": (-3.0, 3.0),
}
#: Where fits start, and what is usual: other values are degenerate. Those of the name
#: alpha are positive, and are fitted as their logs.
EXPONENTS = {
    **dict.fromkeys("abg", ((0.05, 1.5), (0.01, 3.0))),
    # Published: -0.07, noise hurts a larger model more.
    "a2": ((-0.3, 0.3), (-2.0, 2.0)),
    "p": ((0.01, 1.5), (0.01, 3.0)),
    **dict.fromkeys(
        ("alpha_N", "alpha_D", "alpha_C", "alpha_S"), (_ALPHA, (0.005, 3.0))
    ),
    "alpha_B": ((math.log(0.05), 0.0), (0.01, 5.0)),
}

Terms = Tuple[Any, List[Any]]
Logs = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Law:
    """
    A parametric law: the target is a sum of terms, to a power.

    Attributes:
        formula: function of inputs, as their logs, and of constants, which are keyword
            arguments: coefficients, one for each term, then exponents. It returns the
            power and the logs of the terms
        target: name of what it predicts
        transforms: of inputs that the formula takes otherwise than as logs
    """

    formula: Callable[..., Terms]
    target: str = "loss"
    transforms: Mapping[str, Callable] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """In :data:`LAWS`."""
        return self.formula.__name__

    def _named(self, kind: str) -> List[str]:
        named = signature(self.formula).parameters.values()
        return [x.name for x in named if x.kind.name == kind]

    @cached_property
    def inputs(self) -> List[str]:
        """Their names."""
        return self._named("POSITIONAL_OR_KEYWORD")

    @cached_property
    def constants(self) -> List[str]:
        """Their names: the coefficients, then the exponents."""
        return self._named("KEYWORD_ONLY")

    @cached_property
    def coefficients(self) -> List[str]:
        """The names of those constants that multiply terms."""
        return [name for name in self.constants if name in COEFFICIENTS]

    def logs(self, inputs: Mapping[str, ArrayLike]) -> Dict[str, np.ndarray]:
        """The inputs as the formula takes them, checked."""
        if set(inputs) != set(self.inputs):
            raise Refused(
                f"{self.name} is a law of {', '.join(self.inputs)}; got "
                f"{', '.join(inputs) or 'nothing'}."
            )
        logs = {}
        for name in self.inputs:
            values = positive(name, inputs[name], name == "ratio")
            with np.errstate(divide="ignore"):
                value = self.transforms.get(name, log)(values)
            logs[name] = np.maximum(value, LOG_ZERO)
        return logs

    def fit(
        self, target: ArrayLike, /, *, descents: int = 24, **inputs: ArrayLike
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
                finite, lengths that differ, and rows that can't tell the constants
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
        outcome = positive(self.target, target)
        logs = self.logs(inputs)
        for name, values in {self.target: outcome, **logs}.items():
            if outcome.ndim != 1 or values.shape not in ((), outcome.shape):
                raise Refused(
                    f"{name} has shape {values.shape}, {self.target} {outcome.shape}: "
                    "a list with one row each is needed.",
                    parameter=name,
                )
        logs = {n: np.broadcast_to(x, outcome.shape) for n, x in logs.items()}
        checked("descents", descents, at_least=1)
        self._check_identifiable(logs)
        rows = _Rows(self, logs, log(outcome))
        ends = rows.descend_from(descents)
        best = rows.descend(ends[0].values, tolerance=1e-14, evaluations=5000)
        close = ends[0].objective * 1.0001 + 1e-6 * HUBER
        fit = Fit(
            self,
            rows.natural(best.values),
            best.objective,
            len(outcome),
            len(ends),
            sum(end.objective <= close for end in ends),
            best.converged,
        )
        slopes = rows.slopes(best.values)[1]
        return replace(fit, warnings=tuple(_warnings(fit, slopes.T)))

    def _check_identifiable(self, logs: Logs) -> None:
        """Refuses rows that can't determine the constants."""
        rows, constants = len(logs[self.inputs[0]]), len(self.constants)
        if rows < constants:
            raise Refused(
                f"{self.name} has {constants} parameters; {rows} rows can't determine "
                "them.",
                remedy="Measure more, or fit a law of fewer parameters.",
            )
        # c, a and the constant of c x^-a + constant need three values of x.
        least = 3 if "E" in self.constants else 2
        columns = []
        for name, values in logs.items():
            distinct = len(np.unique(values))
            if distinct < least:
                raise Refused(
                    f"{name} has {distinct} values, {self.name} needs {least}.",
                    parameter=name,
                    remedy="Measure more or choose a law without it.",
                )
            # A zero is somewhere below the others.
            values = np.maximum(values, nonzero(values).min() - 1)
            columns.append((values - values.mean()) / np.ptp(values))
        if np.linalg.matrix_rank(columns, tol=1e-8 * rows) < len(columns):
            raise Refused(
                f"{' and '.join(logs)} vary only together: nothing tells their effects "
                "apart.",
                remedy=f"Measure {self.target} at other combinations.",
            )

    def of(self, **constants: float) -> Fit:
        """
        The law with given constants, such as published ones.

        Raises:
            Refused: for other names than the law's, and values out of range

        Example:
            >>> from opacus_ext.planner.laws import chinchilla
            >>> law = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)
            >>> round(float(law.predict(parameters=70e9, tokens=1.4e12)), 3)
            1.937
        """
        if set(constants) != set(self.constants):
            raise Refused(f"{self.name} has {self.constants}; got {sorted(constants)}.")
        for name, value in constants.items():
            checked(name, value, above=0 if _is_positive(name) else -math.inf)
        return Fit(self, {name: float(constants[name]) for name in self.constants})


def _is_positive(constant: str) -> bool:
    return constant in COEFFICIENTS or constant.startswith("alpha")


class Descent(NamedTuple):
    values: np.ndarray
    objective: float
    converged: bool


class _Rows:
    """
    Huber's loss of rows, in units in which target and terms are 1 in their middle. What
    is fitted are exponents and, of positive constants, logs: coefficients of 1 then
    are those of the natural units at which a term is the whole target.
    """

    def __init__(self, law: Law, logs: Logs, outcome: np.ndarray) -> None:
        self.law, self.logs = law, logs
        self.middle = {n: float(nonzero(x).mean()) for n, x in logs.items()}
        self.mean = float(outcome.mean())
        self.outcome = outcome - self.mean

    def _constants(self, values: Any) -> Dict[str, Any]:
        return {
            name: np.exp(value) if _is_positive(name) else value
            for name, value in zip(self.law.constants, values)
        }

    def _in_the_middle(self, constants: Dict[str, Any], coefficient: float) -> Terms:
        equal = dict.fromkeys(self.law.coefficients, coefficient)
        return self.law.formula(**self.middle, **{**constants, **equal})

    def _terms(self, values: Any) -> Terms:
        constants = self._constants(values)
        power, terms = self.law.formula(**self.logs, **constants)
        middle = self._in_the_middle(constants, 1.0)[1]
        return power, [term - other for term, other in zip(terms, middle)]

    def natural(self, values: np.ndarray) -> Dict[str, float]:
        """The constants in the user's units, by name."""
        constants = self._constants(values)
        power, terms = self._in_the_middle(constants, 1.0)
        scaled = self._in_the_middle(constants, math.e)[1]
        for name, value, term, more in zip(
            self.law.coefficients, values, terms, scaled
        ):
            value += (self.mean / power - term) / (more - term)
            # The log of a degenerate fit may be any number; its constant stays finite.
            constants[name] = np.exp(np.clip(value, -700, 700))
        return {name: float(value) for name, value in constants.items()}

    def _loss(self, error: np.ndarray) -> np.ndarray:
        size = np.abs(error)
        near = np.minimum(size, HUBER)
        return (near * (size - near / 2)).sum(-1)

    def slopes(self, values: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Errors ``[rows]``, and their derivatives ``[constants, rows]``."""
        with np.errstate(all="ignore"):  # a start may be far off
            power, terms = self._terms(values)
            total = reduce(np.logaddexp, terms)
            shares = [np.exp(term - total) for term in terms]
            slopes = []
            for at in range(len(values)):
                # Terms are linear in logs: a complex step is cheap, and exact.
                moved = [*values]
                moved[at] += 1e-30j
                moved_power, moved_terms = self._terms(moved)
                slope = np.imag(moved_power) * total
                for share, term in zip(shares, moved_terms):
                    if np.iscomplexobj(term):
                        slope = slope + power * share * term.imag
                slopes.append(1e30 * np.broadcast_to(slope, self.outcome.shape))
        return power * total - self.outcome, np.stack(slopes)

    def descend_from(self, descents: int) -> List[Descent]:
        """Descents from the best of all starts, the best end first."""
        from scipy.stats import qmc  # half a second, which only fits need

        starts = {**COEFFICIENTS, **{n: ends for n, (ends, _) in EXPONENTS.items()}}
        low, high = zip(*(starts[name] for name in self.law.constants))
        sobol = qmc.Sobol(len(low), scramble=False)
        # Without its first point, which is the lower corner.
        points = qmc.scale(sobol.random(2 * STARTS)[1 : STARTS + 1], low, high)
        losses = []
        with np.errstate(all="ignore"):
            for point in points:
                power, terms = self._terms(point)
                losses.append(
                    self._loss(power * reduce(np.logaddexp, terms) - self.outcome)
                )
        first = points[np.argsort(np.nan_to_num(losses, nan=math.inf), kind="stable")]
        ends = map(self.descend, first[:descents])
        return sorted(ends, key=lambda end: end.objective)

    def descend(
        self, start: np.ndarray, tolerance: float = 1e-10, evaluations: int = 500
    ) -> Descent:
        def scaled(values: np.ndarray) -> Tuple[float, np.ndarray]:
            # In units of |error|: the objective itself is so small that L-BFGS would
            # mistake its first value for a minimum.
            error, slopes = self.slopes(values)
            value = self._loss(error) / HUBER
            slope = slopes @ (np.clip(error, -HUBER, HUBER) / HUBER)
            if not (np.isfinite(value) and np.isfinite(slope).all()):
                return math.inf, np.zeros_like(values)
            return float(value), slope

        options = dict(maxiter=evaluations, maxfun=evaluations, maxcor=20, gtol=1e-8)
        options["ftol"] = tolerance
        end = minimize(scaled, start, jac=True, method="L-BFGS-B", options=options)
        # At the limit of float64 no step down may be found.
        flat = np.abs(end.jac).max() < 1e-4 * len(self.outcome)
        converged = math.isfinite(end.fun) and bool(end.success or flat)
        return Descent(end.x, float(end.fun) * HUBER, converged)


def nonzero(logs: np.ndarray) -> np.ndarray:
    """Those that are not the log of 0."""
    return logs[logs > LOG_ZERO]


def positive(name: str, values: ArrayLike, zero: bool = False) -> np.ndarray:
    """``values`` as doubles, all of them above 0 (or 0, with ``zero``) and finite."""
    return checked(name, values, at_least=0) if zero else checked(name, values, above=0)


def broadcast(given: Mapping[str, np.ndarray]) -> Sequence[np.ndarray]:
    """Arrays of one shape; refuses shapes that don't broadcast."""
    try:
        return np.broadcast_arrays(*given.values())
    except ValueError as error:
        shapes = ", ".join(f"{name} {x.shape}" for name, x in given.items())
        raise Refused(
            f"Shapes don't broadcast: {shapes}.", remedy="Pass shapes that do."
        ) from error


@dataclass(frozen=True)
class Fit:
    """
    A law with its constants.

    Attributes:
        law: see :class:`Law`
        parameters: the constants by name
        objective: sum of the Huber losses; None for constants that were given
        rows: number of measurements of the fit
        starts: number of descents
        agreed: number of them that ended where the best one did
        converged: True if the best one did
        warnings: what is wrong with the fit, for people; read them
    """

    law: Law
    parameters: Dict[str, float]
    objective: Optional[float] = None
    rows: int = 0
    starts: int = 0
    agreed: int = 0
    converged: bool = True
    warnings: Tuple[str, ...] = ()

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
            power, terms = self.law.formula(**logs, **self.parameters)
        return np.asarray(np.exp(power * reduce(np.logaddexp, terms)))


def _warnings(fit: Fit, slopes: np.ndarray) -> List[str]:
    """Sentences on the weaknesses of a fit, by slopes ``[rows, constants]``."""
    found = []
    if not fit.converged:
        found.append("L-BFGS stopped before it converged.")
    if fit.starts > 1 and fit.agreed == 1:
        found.append(f"Only one of {fit.starts} starts led to this fit.")
    effects = np.abs(slopes).max(0)
    for (name, value), effect in zip(fit.parameters.items(), effects):
        low, high = EXPONENTS[name][1] if name in EXPONENTS else (0.0, math.inf)
        if not low <= value <= high:
            found.append(
                f"{name} = {value:.4g} is degenerate: outside of {low:g} to {high:g}."
            )
        if effect < _NO_EFFECT:
            found.append(
                f"{name} = {value:.4g} has no effect on {fit.law.target} at these "
                "measurements: they don't determine it."
            )
    used = effects >= _NO_EFFECT
    if used.any():
        _, s, v = np.linalg.svd(slopes[:, used] / effects[used], full_matrices=False)
        if len(s) < used.sum() or s[-1] < 1e-6 * s[0]:
            names = np.array(fit.law.constants)[used][np.abs(v[-1]) > 0.1]
            found.append(
                f"{', '.join(names)} can be traded for each other at these "
                "measurements: only together are they determined."
            )
    return found


def squash(ratio: np.ndarray) -> np.ndarray:
    """log s', the private paper's equation 4, by eye for ratios of 2^-23 to 2^-6."""
    return -np.logaddexp(0.0, -(log(ratio) + 8) / 1.6)


@Law
def chinchilla(parameters, tokens, *, E, A, B, a, b):  # type: ignore[no-untyped-def]
    """L = E + A / M^a + B / D^b."""
    return 1.0, [log(E), log(A) - a * parameters, log(B) - b * tokens]


@Law
def private(  # type: ignore[no-untyped-def]
    parameters, examples, ratio, *, E, A, B, C, a, b, g
):
    """The paper's L1: L = E + A / M^a + B / N^b + C s^g."""
    data = [log(A) - a * parameters, log(B) - b * examples]
    return 1.0, [log(E), *data, log(C) + g * ratio]


@partial(Law, transforms={"ratio": squash})
def private_sigmoid(  # type: ignore[no-untyped-def]
    parameters, examples, ratio, *, E, A, B, C, a, b, g, a2
):
    """
    The paper's L2: L = E + A / M^a + B / N^b + C s'^g / M^a2, with
    s' = sigmoid((log s + 8) / 1.6).
    """
    data = [log(A) - a * parameters, log(B) - b * examples]
    return 1.0, [log(E), *data, log(C) + g * ratio - a2 * parameters]


@Law
def kaplan_parameters_tokens(  # type: ignore[no-untyped-def]
    parameters, tokens, *, N_c, D_c, alpha_N, alpha_D
):
    """L = ((N_c / M)^(alpha_N / alpha_D) + D_c / D)^alpha_D."""
    share = alpha_N / alpha_D
    return alpha_D, [share * (log(N_c) - parameters), log(D_c) - tokens]


@Law
def kaplan_parameters(parameters, *, N_c, alpha_N):  # type: ignore[no-untyped-def]
    """L = (N_c / M)^alpha_N, of models trained to their end on endless data."""
    return alpha_N, [log(N_c) - parameters]


@Law
def kaplan_tokens(tokens, *, D_c, alpha_D):  # type: ignore[no-untyped-def]
    """L = (D_c / D)^alpha_D, of large models stopped early."""
    return alpha_D, [log(D_c) - tokens]


@Law
def kaplan_flops(flops, *, C_c, alpha_C):  # type: ignore[no-untyped-def]
    """L = (C_c / C)^alpha_C, of the best model for a compute."""
    return alpha_C, [log(C_c) - flops]


@Law
def kaplan_parameters_steps(  # type: ignore[no-untyped-def]
    parameters, steps, *, N_c, S_c, alpha_N, alpha_S
):
    """L = (N_c / M)^alpha_N + (S_c / S_min)^alpha_S, steps at huge batches."""
    size = alpha_N * (log(N_c) - parameters)
    return 1.0, [size, alpha_S * (log(S_c) - steps)]


@partial(Law, target="value")
def power_of_flops(flops, *, scale, p):  # type: ignore[no-untyped-def]
    """Scale C^p: what is best for a compute."""
    return 1.0, [log(scale) + p * flops]


@partial(Law, target="tokens")
def power_of_parameters(parameters, *, scale, p):  # type: ignore[no-untyped-def]
    """Scale M^p: the tokens that a size needs."""
    return 1.0, [log(scale) + p * parameters]


@partial(Law, target="batch_size")
def critical_batch(loss, *, B_star, alpha_B):  # type: ignore[no-untyped-def]
    """B_crit = B_star / L^(1 / alpha_B)."""
    return 1.0, [log(B_star) - loss / alpha_B]


LAWS: Dict[str, Law] = {x.name: x for x in [*globals().values()] if isinstance(x, Law)}

#: Published by Hoffmann et al.
CHINCHILLA = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)

#: To 240 of their runs, read off their figure; all but the five of fewest tokens a
#: parameter. The published constants don't fit these.
CHINCHILLA_REFIT = chinchilla.of(E=1.8172, A=477.7, B=2142.0, a=0.3473, b=0.3671)

#: Kaplan et al.'s: L(N, D) of table 2, the other losses and the batch in tokens of
#: table 5, the "optimal" ones of table 6, whose batch is in tokens, too. "flops" is of
#: batches of one size, "minimum_flops" and table 6 of batches far below the critical
#: one. Fewer than the "least_tokens" overfit. Sizes are without embeddings; compute is
#: in FLOPs here, in PF-days there.
KAPLAN: Dict[str, Fit] = {
    "parameters": kaplan_parameters.of(N_c=8.8e13, alpha_N=0.076),
    "tokens": kaplan_tokens.of(D_c=5.4e13, alpha_D=0.095),
    "flops": kaplan_flops.of(C_c=1.6e7 * PF_DAY, alpha_C=0.057),
    "minimum_flops": kaplan_flops.of(C_c=3.1e8 * PF_DAY, alpha_C=0.050),
    "parameters_tokens": kaplan_parameters_tokens.of(
        N_c=6.4e13, alpha_N=0.076, D_c=1.8e13, alpha_D=0.103
    ),
    "parameters_steps": kaplan_parameters_steps.of(
        N_c=8.8e13, alpha_N=0.076, S_c=2.1e3, alpha_S=0.76
    ),
    "critical_batch": critical_batch.of(B_star=2.1e8, alpha_B=0.21),
    "optimal_parameters": power_of_flops.of(scale=1.3e9 * PF_DAY**-0.73, p=0.73),
    "optimal_batch_size": power_of_flops.of(scale=2.0e6 * PF_DAY**-0.24, p=0.24),
    "optimal_steps": power_of_flops.of(scale=5.4e3 * PF_DAY**-0.03, p=0.03),
    "optimal_tokens": power_of_flops.of(scale=2e10 * PF_DAY**-0.27, p=0.27),
    "least_tokens": power_of_parameters.of(scale=5e3, p=0.74),
}

#: L2 of the private paper, which tells its exponents (appendix E) and the best
#: configuration of 16 budgets with its loss (table 2), but no constants. The README of
#: its code (google-research, dp_scaling_laws) links a zip with all measurements, which
#: could not be reached when these were fitted to the 16 rows, in
#: ``benchmarks/planner_laws.py``; whoever has it plans by its results.csv
#: (``--measurements``). a is the paper's, b is fitted, and g and a2 are such that more
#: epsilon never plans a smaller model at equal compute (section 4.1). Examples are
#: counted in physical batches, 1,024 a step, as the losses were measured so.
PAPER = private_sigmoid.of(
    E=0.3597, A=4345.7, B=189.11, C=2.309e-05, a=0.47, b=0.3271, g=2.0, a2=-0.78
)


def private_rows(measurements: Any) -> Tuple[np.ndarray, Dict[str, np.ndarray]]:
    """
    Measurements as :data:`private` and :data:`private_sigmoid` need them: of several
    learning rates, the lowest loss at each size, number of steps and ratio.

    Returns:
        ``(loss, inputs)``; examples are steps times the physical batch

    Raises:
        Refused: if the batch size is unknown

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> grid = [1e4, 1e4], [10, 20], [0, 0.1], [5.0, 4.0]
        >>> loss, inputs = private_rows(Measurements(*grid, batch_size=32))
        >>> loss, inputs["examples"]
        (array([5., 4.]), array([320., 640.]))
    """
    m = measurements
    if not m.batch_size:
        raise Refused("These measurements have no batch_size.", parameter="batch_size")
    rows = np.argsort(m.loss, kind="stable")
    cells = np.stack([m.parameters[rows], m.steps[rows], m.ratio[rows]])
    rows = np.sort(rows[np.unique(cells, axis=1, return_index=True)[1]])
    m = m.select(rows)
    examples = m.steps * m.batch_size
    inputs = dict(parameters=m.parameters, examples=examples, ratio=m.ratio)
    return m.loss, inputs
