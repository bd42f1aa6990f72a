"""PrivacyCallback with Lightning's ModelParallelStrategy: processes that each hold shards
of a model (``fully_shard``) against one that holds all. Float64, as in the other files.
"""

import functools

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

L = pytest.importorskip("lightning.pytorch")

from tests.lightning_processes_test import (  # noqa: E402
    STOP,
    Numbered,
    assert_same,
    trained,
)
from tests.processes import refusal, run  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Sharded(Numbered):
    """The layers, and a part that has them all."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        fully_shard(self.net[2], mesh=mesh)
        fully_shard(self.net, mesh=mesh)


def sharded(folder, whole=False, make=Sharded, noise=0.0, **given):
    """Trains sharded over all processes, or in one process that holds all."""
    given["budget"] = {"noise_multiplier": noise}
    if not dist.is_initialized():
        return trained(folder, **given)
    size, parts = dist.get_world_size(), given.pop("parts", 1)
    sizes = {"data_parallel_size": size // parts, "tensor_parallel_size": parts}
    strategy = L.strategies.ModelParallelStrategy(
        **sizes, save_distributed_checkpoint=not whole
    )
    return trained(folder, make=make, strategy=strategy, **given)


class Itself(Sharded):
    """The LightningModule itself."""

    def configure_model(self):
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class Meta(Sharded):
    """Its weights are drawn after it was sharded."""

    def configure_model(self):
        self.net.to("meta")
        super().configure_model()


class Split(Sharded):
    """Layers that processes compute together."""

    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.device_mesh["data_parallel"].size() > 1:
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class Forgotten(Sharded):
    def configure_model(self):
        fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])


class Alone(Sharded):
    """Each process has the whole model."""

    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["tensor_parallel"])


CASES = {
    "ghost_bk": {},
    "itself": {"make": Itself},
    "scan": {"mode": "scan"},
    "split": {"make": Split, "parts": 2},
    "manual": {"automatic": False},
    "workers": {"mode": "auto", "workers": 2, "physical": 1},
}


def jobs(folder, processes):
    jobs = {
        name: functools.partial(sharded, f"{folder}/{name}", **given)
        for name, given in CASES.items()
    }
    for name, given in dict(noise={}, whole={"whole": True}).items():
        call = functools.partial(sharded, noise=0.7, **given)
        saved = f"{folder}/{name}/step={STOP}.ckpt"
        jobs[name] = functools.partial(call, f"{folder}/{name}")
        jobs[f"{name} again"] = functools.partial(call, f"{folder}/again", resume=saved)
    jobs["meta"] = lambda: sharded(f"{folder}/meta", make=Meta)
    jobs["bf16"] = lambda: sharded(f"{folder}/bf16", precision="bf16-mixed")
    for name, given in REFUSED.items():
        jobs[name] = functools.partial(refusal, sharded, f"{folder}/no", **given)
    return jobs


REFUSED = {
    "forgotten": {"make": Forgotten},
    "alone": {"make": Alone},
    "hooks": {"mode": "hooks"},
    "sync_dist": {"log": {"sync_dist": True}},
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    own = str(tmp_path_factory.mktemp("two"))
    return folder, run(2, own, functools.partial(jobs, folder))


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name, two, tmp_path):
    expected = sharded(str(tmp_path), **CASES[name])
    assert_same(two[1].of(name), expected)


@pytest.mark.parametrize("name", ["noise", "whole"])
def test_resumed(name, two):
    for one, other in zip(two[1].of(name), two[1].of(f"{name} again")):
        for key, value in one["weights"].items():
            assert (value == other["weights"][key]).all(), key
        assert one["accountant"] == other["accountant"]


def test_look(two):
    for name in ("meta", "bf16", *REFUSED):
        print(name, two[1].of(name))
    assert 0
