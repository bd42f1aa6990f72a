"""Clipping functions, and optimizers whose noise matches their sensitivity."""

from opacus_ext.optimizers.banded import Banded

__all__ = ["Banded"]
