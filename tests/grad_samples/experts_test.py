"""Stacked experts: our own, and those of transformers that follow its interface."""

import pytest
import torch
from torch import nn

from opacus_ext.layers import Experts, balancing_loss
from opacus_ext.refused import Refused
from tests.common import (
    check,
    layer_modes,
    next_token_loss,
    run_mode,
    square_loss,
    wrapped,
)


class Model(nn.Module):
    def __init__(self, choices=2, count=4, **kwargs):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.router = nn.Linear(4, count)
        self.experts = Experts(4, 5, count, **kwargs)
        self.choices = choices

    def forward(self, x, chosen=None):
        x = self.first(x)
        flat = x.flatten(0, 1)
        weights, index = self.router(flat).softmax(-1).topk(self.choices, dim=-1)
        index = index if chosen is None else chosen.reshape(-1, 1)
        return x + self.experts(flat, index, weights).view_as(x)


@layer_modes
@wrapped
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("B, T", [(4, 6), (5, 5), (1, 6), (6, 1), (0, 3), (3, 40)])
def test_exact(mode, wrap, gated, bias, B, T):
    model = Model(gated=gated, bias=bias).double()
    check(mode, wrap, model, torch.randn(B, T, 3).double(), square_loss)


@layer_modes
@pytest.mark.parametrize(
    "chosen",
    [
        torch.arange(4).expand(4, 4),  # each expert gets B tokens
        torch.full((4, 4), 2),  # one gets all
        torch.arange(4)[:, None].expand(4, 4),  # one a sample
        torch.full((4, 4), 4),  # all are dropped
        torch.arange(16).view(4, 4) % 5,  # some are dropped
    ],
)
def test_loads(mode, chosen):
    batch = torch.randn(4, 4, 3).double(), chosen
    check(mode, True, Model(1, bias=True).double(), batch, square_loss)


@layer_modes
@pytest.mark.parametrize("frozen", ["router", "experts", "up", "down", "first"])
def test_frozen(mode, frozen):
    model = Model(bias=True).double()
    for name, p in model.named_parameters():
        p.requires_grad_(frozen not in name)
    check(mode, True, model, torch.randn(4, 6, 3).double(), square_loss)


@layer_modes
def test_experts_used_twice(mode):
    class Twice(Model):
        def forward(self, x):
            x = super().forward(x)
            flat = x.flatten(0, 1)
            index = (flat[:, :1] > 0) + 2 * (flat[:, 1:2] > 0)
            weights = torch.ones_like(index).to(flat)
            return self.experts(flat, index, weights).view_as(x)

    check(mode, True, Twice().double(), torch.randn(4, 6, 3).double(), square_loss)


# -- transformers ------------------------------------------------------------------

SMALL = dict(
    vocab_size=31,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
)
FAMILIES = {
    "Mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "Qwen2Moe": dict(
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=6,
        shared_expert_intermediate_size=10,
    ),
    "GptOss": dict(num_local_experts=4, num_experts_per_tok=2),
    "Llama4": dict(num_local_experts=4, num_experts_per_tok=1),
}


def language_model(name):
    import transformers

    text = "Text" if name == "Llama4" else ""
    config = getattr(transformers, f"{name}{text}Config")(**SMALL, **FAMILIES[name])
    model = getattr(transformers, f"{name}ForCausalLM")(config).double().train()
    model.set_experts_implementation("eager")  # its kernels have no float64
    return model


def causal_loss(model, ids):
    return next_token_loss(model(input_ids=ids, use_cache=False).logits, ids)


@layer_modes
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("B, T", [(4, 6), (5, 5)])
def test_language_models(mode, name, B, T):
    model = language_model(name)
    check(mode, True, model, torch.randint(31, (B, T)), causal_loss, tolerance=1e-6)


@layer_modes
def test_router_logits_have_no_dim_of_samples(mode):
    """What Mixtral returns is [B * T, experts]: of no row it is known whose it is."""

    def loss(model, ids):
        output = model(input_ids=ids, output_router_logits=True, use_cache=False)
        losses = next_token_loss(output.logits, ids)
        for logits in output.router_logits:
            p = logits.softmax(-1).unflatten(0, ids.shape)
            losses = losses + balancing_loss(p, p.topk(2).indices)
        return losses

    with pytest.raises(Refused, match="router_logits"):
        run_mode(mode, True, language_model("Mixtral"), torch.randint(31, (4, 6)), loss)


@layer_modes
def test_default_implementation(mode):
    """Grouped products in float32, as the model ships."""
    model = language_model("Mixtral").float()
    model.set_experts_implementation("grouped_mm")
    check(mode, True, model, torch.randint(31, (4, 6)), causal_loss, tolerance=1e-3)


@layer_modes
@wrapped
@pytest.mark.parametrize("capacity", [2, 64])
def test_switch(mode, wrap, capacity):
    """Tied three ways, relative position bias, experts in a ModuleDict."""
    import transformers

    config = transformers.SwitchTransformersConfig(
        vocab_size=31,
        d_model=8,
        d_kv=4,
        d_ff=12,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=2,
        num_experts=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=capacity,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()

    def loss(model, batch):
        output = model(input_ids=batch[0], decoder_input_ids=batch[1], use_cache=False)
        return next_token_loss(output.logits, batch[1])

    batch = torch.randint(31, (4, 7)), torch.randint(31, (4, 5))
    check(mode, wrap, model, batch, loss, tolerance=1e-4)


class Wide(Model):
    def __init__(self, bias):
        super().__init__()
        self.first, self.router = nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = Experts(8, 16, 4, gated=True, bias=bias)


@pytest.mark.gpu
@layer_modes
def test_bfloat16_on_gpu(mode):
    torch.manual_seed(0)
    model = Wide(True).to("cuda", torch.bfloat16)
    batch = torch.randn(3, 6, 8, device="cuda", dtype=torch.bfloat16)
    chosen = torch.randint(4, (3, 6), device="cuda")  # rounding must not reroute
    check(mode, False, model, (batch, chosen), square_loss, tolerance=0.05)
