"""The errors that the noise of DP-SGD makes in a model, and attention without them."""

from opacus_ext.re_attention.effective import (
    effective_errors,
    gradient_noise,
    token_shares,
)
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.rules import register_propagation
from opacus_ext.re_attention.tracking import ErrorTracker, track_errors
from opacus_ext.re_attention.variances import Variance

__all__ = [
    "ErrorTracker",
    "Propagation",
    "Variance",
    "effective_errors",
    "gradient_noise",
    "register_propagation",
    "token_shares",
    "track_errors",
]
