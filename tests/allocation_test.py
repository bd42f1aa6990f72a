"""Batches that are drawn for an epoch at once, cut, or of a fixed size.

The oracles of their epsilon are quadrature, Monte Carlo of the likelihood ratio, and
stored bounds of PLD_accounting 2.0, the package of the authors of random allocation.
"""

import copy
import io
import itertools
import json
import math
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from scipy.stats import binom, norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import Refused
from opacus_ext.accountants import profiles
from opacus_ext.accountants.allocation import allocated
from opacus_ext.accountants.composition import Composition
from opacus_ext.accountants.mechanisms import (
    Allocated,
    Binned,
    Fixed,
    Truncated,
    count_of,
    from_json,
    to_json,
)
from opacus_ext.accountants.profiles import gaussian, turned
from opacus_ext.data import (
    BallsInBins,
    FixedSize,
    Poisson,
    RandomAllocation,
    TruncatedPoisson,
)
from opacus_ext.ledger import difference
from opacus_ext.losses import PerSample
from opacus_ext.secure import SecureSource
from opacus_ext.statement import read_statement

from .sampling_test import fits

DELTA = 1e-5


def epsilon(*history, delta=DELTA):
    spent = Composition()
    spent.history = list(history)
    return spent.get_epsilon(delta)


def allocation(noise, batches, epochs=1, selected=1):
    return Allocated(noise, batches, selected), 1.0, epochs * selected


# -- profiles --------------------------------------------------------------------------


def ratios(noise, batches, count=400_000):
    """Likelihood ratios of outputs without the record, and with it."""
    generator = np.random.default_rng(7)
    z = generator.standard_normal((count, batches))
    without = np.exp(z / noise - 0.5 / noise**2)
    z[:, 0] += 1 / noise
    return without.mean(1), np.exp(z / noise - 0.5 / noise**2).mean(1)


@pytest.mark.parametrize(
    "noise, batches", [(1.0, 2), (0.7, 5), (2.0, 10), (0.4, 8), (1.0, 13)]
)
def test_both_directions_bound_what_is_sampled(noise, batches):
    """By at most 1 % of delta, and three standard errors."""
    without, inside = ratios(noise, batches)
    profile = allocated(noise, batches)
    for t in (0.0, 0.3, 1.0):
        removal = np.maximum(1 - math.exp(t) / inside, 0)
        addition = np.maximum(1 - math.exp(t) * without, 0)
        for delta, sampled in ((profile, removal), (turned(profile), addition)):
            mean, error = sampled.mean(), 3 * sampled.std() / math.sqrt(len(sampled))
            found = float(delta(np.array([t]))[0])
            assert mean - error <= found <= 1.01 * mean + error + 1e-7, (t, mean)


@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
def test_two_batches_are_bounded_closely(noise):
    """Given one ratio, the other makes delta the price of an option: quadrature."""
    z, weight = np.polynomial.hermite_e.hermegauss(180)
    weight = weight / weight.sum()
    profile = allocated(noise, 2)
    for t in np.array([0.02, 0.3, 1.0, 3.0]) / noise:
        # Under the first record: E[(1 - exp(t) / S)+] = E_Q[X (1 - exp(t) / S)+] ...
        strike = 2 * math.exp(t) - np.exp(z / noise - 0.5 / noise**2)
        spot = np.log(np.maximum(strike, 1e-300))
        d = (-spot + 0.5 / noise**2) * noise
        price = norm.cdf(d) - strike * norm.cdf(d - 1 / noise)
        price = np.where(strike <= 0, 1 - strike, price)
        exact = float(weight @ price) / 2
        found = float(profile(np.array([t]))[0])
        assert exact * (1 - 2e-3) <= found <= exact * 1.02, (t, exact, found)


#: Noise, batches, selected, epochs, and PLD_accounting's bounds at delta 1e-5.
AUTHORS = [
    (1.0, 100, 1, 1, 0.6085096, 0.6356520),
    (2.0, 64, 1, 1, 0.2174736, 0.2263693),
    (0.6, 100, 1, 1, 3.4193136, 3.4439415),
    (1.0, 100, 5, 1, 2.9579717, 3.0337132),
    (1.0, 50, 1, 4, 1.5922603, 1.6690178),
]


@pytest.mark.parametrize("noise, batches, selected, epochs, low, high", AUTHORS)
def test_the_bounds_of_the_authors(noise, batches, selected, epochs, low, high):
    found = Composition()
    found.history = [allocation(noise, batches, epochs, selected)]
    bounds = found.get_bounds(DELTA)
    assert 0 < bounds.lower <= low <= bounds.upper <= high
    plain = Composition()
    plain.history = [(noise, 1.0, epochs * selected)]
    assert bounds.upper <= plain.get_epsilon(DELTA)


def test_one_batch_is_the_gaussian_mechanism():
    t = np.linspace(-3, 3, 7)
    assert (allocated(0.8, 1)(t) == gaussian(0.8)(t)).all()
    assert epsilon(allocation(1.0, 1, 3)) == pytest.approx(epsilon((1.0, 1.0, 3)), 1e-3)


def test_epsilon_falls_with_noise_and_batches():
    for grid in (
        [allocation(s, 30) for s in (0.5, 0.7, 1.0, 2.0, 8.0)],
        [allocation(0.9, t) for t in (1, 2, 3, 8, 100, 1000)],
        [allocation(1.0, 60, selected=k) for k in (6, 4, 3, 1)],
    ):
        found = [epsilon(entry) for entry in grid]
        assert found == sorted(found, reverse=True) and found[-1] > 0


@pytest.mark.parametrize(
    "noise, batches, most",
    [(0.3, 20_000, 9.5), (0.1, 10, 96), (0.02, 10, 1600), (100, 10**4, 0.001)],
)
def test_extreme_noise(noise, batches, most):
    """Little noise, where no grid serves, and much, in hardly any time."""
    entry = allocation(noise, batches)
    assert 0 <= epsilon(entry) <= min(most, epsilon((noise, 1.0, 1)))


def test_a_delta_beyond_the_grid():
    """It is that of batches of all records."""
    for entry in (
        allocation(1.0, 10),
        allocation(1.0, 10, 5),
        (Binned(1.0, 9), 1.0, 5),
    ):
        plain = epsilon((1.0, 1.0, entry[2]), delta=1e-100)
        assert epsilon(entry, delta=1e-100) == pytest.approx(plain)


def test_many_noise_multipliers():
    """Of a schedule; they are rounded down, by little."""
    found = epsilon(
        *((Truncated(1 + i / 1e5, 0.01, 1000, 40), 0.01, 1) for i in range(300))
    )
    same = epsilon((Truncated(1.0015, 0.01, 1000, 40), 0.01, 300))
    assert same < found < 1.002 * same


def test_beside_other_steps():
    both = epsilon(allocation(1.0, 100, 2), (1.0, 0.01, 100), (9.0, 1.0, 1))
    parts = [allocation(1.0, 100, 2)], [(1.0, 0.01, 100)], [(9.0, 1.0, 1)]
    each = [epsilon(*part) for part in parts]
    assert max(each) < both < sum(each)
    assert epsilon((Allocated(0.0, 3, 1), 1.0, 1)) == math.inf
    assert epsilon((Allocated(math.inf, 3, 1), 1.0, 1)) == 0


def test_bins_of_a_run_are_one_draw():
    """E epochs are one allocation with noise over sqrt(E), at whatever noise."""
    same = epsilon((Binned(2.0, 20), 1.0, 4))
    assert same == pytest.approx(epsilon(allocation(1.0, 20)))
    mixed = epsilon((Binned(2.0, 20), 1.0, 2), (Binned(math.sqrt(2), 20), 1.0, 1))
    assert mixed == pytest.approx(same)
    assert same > epsilon(allocation(2.0, 20, 4))


@pytest.mark.thorough
def test_cut_and_fixed_batches():
    """With room enough nothing is cut; without any, a step counts twice the bound."""
    rate, steps = 0.01, 200

    def cut(most):
        return epsilon((Truncated(1.0, rate, 1000, most), rate, steps))

    poisson = epsilon((1.0, rate, steps))
    assert cut(10) > cut(15) > cut(30) >= poisson
    assert cut(40) == pytest.approx(poisson, rel=1e-6)
    assert cut(10) < epsilon((0.5, rate, steps))
    whole = epsilon((Fixed(1.0, 1.0), 1.0, 3))
    assert whole == pytest.approx(epsilon((0.5, 1.0, 3)), 1e-3)
    assert epsilon((0.5, 0.01, 100)) < epsilon((Fixed(1.0, 0.01), 1.0, 100))


SUMS = np.linspace(-25, 25, 20_001)


def density(noise, sums):
    """Of a mixture of sums with noise, given their probabilities."""
    shifts = (SUMS[:, None] - np.array([*sums])) / noise
    return np.exp(-(shifts**2) / 2) @ [*sums.values()]


def largest(profile, p, q, *epsilons):
    """The largest excess of delta over a profile, in both directions."""
    p, q = p / p.sum(), q / q.sum()
    worst = -1.0
    for t, (a, b) in itertools.product(epsilons, ((p, q), (q, p))):
        delta = np.maximum(a - math.exp(t) * b, 0).sum()
        worst = max(worst, delta - float(profile(np.array([t]))[0]))
    return worst


def fixed_batches(gradients, size):
    sums = Counter()
    sets = [*itertools.combinations(gradients, size)]
    for chosen in sets:
        sums[sum(chosen)] += 1 / len(sets)
    return sums


def cut_batches(gradients, rate, most):
    sums = Counter()
    for k in range(len(gradients) + 1):
        for drawn in itertools.combinations(gradients, k):
            chance = rate**k * (1 - rate) ** (len(gradients) - k)
            kept = [*itertools.combinations(drawn, min(k, most))]
            for chosen in kept:
                sums[sum(chosen)] += chance / len(kept)
    return sums


def test_every_exchange_and_addition_is_bounded():
    """Of gradients of one number, clipped to 1; the worst ones come near."""
    fixed, worst = (
        profiles.exchanged(profiles.sampled(profiles.gaussian(0.6 / 2), 1 / 3)),
        [],
    )
    for others in itertools.product((-1, 0, 1), repeat=2):
        for x, other in itertools.product((-1, 0, 1), repeat=2):
            pair = (density(0.6, fixed_batches([*others, y], 1)) for y in (x, other))
            worst.append(largest(fixed, *pair, 0.0, 0.5, 1.5))
    assert -0.01 < max(worst) < 1e-6
    ((cut, _),) = Truncated(0.6, 0.4, 3, 2).upper(1)
    worst = []
    for others in itertools.product((-1, 0, 1), repeat=3):
        pair = (density(0.6, cut_batches(y, 0.4, 2)) for y in (others, [*others, 1]))
        worst.append(largest(cut, *pair, 0.5, 1.5))
    assert max(worst) < 1e-6


def test_steps_of_fixed_size_are_beside_no_others():
    for other in ((1.0, 0.1, 1), allocation(1.0, 5)):
        with pytest.raises(Refused, match="can't be composed"):
            epsilon((Fixed(1.0, 0.1), 1.0, 1), other)


# -- entries of a history --------------------------------------------------------------

KINDS = [
    Allocated(1.0, 7, 3),
    Binned(1.0, 7),
    Truncated(2.0, 0.1, 100, 20),
    Fixed(2.0, 0.1),
]


def saved(entries):
    file = io.BytesIO()
    torch.save(entries, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def as_json(entries):
    text = json.dumps(to_json({"history": entries}))
    return json.loads(text, object_hook=from_json)["history"]


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch": saved,
    "json": as_json,
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_a_copy_is_the_same_mechanism(kind, way):
    ((noise, rate, steps),) = COPIES[way]([(kind, kind.rate, 3)])
    assert noise == kind and hash(noise) == hash(kind) and repr(noise) == repr(kind)
    assert (rate, steps) == (kind.rate, 3)
    assert epsilon((noise, rate, steps)) == epsilon((kind, kind.rate, 3))


def test_mechanisms_are_not_taken_for_each_other():
    """Nor for the plain number that they read as."""
    others = [Allocated(1.0, 7, 2), Allocated(1.0, 8, 3), Binned(1.0, 8)]
    for a, b in itertools.combinations([*KINDS, *others, 1.0], 2):
        assert a != b and b != a and not a == b
    history = [(kind, 1.0, 2) for kind in (*KINDS, 1.0)]
    assert difference(history, history) == []
    assert difference(history, history[1:]) == history[:1]
    assert difference(history, [(1.0, 1.0, 2)]) == history[:-1]


@pytest.mark.parametrize("name", ["prv_bounds", "prv", "rdp"])
def test_accountants_keep_entries(name):
    """Opacus's take the last one out at a step; all bound the truth."""
    accountant, kind = create_accountant(name), Allocated(1.0, 7, 3)
    accountant.history.append((kind, 1.0, 3))
    for noise in (1.0, kind, kind):
        accountant.step(noise_multiplier=noise, sample_rate=1.0)
    expected = [(kind, 1.0, 3), (1.0, 1.0, 1), (kind, 1.0, 2)]
    assert accountant.history == expected
    other = create_accountant(name)
    other.load_state_dict(copy.deepcopy(accountant.state_dict()))
    assert other.history == expected and count_of(expected) == 7 + 1 + 7
    assert other.get_epsilon(1e-3) >= epsilon(*expected, delta=1e-3)
    assert [type(noise) for noise, *_ in other.history] == [Allocated, float, Allocated]


# -- draws -----------------------------------------------------------------------------


@pytest.mark.parametrize("generator", [None, SecureSource()], ids=["torch", "secure"])
@pytest.mark.parametrize("steps, selected", [(5, 1), (5, 2), (4, 3)])
def test_each_set_of_batches_is_as_likely(steps, selected, generator):
    torch.manual_seed(0)
    sampling = RandomAllocation(steps=steps, selected=selected)
    chosen = sampling.allocate(20_000, generator).sort(1).values
    sets = [*itertools.combinations(range(steps), selected)]
    found = Counter(map(tuple, chosen.tolist()))
    fits(found, {s: 1 / len(sets) for s in sets}, 20_000)
    batches = [sampling.batch(chosen, i) for i in range(steps)]
    times = torch.cat(batches).bincount()
    assert (times == selected).all() and len(times) == 20_000


def test_records_are_allocated_independently():
    torch.manual_seed(0)
    sampling = RandomAllocation(steps=3)
    found = Counter(
        tuple(sampling.allocate(3, None)[:, 0].tolist()) for _ in range(9000)
    )
    fits(found, dict.fromkeys(itertools.product(range(3), repeat=3), 1 / 27), 9000)


@pytest.mark.parametrize("generator", [None, SecureSource()], ids=["torch", "secure"])
def test_each_batch_of_a_size_is_as_likely(generator):
    torch.manual_seed(0)
    fixed = FixedSize(batch_size=2)
    found = Counter(tuple(fixed.draw(5, generator).tolist()) for _ in range(5000))
    sets = [*itertools.combinations(range(5), 2)]
    fits(found, {s: 1 / len(sets) for s in sets}, 5000)


def test_draws_are_cut():
    """To a random subset."""
    torch.manual_seed(0)
    cut = TruncatedPoisson(sample_rate=0.4, max_batch_size=3)
    cut.check(6)
    draws = [cut.draw(6, None).tolist() for _ in range(8000)]
    sizes = {k: binom.pmf(k, 6, 0.4) for k in range(3)} | {3: binom.sf(2, 6, 0.4)}
    fits(Counter(map(len, draws)), sizes, 8000)
    largest = [tuple(draw) for draw in draws if len(draw) == 3]
    sets = [*itertools.combinations(range(6), 3)]
    fits(Counter(largest), {s: 1 / len(sets) for s in sets}, len(largest))


# -- training --------------------------------------------------------------------------

RECORDS = 30


class Run:
    """A private model, whose records are known by their only feature."""

    def __init__(
        self, sampling, accountant="prv_bounds", noise=1.0, secure=False, **given
    ):
        if secure:
            self.engine = opacus_ext.PrivacyEngine(
                accountant=accountant, secure_mode=True
            )
        else:
            self.engine = PrivacyEngine(accountant=accountant)
        self.model = nn.Linear(1, 2)
        data = TensorDataset(torch.arange(float(RECORDS))[:, None])
        made = dict(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), lr=0.01),
            data_loader=DataLoader(data, batch_size=6),
            criterion=PerSample(),
            max_grad_norm=1.0,
            grad_sample_mode="ghost_bk",
            sampling=sampling,
        )
        if "target_epsilon" in given:
            made = self.engine.make_private_with_epsilon(**made, **given)
        else:
            made = self.engine.make_private(**made, noise_multiplier=noise, **given)
        self.private, self.optimizer, self.criterion, self.loader = made

    def step(self, x):
        self.optimizer.zero_grad()
        self.criterion(self.private(x).square().sum(1)).backward()
        self.optimizer.step()
        return x[:, 0].int().tolist()

    def epoch(self, most=1000):
        return [self.step(x) for (x,), _ in zip(self.loader, range(most))]

    @property
    def history(self):
        return self.engine.accountant.history


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("selected", [1, 2])
def test_an_epoch_has_each_record_so_often(selected, secure):
    sampling = RandomAllocation(steps=5, selected=selected)
    run = Run(sampling, secure=secure)
    assert run.optimizer.expected_batch_size == 6 * selected and len(run.loader) == 5
    epochs = [run.epoch() for _ in range(3)]
    for epoch in epochs:
        assert sorted(sum(epoch, [])) == sorted([*range(RECORDS)] * selected)
        assert all(len({*batch}) == len(batch) for batch in epoch)
    assert epochs[0] != epochs[1]
    assert run.history == [(Allocated(1.0, 5, selected), 1.0, 3 * selected)]
    assert run.engine.get_epsilon(1e-3) == epsilon(*run.history, delta=1e-3)
    text = str(run.engine.privacy_statement(1e-3))
    assert "After 15 steps" in text and f"is in {selected} of each 5 batches" in text


@pytest.mark.parametrize("secure", [False, True])
def test_bins_stay(secure):
    run = Run(BallsInBins(bins=5), secure=secure)
    epochs = [run.epoch() for _ in range(3)]
    assert epochs[0] == epochs[1] == epochs[2]
    assert sorted(sum(epochs[0], [])) == [*range(RECORDS)]
    assert run.history == [(Binned(1.0, 5), 1.0, 3)]
    assert "the same one in each epoch" in str(run.engine.privacy_statement(1e-3))
    assert BallsInBins(bins=5).entry(2.0, 4) == (Binned(2.0, 5), 1.0, 4)


def test_what_is_begun_anew_counts_anew(tmp_path):
    run = Run(RandomAllocation(steps=5))
    kind = Allocated(1.0, 5, 1)
    run.epoch(most=2)
    assert run.history == [(kind, 1.0, 1)]
    run.epoch()
    assert run.history == [(kind, 1.0, 2)]
    next(iter(run.loader))  # may be held, and trained on later
    run.epoch()
    assert run.history == [(kind, 1.0, 4)]
    # A checkpoint from before this epoch, loaded in the middle of one.
    path = tmp_path / "run.pt"
    run.engine.save_checkpoint(path=path, module=run.private, optimizer=run.optimizer)
    batches = iter(run.loader)
    run.step(next(batches)[0])
    run.engine.load_checkpoint(path=path, module=run.private, optimizer=run.optimizer)
    assert run.history == [(kind, 1.0, 4)]
    run.step(next(batches)[0])
    run.step(next(batches)[0])
    assert run.history == [(kind, 1.0, 5)]
    assert count_of(run.history) == 25
    content = read_statement(path, 1e-3).content
    assert content["steps"] == 20 and content["phases"][0]["batches"] == 5


@pytest.mark.filterwarnings("ignore")
def test_two_iterators_are_two_allocations():
    run = Run(RandomAllocation(steps=5))
    pairs = [(run.step(x), run.step(y)) for (x,), (y,) in zip(run.loader, run.loader)]
    for batches in zip(*pairs):
        assert sorted(sum(batches, [])) == [*range(RECORDS)]
    assert run.history[0] == (Allocated(1.0, 5, 1), 1.0, 2)


@pytest.mark.filterwarnings("ignore")
def test_a_batch_that_comes_back_counts_as_all_records():
    run = Run(RandomAllocation(steps=5))
    batches = [x for (x,) in run.loader]
    for x in (*batches, batches[0], batches[0]):
        run.step(x)
    assert run.history == [(Allocated(1.0, 5, 1), 1.0, 1), (1.0, 1.0, 2)]
    other = Run(Poisson(sample_rate=0.01, steps=5))
    run.step(next(iter(other.loader))[0])
    assert run.history[1:] == [(1.0, 1.0, 3)]
    assert run.engine.privacy_statement(1e-3).content["holds"] == "no"


@pytest.mark.parametrize("accountant", ["prv_bounds", "prv", "rdp"])
def test_a_release_beside_batches_of_fixed_size(accountant):
    run = Run(FixedSize(batch_size=6), accountant)
    run.epoch(most=2)
    assert run.engine.get_epsilon(1e-3) > 0
    run.engine.accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    with pytest.raises(Refused, match="can't be composed"):
        run.engine.get_epsilon(1e-3)


def test_a_statement_does_not_tell_a_private_number_of_records():
    run = Run(
        TruncatedPoisson(expected_batch_size=5, max_batch_size=27, public_records=26)
    )
    run.epoch()
    statement = run.engine.privacy_statement(1e-3)
    assert '"max_batch_size": 27' in statement.json()
    assert f": {RECORDS}" not in statement.json()


OTHERS = [
    (FixedSize(batch_size=6), Fixed(1.0, 1.0)),
    (TruncatedPoisson(sample_rate=0.2, max_batch_size=6), 0.5),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("accountant", ["prv_bounds", "rdp"])
@pytest.mark.parametrize("sampling, noise", OTHERS, ids=["fixed", "truncated"])
def test_a_batch_that_comes_back_has_another_record(sampling, noise, accountant):
    """In the place of one that is removed: it moves the sum by twice the bound."""
    run = Run(sampling, accountant)
    batches = [x for (x,) in run.loader]
    for x in (*batches, batches[0]):
        run.step(x)
    assert run.history[1:] == [(noise, 1.0, 1)]
    least = create_accountant(accountant)
    least.history = [(0.5, 1.0, 1)]
    assert run.engine.get_epsilon(1e-3) >= least.get_epsilon(1e-3)


def test_a_run_that_goes_on_counts_each_epoch_once(tmp_path):
    run, parts = Run(RandomAllocation(steps=5)), []
    for _ in range(2):
        run.epoch()
        parts = dict(path=tmp_path / "run.pt", module=run.private)
        run.engine.save_checkpoint(**parts, optimizer=run.optimizer)
        run = Run(RandomAllocation(steps=5))
        parts["module"] = run.private
        run.engine.load_checkpoint(**parts, optimizer=run.optimizer)
    run.epoch()
    assert run.history == [(Allocated(1.0, 5, 1), 1.0, 3)]


def test_less_noise_within_an_epoch_counts_once_more():
    run = Run(RandomAllocation(steps=5), noise=2.0)
    batches = iter(run.loader)
    run.step(next(batches)[0])
    run.optimizer.noise_multiplier = 3.0  # more is no matter
    run.step(next(batches)[0])
    run.optimizer.noise_multiplier = 1.0
    with pytest.warns(UserWarning, match="counts once more"):
        run.step(next(batches)[0])
    run.step(next(batches)[0])
    assert run.history == [
        (Allocated(2.0, 5, 1), 1.0, 1),
        (Allocated(1.0, 5, 1), 1.0, 1),
    ]


@pytest.mark.filterwarnings("ignore:Optimal order")
def test_an_accountant_that_does_not_know_them_says_so():
    with pytest.warns(UserWarning, match='"rdp" does not know RandomAllocation'):
        run = Run(RandomAllocation(steps=5), "rdp")
    run.epoch()
    plain = create_accountant("rdp")
    plain.history = [(1.0, 1.0, 1)]
    assert run.engine.get_epsilon(1e-3) == plain.get_epsilon(1e-3)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "sampling, accountant",
    [
        (RandomAllocation(steps=5), "prv"),
        (BallsInBins(bins=5), "prv_bounds"),
        (TruncatedPoisson(expected_batch_size=6, max_batch_size=9), "prv_bounds"),
        (FixedSize(batch_size=6), "prv_bounds"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_budget_is_kept(sampling, accountant):
    budget = dict(target_epsilon=5.0, target_delta=1e-3, epochs=2)
    run = Run(sampling, accountant, **budget)
    for _ in range(2):
        run.epoch()
    assert 4.9 < run.engine.get_epsilon(1e-3) <= 5
    statement = run.engine.privacy_statement()
    assert statement.content["steps"] == 10 and statement.content["holds"] == "yes"
    fixed = statement.content["neighboring_relation"] == "exchange one"
    assert fixed == isinstance(sampling, FixedSize)
    json.loads(statement.json())


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RandomAllocation(steps=0), "steps must be"),
        (lambda: RandomAllocation(steps=3, selected=4), "selected=4 of 3"),
        (lambda: BallsInBins(bins=2.5), "bins must be"),
        (lambda: FixedSize(batch_size=0), "batch_size must be"),
        (lambda: Run(FixedSize(batch_size=31)), "at most 30"),
        (
            lambda: Run(TruncatedPoisson(sample_rate=0.5, max_batch_size=9)),
            "below the expected batch size",
        ),
    ],
)
def test_what_cannot_be_drawn(make, message):
    with pytest.raises(Refused, match=message):
        make()


def test_fixed_sizes_are_refused_beside_other_releases():
    run, model = Run(Poisson(sample_rate=0.2)), nn.Linear(1, 2)
    run.epoch()
    with pytest.raises(Refused, match="can't be composed"):
        run.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(run.loader.dataset, batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sampling=FixedSize(batch_size=6),
        )
