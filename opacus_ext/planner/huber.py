"""The objective of a fit, Huber's loss of log predictions, and its minimisation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Mapping, NamedTuple, Tuple

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

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
    ) -> Descent:
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
        return Descent(end.x, float(end.fun) * self.huber, converged)
