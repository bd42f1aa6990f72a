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
from tests.common import (
    Net,
    check,
    every_mode,
    make_private,
    next_token_loss,
    square_loss,
)

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


def over_the_batch(capacity=None):
    """A Switch layer whose capacity is counted over the batch, as one sequence."""

    def forward(m, x):
        x = m.first(x)
        return m.last(x + m.moe(x.flatten(0, 1)[None]).view_as(x))

    moe = SwitchFeedForward(4, 8, num_experts=3)
    moe.capacity = capacity
    return Net(forward, first=nn.Linear(4, 4), last=nn.Linear(4, 2), moe=moe)


def rate_of_its_own():
    """Dropout by no attribute; experts draw as many numbers as they have tokens."""

    def forward(m, x):
        flat = m.first(x).flatten(0, 1)
        chosen, out = m.router(flat).argmax(-1), torch.zeros_like(flat)
        for i, expert in enumerate(m.experts):
            (token,) = torch.where(chosen == i)
            y = F.dropout(expert(flat[token]), 0.3, m.training)
            out = out.index_add(0, token, y)
        q = out.view_as(x)[:, None]
        rows = F.scaled_dot_product_attention(q, q, q, None, 0.3, False)
        return m.last(rows[:, 0])

    experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    ends = dict(first=nn.Linear(4, 4), last=nn.Linear(4, 4))
    return Net(forward, router=nn.Linear(4, 3), experts=experts, **ends)


def keeps(m, x):
    """Adds something of the batch before."""
    y = m.layer(x) + m.kept
    m.kept = y.detach().mean()
    return y


def statistics(position):
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    layers.insert(position, nn.BatchNorm1d(4))
    return nn.Sequential(*layers)


def outputs(model, batch):
    out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
    return out, next_token_loss(out.logits, batch["input_ids"])


def balanced_over_the_batch(model, batch):
    out, own = outputs(model, batch)
    return own + 0.01 * out.aux_loss


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
NORM, BALANCING = "GroupNorm", balanced_over_the_batch
LEAKS = {
    "batch norm": (statistics(1), X, plain, "1 (BatchNorm1d)", NORM),
    "first": (statistics(0), X, plain, "0 (BatchNorm1d)", NORM),
    "criterion": (statistics(2), (X, LABELS), CE(), "2 (BatchNorm1d)", NORM),
    "capacity": (over_the_batch(6), SEQUENCES, plain, "moe (SwitchFeed", "capacity"),
    "balancing": (mixtral(), tokens(), BALANCING, "loss_fn", "balancing"),
    "gradient": (nn.Linear(4, 2), X, in_the_gradient, "loss_fn", "one loss a sample"),
    "state": (Net(keeps, layer=nn.Linear(4, 2), kept=0), X, plain, "the model", ""),
    "no capacity": (over_the_batch(), SEQUENCES, plain),
    "balancing by sample": (mixtral(), tokens(), by_sample),
    "Switch": (SwitchFeedForward(4, 8, 3, capacity=2), SEQUENCES, balanced),
    "TopK": (TopKFeedForward(4, 8, 3), SEQUENCES, balanced),
}


@pytest.mark.parametrize("name", LEAKS)
def test_leaks(name):
    model, batch, loss, *told = LEAKS[name]
    found = find_leaks(model, batch, loss)
    assert len(found) == bool(told)
    assert not told or found[0].startswith(told[0]) and told[1] in found[0]


@pytest.mark.parametrize(
    "x, model, words",
    [
        (torch.randn(1, 4), nn.Linear(4, 2), "two samples"),
        (torch.ones(3, 4), nn.Linear(4, 2), "two samples"),
        (torch.randn(5, 6, 4), rate_of_its_own(), "is random"),
    ],
)
def test_what_can_not_be_compared(x, model, words):
    with pytest.raises(ValueError, match=words):
        find_leaks(model, x, plain)


# -- in training -----------------------------------------------------------------------


@every_mode
def test_in_training_each_sample_is_a_batch_of_one(mode):
    """So is a capacity that of the sample, and numbers beside the output do no harm."""

    def beside(m, x):
        y = m.layer(x)
        return y, y.std()

    check(mode, True, over_the_batch(6).double(), SEQUENCES.double(), square_loss)
    model = Net(beside, layer=nn.Linear(4, 2)).double()
    check(mode, False, model, X.double(), lambda m, x: m(x)[0].square().sum(1))
    if mode == "ghost_bk":
        private = make_private(rate_of_its_own(), mode, batch_size=5)
        private.step(torch.randn(5, 6, 4), square_loss)


@every_mode
def test_number_that_mixes_samples(mode):
    model, batch = mixtral(), tokens()
    private = make_private(model, mode, batch_size=4)
    if mode == "hooks":  # a mean of means is one
        private.step(batch, BALANCING)
        return
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match="loses the samples"):
        private.step(batch, BALANCING)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))


def kept(m, x, balancing):
    m.kept = balancing


def kept_in_a_list(m, x, balancing):
    m.kept = [balancing]


def a_row_for_each(m, x, balancing):
    return torch.stack([balancing] * 3)


def as_many_as_samples(m, x, balancing):
    return torch.stack([balancing] * 4)


def flattened(m, x, balancing):
    """Losses of tokens ``[B * T]``: whose rows they are can't be told."""
    return x.square().sum(-1).flatten()


# What is made of a number of the batch, and words of the error.
PLACES = [(kept, "changes kept"), (kept_in_a_list, "changes kept")]
PLACES += [(a_row_for_each, r"output\[1\] has shape")]
PLACES += [(as_many_as_samples, r"output\[1\] has shape")]
PLACES += [(flattened, r"output\[1\] has shape \(5,\)")]


@every_mode
@pytest.mark.parametrize("place, words", PLACES)
def test_numbers_in_other_places(mode, place, words):
    """A balancing loss over the batch that is kept, or given in a vector."""

    def forward(m, x):
        x = m.first(x)
        p = m.router(x).softmax(-1)
        share = F.one_hot(p.argmax(-1), 3).to(p).mean((0, 1))
        given = place(m, x, (share * p.mean((0, 1))).sum())
        return x * p.max(-1, keepdim=True).values, given

    def loss(model, x):
        output, given = model(x)
        own = getattr(model, "_module", model).kept if given is None else given.sum()
        return square_loss(lambda x: output, x) + (own[0] if type(own) is list else own)

    model = Net(forward, first=nn.Linear(4, 4), router=nn.Linear(4, 3)).double()
    with pytest.raises(RuntimeError, match=words):
        make_private(model, mode, batch_size=4).step(SEQUENCES.double(), loss)


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
