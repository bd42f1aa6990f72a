"""Correlated noise: the matrices, the rows of a stream, what is drawn and recorded.

The oracles: dense matrices, and the error of the optimum that another implementation
finds (toeplitz.optimize_banded_toeplitz of JAX-Privacy 2.0).
"""

import math

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.utils.batch_memory_manager import BatchMemoryManager
from scipy.linalg import toeplitz
from scipy.optimize import minimize
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.budget import banded, noise_of_run
from opacus_ext.data import CyclicPoisson, Poisson
from opacus_ext.losses import PerSample
from opacus_ext.monitor import Monitor
from opacus_ext.optimizers import Banded
from opacus_ext.refused import Refused
from opacus_ext.strategies.banded import _error as error
from opacus_ext.strategies.banded import _fit, coefficients
from opacus_ext.strategies.stream import CorrelatedNoise

# (steps, bands): error, and first two coefficients, by JAX-Privacy.
PUBLISHED = {
    (100, 2): (5.181516045, 0.7955966, 0.60582675),
    (100, 8): (3.125326021, 0.64414165, 0.39714823),
    (1000, 2): (15.920321746, 0.75015283, 0.6612645),
    (1000, 16): (6.278161934, 0.4745836, 0.31633072),
    (1000, 64): (4.034867842, 0.51242934, 0.27497038),
    (2000, 32): (6.482642561, 0.43526616, 0.26665435),
}


def dense(bands, steps, momentum=0.0):
    c = coefficients(bands, steps, momentum)
    return np.tril(toeplitz(np.pad(c, (0, steps - bands)), np.zeros(steps)))


@pytest.mark.parametrize("steps, bands", PUBLISHED)
def test_coefficients_are_the_published_ones(steps, bands):
    strategy = Banded(bands, steps)
    c = strategy.coefficients()
    expected, c0, c1 = PUBLISHED[steps, bands]
    assert strategy.prefix_error() == pytest.approx(expected, rel=1e-6)
    assert c[:2] == pytest.approx((c0, c1), abs=1e-4)


@pytest.mark.parametrize("steps, bands", [(1, 1), (7, 3), (40, 40)])
def test_matrix(steps, bands):
    matrix = dense(bands, steps)
    assert np.linalg.norm(matrix, axis=0).max() == pytest.approx(1)
    sums = np.tril(np.ones((steps, steps))) @ np.linalg.inv(matrix)
    found = Banded(bands, steps).prefix_error()
    assert found == pytest.approx(np.linalg.norm(sums) / math.sqrt(steps))


def sgd(steps, momentum, rates):
    """The weights after each step of torch's SGD, a column for each gradient."""
    found = np.zeros((steps, steps))
    for j in range(steps):
        p = nn.Parameter(torch.zeros((), dtype=torch.float64))
        optimizer = torch.optim.SGD([p], lr=1.0, momentum=momentum)
        for t in range(steps):
            optimizer.param_groups[0]["lr"] = rates[t]
            p.grad = torch.tensor(-float(t == j), dtype=torch.float64)
            optimizer.step()
            found[t, j] = p.item()
    return found


def optimum(start, matrix):
    """The least error of any Toeplitz C with as many bands, by finite differences."""

    def objective(c):
        c = np.pad(c / np.linalg.norm(c), (0, len(matrix) - len(c)))
        inverse = np.linalg.inv(np.tril(toeplitz(c, 0 * c)))
        return np.linalg.norm(matrix @ inverse) / math.sqrt(len(matrix))

    return objective(start), minimize(objective, start, options={"gtol": 1e-6}).fun


def test_momentum():
    """The weights of SGD; the optimum for them, and nearly that of a schedule."""
    bands, n, momentum = 5, 30, 0.8
    matrix = sgd(n, momentum, np.ones(n))
    c = coefficients(bands, n, momentum)
    found, least = optimum(c, matrix)
    assert Banded(bands, n, momentum).prefix_error() == pytest.approx(found, rel=1e-12)
    assert found == pytest.approx(least, rel=1e-8)
    assert optimum(coefficients(bands, n), matrix)[0] > 1.01 * least
    found, least = optimum(c, sgd(n, momentum, 1 - np.arange(n) / n))
    assert found < 1.003 * least


def test_a_long_run():
    """What the first steps say of a run is what all of its steps say."""
    c = coefficients(8, 3000, 0.5)
    short, expected = _fit(8, 3000, 0.5, 500)
    assert short == pytest.approx(c, abs=1e-5)
    assert expected == pytest.approx(error(c, 3000, 0.5), rel=1e-8)
    with pytest.raises(Refused, match="MiB"):
        coefficients(10_000, 10_000)
    with pytest.raises(Refused, match="momentum of 1"):
        Banded(2, 10, 1.0)


@pytest.mark.parametrize("bands", [0, 11, 2.5])
def test_bands_are_refused(bands):
    with pytest.raises(Refused, match=f"bands={bands}"):
        Banded(bands, 10)


def test_parts_smaller_than_a_batch_are_refused_whatever_the_accountant():
    sampling = CyclicPoisson(bands=3, expected_batch_size=5)
    with pytest.raises(Refused, match="at most 2 bands"):
        sampling.check(12)


@pytest.mark.parametrize("bands", [1, 2, 5, 9])
def test_stream_is_the_inverse(bands):
    noise = CorrelatedNoise(Banded(bands, 9), bands)
    z = torch.randn(9, 3, dtype=torch.float64)
    rows = []
    for row in z:
        rows.append(noise("w", lambda _: row.clone(), torch.Generator()))
        noise.taken += 1
    expected = torch.tensor(np.linalg.inv(dense(bands, 9))) @ z
    torch.testing.assert_close(torch.stack(rows), expected)
    last = np.linalg.inv(dense(bands, 9))[-1]
    assert noise.std == pytest.approx(np.linalg.norm(last))


def private(
    mode="ghost_bk", noise=Banded(4, 12), multiplier=1.0, seed=0, workers=0, **kwargs
):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    model, engine = nn.Linear(5, 3), PrivacyEngine(accountant="rdp")
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=PerSample(),
        data_loader=DataLoader(
            data, batch_size=5, generator=torch.Generator(), num_workers=workers
        ),
        noise_multiplier=multiplier,
        max_grad_norm=1.0,
        grad_sample_mode=mode,
        noise=noise,
        noise_generator=torch.Generator().manual_seed(seed),
        **kwargs,
    )
    module, optimizer, *criterion, loader = made
    return engine, module, optimizer, criterion[0] if criterion else PerSample(), loader


def step(module, optimizer, criterion, batch):
    optimizer.zero_grad()
    x, y = batch
    losses = nn.functional.cross_entropy(module(x), y, reduction="none")
    criterion(losses).backward()
    optimizer.step()


@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
def test_what_it_adds(mode):
    """C times the noise of the steps is that of independent noise of the same seed."""
    found = []
    for noise in (Banded(4, 12), Banded(1, 12)):
        _, module, optimizer, criterion, loader = private(mode, noise, 30.0)
        rows = []
        for batch in loader:
            step(module, optimizer, criterion, batch)
            rows.append(torch.cat([p.grad.flatten() for p in optimizer.params]))
        found.append(torch.stack(rows) * 5 / 30)
    correlated, independent = found
    matrix = torch.tensor(dense(4, 12), dtype=torch.float32)
    # What is left is made of clipped gradients: up to 15 of norm 1, of noise 30.
    torch.testing.assert_close(matrix @ correlated, independent, atol=0.9, rtol=0)
    assert (correlated - independent).abs().max() > 2


def test_batches_are_of_parts_in_turn_and_recorded_once_in_a_round():
    engine, module, optimizer, criterion, loader = private(sampling=None)
    drawn = []
    for _ in range(2):
        for batch in loader:
            step(module, optimizer, criterion, batch)
    for indices in loader.batch_sampler:
        drawn.append(indices)
        if len(drawn) == 1:
            break
    # A rate of 4/12 for a part; rounds 1 to 6 of 4 steps each.
    assert engine.accountant.history == [(1.0, 4 / 12, 6)]
    assert {i % 4 for i in drawn[0]} <= {0}
    sampling = CyclicPoisson(bands=4, expected_batch_size=5)
    many = [sampling.draw(60, None, t) for t in range(400)]
    assert all((ids % 4 == t % 4).all() for t, ids in enumerate(many))
    shares = torch.bincount(torch.cat(many), minlength=60) / 100
    assert shares.mean() == pytest.approx(1 / 3, abs=0.02)
    assert shares.std() < 0.07


def test_accounting_of_a_run():
    """Six rounds of one sampled Gaussian each, however they are counted."""
    sampling = CyclicPoisson(bands=4, expected_batch_size=5)
    counted = create_accountant("rdp")
    sampling.account(counted, 60, 1.5, steps=21)
    expected = create_accountant("rdp")
    expected.history = [(1.5, 1 / 3, 6)]
    assert counted.get_epsilon(1e-5) == expected.get_epsilon(1e-5)


def test_physical_batches():
    """One row of noise a logical batch."""
    grads = []
    for size in (100, 2):
        _, module, optimizer, criterion, loader = private()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=size, optimizer=optimizer
        ) as parts:
            torch.manual_seed(1)
            for batch in parts:
                step(module, optimizer, criterion, batch)
        assert optimizer.correlated.taken == 12
        grads.append(module.state_dict())
    for name, value in grads[0].items():
        torch.testing.assert_close(grads[1][name], value)


def test_resume(tmp_path):
    """Stopped after five of twelve steps, and gone on with: the same weights."""
    whole, part = private(), private()
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]
    for batch in batches:
        step(*whole[1:4], batch)
    for batch in batches[:5]:
        step(*part[1:4], batch)
    engine, module, optimizer, *_ = part
    engine.save_checkpoint(path=tmp_path / "run.pt", module=module, optimizer=optimizer)
    state = optimizer.generator.get_state()
    rest = private(seed=1)
    rest[0].load_checkpoint(path=tmp_path / "run.pt", module=rest[1], optimizer=rest[2])
    rest[2].generator.set_state(state)
    for batch in batches[5:]:
        step(*rest[1:4], batch)
    for name, value in whole[1].state_dict().items():
        torch.testing.assert_close(rest[1].state_dict()[name], value)
    assert rest[0].accountant.history == whole[0].accountant.history
    drawn = private(seed=2)
    given = dict(path=tmp_path / "run.pt", module=drawn[1], optimizer=drawn[2])
    drawn[0].load_checkpoint(**given)
    assert next(iter(drawn[-1].batch_sampler)) is not None
    independent = private(noise="independent")
    with pytest.raises(Refused, match="correlated noise"):
        independent[2].load_state_dict(optimizer.state_dict())
    with pytest.raises(Refused, match="independent noise"):
        rest[2].load_state_dict(independent[2].state_dict())
    with pytest.raises(Refused, match=r"noise of Banded\(bands=4, steps=12, mom"):
        private(noise=Banded(2, 12))[2].load_state_dict(optimizer.state_dict())
    state = optimizer.state_dict()
    state["opacus_ext_correlated_noise"]["past"] = {}  # as of another process
    rest[2].load_state_dict(state)
    with pytest.raises(Refused, match="no noise of 5 steps before"):
        step(*rest[1:4], batches[0])


def test_batches_without_a_step_are_refused():
    """At the next draw, whatever is drawn ahead; a draw that is given up is fine."""
    for ahead in (0, 1):
        _, module, optimizer, criterion, loader = private()
        loader.batch_sampler.ahead = ahead
        batches, queue, seen = iter(loader), [], []
        with pytest.raises(Refused, match="3 steps.*ask for 4"):
            for i in range(12):
                while len(queue) <= ahead:
                    queue.append(next(batches))
                if i != 3:
                    step(module, optimizer, criterion, queue[0])
                seen.append(queue.pop(0))
        assert len(seen) == 4
    _, module, optimizer, criterion, loader = private()
    for given_up in (5, 2, 12):
        for i, batch in enumerate(loader):
            if i == given_up:
                break
            step(module, optimizer, criterion, batch)
    with pytest.raises(Refused, match="had no new draw"):
        step(module, optimizer, criterion, batch)  # of no new batch


def test_workers_draw_ahead():
    _, module, optimizer, criterion, loader = private(workers=1)
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=2, optimizer=optimizer
    ) as parts:
        for batch in parts:
            step(module, optimizer, criterion, batch)
    assert optimizer.correlated.taken == 12
    _, module, optimizer, criterion, loader = private(workers=1)
    with pytest.raises(Refused, match="5 steps.*ask for 6"):
        for i, batch in enumerate(loader):
            if i != 5:
                step(module, optimizer, criterion, batch)
    assert i == 5


def test_with_epsilon():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(400, 5), torch.randint(0, 3, (400,)))
    model, engine = nn.Linear(5, 3), PrivacyEngine(accountant="prv_bounds")
    module, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.7),
        criterion=PerSample(),
        data_loader=DataLoader(data, batch_size=20),
        target_epsilon=8.0,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
        noise="banded",
    )
    assert optimizer.correlated.strategy.bands > 1
    assert optimizer.correlated.strategy.momentum == 0.7
    for _ in range(3):
        for batch in loader:
            step(module, optimizer, criterion, batch)
    assert 7.5 < engine.get_epsilon(1e-5) <= 8.0


@pytest.mark.parametrize(
    "kwargs, match",
    [
        ({"noise": "pink"}, "noise='pink'"),
        ({"noise": "banded"}, "noise='banded'"),
        ({"sampling": "shuffle"}, "CyclicPoisson"),
        ({"noise": Banded(24, 30)}, "smaller than the expected batch"),
    ],
)
def test_refused(kwargs, match):
    with pytest.raises(Refused, match=match):
        private(**kwargs)


def test_another_noise_multiplier_and_a_monitor_are_refused():
    engine, module, optimizer, criterion, loader = private()
    with pytest.raises(Refused, match="correlated"):
        Monitor(engine, optimizer)
    batches = iter(loader)
    step(module, optimizer, criterion, next(batches))
    optimizer.noise_multiplier = 0.5
    with pytest.raises(Refused, match="from 1 to 0.5"):
        step(module, optimizer, criterion, next(batches))
    optimizer.noise_multiplier = 1.0
    optimizer.params[-1].requires_grad_(False)
    with pytest.raises(Refused, match="Other parameters"):
        step(module, optimizer, criterion, (torch.ones(1, 5), torch.ones(1).long()))


def test_two_batches_in_one_step_are_refused_in_the_middle_of_a_round():
    _, module, optimizer, criterion, loader = private("hooks")
    batches = iter(loader)
    step(module, optimizer, criterion, next(batches))
    optimizer.zero_grad()
    x, y = next(batches)
    with pytest.raises(Refused, match="accumulat"):
        for _ in range(2):
            nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()


@pytest.mark.thorough
def test_the_bands_that_leave_the_least_noise():
    """By the accountant of the run; what was spent before leaves fewer."""
    sampling, accountant = Poisson(sample_rate=0.02), create_accountant("prv_bounds")
    budget = {"epsilon": 4.0, "delta": 1e-5, "epochs": 4}
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))])
    chosen = banded(sampling, accountant, 1000, sgd, **budget)
    left = []
    for bands in (chosen.bands, chosen.bands // 2, chosen.bands * 2):
        cyclic = CyclicPoisson(bands=bands, sample_rate=0.02)
        noise = noise_of_run(cyclic, accountant, 1000, **budget)
        left.append(noise * Banded(bands, 200).prefix_error())
    assert min(left) == left[0]
    accountant.step(noise_multiplier=1.15, sample_rate=1.0)
    rest = banded(sampling, accountant, 1000, sgd, **budget)
    assert 1 <= rest.bands < chosen.bands
