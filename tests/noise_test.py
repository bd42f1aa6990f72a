"""The noise of runs that go on from a checkpoint: afresh, or repeated when asked."""

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from torch import nn

from opacus_ext.refused import Refused

from .common import make_private, square_loss
from .training import distance


def run_of(mode="ghost_bk", generator=None):
    """Five records, all of them in each step."""
    torch.manual_seed(0)
    given = dict(noise_multiplier=1.0, noise_generator=generator, lr=0.1)
    return make_private(nn.Linear(3, 2), mode, batch_size=5, accountant="rdp", **given)


def step(run):
    """Returns the weights afterwards."""
    run.step(torch.ones(5, 3), lambda model, x: model(x).sum(1))
    return {name: p.detach().clone() for name, p in run.module.named_parameters()}


@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
@pytest.mark.parametrize("own", [False, True], ids=["ours", "generator"])
def test_a_checkpoint_resumed_twice(mode, own, tmp_path):
    def make():
        run = run_of(mode, torch.Generator().manual_seed(1) if own else None)
        path = tmp_path / "run.pt"
        return run, dict(path=path, module=run.handle, optimizer=run.optimizer)

    run, given = make()
    first = step(run)
    run.engine.save_checkpoint(**given)
    whole, found = step(run), []
    for repeat_noise in (False, False, True, True):
        other, given = make()
        content = other.engine.load_checkpoint(**given, repeat_noise=repeat_noise)
        assert not any("noise" in name for name in content)
        assert distance(dict(other.module.named_parameters()), first) == 0
        found.append(step(other))
    once, again, same, same_again = found
    assert distance(once, again) > 1e-3 and distance(once, whole) > 1e-3
    assert distance(same, whole) == distance(same_again, whole) == 0


def test_optimizers_alone():
    """A state of another optimizer draws noise afresh; its own one changes nothing."""
    run, alike = run_of(), run_of()
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    assert distance(step(run), step(alike)) == 0
    state, found = run.optimizer.state_dict(), []
    for _ in range(2):
        other = run_of()
        other.optimizer.load_state_dict(state)
        found.append(step(other))
    assert distance(*found) > 0


def test_optimizers_made_one_after_the_other():
    """Each has noise of its own: subtracted from each other they would have none."""
    torch.manual_seed(0)
    noise, models = [], (nn.Linear(5, 2), nn.Linear(5, 2))
    given = {"batch_size": 4, "noise_multiplier": 1.0}
    for private in [make_private(m, "ghost_bk", **given) for m in models]:
        private.step(torch.zeros(0, 5), square_loss)
        noise.append(private.optimizer.params[0].grad)
    assert not torch.equal(*noise)


def test_nothing_to_repeat(tmp_path):
    run = run_of()
    given = {"path": tmp_path / "run.pt", "module": run.handle}
    run.engine.save_checkpoint(**given)
    with pytest.raises(Refused, match="its noise can't be repeated"):
        run.engine.load_checkpoint(**given, repeat_noise=True)


def test_a_step_that_failed_used_no_noise():
    run = run_of()
    step(run)
    with pytest.raises(Refused, match="without clipped gradients"):
        run.optimizer.step()
    step(run)


class Elsewhere(nn.Parameter):
    """A parameter on a device that has a generator of its own, as a GPU has."""

    device = torch.device("cpu", 0)


@pytest.mark.parametrize("given", [False, True], ids=["ours", "generator"])
def test_shares_on_a_device(given):
    """The seed of their noise is drawn from the generator that is watched."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DPDDP(nn.Linear(5, 2))
        generator = torch.Generator() if given else None
        kwargs = dict(noise_multiplier=1.0, noise_generator=generator)
        private = make_private(model, "ghost_bk", batch_size=4, **kwargs)
        private.optimizer.copies = 2  # as if each process had a share
        for p in model.parameters():
            p.__class__ = Elsewhere
        noise = []
        for _ in range(3):
            private.step(torch.zeros(0, 5), square_loss)
            noise.append(private.optimizer.params[0].grad)
        assert len({float(x[0, 0]) for x in noise}) == 3
        assert len(private.optimizer._noise_generators) == 1 - given
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
@pytest.mark.parametrize("multiplier", [0.0, 1e-16])
def test_sums_are_divided_by_the_batch_size(multiplier, mode):
    """Small and large ones, by a step or by its parts."""
    model, x = nn.Linear(3, 2**16).double(), torch.randn(4, 3).double()
    given = dict(batch_size=4, max_grad_norm=1e6, noise_multiplier=multiplier)
    square_loss(model, x).mean().backward()
    expected = [p.grad for p in model.parameters()]
    private = make_private(model, mode, **given)
    optimizer = private.optimizer
    for parts in (["pre_step"], ["accumulate", "add_noise", "scale_grad"]):
        optimizer.zero_grad()
        private.backward(x, square_loss)
        for name in parts:
            if mode == "hooks":
                name = name.replace("accumulate", "clip_and_accumulate")
            getattr(optimizer, name)()
        for p, e in zip(model.parameters(), expected):
            torch.testing.assert_close(p.grad, e, rtol=1e-8, atol=1e-8)
