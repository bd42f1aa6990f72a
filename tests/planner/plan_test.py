import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import opacus_ext  # noqa: F401
from opacus_ext.data import Poisson
from opacus_ext.planner import Budget, Candidates, LossModel
from opacus_ext.planner.loss_model import MEASURED, compute
from opacus_ext.planner.noise import noise_of, verified_noise
from opacus_ext.refused import Refused


def known_loss(size, batch, steps, ratio):
    """Of what a real law has: noise hurts, and large models more."""
    found = 1 + (1e4 / size) ** 0.3 + (1e3 / steps) ** 0.3
    found = found + np.sqrt(ratio * np.sqrt(size))
    return np.where(np.asarray(ratio) < 0.25, found, np.nan)


LAW = LossModel(known_loss, (1e4, 1e6), (100, 3200), 16, 32, MEASURED, "made up")
BUDGET = Budget(users=1e5, epsilon=4, delta=1e-6, flops=1e14, tokens=16)


@pytest.fixture(scope="module")
def table():
    return Candidates(BUDGET, LAW)


def test_the_best_is_the_best_of_all_configurations(table):
    plan = table.best()
    assert plan.flops <= BUDGET.flops
    assert plan.flops == compute(plan.parameters, plan.batch_size, plan.steps, 16)
    assert plan.ratio == pytest.approx(plan.noise_multiplier / plan.batch_size)
    again = float(LAW.loss(plan.parameters, plan.batch_size, plan.steps, plan.ratio))
    assert plan.loss == pytest.approx(again)
    rng = np.random.default_rng(0)
    for _ in range(200):
        at = [rng.integers(n) for n in table.loss.shape]
        if table.flops[tuple(at)] <= BUDGET.flops:
            assert not table.loss[tuple(at)] < plan.loss
    assert 0 < plan.advantage < 1
    tokens = plan.batch_size * plan.steps * 16
    assert plan.tokens_per_parameter == pytest.approx(tokens / plan.parameters)


def test_near_optimal_and_saturating(table):
    plan, near = table.best(), table.near()
    for name in ("parameters", "batch_size", "steps"):
        low, high = getattr(near, name)
        assert low <= getattr(plan, name) <= high
    assert 1 < near.count < table.near(within=0.1).count
    enough, best = table.saturating(), table.best(math.inf)
    assert enough.loss <= 1.012 * best.loss and enough.flops < best.flops
    assert table.best(0.99 * enough.flops).loss > 1.008 * best.loss


def test_equal_epsilon_is_not_equal_advantage(table):
    plans = table.by_batch_size()
    assert len({p.batch_size for p in plans}) == len(plans) > 5
    assert all(p.flops <= BUDGET.flops * (1 + 1e-9) for p in plans)
    advantages = [p.advantage for p in plans]
    assert max(advantages) > 1.2 * min(advantages)
    assert min(p.loss for p in plans) == table.best().loss


def test_twice_of_everything(monkeypatch):
    """What is not known of more is left out: a plan does not fail by it."""
    ends = dict(steps=(800, 800), parameters=(1e5, 1e5), flops=1e13)
    table, twice, most = (
        Candidates(dataclasses.replace(BUDGET, epsilon=epsilon, **ends), LAW)
        for epsilon in (4, 8, 100)
    )
    more = table.doubled_loss()
    assert min(more.values()) >= -1e-4 and max(more.values()) > 0
    expected = 1 - twice.best().loss / table.best().loss
    assert more["epsilon"] == pytest.approx(expected)
    above = most.doubled_loss()
    assert math.isnan(above["epsilon"]) and above["users"] >= 0
    assert set(most.best().doubled_noise()) == {"batch_size", "users"}

    def refuse(*args):
        raise Refused("takes too long")

    monkeypatch.setattr("opacus_ext.planner.plan.Candidates", refuse)
    more = table.doubled_loss()
    assert [math.isnan(gain) for gain in more.values()] == [True, True, False]


def test_sizes_of_which_so_many_steps_are_not_known():
    """Are an end, and no lack of privacy."""

    def loss(size, batch, steps, ratio):
        found = 1 + (1e4 / size) ** 0.3 + (1e3 / steps) ** 0.3 + 0 * batch * ratio
        return np.where((size <= 1e5) | (steps <= 500), found, np.nan)

    law = LossModel(loss, (1e4, 1e6), (100, 3200), 16, 0, MEASURED, "made up")
    budget = dataclasses.replace(BUDGET, steps=(1000, 2000), amplification="none")
    plan = Candidates(budget, law).best(math.inf)
    assert plan.ends == {"parameters": "upper", "steps": "upper"}
    assert "parameters are at the upper end of the range, 92,682" in plan.caveats[0]
    large = dataclasses.replace(budget, parameters=(2e5, 1e6))
    with pytest.raises(
        Refused, match="knows so many steps .1000 and more. for no"
    ) as error:
        Candidates(large, law).best(math.inf)
    assert error.value.parameter == "steps"


@pytest.mark.parametrize(
    "users, epsilon, batch",
    [(1e3, 100, None), (10, 100, (10, 10)), (1e9, 1e-3, None), (1e5, 4, (1e5, 1e5))],
)
def test_edges_of_budgets(users, epsilon, batch):
    few = dict(steps=(100, 100), tokens=16, delta=1e-6)
    plan = Candidates(Budget(users, epsilon, batch_size=batch, **few), LAW).best()
    assert math.isfinite(plan.loss) and 1 <= plan.batch_size <= users
    assert plan.noise_multiplier > 0 and 0 <= plan.advantage <= 1
    for changed, message in (
        (dict(users=10, epsilon=1e-3), "epsilon=0.001 with 10 users leaves"),
        (dict(flops=1), "flops=1 is less than the smallest"),
    ):
        budget = Budget(**{"users": users, "epsilon": epsilon, **few, **changed})
        with pytest.raises(Refused, match=message):
            Candidates(budget, LAW).best()


@pytest.mark.parametrize(
    "changed, batch",
    [
        (dict(amplification="poisson"), 101),  # not 1 / k of them
        (dict(amplification="none"), 90),
    ],
)
def test_the_code_runs_as_it_is_and_trains_within_epsilon(changed, batch):
    ends = dict(steps=(100, 100), batch_size=(batch, batch), delta=1e-3, tokens=16)
    plan = Candidates(Budget(200, 8, **ends, **changed), LAW).best(math.inf)
    drawn, sizes = [], []
    model = nn.Linear(4, 2)
    model.register_forward_hook(lambda module, inputs, _: sizes.append(len(inputs[0])))

    class Data(TensorDataset):
        def __getitem__(self, index):
            drawn.append(index)
            return super().__getitem__(index)

    names = dict(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        dataset=Data(torch.randn(200, 4), torch.randint(0, 2, (200,))),
    )
    exec(plan.code(), names)
    assert plan.examples == 200 and set(range(200)) <= set(drawn)
    assert names["optimizer"].expected_batch_size == batch
    mean = len(drawn) / 100
    if not plan.amplified:
        assert mean == pytest.approx(batch, abs=0.1) and "get_epsilon" in plan.code()
        return
    assert abs(mean - batch) < 4 * math.sqrt(batch / 2 / 100)
    engine = names["engine"]
    assert 7.7 < engine.get_epsilon(1e-3) <= 8
    assert engine.accountant.history == [
        (plan.arguments()["noise_multiplier"], batch / 200, 100)
    ]
    json.dumps(plan.as_dict()["make_private"], allow_nan=False)


def test_the_code_for_the_trainer_runs_as_it_is(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    ends = dict(steps=(100, 100), batch_size=(50, 50), delta=1e-3, tokens=16)
    drawn = dict(amplification="poisson", physical_batch_size=30)
    plan = Candidates(Budget(100, 8, **ends, **drawn), LAW).best()
    config = dict(vocab_size=9, n_embd=8, n_layer=1, n_head=1, n_positions=4)
    ends_of_text = dict(bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2Config(**config, **ends_of_text)
    records = [{"input_ids": x, "labels": x} for x in torch.randint(0, 9, (100, 4))]
    names = dict(model=transformers.GPT2LMHeadModel(model), dataset=records)
    exec(plan.trainer_code(), names)
    trainer = names["trainer"]
    assert trainer.state.global_step == 100 and trainer.logical_batch_size == 50
    assert 7.7 < trainer.get_epsilon() <= 8
    for other in (dict(amplification="none"), dict(sampling="records")):
        budget = Budget(100, 8, **ends, **{**drawn, **other})
        with pytest.raises(Refused, match="PrivateTrainer draws Poisson samples"):
            Candidates(budget, LAW).best().trainer_code()


@pytest.mark.parametrize(
    "unigram, learns", [(math.inf, True), (9.0, True), (3.0, False)]
)
def test_a_loss_of_guessing_is_said_to_be_that(unigram, learns):
    law = dataclasses.replace(LAW, unigram=unigram)
    plan = Candidates(dataclasses.replace(BUDGET, flops=1e12), law).best()
    said = [text for text in plan.caveats if "learns hardly anything" in text]
    assert (plan.loss < 0.98 * unigram) == learns == (not said)
    assert all("fine-tune a public model" in text for text in said)


def test_any_batch_size_has_the_noise_of_its_rate():
    """A hair more than a half of the users, which was twice the noise of the half."""
    half, more = (
        noise_of(Budget(1e6, 4), size, 100).noise_multiplier for size in (5e5, 500_001)
    )
    assert half < more < half * (1 + 1e-4)


def test_noise_that_is_too_low_is_raised_or_refused():
    some = Poisson(expected_batch_size=10)
    enough = verified_noise(1.0, some, 1000, 100, 1.03, 1e-5)
    assert enough >= 1.0
    with pytest.raises(Refused, match="finds more"):
        verified_noise(0.5, Poisson(sample_rate=0.5), 1000, 1000, 1.0, 1e-5)


def test_noise_between_the_knots_of_the_lattice():
    for users, epsilon in ((1e6, 0.5), (300, 20)):
        table = Candidates(Budget(users, epsilon, tokens=16), LAW)
        rng = np.random.default_rng(0)
        for _ in range(6):
            j, k = (rng.integers(n) for n in table.ratio.shape)
            exact = noise_of(
                table.budget, table.batch_size[j], table.steps[k]
            ).noise_multiplier
            assert table.noise_multiplier[j, k] == pytest.approx(exact, rel=1.5e-2)


def test_plans_that_the_engine_counts_otherwise_say_so():
    ends = dict(steps=(100, 120), tokens=16, flops=1e11, delta=1e-5)
    for changed, says in (
        (dict(amplification="none"), "get_epsilon does not hold here"),
        (dict(sampling="records", records_per_user=2), "is of one record"),
        (dict(records_per_user=2), "An item of the data set must be a user"),
    ):
        plan = Candidates(Budget(1000, 8, **ends, **changed), LAW).best()
        assert any(says in note for note in plan.notes())
    plain = dict(amplification="poisson")
    assert not Candidates(Budget(1000, 8, **ends, **plain), LAW).best().notes()
