"""The noise of a budget, against closed forms and other accountants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant
from pytest import approx
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from opacus_ext import Refused
from opacus_ext.accountants import PRVBoundsAccountant, noise_left
from opacus_ext.accountants.calibration import calibrate, delta, noise_multiplier
from opacus_ext.accountants.profiles import gaussian, gaussian_sensitivity, log_delta
from opacus_ext.accountants.saddle_point import (
    SampledGaussian,
    log_delta_of_steps,
    log_profile,
)

# dp-accounting 0.6.0, PLD of the removal of a user, discretised at 1e-6 to 1e-4 (finer
# for a small epsilon, to which its error is relative). epsilon, delta, T, q, sigma
DP_ACCOUNTING = [
    (1 / 32, 1e-8, 16000, 2**-8, 68.9406),
    (0.5, 1e-8, 16000, 2**-8, 4.943224),
    (2.0, 1e-8, 16000, 2**-14, 0.543489),
    (4.0, 1e-8, 16000, 2**-20, 0.341837),
    (8.0, 1e-8, 16000, 2**-8, 0.721041),
    (32.0, 1e-8, 16000, 2**-5, 1.150078),
    (128.0, 1e-8, 16000, 2**-14, 0.163570),
    (0.1, 1e-6, 3, 0.9, 56.69682),
    (0.5, 1e-3, 100, 0.5, 23.10813),
    (2.0, 1e-6, 100_000, 1e-5, 0.426182),
    (3.0, 0.1, 50, 0.02, 0.359565),
    (8.0, 1e-5, 10, 0.3, 0.916619),
    (16.0, 1e-8, 1000, 0.05, 0.950824),
]


@pytest.mark.parametrize("e, d, steps, rate, expected", DP_ACCOUNTING)
def test_dp_accounting(e, d, steps, rate, expected):
    noise = noise_multiplier(e, d, steps, rate)
    assert noise == approx(expected, rel=5e-5)
    assert d * (1 - 3e-4) < delta(noise, rate, steps, e) <= d
    accountant = PRVBoundsAccountant()
    accountant.history = [(noise, rate, steps)]
    bounds = accountant.get_bounds(d)
    assert bounds.lower <= e <= bounds.upper * (1 + 1e-6)


@pytest.mark.parametrize(
    "noise, rate, records, steps, e, expected",
    [  # dp-accounting's PLD of a mixture of Gaussians
        (2.0, 0.05, 3, 20, 1.0, 1.434845e-03),
        (4.0, 0.01, 8, 500, 0.5, 3.987669e-02),
        (1.0, 0.1, 2, 10, 3.0, 2.958291e-03),
        (0.8, 0.001, 5, 200, 4.0, 1.390250e-09),
    ],
)
def test_dp_accounting_several_records(noise, rate, records, steps, e, expected):
    assert delta(noise, rate, steps, e, records) == approx(expected, rel=1e-5)
    found = noise_multiplier(e, expected, steps, rate, records)
    assert found == approx(noise, rel=5e-5)


def by_fft(history, e, records=1, add=False, size=2**17, width=60.0):
    """delta by the plainest means: histograms of the loss, composed by an FFT."""
    j, step, spectrum = np.arange(records + 1), width / size, 1.0
    for noise, rate, steps in history:
        x = np.linspace(-12 * noise, records + 12 * noise, 2_000_001)
        density = np.exp(-((x[:, None] - j) ** 2) / (2 * noise**2))
        density /= density[:, 0].sum()
        p, q = density @ binom.pmf(j, records, rate), density[:, 0]
        loss = np.log(p / q)
        if add:
            p, loss = q, -loss
        below = np.floor(loss / step).astype(int)
        share, mass = loss / step - below, np.zeros(size)
        np.add.at(mass, below % size, p * (1 - share))
        np.add.at(mass, (below + 1) % size, p * share)
        spectrum = spectrum * np.fft.rfft(mass) ** steps
    sums = (np.arange(size) + size // 2) % size - size // 2
    gained = np.maximum(-np.expm1(e - sums * step), 0.0)
    return float(np.fft.irfft(spectrum, size) @ gained)


@pytest.mark.parametrize(
    "noise, rate, records, steps, e",
    [(1.0, 0.2, 1, 8, 1.0), (0.7, 0.02, 1, 30, 2.0), (3.0, 0.9, 1, 5, 0.0)]
    + [(2.0, 0.3, 4, 6, 0.5), (1.5, 0.01, 3, 40, 0.0)],
)
def test_plain_composition_both_ways(noise, rate, records, steps, e):
    """And the removal of a user, which is what we compute, is the worse direction."""
    found = delta(noise, rate, steps, e, records)
    history = [(noise, rate, steps)]
    removed, added = (by_fft(history, e, records, x) for x in (False, True))
    assert found == approx(removed, rel=1e-4, abs=1e-9)
    assert added <= found * (1 + 1e-4)  # the histogram's error
    if e == 0:  # the total variation of two laws has no direction
        assert added == approx(found, rel=1e-4)


@pytest.mark.parametrize(
    "noise, rate, e",
    [(1.0, 0.01, 1.0), (0.3, 1e-3, 1.0), (5.0, 0.1, 0.01), (0.1, 0.01, 40.0)]
    + [(1.0, 0.01, 0.0), (0.5, 1e-6, 1e-3), (0.03, 0.3, 900.0), (2.0, 0.999999, 0.5)]
    + [(100.0, 0.3, 1e-3), (0.05, 1e-9, 200.0)],
)
def test_one_step_of_the_integral(noise, rate, e):
    """One step has a closed form, which the integral doesn't know of."""
    step = SampledGaussian(noise, rate, 1)
    expected = log_profile(step, 1, e)[0]
    assert log_delta_of_steps(step, 1, e)[0] == approx(expected, abs=1e-7)


@pytest.mark.parametrize("e", [1e-3, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("d", [1e-250, 1e-12, 1e-5, 0.1, 0.999])
def test_a_sensitivity_spends_the_budget_and_no_more(e, d):
    """Also by Balle & Wang's theorem 5, with scipy's normal distribution."""
    mu = gaussian_sensitivity(e, math.log(d))
    assert log_delta(gaussian(1 / mu), e) <= math.log(d)
    assert log_delta(gaussian(1 / (mu * (1 + 1e-8))), e) > math.log(d)
    if 1e-250 < d < 0.9 and e < 1e6:
        upper, lower = mu / 2 - e / mu, -mu / 2 - e / mu
        # exp(e) Phi(lower) = phi(upper) Phi(lower) / phi(lower), without overflow
        mills = math.exp(log_ndtr(lower) + lower**2 / 2)
        assert ndtr(upper) - mills * math.exp(-(upper**2) / 2) == approx(d, rel=1e-3)


def test_known_values():
    one, some, million = noise_multiplier(1.0, 1e-5, [1, 9, 10**6], 1.0)
    assert one == approx(3.730631634, rel=1e-5)
    assert (some, million) == approx((3 * one, 1000 * one))
    assert noise_multiplier(1.0, 1e-5, 9, 1.0, 7) == approx(7 * some)
    # without epsilon, delta is the total variation of one step
    assert delta(2.0, 0.3, 1) == approx(0.3 * (2 * ndtr(1 / 4) - 1))
    assert delta(2.0, 1.0, 16) == approx(2 * ndtr(1.0) - 1)
    assert delta(0.0, 0.01, 10, 5.0) == approx(1 - 0.99**10)
    assert delta(1e6, 0.5, 10, 1.0) < 1e-200
    found = log_delta_of_steps(SampledGaussian(30.0, 1 - 1e-12, 1), 1000, 2.0)[0]
    assert math.exp(found) == approx(delta(30.0, 1.0, 1000, 2.0), rel=1e-7)


@pytest.mark.parametrize("e", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("d", [1e-12, 1e-6, 0.1])
def test_edges(e, d):
    """One step and a million, all in a batch and nearly nobody, ten users."""
    steps, rate = np.array([[1], [2], [1000], [10**6]]), np.array([1e-9, 1e-3, 0.9, 1])
    if e == 1e3:  # as sound there, but slow
        steps, rate = steps[:2], rate[2:]
    found = noise_multiplier(e, d, steps, rate)
    assert np.isfinite(found).all()
    assert (np.diff(found, axis=0) >= 0).all() and (np.diff(found, axis=1) >= 0).all()
    # no noise where the chance to be seen is less than delta, some elsewhere
    seen = -np.expm1(steps * np.log1p(-np.minimum(rate, 1 - 1e-16)))
    assert ((found == 0) == (seen <= d)).all()
    ten = calibrate(e, d, [1, 10**6], 10, 10).noise_multiplier
    assert ten == approx(noise_multiplier(e, d, [1, 10**6], 1.0))


budgets = {
    "e": st.floats(0.02, 60),
    "log_delta": st.floats(-10, -2),
    "log_steps": st.floats(0, 5.5),
    "log_users": st.floats(1, 8),
    "share": st.floats(0.01, 1),
}


@given(**budgets, factor=st.sampled_from([1.001, 1.3, 10.0]))
def test_monotone(e, log_delta, log_steps, log_users, share, factor):
    """More epsilon, delta or users, or fewer steps, never need more noise."""
    d, steps, users = 10**log_delta, round(10**log_steps), 10**log_users
    batch = users**share
    rate, larger = batch / users, min(batch * factor, users)
    least = noise_multiplier(e, d, steps, rate)
    assert noise_multiplier(e * factor, d, steps, rate) <= least
    assert noise_multiplier(e, d * factor, steps, rate) <= least
    assert noise_multiplier(e, d, steps, rate / factor) <= least
    assert noise_multiplier(e, d, math.ceil(steps * factor), rate) >= least
    assert noise_multiplier(e, d, steps, rate, records_per_user=2) >= least
    # nor does the ratio rise with the batch
    run = e, d, steps, [batch, larger], users
    poisson = calibrate(*run, amplification="poisson").ratio
    assert poisson[1] <= poisson[0] * (1 + 1e-9)
    assert (calibrate(*run).ratio <= poisson).all()


def test_a_grid_is_its_cells():
    """Neighbours help to start, and leave no trace."""
    e, steps, batch = np.ix_([0.5, 4.0], [1000, 64000], 2 ** np.arange(6, 18, 3))
    grid = calibrate(e, 1e-8, steps, batch, 2**20).ratio
    for at in np.ndindex(2, 2, 4):
        cell = (float(x.flat[i]) for x, i in zip((e, steps, batch), at))
        budget, t, b = cell
        alone = calibrate(budget, 1e-8, t, b, 2**20)
        assert isinstance(alone.ratio, float) and isinstance(alone.amplified, bool)
        assert grid[at] == approx(alone.ratio, rel=1e-6)


def test_the_lower_of_both():
    run = 4.0, 1e-6, 10, [10, 500], 1000
    lower = calibrate(*run)
    poisson, fixed = (calibrate(*run, amplification=x) for x in ("poisson", "none"))
    # 10 x 10 of 1000: nobody is met twice. 10 x 500: everyone five times
    expected = noise_multiplier(4.0, 1e-6, [1, 5], 1.0)
    assert fixed.noise_multiplier == approx(expected)
    assert not fixed.amplified.any() and poisson.amplified.all()
    least = np.minimum(poisson.noise_multiplier, fixed.noise_multiplier)
    assert lower.noise_multiplier == approx(least)
    assert lower.ratio == approx(least / [10, 500])
    # at a great epsilon a single pass needs less noise than its amplified draws
    single = calibrate(60.0, 1e-6, 2, 500, 1000)
    assert not single.amplified
    assert single.noise_multiplier == noise_multiplier(60.0, 1e-6, 1, 1.0)


def test_units():
    """A sampled user counts once, however many records; sampled records all count."""
    run = 2.0, 1e-6, 500, 64, 10_000
    of_records = dict(records_per_user=8, sampling="records")
    users, records = calibrate(*run, records_per_user=8), calibrate(*run, **of_records)
    assert users == calibrate(*run)
    expected = noise_multiplier(2.0, 1e-6, 500, 64 / 80_000, records_per_user=8)
    assert records.noise_multiplier == approx(expected, rel=1e-6)
    assert records.noise_multiplier > users.noise_multiplier
    # fixed batches, at worst with all of a user's records in the same one
    fixed = calibrate(*run, **of_records, amplification="none").noise_multiplier
    assert fixed == approx(8 * noise_multiplier(2.0, 1e-6, 1, 1.0))


@pytest.mark.parametrize("kind", [RDPAccountant, PRVBoundsAccountant])
def test_what_is_left_of_a_budget(kind):
    """Together both spend it; more noise than if nothing had been spent."""
    accountant = kind()
    accountant.history = [(5.0, 1.0, 1)]
    noise = noise_left(accountant, 4.0, 1e-5, 0.05, 60)
    assert accountant.history == [(5.0, 1.0, 1)]
    accountant.history.append((noise, 0.05, 60))
    assert 3.98 < accountant.get_epsilon(1e-5) <= 4.0
    assert noise_left(kind(), 4.0, 1e-5, 0.05, 60) < noise


def test_nothing_is_left():
    accountant = RDPAccountant()
    accountant.history = [(0.5, 1.0, 1)]
    with pytest.raises(Refused, match="epsilon=1 is spent") as caught:
        noise_left(accountant, 1.0, 1e-5, 0.05, 60)
    assert caught.value.parameter == "epsilon"


@pytest.mark.parametrize("kind", [RDPAccountant, PRVBoundsAccountant])
@pytest.mark.parametrize(
    "options",
    [
        dict(epsilon=math.inf),  # no noise is ever too small
        dict(epsilon=math.nan),
        dict(steps=0),
        dict(steps=-1),
        dict(sample_rate=2.0),
        dict(delta=1.0),
    ],
)
def test_no_endless_search(kind, options):
    good = dict(epsilon=1.0, delta=1e-5, sample_rate=0.05, steps=60)
    with pytest.raises(Refused) as caught:
        noise_left(kind(), **{**good, **options})
    assert [caught.value.parameter] == list(options)


def test_a_full_batch_counts_as_a_sample():
    """Both are the same mechanism, whichever is rounded up."""
    epsilon, delta = [0.45009388303136677, 25.27882546664844], [
        6.41922917793491e-05,
        3.6169717656169495e-10,
    ]
    assert all(calibrate(epsilon, delta, [979, 49407], 1e6, 1e6).amplified)


GOOD = dict(epsilon=1.0, delta=1e-5, steps=100, batch_size=10, users=1000)
WRONG = [
    (dict(epsilon=0.0), "epsilon must be finite and above 0, not 0"),
    (dict(epsilon=[1.0, math.nan]), "epsilon must be finite and above 0, not nan"),
    (dict(delta=-1e-9), "delta must be finite and above 0 and below 1, not -1e-09"),
    (dict(steps=10.5), "steps must be whole and at least 1, not 10.5"),
    (dict(batch_size=[1, 1001]), "at most the number of users, 1000, not 1001"),
    (dict(users=[]), "users is empty"),
    (dict(users="many"), "users must be numbers, not 'many'"),
    (dict(amplification="shuffle"), "amplification must be one of .'lower'"),
    (dict(sampling="tokens"), "sampling must be one of .'users', 'records'"),
]
# What can't be computed; and what is out of range elsewhere.
FAR = [
    ((1e-4, 0.1, 10, 1.0), "noise_multiplier = 0.0001, .* = 0.1, .* too extreme"),
    ((-1.0, 0.1, 10), "noise_multiplier must be .* at least 0"),
]


def test_bad_input_is_named():
    for wrong, message in WRONG:
        with pytest.raises(Refused, match=message):
            calibrate(**{**GOOD, **wrong})
    for arguments, message in FAR:
        with pytest.raises(Refused, match=message):
            delta(*arguments)
