"""
What follows from the laws of training without privacy: the best size and tokens for a
compute, by Kaplan et al. and by Hoffmann et al. ("Chinchilla"), and what batches of any
size cost, by Kaplan et al. and McCandlish et al.

M are parameters, D tokens, C = 6 M D their compute in FLOPs; batches are in tokens.
"""

from __future__ import annotations

import math
from typing import Dict, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from opacus_ext.planner.laws import (
    CHINCHILLA,
    CHINCHILLA_REFIT,
    KAPLAN,
    Fit,
    broadcast,
    positive,
)
from opacus_ext.refused import Refused

_HALVINGS = 100  # of the range of a log of a loss: to the last digit
_MOST_LOG_LOSS = 20.0  # where that range ends


class Optimum(NamedTuple):
    """
    What is best for a compute.

    Attributes:
        parameters: M
        tokens: D
        loss: in nats a token
    """

    parameters: np.ndarray
    tokens: np.ndarray
    loss: np.ndarray


def compute_optimal(flops: ArrayLike, law: Fit = CHINCHILLA) -> Optimum:
    """
    The size and tokens of the lowest loss for C = 6 M D, by a law of both.

    Two terms, A / M^a and B / D^b, are in balance where a more in one is a less in the
    other: a A / M^a = b B / D^b.

    Args:
        flops: C
        law: :data:`~opacus_ext.planner.laws.CHINCHILLA`,
            ``KAPLAN["parameters_tokens"]`` or a fit of one of their laws

    Raises:
        Refused: for a law of other inputs, and compute that is not positive and finite

    Example:
        >>> best = compute_optimal(5.76e23)  # the compute of Gopher
        >>> f"{best.parameters:.1e} parameters, {best.tokens:.1e} tokens"
        '3.2e+10 parameters, 3.0e+12 tokens'
    """
    if law.law.inputs != ["parameters", "tokens"]:
        raise Refused(
            f"{law.law.name} is a law of {', '.join(law.law.inputs)}.",
            parameter="law",
            remedy="Pass a law of parameters and tokens, such as CHINCHILLA.",
        )
    product = np.log(positive("flops", flops) / 6)
    # The logs of terms are linear in those of the inputs, and a constant has no slope.
    here, larger, more = (
        np.array(law.law.formula(*at, **law.parameters)[1], dtype=float)
        for at in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0))
    )
    of_size, of_data = here - larger, here - more
    size, data = of_size.argmax(), of_data.argmax()
    a, b = of_size[size], of_data[data]
    balance = here[size] + math.log(a) - here[data] - math.log(b)
    parameters = np.exp((balance + b * product) / (a + b))
    tokens = np.exp(product) / parameters
    return Optimum(
        parameters, tokens, law.predict(parameters=parameters, tokens=tokens)
    )


def kaplan_optimal(flops: ArrayLike) -> Optimum:
    """
    Table 6 of Kaplan et al.: the size and tokens for the least compute, of batches far
    below the critical one.

    Example:
        >>> best = kaplan_optimal(5.76e23)
        >>> f"{best.parameters:.1e} parameters, {best.tokens:.1e} tokens"
        '8.0e+11 parameters, 2.2e+11 tokens'
    """
    names = "optimal_parameters", "optimal_tokens", "minimum_flops"
    return Optimum(*(KAPLAN[name].predict(flops=flops) for name in names))


def optima(flops: ArrayLike) -> Dict[str, Optimum]:
    """
    What is best for a compute, by each published law.

    Example:
        >>> for name, best in optima(1e21).items():
        ...     print(f"{name}: {best.parameters:.1e}, {best.tokens:.1e}")
        Kaplan, table 6: 7.8e+09, 3.9e+10
        Kaplan, L(N, D): 6.2e+09, 2.7e+10
        Chinchilla: 1.8e+09, 9.1e+10
        Chinchilla, refit: 2.8e+09, 6.0e+10
    """
    return {
        "Kaplan, table 6": kaplan_optimal(flops),
        "Kaplan, L(N, D)": compute_optimal(flops, KAPLAN["parameters_tokens"]),
        "Chinchilla": compute_optimal(flops),
        "Chinchilla, refit": compute_optimal(flops, CHINCHILLA_REFIT),
    }


def _batches_by_critical(batch_size: ArrayLike, loss: ArrayLike) -> np.ndarray:
    """How many critical batches, of a loss, a batch is."""
    batch_size = positive("batch_size", batch_size)
    return batch_size / KAPLAN["critical_batch"].predict(loss=loss)


def minimum_steps(
    steps: ArrayLike, batch_size: ArrayLike, loss: ArrayLike
) -> np.ndarray:
    """
    S_min = S / (1 + B_crit(L) / B): the steps to a loss if batches were huge.

    Example:
        >>> critical = KAPLAN["critical_batch"].predict(loss=3.0)
        >>> float(minimum_steps(1000, critical, 3.0))
        500.0
    """
    return positive("steps", steps) / (1 + 1 / _batches_by_critical(batch_size, loss))


def minimum_flops(
    flops: ArrayLike, batch_size: ArrayLike, loss: ArrayLike
) -> np.ndarray:
    """
    C_min = C / (1 + B / B_crit(L)): the compute to a loss if batches were tiny.

    Example:
        >>> critical = KAPLAN["critical_batch"].predict(loss=3.0)
        >>> float(minimum_flops(1e18, critical, 3.0))
        5e+17
    """
    return positive("flops", flops) / (1 + _batches_by_critical(batch_size, loss))


def loss_after(
    parameters: ArrayLike, steps: ArrayLike, batch_size: ArrayLike
) -> np.ndarray:
    """
    Kaplan et al.'s L(N, S_min(S, B, L)), of steps with batches of a size: the loss that
    is on both sides.

    Example:
        >>> round(float(loss_after(1e8, 1e5, 5e5)), 3)
        2.964
    """
    given = dict(parameters=parameters, steps=steps, batch_size=batch_size)
    arrays = {name: positive(name, value) for name, value in given.items()}
    size, steps, batch_size = broadcast(arrays)
    law = KAPLAN["parameters_steps"]
    low, high = np.zeros(size.shape), np.full(size.shape, _MOST_LOG_LOSS)
    low -= _MOST_LOG_LOSS
    for _ in range(_HALVINGS):
        # A higher loss has a smaller critical batch: these steps count as more.
        middle = (low + high) / 2
        least = minimum_steps(steps, batch_size, np.exp(middle))
        above = np.log(law.predict(parameters=size, steps=least)) > middle
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.exp((low + high) / 2)
