"""Data sets for private training."""

from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.sequences import (
    SequenceData,
    read_sequences,
    synthetic_sequences,
)

__all__ = ["RecordCollator", "SequenceData", "read_sequences", "synthetic_sequences"]
