"""Models sharded by ``fully_shard`` (FSDP2).

The oracle is the same training in a single process, from the gradients of each sample
alone by plain autograd.
"""

import functools
import math
import random
from dataclasses import dataclass
from typing import Any, List, NamedTuple, Optional

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
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from opacus_ext import clipped_grads, per_sample_grads
from opacus_ext.data import Poisson
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.optimizers import Banded
from tests.common import clipped_sum, make_private, norms_of, oracle, trainable
from tests.processes import device, refusal, run

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


def of_transformers(name, **config):
    import transformers

    cls = getattr(transformers, name)
    return cls(cls.config_class(vocab_size=31, use_cache=False, **config)).train()


GPT2 = dict(n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0)
GPT2.update(eos_token_id=0, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
MIXTRAL = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2)
MIXTRAL.update(num_attention_heads=2, num_key_value_heads=1)
MIXTRAL.update(num_local_experts=4, num_experts_per_tok=2)
T5 = dict(d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
T5.update(dropout_rate=0.0, decoder_start_token_id=0)
MODELS = {
    "plain": Net,
    "branches": lambda: Net("branch"),
    "item": lambda: Net("item"),
    "checkpoint": lambda: Net(recomputes="yes"),
    "reentrant": lambda: Net(recomputes="reentrant"),
    "both": lambda: Net("branch", recomputes="reentrant"),
    "computed": lambda: Net(computes=True),
    "frozen": frozen,
    "gpt2": lambda: of_transformers("GPT2LMHeadModel", **GPT2),
    "mixtral": lambda: of_transformers("MixtralForCausalLM", **MIXTRAL),
    "t5": lambda: of_transformers("T5ForConditionalGeneration", **T5),
}
OF_TRANSFORMERS = ("gpt2", "mixtral", "t5")
LAYERS = ("Block", "GPT2Block", "MixtralDecoderLayer", "T5Block")


def model_of(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    return (model if name in OF_TRANSFORMERS else model.double()).to(device())


def sharded(name, **kwargs):
    model = model_of(name)
    for layer in model.modules():
        if type(layer).__name__ in LAYERS:
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def batch_of(name, step, size, masked):
    """Token ids of varying length; the mask leaves out the last of every other one."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(1, 31, (size, 5 + step % 3), generator=generator)
    mask = torch.ones_like(ids)
    mask[::2, -2:] = 0
    return {"ids": ids, "mask": mask} if masked else {"ids": ids}


def losses_of(model, batch):
    ids, given = batch["ids"], {}
    if "mask" in batch:
        given["mask"] = batch["mask"].double()
    parameters = [name for name, _ in model.named_parameters()]
    if any("decoder.block" in name for name in parameters):
        logits = model(input_ids=ids, decoder_input_ids=ids.flip(1)).logits
    elif any("lm_head" in n or "wte" in n for n in parameters):
        given = {"attention_mask": batch["mask"]} if "mask" in batch else {}
        logits = model(input_ids=ids, **given).logits
    else:
        logits = model(ids, **given)
    return F.cross_entropy(logits.transpose(1, 2), ids, reduction="none").mean(1)


# -- cases -------------------------------------------------------------------------

# The samples of each process, in each step.
STEPS = [[3, 3, 1], [4, 1, 0], [0, 5, 2], [0, 0, 0], [1, 2, 2]]


@dataclass(frozen=True)
class Case:
    """Some steps of training."""

    model: str
    mode: str = "ghost_bk"
    masked: bool = False
    clipping: str = "flat"
    optimizer: str = "SGD"
    wrap: bool = True
    reshards: Optional[bool] = None

    def __str__(self):
        given = (self.model, self.mode, self.clipping, self.optimizer)
        flags = [n for n in ("masked", "wrap") if getattr(self, n)]
        return ",".join([*given, *flags, *[str(self.reshards)] * (not self.wrap)])

    def sizes(self, processes: int) -> List[List[int]]:
        steps = STEPS[:3] if self.model in OF_TRANSFORMERS else STEPS
        return [sizes[:processes] for sizes in steps]

    def bounds(self, model: nn.Module) -> Any:
        count = len(trainable(model))
        return (
            BOUND if self.clipping == "flat" else [0.05 + i / 99 for i in range(count)]
        )

    def plain_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        lr = 1.0 if self.optimizer == "SGD" else 0.01
        return getattr(torch.optim, self.optimizer)(trainable(model).values(), lr=lr)

    def private(self, model: nn.Module, **kwargs: Any) -> Any:
        given = dict(batch_size=6, max_grad_norm=self.bounds(model))
        given.update(clipping=self.clipping, optimizer=self.plain_optimizer(model))
        return make_private(model, self.mode, self.wrap, **{**given, **kwargs})


TWO = [
    *(Case("plain", mode) for mode in MODES),
    Case("plain", masked=True, optimizer="Adam", wrap=False, reshards=False),
    Case("plain", clipping="per_layer"),
    Case("branches"),
    Case("item", "ghost"),
    Case("checkpoint", masked=True),
    Case("reentrant", clipping="per_layer"),
    Case("computed"),
    Case("frozen", "scan"),
    Case("gpt2", masked=True),
    Case("mixtral"),
    Case("t5", "auto"),
]
THREE = [
    Case("plain"),
    Case("branches", "ghost", reshards=False, wrap=False),
    Case("both"),
    Case("computed", "scan"),
]


def own(batch, sizes):
    return {
        key: x.split(sizes)[dist.get_rank()].to(device()) for key, x in batch.items()
    }


def whole(model):
    """The parameters, put together from all shards."""
    named = {n: p.detach() for n, p in model.named_parameters()}
    return {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).clone().cpu()
        for n, p in named.items()
    }


def train(case: Case) -> Any:
    kwargs = {} if case.reshards is None else {"reshard_after_forward": case.reshards}
    private = case.private(model := sharded(case.model, **kwargs))
    for step, sizes in enumerate(case.sizes(dist.get_world_size())):
        batch = batch_of(case.model, step, sum(sizes), case.masked)
        private.step(own(batch, sizes), losses_of)
    return whole(model), private.engine.accountant.history


def alone(case: Case, processes: int):
    """The same training from the gradients of single samples, by plain autograd."""
    model = model_of(case.model)
    names, optimizer = trainable(model), case.plain_optimizer(model)
    for step, sizes in enumerate(case.sizes(processes)):
        batch = batch_of(case.model, step, sum(sizes), case.masked)
        grads = oracle(model, batch, losses_of)
        sums = clipped_sum(grads, case.clipping, case.bounds(model))
        for name, p in names.items():
            p.grad = sums[name] / 6
        optimizer.step()
    return dict(model.named_parameters())


# -- what is not a comparison of weights ---------------------------------------------


def noise():
    """The noise of two steps, with equal seeds in all processes."""
    torch.manual_seed(7)
    layers = nn.Sequential(nn.Linear(60, 50), nn.Linear(50, 50))
    model = fully_shard(layers.double().to(device()))
    private = make_private(model, "ghost_bk", batch_size=6, noise_multiplier=3.0)
    before, added = whole(model), []
    for _ in range(2):
        x = torch.zeros(2, 60, dtype=torch.float64, device=device())
        private.step(x, lambda model, x: 0 * model(x).sum(1))
        added.append({n: (before[n] - p) * 6 for n, p in whole(model).items()})
        before = whole(model)
    return added


def saved(folder):
    """Trains two steps and saves, with any number of processes."""
    model = sharded("plain")
    private = Case("plain", optimizer="Adam").private(model, noise_multiplier=1.0)
    for step in range(2):
        size = dist.get_world_size()
        batch = batch_of("plain", step, 2 * size, False)
        private.step(own(batch, [2] * size), losses_of)
    optimizer = private.optimizer.original_optimizer
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.save(state, checkpoint_id=f"{folder}/saved")
    if dist.get_rank() == 0:
        rest = private.engine.accountant.state_dict(), private.optimizer.noise_state()
        torch.save(rest, f"{folder}/private.pt")
    return go_on(model, private)


def go_on(model, private):
    batch = batch_of("plain", 9, 6, False)
    sizes = [6 // dist.get_world_size()] * dist.get_world_size()
    private.step(own(batch, sizes), losses_of)
    return whole(model), private.engine.accountant.history


def loaded(folder):
    """Goes on from what another number of processes has saved."""
    model, case = sharded("plain"), Case("plain", optimizer="Adam")
    optimizer = case.plain_optimizer(model)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
    }
    dcp.load(state, checkpoint_id=f"{folder}/saved")
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])
    private = case.private(model, optimizer=optimizer, noise_multiplier=1.0)
    history, noise_state = torch.load(f"{folder}/private.pt")
    private.engine.accountant.load_state_dict(history)
    private.optimizer.repeat_noise(noise_state)
    return go_on(model, private)


def mixed():
    """Sums in float32 where layers compute in bfloat16."""
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded("gpt2", mp_policy=policy)
    private = Case("gpt2").private(model)
    before = whole(model)
    private.optimizer.zero_grad()
    private.backward(own(batch_of("gpt2", 0, 6, False), [3, 3]), losses_of)
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


def asking():
    """Clipped sums, and in how many calls of the loss."""
    found = {}
    for case in ASKING:
        model, calls = sharded(case.model), []

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


def drawn():
    """What each process draws, seeded alike, by Opacus's loader and by a sampling."""
    found = []
    for sampling in (None, Poisson(expected_batch_size=2)):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(1, 2).double())
        data = torch.utils.data.TensorDataset(torch.arange(24.0).double()[:, None])
        given = {} if sampling is None else {"sampling": sampling}
        private = make_private(
            model,
            "ghost_bk",
            batch_size=2,
            dataset=data,
            poisson_sampling=True,
            **given,
        )
        batches = [x.flatten().tolist() for (x,) in private.loader]
        found.append((batches, private.optimizer.expected_batch_size))
    return found


def left_out():
    """One process leaves out a batch, which workers have drawn ahead, and goes on."""
    found = {}
    for physical in (None, 1):
        data = torch.utils.data.TensorDataset(torch.ones(24, 1, dtype=torch.float64))
        private = make_private(
            DDP(nn.Linear(1, 2).double()),
            "ghost_bk",
            batch_size=4,
            dataset=data,
            poisson_sampling=True,
            workers=1,
        )
        loader = private.loader
        if physical:
            loader = wrap_data_loader(
                data_loader=loader,
                max_batch_size=physical,
                optimizer=private.optimizer,
            )
        said = []
        for i, (x,) in enumerate(loader):
            if i != 1 or dist.get_rank() == 0:
                step = (private.step, x, lambda model, x: model(x).sum(1))
                said.append(refusal(*step))
            if len(said) == 3:
                break
        found[physical] = said
    return found


def replicated():
    """Two copies of two shards: the same weights in both copies, noise too."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    case = Case("plain")
    found = {}
    for multiplier in (0.0, 2.0):
        model = sharded("plain", mesh=mesh)
        private = case.private(model, noise_multiplier=multiplier)
        batch = batch_of("plain", 0, 8, False)
        private.step(own(batch, [2] * 4), losses_of)
        found[multiplier] = whole(model)
    return found


def refusals():
    found, model = {}, sharded("plain")
    for mode in ("hooks", "functorch"):
        found[mode] = refusal(Case("plain", mode).private, model)
    found["noise"] = refusal(
        make_private, model, "ghost_bk", batch_size=6, noise=Banded(bands=2, steps=4)
    )
    part = Net()
    fully_shard(part.blocks[0])
    found["part"] = refusal(Case("plain").private, part)
    ignored = Net()
    fully_shard(ignored, ignored_params={ignored.table.weight})
    found["ignored"] = refusal(Case("plain").private, ignored)
    with torch.device("meta"):
        empty = fully_shard(Net())
    found["meta"] = refusal(Case("plain").private, empty)
    later = sharded("plain")
    private = Case("plain").private(later)
    later.blocks[0].requires_grad_(False)
    batch = own(batch_of("plain", 0, 4, False), [2, 2])
    found["frozen"] = refusal(private.step, batch, losses_of)
    return found


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

    def split(model=None):
        model = Net().double() if model is None else model
        parallelize_module(model.blocks[0], mesh["parts"], {"up": ColwiseParallel()})
        return model

    ids, model = batch_of("plain", 0, 2, False)["ids"], split()
    params, loss = dict(model.named_parameters()), lambda x: model(x).sum()
    modes = *MODES, "hooks", "functorch"
    found = {mode: refusal(Case("plain", mode).private, model) for mode in modes}
    below = fully_shard(split(), mesh=mesh["data"])
    found["below"] = refusal(Case("plain").private, below)
    found["frozen"] = refusal(Case("plain").private, split(frozen().double()))
    found["loss"] = refusal(clipped_grads, loss, params, ids, 1.0)
    found["rows"] = refusal(per_sample_grads, loss, params, ids)
    found["below loss"] = refusal(
        clipped_grads, lambda x: below(x).sum(), below, ids, 1.0
    )
    return found


def changed():
    """Settings that one process changes, and an evaluation before a step."""
    found = {}
    for name, value in (("noise_multiplier", 0.0), ("max_grad_norm", 9.0)):
        model = sharded("plain")
        private = Case("plain").private(model, noise_multiplier=1.0)
        if dist.get_rank() == 1:
            setattr(private.optimizer, name, value)
        batch = own(batch_of("plain", 0, 4, False), [2, 2])
        found[name] = refusal(private.step, batch, losses_of)
    case, model = Case("plain"), sharded("plain")
    private = case.private(model)
    for step, sizes in enumerate(case.sizes(2)):
        batch = own(batch_of("plain", step, sum(sizes), False), sizes)
        private.optimizer.zero_grad()
        private.backward(batch, losses_of)
        with torch.no_grad():
            losses_of(private.module, batch)
        private.optimizer.step()
    return found, whole(model)


def jobs(folder: str, processes: int):
    cases = {2: TWO, 3: THREE, 4: []}[processes]
    found = {str(case): lambda case=case: train(case) for case in cases}
    others = {
        2: {
            "noise": noise,
            "saved": lambda: saved(folder),
            "mixed": mixed,
            "drawn": drawn,
            "refusals": refusals,
            "choices": choices,
            "asking": asking,
            "answers": answers,
            "tensor parallel": tensor_parallel,
            "changed": changed,
            "left out": left_out,
        },
        3: {"loaded": lambda: loaded(folder)},
        4: {"replicated": replicated},
    }
    return {**found, **others[processes]}


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Runs a group of so many processes, all with one folder."""
    folder = str(tmp_path_factory.mktemp("shared"))

    def start(size):
        own = str(tmp_path_factory.mktemp(f"of{size}"))
        return run(size, own, functools.partial(jobs, folder))

    return start


@pytest.fixture(scope="module")
def two(start):
    return start(2)


@pytest.fixture(scope="module")
def three(two, start):
    return start(3)


@pytest.fixture(scope="module")
def four(start):
    return start(4)


# -- tests -------------------------------------------------------------------------


def assert_equals_one_process(case: Case, group) -> None:
    expected = alone(case, group.size)
    atol = 1e-6 if case.model in OF_TRANSFORMERS else 1e-10
    for state, history in group.of(str(case)):
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=atol)
        assert sum(n for _, _, n in history) == len(case.sizes(group.size))


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes(case, two):
    assert_equals_one_process(case, two)


@pytest.mark.parametrize("case", THREE, ids=str)
def test_three_processes(case, three):
    assert_equals_one_process(case, three)


def test_noise(two):
    """Std sigma C on each shard, of its own in each step; all processes agree."""
    first, second = two.of("noise")
    for one, other in zip(first, second):
        for name, added in one.items():
            assert torch.equal(added, other[name])
            tolerance = 5 * 3 / (2 * added.numel()) ** 0.5
            assert float(added.std()) == pytest.approx(3, abs=tolerance)
        halves = one["0.weight"].chunk(2)
        apart = torch.corrcoef(torch.stack([x.flatten() for x in halves]))
        assert abs(float(apart[0, 1])) < 5 / halves[0].numel() ** 0.5
    steps = torch.stack([x["0.weight"].flatten() for x in first])
    assert abs(float(torch.corrcoef(steps)[0, 1])) < 0.1


def test_saved_by_two_and_loaded_by_three_processes(two, three):
    """Weights, state of Adam and accountant; noise is that of the shards there are."""
    (after, history), _ = two.of("saved")
    for state, again in three.of("loaded"):
        assert again == history and sum(n for _, _, n in again) == 3
        apart = {n: float((state[n] - p).abs().max()) for n, p in after.items()}
        assert max(apart.values()) < 0.05  # Adam's steps are about 0.01


def test_mixed_precision(two):
    for dtypes, moved in two.of("mixed"):
        assert dtypes == {torch.float32}
        norm = torch.stack([x.norm() for x in moved.values()]).norm()
        assert 0 < float(norm) <= 6 * BOUND * 1.001


def test_processes_draw_one_batch(two):
    """Each record in one process, at the rate of one; empty batches are steps too."""
    for (first, size), (second, _) in zip(*two.of("drawn")):
        assert len(first) == len(second) == 12 and size == 1
        for a, b in zip(first, second):
            assert not {*a} & {*b} and len(a) - len(b) in (0, 1)
        assert [] in second and len({*sum(first + second, [])}) > 12


def test_copies_of_shards(four):
    expected = model_of("plain")
    grads = oracle(expected, batch_of("plain", 0, 8, False), losses_of)
    sums = clipped_sum(grads, "flat", BOUND)
    for found in four.of("replicated"):
        for name, p in expected.named_parameters():
            value = p - sums[name] / 6
            torch.testing.assert_close(found[0.0][name], value, rtol=0, atol=1e-10)
            assert torch.equal(found[2.0][name], four.of("replicated")[0][2.0][name])


def test_refused(two):
    words = {
        "hooks": "mode 'hooks' has whole gradients",
        "functorch": "mode 'functorch' has whole gradients",
        "noise": "Correlated noise is not drawn",
        "part": "Call fully_shard on the whole model, last",
        "ignored": "table.weight is not sharded",
        "meta": "table.weight is on the meta device",
        "frozen": "requires_grad of blocks.0.norm.weight was set to False",
    }
    for found in two.of("refusals"):
        for name, text in words.items():
            assert found[name].startswith("Refused") and text in found[name]


def test_tensor_parallel_is_refused(two):
    for found in two.of("tensor parallel"):
        for name, said in found.items():
            assert said.startswith(
                "Refused: blocks.0.up.weight, of shape (10, 8)"
            ), name
            assert "Tensor parallelism is not supported" in said
            assert "use fully_shard or DDP" in said


def test_layers_that_are_chosen_are_refused(two):
    for found in two.of("choices"):
        assert "compute their losses from different outputs" in found.pop("outputs")
        for said in found.values():
            assert said.startswith("Refused: Processes run different layers"), said


@pytest.mark.parametrize("case", ASKING, ids=str)
def test_questions_about_data(case, two):
    """All samples of all processes give one answer, or run one by one."""
    model = model_of(case.model)
    each = [
        oracle(model, ids, lambda model, ids: case.loss(model, ids)[None])
        for ids in case.batches()
    ]
    grads = {n: torch.cat([x[n] for x in each]) for n in each[0]}
    rounds = max(case.sizes)
    for found, part in zip(two.of("asking"), each):
        sums, norms, count, calls = found[str(case)]
        torch.testing.assert_close(norms, norms_of(part), rtol=0, atol=1e-10)
        for name, value in clipped_sum(grads, "flat", BOUND).items():
            torch.testing.assert_close(sums[name], value, rtol=0, atol=1e-10)
        assert count == len(norms)
        assert calls == (min(rounds, 1) if case.together else 1 + rounds)


def test_answers_of_all_kinds(two):
    """A process without samples is told those of the others, bit by bit."""
    first, second = two.of("answers")
    assert first == second and len(first) == 10
    assert first["float64"] == "[-2.5, -0.0, 0.0, 7.0]"


def test_settings_of_one_process_are_refused(two):
    expected = alone(Case("plain"), 2)
    for found, after in two.of("changed"):
        for said in found.values():
            assert "differ between processes" in said, said
        for name, value in expected.items():  # evaluated before each step
            torch.testing.assert_close(after[name], value, rtol=0, atol=1e-10)


def test_batch_that_one_process_leaves_out(two):
    """By the number of the batch, though workers have drawn later ones."""
    for found in two.of("left out"):
        assert all("of different draws" in x for x in found[None][1:]), found
        for said in found.values():
            assert [x == "not refused" for x in said] == [True, False, False], said
