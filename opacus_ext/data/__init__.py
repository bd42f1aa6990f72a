"""Data sets for private training, and ways to draw batches from them."""

from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.sampling import (
    CyclicPoisson,
    FixedSize,
    Poisson,
    Sampling,
    TruncatedPoisson,
)
from opacus_ext.data.users import UserRecords

__all__ = ["CyclicPoisson", "FixedSize", "Poisson", "RecordCollator", "Sampling"]
__all__ += ["TruncatedPoisson", "UserRecords"]
