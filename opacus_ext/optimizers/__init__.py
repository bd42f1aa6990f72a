"""Optimizers whose noise matches the sensitivity of clipping; correlated noise."""

from opacus_ext.strategies import (
    Banded,
    BufferedToeplitz,
    InverseBanded,
    LambdaCGD,
)

__all__ = ["Banded", "BufferedToeplitz", "InverseBanded", "LambdaCGD"]
