"""Parametric scaling laws: one way to fit, to bound and to use them all.

A :class:`Law` is a name, parameters, inputs and a function of them to the log of what
is predicted (a loss, mostly). :meth:`Law.fit` minimizes the Huber loss of log
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
- :data:`power`: y = scale C^exponent

Sources: Kaplan et al., "Scaling laws for neural language models" (2020); McCandlish et
al., "An empirical model of large-batch training" (2018); Hoffmann et al., "Training
compute-optimal large language models" (2022); "Scaling laws for differentially private
language models", appendix E. Published constants: :data:`KAPLAN`, :data:`CHINCHILLA`
and :data:`CHINCHILLA_REFIT`; those of the private laws were not published.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Union

import numpy as np
from numpy.typing import ArrayLike
from scipy.optimize import brentq

from opacus_ext.planner.dual import exp, log_sum
from opacus_ext.planner.fit import LAWS, Fit, Values, positive
from opacus_ext.planner.law import Law, Parameter
from opacus_ext.refused import Refused

#: FLOPs of a petaflop/s-day, the unit of compute of Kaplan et al.
PF_DAY = 1e15 * 24 * 3600


def _coefficient(name: str) -> Parameter:
    return Parameter(name, (math.log(0.02), math.log(1.0)))


def _exponent(name: str) -> Parameter:
    return Parameter(name, (0.05, 1.5), positive=False, usual=(0.01, 3.0))


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

    def log_target(p: Mapping[str, Any], x: Mapping[str, Any]) -> Any:
        return log_sum(*(log_term(p, x, c) for c in terms))

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
    log_target: Callable[[Mapping[str, Any], Mapping[str, Any]], Any],
    **options: Any,
) -> Law:
    """
    A law of terms (scale / input)^alpha.

    Args:
        scales: by input: the names of its scale and its exponent
    """

    def in_units(p: Values, means: Mapping[str, float], mean: float) -> Values:
        moved = {
            f"log_{c}": p[f"log_{c}"] + means[n] + mean / exp(p[f"log_{alpha}"])
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


def _chinchilla_size(p: Mapping[str, float], budget: float) -> Optional[float]:
    """Hoffmann et al., equation 4; None for exponents that are not positive."""
    if min(p["a"], p["b"]) <= 0:
        return None
    total = p["a"] + p["b"]
    g = (p["a"] * p["A"] / (p["b"] * p["B"])) ** (1 / total)
    return g * budget ** (p["b"] / total)


chinchilla = _sum_of_powers(
    "chinchilla",
    {"E": {}, "A": {"parameters": (-1, "a")}, "B": {"tokens": (-1, "b")}},
    data="tokens",
    best_size=_chinchilla_size,
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

power = _sum_of_powers(
    "power",
    {"scale": {"flops": (1, "exponent")}},
    target="value",
    exponents={"exponent": Parameter("exponent", (-1.0, 1.0), False, usual=(-5, 5))},
)

kaplan_parameters = _kaplan(
    "kaplan_parameters",
    {"parameters": ("N_c", "alpha_N")},
    lambda p, x: exp(p["log_alpha_N"]) * (p["log_N_c"] - x["parameters"]),
)
kaplan_tokens = _kaplan(
    "kaplan_tokens",
    {"tokens": ("D_c", "alpha_D")},
    lambda p, x: exp(p["log_alpha_D"]) * (p["log_D_c"] - x["tokens"]),
)
kaplan_flops = _kaplan(
    "kaplan_flops",
    {"flops": ("C_c", "alpha_C")},
    lambda p, x: exp(p["log_alpha_C"]) * (p["log_C_c"] - x["flops"]),
)


def _parameters_tokens(p: Mapping[str, Any], x: Mapping[str, Any]) -> Any:
    ratio = exp(p["log_alpha_N"] - p["log_alpha_D"])
    inner = log_sum(
        ratio * (p["log_N_c"] - x["parameters"]), p["log_D_c"] - x["tokens"]
    )
    return exp(p["log_alpha_D"]) * inner


kaplan_parameters_tokens = _kaplan(
    "kaplan_parameters_tokens",
    {"parameters": ("N_c", "alpha_N"), "tokens": ("D_c", "alpha_D")},
    _parameters_tokens,
    data="tokens",
)
kaplan_parameters_steps = _kaplan(
    "kaplan_parameters_steps",
    {"parameters": ("N_c", "alpha_N"), "steps": ("S_c", "alpha_S")},
    lambda p, x: log_sum(
        exp(p["log_alpha_N"]) * (p["log_N_c"] - x["parameters"]),
        exp(p["log_alpha_S"]) * (p["log_S_c"] - x["steps"]),
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
    lambda p, x: p["log_B_star"] - x["loss"] * exp(-p["log_alpha_B"]),
    lambda p, means, mean: {
        **p,
        "log_B_star": p["log_B_star"] + mean + means["loss"] / exp(p["log_alpha_B"]),
    },
)

LAWS.update(
    (law.name, law)
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
        power,
    )
)

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
        Refused: for values that are not positive and finite

    Example:
        >>> print(minimum_steps(1000, batch_size=512, critical=512))
        500.0
    """
    steps, batch_size = positive("steps", steps), positive("batch_size", batch_size)
    return steps / (1 + positive("critical", critical) / batch_size)


def minimum_flops(
    flops: ArrayLike, batch_size: ArrayLike, critical: ArrayLike
) -> np.ndarray:
    """
    C_min, the compute that very small batches would have needed: C / (1 + B / B_crit).

    Source: Kaplan et al., equation 5.5. Arguments as of :func:`minimum_steps`.

    Raises:
        Refused: for values that are not positive and finite

    Example:
        >>> print(minimum_flops(1e18, batch_size=512, critical=512))
        5e+17
    """
    flops, batch_size = positive("flops", flops), positive("batch_size", batch_size)
    return flops / (1 + batch_size / positive("critical", critical))


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
    there is one such loss.

    Args:
        parameters: M
        steps: S
        batch_size: B, in tokens as Kaplan's constants are; the three broadcast
        law: a fit of :data:`kaplan_parameters_steps`; Kaplan's by default
        critical: a fit of :data:`critical_batch`; Kaplan's by default

    Raises:
        Refused: for values that are not positive and finite

    Example:
        >>> print(loss_at_batch(1e9, 1e5, [1e4, 1e6, 1e9]).round(3))
        [3.495 2.516 2.429]
    """
    law = law or KAPLAN["parameters_steps"]
    critical = critical or KAPLAN["critical_batch"]
    m, s, b = np.broadcast_arrays(
        positive("parameters", parameters),
        positive("steps", steps),
        positive("batch_size", batch_size),
    )

    def loss(size: float, steps: float, batch: float) -> float:
        def too_low(log_loss: float) -> float:
            at = critical.predict(loss=math.exp(log_loss))
            least = minimum_steps(steps, batch, at)
            return math.log(law.predict(parameters=size, steps=least)) - log_loss

        # as if batches were very large
        low = math.log(law.predict(parameters=size, steps=steps)) - 1e-9
        high = low + 1.0
        while too_low(high) > 0:
            high += 1.0
        return math.exp(brentq(too_low, low, high, xtol=1e-14))

    return np.vectorize(loss, otypes=[float])(m, s, b)


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
        Refused: if no row is left, or the batch size unknown

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> runs = Measurements([1e4, 1e4], [10, 20], [0, 0.1], [5.0, 4.0])
        >>> loss, inputs, groups = private_rows(runs, batch_size=32, least_steps=20)
        >>> loss, inputs["examples"]
        (array([4.]), array([640.]))
    """
    batch_size = batch_size or getattr(measurements, "batch_size", 0)
    if not batch_size:
        raise Refused(
            "These measurements don't tell their batch_size: pass it.",
            parameter="batch_size",
        )
    positive("batch_size", batch_size)
    m = measurements
    chosen = (
        (m.steps >= least_steps) & (m.ratio >= least_ratio) & (m.loss <= highest_loss)
    )
    if not chosen.any():
        raise Refused(
            f"No row has {least_steps:g} steps or more, a ratio of {least_ratio:g} or "
            f"more and a loss of {highest_loss:g} or less.",
            remedy="Leave out fewer rows.",
        )
    rows = np.flatnonzero(chosen)
    rows = rows[np.argsort(m.loss[rows], kind="stable")]
    key = np.stack([m.parameters[rows], m.steps[rows], m.ratio[rows]])
    rows = np.sort(rows[np.unique(key, axis=1, return_index=True)[1]])
    inputs = {
        "parameters": m.parameters[rows],
        "examples": m.steps[rows] * batch_size,
        "ratio": m.ratio[rows],
    }
    return m.loss[rows], inputs, m.run[rows]
