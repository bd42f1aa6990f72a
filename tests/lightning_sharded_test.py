"""PrivacyCallback with Lightning's ModelParallelStrategy: processes that each hold
shards of a model (``fully_shard``) against one that holds all. In float64.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

L = pytest.importorskip("lightning.pytorch")

from tests.lightning_processes_test import (  # noqa: E402
    RECORDS,
    STOP,
    Numbered,
    assert_same,
    trained,
)
from tests.lightning_test import records  # noqa: E402
from tests.processes import refusal, run  # noqa: E402
from tests.training import distance  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.thorough]


class Sharded(Numbered):
    """Its layers, and all of them together."""

    @property
    def mesh(self):
        return self.device_mesh["data_parallel"]

    def configure_model(self):
        fully_shard(self.net[2], mesh=self.mesh)
        fully_shard(self.net, mesh=self.mesh)

    def teardown(self, stage):
        """It is an ordinary model again, that is sharded."""
        assert all(p.grad is None for p in self.parameters())
        self(records()[:4][0]).sum().backward()
        assert not any(hasattr(p, "summed_grad") for p in self.parameters())
        assert all(p.grad is not None for p in self.parameters())
        (optimizer,) = self.trainer.optimizers
        assert type(optimizer) is torch.optim.SGD
        self.trainer.strategy.optimizer_state(optimizer)


class Itself(Sharded):
    def configure_model(self):
        fully_shard(self, mesh=self.mesh)


class Split(Sharded):
    """Processes compute each layer together, and others shard it if there are some."""

    def configure_model(self):
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)
        if self.mesh.size() > 1:
            fully_shard(self.net, mesh=self.mesh)


class Single(Numbered):
    """In float32, which autocast makes bfloat16."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.float()

    def forward(self, x):
        return super().forward(x.float())


class ShardedSingle(Single, Sharded):
    pass


class Heads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(5, 4)
        self.heads = torch.nn.ModuleList(torch.nn.Linear(4, RECORDS) for _ in "ab")

    def forward(self, x):
        return [head(self.body(x).tanh()) for head in self.heads]


class Two(Numbered):
    """The loss uses one of two outputs."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        torch.manual_seed(0)
        self.net = Heads().double()

    def forward(self, x):
        return self.net(x)[1] * self.scale


class ShardedTwo(Two, Sharded):
    def configure_model(self):
        for part in (*self.net.heads, self.net):
            fully_shard(part, mesh=self.mesh)

    def teardown(self, stage):
        pass


def sharded(folder, whole=False, make=Sharded, noise=0.0, **given):
    """Trains sharded over all processes; or in one, where there is no group."""
    parts, given["budget"] = given.pop("parts", 1), {"noise_multiplier": noise}
    if dist.is_initialized():
        strategy = L.strategies.ModelParallelStrategy(
            data_parallel_size=dist.get_world_size() // parts,
            tensor_parallel_size=parts,
            save_distributed_checkpoint=not whole,
        )
        given["strategy"] = strategy
    elif issubclass(make, Sharded):
        make = Numbered
    return trained(folder, make=make, **given)


CASES = {
    "ghost_bk": {},
    "noise": {"noise": 0.7},
    "whole": {"whole": True},
    "whole noise": {"noise": 0.7, "whole": True},
    "itself": {"make": Itself, "mode": "scan"},
    "manual": {"automatic": False},
    "workers": {"mode": "auto", "workers": 2, "physical": 1},
    "float32": {"make": ShardedSingle},
    "bf16": {"make": ShardedSingle, "precision": "bf16-mixed"},
    "split": {"make": Split, "parts": 2},
    "two": {"make": ShardedTwo},
}
NOISE = "noise", "whole noise"
QUICK = "ghost_bk", "noise"


# -- what is refused -------------------------------------------------------------------


class Meta(Sharded):
    """Its weights are drawn after it was sharded."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        del self.metric, self.scale  # Lightning leaves buffers as they may be
        self.scale = 1.0

    def training_step(self, batch, batch_idx):
        return self.criterion(self(batch[0]), batch[1])

    def configure_model(self):
        self.net.to("meta")
        super().configure_model()


class Forgotten(Sharded):
    def configure_model(self):
        fully_shard(self.net[0], mesh=self.mesh)


class Alone(Sharded):
    def configure_model(self):
        fully_shard(self.net, mesh=self.device_mesh["tensor_parallel"])


class Beside(Sharded):
    """A frozen part that runs after the model."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.last = torch.nn.Linear(RECORDS, RECORDS).double().requires_grad_(False)

    def configure_model(self):
        super().configure_model()
        fully_shard(self.last, mesh=self.mesh)


class Differ(ShardedTwo):
    """The loss of each process uses another output."""

    def forward(self, x):
        return self.net(x)[dist.get_rank()]


class Fails(Sharded):
    """Process 1 fails in its second step."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if dist.get_rank() and batch_idx:
            raise KeyError("mine")
        return loss

    def teardown(self, stage):
        pass


class FailsBefore(Fails):
    """Before it calls the model."""

    def forward(self, x):
        if self.training and dist.get_rank() and self.global_step:
            raise KeyError("mine")
        return super().forward(x)


class ReturnsNothing(Fails):
    def training_step(self, batch, batch_idx):
        loss = Numbered.training_step(self, batch, batch_idx)
        return None if dist.get_rank() and batch_idx else loss


class Plain(Sharded):
    def configure_model(self):
        pass


REFUSED = {
    "is one of 2 processes": {"make": Plain},
    "parts that are sharded": {"make": Forgotten},
    "0.weight is sharded by fully_shard over 1 of 2": {"make": Alone},
    "last is sharded by fully_shard beside what": {"make": Beside},
    "losses from different outputs": {"make": Differ},
    "'hooks' has whole gradients": {"mode": "hooks"},
    "self.log, which waits": {"log": {"sync_dist": True}},
    "sums the metric metric": {"log": {"on_each_step": True}},
}
FAILS = {"mine": Fails, "before": FailsBefore, "returned no loss": ReturnsNothing}


# -- processes -------------------------------------------------------------------------


def job(folder, name, resume=None, **given):
    path = resume and f"{folder}/{resume}/step={STOP}.ckpt"
    return functools.partial(sharded, f"{folder}/{name}", resume=path, **given)


def quick(folder, processes):
    made = {name: job(folder, name, **CASES[name]) for name in QUICK}
    made["noise again"] = job(folder, "again", resume="noise", **CASES["noise"])
    made["mine"] = functools.partial(refusal, job(folder, "no", make=Fails))
    return made


def others(folder, processes):
    if processes == 4:
        return {"split": job(folder, "four", make=Split, parts=2)}
    if processes != 2:
        own = f"of {processes}"
        return {name: job(folder, own, resume=name) for name in ("ghost_bk", "whole")}
    names = [name for name in CASES if name not in QUICK]
    made = {name: job(folder, name, **CASES[name]) for name in names}
    given = CASES["whole noise"]
    made["whole noise again"] = job(folder, "again", resume="whole noise", **given)
    made["from one"] = job(folder, "from one", resume="alone")
    made["meta"] = job(folder, "meta", make=Meta)
    for name, given in REFUSED.items():
        made[name] = functools.partial(refusal, job(folder, "no", **given))
    for name, make in FAILS.items():
        made[name] = functools.partial(refusal, job(folder, "no", make=make))
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def alone(folder):
    """One process that holds all, without noise."""
    return sharded(f"{folder}/alone")


@pytest.fixture(scope="module")
def two(folder, tmp_path_factory):
    own = str(tmp_path_factory.mktemp("two"))
    return run(2, own, functools.partial(quick, folder))


@pytest.fixture(scope="module")
def more(folder, alone, two, tmp_path_factory):
    own = str(tmp_path_factory.mktemp("more"))
    return run(2, own, functools.partial(others, folder))


def assert_bits(group, expected):
    for one, other in zip(group, expected):
        assert one["accountant"] == other["accountant"]
        for name, value in one["weights"].items():
            assert torch.equal(value, other["weights"][name])


# -- what they have found --------------------------------------------------------------


def test_two_processes_train_as_one(two, alone):
    """Some steps have records in one process only, and some in none."""
    group = two.of("ghost_bk")
    assert_same(group, alone)
    shares = [[len(numbers) for _, numbers in one["seen"]] for one in group]
    assert {(0, 0), (1, 0)} < {*zip(*shares)}
    assert all(one["logged"]["metric_epoch"] == 2 for one in group)  # without zeros
    assert sum(one["sizes"] for one in group) == alone["sizes"]  # nor of record 0
    losses = [one["logged"]["val_loss"] for one in group]
    assert abs(sum(losses) / 2 - alone["logged"]["val_loss"]) < 1e-6


def test_noise_and_a_run_that_goes_on(two, alone):
    """The processes have one noise, which is repeated as asked, bit for bit."""
    one, other = two.of("noise")
    assert_bits([one], [other])
    apart = [x - alone["weights"][name] for name, x in one["weights"].items()]
    assert min(x.abs().max() for x in apart) > 1e-3
    assert_bits(two.of("noise again"), two.of("noise"))


def test_an_error_of_one_process_is_one_of_all(two):
    first, second = two.of("mine")
    assert "ProcessFailure: Process 1 has failed" in first and "mine" in second


@pytest.mark.parametrize("name", ["whole", "itself", "workers", "split"])
def test_more_that_train_as_one(name, more, alone):
    assert_same(more.of(name), alone)


@pytest.mark.parametrize("name, make", [("manual", Numbered), ("two", Two)])
def test_others_that_train_as_one(name, make, more, tmp_path):
    assert_same(more.of(name), sharded(str(tmp_path), **{**CASES[name], "make": make}))


@pytest.mark.parametrize("name, atol", [("float32", 1e-6), ("bf16", 5e-4)])
def test_float32(name, atol, more, alone, tmp_path):
    expected = sharded(str(tmp_path), **{**CASES[name], "make": Single})["weights"]
    assert (distance(expected, alone["weights"]) > 1e-3) == (name == "bf16")
    assert all(distance(one["weights"], expected) < atol for one in more.of(name))


def test_checkpoints(more, alone, folder, tmp_path):
    """Of two processes for two, one and three; whole ones for one device, too."""
    assert_bits(more.of("whole noise again"), more.of("whole noise"))
    assert_same(more.of("from one"), alone)
    resume = f"{folder}/whole/step={STOP}.ckpt"
    assert_same([sharded(str(tmp_path / "plain"), resume=resume)], alone)
    for count in (1, 3):
        own = tmp_path / str(count)
        own.mkdir()
        group = run(count, str(own), functools.partial(others, folder))
        for name in ("ghost_bk", "whole"):
            assert_same(group.of(name), alone)


def test_split_and_sharded(folder, alone, tmp_path):
    group = run(4, str(tmp_path), functools.partial(others, folder))
    assert_same(group.of("split"), alone)


def test_meta_device(more):
    one, other = more.of("meta")
    assert_bits([one], [other])
    assert all(x.isfinite().all() for x in one["weights"].values())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, more):
    for found in more.of(name):
        assert found.startswith("Refused") and name in found


@pytest.mark.parametrize("name", FAILS)
def test_errors_of_one_process(name, more):
    first, second = more.of(name)
    assert "ProcessFailure: Process 1 has failed" in first
    assert ("mine" if name == "before" else name) in second
