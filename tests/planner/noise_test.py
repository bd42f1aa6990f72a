"""Which noise a run should take: what is left of it, advice, the command, its code."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import opacus_ext  # noqa: F401
from opacus_ext.accountants import calibration
from opacus_ext.accountants.composition import Composition
from opacus_ext.data import CyclicPoisson
from opacus_ext.optimizers import Banded
from opacus_ext.planner import strategies
from opacus_ext.planner.commands.main import main
from opacus_ext.planner.strategies import (
    advice,
    in_memory,
    noise_strategies,
    recommended,
)
from opacus_ext.refused import Refused

RUN = dict(records=2000, batch_size=40, steps=150, epsilon=4.0, delta=1e-4)
ARGS = "plan --noise --users 2000 --epsilon 4 --delta 1e-4 --batch-size 40 --steps 150"


@pytest.fixture(scope="module")
def choices():
    return noise_strategies(**RUN)


def test_all_strategies_spend_the_same(choices):
    """By the accountant, and none wastes more than a thousandth."""
    for choice in choices:
        sampling = CyclicPoisson(bands=choice.parts, expected_batch_size=40)
        accountant = Composition()
        noise = choice.noise_multiplier
        sampling.account(accountant, 2000, noise, 150, choice.strategy)
        assert accountant.get_epsilon(1e-4) == pytest.approx(4, rel=2e-3)
        safe = choice.safe_noise_multiplier(2000, 40, 4.0, 1e-4)
        assert noise <= safe < 1.01 * noise
        assert choice.is_amplified == (choice.strategy.span <= choice.parts)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_shares_are_those_of_independent_noise(momentum):
    independent, *others = noise_strategies(**RUN, momentum=momentum)
    assert independent.is_independent and independent.memory == 0
    assert (independent.prefix, independent.last) == (1, 1)
    alone = calibration.noise_multiplier(4.0, 1e-4, 150, 0.02)
    assert independent.noise_multiplier == pytest.approx(alone)
    matrix = np.cumsum(momentum ** np.arange(150))
    left = alone * np.sqrt(np.cumsum(matrix**2))
    for choice in others:
        errors = choice.noise_multiplier * choice.strategy.errors()
        share = np.linalg.norm(errors) / np.linalg.norm(left)
        assert choice.prefix == pytest.approx(share)
        assert choice.last == pytest.approx(errors[-1] / left[-1])
        assert choice.strategy.momentum == momentum


@pytest.mark.parametrize(
    "changed, kind, memory",
    [
        (dict(epsilon=8.0, steps=50), "BufferedToeplitz", 1),  # one epoch
        (dict(epsilon=8.0, steps=50, momentum=0.9), "LambdaCGD", 0),
        (dict(epsilon=2.0, steps=250), "Banded", 3),
        (dict(epsilon=1.0, batch_size=500), "Banded", 0),  # sampling protects well
    ],
)
def test_what_is_recommended(changed, kind, memory):
    choices = noise_strategies(**{**RUN, **changed})
    best = recommended(choices)
    least = min(choice.prefix for choice in choices)
    assert best.is_independent or best.prefix <= 1.05 * least < 1
    assert (type(best.strategy).__name__, best.memory) == (kind, memory)
    text = advice(choices, 1000)
    shown = "independent noise" if best.is_independent else repr(best.strategy)
    assert text.startswith("Take ") and shown in text


@pytest.mark.parametrize(
    "changed, message",
    [
        (dict(batch_size=3000), "batch_size must be"),
        (dict(steps=0), "steps must be"),
        (dict(delta=0.99, steps=1), "below delta=0.99"),
        (dict(momentum=1.0), "momentum of 1"),
    ],
)
def test_what_can_not_be(changed, message):
    with pytest.raises(Refused, match=message):
        noise_strategies(**{**RUN, **changed})


@pytest.mark.parametrize("most, many, count", [(149, 150, 2), (1, 149, 0)])
def test_long_runs_are_not_searched_for_long(most, many, count, monkeypatch):
    monkeypatch.setattr(strategies, "MOST_STEPS", most)
    monkeypatch.setattr(strategies, "MANY_STEPS", many)
    choices = noise_strategies(**RUN)
    assert sum(not choice.is_amplified for choice in choices) == count


def test_memory_in_words():
    found = [in_memory(*case) for case in ((0, 9), (3, None), (2, 10), (2, 10**10))]
    assert found == ["nothing", "3 x the model", "2 x the model, 80 B"] + [
        "2 x the model, 80 GB"
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("more", ["--epsilon 1 --batch-size 500", "--momentum 0.9", ""])
def test_its_code_trains_within_epsilon(more, capsys):
    assert main(f"{ARGS} {more}".split()) == 0
    out = capsys.readouterr().out
    code = out[out.index("from opacus import") :]
    model = nn.Linear(3, 2)
    names = dict(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        dataset=TensorDataset(torch.randn(2000, 3), torch.randint(2, (2000,))),
        max_grad_norm=1.0,
    )
    exec(code, names)
    for x, y in names["loader"]:
        names["optimizer"].zero_grad()
        names["criterion"](names["model"](x), y).backward()
        names["optimizer"].step()
    epsilon = 1 if "epsilon" in more else 4
    assert 0.98 * epsilon < names["engine"].get_epsilon(1e-4) <= epsilon


@pytest.mark.parametrize("more", ["--batch-size 500 --epsilon 1", ""])
@pytest.mark.thorough
def test_its_code_for_the_trainer(more, capsys):
    assert main(f"{ARGS} {more} --code trainer".split()) == 0
    out = capsys.readouterr().out
    names = dict(max_grad_norm=0.5)
    exec(out[out.index("from opacus_ext") :], names)
    found = names["privacy"]
    best = recommended(noise_strategies(**RUN)).strategy
    assert found.noise == ("independent" if more else best)
    assert (found.target_delta, found.per_sample_max_grad_norm) == (1e-4, 0.5)


def test_for_programs(capsys):
    assert main(f"{ARGS} --json".split()) == 0
    found = json.loads(capsys.readouterr().out)
    names = {choice["name"] for choice in found["choices"]}
    assert {"independent", "Banded, 8 bands", "LambdaCGD"} <= names
    strategy = eval(found["recommended"]["noise"], vars(opacus_ext.optimizers))
    assert strategy in [choice.strategy for choice in noise_strategies(**RUN)]
    assert isinstance(strategy, Banded) or not found["choices"][0]["memory"]


@pytest.mark.parametrize(
    "args, message",
    [
        (ARGS.replace("--steps 150", ""), "give one --steps"),
        (ARGS.replace("--epsilon 4", "--epsilon 1,4"), "give one --epsilon"),
        (f"{ARGS} --sampling records", "Poisson samples of users"),
        (f"{ARGS} --law paper", "leave out --law"),
        ("plan --users 99 --epsilon 1 --momentum 0.5", "goes with --noise"),
        (ARGS + " --trials 10", "leave out --trials"),
        (ARGS + " --gpu h100 --hours 2", "leave out --gpu"),
    ],
)
def test_bad_arguments(args, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(args.split())
    assert stopped.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.thorough
def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "noise.svg"
    assert main([*ARGS.split(), "--plot", str(path)]) == 0
    assert "<svg" in path.read_text() and path.stat().st_size > 20_000
