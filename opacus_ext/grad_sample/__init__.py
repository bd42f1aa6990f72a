"""Per-sample gradients: one representation, one tape, every mode."""

# Importing a layer family registers its rules.
from opacus_ext.grad_sample import (  # noqa: F401
    attention,
    bilinear,
    conv,
    embedding,
    experts,
    group_norm,
    layer_norm,
    linear,
    prelu,
    recurrent,
    rms_norm,
)
