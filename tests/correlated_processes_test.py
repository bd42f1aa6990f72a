"""Correlated noise of several processes.

The oracle is one process that is given the same Z: the normal numbers that processes
draw are replaced by those of a step and a parameter, of which each has its shard.
"""

import copy
import functools
import io
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from scipy.linalg import toeplitz
from torch import nn
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import TensorDataset

from opacus_ext.distributed import expert_parallel
from opacus_ext.layers import TopKFeedForward
from opacus_ext.optimizers import noise as noises
from opacus_ext.strategies import Banded, BufferedToeplitz, InverseBanded, LambdaCGD

from . import processes
from .common import make_private, square_loss
from .processes import assert_close, refusal, share, whole

pytestmark = pytest.mark.filterwarnings("ignore")
SIZES = ((3, 3), (4, 1), (0, 5), (2, 2), (1, 3), (3, 2))
STRATEGIES = {
    "banded": Banded(bands=3, steps=8),
    "inverse": InverseBanded(bands=3, steps=8, momentum=0.5),
    "buffers": BufferedToeplitz(buffers=2, steps=8),
    "lambda": LambdaCGD(steps=8, correlation=0.6),
}


# -- runs --------------------------------------------------------------------------


def by_units(model, **kwargs):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def in_copies(model):
    """Each process has a copy of the one shard."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    return by_units(model, mesh=mesh)


def named(model):
    return by_units(
        model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("shards",))
    )


def compiled(model):
    by_units(model).compile(backend="aot_eager")
    return model


WAYS = {
    "replicas": DDP,
    "shards": by_units,
    "copies": in_copies,
    "named": named,
    "compiled": compiled,
    "experts": expert_parallel,
}


class Experts(nn.Module):
    """A layer of experts, and one that all processes have."""

    def __init__(self):
        super().__init__()
        self.experts, self.head = TopKFeedForward(6, 8, num_experts=4), nn.Linear(6, 4)

    def forward(self, x):
        return self.head(self.experts(x[:, None])[:, 0])


def private_of(way, strategy, multiplier=1.0):
    """A private model that is spread over processes, if there are several."""
    torch.manual_seed(0)
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)
    model = (Experts() if way == "experts" else nn.Sequential(*layers)).double()
    return make_private(
        WAYS[way](model) if dist.is_initialized() else model,
        "ghost_bk",
        batch_size=6,
        dataset=TensorDataset(torch.zeros(48, 6, dtype=torch.float64)),
        poisson_sampling=True,
        noise_multiplier=multiplier,
        noise=STRATEGIES[strategy],
        lr=0.1,
    )


def batch_of(step):
    """The samples of this process."""
    generator = torch.Generator().manual_seed(step)
    sizes = SIZES[step]
    x = torch.randn(sum(sizes), 6, generator=generator, dtype=torch.float64)
    return share(x, sizes) if dist.is_initialized() else x


def train(private, first=0, last=len(SIZES)):
    for step in range(first, last):
        private.step(batch_of(step), square_loss)


# -- Z that is given -----------------------------------------------------------------


class Given:
    """Draws Z by step and parameter, of which this process has a part."""

    def __init__(self, optimizer):
        self.optimizer, self.steps = optimizer, {}  # by the state of the generator

    def __call__(self, like, shape, std, generator):
        state = generator.get_state().numpy().tobytes()
        torch.rand(1, generator=generator)
        step = self.optimizer.correlated.taken
        before = sum(known == step for known, _ in self.steps.values())
        # What is drawn again has the state of the step before.
        step, number = self.steps.setdefault(state, (step, before))
        parts = [self.part(step, i).flatten() for i in self.groups()[number]]
        return std * torch.cat(parts).view(*shape)

    def groups(self):
        """Places of parameters in the order of draws: large ones, then the others."""
        parts = [self.part(0, i) for i in range(len(self.optimizer.params))]
        large = [i for i, x in enumerate(parts) if x.numel() > noises._SMALL]
        return [*([i] for i in large), [i for i in range(len(parts)) if i not in large]]

    def part(self, step, place):
        p = self.optimizer.params[place]
        generator = torch.Generator().manual_seed(100 * step + place)
        z = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        if isinstance(p, DTensor):
            mesh = p.device_mesh
            z = distribute_tensor(z, mesh, p.placements, src_data_rank=None).to_local()
        return z


def of_given_noise(way, strategy):
    private = private_of(way, strategy)
    draw = Given(private.optimizer)
    with mock.patch.multiple(noises, _normal=draw, _SMALL=20):
        train(private)
    assert len({number for _, number in draw.steps.values()}) > 1
    return whole(private.module)


# -- rows ------------------------------------------------------------------------------


def rows_of(strategy, steps=4):
    """What steps without gradients add, over the std of Z ``[steps, 100, 50]``."""
    torch.manual_seed(7)
    model = fully_shard(nn.Linear(50, 100, bias=False).double())
    given = dict(batch_size=8, noise_multiplier=2.0, noise=STRATEGIES[strategy])
    given["dataset"] = TensorDataset(torch.zeros(64, 50, dtype=torch.float64))
    private = make_private(model, "ghost_bk", poisson_sampling=True, **given)
    x, rows = torch.zeros(1, 50, dtype=torch.float64), []
    for _ in range(steps):
        before = whole(private.module)
        private.step(x, lambda model, x: 0 * square_loss(model, x))
        after = whole(private.module)
        rows += [(before[name] - after[name]) * 8 / 2 for name in after]
    return torch.stack(rows)


# -- checkpoints -----------------------------------------------------------------------


def resumed(folder, way, strategy):
    """Weights and steps of a run, and of one that goes on from its third step."""
    first, rank = private_of(way, strategy), dist.get_rank()
    train(first, 0, 3)
    saved = 0 if way == "replicas" else rank
    path = f"{folder}/{way} {strategy}"
    first.engine.save_checkpoint(
        path=f"{path} {rank}", module=first.module, optimizer=first.optimizer
    )
    dist.barrier()
    train(first, 3)
    found = []
    for other in (saved, 1 - saved):
        again = private_of(way, strategy)
        again.engine.load_checkpoint(
            path=f"{path} {other}",
            module=again.module,
            optimizer=again.optimizer,
            repeat_noise=True,
        )
        found.append(refusal(train, again, 3))
        if other == saved:
            ends = [(whole(x.module), x.engine.accountant) for x in (first, again)]
            past = again.optimizer.correlated.state_dict()["past"].values()
            kept = sum(x.numel() for x in past)
    own = sum(x.numel() for x in noises.on_this_process(again.optimizer.params))
    return [(state, made.history) for state, made in ends], kept / own, found


def apart(strategy):
    """Goes on from a file of correlated noise beside weights and the accountant."""
    first, again = private_of("shards", strategy), private_of("shards", strategy)
    train(first, 0, 3)
    file = io.BytesIO()
    torch.save(first.optimizer.correlated.state_dict(), file)
    file.seek(0)
    state, spent = first.optimizer.noise_state(), first.engine.accountant.state_dict()
    again.module.load_state_dict(copy.deepcopy(first.module.state_dict()))
    again.engine.accountant.load_state_dict(copy.deepcopy(spent))
    again.optimizer.correlated.load_state_dict(torch.load(file))
    again.optimizer.repeat_noise(copy.deepcopy(state))
    ends = []
    for private in (first, again):
        train(private, 3)
        ends.append((whole(private.module), private.engine.accountant.history))
    with_optimizer = set_optimizer_state_dict, again.module, again.optimizer
    plain = {"state": {}, "param_groups": []}
    return ends, refusal(*with_optimizer, optim_state_dict=plain)


def of_another_mesh():
    """What a copy of the one shard has kept, for one of two shards of that name."""
    copy, shard = private_of("copies", "banded"), private_of("named", "banded")
    train(copy, 0, 3)
    shard.optimizer.load_state_dict(copy.optimizer.state_dict())
    return refusal(train, shard, 3)


def jobs(folder, size):
    found = {
        f"given {case}": functools.partial(of_given_noise, *case) for case in GIVEN
    }
    found["mesh"] = of_another_mesh
    for name in ("inverse", "lambda"):
        found[f"apart {name}"] = functools.partial(apart, name)
    for name in ("banded", "lambda"):
        found[f"rows {name}"] = functools.partial(rows_of, name)
    for case in RESUMED:
        found[f"resumed {case}"] = functools.partial(resumed, folder, *case)
    return found


GIVEN = [
    *(("shards", name) for name in STRATEGIES),
    *(("copies", name) for name in ("buffers", "lambda")),
    ("compiled", "banded"),
]
RESUMED = [
    *((way, name) for way in ("replicas", "shards") for name in STRATEGIES),
    ("copies", "banded"),
    ("experts", "banded"),
    ("experts", "lambda"),
]

group = processes.groups(jobs)


@pytest.mark.parametrize("way, strategy", GIVEN)
def test_shards_have_the_rows_of_one_process(way, strategy, group):
    expected = of_given_noise(way, strategy)
    found = group(2).of(f"given {way, strategy}")
    assert_close(found, expected, 1e-10)
    other = of_given_noise(way, "inverse" if strategy == "banded" else "banded")
    assert max((expected[n] - x).abs().max() for n, x in other.items()) > 1e-2


@pytest.mark.parametrize("strategy", ["banded", "lambda"])
def test_rows_of_a_shard(strategy, group):
    """Over steps they have the covariance of the matrix, over shards none."""
    one, other = group(2).of(f"rows {strategy}")
    assert torch.equal(one, other)
    c = STRATEGIES[strategy].inverse_coefficients()[: len(one)]
    inverse = np.tril(toeplitz(c))
    expected, shards = inverse @ inverse.T, [x.flatten(1) for x in one.chunk(2, 1)]
    rows, size = one.flatten(1), one[0].numel()
    tolerance = 5 * 1.5 * expected.max() / size**0.5
    assert np.abs((rows @ rows.T / size).numpy() - expected).max() < tolerance
    assert np.abs(expected - np.eye(len(c))).max() > 2 * tolerance
    across = shards[0] @ shards[1].T / (size / 2)
    assert across.abs().max() < 1.5 * tolerance


@pytest.mark.parametrize("way, strategy", RESUMED)
def test_resumed(way, strategy, group):
    """Bit for bit; what another process has saved is refused by all."""
    for rank, (ends, kept, (own, other)) in enumerate(
        group(2).of(f"resumed {way, strategy}")
    ):
        (expected, history), (state, again) = ends
        assert own == "not refused" and again == history
        assert_close([state], expected, 0)
        is_keeper = way != "replicas" or rank == 0
        if way == "experts":  # and the layers that process 0 adds noise to
            assert (kept > 0) is (strategy != "lambda")
        else:
            assert kept == STRATEGIES[strategy].memory * is_keeper
        if way == "copies":
            assert other == "not refused"
        else:
            elsewhere = way == "replicas" and rank == 1
            words = "0 has failed" if elsewhere else "no noise of 3 steps before"
            assert words in other, other


@pytest.mark.parametrize("strategy", ["inverse", "lambda"])
def test_a_file_for_the_noise_alone(strategy, group):
    """As the page on several machines has it."""
    for (expected, (state, history)), said in group(2).of(f"apart {strategy}"):
        assert_close([state], expected[0], 0)
        assert history == expected[1]
        assert "optimizer.correlated.state_dict()" in said


def test_another_mesh_is_refused(group):
    for said in group(2).of("mesh"):
        assert "another share of the model" in said and "as many processes" in said
