"""
Parametric scaling laws by name. M are parameters, D tokens, N examples, s the
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
from functools import reduce
from typing import Any, Dict, Mapping, Optional, Tuple

import numpy as np

from opacus_ext.planner.form import Parameter, Slopes, Values, positive
from opacus_ext.planner.law import Fit, Law
from opacus_ext.refused import Refused

#: FLOPs of a petaflop/s-day, the unit of compute of Kaplan et al.
PF_DAY = 1e15 * 24 * 3600

#: Exponents that are not ordinary ones.
_EXPONENTS = {
    # Published: -0.07, noise hurts a larger model more.
    "a2": Parameter("a2", (-0.3, 0.3), False, usual=(-2.0, 2.0)),
    "exponent": Parameter("exponent", (-1.0, 1.0), False, usual=(-5, 5)),
}


def _log_sum(*logs: Any) -> Any:
    """The log of the sum of exponentials, which broadcast."""
    top = reduce(np.maximum, logs)
    top = np.where(np.isfinite(top), top, 0.0)
    with np.errstate(divide="ignore"):
        return np.log(sum(np.exp(x - top) for x in logs)) + top


def _sum_of_powers(
    name: str,
    terms: Mapping[str, Mapping[str, Tuple[int, str]]],
    target: str = "loss",
    **options: Any,
) -> Law:
    """
    A law that is a sum of terms, each a coefficient times powers of inputs.

    Args:
        terms: by coefficient: the powers as input -> (sign, name of the exponent)
    """
    constant = any(not powers for powers in terms.values())
    # c, a and the constant of c x^-a + constant need three values of x.
    inputs = {n: 3 if constant else 2 for powers in terms.values() for n in powers}
    exponents = dict.fromkeys(e for t in terms.values() for _, e in t.values())
    parameters = [Parameter(c, (math.log(0.02), math.log(1.0))) for c in terms]
    for e in exponents:
        usual = Parameter(e, (0.05, 1.5), positive=False, usual=(0.01, 3.0))
        parameters.append(_EXPONENTS.get(e, usual))

    def log_terms(p: Values, x: Values) -> Dict[str, Any]:
        return {
            c: p[f"log_{c}"] + sum(sign * p[e] * x[n] for n, (sign, e) in t.items())
            for c, t in terms.items()
        }

    def log_target(p: Values, x: Values) -> Any:
        return _log_sum(*log_terms(p, x).values())

    def slopes(p: Values, x: Values) -> Slopes:
        logs = log_terms(p, x)
        total = _log_sum(*logs.values())
        found: Dict[str, Any] = dict.fromkeys(exponents, 0.0)
        for c, powers in terms.items():
            share = found[f"log_{c}"] = np.exp(logs[c] - total)
            for n, (sign, e) in powers.items():
                found[e] = found[e] + share * sign * x[n]
        return total, found

    def in_units(p: Values, means: Mapping[str, float], mean: float) -> Dict[str, Any]:
        moved = log_terms(p, {n: -m for n, m in means.items()})
        return {**p, **{f"log_{c}": mean + value for c, value in moved.items()}}

    return Law(
        name,
        target,
        inputs,
        tuple(parameters),
        log_target,
        slopes,
        in_units,
        **options,
    )


def _kaplan(name: str, scales: Mapping[str, Tuple[str, str]], **options: Any) -> Law:
    """
    A law of terms (scale / input)^alpha, which are added; of tokens, the second term of
    two is alone to the outer power.

    Args:
        scales: by input: the names of its scale and its exponent
    """
    (first, (c1, a1)), *rest = scales.items()

    def in_units(p: Values, means: Mapping[str, float], mean: float) -> Dict[str, Any]:
        moved = {
            f"log_{c}": p[f"log_{c}"] + means[n] + mean / np.exp(p[f"log_{a}"])
            for n, (c, a) in scales.items()
        }
        return {**p, **moved}

    def summed(p: Values, x: Values) -> Any:
        return _log_sum(*(log_term(p, x, n) for n in scales))

    def log_term(p: Values, x: Values, n: str) -> Any:
        c, a = scales[n]
        return np.exp(p[f"log_{a}"]) * (p[f"log_{c}"] - x[n])

    def slopes_of_sum(p: Values, x: Values) -> Slopes:
        found: Dict[str, Any] = {}
        terms = {n: log_term(p, x, n) for n in scales}
        total = _log_sum(*terms.values())
        for n, (c, a) in scales.items():
            share = np.exp(terms[n] - total)
            found[f"log_{c}"] = share * np.exp(p[f"log_{a}"])
            found[f"log_{a}"] = share * terms[n]
        return total, found

    def inner(p: Values, x: Values) -> Tuple[Any, Any]:
        ((second, (c2, a2)),) = rest
        ratio = np.exp(p[f"log_{a1}"] - p[f"log_{a2}"])
        return ratio * (p[f"log_{c1}"] - x[first]), p[f"log_{c2}"] - x[second]

    def nested(p: Values, x: Values) -> Any:
        return np.exp(p[f"log_{rest[0][1][1]}"]) * _log_sum(*inner(p, x))

    def slopes_of_nested(p: Values, x: Values) -> Slopes:
        c2, a2 = rest[0][1]
        u, v = inner(p, x)
        total, outer = _log_sum(u, v), np.exp(p[f"log_{a2}"])
        share = np.exp(u - total)
        by_a1 = outer * share * u
        return outer * total, {
            f"log_{c1}": share * np.exp(p[f"log_{a1}"]),
            f"log_{a1}": by_a1,
            f"log_{c2}": outer * np.exp(v - total),
            f"log_{a2}": outer * total - by_a1,
        }

    is_nested = [*scales] == ["parameters", "tokens"]
    usual = (math.log(0.02), math.log(1.5))
    return Law(
        name,
        "loss",
        {n: 2 for n in scales},
        (
            # The share of its term in the loss is (scale / 1)^alpha, at most 1.
            *(Parameter(c, (-6.0, 0.5)) for c, _ in scales.values()),
            *(Parameter(a, usual, usual=(0.005, 3.0)) for _, a in scales.values()),
        ),
        nested if is_nested else summed,
        slopes_of_nested if is_nested else slopes_of_sum,
        in_units,
        **options,
    )


def _squash(ratio: np.ndarray) -> np.ndarray:
    """
    log s' with s' = sigmoid((log s + 8) / 1.6), equation 4 of the private paper, which
    chose the two numbers by eye for its ratios, 2^-23 to 2^-6; where s is far above
    e^-8, s' is 1 and the law degenerates.
    """
    return -np.logaddexp(0.0, -(np.log(ratio) + 8) / 1.6)


_SIZE = {"parameters": (-1, "a")}
_PRIVATE: Dict[str, Any] = {"data": "examples", "may_be_zero": ("ratio",)}

chinchilla = _sum_of_powers(
    "chinchilla", {"E": {}, "A": _SIZE, "B": {"tokens": (-1, "b")}}, data="tokens"
)
private = _sum_of_powers(
    "private",
    {"E": {}, "A": _SIZE, "B": {"examples": (-1, "b")}, "C": {"ratio": (1, "g")}},
    **_PRIVATE,
)
private_sigmoid = _sum_of_powers(
    "private_sigmoid",
    {
        "E": {},
        "A": _SIZE,
        "B": {"examples": (-1, "b")},
        "C": {"ratio": (1, "g"), "parameters": (-1, "a2")},
    },
    transforms={"ratio": _squash},
    **_PRIVATE,
)
power = _sum_of_powers("power", {"scale": {"flops": (1, "exponent")}}, "value")
kaplan_parameters = _kaplan("kaplan_parameters", {"parameters": ("N_c", "alpha_N")})
kaplan_tokens = _kaplan("kaplan_tokens", {"tokens": ("D_c", "alpha_D")})
kaplan_flops = _kaplan("kaplan_flops", {"flops": ("C_c", "alpha_C")})
kaplan_parameters_tokens = _kaplan(
    "kaplan_parameters_tokens",
    {"parameters": ("N_c", "alpha_N"), "tokens": ("D_c", "alpha_D")},
    data="tokens",
)
kaplan_parameters_steps = _kaplan(
    "kaplan_parameters_steps",
    {"parameters": ("N_c", "alpha_N"), "steps": ("S_c", "alpha_S")},
    data="steps",
)


def _log_critical_batch(p: Values, x: Values) -> Any:
    return p["log_B_star"] - x["loss"] * np.exp(-p["log_alpha_B"])


critical_batch = Law(
    "critical_batch",
    "batch_size",
    {"loss": 2},
    (
        Parameter("B_star", (-3.0, 3.0)),
        Parameter("alpha_B", (math.log(0.05), math.log(1.0)), usual=(0.01, 5.0)),
    ),
    _log_critical_batch,
    lambda p, x: (
        _log_critical_batch(p, x),
        {"log_B_star": 1.0, "log_alpha_B": p["log_B_star"] - _log_critical_batch(p, x)},
    ),
    lambda p, means, mean: {
        **p,
        "log_B_star": p["log_B_star"] + mean + means["loss"] / np.exp(p["log_alpha_B"]),
    },
)

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


def private_rows(
    measurements: Any, *, batch_size: Optional[float] = None
) -> Tuple[np.ndarray, Dict[str, np.ndarray], np.ndarray]:
    """
    Measurements as :data:`private` and :data:`private_sigmoid` need them: of several
    learning rates, the lowest loss at each size, number of steps and ratio.

    Args:
        measurements: arrays ``parameters``, ``steps``, ``ratio``, ``loss``, ``run``
        batch_size: the physical one: examples are steps times it; by default the
            measurements' own

    Returns:
        ``(loss, inputs, groups)``

    Raises:
        Refused: if the batch size is unknown

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> runs = Measurements([1e4, 1e4], [10, 20], [0, 0.1], [5.0, 4.0])
        >>> loss, inputs, groups = private_rows(runs, batch_size=32)
        >>> loss, inputs["examples"]
        (array([5., 4.]), array([320., 640.]))
    """
    batch_size = batch_size or getattr(measurements, "batch_size", 0)
    if not batch_size:
        raise Refused(
            "These measurements have no batch_size.",
            parameter="batch_size",
            remedy="Pass the physical batch size of the runs.",
        )
    positive("batch_size", batch_size)
    m = measurements
    rows = np.argsort(m.loss, kind="stable")
    key = np.stack([m.parameters[rows], m.steps[rows], m.ratio[rows]])
    rows = np.sort(rows[np.unique(key, axis=1, return_index=True)[1]])
    inputs = {
        "parameters": m.parameters[rows],
        "examples": m.steps[rows] * batch_size,
        "ratio": m.ratio[rows],
    }
    return m.loss[rows], inputs, m.run[rows]
