"""Opacus's PRV accountant: its upper bound of epsilon is below the truth.

Alone: ``pip install opacus==1.6.0``, then ``python opacus_prv.py`` (15 s of CPU). The
text of the report is in opacus_prv.md; ``--fix`` applies the fix it proposes (40 s).

The truth without sampling is the closed form of Balle and Wang (2018), theorem 8, at 40
digits: n steps of noise s are one of noise s / sqrt(n). With sampling it is an integral
over the moments of the privacy loss, whose rounding is relative to delta; where the
rate is 1 it is compared with the closed form.
"""

from __future__ import annotations

import math
import sys
import warnings
from importlib.metadata import version

import mpmath as mp
import numpy as np
from opacus.accountants import PRVAccountant
from opacus.accountants.analysis.prv import domain, prvs
from scipy.optimize import minimize_scalar

# noise multiplier, sampling rate, steps, delta
ROWS = [
    (20.0, 1.0, 10**3, 1e-5),
    (20.0, 1.0, 10**3, 1e-12),
    (100.0, 1.0, 10**4, 1e-12),
    (200.0, 1.0, 10**5, 1e-12),
    (20.0, 0.05, 10**5, 1e-11),
]
mp.mp.dps = 40


def gaussian_delta(noise: float, steps: int, epsilon: float) -> float:
    """The exact delta of ``steps`` Gaussian mechanisms without sampling."""
    mu, e = mp.sqrt(steps) / mp.mpf(noise), mp.mpf(epsilon)
    tail = mp.exp(e) * mp.ncdf(-e / mu - mu / 2)
    return float(mp.ncdf(mu / 2 - e / mu) - tail)


def sampled_delta(noise: float, rate: float, steps: int, epsilon: float) -> float:
    """The delta with Poisson sampling: Mellin's inversion, through a saddle point."""
    x = np.arange(-14 * noise, 14 * noise + 2, min(noise, noise**2) / 24)
    weight = np.exp(-x * x / (2 * noise**2))
    weight /= weight.sum()
    ratio = rate * np.expm1((2 * x - 1) / (2 * noise**2))  # of the densities, less 1

    def log_moments(z: np.ndarray) -> np.ndarray:
        """log E[exp(z loss)] of all steps."""
        order = np.asarray(z, complex)[:, None] + 1
        # E[ratio] is 0: taken off, no digits are lost where the rate is small.
        sums = np.expm1(order * np.log1p(ratio)) - order * ratio
        return steps * np.log1p(sums @ weight)

    def height(t: float) -> float:
        order = math.exp(t)
        return float(log_moments(np.array([order]))[0].real) - order * epsilon

    order = math.exp(minimize_scalar(height, bounds=(-3, 6), method="bounded").x)
    near = log_moments(order * np.array([0.99, 1.0, 1.01])).real
    deviation = math.sqrt(near[0] - 2 * near[1] + near[2]) / (0.01 * order)
    z = order + 1j * np.linspace(0, 14 / deviation, 400)
    values = np.exp(log_moments(z) - z * epsilon) / (z * (z + 1))
    assert abs(values[-1]) < 1e-12 * abs(values[0])
    values[0] /= 2
    return float(values.real.sum() * (z[1] - z[0]).imag / math.pi)


def true_delta(noise: float, rate: float, steps: int, epsilon: float) -> float:
    if rate < 1:
        return sampled_delta(noise, rate, steps, epsilon)
    return gaussian_delta(noise, steps, epsilon)


def true_epsilon(noise: float, rate: float, steps: int, delta: float) -> float:
    low, high = 0.1, 50.0
    for _ in range(45):
        middle = (low + high) / 2
        above = true_delta(noise, rate, steps, middle) > delta
        low, high = (middle, high) if above else (low, middle)
    return high


def fix() -> None:
    """Grid, cdf and transforms in extended precision, as in prv-accountant."""
    erfc = prvs.erfc
    prvs.erfc = lambda x: np.longdouble(erfc(np.double(x)))
    domain.Domain.ts = property(
        lambda self: np.linspace(self.t_min, self.t_max, self.size, dtype=np.longdouble)
    )


def main() -> None:
    warnings.simplefilter("ignore")  # log(0) at rate 1; "largest alpha" of RDP
    if "--fix" in sys.argv:
        fix()
    print("opacus", version("opacus"), *sys.argv[1:])
    for noise, rate, steps, delta in ROWS:
        accountant = PRVAccountant()
        accountant.history = [(noise, rate, steps)]
        upper = float(accountant.get_epsilon(delta))
        truth = true_epsilon(noise, rate, steps, delta)
        found = true_delta(noise, rate, steps, upper)
        if rate == 1:  # the integral is checked where there is a closed form
            integral = sampled_delta(noise, rate, steps, upper)
            assert abs(integral / found - 1) < 1e-6, (integral, found)
        print(
            f"noise {noise:g}, rate {rate:g}, steps {steps}, delta {delta:g}: "
            f"epsilon at most {upper:.5f}, true {truth:.5f}; "
            f"true delta at this bound {found:.4e}: "
            + ("BELOW THE TRUTH" if found > delta else "holds"),
            flush=True,
        )


if __name__ == "__main__":
    main()
