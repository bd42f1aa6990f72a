import copy
import io
import math

import pytest
import torch
from torch import nn

from opacus_ext.layers import (
    SwitchFeedForward,
    TopKFeedForward,
    balancing_loss,
    freeze_routers,
    load_entropy,
)
from tests.common import check, layer_modes, next_token_loss, wrapped

LAYERS = {
    "switch": lambda **k: SwitchFeedForward(6, 8, 4, **k),
    "capacity": lambda **k: SwitchFeedForward(6, 8, 4, capacity=2, **k),
    "top-2": lambda **k: TopKFeedForward(6, 8, 4, **k),
    "top-3": lambda **k: TopKFeedForward(6, 8, 5, 3, **k),
}
every_layer = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.tokens = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(make() for _ in range(2))
        self.norm = nn.LayerNorm(6)

    def forward(self, ids):
        x, balancing = self.tokens(ids), 0
        for layer in self.layers:
            x = x + layer(self.norm(x))
            balancing = balancing + layer.balancing
        return x @ torch.eye(6, 11).to(x), balancing


def loss_with_balancing(model, ids):
    logits, balancing = model(ids)
    return next_token_loss(logits, ids) + 0.1 * balancing


@layer_modes
@wrapped
@every_layer
@pytest.mark.parametrize("B, T", [(4, 7), (5, 5), (1, 6), (0, 6), (6, 2)])
def test_exact(mode, wrap, make, B, T):
    model = Model(make).double()
    check(mode, wrap, model, torch.randint(11, (B, T)), loss_with_balancing)


@every_layer
def test_each_sample_by_itself(make):
    layer, x = make().double(), torch.randn(4, 7, 6).double()
    together, balancing = layer(x), layer.balancing
    for b in range(4):
        alone = layer(x[b : b + 1])
        torch.testing.assert_close(alone, together[b : b + 1])
        torch.testing.assert_close(layer.balancing, balancing[b : b + 1])


@every_layer
def test_padding_does_not_count(make):
    layer, x = make().double(), torch.randn(3, 7, 6).double()
    mask = torch.arange(7) < torch.tensor([7, 4, 0])[:, None]
    y, balancing = layer(x, mask), layer.balancing
    assert not y[~mask].any() and balancing[2] == 0
    short = layer(x[1:2, :4])
    torch.testing.assert_close(y[1:2, :4], short)
    torch.testing.assert_close(balancing[1:2], layer.balancing)


def test_capacity_drops_the_later_tokens_of_each_sequence():
    layer, x = SwitchFeedForward(6, 8, 4, capacity=2), torch.randn(3, 9, 6)
    full = SwitchFeedForward(6, 8, 4)
    full.load_state_dict(layer.state_dict())
    chosen = full.route(x).argmax(-1)
    place = nn.functional.one_hot(chosen, 4).cumsum(1).gather(2, chosen[..., None])
    kept = place.squeeze(2) <= 2
    assert not kept.all()
    torch.testing.assert_close(layer(x), full(x) * kept[..., None])


def test_balancing_loss_of_known_loads():
    even = torch.full((1, 4, 4), 0.25)
    torch.testing.assert_close(
        balancing_loss(even, torch.arange(4)[None, :, None]), torch.ones(1)
    )
    one = torch.tensor([1.0, 0, 0, 0]).expand(1, 6, 4)
    index = torch.zeros(1, 6, 1, dtype=torch.long)
    torch.testing.assert_close(balancing_loss(one, index), torch.full((1,), 4.0))


@pytest.mark.parametrize(
    "index, load",
    [
        ([0, 1, 2, 3], [1 / 4] * 4),
        ([2, 2, 2], [1]),
        ([0, 0, 0, 1], [3 / 4, 1 / 4]),
        ([[[0, 1], [2, 4]], [[4, 4], [0, 4]]], [1 / 2, 1 / 4, 1 / 4]),  # 4 is none
        ([4, 4], []),
        ([], []),
    ],
)
def test_load_entropy(index, load):
    found = load_entropy(torch.tensor(index, dtype=torch.long), 4)
    expected = -sum(p * math.log(p) for p in load)
    torch.testing.assert_close(found, torch.tensor(float(expected)))


@every_layer
def test_chosen(make):
    """The most probable experts; none where the mask is off."""
    layer, x = make(), torch.randn(3, 7, 6)
    mask = torch.arange(7) < torch.tensor([7, 4, 0])[:, None]
    layer(x, mask)
    p, size = layer.route(x), layer.experts.num_experts
    expected = p.topk(layer.top_k, dim=-1).indices
    assert torch.equal(layer.chosen, expected.masked_fill(~mask[..., None], size))


@every_layer
def test_copies_after_a_call(make):
    layer, x = make(), torch.randn(3, 7, 6)
    y = layer(x)
    torch.save(layer, io.BytesIO())
    assert torch.equal(copy.deepcopy(layer)(x), y)
    assert layer.balancing is not None


def test_balancing_keeps_experts_from_collapsing():
    """A router that prefers one expert: with the loss it spreads out again."""
    entropy = {}
    for weight in (0.0, 1.0):
        torch.manual_seed(0)
        layer, x = SwitchFeedForward(6, 8, 4), torch.randn(16, 12, 6) + 1
        with torch.no_grad():
            layer.router.weight[0] += 0.5
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.02)
        for _ in range(60):
            loss = (layer(x) - x).pow(2).mean((1, 2)) + weight * layer.balancing
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()
        entropy[weight] = load_entropy(layer.chosen, 4)
    assert entropy[1.0] > 0.9 * torch.tensor(4.0).log()
    assert entropy[0.0] < entropy[1.0]


def test_freeze_routers():
    model = Model(LAYERS["switch"])
    names = ["layers.0.router.weight", "layers.1.router.weight"]
    assert freeze_routers(model) == names
    frozen = [n for n, p in model.named_parameters() if not p.requires_grad]
    assert frozen == names
    with pytest.raises(ValueError, match="No router found"):
        freeze_routers(nn.Linear(2, 2))


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: SwitchFeedForward(4, 4, 2, capacity=0), "capacity"),
        (lambda: TopKFeedForward(4, 4, 2, top_k=3), "top_k"),
    ],
)
def test_bad_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()
