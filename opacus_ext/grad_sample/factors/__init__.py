"""A per-sample gradient as a sum of rank-one terms.

The gradient of sample ``b`` with respect to one parameter is ``G[b] = sum_t f1[b, t]
(x) f2[b, t] (x) ...``, with one factor for each axis of the parameter. A factor is
either dense rows ``[B, T, width]`` or one-hot rows, given by an index ``[B, T]``
(:class:`OneHot`). All modes of DP-SGD use three operations of :class:`GradSample`:
materialize, squared norm, weighted sum.

Source: ghost norms for dense layers (Lee & Kifer 2020; Li et al. 2021), for a tied
embedding (DPFormer, claim 4.1, whose printed square on the first term is a misprint).
"""

from opacus_ext.grad_sample.factors.grad_sample import (  # noqa: F401
    GradSample,
    OuterProducts,
    Term,
    covers,
    scale_of,
)
from opacus_ext.grad_sample.factors.rows import (  # noqa: F401
    ROUNDING,
    Factor,
    OneHot,
    Scale,
    Squares,
    dtype_of,
    full_precision,
    inverse_of,
    norm_of_each,
    real_rows,
    rounded_down,
    sample_norms,
    scaled_norms,
    square_sum,
    sums_wide,
    tf32_settings,
    times,
    upcast,
    workspace,
)
