"""
Opacus for the models people train today.

Importing this package beside ``opacus.PrivacyEngine`` extends the modes "hooks" and
"ghost", and adds "ghost_bk".
"""

from opacus_ext.checks import check_per_sample_gradients
from opacus_ext.grad_sample.factors import GradSample, OneHot, workspace
from opacus_ext.grad_sample.leaks import Leak, find_leaks
from opacus_ext.grad_sample.rules.registry import register_forward, register_rule
from opacus_ext.grad_sample.samplewise.native import register_native
from opacus_ext.monitor import Monitor
from opacus_ext.optimizers.clipping import Clipping, automatic, register_clipping
from opacus_ext.re_attention import ErrorTracker, track_errors
from opacus_ext.refused import Refused
from opacus_ext.registry import register, unregister

__version__ = "0.1.0"

__all__ = [
    "Clipping",
    "ErrorTracker",
    "GradSample",
    "Leak",
    "Monitor",
    "OneHot",
    "Refused",
    "automatic",
    "check_per_sample_gradients",
    "find_leaks",
    "register",
    "register_clipping",
    "register_forward",
    "register_native",
    "register_rule",
    "track_errors",
    "unregister",
    "workspace",
]

register()
