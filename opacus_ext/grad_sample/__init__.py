"""Per-sample gradients: factors, rules, the core, and the modes of DP-SGD.

What users of the package import from it is here. The loop, optimizers and checks of the
package take more from its parts.
"""

from opacus_ext.grad_sample.core.clipped_grads import (
    ClippedGrads,
    PerSampleGrads,
    clipped_grads,
    per_sample_grads,
)
from opacus_ext.grad_sample.factors import GradSample, OneHot, workspace
from opacus_ext.grad_sample.rules import Op, as_op, register_rule

__all__ = ["ClippedGrads", "PerSampleGrads", "clipped_grads", "per_sample_grads"]
__all__ += ["GradSample", "OneHot", "workspace", "Op", "as_op", "register_rule"]
