"""Data sets for private training, and how batches are drawn from them."""

from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.sampling import (
    CyclicPoisson,
    FixedSize,
    Poisson,
    Sampling,
    TruncatedPoisson,
)
from opacus_ext.data.sequences import (
    SequenceData,
    read_sequences,
    synthetic_sequences,
)
from opacus_ext.data.users import UserRecords

__all__ = [
    "CyclicPoisson",
    "FixedSize",
    "Poisson",
    "RecordCollator",
    "Sampling",
    "SequenceData",
    "TruncatedPoisson",
    "UserRecords",
    "read_sequences",
    "synthetic_sequences",
]
