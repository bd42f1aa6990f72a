"""Models for private training."""

from opacus_ext.models.dpformer import DPFormer, NextItemModel, RecurrentModel
from opacus_ext.models.prior import TransitionPrior, leave_out

__all__ = [
    "DPFormer",
    "NextItemModel",
    "RecurrentModel",
    "TransitionPrior",
    "leave_out",
]
