"""Releases: each user moves them by norm one; their noise; what the prior computes.

The oracles: the contribution of one user, pair by pair in plain Python, and the prior's
formula with dense matrices, position by position.
"""

import math
from collections import Counter
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

from opacus_ext.accountants import PRVBoundsAccountant, noise_left
from opacus_ext.models import TransitionPrior
from opacus_ext.refused import Refused
from opacus_ext.releases import (
    Popularity,
    Transitions,
    noise_for,
    release_popularity,
    release_transitions,
)

TINY = 1e-9  # noise that shows the sums
USERS = st.lists(st.lists(st.integers(0, 6), max_size=9), max_size=4)


def tensors(users):
    return [torch.tensor(user, dtype=torch.long) for user in users]


def popularity_of(users, num_items=6, noise=TINY):
    return release_popularity(
        tensors(users), num_items, noise_multiplier=noise, accountant=RDPAccountant()
    )


WEIGHTS = torch.linspace(0.5, 2, 10)


def transitions_of(users, items, noise=TINY, weights=WEIGHTS):
    return release_transitions(
        tensors(users),
        torch.tensor(items),
        noise_multiplier=noise,
        accountant=RDPAccountant(),
        weights=weights,
    )


def pairs_of(user, items, window=20):
    """One user's matrix, pair by pair."""
    place = {item: k for k, item in enumerate(items)}
    found = torch.zeros(len(items), len(items), dtype=torch.float64)
    for i, a in enumerate(user):
        for j in range(i + 1, min(i + window + 1, len(user))):
            if a in items and user[j] in items:
                x, y = place[a], place[user[j]]
                weight = WEIGHTS[a] * WEIGHTS[user[j]] * (j - i) ** -0.75
                found[x, y] += weight
                found[y, x] += 0.2 * weight
    return found / found.norm().clamp(min=1e-300)


@given(USERS)
def test_popularity_is_a_sum_of_unit_vectors(users):
    expected = torch.zeros(7, dtype=torch.float64)
    for user in users:
        counts = Counter(item for item in user if item)
        norm = math.sqrt(sum(c * c for c in counts.values()))
        for item, count in counts.items():
            expected[item] += count / norm
    torch.testing.assert_close(popularity_of(users).counts, expected, atol=1e-7, rtol=0)


@given(USERS, st.permutations([1, 2, 3, 4, 5, 6]), st.integers(1, 6))
def test_transitions_are_a_sum_of_unit_matrices(users, order, size):
    items = order[:size]
    expected = torch.zeros(size, size, dtype=torch.float64)
    for user in users:
        expected += pairs_of(user, items)
    found = transitions_of(users, items).counts
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@given(USERS, st.lists(st.integers(0, 6), max_size=30))
def test_a_user_moves_a_release_by_at_most_one(users, more):
    for release in (popularity_of, lambda u: transitions_of(u, [4, 2, 6, 1])):
        moved = release(users + [more]).counts - release(users).counts
        assert moved.norm() < 1 + 1e-6


def test_weights_and_the_way_back_can_be_undone():
    with patch("opacus_ext.releases.BACK", 0.0):
        plain = transitions_of([[1, 2, 3, 1]], [3, 1, 2], weights=None)
    found = transitions_of([[1, 2, 3, 1]], [3, 1, 2])
    ratio = (found.unweighted / plain.counts)[plain.counts > 0.01]
    # Each was divided by a norm of its own, and nothing else differs.
    torch.testing.assert_close(ratio, ratio[:1].expand_as(ratio), atol=1e-6, rtol=0)
    assert found.unweighted[plain.counts < 0.01].abs().max() < 1e-6


@pytest.mark.parametrize("window", [1, 3])
def test_actions_that_are_far_apart_are_no_pair(window, monkeypatch):
    monkeypatch.setattr("opacus_ext.releases.WINDOW", window)
    users = torch.randint(0, 7, (50, 8)).tolist()
    expected = sum(pairs_of(user, [3, 1, 5], window) for user in users)
    found = transitions_of(users, [3, 1, 5]).counts
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_noise(noise):
    users = [[1, 2, 3], [2, 4]]
    quiet, loud = (
        transitions_of(users, list(range(1, 7)), noise=n).counts for n in (TINY, noise)
    )
    many = torch.cat(
        [
            (popularity_of(users, 4000, noise).counts)[5:],
            (loud - quiet).flatten(),
        ]
    )
    assert many.std() == pytest.approx(noise, rel=0.05)
    assert popularity_of(users, 4000, noise).counts[0] == 0


def test_it_is_recorded_and_training_has_the_rest():
    engine = RDPAccountant()
    popularity = release_popularity(
        tensors([[1, 2]]), 3, noise_multiplier=10.0, accountant=engine
    )
    release_transitions(
        tensors([[1, 2]]), popularity.top(2), noise_multiplier=8.0, accountant=engine
    )
    assert engine.history == [(10.0, 1.0, 1), (8.0, 1.0, 1)]
    noise = noise_left(engine, 5.0, 1e-5, 0.1, 20)
    assert noise > noise_left(RDPAccountant(), 5.0, 1e-5, 0.1, 20)
    engine.history = [*engine.history, (noise, 0.1, 20)]
    assert 4.9 < engine.get_epsilon(1e-5) <= 5.0


@pytest.mark.parametrize("epsilon", [0.5, 5.0, 10.0])
def test_shares_of_a_budget_spend_it(epsilon):
    accountant = PRVBoundsAccountant()
    for share in (0.1, 0.3, 0.6):
        noise = noise_for(epsilon, 1e-5, share)
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    assert epsilon * (1 - 1e-6) < accountant.get_epsilon(1e-5) <= epsilon


@pytest.mark.parametrize(
    "change, match",
    [
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"histories": [torch.tensor([1, 9])]}, "User 0 has ids from 1 to 9"),
        ({"histories": [torch.tensor([1]), torch.tensor([-1])]}, "User 1"),
    ],
)
def test_refused_before_anything_is_recorded(change, match):
    accountant = RDPAccountant()
    given = {"histories": [torch.tensor([1, 2])], "noise_multiplier": 1.0, **change}
    with pytest.raises(Refused, match=match):
        release_popularity(num_items=4, accountant=accountant, **given)
    assert not accountant.history


@pytest.mark.parametrize("items", [[], [1, 1], [0, 1]])
def test_items_are_refused(items):
    with pytest.raises(Refused, match="Give each id once"):
        transitions_of([[1, 2]], torch.tensor(items, dtype=torch.long).tolist())


@pytest.mark.parametrize(
    "weights",
    [
        torch.ones(2),
        torch.zeros(7),
        torch.full((7,), math.nan),
        torch.full((7,), 1e-90, dtype=torch.float64),  # squares are 0
        torch.full((7,), 1e90, dtype=torch.float64),
    ],
)
def test_weights_are_refused(weights):
    with pytest.raises(Refused, match="weights of shape"):
        transitions_of([[1, 2]], [1, 2], weights=weights)


def test_shares_and_budgets_are_refused():
    with pytest.raises(Refused, match="share"):
        noise_for(1.0, 1e-5, 0.0)
    with pytest.raises(Refused, match="size=7"):
        popularity_of([[1]]).top(7)


def test_a_release_is_saved_and_read(tmp_path):
    popularity = popularity_of([[1, 2, 3]], noise=1.0)
    transitions = transitions_of([[1, 2, 3]], [3, 2, 1], noise=1.0)
    torch.save([vars(popularity), vars(transitions)], tmp_path / "r.pt")
    first, second = torch.load(tmp_path / "r.pt", weights_only=True)
    assert torch.equal(Popularity(**first).shares, popularity.shares)
    read = Transitions(**second)
    assert torch.equal(read.counts, transitions.counts)
    assert torch.equal(read.items, transitions.items)


# -- the prior ---------------------------------------------------------------------


def prior_of(length=3, noise=0.3):
    users = torch.randint(1, 8, (30, 10)).tolist()
    popularity = popularity_of(users, 7, noise)
    return TransitionPrior(
        popularity,
        transitions_of(users, popularity.top(5).tolist(), noise=noise),
        length=length,
    )


def test_scores_are_those_of_the_formula():
    prior = prior_of().double()
    p, items = prior.shares, prior.items.tolist()
    scale = (p / p[1:].mean() + 1) ** prior.beta
    matrix = prior.counts[:5] + prior.tau * prior.counts[:5].T
    torch.testing.assert_close(prior.counts[:5].T, prior.back[:5])
    matrix = scale[items][:, None] * matrix * scale[items]
    assert not matrix.diagonal().any()
    for ids in torch.randint(1, 8, (4, 6)):
        expected = prior.alpha * p.clamp(min=p[1:].min()).log()
        for weight, item in zip(prior.weights, reversed(ids.tolist())):
            if item in items:
                row = weight * matrix[items.index(item)]
                expected = expected.index_add(0, prior.items, row)
        torch.testing.assert_close(prior.score(ids[None])[0], expected)
        with torch.no_grad():  # a sparse product
            torch.testing.assert_close(prior.score(ids[None])[0], expected)
        torch.testing.assert_close(prior(ids[None])[0, -1], expected)


def test_later_items_and_padding_change_nothing():
    prior = prior_of()
    ids = torch.randint(1, 8, (2, 6))
    longer = torch.cat([ids, torch.randint(0, 8, (2, 3))], 1)
    torch.testing.assert_close(prior(longer)[:, :6], prior(ids))
    padded = torch.cat([ids, torch.zeros(2, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(prior.score(padded), prior.score(ids))


def test_one_item_alone():
    popularity = popularity_of([[1, 2]], 3)
    prior = TransitionPrior(popularity, transitions_of([[1, 1]], [1]))
    expected = 0.5 * prior.shares.clamp(min=prior.shares[1:].min()).log()
    torch.testing.assert_close(prior.score(torch.tensor([[1, 0]]))[0], expected)


def test_its_numbers_are_trained_exactly():
    from opacus_ext import check_per_sample_gradients

    prior = prior_of(length=4)
    ids = torch.randint(1, 8, (5, 6))
    at, target = torch.tensor([5, 3, 0, 5, 2]), torch.randint(1, 8, (5,))

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.prior = prior

        def forward(self, x):
            return self.prior(x[:, :-1], x[:, -1])

    inputs = torch.cat([ids, at[:, None]], 1)
    report = check_per_sample_gradients(
        Model(), (inputs, target), torch.nn.CrossEntropyLoss(reduction="none")
    )
    assert report.ok, report
