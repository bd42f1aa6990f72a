"""Loops with Accelerate in two processes: each record alone is the oracle."""

import functools
import os

import pytest
import torch
import torch.distributed as dist
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from opacus_ext import PrivacyEngine
from opacus_ext.losses import PerSample

from .processes import refusal, run
from .training import train_alone, weights

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")
RECORDS, EACH, STEPS = 24, 4, 3  # two processes draw eight records on average
BOUND, RATE = 0.5, 0.1


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, RECORDS)).double()
    inputs = torch.randn(RECORDS, 3, dtype=torch.float64)
    return model, TensorDataset(inputs, torch.arange(RECORDS))


def accelerator(steps=1, shards=False, **settings):
    """With ``shards`` as on GPUs, as Accelerate leaves FSDP out on a CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size)
    os.environ.update(LOCAL_WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    config = DataLoaderConfiguration(**settings)
    given = dict(gradient_accumulation_steps=steps, dataloader_config=config)
    made = Accelerator(cpu=True, **given)
    if shards:
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="no_wrap")
        kind = dict(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        made.state._shared_state.update(kind)
    return made


class Loop:
    """What is prepared, made private, and trained."""

    def __init__(self, mode="ghost_bk", seed=None, noise=1.0, **settings):
        self.model, data = make()
        self.accelerator = accelerator(**settings)
        torch.manual_seed(dist.get_rank() if seed is None else seed)
        self.given = self.accelerator.prepare(
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9),
            DataLoader(data, batch_size=EACH, shuffle=True),
        )
        self.engine = PrivacyEngine(accountant="rdp")
        drawn = torch.Generator().manual_seed(2) if seed is None else None
        self.net, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=self.given[0],
            optimizer=self.given[1],
            criterion=PerSample(),
            data_loader=self.given[2],
            noise_multiplier=noise,
            max_grad_norm=BOUND,
            noise_generator=drawn,
            grad_sample_mode=mode,
        )
        self.criterion = criterion[0] if criterion else PerSample()

    def split(self, records):
        """The loader of physical batches."""
        given = {"data_loader": self.loader, "max_physical_batch_size": records}
        return BatchMemoryManager(**given, optimizer=self.optimizer).__enter__()

    def train(self, loader=None, epochs=1):
        """Returns the numbers of this process's records, by step."""
        seen = [[]]
        for _ in range(epochs):
            for x, y in loader or self.loader:
                self.optimizer.zero_grad()
                seen[-1] += y.tolist()
                losses = F.cross_entropy(self.net(x), y, reduction="none")
                self.accelerator.backward(self.criterion(losses))
                if not self.optimizer._check_skip_next_step(pop_next=False):
                    seen.append([])
                self.optimizer.step()
        return seen[:-1]


CASES = {
    "hooks": {},
    "ghost_bk": {},
    "auto": {"physical": 1},
    "ghost": {"split_batches": True},
    "scan": {"dispatch_batches": True},
    "sharded": {"shards": True, "noise": 0.0},  # each shard would have its own
}


def trained(mode, physical=None, **settings):
    loop = Loop("ghost_bk" if mode == "sharded" else mode, **settings)
    assert isinstance(loop.given[0], FSDPModule) == (mode == "sharded")
    seen = loop.train(physical and loop.split(physical), epochs=2)
    history = loop.engine.accountant.history
    found = weights(loop.accelerator.unwrap_model(loop.given[0]))
    for name, p in found.items():
        found[name] = p.full_tensor() if isinstance(p, DTensor) else p
    return {"seen": seen, "weights": found, "history": history}


def resumed(folder):
    """Twice from one checkpoint, by scripts that seed torch alike."""
    found = []
    for noise in (0.0, 1.0):
        loop = Loop(seed=0, noise=noise)
        loop.accelerator.register_for_checkpointing(loop.engine.accountant)
        loop.train()
        loop.accelerator.save_state(folder)
        loop.train()
        found.append([weights(loop.model)])
        for _ in range(2):
            loop = Loop(seed=0, noise=noise)
            loop.accelerator.register_for_checkpointing(loop.engine.accountant)
            loop.accelerator.load_state(folder)
            loop.train()
            found[-1].append(weights(loop.model))
    return found, loop.engine.accountant.history


def loader_after(physical=None, **settings):
    loop = Loop(**settings)
    loader = loop.split(physical) if physical else loop.loader
    loop.train(loop.accelerator.prepare(loader))


def model_after(mode):
    """As if the user had wrapped it; one that prepare has wrapped is left as it is."""
    loop = Loop(mode)
    assert loop.accelerator.prepare(loop.net) is loop.net
    del loop.given[0]._is_accelerate_prepared, loop.net._is_accelerate_prepared
    loop.net = loop.accelerator.prepare(loop.net)
    loop.train()


def optimizer_of_prepare():
    loop = Loop("hooks")
    loop.optimizer = loop.given[1]
    loop.optimizer._check_skip_next_step = lambda pop_next: False
    loop.train()


def prepared_last():
    model, data = make()
    PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(data, batch_size=EACH),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
    )


def every_record(prepares, **given):
    """Without Poisson sampling, and without a share of the data set."""
    made, (model, data) = accelerator(), make()
    *_, loader = PrivacyEngine().make_private(
        module=DistributedDataParallel(model),
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        data_loader=DataLoader(data, batch_size=EACH, **given or {"shuffle": True}),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        poisson_sampling=False,
    )
    next(iter(made.prepare(loader) if prepares else loader))


AGAIN = "prepared once more"
REFUSED = {
    "loader": (loader_after, AGAIN),
    "uneven": (functools.partial(loader_after, even_batches=False), AGAIN),
    "physical": (functools.partial(loader_after, 1, even_batches=False), AGAIN),
    "split": (functools.partial(loader_after, split_batches=True), AGAIN),
    "every record": (functools.partial(every_record, False), "count twice"),
    "sampler": (
        functools.partial(every_record, False, sampler=SubsetRandomSampler(range(24))),
        "give the DataLoader a torch.utils.data.DistributedSampler",
    ),
    "prepared": (functools.partial(every_record, True), "more records than"),
    "model": (functools.partial(model_after, "ghost_bk"), "wrapped by Distributed"),
    "hooked": (functools.partial(model_after, "hooks"), "wrapped by Distributed"),
    "accumulation": (functools.partial(Loop, steps=2), "gradient_accumulation_steps"),
    "optimizer": (optimizer_of_prepare, "step() of the optimizer that was passed"),
    "last": (prepared_last, "Wrap it before make_private"),
}


def jobs(folder, processes):
    return {
        **{mode: functools.partial(trained, mode, **CASES[mode]) for mode in CASES},
        "resumed": functools.partial(resumed, folder),
        "refused": lambda: {name: refusal(call) for name, (call, _) in REFUSED.items()},
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("state"))
    return run(2, str(tmp_path_factory.mktemp("two")), functools.partial(jobs, folder))


@pytest.mark.parametrize("mode", CASES)
def test_prepared_first(mode, two):
    """A step has each record of one draw once, noise once, and is counted once."""
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    one, other = two.of(mode)
    draws = [sorted(a + b) for a, b in zip(one["seen"], other["seen"], strict=True)]
    steps = STEPS if mode != "ghost" else 2 * STEPS  # EACH is for all processes there
    assert len(draws) == 2 * steps and all(len({*x}) == len(x) for x in draws)
    assert len({len(x) for x in draws}) > 2

    def loss_of(model, i):
        return F.cross_entropy(model(data[i][0][None]), data[i][1][None])

    sigma = CASES[mode].get("noise", 1.0)
    noise = sigma * BOUND, torch.Generator().manual_seed(2), torch.float64
    size = RECORDS / steps
    draws = [torch.tensor(x, dtype=torch.int64) for x in draws]
    clipped = train_alone(model, optimizer, draws, loss_of, size, BOUND, noise=noise)
    assert clipped
    for found in (one, other):
        assert found["history"] == [(sigma, 1 / steps, 2 * steps)]
        for name, value in weights(model).items():
            torch.testing.assert_close(
                found["weights"][name], value, rtol=0, atol=1e-12
            )


def test_state_that_is_loaded(two):
    """Draws and noise that are neither those before nor those of another run."""
    for found, history in two.of("resumed"):
        assert history == [(1.0, 1 / STEPS, 2 * STEPS)]
        for runs in found:
            for a, b in ((0, 1), (1, 2)):
                gap = (runs[a]["0.weight"] - runs[b]["0.weight"]).abs().max()
                assert gap > 1e-12


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, two):
    """In both processes, before a step is taken."""
    for found in two.of("refused"):
        assert found[name].startswith("Refused") and REFUSED[name][1] in found[name]
