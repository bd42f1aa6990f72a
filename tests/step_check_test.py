"""``check_per_sample_gradients(step=...)``: loops that mix records, and that don't.

Each loop of ``RIGHT`` is a sum, or a mean, over records of what each gives by itself.
"""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

from opacus_ext import Refused, check_per_sample_gradients

torch.manual_seed(0)
MODEL = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Dropout(0.2), nn.Tanh())
MODEL.append(nn.Linear(6, 3))
X, Y = torch.rand(8, 3, 4, 4), torch.tensor([0, 1, 2, 0, 1, 0, 2, 2])
GENERATOR = np.random.default_rng(0)


def loss(x, y, **options):
    return F.cross_entropy(MODEL(x), y, **options)


def mean(x, y):
    loss(x, y).backward()


def sum_of_parts(x, y):
    for part, target in zip(x.split(3), y.split(3)):
        loss(part, target, reduction="sum").backward()


def noise(x, y):
    mean(x + 0.1 * torch.randn_like(x), y)


def augmented(x, y):
    rows = [row.flip(-1) if random.random() < 0.5 else row for row in x]
    mean(torch.stack(rows) * np.random.rand() / 0.5, y)


def autocast(x, y):
    with torch.autocast("cpu", torch.bfloat16):
        mean(x, y)


RIGHT = [mean, sum_of_parts, noise, augmented, autocast]


def mixup(x, y):
    share, order = np.random.beta(0.2, 0.2), torch.randperm(len(x))
    output = MODEL(share * x + (1 - share) * x[order])
    parts = F.cross_entropy(output, y), F.cross_entropy(output, y[order])
    (share * parts[0] + (1 - share) * parts[1]).backward()


def mixup_in_place_at_times(x, y):
    if random.random() < 0.4:
        x.mul_(0.7).add_(0.3 * x.flip(0))
    mean(x, y)


def cutmix(x, y):
    x = x.clone()
    x[:, :, 1:3, :3] = x.roll(1, 0)[:, :, 1:3, :3]
    mean(x, y)


def negatives(x, y):
    z = MODEL(x)
    F.cross_entropy(z @ z.t(), torch.arange(len(z))).backward()


def by_the_largest(x, y):
    losses = loss(x, y, reduction="none")
    (losses / losses.max().detach()).mean().backward()


def hardest(x, y):
    loss(x, y, reduction="none").topk(2).values.mean().backward()


def centered(x, y):
    mean(x - x.mean(0), y)


def class_weights(x, y):
    weight = 1 / (1 + torch.bincount(y, minlength=3).float())
    loss(x, y, weight=weight).backward()


def tokens_of_the_batch(x, y):
    """Each record has another number of values, and their mean is that of all."""
    values = loss(x, y, reduction="none")
    counts = 1 + y
    ((values * counts).sum() / counts.sum()).backward()


WRONG = [mixup, mixup_in_place_at_times, cutmix, negatives, by_the_largest, hardest]
WRONG += [centered, class_weights, tokens_of_the_batch]


def report_of(step, batch=(X, Y), **options):
    return check_per_sample_gradients(
        MODEL, batch, step=lambda batch: step(*batch), verbose=False, **options
    )


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
def test_right(step):
    report = report_of(step)
    assert report.ok and str(report).startswith("ok"), report


@pytest.mark.parametrize("step", WRONG, ids=lambda step: step.__name__)
def test_wrong(step):
    report = report_of(step)
    assert not report.ok and not report.random
    assert "changes with the other records" in report.findings[0]
    assert "__getitem__" in report.leaks[0] and "NOT ok" in str(report)


def test_together_with_a_criterion():
    report = report_of(mixup, loss_fn=nn.CrossEntropyLoss(), modes=["hooks"])
    assert {cells["hooks"].status for cells in report.cells.values()} == {"ok"}
    assert not report.ok and "mixup" in str(report)


@pytest.mark.parametrize("mixes", [False, True])
def test_collate_fn(mixes):
    def collate(records):
        x, y = default_collate(records)
        return (0.7 * x + 0.3 * x.roll(1, 0) if mixes else x), y

    assert report_of(mean, list(zip(X, Y)), collate_fn=collate).ok is not mixes


def test_random_numbers_of_its_own():
    report = report_of(lambda x, y: mean(x * GENERATOR.random(), y))
    assert report.random and "random generator of its own" in report.findings[0]


def noise_where_data_say(x, y):
    x = x.clone()
    is_hidden = x > 0.5
    x[is_hidden] = torch.randn(int(is_hidden.sum()))
    mean(x, y)


def test_random_numbers_that_data_count():
    report = report_of(noise_where_data_say)
    assert not report.ok
    assert report.random and not report.leaks
    assert "more random numbers for some records" in str(report)


def nothing(x, y):
    loss(x, y)


def with_a_step(x, y):
    mean(x, y)
    torch.optim.SGD(MODEL.parameters(), lr=0.1).step()


def not_finite(x, y):
    mean(x / 0, y)


@pytest.mark.parametrize(
    "step, batch, words",
    [
        (nothing, (X, Y), "left no gradient"),
        (with_a_step, (X, Y), "without optimizer.step()"),
        (not_finite, (X, Y), "not finite"),
        (mean, (X[:3], Y[:3]), "four records or more, got 3"),
    ],
)
def test_refused(step, batch, words):
    before = [p.detach().clone() for p in MODEL.parameters()]
    with pytest.raises(Refused, match=words.replace("(", r"\(").replace(")", r"\)")):
        report_of(step, batch)
    assert all(map(torch.equal, before, MODEL.parameters()))


def test_nothing_to_check():
    with pytest.raises(Refused, match="neither loss_fn nor step"):
        check_per_sample_gradients(MODEL, (X, Y))


def test_leaves_all_as_it_was():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    x, given = torch.randn(6, 4), torch.ones(4)
    model[0].bias.grad, state = given, {
        k: v.clone() for k, v in model.state_dict().items()
    }
    numbers = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    report = check_per_sample_gradients(
        model, x, step=lambda x: model(x).square().sum().backward(), verbose=False
    )
    assert not report.ok  # the statistics of the batch
    assert model[0].bias.grad is given and model[0].weight.grad is None
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert (np.random.get_state()[1] == numbers[1]).all()
    assert random.getstate() == numbers[2]
