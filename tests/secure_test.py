"""Secure mode: the noise against exact probabilities, and who draws by it.

Tests of chance fail by chance once in a billion runs. The oracle of single draws is
mpmath, in 60 digits and more.
"""

import math
import random
from unittest.mock import patch

import mpmath
import numpy as np
import opacus
import pytest
import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy import stats
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import secure
from opacus_ext.data import Poisson
from opacus_ext.data.draws import Draws
from opacus_ext.data.sampling import _drawn
from opacus_ext.monitor import Monitor
from opacus_ext.optimizers import Banded
from opacus_ext.re_attention.effective import token_shares
from opacus_ext.refused import Refused
from opacus_ext.releases import release_popularity
from opacus_ext.secure import (
    SecureSource,
    add_rounded_noise,
    gaussian_grid,
    rounded_normals,
)

from .common import clipped_sum, oracle

ALPHA = 1e-9  # of false alarms
FINE = 1.3 * 2**30
modes = pytest.mark.parametrize("mode", ("hooks", "ghost", "ghost_bk", "scan", "auto"))
RECORDS = 8  # a power of two, so that a mean of them is exact


def known_bits(monkeypatch, seed=0):
    """Lets the operating system's random bits be those of a seed."""
    monkeypatch.setattr(secure.os, "urandom", random.Random(seed).randbytes)


def on_grid(x, grid):
    steps = x.double() / grid
    return torch.equal(steps, steps.round())


# -- the noise -------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.3, 4.0])
def test_probabilities_on_a_coarse_grid(std):
    """As all of ``P[n - 1/2 < N < n + 1/2]`` are, the tails together."""
    drawn, most = rounded_normals(std, 400_000).numpy(), round(4 * std)
    edges = np.array([-np.inf, *(np.arange(-most, most + 2) - 0.5), np.inf])
    exact = np.diff(stats.norm.cdf(edges, scale=std)) * len(drawn)
    places = np.searchsorted(edges, drawn) - 1
    found = np.bincount(places, minlength=len(exact))
    assert stats.chisquare(found, exact).pvalue > ALPHA


def test_normal_on_a_fine_grid():
    """The distribution, and no gaps: the last bits are as likely as each other."""
    drawn = rounded_normals(FINE, 200_000).numpy()
    assert stats.kstest(drawn / FINE, "norm").pvalue > ALPHA
    assert stats.chisquare(np.bincount(drawn % 64)).pvalue > ALPHA
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 6.2 / math.sqrt(len(drawn))


def test_ndtri_is_as_accurate_as_is_assumed():
    """An eighth of the error that is allowed for all of it together."""
    halves = 2.0 ** -torch.linspace(1, 19, 400, dtype=torch.float64)[1:]
    with mpmath.workdps(60):
        exact = [
            -mpmath.sqrt(2) * mpmath.erfinv(1 - 2 * mpmath.mpf(u))
            for u in halves.tolist()
        ]
        found = torch.special.ndtri(halves).tolist()
        worst = max(abs(x - y) for x, y in zip(exact, found))
    assert 0 < worst < secure._ERROR / 8


@pytest.mark.parametrize("std", [0.3, 4.0, FINE])
def test_each_way_to_decide_gives_the_same(monkeypatch, std):
    """Float64, one comparison in many digits, a search by them; and mpmath."""
    known_bits(monkeypatch)
    heads = secure._words(200)
    heads, signs = (heads & (2**63 - 1)).tolist(), (heads < 0).tolist()
    with mpmath.workdps(60):
        ends = (1 - (mpmath.mpf(h) + 0.5) / 2**63 for h in heads)
        exact = [
            int(mpmath.nint(std * mpmath.sqrt(2) * mpmath.erfinv(u))) for u in ends
        ]
    exact = [-x if negative else x for x, negative in zip(exact, signs)]
    for error, tail in [(secure._ERROR, secure._TAIL), (1e9, 1), (1e9, 2**63 - 1)]:
        monkeypatch.setattr(secure, "_ERROR", error)
        monkeypatch.setattr(secure, "_TAIL", tail)
        known_bits(monkeypatch)
        assert rounded_normals(std, 200).tolist() == exact


@pytest.mark.parametrize("more, expected", [(b"\0", 3), (b"\xff", 2)])
def test_more_bits_decide_where_the_first_do_not(monkeypatch, more, expected):
    """A number whose interval has the threshold between 2 and 3 inside."""
    with mpmath.workdps(60):
        head = int(mpmath.ldexp(mpmath.erfc(2.5 / (4 * mpmath.sqrt(2))), 63))
    monkeypatch.setattr(secure.os, "urandom", lambda count: more * count)
    assert secure._Uniform(head).rounded_normal(4.0) == expected
    assert secure._Uniform(head).rounded_normal(4.0, 2) == expected


def test_what_is_drawn_together_is_not_drawn_again(monkeypatch):
    monkeypatch.setattr(secure, "_CHUNK", 500)
    first, second = rounded_normals(FINE, 1000).split(500)
    assert (first == second).sum() < 5


def test_the_tail_has_no_end(monkeypatch):
    """``P[|N| > 40 std]`` is 1e-349: of bits that are all zero before."""
    bits = iter([*[b"\0" * 8] * 18, b"\1" * 8])
    monkeypatch.setattr(secure.os, "urandom", lambda count: next(bits))
    assert 39 < secure._Uniform(0).rounded_normal(5.0) / 5 < 42


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_what_is_released_is_on_the_grid(dtype):
    total = torch.randn(50, 20).to(dtype)
    std, grid = gaussian_grid(0.7, 3.0, total.numel())
    released = add_rounded_noise(total, std, grid)
    assert released.dtype == dtype and released.shape == total.shape
    assert on_grid(released, grid) and not on_grid(total.double() / 3, grid)


def test_noise_of_the_rounded_sum_is_rounded_noise_of_the_sum(monkeypatch):
    """What the proof says, of one normal; and std is the one that it asks for."""
    std, grid = gaussian_grid(1.7, 0.9, 1000)
    assert 2**30 <= std / grid < 2**31 and math.frexp(grid)[0] == 0.5
    assert std >= 1.7 * (0.9 + grid * math.sqrt(1000)) > 1.7 * 0.9
    total = torch.randn(1000).double()
    known_bits(monkeypatch)
    released = add_rounded_noise(total, std, grid)
    known_bits(monkeypatch)
    noise = rounded_normals(std / grid, 1000).double()
    assert torch.equal(released, (total / grid).round() * grid + noise * grid)


def test_no_sum_is_out_of_range():
    found = add_rounded_noise(
        torch.tensor([math.inf, -math.inf, 1e300]).double(), 1.0, 2.0**-30
    )
    assert torch.allclose(found.abs(), torch.tensor(2.0**31).double())
    with pytest.raises(Refused, match="not a number"):
        add_rounded_noise(torch.tensor([math.nan]), 1.0, 2.0**-30)


@pytest.mark.gpu
def test_on_a_gpu():
    total = torch.randn(1000, device="cuda")
    std, grid = gaussian_grid(1.0, 1.0, 1000)
    released = add_rounded_noise(total, std, grid)
    assert released.is_cuda and on_grid(released, grid)
    assert 0.8 < float((released - total).std()) < 1.2


def test_torch_draws_nothing_by_the_source():
    """So what is not secure fails: Opacus's own noise and samplers."""
    with pytest.raises(TypeError):
        torch.randn(2, generator=SecureSource())


# -- batches ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rate, drawn", [(1.0, 2**63), (0.5, 2**62), (2.0**-63, 1), (0.3, int(0.3 * 2**63))]
)
def test_as_many_keys_are_below_a_rate_as_it_says(rate, drawn):
    keys = torch.tensor([0, drawn - 1, min(drawn, 2**63 - 1)])
    expected = [0, 1] if drawn < 2**63 else [0, 1, 2]
    with patch.object(SecureSource, "integers", return_value=keys):
        assert _drawn(3, rate, SecureSource()).tolist() == expected


def test_every_record_is_drawn_as_often_as_it_should():
    draws = Draws(Poisson(sample_rate=0.2), 10, SecureSource())
    batches = [batch for _ in range(1000) for batch in draws]
    counts = np.bincount(np.concatenate(batches).astype(int), minlength=10)
    for count in counts:
        assert stats.binomtest(int(count), len(batches), 0.2).pvalue > ALPHA / 10


# -- training --------------------------------------------------------------------------


def data():
    torch.manual_seed(1)
    x = torch.randn(RECORDS, 4).double()
    return TensorDataset(x, torch.randn(RECORDS, 2).double())


def losses(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean(1)


class Run:
    """All records in each step, unless the batch size is smaller."""

    def __init__(
        self, mode="ghost_bk", engine=None, batch_size=RECORDS, of=None, **kwargs
    ):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        self.engine = engine or opacus_ext.PrivacyEngine(
            accountant="prv_bounds", secure_mode=True
        )
        kwargs.setdefault("max_grad_norm", 0.5)
        kwargs.setdefault("data_loader", DataLoader(data(), batch_size=batch_size))
        self.net, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=self.model if of is None else of(self.model),
            optimizer=torch.optim.SGD(self.model.parameters(), lr=1.0),
            criterion=nn.MSELoss(),
            noise_multiplier=0.8,
            grad_sample_mode=mode,
            **kwargs,
        )
        self.criterion = criterion[0] if criterion else nn.MSELoss()

    def epoch(self, loader=None):
        for x, y in loader or self.loader:
            self.optimizer.zero_grad()
            self.criterion(self.net(x), y).backward()
            self.optimizer.step()
        return [p.detach().clone() for p in self.model.parameters()]

    @property
    def given(self):
        return {"module": self.model, "optimizer": self.optimizer}


@modes
@pytest.mark.parametrize("clipping, bound", [("flat", 0.5), ("per_layer", [0.2] * 4)])
def test_every_mode_rounds_the_sum_and_nothing_else(mode, clipping, bound, monkeypatch):
    """Without its noise a step is that of single samples, to half the grid."""
    asked = []

    def none(std, count):
        asked.append((std, count))
        return torch.zeros(count, dtype=torch.int64)

    monkeypatch.setattr(secure, "rounded_normals", none)
    run = Run(mode, clipping=clipping, max_grad_norm=bound)
    expected = clipped_sum(
        oracle(run.model, data().tensors, losses), clipping, bound
    ).values()
    run.epoch()
    sensitivity = 0.5 if clipping == "flat" else 0.4
    std, grid = gaussian_grid(0.8, sensitivity, 23)
    assert [(round(s * grid, 12), n) for s, n in asked] == [
        (round(std, 12), p.numel()) for p in run.model.parameters()
    ]
    for p, total in zip(run.model.parameters(), expected):
        assert on_grid(p.grad * RECORDS, grid)
        assert (p.grad * RECORDS - total).abs().max() <= grid * 0.51
        assert not on_grid(total, grid)


@modes
def test_seeds_tell_nothing(mode):
    """The same seeds: other noise, and other batches."""
    first, second = Run(mode), Run(mode)
    first.epoch(), second.epoch()
    std, grid = gaussian_grid(0.8, 0.5, 23)
    for p, q in zip(first.model.parameters(), second.model.parameters()):
        assert on_grid(p.grad * RECORDS, grid)
        assert (p.grad != q.grad).all()
        assert (p.grad * RECORDS).abs().max() < 4 + 7 * std


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_batch_without_records_has_noise(mode):
    run = Run(mode)
    run.epoch([[x[:0] for x in data().tensors]])
    assert all((p.grad != 0).all() for p in run.model.parameters())


def test_batches_and_what_splits_them():
    drawn = set()
    for _ in range(3):
        torch.manual_seed(0)
        run = Run(batch_size=2)
        drawn.add(str([x.tolist() for x, _ in run.loader]))
    assert len(drawn) == 3 and run.optimizer.expected_batch_size == 2
    again = Run(engine=run.engine, data_loader=run.loader)
    assert isinstance(again.loader.batch_sampler.generator, SecureSource)
    with BatchMemoryManager(
        data_loader=again.loader, max_physical_batch_size=2, optimizer=again.optimizer
    ) as parts:
        again.epoch(parts)
    assert run.engine.accountant.history == [(0.8, 0.25, 4)]


def test_engine_of_opacus():
    """No torchcsprng; and after unregister() Opacus asks for it again."""
    engine = PrivacyEngine(accountant="rdp", secure_mode=True)
    Run("hooks", engine).epoch()
    statement = engine.privacy_statement(1e-3).text
    assert "cryptographically secure" in statement and "seed" not in statement
    opacus_ext.unregister()
    try:
        with pytest.raises(ImportError, match="torchcsprng"):
            opacus.PrivacyEngine(secure_mode=True)
    finally:
        opacus_ext.register()


def test_what_else_is_released_is_on_a_grid():
    run = Run()
    monitor = Monitor(run.engine, run.optimizer, share=0.25)
    run.epoch()
    assert on_grid(monitor._counts, 2.0**-30) and not on_grid(monitor._counts, 2.0**-9)
    accountant, source = run.engine.accountant, SecureSource()
    counts = release_popularity(
        [torch.tensor([1, 2, 3])],
        4,
        noise_multiplier=1.5,
        accountant=accountant,
        generator=source,
    ).counts
    assert on_grid(counts, 2.0**-30) and not counts[0]
    shares = token_shares(
        torch.tensor([[1, 2]]),
        4,
        source="private",
        max_tokens=2,
        noise_multiplier=1.5,
        accountant=opacus.accountants.RDPAccountant(),
        generator=source,
    )
    assert bool((shares[1:] > 0).all())


def test_checkpoints_hold_nothing_of_the_noise(tmp_path):
    run, path = Run(), tmp_path / "checkpoint.pt"
    run.epoch()
    run.engine.save_checkpoint(path=path, **run.given)
    saved = torch.load(path, weights_only=False)
    assert saved["opacus_ext_noise"] == {}
    first, second = Run(), Run()
    for one in (first, second):
        one.engine.load_checkpoint(path=path, **one.given)
        one.epoch()
    assert (first.model[0].weight != second.model[0].weight).all()
    for one in (first, Run(engine=PrivacyEngine(accountant="prv_bounds"))):
        with pytest.raises(Refused, match="can't be repeated"):
            one.engine.load_checkpoint(path=path, repeat_noise=True, **one.given)


# -- what is refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, kwargs, message",
    [
        ("ghost_bk", {"noise": Banded(2, 4)}, "Correlated noise"),
        ("hooks", {"poisson_sampling": False}, "leaves the loader"),
        ("no_op", {}, "independent and not"),
        ("hoks", {}, "Is 'hooks' meant"),
        ("hooks", {"noise_generator": torch.Generator()}, "prohibited"),
        ("hooks", {"data_loader": DataLoader(data(), batch_size=None)}, "no batches"),
    ],
)
def test_what_is_not_secure_is_refused(mode, kwargs, message):
    with pytest.raises(ValueError, match=message):
        Run(mode, **kwargs)


def test_several_processes_are_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(Refused, match="several processes has no secure mode"):
            Run(of=DDP)
    finally:
        dist.destroy_process_group()
