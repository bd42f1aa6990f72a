"""PrivacyCallback: Lightning's training equals the oracle's, and goes on as it was.

The oracle takes the draws of the same seed, clips the gradients of each record alone in
float64, and steps with the same optimizer and schedule.
"""

import logging
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.data_loader import DPDataLoader
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from opacus_ext.data.logical import derive_seed
from opacus_ext.losses import PerSample, model_losses

from .common import assert_same, clipped_sum, oracle

L = pytest.importorskip("lightning.pytorch")
from opacus_ext.lightning import PrivacyCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
SEED, RECORDS, BATCH = 8, 22, 4  # with this seed draw 6 is empty
every = pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "auto"])


@pytest.fixture(autouse=True)
def quiet(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Steps:
    """What makes a LightningModule of either package."""

    def __init__(self, automatic=True, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = automatic
        self.net = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
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

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        halve = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
        if not self.automatic_optimization:
            return optimizer
        return [optimizer], [{"scheduler": halve, "interval": "step"}]


class Classifier(Steps, L.LightningModule):
    pass


def records(dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = 2 * torch.randn(RECORDS, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 2, (RECORDS,), generator=generator))


def loader(dtype=torch.float64):
    return DataLoader(records(dtype), batch_size=BATCH, shuffle=True)


def privacy(mode, **given):
    settings = {
        "target_delta": 1e-3,
        "max_grad_norm": 0.5,
        "seed": SEED,
        "accountant": "rdp",
    }
    if "target_epsilon" not in given:
        settings["noise_multiplier"] = 0.0
    return PrivacyCallback(grad_sample_mode=mode, **{**settings, **given})


def trainer(*callbacks, package=L, **given):
    settings = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return package.Trainer(callbacks=list(callbacks), **{**settings, **given})


def draw(number):
    generator = torch.Generator().manual_seed(derive_seed(SEED, "draw", number))
    keys = torch.rand(RECORDS, generator=generator, dtype=torch.float64)
    return (keys < BATCH / RECORDS).nonzero()[:, 0]


def expected(steps, automatic):
    """The weights after so many steps without noise, by the oracle."""
    model, data = Classifier(automatic), records()
    made = model.configure_optimizers()
    (optimizer,), schedules = made if automatic else ([made], [])

    def loss_of(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for number in range(steps):
        batch = data[draw(number)]
        sums = clipped_sum(oracle(model, batch, loss_of), "flat", 0.5)
        for name, p in model.named_parameters():
            p.grad = sums[name] / BATCH
        optimizer.step()
        for each in schedules:
            each["scheduler"].step()
    return dict(model.named_parameters())


def weights(model):
    return {name: p.detach() for name, p in model.named_parameters()}


@every
@pytest.mark.parametrize(
    "automatic, physical", [(True, None), (True, 2), (False, None)]
)
def test_two_epochs(mode, automatic, physical):
    """Draws in parts, one of them empty; steps and schedule count draws."""
    model, callback = Classifier(automatic), privacy(
        mode, max_physical_batch_size=physical
    )
    lightning = trainer(callback, max_epochs=2)
    lightning.fit(model, loader())
    assert_same(weights(model), expected(12, automatic))
    sizes = [len(draw(number)) for number in range(12)]
    assert 0 in sizes and sum(model.sizes) == sum(sizes)
    assert physical is None or max(model.sizes) == 2 < max(sizes)
    assert lightning.global_step == 12
    assert callback.engine.accountant.history == [(0.0, BATCH / RECORDS, 12)]


@pytest.mark.parametrize("mode, stop", [("hooks", 6), ("ghost_bk", 4), ("ghost_bk", 8)])
def test_resume(mode, stop, tmp_path):
    """
    From a checkpoint, in an epoch or between: as if it had not been stopped, or by
    default with other noise.
    """

    def fit(path=None, repeat_noise=True, **limit):
        checkpoint = L.callbacks.ModelCheckpoint(
            tmp_path, every_n_train_steps=stop, save_top_k=-1, filename="{step}"
        )
        model = Classifier()
        callback = privacy(mode, noise_multiplier=1.0, repeat_noise=repeat_noise)
        lightning = trainer(callback, checkpoint, enable_checkpointing=True, **limit)
        lightning.fit(model, loader(), ckpt_path=path)
        return weights(model), callback

    whole, one = fit(max_epochs=2)
    part, _ = fit(max_steps=stop)
    rest, other = fit(str(tmp_path / f"step={stop}.ckpt"), max_epochs=2)
    assert all(torch.equal(whole[name], rest[name]) for name in whole)
    assert not torch.equal(whole["net.0.weight"], part["net.0.weight"])
    assert other.engine.accountant.history == one.engine.accountant.history
    assert other.get_epsilon() == one.get_epsilon()
    path = str(tmp_path / f"step={stop}.ckpt")
    fresh = [fit(path, False, max_epochs=2)[0]["net.0.weight"] for _ in range(2)]
    for a, b in (fresh, [fresh[0], whole["net.0.weight"]]):
        assert (a - b).abs().max() > 1e-2


def test_checkpoints_of_other_runs_are_refused(tmp_path):
    path = tmp_path / "a.ckpt"
    plain = trainer(max_steps=1)
    plain.fit(Classifier(), loader())
    plain.save_checkpoint(path)
    with pytest.raises(Refused, match="PrivacyCallback"):
        trainer(privacy("hooks"), max_steps=2).fit(
            Classifier(), loader(), ckpt_path=path
        )
    private = trainer(privacy("hooks"), max_steps=1)
    private.fit(Classifier(), loader())
    private.save_checkpoint(path)
    for changed, words in (
        ({"max_grad_norm": 2.0}, "max_grad_norm: '0.5' there, '2.0' here"),
        ({"noise_multiplier": 9.0}, "noise_multiplier: .* there, 9.0 here"),
    ):
        with pytest.raises(Refused, match=words):
            trainer(privacy("hooks", **changed), max_steps=2).fit(
                Classifier(), loader(), ckpt_path=path
            )


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
    with pytest.raises(Refused, match="max_epochs or max_steps"):
        trainer(
            privacy("hooks", target_epsilon=3.0), max_epochs=-1, max_time="00:00:00:01"
        ).fit(Classifier(), loader())
    with pytest.raises(Refused, match="either"):
        PrivacyCallback(target_delta=1e-3)


def test_bf16():
    """Half precision within the step, float32 gradients and noise."""
    model = Classifier(dtype=torch.float32)
    single = trainer(privacy("ghost_bk"), max_steps=5)
    single.fit(model, loader(torch.float32))
    mixed = Classifier(dtype=torch.float32)
    trainer(privacy("ghost_bk"), max_steps=5, precision="bf16-mixed").fit(
        mixed, loader(torch.float32)
    )
    assert_same(weights(mixed), weights(model), 0.05)
    assert not torch.equal(mixed.net[0].weight, model.net[0].weight)


def test_data_module_with_transfers():
    """Its hooks for batches are called with each physical batch, as it was collated."""

    class Data(L.LightningDataModule):
        def train_dataloader(self):
            return loader()

        def on_before_batch_transfer(self, batch, dataloader_idx):
            return batch[0] / 2, batch[1]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 2, batch[1]

    model = Classifier()
    trainer(privacy("hooks", max_physical_batch_size=2), max_steps=9).fit(model, Data())
    assert_same(weights(model), expected(9, True))


class Plain(Classifier):
    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])


class CallsNet(Classifier):
    def training_step(self, batch, batch_idx):
        return {"loss": self.criterion(self.net(batch[0]), batch[1])}


@pytest.mark.parametrize(
    "cls, given", [(Plain, {"mode": "hooks"}), (CallsNet, {"module": "net"})]
)
def test_other_losses_and_modules(cls, given):
    """Any mean in "hooks"; a part of the module that training_step calls."""
    model = cls()
    trainer(privacy(**{"mode": "ghost_bk", **given}), max_steps=3).fit(model, loader())
    assert_same(weights(model), expected(3, True))


class Failing(Classifier):
    def training_step(self, batch, batch_idx):
        raise KeyError("mine")


class Nothing(Classifier):
    def training_step(self, batch, batch_idx):
        return None


class Twice(Classifier):
    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        super().training_step(batch, batch_idx)


class Without(Classifier):
    def __init__(self):
        super().__init__()
        self.criterion = None


class Two(Classifier):
    def configure_optimizers(self):
        first, second = self.net[0].parameters(), self.net[2].parameters()
        return [torch.optim.SGD(first, lr=0.1), torch.optim.SGD(second, lr=0.1)]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0 clips"),
        ({"accumulate_grad_batches": 2}, "max_physical_batch_size"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders"),
        ({"strategy": "ddp"}, "DDPStrategy"),
        ({}, "scales the loss"),
    ],
)
def test_settings_that_are_refused(settings, message):
    model = Classifier()
    before = weights(model)
    lightning = trainer(max_steps=1, **settings)
    if not settings:
        lightning.strategy.precision_plugin.scaler = object()
    with pytest.raises(Refused, match=message):
        privacy("ghost_bk").setup(lightning, model, "fit")
    assert all(torch.equal(p, before[name]) for name, p in weights(model).items())


@pytest.mark.parametrize(
    "cls, automatic, given, message",
    [
        (Plain, True, {"mode": "ghost_bk"}, "not made by self.criterion"),
        (Nothing, True, {"mode": "hooks"}, "returned no loss"),
        (Failing, True, {"mode": "auto"}, "mine"),
        (Twice, False, {"mode": "ghost_bk"}, "took 2 steps"),
        (Without, True, {"mode": "auto"}, "has no self.criterion"),
        (Two, False, {"mode": "hooks"}, "2 optimizers"),
        (
            Classifier,
            False,
            {"mode": "hooks", "max_physical_batch_size": 2},
            "manual optimization",
        ),
    ],
)
def test_modules_that_are_refused(cls, automatic, given, message):
    """They are ordinary ones afterwards."""
    model = cls()
    model.automatic_optimization = automatic
    with pytest.raises((Refused, KeyError), match=message):
        trainer(privacy(**given), max_steps=1).fit(model, loader())
    assert "forward" not in vars(model) and "training_step" not in vars(model)


def test_loaders_that_are_refused():
    data = records()
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * RECORDS, RECORDS)
    for given in (
        {"a": loader(), "b": loader()},
        DataLoader(data, batch_size=4, sampler=weighted),
        DPDataLoader.from_data_loader(loader()),
    ):
        with pytest.raises(Refused, match="training loader"):
            trainer(privacy("hooks"), max_steps=1).fit(Classifier(), given)


def test_the_older_name():
    """``pytorch_lightning`` is another package with the same code."""
    package = pytest.importorskip("pytorch_lightning")
    model = type("Other", (Steps, package.LightningModule), {})()
    trainer(privacy("ghost_bk"), package=package, max_steps=3).fit(model, loader())
    assert_same(weights(model), expected(3, True))


class Language(L.LightningModule):
    """A model of transformers, whose loss is one a sample."""

    def __init__(self, model):
        super().__init__()
        self.model, self.criterion = model, PerSample()

    def training_step(self, batch, batch_idx):
        return self.criterion(model_losses(self.model, batch))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_a_model_of_transformers(mode="auto"):
    transformers = pytest.importorskip("transformers")
    off = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=9, n_embd=8, n_layer=1, n_head=1, **off)
    ).double()
    ids = torch.randint(0, 9, (RECORDS, 6))
    sums = clipped_sum(
        oracle(
            model.train(),
            {"input_ids": ids[draw(0)], "labels": ids[draw(0)]},
            lambda model, batch: model_losses(model, batch),
        ),
        "flat",
        0.5,
    )
    step = 0.5 / BATCH
    after = {name: p.detach() - step * sums[name] for name, p in weights(model).items()}
    data = [{"input_ids": x, "labels": x} for x in ids]
    trainer(privacy(mode, module="model"), max_steps=1).fit(
        Language(model), DataLoader(data, batch_size=BATCH, shuffle=True)
    )
    assert_same(weights(model), after)


@pytest.mark.parametrize("mode, automatic", [("hooks", True), ("ghost_bk", False)])
def test_without_the_callback(mode, automatic):
    """make_private before fit: what a loop of one's own does, draw by draw."""

    def made():
        model = Classifier(automatic)
        model.automatic_optimization = automatic
        first = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(
                records(), batch_size=8, generator=torch.Generator().manual_seed(1)
            ),
            noise_multiplier=1.0,
            max_grad_norm=0.5,
            noise_generator=torch.Generator().manual_seed(2),
            grad_sample_mode=mode,
            wrap_model=False,
        )
        _, optimizer, *criterion, batches = first
        return model, optimizer, criterion[0] if criterion else model.criterion, batches

    model, optimizer, criterion, batches = made()
    for x, y in batches:
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
    other, private, clipping, batches = made()
    other.configure_optimizers = lambda: private
    del other.criterion
    vars(other)["criterion"] = clipping
    trainer(max_epochs=1).fit(other, batches)
    assert_same(weights(other), weights(model))


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "prefetch_factor": 3}])
def test_an_epoch_that_is_cut_short(workers):
    """
    It goes on with the next draws: what a loader's processes have drawn in advance is
    drawn again, not left out.
    """
    model, ahead = Classifier(), DataLoader(records(), batch_size=4, **workers)
    trainer(privacy("ghost_bk"), max_steps=5, limit_train_batches=3).fit(model, ahead)
    assert_same(weights(model), expected(5, True))
