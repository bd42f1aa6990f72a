"""A check that users run on their own model: is every mode's clipped sum right?"""

from opacus_ext.checks.check import check_per_sample_gradients, find_leaks
from opacus_ext.checks.report import Cell, PerSampleGradientReport

__all__ = [
    "Cell",
    "PerSampleGradientReport",
    "check_per_sample_gradients",
    "find_leaks",
]
