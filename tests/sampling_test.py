"""Ways to draw batches: their distribution, what a step does, and what is refused.

Counts are compared with the exact distribution by a bound that a right sampler breaks
once in a million runs; seeds are fixed.
"""

import gc
import itertools
import math
from collections import Counter, deque
from unittest.mock import patch

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from opacus_ext import Refused
from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.data import Poisson
from opacus_ext.losses import PerSample
from tests.common import oracle

RECORDS = 24


def data(records=RECORDS):
    torch.manual_seed(1)
    x = torch.randn(records, 3, dtype=torch.float64)
    return TensorDataset(torch.arange(records), x)


def make(
    sampling, accountant="prv_bounds", mode="auto", loader=None, wrap=None, **kwargs
):
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.float64)
    model = model if wrap is None else wrap(model)
    engine = PrivacyEngine(
        accountant=accountant if isinstance(accountant, str) else "prv_bounds"
    )
    if not isinstance(accountant, str):
        engine.accountant = accountant
    stock = DataLoader(data(), batch_size=4, generator=torch.Generator().manual_seed(3))
    settings = dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=stock if loader is None else loader,
        criterion=PerSample(),
        max_grad_norm=0.5,
        grad_sample_mode=mode,
        sampling=sampling,
        **kwargs,
    )
    if "target_epsilon" in kwargs:
        made = engine.make_private_with_epsilon(**settings)
    else:
        made = engine.make_private(**{"noise_multiplier": 0.0, **settings})
    model, optimizer, *criterion, loader = made
    return engine, model, optimizer, criterion[0] if criterion else PerSample(), loader


def draws(sampling, count, records=6):
    generator = torch.Generator().manual_seed(5)
    return [tuple(sampling.draw(records, generator).tolist()) for _ in range(count)]


def fits(found, expected, count):
    """Pearson's test of counts by outcome against probabilities."""
    assert set(found) <= set(expected)
    assert math.isclose(sum(expected.values()), 1, rel_tol=1e-9)
    value = sum((found[k] - count * p) ** 2 / (count * p) for k, p in expected.items())
    assert value < chi2.isf(1e-6, len(expected) - 1), value


# -- distributions ---------------------------------------------------------------------


def subsets(n):
    return [s for k in range(n + 1) for s in itertools.combinations(range(n), k)]


def test_poisson_draws_every_set_as_often_as_it_should():
    q, found = 0.3, Counter(draws(Poisson(sample_rate=0.3), 20_000))
    fits(found, {s: q ** len(s) * (1 - q) ** (6 - len(s)) for s in subsets(6)}, 20_000)


def test_small_rates_are_not_rounded():
    """float32 has no numbers between 16 and 17 times 2^-24: a rate of 1e-6 is lost."""
    keys = (torch.arange(2**16, dtype=torch.float64) + 0.5) / 2**16 * 2e-7
    with patch("torch.rand", return_value=keys) as rand:
        drawn = Poisson(sample_rate=1e-7).draw(2**16, None)
    assert len(drawn) == 2**15
    assert rand.call_args.kwargs["dtype"] == torch.float64


@pytest.mark.parametrize(
    "sampling, steps, size",
    [
        (Poisson(expected_batch_size=10), 2, 10),
        (Poisson(expected_batch_size=13), 2, 13),  # 24 / 13 is 1.85
        (Poisson(expected_batch_size=0.5, steps=7), 7, 0.5),
        (Poisson(sample_rate=0.25), 4, 6),
        (Poisson(sample_rate=0.25, expected_batch_size=7), 4, 7),
        (Poisson(sample_rate=0.25, public_records=20), 4, 5),
        (Poisson(expected_batch_size=5, public_records=20), 4, 5),
        (Poisson(expected_batch_size=5), 5, 5),  # 24 / 5 is 4.8
        (Poisson(expected_batch_size=24), 1, 24),
    ],
)
def test_length_of_an_epoch_and_what_the_sum_is_divided_by(sampling, steps, size):
    engine, _, optimizer, _, loader = make(sampling)
    assert len(loader) == steps == len([*loader.batch_sampler])
    assert optimizer.expected_batch_size == size
    assert isinstance(optimizer.expected_batch_size, int) == (size == int(size))


# -- training --------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["auto", "hooks"])
def test_steps_equal_the_oracle_and_are_recorded(mode):
    """Each record alone through autograd, clipped, over the expected batch size."""
    sampling = Poisson(expected_batch_size=5)
    engine, model, optimizer, criterion, loader = make(sampling, mode=mode)
    optimizer.noise_multiplier = 1e-12  # nothing that is seen, and yet finite
    steps = 0
    for _ in range(2):
        for numbers, x in loader:
            optimizer.zero_grad()
            plain = nn.Linear(3, 2, dtype=torch.float64)
            plain.load_state_dict(getattr(model, "_module", model).state_dict())
            rows = oracle(plain, x, lambda m, z: m(z).pow(2).sum(1))
            norms = sum(g.flatten(1).pow(2).sum(1) for g in rows.values()).sqrt()
            factors = (0.5 / (norms + 1e-6)).clamp(max=1)
            loss = criterion(model(x).pow(2).sum(1))
            (loss.mean() if mode == "hooks" and loss.dim() else loss).backward()
            optimizer.step()
            for name, p in plain.named_parameters():
                total = torch.einsum("b,b...->...", factors, rows[name])
                now = dict(getattr(model, "_module", model).named_parameters())[name]
                assert torch.allclose(now, p - total / 5, atol=1e-9), name
            steps += 1
    trial = PRVBoundsAccountant()
    sampling.account(trial, RECORDS, 1e-12, steps)
    assert engine.accountant.state_dict() == trial.state_dict()
    assert steps == 10


def test_the_loader_keeps_what_is_not_about_batches():
    def collate(rows):
        return torch.stack([x for _, x in rows]), "mine"

    stock = DataLoader(
        data(), batch_size=4, collate_fn=collate, num_workers=1, timeout=60
    )
    *_, loader = make(Poisson(sample_rate=1.0, steps=2), loader=stock)
    assert (loader.num_workers, loader.timeout) == (1, 60)
    assert [(len(x), text) for x, text in loader] == [(24, "mine")] * 2


@pytest.mark.parametrize("sampling", [None, Poisson(expected_batch_size=0.1, steps=9)])
def test_first_draw_is_empty(sampling):
    """It has the form of others, whatever that is."""

    class Nested(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            x = torch.ones(3)
            return {"x": x, "more": (x, {"label": i % 2})}

    given = {} if sampling is None else {"sampling": sampling}
    for seed in range(20):
        torch.manual_seed(seed)
        model = nn.Linear(3, 2)
        *_, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(Nested(), batch_size=1),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **given,
        )
        batch = next(iter(loader))
        if not len(batch["x"]):
            break
    assert batch["x"].shape == batch["more"][0].shape == (0, 3)
    assert batch["more"][1]["label"].shape == (0,)


def test_two_batches_are_not_one_draw():
    sampling = Poisson(expected_batch_size=5)
    engine, model, optimizer, criterion, loader = make(sampling, mode="hooks")
    model.allow_grad_accumulation()
    for (_, x), _ in zip(loader, "ab"):
        model(x).pow(2).sum(1).mean().backward()
    with pytest.raises(Refused, match="2 batches were accumulated"):
        optimizer.step()
    assert not len(engine.accountant)


@pytest.mark.parametrize("before", [0, 10])
def test_noise_is_chosen_for_what_is_left(before):
    """Of the budget, by steps before."""
    sampling = Poisson(expected_batch_size=5)
    budget = dict(target_epsilon=4.0, target_delta=1e-3, epochs=3)
    accountant = PRVBoundsAccountant()
    if before:
        sampling.account(accountant, RECORDS, 8.0, before)
    engine, _, optimizer, _, loader = make(sampling, accountant, **budget)
    sampling.account(engine.accountant, RECORDS, optimizer.noise_multiplier, 15)
    assert 3.97 < engine.get_epsilon(1e-3) <= 4


def test_a_loader_of_two_engines(tmp_path):
    """The first one gives it new random numbers where a checkpoint is loaded."""
    engine, model, *_, loader = make(Poisson(expected_batch_size=5))
    *_, same = make(Poisson(expected_batch_size=5), loader=loader)
    gc.collect()
    before = same.batch_sampler.generator
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model)
    engine.load_checkpoint(path=tmp_path / "run.pt", module=model)
    assert same.batch_sampler.generator is not before


class Strange:
    """A sampler of which nothing can be made but its batches."""

    __slots__ = ("size",)

    def __init__(self):
        self.size = 4

    def __init_subclass__(cls):
        raise AssertionError("nobody makes a subclass")

    def __iter__(self):
        assert type(self) is Strange
        yield from (range(i, i + self.size) for i in range(0, 24, self.size))

    def __len__(self):
        return 6


@pytest.mark.parametrize(
    "sampler",
    [
        UniformWithReplacementSampler(num_samples=24, sample_rate=0.25, steps=4),
        Strange(),
        deque([[0, 1], [2, 3]]),
        torch.arange(24).reshape(6, 4),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_stays_as_it_is(sampler):
    """What the loader of make_private has in its place has its class and attributes."""
    kind, given = type(sampler), DataLoader(data(), batch_sampler=sampler)
    *_, loader = make(None, loader=given, poisson_sampling=False)
    assert loader is given and loader.batch_sampler is not sampler
    assert type(sampler) is kind and isinstance(loader.batch_sampler, kind)
    assert len([*loader]) == len(loader) == len(sampler)
    if kind is Strange:
        loader.batch_sampler.size = 8
        assert sampler.size == 8 and len([*loader]) == 3


# -- what is refused -------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(3)

    def __len__(self):
        return 5


@pytest.mark.parametrize(
    "sampling, settings, message",
    [
        (Poisson(), {}, "neither expected_batch_size nor sample_rate"),
        (Poisson(expected_batch_size=-2, sample_rate=0.1), {}, "got -2"),
        (Poisson(expected_batch_size=25), {}, "at most 24"),
        (Poisson(sample_rate=0.0), {}, "sample_rate must be .*got 0.0"),
        (Poisson(sample_rate=0.1, steps=0), {}, "steps must be .*got 0"),
        (Poisson(sample_rate=0.1), {"poisson_sampling": False}, "Leave one of them"),
        ("poisson", {}, "give opacus_ext.data.Poisson"),
        (
            Poisson(sample_rate=0.1),
            {"loader": DataLoader(Stream(), batch_size=2)},
            "IterableDataset",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_changed(
    sampling, settings, message
):
    with patch.object(nn.Module, "register_forward_hook") as hooked:
        with pytest.raises(Refused, match=message):
            make(sampling, **settings)
    assert not hooked.called
