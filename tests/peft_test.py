"""Adapters of PEFT: exact, or refused where they would be trained on noise alone.

Tiny random models of transformers; adapters are moved off their starting point first,
as LoRA starts with B = 0, where A's gradient is zero whatever is done to it.
"""

import copy
import itertools

import pytest
import torch
from torch import nn

from tests import tiny
from tests.common import (
    MODES,
    check,
    layer_modes,
    make_private,
    oracle,
    square_loss,
    trainable,
)
from tests.compatibility import all_double, batch_of, loss_fn

peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")


CAUSAL, LM = "causal-lm", "CAUSAL_LM"
# Task, model, PEFT's task; where adapters go; feed-forward layers of these; the head.
MODELS = {
    "gpt2": (CAUSAL, "GPT2LMHeadModel", LM, "c_attn c_proj", "c_proj", "lm_head"),
    "llama": (
        *(CAUSAL, "LlamaForCausalLM", LM),
        *("q_proj down_proj", "down_proj", "lm_head"),
    ),
    "bert": (
        *("sequence-classification", "BertForSequenceClassification", "SEQ_CLS"),
        *("query dense", "dense", "classifier"),
    ),
    "t5": (
        *("seq2seq-lm", "T5ForConditionalGeneration", "SEQ_2_SEQ_LM"),
        *("q wo", "wo", "lm_head"),
    ),
    "vit": (
        *("image-classification", "ViTForImageClassification", None),
        *("q_proj fc1 projection", "fc1", "classifier"),
    ),
    "qwen2_moe": (CAUSAL, "Qwen2MoeForCausalLM", LM, "q_proj gate_proj", "", "lm_head"),
}


def base(family, **kwargs):
    return tiny.build(MODELS[family][0], family, MODELS[family][1], **kwargs)


def batch(family="llama", kind="padded"):
    return batch_of(base(family), MODELS[family][0], kind)


def lora(family, **kwargs):
    _, _, task, layers, _, _ = MODELS[family]
    given = {"r": 4, "target_modules": layers.split(), **kwargs}
    return peft.LoraConfig(task_type=task, **given)


def ia3(family):
    _, _, task, layers, forward, _ = MODELS[family]
    given = {"target_modules": layers.split(), "feedforward_modules": forward.split()}
    return peft.IA3Config(task_type=task, **given)


def prompt(kind, **kwargs):
    return lambda family: getattr(peft, kind)(
        num_virtual_tokens=3, task_type=MODELS[family][2], **kwargs
    )


METHODS = {
    "lora": lora,
    "lora and head": lambda f: lora(f, modules_to_save=[MODELS[f][-1]]),
    "dora": lambda f: lora(f, use_dora=True),
    "rslora, biases": lambda f: lora(f, use_rslora=True, lora_bias=True, bias="all"),
    "all-linear": lambda f: lora(f, target_modules="all-linear"),
    "ia3": ia3,
    "prompt": prompt("PromptTuningConfig"),
    "prefix": prompt("PrefixTuningConfig"),
    "p-tuning": prompt("PromptEncoderConfig", encoder_hidden_size=8),
}
# Llama has all of them, other families those that touch other layers there.
IN_EVERY_FAMILY = ("lora and head", "dora", "ia3", "p-tuning")
HAVE_NO_PROMPT = ("vit", "qwen2_moe")


def perturbed(model, by=0.3):
    """``model`` with its trainable parameters moved."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(by * torch.randn_like(p))
    return model


def adapted(config=None, family="llama", **kwargs):
    """A model with an adapter of a config, by default LoRA, in float64."""
    torch.manual_seed(5)
    model = peft.get_peft_model(base(family, **kwargs), config or lora(family))
    return perturbed(model.double().train())


def exact(model, batch, modes=MODES, wraps=(True,)):
    """Every mode equals the oracle, in float64 inside the model too."""
    with all_double():
        grads = oracle(model, batch, loss_fn)
        for mode in modes:
            for wrap in wraps:
                check(mode, wrap, model, batch, loss_fn, grads=grads)


# -- exact -------------------------------------------------------------------------


TYPES = {
    "AdaLora": dict(total_step=10),
    "C3A": dict(block_size=4),
    "HRA": dict(r=4),
    "LoHa": dict(r=4),
    "LoKr": dict(r=4),
    "Miss": dict(r=4),
    "OFT": dict(oft_block_size=4, r=0),
    "RandLora": dict(r=4),
    "Road": dict(group_size=4),
    "VBLoRA": dict(vector_length=4, num_vectors=8, topk=2),
    "Vera": dict(r=4),
}
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
OPTIONS = {
    "llama": [
        dict(layer_replication=[[0, 2], [0, 2]]),
        dict(use_qalora=True),
        dict(trainable_token_indices={"embed_tokens": [3, 5]}),
    ],
    "gpt2": [dict(target_modules=["wte", "c_attn"])],
    "bert": [dict(target_modules=["word_embeddings", "query"], use_dora=True)],
    "vit": [dict(target_modules=["projection"], use_dora=True)],
    "qwen2_moe": [dict(target_modules=["q_proj"], target_parameters=EXPERTS)],
}
TIED = [
    dict(target_modules=["embed_tokens", "lm_head"]),
    dict(modules_to_save=["lm_head"]),
    dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    dict(trainable_token_indices=[3, 5, 7]),
]
SLOW = pytest.mark.slow


def cases():
    """A name, a family, a config, whether embeddings are tied, and if it is slow."""
    for family, (method, config) in itertools.product(MODELS, METHODS.items()):
        if family == "llama" or method in IN_EVERY_FAMILY:
            if not (method.startswith("p") and family in HAVE_NO_PROMPT):
                yield method, family, config, False, False
    layers = dict(target_modules=["q_proj", "v_proj"])
    for kind, more in TYPES.items():
        made = getattr(peft, f"{kind}Config")(**layers, **more)
        yield kind, "llama", lambda family, made=made: made, False, True
    for family, found in OPTIONS.items():
        for options in found:
            yield str(options), family, options, False, False
    for options in TIED:
        options = {"target_modules": ["q_proj"], **options}
        yield f"tied {options}", "llama", options, True, False
    projected = dict(encoder_hidden_size=8, prefix_projection=True)
    config = prompt("PrefixTuningConfig", **projected)
    yield "projected", "llama", config, False, False


@pytest.mark.parametrize(
    "name, family, config, tied",
    [
        pytest.param(*case, id=f"{case[1]}-{case[0]}", marks=[SLOW] * slow)
        for *case, slow in cases()
    ],
)
def test_exact(name, family, config, tied):
    made = config(family) if callable(config) else lora(family, **config)
    given = {"tie_word_embeddings": True} if tied else {}
    model = adapted(made, family, **given)
    if family != "llama" or name not in ("lora and head", "ia3", "p-tuning"):
        return exact(model, batch(family), ["hooks", "ghost_bk"])
    exact(model, batch(family))
    for kind, wrap in (("B=1", True), ("T=B", False)):
        exact(model, batch(family, kind), ["ghost_bk"], wraps=[wrap])


def test_trained_experts_under_adapters():
    """A parametrization comes and goes in the forward, and sets the experts anew."""
    config = lora("qwen2_moe", target_modules=[], target_parameters=EXPERTS[:1])
    model = adapted(config, "qwen2_moe")
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "experts" in name)
    private = make_private(model, "ghost_bk", batch_size=4)
    refused("changes .*gate_up_proj", step_of(private, batch("qwen2_moe")))


def test_two_adapters():
    """Both active, or one of them."""
    model = adapted()
    model.add_adapter("other", lora("llama"))
    model.double()
    exact(model, batch(), ["ghost_bk"])
    model.base_model.set_adapter(["default", "other"])
    exact(perturbed(model), batch())


@layer_modes
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(mode, reentrant):
    model = adapted(lora("llama", modules_to_save=["lm_head"]))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    exact(model, batch(), [mode])


@layer_modes
def test_checkpoints_that_no_gradient_enters(mode):
    """Autograd gives zero: the embeddings are frozen, the checkpoints reentrant."""
    model = base("llama")
    model.gradient_checkpointing_enable({"use_reentrant": True})
    config = lora("llama", modules_to_save=["lm_head"])
    model = peft.get_peft_model(model, config).double().train()
    model.get_input_embeddings()._forward_hooks.clear()
    exact(perturbed(model), batch(), [mode])


def test_samples_that_meet_in_an_adapter():
    """LILY's router averages over the batch, which is the sample itself."""
    config = peft.LilyConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    exact(adapted(config), batch())


# -- refused -----------------------------------------------------------------------


def refused(match, act, error=(ValueError, RuntimeError)):
    with pytest.raises(error, match=match):
        act()


@layer_modes
def test_merged_or_disabled(mode):
    """At make_private, and in a step after it."""
    model = adapted()
    model.merge_adapter()
    make = lambda: make_private(model, mode, batch_size=4)  # noqa: E731
    refused("q_proj .Linear. has an adapter 'default' .* merged.*unmerge_adapter", make)
    model.unmerge_adapter()
    private = make()
    step = step_of(private, batch())
    step()
    before = {n: p.detach().clone() for n, p in trainable(model).items()}
    model.merge_adapter()
    refused("q_proj .Linear. has an adapter 'default' .* merged", step)
    model.unmerge_adapter()
    with model.disable_adapter():
        refused("q_proj .Linear. .* disabled.*disable_adapter", step)
        with torch.no_grad():  # what a reference model is asked for
            loss_fn(private.module, batch())
    for n, p in trainable(model).items():
        assert torch.equal(p, before[n])
    step()


@layer_modes
def test_adapter_that_is_not_active(mode):
    model = adapted()
    model.add_adapter("other", lora("llama"))
    model.double()
    private = make_private(copy.deepcopy(model), mode, batch_size=4)
    step = step_of(private, batch())
    step()
    private.module._module.set_adapter("other")
    refused("has other adapters active", step)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    make = lambda: make_private(model, mode, batch_size=4)  # noqa: E731
    refused("adapter 'other' that is trainable and not active", make)


def test_optimizer_of_other_parameters():
    """Built before the adapters were there, or of frozen ones."""
    for config, message in (
        (lora("llama"), "q_proj .Linear. has adapters whose"),
        (lora("llama", inference_mode=True), "no trainable parameter"),
    ):
        model = base("llama")
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
        model = peft.get_peft_model(model, config)
        refused(message, lambda: make_private(model, "ghost_bk", batch_size=4, **given))


@layer_modes
def test_adapters_added_later(mode):
    model = base("llama").double().train()
    private = make_private(model, mode, batch_size=4)
    late = peft.get_peft_model(model, lora("llama")).double()
    refused("the model did not have at make_private", step_of(private, batch()))
    refused("twice", lambda: make_private(late, mode, batch_size=4))
    model = adapted()
    step = step_of(make_private(model, mode, batch_size=4), batch())
    step()
    model.merge_and_unload()
    refused("q_proj .Linear. has an adapter 'default' .* merged", step)


def step_of(private, batch):
    return lambda: private.step(batch, loss_fn)


def test_original_of_a_saved_module():
    model = adapted(lora("llama", modules_to_save=["lm_head"]))
    for p in model.parameters():
        p.requires_grad_(True)
    make = lambda: make_private(model, "ghost_bk", batch_size=4)  # noqa: E731
    refused("lm_head .* has a trainable original_module", make)
    original = model.get_submodule("base_model.model.lm_head.original_module")
    original.requires_grad_(False)
    step_of(make(), batch())()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.inside(x)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@layer_modes
@pytest.mark.parametrize("layers", [["inside", "out_proj"], ["attention"]])
def test_weight_read_by_its_neighbour(mode, layers):
    """nn.MultiheadAttention never calls out_proj."""
    model = peft.get_peft_model(Attends(), peft.LoraConfig(r=2, target_modules=layers))
    private = make_private(perturbed(model).double(), mode, batch_size=4)
    x = torch.randn(4, 5, 4).double()
    step = lambda: private.step(x, square_loss)  # noqa: E731
    refused("out_proj .Linear. was not called, but MultiheadAttention", step)


TOKENS = dict(cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1])
LSTM = dict(encoder_hidden_size=8, encoder_reparameterization_type="LSTM")


@pytest.mark.parametrize(
    "family, kind, given, match",
    [
        ("llama", "CPT", {**TOKENS, "cpt_tokens_type_mask": [1, 2, 3]}, "has a hook"),
        ("bert", "PromptEncoder", LSTM, "prompt_encoder.default .PromptEncoder.*MLP"),
    ],
)
def test_types_that_are_refused(family, kind, given, match):
    """Masks of gradients by a hook, which no mode runs; an LSTM for all samples."""
    config = prompt(f"{kind}Config", **given)(family)
    model = peft.get_peft_model(base(family), config)
    refused(match, lambda: make_private(model, "ghost_bk", batch_size=4))
