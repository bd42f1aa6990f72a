"""Every family of transformers with a mixture of experts, tiny and in float64."""

import inspect

import pytest
import torch

from opacus_ext import clipped_grads
from tests import tiny
from tests.common import (
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    next_token_loss,
    oracle,
    trainable,
)
from tests.compatibility import check_class
from tests.grad_samples.rule_case import MODE

transformers = pytest.importorskip("transformers")

# Those with an architecture of their own.
MAIN = ("mixtral", "gpt_oss", "deepseek_v3", "jetmoe", "switch_transformers", "zaya")
# As transformers ships them; the others' routes are branches, or as these.
COMPILED = ("mixtral", "gpt_oss", "deepseek_v3")
EXPERTS = {"num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"}


def is_mixture(family):
    known = set(inspect.signature(tiny.CONFIG_MAPPING[family].__init__).parameters)
    return known & EXPERTS or "ffn_config" in known


JOBS = {
    job[1]: job
    for job in tiny.classes()
    if job[0] in ("causal-lm", "seq2seq-lm") and is_mixture(job[1])
}


def build(family, **kwargs):
    return tiny.build(*JOBS[family], **kwargs)


def loss_fn(model, batch):
    ids, given = batch["input_ids"], dict(batch)
    config = getattr(model, "_module", model).config
    if config.is_encoder_decoder:
        given["decoder_input_ids"] = ids
    return next_token_loss(model(**given, use_cache=False).logits, ids)


def batch_of(B, T):
    return {"input_ids": torch.randint(3, tiny.V, (B, T))}


@pytest.mark.parametrize("i, family", list(enumerate(JOBS))[::2], ids=[*JOBS][::2])
def test_families(i, family):
    """Every other one, in one mode and kind of batch; "-m slow" takes every class."""
    mode, kind = ("hooks", "ghost", "ghost_bk")[i % 3], ("padded", "T=B")[i % 4 // 2]
    given = dict(modes=(mode,), kinds=(kind,))
    assert check_class(*JOBS[family], **given)[:2] == ("exact", "")


@pytest.mark.parametrize("form", ["half frozen", "embeddings frozen"])
@pytest.mark.parametrize("family", MAIN)
def test_frozen(family, form):
    given = dict(kinds=("T=B",))
    assert check_class(*JOBS[family], form, **given)[:2] == ("exact", "")


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe"])
def test_bfloat16(family):
    """As close to single samples in bfloat16 (which choose the same experts)."""
    model, batch = build(family).bfloat16(), batch_of(3, 5)

    def loss(model, batch):
        return loss_fn(model, batch).float()

    grads = {name: g.float() for name, g in oracle(model, batch, loss).items()}
    c = half_clipped(grads)
    make_private(model, *MODE, batch_size=3, max_grad_norm=c).step(batch, loss)
    got = {name: 3 * p.grad.float() for name, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("family", COMPILED)
def test_compiled(family):
    """Whole: the model, in two steps of other routes, and its clipped gradients."""
    torch._dynamo.reset()
    one = dict(num_hidden_layers=1, first_k_dense_replace=0)
    model, plain, c = build(family, **one), build(family, **one), 0.3
    plain.load_state_dict(model.state_dict())
    how = dict(backend="aot_eager", fullgraph=True)
    whole = torch.compile(model, **how)
    private = make_private(whole, *MODE, batch_size=3, max_grad_norm=c, lr=0.0)
    params, batches = trainable(model), [batch_of(3, 5) for _ in range(2)]
    for batch in batches:
        expected = clipped_sum(oracle(plain, batch, loss_fn), "flat", c)
        private.step(batch, loss_fn)
        got = {name: 3 * p.grad for name, p in params.items()}
        assert_same(got, expected, 1e-5)  # it rotates in float32

    def loss(sample):
        return loss_fn(model, sample)[0]

    step = torch.compile(lambda batch: clipped_grads(loss, params, batch, c), **how)
    assert_same(step(batch).sums, expected, 1e-5)


def test_tokens_mixed_by_the_model():
    """Doge's router reads its logits as [2, B * T]: of one sample, its own tokens."""
    job = "causal-lm", "doge", "DogeForCausalLM"
    model = tiny.build(*job, is_moe=True, num_experts=16)
    check("ghost_bk", True, model, batch_of(3, 5), loss_fn, tolerance=1e-3)
