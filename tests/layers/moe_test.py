import copy
import io
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.func import functional_call, grad, vmap

from opacus_ext import clipped_grads
from opacus_ext.layers import (
    SwitchFeedForward,
    TopKFeedForward,
    balancing_loss,
    freeze_routers,
    load_entropy,
)
from tests.common import (
    MODES,
    assert_same,
    check,
    clipped_sum,
    layer_modes,
    next_token_loss,
    oracle,
    trainable,
    wrapped,
)

LAYERS = {
    "switch": lambda **k: SwitchFeedForward(6, 8, 4, **k),
    "capacity": lambda **k: SwitchFeedForward(6, 8, 4, capacity=2, **k),
    "factor": lambda **k: SwitchFeedForward(6, 8, 4, capacity_factor=1.0, **k),
    "top-2": lambda **k: TopKFeedForward(6, 8, 4, **k),
    "top-3": lambda **k: TopKFeedForward(6, 8, 5, 3, **k),
}
LAYERS |= {
    f"{name}, padded": partial(LAYERS[name], dispatch="padded")
    for name in ("factor", "top-2")
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
def test_under_vmap(make):
    """torch.func alone, with other tokens masked in each sample."""
    layer, x = make().double(), torch.randn(4, 7, 6).double()
    mask = torch.arange(7) < torch.tensor([7, 4, 0, 1])[:, None]

    def loss(weights, x, mask):
        y = functional_call(layer, weights, (x[None], mask[None]))
        return y.square().sum() + layer.balancing.sum()

    def losses(layer, batch):
        return layer(*batch).square().sum((1, 2)) + layer.balancing

    expected = oracle(layer, (x, mask), losses)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    assert_same(vmap(grad(loss), (None, 0, 0))(weights, x, mask), expected)


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


@pytest.mark.parametrize(
    "factor, tokens, experts, capacity",
    [
        (1.0, 8, 4, 2),
        (1.0, 9, 4, 3),
        (1.25, 8, 4, 3),
        (1.1, 50, 5, 11),  # 12 in floating point
        (np.float32(1.1), 50, 5, 11),
        (1, 8, 4, 2),
        (1e-6, 9, 4, 1),
        (math.inf, 9, 4, 9),
    ],
)
@pytest.mark.parametrize("padding", [0, 7])
def test_capacity_factor(factor, tokens, experts, capacity, padding):
    """A share of a sequence's own tokens, rounded up; padding has no part in it."""
    layer = SwitchFeedForward(6, 8, experts, capacity_factor=factor)
    known = SwitchFeedForward(6, 8, experts, capacity=capacity)
    known.load_state_dict(layer.state_dict())
    x, mask = torch.randn(2, tokens + padding, 6), torch.arange(tokens + padding)
    x[..., 0] = layer.router.weight[0, 0].sign() * 30  # most go to one expert
    mask = (mask < tokens).expand(2, -1)
    assert torch.equal(layer(x, mask), known(x, mask))
    if padding:
        mask = torch.stack([mask[0], mask[0] & False])
        assert torch.equal(layer(x, mask)[0], known(x, mask)[0])


# -- experts whose tokens are padded -----------------------------------------------


def twins(make, steer=(), frozen=None, dtype=torch.double):
    """
    A padded model and its gathered twin. ``steer`` is added to the router's logits, by
    a feature that the norm sets to one.
    """
    model = Model(partial(make, dispatch="padded")).to(dtype)
    with torch.no_grad():
        model.norm.weight[0], model.norm.bias[0] = 0, 1
        for layer in model.layers:
            layer.router.weight[: len(steer), 0] = torch.tensor(steer).to(dtype)
    for name, p in model.named_parameters():
        p.requires_grad = frozen is None or frozen not in name
    twin = copy.deepcopy(model)
    for layer in twin.layers:
        layer.experts.dispatch = "gathered"
    return model, twin


PADDED = {
    "one expert gets all": dict(steer=(9.0, 0, 0, 0)),
    "an expert gets nothing": dict(steer=(0.0, 0, 0, -9)),
    "two experts get nothing": dict(make=LAYERS["top-2"], steer=(9.0, 0, 0, 9)),
    "router": dict(frozen="router"),
    "experts": dict(frozen="experts"),
    "up": dict(frozen="up_proj", make=LAYERS["capacity"]),
}


@pytest.mark.parametrize("mode", [*MODES, "scan"])
@pytest.mark.parametrize("name", PADDED)
def test_padded_as_gathered(name, mode):
    """The gradients, alone through gathered experts; and outputs without any."""
    given = {"make": LAYERS["switch"], **PADDED[name]}
    model, twin = twins(**given)
    ids, how = torch.randint(11, (4, 5)), dict(loss_fn=loss_with_balancing)
    check(mode, True, model, ids, **how, grads=oracle(twin, ids, **how))
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(ids), twin.eval()(ids))


def test_experts_see_padded_rows(monkeypatch):
    """As many as the expert gets that gets most, over all samples; private or not."""
    seen, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: seen.append(a.shape) or bmm(a, b))
    layer, x = SwitchFeedForward(6, 8, 4, dispatch="padded"), torch.randn(3, 7, 6)
    layer(x)
    most = int(torch.bincount(layer.chosen.flatten()).max())
    expected = [(4, most, 6), (4, most, 8)]
    assert seen == expected
    clipped_grads(lambda x: layer(x).square().sum(), trainable(layer), x, 1.0)
    assert seen[2:4] == expected
    seen.clear()
    layer.experts.dispatch = "gathered"
    layer(x)
    assert not seen


def clipping(model):
    def clip(ids):
        loss = partial(loss_with_balancing, model)
        return clipped_grads(lambda x: loss(x)[0], trainable(model), ids, 0.3).sums

    return clip


def expected_of(twin, ids):
    return clipped_sum(oracle(twin, ids, loss_with_balancing), "flat", 0.3)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["factor", "top-2"])
def test_padded_in_compiled_steps(name):
    """How far rows are padded is no part of the program."""
    model, twin = twins(LAYERS[name])
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    step = torch.compile(clipping(model), backend=counter, fullgraph=True)
    for ids in torch.randint(11, (2, 3, 5)):
        assert_same(step(ids), expected_of(twin, ids))
    assert counter.frame_count == 1


def test_padded_in_bfloat16():
    model, twin = twins(LAYERS["switch"], (3.0,), dtype=torch.bfloat16)
    ids = torch.randint(11, (4, 5))
    got = {name: g.double() for name, g in clipping(model)(ids).items()}
    assert_same(got, expected_of(twin.double(), ids), 0.05)


# -- routers ------------------------------------------------------------------------


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
        (lambda: SwitchFeedForward(4, 4, 2, capacity=math.nan), "capacity.*got nan"),
        (lambda: SwitchFeedForward(4, 4, 2, capacity_factor="2"), "number .*got '2'"),
        (lambda: SwitchFeedForward(4, 4, 2, 3, 1.0), "both given. Give one"),
        (lambda: SwitchFeedForward(4, 4, 2, capacity_factor=0), "1e-6 or more.*got 0"),
        (lambda: SwitchFeedForward(4, 4, 2, capacity_factor=math.nan), "got nan"),
        (lambda: SwitchFeedForward(4, 4, 2, dispatch="batched"), "got 'batched'"),
        (lambda: TopKFeedForward(4, 4, 2, dispatch=None), "'padded'.*got None"),
        (lambda: TopKFeedForward(4, 4, 2, top_k=3), "top_k"),
    ],
)
def test_bad_settings(make, match):
    with pytest.raises(ValueError, match=match):
        make()
