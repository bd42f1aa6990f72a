"""PrivacyCallback with Lightning's ModelParallelStrategy: processes that each hold shards
of a model (``fully_shard``) against one that holds all. Float64, as in the other files.
"""

import functools

import pytest
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

L = pytest.importorskip("lightning.pytorch")

from tests.lightning_processes_test import (  # noqa: E402
    STOP,
    Numbered,
    assert_same,
    trained,
)
from tests.processes import run  # noqa: E402

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


CASES = {
    "ghost_bk": {},
    "manual": {"automatic": False},
    "workers": {"mode": "auto", "workers": 2, "physical": 1},
}


def jobs(folder, processes):
    return {
        name: functools.partial(sharded, f"{folder}/{name}", **given)
        for name, given in CASES.items()
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
