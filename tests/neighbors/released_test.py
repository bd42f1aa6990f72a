"""Releases beside gradients: histograms of norms, counts of items."""

import math

import pytest
import torch
from opacus.accountants import RDPAccountant

from opacus_ext import Monitor
from opacus_ext.releases import release_popularity, release_transitions
from tests.neighbors.cases import setting
from tests.neighbors.search import SLACK, neighbors, runs_of
from tests.zoo import EVERY_MODE

PAIRS = 18


@pytest.mark.parametrize("mode", EVERY_MODE)
def test_the_monitor(mode):
    """
    Without noise the monitor's histogram moves by 1 (one bin), or sqrt(2) for a
    replacement. Its other numbers are computed from that and from the noisy gradient.
    """
    one = setting("encoder", mode=mode)
    runs = runs_of(one, 0)
    monitors = [Monitor(r.private.engine, r.private.optimizer) for r in runs]
    worst = 0.0
    for pair in range(PAIRS):
        first, second, bounds = neighbors(one.records, pair)
        for run, records in zip(runs, (first, second)):
            run.sees(records)
        left, right = (m.state_dict() for m in monitors)
        gap = float((left["_counts"] - right["_counts"]).norm())
        assert gap <= math.sqrt(bounds) + SLACK, f"pair {pair}"
        worst = max(worst, gap)
        noised = "_counts", "_squares"
        assert all(left[n] == right[n] for n in left if n not in noised)
        monitors[1].load_state_dict(left)
        assert _same(*(m.read() for m in monitors)), f"pair {pair}"
    assert worst > 1


def _same(one, two):
    return one.keys() == two.keys() and all(
        a == b or math.isnan(a) and math.isnan(b)
        for a, b in zip(*map(dict.values, (one, two)))
    )


def users_of(seed):
    """Histories of item ids, and one more: empty, long, of one item, padding."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length, high=7, low=0):
        return torch.randint(low, high, (length,), generator=generator)

    more = (draw(0), draw(40), draw(30, 2, 1), draw(5, 1), draw(1, 7, 6), draw(9))
    return [draw(5), draw(9), draw(1)], more[seed % len(more)]


RELEASES = {
    "popularity": lambda users, **how: release_popularity(users, 6, **how),
    "transitions": lambda users, **how: release_transitions(
        users, torch.tensor([4, 2, 6, 1]), **how
    ),
}


@pytest.mark.parametrize("name", RELEASES)
def test_counts_of_users(name):
    """The whole history of a user moves a release by at most 1."""
    worst = 0.0
    for seed in range(60):
        users, more = users_of(seed)
        found = [
            RELEASES[name](
                given,
                noise_multiplier=1.0,
                accountant=RDPAccountant(),
                generator=torch.Generator().manual_seed(seed),
            ).counts
            for given in (users, [*users, more], [more, *users[1:]])
        ]
        assert float((found[0] - found[1]).norm()) <= 1 + SLACK, f"seed {seed}"
        assert float((found[0] - found[2]).norm()) <= 2 + SLACK, f"seed {seed}"
        worst = max(worst, float((found[0] - found[1]).norm()))
    assert worst > 0.99
