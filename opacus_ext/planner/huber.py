"""The objective of a fit, Huber's loss of log predictions, and its minimization."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Tuple

import numpy as np
from scipy.optimize import minimize

from opacus_ext.planner.dual import Dual

if TYPE_CHECKING:
    from opacus_ext.planner.law import Law


class Descent(NamedTuple):
    x: np.ndarray
    objective: float
    converged: bool


class HuberProblem:
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
        self.logs = {n: x - means[n] for n, x in logs.items()}
        self.outcome = outcome - mean

    def _log_target(self, values: Any) -> Any:
        return self.law.log_target(dict(zip(self.law.keys, values)), self.logs)

    def _huber(self, error: np.ndarray) -> np.ndarray:
        size, limit = np.abs(error), self.huber
        near = np.minimum(size, limit)
        return near * (size - near / 2)

    def objectives(self, x: np.ndarray) -> np.ndarray:
        """Of many starts ``[starts, parameters]``, in parts that fit in memory."""
        part = max(1, 10**6 // len(self.outcome))
        found = []
        with np.errstate(all="ignore"):
            for i in range(0, len(x), part):
                error = self._log_target(x[i : i + part].T[..., None]) - self.outcome
                found.append(self._huber(error).sum(-1))
        return np.nan_to_num(np.concatenate(found), nan=math.inf)

    def _dual(self, x: np.ndarray) -> Dual:
        slopes = np.eye(len(x))[..., None]
        with np.errstate(all="ignore"):  # of a start that is far off
            return self._log_target([Dual(v[None], s) for v, s in zip(x, slopes)])

    def jacobian(self, x: np.ndarray) -> np.ndarray:
        """Of log target by parameters, ``[rows, parameters]``."""
        slope = self._dual(x).slope
        return np.broadcast_to(slope, (len(x), len(self.outcome))).T

    def descend(
        self, start: np.ndarray, tolerance: float = 1e-10, evaluations: int = 500
    ) -> Descent:
        def scaled(x: np.ndarray) -> Tuple[float, np.ndarray]:
            # In units of |error|: the objective itself is so small that L-BFGS would
            # take its first value for a minimum.
            found = self._dual(x)
            error = found.value - self.outcome
            value = self._huber(error).sum() / self.huber
            slope = found.slope @ (np.clip(error, -self.huber, self.huber) / self.huber)
            if not (np.isfinite(value) and np.isfinite(slope).all()):
                return math.inf, np.zeros_like(x)
            return float(value), slope

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
        return Descent(end.x, float(end.fun) * self.huber, converged)
