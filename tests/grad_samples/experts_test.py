"""Stacked experts, ours and those of transformers, and rows that routers move."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext.layers import Experts, balancing_loss
from opacus_ext.refused import Refused
from tests.common import next_token_loss, run_mode, square_loss
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
