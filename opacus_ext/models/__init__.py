"""Models for private training."""

from .dpformer import DPFormer, NextItemModel, RecurrentModel

__all__ = ["DPFormer", "NextItemModel", "RecurrentModel"]
