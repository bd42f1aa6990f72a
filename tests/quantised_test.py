"""LoRA on a frozen quantised base, as bitsandbytes has it.

Its layers hold packed integers and call an autograd function, old style and with a
state that is no tensor, which dequantises in forward and backward. These are such
layers in plain torch. The oracle is each sample alone through plain autograd.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import tiny
from tests.common import check, trainable
from tests.compatibility import all_double

peft = pytest.importorskip("peft")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*one sample after the other"),
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing"),
]

V = tiny.V


class State:
    """The scales of blocks, and the shape that the weight had."""

    def __init__(self, scale, shape):
        self.scale, self.shape = scale, shape


def pack(weight):
    """Four bits a number, one scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 7
    levels = (weight / scale).round().to(torch.uint8) + 8
    low, high = levels.flatten().view(-1, 2).unbind(1)
    return (low | high << 4)[:, None], State(scale, weight.shape)


def unpack(packed, state):
    levels = torch.stack([packed[:, 0] & 15, packed[:, 0] >> 4], 1).view(state.shape)
    return (levels.to(state.scale.dtype) - 8) * state.scale


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, out=None, bias=None, state=None):
        ctx.state, ctx.tensors = state, packed
        return F.linear(x, unpack(packed, state).to(x.dtype), bias)

    @staticmethod
    def backward(ctx, grad):
        weight = unpack(ctx.tensors, ctx.state).to(grad.dtype)
        return grad @ weight, None, None, None, None


class Params4bit(nn.Parameter):
    pass


class Linear4bit(nn.Linear):
    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, False)
        packed, self.state = pack(layer.weight.detach().double())
        self.weight = Params4bit(packed, requires_grad=False)

    def forward(self, x):
        return MatMul4Bit.apply(x, self.weight, None, None, self.state)


class MatMul8bit(torch.autograd.Function):
    """Takes tensors only, and vmap has a rule for it: all samples in one call."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, scale):
        return x @ (weight.to(x.dtype) * scale.to(x.dtype)).t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs[1:])

    @staticmethod
    def backward(ctx, grad):
        weight, scale = ctx.saved_tensors
        return grad @ (weight.to(grad.dtype) * scale.to(grad.dtype)), None, None


class Linear8bit(nn.Linear):
    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, False)
        weight = layer.weight.detach().double()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        levels = (weight / scale).round().to(torch.int8)
        self.weight = nn.Parameter(levels, requires_grad=False)

    def forward(self, x):
        return MatMul8bit.apply(x, self.weight, self.scale)


def quantised(layer, checkpointing=False):
    """A Llama with quantised projections and trainable LoRA."""
    model = tiny.build("causal-lm", "llama", "LlamaForCausalLM").double()
    for block in model.model.layers:
        for part in (block.self_attn, block.mlp):
            for name, child in list(part.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(part, name, layer(child))
    if checkpointing:
        floating = {n: p.dtype for n, p in model.named_parameters()}
        kwargs = {"use_reentrant": False}
        model.is_loaded_in_4bit = True
        model = peft.prepare_model_for_kbit_training(
            model, gradient_checkpointing_kwargs=kwargs
        )
        for name, p in model.named_parameters():
            p.data = p.data.to(floating[name])  # it makes everything float32
    lora = peft.LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False
    )
    model = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    for p in trainable(model).values():
        p.data = p.data.double()
    return model.train()


def batch():
    torch.manual_seed(1)
    ids = torch.randint(0, V, (4, 6))
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_fn(model, inputs):
    logits = model(**inputs, use_cache=False).logits.double()[:, :-1]
    labels = torch.where(inputs["attention_mask"] == 1, inputs["input_ids"], -100)
    losses = F.cross_entropy(logits.mT, labels[:, 1:], reduction="none")
    return losses.sum(1) / (labels[:, 1:] != -100).sum(1)


@pytest.mark.parametrize("mode", ["ghost_bk", "ghost", "hooks", "scan"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_on_quantised_layers(mode, checkpointing):
    """With checkpointing as prepare_model_for_kbit_training leaves the model."""
    model = quantised(Linear4bit, checkpointing)
    assert model.is_gradient_checkpointing == checkpointing
    with all_double():
        check(mode, True, model, batch(), loss_fn)


@pytest.mark.filterwarnings("error:.*one sample after the other")
@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
def test_all_samples_at_once(mode):
    with all_double():
        check(mode, True, quantised(Linear8bit), batch(), loss_fn)
