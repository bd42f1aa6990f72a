"""Adaptive clipping: the bound follows a quantile of the norms, and is paid for.

The oracle is each sample alone through plain autograd, and the paper's formula.
"""

import copy
import math
import warnings

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.adaptive_clipping import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext import Refused
from opacus_ext.monitor import Monitor
from opacus_ext.optimizers import Banded

from .common import assert_same, clipped_sum, moved, norms_of, oracle

MODES = ("hooks", "ghost", "ghost_bk", "scan", "auto")
SIZES = (40, 25, 0, 1, 33)


class OfBoth(opacus_ext.PrivacyEngine, PrivacyEngineAdaptiveClipping):
    """Ours comes first."""


class Branching(nn.Linear):
    """A linear map that asks for its data, so that samples run one by one."""

    def forward(self, x):
        y = super().forward(x)
        return y if x.sum() > 0 else -y


def small():
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def private(mode, model, engine=PrivacyEngine, records=40, size=None, **given):
    """Returns the engine, and model, optimizer, criterion and loader that it made."""
    data = TensorDataset(torch.randn(records, 3).double(), torch.arange(records) % 2)
    engine = engine() if isinstance(engine, type) else engine
    given = {"noise_multiplier": 0.0, "max_grad_norm": 0.2, **given}
    if not isinstance(engine, PrivacyEngineAdaptiveClipping):
        given.setdefault("clipping", "adaptive")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        called, optimizer, *criterion, loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, size or records),
            poisson_sampling=False,
            grad_sample_mode=mode,
            **given,
        )
    return engine, called, optimizer, (criterion or [nn.CrossEntropyLoss()])[0], loader


def step(called, optimizer, criterion, x, y):
    optimizer.zero_grad()
    criterion(called(x), y).backward()
    optimizer.step()


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize("make", [small, lambda: Branching(3, 2).double()])
@pytest.mark.parametrize(
    "mode, engine",
    [
        *((mode, PrivacyEngine) for mode in (*MODES, "ghost_fsdp")),
        *((mode, PrivacyEngineAdaptiveClipping) for mode in MODES[1:]),
        ("ghost_bk", OfBoth),
    ],
)
def test_the_bound_and_the_sums(mode, engine, make):
    """Each batch is clipped at a bound that the batches before it have moved."""
    torch.manual_seed(0)
    model = make()
    alone, bound = copy.deepcopy(model), 0.2
    given = dict(min_clipbound=0.01, clipbound_learning_rate=0.9)
    given["target_unclipped_quantile"] = 0.3
    _, called, optimizer, criterion, _ = private(mode, model, engine, **given)
    for size in SIZES:
        x, y = torch.randn(size, 3).double(), torch.randint(0, 2, (size,))
        grads = oracle(alone, (x, y), losses)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        step(called, optimizer, criterion, x, y)
        got = {n: 40 * (before[n] - p.detach()) for n, p in model.named_parameters()}
        assert_same(got, clipped_sum(grads, "flat", bound))
        bound = max(moved(bound, norms_of(grads), 40, 0.3, 0.9), 0.01)
        assert optimizer.max_grad_norm == pytest.approx(bound, rel=1e-8)
        alone.load_state_dict(model.state_dict())


@pytest.mark.parametrize("mode", MODES)
def test_physical_batches_move_it_once(mode):
    """A logical batch in parts is what it is as a whole."""
    bounds = []
    for most in (40, 7):
        torch.manual_seed(0)
        model = small()
        _, called, optimizer, criterion, loader = private(mode, model)
        given = dict(max_physical_batch_size=most, optimizer=optimizer)
        for _ in range(3):
            with BatchMemoryManager(data_loader=loader, **given) as parts:
                for x, y in parts:
                    step(called, optimizer, criterion, x, y)
        bounds.append((optimizer.max_grad_norm, *model[0].weight.flatten().tolist()))
    assert bounds[0] == pytest.approx(bounds[1], rel=1e-8)


def test_it_finds_the_quantile():
    """Of norms 0.02 to 1, within the noise of the count."""
    torch.manual_seed(0)
    model, x = nn.Linear(1, 1, bias=False).double(), torch.arange(1, 51) / 50
    given = dict(max_grad_norm=10.0, noise_multiplier=1.0, records=50)
    given["target_unclipped_quantile"] = 0.8
    given["criterion"] = nn.L1Loss()
    _, called, optimizer, criterion, _ = private("ghost_bk", model, **given)
    x, y = x[:, None].double(), torch.full((50, 1), -1e9).double()
    found = []
    for _ in range(120):
        step(called, optimizer, criterion, x, y)
        found.append(optimizer.max_grad_norm)
    assert sum(found[60:]) / 60 == pytest.approx(0.8, abs=0.04)


@pytest.mark.parametrize("secure", [False, True])
def test_gradients_pay_for_the_count(secure):
    """Their noise and that of the count are, together, what is accounted."""
    wide, given = nn.Linear(3, 2000).double(), dict(noise_multiplier=3.0)
    given["unclipped_num_std"] = 2.5
    engine = opacus_ext.PrivacyEngine(secure_mode=secure)
    if secure:  # draws are secure, too
        data = TensorDataset(torch.zeros(40, 3).double(), torch.zeros(40).long())
        _, optimizer, _, _ = engine.make_private(
            module=wide,
            optimizer=torch.optim.SGD(wide.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=40),
            max_grad_norm=0.2,
            clipping="adaptive",
            grad_sample_mode="ghost",
            **given,
        )
    else:
        _, called, optimizer, criterion, _ = private("ghost", wide, engine, **given)
        old = wide.weight.detach().clone()
        step(called, optimizer, criterion, torch.zeros(0, 3).double(), torch.arange(0))
        std = (3.0**-2 - 5.0**-2) ** -0.5 * 0.2
        assert abs(40 * (wide.weight - old).std() / std - 1) < 0.05
        assert engine.accountant.history == [(3.0, 1.0, 1)]
    assert optimizer.gradient_noise_multiplier**-2 + 5.0**-2 == pytest.approx(1 / 9)
    counts = [
        float(optimizer.release(torch.zeros(1).double(), 5.0, 0.5)) for _ in range(2000)
    ]
    assert torch.tensor(counts).std() == pytest.approx(2.5, rel=0.08)


def test_a_record_counts_one_half():
    """Whatever its norm is: also one that is not finite."""
    released = []

    def release(count, noise_multiplier, sensitivity):
        released.append((float(count), noise_multiplier, sensitivity))
        return count

    given = dict(noise_multiplier=1.0)
    _, called, optimizer, criterion, _ = private("hooks", small(), **given)
    optimizer.release = release
    step(called, optimizer, criterion, torch.zeros(1, 3).double(), torch.arange(1))
    del released[:]
    for norms in ([0.1, 0.3], [0.1, 0.3, 0.15], [0.1, math.nan], [0.1, math.inf], []):
        optimizer.max_grad_norm = 0.2
        optimizer.adaptive.observe([torch.tensor(norms), None])
    assert released == [(x, 4.0, 0.5) for x in (0.0, 0.5, 0.0, 0.0, 0.0)]


def test_what_is_accounted_may_change():
    """A scheduler's noise multiplier is accounted, so what is released follows it."""
    _, called, optimizer, criterion, _ = private("ghost", small(), noise_multiplier=1.0)
    for multiplier in (1.0, 2.0, 30.0):
        optimizer.noise_multiplier = multiplier
        std = optimizer.adaptive.count_std
        assert std == max(2.0, multiplier)
        total = optimizer.gradient_noise_multiplier**-2 + (2 * std) ** -2
        assert total == pytest.approx(multiplier**-2)
        step(
            called,
            optimizer,
            criterion,
            torch.zeros(4, 3).double(),
            torch.arange(4) % 2,
        )
    optimizer.adaptive.unclipped_num_std = 15.0
    with pytest.raises(Refused, match="takes all of the budget"):
        optimizer.gradient_noise_multiplier


def test_beside_a_monitor():
    """Three releases of one step; the histogram is counted by the bound of its step."""
    engine, called, optimizer, criterion, _ = private(
        "ghost_bk", small(), noise_multiplier=0.5
    )
    monitor = Monitor(engine, optimizer, share=0.3)
    total = optimizer.gradient_noise_multiplier**-2 + 0.3 / 0.25 + 4.0**-2
    assert total == pytest.approx(1 / 0.25)
    x, y = torch.randn(40, 3).double(), torch.arange(40) % 2
    optimizer.noise_multiplier = 0.0
    optimizer.max_grad_norm = 1e3
    step(called, optimizer, criterion, x, y)
    assert monitor.read()["clipped_fraction"] == 0.0
    assert optimizer.max_grad_norm == pytest.approx(1e3 * math.exp(-0.1))


def test_a_checkpoint_has_the_bound(tmp_path):
    """A run that goes on from it is bit for bit the one that was not stopped."""
    path, ends = tmp_path / "checkpoint.pt", []
    for stops in (False, True):
        torch.manual_seed(0)
        model = small()
        engine, called, optimizer, criterion, loader = private(
            "ghost_bk", model, noise_multiplier=1.0
        )
        (batch,) = loader
        step(called, optimizer, criterion, *batch)
        engine.save_checkpoint(path=path, module=called, optimizer=optimizer)
        if stops:
            torch.manual_seed(1)
            model = small()
            engine, called, optimizer, criterion, _ = private(
                "ghost_bk", model, noise_multiplier=1.0
            )
            engine.load_checkpoint(
                path=path, module=called, optimizer=optimizer, repeat_noise=True
            )
        step(called, optimizer, criterion, *batch)
        ends.append((optimizer.max_grad_norm, *model[0].weight.flatten().tolist()))
    assert ends[0] == ends[1] and ends[0][0] != 0.2


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(noise_multiplier=2.0, unclipped_num_std=1.0), "Give 2 or more"),
        (dict(target_unclipped_quantile=1.5), "target_unclipped_quantile"),
        (dict(clipbound_learning_rate=-1.0), "clipbound_learning_rate"),
        (dict(min_clipbound=2.0, max_clipbound=1.0), "above min_clipbound"),
        (dict(noise=Banded(2, 4)), "one bound in all steps"),
        (dict(max_grad_norm=[1.0] * 4), "max_grad_norm"),
        (dict(target_quantile=0.5), "no argument 'target_quantile'"),
    ],
)
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_refused(mode, given, words):
    model = small()
    before = {*vars(model)}
    with pytest.raises(Refused, match=words):
        private(mode, model, **given)
    assert {*vars(model)} == before


def test_the_statement_says_so():
    """Also for the engine whose bound adapts without an argument."""
    for kind in (opacus_ext.PrivacyEngine, OfBoth):
        engine, called, optimizer, criterion, loader = private(
            "ghost", small(), kind, noise_multiplier=1.0
        )
        for batch in loader:
            step(called, optimizer, criterion, *batch)
        assert "follows a quantile" in str(engine.privacy_statement(1e-3))
        assert "clipping=adaptive" in repr(optimizer)


@pytest.mark.parametrize("mode", MODES)
def test_a_hook_changes_the_noise_of_the_next_step(mode):
    """The count of this step has the noise that its gradients have paid for."""
    engine, called, optimizer, criterion, _ = private(
        mode, small(), noise_multiplier=4.0
    )
    released, stock = [], optimizer.release

    def release(statistic, noise_multiplier, sensitivity):
        released.append(noise_multiplier)
        return stock(statistic, noise_multiplier, sensitivity)

    def hook(each):
        each.noise_multiplier = 0.4
        Monitor(engine, each)  # counts from the next step on

    optimizer.release = release
    optimizer.attach_step_hook(hook)
    before = optimizer.gradient_noise_multiplier
    step(called, optimizer, criterion, torch.zeros(4, 3).double(), torch.arange(4) % 2)
    assert len(released) == 1 and before**-2 + released[0] ** -2 == pytest.approx(
        1 / 16
    )
    assert engine.accountant.history == [(4.0, 1.0, 1)]
