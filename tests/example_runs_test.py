"""Runs that go on, and what is refused: of opacus-ext recommend and of
examples/finetune.py, on tiny data."""

import json
from unittest.mock import patch

import pytest
import torch

from examples import finetune
from opacus_ext.planner.commands.main import main
from opacus_ext.recommend import training
from tests import finetune_test, train_test
from tests.finetune_test import any_noise, folder  # noqa: F401
from tests.train_test import tiny, weights  # noqa: F401

PROGRAMS = ("train", "finetune")


@pytest.fixture
def programs(folder):  # noqa: F811
    """Each command: given more arguments, and the arguments of its main."""
    return {
        "train": (train_test.run, train_test.arguments),
        "finetune": (
            lambda *more: finetune_test.run(folder, *more),
            lambda *more: finetune_test.arguments(folder, *more),
        ),
    }


# By name: the program, its arguments, where it stops, and the steps at each stop.
RESUMED = {
    "train": ("train", (), "--stop-after-epochs", [3, 6, 9]),
    "average": ("finetune", ("--ema", "0.9"), "--stop-after-steps", [3, 6]),
    "non-private": (
        "finetune",
        ("--non-private", "--checkpoint-every", "2"),
        "--stop-after-steps",
        [2, 4, 6],
    ),
}


def assert_same_run(found, expected, parts, whole, *which):
    for key in expected.keys() - {"seconds"}:
        assert expected[key] == found[key], key
    for name in ("module_state_dict", *which):
        one, two = weights(whole, name), weights(parts, name)
        assert all(torch.equal(one[key], two[key]) for key in one)


@pytest.mark.parametrize("name", RESUMED)
def test_resumed_is_bit_identical(name, programs, tmp_path):
    """Stopped after each part and resumed, against one run in one piece."""
    program, more, stop, steps = RESUMED[name]
    run = programs[program][0]
    whole, parts = (str(tmp_path / part) for part in ("whole", "parts"))
    expected = run(*more, "--checkpoint", whole)
    again = (*more, "--checkpoint", parts, "--resume", "--repeat-noise")
    found = [run(*more, "--checkpoint", parts, stop, "1")]
    while found[-1]["steps"] < expected["steps"]:
        torch.rand(7)  # whatever happens in between
        found.append(run(*again, stop, "1"))
    assert [each["steps"] for each in found] == steps
    average = ["average"] if name == "average" else []
    assert_same_run(found[-1], expected, parts, whole, *average)
    if name != "non-private":
        spent = [each["epsilon_spent"] for each in found]
        assert spent == sorted(set(spent))
        # Resuming a finished run spends nothing.
        assert run(*again)["epsilon_spent"] == expected["epsilon_spent"]


def test_cut_off_between_checkpoints(programs, tmp_path):
    """A crash within epoch 2: its steps are drawn again, and counted once."""
    run = programs["train"][0]
    whole, parts = (str(tmp_path / part) for part in ("whole", "parts"))
    expected = run("--checkpoint", whole)
    original = training.learning_rate

    def fail(step, *args):
        if step == 4:  # the second step of epoch 2
            raise KeyboardInterrupt
        return original(step, *args)

    with patch.object(training, "learning_rate", fail):
        with pytest.raises(KeyboardInterrupt):
            run("--checkpoint", parts)
    found = run("--checkpoint", parts, "--resume", "--repeat-noise")
    assert_same_run(found, expected, parts, whole)


REFUSED = {
    "train": [
        ("--resume --lr 1 --epochs 9", "epochs: 3 .* lr: 0.003"),
    ],
    "finetune": [
        ("--resume --non-private", "non_private: False there, True here"),
        ("--resume --lr 1 --seed 3", "lr: 0.0005 there.* seed: 0 there"),
    ],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_refusals(program, programs, tmp_path):
    run, _ = programs[program]
    path = str(tmp_path / "run")
    stop = RESUMED["train" if program == "train" else "average"][2]
    run("--checkpoint", path, stop, "1")
    for more, message in [
        ("", "Add --resume"),
        ("--resume --epsilon 9", "epsilon: 8.0 there, 9.0 here"),
        *REFUSED[program],
    ]:
        with pytest.raises(ValueError, match=message):
            run("--checkpoint", path, *more.split())
    with pytest.raises(ValueError, match="--resume needs --checkpoint"):
        run("--resume")
    with pytest.raises(OSError):
        run("--resume", "--checkpoint", path + "-missing")
    with pytest.warns(UserWarning, match="above 1/24 rows|not below 1/60 users"):
        run("--delta", "0.1", stop, "1")


def test_refusals_of_other_data(programs, tmp_path):
    with pytest.raises(ValueError, match="--users needs --data"):
        programs["train"][0]("--users", "5")
    run, path = programs["finetune"][0], str(tmp_path / "run")
    run("--checkpoint", path, "--stop-after-steps", "1")
    for name in ("train.tsv", "dev.tsv"):
        (tmp_path / name).write_text("sentence\tlabel\ngood\t1\nbad\t0\n")
    with pytest.raises(ValueError, match="data_fingerprint"):
        run("--checkpoint", path, "--resume", "--data", str(tmp_path))


WRONG = [["--scratch"], ["--epochs", "0"], ["--task", "cola"]]


def test_command_line(programs, tmp_path, capsys):
    arguments = programs["finetune"][1]
    path = tmp_path / "summary.jsonl"
    for more in [(), ("--non-private",)]:
        assert finetune.main(arguments(*more, "--json", str(path))) == 0
    out = capsys.readouterr().out
    found = [json.loads(line)["private"] for line in path.read_text().splitlines()]
    assert found == [True, False]
    assert "privacy      none" in out and "accuracy" in out
    assert "epsilon" in out
    assert finetune.main(arguments("--data", str(tmp_path / "missing"))) == 2
    assert "missing" in capsys.readouterr().err
    for wrong in WRONG:
        with pytest.raises(SystemExit):
            finetune.parse_args([*arguments(), *wrong])
    with pytest.raises(SystemExit):
        finetune.parse_args(["--task", "sst2", "--data", "d"])


def test_command_line_of_recommenders(programs, capsys):
    arguments = programs["train"][1]
    assert main(["recommend", *arguments("--json")]) == 0
    assert json.loads(capsys.readouterr().out)["users"] == 60
