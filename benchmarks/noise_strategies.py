"""Errors and sensitivities of strategies of correlated noise, beside JAX-Privacy's.

Run in an environment with jax-privacy, whose torch may be absent:

    PYTHONPATH=. python benchmarks/noise_strategies.py --json theirs.json

The error is that of prefix sums, a root mean square over the steps, times the
sensitivity, for a first column of norm 1. JAX-Privacy 2.0 has buffered Toeplitz
matrices; what later versions have of inverse banded ones is used if it is there.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Dict, Iterator, NamedTuple, Tuple

import jax
import jax.numpy as jnp
import numpy as np
from jax_privacy.matrix_factorization import buffered_toeplitz, toeplitz

from opacus_ext_command import import_bare

RUNS = {"inverse": ((50, 10), (500, 100)), "buffered": ((100, 100), (100, 20))}
RUNS["buffered"] += ((1000, 1000), (1000, 200))  # steps, separation
BANDS, BUFFERS = (2, 4, 16), (1, 2, 3, 4)


class Case(NamedTuple):
    """A strategy, a number of bands or buffers, and a run."""

    name: str
    size: int
    steps: int
    separation: int

    @property
    def times(self) -> int:
        return -(-self.steps // self.separation)


def cases() -> Iterator[Case]:
    for steps, separation in RUNS["inverse"]:
        for bands in BANDS:
            yield Case("InverseBanded", bands, steps, separation)
            yield Case("InverseBanded, searched", bands, steps, separation)
    for steps, separation in RUNS["buffered"]:
        for buffers in BUFFERS:
            yield Case("BufferedToeplitz", buffers, steps, separation)


def theirs(case: Case) -> np.ndarray:
    """The first column of C, by JAX-Privacy; AttributeError if it has none."""
    run = {"n": case.steps, "min_sep": case.separation}
    if case.name == "BufferedToeplitz":
        found = buffered_toeplitz.optimize(
            **run,
            max_participations=case.times,
            error="mean",
            min_buffers=case.size,
            max_buffers=case.size,
        )
        return np.asarray(found.toeplitz_coefs(case.steps))
    if case.name == "InverseBanded":
        noising = toeplitz.banded_inverse_square_root_noising_coefs(case.size)
    else:
        noising = toeplitz.optimize_banded_inverse_toeplitz(
            **run, num_bands=case.size, max_participations=case.times
        )
    noising = jnp.pad(jnp.asarray(noising), (0, case.steps - case.size))
    return np.asarray(toeplitz.inverse_coef(noising, case.steps))


def their_values(case: Case) -> Dict[str, float]:
    """The values that tests/strategies_peer_test.py stores."""
    column = theirs(case)
    column = column / np.linalg.norm(column)
    noising = toeplitz.inverse_coef(jnp.asarray(column), case.steps)
    errors = toeplitz.per_query_error(noising_coef=noising, n=case.steps)
    # Theirs is an upper bound, or refused, where the column rises.
    column = np.maximum.accumulate(np.abs(column)[::-1])[::-1]
    squared = toeplitz.minsep_sensitivity_squared(
        jnp.asarray(column),
        min_sep=case.separation,
        max_participations=case.times,
        n=case.steps,
    )
    return {
        "prefix": float(np.sqrt(np.mean(errors))),
        "last": float(np.sqrt(errors[-1])),
        "sensitivity": float(np.sqrt(squared)),
    }


def our_values(case: Case) -> Dict[str, float]:
    """The same of this package."""
    from opacus_ext import strategies

    name, _, searched = case.name.partition(",")
    options: Dict[str, Any] = {}
    if searched or name == "BufferedToeplitz":
        options["separation"] = case.separation
    strategy = getattr(strategies, name)(case.size, case.steps, **options)
    participation = strategies.Participation(case.separation, case.times)
    return {
        "prefix": strategy.prefix_error(),
        "last": strategy.last_error(),
        "sensitivity": strategy.sensitivity(participation),
    }


def total(values: Dict[str, float]) -> Tuple[float, float]:
    """Prefix sums' and the last iterate's noise, at equal privacy."""
    times = values["sensitivity"]
    return values["prefix"] * times, values["last"] * times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="file for their values")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", True)
    import_bare("opacus_ext")
    print("strategy, size, steps, separation: theirs, ours (prefix sums; last; ratio)")
    stored = []
    for case in cases():
        try:
            found = their_values(case)
        except AttributeError:
            print(*case, "- not in this version", sep="  ")
            continue
        stored.append([*case, found])
        ours, others = total(our_values(case)), total(found)
        numbers = "  ".join(f"{x:.6f} {y:.6f}" for x, y in zip(others, ours))
        print(*case, numbers, f"{ours[0] / others[0]:.6f}", sep="  ", flush=True)
    if args.json:
        args.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
