"""Models for private training."""

from .dpformer import DPFormer

__all__ = ["DPFormer"]
