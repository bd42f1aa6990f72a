"""Data sets for private training, and samplings that draw batches from them."""

from opacus_ext.data.allocation import (
    BallsInBins,
    FixedSize,
    RandomAllocation,
    TruncatedPoisson,
)
from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling
from opacus_ext.data.users import UserRecords

__all__ = [
    "BallsInBins",
    "CyclicPoisson",
    "FixedSize",
    "Poisson",
    "RandomAllocation",
    "RecordCollator",
    "Sampling",
    "TruncatedPoisson",
    "UserRecords",
]
