"""How the noise of DP-SGD spreads through a model: effective errors and moments."""

from opacus_ext.errors import moments
from opacus_ext.errors.effective import effective_errors, gradient_noise, token_shares
from opacus_ext.errors.moments import Moments

__all__ = [
    "Moments",
    "effective_errors",
    "gradient_noise",
    "moments",
    "token_shares",
]
