"""The noise-batch ratios of Figure 4 of the paper, against single calibrations.

Run as ``python benchmarks/calibration.py``. All cells of the three planes with the
doubles that their arrows need, at T = 16000 and delta = 1e-8, are calibrated at once.
Some of them, drawn at random, are calibrated again one by one, by bisection with
Opacus's PRV accountant. It returns the upper end of its bounds, epsilon + eps_error, so
that this is what it is asked for.
"""

import argparse
import random
import time
from typing import List, Tuple

import numpy as np
from opacus.accountants.utils import get_noise_multiplier

from opacus_ext.accountants.calibration import calibrate

STEPS, DELTA = 16_000, 1e-8
EPSILONS = 2.0 ** np.arange(-5, 8)
Cells = Tuple[np.ndarray, np.ndarray, np.ndarray]  # epsilon, batch size, users


def planes() -> List[Cells]:
    """The planes of the figure, of the cells where a batch is at most all users."""
    batch, users = 2.0 ** np.arange(10, 23), 2.0 ** np.arange(17, 30)
    corners = [
        np.meshgrid(EPSILONS, batch, [2.0**24]),
        np.meshgrid([4.0], 2.0 ** np.arange(9, 22), users),
        np.meshgrid(EPSILONS, [65536.0], users),
    ]
    flat = [tuple(axis.ravel() for axis in plane) for plane in corners]
    return [tuple(axis[b <= n] for axis in (e, b, n)) for e, b, n in flat]


def doubling(e: np.ndarray, batch: np.ndarray, users: np.ndarray) -> np.ndarray:
    """The share saved by doubling each ``[3, cells]``, NaN without so many users."""
    fits = 2 * batch <= users
    more = np.where(fits, 2, 1) * batch
    e, batch = np.stack([e, 2 * e, e, e]), np.stack([batch, batch, more, batch])
    users = np.stack([users, users, users, 2 * users])
    ratio = calibrate(e, DELTA, STEPS, batch, users).ratio
    saved = ratio[0] / ratio[1:] - 1
    saved[1, ~fits] = np.nan
    return saved


def single(epsilon: float, rate: float) -> float:
    error = epsilon / 200
    return get_noise_multiplier(
        target_epsilon=epsilon + error,
        target_delta=DELTA,
        sample_rate=rate,
        steps=STEPS,
        accountant="prv",
        epsilon_tolerance=epsilon / 5000,
        eps_error=error,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--singles", type=int, default=20, help="cells done again")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    wall, cpu, cells = time.perf_counter(), time.process_time(), 0
    for name, (epsilon, batch, users) in zip("abc", planes()):
        arrows = doubling(epsilon, batch, users)
        cells += len(epsilon)
        spans = ", ".join(
            f"{of} {np.nanmin(saved):.4f} to {np.nanmax(saved):.4f}"
            for of, saved in zip(("epsilon", "batch", "users"), arrows)
        )
        print(f"({name}) {len(epsilon)} cells; saved by doubling {spans}")
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    print(f"{cells} cells and their doubles: {wall:.1f} s, {cpu:.1f} s of CPU\n")

    epsilon, batch, users = (np.concatenate(axis) for axis in zip(*planes()))
    some = random.Random(args.seed).sample(range(cells), args.singles)
    print("epsilon  log2 B  log2 N       ours  Opacus PRV    ratio  seconds")
    worst = spent = 0.0
    for i in sorted(some, key=lambda i: (epsilon[i], batch[i], users[i])):
        budget = epsilon[i], DELTA, STEPS, batch[i], users[i]
        ours = calibrate(*budget, amplification="poisson").noise_multiplier
        start = time.perf_counter()
        theirs = single(epsilon[i], batch[i] / users[i])
        seconds = time.perf_counter() - start
        worst, spent = max(worst, abs(ours / theirs - 1)), spent + seconds
        print(
            f"{epsilon[i]:7g} {np.log2(batch[i]):7g} {np.log2(users[i]):7g} "
            f"{ours:10.5f} {theirs:11.5f} {ours / theirs:8.5f} {seconds:8.1f}",
            flush=True,
        )
    print(
        f"worst difference {worst:.3%}; {spent / args.singles:.1f} s for each of "
        f"Opacus's, {spent / args.singles * cells:.0f} s for all"
    )


if __name__ == "__main__":
    main()
