"""What a plan expects of a configuration: a law of the loss, or a bound on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Callable, Optional, Tuple

import numpy as np

from opacus_ext.planner.laws import Fit
from opacus_ext.planner.surface import Surface

PAPER_STEPS = 1e3, 8.2e6
NOISE_NORM = 0.2


def compute(parameters: Any, batch_size: Any, steps: Any, tokens: Any) -> Any:
    """
    Floating-point operations of a training run: C = 6 M B T S.

    Args:
        parameters: M
        batch_size: B, examples a step
        steps: T
        tokens: S, tokens of an example

    Example:
        >>> f"{compute(4.6e6, 510, 1.8e3, 512):.1e}"  # table 2: N = 1e5, epsilon 1
        '1.3e+16'
    """
    return 6.0 * parameters * batch_size * steps * tokens


@dataclass(frozen=True)
class LossModel:
    """
    What a plan expects of a configuration.

    Attributes:
        loss: of (parameters, batch_size, steps, ratio), which broadcast; nan where the
            law says nothing
        parameters: the sizes it may be asked for, least and most
        steps: the steps it may be asked for
        tokens: S, of the examples that it was measured on; 0 for any
        batch_size: the physical batch that it was measured with; 0 if that is unknown
        private: whether its losses are of private training. If not they are a bound:
            no private run is expected to get below
        source: what it rests on, for people
        noise_excess: of a bound: of (parameters, ratio), how much more noise there is
            than a plan should have; above 1 the least of it is planned
        measured_steps: up to which its curves were measured; beyond, extrapolated
        learning_rate: of (parameters, steps, ratio), if that is known
        interval: of (parameters, steps, ratio), low and high, if that is known
    """

    loss: Callable[..., np.ndarray]
    parameters: Tuple[float, float]
    steps: Tuple[float, float]
    tokens: int
    batch_size: int
    private: bool
    source: str
    measured_steps: float = math.inf
    learning_rate: Optional[Callable[..., float]] = None
    interval: Optional[Callable[..., Tuple[float, float]]] = None
    noise_excess: Optional[Callable[..., np.ndarray]] = None

    @classmethod
    def of_surface(
        cls, surface: Surface, source: str, tokens: int = 0, batch_size: int = 0
    ) -> LossModel:
        """A fitted surface: between and within what was measured."""

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            return surface.loss(parameters, steps, ratio, outside="nan")

        ranges = surface.ranges
        return cls(
            loss,
            tuple(ranges["parameters"]),
            tuple(ranges["steps"]),
            tokens=tokens,
            batch_size=batch_size,
            private=True,
            source=source,
            measured_steps=ranges["measured_steps"][1],
            learning_rate=surface.learning_rate,
            interval=None if surface.samples is None else surface.interval,
        )

    @classmethod
    def of_fit(
        cls,
        fit: Fit,
        parameters: Tuple[float, float],
        steps: Tuple[float, float] = PAPER_STEPS,
        tokens: int = 0,
        batch_size: int = 0,
    ) -> LossModel:
        """
        A parametric law of private training: ``private`` or ``private_sigmoid`` of
        :mod:`opacus_ext.planner.laws` (L1 and L2 of the paper's appendix E).
        """

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            return fit.predict(
                parameters=parameters, examples=batch_size * steps, ratio=ratio
            )

        source = f"{fit.law.name}, fitted to {fit.rows} rows"
        return cls(
            loss,
            parameters,
            steps,
            tokens=tokens,
            batch_size=batch_size,
            private=True,
            source=source,
        )

    @classmethod
    def bound(
        cls,
        fit: Fit,
        tokens: int,
        noise_norm: float = NOISE_NORM,
        parameters: Tuple[float, float] = (1e4, 1e12),
        steps: Tuple[float, float] = PAPER_STEPS,
    ) -> LossModel:
        """
        Where no private run was measured: a law of non-private training, as a bound.

        The noise in the mean gradient has the norm ratio * sqrt(parameters), and the
        gradient's is at most 1. Of the configurations whose noise is no larger than
        ``noise_norm`` the one with the lowest bound is planned; where there is none,
        the one with the least noise. How much loss the noise costs, only measurements
        can tell.

        Args:
            fit: of Chinchilla's form, in parameters and training tokens
            tokens: S, of an example
            noise_norm: the largest norm of the noise; the default is about what the
                best plans of the paper's table 2 have (median 0.18)
        """

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            seen = np.multiply(batch_size, steps) * float(tokens)
            return fit.predict(parameters=parameters, tokens=seen)

        def noise_excess(parameters: Any, ratio: Any) -> Any:
            return ratio * np.sqrt(parameters) / noise_norm

        source = (
            f"a bound only: {fit.law.name}, without privacy, where the noise's norm is "
            f"at most {noise_norm:g} (the gradient's is 1 at most)"
        )
        return cls(
            loss,
            parameters,
            steps,
            tokens=0,
            batch_size=0,
            private=False,
            source=source,
            noise_excess=noise_excess,
        )
