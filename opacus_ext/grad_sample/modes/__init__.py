"""The modes of DP-SGD, which differ in what they do with per-sample gradients.

=========== ====== ==============================================================
mode        passes per-sample gradients
=========== ====== ==============================================================
"hooks"     1      materialized into ``p.grad_sample`` (Opacus's interface);
                   "functorch" is the same
"ghost"     2      norms only; then the gradients of the outputs, scaled with the
                   clipping factors, are backpropagated (Lee & Kifer)
"ghost_bk"  1      norms, then the clipped sum, both from the factors
                   (book-keeping, Bu et al. 2023)
"scan"      B      each sample alone by ordinary autograd, clipped and added
"auto"             "ghost_bk" or "scan", whichever is faster
=========== ====== ==============================================================
"""
