"""
Fine-tuning: frozen parameters cost compute and no noise, ranks cost noise, one run
without noise tells a loss; and what a run costs.
"""

import json
import math
import re

import numpy as np
import pytest

from opacus_ext.planner import Budget, Candidates, LossModel, Measurements
from opacus_ext.planner.budget import HopelessError
from opacus_ext.planner.commands.main import main
from opacus_ext.planner.loss_model import NOISE_FREE, RULE, compute
from opacus_ext.planner.noise import noise_of
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.refused import Refused

WHOLE, ADAPTERS = 6.7e9, 4_194_304  # rank 8 of query and value of 32 layers of 4,096
MODEL = dict(parameters=(WHOLE, WHOLE), trainable=ADAPTERS, physical_batch_size=8)
BUDGET = Budget(50_000, 8, delta=1e-6, flops=1e19, steps=(500, 2000), **MODEL)
STEPS = np.arange(0, 601, 20)
RUN = NoiseFree(STEPS, 1.6 + 0.8 / (1 + STEPS / 40))


@pytest.fixture(scope="module")
def table():
    return Candidates(BUDGET, LossModel.of_noise_free(RUN, "made up"))


def test_frozen_parameters_cost_compute_and_no_noise(table):
    for found in (table, Candidates(BUDGET, LossModel.rule_of_thumb())):
        plan = found.best()
        assert (plan.parameters, plan.trainable) == (WHOLE, ADAPTERS)
        tokens = plan.batch_size * plan.steps * plan.budget.tokens
        assert plan.flops == pytest.approx((4 * WHOLE + 2 * ADAPTERS) * tokens)
        assert plan.flops <= BUDGET.flops
        assert plan.noise_norm == pytest.approx(plan.ratio * math.sqrt(ADAPTERS))
        # Noise depends on the data and the batches, not on what is trained.
        same = noise_of(Budget(50_000, 8, 1e-6), plan.batch_size, plan.steps)
        assert plan.noise_multiplier == pytest.approx(float(same.noise_multiplier))
        code = plan.code()
        assert "all but 4,194,304 parameters frozen" in code
        assert f"about {math.ceil(plan.batch_size / 8):,} parts" in code
    assert plan.kind == RULE and plan.loss is None
    whole = compute(WHOLE, 100, 10, 512)
    assert whole == 6 * WHOLE * 512_000 == compute(WHOLE, 100, 10, 512, trainable=WHOLE)


def test_a_higher_rank_is_more_noise(table):
    plans = table.by_rank(8)
    assert list(plans) == [2, 4, 8, 16, 32]
    assert plans[8] == table.best()
    assert [p.trainable for p in plans.values()] == [
        ADAPTERS * rank // 8 for rank in plans
    ]
    losses = [p.loss for p in plans.values()]
    assert losses == sorted(losses) and losses[0] < losses[-1]
    assert list(table.by_rank(1)) == [1, 2, 4]
    assert list(table.by_rank(6)) == [3, 6, 12, 24]
    whole = Candidates(Budget(1e5, 8, steps=(1000, 1100)), LossModel.rule_of_thumb())
    with pytest.raises(Refused, match="Ranks are of adapters"):
        whole.by_rank(1)


def test_noise_slows_a_run_down():
    assert RUN.start == pytest.approx(2.4) and RUN.end == 600
    assert RUN.after(STEPS, 0.0) == pytest.approx(RUN.loss, rel=1e-3)
    norms = np.geomspace(1e-3, 30, 9)[:, None]
    loss = RUN.after(np.arange(1, 3000, 50), norms)
    assert (np.diff(loss, axis=0) >= 0).all() and (np.diff(loss, axis=1) <= 0).all()
    assert (loss >= RUN.loss[-1]).all() and (loss <= RUN.start).all()
    assert RUN.reached(1e9, 0.3) == RUN.end and RUN.reached(600, 0.3) < RUN.end
    # Without a loss at the start, the first two go back to it.
    late = NoiseFree(STEPS[1:], RUN.loss[1:])
    assert late.start == pytest.approx(2 * RUN.loss[1] - RUN.loss[2])


def test_a_warm_up_and_noisy_readings_are_no_lack_of_gradient():
    clean = RUN.after([600, 2400], 1.0)
    flat = RUN.loss.copy()
    flat[1] = flat[0]
    assert NoiseFree(STEPS, flat).after([600, 2400], 1.0) == pytest.approx(clean, 0.01)
    each = np.arange(601)
    for seed in range(3):
        noise = np.exp(0.05 * np.random.default_rng(seed).standard_normal(601))
        logged = NoiseFree(each, (1.6 + 0.8 / (1 + each / 40)) * noise)
        assert logged.after([600, 2400], 1.0) == pytest.approx(clean, rel=0.03)


def test_answers_that_do_not_belong_to_fine_tuning():
    law = LossModel.of_noise_free(RUN, "made up")
    drowned = Budget(**{**vars(BUDGET), "users": 2000, "trainable": 1e9, "epsilon": 1})
    with pytest.raises(HopelessError, match="Nothing can be learned"):
        Candidates(drowned, law).best(math.inf)
    runs = Measurements.read()
    measured = LossModel.of_measurements(runs, "shipped")
    given = {**vars(BUDGET), "trainable": 50_000, "tokens": 64}
    plan = Candidates(Budget(**given), measured).best(math.inf)
    assert any("must be runs of adapters" in caveat for caveat in plan.caveats)


ARGS = """
plan --users 50000 --epsilon 8 --delta 1e-6 --parameters 6.7e9 --trainable 4194304
--flops 1e19 --steps 500:1000 --rank 8 --device-flops 3e14 --price 2.5 --devices 4
--physical-batch-size 8
"""


def test_a_plan_of_adapters(capsys, tmp_path):
    run = tmp_path / "run.csv"
    lines = [f"{t},{loss}" for t, loss in zip(RUN.steps, RUN.loss)]
    run.write_text("\n".join(["steps,loss", *lines]))

    def shown(more=""):
        assert main(f"{ARGS} {more}".split()) == 0
        return capsys.readouterr().out

    found = json.loads(shown(f"--noise-free {run} --json"))
    (plan,) = found["plans"]
    assert found["answer"] == NOISE_FREE and RUN.loss[-1] < plan["loss"] < RUN.start
    hours = plan["flops"] / (3e14 * 0.3) / 3600
    cost = dict(device_hours=hours, hours=hours / 4, money=2.5 * hours)
    assert plan["cost"] == pytest.approx(cost)
    assert [row["rank"] for row in plan["ranks"]] == [2, 4, 8, 16, 32]
    assert plan["parts"] == math.ceil(plan["batch_size"] / 8)
    out = shown(f"--noise-free {run} --tokens 1")
    noise = re.search(r"noise multiplier +(\S+)", out)[1]
    for text in (" nats a record", "Too hopeful", f"noise_multiplier={noise},"):
        assert text in out
    out = shown()
    for text in ("4,194,304", "device_hours", "--noise-", "other ranks", "No loss is"):
        assert text in out
