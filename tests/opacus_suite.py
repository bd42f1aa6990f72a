"""A plugin of pytest: Opacus's own tests, with this package imported.

``python -m pytest -p tests.opacus_suite --pyargs opacus.tests``. These tests use data
sets and models of torchvision, but none of its kernels: one that was built for another
torch does for them, if the operators that it registers something for exist.
"""

import torch

import opacus_ext  # noqa: F401  (importing it registers)

try:
    import torchvision  # noqa: F401
except RuntimeError:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
