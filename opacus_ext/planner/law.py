"""Parametric laws in general, and how one is fitted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import numpy as np
from numpy.typing import ArrayLike

from opacus_ext.planner.fit import Fit, Values, positive, transformed
from opacus_ext.planner.huber import Descent, HuberProblem
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

# Stands for log 0 where gradients must stay finite: a power of it is 0 all the same.
_LOG_ZERO = -1e6
_NO_EFFECT = 1e-4  # of a parameter on log loss, nobody can measure less
_WIDE = 100.0  # an interval whose ends differ by this factor says little


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
        log_target: function of ``(parameters, inputs)``, both dicts of arrays (or
            :class:`~opacus_ext.planner.dual.Dual`) that broadcast, to the log of the
            target. Positive parameters come as logs, and inputs as theirs
        in_units: function of ``(parameters, means, mean)``: parameters of a law fitted
            in units in which inputs and target have geometric mean 1, to those in the
            user's units; ``means`` and ``mean`` are logs
        transforms: of inputs that the law takes otherwise than as logs
        data: the input that a compute budget pays for, given the model's size: tokens,
            examples or steps
        may_be_zero: inputs that may be 0
        best_size: function of ``(parameters, budget)`` to the model size of the lowest
            loss where size times data is the budget, if it has a closed form; None
            where these parameters have no such size

    Example:
        >>> from opacus_ext.planner.laws import CHINCHILLA, chinchilla
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
    log_target: Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
    in_units: Callable[[Values, Mapping[str, float], float], Values]
    transforms: Mapping[str, Callable[[np.ndarray], np.ndarray]] = field(
        default_factory=dict
    )
    data: Optional[str] = None
    may_be_zero: Tuple[str, ...] = ()
    best_size: Optional[Callable[[Mapping[str, float], float], Optional[float]]] = None

    @property
    def keys(self) -> List[str]:
        """The names of the parameters."""
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
            Refused: for inputs that the law doesn't have or that lack, values that
                are not positive and finite, lengths that differ, fewer rows than
                parameters, inputs that vary too little or only together, so that
                nothing tells the parameters apart, and settings out of range
        """
        logs, outcome = self._read(target, inputs)
        if not 0 < huber < math.inf:
            raise Refused(
                f"huber must be positive; got {huber}.",
                parameter="huber",
                remedy="Take 1e-3.",
            )
        if isinstance(starts, int) and starts < 1 or descents < 1 or bootstrap < 0:
            raise Refused(
                "starts and descents are at least 1 and bootstrap at least 0; got "
                f"{starts}, {descents} and {bootstrap}.",
                parameter="starts",
            )
        labels = np.arange(len(outcome)) if groups is None else np.asarray(groups)
        if labels.shape != outcome.shape:
            raise Refused(
                f"groups has shape {labels.shape}; there are {len(outcome)} rows.",
                parameter="groups",
                remedy="Give each row its label.",
            )
        units = [np.flatnonzero(labels == u) for u in np.unique(labels)]
        if bootstrap and len(units) < 2:
            raise Refused(
                "groups has one label: a bootstrap needs several.",
                parameter="groups",
                remedy="Measure more runs or set bootstrap=0.",
            )
        self._check_identifiable(logs, outcome)

        means = {n: float(x[x > _LOG_ZERO].mean()) for n, x in logs.items()}
        mean = float(outcome.mean())
        data = HuberProblem(self, logs, outcome, means, mean, huber)
        first = self._starts(starts, descents, data, means, mean)
        ends = sorted((data.descend(s) for s in first), key=lambda end: end.objective)
        best = data.descend(ends[0].x, tolerance=1e-14, evaluations=5000)
        close = ends[0].objective * 1.0001 + 1e-6 * huber
        agreed = sum(end.objective <= close for end in ends)

        samples, redrawn = None, 0
        if bootstrap:
            rng = np.random.default_rng(seed)
            warm = _distinct(ends, 2 * close)
            draws, redrawn = self._resamples(units, logs, outcome, bootstrap, rng)
            found = []
            for rows in progress(draws, "resampling"):
                drawn = {n: x[rows] for n, x in logs.items()}
                resampled = HuberProblem(self, drawn, outcome[rows], means, mean, huber)
                tries = [resampled.descend(w.x) for w in warm]
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
        return replace(fit, warnings=tuple(warnings))

    def of(self, **parameters: float) -> Fit:
        """
        The law with given parameters, such as published ones.

        Raises:
            Refused: for names that it doesn't have or that lack, and values that
                are not finite, or not positive where they must be

        Example:
            >>> from opacus_ext.planner.laws import chinchilla
            >>> law = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)
            >>> round(float(law.predict(parameters=70e9, tokens=1.4e12)), 3)
            1.937
        """
        names = [p.name for p in self.parameters]
        if set(parameters) != set(names):
            raise Refused(
                f"{self.name} has the parameters {names}; got {sorted(parameters)}.",
                remedy="Give each of them.",
            )
        for p in self.parameters:
            value = parameters[p.name]
            if not math.isfinite(value) or (p.positive and value <= 0):
                kind = "positive and finite" if p.positive else "finite"
                raise Refused(
                    f"{p.name} must be {kind}; got {value}.", parameter=p.name
                )
        return Fit(self, {n: float(parameters[n]) for n in names})

    def logs(self, inputs: Mapping[str, ArrayLike]) -> Dict[str, np.ndarray]:
        """The inputs as the law's function takes them, checked."""
        if set(inputs) != set(self.inputs):
            raise Refused(
                f"{self.name} is a law of {', '.join(self.inputs)}; got "
                f"{', '.join(inputs) or 'nothing'}.",
                remedy="Give each of its inputs, and no other.",
            )
        logs = {}
        for name in self.inputs:
            zero = name in self.may_be_zero
            values = positive(name, inputs[name], zero)
            with np.errstate(divide="ignore"):
                x = self.transforms.get(name, np.log)(values)
            logs[name] = np.maximum(x, _LOG_ZERO)
        return logs

    def _read(
        self, target: ArrayLike, inputs: Mapping[str, ArrayLike]
    ) -> Tuple[Dict[str, np.ndarray], np.ndarray]:
        outcome = positive(self.target, target)
        if outcome.ndim != 1:
            raise Refused(
                f"{self.target} must be a list of numbers; got an array of shape "
                f"{outcome.shape}.",
                parameter=self.target,
            )
        logs = self.logs(inputs)
        for name, x in logs.items():
            if x.shape not in ((), outcome.shape):
                raise Refused(
                    f"{name} has shape {x.shape}, {self.target} {outcome.shape}: one "
                    "row each is needed.",
                    parameter=name,
                )
            logs[name] = np.broadcast_to(x, outcome.shape)
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
        for name, least in self.inputs.items():
            distinct = len(np.unique(logs[name]))
            if distinct < least:
                raise Refused(
                    f"{name} has {distinct} distinct value{'s' * (distinct != 1)}; "
                    f"{self.name} can't be told from fewer than {least}.",
                    parameter=name,
                    remedy="Measure more or take a law without it.",
                )
        # A zero is somewhere below the others.
        columns = [
            np.where(x > _LOG_ZERO, x, x[x > _LOG_ZERO].min() - 1)
            for x in logs.values()
        ]
        matrix = np.stack([(x - x.mean()) / np.ptp(x) for x in columns])
        if np.linalg.matrix_rank(matrix, tol=1e-8 * len(outcome)) < len(matrix):
            raise Refused(
                f"{' and '.join(self.inputs)} vary only together: nothing tells their "
                "effects apart.",
                remedy=f"Measure {self.target} at other combinations.",
            )

    def _resamples(
        self,
        units: List[np.ndarray],
        logs: Mapping[str, np.ndarray],
        outcome: np.ndarray,
        bootstrap: int,
        rng: np.random.Generator,
    ) -> Tuple[List[np.ndarray], int]:
        """
        Rows of so many resamples that determine the parameters, and how many did not.
        """
        draws: List[np.ndarray] = []
        redrawn = 0
        while len(draws) < bootstrap:
            picked = rng.integers(len(units), size=len(units))
            rows = np.concatenate([units[i] for i in picked])
            drawn = {n: x[rows] for n, x in logs.items()}
            try:
                self._check_identifiable(drawn, outcome[rows])
                draws.append(rows)
                continue
            except Refused:
                redrawn += 1
            if redrawn > 20 * bootstrap:
                raise Refused(
                    f"Of {len(units)} groups, hardly a resample determines "
                    f"the {len(self.parameters)} parameters: there is too "
                    "little for a bootstrap.",
                    parameter="bootstrap",
                    remedy="Measure more or set bootstrap=0.",
                )
        return draws, redrawn

    def _starts(
        self,
        starts: Union[int, Sequence[Mapping[str, float]]],
        descents: int,
        data: HuberProblem,
        means: Mapping[str, float],
        mean: float,
    ) -> np.ndarray:
        if not isinstance(starts, int):
            given = [transformed(self.of(**start)) for start in starts]
            if not given:
                raise Refused(
                    "starts is empty.",
                    parameter="starts",
                    remedy="Give parameters to start from, or how many starts to make.",
                )
            minus = {n: -m for n, m in means.items()}
            inner = [self.in_units(p, minus, -mean) for p in given]
            return np.array([[p[key] for key in self.keys] for p in inner])
        from scipy.stats import qmc  # half a second, which only fits need

        low, high = np.array([p.starts for p in self.parameters]).T
        sobol = qmc.Sobol(len(low), scramble=False)
        # Without its first point, which is the lower corner.
        points = sobol.random(2 ** math.ceil(math.log2(starts + 1)))[1 : starts + 1]
        points = qmc.scale(points, low, high)
        return points[np.argsort(data.objectives(points), kind="stable")[:descents]]

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

    def _warnings(self, fit: Fit, data: HuberProblem, best: Descent) -> List[str]:
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


def _distinct(ends: Sequence[Descent], most: float) -> List[Descent]:
    """
    Of equally good ends only one, three at most with an objective below ``most``: a few
    worse ones may win in a resample.
    """
    found: List[Descent] = []
    for end in ends:
        if all(np.abs(end.x - other.x).max() > 1e-2 for other in found):
            found.append(end)
    return [end for end in found[:3] if end.objective < most]
