"""A plain loop with Accelerate on one process is the same loop without it."""

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import PrivacyEngine
from opacus_ext.losses import PerSample

pytestmark = pytest.mark.filterwarnings("ignore")
Accelerator = pytest.importorskip("accelerate").Accelerator
both_modes = pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])


@pytest.fixture
def fresh():
    """Makes Accelerators with other settings than those before."""
    from accelerate.state import AcceleratorState, GradientState

    def make(**settings):
        AcceleratorState._reset_state(True)
        GradientState._reset_state()
        return Accelerator(cpu=True, **settings)

    yield make
    make()


class Loop:
    """
    A run whose draws come from torch's default generator, or draws and noise from
    their own: Accelerate looks a batch ahead, so that the default one's are used in
    another order.
    """

    def __init__(self, mode, accelerator=None, first=False, own=True, noise=1.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        data = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        seeds = (1, 2) if own else ()
        draws, drawn = [torch.Generator().manual_seed(i) for i in seeds] or (None, None)
        loader = DataLoader(data, batch_size=8, generator=draws)
        model, self.accelerator = self.model, accelerator
        if first:
            model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        self.engine = PrivacyEngine(accountant="rdp")
        self.net, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=model,
            optimizer=optimizer,
            criterion=PerSample(),
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=1.0,
            noise_generator=drawn,
            grad_sample_mode=mode,
        )
        self.criterion = criterion[0] if criterion else PerSample()
        self.loader = BatchMemoryManager(
            data_loader=self.loader,
            max_physical_batch_size=3,
            optimizer=self.optimizer,
        ).__enter__()
        if accelerator and not first:
            made = accelerator.prepare(self.net, self.optimizer, self.loader)
            self.net, self.optimizer, self.loader = made

    def epoch(self, clip=False):
        accelerator = self.accelerator
        for x, y in self.loader:
            self.optimizer.zero_grad()
            loss = self.criterion(F.cross_entropy(self.net(x), y, reduction="none"))
            if accelerator is None:
                loss.backward()
                self.optimizer.step()
                continue
            with accelerator.accumulate(self.net):
                accelerator.backward(loss)
                if clip:
                    accelerator.clip_grad_norm_(self.net.parameters(), 0.01)
                self.optimizer.step()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@both_modes
@pytest.mark.parametrize("first", [False, True])
def test_prepare(mode, first, fresh, tmp_path):
    """After make_private, or before it; with a sampler that it would replace."""
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=True)
    run = Loop(mode, fresh(dataloader_config=config), first=first)
    assert torch.equal(run.epoch(), Loop(mode).epoch())
    assert run.engine.accountant.history == [(1.0, 0.2, 5)]
    run.accelerator.save_model(run.model, tmp_path, safe_serialization=False)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    assert list(saved) == list(run.model.state_dict())


@both_modes
def test_what_is_refused(mode, fresh):
    """
    accumulate leaves out batches, or scales losses; clip_grad_norm_ clips before the
    noise, and is without effect in "hooks", as in Opacus.
    """
    with pytest.raises((ValueError, RuntimeError), match="BatchMemoryManager"):
        Loop(mode, fresh(gradient_accumulation_steps=2)).epoch()
    if mode == "hooks":
        assert torch.equal(Loop(mode, fresh()).epoch(clip=True), Loop(mode).epoch())
        return
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        Loop(mode, fresh()).epoch(clip=True)


@both_modes
@pytest.mark.parametrize("first", [False, True])
def test_state_that_is_loaded(mode, first, fresh, tmp_path):
    """
    With the accountant registered: records and noise are drawn afresh each time, as
    what another run has drawn may be known.
    """

    def make(noise):
        run = Loop(mode, fresh(), first, own=False, noise=noise)
        run.accelerator.register_for_checkpointing(run.engine.accountant)
        return run

    for noise in (0.0, 1.0):
        run = make(noise)
        run.epoch()
        run.accelerator.save_state(tmp_path)
        found = [run.epoch()]
        for _ in range(2):
            other = make(noise)
            other.accelerator.load_state(tmp_path)
            found.append(other.epoch())
        assert other.engine.accountant.history == [(noise, 0.2, 10)]
        for i, j in ((0, 1), (1, 2)):
            assert (found[i] - found[j]).abs().max() > 1e-3
    assert other.engine.get_epsilon(1e-3) == run.engine.get_epsilon(1e-3)
