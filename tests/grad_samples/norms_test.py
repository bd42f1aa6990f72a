"""Norms over features, groups of channels and single channels."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.common import Net, run_mode, square_loss
from tests.grad_samples.rule_case import BOTH, MODE, RuleCase, RuleTests, exact, rows


def maps(*channels):
    return lambda B, T: torch.randn(B, *channels, T + 1)


class GemmaLike(LlamaRMSNorm):
    """Scales by 1 + weight."""

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * (1.0 + self.weight)


class MeanLike(LlamaRMSNorm):
    """Has the names of an RMSNorm and computes something else."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return self.weight.sin() * x / (x.abs().mean(-1, keepdim=True) + 1)


class TestLayerNorm(RuleTests):
    ops = (nn.functional.layer_norm,)
    cases = {
        "features": RuleCase(lambda: nn.LayerNorm(4), rows(4)),
        "[B, d]": RuleCase(lambda: nn.LayerNorm(4), lambda B, T: torch.randn(B, 4)),
        "two dims": RuleCase(lambda: nn.LayerNorm((2, 3), eps=0.1), rows(2, 3)),
        "without bias": RuleCase(lambda: nn.LayerNorm(4, bias=False), rows(4)),
    }


class TestRMSNorm(RuleTests):
    cases = {
        "features": RuleCase(lambda: nn.RMSNorm(4), rows(4)),
        "two dims": RuleCase(lambda: nn.RMSNorm((2, 3), eps=0.1), rows(2, 3)),
        "like Gemma's": RuleCase(lambda: GemmaLike(4), rows(4)),
        "not one": RuleCase(lambda: MeanLike(4), rows(4)),
    }


class TestGroupNorm(RuleTests):
    cases = {
        "groups": RuleCase(lambda: nn.GroupNorm(2, 4), maps(4)),
        "[B, C]": RuleCase(lambda: nn.GroupNorm(2, 4), lambda B, T: torch.randn(B, 4)),
        "one group": RuleCase(lambda: nn.GroupNorm(1, 3, eps=0.1), maps(3, 2)),
    }


def frames(m, x):
    """Several rows of a sample, of whose output a view is taken."""
    return m.norm(x.flatten(0, 1)).view(len(x), -1)


def inner_vmap(m, x):
    return torch.vmap(lambda row: m.norm(row[None])[0])(m.first(x))


@pytest.mark.filterwarnings("error:.*one sample after the other")
@pytest.mark.parametrize("then", [frames, inner_vmap])
def test_group_norm_at_once(then):
    norm = nn.GroupNorm(2, 4, affine=then is frames)
    model = Net(then, norm=norm, first=nn.Conv1d(4, 4, 1)).double()
    shape = (3, 4, 5) if then is frames else (4, 5)
    exact(model, torch.randn(3, *shape).double(), square_loss, BOTH)


def test_group_norm_of_a_wrong_weight():
    model = Net(lambda m, x: F.group_norm(x, 2, m.weight), weight=torch.ones(2, 2))
    with pytest.raises(RuntimeError, match="Expected weight to be a vector"):
        run_mode(*MODE, model.double(), torch.randn(3, 4, 5).double(), square_loss)


class TestInstanceNorm(RuleTests):
    """Torch's own forward crashes at B = 0."""

    cases = {
        f"{dims}-D": RuleCase(
            lambda norm=norm: norm(4, affine=True, eps=0.1),
            maps(4, *[2] * (dims - 1)),
            without=("empty",),
        )
        for dims, norm in enumerate(
            (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), 1
        )
    }
