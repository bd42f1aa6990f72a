"""Strategies of correlated noise: matrices, sensitivities, streams, what is recorded.

The oracles: dense matrices, and all ways to take part in up to eight steps.
"""

import copy
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from scipy.linalg import toeplitz
from scipy.signal import lfilter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401
from opacus_ext.accountants.composition import Composition
from opacus_ext.accountants.mechanisms import Binned
from opacus_ext.data import BallsInBins, CyclicPoisson, Poisson
from opacus_ext.losses import PerSample
from opacus_ext.refused import Refused
from opacus_ext.strategies import (
    Banded,
    BufferedToeplitz,
    InverseBanded,
    LambdaCGD,
    Participation,
)
from opacus_ext.strategies.banded import coefficients
from opacus_ext.strategies.stream import CorrelatedNoise

N = 8
STRATEGIES = {
    "independent": Banded(1, N),
    "banded": Banded(3, N),
    "banded, momentum": Banded(4, N, 0.9),
    "inverse banded": InverseBanded(3, N),
    "inverse banded, momentum": InverseBanded(5, N, 0.9),
    "inverse banded, searched": InverseBanded(4, N, separation=2),
    "buffered": BufferedToeplitz(1, N),
    "buffered, several epochs": BufferedToeplitz(2, N, separation=3),
    "buffered, momentum": BufferedToeplitz(2, N, 0.5),
    "lambda": LambdaCGD(N, separation=4),
    "lambda, fixed": LambdaCGD(N, correlation=0.7),
}


def matrix(strategy):
    return np.tril(toeplitz(strategy.coefficients(), np.zeros(strategy.steps)))


def workload(steps, momentum):
    column = np.cumsum(momentum ** np.arange(steps))
    return np.tril(toeplitz(column, np.zeros(steps)))


def participations(separation, times):
    """All sets of steps of one record."""
    for count in range(1, times + 1):
        for steps in itertools.combinations(range(N), count):
            if all(b - a >= separation for a, b in zip(steps, steps[1:])):
                yield list(steps)


@pytest.mark.parametrize("name", STRATEGIES)
def test_matrix_and_errors(name):
    strategy = STRATEGIES[name]
    c = matrix(strategy)
    assert np.linalg.norm(c[:, 0]) == pytest.approx(1)
    inverse = np.linalg.inv(c)
    assert strategy.inverse_coefficients() == pytest.approx(inverse[:, 0])
    left = workload(N, strategy.momentum) @ inverse
    rows = np.linalg.norm(left, axis=1)
    assert strategy.prefix_error() == pytest.approx(math.sqrt(np.mean(rows**2)))
    assert strategy.last_error() == pytest.approx(rows[-1])
    wide = max(np.abs(c).nonzero()[0] - np.abs(c).nonzero()[1]) + 1
    assert wide <= strategy.span


@pytest.mark.parametrize("name", STRATEGIES)
def test_sensitivity_is_the_largest_of_all_participations(name):
    """Gradients of norm 1 that are alike, of both signs, and in any directions."""
    strategy, rng = STRATEGIES[name], np.random.default_rng(0)
    c = matrix(strategy)
    for separation, times in itertools.product((1, 2, 3, 5, 9), (1, 2, 3, 8)):
        most = 0.0
        for steps in participations(separation, times):
            columns = c[:, steps]
            most = max(most, np.linalg.norm(columns.sum(1)))
            for gradients in (
                rng.choice([-1.0, 1.0], (len(steps), 1)),
                rng.normal(size=(len(steps), 3)),
            ):
                gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
                changed = np.linalg.norm(columns @ gradients)
                most = max(most, changed)
        found = strategy.sensitivity(Participation(separation, times))
        column = strategy.coefficients()
        if column.min() >= 0 and (np.diff(column) <= 0).all():
            assert found == pytest.approx(most, rel=1e-9), (separation, times)
        else:  # a bound, for one that was searched for
            assert most * (1 - 1e-9) <= found < 1.01 * most


def test_sensitivity_bounds_columns_that_rise():
    """For no strategy of the package, but for any that somebody adds."""
    from opacus_ext.strategies.strategy import lagged_norm

    rng = np.random.default_rng(1)
    for _ in range(20):
        column = rng.normal(size=N)
        c = np.tril(toeplitz(column, np.zeros(N)))
        for separation, times in ((1, 3), (2, 4), (3, 2)):
            found = lagged_norm(column, separation, times)
            for steps in participations(separation, times):
                signs = itertools.product([-1, 1], repeat=len(steps))
                most = max(np.linalg.norm(c[:, steps] @ s) for s in signs)
                assert most <= found * (1 + 1e-12)


def rows_of(strategy, *shape, dtype=torch.float64):
    """The rows of a stream, and the independent ones that its generator draws."""
    noise = CorrelatedNoise(strategy, strategy.steps)
    generator, same = (torch.Generator().manual_seed(3) for _ in range(2))
    rows, drawn = [], []
    for _ in range(strategy.steps):
        draw = functools.partial(torch.randn, *shape, dtype=dtype)
        drawn.append(draw(generator=same))
        row = noise("w", lambda source: draw(generator=source), generator)
        rows.append(row.clone())
        noise.end()
    return torch.stack(rows), torch.stack(drawn), noise.std


@pytest.mark.parametrize("name", STRATEGIES)
def test_stream_is_the_inverse(name):
    strategy = STRATEGIES[name]
    inverse = np.linalg.inv(matrix(strategy))
    rows, z, std = rows_of(strategy, 3, 2)
    expected = torch.tensor(inverse) @ z.reshape(N, -1)
    torch.testing.assert_close(rows.reshape(N, -1), expected)
    assert std == pytest.approx(np.linalg.norm(inverse[-1]))


@pytest.mark.parametrize("name", STRATEGIES)
def test_covariance_of_a_stream(name):
    """Of 40,000 entries, drawn by the generator of a run."""
    strategy = STRATEGIES[name]
    rows, _, _ = rows_of(strategy, 40_000, dtype=torch.float32)
    inverse = np.linalg.inv(matrix(strategy))
    found = np.cov(rows.numpy())
    expected = inverse @ inverse.T
    deviation = np.sqrt(np.outer(np.diag(expected), np.diag(expected)) * 2 / 40_000)
    assert (np.abs(found - expected) < 5 * deviation).all()


def private(noise, sampling=None, steps=12, accountant="prv_bounds", **kwargs):
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    model, engine = nn.Linear(5, 3), PrivacyEngine(accountant=accountant)
    model, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=PerSample(),
        data_loader=DataLoader(data, batch_size=15),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
        noise=noise,
        sampling=sampling,
        **kwargs,
    )
    return engine, model, optimizer, criterion, loader


def step(model, optimizer, criterion, batch):
    optimizer.zero_grad()
    x, y = batch
    losses = nn.functional.cross_entropy(model(x), y, reduction="none")
    criterion(losses).backward()
    optimizer.step()


RUNS = {
    "inverse banded": (InverseBanded(3, 12), None),
    "lambda": (LambdaCGD(12, separation=4), None),
    "buffered, half of a part": (
        BufferedToeplitz(2, 12, separation=2),
        CyclicPoisson(bands=2, sample_rate=0.25),
    ),
    "banded, too few parts": (Banded(4, 12), CyclicPoisson(bands=2, sample_rate=0.25)),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_one_gaussian_release_at_any_time(name):
    """By its sensitivity so far; the parts are those of an epoch, and equal."""
    strategy, sampling = RUNS[name]
    engine, model, optimizer, criterion, loader = private(strategy, sampling)
    separation = loader.batch_sampler.sampling.bands
    taken = 0
    for _ in range(3):
        for batch in loader:
            if sampling is None:
                assert len(batch[0]) == 15
            step(model, optimizer, criterion, batch)
            taken += 1
            rounds = -(-taken // separation)
            expected = strategy.sensitivity(Participation(separation, rounds))
            history = engine.accountant.history
            assert {rate for _, rate, _ in history} == {1.0}
            found = sum(steps / noise**2 for noise, _, steps in history)
            assert math.sqrt(found) == pytest.approx(expected)
    with pytest.raises(Refused, match="planned for 12 steps"):
        step(model, optimizer, criterion, next(iter(loader)))
    assert "all of the data" in str(engine.privacy_statement(delta=1e-5))
    trial = PrivacyEngine(accountant="prv_bounds").accountant
    loader.batch_sampler.sampling.account(trial, 60, 1.0, 12, strategy)
    assert trial.get_epsilon(1e-5) == pytest.approx(engine.get_epsilon(1e-5), rel=1e-6)


def test_a_budget():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(60, 5), torch.randint(0, 3, (60,)))
    for epochs, strategy in ((3, LambdaCGD(12, separation=4)), (4, LambdaCGD(12))):
        model, engine = nn.Linear(5, 3), PrivacyEngine(accountant="prv_bounds")
        given = dict(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=PerSample(),
            data_loader=DataLoader(data, batch_size=15),
            target_epsilon=4.0,
            target_delta=1e-5,
            epochs=epochs,
            max_grad_norm=1.0,
            grad_sample_mode="ghost_bk",
            noise=strategy,
        )
        if epochs == 4:
            with pytest.raises(Refused, match="steps=16"):
                engine.make_private_with_epsilon(**given)
            continue
        model, optimizer, criterion, loader = engine.make_private_with_epsilon(**given)
        for _ in range(epochs):
            for batch in loader:
                step(model, optimizer, criterion, batch)
        assert 3.9 < engine.get_epsilon(1e-5) <= 4.0


@pytest.mark.parametrize(
    "strategy", [InverseBanded(3, 12), LambdaCGD(12), BufferedToeplitz(2, 12)]
)
def test_resume_is_bit_for_bit(strategy, tmp_path):
    """Of what the stream keeps, or draws again; only new noise is new."""
    whole, part = private(strategy), private(strategy)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]
    for run, count in ((whole, 12), (part, 5)):
        generator = torch.Generator().manual_seed(7)
        run[2].generator = generator
        for batch in batches[:count]:
            step(*run[1:4], batch)
    engine, model, optimizer, *_ = part
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    rest = private(strategy)
    rest[2].generator = torch.Generator()
    rest[0].load_checkpoint(path=tmp_path / "run.pt", module=rest[1], optimizer=rest[2])
    rest[2].generator.set_state(optimizer.generator.get_state())
    for batch in batches[5:]:
        step(*rest[1:4], batch)
    for name, value in whole[1].state_dict().items():
        assert torch.equal(rest[1].state_dict()[name], value)
    assert rest[0].accountant.history == whole[0].accountant.history
    state = optimizer.state_dict()["opacus_ext_correlated_noise"]
    kept = sum(x.numel() for x in state["past"].values())
    assert kept == strategy.memory * 18
    with pytest.raises(Refused, match="parts of the data"):
        private(strategy, CyclicPoisson(bands=2, sample_rate=0.25))[2].load_state_dict(
            optimizer.state_dict()
        )


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: InverseBanded(0, 10), "bands=0"),
        (lambda: BufferedToeplitz(11, 20), "buffers=11"),
        (lambda: LambdaCGD(10, correlation=1.0), "correlation=1.0"),
        (lambda: LambdaCGD(10, momentum=1.0), "momentum of 1"),
        (lambda: LambdaCGD(10, separation=0), "separation=0"),
        (lambda: Banded(2, 1.5), "steps=1.5"),
        (lambda: Participation(0), "separation=0"),
    ],
)
def test_numbers_are_refused(make, match):
    with pytest.raises(Refused, match=match):
        make()


@pytest.mark.parametrize("sampling", [CyclicPoisson, BallsInBins])
@pytest.mark.parametrize("name", ["buffered", "inverse", "lambda", "banded"])
def test_more_steps_than_planned(name, sampling):
    """Within the round that was planned columns have no row in common."""
    strategy = {
        "buffered": BufferedToeplitz(1, 3),
        "inverse": InverseBanded(3, 3),
        "lambda": LambdaCGD(3, 0.9),
        "banded": Banded(3, 3),
    }[name]
    if sampling is CyclicPoisson:
        drawn = CyclicPoisson(bands=4, sample_rate=0.25)
    else:
        drawn = BallsInBins(bins=4)
    engine, model, optimizer, criterion, loader = private(strategy, drawn)
    for _, batch in zip(range(3), loader):
        step(model, optimizer, criterion, batch)
    account = engine.accountant, 60, 1.0, 8, strategy
    if name == "banded":
        step(model, optimizer, criterion, next(iter(loader)))
        drawn.account(*account)
        return
    with pytest.raises(Refused, match="planned for 3 steps"):
        step(model, optimizer, criterion, next(iter(loader)))
    with pytest.raises(Refused, match="planned for 3 steps"):
        drawn.account(*account)
    assert sum(steps for *_, steps in engine.accountant.history) == 1
    # Two rounds would be more than two releases.
    numerator, denominator = strategy.filter
    c = lfilter(denominator, numerator, np.eye(1, 8)[0]) / strategy.factor
    assert np.linalg.norm(c + np.append(np.zeros(4), c[:4])) > 1.01 * math.sqrt(2)


def test_poisson_becomes_parts_of_an_epoch():
    *_, loader = private(LambdaCGD(12), Poisson(expected_batch_size=14))
    assert loader.batch_sampler.sampling.bands == 4
    assert loader.batch_sampler.sampling.expected_batch_size == 14


def in_bins(strategy, epochs, bins=4, **kwargs):
    """A run with balls in bins; the records of each batch."""
    run = private(strategy, BallsInBins(bins=bins), **kwargs)
    engine, model, optimizer, criterion, loader = run
    drawn = []
    for _ in range(epochs):
        for batch in loader:
            drawn.append({float(x[0]) for x in batch[0]})
            step(model, optimizer, criterion, batch)
    return run, drawn


@pytest.mark.parametrize(
    "strategy, left",
    [
        (Banded(2, 12), 2),
        (Banded(3, 12), 1),
        (Banded(5, 12), None),
        (LambdaCGD(12, separation=4), None),
    ],
)
def test_balls_in_bins(strategy, left):
    """Each record is in the same batch of each epoch; bands leave some bins alike."""
    (engine, *_), drawn = in_bins(strategy, 3)
    assert drawn[:4] == drawn[4:8] == drawn[8:]
    assert sum(map(len, drawn[:4])) == 60
    history = engine.accountant.history
    if left is not None:
        assert history == [(Binned(1.0, left) if left > 1 else 1.0, 1.0, 3)]
        bands = 4 // left  # in each, two of one bin are so many steps apart
        text = engine.privacy_statement(1e-3).text
        assert f"After {3 * left} rounds of {bands} steps" in text
        assert f"noise of {bands} steps in a row" in text and "one of 4 batches" in text
        return
    square = sum(steps / noise**2 for noise, _, steps in history)
    expected = strategy.sensitivity(Participation(4, 3))
    assert math.sqrt(square) == pytest.approx(expected)


@pytest.mark.parametrize("bands, epsilon", [(2, 0.5), (2, 1.5), (4, 1.0)])
def test_epsilon_of_balls_in_bins_is_no_less_than_the_true_one(bands, epsilon):
    """Of the mixture over the bins, by the likelihood ratio of 400,000 runs."""
    epochs, bins, noise = 2, 4, 1.5
    c = matrix(Banded(bands, epochs * bins))
    means = np.stack([c[:, j::bins].sum(1) for j in range(bins)])
    rng = np.random.default_rng(0)
    drawn = rng.normal(size=(400_000, epochs * bins)) * noise
    exponents = (drawn @ means.T - (means**2).sum(1) / 2) / noise**2
    ratio = np.exp(exponents).mean(1)
    trial = PrivacyEngine(accountant="prv_bounds").accountant
    sampling = BallsInBins(bins=bins)
    steps = epochs * bins
    sampling.account(trial, 60, noise, steps, Banded(bands, steps))
    delta = trial.get_delta(epsilon)
    for excess in (ratio - math.exp(epsilon), 1 - math.exp(epsilon) * ratio):
        found = np.maximum(excess, 0)
        assert found.mean() - 4 * found.std() / 632 <= delta.upper


def test_bins_are_kept_by_a_checkpoint(tmp_path):
    strategy = LambdaCGD(12, separation=4)
    (engine, model, optimizer, *_), before = in_bins(strategy, 1)
    engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    engine, model, optimizer, criterion, loader = private(strategy, BallsInBins(bins=4))
    engine.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
    after = []
    for batch in loader:
        after.append({float(x[0]) for x in batch[0]})
        step(model, optimizer, criterion, batch)
    assert after == before


@pytest.mark.parametrize("whole", [True, False])
def test_a_state_of_earlier_is_loaded(whole, tmp_path):
    """Alone, all rounds count once more; with the engine they do not."""
    strategy, path = LambdaCGD(12, separation=4), tmp_path / "run.pt"
    engine, model, optimizer, criterion, loader = private(strategy)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]
    for i, batch in enumerate(batches):
        if i == 6:
            parts = dict(path=path, module=model, optimizer=optimizer)
            engine.save_checkpoint(**parts)
            state = copy.deepcopy(optimizer.state_dict())
        step(model, optimizer, criterion, batch)
    if whole:
        engine.load_checkpoint(**parts)
    else:
        optimizer.load_state_dict(state)
    for batch in batches[6:]:
        step(model, optimizer, criterion, batch)
    found = sum(steps / noise**2 for noise, _, steps in engine.accountant.history)
    expected = strategy.sensitivity(Participation(4, 3)) ** 2
    assert found == pytest.approx(expected if whole else 2 * expected)


def rounds_of(engine):
    return sum(steps / noise**2 for noise, _, steps in engine.accountant.history)


def test_a_state_that_is_loaded_twice_counts_as_once():
    """Also if it is of a branch that went further than the steps since."""
    strategy = LambdaCGD(12, separation=4)
    engine, model, optimizer, criterion, _ = private(strategy)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(12)]
    states = []
    for batch in batches[:9]:
        states.append(copy.deepcopy(optimizer.state_dict()))
        step(model, optimizer, criterion, batch)
    square = [strategy.sensitivity(Participation(4, k)) ** 2 for k in (1, 2, 3)]
    optimizer.load_state_dict(states[4])
    optimizer.load_state_dict(states[4])
    step(model, optimizer, criterion, batches[4])
    assert rounds_of(engine) == pytest.approx(square[2] + square[1])
    optimizer.load_state_dict(states[8])  # of the first branch
    step(model, optimizer, criterion, batches[8])
    assert rounds_of(engine) == pytest.approx(2 * square[2] + square[1])


@pytest.mark.parametrize("fails", [True, False])
def test_a_checkpoint_without_this_noise(fails, tmp_path):
    """The noise goes on, so that the round that is under way counts again."""
    strategy = LambdaCGD(12, separation=4)
    engine, model, optimizer, *_ = private(LambdaCGD(24) if fails else strategy)
    path = tmp_path / "run.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=optimizer)
    engine, model, optimizer, criterion, _ = private(strategy)
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(7)]
    for batch in batches[:6]:
        step(model, optimizer, criterion, batch)
    if fails:
        with pytest.raises(Refused, match="The checkpoint has noise of"):
            engine.load_checkpoint(path=path, module=model, optimizer=optimizer)
    else:
        with pytest.warns(UserWarning, match="no optimizer is given"):
            engine.load_checkpoint(path=path, module=model)
    before = rounds_of(engine)
    step(model, optimizer, criterion, batches[6])
    expected = strategy.sensitivity(Participation(4, 2)) ** 2 - 1
    assert rounds_of(engine) - before == pytest.approx(expected)


def test_a_branch_of_banded_noise():
    """
    Of the steps before it, a record may be in the noise of both branches by one draw:
    with noise that is sqrt(2) times less, which counts beside all rounds.
    """
    engine, model, optimizer, criterion, _ = private(Banded(2, 12))
    batches = [(torch.randn(4, 5), torch.randint(0, 3, (4,))) for _ in range(4)]
    step(model, optimizer, criterion, batches[0])
    state = copy.deepcopy(optimizer.state_dict())
    for batch in batches[1:]:
        step(model, optimizer, criterion, batch)
    optimizer.load_state_dict(state)
    for batch in batches[1:]:
        step(model, optimizer, criterion, batch)
    found = engine.accountant.history
    assert [steps for *_, steps in found] == [3, 1, 1]
    assert [noise for noise, *_ in found] == pytest.approx([1.0, 0.5**0.5, 1.0])
    assert {rate for _, rate, _ in found} == {0.5}
    one, two = (Composition() for _ in range(2))
    c = coefficients(2, 12)
    # The truth for a record of the first step, and two rounds.
    one.history = [(1 / math.sqrt(1 + c[1] ** 2), 0.01, 1)]
    two.history = [(1.0, 0.01, 2)]
    assert one.get_bounds(1e-5).lower > two.get_epsilon(1e-5)


def test_a_run_after_another_one_has_other_noise():
    """Also if it is seeded alike, and only the accountant was loaded."""
    engine, model, optimizer, criterion, _ = private(LambdaCGD(12))
    batch = torch.randn(4, 5), torch.randint(0, 3, (4,))
    step(model, optimizer, criterion, batch)
    state = optimizer.noise_state()
    later, *_ = private(LambdaCGD(12))
    later.accountant.load_state_dict(engine.accountant.state_dict())
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    _, optimizer, *_ = later.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=PerSample(),
        data_loader=DataLoader(TensorDataset(torch.randn(60, 5)), batch_size=15),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
        noise=LambdaCGD(12),
    )
    assert optimizer.noise_state()["seed"] != state["seed"]
    assert optimizer._noise_generators == {}


def test_noise_that_was_drawn_in_part():
    """Sums that have faded twice are refused; a ring and states are drawn once more."""
    for strategy in (BufferedToeplitz(1, 12), InverseBanded(2, 12), LambdaCGD(12)):
        _, model, optimizer, criterion, _ = private(strategy)
        batch = torch.randn(4, 5), torch.randint(0, 3, (4,))
        step(model, optimizer, criterion, batch)
        row, calls = optimizer.correlated.strategy.row, []

        def fails(*args):
            calls.append(row(*args))
            raise KeyboardInterrupt

        kind = type(strategy)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kind, "row", lambda self, *args: fails(*args))
            with pytest.raises(KeyboardInterrupt):
                step(model, optimizer, criterion, batch)
        assert calls
        if strategy.can_redraw:
            step(model, optimizer, criterion, batch)
            continue
        with pytest.raises(Refused, match="last checkpoint"):
            step(model, optimizer, criterion, batch)
