"""How the noise of DP-SGD spreads through a model: effective errors and moments."""

from opacus_ext.re_attention import moments
from opacus_ext.re_attention.distraction import Distraction, attention_mass, distraction
from opacus_ext.re_attention.effective import (
    effective_errors,
    gradient_noise,
    token_shares,
)
from opacus_ext.re_attention.moments import Moments
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.rules import register_propagation
from opacus_ext.re_attention.tracking import ErrorTracker, track_errors
from opacus_ext.re_attention.variances import Variance

__all__ = [
    "Distraction",
    "ErrorTracker",
    "Moments",
    "Propagation",
    "Variance",
    "attention_mass",
    "distraction",
    "effective_errors",
    "gradient_noise",
    "moments",
    "register_propagation",
    "token_shares",
    "track_errors",
]
