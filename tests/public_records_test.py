"""The number of records: what is released with one record more, and what is said."""

import math
import warnings

import numpy as np
import opacus
import pytest
import torch
from lightning import LightningModule, Trainer
from scipy.stats import chi2
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import TrainingArguments

import opacus_ext
from opacus_ext import Refused, misuse
from opacus_ext.data import CyclicPoisson, Poisson
from opacus_ext.lightning import PrivacyCallback
from opacus_ext.optimizers import Banded
from opacus_ext.runs import runs_of
from opacus_ext.statement import read_statement
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

# 100 is a multiple of the batch size: one record more is another batch of an epoch.
NUMBERS = 100, 101
BY_HAND = {"sample_rate": 0.1, "expected_batch_size": 9.5, "steps": 10}


def data(records):
    return TensorDataset(torch.randn(records, 5), torch.randint(0, 2, (records,)))


def run(records, kind=opacus_ext.PrivacyEngine, budget=False, secure=False, **settings):
    """Returns what a run releases beside its weights, and its statement."""
    torch.manual_seed(0)
    model, engine = nn.Linear(5, 2), kind(secure_mode=secure)
    make, noise = engine.make_private, {"noise_multiplier": 1.0}
    if budget:
        make = engine.make_private_with_epsilon
        noise = {"target_epsilon": 8.0, "target_delta": 1e-4, "epochs": 1}
    _, optimizer, *_, loader = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(records), batch_size=10),
        max_grad_norm=1.0,
        **noise,
        **settings,
    )
    rate = loader.batch_sampler.sample_rate
    std = optimizer.noise_multiplier / optimizer.expected_batch_size
    released = optimizer.expected_batch_size, rate, len(loader), std
    return released, engine.privacy_statement(1e-4)


@pytest.mark.parametrize("kind", [opacus_ext.PrivacyEngine, opacus.PrivacyEngine])
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize(
    "settings, size",
    [
        ({"public_records": 90}, 10),
        ({"public_records": 95}, 9.5),
        ({"public_records": 90, "expected_batch_size": 12.5}, 12.5),
        ({"public_records": 90, "budget": True}, 10),
        ({"public_records": 90, "budget": True, "expected_batch_size": 8}, 8),
        ({"sampling": Poisson(**BY_HAND)}, 9.5),
        ({"sampling": Poisson(sample_rate=0.1), "expected_batch_size": 8}, 8),
    ],
)
def test_neighbors_release_the_same_numbers(kind, mode, settings, size):
    (one, told), (other, also) = (
        run(n, kind, grad_sample_mode=mode, **settings) for n in NUMBERS
    )
    assert one == other and one[0] == size
    relation = "neighboring_relation"
    assert told.content[relation] == also.content[relation] == "add or remove one"
    assert told.content["records"] == also.content["records"]
    assert "number of records" not in told.text.split("not cover")[1]
    ours = told.content["runs"][0]["sampling"]
    assert ours["expected_batch_size"] == size and ours["sample_rate"] == one[1]


def test_secure_mode_and_correlated_noise_take_it_too():
    for settings in ({"secure": True}, {"noise": Banded(2, steps=9)}):
        one, other = (run(n, public_records=90, **settings)[0] for n in NUMBERS)
        assert one == other
    cyclic = {"sampling": CyclicPoisson(bands=2, **BY_HAND), "noise": Banded(2, 9)}
    assert run(100, **cyclic)[0] == run(101, **cyclic)[0]


@pytest.mark.parametrize("budget", [False, True])
def test_by_default_the_number_counts_as_public(budget):
    """The divisor is Opacus's, and the statement says for whom epsilon holds."""
    for n in NUMBERS:
        (size, *_), told = run(n, budget=budget)
        assert size == n // math.ceil(n / 10)
        assert told.content["neighboring_relation"] == "replace one by nothing"
        assert told.content["records"] == n
        assert "the number of records counts as public" in told.text
    (size, *_), told = run(100, expected_batch_size=12.5, budget=budget)
    assert size == 12.5
    assert told.content["neighboring_relation"] == "replace one by nothing"


def test_the_true_number_counts_as_public():
    for settings in ({}, {"expected_batch_size": 12.5}):
        _, told = run(100, public_records=100, **settings)
        assert told.content["neighboring_relation"] == "replace one by nothing"


def test_the_divisor_alone_also_divides_what_is_not_drawn():
    assert run_shuffled().expected_batch_size == 8


def run_shuffled():
    model = nn.Linear(5, 2)
    return opacus_ext.PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data(100), batch_size=10),
        max_grad_norm=1.0,
        noise_multiplier=1.0,
        poisson_sampling=False,
        expected_batch_size=8,
    )[1]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"public_records": 0}, "public_records must be a whole number"),
        ({"public_records": 9.5}, "public_records must be a whole number"),
        ({"public_records": 9, "sampling": Poisson(sample_rate=0.1)}, "both say"),
        ({"public_records": 90, "poisson_sampling": False}, "Leave one of them"),
        ({"expected_batch_size": 0}, "expected_batch_size must be a number"),
        ({"expected_batch_size": 0, "public_records": 9}, "must be a number"),
        (
            {"expected_batch_size": 9, "sampling": Poisson(expected_batch_size=9)},
            "Leave it out here",
        ),
    ],
)
@pytest.mark.parametrize("budget", [False, True])
def test_what_is_refused(settings, message, budget):
    with pytest.raises(Refused, match=message):
        run(100, budget=budget, **settings)


def test_the_warning_comes_once_in_a_process(monkeypatch):
    monkeypatch.setattr(misuse, "PROCESS", misuse._Process())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(100, public_records=90)
        run_shuffled()
        assert not [w for w in caught if "public_records" in str(w.message)]
        run(100), run(101)
    (told,) = [w for w in caught if "public_records" in str(w.message)]
    assert told.filename == __file__


def test_scales_of_noise_are_told_apart():
    """The formula of docs/how-to/accounting.md, against samples."""
    numbers, size, other = 40, 10, 9
    ratio = (size / other) ** 2
    threshold = numbers * math.log(ratio) / (1 - 1 / ratio)
    exact = chi2.cdf(threshold, numbers) - chi2.cdf(threshold / ratio, numbers)
    draws = np.random.default_rng(0).standard_normal((200_000, numbers))
    squares = (draws**2).sum(1)
    found = (squares < threshold).mean() - (squares * ratio < threshold).mean()
    assert found == pytest.approx(exact, abs=0.005)
    assert exact == pytest.approx(math.sqrt(numbers / math.pi) / size, rel=0.1)


def trained(records, folder, **settings):
    """What a run of PrivateTrainer releases beside its weights, and its statement."""
    inputs = torch.randn(records, 5)
    trainer = PrivateTrainer(
        Classifier(),
        TrainingArguments(
            str(folder),
            per_device_train_batch_size=10,
            num_train_epochs=1,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=[{"x": x, "labels": 1} for x in inputs],
        privacy=PrivacyArguments(target_delta=1e-4, target_epsilon=8, **settings),
    )
    trainer.train()
    optimizer = trainer._training.optimizer
    released = optimizer.expected_batch_size, optimizer.noise_multiplier
    return (*released, trainer.state.global_step), trainer


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, x, labels):
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def test_private_trainer_takes_it(tmp_path):
    one, trainer = trained(100, tmp_path, public_records=90)
    other, _ = trained(101, tmp_path, public_records=90)
    assert one == other and one[::2] == (10, 9)
    (_, rate, steps), *more = trainer.engine.accountant.history
    assert (rate, steps, more) == (10 / 90, 9, [])
    trainer.save_model()
    content = read_statement(tmp_path).content
    assert content["neighboring_relation"] == "add or remove one"
    _, trainer = trained(101, tmp_path)
    content = trainer.privacy_statement().content
    assert content["neighboring_relation"] == "replace one by nothing"
    with pytest.raises(Refused, match="public_records"):
        PrivacyArguments(target_delta=1e-4, target_epsilon=8, public_records=0.5)


class Lit(LightningModule):
    def __init__(self):
        super().__init__()
        self.linear, self.criterion = nn.Linear(5, 2), nn.CrossEntropyLoss()

    def forward(self, x):
        return self.linear(x)

    def training_step(self, batch, index):
        return self.criterion(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fitted(records, limit=1.0, **settings):
    """What a run of Lightning releases beside its weights, and its callback."""
    privacy = PrivacyCallback(target_delta=1e-4, target_epsilon=8, **settings)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"logger": False, "enable_checkpointing": False, "accelerator": "cpu"}
    trainer = Trainer(
        max_epochs=2, limit_train_batches=limit, callbacks=[privacy], **quiet
    )
    trainer.fit(Lit(), DataLoader(data(records), batch_size=10, shuffle=True))
    optimizer = privacy._training.optimizer
    released = optimizer.expected_batch_size, optimizer.noise_multiplier
    return (*released, trainer.global_step), privacy


@pytest.mark.parametrize(
    "settings, steps",
    [
        ({"public_records": 90}, 18),
        ({"public_records": 90, "limit": 0.5}, 8),
        ({"sampling": Poisson(**BY_HAND)}, 20),
    ],
)
def test_lightning_takes_it(settings, steps):
    one, privacy = fitted(100, **settings)
    other, _ = fitted(101, **settings)
    assert one == other and one[2] == steps
    assert privacy.get_epsilon() == pytest.approx(8, abs=0.02)
    content = privacy.privacy_statement().content
    assert content["neighboring_relation"] == "add or remove one"


def test_lightning_counts_the_number_as_public_by_default():
    content = fitted(101)[1].privacy_statement().content
    assert content["neighboring_relation"] == "replace one by nothing"
    with pytest.raises(Refused, match="both say"):
        fitted(100, public_records=90, sampling=Poisson(**BY_HAND))


def test_steps_of_plain_opacus_keep_their_condition(tmp_path):
    """A run that goes on from them does not know how they were drawn."""
    path, engines = tmp_path / "plain.pt", [
        opacus_ext.PrivacyEngine() for _ in range(2)
    ]
    engines[0].accountant.history = [(1.0, 0.1, 10)]
    model = nn.Linear(3, 2)
    engines[0].save_checkpoint(path=path, module=nn.Sequential())
    content = torch.load(path)
    for name in [name for name in content if name.startswith("opacus_ext")]:
        del content[name]
    torch.save(content, path)
    given = dict(max_grad_norm=1.0, noise_multiplier=1.0, public_records=90)
    records = TensorDataset(torch.randn(100, 3))
    made = engines[1].make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records, batch_size=10),
        **given,
    )
    engines[1].load_checkpoint(path=path, module=nn.Sequential())
    engines[1].save_checkpoint(path=path, module=made[0])
    for statement in (
        engines[1].privacy_statement(1e-3),
        read_statement(path, 1e-3),
    ):
        content = statement.content
        assert content["holds"].startswith("if every batch")
        assert content["neighboring_relation"] == "replace one by nothing"


def test_correlated_noise_for_a_budget_knows_the_rate_from_the_data():
    model, engine = nn.Linear(3, 2), opacus_ext.PrivacyEngine()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(100, 3)), batch_size=10),
        target_epsilon=3.0,
        target_delta=1e-3,
        epochs=2,
        max_grad_norm=1.0,
        noise="banded",
        expected_batch_size=8,
    )
    assert not runs_of(engine)[0]["records_are_private"]


def test_numbers_of_numpy():
    """Statements hold plain ones."""
    sampling = Poisson(sample_rate=np.float32(0.5), steps=10.0, public_records=90.0)
    assert {type(x) for x in vars(sampling).values()} == {float, int}
    assert sampling.steps_per_epoch(100) == 10 and type(sampling.steps) is int
    assert (
        type(
            PrivacyArguments(
                target_epsilon=1, target_delta=1e-3, public_records=np.int64(90)
            ).public_records
        )
        is int
    )
    with pytest.raises(Refused, match="of 100 records.*at most 100"):
        Poisson(public_records=100, expected_batch_size=200).check(250)
    with pytest.raises(Refused, match="a sample_rate of at most 1"):
        Poisson(sample_rate=1.5).check(250)
