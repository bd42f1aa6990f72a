"""The noise of a budget, against closed forms and other accountants."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_ndtr, ndtr
from scipy.stats import binom

from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.accountants.calibration import (
    calibrate,
    delta,
    gaussian_noise_multiplier,
    noise_multiplier,
)
from opacus_ext.accountants.profiles import gaussian_log_delta, gaussian_sensitivity
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
    found = noise_multiplier(e, d, steps, rate)
    assert found == pytest.approx(expected, rel=5e-5)
    assert delta(found, rate, steps, e) <= d
    assert delta(found, rate, steps, e) == pytest.approx(d, rel=3e-4)
    accountant = PRVBoundsAccountant()
    accountant.history = [(found, rate, steps)]
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
    found = delta(noise, rate, steps, e, records_per_user=records)
    assert found == pytest.approx(expected, rel=1e-5)
    assert noise_multiplier(e, expected, steps, rate, records) == pytest.approx(
        noise, rel=5e-5
    )


def by_fft(noise, rate, steps, e, records=1, add=False, size=2**17, width=60.0):
    """delta by the plainest means: a histogram of the loss, composed by an FFT."""
    j = np.arange(records + 1)
    weights = binom.pmf(j, records, rate)
    x = np.linspace(-12 * noise, records + 12 * noise, 2_000_001)
    density = np.exp(-((x[:, None] - j) ** 2) / (2 * noise**2))
    density /= density[:, 0].sum()
    p, q = density @ weights, density[:, 0]
    loss = np.log(p / q)
    if add:
        p, loss = q, -loss
    step = width / size
    place = loss / step
    below = np.floor(place).astype(int)
    mass = np.zeros(size)
    np.add.at(mass, below % size, p * (below + 1 - place))
    np.add.at(mass, (below + 1) % size, p * (place - below))
    total = np.fft.irfft(np.fft.rfft(mass) ** steps, size)
    sums = (np.arange(size) + size // 2) % size - size // 2
    gained = np.maximum(-np.expm1(e - sums * step), 0.0)
    return float(total @ gained)


@pytest.mark.parametrize(
    "noise, rate, records, steps, e",
    [(1.0, 0.2, 1, 8, 1.0), (0.7, 0.02, 1, 30, 2.0), (3.0, 0.9, 1, 5, 0.0)]
    + [(2.0, 0.3, 4, 6, 0.5), (1.5, 0.01, 3, 40, 0.0)],
)
def test_plain_composition_both_ways(noise, rate, records, steps, e):
    """And the removal of a user, which is what we compute, is the worse direction."""
    found = delta(noise, rate, steps, e, records)
    assert found == pytest.approx(
        by_fft(noise, rate, steps, e, records), rel=1e-4, abs=1e-9
    )
    added = by_fft(noise, rate, steps, e, records, add=True)
    assert added <= found * (1 + 1e-4)  # the histogram's error
    if e == 0:  # the total variation of two laws has no direction
        assert added == pytest.approx(found, rel=1e-4)


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
    assert log_delta_of_steps(step, 1, e)[0] == pytest.approx(expected, abs=1e-7)


def test_all_sampled_is_a_gaussian_mechanism():
    step = SampledGaussian(30.0, 1 - 1e-12, 1)
    found = log_delta_of_steps(step, 1000, 2.0)[0]
    assert math.exp(found) == pytest.approx(delta(30.0, 1.0, 1000, 2.0), rel=1e-7)
    whole = noise_multiplier(1.0, 1e-6, [1, 50, 10**6], 1.0)
    assert whole == pytest.approx(gaussian_noise_multiplier(1.0, 1e-6, [1, 50, 10**6]))
    assert noise_multiplier(1.0, 1e-6, 50, 1.0, 7) == pytest.approx(7 * whole[1])


@pytest.mark.parametrize("e", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("d", [1e-12, 1e-5, 0.1])
def test_gaussian_noise_spends_the_budget(e, d):
    """Balle & Wang's theorem 5, with scipy's normal distribution."""
    mu = 1 / gaussian_noise_multiplier(e, d)
    upper, lower = mu / 2 - e / mu, -mu / 2 - e / mu
    # exp(e) Phi(lower) = phi(upper) Phi(lower) / phi(lower), without overflow
    mills = math.exp(log_ndtr(lower) + lower**2 / 2)
    spent = ndtr(upper) - mills * math.exp(-(upper**2) / 2)
    assert spent == pytest.approx(d, rel=1e-3)
    assert gaussian_noise_multiplier(e, d, 9) == pytest.approx(3 / mu)


@pytest.mark.parametrize("e", [1e-3, 1.0, 100.0, 1e6])
@pytest.mark.parametrize("d", [1e-250, 1e-12, 1e-5, 0.1, 0.999])
def test_a_sensitivity_spends_no_more_than_the_budget(e, d):
    """And a hundred-millionth more of it would."""
    found = float(gaussian_sensitivity(e, math.log(d)))
    assert gaussian_log_delta(found, e) <= math.log(d)
    assert gaussian_log_delta(found * (1 + 1e-8), e) > math.log(d)


def test_known_values():
    assert gaussian_noise_multiplier(1.0, 1e-5) == pytest.approx(3.730631634, rel=1e-5)
    # without epsilon, delta is the total variation of one step
    assert delta(2.0, 0.3, 1) == pytest.approx(0.3 * (2 * ndtr(1 / 4) - 1))
    assert delta(2.0, 1.0, 16) == pytest.approx(2 * ndtr(1.0) - 1)
    assert delta(0.0, 0.01, 10, 5.0) == pytest.approx(1 - 0.99**10)
    assert delta(1e6, 0.5, 10, 1.0) < 1e-200


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
    ten = calibrate(e, d, [1, 10**6], 10, 10)
    assert ten.noise_multiplier == pytest.approx(
        gaussian_noise_multiplier(e, d, [1, 10**6])
    )


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
    least = noise_multiplier(e, d, steps, batch / users)
    assert noise_multiplier(e * factor, d, steps, batch / users) <= least
    assert noise_multiplier(e, d * factor, steps, batch / users) <= least
    assert noise_multiplier(e, d, steps, batch / (users * factor)) <= least
    assert noise_multiplier(e, d, math.ceil(steps * factor), batch / users) >= least
    assert noise_multiplier(e, d, steps, batch / users, records_per_user=2) >= least
    # nor does the ratio rise with the batch
    larger = min(batch * factor, users)
    run = e, d, steps, [batch, larger], users
    ratio = calibrate(*run).ratio
    poisson = calibrate(*run, amplification="poisson").ratio
    assert poisson[1] <= poisson[0] * (1 + 1e-9)
    assert (ratio <= poisson).all()


def test_a_grid_is_its_cells():
    """Neighbours help to start, and leave no trace."""
    e, batch = np.array([0.5, 4.0])[:, None, None], 2 ** np.arange(6, 18, 3)
    steps = np.array([1000, 64000])[:, None]
    grid = calibrate(e, 1e-8, steps, batch, 2**20).ratio
    assert grid.shape == (2, 2, 4)
    for at in np.ndindex(grid.shape):
        alone = calibrate(
            float(e[at[0], 0, 0]), 1e-8, int(steps[at[1], 0]), int(batch[at[2]]), 2**20
        ).ratio
        assert isinstance(alone, float)
        assert grid[at] == pytest.approx(alone, rel=1e-6)


def test_the_lower_of_both():
    poisson = calibrate(4.0, 1e-6, 10, [10, 500], 1000, amplification="poisson")
    fixed = calibrate(4.0, 1e-6, 10, [10, 500], 1000, amplification="none")
    lower = calibrate(4.0, 1e-6, 10, [10, 500], 1000)
    # 10 x 10 of 1000: nobody is met twice. 10 x 500: everyone five times
    assert fixed.noise_multiplier == pytest.approx(
        gaussian_noise_multiplier(4.0, 1e-6, [1, 5])
    )
    assert not fixed.amplified.any() and poisson.amplified.all()
    assert lower.noise_multiplier == pytest.approx(
        np.minimum(poisson.noise_multiplier, fixed.noise_multiplier)
    )
    assert lower.ratio == pytest.approx(lower.noise_multiplier / [10, 500])
    single = calibrate(4.0, 1e-6, 10, 10, 1000)
    assert isinstance(single.ratio, float) and isinstance(single.amplified, bool)
    # at a great epsilon a single pass needs less noise than its amplified draws
    pass_ = calibrate(60.0, 1e-6, 2, 500, 1000)
    assert not pass_.amplified
    assert pass_.noise_multiplier == gaussian_noise_multiplier(60.0, 1e-6)


def test_units():
    """A sampled user counts once, however many records; sampled records all count."""
    of_users = calibrate(2.0, 1e-6, 500, 64, 10_000, records_per_user=8)
    assert of_users == calibrate(2.0, 1e-6, 500, 64, 10_000)
    of_records = calibrate(
        2.0, 1e-6, 500, 64, 10_000, records_per_user=8, sampling="records"
    )
    assert of_records.noise_multiplier == pytest.approx(
        noise_multiplier(2.0, 1e-6, 500, 64 / 80_000, records_per_user=8), rel=1e-6
    )
    assert of_records.noise_multiplier > of_users.noise_multiplier
    # fixed batches, at worst with all of a user's records in the same one
    fixed = calibrate(
        *(2.0, 1e-6, 500, 64, 10_000),
        records_per_user=8,
        sampling="records",
        amplification="none",
    )
    assert fixed.noise_multiplier == pytest.approx(
        8 * gaussian_noise_multiplier(2.0, 1e-6)
    )


GOOD = dict(epsilon=1.0, delta=1e-5, steps=100, batch_size=10, users=1000)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(epsilon=0.0), "epsilon must be finite and above 0, not 0"),
        (dict(epsilon=[1.0, math.nan]), "epsilon must be finite and above 0, not nan"),
        (dict(epsilon=math.inf), "epsilon must be finite and above 0, not inf"),
        (dict(delta=1.0), "delta must be finite and above 0 and below 1, not 1"),
        (dict(delta=-1e-9), "delta must be finite and above 0 and below 1, not -1e-09"),
        (dict(steps=10.5), "steps must be whole and at least 1, not 10.5"),
        (dict(steps=0), "steps must be whole and at least 1, not 0"),
        (dict(batch_size=0), "batch_size must be finite and above 0, not 0"),
        (dict(batch_size=[1, 1001]), "at most the number of users, 1000, not 1001"),
        (dict(users=0.5), "users must be finite and at least 1, not 0.5"),
        (dict(users=[]), "users is empty"),
        (dict(users="many"), "users must be numbers, not 'many'"),
        (dict(amplification="shuffle"), "amplification must be one of .'lower'"),
        (dict(sampling="tokens"), "sampling must be one of .'users', 'records'"),
        (dict(records_per_user=0), "records_per_user must be whole and at least 1"),
    ],
)
def test_bad_input_is_named(wrong, message):
    with pytest.raises(ValueError, match=message):
        calibrate(**{**GOOD, **wrong})


def test_what_cannot_be_computed_is_refused():
    with pytest.raises(ValueError, match="noise = 0.0001, rate = 0.1, .* too extreme"):
        delta(1e-4, 0.1, 10, 1.0)
    with pytest.raises(ValueError, match="noise_multiplier must be .* at least 0"):
        delta(-1.0, 0.1, 10)
