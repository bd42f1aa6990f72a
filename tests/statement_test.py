"""The privacy statement: numbers, runs that prove nothing, checkpoints."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import opacus_ext
from opacus_ext import Refused, UserRecords
from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.data.users import unit_of
from opacus_ext.optimizers import Banded
from opacus_ext.planner.commands.main import main
from opacus_ext.runs import ACCOUNTANT, runs_of, spent_by
from opacus_ext.statement import read_statement, state


def run(accountant="prv_bounds", steps=4, batches=4, data=None, model=None, **kwargs):
    torch.manual_seed(0)
    model, engine = model or nn.Linear(3, 1), PrivacyEngine(accountant=accountant)
    data = data or TensorDataset(torch.ones(64, 3))
    settings = dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=64 // batches),
        max_grad_norm=0.5,
        **kwargs,
    )
    if "target_epsilon" in kwargs:
        made = engine.make_private_with_epsilon(**settings)
    else:
        made = engine.make_private(**{"noise_multiplier": 2.0, **settings})
    optimizer, loader = made[1], made[-1]
    net = made[0] if kwargs.get("wrap_model", True) else model
    for (x,), _ in zip(loader, range(steps)):
        optimizer.zero_grad()
        net(x).mean().backward()
        optimizer.step()
    return SimpleNamespace(engine=engine, model=made[0], optimizer=optimizer)


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
    assert content["epsilon"] == other.get_epsilon(1e-3)
    assert content["accountant"] == "prv_bounds" and content["holds"] == "yes"
    assert content["neighboring_relation"] == "replace one by nothing"
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
    assert "| unit of privacy | one user |\n| number of users | 64 |" in text
    assert f"| epsilon | {shown:.2f}, an upper bound |" in text
    assert "each draws every user with probability 0.25" in text
    assert "What it does not cover" in text
    assert "hyperparameters" in text and "opacus_ext" in text


SAID = {
    "prv_bounds": None,
    "prv": None,
    "rdp": 'epsilon 0.99, by the accountant "rdp", whose bound is less close',
    "gdp": 'epsilon 0.64, by the accountant "gdp", which approximates',
}


@pytest.mark.parametrize("accountant", SAID)
def test_one_epsilon_whichever_accountant_the_engine_has(accountant):
    statement = run(accountant).engine.privacy_statement(1e-3)
    assert "are (0.79, 0.001)-differentially private" in statement.text
    assert "| accountant | prv_bounds of opacus_ext" in statement.text
    notes = statement.content["notes"]
    assert len(notes) == (SAID[accountant] is not None)
    assert all(SAID[accountant] in note for note in notes)


# dp-accounting 0.6.0: the larger epsilon of an addition and a removal, by its PLD with
# an interval of 1e-4. noise, rate, steps, delta, epsilon
PLD = [
    (1.0, 0.01, 1000, 1e-5, 1.828243645591767),
    (1.1, 256 / 60000, 3000, 1e-5, 1.0439395813571033),
    (2.0, 0.25, 40, 1e-3, 2.692044559740215),
    (0.8, 0.02, 300, 1e-5, 3.7874306490529595),
    (3.0, 1.0, 10, 1e-5, 4.652984570661137),
    (0.54, 0.25, 4, 1e-3, 7.928221178178173),
]


@pytest.mark.parametrize("noise, rate, steps, delta, expected", PLD)
def test_epsilon_is_that_of_other_software(noise, rate, steps, delta, expected):
    accountant = create_accountant("prv_bounds")
    accountant.history = [(noise, rate, steps)]
    epsilon = state(accountant, [], delta).content["epsilon"]
    assert expected - 1e-6 < epsilon < expected + 1e-3


class Counts(PRVBoundsAccountant):
    """An accountant of a user, which may count more than its history has."""

    more = 0.0

    @classmethod
    def mechanism(cls):
        return "counts"

    def get_epsilon(self, delta, **kwargs):
        return super().get_epsilon(delta) + self.more


@pytest.mark.parametrize("more", [1.0, -0.1])
def test_an_accountant_of_a_user(more):
    accountant = Counts()
    accountant.history, accountant.more = [(2.0, 0.25, 4)], more
    content = state(accountant, [], 1e-3).content
    least = accountant.get_epsilon(1e-3) - more
    assert content["epsilon"] == pytest.approx(least + max(more, 0))
    assert content["accountant"] == ("counts" if more > 0 else "prv_bounds")
    assert any("less than what holds" in x for x in content["notes"]) == (more < 0)


UNITS = {
    "record": "records",
    "author": "authors",
    "company": "companies",
    "bus": "buses",
}


@pytest.mark.parametrize("unit", UNITS)
def test_the_unit_is_that_of_the_data(unit):
    """Of UserRecords, also in a part of it; a data set of records has no other."""
    records = TensorDataset(torch.ones(128, 3))
    data = UserRecords(records, torch.arange(128) % 64, unit=unit)
    for part, number in ((data, 64), (Subset(data, range(32)), 32)):
        made = run(data=part, steps=1)
        statement = made.engine.privacy_statement(1e-3)
        assert f"private for one {unit}." in statement.text
        assert f"| number of {UNITS[unit]} | {number} |" in statement.text
    assert unit_of(UserRecords(records, torch.arange(128) % 64)) == "user"
    assert unit_of(Subset(records, [3, 4])) == "record"
    other = made.engine.privacy_statement(1e-3, unit="patient").text
    assert "| number of patients | 32 |" in other and f"{unit} " not in other


def test_runs_on_users_and_on_records_protect_neither():
    """A record less of a user changes a gradient by up to twice the bound."""
    data = UserRecords(TensorDataset(torch.ones(128, 3)), torch.arange(128) % 64)
    engines = [run(data=data), run()]
    runs = [entry for each in engines for entry in runs_of(each.engine)]
    mixed = engines[0].engine.accountant, runs, 1e-3
    content = state(*mixed).content
    assert content["holds"] == "no" and content["epsilon_if_poisson"] is None
    assert "Some steps protect one record, others one user" in content["notes"][0]
    assert state(*mixed, "patient").content["holds"] == "yes"
    for runs in (mixed[1], mixed[1][:1]):
        with pytest.raises(Refused, match="one user with all of their records.*Leave"):
            state(mixed[0], runs, 1e-3, "record")


OTHERS = {
    "batches": (dict(poisson_sampling=False), "Batches were not drawn by Poisson"),
    "unit": (
        dict(data=UserRecords(TensorDataset(torch.ones(128, 3)), [*range(64)] * 2)),
        "others one user",
    ),
    "none": ({}, "4 steps of other engines"),
    "no step": (dict(poisson_sampling=False, steps=0), None),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_conditions_of_other_engines_hold_too(name, tmp_path):
    """Engines that have trained the same parameters; also from a checkpoint."""
    settings, note = OTHERS[name]
    model = nn.Linear(3, 1)
    run(model=model, wrap_model=False, **settings).model.cleanup()
    made = run(model=model, wrap_model=False)
    path = tmp_path / "run.pt"
    made.engine.save_checkpoint(path=path, module=model)
    for found in (made.engine.privacy_statement(1e-3), read_statement(path, 1e-3)):
        content = found.content
        assert (content["holds"] == "no") == (name in ("batches", "unit"))
        assert (
            any(note in x for x in content["notes"]) if note else not content["notes"]
        )


@pytest.mark.parametrize(
    "accountant, batches", [("prv_bounds", 3), ("prv_bounds", 75), ("rdp", 75)]
)
def test_a_target_is_kept(accountant, batches):
    """Also with 75 batches, where Opacus plans 224 steps: 3 / (1 / 75) < 225."""
    records = TensorDataset(torch.ones(2 * batches, 3))
    model, engine = nn.Linear(3, 1), PrivacyEngine(accountant=accountant)
    *_, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=2),
        max_grad_norm=1.0,
        target_epsilon=20.0,
        target_delta=1e-3,
        epochs=3,
    )
    noise = runs_of(engine)[0]["noise_multiplier"]
    engine.accountant.history = [(noise, 1 / batches, 3 * len(loader))]
    assert 19.98 < engine.get_epsilon(1e-3) <= 20.0
    stated = engine.privacy_statement().content["epsilon"]
    assert stated <= 20.0 and (stated > 19.98) == (accountant == "prv_bounds")


@pytest.mark.parametrize("mechanism", ["prv_bounds", "prv", "rdp", "gdp"])
def test_epsilon_is_a_plain_number(mechanism):
    made = run(mechanism)
    assert type(made.engine.get_epsilon(1e-3)) is float
    assert type(made.engine.privacy_statement(1e-3).content["epsilon"]) is float
    assert type(run(mechanism, steps=0).engine.get_epsilon(1e-3)) is float


def test_default_accountants():
    """Programs for Opacus load checkpoints that its default accountant has written."""
    made = opacus_ext.PrivacyEngine(), opacus_ext.PrivacyEngine(secure_mode=True)
    assert {engine.accountant.mechanism() for engine in made} == {"prv_bounds"}
    assert PrivacyEngine().accountant.mechanism() == "prv"
    assert PrivacyEngine(accountant="rdp").accountant.mechanism() == "rdp"


def test_a_schedule_of_the_noise_is_cut_in_the_table():
    accountant = PRVBoundsAccountant()
    accountant.history = [(2 + i / 10, 0.1, 3) for i in range(20)]
    statement = state(accountant, [], 1e-3)
    assert len(statement.content["phases"]) == 20
    assert "| steps | 3 with noise multiplier 2.7; each draws every" in statement.text
    assert "12 rows more, in the JSON" in statement.text
    assert statement.text.count("| steps |") == 9


def test_shuffled_batches_prove_nothing():
    statement = run(poisson_sampling=False).engine.privacy_statement(1e-3)
    content = strict(statement.json())
    assert content["holds"] == "no"
    assert content["epsilon"] is None and content["epsilon_if_poisson"] > 0
    assert "no bound for this run" in statement.text
    assert "an upper bound" not in statement.text
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
    statement = run(steps=0).engine.privacy_statement(1e-3)
    assert statement.content["epsilon"] == 0
    assert statement.text.count("No step was taken: nothing was spent.") == 1


def test_correlated_noise_is_counted_by_rounds():
    text = run(noise=Banded(2, steps=8)).engine.privacy_statement(1e-3).text
    assert "After 2 rounds of 2 steps the weights are" in text
    assert "| rounds | 2 with noise multiplier 2; each draws every" in text
    assert "all others keep their places" in text


def test_an_accountant_that_says_too_little_is_not_believed():
    accountant = create_accountant("gdp")
    accountant.history = [(0.5, 0.01, 1000)]
    content = state(accountant, [], 1e-6).content
    assert accountant.get_epsilon(1e-6) < 0.9 * content["epsilon"]
    assert "is no bound" in content["notes"][0]
    assert content["holds"].startswith("if every batch")


def test_delta_is_that_of_the_run_or_asked_for():
    made = run("prv_bounds", target_epsilon=3.0, target_delta=1e-3, epochs=1)
    assert made.engine.privacy_statement().content["delta"] == 1e-3
    assert made.engine.privacy_statement(1e-4).content["delta"] == 1e-4
    with pytest.raises(Refused, match=r"number of records \(64\), such as 0.01"):
        run().engine.privacy_statement()
    for delta in (0, 1.0, -1e-5):
        with pytest.raises(Refused, match="delta must be a number, below 1"):
            run().engine.privacy_statement(delta)
    (note,) = run("prv_bounds").engine.privacy_statement(0.1).content["notes"]
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
    made = run("prv")
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


def spent(steps=20, secret=(), **settings):
    """What a folder of PrivateTrainer has, after some steps."""
    engine = run("prv_bounds", steps=0, **settings).engine
    engine.accountant.history = [(1.5, 0.1, steps)]
    runs_of(engine)[-1]["target_delta"] = 1e-4
    return {**spent_by(engine), **dict(secret)}


def written(folder, content):
    folder.mkdir(parents=True)
    (folder / "privacy.json").write_text(json.dumps(content))


@pytest.mark.parametrize("poisson", [True, False])
def test_folders_of_the_trainer(tmp_path, poisson, capsys):
    """By save_model, a checkpoint, output_dir; and Lightning's callback has the same"""
    content = spent(poisson_sampling=poisson)
    for number in (5, 20, 9):
        written(tmp_path / f"checkpoint-{number}", spent(number))
    written(tmp_path / "checkpoint-100", content)
    (tmp_path / "checkpoint-200").mkdir()  # with save_only_model, of another Trainer
    for path in (tmp_path / "checkpoint-100", tmp_path):
        assert main(["statement", str(path), "--json"]) == (0 if poisson else 1)
        out, err = capsys.readouterr()
        assert ("checkpoint-100" in err) == (path == tmp_path)
        found = strict(out)
        assert (found["holds"] == "yes") == poisson
        assert (found["delta"], found["records"], found["steps"]) == (1e-4, 64, 20)
    written(tmp_path / "model", spent(3))
    assert read_statement(tmp_path / "model").content["steps"] == 3
    secret = {"noise": torch.ones(3), "seed": 7}
    callbacks = {"other": {}, "mine": {**content, **secret}}
    torch.save({"callbacks": callbacks}, tmp_path / "last.ckpt")
    assert read_statement(tmp_path / "last.ckpt").content == found


WRONG = {
    "weights.pt": (lambda path: torch.save({"weights": torch.ones(3)}, path), "spent"),
    "list.pt": (lambda path: torch.save([1, 2], path), "spent"),
    "text.md": (lambda path: path.write_text("not a checkpoint"), "can't be read"),
    "dot.txt": (lambda path: path.write_text("."), "can't be read"),
    "empty": (lambda path: path.write_text(""), "can't be read"),
    "cut.json": (lambda path: path.write_text('{"opacus_ext_'), "no JSON"),
    "other.json": (lambda path: path.write_text("[1, 2]"), "spent"),
    "accountant.pt": (
        lambda path: torch.save({ACCOUNTANT: {"mechanism": "other"}}, path),
        "spent",
    ),
    "folder": (lambda path: path.mkdir(), "The folder .* has no privacy.json"),
}


@pytest.mark.parametrize("name", WRONG)
def test_files_that_cannot_be_used(name, tmp_path, capsys):
    write, match = WRONG[name]
    write(tmp_path / name)
    with pytest.raises(Refused, match=match):
        read_statement(tmp_path / name)
    for wrong in (tmp_path / name, tmp_path / "missing.pt"):
        with pytest.raises(SystemExit):
            main(["statement", str(wrong)])
        assert "opacus-ext statement: error:" in capsys.readouterr().err


def test_a_checkpoint_does_not_speak_for_other_weights(tmp_path):
    """The weights in output_dir may have taken more steps than those of it."""
    written(tmp_path / "checkpoint-9", spent(9))
    (tmp_path / "training_args.bin").write_bytes(b"")
    assert read_statement(tmp_path).content["steps"] == 9
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(Refused, match="it has model.safetensors.*pass .*checkpoint-9"):
        read_statement(tmp_path)


def test_a_folder_of_others_says_what_it_has(tmp_path):
    (tmp_path / "epoch=3.ckpt").write_bytes(b"")
    with pytest.raises(Refused, match="it has epoch=3.ckpt"):
        read_statement(tmp_path)
