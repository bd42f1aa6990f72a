"""Loops with Accelerate in two processes: each record alone is the oracle."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, SubsetRandomSampler

from opacus_ext import PrivacyEngine

from . import processes
from .accelerate_test import (
    BOUND,
    EACH,
    RATE,
    RECORDS,
    Loop,
    accelerator,
    assert_resumed,
    generator,
    make,
    resumed,
)
from .processes import assert_close, assert_refused, refusals
from .training import train_alone, weights

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 3  # of an epoch: two processes draw eight records on average

CASES = {
    "hooks": {},
    "ghost_bk": {},
    "auto": {"physical": 1},
    "ghost": {"split_batches": True},
    "scan": {"dispatch_batches": True},
    "sharded": {"shards": True, "noise": 0.0},  # each shard would have its own
}


def loop_of(mode="ghost_bk", physical=None, noise=1.0, **settings):
    given = dict(seed=dist.get_rank(), noise=noise, physical=physical)
    return Loop(mode, accelerator(**settings), drawn=generator(2), **given)


def trained(name):
    loop = loop_of("ghost_bk" if name == "sharded" else name, **CASES[name])
    assert isinstance(loop.given[0], FSDPModule) == (name == "sharded")
    seen = loop.train(epochs=2)
    found = weights(loop.accelerator.unwrap_model(loop.given[0]))
    return {"seen": seen, "weights": found, "history": loop.engine.accountant.history}


def loader_after(**settings):
    loop = loop_of(**settings)
    loop.loader = loop.accelerator.prepare(loop.loader)
    loop.train()


def model_after(mode):
    """As if the user had wrapped it; one that prepare has wrapped is left as it is."""
    loop = loop_of(mode)
    assert loop.accelerator.prepare(loop.net) is loop.net
    del loop.given[0]._is_accelerate_prepared, loop.net._is_accelerate_prepared
    loop.net = loop.accelerator.prepare(loop.net)
    loop.train()


def optimizer_of_prepare():
    loop = loop_of("hooks")
    loop.optimizer = loop.given[1]
    loop.train()


def every_record(model=None, prepares=False, poisson_sampling=False, **given):
    """Without Poisson sampling, and without a share of the data set."""
    made, (plain, data) = accelerator(), make()
    *_, loader = PrivacyEngine().make_private(
        module=model(plain) if model else plain,
        optimizer=torch.optim.SGD(plain.parameters(), lr=RATE),
        data_loader=DataLoader(data, batch_size=EACH, **given or {"shuffle": True}),
        noise_multiplier=1.0,
        max_grad_norm=BOUND,
        poisson_sampling=poisson_sampling,
    )
    next(iter(made.prepare(loader) if prepares else loader))


AGAIN = "prepared once more"
REFUSED = {
    "loader": (loader_after, AGAIN),
    "uneven": (functools.partial(loader_after, even_batches=False), AGAIN),
    "physical": (
        functools.partial(loader_after, physical=1, even_batches=False),
        AGAIN,
    ),
    "split": (functools.partial(loader_after, split_batches=True), AGAIN),
    "every record": (functools.partial(every_record, DDP), "count twice"),
    "sampler": (
        functools.partial(every_record, DDP, sampler=SubsetRandomSampler(range(24))),
        "give the DataLoader a torch.utils.data.DistributedSampler",
    ),
    "prepared": (functools.partial(every_record, DDP, True), "more records than"),
    "model": (functools.partial(model_after, "ghost_bk"), "wrapped by Distributed"),
    "hooked": (functools.partial(model_after, "hooks"), "wrapped by Distributed"),
    "accumulation": (
        functools.partial(loop_of, steps=2),
        "gradient_accumulation_steps",
    ),
    "optimizer": (optimizer_of_prepare, "step() of the optimizer that was passed"),
    "last": (
        functools.partial(every_record, poisson_sampling=True),
        "Wrap it before make_private",
    ),
}


def jobs(folder, size):
    return {
        **{name: functools.partial(trained, name) for name in CASES},
        "resumed": functools.partial(resumed, f"{folder}/state"),
        "refused": lambda: refusals(REFUSED),
    }


group = processes.groups(jobs)


@pytest.mark.parametrize("mode", CASES)
def test_prepared_first(mode, group):
    """A step has each record of one draw once, noise once, and is counted once."""
    model, data = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    one, other = group(2).of(mode)
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
    assert_close([one["weights"], other["weights"]], weights(model), 1e-12)
    for found in (one, other):
        assert found["history"] == [(sigma, 1 / steps, 2 * steps)]


def test_state_that_is_loaded(group):
    for found in group(2).of("resumed"):
        assert_resumed(found, STEPS)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name, group):
    """In both processes, before a step is taken."""
    assert_refused(group(2), name, REFUSED[name][1])
