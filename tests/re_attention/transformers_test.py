"""Re-Attention in models of transformers: tiny ones, each of a structure of its own."""

import copy
import subprocess
import sys
import warnings
from inspect import signature

import pytest
import torch

from opacus_ext import track_errors
from opacus_ext.re_attention import attention
from opacus_ext.refused import Refused
from tests.common import (
    MODES,
    assert_same,
    clipped_sum,
    make_private,
    norms_of,
    sample_of,
)
from tests.re_attention.common import track

transformers = pytest.importorskip("transformers")
pytest.importorskip("opacus_ext.transformers")
ours = pytest.importorskip("opacus_ext.re_attention.transformers")

V = 32
LM = dict(
    vocab_size=V,
    hidden_size=16,
    intermediate_size=12,
    num_hidden_layers=2,
    num_attention_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
GROUPED = dict(LM, num_key_value_heads=1, head_dim=8)
T5 = dict(
    **dict(vocab_size=V, d_model=16, d_kv=8, d_ff=12, num_layers=2, num_heads=2),
    **dict(dropout_rate=0.0, decoder_start_token_id=1),
)
BART = dict(
    **dict(vocab_size=V, d_model=16, encoder_layers=2, decoder_layers=2),
    **dict(encoder_attention_heads=2, decoder_attention_heads=2),
    **dict(encoder_ffn_dim=12, decoder_ffn_dim=12, max_position_embeddings=64),
    **dict(dropout=0.0, pad_token_id=0, decoder_start_token_id=1),
)
PICTURES = dict(image_size=16, patch_size=4, hidden_dropout_prob=0.0)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
LATENT = dict(
    **dict(LM, num_key_value_heads=2, kv_lora_rank=8, q_lora_rank=8, n_group=2),
    **dict(qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=4),
)
FAMILIES = {  # what is special, the model and its configuration
    "rotary": ("LlamaForCausalLM", GROUPED),
    "normed keys": ("Qwen3ForCausalLM", GROUPED),
    "1 + weight, sliding": ("Gemma3ForCausalLM", dict(GROUPED, sliding_window=4)),
    "one matrix": ("Phi3ForCausalLM", GROUPED),
    "partly rotary": ("GPTNeoXForCausalLM", LM),
    "Conv1D": (
        "GPT2LMHeadModel",
        dict(vocab_size=V, n_embd=16, n_head=2, n_layer=2, n_positions=64)
        | dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0),
    ),
    "learned positions": (
        "OPTForCausalLM",
        dict(LM, ffn_dim=12, word_embed_proj_dim=16, dropout=0.0),
    ),
    "experts": (
        "MixtralForCausalLM",
        dict(GROUPED, num_local_experts=4, num_experts_per_tok=2),
    ),
    "xIELU": ("ApertusForCausalLM", GROUPED),
    "convolutions": (
        "Lfm2ForCausalLM",
        dict(GROUPED, layer_types=["conv", "full_attention"], block_multiple_of=4),
    ),
    "both sides": ("BertForMaskedLM", dict(LM, **NO_DROPOUT)),
    "shifted positions": (
        "RobertaForMaskedLM",
        dict(LM, max_position_embeddings=66, **NO_DROPOUT),
    ),
    "position bias": ("T5ForConditionalGeneration", T5),
    "two stacks": ("BartForConditionalGeneration", BART),
    "patches": ("ViTForImageClassification", dict(LM, **PICTURES)),
    "windows": (
        "SwinForImageClassification",
        dict(embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=2)
        | dict(image_size=16, patch_size=2, drop_path_rate=0.0),
    ),
}
families = pytest.mark.parametrize("family", FAMILIES)
# Samples run at once, all that is tracked included.
pytestmark = pytest.mark.filterwarnings("error:.*run one sample after the other")


def build(name, sizes):
    model_class = getattr(transformers, name)
    config = model_class.config_class(**sizes)
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = model_class(config)
    if model_class._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the kernels have no float64
    with torch.no_grad():  # no zeros, no ones
        for p in model.parameters():
            p += 0.1 * torch.randn_like(p)
    return model


def has_choice(model):
    """Skips a model that computes attention in code of its own in older versions."""
    if not model._can_set_attn_implementation():
        version = transformers.__version__
        pytest.skip(f"{type(model).__name__} of transformers {version} has no choice")


def set_attention(model, name):
    """Chooses the attention, also in parts that transformers 5.17 leaves out."""
    for part in model.modules():
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(name)


def batch_of(model, padded=False):
    torch.manual_seed(5)
    if "ImageClassification" in type(model).__name__:
        return {"pixel_values": torch.randn(3, 3, 16, 16)}
    batch = {"input_ids": torch.randint(3, V, (3, 6))}
    if padded:
        batch["attention_mask"] = torch.ones(3, 6, dtype=torch.long)
        batch["attention_mask"][1, -2:] = 0
    return batch


def call(model, batch):
    own = getattr(model, "_module", model)
    batch = dict(batch)
    if own.config.is_encoder_decoder:
        batch["decoder_input_ids"] = batch["input_ids"][:, :5]
    if "pixel_values" not in batch:
        batch["use_cache"] = False
    return model(**batch).logits


def tracked(model, noise, **kwargs):
    return track(model, shares_of(model), noise, **kwargs)


def shares_of(model):
    table = getattr(model, "get_input_embeddings", lambda: None)()
    if not isinstance(table, torch.nn.Embedding):
        return None
    name = next(n for n, p in model.named_parameters() if p is table.weight)
    torch.manual_seed(2)
    return {name: 0.2 + 0.8 * torch.rand(table.num_embeddings)}


@pytest.fixture
def asked(monkeypatch):
    """The variances of keys, one ``[*, U]`` for each attention."""
    found = []

    def spy(key, module):
        errors = attention.errors_of(key, module)
        if errors is not None:
            found.append(errors[1].expand(*key.shape[:-1], 1)[..., 0])
        return errors

    monkeypatch.setattr(ours, "errors_of", spy)
    return found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@families
def test_errors_reach_every_attention(family, padded, asked):
    """With hardly any noise the model is that of "eager", masks and all."""
    model = build(*FAMILIES[family]).eval()
    has_choice(model)
    batch = batch_of(model, padded)
    kept = ...
    if "attention_mask" in batch and not model.config.is_encoder_decoder:
        kept = batch["attention_mask"].bool()  # the others mean nothing
    eager = call(model, batch)[kept]
    set_attention(model, "re_attention")
    with warnings.catch_warnings():
        # no attention is left out
        warnings.simplefilter("error", UserWarning)
        tracker = tracked(model, 1e-7)
        torch.testing.assert_close(call(model, batch)[kept], eager)
    tracker.detach()
    set_attention(model, "sdpa")
    plain = call(model, batch)
    set_attention(model, "re_attention")
    assert torch.equal(call(model, batch), plain)  # where nothing is tracked
    number = len(asked)
    assert number >= (1 if family == "convolutions" else 2)
    tracked(model, 0.3)
    assert not torch.allclose(call(model, batch)[kept], eager)
    assert len(asked) == 2 * number
    for variance in asked:
        assert variance.isfinite().all() and (variance > 0).all()


def loss_fn(model, batch):
    logits = call(model, batch).flatten(1)
    weights = torch.linspace(0.5, 1.5, logits.size(1), dtype=logits.dtype)
    return (weights * (logits + logits**2)).sum(1)


SOME_MODES = [(i, family) for i, family in enumerate(FAMILIES)]
SOME_MODES += [(i, f) for f in ("rotary", "position bias") for i in range(3)]


@pytest.mark.parametrize("i, family", sorted(set(SOME_MODES)))
def test_gradients(i, family):
    """Each sample has the gradient that it has alone, corrected as well."""
    model = build(*FAMILIES[family]).double().train()
    has_choice(model)
    set_attention(model, "re_attention")
    batch = batch_of(model, padded=True)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    alone = copy.deepcopy(model)
    tracker = tracked(alone, 0.05)
    rows = []
    for b in range(3):
        alone.zero_grad()
        loss_fn(alone, sample_of(batch, b)).sum().backward()
        rows.append([copy.copy(p.grad) for p in alone.parameters()])
    names = [n for n, _ in model.named_parameters()]
    grads = {
        n: torch.stack([p.new_zeros(p.shape) if g is None else g for g in gs])
        for n, p, gs in zip(names, model.parameters(), zip(*rows))
    }
    c = float(norms_of(grads).median())

    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    private = make_private(
        *(model, MODES[i % 3], i % 2 == 0),
        batch_size=3,
        max_grad_norm=c,
        noise_multiplier=0.05 * 3 / c,
    )
    # The noise that is tracked and not added.
    private.optimizer.add_noise = lambda: [
        setattr(p, "grad", p.summed_grad.view_as(p).to(p.dtype))
        for p in private.optimizer.params
        if p.summed_grad is not None
    ]
    both = track_errors(private.module, private.optimizer, shares_of(alone))
    for name, error in tracker.errors().items():
        torch.testing.assert_close(both.errors()[name], error)
    private.step(batch, loss_fn)
    after = dict(model.named_parameters())
    got = {n: (before[n] - after[n].detach()) * 3 for n in before}
    # The norms of some are in float32, whatever the type of the model.
    assert_same(got, clipped_sum(grads, "flat", c), 1e-5)


@pytest.mark.parametrize(
    "family",
    ["rotary", "normed keys", "partly rotary", "both sides", "patches"],
)
def test_variances_are_those_of_samples(family, asked, monkeypatch):
    """Sampled noise in all parameters gives them, to 20 % over all tokens."""
    model = build(*FAMILIES[family]).double().eval()
    has_choice(model)
    set_attention(model, "re_attention")
    batch = batch_of(model)
    if "pixel_values" in batch:
        batch["pixel_values"] = batch["pixel_values"].double()
    tracker = tracked(model, 2e-3, cap=None)
    keys = []
    monkeypatch.setattr(
        ours,
        "errors_of",
        lambda key, module, spy=ours.errors_of: keys.append(key) or spy(key, module),
    )
    with torch.no_grad():
        call(model, batch)
        errors = {
            n: e.reshape(-1, 1) if e.dim() else e for n, e in tracker.errors().items()
        }
        tracker.detach()
        keys.clear()
        call(model, batch)
        true, means = list(keys), {n: p.clone() for n, p in model.named_parameters()}
        sums, draws = [0.0] * len(true), 300
        torch.manual_seed(7)
        for _ in range(draws):
            keys.clear()
            for n, p in model.named_parameters():
                p.copy_(means[n] + errors[n] * torch.randn_like(p))
            call(model, batch)
            for i, (k, m) in enumerate(zip(keys, true)):
                sums[i] += (k - m).square().mean() / draws
    for variance, sampled in zip(asked, sums):
        assert 0.8 < float(variance.mean() / sampled) < 1.25


EXPERTS = dict(GROUPED, num_local_experts=4, num_experts_per_tok=2)
BLOOM = dict(vocab_size=V, hidden_size=16, n_head=2, n_layer=2)
LONG = dict(T5, local_radius=3, encoder_attention_type="transient-global")
REFUSED = {
    "soft cap": (("Gemma2ForCausalLM", GROUPED), "softcap"),
    "sinks": (("GptOssForCausalLM", EXPERTS), "s_aux"),
    "ALiBi": (
        ("BloomForCausalLM", BLOOM),
        "no attention asked.*encoder.*code of their own",
    ),
    "own code": (("FalconForCausalLM", LM), "no attention asked"),
    "no attention": (("FNetForMaskedLM", LM), "no attention asked"),
    "latent keys": (("DeepseekV3ForCausalLM", LATENT), "'copy in place'"),
    "other products": (("LongT5ForConditionalGeneration", LONG), "'einsum'"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_refused(family):
    which, message = REFUSED[family]
    model = build(*which).eval()
    if "no attention asked" not in message:
        has_choice(model)
    if "copy" in message and not hasattr(model.model.layers[0].self_attn, "expand_kv"):
        pytest.skip(f"no keys are copied in transformers {transformers.__version__}")
    set_attention(model, "re_attention")
    tracked(model, 0.05)
    with pytest.raises(Refused, match=message) as caught:
        if family == "no attention":
            model(**batch_of(model))
        call(model, batch_of(model))
    assert "\n" not in str(caught.value)


def test_attention_that_is_left_out_is_named():
    """One of two asks for the correction."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.one = attention.SelfAttention(8)
            self.two = torch.nn.MultiheadAttention(8, 1)

        def forward(self, x):
            x = self.one(x)
            return self.two(x, x, x)[0]

    model = Model()
    tracked(model, 0.05)
    with pytest.warns(UserWarning, match="MultiheadAttention"):
        model(torch.randn(2, 5, 8))


@pytest.mark.parametrize("family", ["rotary", "experts"])
def test_another_attention_later(family):
    """Correction that is switched off by accident does not go unnoticed."""
    model = build(*FAMILIES[family])
    set_attention(model, "re_attention")
    tracked(model, 0.05)
    call(model, batch_of(model))
    set_attention(model, "sdpa")
    with pytest.raises(RuntimeError, match="no attention asked"):
        call(model, batch_of(model))


def test_a_cache_is_refused():
    """Given by name or position, and the one that generate() makes."""
    model = build(*FAMILIES["rotary"]).eval()
    set_attention(model, "re_attention")
    tracked(model, 0.05)
    ids = batch_of(model)["input_ids"]
    cache = model(ids, use_cache=True).past_key_values
    # transformers 5.0 to 5.23 call it past_key_values, later ones cache.
    names = signature(model.forward).parameters
    name = "cache" if "cache" in names else "past_key_values"
    for call_, given in (
        (lambda: model(input_ids=ids[:, :1], **{name: cache}), name),
        (lambda: model(ids[:, :1], None, None, cache), None),
        (lambda: model.generate(ids, max_new_tokens=2, do_sample=False), name),
    ):
        with pytest.raises(Refused, match="use_cache=False") as caught:
            call_()
        assert caught.value.parameter == given
    options = dict(max_new_tokens=2, do_sample=False, use_cache=False)
    assert model.generate(ids, **options).shape[1] == ids.shape[1] + 2


REGISTERED = """
import warnings
warnings.simplefilter("ignore")
import opacus_ext, torch
from opacus import PrivacyEngine
if {later}:
    import transformers.modeling_utils
    model = torch.nn.Linear(2, 1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=torch.utils.data.DataLoader(data, batch_size=2),
        noise_multiplier=1.0, max_grad_norm=1.0)
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    assert "opacus_ext" in ALL_EXPERTS_FUNCTIONS["grouped_mm"].__module__
    assert "re_attention" in transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
opacus_ext.unregister()
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
interfaces = ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS
for _ in range(2):
    assert not any("re_attention" in each for each in interfaces)
    opacus_ext.register()
    assert all("re_attention" in each for each in interfaces)
    opacus_ext.unregister()
"""


@pytest.mark.parametrize(
    "later", [True, pytest.param(False, marks=pytest.mark.thorough)]
)
def test_transformers_is_left_as_it_was(later):
    """unregister() works before its import and after; make_private registers."""
    code = REGISTERED.format(later=later)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
