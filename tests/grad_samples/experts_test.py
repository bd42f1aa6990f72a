"""Stacked experts, ours and those of transformers, and rows that routers move."""

import pytest
import torch
from torch import nn
from torch.func import grad, vmap
from torch.nn import functional as F

from opacus_ext.grad_sample.rules.experts import grouped_linear
from opacus_ext.layers import Experts, balancing_loss
from opacus_ext.refused import Refused
from tests.common import next_token_loss, oracle, run_mode, square_loss
from tests.grad_samples.moe_families_test import batch_of, build, loss_fn
from tests.grad_samples.rule_case import MODE, exact

# -- ways to write a mixture of experts ------------------------------------------------


def by_mask(experts, x, weights, chosen):
    out = torch.zeros_like(x)
    for i, expert in enumerate(experts):
        mask = (chosen == i).any(-1)
        if mask.any():
            share = (weights * (chosen == i)).sum(-1)
            out[mask] += expert(x[mask]) * share[mask][:, None]
    return out


def stacked(experts, x, weights, chosen):
    return experts(x, chosen, weights)


def capped(experts, x, weights, chosen):
    """No expert takes more than two tokens of what is called the batch."""
    place = F.one_hot(chosen[:, 0], len(experts)).cumsum(0).gather(1, chosen[:, :1])
    return by_mask(experts, x, weights * (place <= 2), chosen)


WAYS = (by_mask, stacked, capped)
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


class Mixture(nn.Module):
    def __init__(self, way, k=2, **kwargs):
        super().__init__()
        self.way, self.k, self.router = way, k, nn.Linear(4, 4)
        if way is stacked:
            self.experts = Experts(4, 5, 4, **kwargs)
            return
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4)) for _ in "abcd"
        )

    def forward(self, x, chosen=None):
        flat = x.flatten(0, 1)
        weights, best = self.router(flat).softmax(-1).topk(self.k, dim=-1)
        chosen = best if chosen is None else chosen.reshape(-1, 1)
        return self.way(self.experts, flat, weights, chosen).view_as(x)


class Mixtures(nn.Module):
    """Two mixtures, the second on the output of the first; or one, twice."""

    def __init__(self, *args, twice=False, **kwargs):
        super().__init__()
        self.first, self.norm = nn.Linear(3, 4), nn.LayerNorm(4)
        made = [Mixture(*args, **kwargs) for _ in range(2 - twice)]
        self.mixtures = nn.ModuleList(made * (1 + twice))

    def forward(self, x, chosen=None):
        x = self.first(x)
        for mixture in self.mixtures:
            x = x + mixture(self.norm(x), chosen)
        return x


@ways
def test_sizes(way):
    for k, sizes in ((2, ((4, 6), (1, 6), (6, 1), (0, 3))), (1, ((5, 5), (3, 40)))):
        for B, T in sizes:
            x = torch.randn(B, T, 3).double()
            exact(Mixtures(way, k).double(), x, square_loss)


ROUTES = {
    "each expert gets B tokens, of mixed samples": torch.tensor(
        [[0, 0, 1, 2], [3, 0, 1, 1], [2, 2, 3, 0], [1, 3, 3, 2]]
    ),
    "one expert gets all": torch.full((4, 4), 2),
    "a sample has an expert of its own": torch.arange(4)[:, None].expand(4, 4),
    "some are dropped": torch.arange(16).view(4, 4) % 5,
}


@ways
@pytest.mark.parametrize("route", ROUTES)
def test_routes(way, route):
    """Four samples, four tokens, four experts: every shape looks like a batch."""
    if "dropped" in route and way is capped:
        pytest.skip("has no expert to drop tokens to")

    class Routed(Mixtures):
        def forward(self, x):
            return super().forward(x[..., :3], x[..., 3].long())

    x = torch.cat([torch.randn(4, 4, 3), ROUTES[route][..., None]], dim=-1).double()
    exact(Routed(way, k=1).double(), x, square_loss)


@ways
@pytest.mark.parametrize("frozen", ["router", "mixtures.0.experts", "first", "up", ""])
def test_frozen_and_used_twice(way, frozen):
    model = Mixtures(way, twice=not frozen).double()
    for name, p in model.named_parameters():
        p.requires_grad = not frozen or frozen not in name
    exact(model, torch.randn(4, 6, 3).double(), square_loss)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_kinds_of_stacked_experts(gated, bias):
    for B, T in ((4, 6), (5, 5), (0, 3)):
        model = Mixtures(stacked, gated=gated, bias=bias).double()
        exact(model, torch.randn(B, T, 3).double(), square_loss)


def of_backward(value, weight):
    weight = weight.clone().requires_grad_()
    value(weight).backward()
    return weight.grad


def without_grad(f, x, w):
    with torch.no_grad():
        y = f(x, w)
    return x.sum() * y


# Gradients of weights through a gradient of inputs, by levels of torch.func.
LEVELS = {
    "grad, grad": lambda f, x, w: grad(lambda w: grad(f)(x, w).square().sum())(w),
    "backward, grad": lambda f, x, w: of_backward(
        lambda w: grad(f)(x, w).square().sum(), w
    ),
    "backward, vmap, grad": lambda f, x, w: of_backward(
        lambda w: vmap(grad(f), (0, None))(torch.stack([x, 2 * x]), w).norm(), w
    ),
    "grad, vmap, grad": lambda f, x, w: grad(
        lambda w: vmap(grad(f), (None, 0))(x, torch.stack([w, 2 * w])).norm()
    )(w),
    "no_grad inside": lambda f, x, w: grad(
        lambda w: grad(lambda x: without_grad(f, x, w))(x).norm() + w.sum()
    )(w),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", LEVELS)
def test_levels_of_torch_func(name, padded):
    """None is forgotten: each level records what the one above it computes."""
    index, x = torch.tensor([0, 2, 2, 1, 3]), torch.randn(5, 4).double()
    weight = torch.randn(3, 4, 2).double()

    def ours(x, w):
        return grouped_linear(x, index, w, padded=padded).pow(3).sum()

    def plain(x, w):
        weights = torch.cat([w, torch.zeros_like(w[:1])])[index]
        return (x.unsqueeze(1) @ weights).pow(3).sum()

    of = LEVELS[name]
    torch.testing.assert_close(of(ours, x, weight), of(plain, x, weight))


def by_autograd(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x, create_graph=True)[0]

    return gradient


def test_penalty_by_torch_func():
    """The gradient of each sample, in its loss; the oracle has it by autograd."""

    class Penalized(Mixtures):
        def forward(self, x):
            run = super().forward
            return self.way(lambda x: run(x).square().sum())(x)

    model, x = Penalized(stacked).double(), torch.randn(3, 4, 3).double()
    model.way = by_autograd
    grads = oracle(model, x, square_loss)
    model.way = grad
    exact(model, x, square_loss, grads=grads)


def test_router_logits_have_no_dim_of_samples():
    """Mixtral's are [B * T, experts]: of no row it is known whose it is."""

    def loss(model, batch):
        ids = batch["input_ids"]
        output = model(**batch, output_router_logits=True, use_cache=False)
        losses = next_token_loss(output.logits, ids)
        for logits in output.router_logits:
            p = logits.softmax(-1).unflatten(0, ids.shape)
            losses = losses + balancing_loss(p, p.topk(2).indices)
        return losses

    batch = batch_of(4, 6)
    with pytest.raises(Refused, match="router_logits"):
        run_mode(*MODE, build("mixtral"), batch, loss)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_default_implementation(family):
    """Grouped products in float32, as the model ships."""
    model = build(family)
    model.set_experts_implementation("grouped_mm")
    exact(model, batch_of(4, 6), loss_fn, tolerance=5e-3)


@pytest.mark.gpu
def test_bfloat16_on_gpu():
    torch.manual_seed(0)
    model = Mixtures(stacked, k=1, gated=True, bias=True).to("cuda", torch.bfloat16)
    batch = torch.randn(3, 6, 3, device="cuda", dtype=torch.bfloat16)
    chosen = torch.randint(4, (3, 6), device="cuda")  # rounding must not reroute
    exact(model, (batch, chosen), square_loss, tolerance=0.05)
