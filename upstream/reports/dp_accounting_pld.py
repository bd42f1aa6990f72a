"""dp-accounting: the pessimistic epsilon of a composed PLD is below the truth.

Alone: ``pip install dp-accounting==0.6.0``, then ``python dp_accounting_pld.py`` (a few
seconds). The text of the report is in dp_accounting_pld.md; ``--fix`` applies the fix
it proposes.

The truth is the closed form of Balle and Wang (2018), theorem 8, at 40 digits: n
Gaussian mechanisms of noise s are one of noise s / sqrt(n).
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Tuple

import mpmath as mp
import numpy as np
from dp_accounting.pld import common
from dp_accounting.pld.privacy_loss_distribution import from_gaussian_mechanism
from scipy import fft

# noise, steps, delta, discretization interval
ROWS = [
    (20.0, 10**3, 1e-5, 1e-4),
    (20.0, 10**3, 1e-12, 1e-3),
    (100.0, 10**4, 1e-10, 1e-4),
    (100.0, 10**4, 1e-12, 1e-4),
    (200.0, 10**5, 1e-9, 1e-4),
    (200.0, 10**5, 1e-12, 1e-4),
    (200.0, 10**5, 1e-12, 1e-3),
]
mp.mp.dps = 40


def true_delta(noise: float, steps: int, epsilon: float) -> mp.mpf:
    mu, e = mp.sqrt(steps) / mp.mpf(noise), mp.mpf(epsilon)
    return mp.ncdf(mu / 2 - e / mu) - mp.exp(e) * mp.ncdf(-e / mu - mu / 2)


def true_epsilon(noise: float, steps: int, delta: float) -> float:
    low, high = mp.mpf(0), mp.mpf(50)
    for _ in range(100):
        middle = (low + high) / 2
        above = true_delta(noise, steps, middle) > delta
        low, high = (middle, high) if above else (low, middle)
    return float(high)


def self_convolve(
    input_list: np.ndarray, num_times: int, tail_mass_truncation: float = 0
) -> Tuple[int, np.ndarray]:
    """The fix: transforms in extended precision, where the platform has it."""
    lower, upper = common.compute_self_convolve_bounds(
        input_list, num_times, tail_mass_truncation
    )
    size = upper - lower + 1
    points = fft.next_fast_len(max(size, len(input_list)))
    spectrum = fft.fft(np.asarray(input_list, np.longdouble), points)
    return lower, np.roll(np.real(fft.ifft(spectrum**num_times)), -lower)[:size]


def main() -> None:
    if "--fix" in sys.argv:
        common.self_convolve = self_convolve
    print("dp-accounting", version("dp-accounting"), *sys.argv[1:])
    for noise, steps, delta, interval in ROWS:
        composed = from_gaussian_mechanism(
            noise, pessimistic_estimate=True, value_discretization_interval=interval
        ).self_compose(steps)
        epsilon = float(composed.get_epsilon_for_delta(delta))
        truth = true_epsilon(noise, steps, delta)
        found = float(true_delta(noise, steps, epsilon))
        print(
            f"noise {noise:g}, steps {steps}, delta {delta:g}, interval {interval:g}: "
            f"pessimistic epsilon {epsilon:.6f}, true {truth:.6f}; "
            f"true delta at this epsilon {found:.4e}: "
            + ("BELOW THE TRUTH" if found > delta else "holds"),
            flush=True,
        )


if __name__ == "__main__":
    main()
