"""Models for private training."""

from opacus_ext.models.dpformer import DPFormer, NextItemModel, RecurrentModel

__all__ = ["DPFormer", "NextItemModel", "RecurrentModel"]
