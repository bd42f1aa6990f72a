"""
Parametric laws. Oracles: data made from known laws, closed forms, published numbers
and, where OPACUS_EXT_CHINCHILLA names the file, the runs of Hoffmann et al.
"""

import csv
import json
import os
from types import SimpleNamespace

import numpy as np
import pytest

from opacus_ext.planner import laws
from opacus_ext.planner.laws import CHINCHILLA, KAPLAN, LAWS, PF_DAY, Fit

CHINCHILLA_CSV = os.environ.get("OPACUS_EXT_CHINCHILLA")

L1 = laws.private.of(E=1.2, A=2e4, B=200.0, C=20.0, a=0.71, b=0.35, g=0.3)
L2 = laws.private_sigmoid.of(
    E=1.2, A=2e3, B=20.0, C=4.0, a=0.47, b=0.22, g=0.95, a2=-0.07
)
PRIVATE = {"parameters": (4e6, 8e8), "examples": (1e6, 1e8), "ratio": (1e-7, 2e-2)}
SIZE = {"parameters": (1e6, 1e10)}

# A law, known parameters of it and where to measure it.
KNOWN = {
    "chinchilla": (CHINCHILLA, {**SIZE, "tokens": (1e8, 1e12)}),
    "private": (L1, PRIVATE),
    "private_sigmoid": (L2, PRIVATE),
    "kaplan_parameters": (KAPLAN["parameters"], SIZE),
    "kaplan_tokens": (KAPLAN["tokens"], {"tokens": (1e7, 1e10)}),
    "kaplan_flops": (KAPLAN["flops"], {"flops": (1e16, 1e22)}),
    "kaplan_parameters_tokens": (
        KAPLAN["parameters_tokens"],
        {**SIZE, "tokens": (1e7, 1e10)},
    ),
    "kaplan_parameters_steps": (
        KAPLAN["parameters_steps"],
        {**SIZE, "steps": (1e2, 1e5)},
    ),
    "critical_batch": (KAPLAN["critical_batch"], {"loss": (2, 7)}),
    "power": (KAPLAN["optimal_parameters"], {"flops": (1e16, 1e22)}),
}


def sample(ranges, rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.exp(rng.uniform(*np.log(ends), rows)) for name, ends in ranges.items()
    }


def test_every_law_is_tested():
    assert set(KNOWN) == set(LAWS)


@pytest.mark.parametrize("name", KNOWN)
def test_known_law_is_recovered(name):
    """From many starts, all of which are to agree, without noise: to 1e-6."""
    known, ranges = KNOWN[name]
    inputs = sample(ranges, 80)
    fit = known.law.fit(known.predict(**inputs), descents=6, **inputs)
    for parameter, value in known.parameters.items():
        assert fit.parameters[parameter] == pytest.approx(value, rel=1e-6), parameter
    assert fit.converged and not fit.warnings
    assert fit.agreed == fit.starts == 6
    assert fit.objective < 1e-12


# Each kind: with noise, of two inputs, of one, and without a logarithm of its own.
@pytest.mark.parametrize(
    "name", ["private", "kaplan_parameters_tokens", "critical_batch", "power"]
)
def test_intervals_cover_a_known_law(name):
    """One draw of noise, 99 %: fails if intervals are off or far too narrow."""
    known, ranges = KNOWN[name]
    inputs = sample(ranges, 150, seed=1)
    noise = np.exp(0.005 * np.random.default_rng(3).standard_normal(150))
    fit = known.law.fit(
        known.predict(**inputs) * noise, descents=2, bootstrap=60, **inputs
    )
    assert not fit.warnings
    for parameter, (low, high) in fit.intervals(0.99).items():
        assert low <= known.parameters[parameter] <= high, parameter
        assert low < fit.parameters[parameter] < high
    low, high = fit.predict_interval(0.99, **inputs)
    truth = known.predict(**inputs)
    assert ((low <= truth) & (truth <= high)).mean() > 0.85
    assert (high / low - 1).mean() < 0.015  # many rows: narrower than their noise


def test_coverage():
    """90 % intervals of 12 draws cover about 90 %: between 70 and 99."""
    known, ranges = KNOWN["kaplan_parameters"]
    covered = []
    for seed in range(12):
        inputs = sample(ranges, 40, seed)
        noise = np.exp(0.02 * np.random.default_rng(seed).standard_normal(40))
        fit = known.law.fit(
            known.predict(**inputs) * noise,
            starts=[known.parameters],
            bootstrap=30,
            seed=seed,
            **inputs,
        )
        low, high = fit.intervals(0.9)["alpha_N"]
        covered.append(low <= known.parameters["alpha_N"] <= high)
    assert 0.7 <= np.mean(covered) <= 0.99


def test_outliers_weigh_little():
    inputs = sample(KNOWN["chinchilla"][1], 60)
    loss = CHINCHILLA.predict(**inputs)
    loss[::10] *= 1.5
    fit = laws.chinchilla.fit(loss, descents=6, **inputs)
    assert fit.parameters["a"] == pytest.approx(0.34, rel=1e-2)
    assert fit.parameters["b"] == pytest.approx(0.28, rel=1e-2)


def test_units_do_not_matter():
    """Tokens in millions and loss in bits: the same law."""
    inputs = sample(KNOWN["chinchilla"][1], 60)
    loss = CHINCHILLA.predict(**inputs)
    bits = laws.chinchilla.fit(
        loss / np.log(2),
        descents=4,
        parameters=inputs["parameters"],
        tokens=inputs["tokens"] / 1e6,
    ).parameters
    assert bits["E"] * np.log(2) == pytest.approx(1.69, rel=1e-6)
    assert bits["a"] == pytest.approx(0.34, rel=1e-6)
    assert bits["B"] * np.log(2) * 1e6**0.28 == pytest.approx(410.7, rel=1e-5)


@pytest.mark.skipif(not CHINCHILLA_CSV, reason="OPACUS_EXT_CHINCHILLA names no file")
def test_runs_of_chinchilla():
    """Constants of an independent fit to these runs, without the five lowest D / N."""
    with open(CHINCHILLA_CSV, newline="") as file:
        rows = list(csv.DictReader(file))
    size, flops, loss = (
        np.array([float(row[name]) for row in rows])
        for name in ("Model Size", "Training FLOP", "loss")
    )
    assert len(rows) == 245
    tokens = flops / (6 * size)
    keep = np.sort(np.argsort(tokens / size)[5:])
    fit = laws.chinchilla.fit(
        loss[keep], parameters=size[keep], tokens=tokens[keep], bootstrap=30
    )
    assert fit.objective == pytest.approx(0.00101827, abs=5e-9)
    expected = laws.CHINCHILLA_REFIT.parameters
    for name, value in expected.items():
        assert fit.parameters[name] == pytest.approx(value, rel=1e-3), name
    assert fit.agreed == fit.starts == 24
    for name, (low, high) in fit.intervals().items():
        assert low < expected[name] < high
    # Published constants are outside: these runs are not fitted by them.
    low, high = fit.intervals()["b"]
    assert not low < CHINCHILLA.parameters["b"] < high


def test_noise_free_rows_fix_the_rest_of_a_private_law():
    """A ratio of 0 is no noise at all, in fits and in predictions."""
    inputs = sample(PRIVATE, 120)
    inputs["ratio"][::3] = 0
    for known in (L1, L2):
        fit = known.law.fit(known.predict(**inputs), descents=6, **inputs)
        for name, value in known.parameters.items():
            assert fit.parameters[name] == pytest.approx(value, rel=1e-5), name
        p = known.parameters
        free = known.predict(parameters=1e7, examples=1e7, ratio=0)
        assert free == pytest.approx(
            p["E"] + p["A"] / 1e7 ** p["a"] + p["B"] / 1e7 ** p["b"]
        )


def test_formulas():
    """Each law against its formula, written out."""
    m, d, s = 3e8, 4e9, 1e-4
    p = L2.parameters
    squashed = 1 / (1 + np.exp(-(np.log(s) + 8) / 1.6))
    noise = p["C"] * squashed ** p["g"] / m ** p["a2"]
    assert L2.predict(parameters=m, examples=d, ratio=s) == pytest.approx(
        p["E"] + p["A"] / m ** p["a"] + p["B"] / d ** p["b"] + noise
    )
    p = L1.parameters
    assert L1.predict(parameters=m, examples=d, ratio=s) == pytest.approx(
        p["E"] + p["A"] / m**0.71 + p["B"] / d**0.35 + p["C"] * s**0.3
    )
    assert KAPLAN["parameters_tokens"].predict(parameters=m, tokens=d) == pytest.approx(
        ((6.4e13 / m) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103
    )
    assert KAPLAN["parameters_steps"].predict(parameters=m, steps=1e4) == pytest.approx(
        (8.8e13 / m) ** 0.076 + (2.1e3 / 1e4) ** 0.76
    )
    assert KAPLAN["flops"].predict(flops=PF_DAY) == pytest.approx(1.6e7**0.057)
    assert KAPLAN["minimum_flops"].predict(flops=PF_DAY) == pytest.approx(3.1e8**0.05)
    assert KAPLAN["critical_batch"].predict(loss=3.0) == pytest.approx(
        2.1e8 / 3.0 ** (1 / 0.21)
    )
    for name, value in [
        ("optimal_parameters", 1.3e9 * 10**0.73),
        ("optimal_batch_size", 2.0e6 * 10**0.24),
        ("optimal_steps", 5.4e3 * 10**0.03),
        ("optimal_tokens", 2e10 * 10**0.27),
    ]:
        assert KAPLAN[name].predict(flops=10 * PF_DAY) == pytest.approx(value)


def test_the_least_steps_and_compute_of_a_loss():
    """Equations 5.4 and 5.5 of Kaplan et al.: (S / S_min - 1) (E / E_min - 1) = 1."""
    batch = np.array([16.0, 64, 256, 1024, 4096])
    steps = 1000 * (1 + 500 / batch)  # S_min 1000, B_crit 500
    assert laws.minimum_steps(steps, batch, 500) == pytest.approx(np.full(5, 1000))
    flops = 6 * 1e6 * batch * steps
    least = laws.minimum_flops(flops, batch, 500)
    assert least == pytest.approx(np.full(5, 6 * 1e6 * 500 * 1000))


def test_loss_at_batch_agrees_with_its_critical_batch():
    m, s, b = 1e8, 3e4, np.array([1.0, 1e4, 1e6, 1e12])
    loss = laws.loss_at_batch(m, s, b)
    critical = KAPLAN["critical_batch"].predict(loss=loss)
    again = KAPLAN["parameters_steps"].predict(
        parameters=m, steps=laws.minimum_steps(s, b, critical)
    )
    assert loss == pytest.approx(again, rel=1e-9)
    assert (np.diff(loss) < 0).all()
    unlimited = KAPLAN["parameters_steps"].predict(parameters=m, steps=s)
    assert loss[-1] == pytest.approx(unlimited)


def test_compute_optimal():
    """Closed form against a scan; L1 at a fixed ratio has Chinchilla's closed form."""
    best = CHINCHILLA.compute_optimal(1e21)
    sizes = best.parameters * np.geomspace(0.5, 2, 2001)
    losses = CHINCHILLA.predict(parameters=sizes, tokens=1e21 / (6 * sizes))
    assert losses.argmin() == 1000
    assert 6 * best.parameters * best.data == pytest.approx(1e21)

    p = L1.parameters
    same = laws.chinchilla.of(**{n: p[n] for n in ("E", "A", "B", "a", "b")})
    closed = same.compute_optimal(1e21 / 512)
    for ratio in (0, 1e-4):
        best = L1.compute_optimal(1e21, tokens_per_step=512, ratio=ratio)
        assert best.parameters == pytest.approx(closed.parameters, rel=1e-5)
        assert best.data == pytest.approx(closed.data, rel=1e-5)
    # Noise hurts larger models more in L2.
    sizes = [
        L2.compute_optimal(1e20, tokens_per_step=512, ratio=ratio).parameters
        for ratio in (0, 1e-5, 1e-3)
    ]
    assert sizes[0] > sizes[1] > sizes[2]
    kaplan = KAPLAN["parameters_tokens"].compute_optimal(1e21)
    assert 1e8 < kaplan.parameters < 1e12
    # More compute never plans a worse loss.
    losses = [CHINCHILLA.compute_optimal(c).loss for c in np.geomspace(1e10, 1e30, 21)]
    assert (np.diff(losses) < 0).all()


def test_no_compute_optimal():
    growing = laws.chinchilla.of(E=1.0, A=1.0, B=1.0, a=-0.1, b=0.3)
    with pytest.raises(ValueError, match="no best size between 100 and 1e"):
        growing.compute_optimal(1e18)
    with pytest.raises(ValueError, match="kaplan_tokens has no model size"):
        KAPLAN["tokens"].compute_optimal(1e18)
    with pytest.raises(ValueError, match="flops must be positive"):
        CHINCHILLA.compute_optimal(0)
    with pytest.raises(ValueError, match="private is a law of parameters, examples"):
        L1.compute_optimal(1e18)


def test_json():
    inputs = sample(SIZE, 20)
    loss = KAPLAN["parameters"].predict(**inputs) * np.linspace(0.99, 1.01, 20)
    fit = laws.kaplan_parameters.fit(loss, descents=2, bootstrap=5, **inputs)
    again = Fit.from_dict(json.loads(json.dumps(fit.to_dict())))
    assert again == fit
    assert again.intervals() == fit.intervals()
    assert str(again).startswith("kaplan_parameters: N_c ")
    with pytest.raises(ValueError, match="law must be one of"):
        Fit.from_dict({"law": "moore"})


def test_same_seed_same_fit():
    inputs = sample(SIZE, 20)
    loss = KAPLAN["parameters"].predict(**inputs) * np.linspace(0.99, 1.01, 20)
    fits = [
        laws.kaplan_parameters.fit(loss, descents=2, bootstrap=5, seed=s, **inputs)
        for s in (3, 3, 4)
    ]
    assert fits[0].intervals() == fits[1].intervals() != fits[2].intervals()


def test_groups_are_resampled_whole():
    """Rows of one run share its error; as rows they'd seem to be as many runs."""
    rng = np.random.default_rng(0)
    runs, each = 12, 10
    inputs = {n: np.repeat(x, each) for n, x in sample(SIZE, runs).items()}
    error = np.repeat(np.exp(0.02 * rng.standard_normal(runs)), each)
    loss = KAPLAN["parameters"].predict(**inputs) * error
    options = dict(starts=[KAPLAN["parameters"].parameters], bootstrap=60)
    width = []
    for groups in (None, np.repeat(np.arange(runs), each)):
        fit = laws.kaplan_parameters.fit(loss, groups=groups, **options, **inputs)
        low, high = fit.intervals()["alpha_N"]
        width.append(high - low)
    assert width[1] > 2 * width[0]


def test_degenerate_fits_are_reported():
    inputs = sample(KNOWN["chinchilla"][1], 60)
    size, tokens = inputs["parameters"], inputs["tokens"]
    # Data that matter in no way but at the very smallest: b runs away.
    steep = 2 + 400 / size**0.34 + (tokens / tokens.min()) ** -13.0
    fit = laws.chinchilla.fit(steep, descents=2, **inputs)
    assert any(w.startswith("b = ") and "degenerate" in w for w in fit.warnings)
    # No constant: E is lost.
    fit = laws.chinchilla.fit(
        400 / size**0.34 + 400 / tokens**0.28, descents=2, **inputs
    )
    assert any(w.startswith("E = ") and "no effect" in w for w in fit.warnings)
    # Noise only.
    rng = np.random.default_rng(0)
    loss = 3 * np.exp(0.01 * rng.standard_normal(60))
    fit = laws.chinchilla.fit(loss, descents=2, bootstrap=3, **inputs)
    assert fit.warnings
    assert all(w in str(fit) for w in fit.warnings)


ROWS = {"parameters": [1e6, 1e7, 1e8, 1e9, 1e9, 1e8], "tokens": [1e9, 1e10, 1e8] * 2}
LOSS = [5.0, 4, 3, 2.5, 3, 2]


@pytest.mark.parametrize(
    "loss, changes, message",
    [
        (LOSS[:4], {n: x[:4] for n, x in ROWS.items()}, "5 parameters; 4 rows"),
        ([*LOSS[:5], np.nan], {}, "loss must be positive and finite; got nan"),
        ([*LOSS[:5], np.inf], {}, "loss must be positive and finite; got inf"),
        ([*LOSS[:5], 0], {}, "loss must be positive and finite; got 0"),
        ([*LOSS[:5], -1], {}, "loss must be positive and finite; got -1"),
        ([], {}, "loss is empty"),
        ([LOSS], {}, r"loss must be a list of numbers"),
        (LOSS, {"tokens": [1e9, 1e8]}, r"tokens has shape \(2,\), loss \(6,\)"),
        (LOSS, {"tokens": [0.0] * 6}, "tokens must be positive and finite; got 0"),
        (LOSS, {"parameters": 1e6}, "parameters has 1 distinct value; chinchilla"),
        (LOSS, {"parameters": [1e6, 1e7] * 3}, "parameters has 2 distinct values"),
        (
            LOSS,
            {"tokens": [20 * m for m in ROWS["parameters"]]},
            "parameters and tokens vary only together",
        ),
        (LOSS, {"steps": [1] * 6}, "law of parameters, tokens; got"),
        (LOSS, {"huber": 0}, "huber must be positive; got 0"),
        (LOSS, {"starts": 0}, "at least 1"),
        (LOSS, {"starts": []}, "starts is empty"),
        (LOSS, {"starts": [{"E": 1}]}, "has the parameters"),
        (LOSS, {"bootstrap": -1}, "at least 0"),
        (LOSS, {"groups": [1]}, "groups has shape"),
        (LOSS, {"groups": [1] * 6, "bootstrap": 3}, "groups has one label"),
    ],
)
def test_refused_fits(loss, changes, message):
    with pytest.raises(ValueError, match=message):
        laws.chinchilla.fit(loss, **{"descents": 1, **ROWS, **changes})


def test_refused_parameters_and_predictions():
    with pytest.raises(ValueError, match="A must be positive and finite; got 0"):
        laws.chinchilla.of(E=1, A=0, B=1, a=1, b=1)
    with pytest.raises(ValueError, match="a must be finite; got nan"):
        laws.chinchilla.of(E=1, A=1, B=1, a=float("nan"), b=1)
    with pytest.raises(ValueError, match="got parameters"):
        CHINCHILLA.predict(parameters=1)
    with pytest.raises(ValueError, match="tokens must be positive"):
        CHINCHILLA.predict(parameters=1, tokens=[1, -1])
    with pytest.raises(ValueError, match="don't broadcast: parameters"):
        CHINCHILLA.predict(parameters=[1, 2], tokens=[1, 2, 3])
    with pytest.raises(ValueError, match="no intervals without a bootstrap"):
        CHINCHILLA.intervals()
    with pytest.raises(ValueError, match="level must be between 0 and 1; got 95"):
        CHINCHILLA.intervals(95)
    with pytest.raises(ValueError, match="critical must be positive"):
        laws.minimum_steps(1, 1, 0)


def test_predictions_broadcast():
    found = CHINCHILLA.predict(parameters=[[1e6], [1e7]], tokens=[1e8, 1e9, 1e10])
    assert found.shape == (2, 3)
    assert found.dtype == np.float64


def test_private_rows():
    m = SimpleNamespace(
        parameters=np.array([1e4] * 6),
        steps=np.array([10.0, 20, 10, 20, 10, 20]),
        ratio=np.array([0, 0, 0.1, 0.1, 0.1, 0.1]),
        loss=np.array([5.0, 4, 6, 5, 5.5, 5.5]),
        run=np.array([0.0, 0, 1, 1, 2, 2]),
        batch_size=32,
    )
    loss, inputs, groups = laws.private_rows(m)
    assert loss.tolist() == [5, 4, 5, 5.5]  # the better learning rate at each
    assert inputs["examples"].tolist() == [320, 640, 640, 320]
    assert groups.tolist() == [0, 0, 1, 2]
    loss, inputs, _ = laws.private_rows(
        m, batch_size=1, least_steps=20, least_ratio=0.1, highest_loss=5.2
    )
    assert loss.tolist() == [5]
    assert inputs["ratio"].tolist() == [0.1]
    with pytest.raises(ValueError, match="No row has 30 steps"):
        laws.private_rows(m, least_steps=30)
    m.batch_size = 0
    with pytest.raises(ValueError, match="don't tell their batch_size"):
        laws.private_rows(m)
