"""The private functions of torch are there, and do what is relied on."""

import pytest
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import (
    Level,
    is_batched,
    replace_tensor,
)


def test_a_level_is_vmap():
    x = torch.randn(3, 4)
    level = Level(3)
    with level:
        one = level.wrap(x)
        assert is_batched(one) and level.owns(one) and one.shape == (4,)
        assert level.innermost and not is_batched(x)
        y = level.unwrap(one.cumsum(0))
        drawn = level.unwrap(torch.rand(2) + 0 * one[:2])
    assert torch.equal(y, x.cumsum(1)) and drawn.unique().numel() == 6


def test_samples_that_are_not_the_first_dim():
    level = Level(3)
    with level:
        one = level.wrap(torch.arange(12).view(3, 4))
        found = level.unwrap(torch.stack([one, one], 1))
    assert found.shape == (3, 4, 2) and found[1, 0, 0] == 4


def test_outside_is_the_whole_batch():
    level = Level(3)
    with level:
        one = level.wrap(torch.ones(3, 4))
        with level.outside():
            assert not level.innermost
            total = level.unwrap(one).sum()
            with level.outside():
                assert torch.ones(2).shape == (2,)
        assert level.innermost and (one + total).shape == (4,)
        with pytest.raises(ValueError):
            with level.outside():
                raise ValueError
        assert level.innermost


def test_functions_that_are_applied_outside():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            assert not is_batched(x)
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    x, level = torch.ones(3, 4, requires_grad=True), Level(3)
    apply = functorch.apply_outside(level, Double)
    with level:
        y = level.wrap(apply(level.unwrap(level.wrap(x)))).sum()
        out = level.unwrap(y)
    out.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


def test_a_tensor_becomes_another_wherever_it_is_kept():
    level, kept = Level(3), []
    x = torch.ones(3, 4, requires_grad=True)
    with level:
        one = level.wrap(x) * 2
        kept.append(one)
        saved = one.exp()  # autograd saves results, and one's values
        whole = level.unwrap(one)
        out = level.unwrap(saved)
    replace_tensor(one, whole.clone())
    assert kept[0] is one and not is_batched(one) and one.shape == (3, 4)
    (out.sum() + kept[0].sum()).backward()
    torch.testing.assert_close(x.grad, 2 * (2 * torch.ones(3, 4)).exp() + 2)


def test_a_composite_function_shows_its_ops():
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            if functorch.is_composite(func):
                with self:
                    return functorch.descend(func)(*args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    assert functorch.is_composite(F.softmax) and not functorch.is_composite(torch.exp)
    x = torch.randn(3)
    with Mode():
        y = F.softmax(x, dim=0)
    assert torch.Tensor.softmax in seen and torch.allclose(y, x.softmax(0))


def test_checkpoints_are_handed_over():
    def handler(plain, function, *args, **kwargs):
        return plain(function, *args, **kwargs) + 1

    x = torch.ones(2, requires_grad=True)
    with functorch.checkpoints(handler):
        inside = checkpoint(torch.exp, x, use_reentrant=False)
    outside = checkpoint(torch.exp, x, use_reentrant=False)
    assert torch.equal(inside, outside + 1)


def test_autograd_functions_are_handed_over():
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    seen = []

    def handler(function, apply, *args):
        seen.append(function)
        return apply(*args)

    with functorch.functions(handler):
        assert torch.equal(Twice.apply(torch.ones(2)), torch.full((2,), 2.0))
    Twice.apply(torch.ones(2))
    assert seen == [Twice]


def test_whose_memory_it_is():
    x = torch.ones(4)
    y = x.view(2, 2)
    assert not functorch.is_memory_of(x, [x])
    assert functorch.is_memory_of(x, [x, y])
    assert not functorch.is_memory_of(x, [x, y, torch.ones(4)])
