"""Parametric scaling laws: one way to fit, to bound and to use them all.

A :class:`Law` is a name, parameters, inputs and a function of them to the log of what
is predicted (a loss, mostly). :meth:`Law.fit` minimises the Huber loss of log
predictions with L-BFGS from many starts (Hoffmann et al., 2022, section D.2), and gives
a :class:`Fit`. Laws of this module, M being parameters, D tokens, N examples, s the
noise-batch ratio, C compute in FLOPs, S steps:

- :data:`chinchilla`: L = E + A / M^a + B / D^b
- :data:`private`, the paper's L1: L = E + A / M^a + B / N^b + C s^g
- :data:`private_sigmoid`, its L2: L = E + A / M^a + B / N^b + C s'^g / M^a2 with
  s' = sigmoid((log s + 8) / 1.6)
- :data:`kaplan_parameters`: L = (N_c / M)^alpha_N
- :data:`kaplan_tokens`: L = (D_c / D)^alpha_D
- :data:`kaplan_flops`: L = (C_c / C)^alpha_C
- :data:`kaplan_parameters_tokens`:
  L = ((N_c / M)^(alpha_N / alpha_D) + D_c / D)^alpha_D
- :data:`kaplan_parameters_steps`: L = (N_c / M)^alpha_N + (S_c / S_min)^alpha_S
- :data:`critical_batch`: B_crit = B_star / L^(1 / alpha_B)
- :data:`steps_to_loss`: S = S_min + E_min / B, of runs with several batches to one
  loss: (S / S_min - 1) (E / E_min - 1) = 1 with E = B S, and B_crit is E_min / S_min
- :data:`power`: y = scale C^exponent

Sources: Kaplan et al., "Scaling laws for neural language models" (2020); McCandlish et
al., "An empirical model of large-batch training" (2018); Hoffmann et al., "Training
compute-optimal large language models" (2022); "Scaling laws for differentially private
language models", appendix E. Published constants: :data:`KAPLAN`, :data:`CHINCHILLA`
and :data:`CHINCHILLA_REFIT`; those of the private laws were not published.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
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
    Union,
)

import numpy as np
import torch
from numpy.typing import ArrayLike
from scipy.optimize import minimize, minimize_scalar
from scipy.stats import qmc
from torch import Tensor

from opacus_ext.refused import Refused

#: FLOPs of a petaflop/s-day, the unit of compute of Kaplan et al.
PF_DAY = 1e15 * 24 * 3600

# Stands for log 0 where gradients must stay finite: a power of it is 0 all the same.
_LOG_ZERO = -1e6
_NO_EFFECT = 1e-4  # of a parameter on log loss, nobody can measure less
_WIDE = 100.0  # an interval whose ends differ by this factor says little

Values = Dict[str, Any]


@dataclass(frozen=True)
class Parameter:
    """
    A parameter of a law.

    Attributes:
        name: in the law's formula
        starts: range of the starts of a fit, of the log of a positive parameter; in
            units in which inputs and outcomes have geometric mean 1
        positive: fitted as a log, so that it can't be anything else
        usual: a fit outside of this range is reported as degenerate
    """

    name: str
    starts: Tuple[float, float]
    positive: bool = True
    usual: Tuple[float, float] = (0.0, math.inf)

    @property
    def key(self) -> str:
        """What the law's function finds it by: ``log_A`` for a positive ``A``."""
        return f"log_{self.name}" if self.positive else self.name


def _coefficient(name: str) -> Parameter:
    return Parameter(name, (math.log(0.02), math.log(1.0)))


def _exponent(name: str) -> Parameter:
    return Parameter(name, (0.05, 1.5), positive=False, usual=(0.01, 3.0))


@dataclass(frozen=True)
class Law:
    """
    A parametric law.

    Attributes:
        name: in :data:`LAWS`
        target: what it predicts
        inputs: names of its inputs, and the number of distinct values below which they
            can't tell the law's parameters apart
        parameters: see :class:`Parameter`
        log_target: function of ``(parameters, inputs)``, both dicts of float64 tensors
            that broadcast, to the log of the target. Positive parameters come as
            logs, and inputs as theirs
        in_units: function of ``(parameters, means, mean)``: parameters of a law fitted
            in units in which inputs and target have geometric mean 1, to those in the
            user's units; ``means`` and ``mean`` are logs
        transforms: of inputs that the law takes otherwise than as logs
        data: the input that a compute budget pays for, given the model's size: tokens,
            examples or steps
        may_be_zero: inputs that may be 0

    Example:
        >>> size = np.array([1e6, 1e7, 1e8, 1e6, 1e7, 1e8])
        >>> tokens = np.array([1e8, 1e8, 1e8, 1e10, 1e9, 4e9])
        >>> loss = CHINCHILLA.predict(parameters=size, tokens=tokens)
        >>> fit = chinchilla.fit(loss, parameters=size, tokens=tokens)
        >>> {name: round(value, 2) for name, value in fit.parameters.items()}
        {'E': 1.69, 'A': 406.4, 'B': 410.7, 'a': 0.34, 'b': 0.28}
    """

    name: str
    target: str
    inputs: Mapping[str, int]
    parameters: Tuple[Parameter, ...]
    log_target: Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor]
    in_units: Callable[[Values, Mapping[str, float], float], Values]
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )
    data: Optional[str] = None
    may_be_zero: Tuple[str, ...] = ()

    @property
    def keys(self) -> List[str]:
        return [p.key for p in self.parameters]

    def fit(
        self,
        target: ArrayLike,
        /,
        *,
        huber: float = 1e-3,
        starts: Union[int, Sequence[Mapping[str, float]]] = 256,
        descents: int = 24,
        bootstrap: int = 0,
        groups: Optional[ArrayLike] = None,
        seed: int = 0,
        **inputs: ArrayLike,
    ) -> Fit:
        """
        Fits the law to measurements.

        The objective is the sum over rows of Huber's loss of (log prediction - log
        target). As Huber's loss is nearly |error|, outliers weigh little.

        Args:
            target: what was measured (of most laws: losses), ``[rows]``
            huber: errors of log target beyond which Huber's loss is linear
            starts: that many, spread over the parameters' ranges, of which L-BFGS goes
                on from the best ``descents``; or starts of your own, dicts of
                parameters by name, each gone on from
            descents: see ``starts``
            bootstrap: refits to that many resamples, for intervals; 200 do for 90 %,
                1000 for 95 %
            groups: ``[rows]``, labels of what is resampled: rows of one run are no
                independent measurements, so give the runs' numbers. None: rows
            seed: of resampling
            **inputs: by name, ``[rows]`` or a number

        Returns:
            see :class:`Fit`; read its ``warnings``

        Raises:
            ValueError: for inputs that the law doesn't have or that lack, values that
                are not positive and finite, lengths that differ, fewer rows than
                parameters, inputs that vary too little or only together, so that
                nothing tells the parameters apart, and settings out of range
        """
        logs, outcome = self._read(target, inputs)
        if not 0 < huber < math.inf:
            raise Refused(f"huber must be positive; got {huber}.")
        if isinstance(starts, int) and starts < 1 or descents < 1 or bootstrap < 0:
            raise Refused(
                "starts and descents are at least 1 and bootstrap at least 0; got "
                f"{starts}, {descents} and {bootstrap}."
            )
        labels = np.arange(len(outcome)) if groups is None else np.asarray(groups)
        if labels.shape != outcome.shape:
            raise Refused(
                f"groups has shape {labels.shape}; there are {len(outcome)} rows."
            )
        units = [np.flatnonzero(labels == u) for u in np.unique(labels)]
        if bootstrap and len(units) < 2:
            raise Refused("groups has one label: a bootstrap needs several.")
        problem = self._identifiable(logs, outcome)
        if problem:
            raise Refused(problem)

        means = {n: float(x[x > _LOG_ZERO].mean()) for n, x in logs.items()}
        mean = float(outcome.mean())
        data = _Data(self, logs, outcome, means, mean, huber)
        first = self._starts(starts, descents, data, means, mean)
        ends = sorted((data.descend(s) for s in first), key=lambda end: end.objective)
        best = data.descend(ends[0].x, tolerance=1e-14, evaluations=5000)
        close = ends[0].objective * 1.0001 + 1e-6 * huber
        agreed = sum(end.objective <= close for end in ends)

        samples = None
        redrawn = 0
        if bootstrap:
            # Of equally good ends only one; a few worse ones may win in a resample.
            warm: List[_End] = []
            for end in ends:
                if all(np.abs(end.x - w.x).max() > 1e-2 for w in warm):
                    warm.append(end)
            warm = [w for w in warm[:3] if w.objective < 2 * close]
            rng = np.random.default_rng(seed)
            found = []
            while len(found) < bootstrap:
                picked = rng.integers(len(units), size=len(units))
                rows = np.concatenate([units[i] for i in picked])
                taken = {n: x[rows] for n, x in logs.items()}
                if self._identifiable(taken, outcome[rows]):
                    redrawn += 1
                    if redrawn > 20 * bootstrap:
                        raise Refused(
                            f"Of {len(units)} groups, hardly a resample determines "
                            f"the {len(self.parameters)} parameters: there is too "
                            "little for a bootstrap. Measure more or set bootstrap=0."
                        )
                    continue
                again = _Data(self, taken, outcome[rows], means, mean, huber)
                tries = [again.descend(w.x) for w in warm]
                found.append(min(tries, key=lambda end: end.objective).x)
            samples = self._natural(np.stack(found), means, mean)

        x = self._natural(best.x, means, mean)
        fit = Fit(
            law=self,
            parameters={n: float(v) for n, v in x.items()},
            objective=best.objective,
            rows=len(outcome),
            starts=len(ends),
            agreed=agreed,
            converged=best.converged,
            samples=samples,
        )
        warnings = self._warnings(fit, data, best)
        if bootstrap and len(units) < 10:
            warnings.append(
                f"Only {len(units)} groups were resampled: intervals are too narrow."
            )
        if redrawn > bootstrap / 10:
            warnings.append(
                f"{redrawn} resamples, beside the {bootstrap} taken, did not determine "
                "the parameters: intervals are too narrow."
            )
        return Fit(**{**fit.__dict__, "warnings": tuple(warnings)})

    def of(self, **parameters: float) -> Fit:
        """
        The law with given parameters, such as published ones.

        Raises:
            ValueError: for names that it doesn't have or that lack, and values that
                are not finite, or not positive where they must be

        Example:
            >>> law = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)
            >>> round(float(law.predict(parameters=70e9, tokens=1.4e12)), 3)
            1.937
        """
        names = [p.name for p in self.parameters]
        if set(parameters) != set(names):
            raise Refused(
                f"{self.name} has the parameters {names}; got {sorted(parameters)}."
            )
        for p in self.parameters:
            value = parameters[p.name]
            if not math.isfinite(value) or (p.positive and value <= 0):
                kind = "positive and finite" if p.positive else "finite"
                raise Refused(f"{p.name} must be {kind}; got {value}.")
        return Fit(self, {n: float(parameters[n]) for n in names})

    def _logs(self, inputs: Mapping[str, ArrayLike]) -> Dict[str, np.ndarray]:
        """The inputs as the law's function takes them, checked."""
        if set(inputs) != set(self.inputs):
            raise Refused(
                f"{self.name} is a law of {', '.join(self.inputs)}; got "
                f"{', '.join(inputs) or 'nothing'}."
            )
        logs = {}
        for name in self.inputs:
            zero = name in self.may_be_zero
            values = _positive(name, inputs[name], zero)
            with np.errstate(divide="ignore"):
                x = self.transforms.get(name, np.log)(values)
            logs[name] = np.maximum(x, _LOG_ZERO)
        return logs

    def _read(
        self, target: ArrayLike, inputs: Mapping[str, ArrayLike]
    ) -> Tuple[Dict[str, np.ndarray], np.ndarray]:
        outcome = _positive(self.target, target)
        if outcome.ndim != 1:
            raise Refused(
                f"{self.target} must be a list of numbers; got an array of shape "
                f"{outcome.shape}."
            )
        logs = self._logs(inputs)
        for name, x in logs.items():
            if x.shape not in ((), outcome.shape):
                raise Refused(
                    f"{name} has shape {x.shape}, {self.target} {outcome.shape}: one "
                    "row each is needed."
                )
            logs[name] = np.broadcast_to(x, outcome.shape)
        return logs, np.log(outcome)

    def _identifiable(self, logs: Mapping[str, np.ndarray], outcome: np.ndarray) -> str:
        """Why these rows can't determine the parameters; empty if they may."""
        if len(outcome) < len(self.parameters):
            return (
                f"{self.name} has {len(self.parameters)} parameters; {len(outcome)} "
                "rows can't determine them."
            )
        for name, least in self.inputs.items():
            distinct = len(np.unique(logs[name]))
            if distinct < least:
                return (
                    f"{name} has {distinct} distinct value{'s' * (distinct != 1)}; "
                    f"{self.name} can't be told from fewer than {least}. Measure more "
                    "or take a law without it."
                )
        # A zero is somewhere below the others.
        columns = [
            np.where(x > _LOG_ZERO, x, x[x > _LOG_ZERO].min() - 1)
            for x in logs.values()
        ]
        matrix = np.stack([(x - x.mean()) / np.ptp(x) for x in columns])
        if np.linalg.matrix_rank(matrix, tol=1e-8 * len(outcome)) < len(matrix):
            return (
                f"{' and '.join(self.inputs)} vary only together: nothing tells their "
                f"effects apart. Measure {self.target} at other combinations."
            )
        return ""

    def _starts(
        self,
        starts: Union[int, Sequence[Mapping[str, float]]],
        descents: int,
        data: _Data,
        means: Mapping[str, float],
        mean: float,
    ) -> np.ndarray:
        if not isinstance(starts, int):
            given = [_transformed(self.of(**start)) for start in starts]
            if not given:
                raise Refused("starts is empty.")
            minus = {n: -m for n, m in means.items()}
            inner = [self.in_units(p, minus, -mean) for p in given]
            return np.array([[p[key] for key in self.keys] for p in inner])
        low, high = np.array([p.starts for p in self.parameters]).T
        sobol = qmc.Sobol(len(low), scramble=False)
        # Without its first point, which is the lower corner.
        spread = sobol.random(2 ** math.ceil(math.log2(starts + 1)))[1 : starts + 1]
        spread = qmc.scale(spread, low, high)
        return spread[np.argsort(data.objectives(spread), kind="stable")[:descents]]

    def _natural(
        self, x: np.ndarray, means: Mapping[str, float], mean: float
    ) -> Dict[str, np.ndarray]:
        """Parameters of a fit, ``[*, parameters]``, in the user's units by name."""
        p = self.in_units(dict(zip(self.keys, np.moveaxis(x, -1, 0))), means, mean)
        # Of a degenerate fit a log may be any number; its parameter stays finite.
        return {
            q.name: np.exp(np.clip(p[q.key], -700, 700)) if q.positive else p[q.key]
            for q in self.parameters
        }

    def _warnings(self, fit: Fit, data: _Data, best: _End) -> List[str]:
        found = []
        if not best.converged:
            found.append("L-BFGS stopped before it converged.")
        if fit.starts > 1 and fit.agreed == 1:
            found.append(
                f"Only one of {fit.starts} starts led to this fit: take more starts."
            )
        jacobian = data.jacobian(best.x)
        effects = np.abs(jacobian).max(0)
        for p, effect in zip(self.parameters, effects):
            value = fit.parameters[p.name]
            if not p.usual[0] <= value <= p.usual[1]:
                found.append(
                    f"{p.name} = {value:.4g} is degenerate: outside of "
                    f"{p.usual[0]:g} to {p.usual[1]:g}."
                )
            if effect < _NO_EFFECT:
                found.append(
                    f"{p.name} = {value:.4g} has no effect on {self.target} at these "
                    "measurements: they don't determine it."
                )
        used = effects >= _NO_EFFECT
        if used.any():
            _, s, v = np.linalg.svd(jacobian[:, used] / effects[used])
            if len(s) < used.sum() or s[-1] < 1e-6 * s[0]:
                names = [p.name for p, u in zip(self.parameters, used) if u]
                mixed = [n for n, w in zip(names, v[-1]) if abs(w) > 0.1]
                found.append(
                    f"{', '.join(mixed)} can be traded for each other at these "
                    "measurements: only together are they determined."
                )
        if fit.samples is not None:
            for p in self.parameters:
                low, high = fit.intervals()[p.name]
                if p.positive and not high < _WIDE * low:
                    found.append(
                        f"{p.name} is hardly determined: from {low:.3g} to {high:.3g}."
                    )
                elif not p.positive and low <= 0 <= high:
                    found.append(
                        f"The sign of {p.name} is not determined: from {low:.3g} to "
                        f"{high:.3g}."
                    )
        return found


class _End(NamedTuple):
    x: np.ndarray
    objective: float
    converged: bool


class _Data:
    """The rows of a fit, in units in which their geometric means are 1."""

    def __init__(
        self,
        law: Law,
        logs: Mapping[str, np.ndarray],
        outcome: np.ndarray,
        means: Mapping[str, float],
        mean: float,
        huber: float,
    ) -> None:
        self.law, self.huber = law, huber
        self.logs = {n: torch.tensor(x - means[n]) for n, x in logs.items()}
        self.outcome = torch.tensor(outcome - mean)

    def log_target(self, x: Tensor) -> Tensor:
        """Of parameters ``[*, parameters]``: ``[*, rows]``."""
        values = dict(zip(self.law.keys, x.unsqueeze(-1).unbind(-2)))
        return self.law.log_target(values, self.logs)

    def objective(self, x: Tensor) -> Tensor:
        error = self.log_target(x) - self.outcome
        return torch.nn.functional.huber_loss(
            error, torch.zeros_like(error), reduction="none", delta=self.huber
        ).sum(-1)

    def objectives(self, x: np.ndarray) -> np.ndarray:
        """Of many starts ``[starts, parameters]``, in parts that fit in memory."""
        part = max(1, 10**6 // len(self.outcome))
        with torch.no_grad():
            found = [
                self.objective(torch.tensor(x[i : i + part]))
                for i in range(0, len(x), part)
            ]
        found = torch.cat(found).nan_to_num(math.inf, math.inf)
        return found.numpy()

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        """Of log target by parameters, ``[rows, parameters]``."""
        function = torch.autograd.functional.jacobian
        return function(self.log_target, torch.tensor(x), vectorize=True).numpy()

    def descend(
        self, start: np.ndarray, tolerance: float = 1e-10, evaluations: int = 500
    ) -> _End:
        def scaled(x: np.ndarray) -> Tuple[float, np.ndarray]:
            # In units of |error|: the objective itself is so small that L-BFGS would
            # take its first value for a minimum.
            point = torch.tensor(x, requires_grad=True)
            value = self.objective(point) / self.huber
            (slope,) = torch.autograd.grad(value, point)
            if not (torch.isfinite(value) and torch.isfinite(slope).all()):
                return math.inf, np.zeros_like(x)
            return value.item(), slope.numpy()

        options = dict(
            maxiter=evaluations,
            maxfun=evaluations,
            maxcor=20,
            ftol=tolerance,
            gtol=1e-8,
        )
        end = minimize(scaled, start, jac=True, method="L-BFGS-B", options=options)
        # At the limit of float64 no step may be found that is down.
        flat = np.abs(end.jac).max() < 1e-4 * len(self.outcome)
        converged = math.isfinite(end.fun) and bool(end.success or flat)
        return _End(end.x, float(end.fun) * self.huber, converged)


@dataclass(frozen=True)
class Fit:
    """
    A law with its parameters.

    Attributes:
        law: see :class:`Law`
        parameters: by name
        objective: sum of the Huber losses; None for parameters that were given
        rows: measurements that it was fitted to
        starts: descents made
        agreed: of these, how many ended where the best one did
        converged: whether the best one did
        samples: parameters of the refits of the bootstrap, by name, ``[bootstrap]``
        warnings: what is wrong with the fit, for people; read them
    """

    law: Law
    parameters: Dict[str, float]
    objective: Optional[float] = None
    rows: int = 0
    starts: int = 0
    agreed: int = 0
    converged: bool = True
    samples: Optional[Dict[str, np.ndarray]] = field(default=None, compare=False)
    warnings: Tuple[str, ...] = ()

    def predict(self, **inputs: ArrayLike) -> np.ndarray:
        """
        What the law predicts.

        Args:
            **inputs: the law's inputs by name; they broadcast

        Raises:
            ValueError: for inputs that the law doesn't have or that lack, and values
                that are not positive and finite (the noise-batch ratio may be 0)

        Example:
            >>> KAPLAN["parameters"].predict(parameters=[1e6, 1e9]).round(2)
            array([4.02, 2.38])
        """
        return self._predict(_transformed(self), inputs)

    def _predict(self, values: Values, inputs: Mapping[str, ArrayLike]) -> np.ndarray:
        logs = {n: torch.tensor(x) for n, x in self.law._logs(inputs).items()}
        try:
            torch.broadcast_shapes(*(x.shape for x in logs.values()))
        except RuntimeError as e:
            shapes = ", ".join(f"{n} {tuple(x.shape)}" for n, x in logs.items())
            raise Refused(f"Shapes don't broadcast: {shapes}.") from e
        return self.law.log_target(values, logs).exp().numpy()

    def intervals(self, level: float = 0.95) -> Dict[str, Tuple[float, float]]:
        """
        Of each parameter, between percentiles of the bootstrap.

        Raises:
            ValueError: if the fit was made without a bootstrap, and for a level that
                is not between 0 and 1
        """
        ends = self._percentiles(level)
        return {
            name: (float(low), float(high))
            for name, x in self._samples().items()
            for low, high in [np.percentile(x, ends)]
        }

    def predict_interval(
        self, level: float = 0.95, **inputs: ArrayLike
    ) -> Tuple[np.ndarray, np.ndarray]:
        """
        Of a prediction: of the law's value, between percentiles of the bootstrap, not
        of a single new measurement, which has its own noise.

        Returns:
            lower and upper ends, of the shape of :meth:`predict`

        Raises:
            ValueError: as :meth:`intervals` and :meth:`predict`
        """
        ends = self._percentiles(level)
        samples = self._samples()
        rank = np.broadcast(*(np.empty(np.shape(x)) for x in inputs.values())).ndim
        shape = (-1,) + (1,) * rank
        values = _transformed(
            Fit(self.law, {n: x.reshape(shape) for n, x in samples.items()})
        )
        low, high = np.percentile(self._predict(values, inputs), ends, axis=0)
        return low, high

    def _samples(self) -> Dict[str, np.ndarray]:
        if self.samples is None:
            raise Refused(
                "There are no intervals without a bootstrap: fit with bootstrap=200."
            )
        return self.samples

    @staticmethod
    def _percentiles(level: float) -> Tuple[float, float]:
        if not 0 < level < 1:
            raise Refused(f"level must be between 0 and 1; got {level}.")
        return 50 * (1 - level), 50 * (1 + level)

    def to_dict(self) -> Dict[str, Any]:
        """As plain numbers, lists and strings, for JSON."""
        plain = {**self.__dict__, "law": self.law.name, "warnings": list(self.warnings)}
        if self.samples is not None:
            plain["samples"] = {n: x.tolist() for n, x in self.samples.items()}
        return plain

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Fit:
        """
        From what :meth:`to_dict` gave.

        Raises:
            ValueError: for a law that isn't one of :data:`LAWS`, and other parameters
                than it has

        Example:
            >>> Fit.from_dict(CHINCHILLA.to_dict()) == CHINCHILLA
            True
        """
        if plain.get("law") not in LAWS:
            raise Refused(f"law must be one of {sorted(LAWS)}; got {plain.get('law')}.")
        law = LAWS[plain["law"]]
        law.of(**plain["parameters"])
        samples = plain.get("samples")
        if samples is not None:
            samples = {n: np.asarray(x, dtype=float) for n, x in samples.items()}
        rest = {"warnings": tuple(plain.get("warnings", ())), "samples": samples}
        return cls(**{**plain, "law": law, **rest})

    def compute_optimal(
        self,
        flops: float,
        *,
        tokens_per_step: float = 1.0,
        between: Tuple[float, float] = (1e2, 1e14),
        **inputs: float,
    ) -> Optimum:
        """
        The model size of the lowest loss for a compute budget, C = 6 M times tokens.

        The law's data are then known: tokens are C / (6 M), examples that divided by
        the tokens of an example, and steps by the tokens of a batch. Closed for
        :data:`chinchilla` (Hoffmann et al., equation 4), by
        ``scipy.optimize.minimize_scalar`` for others (appendix E of the private paper).

        Args:
            flops: C
            tokens_per_step: tokens in a unit of the law's data: 1 for laws of tokens,
                S, the tokens of an example, for laws of examples, and the tokens of a
                batch for laws of steps
            between: sizes to look between, where the optimum isn't closed
            **inputs: the law's other inputs, such as ``ratio``

        Raises:
            ValueError: if the law has no size and data, for values that aren't positive
                and finite, and if there is no best size between these

        Example:
            >>> best = CHINCHILLA.compute_optimal(5.76e23)  # Gopher's
            >>> print(f"{best.parameters:.3g} {best.data:.3g} {best.loss:.3f}")
            3.22e+10 2.98e+12 1.931
        """
        law = self.law
        if law.data is None or "parameters" not in law.inputs:
            raise Refused(f"{law.name} has no model size to choose for a budget.")
        _positive("flops", flops)
        _positive("tokens_per_step", tokens_per_step)
        budget = flops / (6 * tokens_per_step)  # = parameters times data
        p = self.parameters
        if law is chinchilla and min(p["a"], p["b"]) > 0:
            total = p["a"] + p["b"]
            g = (p["a"] * p["A"] / (p["b"] * p["B"])) ** (1 / total)
            size = g * budget ** (p["b"] / total)
        else:
            low, high = np.log(_positive("between", between))
            scan = np.linspace(low, high, 300)

            def loss(log_size: Any) -> np.ndarray:
                given = {"parameters": np.exp(log_size), **inputs}
                given[law.data] = budget / given["parameters"]
                return np.log(self.predict(**given))

            i = int(np.argmin(loss(scan)))
            if i in (0, len(scan) - 1):
                raise Refused(
                    f"{law.name} has no best size between {between[0]:g} and "
                    f"{between[1]:g} at {flops:g} FLOPs: its loss is lowest at "
                    f"{np.exp(scan[i]):g}."
                )
            found = minimize_scalar(
                lambda x: float(loss(x)),
                bounds=(scan[i - 1], scan[i + 1]),
                method="bounded",
                options={"xatol": 1e-10},
            )
            size = math.exp(found.x)
        given = {**inputs, "parameters": size, law.data: budget / size}
        return Optimum(size, budget / size, float(self.predict(**given)))

    def __str__(self) -> str:
        values = ", ".join(f"{n} {v:.5g}" for n, v in self.parameters.items())
        return "\n".join([f"{self.law.name}: {values}", *self.warnings])


class Optimum(NamedTuple):
    """Model size and data of the lowest loss for a compute budget, and that loss."""

    parameters: float
    data: float
    loss: float


def _transformed(fit: Fit) -> Values:
    """Parameters as a law's function takes them."""
    with np.errstate(divide="ignore"):
        return {
            p.key: torch.as_tensor(
                (
                    np.log(fit.parameters[p.name])
                    if p.positive
                    else fit.parameters[p.name]
                ),
                dtype=torch.float64,
            )
            for p in fit.law.parameters
        }


def _positive(name: str, values: ArrayLike, zero: bool = False) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.size == 0:
        raise Refused(f"{name} is empty.")
    bad = ~np.isfinite(array) | (array < 0) | ((array == 0) & (not zero))
    if bad.any():
        kind = "0 or more" if zero else "positive"
        raise Refused(f"{name} must be {kind} and finite; got {array[bad].flat[0]}.")
    return array


def _exp(x: Any) -> Any:
    return x.exp() if isinstance(x, Tensor) else np.exp(x)


def _log_sum(*logs: Tensor) -> Tensor:
    return torch.logsumexp(torch.stack(torch.broadcast_tensors(*logs)), 0)


Power = Union[str, float]


def _sum_of_powers(
    name: str,
    terms: Mapping[str, Mapping[str, Tuple[int, Power]]],
    *,
    target: str = "loss",
    exponents: Mapping[str, Parameter] = {},
    **options: Any,
) -> Law:
    """
    A law that is a sum of terms, each a coefficient times powers of inputs.

    Args:
        terms: by coefficient: the powers as input -> (sign, exponent), the exponent a
            parameter's name or a number
        exponents: parameters that are not ordinary exponents
    """
    powers = [
        (n, e) for t in terms.values() for n, (_, e) in t.items() if isinstance(e, str)
    ]
    constant = any(not t for t in terms.values())
    inputs = {n: 2 for t in terms.values() for n in t}
    # c, a and the constant of c x^-a + constant need three values of x.
    inputs.update({n: 3 for n, _ in powers if constant})
    names = list(dict.fromkeys(e for _, e in powers))

    def log_term(p: Mapping[str, Any], x: Mapping[str, Any], coefficient: str) -> Any:
        value = p[f"log_{coefficient}"]
        for n, (sign, e) in terms[coefficient].items():
            value = value + sign * (p[e] if isinstance(e, str) else e) * x[n]
        return value

    def log_target(p: Mapping[str, Any], x: Mapping[str, Any]) -> Tensor:
        return _log_sum(*(log_term(p, x, c) for c in terms))

    def in_units(p: Values, means: Mapping[str, float], mean: float) -> Values:
        minus = {n: -m for n, m in means.items()}
        return {**p, **{f"log_{c}": mean + log_term(p, minus, c) for c in terms}}

    return Law(
        name,
        target,
        inputs,
        (
            *(_coefficient(c) for c in terms),
            *(exponents.get(n, _exponent(n)) for n in names),
        ),
        log_target,
        in_units,
        **options,
    )


def _kaplan(
    name: str,
    scales: Mapping[str, Tuple[str, str]],
    log_target: Callable[[Mapping[str, Any], Mapping[str, Any]], Tensor],
    **options: Any,
) -> Law:
    """
    A law of terms (scale / input)^alpha.

    Args:
        scales: by input: the names of its scale and its exponent
    """

    def in_units(p: Values, means: Mapping[str, float], mean: float) -> Values:
        moved = {
            f"log_{c}": p[f"log_{c}"] + means[n] + mean / _exp(p[f"log_{alpha}"])
            for n, (c, alpha) in scales.items()
        }
        return {**p, **moved}

    parameters = [
        # The share of its term in the loss is (scale / 1)^alpha, at most 1.
        *(Parameter(c, (-6.0, 0.5)) for c, _ in scales.values()),
        *(
            Parameter(a, (math.log(0.02), math.log(1.5)), usual=(0.005, 3.0))
            for _, a in scales.values()
        ),
    ]
    inputs = {n: 2 for n in scales}
    return Law(name, "loss", inputs, tuple(parameters), log_target, in_units, **options)


chinchilla = _sum_of_powers(
    "chinchilla",
    {"E": {}, "A": {"parameters": (-1, "a")}, "B": {"tokens": (-1, "b")}},
    data="tokens",
)

private = _sum_of_powers(
    "private",
    {
        "E": {},
        "A": {"parameters": (-1, "a")},
        "B": {"examples": (-1, "b")},
        "C": {"ratio": (1, "g")},
    },
    data="examples",
    may_be_zero=("ratio",),
)


def _squash(ratio: np.ndarray) -> np.ndarray:
    """
    log s' with s' = sigmoid((log s + 8) / 1.6), equation 4 of the private paper. It
    chose the two numbers by eye for its ratios, 2^-23 to 2^-6; where s is far above
    e^-8, s' is 1 and the law degenerates.
    """
    return -np.logaddexp(0.0, -(np.log(ratio) + 8) / 1.6)


private_sigmoid = _sum_of_powers(
    "private_sigmoid",
    {
        "E": {},
        "A": {"parameters": (-1, "a")},
        "B": {"examples": (-1, "b")},
        "C": {"ratio": (1, "g"), "parameters": (-1, "a2")},
    },
    # Published: -0.07, noise hurts a larger model more.
    exponents={"a2": Parameter("a2", (-0.3, 0.3), False, usual=(-2.0, 2.0))},
    transforms={"ratio": _squash},
    data="examples",
    may_be_zero=("ratio",),
)

steps_to_loss = _sum_of_powers(
    "steps_to_loss",
    {"S_min": {}, "E_min": {"batch_size": (-1, 1.0)}},
    target="steps",
)

power = _sum_of_powers(
    "power",
    {"scale": {"flops": (1, "exponent")}},
    target="value",
    exponents={"exponent": Parameter("exponent", (-1.0, 1.0), False, usual=(-5, 5))},
)

kaplan_parameters = _kaplan(
    "kaplan_parameters",
    {"parameters": ("N_c", "alpha_N")},
    lambda p, x: p["log_alpha_N"].exp() * (p["log_N_c"] - x["parameters"]),
)
kaplan_tokens = _kaplan(
    "kaplan_tokens",
    {"tokens": ("D_c", "alpha_D")},
    lambda p, x: p["log_alpha_D"].exp() * (p["log_D_c"] - x["tokens"]),
)
kaplan_flops = _kaplan(
    "kaplan_flops",
    {"flops": ("C_c", "alpha_C")},
    lambda p, x: p["log_alpha_C"].exp() * (p["log_C_c"] - x["flops"]),
)


def _parameters_tokens(p: Mapping[str, Any], x: Mapping[str, Any]) -> Tensor:
    ratio = (p["log_alpha_N"] - p["log_alpha_D"]).exp()
    inner = _log_sum(
        ratio * (p["log_N_c"] - x["parameters"]), p["log_D_c"] - x["tokens"]
    )
    return p["log_alpha_D"].exp() * inner


kaplan_parameters_tokens = _kaplan(
    "kaplan_parameters_tokens",
    {"parameters": ("N_c", "alpha_N"), "tokens": ("D_c", "alpha_D")},
    _parameters_tokens,
    data="tokens",
)
kaplan_parameters_steps = _kaplan(
    "kaplan_parameters_steps",
    {"parameters": ("N_c", "alpha_N"), "steps": ("S_c", "alpha_S")},
    lambda p, x: _log_sum(
        p["log_alpha_N"].exp() * (p["log_N_c"] - x["parameters"]),
        p["log_alpha_S"].exp() * (p["log_S_c"] - x["steps"]),
    ),
    data="steps",
)

critical_batch = Law(
    "critical_batch",
    "batch_size",
    {"loss": 2},
    (
        Parameter("B_star", (-3.0, 3.0)),
        Parameter("alpha_B", (math.log(0.05), math.log(1.0)), usual=(0.01, 5.0)),
    ),
    lambda p, x: p["log_B_star"] - x["loss"] * (-p["log_alpha_B"]).exp(),
    lambda p, means, mean: {
        **p,
        "log_B_star": p["log_B_star"] + mean + means["loss"] / _exp(p["log_alpha_B"]),
    },
)

#: The laws by name.
LAWS: Dict[str, Law] = {
    law.name: law
    for law in (
        chinchilla,
        private,
        private_sigmoid,
        kaplan_parameters,
        kaplan_tokens,
        kaplan_flops,
        kaplan_parameters_tokens,
        kaplan_parameters_steps,
        critical_batch,
        steps_to_loss,
        power,
    )
}

#: Published by Hoffmann et al.
CHINCHILLA = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)

#: To 240 of their runs, read off their figure; all but the five of fewest tokens a
#: parameter. The published constants don't fit these.
CHINCHILLA_REFIT = chinchilla.of(E=1.8172, A=477.7, B=2142.0, a=0.3473, b=0.3671)

#: Kaplan et al.'s, with compute in FLOPs (theirs is in PF-days) and batches in tokens.
#: Of table 5, but for ``parameters_tokens``, which is of table 2; ``flops`` is with
#: batches of one size, ``minimum_flops`` with batches far below the critical one. The
#: last four, of table 6, are what is best for such a minimum.
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
    "optimal_parameters": power.of(scale=1.3e9 * PF_DAY**-0.73, exponent=0.73),
    "optimal_batch_size": power.of(scale=2.0e6 * PF_DAY**-0.24, exponent=0.24),
    "optimal_steps": power.of(scale=5.4e3 * PF_DAY**-0.03, exponent=0.03),
    "optimal_tokens": power.of(scale=2e10 * PF_DAY**-0.27, exponent=0.27),
}


def minimum_steps(
    steps: ArrayLike, batch_size: ArrayLike, critical: ArrayLike
) -> np.ndarray:
    """
    S_min, the steps that very large batches would have needed: S / (1 + B_crit / B).

    Source: Kaplan et al., equation 5.4. Before fitting :data:`kaplan_parameters_steps`,
    adjust the steps so, with the critical batch at each loss.

    Args:
        steps: S
        batch_size: B, in the unit of ``critical``
        critical: B_crit at the loss reached, as :data:`critical_batch` predicts it

    Raises:
        ValueError: for values that are not positive and finite

    Example:
        >>> print(minimum_steps(1000, batch_size=512, critical=512))
        500.0
    """
    steps, batch_size = _positive("steps", steps), _positive("batch_size", batch_size)
    return steps / (1 + _positive("critical", critical) / batch_size)


def minimum_flops(
    flops: ArrayLike, batch_size: ArrayLike, critical: ArrayLike
) -> np.ndarray:
    """
    C_min, the compute that very small batches would have needed: C / (1 + B / B_crit).

    Source: Kaplan et al., equation 5.5. Arguments as of :func:`minimum_steps`.

    Raises:
        ValueError: for values that are not positive and finite

    Example:
        >>> print(minimum_flops(1e18, batch_size=512, critical=512))
        5e+17
    """
    flops, batch_size = _positive("flops", flops), _positive("batch_size", batch_size)
    return flops / (1 + batch_size / _positive("critical", critical))


def loss_at_batch(
    parameters: ArrayLike,
    steps: ArrayLike,
    batch_size: ArrayLike,
    law: Optional[Fit] = None,
    critical: Optional[Fit] = None,
) -> np.ndarray:
    """
    The loss of Kaplan's L(N, S_min) after S steps with a batch of B.

    S_min depends on the critical batch and that on the loss: the loss is where both
    agree. The predicted loss falls as S_min grows, and S_min grows with the loss, so
    there is one such loss; it is found by bisection.

    Args:
        parameters: M
        steps: S
        batch_size: B, in tokens as Kaplan's constants are; the three broadcast
        law: a fit of :data:`kaplan_parameters_steps`; Kaplan's by default
        critical: a fit of :data:`critical_batch`; Kaplan's by default

    Raises:
        ValueError: for values that are not positive and finite

    Example:
        >>> print(loss_at_batch(1e9, 1e5, [1e4, 1e6, 1e9]).round(3))
        [3.495 2.516 2.429]
    """
    law = law or KAPLAN["parameters_steps"]
    critical = critical or KAPLAN["critical_batch"]
    m, s, b = np.broadcast_arrays(
        _positive("parameters", parameters),
        _positive("steps", steps),
        _positive("batch_size", batch_size),
    )

    def predicted(log_loss: np.ndarray) -> np.ndarray:
        at = critical.predict(loss=np.exp(log_loss))
        return np.log(law.predict(parameters=m, steps=minimum_steps(s, b, at)))

    low = np.log(law.predict(parameters=m, steps=s))  # as if batches were very large
    high = low + 1.0
    while (above := predicted(high) > high).any():
        high = np.where(above, high + 1.0, high)
    for _ in range(60):
        middle = (low + high) / 2
        above = predicted(middle) > middle
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.exp(high)


def private_rows(
    measurements: Any,
    *,
    batch_size: Optional[float] = None,
    least_steps: float = 0.0,
    least_ratio: float = 0.0,
    highest_loss: float = math.inf,
) -> Tuple[np.ndarray, Dict[str, np.ndarray], np.ndarray]:
    """
    Measurements as :data:`private` and :data:`private_sigmoid` take them.

    Appendix E of the private paper fits only to rows of more than some steps, ratios
    above some and losses below some, these laws being wrong beyond; the numbers are not
    in the text that we have, so none is left out by default. Of several learning rates,
    the lowest loss at a size, number of steps and ratio is taken.

    Args:
        measurements: arrays ``parameters``, ``steps``, ``ratio``, ``loss``, ``run``
        batch_size: the physical one, examples being T times B; by default the
            measurements' own
        least_steps: rows of fewer are left out
        least_ratio: rows of lower ones are left out, noise-free ones if it is above 0
        highest_loss: rows of higher ones are left out

    Returns:
        ``(loss, inputs, groups)``

    Raises:
        ValueError: if no row is left, or the batch size unknown

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> runs = Measurements([1e4, 1e4], [10, 20], [0, 0.1], [5.0, 4.0])
        >>> loss, inputs, groups = private_rows(runs, batch_size=32, least_steps=20)
        >>> loss, inputs["examples"]
        (array([4.]), array([640.]))
    """
    batch_size = batch_size or getattr(measurements, "batch_size", 0)
    if not batch_size:
        raise Refused("These measurements don't tell their batch_size: pass it.")
    _positive("batch_size", batch_size)
    m = measurements
    keep = (
        (m.steps >= least_steps) & (m.ratio >= least_ratio) & (m.loss <= highest_loss)
    )
    if not keep.any():
        raise Refused(
            f"No row has {least_steps:g} steps or more, a ratio of {least_ratio:g} or "
            f"more and a loss of {highest_loss:g} or less."
        )
    rows = np.flatnonzero(keep)
    rows = rows[np.argsort(m.loss[rows], kind="stable")]
    key = np.stack([m.parameters[rows], m.steps[rows], m.ratio[rows]])
    rows = np.sort(rows[np.unique(key, axis=1, return_index=True)[1]])
    inputs = {
        "parameters": m.parameters[rows],
        "examples": m.steps[rows] * batch_size,
        "ratio": m.ratio[rows],
    }
    return m.loss[rows], inputs, m.run[rows]
