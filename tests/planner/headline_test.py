"""What is in the first lines of a plan, and the noise of ``calibrate``."""

import dataclasses

import numpy as np
import pytest

from opacus_ext.accountants.composition import Composition
from opacus_ext.data.sampling import Poisson
from opacus_ext.planner import Budget, Candidates
from tests.planner.commands_test import output_of, strict
from tests.planner.plan_test import BUDGET, LAW


@pytest.mark.parametrize("within", [0.001, 0.01, 0.05])
def test_the_cheapest_of_about_the_best_loss(within):
    """Beside a search of all configurations, by the losses of the grid."""
    table = Candidates(BUDGET, LAW)
    plan, best = table.best(within=within), table.best()
    affordable = table.flops <= BUDGET.flops
    enough = affordable & (
        table.loss <= (1 + within) * np.nanmin(table.loss[affordable])
    )
    assert plan.flops == table.flops[enough].min() < best.flops
    assert best.loss <= plan.loss < best.loss * (1 + within) * 1.001
    assert plan.budget == best.budget


def test_delta_follows_the_users():
    given = dict(epsilon=4)
    deltas = [Budget(users, **given).delta for users in (1, 1e3, 5e4, 1e6, 1e9)]
    assert deltas == [0.1, 5e-4, 6e-6, 2e-7, 1e-10]
    assert dataclasses.replace(Budget(1e3, **given), users=1e6).delta == 5e-4


def test_the_noise_of_calibrate_is_enough_for_the_accountant(capsys):
    args = "calibrate --users 1e6 --epsilon 1,4 --batch-size 4096 --steps 1000"
    for row in strict(output_of(capsys, f"{args} --json")):
        spent = Composition()
        sampling = Poisson(expected_batch_size=4096, steps=1000)
        sampling.account(spent, 10**6, row["noise_multiplier"], 1000)
        assert 0.99 * row["epsilon"] < spent.get_epsilon(2e-7) <= row["epsilon"]
        assert row["delta"] == 2e-7
        assert str(row["noise_multiplier"]) in output_of(capsys, args)
