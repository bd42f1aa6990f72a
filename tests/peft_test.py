"""Adapters of PEFT: exact, or refused where they would be trained on noise alone.

Tiny random models of transformers; adapters are moved off their starting point first,
as LoRA starts with B = 0, where A's gradient is zero whatever is done to it.
"""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.common import (
    MODES,
    assert_same,
    check,
    clipped_sum,
    every_mode,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    trainable,
    wrapped_or_not,
)
from tests.compatibility import all_double

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out"),
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings"),
    pytest.mark.filterwarnings("ignore:.*tied"),
    pytest.mark.filterwarnings("ignore:.*requires_grad=True"),
]

V = 23
SMALL = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=32,
    pad_token_id=0,
)
QUIET = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=3)


def gpt2():
    quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, pad_token_id=0)
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=V, n_positions=32, n_embd=16, n_layer=2, n_head=2, **quiet
        )
    )


def llama(**kwargs):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=1, **kwargs)
    return transformers.LlamaForCausalLM(config)


def bert():
    config = transformers.BertConfig(**SMALL, **QUIET)
    return transformers.BertForSequenceClassification(config)


def t5():
    config = transformers.T5Config(
        **dict(vocab_size=V, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2),
        **dict(dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0),
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    sizes = {k: SMALL[k] for k in list(SMALL)[1:5]}
    config = transformers.ViTConfig(image_size=8, patch_size=4, **sizes, **QUIET)
    return transformers.ViTForImageClassification(config)


def moe():
    config = transformers.Qwen2MoeConfig(
        **dict(SMALL, num_key_value_heads=2, moe_intermediate_size=12),
        **dict(shared_expert_intermediate_size=12, num_experts=4),
        num_experts_per_tok=2,
    )
    # grouped_mm, the default, has no float64
    eager = dict(experts_implementation="eager")
    return transformers.Qwen2MoeForCausalLM._from_config(config, **eager)


# The task, the layers that adapters go to, those of the feed-forward part, the head.
MODELS = {
    gpt2: ("CAUSAL_LM", ["c_attn", "c_proj"], ["c_proj"], "lm_head"),
    llama: ("CAUSAL_LM", ["q_proj", "down_proj"], ["down_proj"], "lm_head"),
    bert: ("SEQ_CLS", ["query", "dense"], ["dense"], "classifier"),
    t5: ("SEQ_2_SEQ_LM", ["q", "wo"], ["wo"], "lm_head"),
    vit: (None, ["q_proj", "fc1", "projection"], ["fc1"], "classifier"),
    moe: ("CAUSAL_LM", ["q_proj", "gate_proj"], [], "lm_head"),
}


def lora(family, **kwargs):
    task, layers, _, _ = MODELS[family]
    kwargs = {"r": 4, "target_modules": layers, "task_type": task, **kwargs}
    return peft.LoraConfig(**kwargs)


def ia3(family):
    task, layers, forward, _ = MODELS[family]
    return peft.IA3Config(
        target_modules=layers, feedforward_modules=forward, task_type=task
    )


def prompt(kind, **kwargs):
    def config(family):
        task = MODELS[family][0]
        return getattr(peft, kind)(num_virtual_tokens=3, task_type=task, **kwargs)

    return config


METHODS = {
    "lora": lora,
    "lora and head": lambda f: lora(f, modules_to_save=[MODELS[f][3]]),
    "dora": lambda f: lora(f, use_dora=True),
    "rslora, biases": lambda f: lora(f, use_rslora=True, lora_bias=True, bias="all"),
    "all-linear": lambda f: lora(f, target_modules="all-linear"),
    "ia3": ia3,
    "prompt": prompt("PromptTuningConfig"),
    "prefix": prompt("PrefixTuningConfig"),
    "p-tuning": prompt("PromptEncoderConfig", encoder_hidden_size=8),
}
RARER = ("rslora, biases", "all-linear", "prefix")
HAVE_NO_PROMPT = (vit, moe)


def perturbed(model, by=0.3):
    """``model`` with its trainable parameters moved."""
    torch.manual_seed(7)
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(by * torch.randn_like(p))
    return model


def adapted(family, config, build=None, dtype=torch.float64):
    torch.manual_seed(5)
    model = peft.get_peft_model((build or family)(), config).to(dtype).train()
    return perturbed(model)


def batch_of(family, B=4, T=6, dtype=torch.float64):
    torch.manual_seed(100 * B + T)
    if family is vit:
        pixels = torch.randn(B, 3, 8, 8, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.randint(0, 3, (B,))}
    ids = torch.randint(1, V, (B, T))
    mask = torch.ones_like(ids)
    mask[1:2, -2:] = 0
    if family is bert:
        labels = torch.randint(0, 3, (B,))
    else:
        labels = ids if family is t5 else torch.where(mask.bool(), ids, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if family is t5:
        start = torch.zeros_like(labels[:, :1])
        batch["decoder_input_ids"] = torch.cat([start, labels[:, :-1]], 1)
    return batch


def loss_fn(model, batch):
    inputs = dict(batch)
    labels = inputs.pop("labels")
    logits = model(**inputs).logits.double()
    if labels.dim() == 1:
        return F.cross_entropy(logits, labels, reduction="none")
    logits = logits[:, -labels.shape[1] :]  # behind those of a prompt
    if "decoder_input_ids" not in inputs:
        logits, labels = logits[:, :-1], labels[:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def exact(model, batch, modes=MODES, wraps=(True,), loss_fn=loss_fn):
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
OPTIONS = {
    llama: [
        dict(layer_replication=[[0, 2], [0, 2]]),
        dict(rank_pattern={"q_proj": 2}, alpha_pattern={"q_proj": 3}),
        dict(layers_to_transform=[1]),
        dict(use_qalora=True),
        dict(trainable_token_indices={"embed_tokens": [3, 5]}),
    ],
    gpt2: [dict(target_modules=["wte", "c_attn"])],
    bert: [dict(target_modules=["word_embeddings", "query"], use_dora=True)],
    vit: [dict(target_modules=["projection"], use_dora=True)],
    moe: [
        dict(target_modules=["q_proj"], target_parameters=names)
        for names in (
            ["experts.gate_up_proj"],
            ["experts.gate_up_proj", "experts.down_proj"],
        )
    ],
}
TIED = [
    dict(target_modules=["embed_tokens", "lm_head"]),
    dict(modules_to_save=["embed_tokens"]),
    dict(modules_to_save=["lm_head"]),
    dict(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
    dict(trainable_token_indices=[3, 5, 7]),
]
SLOW = pytest.mark.slow


def cases():
    """A family, a config, how its model is built, and whether it is slow."""
    for family, (method, config) in itertools.product(MODELS, METHODS.items()):
        if not (method.startswith("p") and family in HAVE_NO_PROMPT):
            yield method, family, config, None, method in RARER and family is not llama
    layers = dict(target_modules=["q_proj", "v_proj"])
    for kind, more in TYPES.items():
        made = getattr(peft, f"{kind}Config")(**layers, **more)
        yield kind, llama, lambda family, made=made: made, None, True
    for init in (False, "gaussian", "pissa", "olora", "orthogonal", "eva", "mica"):
        yield f"init {init}", llama, {"init_lora_weights": init}, None, True
    for family, found in OPTIONS.items():
        for options in found:
            yield str(options), family, options, None, False
    for options in TIED:
        build = lambda: llama(tie_word_embeddings=True)  # noqa: E731
        options = {"target_modules": ["q_proj"], **options}
        yield f"tied {options}", llama, options, build, False
    projected = dict(encoder_hidden_size=8, prefix_projection=True)
    yield "projected", llama, prompt("PrefixTuningConfig", **projected), None, False


@pytest.mark.parametrize(
    "name, family, config, build",
    [
        pytest.param(*case, id=f"{case[1].__name__}-{case[0]}", marks=[SLOW] * slow)
        for *case, slow in cases()
    ],
)
def test_exact(name, family, config, build):
    made = config(family) if callable(config) else lora(family, **config)
    model = adapted(family, made, build)
    if name not in ("lora and head", "ia3", "p-tuning"):
        return exact(model, batch_of(family), ["hooks", "ghost_bk"])
    exact(model, batch_of(family))
    for B, T, wrap in ((1, 6, True), (3, 3, False)):
        exact(model, batch_of(family, B, T), ["ghost_bk"], wraps=[wrap])


def test_trained_experts_under_adapters():
    """A parametrization comes and goes in the forward, and sets the experts anew."""
    parameters = ["experts.gate_up_proj"]
    config = lora(moe, target_modules=[], target_parameters=parameters)
    model = adapted(moe, config)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad or "experts" in name)
    private = make_private(model, "ghost_bk", batch_size=4)
    refused("changes .*gate_up_proj", step_of(private, batch_of(moe)))


def test_two_adapters():
    """Both active, or one of them."""
    model = adapted(llama, lora(llama))
    model.add_adapter("other", lora(llama))
    model.double()
    exact(model, batch_of(llama), ["ghost_bk"])
    model.base_model.set_adapter(["default", "other"])
    exact(perturbed(model), batch_of(llama))


@every_mode
def test_frozen_layers_of_another_kind(mode):
    """As quantised ones: the base layer computes by a function of its own."""

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, codes, scale):
            ctx.save_for_backward(codes, scale)
            return x @ (codes.to(x) * scale).T

        @staticmethod
        def backward(ctx, grad):
            codes, scale = ctx.saved_tensors
            return grad @ (codes.to(grad) * scale), None, None

    class Coded(nn.Linear):
        def __init__(self, weight):
            super().__init__(*weight.shape[::-1], bias=False)
            scale = weight.abs().max() / 127
            self.register_buffer("scale", scale.detach())
            codes = (weight / scale).round().to(torch.int8)
            self.weight = nn.Parameter(codes, requires_grad=False)

        def forward(self, x):
            return Times.apply(x, self.weight, self.scale)

    model = adapted(llama, lora(llama))
    for layer in list(model.modules()):
        if isinstance(layer, peft.tuners.lora.Linear):
            layer.base_layer = Coded(layer.base_layer.weight)
    exact(model, batch_of(llama), [mode])


@every_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(mode, reentrant):
    model = adapted(llama, lora(llama, modules_to_save=["lm_head"]))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    exact(model, batch_of(llama), [mode])


@every_mode
def test_bf16_base(mode):
    """Adapters in float32 on a base in bfloat16, as near as bfloat16 is."""
    torch.manual_seed(5)
    base = llama().to(torch.bfloat16)
    model = perturbed(peft.get_peft_model(base, lora(llama)).train(), 0.1)
    assert {p.dtype for p in trainable(model).values()} == {torch.float32}
    batch = batch_of(llama)
    grads = oracle(model, batch, loss_fn)
    c = float(norms_of(grads).median())
    got = run_mode(mode, True, model, batch, loss_fn, "flat", c)
    assert_same(got, clipped_sum(grads, "flat", c), 0.1, mode)


def test_dropout():
    """Another one for each seed; the modes agree on it."""
    model, batch = adapted(llama, lora(llama, lora_dropout=0.5)), batch_of(llama)

    def sums(mode, seed):
        torch.manual_seed(seed)
        return run_mode(mode, True, model, batch, loss_fn, "flat", 1e6)

    first = sums("ghost_bk", 1)
    for mode in MODES:
        assert_same(sums(mode, 1), first, 1e-5)
    other = sums("ghost_bk", 2)
    assert not all(torch.allclose(other[n], x) for n, x in first.items())


# -- refused -----------------------------------------------------------------------


def refused(match, act, error=(ValueError, RuntimeError)):
    with pytest.raises(error, match=match):
        act()


def everything(model):
    return torch.optim.SGD(model.parameters(), lr=1.0)


@every_mode
@wrapped_or_not
def test_merged_or_disabled(mode, wrap):
    """At make_private, and in a step after it."""
    model, batch = adapted(llama, lora(llama)), batch_of(llama)
    model.merge_adapter()
    make = lambda: make_private(model, mode, wrap, batch_size=4)  # noqa: E731
    refused("q_proj .Linear. has its adapter 'default' merged.*unmerge_adapter", make)
    model.unmerge_adapter()
    private = make()
    private.step(batch, loss_fn)
    before = {n: p.detach().clone() for n, p in trainable(model).items()}
    step = lambda: private.step(batch, loss_fn)  # noqa: E731
    model.merge_adapter()
    refused("q_proj .Linear. has its adapter 'default' merged", step)
    model.unmerge_adapter()
    with model.disable_adapter():
        refused("q_proj .Linear. is disabled.*disable_adapter", step)
        with torch.no_grad():  # what a reference model is asked for
            loss_fn(private.module, batch)
    for n, p in trainable(model).items():
        assert torch.equal(p, before[n])
    step()


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_adapter_that_is_not_active(mode):
    model, batch = adapted(llama, lora(llama)), batch_of(llama)
    model.add_adapter("other", lora(llama))
    model.double()
    private = make_private(copy.deepcopy(model), mode, batch_size=4)
    private.step(batch, loss_fn)
    private.module._module.set_adapter("other")
    refused("has other adapters active", lambda: private.step(batch, loss_fn))
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    make = lambda: make_private(model, mode, batch_size=4)  # noqa: E731
    refused("adapter 'other' that is trainable and not active", make)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_optimizer_of_other_parameters(mode):
    """Built before the adapters were there, or of frozen ones."""
    model = llama()
    early = everything(model)
    model = peft.get_peft_model(model, lora(llama))
    make = lambda o: make_private(model, mode, batch_size=4, optimizer=o)  # noqa: E731
    refused("q_proj .Linear.: the optimizer does not have", lambda: make(early))
    model.lm_head.requires_grad_(True)
    refused("q_proj .Linear.: the optimizer does not have", lambda: make(early))
    model = peft.get_peft_model(llama(), lora(llama, inference_mode=True))
    refused("no trainable parameter", lambda: make(everything(model)))


@every_mode
def test_adapters_added_later(mode):
    batch = batch_of(llama)
    model = llama().double().train()
    private = make_private(model, mode, batch_size=4)
    late = peft.get_peft_model(model, lora(llama)).double()
    step = lambda: private.step(batch, loss_fn)  # noqa: E731
    refused("the model did not have at make_private", step)
    make = lambda: make_private(late, mode, batch_size=4)  # noqa: E731
    refused("twice", make)
    model = adapted(llama, lora(llama))
    private = make_private(model, mode, batch_size=4)
    private.step(batch, loss_fn)
    model.merge_and_unload()
    refused("q_proj .Linear. has its adapter 'default' merged", step_of(private, batch))


def step_of(private, batch):
    return lambda: private.step(batch, loss_fn)


def test_original_of_a_saved_module():
    model = adapted(llama, lora(llama, modules_to_save=["lm_head"]))
    for p in model.parameters():
        p.requires_grad_(True)
    make = lambda: make_private(model, "ghost_bk", batch_size=4)  # noqa: E731
    refused("lm_head .*: original_module is trainable", make)
    model.get_submodule("base_model.model.lm_head.original_module").requires_grad_(
        False
    )
    make().step(batch_of(llama), loss_fn)


@every_mode
def test_checkpoints_that_no_gradient_enters(mode):
    """Autograd gives zero: the embeddings are frozen, the checkpoints reentrant."""
    model = llama()
    options = dict(modules_to_save=["lm_head"])
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.get_input_embeddings()._forward_hooks.clear()
    model = peft.get_peft_model(model, lora(llama, **options)).double().train()
    model.get_input_embeddings()._forward_hooks.clear()
    exact(perturbed(model), batch_of(llama), [mode])


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        x = self.inside(x)
        return self.attention(x, x, x, need_weights=False)[0].mean(1)


@every_mode
@pytest.mark.parametrize("layers", [["inside", "out_proj"], ["attention"]])
def test_weight_read_by_its_neighbour(mode, layers):
    """nn.MultiheadAttention never calls out_proj."""
    model = peft.get_peft_model(Attends(), peft.LoraConfig(r=2, target_modules=layers))
    private = make_private(perturbed(model).double(), mode, batch_size=4)
    x = torch.randn(4, 5, 4).double()
    step = lambda: private.step(x, square_loss)  # noqa: E731
    refused("out_proj .Linear.: MultiheadAttention ran without calling it", step)


@pytest.mark.parametrize(
    "family, kind, given, match",
    [
        (
            llama,
            "CPTConfig",
            dict(
                **dict(cpt_token_ids=[1, 2, 3], cpt_mask=[1, 1, 1]),
                **dict(cpt_tokens_type_mask=[1, 2, 3], num_virtual_tokens=3),
            ),
            "delta_embedding.weight has a hook .register_hook",
        ),
        (
            bert,
            "PromptEncoderConfig",
            dict(
                **dict(encoder_hidden_size=8, num_virtual_tokens=3),
                encoder_reparameterization_type="LSTM",
            ),
            "prompt_encoder.default .PromptEncoder.*MLP",
        ),
    ],
)
def test_types_that_are_refused(family, kind, given, match):
    """Masks of gradients by a hook, which no mode runs; an LSTM for all samples."""
    config = getattr(peft, kind)(task_type=MODELS[family][0], **given)
    model = peft.get_peft_model(family(), config)
    refused(match, lambda: make_private(model, "ghost_bk", batch_size=4))


@every_mode
def test_samples_that_meet_in_an_adapter(mode):
    """LILY's router averages over the batch, which is the sample itself."""
    config = peft.LilyConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    exact(adapted(llama, config), batch_of(llama), [mode])
