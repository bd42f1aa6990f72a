"""Attention distraction: weights written out, and what theory says of them."""

import copy

import pytest
import torch
from torch import nn

from benchmarks.distraction import attention_mass, distraction
from opacus_ext.layers import corrected_attention
from opacus_ext.models import DPFormer
from tests.re_attention.common import track


def test_mass_is_the_sum_of_weights():
    torch.manual_seed(0)
    model = DPFormer(12, 8, width=8, dropout=0.0).double().eval()
    nn.init.normal_(model.embedding.weight, std=0.3)
    ids = torch.randint(1, 13, (3, 6))
    found = attention_mass(model, ids, ids > 6)
    x = model.embedding(ids) * 8**0.5 + model.position(torch.arange(6))
    q, k, _ = model.blocks[0].attention.qkv(x).chunk(3, dim=-1)
    hidden = torch.ones(6, 6, dtype=torch.bool).triu(1)
    weights = torch.softmax((q @ k.mT / 8**0.5).masked_fill(hidden, -torch.inf), -1)
    expected = (weights * (ids > 6)[:, None, :]).sum(-1)
    torch.testing.assert_close(found[0], expected)
    # Of corrected weights, which sum to less than 1 on the scores.
    tracker = track(model, where="scores", noise=1.0)
    assert (attention_mass(model, ids, ids > 0)[0] < 1 - 1e-6).all()
    tracker.where = "logits"
    mass = attention_mass(model, ids, ids > 0)[0]
    torch.testing.assert_close(mass, torch.ones_like(mass))


@pytest.mark.parametrize("variance", [0.07, 0.3, 1.0])
def test_independent_errors_of_keys_are_taken_back(variance):
    """Equation 5.2 as it stands: noise raises rare tokens, the correction lowers."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 16), torch.randn(20, 16) / 2
    rare = torch.arange(20) < 10
    value, plain = rare[:, None].float(), torch.zeros(20, 1)
    noise = variance * 16 / q.square().sum() * rare[:, None]
    free = corrected_attention(q, k, value, plain)
    keys = k + noise.sqrt() * torch.randn(4000, 20, 16)
    many = q.expand(4000, 1, 16), keys, value.expand(4000, 20, 1)
    raised = corrected_attention(*many, plain).mean() - free
    left = corrected_attention(*many, noise).mean() - free
    assert raised > variance / 20
    assert left.abs() < raised / 3


def test_distraction_by_the_parameters_noise():
    """Errors of a query and of its own key are the same: nothing exact is left."""
    torch.manual_seed(0)
    model = DPFormer(40, 20, width=16, depth=1, dropout=0.0)
    nn.init.normal_(model.embedding.weight, std=0.25)
    shares = torch.cat(
        [torch.zeros(1), torch.full((20,), 0.9), torch.full((20,), 0.05)]
    )
    track(model, {"embedding.weight": shares}, 0.02, cap=None)
    ids = torch.randint(1, 41, (64, 20))
    before = copy.deepcopy(model.state_dict())
    found = distraction(
        model, ids, shares < 0.1, 20, generator=torch.Generator().manual_seed(0)
    )
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items())
    assert found.noisy > found.noise_free + 0.01
    assert found.corrected < found.noisy - 0.01
    assert 0.4 < found.uniform < 0.6
