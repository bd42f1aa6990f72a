"""Adapters of PEFT: exact, or refused where they would be trained on noise alone.

Tiny random models of transformers; adapters are moved off their starting point first,
as LoRA starts with B = 0, where A's gradient is zero whatever is done to it.
"""

import itertools

import pytest
import torch
from torch import nn

from tests import tiny
from tests.common import (
    MODES,
    Net,
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
CAUSAL, CLASSES, IMAGES = "causal-lm", "sequence-classification", "image-classification"
# Task and model; where adapters go, feed-forward layers among these, and the head.
MODELS = {
    "gpt2": (CAUSAL, "GPT2LMHeadModel", "c_attn c_proj", "c_proj", "lm_head"),
    "llama": (CAUSAL, "LlamaForCausalLM", "q_proj down_proj", "down_proj", "lm_head"),
    "bert": (
        *(CLASSES, "BertForSequenceClassification"),
        *("query dense", "dense", "classifier"),
    ),
    "t5": ("seq2seq-lm", "T5ForConditionalGeneration", "q wo", "wo", "lm_head"),
    "vit": (
        *(IMAGES, "ViTForImageClassification"),
        *("q_proj fc1 projection", "fc1", "classifier"),
    ),
    "qwen2_moe": (CAUSAL, "Qwen2MoeForCausalLM", "q_proj", "q_proj", "lm_head"),
}
TASKS = {CAUSAL: "CAUSAL_LM", CLASSES: "SEQ_CLS", "seq2seq-lm": "SEQ_2_SEQ_LM"}


def base(family, **kwargs):
    return tiny.build(MODELS[family][0], family, MODELS[family][1], **kwargs)


def batch(family="llama", kind="padded"):
    return batch_of(base(family), MODELS[family][0], kind)


def config(family="llama", kind="Lora", **kwargs):
    task, _, layers, forward, head = MODELS[family]
    if kind in ("Prompt", "Prefix"):
        kind += "Tuning"
    elif kind not in ("CPT", "PromptEncoder"):
        kwargs = {"target_modules": layers.split(), **kwargs}
    if kind == "IA3":
        kwargs["feedforward_modules"] = [forward]
    if kwargs.get("modules_to_save") == "head":
        kwargs["modules_to_save"] = [head]
    return getattr(peft, f"{kind}Config")(task_type=TASKS.get(task), **kwargs)


def adapted(family="llama", tied=False, **kwargs):
    """A model with a moved adapter, by default LoRA, in float64."""
    torch.manual_seed(5)
    given = {"tie_word_embeddings": True} if tied else {}
    model = peft.get_peft_model(base(family, **given), config(family, **kwargs))
    return moved(model.double().train())


def moved(model):
    torch.manual_seed(7)
    with torch.no_grad():
        for p in trainable(model).values():
            p.add_(0.3 * torch.randn_like(p))
    return model


def exact(model, batch, modes=MODES):
    """Every mode equals the oracle, in float64 inside the model too."""
    with all_double():
        grads = oracle(model, batch, loss_fn)
        for mode in modes:
            check(mode, True, model, batch, loss_fn, grads=grads)


# -- exact -------------------------------------------------------------------------

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
ENCODER = dict(kind="PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=8)
IN_EVERY_FAMILY = {
    "lora and head": dict(modules_to_save="head"),
    "dora": dict(use_dora=True),
    "ia3": dict(kind="IA3"),
    "p-tuning": ENCODER,
}
OPTIONS = [
    ("llama", dict(kind="Prompt", num_virtual_tokens=3)),
    ("llama", dict(kind="Prefix", num_virtual_tokens=3)),
    ("llama", dict(use_rslora=True, lora_bias=True, bias="all")),
    ("llama", dict(target_modules="all-linear")),
    ("llama", dict(layer_replication=[[0, 2], [0, 2]])),
    ("llama", dict(use_qalora=True)),
    ("llama", dict(trainable_token_indices={"embed_tokens": [3, 5]})),
    ("llama", dict(tied=True, target_modules=["embed_tokens", "lm_head"])),
    ("llama", dict(tied=True, modules_to_save=["lm_head"])),
    ("llama", dict(tied=True, modules_to_save=["embed_tokens"])),
    ("llama", dict(tied=True, trainable_token_indices=[3, 5, 7])),
    ("gpt2", dict(target_modules=["wte", "c_attn"])),
    ("bert", dict(target_modules=["word_embeddings", "query"], use_dora=True)),
    ("vit", dict(target_modules=["projection"], use_dora=True)),
    ("qwen2_moe", dict(target_parameters=EXPERTS)),
    # Its router averages over the batch, which is the sample itself.
    ("llama", dict(kind="Lily", r=4)),
]
TYPES = {
    **dict.fromkeys(("HRA", "LoHa", "LoKr", "Miss", "RandLora", "Vera"), dict(r=4)),
    "AdaLora": dict(total_step=10),
    "C3A": dict(block_size=4),
    "OFT": dict(oft_block_size=4, r=0),
    "Road": dict(group_size=4),
    "VBLoRA": dict(vector_length=4, num_vectors=8, topk=2),
}


def cases():
    for family, (name, given) in itertools.product(MODELS, IN_EVERY_FAMILY.items()):
        if name != "p-tuning" or family not in ("vit", "qwen2_moe"):
            yield pytest.param(family, given, id=f"{family}-{name}")
    for family, given in OPTIONS:
        yield pytest.param(family, given, id=f"{family}-{given}")
    for kind, given in TYPES.items():
        given = dict(kind=kind, target_modules=["q_proj", "v_proj"], **given)
        yield pytest.param("llama", given, id=kind, marks=pytest.mark.slow)


@pytest.mark.parametrize("family, given", list(cases()))
def test_exact(family, given):
    model = adapted(family, **given)
    if family != "llama" or given not in IN_EVERY_FAMILY.values():
        return exact(model, batch(family), ["hooks", "ghost_bk"])
    exact(model, batch(family))
    for kind in ("B=1", "T=B"):
        exact(model, batch(family, kind), ["ghost_bk"])


@layer_modes
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("enters", [True, False])
def test_checkpointed(mode, reentrant, enters):
    """Where no gradient enters a reentrant checkpoint, autograd gives zero."""
    model = adapted(modules_to_save=["lm_head"])
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if enters:
        model.enable_input_require_grads()
    exact(model, batch(), [mode])


# -- refused -----------------------------------------------------------------------


def refused(match, act):
    with pytest.raises((ValueError, RuntimeError), match=match):
        act()


def step_of(private, batch, loss=loss_fn):
    return lambda: private.step(batch, loss)


@layer_modes
def test_merged_disabled_or_not_active(mode):
    """At make_private, and in a step after it."""
    model = adapted()
    model.merge_adapter()
    make = lambda: make_private(model, mode, batch_size=4)  # noqa: E731
    refused("q_proj .Linear. has an adapter 'default' .* merged.*unmerge_adap", make)
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
    assert all(torch.equal(p, before[n]) for n, p in trainable(model).items())
    step()
    model.add_adapter("other", config())
    model.double().set_adapter("other")
    refused("other adapters active", step)
    for name, p in model.named_parameters():
        p.requires_grad_("lora" in name)
    refused("adapter 'default' that is trainable and not active", step)


@pytest.mark.parametrize(
    "given, match", [({}, "has adapters whose"), ({"inference_mode": True}, "no train")]
)
def test_optimizer_of_other_parameters(given, match):
    """Built before the adapters were there, or of frozen ones."""
    model = base("llama")
    early = torch.optim.SGD(model.parameters(), lr=1.0)
    model = peft.get_peft_model(model, config(**given))
    given = dict(batch_size=4, optimizer=early)
    refused(match, lambda: make_private(model, "ghost_bk", **given))


@layer_modes
def test_adapters_added_later(mode):
    model = base("llama").double().train()
    private = make_private(model, mode, batch_size=4)
    late = peft.get_peft_model(model, config()).double()
    refused("the model did not have at make_private", step_of(private, batch()))
    refused("twice", lambda: make_private(late, mode, batch_size=4))


def test_original_of_a_saved_module():
    model = adapted(modules_to_save=["lm_head"])
    for p in model.parameters():
        p.requires_grad_(True)
    make = lambda: make_private(model, "ghost_bk", batch_size=4)  # noqa: E731
    refused("lm_head .* has a trainable original_module", make)
    original = model.get_submodule("base_model.model.lm_head.original_module")
    original.requires_grad_(False)
    step_of(make(), batch())()


def attends():
    def forward(m, x):
        x = m.inside(x)
        return m.attention(x, x, x, need_weights=False)[0].mean(1)

    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    return Net(forward, inside=nn.Linear(4, 8), attention=attention)


@layer_modes
@pytest.mark.parametrize("layers", [["inside", "out_proj"], ["attention"]])
def test_weight_read_by_its_neighbour(mode, layers):
    """nn.MultiheadAttention never calls out_proj."""
    model = peft.get_peft_model(attends(), peft.LoraConfig(r=2, target_modules=layers))
    private = make_private(moved(model).double(), mode, batch_size=4)
    step = step_of(private, torch.randn(4, 5, 4).double(), square_loss)
    refused("out_proj .Linear. was not called, but MultiheadAttention", step)


TOKENS = dict(cpt_token_ids=[1, 2, 3], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1, 2, 3])
LSTM = {**ENCODER, "encoder_reparameterization_type": "LSTM"}


@pytest.mark.parametrize(
    "family, given, match",
    [
        ("llama", dict(kind="CPT", num_virtual_tokens=3, **TOKENS), "has a hook"),
        ("bert", LSTM, "prompt_encoder.default .PromptEncoder.*MLP"),
    ],
)
def test_types_that_are_refused(family, given, match):
    """Masks of gradients by a hook, which no mode runs; an LSTM for all samples."""
    model = peft.get_peft_model(base(family), config(family, **given))
    refused(match, lambda: make_private(model, "ghost_bk", batch_size=4))
