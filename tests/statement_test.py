"""The privacy statement: numbers, runs that prove nothing, checkpoints."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.planner.commands.main import main
from opacus_ext.statement import read_statement, state


def run(accountant="prv", steps=4, batches=4, **kwargs):
    torch.manual_seed(0)
    model, engine = nn.Linear(3, 1), PrivacyEngine(accountant=accountant)
    settings = dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.ones(64, 3)), batch_size=64 // batches
        ),
        max_grad_norm=0.5,
        **kwargs,
    )
    if "target_epsilon" in kwargs:
        made = engine.make_private_with_epsilon(**settings)
    else:
        made = engine.make_private(**{"noise_multiplier": 2.0, **settings})
    model, optimizer, loader = made[0], made[1], made[-1]
    for (x,), _ in zip(loader, range(steps)):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return SimpleNamespace(engine=engine, model=model, optimizer=optimizer)


def strict(text):
    def refuse(constant):
        raise AssertionError(constant)

    return json.loads(text, parse_constant=refuse)


def test_numbers_are_those_of_the_accountant():
    made = run(clipping="flat")
    statement = made.engine.privacy_statement(delta=1e-3, unit="user")
    content = strict(statement.json())
    other = PRVBoundsAccountant()
    other.history = [(2.0, 0.25, 4)]
    bounds = other.get_bounds(1e-3)
    assert content["epsilon"] == made.engine.get_epsilon(1e-3)
    assert content["epsilon_lower"] == bounds.lower <= content["epsilon"]
    assert content["epsilon_upper"] == bounds.upper
    assert content["holds"] == "yes"
    assert content["neighboring_relation"] == "add or remove one"
    assert (content["unit"], content["records"], content["steps"]) == ("user", 64, 4)
    assert content["phases"] == [
        {
            "sampling": "poisson",
            "sample_rate": 0.25,
            "noise_multiplier": 2.0,
            "steps": 4,
        }
    ]
    (made_private,) = content["runs"]
    assert made_private["clipping"] == "flat" and made_private["max_grad_norm"] == 0.5
    assert made_private["sensitivity"] == 0.5 and not made_private["secure_mode"]
    assert content["versions"]["torch"] == torch.__version__
    shown = math.ceil(content["epsilon"] * 100) / 100
    text = str(statement)
    assert f"are ({shown:.2f}, 0.001)-differentially private for one user." in text
    assert "| unit | user |\n| records | 64 |" in text
    assert "What it does not cover" in text
    assert "Hyperparameters" in text and "opacus_ext" in text


@pytest.mark.parametrize("accountant", ["prv", "rdp", "prv_bounds"])
def test_bounds_hold_what_the_accountant_says(accountant):
    content = run(accountant).engine.privacy_statement(1e-3).content
    assert content["epsilon_lower"] <= content["epsilon"]
    assert content["accountant"] == accountant
    loose = accountant == "rdp"
    assert (content["epsilon"] > 1.05 * content["epsilon_upper"]) == loose


def test_a_schedule_of_the_noise_is_cut_in_the_table():
    accountant = PRVBoundsAccountant()
    accountant.history = [(2 + i / 10, 0.1, 3) for i in range(20)]
    statement = state(accountant, [], 1e-3, "record")
    assert len(statement.content["phases"]) == 20
    text = "| sampling poisson, sample rate 0.1, noise multiplier 2.7, steps 3 |"
    assert text in statement.text and "12 more, in the JSON" in statement.text
    assert statement.text.count("sampling and noise") == 9


def test_shuffled_batches_prove_nothing():
    statement = run(poisson_sampling=False).engine.privacy_statement(1e-3)
    content = strict(statement.json())
    assert content["holds"] == "no"
    assert content["epsilon"] is content["epsilon_upper"] is None
    assert content["epsilon_if_poisson"] > 0
    assert "No guarantee is known for the weights after 4 steps." in statement.text


def test_a_loader_that_draws_by_itself_counts_as_poisson():
    from opacus.data_loader import DPDataLoader

    loader = DPDataLoader(TensorDataset(torch.ones(64, 3)), sample_rate=0.25)
    made = run(steps=0)
    made.engine.make_private(
        module=made.model,
        optimizer=made.optimizer,
        data_loader=loader,
        noise_multiplier=2.0,
        max_grad_norm=0.5,
        poisson_sampling=False,
    )
    runs = made.engine.privacy_statement(1e-3).content["runs"]
    assert [run["sampling"]["scheme"] for run in runs] == ["poisson"]


def test_without_noise_or_steps():
    statement = run(noise_multiplier=0.0).engine.privacy_statement(1e-3)
    content = strict(statement.json())
    assert content["holds"] == "no" and content["epsilon"] is None
    assert content["epsilon_if_poisson"] is None
    assert "too little noise" in statement.text
    content = run(steps=0).engine.privacy_statement(1e-3).content
    assert content["epsilon"] == 0 and "No step was taken" in content["notes"][0]


def test_an_accountant_that_says_too_little_is_not_believed():
    accountant = create_accountant("gdp")
    accountant.history = [(0.5, 0.01, 1000)]
    content = state(accountant, [], 1e-6, "record").content
    assert content["epsilon"] == content["epsilon_upper"]
    assert accountant.get_epsilon(1e-6) < content["epsilon_lower"]
    assert "'gdp' says" in content["notes"][0]
    assert content["holds"].startswith("if every batch")


def test_delta_is_that_of_the_run_or_asked_for():
    made = run("prv_bounds", target_epsilon=3.0, target_delta=1e-3, epochs=1)
    assert made.engine.privacy_statement().content["delta"] == 1e-3
    assert made.engine.privacy_statement(1e-4).content["delta"] == 1e-4
    with pytest.raises(Refused, match="64 records: below 0.02"):
        run().engine.privacy_statement()
    for delta in (0, 1.0, -1e-5):
        with pytest.raises(Refused, match="delta must be a number, below 1"):
            run().engine.privacy_statement(delta)
    (note,) = run().engine.privacy_statement(0.1).content["notes"]
    assert "not below one over 64 records" in note


# -- files -----------------------------------------------------------------------------


def test_a_checkpoint_says_the_same(tmp_path, capsys):
    made = run("prv_bounds", target_epsilon=3.0, target_delta=1e-3, epochs=1)
    path = tmp_path / "run.pt"
    made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    expected = made.engine.privacy_statement()
    assert read_statement(path).content == expected.content
    assert main(["statement", str(path)]) == 0
    assert capsys.readouterr().out.strip() == expected.text.strip()
    assert main(["statement", str(path), "--json", "--delta", "1e-5"]) == 0
    assert strict(capsys.readouterr().out)["delta"] == 1e-5


def test_a_run_that_goes_on_keeps_what_it_was(tmp_path):
    made = run()
    path = tmp_path / "run.pt"
    made.engine.save_checkpoint(path=path, module=made.model, optimizer=made.optimizer)
    for bound, count in ((0.5, 1), (0.25, 2)):
        other = run(steps=0)
        if bound == 0.25:
            other = run(steps=0, clipping="automatic", grad_sample_mode="hooks")
        other.engine.load_checkpoint(
            path=path, module=other.model, optimizer=other.optimizer
        )
        content = other.engine.privacy_statement(1e-3).content
        assert len(content["runs"]) == count and content["steps"] == 4


def test_a_checkpoint_of_plain_opacus(tmp_path):
    made = run()
    path = tmp_path / "run.pt"
    torch.save(
        {
            "module_state_dict": made.model.state_dict(),
            "privacy_accountant_state_dict": made.engine.accountant.state_dict(),
        },
        path,
    )
    statement = read_statement(path, 1e-3)
    assert statement.content["holds"].startswith("if every batch")
    assert "if every batch was drawn by Poisson sampling." in statement.text
    assert statement.content["epsilon"] == made.engine.get_epsilon(1e-3)


@pytest.mark.parametrize("poisson", [True, False])
def test_a_folder_of_the_trainer(tmp_path, poisson, capsys):
    accountant = create_accountant("prv")
    accountant.history = [(1.5, 0.1, 20)]
    config = dict(
        target_delta=1e-4,
        target_epsilon=None,
        per_sample_max_grad_norm=0.25,
        clipping="flat",
        grad_sample_mode="auto",
        poisson_sampling=poisson,
        records=500,
    )
    saved = dict(
        config=config, accountant=accountant.state_dict(), noise_multiplier=1.5
    )
    torch.save(saved, tmp_path / "privacy.pt")
    assert main(["statement", str(tmp_path), "--json"]) == (0 if poisson else 1)
    content = strict(capsys.readouterr().out)
    assert (content["holds"] == "yes") == poisson
    assert (content["delta"], content["records"]) == (1e-4, 500)
    found = content["epsilon" if poisson else "epsilon_if_poisson"]
    assert found == accountant.get_epsilon(1e-4)
    assert content["runs"][0]["max_grad_norm"] == 0.25
    # Lightning has the same in the state of a callback.
    torch.save({"callbacks": {"other": {}, "mine": saved}}, tmp_path / "last.ckpt")
    assert read_statement(tmp_path / "last.ckpt").content == content


def test_files_that_cannot_be_used(tmp_path, capsys):
    path = tmp_path / "other.pt"
    torch.save({"weights": torch.ones(3)}, path)
    with pytest.raises(Refused, match="no accountant's history that can be used"):
        read_statement(path)
    path.write_text("not a checkpoint")
    with pytest.raises(Refused, match="can't be read: it was cut short"):
        read_statement(path)
    torch.save({"privacy_accountant_state_dict": {"mechanism": "other"}}, path)
    with pytest.raises(Refused, match="history that can be used"):
        read_statement(path)
    for wrong in (path, tmp_path / "missing.pt", tmp_path):
        with pytest.raises(SystemExit):
            main(["statement", str(wrong)])
        assert "opacus-ext statement: error:" in capsys.readouterr().err
