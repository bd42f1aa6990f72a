"""Per-sample gradients: one representation, one tape, every mode."""

# Importing a layer family registers its rules.
from opacus_ext.grad_sample import (  # noqa: F401
    embedding,
    layer_norm,
    linear,
    rms_norm,
)
