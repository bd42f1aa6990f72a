"""Several processes against one.

Starting a process takes seconds, so two groups of processes run all cases, one after
the other, and save what they have found. The oracle is the same training in a single
process, from the gradients of each sample alone by plain autograd.
"""

import copy
import os
import time
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DistributedSampler, TensorDataset

from opacus_ext import Clipping, check_per_sample_gradients
from opacus_ext.data import Poisson
from opacus_ext.data.draws import Draws
from opacus_ext.distributed import expert_parallel, full_state_dict
from opacus_ext.layers import (
    Experts,
    SwitchFeedForward,
    TopKFeedForward,
    freeze_routers,
)
from opacus_ext.optimizers import Banded
from tests.common import (
    clipped_sum,
    make_private,
    next_token_loss,
    norms_of,
    oracle,
    square_loss,
    trainable,
)
from tests.neighbors.cases import setting
from tests.neighbors.loops import physical
from tests.neighbors.search import SLACK, Run, neighbors, norm_of_change
from tests.processes import LATE, Group, Jobs, device, refusal, run

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


def switch():
    import transformers

    config = transformers.SwitchTransformersConfig(
        **dict(vocab_size=31, d_model=8, d_kv=4, d_ff=12, num_heads=2, num_experts=4),
        **dict(num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1),
        **dict(num_sparse_decoder_layers=1, expert_capacity=3, dropout_rate=0.0),
        **dict(router_jitter_noise=0.0),
    )
    model = transformers.SwitchTransformersForConditionalGeneration(config).train()
    for module in model.modules():
        if hasattr(module, "router"):
            module.router.dtype = torch.float64
    return model


def mixtral():
    import transformers

    config = transformers.MixtralConfig(
        **dict(vocab_size=31, hidden_size=8, intermediate_size=12, head_dim=4),
        **dict(num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1),
        **dict(num_local_experts=4, num_experts_per_tok=2),
    )
    model = transformers.MixtralForCausalLM(config).train()
    model.set_experts_implementation("eager")  # its kernels have no float64
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
    "switch": switch,
    "mixtral": mixtral,
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name]().double().to(device())


def batch_of(name, step, size):
    generator = torch.Generator().manual_seed(step)
    if name in ("switch", "mixtral"):
        return torch.randint(31, (size, 6), generator=generator)
    return torch.randn(size, 5, 3, dtype=torch.float64, generator=generator)


def token_loss(model, ids):
    given = {"input_ids": ids, "use_cache": False}
    if any("decoder" in name for name, _ in model.named_parameters()):
        given["decoder_input_ids"] = ids.flip(1)
    return next_token_loss(model(**given).logits, ids)


# -- cases -------------------------------------------------------------------------

ROOTS = Clipping("roots", lambda norms, bound: bound / (1e-3 + norms))


@dataclass(frozen=True)
class Case:
    """Some steps of training, the samples of each process in each step."""

    model: str
    mode: str
    sizes: List[List[int]]
    wrap: bool = True
    clipping: Any = "flat"
    optimizer: str = "SGD"
    max_grad_norm: float = 0.3

    def bounds(self, model):
        """For per-layer clipping one that differs from parameter to parameter."""
        names = trainable(model)
        if self.clipping != "per_layer":
            return self.max_grad_norm
        return [0.02 * (2 + len(name) % 5) for name in map(kind_of, names)]

    @property
    def loss(self):
        return token_loss if self.model in ("switch", "mixtral") else square_loss

    def plain_optimizer(self, model):
        make = getattr(torch.optim, self.optimizer)
        lr = 1.0 if self.optimizer == "SGD" else 0.01
        return make(trainable(model).values(), lr=lr)

    def private(self, model, size, **kwargs):
        kwargs = {"max_grad_norm": self.bounds(model), **kwargs}
        return make_private(
            model,
            self.mode,
            self.wrap,
            batch_size=size,
            clipping=self.clipping,
            optimizer=self.plain_optimizer(model),
            **kwargs,
        )

    def __str__(self):
        name = getattr(self.clipping, "name", self.clipping)
        wrap = "wrap" if self.wrap else "nowrap"
        sizes = "-".join("".join(map(str, s)) for s in self.sizes)
        parts = (self.model, self.mode, wrap, name, self.optimizer)
        return ",".join((*parts, sizes))


def kind_of(name):
    """The name of a parameter without the number of its expert, and wrappers."""
    name = name.replace("module.", "").replace("_module.", "")
    return ".".join("i" if "expert_" in part else part for part in name.split("."))


UNEVEN = [[3, 3], [4, 1], [0, 5]]  # one step each
BOTH = [[2, 3], [4, 0]]
# "ghost" and "ghost_bk" have sums of their own; what is not in a sum runs in one.
TWO = [
    Case("mixture", "ghost", UNEVEN),
    Case("mixture", "ghost_bk", UNEVEN, wrap=False),
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


def train(case: Case) -> Dict[str, Any]:
    """A case in this process, one of several."""
    model = model_of(case.model)
    model = WRAPPERS.get(case.model, expert_parallel)(model)
    private = case.private(model, sum(case.sizes[0]))
    for step, sizes in enumerate(case.sizes):
        batch = batch_of(case.model, step, sum(sizes)).split(sizes)[dist.get_rank()]
        private.step(batch.to(device()), case.loss)
    named = model.named_parameters(remove_duplicate=False)
    spread = [name for name, p in named if hasattr(p, "sharding")]
    return {
        "state": {n: p.cpu() for n, p in full_state_dict(private.module).items()},
        "own": {n: p.cpu() for n, p in model.state_dict().items() if n not in spread},
        "spread": spread,
        "history": private.engine.accountant.history,
    }


def alone(case: Case, size: int) -> Dict[str, torch.Tensor]:
    """The same training from the gradients of single samples, by plain autograd."""
    model = model_of(case.model)
    names, optimizer = trainable(model), case.plain_optimizer(model)
    for step, sizes in enumerate(case.sizes):
        batch = batch_of(case.model, step, sum(sizes))
        grads = oracle(model, batch, case.loss)
        for name, total in clipped(case, model, grads, size).items():
            names[name].grad = total / max(1, sum(case.sizes[0]))
        optimizer.step()
    return model.state_dict()


def clipped(
    case: Case, model: nn.Module, grads: Dict[str, torch.Tensor], size: int
) -> Dict[str, torch.Tensor]:
    """The clipped sums. By layer, the share of each process is one."""
    if case.clipping == ROOTS:
        factors = case.max_grad_norm / (1e-3 + norms_of(grads))
        return {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}
    bounds, total = case.bounds(model), {}
    if case.clipping != "per_layer":
        return clipped_sum(grads, case.clipping, bounds)
    for (name, g), bound in zip(grads.items(), bounds):
        stacked = ".experts." in name and "expert_" not in name
        parts = [{name: x} for x in (g.chunk(size, dim=1) if stacked else [g])]
        sums = [clipped_sum(x, "per_layer", [bound])[name] for x in parts]
        total[name] = torch.cat(sums) if stacked else sums[0]
    return total


# -- what is not a comparison of weights ---------------------------------------------


def own_batch(step: int, sizes: List[int], name: str = "mixture") -> torch.Tensor:
    return batch_of(name, step, sum(sizes)).split(sizes)[dist.get_rank()]


def unchanged(model: nn.Module, before: Dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, before[n]) for n, p in model.state_dict().items())


def weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in model.state_dict().items()}


def noise(mode: str, clipping: str = "flat") -> Dict[str, Any]:
    """The noise of one step, with equal seeds, on parameters of many entries."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), TopKFeedForward(40, 40, 4)).double()
    model = expert_parallel(model)
    count = len(trainable(model))
    bound = 0.5 if clipping != "per_layer" else [0.5] * count
    torch.manual_seed(7)  # the same everywhere
    private = make_private(
        model,
        mode,
        batch_size=8,
        max_grad_norm=bound,
        clipping=clipping,
        noise_multiplier=3.0,
    )
    before = weights(model)
    batch = torch.zeros(4, 2, 40, dtype=torch.float64)
    private.step(batch, lambda model, x: 0 * square_loss(model, x))
    return {
        "added": {n: (before[n] - p) * 8 for n, p in model.state_dict().items()},
        "spread": [n for n, p in model.named_parameters() if hasattr(p, "sharding")],
        "sensitivity": private.optimizer.sensitivity,
        "history": private.engine.accountant.history,
    }


PLAN = Banded(bands=3, steps=16, momentum=0.5)


def correlated_run():
    """A run with correlated noise, its records known by their first entry."""
    torch.manual_seed(0)
    x = torch.randn(48, 5, dtype=torch.float64)
    x[:, 0] = torch.arange(48)
    model = nn.Linear(5, 3).double()
    private = make_private(
        DPDDP(model) if dist.is_initialized() else model,
        "ghost_bk",
        batch_size=6,
        dataset=TensorDataset(x),
        poisson_sampling=True,
        noise=PLAN,
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
        again.step(batch, square_loss)
    place = dist.get_rank(), dist.get_world_size()
    other = Draws(Poisson(expected_batch_size=5 + place[0]), 48, None, place)
    return {
        "other": refusal(next, iter(other)),
        "batches": batches,
        "states": [weights(model), weights(resumed)],
        "history": private.engine.accountant.history,
    }


def evaluation() -> torch.Tensor:
    """Before training, after some, and after the hooks are gone."""
    model = expert_parallel(model_of("mixture")).eval()
    x = own_batch(0, [3] * dist.get_world_size())
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
    case = Case("mixture", "ghost_bk", [[3, 2]])
    model = copy.deepcopy(expert_parallel(model_of("mixture")))
    private = case.private(model, 5)
    assert any(private.optimizer._is_sharded(p) for p in private.optimizer.params)
    private.step(own_batch(0, [3, 2]), square_loss)
    return full_state_dict(private.module)


def refusals() -> Dict[str, str]:
    """Nothing may have changed, and all processes must refuse."""
    found, rank = {}, dist.get_rank()
    model = Net(TopKFeedForward(4, 4, 3))
    before, names = weights(model), list(model.state_dict())
    found["uneven"] = refusal(expert_parallel, model)
    assert unchanged(model, before) and names == list(model.state_dict())
    assert not any(hasattr(part, "sharding") for part in model.modules())
    found["none"] = refusal(expert_parallel, Net(nn.Linear(4, 4)))
    model = mixture()
    model.layers[0].experts.down_proj = model.layers[2].experts.down_proj
    found["shared"] = refusal(expert_parallel, model)
    model = mixture()
    whole = expert_parallel(model)
    found["twice"] = refusal(expert_parallel, model)
    found["not wrapped"] = refusal(make_private, model, "ghost_bk", batch_size=2)
    found["adaptive"] = refusal(
        make_private,
        whole,
        "hooks",
        batch_size=2,
        clipping="adaptive",
        target_unclipped_quantile=0.5,
    )
    for mode in ("hooks", "functorch", "scan", "auto"):
        found[mode] = refusal(make_private, whole, mode, batch_size=2)
    batch = torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    found["check"] = refusal(
        check_per_sample_gradients, whole, batch, nn.MSELoss(), verbose=False
    )
    bound = 1.0 + rank
    found["bounds"] = refusal(
        make_private, whole, "ghost_bk", batch_size=2, max_grad_norm=bound
    )
    groups = [dist.new_group([0]), dist.new_group([1])]
    part = expert_parallel(mixture(), groups[rank])
    found["group"] = refusal(make_private, part, "ghost_bk", batch_size=2)
    for mode in MODES:
        for name, step in REFUSED_STEPS.items():
            found[f"{name} {mode}"] = step(mode)
    return found


def refused_step(model, mode, sizes, wrap=True, batch=None, **kwargs) -> str:
    model = expert_parallel(model.double())
    private = make_private(model, mode, wrap, batch_size=sum(sizes), **kwargs)
    before = weights(model)
    batch = own_batch(0, sizes) if batch is None else batch
    found = refusal(private.step, batch, square_loss)
    assert unchanged(model, before) and not private.engine.accountant.history
    return found


def accumulated(mode) -> str:
    model = expert_parallel(model_of("mixture"))
    private = make_private(model, mode, batch_size=4)
    batch = own_batch(0, [2, 2])
    private.backward(batch, square_loss)
    return refusal(private.backward, batch, square_loss)


def unequal_batches(mode) -> str:
    """One process has a physical batch more than the other."""
    model = expert_parallel(model_of("mixture"))
    private = make_private(model, mode, batch_size=4)
    before = weights(model)
    private.optimizer.signal_skip_step(do_skip=dist.get_rank() == 0)
    found = refusal(private.step, own_batch(0, [2, 2]), square_loss)
    assert unchanged(model, before) and not private.engine.accountant.history
    return found


REFUSED_STEPS: Dict[str, Callable[[str], str]] = {
    "checkpoint": lambda mode: refused_step(recomputed(), mode, [3, 0]),
    "branches": lambda mode: refused_step(
        Branching(TopKFeedForward(4, 6, 4)), mode, [3, 1]
    ),
    "elsewhere": lambda mode: refused_step(
        Branching(TopKFeedForward(4, 6, 4)),
        mode,
        [2, 2],
        batch=torch.full((2, 5, 3), dist.get_rank() - 0.5).double(),
    ),
    "accumulated": accumulated,
    "unequal": unequal_batches,
}


def in_parts(mode: str) -> Dict[str, torch.Tensor]:
    """BatchMemoryManager, with as many physical batches in each process."""
    case = Case("mixture", mode, [[4, 4]])
    model = expert_parallel(model_of("mixture"))
    data = TensorDataset(own_batch(0, [4, 4]))
    own = DistributedSampler(data, num_replicas=1, rank=0)
    private = case.private(model, 4, dataset=data, sampler=own)
    private.optimizer.expected_batch_size = 4  # in each process
    history = private.engine.accountant.history
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=3,
        optimizer=private.optimizer,
    ) as loader:
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


def half() -> Dict[str, Any]:
    """Rows in bfloat16, in autocast and of their own, of odd width."""
    found = {}
    for mode in MODES:
        torch.manual_seed(0)
        layer = TopKFeedForward(3, 5, 4, top_k=1)
        model = expert_parallel(nn.Sequential(nn.Linear(3, 3), layer).bfloat16())
        private = make_private(model, mode, batch_size=2)
        x = torch.randn(1 + dist.get_rank(), 1, 3).bfloat16()
        private.step(x, square_loss)
        found[mode] = model.state_dict()["module.0.weight"]
        torch.manual_seed(0)
        layer = TopKFeedForward(3, 5, 4, top_k=1)
        model = expert_parallel(nn.Sequential(nn.Linear(3, 3), layer))
        private = make_private(model, mode, batch_size=2)
        with torch.autocast("cpu", torch.bfloat16):
            private.step(x.float(), square_loss)
        found[f"{mode} autocast"] = model.state_dict()["module.0.weight"]
    return found


def late(rank_of_late: int = 1) -> Optional[str]:
    """A process that comes too late for the others."""
    return lost(lambda: time.sleep(LATE + 2), rank_of_late)


def killed() -> Optional[str]:
    """A process that dies between forward and backward."""
    return lost(lambda: os._exit(1), dist.get_world_size() - 1)


def lost(happens: Callable[[], None], rank: int) -> Dict[str, Any]:
    model = expert_parallel(model_of("mixture"))
    private = make_private(model, "ghost_bk", batch_size=4, noise_multiplier=1.0)
    size = dist.get_world_size()
    private.step(own_batch(0, [2] * size), square_loss)
    before, start = weights(model), time.time()
    private.optimizer.zero_grad()
    losses = square_loss(private.module, own_batch(1, [2] * size))
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


OTHERS: Dict[int, Dict[str, Callable[[], Any]]] = {
    2: {
        **{f"noise {mode}": lambda mode=mode: noise(mode) for mode in MODES},
        "noise per_layer": lambda: noise("ghost_bk", "per_layer"),
        "evaluation": evaluation,
        "copied": copied,
        "refusals": refusals,
        **{f"in parts {mode}": lambda mode=mode: in_parts(mode) for mode in MODES},
        "half": half,
        "correlated": correlated,
        "one record": one_record_moves,
    },
    4: {"evaluation": evaluation},
}
CASES = {2: TWO, 4: FOUR}
LAST = {"late": late, "killed": killed}


# -- groups of processes -----------------------------------------------------------


def jobs(processes: int) -> Jobs:
    cases = {str(case): lambda case=case: train(case) for case in CASES[processes]}
    return {**cases, **OTHERS[processes]}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(2, str(tmp_path_factory.mktemp("two")), jobs, LAST)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run(4, str(tmp_path_factory.mktemp("four")), jobs)


# -- tests -------------------------------------------------------------------------


def assert_equals_one_process(case: Case, group: Group) -> None:
    results = group.of(str(case))
    before, expected = model_of(case.model).state_dict(), alone(case, group.size)
    # Those of transformers compute norms and probabilities in float32.
    atol = 1e-6 if case.loss is token_loss else 1e-10
    moved = False
    for result in results:
        assert set(result["state"]) == set(expected)
        for name, value in expected.items():
            got = result["state"][name]
            torch.testing.assert_close(got, value, rtol=0, atol=atol, msg=name)
            moved |= not torch.equal(before[name], value)
        assert sum(s for _, _, s in result["history"]) == len(case.sizes)
        for name, value in results[0]["own"].items():
            assert torch.equal(result["own"][name], value), f"{name} differs"
    assert moved
    assert bool(results[0]["spread"]) == (case.model not in WRAPPERS)
    model_of(case.model).load_state_dict(results[-1]["state"], strict=True)


@pytest.mark.parametrize("case", TWO, ids=str)
def test_two_processes(case, two):
    assert_equals_one_process(case, two)


@pytest.mark.parametrize("case", FOUR, ids=str)
def test_four_processes(case, four):
    assert_equals_one_process(case, four)


@pytest.mark.parametrize("mode", [*MODES, "per_layer"])
def test_noise_once(mode, two):
    """Std sigma C, replicas alike, shares with noise of their own."""
    first, second = two.of(f"noise {mode}")
    assert first["history"] == second["history"] and len(first["history"]) == 1
    bounds = 0.5
    if mode == "per_layer":
        spread = len(first["spread"])
        shared = len(first["added"]) - spread
        bounds = 0.5 * (shared + 2 * spread) ** 0.5
    assert first["sensitivity"] == pytest.approx(bounds)
    assert second["sensitivity"] == pytest.approx(bounds)
    for name, added in first["added"].items():
        other = second["added"][name]
        for x in (added, other):
            tolerance = 5 * 3 * bounds / (2 * x.numel()) ** 0.5
            assert float(x.std()) == pytest.approx(3 * bounds, abs=tolerance)
        if name in first["spread"]:
            apart = torch.corrcoef(torch.stack([added.flatten(), other.flatten()]))
            assert abs(float(apart[0, 1])) < 5 / added.numel() ** 0.5
        else:
            assert torch.equal(added, other)
    values = [x.flatten()[:40] for x in first["added"].values()]
    assert not any(torch.equal(values[0], x) for x in values[1:])


def test_correlated_noise(two):
    """Batches of parts in turn, a share for each; the noise of one process."""
    first, second = two.of("correlated")
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
        for state in found["states"]:
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [2, 4])
def test_evaluation(size, request):
    group = request.getfixturevalue({2: "two", 4: "four"}[size])
    model = model_of("mixture").eval()
    expected = model(batch_of("mixture", 0, 3 * size)).detach()
    torch.testing.assert_close(torch.cat(group.of("evaluation")), expected)


@pytest.mark.parametrize(
    "name, sizes",
    [("copied", [3, 2]), *((f"in parts {mode}", [4, 4]) for mode in MODES)],
)
def test_other_ways_to_train(name, sizes, two):
    expected = alone(Case("mixture", "ghost_bk", [sizes]), 2)
    for state in two.of(name):
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-10)


REFUSALS = {
    "uneven": ("Refused", "has 3 experts"),
    "none": ("Refused", "has no experts that can be spread"),
    "shared": ("Refused", "shared with another layer"),
    "twice": ("Refused", "already"),
    "not wrapped": ("Refused", "expert_parallel has returned"),
    "adaptive": ("Refused", "adaptive"),
    "hooks": ("Refused", "'hooks'"),
    "functorch": ("Refused", "'functorch'"),
    "scan": ("Refused", "'scan'"),
    "auto": ("Refused", "'auto'"),
    "group": ("Refused", "over 1 of 2 processes"),
    "check": ("Refused", "before expert_parallel"),
    "bounds": ("Refused", "differ between processes"),
}
REFUSALS_OF_STEPS = {
    "checkpoint": "activation checkpointing",
    "branches": "take different branches",
    "elsewhere": "leave out a layer of experts",
    "accumulated": "second time",
    "unequal": "max_physical_batch_size",
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_before_training(name, two):
    kind, words = REFUSALS[name]
    for found in two.of("refusals"):
        assert found[name].startswith(kind), found[name]
        assert words in found[name], found[name]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", REFUSALS_OF_STEPS)
def test_refused_by_all_processes(name, mode, two):
    """One says why; the others say that another one does, and none is left waiting."""
    found = [refusals[f"{name} {mode}"] for refusals in two.of("refusals")]
    assert any(REFUSALS_OF_STEPS[name] in text for text in found), found
    for text in found:
        assert text.startswith(("Refused", "ProcessFailure", "RuntimeError")), text
        said = REFUSALS_OF_STEPS[name] in text
        assert said or "has failed in its " in text


def test_one_record_of_two_processes(two):
    """It moves the sum of both by its bound at most, and no other batch."""
    for found in two.of("one record"):
        for label, pairs in found.items():
            own, after = zip(*pairs)
            assert 0.3 < max(own) <= 1 + SLACK, f"{label}: {own}"
            assert max(after) < SLACK, f"{label}: {after}"


def test_half_precision(two):
    first, second = two.of("half")
    for name, value in first.items():
        assert torch.equal(value, second[name]) and bool(value.isfinite().all())


def assert_nothing_done(result: Dict[str, Any], seconds: float) -> None:
    assert result["refusal"].startswith("ProcessFailure"), result["refusal"]
    assert "One of them has died, failed or come too late" in result["refusal"]
    assert result["unchanged"] and result["still"]
    assert result["again"].startswith(("ProcessFailure", "Refused")), result["again"]
    assert result["steps"] == 1  # the one before
    assert result["seconds"] < seconds


def test_late_process(two):
    for result in two.of("late"):
        assert_nothing_done(result, LATE + 10)


def test_killed_process(two):
    assert two.codes == [0, 1]
    found = two.found[0]
    assert "killed" in found, found["error"]
    assert_nothing_done(found["killed"], 40)
