"""
The semi-parametric surface. Oracles: data made from a known private law, and the two
properties that any data must come out with: the loss never rises with steps and never
falls with the noise-batch ratio.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import curve_fit

from opacus_ext import Refused
from opacus_ext.planner import Budget, Candidates, LossModel, laws
from opacus_ext.planner.measurements import Measurements
from opacus_ext.planner.surface import Surface, continued, extrapolate, hold_out

LAW = laws.private_sigmoid.of(
    E=1.2, A=2e3, B=2e3, C=4.0, a=0.47, b=0.42, g=0.95, a2=-0.07
)
BATCH = 1024
SIZES = [4.5e6, 11.4e6, 29e6, 41e6, 109e6, 335e6, 778e6]
RATIOS = [0.0] + [2.0**-k for k in range(23, 5, -1)]
SMALL = dict(min_steps=20, window=1, fit_from=200)


def truth(parameters, steps, ratio):
    steps = np.asarray(steps, dtype=float)
    return LAW.predict(parameters=parameters, examples=steps * BATCH, ratio=ratio)


def level(parameters, steps, ratio):
    return np.full(len(steps), 2.0)


def measure(sizes, steps, ratios, noise=0.0, rates=(1.0,), seeds=1, seed=0, loss=truth):
    """A grid of runs. A learning rate multiplies the loss, so that 1 is the best."""
    cells = [(m, r, q) for m in sizes for r in ratios for q in rates] * seeds
    run = np.repeat(np.arange(len(cells)), len(steps))
    m, r, q = np.array(cells)[run].T
    t = np.tile(steps, len(cells))
    error = np.exp(noise * np.random.default_rng(seed).standard_normal(len(t)))
    return Measurements(m, t, r, loss(m, t, r) * q * error, learning_rate=q, run=run)


@pytest.fixture(scope="module")
def paper():
    """The paper's grid, but read every 1000 steps rather than every 100."""
    return measure(SIZES, np.arange(1000, 128_001, 1000), RATIOS)


@pytest.fixture(scope="module")
def study():
    """A small study: readings every 20 steps, noisy."""
    return measure([1e5, 1e6, 1e7], np.arange(20, 1001, 20), RATIOS[::6], noise=0.01)


def between(surface, count=4000, seed=0):
    rng = np.random.default_rng(seed)
    ratio = surface.ratio[surface.ratio > 0]
    ends = surface.parameters, surface.steps, ratio
    return [
        np.exp(rng.uniform(np.log(x[0]), np.log(x[-1]), count)).clip(x[0], x[-1])
        for x in ends
    ]


def test_known_law_is_reproduced(paper):
    """
    At grid points exactly, between them to 3 % (0.5 % on average); and 64 times beyond
    the last reading, as the curves are of the form that is fitted.
    """
    surface = Surface.fit(paper, window=1, steps_to=8.2e6)
    rows = paper.parameters, paper.steps, paper.ratio
    assert surface.loss(*rows) == pytest.approx(paper.loss, rel=1e-12)
    size, steps, ratio = between(surface)
    steps = np.minimum(steps, 128_000)
    error = np.abs(surface.loss(size, steps, ratio) / truth(size, steps, ratio) - 1)
    assert error.max() < 0.03 and error.mean() < 5e-3
    later = np.geomspace(128_000, 8.2e6, 50)
    for size, ratio in ((4.5e6, 0.0), (29e6, 2.0**-12), (778e6, 2.0**-6)):
        told = surface.loss(size, later, ratio)
        assert told == pytest.approx(truth(size, later, ratio), rel=1e-3)
    assert surface.ranges == {
        "parameters": (4.5e6, 7.78e8),
        "steps": (1000, 8.2e6),
        "ratio": (0, 2**-6),
        "measured_steps": (1000, 128_000),
    }
    assert not surface.warnings


def monotone(surface):
    by_steps = np.diff(surface.log_loss, axis=1)
    by_ratio = np.diff(surface.log_loss, axis=2)
    return by_steps.max() <= 0 <= by_ratio.min()


@given(
    seed=st.integers(0, 2**16),
    noise=st.sampled_from([0.01, 0.3, 2.0]),
    window=st.sampled_from([1, 3]),
    steps_to=st.sampled_from([None, 5e3, 1e6]),
    cut=st.integers(0, 6),
)
def test_monotone_whatever_the_data(seed, noise, window, steps_to, cut):
    """Also where one run ended early, and between grid points."""
    m = measure(
        [1e5, 1e6],
        np.arange(100, 1001, 100),
        [0.0, 1e-4, 1e-3, 1e-2],
        noise=noise,
        rates=(1.0, 1.1),
        seed=seed,
    )
    ends = np.where((m.parameters == 1e6) & (m.ratio == 1e-3), 1000 - 100 * cut, 1000)
    m = m.select(m.steps <= ends)
    surface = Surface.fit(
        m, min_steps=100, window=window, fit_from=100, steps_to=steps_to
    )
    assert np.isfinite(surface.log_loss).all()
    assert monotone(surface)
    size, steps, ratio = between(surface, 200, seed)
    loss = surface.loss(size, steps, ratio)
    tolerance = 1 + 1e-9
    assert (loss <= surface.loss(size, steps * 0.999 + 0.1, ratio) * tolerance).all()
    assert (surface.loss(size, steps, 0) <= loss * tolerance).all()
    assert (surface.loss(size, steps, ratio * 0.9) <= loss * tolerance).all()


def test_readings_become_a_curve():
    """Early ones, far above all others, are in no mean; a lucky one is no curve."""
    m = measure([1e5], [10, 20, 30], [0.0, 1e-3])
    surface = Surface.fit(m, min_steps=20, window=2)
    assert surface.loss(1e5, 20, 0) == pytest.approx(truth(1e5, 20, 0))
    m = measure([1e5], np.arange(20, 201, 20), [0.0, 1e-3], loss=level)
    m.loss[3] = 1.0
    surface = Surface.fit(m, min_steps=20, window=1)
    assert surface.loss(1e5, 200, 1e-3) == pytest.approx(2)
    assert surface.loss(1e5, 200, 0) == pytest.approx(13 / 7, abs=0.05)


def test_best_learning_rate():
    """The lowest loss at each size, steps and ratio, and the rate that gave it."""

    ratios = [0.0, 1e-3, 1e-2]
    m = measure([1e5, 1e6], [10, 100, 1000], ratios, loss=level, rates=(1, 1.5))
    # Rate 1.5 is better for the larger model from 100 steps on.
    better = (m.parameters == 1e6) & (m.steps >= 100) & (m.learning_rate == 1.5)
    m.loss[better] = 1.5
    surface = Surface.fit(m, min_steps=10, window=1)
    rate = surface.learning_rate([1e5, 1e6, 1e6, 1e6], [100, 10, 100, 400], 1e-3)
    assert rate.tolist() == [1, 1, 1.5, 1.5]
    # Nearest in logs: 30 steps are nearer to 10, 40 to 100.
    assert surface.learning_rate(1e6, [30, 40], 0).tolist() == [1, 1.5]
    assert surface.learning_rate([3e5, 4e5], 100, 1e-2).tolist() == [1, 1.5]
    assert surface.loss(1e6, [10, 100], 0) == pytest.approx([2, 1.5])


@pytest.mark.parametrize("planned, end", [(100, 400), (400, 100), (109, 400)])
def test_a_longer_seed_goes_on_from_the_mean(planned, end):
    """Unless the shorter one was to be as long: what it met there was no loss."""
    steps = np.arange(10, 401, 10)
    m = measure([1e5], steps, [0.0, 1e-3], seeds=2)
    m.loss[m.run >= 2] *= 1.2
    m = m.select((m.run < 2) | (m.steps <= 100))
    m.planned[:] = np.where(m.run < 2, 400, planned)
    surface = Surface.fit(m, min_steps=10, window=1)
    assert (surface.measured_to == end).all() and surface.ranges["steps"][1] == end
    known = surface.steps <= end
    mean = 1.1 * truth(1e5, surface.steps, 1e-3)
    assert surface.loss(1e5, surface.steps[known], 1e-3) == pytest.approx(mean[known])


def test_three_seeds_of_three_lengths():
    """Their readings apart, and each goes on from the mean of those before."""
    rows = []
    for run, (last, every, factor) in enumerate(
        ((700, 20, 1.0), (710, 10, 1.2), (2800, 20, 0.8))
    ):
        for steps in range(every, last + 1, every):
            loss = float(factor * truth(1e5, steps, 1e-3))
            rows.append((1e5, steps, 1e-3, loss, 1.0, run, last))
    surface = Surface.fit(Measurements(*zip(*rows)), min_steps=20, window=1)
    steps = np.arange(20, 2801, 20)
    assert np.unique(surface.steps).tolist() == surface.steps.tolist()
    assert surface.loss(1e5, steps, 1e-3) == pytest.approx(truth(1e5, steps, 1e-3))


def test_a_shorter_learning_rate_holds_its_best():
    steps = np.arange(20, 2801, 20)
    m = measure([1e5], steps, [0.0, 1e-3], rates=(0.9, 1.1))
    m = m.select((m.learning_rate == 1.1) | (m.steps <= 700))
    surface = Surface.fit(m, min_steps=20, window=1)
    best = np.minimum(
        0.9 * truth(1e5, np.minimum(steps, 700), 1e-3), 1.1 * truth(1e5, steps, 1e-3)
    )
    assert surface.loss(1e5, steps, 1e-3) == pytest.approx(best)
    assert surface.learning_rate(1e5, 720, 1e-3) == 0.9


@pytest.mark.parametrize("readings", [0, 1])
def test_of_seeds_that_had_no_loss_none_counts(readings):
    """Whether it was not finite from the start, or before the first reading kept."""
    run = dict(family="x", tokens=1, batch_size=1, parameters=1e5, total_steps=400)
    steps = list(range(10, 401, 10))
    runs = []
    for ratio in (0.0, 1e-3):
        for rate, loss, last in ((1.0, 3.0, 40), (2.0, 2.0, 40), (2.0, 2.0, readings)):
            kept = dict(steps=steps[:last], loss=[loss] * last)
            runs.append({**run, "ratio": ratio, "learning_rate": rate, **kept})
    surface = Surface.fit(Measurements.of_runs(runs), min_steps=20, window=1)
    assert surface.loss(1e5, 300, 1e-3) == pytest.approx(3)


def test_steps_measured_of_a_size_and_ratio():
    """Of what a loss lies between the shortest; and a law tells four times as far."""
    grid = measure([1e4, 1e5, 1e6], np.arange(20, 1001, 20), [0.0, 1e-3, 1e-2])
    m = grid.select((grid.parameters < 1e6) & (grid.ratio < 1e-2) | (grid.steps <= 200))
    options = dict(min_steps=20, window=1, fit_from=200, steps_to=4000)
    surface = Surface.fit(m, **options)
    found = surface.measured_steps([1e4, 5e4, 1e5, 2e5, 9e9], [[0.0], [5e-4], [2e-3]])
    assert found.tolist() == [[1000, 1000, 1000, 200, 200]] * 2 + [[200] * 5]
    law = LossModel.of_measurements(m, "made up", **options)
    told = law.loss([5e4, 2e5, 2e5], 1, [4000, 800, 801], 1e-4)
    assert np.isfinite(told).tolist() == [True, True, False]
    # With less noise no loss is higher: what is known of more noise is of it, too.
    few = Surface.fit(
        grid.select((grid.ratio != 1e-3) | (grid.steps <= 200)), **options
    )
    assert (few.measured_steps(1e4, [0, 1e-4, 1e-3, 5e-3]) == 1000).all()
    # A plan of this size is at its end there.
    ends = dict(parameters=(2e5, 2e5), amplification="none", steps=(100, 4000))
    plan = Candidates(Budget(1e9, 50, 1e-6, **ends), law).best()
    assert plan.steps <= 800 and plan.ends == {"steps": "upper"}
    assert "upper end of the range, 790" in plan.caveats[0]
    assert "measured to 200 steps" in plan.caveats[1]


def test_ratios_between_zero_and_the_lowest(paper):
    """Between the noise-free runs and the lowest: continuous, monotone, a line."""
    surface, at = Surface.fit(paper, window=1), (29e6, 16_000)
    ratios = np.linspace(0, 2**-23, 9)
    found = np.log(surface.loss(*at, ratios))
    assert found[0] < found[-1] and found == pytest.approx(
        np.linspace(*found[[0, -1]], 9)
    )
    assert np.exp(found[0]) == pytest.approx(truth(*at, 0))
    assert surface.learning_rate(*at, 1e-30) == 1
    assert np.isnan(surface.loss([4e6, 29e6], 16_000, 0, outside="nan")).tolist() == [
        True,
        False,
    ]
    without = Surface.fit(paper.select(paper.ratio > 0), window=1)
    # Too high rather than too low; but without noise is no ratio.
    assert without.loss(*at, 1e-30) == surface.loss(*at, 2**-23)
    assert np.isnan(without.loss(*at, 0, outside="nan"))
    alone = Surface.fit(paper.select(paper.ratio == 0), window=1)
    assert alone.loss(*at, 0) == surface.loss(*at, 0)


def test_ratios_that_a_size_lacks(paper):
    """Between two that it has: as the law to 3 %, and told; else refused."""
    lacking = [(778e6, 2.0**-12), (4.5e6, 2.0**-23)]
    m = replace(paper, may_lack_ratios=True)
    for size, ratio in lacking:
        m = m.select((m.parameters != size) | (m.ratio != ratio))
    surface = Surface.fit(m, window=1)
    assert {*surface.interpolated} == {*lacking}
    assert surface.warnings[0].startswith("2 curves: not measured, interpolated")
    for size, ratio in lacking:
        told = surface.loss(size, [1000, 9000, 128_000], ratio)
        assert told == pytest.approx(
            truth(size, [1000, 9000, 128_000], ratio), rel=0.03
        )
    assert "and 2 more interpolated" in LossModel.of_measurements(m, "runs").source
    end = m.select((m.parameters != 29e6) | (m.ratio != 2.0**-6))
    for refused in (replace(m, may_lack_ratios=False), end):
        with pytest.raises(Refused, match="Nothing was measured at parameters"):
            Surface.fit(refused, window=1)


def test_runs_read_at_different_steps():
    """Between two readings, loss is a line in logs."""
    sizes, steps = [1e5] * 3 + [1e6] * 4, [10, 100, 1000, 5, 30, 200, 1000]
    m = Measurements(sizes, steps, [0] * 7, 100 / np.sqrt(steps))
    surface = Surface.fit(m, min_steps=1, window=1)
    assert surface.steps.tolist() == [10, 30, 100, 200, 1000]
    at = np.geomspace(10, 1000, 9)
    assert surface.loss(1e5, at, 0) == pytest.approx(100 / np.sqrt(at))
    assert surface.loss(1e6, at, 0) == pytest.approx(100 / np.sqrt(at))


def test_flat_and_odd_curves_are_reported():
    m = measure([1e5], np.arange(20, 1001, 20), [0.0, 1e-3], loss=level)
    surface = Surface.fit(m, **SMALL, steps_to=1e5)
    assert surface.loss(1e5, 1e5, 0) == pytest.approx(2)
    (warning,) = surface.warnings
    assert "2 curves" in warning and "continued flat" in warning

    def falling_faster(m, steps, r):  # no power law with E >= 0
        return 5 - 4 * (np.asarray(steps) / 1000) ** 2

    m = measure([1e5], np.arange(20, 1001, 20), [0.0, 1e-3], loss=falling_faster)
    surface = Surface.fit(m, **SMALL, steps_to=1e5)
    assert "doesn't flatten" in surface.warnings[0]
    assert monotone(surface)
    assert 0 < surface.loss(1e5, 1e5, 0) <= 1


def test_extrapolation_is_least_squares():
    """Oracle: scipy's curve_fit, which the paper uses, where it works."""
    steps = np.arange(1000.0, 20_001, 500)
    noise = 0.01 * np.random.default_rng(0).standard_normal(len(steps))
    loss = 40 * steps**-0.4 + 1.5 + noise
    to = np.array([3e4, 1e6])

    def curve(t, m, b, e):
        return np.exp(m * np.log(t) + b) + e

    found, _ = curve_fit(curve, steps, loss, (-0.5, 3.0, 1.0))
    expected = curve(to, *found)
    assert extrapolate(steps, loss, to) == (pytest.approx(expected, rel=1e-5), "")


def test_hold_out(paper):
    """Interpolation over a gap twice as wide, of the known law: to 2 %."""
    held = hold_out(paper, window=1, parameters=29e6)
    rows = held.parameters, held.steps, held.ratio
    assert held.measured == pytest.approx(truth(*rows))
    assert set(held.parameters) == {29e6} and len(held.error) == 128 * 19
    assert 0 < held.mean <= held.worst < 0.02
    # It is not in the fit: other losses there, other errors.
    twice = np.where(paper.parameters == 29e6, 2 * paper.loss, paper.loss)
    again = hold_out(replace(paper, loss=twice), window=1, parameters=29e6)
    assert again.mean == pytest.approx(0.5, abs=0.02)


def test_held_out_ratios_and_steps(study):
    """The lowest ratio beside noise-free runs; and what continuing curves is worth."""
    held = hold_out(study, ratio=2.0**-18, min_steps=20, window=1)
    assert held.mean < 0.05 and set(held.ratio) == {2.0**-18}
    held = hold_out(study, steps=250, **{**SMALL, "fit_from": 50})
    assert held.steps.min() == 260 and held.steps.max() == 1000
    assert 0 < held.mean < 0.03
    quarter = continued(study, **SMALL)
    assert quarter.mean == held.mean
    assert continued(study, min_steps=300, window=1, fit_from=400) is None
