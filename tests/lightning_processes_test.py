"""PrivacyCallback in two processes of Lightning's DDP against one: weights, epsilon,
draws, checkpoints. Float64, so that two sums of the same gradients differ by rounding.
"""

import functools
from tempfile import mkdtemp

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

L = pytest.importorskip("lightning.pytorch")

from torchmetrics import MeanMetric  # noqa: E402

from opacus_ext.strategies import Banded  # noqa: E402
from tests import processes  # noqa: E402
from tests.lightning_test import (  # noqa: E402
    BATCH,
    RECORDS,
    Classifier,
    Seen,
    privacy,
    records,
    trainer,
)
from tests.processes import (  # noqa: E402
    as_torchrun,
    assert_close,
    assert_refused,
    refusal,
    refusals,
)
from tests.training import drawn, weights  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
STOP = 4  # in the middle of an epoch
SEED = 83  # draws of one record, and of none


class Numbered(Classifier):
    """Its targets are the numbers of the records."""

    def __init__(self, automatic=True, **log):
        super().__init__(automatic)
        self.net[2] = nn.Linear(4, RECORDS).double()
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.metric = MeanMetric(dist_sync_on_step=log.pop("on_each_step", False))
        self.given = log

    def forward(self, x):
        return self.net(x) * self.scale

    def training_step(self, batch, batch_idx):
        self.log("records", float(len(batch[0])), **self.given)
        self.metric(float(len(batch[0])))
        self.log("metric", self.metric, on_epoch=True)
        return super().training_step(batch, batch_idx)


class Steps(Numbered):
    """Steps its schedule by itself."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return optimizer

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        self.schedule.step()


def trained(
    folder, mode="ghost_bk", automatic=True, resume=None, make=Numbered, **given
):
    """Nine steps, a checkpoint after four; in all processes together, if there are."""
    as_torchrun()
    torch.manual_seed(0)
    model = make(automatic, **given.pop("log", {}))
    if dist.is_initialized():
        given = {"strategy": "ddp", "devices": dist.get_world_size(), **given}
        with torch.no_grad():  # those of process 0 count
            own = () if make is not Numbered else model.parameters()
            for x in (*own, *model.buffers()):
                x += dist.get_rank()
    data = TensorDataset(records()[:][0], torch.arange(RECORDS))
    workers = given.pop("workers", 0)
    how = {"multiprocessing_context": "fork"} if workers else {}
    loader = DataLoader(data, BATCH, shuffle=True, num_workers=workers, **how)
    checkpoint = L.callbacks.ModelCheckpoint(
        folder, every_n_train_steps=STOP, save_top_k=-1, filename="{step}"
    )
    settings = dict(repeat_noise=True, seed=SEED, target_epsilon=6.0)
    settings["max_physical_batch_size"] = given.pop("physical", None)
    settings["noise"] = given.pop("noise", "independent")
    callback, seen = privacy(mode, **settings), Seen()
    given = {"max_steps": 9, "enable_checkpointing": True, **given}
    lightning = trainer(callback, seen, checkpoint, **given)
    steps = []
    model.on_train_start = lambda: steps.append(lightning.estimated_stepping_batches)
    lightning.fit(model, loader, loader, ckpt_path=resume)
    return {
        "weights": weights(model),
        "seen": seen.found,
        "accountant": callback.engine.accountant.history,
        "logged": {k: float(v) for k, v in lightning.callback_metrics.items()},
        "epsilon": callback.get_epsilon(),
        "steps": (steps, lightning.global_step),
    }


CASES = {
    "ghost_bk": {},
    "hooks": {"mode": "hooks", "physical": 2},
    "manual": {"automatic": False},
    "workers": {"mode": "auto", "workers": 2, "physical": 1},
    "correlated": {"noise": Banded(2, 9)},
}


def found(folder, name):
    strategy = L.strategies.DDPStrategy(find_unused_parameters=True)
    given = {"strategy": strategy} if name == "hooks" else {}
    return trained(f"{folder}/{name}", **CASES[name], **given)


def split_model():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    model = Numbered()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = model.net[0].weight.detach()
    model.net[0].weight = nn.Parameter(distribute_tensor(whole, mesh))
    given = {"strategy": "ddp", "devices": 2, "max_steps": 1}
    try:
        trainer(privacy("ghost_bk"), **given).fit(model, DataLoader(records(), BATCH))
    except Exception as error:  # Lightning may fail to move such a model afterwards
        while error.__context__ is not None:
            error = error.__context__
        raise error


REFUSED = {
    "split": (split_model, "Tensor parallelism is not supported"),
    "rates": (
        lambda: trained(mkdtemp(), automatic=False, make=Steps),
        "Learning rates or other settings",
    ),
    "sync_dist": (
        lambda: trained(mkdtemp(), log={"sync_dist": True}),
        "self.log, which waits",
    ),
    "metric": (
        lambda: trained(mkdtemp(), log={"on_each_step": True}),
        "sums the metric metric over processes, which waits",
    ),
}


def jobs(folder, size):
    def again(name):
        saved = f"{folder}/{name}/step={STOP}.ckpt"
        return trained(f"{folder}/again", resume=saved, **CASES[name])

    return {
        **{name: functools.partial(found, folder, name) for name in CASES},
        "resumed ghost_bk": lambda: again("ghost_bk"),
        "resumed correlated": lambda: again("correlated"),
        "refused": lambda: refusals(REFUSED),
    }


group = processes.groups(jobs)


def assert_same(found, expected):
    assert_close([one["weights"] for one in found], expected["weights"], 1e-12)
    for one in found:
        for name in ("accountant", "epsilon", "steps"):
            assert one[name] == expected[name]
        assert one["logged"]["epsilon"] == expected["logged"]["epsilon"]


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name, group, tmp_path):
    """Each record of a draw is one process's; a process without records waits."""
    expected = trained(str(tmp_path), **CASES[name])
    found = group(2).of(name)
    assert_same(found, expected)
    numbers = [drawn(SEED, step, RECORDS, BATCH).tolist() for step in range(9)]
    if name == "correlated":  # from two parts of the data set in turn
        numbers = [drawn for _, drawn in expected["seen"]]
        assert all(i % 2 == n % 2 for n, drawn in enumerate(numbers) for i in drawn)
    assert expected["seen"] == list(enumerate(numbers))
    for one, other, (draw, whole) in zip(*(x["seen"] for x in found), expected["seen"]):
        assert one[0] == other[0] == draw and sorted(one[1] + other[1]) == whole
    assert name == "correlated" or {0, 1} < {len(whole) for whole in numbers}


@pytest.mark.parametrize("name", ["ghost_bk", "correlated"])
def test_resumed_by_two_and_by_one(name, group, tmp_path):
    expected = group(2).of(name)[0]
    assert_same(group(2).of(f"resumed {name}"), expected)
    saved = f"{group.folder}/{name}/step={STOP}.ckpt"
    alone = trained(str(tmp_path), resume=saved, **CASES[name])
    assert_same([alone], expected)
    assert [draw for draw, _ in alone["seen"]] == list(range(STOP, 9))


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, group):
    assert_refused(group(2), name, REFUSED[name][1])


@pytest.mark.parametrize("name", ["FSDPStrategy", "ModelParallelStrategy"])
def test_a_strategy_that_is_refused(name):
    lightning = trainer(max_steps=1)
    lightning._accelerator_connector.strategy = getattr(L.strategies, name)()
    message = refusal(privacy("ghost_bk").setup, lightning, Classifier(), "fit")
    assert message.startswith(f"Refused: {name} computes or shards")
    for way in ('strategy="ddp"', "PrivateTrainer", "fully_shard and make_private"):
        assert way in message
