import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from opacus_ext.planner import plots  # noqa: E402
from opacus_ext.planner import Budget, Candidates  # noqa: E402
from tests.planner.plan_test import LAW  # noqa: E402

ENDS = dict(delta=1e-6, flops=1e13, tokens=16, steps=(100, 800))
BUDGET = Budget(users=1e4, epsilon=4, **ENDS)
FLOPS = np.geomspace(1e10, 1e15, 6)


@pytest.fixture(scope="module")
def tables():
    return {"epsilon 4": Candidates(BUDGET, LAW)}


@pytest.fixture(autouse=True)
def closed():
    yield
    matplotlib.pyplot.close("all")


def test_allocation_shows_the_plans(tables):
    figure = plots.allocation(tables, FLOPS)
    plans = [p for p in tables["epsilon 4"].frontier(FLOPS) if p]
    for axis, name in zip(figure.axes, ("parameters", "batch_size", "steps")):
        (line,) = axis.get_lines()
        np.testing.assert_array_equal(
            line.get_ydata(), [getattr(p, name) for p in plans]
        )
        assert axis.collections  # the region


def test_compute_benefit_falls_and_saturates(tables):
    figure = plots.compute_benefit(tables, FLOPS)
    curve, dot = figure.axes[0].get_lines()
    assert (np.diff(curve.get_ydata()) <= 1e-9).all()
    assert dot.get_ydata()[0] <= 1.02 * curve.get_ydata()[-1]


def test_synergy_has_an_arrow_for_every_cell():
    plane = (
        ("batch_size", [64.0, 256.0]),
        ("epsilon", [1.0, 4.0]),
        {"users": 256.0},
    )
    figure = plots.synergy(100, 1e-6, [plane])
    quiver = figure.axes[0].collections[-1]
    # 2 x 256 is more than all users: only the batches of 64.
    assert quiver.N == 2 and (quiver.U > 0).all() and (quiver.V > 0).all()


def test_baselines_are_above_the_best():
    figure = plots.baselines(BUDGET, LAW, [2, 8], {"large": (1e6, 1000, 100)})
    fixed, best = (line.get_ydata() for line in figure.axes[0].get_lines())
    assert (best < fixed).all() and best[1] < best[0]


def test_vulnerability_has_both_curves(tables):
    figure = plots.vulnerability(tables["epsilon 4"], 1e13)
    loss, advantage = (axis.get_lines()[0].get_ydata() for axis in figure.axes)
    assert len(loss) == len(advantage) > 3
    assert ((0 < advantage) & (advantage < 1)).all()
