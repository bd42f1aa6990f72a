"""Losses that depend on other samples are found, named and refused."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
)

from opacus_ext import find_leaks
from opacus_ext.layers import SwitchFeedForward, TopKFeedForward, balancing_loss
from tests.common import check, every_mode, make_private, next_token_loss, square_loss

torch.manual_seed(0)
SMALL = dict(vocab_size=32, num_hidden_layers=1, num_attention_heads=2)
X, SEQUENCES = torch.randn(5, 4), torch.randn(4, 5, 4)
LABELS, CE = torch.arange(5) % 2, nn.CrossEntropyLoss


def tokens(B=4, T=6):
    ids = torch.randint(1, 32, (B, T))
    mask = torch.ones_like(ids)
    mask[0, T - 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def mixtral():
    config = dict(SMALL, hidden_size=16, intermediate_size=16, num_key_value_heads=1)
    config.update(num_local_experts=4, max_position_embeddings=32)
    return MixtralForCausalLM(MixtralConfig(output_router_logits=True, **config))


class OverTheBatch(nn.Module):
    """A Switch layer whose capacity is counted over the batch."""

    def __init__(self, capacity=None):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 2)
        self.moe = SwitchFeedForward(4, 8, num_experts=3)
        self.moe.capacity = capacity

    def forward(self, x):
        x = self.first(x)
        y = self.moe(x.flatten(0, 1)[None])  # the batch as one sequence
        return self.last(x + y.view_as(x))


class RateOfItsOwn(nn.Module):
    """Dropout by no attribute; experts draw as many numbers as they have tokens."""

    def __init__(self):
        super().__init__()
        self.router, self.last = nn.Linear(4, 3), nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        flat = self.first(x).flatten(0, 1)
        chosen, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            (token,) = torch.where(chosen == i)
            y = F.dropout(expert(flat[token]), 0.3, self.training)
            out = out.index_add(0, token, y)
        q = out.view_as(x)[:, None]
        rows = F.scaled_dot_product_attention(q, q, q, None, 0.3, False)
        return self.last(rows[:, 0])


class Keeps(nn.Linear):
    """Adds something of the batch before."""

    last = 0.0

    def forward(self, x):
        y = super().forward(x) + self.last
        self.last = y.detach().mean()
        return y


def statistics(position):
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    layers.insert(position, nn.BatchNorm1d(4))
    return nn.Sequential(*layers)


def outputs(model, batch):
    out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return out, next_token_loss(out.logits, batch["input_ids"])


def over_the_batch(weight):
    def loss(model, batch):
        out, own = outputs(model, batch)
        return own + weight * out.aux_loss

    return loss


def by_sample(model, batch):
    out, own = outputs(model, batch)
    p = torch.stack(out.router_logits).softmax(-1)  # [layers, B * T, experts]
    p = p.unflatten(1, batch["input_ids"].shape).transpose(0, 1).flatten(1, 2)
    return own + balancing_loss(p, p.topk(2).indices)


def in_the_gradient(model, x):
    """The losses of the others stay; only their gradients change."""
    y = model(x).square().sum(1)
    scale = y.mean().detach()
    return y * (scale / scale.clone()) + (y - y.detach()) * scale


def balanced(model, x):
    return model(x).square().sum((1, 2)) + model.balancing


def plain(model, x):
    return model(x).flatten(1).square().sum(1)


# A model, a batch, a loss, where the leak is, and words of the fix.
LEAKS = {
    "batch norm": (statistics(1), X, plain, "1 (BatchNorm1d)", "GroupNorm"),
    "first": (statistics(0), X, plain, "0 (BatchNorm1d)", "GroupNorm"),
    "criterion": (statistics(2), (X, LABELS), CE(), "2 (BatchNorm1d)", "GroupNorm"),
    "capacity": (
        *(OverTheBatch(6), SEQUENCES, plain),
        *("moe (SwitchFeedForward)", "capacity"),
    ),
    "balancing": (mixtral(), tokens(), over_the_batch(1e-3), "loss_fn", "balancing"),
    "gradient": (nn.Linear(4, 2), X, in_the_gradient, "loss_fn", "one loss a sample"),
    "state": (Keeps(4, 2), X, plain, "the model", ""),
    "no capacity": (OverTheBatch(), SEQUENCES, plain, None, ""),
    "balancing by sample": (mixtral(), tokens(), by_sample, None, ""),
    "Switch": (SwitchFeedForward(4, 8, 3, capacity=2), SEQUENCES, balanced, None, ""),
    "TopK": (TopKFeedForward(4, 8, 3), SEQUENCES, balanced, None, ""),
}


@pytest.mark.parametrize("name", LEAKS)
def test_leaks(name):
    model, batch, loss, where, fix = LEAKS[name]
    found = find_leaks(model, batch, loss)
    assert [leak.split(":")[0] for leak in found] == ([] if where is None else [where])
    assert not found or fix in found[0]


@pytest.mark.parametrize(
    "x, model, words",
    [
        (torch.randn(1, 4), nn.Linear(4, 2), "two samples"),
        (torch.ones(3, 4), nn.Linear(4, 2), "two samples"),
        (torch.randn(5, 6, 4), RateOfItsOwn(), "is random"),
    ],
)
def test_what_can_not_be_compared(x, model, words):
    with pytest.raises(ValueError, match=words):
        find_leaks(model, x, plain)


# -- in training -----------------------------------------------------------------------


@every_mode
def test_capacity_is_that_of_the_sample(mode):
    """In training each sample is a batch of one."""
    check(mode, True, OverTheBatch(6).double(), SEQUENCES.double(), square_loss)


def test_dropout_in_training():
    private = make_private(RateOfItsOwn(), "ghost_bk", batch_size=5)
    private.step(torch.randn(5, 6, 4), square_loss)


@every_mode
def test_number_that_mixes_samples(mode):
    model, batch = mixtral(), tokens()
    private = make_private(model, mode, batch_size=4)
    if mode == "hooks":  # a mean of means is one
        private.step(batch, over_the_batch(0.01))
        return
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="loses the samples"):
        private.step(batch, over_the_batch(0.01))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


@every_mode
@pytest.mark.parametrize("how", ["attribute", "list", 3, 4])
def test_numbers_in_other_places(mode, how):
    """A balancing loss over the batch that is kept, or given in a vector."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.router = nn.Linear(4, 4), nn.Linear(4, 3)

        def forward(self, x):
            x = self.first(x)
            p = self.router(x).softmax(-1)
            share = F.one_hot(p.argmax(-1), 3).to(p).mean((0, 1))
            balancing = (share * p.mean((0, 1))).sum()
            out = x * p.max(-1, keepdim=True).values
            if isinstance(how, int):  # one a layer, also as many as samples
                return out, torch.stack([balancing] * how)
            self.kept = balancing if how == "attribute" else [balancing]
            return out

    def loss(model, x):
        found = model(x)
        if isinstance(found, tuple):
            return square_loss(lambda x: found[0], x) + found[1].sum()
        kept = getattr(model, "_module", model).kept
        own = kept[0] if isinstance(kept, list) else kept
        return square_loss(lambda x: found, x) + own

    private = make_private(Model().double(), mode, batch_size=4)
    what = "changes kept" if isinstance(how, str) else r"output\[1\] has shape"
    with pytest.raises(RuntimeError, match=what):
        private.step(SEQUENCES.double(), loss)


class Rows(nn.Linear):
    """Losses of tokens ``[B * T]``: whose rows they are can't be told."""

    def forward(self, x):
        return super().forward(x).square().sum(-1).flatten()


@every_mode
def test_losses_of_flattened_tokens(mode):
    private = make_private(Rows(4, 2).double(), mode, batch_size=4)
    with pytest.raises(RuntimeError, match=r"Rows: output has shape \(5,\)"):
        private.step(
            SEQUENCES.double(), lambda m, x: m(x).unflatten(0, x.shape[:2]).sum(1)
        )


def test_mean_over_samples_is_trained_on():
    """The way of Opacus's tutorial: the loss that the model computes."""
    rates = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    config = BertConfig(hidden_size=16, intermediate_size=16, **SMALL, **rates)
    model = BertForSequenceClassification(config).double()
    batch = {**tokens(), "labels": torch.tensor([0, 1, 1, 0])}
    private = make_private(model, "hooks", batch_size=4)
    private.module(**batch).loss.backward()
    got = {n: p.grad_sample for n, p in model.named_parameters()}
    private.optimizer.zero_grad()
    logits = private.module(batch["input_ids"], batch["attention_mask"]).logits
    F.cross_entropy(logits, batch["labels"]).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad_sample)


@every_mode
def test_the_number_of_tokens_in_a_batch_is_left_out(mode):
    """transformers' Trainer passes it; it would divide by the tokens of others."""
    batch, found = tokens(), []
    for given in ({}, dict(num_items_in_batch=torch.tensor(77))):
        torch.manual_seed(0)
        model = mixtral()
        private = make_private(model, mode, batch_size=4)
        with pytest.warns(match="number of the batch") if given else nullcontext():
            loss = private.module(**batch, **given).loss
        loss.backward()
        private.optimizer.step()
        found.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *found))


@every_mode
def test_numbers_beside_do_no_harm(mode):
    class Model(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y, y.std()

    check(
        mode,
        False,
        Model(4, 2).double(),
        X.double(),
        lambda m, x: m(x)[0].square().sum(1),
    )
