"""Mode "auto": whichever way takes less time, and the same update either way."""

import copy
import logging

import pytest
import torch
from torch import nn

from opacus_ext.grad_sample.modes import auto
from opacus_ext.grad_sample.modes.auto import AT_ONCE, ONE_BY_ONE, Plan
from opacus_ext.grad_sample.modes.common import engine_of
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    oracle,
    square_loss,
    trainable,
    wrapped_or_not,
)


def settled(once, each, layers=1, size=4):
    """The choice where these are the times of the ways, and after how many steps."""
    plan, steps = Plan(layers), 0
    while plan.choice is None:
        way = plan.way
        # What is learnt of a kind of input is learnt in the first step.
        plan.add(way, (once if way == AT_ONCE else each) + 9 * (steps in (0, 2)), size)
        steps += 1
    return plan.way, steps


def test_the_faster_one():
    assert settled(1.0, 0.9) == (ONE_BY_ONE, 6)
    assert settled(1.0, 1.1) == (AT_ONCE, 6)
    assert settled(1.0, 3.0) == (AT_ONCE, 4)  # hopeless
    # Kernels of all samples would take longer to start than all takes at once.
    assert settled(1e-3, 1e-4, layers=50, size=8) == (AT_ONCE, 2)


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@wrapped_or_not
@pytest.mark.parametrize("slow", [AT_ONCE, ONE_BY_ONE])
def test_same_update(wrap, slow, monkeypatch, caplog):
    """While it tries and afterwards, for each shape by itself, B = 0 and B = 1 too."""
    caplog.set_level(logging.INFO, "opacus_ext")
    model, plain = model_of(), model_of()
    private = make_private(
        model, "auto", wrap, batch_size=4, max_grad_norm=0.2, clipping="flat", lr=0.1
    )
    engine = engine_of(private.module)
    mode = engine.chooser
    clock = [0.0]

    def now():  # one way takes longer
        clock[0] += 0.1 * (1 + (mode._trial is not None and mode._trial[1] == slow))
        return clock[0]

    monkeypatch.setattr(mode, "_now", now)
    sizes = [4, 5, 4, 6, 7, 5, 4, 4, 0, 1, 16]
    for size in sizes:
        batch = torch.randn(size, 4).double()
        plain.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(plain, batch, square_loss), "flat", 0.2)
        private.optimizer.zero_grad()
        private.criterion(square_loss(private.module, batch)).backward()
        assert_same({n: p.grad for n, p in trainable(model).items()}, expected, 1e-8)
        private.optimizer.step()
    other = {AT_ONCE: ONE_BY_ONE, ONE_BY_ONE: AT_ONCE}[slow]
    assert other in [plan.choice for plan in mode.plans.values()]
    assert f'mode "auto" is "{other}"' in caplog.text


def test_step_that_failed_does_not_count():
    private = make_private(model_of(), "auto", batch_size=4)
    mode = engine_of(private.module).chooser
    batch = torch.randn(4, 4).double()
    with pytest.raises(RuntimeError, match="1 losses for a batch"):
        private.criterion(private.module(batch).mean()[None]).backward()
    private.module(batch)  # and no backward pass
    assert not any(t for plan in mode.plans.values() for t in plan.times.values())
    private.step(batch, square_loss)
    (plan,) = mode.plans.values()
    assert [len(t) for t in plan.times.values()] == [1, 0]


def test_what_can_not_be_scanned(monkeypatch):
    """The mode tries, and goes on with the other way."""
    private = make_private(model_of(), "auto", batch_size=4)
    engine = engine_of(private.module)
    monkeypatch.setattr(auto, "_START", 0.0)

    def fail(*args):
        raise NotImplementedError

    monkeypatch.setattr(ScanRun, "forward", fail)
    for _ in range(4):
        private.step(torch.randn(4, 4).double(), square_loss)
    assert [plan.choice for plan in engine.chooser.plans.values()] == [AT_ONCE]


def test_copies_choose_by_themselves():
    private = make_private(model_of(), "auto", batch_size=4)
    private.step(torch.randn(4, 4).double(), square_loss)
    copied = copy.deepcopy(private.module)
    assert engine_of(copied).chooser is not engine_of(private.module).chooser
