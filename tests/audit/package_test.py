"""The package's own steps and runs keep their claims; broken ones are caught.

Each broken variant changes one thing in the package, or in what is given to it.
"""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.audit import (
    audit_model,
    audit_scores,
    audit_steps,
    audit_training,
    f_dp_p_value,
)
from opacus_ext.audit.bounds import accounted_tradeoff
from opacus_ext.clipping import ClippingFunction
from opacus_ext.data.sampling import Poisson
from opacus_ext.optimizers.optimizer import GhostDPOptimizer


def loss_fn(model, batch):
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


@pytest.fixture
def case():
    """A model with 2,163 entries, a loss and five records."""
    model = nn.Sequential(nn.Linear(16, 108), nn.Tanh(), nn.Linear(108, 3))
    return model, loss_fn, (3 * torch.randn(5, 16), torch.arange(5) % 3)


def kinds(audit):
    return {finding.test for finding in audit.broken}


# -- what is right ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ghost_bk", "ghost", "hooks", "scan"])
def test_steps_keep_their_claim(mode, case):
    audit = audit_model(*case, trials=20, confidence=0.999, grad_sample_mode=mode)
    assert audit.ok and audit.epsilon == 0 < audit.claimed, audit


@pytest.mark.thorough
@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
def test_a_run_keeps_its_claim(mode, case):
    audit = audit_training(*case, confidence=0.999, grad_sample_mode=mode)
    assert audit.ok and 0 < audit.epsilon < audit.claimed, audit


# -- what is broken -----------------------------------------------------------------


def halve_noise(monkeypatch, where=lambda step, parameter: True):
    """Half the noise in a step, where a function of its number and a parameter says."""
    whole, steps = GhostDPOptimizer.add_noise, []

    def add_noise(self):
        sums = [p.summed_grad.clone() for p in self.params]
        whole(self)
        steps.append(1)
        for i, (p, total) in enumerate(zip(self.params, sums)):
            if where(len(steps), i):
                p.grad = (p.grad + total.view_as(p)) / 2

    monkeypatch.setattr(GhostDPOptimizer, "add_noise", add_noise)


def clip_by(monkeypatch, factors):
    """Other factors: of a clipping function, norms, and the norms before these."""
    whole, seen = ClippingFunction.__call__, [()]

    def call(self, norms):
        seen.append(norms)
        return factors(lambda norms: whole(self, norms), norms, seen[-2])

    monkeypatch.setattr(ClippingFunction, "__call__", call)


def stale(clip, norms, before):
    return clip(before if len(before) == len(norms) else norms)


def no_clipping_of_one(clip, norms, before):
    return torch.ones_like(norms) if len(norms) == 1 else clip(norms)


def by_the_number_in_the_batch(clip, norms, before):
    return clip(norms) * 8 / max(1, len(norms))


BROKEN = [
    (halve_noise, lambda step, parameter: parameter == 1, "noise"),
    (halve_noise, lambda step, parameter: step == 50, "noise"),
    (clip_by, stale, "sensitivity"),
    (clip_by, no_clipping_of_one, "sensitivity"),
    (clip_by, by_the_number_in_the_batch, "sensitivity"),
]


@pytest.mark.parametrize("breaks, how, test", BROKEN)
def test_a_broken_step_is_caught(breaks, how, test, case, monkeypatch):
    breaks(monkeypatch, how)
    audit = audit_model(*case, trials=20, confidence=0.999)
    assert test in kinds(audit), audit


def test_a_padded_length_that_leaks_is_caught():
    """A mean over a length that the longest record gives."""

    def collate(records):
        return pad_sequence(records, batch_first=True)

    def mean(model, batch):
        return 9 * model(batch[:, None]).square().flatten(1).mean(1)

    records = [torch.randn(n) for n in (3, 4, 9)]
    model = nn.Conv1d(1, 8, 3, padding=1)
    audit = audit_model(model, mean, records, collate=collate, trials=16)
    assert "sensitivity" in kinds(audit), audit


def test_a_shared_parameter_that_counts_once_is_caught():
    """As where the norm of the last use alone is taken for that of all."""
    ids, table = torch.randint(8, (5, 4)), torch.randn(8, 6)

    def loss(one, two, ids):
        return 9 * F.cross_entropy((one[ids] @ two.T)[0], ids[0])

    def exact(records):
        total = torch.zeros(48)
        for record in records:
            gradient = torch.func.grad(loss, (0, 1))(table, table, record)
            norm = gradient[1].norm()  # of one use
            total += (sum(gradient) / norm.clamp(min=1)).flatten()
        return total

    audit = audit_steps(
        lambda records: exact(records) + 0.5 * torch.randn(48),
        exact,
        {"a record": [([*ids[:i], *ids[i + 1 :]], ids[i]) for i in range(5)]},
        noise_multiplier=0.5,
        trials=50,
    )
    assert kinds(audit) == {"sensitivity"}, audit


@dataclass(frozen=True)
class Twice(Poisson):
    """Draws each record twice."""

    def draw(self, records, generator, step=0):
        return super().draw(records, generator, step).repeat(2)


@pytest.mark.thorough
def test_a_sampler_that_repeats_is_caught(case):
    audit = audit_training(*case, sampling=Twice(sample_rate=0.9, steps=16))
    assert "membership" in kinds(audit), audit


@pytest.mark.thorough
def test_half_the_noise_of_a_run_is_caught(case, monkeypatch):
    """By what is released alone."""
    halve_noise(monkeypatch)
    audit = audit_training(*case)
    assert kinds(audit) == {"membership"}, audit


@pytest.mark.thorough
def test_an_accountant_that_forgets_empty_batches_is_caught(case, monkeypatch):
    """The norms of a step are known when it is counted."""
    whole = Poisson.hook

    def hook(self, accountant, records):
        record = whole(self, accountant, records)
        return lambda optimizer: sum(map(len, optimizer.norms)) and record(optimizer)

    monkeypatch.setattr(Poisson, "hook", hook)
    audit = audit_training(*case, canaries=100)
    assert kinds(audit) == {"accountant"}, audit


def test_what_an_audit_says_of_steps(case, monkeypatch):
    """The verdict first. Rows of noise, of which models have hundreds, are one."""
    options = dict(trials=20, confidence=0.9999)
    first, *_, last = str(audit_model(*case, **options)).splitlines()
    assert first.startswith("No fault was seen: no record moves the sum of a step by")
    assert last.startswith("noise        5 parameters and steps  1")
    halve_noise(monkeypatch, lambda step, parameter: parameter == 1)
    lines = str(audit_model(*case, **options)).splitlines()
    assert lines[0].startswith("VIOLATION: 1 of 8 tests contradict the claim (99.99 %")
    assert "The first is noise of 0.bias: std over claimed 0." in lines[0]
    assert sum("VIOLATION" in line for line in lines) == 2


def test_what_an_audit_says_of_a_run():
    """A claim permits so many right guesses, and canaries can show so much."""
    accountant = of_one_step(2.0)
    coins = np.arange(100) % 2 == 0
    audit = audit_scores(coins + 0.1, coins, accountant)
    assert audit.canaries == 100 and audit.epsilon == audit.most > 1
    (finding,) = audit.findings
    assert finding.measured == 20 and str(audit).startswith("VIOLATION")
    claim = accounted_tradeoff(accountant)
    permitted = int(finding.claimed)
    values = [f_dp_p_value(claim, 100, 20, n) for n in (permitted, permitted + 1)]
    assert values[0] > 0.025 >= values[1] and audit.broken
    half = audit_scores(np.zeros(100), coins, accountant)
    assert "No leak was seen: 100 canaries show epsilon at least 0 (95 %" in str(half)
    weak = audit_scores(np.zeros(100), coins, of_one_step(0.2))
    assert weak.findings[0].claimed == 20 and not weak.can_tell
    told = "Too few canaries to tell whether it leaks: 100 canaries"
    assert weak.verdict.startswith(told)


def of_one_step(noise_multiplier):
    """An accountant of one step."""
    accountant = PRVBoundsAccountant()
    accountant.step(noise_multiplier=noise_multiplier, sample_rate=1.0)
    return accountant


@pytest.mark.filterwarnings("error::UserWarning")
def test_an_audit_of_steps_tells_of_no_loader(case):
    """Its steps need none: a warning that epsilon does not hold is not for readers."""
    assert audit_model(*case, trials=20, confidence=0.9999).ok
