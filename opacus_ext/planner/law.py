"""A parametric scaling law with its parameters: predictions and intervals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Dict, List, Optional, Tuple

import numpy as np
from numpy.typing import ArrayLike

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.form import (
    Descent,
    Form,
    Objective,
    broadcast,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

_NO_EFFECT = 1e-4  # of a parameter on log loss: nobody can measure less
_WIDE = 100.0  # an interval whose ends differ by this factor says little


class Law(Form):
    """A parametric law: its formula (:class:`Form`), and how it is fitted."""

    def fit(
        self,
        target: ArrayLike,
        /,
        *,
        huber: float = 1e-3,
        starts: int = 256,
        descents: int = 24,
        bootstrap: int = 0,
        groups: Optional[ArrayLike] = None,
        seed: int = 0,
        **inputs: ArrayLike,
    ) -> Fit:
        """
        Fits the law to measurements: minimizes the sum over rows of Huber's loss of
        (log prediction - log target), in which outliers weigh little, with L-BFGS.

        Args:
            target: what was measured (a loss, for most laws), ``[rows]``
            huber: error of log target beyond which Huber's loss is linear
            starts: number of starts, spread over the parameters' ranges
            descents: number of the best starts from which L-BFGS descends
            bootstrap: number of refits to resamples, for intervals; 200 suffice for
                90 %, 1000 for 95 %
            groups: labels of what is resampled, ``[rows]``: rows of one run are no
                independent measurements, so pass the runs' numbers. None: rows
            seed: of resampling
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
        logs, outcome = self.read(target, inputs)
        checked("huber", huber, above=0)
        for name, value in (("starts", starts), ("descents", descents)):
            checked(name, value, at_least=1)
        checked("bootstrap", bootstrap, at_least=0)
        labels = np.arange(len(outcome)) if groups is None else np.asarray(groups)
        units = [np.flatnonzero(labels == u) for u in np.unique(labels)]
        if labels.shape != outcome.shape or bootstrap and len(units) < 2:
            raise Refused(
                f"groups has shape {labels.shape} and {len(units)} different labels; "
                f"there are {len(outcome)} rows.",
                parameter="groups",
                remedy="Pass a label for each row, several for a bootstrap.",
            )
        self.check_identifiable(logs, outcome)
        objective = Objective(self, logs, outcome, huber)
        ends = objective.descend_from(starts, descents)
        best = objective.descend(ends[0].x, tolerance=1e-14, evaluations=5000)
        close = ends[0].objective * 1.0001 + 1e-6 * huber
        fit = Fit(
            law=self,
            parameters={n: float(v) for n, v in objective.natural(best.x).items()},
            objective=best.objective,
            rows=len(outcome),
            starts=len(ends),
            agreed=sum(end.objective <= close for end in ends),
            converged=best.converged,
        )
        warnings: List[str] = []
        if bootstrap:
            warm = _distinct(ends, 2 * close)
            samples = self._refits(objective, units, warm, bootstrap, seed)
            fit = replace(fit, samples=objective.natural(samples))
            if len(units) < 10:
                warnings.append(
                    f"Only {len(units)} groups were resampled: intervals are too "
                    "narrow."
                )
        found = _warnings(fit, objective.slopes(best.x)[1].T)
        return replace(fit, warnings=(*found, *warnings))

    def _refits(
        self,
        objective: Objective,
        units: List[np.ndarray],
        warm: List[Descent],
        bootstrap: int,
        seed: int,
    ) -> np.ndarray:
        """Fits to resamples that determine the parameters, ``[bootstrap, *]``."""
        rng, found = np.random.default_rng(seed), []
        for _ in progress(range(20 * bootstrap), "resampling"):
            picked = rng.integers(len(units), size=len(units))
            rows = np.concatenate([units[i] for i in picked])
            resample = objective.at(rows)
            try:
                self.check_identifiable(resample.logs, resample.outcome)
            except Refused:
                continue
            ends = [resample.descend(end.x) for end in warm]
            found.append(min(ends, key=lambda end: end.objective).x)
            if len(found) == bootstrap:
                return np.stack(found)
        raise Refused(
            f"Hardly a resample of {len(units)} groups determines the parameters.",
            parameter="bootstrap",
            remedy="Measure more or set bootstrap=0.",
        )

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
        The law's prediction.

        Args:
            **inputs: the law's inputs by name; they broadcast

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

    def intervals(self, level: float = 0.95) -> Dict[str, Tuple[float, float]]:
        """
        Percentiles of each parameter over the bootstrap, lower and upper.

        Raises:
            Refused: if the fit was made without a bootstrap, and for a level that
                is not between 0 and 1
        """
        if self.samples is None:
            raise Refused(
                "There are no intervals without a bootstrap.",
                parameter="bootstrap",
                remedy="Fit with bootstrap=200.",
            )
        checked("level", level, above=0, below=1)
        ends = 50 * (1 - level), 50 * (1 + level)
        found = {}
        for name, x in self.samples.items():
            low, high = np.percentile(x, ends)
            found[name] = float(low), float(high)
        return found

    def __str__(self) -> str:
        values = ", ".join(f"{n} {v:.5g}" for n, v in self.parameters.items())
        return "\n".join([f"{self.law.name}: {values}", *self.warnings])


def _warnings(fit: Fit, jacobian: np.ndarray) -> List[str]:
    """Sentences on the weaknesses of a fit."""
    found, parameters = [], fit.law.parameters
    if not fit.converged:
        found.append("L-BFGS stopped before it converged.")
    if fit.starts > 1 and fit.agreed == 1:
        found.append(
            f"Only one of {fit.starts} starts led to this fit: use more starts."
        )
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
    for p in parameters if fit.samples is not None else ():
        low, high = fit.intervals()[p.name]
        if p.positive and not high < _WIDE * low:
            found.append(
                f"{p.name} is hardly determined: from {low:.3g} to {high:.3g}."
            )
        elif not p.positive and low <= 0 <= high:
            found.append(
                f"The sign of {p.name} is not determined: from {low:.3g} to {high:.3g}."
            )
    return found


def _distinct(ends: List[Descent], most: float) -> List[Descent]:
    """
    Up to three ends that differ, with an objective below ``most``: a slightly worse one
    may win in a resample.
    """
    found: List[Descent] = []
    for end in ends:
        if all(np.abs(end.x - other.x).max() > 1e-2 for other in found):
            found.append(end)
    return [end for end in found[:3] if end.objective < most]
