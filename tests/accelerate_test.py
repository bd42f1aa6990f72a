"""A plain loop with Accelerate on one process is the same loop without it."""

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import PrivacyEngine
from opacus_ext.losses import PerSample

from .processes import as_torchrun
from .training import distance, weights

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("accelerate")
both_modes = pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
RECORDS, EACH = 24, 4  # the records of a process's draw, on average
BOUND, RATE = 0.5, 0.1


def make():
    """The targets are the numbers of the records."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, RECORDS)).double()
    inputs = torch.randn(RECORDS, 3, dtype=torch.float64)
    return model, TensorDataset(inputs, torch.arange(RECORDS))


def accelerator(steps=1, shards=False, **settings):
    """With ``shards`` as on GPUs, as Accelerate leaves FSDP out on a CPU."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import (
        DataLoaderConfiguration,
        DistributedType,
        FullyShardedDataParallelPlugin,
    )

    as_torchrun()
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    config = DataLoaderConfiguration(**settings)
    given = dict(gradient_accumulation_steps=steps, dataloader_config=config)
    made = Accelerator(cpu=True, **given)
    if shards:
        plugin = FullyShardedDataParallelPlugin(2, auto_wrap_policy="no_wrap")
        kind = dict(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
        made.state._shared_state.update(kind)
    return made


@pytest.fixture(autouse=True)
def as_before():
    yield
    accelerator()


def generator(seed):
    return torch.Generator().manual_seed(seed)


class Loop:
    """
    A run that an ``accelerator``, if there is one, prepares before make_private, or
    after it if not ``first``. Draws and noise may come from generators: Accelerate
    looks a batch ahead, so that numbers of the default one are used in another order.
    """

    def __init__(
        self,
        mode="ghost_bk",
        accelerator=None,
        first=True,
        seed=0,
        noise=1.0,
        draws=None,
        drawn=None,
        physical=None,
    ):
        self.model, data = make()
        self.accelerator, self.engine = accelerator, PrivacyEngine(accountant="rdp")
        torch.manual_seed(seed)
        self.given = (
            self.model,
            torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9),
            DataLoader(data, batch_size=EACH, shuffle=True, generator=draws),
        )
        if accelerator and first:
            self.given = accelerator.prepare(*self.given)
        self.net, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=self.given[0],
            optimizer=self.given[1],
            criterion=PerSample(),
            data_loader=self.given[2],
            noise_multiplier=noise,
            max_grad_norm=BOUND,
            noise_generator=drawn,
            grad_sample_mode=mode,
        )
        self.criterion = criterion[0] if criterion else PerSample()
        self.private = self.optimizer
        if physical:
            self.loader = BatchMemoryManager(
                data_loader=self.loader,
                max_physical_batch_size=physical,
                optimizer=self.optimizer,
            ).__enter__()
        if accelerator and not first:
            made = accelerator.prepare(self.net, self.optimizer, self.loader)
            self.net, self.optimizer, self.loader = made

    def train(self, epochs=1, clip=False):
        """Returns the numbers of this process's records, by step."""
        seen, accelerator = [[]], self.accelerator
        for _ in range(epochs):
            for x, y in self.loader:
                self.optimizer.zero_grad()
                seen[-1] += y.tolist()
                loss = self.criterion(F.cross_entropy(self.net(x), y, reduction="none"))
                if not self.private._check_skip_next_step(pop_next=False):
                    seen.append([])
                if accelerator is None:
                    loss.backward()
                    self.optimizer.step()
                    continue
                with accelerator.accumulate(self.net):
                    accelerator.backward(loss)
                    if clip:
                        accelerator.clip_grad_norm_(self.net.parameters(), 0.01)
                    self.optimizer.step()
        return seen[:-1]


def resumed(folder, **given):
    """
    The gaps between the weights of a run and of two that go on from its checkpoint, by
    scripts that seed torch alike; and the accountants.
    """
    found = []
    for noise in (0.0, 1.0):
        runs = []
        for load in (False, True, True):
            loop = Loop(accelerator=accelerator(), noise=noise, **given)
            loop.accelerator.register_for_checkpointing(loop.engine.accountant)
            if load:
                loop.accelerator.load_state(folder)
            else:
                loop.train()
                loop.accelerator.save_state(folder)
            loop.train()
            runs.append(loop)
        states = [weights(run.model) for run in runs]
        gaps = [distance(*states[i : i + 2]) for i in range(2)]
        found.append((gaps, [run.engine.accountant.history for run in runs]))
    return found


def assert_resumed(found, steps):
    """Draws and noise are afresh, as what another run has drawn may be known."""
    for noise, (gaps, histories) in zip((0.0, 1.0), found):
        assert min(gaps) > 1e-12
        assert histories == [[(noise, 1 / steps, 2 * steps)]] * 3


def end_of(mode, made=None, first=True, clip=False):
    loop = Loop(mode, made, first, draws=generator(1), drawn=generator(2), physical=3)
    loop.train(clip=clip)
    return loop


@both_modes
@pytest.mark.parametrize("first", [False, True])
def test_prepare(mode, first, tmp_path):
    """After make_private, or before it; with a sampler that it would replace."""
    run = end_of(mode, accelerator(use_seedable_sampler=True), first)
    assert distance(weights(run.model), weights(end_of(mode).model)) == 0
    assert run.engine.accountant.history == [(1.0, EACH / RECORDS, RECORDS // EACH)]
    run.accelerator.save_model(run.model, tmp_path, safe_serialization=False)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    assert list(saved) == list(run.model.state_dict())


@both_modes
def test_what_is_refused(mode):
    """
    accumulate leaves out batches, or scales losses; clip_grad_norm_ clips before the
    noise, and is without effect in "hooks", as in Opacus.
    """
    with pytest.raises((ValueError, RuntimeError), match="BatchMemoryManager"):
        end_of(mode, accelerator(steps=2), first=False)
    if mode == "hooks":
        clipped = end_of(mode, accelerator(), first=False, clip=True)
        assert distance(weights(clipped.model), weights(end_of(mode).model)) == 0
        return
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        end_of(mode, accelerator(), first=False, clip=True)


@both_modes
@pytest.mark.parametrize("first", [False, True])
def test_state_that_is_loaded(mode, first, tmp_path):
    given = {"mode": mode, "first": first, "physical": 3}
    assert_resumed(resumed(str(tmp_path), **given), RECORDS // EACH)
