"""Per-sample gradients: rules, runs of single samples, and the modes of DP-SGD."""

from opacus_ext.grad_sample import rules  # noqa: F401
from opacus_ext.grad_sample.samplewise import (  # noqa: F401
    bags,
    branches,
    experts,
    native,
    recurrent,
)
