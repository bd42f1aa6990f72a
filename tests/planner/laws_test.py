"""
Parametric laws. Oracles: data made from known laws, closed forms, published numbers.
"""

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from opacus_ext import Refused
from opacus_ext.planner import Measurements, laws
from opacus_ext.planner.laws import CHINCHILLA, CHINCHILLA_REFIT, KAPLAN, LAWS, PF_DAY
from opacus_ext.planner.optimum import (
    compute_optimal,
    loss_after,
    minimum_flops,
    minimum_steps,
    optima,
)

L1 = laws.private.of(E=1.2, A=2e4, B=200.0, C=20.0, a=0.71, b=0.35, g=0.3)
L2 = laws.private_sigmoid.of(
    E=1.2, A=2e3, B=20.0, C=4.0, a=0.47, b=0.22, g=0.95, a2=-0.07
)
SIZE = {"parameters": (1e6, 1e10)}
PRIVATE = {"parameters": (4e6, 8e8), "examples": (1e6, 1e8), "ratio": (1e-7, 2e-2)}

# A law, known parameters of it and where to measure it.
KNOWN = {
    "chinchilla": (CHINCHILLA, {**SIZE, "tokens": (1e8, 1e12)}),
    "private": (L1, PRIVATE),
    "private_sigmoid": (L2, PRIVATE),
    "kaplan_parameters_tokens": (
        KAPLAN["parameters_tokens"],
        {**SIZE, "tokens": (1e7, 1e10)},
    ),
    "critical_batch": (KAPLAN["critical_batch"], {"loss": (2, 7)}),
    "kaplan_parameters": (KAPLAN["parameters"], SIZE),
    "kaplan_tokens": (KAPLAN["tokens"], {"tokens": (1e7, 1e10)}),
    "kaplan_flops": (KAPLAN["minimum_flops"], {"flops": (1e15, 1e20)}),
    "kaplan_parameters_steps": (
        KAPLAN["parameters_steps"],
        {**SIZE, "steps": (1e3, 1e6)},
    ),
    "power_of_flops": (KAPLAN["optimal_parameters"], {"flops": (1e15, 1e20)}),
    "power_of_parameters": (KAPLAN["least_tokens"], SIZE),
}


def sample(ranges, rows, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.exp(rng.uniform(*np.log(ends), rows)) for name, ends in ranges.items()
    }


@pytest.mark.parametrize("name", LAWS)
def test_known_law_is_recovered(name):
    """From many starts, all of which are to agree, without noise: to 1e-6. With slopes
    that were wrong L-BFGS would stop before."""
    known, ranges = KNOWN[name]
    inputs = sample(ranges, 80)
    fit = known.law.fit(known.predict(**inputs), descents=6, **inputs)
    for parameter, value in known.parameters.items():
        assert fit.parameters[parameter] == pytest.approx(value, rel=1e-6), parameter
    assert fit.converged and not fit.warnings
    assert fit.agreed == fit.starts == 6 and fit.objective < 1e-12


def test_formulas():
    """Each law against its formula, written out."""
    m, d, s = 3e8, 4e9, 1e-4
    squashed = 1 / (1 + np.exp(-(np.log(s) + 8) / 1.6))
    rows = dict(parameters=m, examples=d, ratio=s)
    free = 1.2 + 2e4 / m**0.71 + 200 / d**0.35
    kaplan = ((6.4e13 / m) ** (0.076 / 0.103) + 1.8e13 / d) ** 0.103
    harm = 4 * squashed**0.95 * m**0.07
    for fit, inputs, expected in (
        (L1, rows, free + 20 * s**0.3),
        (L1, {**rows, "ratio": 0}, free),
        (L2, rows, 1.2 + 2e3 / m**0.47 + 20 / d**0.22 + harm),
        (KAPLAN["parameters_tokens"], dict(parameters=m, tokens=d), kaplan),
        (KAPLAN["critical_batch"], dict(loss=3.0), 2.1e8 / 3.0 ** (1 / 0.21)),
    ):
        assert fit.predict(**inputs) == pytest.approx(expected)
    found = CHINCHILLA.predict(parameters=[[1e6], [1e7]], tokens=[1e8, 1e9, 1e10])
    assert found.shape == (2, 3)


@pytest.mark.parametrize(
    "name, at, expected",
    [  # tables 2, 5 and 6 as they are printed: a law is 1, or its scale, at its scale
        ("parameters", dict(parameters=8.8e13), 1.0),
        ("parameters", dict(parameters=8.8e12), 10**0.076),
        ("tokens", dict(tokens=5.4e13), 1.0),
        ("tokens", dict(tokens=5.4e12), 10**0.095),
        ("flops", dict(flops=1.6e7 * PF_DAY), 1.0),
        ("flops", dict(flops=1.6e6 * PF_DAY), 10**0.057),
        ("minimum_flops", dict(flops=3.1e8 * PF_DAY), 1.0),
        ("minimum_flops", dict(flops=3.1e7 * PF_DAY), 10**0.050),
        ("parameters_tokens", dict(parameters=6.4e13, tokens=1e99), 1.0),
        ("parameters_tokens", dict(parameters=1e99, tokens=1.8e13), 1.0),
        ("parameters_tokens", dict(parameters=6.4e12, tokens=1e99), 10**0.076),
        ("parameters_tokens", dict(parameters=1e99, tokens=1.8e12), 10**0.103),
        ("parameters_steps", dict(parameters=8.8e13, steps=2.1e3), 2.0),
        ("parameters_steps", dict(parameters=8.8e12, steps=2.1e99), 10**0.076),
        ("parameters_steps", dict(parameters=8.8e99, steps=2.1e2), 10**0.76),
        ("critical_batch", dict(loss=1.0), 2.1e8),
        ("critical_batch", dict(loss=10.0), 2.1e8 / 10 ** (1 / 0.21)),
        ("optimal_parameters", dict(flops=PF_DAY), 1.3e9),
        ("optimal_parameters", dict(flops=10 * PF_DAY), 1.3e9 * 10**0.73),
        ("optimal_batch_size", dict(flops=PF_DAY), 2.0e6),
        ("optimal_batch_size", dict(flops=10 * PF_DAY), 2.0e6 * 10**0.24),
        ("optimal_steps", dict(flops=PF_DAY), 5.4e3),
        ("optimal_steps", dict(flops=10 * PF_DAY), 5.4e3 * 10**0.03),
        ("optimal_tokens", dict(flops=PF_DAY), 2e10),
        ("optimal_tokens", dict(flops=10 * PF_DAY), 2e10 * 10**0.27),
        ("least_tokens", dict(parameters=1.0), 5e3),
        ("least_tokens", dict(parameters=1e9), 5e3 * 1e9**0.74),
    ],
)
def test_printed_constants_of_kaplan(name, at, expected):
    assert KAPLAN[name].predict(**at) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(
    "law", [CHINCHILLA, CHINCHILLA_REFIT, KAPLAN["parameters_tokens"]]
)
@pytest.mark.parametrize("flops", [1e17, 1e21, 1e25])
def test_closed_form_of_the_optimum_is_the_minimum(law, flops):
    def loss(log_size):
        size = np.exp(log_size)
        return float(law.predict(parameters=size, tokens=flops / 6 / size))

    best = compute_optimal(flops, law)
    options = dict(bounds=(5, 40), method="bounded", options={"xatol": 1e-8})
    found = minimize_scalar(loss, **options)
    assert best.parameters == pytest.approx(np.exp(found.x), rel=1e-4)
    assert best.loss == pytest.approx(found.fun, rel=1e-12)
    assert 6 * best.parameters * best.tokens == pytest.approx(flops)


def test_laws_agree_with_one_another():
    """What Kaplan et al. derive of their laws, to the digits that are printed."""
    size, batch, steps = np.array([1e6, 1e9]), 2.0**19, 1e4
    law = KAPLAN["parameters_steps"]
    # Of huge batches all steps count; and what never ends is limited by size alone.
    told = law.predict(parameters=size, steps=steps)
    np.testing.assert_allclose(loss_after(size, steps, 1e15), told, rtol=1e-6)
    told = KAPLAN["parameters"].predict(parameters=size)
    np.testing.assert_allclose(loss_after(size, 1e99, batch), told)
    loss = loss_after(size, steps, batch)
    least = minimum_steps(steps, batch, loss)
    told = law.predict(parameters=size, steps=least)
    np.testing.assert_allclose(loss, told, rtol=1e-12)
    flops = minimum_flops(6 * size * batch * steps, batch, loss)
    critical = KAPLAN["critical_batch"].predict(loss=loss)
    np.testing.assert_allclose(flops, 6 * size * critical * least)
    # Table 6: N B S is the compute, D = B S, and exponents are those of table 5.
    of = {n: f.parameters for n, f in KAPLAN.items()}
    names = [f"optimal_{x}" for x in ("parameters", "batch_size", "steps")]
    assert sum(of[n]["p"] for n in names) == pytest.approx(1)
    at_day = [float(KAPLAN[n].predict(flops=PF_DAY)) for n in names]
    assert 6 * np.prod(at_day) == pytest.approx(PF_DAY, rel=0.05)
    assert of["optimal_tokens"]["p"] == pytest.approx(1 - of["optimal_parameters"]["p"])
    # The best size at C = 6 N B_crit S_min is a power of C, of which 1 / 0.21 is B's.
    alphas = {**of["parameters_steps"], **of["critical_batch"]}
    inverse = [1 / alphas[f"alpha_{x}"] for x in "NBS"]
    slopes = 1 / sum(inverse)
    assert slopes == pytest.approx(of["minimum_flops"]["alpha_C"], rel=0.05)
    for name, term in zip(names[:2], inverse):
        assert slopes * term == pytest.approx(of[name]["p"], rel=0.1)


def test_enough_tokens():
    """Kaplan et al.'s rule: with so many, few percent of the loss are the data's."""
    law = KAPLAN["parameters_tokens"]
    for size in (1e6, 1e9):
        least = float(KAPLAN["least_tokens"].predict(parameters=size))
        endless = law.predict(parameters=size, tokens=1e99)
        told = law.predict(parameters=size, tokens=least)
        assert told / endless == pytest.approx(1.021, abs=0.001)


def test_kaplan_and_chinchilla_side_by_side():
    """Ten times the compute: 5.4 times the size by Kaplan, 2.8 by Chinchilla."""
    less, more = optima(1e21), optima(1e22)
    for name, growth in {
        "Kaplan, table 6": 10**0.73,
        "Kaplan, L(N, D)": 10 ** (0.103 / (0.076 + 0.103)),
        "Chinchilla": 10 ** (0.28 / 0.62),
    }.items():
        assert more[name].parameters / less[name].parameters == pytest.approx(growth)
    with pytest.raises(Refused, match="is a law of loss"):
        compute_optimal(1e21, KAPLAN["critical_batch"])


def test_degenerate_fits_are_reported():
    inputs = sample(KNOWN["chinchilla"][1], 60)
    size, tokens = inputs["parameters"], inputs["tokens"]
    noise = 3 * np.exp(0.01 * np.random.default_rng(0).standard_normal(60))
    for loss, start, message in (
        # Data that matter only at the very smallest: b runs away.
        (2 + 400 / size**0.34 + (tokens / tokens.min()) ** -13.0, "b = ", "degenerate"),
        (400 / size**0.34 + 400 / tokens**0.28, "E = ", "no effect"),  # no constant
        (noise, "", ""),
    ):
        fit = laws.chinchilla.fit(loss, descents=2, **inputs)
        assert any(w.startswith(start) and message in w for w in fit.warnings)


def test_private_rows():
    m = Measurements(
        parameters=np.array([1e4] * 6),
        steps=np.array([10.0, 20, 10, 20, 10, 20]),
        ratio=np.array([0, 0, 0.1, 0.1, 0.1, 0.1]),
        loss=np.array([5.0, 4, 6, 5, 5.5, 5.5]),
        run=np.array([0.0, 0, 1, 1, 2, 2]),
        batch_size=32,
    )
    loss, inputs = laws.private_rows(m)
    assert loss.tolist() == [5, 4, 5, 5.5]  # the better learning rate at each
    assert inputs["examples"].tolist() == [320, 640, 640, 320]
