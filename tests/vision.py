"""torchvision beside a build of torch that its kernels were not made for.

Its data sets and transforms work then, and so does what imports it (timm); only its
import fails, as it registers something for operators that no one has defined.
"""

from importlib.util import find_spec

import torch

try:
    if find_spec("torchvision"):
        import torchvision  # noqa: F401
except RuntimeError:
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
