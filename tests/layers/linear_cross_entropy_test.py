"""The head that never holds all logits: against a linear layer and its loss."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext import GradSample, OneHot, workspace
from opacus_ext.layers import LinearCrossEntropy, chunked_head
from opacus_ext.layers.linear_cross_entropy import Columns
from opacus_ext.losses import model_losses
from tests.common import check, layer_modes, oracle, wrapped
from tests.losses_test import bert, build, gpt2, llama, t5, tokens

V, D = 300, 8
CAP = (("div", 3.0), ("tanh", None), ("mul", 3.0))


@pytest.fixture(params=[64 * 2**20, 1000], ids=["whole", "parts"], autouse=True)
def bound(request):
    before = workspace(request.param)
    yield request.param
    workspace(before)


def plain(head, x, labels, ops=()):
    y = F.linear(x, head.weight, head.bias)
    for name, other in ops:
        y = getattr(torch, name)(y, *(() if other is None else (other,)))
    y, rows = y.flatten(0, -2), labels.flatten()
    return F.cross_entropy(y, rows, reduction="none").view(labels.shape)


class Model(nn.Module):
    def __init__(self, tied=False, bias=False, ops=(), twice=False):
        super().__init__()
        self.embedding, self.hidden = nn.Embedding(V, D), nn.Linear(D, D)
        self.head = LinearCrossEntropy(D, V, bias)
        if tied:
            self.head.weight = self.embedding.weight
        self.ops, self.twice, self.loss = ops, twice, None

    def forward(self, ids, labels):
        x = torch.tanh(self.hidden(self.embedding(ids)))
        if self.loss is not None:
            return self.loss(self.head, x, labels, self.ops)
        losses = self.head(x, labels, self.ops)
        if self.twice:
            losses = losses + self.head(x.flip(1), labels) + self.head(x)[..., 3]
        return losses


def loss_fn(model, batch):
    return model(*batch).mean(1)


def batch_of(B, T):
    torch.manual_seed(B * T)
    ids, labels = torch.randint(V, (B, T)), torch.randint(V, (B, T))
    labels[:1, :2] = -100
    return ids, labels


class TestLosses:
    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("ops", [(), CAP, (("add", torch.rand(V).double()),)])
    @pytest.mark.parametrize("rows", [(), (3,), (2, 5), (2, 3, 2), (0, 4)])
    def test_are_those_of_a_linear_layer(self, rows, ops, bias):
        torch.manual_seed(0)
        head = LinearCrossEntropy(D, V, bias).double()
        x = torch.randn(*rows, D).double().requires_grad_()
        labels = torch.randint(V, rows)
        if len(rows) > 1:
            labels[:1, 0] = -100
        if not rows:
            x, labels = x.detach()[None].requires_grad_(), labels[None]
        params = [x, *head.parameters()]
        got, expected = head(x, labels, ops), plain(head, x, labels, ops)
        assert torch.allclose(got, expected)
        c = torch.rand(labels.shape).double()
        for a, b in zip(
            torch.autograd.grad((c * got).sum(), params),
            torch.autograd.grad((c * expected).sum(), params),
        ):
            assert torch.allclose(a, b)
        assert torch.allclose(head(x), F.linear(x, head.weight, head.bias))

    def test_large_logits(self):
        head = LinearCrossEntropy(D, V)
        x = 1e4 * torch.randn(3, D)
        assert head(x, torch.tensor([1, 2, 3])).isfinite().all()

    def test_half_precision(self):
        torch.manual_seed(0)
        head, x = LinearCrossEntropy(D, V), torch.randn(3, D, requires_grad=True)
        labels = torch.tensor([1, 2, 3])
        whole = head(x, labels)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            (grad,) = torch.autograd.grad(head(x, labels).sum(), x)
        assert torch.allclose(grad, torch.autograd.grad(whole.sum(), x)[0])
        losses = copy.deepcopy(head).bfloat16()(x.bfloat16(), labels)
        assert losses.dtype == torch.float32
        assert torch.allclose(losses, whole, rtol=0.05)

    def test_refused(self):
        head = LinearCrossEntropy(D, V)
        with pytest.raises(ValueError, match=r"\(2, 8\) and \(3,\)"):
            head(torch.randn(2, D), torch.tensor([1, 2, 3]))
        for label in (V, -1):
            with pytest.raises(ValueError, match=f"labels below {V}"):
                head(torch.randn(2, D), torch.tensor([label, 1]))


class TestModes:
    @layer_modes
    @wrapped
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
    @pytest.mark.parametrize("shape", [(3, 5), (4, 4), (1, 3)])
    def test_exact(self, mode, wrap, tied, bias, shape):
        model, batch = Model(tied, bias).double(), batch_of(*shape)
        check(mode, wrap, model, batch, loss_fn)

    @layer_modes
    def test_empty_batch(self, mode):
        check(mode, True, Model(True).double(), batch_of(0, 5), loss_fn)

    def test_the_oracle_agrees_with_a_linear_layer(self):
        model, batch = Model(True, True, CAP).double(), batch_of(3, 5)
        other = copy.deepcopy(model)
        other.loss = plain
        expected = oracle(other, batch, loss_fn)
        for name, g in oracle(model, batch, loss_fn).items():
            assert torch.allclose(g, expected[name])

    @layer_modes
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    def test_capped_and_used_twice(self, mode, tied):
        model = Model(tied, True, CAP, twice=True).double()
        check(mode, True, model, batch_of(3, 5), loss_fn)

    @layer_modes
    @pytest.mark.parametrize("frozen", ["head.weight", "head.bias", "head", "others"])
    def test_frozen_parts(self, mode, frozen):
        model = Model(False, True).double()
        for name, p in model.named_parameters():
            hit = name.startswith(frozen)
            p.requires_grad_(name.startswith("head") if frozen == "others" else not hit)
        check(mode, True, model, batch_of(3, 5), loss_fn)

    @layer_modes
    def test_half_precision(self, mode):
        torch.manual_seed(0)
        model = Model(True, True).bfloat16()
        check(mode, True, model, batch_of(3, 5), loss_fn, tolerance=0.2)


class TestColumns:
    """Computed in slices they are what they are when held, alone and tied."""

    @pytest.mark.parametrize("shape", [(V, D), (V,)])
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("num_bytes", [300, 2**20])
    @pytest.mark.parametrize("keep", [0, 2**20])
    def test_operations(self, shape, tied, num_bytes, keep):
        torch.manual_seed(0)
        B, T = 3, 4
        one, other = (GradSample(torch.Size(shape), B) for _ in range(2))
        for _ in range(1 + tied):
            g, x = torch.randn(B, T, V).double(), torch.randn(B, T, D).double()
            rest = (x,) if len(shape) == 2 else ()
            make = lambda samples, columns, g=g: g[samples, :, columns]  # noqa
            one.add(Columns(make, g.shape, g, *rest))
            other.add(g, *rest)
        if tied:
            ids, x = torch.randint(V, (B, 6)), torch.randn(B, 6, D).double()
            use = (OneHot(ids, V), x) if rest else (OneHot(ids, V),)
            whole = torch.randn(B, 1, math.prod(shape)).double()
            for sample in (one, other):
                sample.add(*use)
                sample.add(whole)
        weights = torch.rand(B).double()
        with workspace(num_bytes):
            for drop in (False, True):
                if drop:
                    for sample in (one, other):
                        sample.drop(torch.tensor([True, False, False]))
                assert torch.allclose(one.materialize(), other.materialize())
                for _ in range(2):
                    sums = [s.weighted_sum(weights) for s in (one, other)]
                    assert torch.allclose(*sums)
                    norms = one.squared_norm(keep), other.squared_norm()
                    assert torch.allclose(*norms)
                assert bool(one.cached_bytes) == (keep > 0)


def gemma2():
    return build("causal-lm", "gemma2", "Gemma2ForCausalLM")


def bart():
    return build("seq2seq-lm", "bart", "BartForConditionalGeneration")


class TestChunkedHead:
    @pytest.mark.parametrize(
        "model_of", [gpt2, llama, bert, t5, gemma2, bart], ids=lambda f: f.__name__
    )
    def test_losses_and_names_stay(self, model_of):
        torch.manual_seed(0)
        model, batch = model_of(), tokens(3, 6)
        model.train(False)
        names = list(model.state_dict())
        expected, logits = model_losses(model, batch), model(**batch).logits
        assert chunked_head(model) is model and list(model.state_dict()) == names
        losses = model_losses(model, batch)
        assert torch.allclose(losses, expected.to(losses), rtol=1e-5)
        assert torch.equal(model(**batch).logits, logits)
        head = model.get_output_embeddings()
        tied = model.config.get_text_config().tie_word_embeddings
        assert (head.weight is model.get_input_embeddings().weight) == tied

    @layer_modes
    @pytest.mark.parametrize("model_of", [gpt2, bert, t5], ids=lambda f: f.__name__)
    def test_every_mode(self, model_of, mode, bound):
        torch.manual_seed(0)
        model, batch = chunked_head(model_of()), tokens(3, 6)
        tolerance = 1e-6 if model_of is t5 else 1e-8
        check(mode, True, model, batch, model_losses, tolerance=tolerance)

    def test_what_needs_all_logits_is_refused(self):
        class Sorted(nn.Module):
            def __init__(self):
                super().__init__()
                self.lm_head = nn.Linear(D, V)

            def get_output_embeddings(self):
                return self.lm_head

            def forward(self, x, labels):
                y = self.lm_head(x).softmax(-1)
                return {"loss": F.nll_loss(y.flatten(0, 1), labels.flatten())}

        model = chunked_head(Sorted())
        batch = {"x": torch.randn(2, 3, D), "labels": torch.ones(2, 3).long()}
        with pytest.raises(ValueError, match="softmax of its logits"):
            model_losses(model, batch)
        assert not model.lm_head.pending

    def test_refused(self):
        with pytest.raises(ValueError, match="Linear has no output layer"):
            chunked_head(nn.Linear(2, 2))
        model = chunked_head(gpt2())
        with pytest.raises(ValueError, match="it gives LinearCrossEntropy"):
            chunked_head(model)
