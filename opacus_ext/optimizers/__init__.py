"""
Optimizers whose noise matches the sensitivity of clipping; correlated noise; Adam that
knows the noise.
"""

from opacus_ext.optimizers.noise_aware import AdamBC, ScaledAdam
from opacus_ext.strategies import Banded, BufferedToeplitz, InverseBanded, LambdaCGD

__all__ = [
    "AdamBC",
    "Banded",
    "BufferedToeplitz",
    "InverseBanded",
    "LambdaCGD",
    "ScaledAdam",
]
