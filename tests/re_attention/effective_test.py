"""Effective errors: the oracle is the noise that a private optimizer really adds.

With zero gradients a step moves a parameter by the noise alone, so that the standard
deviation of many parameters' moves is what ``effective_errors`` should have said.
"""

import math

import pytest
import torch
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from torch import nn

from opacus_ext.re_attention import effective_errors, gradient_noise, token_shares
from tests.common import MODES, make_private

SIZE = 60  # 60 * 60 elements: a standard deviation within 1.2 % (one standard error)


def still(model, batch):
    """Losses without a gradient that would move anything."""
    return 0 * model(batch).flatten(1).sum(1)


def private(model=None, mode="hooks", **kwargs):
    model = model or nn.Linear(SIZE, SIZE, bias=False)
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    settings = {"noise_multiplier": 1.5, "max_grad_norm": 0.5, **kwargs}
    return make_private(model, mode, batch_size=5, optimizer=sgd, **settings)


# The oracle is what a step without a gradient does.
def moved(run):
    """Standard deviation of how far the parameters move in a step."""
    (p,) = run.module.parameters()
    before = p.detach().clone()
    run.step(torch.zeros(5, SIZE), still)
    return float((p.detach() - before).std())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("clipping", ["flat", "normalized", "automatic", "per_layer"])
def test_error_is_the_noise_of_an_averaged_gradient(mode, clipping):
    bound = [0.5] if clipping == "per_layer" else 0.5
    run = private(mode=mode, clipping=clipping, max_grad_norm=bound)
    (error,) = effective_errors(run.module, run.optimizer).values()
    clip = 1.0 if clipping == "normalized" else 0.5
    assert float(error) == pytest.approx(1.5 * clip / 5)
    assert moved(run) == pytest.approx(float(error), rel=0.05)


def test_rows_are_divided_by_their_shares():
    """And what is frozen, or of no optimizer, has no error."""
    model = nn.Sequential(nn.Embedding(4, 6), nn.Linear(6, 2), nn.Linear(2, 2))
    model[1].bias.requires_grad_(False)
    errors = effective_errors(
        model, 0.15, {"0.weight": torch.tensor([0, 0.01, 0.5, 1])}
    )
    expected = 0.15 / torch.tensor([0.01, 0.01, 0.5, 1.0])
    torch.testing.assert_close(errors["0.weight"], expected)
    optimizer = torch.optim.SGD([*model[:2].parameters()], lr=1.0)
    run = make_private(model, "ghost_bk", batch_size=5, optimizer=optimizer)
    run.optimizer.noise_multiplier = 1.0
    errors = effective_errors(run.handle, run.optimizer)
    assert [n for n, e in errors.items() if e > 0] == ["0.weight", "1.weight"]


def test_summed_losses_are_not_divided_by_the_batch():
    run = private(loss_reduction="sum")
    assert gradient_noise(run.optimizer) == pytest.approx(0.75)
    assert moved(run) == pytest.approx(0.75, rel=0.05)


@pytest.mark.parametrize(
    "name, shares, message",
    [
        ("bias", torch.ones(3), "bias"),
        ("weight", torch.ones(3), "4 shares"),
        ("weight", torch.full((4,), 1.5), "between 0 and 1"),
        ("weight", torch.full((4,), math.nan), "between 0 and 1"),
        ("weight", torch.zeros(4), "positive"),
    ],
)
def test_refusals(name, shares, message):
    with pytest.raises(ValueError, match=message):
        effective_errors(nn.Embedding(4, 6), 0.1, {name: shares})


# Token shares

SEQUENCES = [torch.tensor(s) for s in ([1, 2, 2, 2], [2, 0, 0], [3, 1, 3], [2])]


def exact(*args, **kwargs):
    with pytest.warns(UserWarning, match="not covered by the privacy guarantee"):
        return token_shares(*args, source="exact", **kwargs)


def test_exact_shares_are_those_of_sequences_and_warn():
    """Token 2: 5 of 9 tokens, but 3 of 4 sequences."""
    assert exact(SEQUENCES, 5).tolist() == [0, 0.5, 0.75, 0.25, 0]
    padded = torch.tensor([[1, 1, 0], [2, 1, 0]])
    assert exact(padded, 3, padding_idx=None).tolist() == [1, 1, 0.5]
    assert exact([], 3).tolist() == [0, 0, 0]
    # A sequence counts its last distinct tokens.
    ids = torch.tensor([[1, 2, 3, 2, 0]])
    assert exact(ids, 4, max_tokens=2).tolist() == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="1 to 7"):
        released([torch.tensor([1, 7])], 5)


def released(sequences, vocabulary, noise_multiplier=1e-6, **kwargs):
    options = dict(source="private", max_tokens=3, accountant=RDPAccountant())
    options.update(kwargs, noise_multiplier=noise_multiplier)
    return token_shares(sequences, vocabulary, **options)


@pytest.mark.parametrize("length", range(1, 7))
def test_one_user_moves_the_release_by_its_sensitivity_at_most(length):
    """The release without noise: the counts, and the number of sequences."""

    def counts(data):
        shares = exact(data, 10, max_tokens=length, padding_idx=None)
        return torch.cat([shares * len(data), torch.tensor([float(len(data))])])

    for _ in range(20):
        data = torch.randint(0, 10, (4, 12))
        gap = counts(data) - counts(data[1:])
        assert float(gap.norm()) <= math.sqrt(length + 1) + 1e-4


def test_private_noise_has_the_promised_deviation():
    """1000 sequences with half of 4000 tokens each, L = 3 of them counted."""
    ids = torch.arange(1, 4).repeat(1_000_000, 1)[:1000]
    vocabulary = 4001
    noise = 5.0 * math.sqrt(4)
    got = released(ids, vocabulary, 5.0, generator=torch.Generator().manual_seed(3))
    # untouched tokens: max(noise, std) / total
    total = noise / float(got[4:].min())
    assert abs(total - 1000) < 5 * noise
    tail = got[4:] * total / noise
    above = tail[tail > 1 + 1e-6]
    # P(z > 1) = 0.1587, E[z | z > 1] = phi(1) / 0.1587 = 1.5251
    assert len(above) / len(tail) == pytest.approx(0.1587, abs=0.02)
    assert float(above.mean()) == pytest.approx(1.5251, abs=0.05)
    assert ((got >= 0) & (got <= 1)).all() and got[0] == 0
    assert (got[1:4] > 0.9).all()


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Optimal order")
@pytest.mark.parametrize("accountant", [RDPAccountant, PRVAccountant])
def test_the_release_costs_what_a_gaussian_mechanism_does(accountant):
    """The exact epsilon is by Balle and Wang 2018."""

    def delta(epsilon, sigma):
        phi = torch.special.ndtr
        a, b = 1 / (2 * sigma), epsilon * sigma
        first, second = phi(torch.tensor([a - b, -a - b], dtype=torch.float64))
        return float(first - math.exp(epsilon) * second)

    alone = accountant()
    released(SEQUENCES, 5, 5.0, accountant=alone)
    # What is composed with it is read off the history.
    assert alone.history == [(5.0, 1.0, 1)]
    epsilon = alone.get_epsilon(1e-5)
    assert delta(epsilon, 5.0) <= 1e-5  # an upper bound,
    assert delta(0.85 * epsilon, 5.0) > 1e-5  # and not a loose one


@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_releases_that_can_not_be_accounted_are_refused():
    for missing in ("max_tokens", "accountant"):
        with pytest.raises(ValueError, match=missing):
            released(SEQUENCES, 5, 1.0, **{missing: None})
    with pytest.raises(ValueError, match="positive"):
        released(SEQUENCES, 5, -1.0)
    with pytest.raises(ValueError, match="public"):
        token_shares(SEQUENCES, 5, source="public")
    gdp = GaussianAccountant()
    gdp.step(noise_multiplier=1.0, sample_rate=0.1)
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match="constant"):
        released(SEQUENCES, 5, 2.0, accountant=gdp)
    assert torch.equal(state, torch.get_rng_state())  # refused before any draw
    assert gdp.history == [(1.0, 0.1, 1)]  # and Opacus would have dropped this
