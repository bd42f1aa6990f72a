"""PrivacyCallback: Lightning's training equals the oracle's, and goes on as it was.

The oracle (training.py) takes the draws of the same seed, and steps with the same
optimizer and schedule in float64.
"""

import pytest
import torch
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from opacus_ext.accountants.mechanisms import Allocated, Binned
from opacus_ext.data import BallsInBins, RandomAllocation
from opacus_ext.optimizers import AdamBC, ScaledAdam
from opacus_ext.statement import read_statement

from .common import assert_same
from .training import distance, drawn, train_alone, weights

L = pytest.importorskip("lightning.pytorch")
from opacus_ext.lightning import PrivacyCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SEED, RECORDS, BATCH = 8, 22, 4  # with this seed draw 6 is empty
every = pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "auto"])


@pytest.fixture(autouse=True)
def elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


class Classifier(L.LightningModule):
    def __init__(self, automatic=True):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = automatic
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.criterion = nn.CrossEntropyLoss()
        self.sizes = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.sizes.append(len(x))
        loss = self.criterion(self(x), y)
        self.log("loss", loss)
        if self.automatic_optimization:
            return loss
        self.optimizers().zero_grad()
        self.manual_backward(loss)
        self.optimizers().step()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.criterion(self(batch[0]), batch[1]))

    def optimizer_and_schedule(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        halve = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        return (optimizer, halve)[: 1 + self.automatic_optimization]

    def configure_optimizers(self):
        optimizer, *schedule = self.optimizer_and_schedule()
        return [optimizer], [{"scheduler": x, "interval": "step"} for x in schedule]


def records():
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(RECORDS, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 2, (RECORDS,), generator=generator))


def loader():
    return DataLoader(records(), batch_size=BATCH, shuffle=True)


def privacy(mode, **given):
    settings = {"target_delta": 1e-3, "max_grad_norm": 0.5, "seed": SEED}
    settings |= {"accountant": "prv_bounds", "grad_sample_mode": mode}
    if "target_epsilon" not in given:
        settings["noise_multiplier"] = 0.0
    return PrivacyCallback(**{**settings, **given})


def trainer(*callbacks, **given):
    off = "logger", "enable_checkpointing", "enable_progress_bar"
    settings = dict.fromkeys((*off, "enable_model_summary"), False)
    settings["accelerator"] = "cpu"
    return L.Trainer(callbacks=list(callbacks), **{**settings, **given})


def draws(steps):
    return [drawn(SEED, number, RECORDS, BATCH) for number in range(steps)]


def loss_of(model, i):
    x, y = records()[i : i + 1]
    return F.cross_entropy(model(x), y)


def expected(steps, automatic=True):
    """The weights after so many steps without noise, by the oracle."""
    model = Classifier(automatic)
    optimizer, *schedule = model.optimizer_and_schedule()
    for numbers in draws(steps):
        train_alone(model, optimizer, [numbers], loss_of, BATCH, 0.5)
        for each in schedule:
            each.step()
    return weights(model)


def fit(model, callback, data=None, **limit):
    trainer(callback, **limit).fit(model, loader() if data is None else data)
    return weights(model)


@every
@pytest.mark.parametrize(
    "automatic, physical", [(True, None), (True, 2), (False, None)]
)
def test_two_epochs(mode, automatic, physical):
    """Draws in parts, one of them empty; steps and schedule count draws."""
    model = Classifier(automatic)
    callback = privacy(mode, max_physical_batch_size=physical)
    lightning = trainer(callback, max_epochs=2)
    lightning.fit(model, loader())
    assert_same(weights(model), expected(12, automatic))
    sizes = [len(numbers) for numbers in draws(12)]
    assert 0 in sizes and sum(model.sizes) == sum(sizes)
    assert physical is None or max(model.sizes) == 2 < max(sizes)
    assert lightning.global_step == 12
    assert callback.engine.accountant.history == [(0.0, BATCH / RECORDS, 12)]


@pytest.mark.parametrize("kind", [AdamBC, ScaledAdam])
@pytest.mark.parametrize("automatic", [True, False])
def test_optimizers_that_know_the_noise(kind, automatic):
    """They are told of each step's noise, and their scales divide gradients."""
    told, optimizers = [], []

    class Aware(Classifier):
        def configure_optimizers(self):
            optimizer = kind(self.parameters(), lr=0.01)
            optimizer.register_step_pre_hook(
                lambda o, *_: told.append(getattr(o, "noise_variance", 0))
            )
            optimizers.append(optimizer)
            return optimizer

    model = Aware(automatic)
    fit(model, privacy("ghost_bk", noise_multiplier=2.0), max_epochs=2)
    if kind is AdamBC:
        assert told == [pytest.approx((2.0 * 0.5 / BATCH) ** 2)] * 12
    else:
        assert len(optimizers[0].gradient_scales()) == len([*model.parameters()])


@pytest.mark.parametrize("stop", [4, 6])
def test_resume(stop, tmp_path):
    """
    From a checkpoint, in an epoch or between: as if it had not been stopped, or by
    default with other noise.
    """
    path = str(tmp_path / f"step={stop}.ckpt")

    def run(path=None, repeat_noise=True):
        checkpoint = L.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=stop, save_top_k=-1, filename="{step}"
        )
        model = Classifier()
        settings = dict(noise_multiplier=1.0, clipping="adaptive")
        callback = privacy("ghost_bk", repeat_noise=repeat_noise, **settings)
        lightning = trainer(
            callback, checkpoint, enable_checkpointing=True, max_steps=9
        )
        lightning.fit(model, loader(), ckpt_path=path)
        return weights(model), callback

    whole, one = run()
    rest, other = run(path)
    assert distance(whole, rest) == 0
    assert other.engine.accountant.history == one.engine.accountant.history
    assert other.get_epsilon() == one.get_epsilon()
    first, second = (run(path, False)[0] for _ in range(2))
    assert distance(first, second) > 1e-2 and distance(first, whole) > 1e-2


@pytest.mark.parametrize("stop", [2, 4])
@pytest.mark.parametrize(
    "sampling, kind",
    [
        (RandomAllocation(steps=4), Allocated(1.0, 4, 1)),
        (BallsInBins(bins=4), Binned(1.0, 4)),
    ],
)
def test_batches_of_an_epoch_that_are_drawn_at_once(sampling, kind, stop, tmp_path):
    """An epoch of Lightning has their number; one that goes on is counted once."""
    path = tmp_path / "a.ckpt"

    def run(steps, path=None, **given):
        given = {"sampling": sampling, "noise_multiplier": 1.0, **given}
        model, callback = Classifier(), privacy("ghost_bk", **given)
        lightning = trainer(callback, max_steps=steps)
        lightning.fit(model, loader(), ckpt_path=path)
        return weights(model), callback.engine.accountant.history, model, lightning

    whole, history, model, _ = run(10, repeat_noise=True)
    assert history == [(kind, 1.0, 3)]
    assert [sum(model.sizes[i : i + 4]) for i in (0, 4)] == [RECORDS] * 2
    run(stop, repeat_noise=True)[-1].save_checkpoint(path)
    rest, again, *_ = run(10, path, repeat_noise=True)
    assert distance(whole, rest) == 0 and again == history
    secure = {"secure_mode": True, "seed": None}
    run(stop, **secure)[-1].save_checkpoint(path)
    assert run(10, path, **secure)[1] == [(kind, 1.0, 3 + (stop == 2))]


class Seen(L.Callback):
    """The draws that Lightning's loop takes: number and records."""

    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        inputs = [part.inputs for part in batch if part.records]
        numbers = sorted(i for x, y in inputs for i in y.tolist())
        self.found.append((batch[-1].draw, numbers))


WORKERS = {
    "none": {},
    "one": {"num_workers": 1, "prefetch_factor": 3},
    "two": {"num_workers": 2},
    "persistent": {"num_workers": 2, "persistent_workers": True},
}
LIMITS = {
    "epochs": {"max_epochs": 3, "steps": 18},
    "left early": {"max_epochs": 3, "limit_train_batches": 4, "steps": 12},
    "steps": {"max_steps": 15, "steps": 15},
}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("limit", LIMITS)
def test_each_draw_is_taken_once(workers, limit, tmp_path):
    """In order, whatever a loader's processes draw ahead; a run that goes on, too."""
    # The targets are the numbers of the records.
    data = TensorDataset(records()[:][0], torch.arange(RECORDS))
    data = DataLoader(data, batch_size=BATCH, **WORKERS[workers])

    def run(*callbacks, path=None):
        seen, model, given = Seen(), Classifier(), {**LIMITS[limit]}
        model.net[2] = nn.Linear(4, RECORDS).double()
        steps = given.pop("steps")
        given["enable_checkpointing"] = bool(callbacks)
        callback = privacy("hooks")
        trainer(seen, callback, *callbacks, **given).fit(model, data, ckpt_path=path)
        assert callback.engine.accountant.history == [(0.0, BATCH / RECORDS, steps)]
        expected = [numbers.tolist() for numbers in draws(steps)]
        assert seen.found == list(enumerate(expected))[steps - len(seen.found) :]
        return len(seen.found), steps

    every = {"every_n_train_steps": 3, "save_top_k": -1, "filename": "{step}"}
    taken, steps = run(L.callbacks.ModelCheckpoint(tmp_path, **every))
    assert taken == steps
    for step in (3, 6, 9):  # in an epoch and at its end
        assert run(path=str(tmp_path / f"step={step}.ckpt"))[0] == steps - step


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    for made, changed, words in (
        ((), {}, "PrivacyCallback"),
        ((privacy("hooks"),), {"max_grad_norm": 2.0}, "'0.5' there, '2.0' here"),
        ((privacy("hooks"),), {"noise_multiplier": 9.0}, "noise_mul.* there, 9.0 here"),
    ):
        first = trainer(*made, max_steps=1)
        first.fit(Classifier(), loader())
        first.save_checkpoint(path)
        second = trainer(privacy("hooks", **changed), max_steps=2)
        with pytest.raises(Refused, match=words):
            second.fit(Classifier(), loader(), ckpt_path=path)


def test_a_run_that_goes_on_with_another_plan(tmp_path):
    """In secure mode, too; a budget that is spent is told."""
    path, secure = tmp_path / "a.ckpt", {"secure_mode": True, "seed": None}

    def fit(epsilon, steps, path=None):
        callback = privacy("ghost_bk", target_epsilon=epsilon, **secure)
        lightning = trainer(callback, max_steps=steps)
        lightning.fit(Classifier(), loader(), ckpt_path=path)
        return lightning, callback

    fit(3.0, 4)[0].save_checkpoint(path)
    with pytest.raises(Refused, match="the steps so far have spent .*max_epochs"):
        fit(3.0, 6, path)
    for epsilon, steps in ((3.0, 4), (4.0, 6)):
        lightning, callback = fit(epsilon, steps, path)
        assert epsilon - 0.01 <= callback.get_epsilon() <= epsilon
    assert [steps for *_, steps in callback.engine.accountant.history] == [4, 2]
    lightning.save_checkpoint(path)
    assert "cryptographically secure" in str(read_statement(path, 1e-3))


def test_what_is_around_training():
    """Validation, early stopping, epsilon in the logs, an ordinary model at the end."""
    model = Classifier()
    callback = privacy("ghost_bk", noise_multiplier=1.0)
    stop = L.callbacks.EarlyStopping(
        "epsilon", mode="max", stopping_threshold=3.5, check_on_train_epoch_end=True
    )
    lightning = trainer(callback, stop, max_epochs=9, val_check_interval=3)
    lightning.fit(model, loader(), loader())
    assert 0 < lightning.current_epoch < 9 and "val_loss" in lightning.callback_metrics
    assert abs(lightning.callback_metrics["epsilon"] - callback.get_epsilon()) < 1e-6
    assert lightning.callback_metrics["loss"] > 0
    assert not hasattr(model, "autograd_grad_sample_hooks")
    assert "training_step" not in vars(model) and "forward" not in vars(model)
    model.criterion(model(records()[:][0]), records()[:][1]).backward()
    lightning.validate(model, loader())
    spent = callback.get_epsilon()
    trainer(callback, max_steps=2).fit(model, loader())
    assert callback.get_epsilon() > spent


def test_target_epsilon():
    callback = privacy("ghost_bk", target_epsilon=3.0)
    trainer(callback, max_epochs=2).fit(Classifier(), loader())
    assert 2.8 < callback.get_epsilon() <= 3.0
    assert callback.privacy_statement().content["epsilon"] == callback.get_epsilon()
    with pytest.raises(Refused, match="max_epochs or max_steps"):
        trainer(
            privacy("hooks", target_epsilon=3.0), max_epochs=-1, max_time="00:00:00:01"
        ).fit(Classifier(), loader())
    with pytest.raises(Refused, match="either"):
        PrivacyCallback(target_delta=1e-3)


class Data(L.LightningDataModule):
    """Its hooks for batches are called with each physical batch, as it was collated."""

    def train_dataloader(self):
        return loader()

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch[0] / 2, batch[1]

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] * 2, batch[1]


class Plain(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


class CallsNet(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": self.criterion(self.net(batch[0]), batch[1])}


FIVE, PARTS = {"max_steps": 5}, {"max_physical_batch_size": 2}
FITS = {
    "transfers": lambda: fit(Plain(), privacy("hooks", **PARTS), Data(), **FIVE),
    "a part": lambda: fit(CallsNet(), privacy("ghost_bk", module="net"), **FIVE),
    # What a loader's processes have drawn in advance is drawn again, not left out.
    "drawn in advance": lambda: fit(
        Classifier(),
        privacy("ghost_bk"),
        DataLoader(records(), batch_size=BATCH, num_workers=1, prefetch_factor=3),
        limit_train_batches=3,
        **FIVE,
    ),
}


@pytest.mark.parametrize("name", FITS)
def test_fit(name):
    assert_same(FITS[name](), expected(5))


def fails(self, batch, batch_idx):
    raise KeyError("mine")


def twice(self, batch, batch_idx):
    for _ in range(2):
        Classifier.training_step(self, batch, batch_idx)


def left_out(self, epoch, batch_idx, optimizer, optimizer_closure):
    optimizer_closure()


def two_optimizers(self):
    return [torch.optim.SGD(self.net[i].parameters(), lr=0.1) for i in (0, 2)]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 clips"),
        ({"accumulate_grad_batches": 2}, "max_physical_batch_size"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"strategy": "ddp_spawn"}, "'spawn'"),
        ({}, "scales the loss"),
    ],
)
def test_settings_that_are_refused(settings, message):
    lightning = trainer(max_steps=1, **settings)
    if not settings:
        lightning.strategy.precision_plugin.scaler = object()
    with pytest.raises(Refused, match=message):
        privacy("ghost_bk").setup(lightning, Classifier(), "fit")


def replaced(trainer, model, *rest):
    if trainer.global_step == 2:
        trainer.strategy.optimizers = model.configure_optimizers()[0]


def weighted():
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    return DataLoader(records(), batch_size=BATCH, sampler=sampler)


ACCUMULATES = L.callbacks.GradientAccumulationScheduler({1: 2})
REPLACES = L.callbacks.LambdaCallback(on_train_batch_start=replaced)
# By name: a module's own methods and attributes, what a run is given beside it, and the
# message.
REFUSED = {
    "another loss": (
        {"training_step": Plain.training_step},
        {},
        "not made by self.criterion",
    ),
    "no loss": ({"training_step": lambda *args: None}, {}, "returned no loss"),
    "an error": ({"training_step": fails}, {}, "mine"),
    "two steps": ({"training_step": twice}, dict(automatic=False), "took 2 steps"),
    "no step": ({"optimizer_step": left_out}, {}, "took 0 steps"),
    "no criterion": ({"criterion": None}, {}, "has no self.criterion"),
    "two optimizers": (
        {"configure_optimizers": two_optimizers},
        dict(automatic=False),
        "2 optimizers",
    ),
    "parts": ({}, dict(automatic=False, settings=PARTS), "manual optimization"),
    # A callback of Lightning's sets it when an epoch begins.
    "accumulates later": (
        {},
        dict(callbacks=[ACCUMULATES]),
        "accumulate_grad_batches=2",
    ),
    "another optimizer": ({}, dict(callbacks=[REPLACES]), "optimizer was replaced"),
    "weighted": ({}, dict(make=weighted), "training loader"),
    "drawn already": (
        {},
        dict(make=lambda: DPDataLoader.from_data_loader(loader())),
        "training loader",
    ),
    "two loaders": ({}, dict(make=lambda: [loader()] * 2), "training loader"),
}
STEPS = {"accumulates later": RECORDS // BATCH + 1, "another optimizer": 2}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_and_loops_that_are_refused(name):
    """The steps before it are those of the oracle, and the module an ordinary one."""
    own, given, message = REFUSED[name]
    automatic = given.get("automatic", True)
    model = type("Own", (Classifier,), own)(automatic)
    if "criterion" in own:
        del model.criterion
    with pytest.raises((Refused, KeyError), match=message):
        callback = privacy("ghost_bk", **given.get("settings", {}))
        lightning = trainer(callback, *given.get("callbacks", ()), max_epochs=2)
        lightning.fit(model, given.get("make", loader)())
    assert "forward" not in vars(model) and "training_step" not in vars(model)
    if name != "two steps":
        assert_same(weights(model), expected(STEPS.get(name, 0), automatic))


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "make", [L.callbacks.LearningRateFinder, L.callbacks.BatchSizeFinder]
)
def test_callbacks_that_train_by_themselves(make, first):
    """Before training begins, whatever the order."""
    model, stock = Classifier(), loader()
    model.lr, model.batch_size, model.train_dataloader = 0.1, BATCH, lambda: stock
    model.val_dataloader = model.train_dataloader
    callbacks = [privacy("ghost_bk"), make()][:: 1 if first else -1]
    with pytest.raises(Refused, match="training loop by itself"):
        trainer(*callbacks, max_steps=1).fit(model)
    assert not model.sizes


def test_a_second_fit_counts_its_own_epochs():
    """And that which the first has left in its middle once more."""
    sampling = RandomAllocation(steps=4)
    callback = privacy("ghost_bk", sampling=sampling, noise_multiplier=1.0)
    found = []
    for _ in range(2):
        trainer(callback, max_steps=6).fit(Classifier(), loader())
        found.append(callback.engine.accountant.history[0][2])
    assert found == [2, 4]
