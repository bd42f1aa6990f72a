"""The errors that the noise of DP-SGD makes in a model, and attention without them."""

from opacus_ext.re_attention.effective import (
    effective_errors,
    gradient_noise,
    token_shares,
)
from opacus_ext.re_attention.propagation import Propagating, Uncertain, propagated
from opacus_ext.re_attention.tracking import ErrorTracker, track_errors

__all__ = [
    "ErrorTracker",
    "Propagating",
    "Uncertain",
    "effective_errors",
    "gradient_noise",
    "propagated",
    "token_shares",
    "track_errors",
]
