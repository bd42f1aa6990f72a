"""Every family of transformers with a mixture of experts, tiny and with random weights.

All of them compute in float32 somewhere (routers, norms), whatever the model's type.
Here that float32 is float64 too, so that the oracle, each sample alone, tells to 1e-8.
"""

import importlib
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests import tiny
from tests.common import (
    MODES,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    layer_modes,
    make_private,
    oracle,
    trainable,
    wrapped,
)

transformers = pytest.importorskip("transformers")

V = tiny.V
OFF = ("hidden_dropout", "attention_dropout", "router_jitter_noise")
SMALL = {**tiny.SMALL, **dict.fromkeys(OFF, 0.0)}
FAMILIES = {name: tiny.FAMILIES[name] for name in """
    afmoe aria axk1 axk2 bailing_hybrid beam cohere2_moe dbrx deepseek_ocr2
    deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffusion_gemma dots1
    dots3_note ernie4_5_moe ernie4_5_vl_moe exaone_moe flex_olmo flint gemma4
    glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa gpt_oss granitemoe
    granitemoe_swa granitemoehybrid granitemoeshared hunyuan_v1_moe hy_v3 hy_v4
    inkling inkling2 jamba jetmoe kimi_linear kolibri1 laguna lfm2_moe llama4
    longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl mistral4
    mistral_large4 mixtral muse_spark nemotron_h nllb_moe olmoe
    openai_privacy_filter phimoe qwen2_moe qwen3_5_moe qwen3_moe qwen3_next
    qwen3_omni_moe qwen3_vl_moe qwen4_exp solar_open step3p7 switch_transformers
    unlimited_ocr zaya
    """.split()}
# Those with an architecture of their own: every check is made on them.
MAIN = (
    *("mixtral", "gpt_oss", "qwen2_moe", "deepseek_v3", "llama4", "jetmoe", "step3p7"),
    *("switch_transformers", "granitemoehybrid", "qwen3_next", "zaya"),
)
ROUTERS = ("router", "gate.weight", "gate.proj")


class WithHead(nn.Module):
    """The text part of a model for several kinds of input."""

    def __init__(self, model, width):
        super().__init__()
        self.model = model
        self.head = nn.Linear(width, V, bias=False)

    def forward(self, input_ids, **kwargs):
        hidden = self.model(input_ids=input_ids, **kwargs)[0]
        return transformers.modeling_outputs.CausalLMOutput(logits=self.head(hidden))


def modules_of(family):
    """What defines the configurations, and what the models; None if not installed."""
    package = f"transformers.models.{family}"
    try:
        return [
            importlib.import_module(f"{package}.{part}_{family}")
            for part in ("configuration", "modeling")
        ]
    except ImportError:
        return None


def classes_of(family):
    """The configuration of the language model, its class, and whether it has a head."""
    parts = modules_of(family)
    if parts is None:
        pytest.skip(f"this version of transformers has no {family}")
    configs, models = (
        {
            name: cls
            for name, cls in vars(part).items()
            if inspect.isclass(cls)
            and issubclass(cls, base)
            and cls.__module__ == part.__name__
        }
        for part, base in zip(
            parts, (transformers.PreTrainedConfig, transformers.PreTrainedModel)
        )
    )
    text = [c for n, c in configs.items() if n.endswith("TextConfig")]
    config = text[0] if text else list(configs.values())[-1]
    for end in ("CausalLM", "TextModel", "ConditionalGeneration", "Classification"):
        found = [c for n, c in models.items() if n.endswith(end)]
        if found and (text or end != "TextModel"):
            return config, found[0], end != "TextModel"
    raise LookupError(family)


def build(family, **kwargs):
    config_class, model_class, has_head = classes_of(family)
    known = inspect.signature(config_class.__init__).parameters
    given = {k: v for k, v in SMALL.items() if k in known}
    config = config_class(**{**given, **FAMILIES.get(family, {}), **kwargs})
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = model_class(config)
    if model_class._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the kernels have no float64
    if not has_head:
        model = WithHead(model, config.hidden_size)
    with torch.no_grad():  # no zeros, no ones
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model.train()


def loss_fn(model, batch):
    ids, given = batch["input_ids"], dict(batch)
    own = getattr(model, "_module", model)  # that of the user
    if getattr(getattr(own, "config", None), "is_encoder_decoder", False):
        given["decoder_input_ids"] = ids
    if not type(own).__name__.endswith("Classification"):
        given["use_cache"] = False
    logits = model(**given).logits[:, :-1].transpose(1, 2)
    losses = F.cross_entropy(logits, ids[:, 1:], reduction="none")
    if "attention_mask" not in batch:
        return losses.mean(1)
    kept = batch["attention_mask"][:, 1:]
    return (losses * kept).sum(1) / kept.sum(1)


def batch_of(B, T, padded=False):
    torch.manual_seed(10 * B + T)
    batch = {"input_ids": torch.randint(3, V, (B, T))}
    if padded:
        mask = torch.ones(B, T, dtype=torch.long)
        mask[1, T - 2 :] = 0
        mask[2, :2] = 0
        batch["attention_mask"] = mask
    return batch


@pytest.fixture
def all_double(monkeypatch):
    """What models compute in float32 they compute in float64."""
    importlib.import_module("safetensors.torch")  # not while it is patched
    for family in FAMILIES:
        modules_of(family)
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(torch, "float", torch.float64)
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def check_family(family, mode, wrap, batch, change=lambda name: True, **kwargs):
    model = build(family, **kwargs).double()
    for name, p in model.named_parameters():
        p.requires_grad_(change(name))
    check(mode, wrap, model, batch, loss_fn)


def not_router(name):
    return not any(part in name for part in ROUTERS)


BATCHES = {"plain": (3, 5), "T=B": (4, 4), "padded": (3, 5, True)}
batches = pytest.mark.parametrize("kind", BATCHES)


@pytest.mark.parametrize("i, family", list(enumerate(FAMILIES)), ids=FAMILIES)
def test_every_family(all_double, i, family):
    """Each in one of the modes, wrapped or not; all combinations are marked slow."""
    check_family(family, MODES[i % 3], i % 2 == 0, batch_of(*BATCHES["padded"]))


@layer_modes
@pytest.mark.parametrize("family", MAIN)
def test_modes(all_double, mode, family):
    check_family(family, mode, False, batch_of(*BATCHES["T=B"]))


@pytest.mark.slow
@layer_modes
@wrapped
@batches
@pytest.mark.parametrize("family", FAMILIES)
def test_all_combinations(all_double, mode, wrap, kind, family):
    check_family(family, mode, wrap, batch_of(*BATCHES[kind]))
    if kind == "plain":
        check_family(family, mode, wrap, batch_of(3, 5), not_router)


@pytest.mark.parametrize("family", MAIN)
def test_frozen_router(all_double, family):
    check_family(family, "ghost_bk", True, batch_of(3, 5), not_router)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "jetmoe", "llama4"])
@pytest.mark.parametrize("part", ["experts", "router"])
def test_all_else_frozen(all_double, family, part):
    """No gradient flows below the experts, or the routers, of the first layer."""

    def change(name):
        return not not_router(name) if part == "router" else "experts" in name

    if family == "jetmoe" and part == "experts":
        pytest.skip("called otherwise")
    check_family(family, "ghost_bk", True, batch_of(3, 5), change)


@layer_modes
@pytest.mark.parametrize("family", ["switch_transformers", "nllb_moe"])
def test_experts_as_modules(all_double, mode, family):
    """With nothing trained below them, too."""
    check_family(family, mode, True, batch_of(3, 5), lambda n: "experts" in n)


class Chosen(nn.Module):
    """A router that sends the token at each place where it is told to."""

    def __init__(self, width, chosen):
        super().__init__()
        self.scores = nn.Linear(width, chosen.shape[1])
        self.register_buffer("chosen", chosen)

    def forward(self, hidden):
        hidden = hidden.flatten(0, -2)
        index = self.chosen.repeat(len(hidden) // len(self.chosen), 1)
        scores = self.scores(hidden)
        return scores, scores.softmax(-1), index


@layer_modes
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
@pytest.mark.parametrize(
    "chosen",
    [
        torch.arange(4)[:, None],  # each expert gets B tokens, one a sample
        torch.tensor([[0], [0], [2], [2]]),  # 2 B tokens, and some get none
        torch.full((4, 1), 3),  # one gets all
        torch.tensor([[0, 1], [1, 0], [0, 1], [3, 1]]),
    ],
)
@pytest.mark.parametrize("B", [3, 4])
def test_loads(all_double, mode, family, chosen, B):
    model = build(family)
    for layer in model.model.layers:
        layer.mlp.gate = Chosen(16, chosen)
    check(mode, True, model.double(), batch_of(B, 4), loss_fn)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "nemotron_h"])
def test_experts_implementations(family, implementation):
    """In float32, whichever of the kernels of transformers the user has chosen."""
    model = build(family)
    model.set_experts_implementation(implementation)
    check("ghost_bk", True, model, batch_of(3, 5), loss_fn, tolerance=5e-3)


@layer_modes
@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "llama4"])
def test_bfloat16(mode, family):
    """As close to single samples in bfloat16 (which choose the same experts)."""
    model, batch = build(family).bfloat16(), batch_of(3, 5)

    def loss(model, batch):
        return loss_fn(model, batch).float()

    grads = {name: g.float() for name, g in oracle(model, batch, loss).items()}
    c = half_clipped(grads)
    private = make_private(model, mode, True, batch_size=3, max_grad_norm=c)
    private.step(batch, loss)
    got = {name: 3 * p.grad.float() for name, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 0.1, mode)


def test_tokens_mixed_by_the_model(all_double):
    """Doge's router reads its logits as [2, B * T]: of one sample, its own tokens."""
    model = build("doge", is_moe=True, num_experts=16).double()
    check("ghost_bk", True, model, batch_of(3, 5), loss_fn)


@wrapped
@pytest.mark.parametrize(
    "family", ["mixtral", "gpt_oss", "llama4", "jetmoe", "switch_transformers"]
)
def test_checkpoint(family, wrap, tmp_path):
    """After a private step: the original names, and the same model once loaded."""
    model = build(family)
    names, before = list(model.state_dict()), build(family).state_dict()
    private = make_private(
        model, "ghost_bk", wrap, batch_size=3, noise_multiplier=1.0, lr=0.1
    )
    private.step(batch_of(3, 5), loss_fn)
    assert list(model.state_dict()) == names
    assert all(not torch.equal(p, before[name]) for name, p in trainable(model).items())
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path, attn_implementation="eager")
    assert list(loaded.state_dict()) == names
    with torch.no_grad():
        losses = [loss_fn(m.eval(), batch_of(2, 6)) for m in (model, loaded)]
    torch.testing.assert_close(*losses)
    again = make_private(loaded.train(), "ghost_bk", wrap, batch_size=3)
    again.step(batch_of(3, 5), loss_fn)
