"""Optimizers whose noise matches the sensitivity of clipping; correlated noise."""

from opacus_ext.optimizers.banded import Banded
from opacus_ext.optimizers.noise_aware import AdamBC, ScaledAdam

__all__ = ["AdamBC", "Banded", "ScaledAdam"]
