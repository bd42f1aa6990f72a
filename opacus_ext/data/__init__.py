"""Data sets for private training."""

from .sequences import SequenceData, read_sequences, synthetic_sequences

__all__ = ["SequenceData", "read_sequences", "synthetic_sequences"]
