"""prv-accountant: bounds of PureDPMechanism and ApproximateDPMechanism are wrong.

Alone: ``pip install prv-accountant==0.2.0 mpmath``, then
``python prv_accountant_pure.py`` (a few seconds). The text of the report is in
prv_accountant_pure.md; ``--fix`` applies the fix it proposes.

The mechanism that uses up (epsilon, 0) is randomised response, whose loss is epsilon
with probability 1 / (1 + exp(-epsilon)) and else -epsilon. The truth is the sum over
all outcomes of the composition, at 40 digits. (epsilon, delta) adds an infinite loss.
"""

from __future__ import annotations

import sys
from importlib.metadata import version

import mpmath as mp
import numpy as np
from prv_accountant import ApproximateDPMechanism, PRVAccountant, PureDPMechanism

# epsilon and delta of one use, uses, delta
ROWS = [
    (1.0, 0.0, 30, 1e-5),
    (5.0, 0.0, 10, 1e-3),
    (5.0, 0.0, 20, 1e-3),
    (8.0, 0.0, 30, 1e-3),
    (5.0, 1e-6, 20, 1e-3),
]
mp.mp.dps = 40


def true_delta(each: float, infinite: float, uses: int, epsilon: mp.mpf) -> mp.mpf:
    p = 1 / (1 + mp.exp(-mp.mpf(each)))
    total = mp.mpf(0)
    for k in range(uses + 1):
        loss = mp.mpf(each) * (2 * k - uses)
        if loss > epsilon:
            weight = mp.binomial(uses, k) * p**k * (1 - p) ** (uses - k)
            total += weight * (1 - mp.exp(epsilon - loss))
    finite = (1 - mp.mpf(infinite)) ** uses
    return 1 - finite + finite * total


def true_epsilon(each: float, infinite: float, uses: int, delta: float) -> float:
    low, high = mp.mpf(0), mp.mpf(each * uses)
    for _ in range(100):
        middle = (low + high) / 2
        above = true_delta(each, infinite, uses, middle) > delta
        low, high = (middle, high) if above else (low, middle)
    return float(high)


def divergence(self: PureDPMechanism, alpha: float) -> float:
    """The fix: the Renyi divergence of randomised response (Mironov, 2017)."""
    p = -np.log1p(np.exp(-self.eps))  # log probability of the likelier answer
    q = p - self.eps
    both = np.logaddexp(alpha * p + (1 - alpha) * q, alpha * q + (1 - alpha) * p)
    return both / (alpha - 1)


def main() -> None:
    if "--fix" in sys.argv:
        PureDPMechanism.rdp = divergence
    print("prv-accountant", version("prv-accountant"), *sys.argv[1:])
    one = PureDPMechanism(5.0)
    print(
        f"Renyi divergence at epsilon 5, alpha 2: rdp() {one.rdp(2.0):.4f}, "
        f"true {divergence(one, 2.0):.4f}"
    )
    for each, infinite, uses, delta in ROWS:
        mechanism = PureDPMechanism(each)
        if infinite:
            mechanism = ApproximateDPMechanism(each, infinite)
        lower, _, upper = PRVAccountant(
            mechanism, eps_error=0.1, delta_error=1e-6, max_self_compositions=uses
        ).compute_epsilon(delta, [uses])
        truth = true_epsilon(each, infinite, uses, delta)
        print(
            f"({each:g}, {infinite:g}) {uses} times, delta {delta:g}: "
            f"epsilon in [{lower:.4f}, {upper:.4f}], true {truth:.4f}: "
            + ("BELOW THE TRUTH" if upper < truth else "holds"),
            flush=True,
        )


if __name__ == "__main__":
    main()
