"""
Parametric laws. Oracles: data made from known laws, closed forms, published numbers.
"""

import numpy as np
import pytest

from opacus_ext.planner import Measurements, laws
from opacus_ext.planner.laws import CHINCHILLA, KAPLAN, LAWS

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
