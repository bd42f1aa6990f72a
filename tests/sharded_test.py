"""Models sharded by ``fully_shard`` (FSDP2).

The oracle is the same training in a single process (processes.py).
"""

import copy
import functools
import math
import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from opacus.utils.batch_memory_manager import wrap_data_loader
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from opacus_ext import clipped_grads, per_sample_grads
from opacus_ext.data import Poisson
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.optimizers import AdamBC, ScaledAdam
from tests import processes
from tests.common import clipped_sum, make_private, next_token_loss, norms_of, oracle
from tests.processes import (
    TOKENS,
    TRANSFORMERS,
    assert_close,
    assert_noise,
    assert_refused,
    device,
    noise,
    of_transformers,
    refusal,
    refusals,
    share,
    whole,
)

MODES = ("ghost", "ghost_bk", "scan", "auto")
BOUND = 0.3


# -- models ------------------------------------------------------------------------


class Block(nn.Module):
    """``reads`` says how it reads values of its input."""

    def __init__(self, reads=""):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(8),
            nn.Linear(8, 10),
            nn.Linear(10, 8),
        )
        self.unused, self.reads = nn.Linear(2, 3), reads

    def forward(self, x, mask=None):
        if self.reads == "branch" and x.sum() > 0:
            return x + self.down(self.up(x))
        y = self.up(self.norm(x))
        if self.reads == "item":
            y = y * float(x.mean())
        return x + self.down((y if mask is None else y * mask[..., None]).tanh())


class Net(nn.Module):
    """A model of tokens with a tied head."""

    def __init__(self, reads="", recomputes="", computes=False):
        super().__init__()
        self.table = nn.Embedding(31, 8)
        self.blocks = nn.ModuleList(Block(reads) for _ in range(2))
        self.head = nn.Linear(8, 31, bias=False)
        self.head.weight = self.table.weight
        self.recomputes, self.computes = recomputes, computes

    def forward(self, ids, mask=None):
        x = self.table(ids)
        if self.computes:
            x = x @ (self.table.weight.T @ self.table.weight)
        for block in self.blocks:
            if self.recomputes:
                reentrant = self.recomputes == "reentrant"
                x = checkpoint(block, x, mask, use_reentrant=reentrant)
            else:
                x = block(x, mask)
        return self.head(x)


def frozen():
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


MODELS = {
    "plain": Net,
    "branches": lambda: Net("branch"),
    "item": lambda: Net("item"),
    "checkpoint": lambda: Net(recomputes="yes"),
    "reentrant": lambda: Net(recomputes="reentrant"),
    "both": lambda: Net("branch", recomputes="reentrant"),
    "computed": lambda: Net(computes=True),
    "frozen": frozen,
    **{
        name: functools.partial(of_transformers, name)
        for name in ("gpt2", "mixtral", "t5")
    },
}
LAYERS = ("Block", "GPT2Block", "MixtralDecoderLayer", "T5Block")


# -- cases -------------------------------------------------------------------------

STEPS = ((3, 3, 1), (4, 1, 0), (0, 5, 2), (0, 0, 0), (1, 2, 2))


@dataclass(frozen=True)
class Case(processes.Case):
    """The mask leaves out the last tokens of every other sample."""

    sizes: Any = STEPS
    masked: bool = False
    reshards: bool = True

    def __str__(self):
        return f"{super().__str__()},{self.masked},{self.reshards}"

    def build(self):
        model = MODELS[self.model]()  # the kernels of experts have no float64
        return model if self.model in TRANSFORMERS else model.double()

    def spread(self, model, **kwargs):
        if not kwargs:
            kwargs = {"reshard_after_forward": self.reshards}
        for layer in model.modules():
            if type(layer).__name__ in LAYERS:
                fully_shard(layer, **kwargs)
        return fully_shard(model, **kwargs)

    def batch(self, step, size):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, TOKENS, (size, 5 + step % 3), generator=generator)
        mask = torch.ones_like(ids)
        mask[::2, -2:] = 0
        return {"ids": ids, "mask": mask} if self.masked else {"ids": ids}

    def losses(self, model, batch):
        if self.model in TRANSFORMERS:
            return super().losses(model, batch)
        return next_token_loss(model(**batch), batch["ids"])


PLAIN = Case("plain")


def sharded(case=PLAIN, **kwargs):
    return case.spread(case.start(), **kwargs)


def ids_of(size, step=0):
    """The share of this process of a batch with as many samples in each."""
    count = dist.get_world_size()
    return share(PLAIN.batch(step, size * count), [size] * count)


TWO = [
    *(Case("plain", mode) for mode in MODES),
    Case("plain", masked=True, optimizer="Adam", wrap=False, reshards=False),
    Case("plain", clipping="per_layer"),
    Case("plain", clipping="adaptive"),
    Case("branches"),
    Case("item", "ghost"),
    Case("checkpoint", masked=True),
    Case("reentrant", clipping="per_layer"),
    Case("computed"),
    Case("frozen", "scan"),
    Case("gpt2", sizes=STEPS[:3], masked=True),
    Case("mixtral", sizes=STEPS[:3]),
    Case("t5", "auto", sizes=STEPS[:3]),
]
THREE = [
    Case("plain"),
    Case("branches", "ghost", reshards=False, wrap=False),
    Case("both"),
    Case("computed", "scan"),
]


# -- what is not a comparison of weights ---------------------------------------------


def noise_of():
    """On layers of many entries, each of which is sharded."""
    layers = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 50))
    return noise(fully_shard(layers.double().to(device())), 2, 60)[0]


ADAM = Case("plain", optimizer="Adam")


def state_of(model, optimizer):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }


def load(model, optimizer, path):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def saved(folder):
    """Trains two steps and saves, with any number of processes."""
    model = sharded()
    private = ADAM.private(model, noise_multiplier=1.0)
    for step in range(2):
        private.step(ids_of(2, step), ADAM.losses)
    state = state_of(model, private.optimizer.original_optimizer)
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    if dist.get_rank() == 0:
        rest = private.engine.accountant.state_dict(), private.optimizer.noise_state()
        torch.save(rest, f"{folder}/private.pt")
    return go_on(model, private)


def go_on(model, private):
    private.step(ids_of(6 // dist.get_world_size(), 9), ADAM.losses)
    return whole(model), private.engine.accountant.history


def loaded(folder):
    """Goes on from what another number of processes has saved."""
    model = sharded()
    optimizer = ADAM.plain_optimizer(model)
    load(model, optimizer, f"{folder}/saved")
    private = ADAM.private(model, optimizer=optimizer, noise_multiplier=1.0)
    history, noise_state = torch.load(f"{folder}/private.pt")
    private.engine.accountant.load_state_dict(history)
    private.optimizer.repeat_noise(noise_state)
    return go_on(model, private)


def mixed():
    """Sums in float32 where layers compute in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    case = Case("gpt2")
    model = sharded(case, mp_policy=policy)
    private = case.private(model)
    before = whole(model)
    private.optimizer.zero_grad()
    private.backward(ids_of(3), case.losses)
    grads = {n: p.grad for n, p in model.named_parameters()}
    private.optimizer.step()
    moved = {n: (before[n] - p) * 6 for n, p in whole(model).items()}
    return {g.dtype for g in grads.values()}, moved


class Asking(NamedTuple):
    """Losses that ask something of the data; whether samples can run together."""

    asks: str
    sizes: Any
    together: bool
    padded: Any = ()  # numbers of samples, among those of all processes
    lengths: Any = (6, 6)
    model: str = "plain"

    def batches(self):
        given: Any = dict(generator=torch.Generator().manual_seed(0))
        sizes = zip(self.sizes, self.lengths)
        batches = [torch.randint(1, 31, size, **given) for size in sizes]
        rows = [row for ids in batches for row in ids]
        for i in self.padded:
            rows[i][-2:] = 0
        return batches

    def loss(self, model, ids):
        sign, mask = 1.0, None
        if self.asks == "padding" and (ids == 0).any():
            mask = (ids != 0).double()
        elif self.asks == "mask":
            ids = ids[:, (ids != 0)[0]]
        elif self.asks == "tokens":  # one after the other
            tokens = enumerate(ids[0])
            ids = ids[:, : next((t for t, token in tokens if token == 0), None)]
        elif self.asks == "bits":
            sign = math.copysign(1, (0.0 * (ids[0, 0] - 14.5)).item())
        elif self.asks == "generator":  # what vmap can't run
            generator = torch.Generator().manual_seed(3)
            mask = torch.rand(ids.shape, generator=generator).double()
        elif self.asks == "process" and dist.is_initialized() and is_batched(ids):
            if dist.get_rank():
                raise ValueError("of mine")
        logits = model(ids, mask) * sign
        return logits.logsumexp(-1).mean() + logits[..., 3].square().mean()


ASKING = [
    Asking("padding", (3, 3), True),
    Asking("padding", (4, 1), True),
    Asking("padding", (3, 0), True),
    Asking("padding", (0, 2), True, (0, 1)),
    Asking("padding", (0, 0), True),
    Asking("padding", (3, 3), True, (), (5, 7)),
    Asking("padding", (3, 3), False, (0, 1, 2)),
    Asking("padding", (4, 2), False, (1,)),
    Asking("padding", (3, 0), False, (0,)),
    Asking("mask", (3, 0), True),
    Asking("mask", (3, 2), False, (), (5, 7)),
    Asking("mask", (1, 4), False, (2,), (5, 7)),
    Asking("tokens", (2, 3), True),
    Asking("tokens", (2, 3), False, (), (5, 7)),
    Asking("bits", (2, 2), False),
    Asking("generator", (2, 1), False),
    Asking("process", (2, 3), False),
    Asking("padding", (0, 4), False, (), (6, 6), "item"),
    Asking("padding", (3, 2), True, (), (6, 6), "checkpoint"),
]


def aware():
    """
    Steps of AdamBC on shards, the last one after its state went through a checkpoint,
    and on whole parameters that get the same gradients.
    """
    model = sharded()
    shards = AdamBC(model.parameters(), lr=0.1)
    plain = [nn.Parameter(p.full_tensor()) for p in model.parameters()]
    alone, told = AdamBC(plain, lr=0.1), []
    shards.register_step_pre_hook(lambda *_: told.append(shards.noise_variance))
    private = PLAIN.private(model, 4, optimizer=shards, noise_multiplier=1.0)
    for step in range(4):
        if step == 3:
            saved = copy.deepcopy(get_optimizer_state_dict(model, shards))
            for state in shards.state.values():
                state["noise"] = 0.0
            set_optimizer_state_dict(model, shards, saved)
        private.step(ids_of(2), PLAIN.losses)
        for p, whole_one in zip(model.parameters(), plain):
            whole_one.grad = p.grad.full_tensor()
        alone.noise_variance = told[-1]
        alone.step()
    return told, list(whole(model).values()), [p.detach() for p in plain]


def asking():
    """Clipped sums, and in how many calls of the loss."""
    found = {}
    for case in ASKING:
        model, calls = sharded(Case(case.model)), []

        def loss(ids):
            calls.append(ids)
            return case.loss(model, ids)

        got = clipped_grads(loss, model, case.batches()[dist.get_rank()], BOUND)
        sums = {n: x.full_tensor() for n, x in got.sums.items()}
        found[str(case)] = sums, got.norms, len(got.losses), len(calls)
    return found


def answers():
    """What a loss is told where only process 0 has samples."""
    model, told = fully_shard(nn.Linear(4, 1).double()), {}
    x = torch.tensor([[-2.5, -0.0, 0.0, 7.0]]).double()
    kinds = "bool uint8 int64 float16 bfloat16 float32 float64 complex64 complex128"

    def loss(x):
        for kind in kinds.split():
            told[kind] = repr(x.to(getattr(torch, kind))[0].tolist())
        told["none"] = x[0, :0].tolist()
        return model(x).sum()

    clipped_grads(loss, model, x.expand(3 * (dist.get_rank() == 0), 4), 1.0)
    return told


def drawing(model, batch_size, **given):
    """Draws by Poisson sampling from 24 records, which are numbers."""
    data = TensorDataset(torch.arange(24.0).double()[:, None])
    given = {"dataset": data, "poisson_sampling": True, **given}
    return make_private(model.double(), "ghost_bk", batch_size=batch_size, **given)


def drawn():
    """What each process draws, seeded alike, by Opacus's loader and by a sampling."""
    found = []
    for given in ({}, {"sampling": Poisson(expected_batch_size=2)}):
        torch.manual_seed(0)
        private = drawing(fully_shard(nn.Linear(1, 2).double()), 2, **given)
        batches = [x.flatten().tolist() for (x,) in private.loader]
        found.append((batches, private.optimizer.expected_batch_size))
    return found


def left_out():
    """One process leaves out a batch, which workers have drawn ahead, and goes on."""
    found = {}
    for physical in (None, 1):
        private = drawing(DDP(nn.Linear(1, 2).double()), 4, workers=1)
        loader, said = private.loader, []
        if physical:
            loader = wrap_data_loader(
                data_loader=loader,
                max_batch_size=physical,
                optimizer=private.optimizer,
            )
        for i, (x,) in enumerate(loader):
            if i != 1 or dist.get_rank() == 0:
                step = (private.step, x / 24, lambda model, x: model(x).sum(1))
                said.append(refusal(*step))
            if len(said) == 3:
                break
        found[physical] = said
    return found


def replicated():
    """Two copies of two shards: the same weights in both copies, noise too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    found = {}
    for multiplier in (0.0, 2.0):
        model = sharded(mesh=mesh)
        private = PLAIN.private(model, 8, noise_multiplier=multiplier)
        private.step(ids_of(2), PLAIN.losses)
        found[multiplier] = whole(model)
    return found


# -- what is refused ---------------------------------------------------------------


def private_part(ignores=False):
    """Of a model of which a part alone, or not every parameter, is sharded."""
    model = Net()
    if ignores:
        fully_shard(model, ignored_params={model.table.weight})
    else:
        fully_shard(model.blocks[0])
    PLAIN.private(model)


def scaled():
    model = sharded()
    PLAIN.private(model, optimizer=ScaledAdam(model.parameters()))


def without_values():
    with torch.device("meta"):
        PLAIN.private(fully_shard(Net()))


def frozen_later():
    model = sharded()
    private = PLAIN.private(model)
    model.blocks[0].requires_grad_(False)
    private.step(ids_of(2), PLAIN.losses)


def set_by_one(name, value):
    """A setting that one process changes."""
    private = PLAIN.private(sharded(), noise_multiplier=1.0)
    if dist.get_rank() == 1:
        setattr(private.optimizer, name, value)
    private.step(ids_of(2), PLAIN.losses)


REFUSED = {
    **{
        mode: (
            lambda mode=mode: Case("plain", mode).private(sharded()),
            "this mode has whole gradients",
        )
        for mode in ("hooks", "functorch")
    },
    "scales": (
        scaled,
        "Take torch.optim.AdamW or opacus_ext.optimizers.AdamBC",
    ),
    "scale=": (
        lambda: clipped_grads(lambda ids: 0, sharded(), ids_of(2), 1.0, scale={"a": 1}),
        "is not computed for models sharded",
    ),
    "part": (private_part, "Call fully_shard on the whole model, last"),
    "ignored": (lambda: private_part(ignores=True), "table.weight is not sharded"),
    "meta": (without_values, "table.weight is on the meta device"),
    "frozen": (frozen_later, "requires_grad of blocks.0.norm.weight was set to False"),
    **{
        name: (functools.partial(set_by_one, name, value), "differ between processes")
        for name, value in {"noise_multiplier": 0.0, "max_grad_norm": 9.0}.items()
    },
}


class Choosing(nn.Module):
    """Samples, or random numbers, choose between two sharded layers of one shape."""

    def __init__(self, way):
        super().__init__()
        self.first, self.left, self.right = (nn.Linear(4, 4) for _ in range(3))
        self.way = way

    def forward(self, x):
        y = self.first(x)
        if self.way == "outputs":
            return self.left(y), self.right(y)
        by = {"torch": torch.rand(()), "python": random.random()}
        by = by.get(self.way, 0.5 + x.sum())
        try:
            return self.left(y) if by > 0.5 else self.right(y)
        except Exception:
            if self.way != "catches":
                raise
        return y


def choices():
    """All are refused by all: else layers would be gathered half and half."""
    found = {}

    def losses(model, x):
        y = model(x)
        return (y[dist.get_rank()] if isinstance(y, tuple) else y).sum(1)

    for way in ("sum", "torch", "python", "catches", "outputs"):
        torch.manual_seed(0)
        model = Choosing(way).double()
        for layer in (model.left, model.right, model):
            fully_shard(layer)
        private = make_private(model, "ghost_bk", batch_size=6)
        x = torch.randn(3, 4, dtype=torch.float64).abs() * (1 - 2 * dist.get_rank())
        torch.manual_seed(dist.get_rank())
        random.seed(dist.get_rank())
        for step in range(6):
            said = refusal(private.step, x, losses)
            if said != "not refused":
                break
        found[way] = said
    return found


def tensor_parallel():
    """A layer that processes compute together, in all ways to train it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "parts"))

    def split(model):
        parallelize_module(model.blocks[0], mesh["parts"], {"up": ColwiseParallel()})
        return model

    ids, model = PLAIN.batch(0, 2)["ids"], split(Net())
    below = fully_shard(split(Net()), mesh=mesh["data"])
    params, loss = dict(model.named_parameters()), lambda x: model(x).sum()
    calls = {
        mode: functools.partial(Case("plain", mode).private, model)
        for mode in (*MODES, "hooks", "functorch")
    }
    calls["below"] = lambda: PLAIN.private(below)
    calls["frozen"] = lambda: PLAIN.private(split(frozen()))
    calls["loss"] = lambda: clipped_grads(loss, params, ids, 1.0)
    calls["rows"] = lambda: per_sample_grads(loss, params, ids)
    calls["below loss"] = lambda: clipped_grads(
        lambda x: below(x).sum(), below, ids, 1.0
    )
    return {name: refusal(call) for name, call in calls.items()}


def evaluated():
    """An evaluation before each step changes nothing."""
    model = sharded()
    private = PLAIN.private(model)
    for step, sizes in enumerate(PLAIN.steps(2)):
        batch = share(PLAIN.batch(step, sum(sizes)), sizes)
        private.optimizer.zero_grad()
        private.backward(batch, PLAIN.losses)
        with torch.no_grad():
            PLAIN.losses(private.module, batch)
        private.optimizer.step()
    return whole(model)


CASES = {2: TWO, 3: THREE}


def jobs(folder: str, size: int):
    others = {
        2: {
            "noise": noise_of,
            "saved": functools.partial(saved, folder),
            "mixed": mixed,
            "aware": aware,
            "drawn": drawn,
            "refused": lambda: refusals(REFUSED),
            "choices": choices,
            "asking": asking,
            "answers": answers,
            "tensor parallel": tensor_parallel,
            "evaluated": evaluated,
            "left out": left_out,
        },
        3: {"loaded": functools.partial(loaded, folder)},
        4: {"replicated": replicated},
    }
    return {**{str(case): case.train for case in CASES.get(size, [])}, **others[size]}


group = processes.groups(jobs)


# -- tests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, case", [(n, case) for n in CASES for case in CASES[n]], ids=str
)
def test_processes_train_as_one(size, case, group):
    case.check(group(size))


def test_noise(group):
    """Std sigma C on each shard, of its own in each step; all processes agree."""
    first, second = group(2).of("noise")
    for one, other in zip(first, second):
        for name, added in one.items():
            assert torch.equal(added, other[name])
            assert_noise(added)
        assert_noise(*one["0.weight"].chunk(2))
    assert_noise(*(step["0.weight"] for step in first))


def test_adam_that_knows_the_noise(group):
    for told, found, expected in group(2).of("aware"):
        assert told == [pytest.approx((BOUND / 4) ** 2)] * 4
        for x, y in zip(found, expected):
            torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-10)


def test_saved_by_two_and_loaded_by_three_processes(group):
    """Weights, state of Adam and accountant; noise is that of the shards there are."""
    (after, history), _ = group(2).of("saved")
    for state, again in group(3).of("loaded"):
        assert again == history and sum(n for _, _, n in again) == 3
        assert_close([state], after, 0.05)  # Adam's steps are about 0.01


def test_mixed_precision(group):
    for dtypes, moved in group(2).of("mixed"):
        assert dtypes == {torch.float32}
        norm = torch.stack([x.norm() for x in moved.values()]).norm()
        assert 0 < float(norm) <= 6 * BOUND * 1.001


def test_processes_draw_one_batch(group):
    """Each record in one process, at the rate of one; empty batches are steps too."""
    for (first, size), (second, _) in zip(*group(2).of("drawn")):
        assert len(first) == len(second) == 12 and size == 1
        for a, b in zip(first, second):
            assert not {*a} & {*b} and len(a) - len(b) in (0, 1)
        assert [] in second and len({*sum(first + second, [])}) > 12


def test_copies_of_shards(group):
    found = group(4).of("replicated")
    expected = Case("plain", sizes=[[2] * 4]).alone(4)
    assert_close([one[0.0] for one in found], whole(expected), 1e-10)
    assert_close([one[2.0] for one in found], found[0][2.0], 0)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, group):
    assert_refused(group(2), name, REFUSED[name][1])


def test_tensor_parallel_is_refused(group):
    for found in group(2).of("tensor parallel"):
        for name, said in found.items():
            assert said.startswith("Refused"), name
            assert "Tensor parallelism is not supported" in said
            assert "use fully_shard or DDP" in said


def test_layers_that_are_chosen_are_refused(group):
    for found in group(2).of("choices"):
        assert "compute their losses from different outputs" in found.pop("outputs")
        for said in found.values():
            assert said.startswith("Refused: Processes run different layers"), said


@pytest.mark.parametrize("case", ASKING, ids=str)
def test_questions_about_data(case, group):
    """All samples of all processes give one answer, or run one by one."""
    model = Case(case.model).start()
    each = [
        oracle(model, ids, lambda model, ids: case.loss(model, ids)[None])
        for ids in case.batches()
    ]
    grads = {n: torch.cat([x[n] for x in each]) for n in each[0]}
    rounds = max(case.sizes)
    for found, part in zip(group(2).of("asking"), each):
        sums, norms, count, calls = found[str(case)]
        torch.testing.assert_close(norms, norms_of(part), rtol=0, atol=1e-10)
        for name, value in clipped_sum(grads, "flat", BOUND).items():
            torch.testing.assert_close(sums[name], value, rtol=0, atol=1e-10)
        assert count == len(norms)
        assert calls == (min(rounds, 1) if case.together else 1 + rounds)


def test_answers_of_all_kinds(group):
    """A process without samples is told those of the others, bit by bit."""
    first, second = group(2).of("answers")
    assert first == second and len(first) == 10
    assert first["float64"] == "[-2.5, -0.0, 0.0, 7.0]"


def test_evaluation_before_each_step(group):
    assert_close(group(2).of("evaluated"), whole(PLAIN.alone(2)), 1e-10)


def test_batch_that_one_process_leaves_out(group):
    """By the number of the batch, though workers have drawn later ones."""
    for found in group(2).of("left out"):
        assert all("of different draws" in x for x in found[None][1:]), found
        for said in found.values():
            assert [x == "not refused" for x in said] == [True, False, False], said
