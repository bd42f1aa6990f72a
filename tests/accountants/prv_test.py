"""The accountant with bounds, against closed forms and against other accountants."""

import io
import math
from unittest.mock import patch

import numpy as np
import opacus
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant, create_accountant
from prv_accountant import PoissonSubsampledGaussianMechanism
from prv_accountant import PRVAccountant as Microsoft
from scipy.optimize import brentq, minimize_scalar
from scipy.stats import norm
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import Refused
from opacus_ext.accountants import (
    PRVBoundsAccountant,
    composition,
    numerical,
    profiles,
)
from opacus_ext.re_attention import token_shares
from tests.accountants.calibration_test import by_fft


def accountant(*history):
    made = PRVBoundsAccountant()
    made.history = list(history)
    return made


def renyi(*history):
    made = RDPAccountant()
    made.history = list(history)
    return made


def holds(bounds, truth, gap=0.03):
    """The bounds hold and are near."""
    assert bounds.lower <= truth <= bounds.upper, (bounds, truth)
    assert bounds.lower <= bounds.estimate <= bounds.upper
    assert bounds.upper <= truth * 1.003 and bounds.lower >= truth * (1 - gap)


def exact_gaussian(mu, delta):
    """Balle and Wang (2018), theorem 8, as it is printed."""

    def left(e):
        tail = math.exp(e + norm.logcdf(-e / mu - mu / 2))
        return norm.cdf(mu / 2 - e / mu) - tail - delta

    return brentq(left, 0, mu * mu + 50 * mu, xtol=1e-13)


def log_moment(noise, rate, z):
    """
    log E[exp(z loss)] under the sampled mechanism: a trapezoid over its output. From
    r^(1+z) - 1 - (1+z) (r - 1), which is the same as E_Q[r - 1] = 0, no digits are lost
    at small rates.
    """
    step = min(noise, noise**2) / 24
    x = np.arange(-14 * noise, np.max(z.real) + 2 + 14 * noise, step)
    x = x.astype(np.longdouble)
    density = np.exp(-x * x / (2 * noise**2)) / (noise * math.sqrt(2 * math.pi)) * step
    v = rate * np.expm1((2 * x - 1) / (2 * noise**2))
    orders = (np.asarray(z, np.clongdouble) + 1)[:, None]
    sums = (density * (np.expm1(orders * np.log1p(v)) - orders * v)).sum(1)
    return np.log1p(sums.astype(complex))


def exact_delta(history, epsilon):
    """
    Delta by an integral over the moments of the composition, at a saddle point: an
    independent method, without a grid of losses.
    """

    def log_moments(z):
        return sum(k * log_moment(noise, rate, z) for noise, rate, k in history)

    def real(order):
        return log_moments(np.array([complex(order)]))[0].real

    low, high = -3, math.log(300)
    found = minimize_scalar(
        lambda t: real(math.exp(t)) - math.exp(t) * epsilon,
        bounds=(low, high),
        method="bounded",
    )
    order = math.exp(found.x)
    curve = real(order * 1.01) - 2 * real(order) + real(order * 0.99)
    std = math.sqrt(curve) / (0.01 * order)
    total, start, width = 0.0, 0.0, 12 / std
    while True:
        u = start + np.arange(0, 240) * width / 240
        z = order + 1j * u
        values = np.exp(log_moments(z) - z * epsilon) / (z * (z + 1))
        if start == 0:
            first = abs(values[0])
            values[0] /= 2
        total += values.real.sum() * width / 240 / math.pi
        start += width
        if abs(values[-1]) < 1e-10 * first:
            return total


# -- closed forms ------------------------------------------------------------------


@pytest.mark.parametrize("delta", [1e-12, 1e-5, 1e-2])
@pytest.mark.parametrize(
    "noise, steps",
    [(1.0, 1), (0.05, 1), (1e3, 1), (30.0, 100), (1e3, 10**6), (20.0, 10**6)],
)
def test_without_sampling_it_is_the_gaussian_mechanism(noise, steps, delta):
    """From epsilon 1e-3 to 1e3, by the closed form and on the grid."""
    mu = math.sqrt(steps) / noise
    if 2 * norm.cdf(mu / 2) - 1 <= delta:
        assert accountant((noise, 1.0, steps)).get_bounds(delta) == (0, 0, 0)
        return
    truth = exact_gaussian(mu, delta)
    bounds = accountant((noise, 1.0, steps)).get_bounds(delta)
    holds(bounds, truth, 1e-6)
    if steps < 10**6:
        halves = [numerical.Step(profiles.gaussian(noise * 2**0.5), steps)] * 2
        holds(numerical.epsilon_bounds(halves, delta), truth)


@pytest.mark.parametrize("rate", [1e-8, 1e-3, 0.5])
@pytest.mark.parametrize("noise", [0.3, 1.0, 20.0])
def test_one_sampled_step(noise, rate):
    """(1 - q) N(0) + q N(1) against N(0): q times a Gaussian's delta elsewhere."""
    made = accountant((noise, rate, 1))
    # The same on a grid, with a step that tells nothing.
    step = numerical.Step(profiles.sampled(profiles.gaussian(noise), rate), 1)
    steps = [step, numerical.Step(np.zeros_like, 1)]
    for epsilon in (0.0, rate / noise / 3, math.log1p(rate * 5)):
        inner = math.log1p(math.expm1(epsilon) / rate)
        truth = norm.cdf(0.5 / noise - inner * noise)
        truth -= math.exp(inner) * norm.cdf(-0.5 / noise - inner * noise)
        truth *= rate
        holds(made.get_delta(epsilon), truth)
        if epsilon:
            holds(made.get_bounds(truth), epsilon)
        if noise >= 1:
            found = numerical.delta_bounds(steps, epsilon)
            assert found.lower <= truth <= found.upper
            if epsilon:
                found = numerical.epsilon_bounds(steps, truth)
                assert found.lower <= epsilon <= found.upper


@pytest.mark.parametrize(
    "history, epsilon",
    [
        ([(1.0, 0.01, 1000)], 1.8),
        ([(2.0, 0.2, 5)], 1.0),
        ([(0.8, 0.01, 300), (1.5, 0.03, 200), (30.0, 0.5, 20)], 4.0),
        ([(20.0, 0.5, 1000)], 0.0),
        ([(5.0, 1e-3, 10**5)], 0.25),
        ([(60.0, 0.01, 1000)], 1e-3),
    ],
)
def test_sampled_compositions(history, epsilon):
    """Against an integral that knows no grid, or at epsilon 0 a plain histogram."""
    truth_of = exact_delta if epsilon else by_fft  # the first needs a saddle above 0
    delta, made = truth_of(history, epsilon), accountant(*history)
    if epsilon:
        holds(made.get_bounds(delta), epsilon)
    deltas = made.get_delta(epsilon)
    assert 0.7 * delta < deltas.lower <= delta <= deltas.upper < 1.01 * delta


# -- other accountants -------------------------------------------------------------

HISTORIES = [
    ([(1.0, 0.01, 1000)], 1e-5),
    ([(0.8, 1e-2, 300)], 1e-6),
    ([(10.0, 0.3, 500), (3.0, 0.02, 2000)], 1e-5),
    ([(1.1, 0.05, 1)], 1e-4),
]


@pytest.mark.parametrize("history, delta", HISTORIES)
def test_agrees_with_others(history, delta):
    bounds = accountant(*history).get_bounds(delta)
    theirs = PRVAccountant()
    theirs.history = list(history)
    grid = theirs._get_dprv(eps_error=0.01, delta_error=delta / 1000)
    lower, _, upper = grid.compute_epsilon(delta, delta / 1000, 0.01)
    assert lower <= bounds.estimate <= upper
    assert bounds.upper <= renyi(*history).get_epsilon(delta)
    mechanisms = [PoissonSubsampledGaussianMechanism(q, s) for s, q, _ in history]
    counts = [k for *_, k in history]
    lower, _, upper = Microsoft(
        mechanisms, 0.01, delta / 1000, max_self_compositions=counts
    ).compute_epsilon(delta, counts)
    assert lower <= bounds.estimate <= upper


@pytest.mark.parametrize(
    "history, delta, truth",
    [
        (
            (18.667774717685393, 0.3103484721522613, 10515),
            2.0932133031595727e-12,
            12.8924907,
        ),
        ((20.0, 0.05, 10**5), 1e-11, 5.3549567),
    ],
)
def test_small_deltas(history, delta, truth):
    """
    By :func:`exact_delta`, which takes too long here. Opacus's upper bounds were 12.844
    (a last digit of delta more or less makes it 12.993) and 5.3539: the rounding of
    double precision is more than such a delta.
    """
    holds(accountant(history).get_bounds(delta), truth)


@pytest.mark.parametrize(
    "history, delta", [([(1.0, 0.01, 1000)], 1e-5), ([(2.0, 1e-2, 10**4)], 1e-8)]
)
def test_adding_costs_no_more_than_removing(history, delta):
    steps = composition.steps_of({(noise, rate): k for noise, rate, k in history})

    def exchanged(profile):  # the two data sets
        return lambda t: profile(-t) * np.exp(np.minimum(t, 700))

    added = [s._replace(profile=exchanged(s.profile)) for s in steps]
    found = numerical.epsilon_bounds(added, delta)
    assert found.upper <= accountant(*history).get_epsilon(delta)
    # At 0 both are the total variation.
    assert numerical.delta_bounds(added, 0.0).estimate == pytest.approx(
        accountant(*history).get_delta(0.0).estimate, rel=2e-3
    )


# -- edges -------------------------------------------------------------------------


def test_nothing_and_everything():
    assert accountant().get_bounds(1e-5) == accountant().get_delta(1.0) == (0, 0, 0)
    assert len(accountant()) == 0
    assert accountant((0.0, 0.1, 1)).get_epsilon(1e-5) == math.inf
    assert accountant((0.0, 0.1, 1)).get_delta(3.0).upper == 1
    assert accountant((0.0, 0.0, 1)).get_epsilon(1e-5) == 0
    # Less than delta could tell the two apart in all.
    assert accountant((1.0, 1e-8, 1)).get_epsilon(1e-5) == 0


@pytest.mark.parametrize("noise", [1e-3, 0.3, 1e5])
@pytest.mark.parametrize("rate", [1e-8, 0.999, 1.0])
@pytest.mark.parametrize("steps", [1, 10**6])
def test_always_a_number_and_below_renyi(noise, rate, steps):
    bounds = accountant((noise, rate, steps)).get_bounds(1e-8)
    assert 0 <= bounds.lower <= bounds.estimate <= bounds.upper < math.inf
    most = renyi((noise, rate, steps)).get_epsilon(1e-8)
    assert bounds.upper <= most * (1 + 1e-4)


def test_tiny_delta_falls_back():
    """Below what rounding leaves, the bound is Chernoff's."""
    bounds = accountant((1.0, 0.01, 1000)).get_bounds(1e-18)
    assert bounds.lower < bounds.upper
    expected = renyi((1.0, 0.01, 1000)).get_epsilon(1e-18)
    assert bounds.upper == pytest.approx(expected, rel=1e-2)


def test_equal_entries_are_merged():
    alternating = [(1.0, 0.01, 1), (2.0, 0.02, 1)] * 500
    merged = accountant(*alternating).get_bounds(1e-5)
    assert merged == accountant((1.0, 0.01, 500), (2.0, 0.02, 500)).get_bounds(1e-5)
    made = accountant()
    for noise, rate, steps in [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]:
        for _ in range(steps):
            made.step(noise_multiplier=np.float64(noise), sample_rate=rate)
    assert made.history == [(1.0, 0.1, 2), (2.0, 0.1, 1), (1.0, 0.1, 1)]
    assert type(made.history[0][0]) is float


def test_a_noise_that_falls_in_every_step():
    """More distinct steps than are composed as they are."""
    history = [(float(noise), 0.01, 9) for noise in np.geomspace(2.0, 1.0, 24)]
    truth = accountant(*history).get_bounds(1e-5)
    with patch.object(composition, "_DISTINCT", 12):
        bounds = accountant(*history).get_bounds(1e-5)
    assert bounds.lower < truth.lower < truth.upper < bounds.upper
    assert bounds.upper - bounds.lower < 0.2 * truth.upper


ENTRIES = {
    (1.0, 1.5, 1): "sample_rate=1.5",
    (1.0, math.nan, 1): "sample_rate=nan",
    (-1.0, 0.1, 1): "noise_multiplier=-1.0",
    (math.nan, 0.1, 1): "noise_multiplier=nan",
    (1.0, 0.1, 0.5): "steps=0.5",
}


def test_refused():
    """Numbers that can't be are named, and nothing is recorded."""
    made = accountant((1.0, 0.01, 10))
    for wrong in (-1.0, math.nan, math.inf):
        for delta in (wrong, 0, 1):
            with pytest.raises(Refused, match="delta=.* between 0 and 1"):
                made.get_epsilon(delta)
        with pytest.raises(Refused, match="epsilon="):
            made.get_delta(wrong)
    made = accountant()
    for entry, message in ENTRIES.items():
        noise, rate, steps = entry
        with pytest.raises(Refused, match=message):
            accountant(entry).get_epsilon(1e-5)
        if steps == 1:
            with pytest.raises(Refused, match=message):
                made.step(noise_multiplier=noise, sample_rate=rate)
    assert len(made) == 0


# -- with Opacus -------------------------------------------------------------------


def test_registered_and_unregistered():
    table = opacus.accountants.registry._ACCOUNTANTS
    assert isinstance(create_accountant("prv_bounds"), PRVBoundsAccountant)
    opacus_ext.unregister()
    try:
        assert "prv_bounds" not in table and len(table) == 3
    finally:
        opacus_ext.register()
    assert table["prv_bounds"] is PRVBoundsAccountant


def private(engine, **budget):
    model = nn.Linear(4, 2)
    data = TensorDataset(torch.randn(40, 4), torch.randint(2, (40,)))
    make = engine.make_private_with_epsilon if budget else engine.make_private
    return make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        max_grad_norm=1.0,
        **(budget or dict(noise_multiplier=1.5)),
    )


def test_engine_trains_to_a_budget_and_resumes(tmp_path):
    engine, other = (PrivacyEngine(accountant="prv_bounds") for _ in range(2))
    budget = dict(target_epsilon=3.0, target_delta=1e-5, epochs=3)
    model, optimizer, loader = private(engine, **budget)
    for x, y in (batch for _ in range(3) for batch in loader):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert engine.accountant.history == [(optimizer.noise_multiplier, 0.2, 15)]
    assert 2.98 < engine.get_epsilon(1e-5) <= 3.0
    engine.accountant.step(noise_multiplier=2.0, sample_rate=1.0)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model)
    assert torch.load(path, weights_only=True)
    other.load_checkpoint(path=path, module=private(other)[0])
    assert other.get_epsilon(1e-5) == engine.get_epsilon(1e-5) > 3.01


def test_state_dict_is_plain_and_checked():
    made = accountant((1.0, 0.01, 100))
    buffer = io.BytesIO()
    torch.save(made.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other = PRVBoundsAccountant()
    other.load_state_dict({**state, "mechanisms": []})  # of an earlier version
    assert other.history == made.history
    other.step(noise_multiplier=1.0, sample_rate=0.01)
    assert made.history == state["history"] == [(1.0, 0.01, 100)]
    for broken in (
        {"history": [(1.0, 2.0, 3)], "mechanism": "prv_bounds"},
        {"history": [], "mechanism": "prv"},
        {**state, "mechanisms": [{"mechanism": "pure", "participations": 1}]},
    ):
        with pytest.raises(ValueError):
            other.load_state_dict(broken)
        assert other.history == [(1.0, 0.01, 101)]


def test_token_shares_compose_with_training():
    """A Gaussian mechanism without sampling, before the sampled steps."""
    made = PRVBoundsAccountant()
    given = dict(source="private", max_tokens=2, noise_multiplier=5.0, accountant=made)
    token_shares(torch.tensor([[1, 2], [2, 3]]), 5, **given)
    for _ in range(20):
        made.step(noise_multiplier=2.0, sample_rate=0.2)
    assert made.history == [(5.0, 1.0, 1), (2.0, 0.2, 20)]
    # The sampled formula at a rate of almost 1 is the same mechanism.
    history = [(5.0, 1 - 1e-12, 1), (2.0, 0.2, 20)]
    holds(made.get_bounds(exact_delta(history, 2.0)), 2.0)
