"""The loss of the ghost modes is a tensor to who logs it, and clips by sample.

Oracle: each sample alone, its losses weighted and added as numbers (tests/common.py);
for what is logged, the plain mean of the losses.
"""

import copy
import math
import warnings

import pytest
import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch import nn
from torch.nn import functional as F

from opacus_ext.refused import Refused
from tests.common import assert_same, clipped_sum, make_private, oracle, trainable

SIZE = 4


def net():
    torch.manual_seed(0)
    layers = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)
    return nn.Sequential(*layers).double()


def batch_of(seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, 3, generator=g, dtype=torch.float64)
    return x, torch.randint(0, 2, (SIZE,), generator=g)


def private_net(mode="ghost_bk", **kwargs):
    criterion = nn.CrossEntropyLoss()
    return make_private(net(), mode, batch_size=SIZE, criterion=criterion, **kwargs)


def loss_of(private, batch=None):
    x, y = batch or batch_of()
    return private.criterion(private.module(x), y)


def test_it_reads_as_its_value():
    private = private_net()
    loss = loss_of(private)
    x, y = batch_of()
    value = F.cross_entropy(net()(x), y).item()
    assert isinstance(loss, torch.Tensor)
    assert isinstance(loss, DPTensorFastGradientClipping)
    assert loss.loss_per_sample.shape == (SIZE,)
    assert (loss.shape, loss.dim(), loss.dtype) == ((), 0, torch.float64)
    assert loss.requires_grad and loss.device.type == "cpu" and loss.numel() == 1
    for got in (
        float(loss),
        loss.item(),
        loss.tolist(),
        float(loss.detach().cpu().numpy()),
        float(loss.data),
        torch.stack([loss, loss]).mean().item(),
        float(torch.as_tensor(loss)),
        float(copy.deepcopy(loss.detach())),
        float(loss.mean()),
        float(loss.sum()),
        loss.exp().log().item(),
        float(max(loss, loss - 1)),
        float(min(math.inf, loss)),
    ):
        assert abs(got - value) < 1e-12
    assert f"{loss:.3f} {int(loss + 3)}" == f"{value:.3f} {int(value + 3)}"
    assert f"{value:.4f}" in str(loss) and f"{value:.4f}" in repr(loss)
    assert loss < value + 1 and loss > 0 and not torch.isnan(loss)
    assert torch.isfinite(loss) and not math.isnan(loss) and bool(loss)
    assert type(loss.detach()) is torch.Tensor and not loss.detach().requires_grad
    with torch.no_grad():
        assert type(loss * 2) is torch.Tensor
        assert not loss_of(private).requires_grad


EXPRESSIONS = {
    "itself": (lambda a, b: a, lambda a, b: a),
    "scaled": (lambda a, b: 2 * a * 0.25, lambda a, b: a / 2),
    "sum": (lambda a, b: a + b, lambda a, b: a + b),
    "sum()": (lambda a, b: sum([a, b]), lambda a, b: a + b),
    "from zeros": (lambda a, b: torch.zeros(()) + a - b, lambda a, b: a - b),
    "weighted": (lambda a, b: 1 - (-a - 0.3 * b), lambda a, b: a + 0.3 * b),
    "functions": (
        lambda a, b: torch.add(a, b, alpha=3).mean(),
        lambda a, b: a + 3 * b,
    ),
}


@pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_arithmetic_keeps_samples(name, mode):
    of_losses, of_numbers = EXPRESSIONS[name]
    private = private_net(mode, max_grad_norm=0.3)
    plain = net()
    for step in range(2):
        first, second = batch_of(step), batch_of(step + 10)

        def losses(model, batch):
            x, y, x2, y2 = batch
            a = F.cross_entropy(model(x), y, reduction="none")
            b = F.cross_entropy(model(x2), y2, reduction="none")
            return of_numbers(a, b)

        grads = oracle(plain, (*first, *second), losses)
        expected = clipped_sum(grads, "flat", 0.3)
        a, b = loss_of(private, first), loss_of(private, second)
        loss = of_losses(a, b)
        with torch.no_grad():
            value = losses(plain, (*first, *second)).mean()
        shift = 1 if name == "weighted" else 0
        assert abs(loss.item() - value - shift) < 1e-6
        private.optimizer.zero_grad()
        loss.backward()
        got = {n: p.grad for n, p in trainable(private.module._module).items()}
        assert_same(got, expected)
        private.optimizer.step()
        with torch.no_grad():
            for n, p in plain.named_parameters():
                p -= expected[n] / SIZE


LOST = {
    "stack": lambda loss, p: torch.stack([loss, loss]).sum().backward(),
    "function": lambda loss, p: loss.exp().backward(),
    "product": lambda loss, p: (loss * loss).backward(),
    "focal": lambda loss, p: ((1 - torch.exp(-loss)) ** 2 * loss).backward(),
    "weight of the batch": lambda loss, p: (loss * (loss / 2).tanh()).backward(),
    "by sample": lambda loss, p: (loss * torch.arange(4.0)).sum().backward(),
    "quotient": lambda loss, p: (1 / loss).backward(),
    "autograd.grad": lambda loss, p: torch.autograd.grad(loss, p),
    "autograd.grad of several": lambda loss, p: torch.autograd.grad([loss], p),
    "autograd.backward": lambda loss, p: torch.autograd.backward(loss),
    "hook": lambda loss, p: loss.register_hook(lambda grad: 2 * grad),
    "gradient": lambda loss, p: loss.backward(gradient=torch.ones(())),
    "graph": lambda loss, p: loss.backward(create_graph=True),
    "inputs": lambda loss, p: loss.backward(inputs=p),
    "twice": lambda loss, p: (loss.backward(), loss.backward()),
}


@pytest.mark.parametrize("name", LOST)
def test_lost_samples_are_refused(name):
    private = private_net()
    params = list(private.module.parameters())
    with pytest.raises(Refused, match="private loss|computed from a loss|same loss"):
        LOST[name](loss_of(private), params)
    if name != "twice":
        assert all(p.grad is None for p in params)


@pytest.mark.parametrize("mode", ["ghost_bk", "ghost"])
def test_a_trained_head_outside_of_the_model_is_refused(mode):
    """It would get no gradient, without a word; a frozen one is fine."""
    private, head = private_net(mode), nn.Linear(2, 2).double()
    x, y = batch_of()
    for loss in (
        private.criterion(head(private.module(x)), y),
        loss_of(private) * nn.Parameter(torch.ones(())),
    ):
        with pytest.raises(Refused, match="the loss is computed by another model"):
            loss.backward()
    head.requires_grad_(False)
    private.criterion(head(private.module(x)), y).backward()


def test_losses_of_two_models():
    one, two = private_net(), private_net()
    with pytest.raises(Refused, match="losses of the same samples and model"):
        (loss_of(one) + loss_of(two)).backward()


def test_division_is_told_once():
    private, other = private_net(), private_net()
    with pytest.warns(UserWarning, match="divided by 8 .*BatchMemoryManager"):
        (loss_of(private) / 4 / 2 + 0).backward()
    private.optimizer.step()
    private.optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = loss_of(private)
        loss /= 4
        loss.backward()
        (loss_of(other) / 1).backward()
