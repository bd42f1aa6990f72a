"""Optimizers whose noise matches the sensitivity of clipping; correlated noise."""

from opacus_ext.optimizers.banded import Banded

__all__ = ["Banded"]
