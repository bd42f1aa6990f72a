"""The accountant counts every step that adds noise and changes the weights."""

import itertools

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

from opacus_ext import Refused
from opacus_ext.data import Poisson
from opacus_ext.optimizers import Banded
from tests.common import assert_same, square_loss

from .loop import Loop, Net

MODES = ("hooks", "ghost", "ghost_bk", "scan")
FAILURES = ("forward", "criterion", "backward", "hook")


def epochs(loader, number):
    return itertools.chain.from_iterable(loader for _ in range(number))


SAMPLINGS = {
    "Opacus's": {},
    "Poisson": {"sampling": Poisson(sample_rate=0.3)},
}


@pytest.mark.parametrize("physical", [None, 2], ids=["whole", "parts"])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_every_step_is_counted(name, physical):
    """For whole batches, for parts of them, and for batches without records."""
    loop = Loop(accountant="prv_bounds", **SAMPLINGS[name])
    steps = []
    manager = BatchMemoryManager(
        data_loader=loop.loader,
        max_physical_batch_size=physical or 12,
        optimizer=loop.optimizer,
    )
    with manager as loader:
        for (x,) in epochs(loader, 3):
            before = loop.weights()
            loop.step(x)
            steps.append(not torch.equal(before, loop.weights()))
    assert sum(steps) == loop.counted == 3 * len(loop.loader)
    if physical is None:
        assert all(steps)


@pytest.mark.parametrize(
    "mode, sampling",
    [*((mode, None) for mode in MODES), ("ghost_bk", Poisson(expected_batch_size=3))],
)
def test_batches_without_records_have_noise_and_are_counted(mode, sampling):
    loop = Loop(mode, **({} if sampling is None else {"sampling": sampling}))
    for i in range(1, 4):
        loop.step(torch.zeros(0, 3, dtype=torch.float64))
        loop.look()
        assert loop.counted == loop.changed == i


def test_backward_passes_that_accumulate_are_a_larger_rate():
    loop = Loop("hooks")
    loop.private.handle.allow_grad_accumulation()
    for times in (1, 2):
        loop.optimizer.zero_grad()
        for _ in range(times):
            x = torch.randn(3, 3, dtype=torch.float64)
            loop.private.backward(x, loop.loss)
        loop.optimizer.step()
        loop.look()
    assert loop.accountant.history == [(1.0, 0.25, 1), (1.0, 0.5, 1)]


@pytest.mark.parametrize("place", [*FAILURES, "optimizer"])
def test_an_error_in_a_step(place):
    """
    An error before the step is counted changes nothing; after one that comes later, the
    step stays counted. Then the same batch can be computed again, and training goes on.
    """
    loop = Loop()
    if place == "hook":
        loop.optimizer.step_hook = None  # which the steps are counted without
        loop.optimizer.attach_step_hook(lambda _: loop.net.fail(place))
    x = torch.randn(3, 3, dtype=torch.float64)
    for number in range(1, 4):
        before, counted = loop.weights(), loop.counted
        with loop.failing(place):
            loop.step(x)
        loop.look()
        assert torch.equal(before, loop.weights()) == (place != "optimizer")
        late = place in ("hook", "optimizer")
        assert loop.counted == counted + late
        loop.step(x)
        loop.look()
        assert loop.counted == number * (1 + late)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_step_twice(mode):
    loop = Loop(mode)
    x = torch.randn(3, 3, dtype=torch.float64)
    loop.step(x)
    with pytest.raises((Refused, ValueError), match="clipped gradients|cleared"):
        loop.optimizer.step()
    loop.look()
    loop.step(x)
    loop.look()
    assert loop.counted == loop.changed == 2


def test_several_optimizers_of_one_engine():
    loop, other = Loop(), Net().double()
    first, optimizer, criterion, _ = loop.private.engine.make_private(
        module=other,
        optimizer=torch.optim.SGD(other.parameters(), lr=0.1),
        criterion=loop.private.criterion.criterion,
        data_loader=loop.loader,
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
    )
    x = torch.randn(3, 3, dtype=torch.float64)
    for _ in range(3):
        optimizer.zero_grad()
        criterion(square_loss(first, x), None).backward()
        optimizer.step()
        loop.step(x)
    counted = {noise: 0 for noise in (1.0, 2.0)}
    for noise, _, steps in loop.accountant.history:
        counted[noise] += steps
    assert counted == {1.0: 3, 2.0: 3}


def test_a_run_that_goes_on(tmp_path):
    path, loop = tmp_path / "run.pt", Loop()
    batches = iter(epochs(loop.loader, 9))
    for part in range(3):
        for (x,) in itertools.islice(batches, 5):
            loop.step(x)
            loop.look()
        counted = loop.counted
        private = loop.private
        given = {"module": private.handle, "optimizer": loop.optimizer}
        private.engine.save_checkpoint(path=path, **given)
        loop = Loop()
        private = loop.private
        given = {"module": private.handle, "optimizer": loop.optimizer}
        private.engine.load_checkpoint(path=path, **given)
        assert loop.counted == counted == 5 * (part + 1)
        loop._seen = loop.weights()


def test_rounds_of_correlated_noise():
    """A round is counted at its first step; once more if that fails after it."""
    loop = Loop(noise=Banded(3, 9), batch_size=2)
    batches = iter(loop.loader)
    for step in range(6):
        (x,) = next(batches)
        loop.step(x)
        assert loop.counted == step // 3 + 1
    hook = loop.optimizer.step_hook

    def fail_first(optimizer):
        loop.net.fail("hook")
        hook(optimizer)

    loop.optimizer.step_hook = fail_first
    (x,) = torch.zeros(1, 2, 3, dtype=torch.float64)
    with loop.failing("hook"):
        loop.step(x)
    assert loop.counted == 3
    loop.step(x)
    assert loop.counted == 4


def test_accountants_that_refuse_a_step_keep_those_before():
    """Opacus's takes the last entry out before it checks the new one."""
    loop = Loop(accountant="gdp")
    x = torch.randn(3, 3, dtype=torch.float64)
    loop.step(x)
    loop.optimizer.noise_multiplier = 2.0
    before = loop.weights()
    with pytest.raises(ValueError, match="stay constant"):
        loop.step(x)
    assert loop.counted == 1 and torch.equal(before, loop.weights())
    loop.optimizer.noise_multiplier = 1.0
    loop.step(x)
    assert loop.counted == 2


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_parts_that_are_left_out(skipped):
    """Skipped parts of logical batches; or later parts would go to other steps."""
    loop = Loop(batch_size=12)  # all records in each step
    manager = BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=5, optimizer=loop.optimizer
    )
    with manager as loader:
        parts = iter(epochs(loader, 3))
        for _ in range(skipped):
            (x,) = next(parts)
            loop.step(x)
        next(parts)
        (x,) = next(parts)
        if skipped < 2:  # the loader has not begun anew
            with pytest.raises(Refused, match="1 of the physical batches"):
                loop.step(x)
            assert loop.counted == 0
        for (x,) in loader:
            loop.step(x)
        assert loop.counted == 1


@pytest.mark.parametrize("place", ["forward", "criterion", "hook after"])
def test_an_error_in_the_middle_of_a_logical_batch(place):
    loop = Loop(batch_size=12, noise_multiplier=1e-12)
    loop.optimizer.attach_step_hook(lambda _: loop.net.fail("hook after"))
    manager = BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=5, optimizer=loop.optimizer
    )
    with manager as loader:
        parts = iter(loader)
        loop.step(*next(parts))
        with loop.failing(place):
            for (x,) in parts:
                loop.step(x)
        if place == "hook after":
            with pytest.raises(Refused, match="Begin the loader anew"):
                loop.step(x)
        else:
            loop.step(x)  # the same part once more
        loop.look()
        counted, every = loop.counted, loop.loader.dataset.tensors[0]
        expected = loop.sum_of(every)
        for (x,) in loader:
            loop.step(x)
        assert loop.counted == counted + 1
    got = {n: 12 * p.grad for n, p in loop.net.named_parameters()}
    assert_same(got, expected)
