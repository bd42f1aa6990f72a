"""The sizes, batches and steps of configurations, the same for every budget."""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np

from opacus_ext.planner.budget import Range
from opacus_ext.refused import Refused

# Points to a factor of two. Those of batches and steps divide those of sizes: at any
# size, batches and steps then leave the same share of the compute unused, which does
# not favor a size.
POINTS = {"parameters": 8, "trainable": 8, "batch_size": 4, "steps": 8}


def lattice(name: str, covered: Tuple[float, float], wanted: Range) -> np.ndarray:
    """
    Whole numbers of a range, the same for every budget: a wider range contains a
    narrower one. The ends of a wanted range are included.
    """
    points = POINTS[name]
    low, high = covered
    if wanted is not None:
        low, high = max(low, wanted[0]), min(high, wanted[1])
        if low > high:
            given = " to ".join(f"{end:g}" for end in sorted(set(wanted)))
            raise Refused(
                f"{name}={given} is outside of what is known, {covered[0]:g} to "
                f"{covered[1]:g}.",
                parameter=name,
            )
    first = math.floor(points * math.log2(low))
    last = math.ceil(points * math.log2(high))
    values = np.round(2.0 ** (np.arange(first, last + 1) / points))
    values = values[(values >= low) & (values <= high)]
    # An end that was asked for, not one that a budget set: a larger one moves that.
    ends = [] if wanted is None else [math.ceil(wanted[0]), math.floor(wanted[1])]
    if name != "batch_size" and wanted is None:
        ends = [math.ceil(low), math.floor(high)]
    values = np.unique([*values, *(e for e in ends if low <= e <= high)])
    if not len(values):
        raise Refused(
            f"There is no whole number of {name} in [{low:g}, {high:g}].",
            parameter=name,
        )
    return values
