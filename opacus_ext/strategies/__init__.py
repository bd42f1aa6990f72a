"""
Strategies of correlated noise: the matrices C by which ``make_private(noise=...)`` adds
``C^-1 Z`` to the gradients, with independent ``Z``.
"""

from opacus_ext.strategies.banded import Banded
from opacus_ext.strategies.buffered import BufferedToeplitz
from opacus_ext.strategies.inverse_banded import InverseBanded
from opacus_ext.strategies.lambda_cgd import LambdaCGD
from opacus_ext.strategies.strategy import Participation, Strategy

__all__ = [
    "Banded",
    "BufferedToeplitz",
    "InverseBanded",
    "LambdaCGD",
    "Participation",
    "Strategy",
]
