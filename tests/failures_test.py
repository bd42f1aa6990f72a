"""Processes that fail, are killed, or have other numbers of physical batches."""

import functools
import math
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from opacus_ext.checkpoints import read, write
from opacus_ext.data import Poisson
from opacus_ext.losses import model_losses
from opacus_ext.refused import STAGES
from tests.processes import (
    LATE,
    assert_close,
    groups,
    preloaded,
    refusal,
    run,
    share,
    whole,
)
from tests.sharded_test import ADAM, Case, Net, load, state_of

WAYS = ("ddp", "fsdp2")
GPT2 = Case("gpt2")


def spread(way, model):
    """A model of this process, under one of the ways."""
    if way == "ddp":
        return DDP(model)
    for block in getattr(model, "blocks", ()):
        fully_shard(block)
    return fully_shard(model)


def weights(model):
    return {n.removeprefix("module."): p for n, p in whole(model).items()}


def trajectory(batches, case=ADAM, model=None, **given):
    """The weights after each step of one process."""
    model = case.start() if model is None else model
    optimizer = case.plain_optimizer(model)
    return [case.take_step(model, optimizer, batch, **given) for batch in batches]


# -- errors of one process -----------------------------------------------------------


class Failing(Net):
    """Fails in one process when it is told to."""

    fails = False

    def forward(self, ids):
        if self.fails:
            raise ValueError("of mine")
        return super().forward(ids)


class Mean(nn.Module):
    fails = False

    def forward(self, losses, _):
        if self.fails:
            raise ValueError("of mine")
        return losses.mean()


def failing(way, stage):
    """An error in the second of three steps, which under DDP is taken again."""
    torch.manual_seed(0)
    inner, criterion = Failing("item").double(), Mean()
    model = spread(way, inner)
    private = ADAM.private(model, criterion=criterion)
    batches = [share(ADAM.batch(step, 5), [3, 2]) for step in range(3)]
    private.step(batches[0], ADAM.losses)

    def state():
        parts = [model.state_dict(), private.optimizer.state_dict()["state"]]
        leaves = tree_leaves(parts)
        return [x.to_local() if hasattr(x, "to_local") else x for x in leaves]

    def losses(model, batch):
        found = ADAM.losses(model, batch)
        bad = fails and stage == "backward pass"
        return found * nn.Parameter(torch.ones(2).double()) if bad else found

    before = [x.clone() for x in state()]
    fails = dist.get_rank() == 1
    inner.fails = fails and stage == "forward pass"
    criterion.fails = fails and stage == "criterion"

    def step():
        private.optimizer.zero_grad()
        private.backward(batches[1], losses)
        if fails and stage == "step":
            private.optimizer.params[0].grad.mul_(2)
        private.optimizer.step()

    start = time.time()
    found = refusal(step)
    seconds, after = time.time() - start, state()
    unchanged = all(torch.equal(x, y) for x, y in zip(before, after))
    counted = sum(steps for _, _, steps in private.engine.accountant.history)
    if way == "fsdp2":  # the others are not told, and have given up
        return found, unchanged and counted == 1, seconds
    inner.fails = criterion.fails = fails = False
    for batch in batches[1:]:
        private.step(batch, losses)
    return found, unchanged and counted == 1, seconds, weights(model)


# -- physical batches ----------------------------------------------------------------


def own_splits(way):
    """Physical batches of one record in one process, and of four in the other."""
    private = ADAM.private(
        spread(way, ADAM.start()),
        dataset=TensorDataset(torch.ones(30, 5, dtype=torch.int64)),
        poisson_sampling=True,
        sampling=Poisson(expected_batch_size=6, steps=3),
    )
    with private.parts(1 + 3 * dist.get_rank()) as loader:
        for (some,) in loader:
            private.step({"ids": some}, ADAM.losses)
    return sum(steps for _, _, steps in private.engine.accountant.history)


def physical(way):
    """The draws of each logical batch, in physical batches of two."""
    model = spread(way, ADAM.start())
    ids = ADAM.batch(0, 30)["ids"]
    private = ADAM.private(
        model,
        dataset=TensorDataset(ids),
        poisson_sampling=True,
        sampling=Poisson(expected_batch_size=6, steps=5),
    )
    torch.manual_seed(0)
    sizes, drawn, steps, taken = [[]], [[]], 0, []
    with private.parts(2) as loader:
        for (some,) in loader:
            private.step({"ids": some}, ADAM.losses)
            sizes[-1].append(len(some))
            drawn[-1].append(some)
            steps = sum(steps for _, _, steps in private.engine.accountant.history)
            if steps == len(sizes):
                taken.append(weights(model))
                sizes.append([])
                drawn.append([])
    return sizes[:-1], [torch.cat(x) for x in drawn[:-1]], taken


# -- a model's own losses ------------------------------------------------------------


def own_losses(way):
    model = spread(way, GPT2.start())
    private = GPT2.private(model)
    for step, sizes in enumerate([[3, 2], [0, 4]]):
        batch = share(labeled(step, sum(sizes)), sizes)
        private.step(batch, model_losses)
    return weights(model)


def labeled(step, size):
    ids = GPT2.batch(step, size)["ids"]
    return {"input_ids": ids, "labels": torch.where(ids > 25, -100, ids)}


# -- kills ---------------------------------------------------------------------------


def batch_at(step):
    return ADAM.batch(step, 4)


def begun(way, folder=None):
    """A run of this process; it goes on from the last checkpoint in a folder."""
    model = spread(way, ADAM.start())
    optimizer = ADAM.plain_optimizer(model)
    done = last(folder) if folder else None
    if done and way == "fsdp2":
        load(model, optimizer, done)
    private = ADAM.private(model, optimizer=optimizer)
    if done and way == "ddp":
        given = {"module": private.handle, "optimizer": private.optimizer}
        private.engine.load_checkpoint(path=done, **given)
    elif done:
        private.engine.accountant.load_state_dict(read(done / "private.pt"))
    return private, model


def last(folder):
    """The last checkpoint: a folder of FSDP2 is complete once it has the accountant."""
    found = [*folder.glob("*.pt"), *(x.parent for x in folder.glob("*/private.pt"))]
    return max(found, key=lambda x: int(x.stem), default=None)


def save(way, private, model, folder, step):
    if way == "ddp" and dist.get_rank() == 0:
        given = {"module": private.handle, "optimizer": private.optimizer}
        private.engine.save_checkpoint(path=folder / f"{step}.pt", **given)
    elif way == "fsdp2":
        state = state_of(model, private.optimizer.original_optimizer)
        dcp.save(state, checkpoint_id=folder / str(step))
        if dist.get_rank() == 0:
            spent = private.engine.accountant.state_dict()
            write(folder / str(step) / "private.pt", spent)


def train_until_killed(rank, way, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=LATE),
    )
    private, model = begun(way)
    try:
        for step in range(1000):
            private.step(share(batch_at(step), [2, 2]), ADAM.losses)
            save(way, private, model, folder, step + 1)
    except Exception:
        os._exit(3)


def kill_one(folder, number):
    """Starts two processes and kills one; returns how the other has ended, and when."""
    chance = random.Random(number)
    folder.mkdir()
    context = preloaded()
    given = [(rank, WAYS[number % 2], folder) for rank in range(2)]
    both = [context.Process(target=train_until_killed, args=args) for args in given]
    for process in both:
        process.start()
    while last(folder) is None and all(process.is_alive() for process in both):
        time.sleep(0.02)
    time.sleep(chance.random())
    victim = chance.randrange(2)
    os.kill(both[victim].pid, signal.SIGKILL)
    start, other = time.time(), both[1 - victim]
    other.join(LATE + 10)
    other.kill()
    return other.exitcode, time.time() - start


def resumed(folder, number):
    """Two steps more than the last checkpoint has."""
    way = WAYS[number % 2]
    private, model = begun(way, folder)
    history = private.engine.accountant.history
    begin = sum(steps for _, _, steps in history)
    for step in (begin, begin + 1):
        private.step(share(batch_at(step), [2, 2]), ADAM.losses)
    return begin, int(last(folder).stem), weights(model), history


# -- groups of processes -------------------------------------------------------------


def jobs(folder, processes):
    found = {"own splits": functools.partial(own_splits, "ddp")}
    for stage in STAGES:
        found[stage] = functools.partial(failing, "ddp", stage)
    for way in WAYS:
        found[f"{way} physical"] = functools.partial(physical, way)
        found[f"{way} losses"] = functools.partial(own_losses, way)
    return found


def jobs_after(folder, processes):
    numbers = range(20)
    return {n: functools.partial(resumed, folder / str(n), n) for n in numbers}


LAST = {f"late {stage}": functools.partial(failing, "fsdp2", stage) for stage in STAGES}
group = groups(jobs, LAST)


@pytest.mark.parametrize("stage", STAGES)
def test_the_others_are_told(stage, group):
    """Which process has failed and in what; all go on as if it had not been."""
    first, second = group(2).of(stage)
    assert f"Process 1 has failed in its {stage}" in first[0], first[0]
    assert "Process 1 has failed" not in second[0]
    assert ("of mine" in second[0]) == (stage in STAGES[:2]), second[0]
    batches = [ADAM.batch(step, 5) for step in range(3)]
    expected = trajectory(batches, Case("item", optimizer="Adam"))[-1]
    for _, unchanged, seconds, found in (first, second):
        assert unchanged and seconds < LATE
        assert_close([found], expected, 1e-10)


@pytest.mark.parametrize("stage", STAGES)
def test_the_others_wait_where_a_model_is_sharded(stage, group):
    """They end in an error, as with plain FSDP2; no process takes the step."""
    first, second = group(2).of(f"late {stage}")
    assert first[0].startswith("ProcessFailure"), first[0]
    assert ("of mine" in second[0]) == (stage in STAGES[:2]), second[0]
    for _, unchanged, seconds in (first, second):
        assert unchanged and seconds < LATE + 5


def test_each_process_may_split_as_it_needs(group):
    assert group(2).of("own splits") == [3, 3]


@pytest.mark.parametrize("way", WAYS)
def test_as_many_physical_batches(way, group):
    """An odd draw is split into one more in one process; the other has an empty one."""
    (sizes, drawn, taken), (others, rest, again) = group(2).of(f"{way} physical")
    assert [len(x) for x in sizes] == [len(x) for x in others]
    assert len(sizes) == 5 and max(map(len, sizes)) > 1
    assert any(max(1, math.ceil(sum(x) / 2)) < len(x) for x in others), others
    batches = [{"ids": torch.cat(parts)} for parts in zip(drawn, rest)]
    for found in zip(trajectory(batches), taken, again):
        assert_close(found[1:], found[0], 1e-10)


@pytest.mark.parametrize("way", WAYS)
def test_losses_of_the_model(way, group):
    batches = [labeled(step, size) for step, size in enumerate((5, 4))]
    expected = trajectory(batches, GPT2, losses=lambda m, b: m(**b).loss[None])[-1]
    assert_close(group(2).of(f"{way} losses"), expected, 1e-6)


def test_killed_at_any_moment(tmp_path):
    """The other one ends, and the last checkpoint goes on as if nothing had been."""
    folders = [tmp_path / str(n) for n in range(20)]
    with ThreadPoolExecutor(4) as pool:
        ends = list(pool.map(kill_one, folders, range(20)))
    assert all(code == 3 and seconds < LATE + 5 for code, seconds in ends), ends
    (tmp_path / "after").mkdir()
    after = run(2, str(tmp_path / "after"), functools.partial(jobs_after, tmp_path))
    found = [each for n in range(20) for each in after.of(n)]
    longest = max(steps for steps, *_ in found) + 2
    expected = trajectory(map(batch_at, range(longest)))
    for steps, saved, state, history in found:
        assert steps == saved > 0
        assert sum(n for _, _, n in history) == steps + 2
        assert_close([state], expected[steps + 1], 1e-10)
