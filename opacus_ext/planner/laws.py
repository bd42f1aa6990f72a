"""
Parametric scaling laws by name. M are parameters, D tokens, N examples, s the
noise-batch ratio:

- :data:`chinchilla`: L = E + A / M^a + B / D^b
- :data:`private`, the paper's L1: L = E + A / M^a + B / N^b + C s^g
- :data:`private_sigmoid`, its L2: L = E + A / M^a + B / N^b + C s'^g / M^a2 with
  s' = sigmoid((log s + 8) / 1.6)
- :data:`kaplan_parameters_tokens`:
  L = ((N_c / M)^(alpha_N / alpha_D) + D_c / D)^alpha_D
- :data:`critical_batch`: B_crit = B_star / L^(1 / alpha_B)

Sources: Kaplan et al., "Scaling laws for neural language models" (2020); McCandlish et
al., "An empirical model of large-batch training" (2018); Hoffmann et al., "Training
compute-optimal large language models" (2022); "Scaling laws for differentially private
language models", appendix E. Published constants: :data:`KAPLAN`, :data:`CHINCHILLA`
and :data:`CHINCHILLA_REFIT`; those of the private laws were not published.
"""

from __future__ import annotations

from typing import Any, Dict, List, Mapping, Tuple

import numpy as np

from opacus_ext.planner.law import Fit, Law
from opacus_ext.refused import Refused


def _sum(*terms: Mapping[str, Any]) -> Tuple[float, List[Tuple[float, Any]]]:
    """Terms of coefficients that are multiplied by powers of inputs."""
    return 1.0, [(1.0, powers) for powers in terms]


def _squash(ratio: np.ndarray) -> np.ndarray:
    """log s', equation 4 of the private paper, by eye for ratios of 2^-23 to 2^-6."""
    return -np.logaddexp(0.0, -(np.log(ratio) + 8) / 1.6)


chinchilla = Law(
    "chinchilla",
    ("parameters", "tokens"),
    ("E", "A", "B"),
    lambda a, b: _sum({}, {"parameters": -a}, {"tokens": -b}),
)
private = Law(
    "private",
    ("parameters", "examples", "ratio"),
    ("E", "A", "B", "C"),
    lambda a, b, g: _sum({}, {"parameters": -a}, {"examples": -b}, {"ratio": g}),
)
private_sigmoid = Law(
    "private_sigmoid",
    ("parameters", "examples", "ratio"),
    ("E", "A", "B", "C"),
    lambda a, b, g, a2: _sum(
        {}, {"parameters": -a}, {"examples": -b}, {"ratio": g, "parameters": -a2}
    ),
    transforms={"ratio": _squash},
)
kaplan_parameters_tokens = Law(
    "kaplan_parameters_tokens",
    ("parameters", "tokens"),
    ("N_c", "D_c"),
    lambda alpha_N, alpha_D: (
        alpha_D,
        [
            (alpha_N / alpha_D, {"parameters": -alpha_N / alpha_D}),
            (1.0, {"tokens": -1.0}),
        ],
    ),
)
critical_batch = Law(
    "critical_batch",
    ("loss",),
    ("B_star",),
    lambda alpha_B: _sum({"loss": -1 / alpha_B}),
    "batch_size",
)

LAWS: Dict[str, Law] = {x.name: x for x in [*globals().values()] if isinstance(x, Law)}

#: Published by Hoffmann et al.
CHINCHILLA = chinchilla.of(E=1.69, A=406.4, B=410.7, a=0.34, b=0.28)

#: To 240 of their runs, read off their figure; all but the five of fewest tokens a
#: parameter. The published constants don't fit these.
CHINCHILLA_REFIT = chinchilla.of(E=1.8172, A=477.7, B=2142.0, a=0.3473, b=0.3671)

#: Kaplan et al.'s: the loss, of table 2, and the batch in tokens, of table 5.
KAPLAN: Dict[str, Fit] = {
    "parameters_tokens": kaplan_parameters_tokens.of(
        N_c=6.4e13, alpha_N=0.076, D_c=1.8e13, alpha_D=0.103
    ),
    "critical_batch": critical_batch.of(B_star=2.1e8, alpha_B=0.21),
}


def private_rows(
    measurements: Any,
) -> Tuple[np.ndarray, Dict[str, np.ndarray], np.ndarray]:
    """
    Measurements as :data:`private` and :data:`private_sigmoid` need them: of several
    learning rates, the lowest loss at each size, number of steps and ratio.

    Returns:
        ``(loss, inputs, runs)``; examples are steps times the physical batch

    Raises:
        Refused: if the batch size is unknown

    Example:
        >>> from opacus_ext.planner.measurements import Measurements
        >>> grid = [1e4, 1e4], [10, 20], [0, 0.1], [5.0, 4.0]
        >>> loss, inputs, runs = private_rows(Measurements(*grid, batch_size=32))
        >>> loss, inputs["examples"]
        (array([5., 4.]), array([320., 640.]))
    """
    m = measurements
    if not m.batch_size:
        raise Refused("These measurements have no batch_size.", parameter="batch_size")
    rows = np.argsort(m.loss, kind="stable")
    key = np.stack([m.parameters[rows], m.steps[rows], m.ratio[rows]])
    rows = np.sort(rows[np.unique(key, axis=1, return_index=True)[1]])
    inputs = {
        "parameters": m.parameters[rows],
        "examples": m.steps[rows] * m.batch_size,
        "ratio": m.ratio[rows],
    }
    return m.loss[rows], inputs, m.run[rows]
