"""
Recommenders with user-level privacy: from a table of who did what to a model that names
the next items. ``opacus-ext recommend`` does all of it.
"""

from opacus_ext.recommend.ranking import evaluate
from opacus_ext.recommend.recommender import Recommender
from opacus_ext.recommend.sequences import (
    SequenceData,
    read_sequences,
    synthetic_sequences,
)

__all__ = [
    "Recommender",
    "SequenceData",
    "evaluate",
    "read_sequences",
    "synthetic_sequences",
]
