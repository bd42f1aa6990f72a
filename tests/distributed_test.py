"""Several processes against one.

The oracle is the same training in a single process (processes.py).
"""

import copy
import functools
import os
import time
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler, TensorDataset

from opacus_ext import Clipping, check_per_sample_gradients
from opacus_ext.data import BallsInBins, Poisson, RandomAllocation
from opacus_ext.data.draws import Draws
from opacus_ext.distributed import expert_parallel, full_state_dict
from opacus_ext.layers import (
    Experts,
    SwitchFeedForward,
    TopKFeedForward,
    freeze_routers,
)
from opacus_ext.optimizers import AdamBC, Banded, ScaledAdam
from tests import processes
from tests.common import clipped_sum, make_private, norms_of, square_loss, trainable
from tests.neighbors.cases import setting
from tests.neighbors.loops import physical
from tests.neighbors.search import SLACK, Run, neighbors, norm_of_change
from tests.processes import (
    LATE,
    TOKENS,
    assert_close,
    assert_noise,
    assert_refused,
    noise,
    of_transformers,
    refusal,
    refusals,
    share,
    whole,
)

MODES = ("ghost", "ghost_bk")  # of experts that are spread
PLAIN = ("hooks", "ghost", "ghost_bk", "scan")  # of data parallelism alone


# -- models ------------------------------------------------------------------------


class Net(nn.Module):
    """Two layers of experts with something around them."""

    def __init__(self, *layers):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.layers, self.checkpoint = nn.ModuleList(layers), False

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            y = (
                checkpoint(layer, x, use_reentrant=False)
                if self.checkpoint
                else layer(x)
            )
            x = x + y
        return self.last(x)


class Biased(nn.Module):
    """Experts with a bias each, the choice given by the position of the token."""

    def __init__(self, choose):
        super().__init__()
        self.experts, self.choose = Experts(4, 5, 4, gated=True, bias=True), choose

    def forward(self, x):
        index = self.choose(torch.arange(x.shape[1])).expand(x.shape[:2])
        weights = x.new_ones(index.numel(), 1)
        y = self.experts(x.flatten(0, 1), index.reshape(-1, 1), weights)
        return y.view_as(x)


class Row(nn.Module):
    """An expert of a ModuleDict; ``mixes`` lets rows see each other."""

    def __init__(self, mixes=False):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 5), nn.LayerNorm(5)
        self.outer, self.mixes = nn.Linear(5, 4, bias=False), mixes

    def forward(self, x):
        y = self.outer(self.norm(self.inner(x)).tanh())
        return y - y.mean(0) if self.mixes else y


class RowExperts(nn.ModuleDict):
    """As Switch has them in transformers."""

    def forward(self, hidden_states, selected_experts, routing_weights):
        out = torch.zeros_like(hidden_states)
        for i, expert in enumerate(self.values()):
            token, choice = torch.where(selected_experts[..., i] > 0)
            if len(token):
                y = expert(hidden_states[token]) * routing_weights[token, choice, None]
                out = out.index_add(0, token, y)
        return out


class RowLayer(nn.Module):
    def __init__(self, **kwargs):
        super().__init__()
        self.router = nn.Linear(4, 4)
        self.experts = RowExperts({f"expert_{i}": Row(**kwargs) for i in range(4)})

    def forward(self, x):
        weights, index = self.router(x).softmax(-1).topk(2, dim=-1)
        chosen = nn.functional.one_hot(index, 4)
        rows = (y.flatten(0, 1) for y in (x, chosen, weights))
        return self.experts(*rows).view_as(x)


class TimeFirst(nn.Module):
    """Gives the experts the tokens of all samples at one time, then the next."""

    def __init__(self):
        super().__init__()
        self.net = TopKFeedForward(4, 6, 4)
        self.first = nn.Linear(3, 4)

    def forward(self, x):
        return self.net(self.first(x).transpose(0, 1)).transpose(0, 1)


class Branching(Net):
    """Does to one sample what it does not do to another."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else self.last(self.first(x))


def mixture():
    return Net(
        TopKFeedForward(4, 6, 4),
        SwitchFeedForward(4, 5, 4, capacity=2),
        Biased(lambda t: (3 * t) % 4),
    )


def frozen(model, *names):
    for name, p in model.named_parameters():
        if any(part in name for part in names):
            p.requires_grad_(False)
    return model


def without_routers():
    model = mixture()
    freeze_routers(model)
    return model


def recomputed():
    model = mixture()
    model.checkpoint = True
    return model


def last_first():
    """Registered in another order, and one layer of experts used twice."""
    layer = TopKFeedForward(4, 6, 4, top_k=1)
    return Net(layer, RowLayer(), layer)


def eager(name):
    """A model of transformers whose experts and routers compute in float64."""
    model = of_transformers(name)
    for module in model.modules():
        if hasattr(module, "router"):
            module.router.dtype = torch.float64
    if name == "mixtral":
        model.set_experts_implementation("eager")
    return model


def compiled(model):
    model = DDP(model)
    model.compile(backend="aot_eager")
    return model


# Of models that all processes hold whole.
WRAPPERS = {"plain": DPDDP, "ddp": DDP, "compiled": compiled}
MODELS: Dict[str, Callable[[], nn.Module]] = {
    "mixture": mixture,
    "rows": lambda: Net(RowLayer(), SwitchFeedForward(4, 5, 4)),
    "last first": last_first,
    "one chosen by all": lambda: Net(Biased(lambda t: 0 * t + 3)),
    "none chosen": lambda: Net(Biased(lambda t: 0 * t + 4)),
    "frozen experts": lambda: frozen(mixture(), "experts"),
    "frozen routers": without_routers,
    "frozen below": lambda: frozen(mixture(), "first", "router"),
    "only experts": lambda: frozen(mixture(), "first", "router", "last"),
    "rows that mix": lambda: Net(RowLayer(mixes=True)),
    "time first": TimeFirst,
    **dict.fromkeys(WRAPPERS, lambda: Net(nn.Linear(4, 4), nn.LayerNorm(4))),
    **{name: functools.partial(eager, name) for name in ("switch", "mixtral")},
}


# -- cases -------------------------------------------------------------------------

BOUND = 0.3
ROOTS = Clipping("roots", lambda norms, bound: bound / (1e-3 + norms))


class Case(processes.Case):
    """Experts are spread, and data; models that all processes hold are wrapped."""

    def build(self):
        return MODELS[self.model]().double()

    def spread(self, model):
        return WRAPPERS.get(self.model, expert_parallel)(model)

    def batch(self, step, size):
        generator = torch.Generator().manual_seed(step)
        if self.model in processes.TRANSFORMERS:
            return {"ids": torch.randint(TOKENS, (size, 6), generator=generator)}
        return torch.randn(size, 5, 3, dtype=torch.float64, generator=generator)

    def gathered(self, model, private):
        return full_state_dict(private.module)

    def sums(self, model, grads, processes):
        """By layer, the share of each process is one."""
        if self.clipping == ROOTS:
            factors = BOUND / (1e-3 + norms_of(grads))
            return {
                n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()
            }
        if self.clipping != "per_layer":
            return super().sums(model, grads, processes)
        total = {}
        for (name, g), bound in zip(grads.items(), self.bounds(model)):
            stacked = ".experts." in name and "expert_" not in name
            parts = g.chunk(processes, dim=1) if stacked else [g]
            sums = [clipped_sum({name: x}, "flat", bound)[name] for x in parts]
            total[name] = torch.cat(sums) if stacked else sums[0]
        return total

    def check(self, group):
        super().check(group)
        for result in group.of(str(self)):
            assert bool(result["spread"]) == (self.model not in WRAPPERS)
            self.start().load_state_dict(result["state"], strict=True)


def model_of(name):
    return Case(name).start()


UNEVEN = [[3, 3], [4, 1], [0, 5]]  # one step each
BOTH = [[2, 3], [4, 0]]
# "ghost" and "ghost_bk" have sums of their own; what is not in a sum runs in one.
TWO = [
    Case("mixture", "ghost", UNEVEN),
    Case("mixture", wrap=False),
    Case("rows", "ghost", UNEVEN, wrap=False),
    Case("rows", "ghost_bk", UNEVEN, optimizer="Adam"),
    Case("last first", "ghost", [[2, 3], [1, 1]]),
    Case("mixture", "ghost", [[3, 2]], clipping="automatic"),
    Case("mixture", "ghost_bk", [[3, 2]], clipping="normalized"),
    *(Case("mixture", mode, [[3, 2]], clipping="per_layer") for mode in MODES),
    Case("rows", "ghost", [[3, 2]], clipping="per_layer"),
    Case("mixture", "ghost", UNEVEN, clipping=ROOTS),
    Case("one chosen by all", "ghost_bk", BOTH),
    Case("none chosen", "ghost", BOTH),
    Case("frozen experts", "ghost_bk", BOTH),
    Case("frozen routers", "ghost_bk", BOTH),
    Case("frozen below", "ghost", BOTH),
    *(Case("only experts", mode, BOTH) for mode in MODES),
    Case("rows that mix", "ghost_bk", UNEVEN),
    Case("mixture", "ghost", [[0, 0], [2, 1]]),
    Case("time first", "ghost", UNEVEN),
    Case("mixture", "ghost_bk", UNEVEN * 2, optimizer="Adam"),
    *(Case("plain", mode, UNEVEN, clipping="automatic") for mode in PLAIN),
    Case("plain", "ghost_bk", [[3, 1]], clipping="per_layer"),
    *(Case("plain", mode, UNEVEN, clipping="adaptive") for mode in PLAIN),
    Case("mixture", "ghost_bk", UNEVEN, clipping="adaptive"),
    *(Case("ddp", mode, UNEVEN) for mode in PLAIN),
    Case("compiled", "ghost_bk", UNEVEN),
    Case("switch", "ghost", [[2, 1], [3, 2]]),
    Case("switch", "ghost_bk", [[2, 2]], clipping="per_layer"),
    Case("mixtral", "ghost_bk", [[2, 1], [3, 2]], wrap=False),
]
FOUR = [
    Case("mixture", "ghost_bk", [[2, 1, 0, 3], [1, 1, 1, 1]]),
    Case("rows", "ghost", [[0, 2, 0, 1], [2, 2, 2, 2]], wrap=False),
    Case("mixture", "ghost_bk", [[1, 2, 2, 0]], clipping="per_layer"),
    Case("last first", "ghost_bk", [[1, 1, 1, 1]] * 3, optimizer="Adam"),
]


# -- what is not a comparison of weights ---------------------------------------------


def own_batch(sizes: List[int], step: int = 0) -> torch.Tensor:
    return share(Case("mixture").batch(step, sum(sizes)), sizes)


def spread(model: Optional[nn.Module] = None) -> nn.Module:
    return expert_parallel(model_of("mixture") if model is None else model.double())


def unchanged(model: nn.Module, before: Dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[n]) for n, p in whole(model).items())


def noise_of(mode: str, clipping: str = "flat") -> Dict[str, Any]:
    """On parameters of many entries, of which some are spread."""
    torch.manual_seed(0)
    model = spread(nn.Sequential(nn.Linear(40, 40), TopKFeedForward(40, 40, 4)))
    bound = 0.5 if clipping == "flat" else [0.5] * len(trainable(model))
    given = dict(mode=mode, max_grad_norm=bound, clipping=clipping)
    added, private = noise(model, 4, 2, 40, **given)
    return {
        "added": added,
        "spread": [n for n, p in model.named_parameters() if hasattr(p, "sharding")],
        "sensitivity": private.optimizer.sensitivity,
        "history": private.engine.accountant.history,
    }


AWARE = [
    (kind, mode) for kind in (AdamBC, ScaledAdam) for mode in ("hooks", "ghost_bk")
]
PLAN = Banded(bands=3, steps=16, momentum=0.5)


def correlated_run():
    return run_of(noise=PLAN)


def run_of(**given):
    """A run whose records are known by their first entry."""
    torch.manual_seed(0)
    x = torch.randn(48, 5, dtype=torch.float64)
    x[:, 0] = torch.arange(48)
    model = nn.Linear(5, 3).double()
    private = make_private(
        DDP(model) if dist.is_initialized() else model,
        "ghost_bk",
        batch_size=6,
        dataset=TensorDataset(x),
        poisson_sampling=True,
        **given,
        noise_multiplier=2.0,
        noise_generator=torch.Generator().manual_seed(3),
        lr=0.1,
    )
    return private, model


def correlated() -> Dict[str, Any]:
    """Two epochs, and the last eleven steps again from what process 0 has saved."""
    private, model = correlated_run()
    torch.manual_seed(dist.get_rank())  # process 0 says what is drawn
    batches, saved = [], []
    for _ in range(2):
        for (batch,) in private.loader:
            if len(batches) == 5:
                saved = [model.state_dict(), private.optimizer.state_dict()]
                saved = copy.deepcopy([*saved, private.optimizer.generator.get_state()])
                dist.broadcast_object_list(saved)
            batches.append(batch)
            private.step(batch, square_loss)
    again, resumed = correlated_run()
    resumed.load_state_dict(saved[0])
    again.optimizer.load_state_dict(saved[1])
    again.optimizer.generator.set_state(saved[2])
    for batch in batches[5:]:
        again.step(batch.clone(), square_loss)
    place = dist.get_rank(), dist.get_world_size()
    other = Draws(Poisson(expected_batch_size=5 + place[0]), 48, None, place)
    return {
        "other": refusal(next, iter(other)),
        "batches": batches,
        "states": [whole(model), whole(resumed)],
        "history": private.engine.accountant.history,
    }


def aware_run(kind, mode, steps=4):
    """The weights after steps of an optimizer that knows the noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3)).double()
    private = make_private(
        DDP(model) if dist.is_initialized() else model,
        mode,
        batch_size=6,
        optimizer=kind(model.parameters(), lr=0.1),
        noise_multiplier=2.0,
        noise_generator=torch.Generator().manual_seed(3),
    )
    for step in range(steps):
        batch = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
        if dist.is_initialized():
            batch = share(batch, [4, 2])
        private.step(batch.double(), square_loss)
    return whole(model)


def allocated() -> Dict[str, Any]:
    """Epochs whose batches are drawn at once, by each process from the same seed."""
    torch.manual_seed(dist.get_rank())
    found = {}
    for sampling in (RandomAllocation(steps=4), BallsInBins(bins=4)):
        private, _ = run_of(sampling=sampling)
        epochs = []
        for _ in range(2):
            epochs.append([batch for (batch,) in private.loader])
            for batch in epochs[-1]:
                private.step(batch, square_loss)
        history = private.engine.accountant.history
        found[type(sampling).__name__] = epochs, history
    return found


def evaluation() -> torch.Tensor:
    """Before training, after some, and after the hooks are gone."""
    model = spread().eval()
    x = own_batch([3] * dist.get_world_size())
    with torch.no_grad():
        before = model(x)
    model.train()
    private = make_private(model, "ghost_bk", wrap=False, batch_size=4)
    model.eval()
    with torch.no_grad():
        hooked = model(x)
        other = model(x[: dist.get_rank() + 1])  # another size than any step had
    with_gradients = model(x).detach()
    private.handle.cleanup()
    torch.testing.assert_close(other, before[: dist.get_rank() + 1])
    for y in (hooked, with_gradients, model(x).detach()):
        torch.testing.assert_close(y, before)
    return before


def copied() -> Dict[str, torch.Tensor]:
    """Copies of a model know that its experts are spread."""
    model = copy.deepcopy(spread())
    private = Case("mixture").private(model, 5)
    assert any(private.optimizer._is_sharded(p) for p in private.optimizer.params)
    private.step(own_batch([3, 2]), square_loss)
    return full_state_dict(private.module)


# -- what is refused ---------------------------------------------------------------


def uneven() -> None:
    model = Net(TopKFeedForward(4, 4, 3))
    before, names = whole(model), list(model.state_dict())
    try:
        expert_parallel(model)
    finally:
        assert unchanged(model, before) and names == list(model.state_dict())
        assert not any(hasattr(part, "sharding") for part in model.modules())


def shared_with_another_layer() -> None:
    model = mixture()
    model.layers[0].experts.down_proj = model.layers[2].experts.down_proj
    expert_parallel(model)


def used_again(act: Callable[..., Any], **given: Any) -> None:
    """The model that is spread already, and not what expert_parallel returned."""
    model = mixture()
    expert_parallel(model)
    act(model, **given)


def private(mode: str = "ghost_bk", **given: Any) -> None:
    make_private(spread(), mode, **{"batch_size": 2, **given})


def checked() -> None:
    batch = torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    check_per_sample_gradients(spread(), batch, nn.MSELoss(), verbose=False)


def of_a_part() -> None:
    groups = [dist.new_group([0]), dist.new_group([1])]
    model = expert_parallel(mixture(), groups[dist.get_rank()])
    make_private(model, "ghost_bk", batch_size=2)


def private_again(mode: str) -> None:
    wrapper = make_private(DPDDP(nn.Linear(3, 2)), mode, batch_size=2).module
    make_private(wrapper, mode, batch_size=2)


REFUSED = {
    "uneven": (uneven, "has 3 experts"),
    "none": (
        lambda: expert_parallel(Net(nn.Linear(4, 4))),
        "has no experts that can be spread",
    ),
    "shared": (shared_with_another_layer, "shared with another layer"),
    "twice": (lambda: used_again(expert_parallel), "already"),
    "not wrapped": (
        lambda: used_again(make_private, mode="ghost_bk", batch_size=2),
        "expert_parallel has returned",
    ),
    **{
        mode: (functools.partial(private, mode), f"'{mode}'")
        for mode in ("hooks", "functorch", "scan", "auto")
    },
    "again": (lambda: private_again("hooks"), "several processes is private already"),
    "group": (of_a_part, "over 1 of 2 processes"),
    "check": (checked, "before expert_parallel"),
    "bounds": (
        lambda: private(max_grad_norm=1.0 + dist.get_rank()),
        "differ between processes",
    ),
}


def branching() -> nn.Module:
    return Branching(TopKFeedForward(4, 6, 4))


def signs() -> torch.Tensor:
    return torch.full((2, 5, 3), dist.get_rank() - 0.5).double()


# By name: what one process says, the model, the samples, and what comes before a step.
REFUSED_STEPS: Dict[str, Any] = {
    "checkpoint": ("activation checkpointing", recomputed, lambda: own_batch([3, 0])),
    "branches": ("take different branches", branching, lambda: own_batch([3, 1])),
    "elsewhere": ("leave out a layer of experts", branching, signs),
    "accumulated": ("second time", mixture, lambda: own_batch([2, 2])),
    "unequal": ("max_physical_batch_size", mixture, lambda: own_batch([2, 2])),
}


def refused_step(name: str, mode: str) -> str:
    """Nothing has changed, and no step is counted."""
    _, build, batch = REFUSED_STEPS[name]
    model = spread(build())
    private = make_private(model, mode, batch_size=4)
    before, x = whole(model), batch()
    if name == "accumulated":
        private.backward(x, square_loss)
        return refusal(private.backward, x, square_loss)
    if name == "unequal":  # one process has a physical batch more than the other
        private.optimizer.signal_skip_step(do_skip=dist.get_rank() == 0)
    found = refusal(private.step, x, square_loss)
    assert unchanged(model, before) and not private.engine.accountant.history
    return found


# -- loops -------------------------------------------------------------------------


def in_parts(mode: str) -> Dict[str, torch.Tensor]:
    """BatchMemoryManager, with as many physical batches in each process."""
    data = TensorDataset(own_batch([4, 4]))
    own = DistributedSampler(data, num_replicas=1, rank=0)
    private = Case("mixture", mode).private(spread(), 4, dataset=data, sampler=own)
    private.optimizer.expected_batch_size = 4  # in each process
    history = private.engine.accountant.history
    with private.parts(3) as loader:
        for (x,) in loader:
            assert not history
            private.step(x, square_loss)
    assert sum(steps for _, _, steps in history) == 1
    return full_state_dict(private.module)


class Shared(Run):
    """A search for neighbors across all processes, each with its own batches."""

    def __init__(self, one, model):
        super().__init__(one, DPDDP(model.double()))


def one_record_moves() -> Dict[str, List]:
    """By mode and loop, how far a record moves its own step and the next one."""
    found: Dict[str, List] = {}
    for mode in PLAIN:
        for loop in (None, physical):
            one, runs = setting("rows", mode=mode, loop=loop), []
            for _ in range(2):
                torch.manual_seed(0)
                runs.append(Shared(one, one.model()))
            left, right = runs
            for pair in range(8):
                first, second, bounds = neighbors(one.records, pair)
                here = pair % 2 == dist.get_rank()  # whose record it is
                sums = left.sees(first), right.sees(second if here else first)
                later = neighbors(one.records, pair + 100 + dist.get_rank())[0]
                after = left.sees(later), right.sees(later)
                own = norm_of_change(*sums) / (bounds * left.bound)
                moved = own, norm_of_change(*after) / left.bound
                found.setdefault(one.label, []).append(moved)
    return found


def half(mode: str, autocast: bool) -> torch.Tensor:
    """Rows in bfloat16, in autocast or of their own, of odd width."""
    torch.manual_seed(0)
    layer = TopKFeedForward(3, 5, 4, top_k=1)
    model = nn.Sequential(nn.Linear(3, 3), layer)
    dtype = torch.float32 if autocast else torch.bfloat16
    private = make_private(expert_parallel(model.to(dtype)), mode, batch_size=2)
    x = torch.randn(1 + dist.get_rank(), 1, 3).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        private.step(x, square_loss)
    return model[0].weight.detach()


def late(rank_of_late: int = 1) -> Optional[str]:
    """A process that comes too late for the others."""
    return lost(lambda: time.sleep(LATE + 2), rank_of_late)


def killed() -> Optional[str]:
    """A process that dies between forward and backward."""
    return lost(lambda: os._exit(1), dist.get_world_size() - 1)


def lost(happens: Callable[[], None], rank: int) -> Dict[str, Any]:
    model = spread()
    private = make_private(model, "ghost_bk", batch_size=4, noise_multiplier=1.0)
    size = dist.get_world_size()
    private.step(own_batch([2] * size), square_loss)
    before, start = whole(model), time.time()
    private.optimizer.zero_grad()
    losses = square_loss(private.module, own_batch([2] * size, 1))
    if dist.get_rank() == rank:
        happens()

    def rest():
        private.criterion(losses, None).backward()
        private.optimizer.step()

    found = refusal(rest)
    history = private.engine.accountant.history
    return {
        "refusal": found,
        "unchanged": unchanged(model, before),
        "again": refusal(private.optimizer.step),
        "still": unchanged(model, before),
        "steps": sum(steps for _, _, steps in history),
        "seconds": time.time() - start,
    }


def jobs(folder: str, size: int) -> processes.Jobs:
    found: Dict[str, Any] = {str(case): case.train for case in CASES[size]}
    found["evaluation"] = evaluation
    if size == 4:
        return found
    for mode in MODES:
        found[f"noise {mode}"] = functools.partial(noise_of, mode)
        found[f"in parts {mode}"] = functools.partial(in_parts, mode)
        for autocast in (False, True):
            given = mode, autocast
            found[f"half {mode} {autocast}"] = functools.partial(half, *given)
        for name in REFUSED_STEPS:
            call = functools.partial(refused_step, name, mode)
            found[f"{name} {mode}"] = call
    return {
        **found,
        "noise per_layer": lambda: noise_of("ghost_bk", "per_layer"),
        "copied": copied,
        "refused": lambda: refusals(REFUSED),
        "correlated": correlated,
        "aware": lambda: [aware_run(*of) for of in AWARE] if size == 2 else None,
        "allocated": allocated,
        "one record": one_record_moves,
    }


CASES = {2: TWO, 4: FOUR}
group = processes.groups(jobs, {"late": late, "killed": killed})


# -- tests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "size, case", [(n, case) for n in CASES for case in CASES[n]], ids=str
)
def test_processes_train_as_one(size, case, group):
    case.check(group(size))


@pytest.mark.parametrize("mode", [*MODES, "per_layer"])
def test_noise_once(mode, group):
    """Std sigma C, replicas alike, shares with noise of their own."""
    first, second = group(2).of(f"noise {mode}")
    assert first["history"] == second["history"] and len(first["history"]) == 1
    count, spread = len(first["added"][0]), len(first["spread"])
    parts = count + spread if mode == "per_layer" else 1  # each process has a share
    bound = 0.5 * parts**0.5
    for found in (first, second):
        assert found["sensitivity"] == pytest.approx(bound)
    for one, other in zip(first["added"], second["added"]):
        for name, added in one.items():
            if name in first["spread"]:
                assert_noise(added, other[name], bound=bound)
            else:
                assert torch.equal(added, other[name])
            assert_noise(other[name], bound=bound)
        values = [x.flatten()[:40] for x in one.values()]
        assert not any(torch.equal(values[0], x) for x in values[1:])


@pytest.mark.parametrize("name", ["RandomAllocation", "BallsInBins"])
def test_batches_of_an_epoch_that_are_drawn_at_once(name, group):
    """Each record is in one batch of an epoch, in one process; both count the same."""
    (first, history), (second, other) = (x[name] for x in group(2).of("allocated"))
    for epoch, shares in zip(first, second):
        seen = torch.cat([*epoch, *shares])[:, 0].tolist()
        assert sorted(seen) == [*range(48)]
        for a, b in zip(epoch, shares):
            assert len(a) - len(b) in (0, 1)
    assert torch.equal(first[0][0], first[1][0]) == (name == "BallsInBins")
    assert history == other and history[0][1:] == (1.0, 2) and len(history) == 1


def test_correlated_noise(group):
    """Batches of parts in turn, a share for each; the noise of one process."""
    first, second = group(2).of("correlated")
    private, model = correlated_run()
    for t, shares in enumerate(zip(first["batches"], second["batches"])):
        drawn = torch.cat(shares)
        assert len(set(drawn[:, 0].tolist())) == len(drawn)
        assert (drawn[:, 0] % 3 == t % 3).all()
        assert len(shares[0]) - len(shares[1]) in (0, 1)
        private.step(drawn, square_loss)
    assert sum(map(len, first["batches"])) > 20
    assert first["other"] == "not refused"
    assert "This process draws by Poisson(steps=None, expected" in second["other"]
    for found in (first, second):
        assert found["history"] == private.engine.accountant.history
        assert_close(found["states"], whole(model), 1e-10)


def test_optimizers_that_know_the_noise(group):
    """Each process has the weights of one process that has all samples."""
    for number, (kind, mode) in enumerate(AWARE):
        states = [found[number] for found in group(2).of("aware")]
        assert_close(states, aware_run(kind, mode), 1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation(size, group):
    x = Case("mixture").batch(0, 3 * size)
    expected = model_of("mixture").eval()(x).detach()
    torch.testing.assert_close(torch.cat(group(size).of("evaluation")), expected)


@pytest.mark.parametrize(
    "name, sizes",
    [("copied", [3, 2]), *((f"in parts {mode}", [4, 4]) for mode in MODES)],
)
def test_other_ways_to_train(name, sizes, group):
    expected = Case("mixture", sizes=[sizes]).alone(2).state_dict()
    assert_close(group(2).of(name), expected, 1e-10)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_training(name, group):
    assert_refused(group(2), name, REFUSED[name][1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSED_STEPS)
def test_refused_by_all_processes(name, mode, group):
    """One says why; the others say that another one does, and none is left waiting."""
    words, found = REFUSED_STEPS[name][0], group(2).of(f"{name} {mode}")
    assert any(words in text for text in found), found
    for text in found:
        assert text.startswith(("Refused", "ProcessFailure", "RuntimeError")), text
        assert words in text or "has failed in its " in text


def test_one_record_of_two_processes(group):
    """It moves the sum of both by its bound at most, and no other batch."""
    for found in group(2).of("one record"):
        for label, pairs in found.items():
            own, after = zip(*pairs)
            assert 0.3 < max(own) <= 1 + SLACK, f"{label}: {own}"
            assert max(after) < SLACK, f"{label}: {after}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision(mode, autocast, group):
    first, second = group(2).of(f"half {mode} {autocast}")
    assert torch.equal(first, second) and bool(first.isfinite().all())


@pytest.mark.parametrize("name, seconds", [("late", LATE + 10), ("killed", 40)])
def test_a_process_that_is_lost(name, seconds, group):
    """The others change nothing, and go on to change nothing."""
    two = group(2)
    assert two.codes == [0, 1] and "killed" not in two.found[1]
    found = two.of("late") if name == "late" else [two.found[0][name]]
    for result in found:
        assert result["refusal"].startswith("ProcessFailure"), result["refusal"]
        assert "One of them has died, failed or come too late" in result["refusal"]
        assert result["unchanged"] and result["still"]
        assert result["again"].startswith(("ProcessFailure", "Refused"))
        assert result["steps"] == 1  # the one before
        assert result["seconds"] < seconds
