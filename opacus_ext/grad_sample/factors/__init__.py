"""A per-sample gradient as a sum of rank-one terms.

For every layer that matters here the gradient of sample ``b`` with respect to one
parameter is ``G[b] = sum_t f1[b, t] (x) f2[b, t] (x) ...``, one factor for each axis
of the parameter. A factor is either dense rows ``[B, T, width]`` or one-hot rows,
given by an index ``[B, T]`` (:class:`OneHot`). Every mode of DP-SGD is one of four
operations on that object, :class:`GradSample`.

====================  ================================================================
file                  holds
====================  ================================================================
``settings``          :func:`workspace`, the one setting
``rows``              the factors: what a rule returns
``term``              what a structure must have, :class:`~term.Term`
``batched``           structures of batched rows: one factor, dense, with one-hot ones
``ragged``            rows in any order, beside the sample of each
``deferred``          blocks of rows, and rows that are computed for some samples
``columns``           rows that are computed for some columns as well
``segments, gram``    how rows meet: by equal index, or all with all
``cost``              which way is cheaper
``sums``              the four operations on several terms
``grad_sample``       :class:`GradSample`
====================  ================================================================

Source: ghost norms for dense layers (Lee & Kifer 2020; Li et al. 2021), for a tied
embedding (DPFormer, claim 4.1, whose printed square on the first term is a misprint).
"""

from opacus_ext.grad_sample.factors.grad_sample import GradSample, resolved
from opacus_ext.grad_sample.factors.rows import (
    Blocks,
    Columns,
    Factor,
    Lazy,
    OneHot,
    Ragged,
    known,
    pad_rows,
    wide,
)
from opacus_ext.grad_sample.factors.settings import workspace

__all__ = [
    "Blocks",
    "Columns",
    "Factor",
    "GradSample",
    "Lazy",
    "OneHot",
    "Ragged",
    "known",
    "pad_rows",
    "resolved",
    "wide",
    "workspace",
]
