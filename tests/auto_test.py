"""Mode "auto": whichever way takes less time, and the same update either way."""

import logging

import pytest
import torch
from torch import nn

from opacus_ext.grad_sample.adapter.settings import settings_of
from opacus_ext.grad_sample.modes import auto
from opacus_ext.grad_sample.modes.auto import AT_ONCE, ONE_BY_ONE, Choice
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    net,
    oracle,
    square_loss,
    trainable,
    wrapped_or_not,
)


def settled(once, each, layers=1, size=4):
    """The choice where these are the times of the ways, and after how many steps."""
    choice, steps = Choice(layers), 0
    while choice.way is None:
        seconds = once if choice.next == AT_ONCE else each
        # What is learned of a model is learned in the first step of a way.
        choice.add(seconds + 9 * (steps in (0, 2)), size)
        steps += 1
    return choice.way, steps


def test_the_faster_one():
    assert settled(1.0, 0.9) == (ONE_BY_ONE, 6)
    assert settled(1.0, 1.1) == (AT_ONCE, 6)
    # Kernels of all samples would take longer to start than all takes at once.
    assert settled(1e-3, 1e-4, layers=50, size=8) == (AT_ONCE, 2)


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@wrapped_or_not
@pytest.mark.parametrize("slow", [AT_ONCE, ONE_BY_ONE])
def test_same_update(wrap, slow, monkeypatch, caplog):
    """While it tries and afterwards, B = 0 and B = 1 too."""
    caplog.set_level(logging.INFO, "opacus_ext")
    model, plain = model_of(), model_of()
    private = make_private(
        model, "auto", wrap, batch_size=4, max_grad_norm=0.2, clipping="flat", lr=0.1
    )
    mode, clock = private.handle, [0.0]

    def now():  # one way takes longer
        clock[0] += 0.1 * (1 + (mode.choice.next == slow))
        return clock[0]

    monkeypatch.setattr(mode, "_now", now)
    sizes = [4, 5, 4, 6, 7, 5, 4, 4, 0, 1, 16]
    check_steps(private, model, plain, [torch.randn(n, 4).double() for n in sizes])
    other = {AT_ONCE: ONE_BY_ONE, ONE_BY_ONE: AT_ONCE}[slow]
    assert mode.choice.way == other and mode.private.one_by_one == (slow == AT_ONCE)
    assert f'mode "auto" is "{other}"' in caplog.text


def test_step_that_failed_does_not_count():
    private = make_private(model_of(), "auto", batch_size=4)
    times = private.handle.choice.times
    batch = torch.randn(4, 4).double()
    with pytest.raises(RuntimeError, match="batch of 4 samples"):
        private.criterion(private.module(batch).mean()[None]).backward()
    private.module(batch)  # and no backward pass
    assert not any(times.values())
    private.step(batch, square_loss)
    assert [len(t) for t in times.values()] == [1, 0]


@pytest.fixture
def compiles(monkeypatch):
    """Compiles on a CPU, by what needs no C++ compiler."""
    made = settings_of(torch.compile(nn.Identity(), backend="aot_eager"))
    monkeypatch.setattr(auto, "_COMPILED_ON", {"cpu"})
    monkeypatch.setattr(auto, "settings_of", lambda module: made)
    yield
    torch._dynamo.reset()


def check_steps(private, model, plain, batches):
    for batch in batches:
        plain.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(plain, batch, square_loss), "flat", 0.2)
        private.optimizer.zero_grad()
        private.criterion(square_loss(private.module, batch)).backward()
        assert_same({n: p.grad for n, p in trainable(model).items()}, expected, 1e-8)
        private.optimizer.step()
    compiled = private.handle.private._compiled.get(type(None))
    return 0 if compiled is None else compiled.programs


GIVEN = dict(batch_size=4, max_grad_norm=0.2, clipping="flat", lr=0.1)


def test_compiles_on_a_gpu(compiles, recwarn):
    """
    Poisson draws another batch size at each step: four programs serve them all, and
    those of another model in the same process do not count.
    """
    sizes = [4, 16, 11, 0, 15, 16, 19, 9, 1, 13, 24, 17, 30, 2, 12, 36, 16]
    batches = [torch.randn(size, 4).double() for size in sizes]
    for steps in (17, 3):
        model, plain = model_of(), model_of()
        private = make_private(model, "auto", **GIVEN)
        assert 1 < check_steps(private, model, plain, batches[:steps]) <= 4
    assert not [w for w in recwarn if "not compiled" in str(w.message)]


@pytest.mark.gpu
def test_on_a_gpu():
    model, plain = model_of().cuda(), model_of().cuda()
    private = make_private(model, "auto", **GIVEN)
    batches = [torch.randn(size, 4).double().cuda() for size in (4, 16, 11, 0, 1, 30)]
    assert 1 < check_steps(private, model, plain, batches) <= 4


def test_more_lengths_than_programs(compiles):
    build = net(lambda m, x: m.one(x).tanh().mean(1), one=(4, 3))
    model, plain = build().double(), build().double()
    private = make_private(model, "auto", **GIVEN)
    batches = [torch.randn(4, 1 + i % 7, 4).double() for i in range(10)]
    with pytest.warns(UserWarning, match="4 programs are built.*pad_to_multiple_of"):
        assert check_steps(private, model, plain, batches) == 4


def test_what_is_not_compiled_is_exact(compiles):
    def forward(m, x):
        if x.sum() > 0:
            x = 2 * x
        return m.one(x).tanh()

    build = net(forward, one=(4, 3))
    model, plain = build().double(), build().double()
    private = make_private(model, "auto", **GIVEN)
    batches = [torch.randn(4, 4).double() for _ in range(4)]
    with pytest.warns(UserWarning, match="trained exactly, and not compiled"):
        assert not check_steps(private, model, plain, batches)
