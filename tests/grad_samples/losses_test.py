"""Cross entropy of samples that run together, as of each sample alone."""

import pytest
import torch
from torch.nn import functional as F

from opacus_ext import clipped_grads

V = 5
SHAPES = [(V,), (3, V), (3, V, 2), (2, V, 2, 2)]  # of a sample's logits
OPTIONS = [
    dict(),
    dict(reduction="sum"),
    dict(reduction="none"),
    dict(label_smoothing=0.1),
    dict(ignore_index=1),
    dict(ignore_index=1, reduction="sum", label_smoothing=0.2),
    dict(weight=torch.arange(1.0, V + 1).double()),
    dict(size_average=False),
]


@pytest.mark.filterwarnings("ignore:.*size_average")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cross_entropy(shape, options):
    torch.manual_seed(0)
    weight = torch.randn(V, dtype=torch.double, requires_grad=True)
    x = torch.randn(4, *shape).double()
    y = torch.randint(V, (4, *shape[:1], *shape[2:]) if len(shape) > 1 else (4,))
    y[0] = 0  # a sample without ignored labels
    scale = weight if len(shape) == 1 else weight.view(V, *[1] * (len(shape) - 2))

    def loss(sample):
        logits, labels = sample
        logits, labels = logits[0] * scale, labels[0]
        return F.cross_entropy(logits, labels, **options).sum()

    found = clipped_grads(loss, {"w": weight}, (x, y), 0.1)
    total = torch.zeros_like(weight)
    for i in range(4):
        value = loss((x[i : i + 1], y[i : i + 1]))
        assert torch.allclose(found.losses[i], value, 1e-10, equal_nan=True)
        if value.isnan():  # all labels ignored: dropped, as its gradient
            continue
        (grad,) = torch.autograd.grad(value, weight)
        assert torch.allclose(found.norms[i], grad.norm(), 1e-10)
        total += grad * min(1.0, 0.1 / (grad.norm().item() + 1e-6))
    assert torch.allclose(found.sums["w"], total, 1e-10)


def test_an_unknown_reduction_is_torchs_error():
    x, y, weight = torch.randn(2, 3, V), torch.ones(2, 3).long(), torch.ones(V)

    def loss(sample):
        return F.cross_entropy(sample[0][0] * weight, sample[1][0], reduction="avg")

    with pytest.raises(ValueError, match="avg is not a valid value"):
        clipped_grads(loss, {"w": weight.requires_grad_()}, (x, y), 1.0)
