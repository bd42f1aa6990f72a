"""A plain loop with Accelerate on one process is the same loop without it."""

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.losses import PerSample

from .common import every_mode, wrapped_or_not

pytestmark = pytest.mark.filterwarnings("ignore")
Accelerator = pytest.importorskip("accelerate").Accelerator


def train(mode, wrap, accelerated, physical=None, clip=False, accumulate=1):
    """The weights after an epoch, and the accountant's history."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    data = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))
    draws = torch.Generator().manual_seed(1)
    engine = PrivacyEngine()
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        criterion=PerSample(),
        data_loader=DataLoader(data, batch_size=8, generator=draws),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        noise_generator=torch.Generator().manual_seed(2),
        grad_sample_mode=mode,
        wrap_model=wrap,
    )
    module, optimizer, *criterion, loader = made
    criterion = criterion[0] if criterion else PerSample()
    net = module if wrap else model
    if physical:
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
        )
        loader = manager.__enter__()
    if accelerated:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    for x, y in loader:
        optimizer.zero_grad()
        losses = F.cross_entropy(net(x), y, reduction="none")
        if not accelerated:
            criterion(losses).backward()
            optimizer.step()
            continue
        with accelerator.accumulate(net):
            accelerator.backward(criterion(losses))
            if clip:
                accelerator.clip_grad_norm_(net.parameters(), 0.01)
            optimizer.step()
    return torch.cat([p.flatten() for p in model.parameters()]), engine.accountant


@every_mode
@wrapped_or_not
@pytest.mark.parametrize("physical", [None, 3])
def test_prepare(mode, wrap, physical):
    plain, accountant = train(mode, wrap, False, physical)
    weights, same = train(mode, wrap, True, physical)
    assert torch.equal(weights, plain)
    assert same.history == accountant.history == [(1.0, 0.2, 5)]


@every_mode
def test_accumulate_is_refused(mode):
    """It would leave out batches, or scale losses; BatchMemoryManager does neither."""
    with pytest.raises((ValueError, RuntimeError), match="BatchMemoryManager"):
        train(mode, True, True, accumulate=2)


@every_mode
def test_clip_grad_norm(mode):
    """Clips before the noise: refused, or without effect as in Opacus's "hooks"."""
    if mode == "hooks":
        weights, _ = train(mode, True, True, clip=True)
        assert torch.equal(weights, train(mode, True, False)[0])
        return
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        train(mode, True, True, clip=True)


# -- what else Accelerate's users do -------------------------------------------------


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


class Run:
    """
    A run whose draws come from torch's default generator, or draws and noise from
    their own: Accelerate looks a batch ahead, so that the default one's are used
    in another order.
    """

    def __init__(self, mode, accelerator=None, first=False, own=True, noise=1.0):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
        data = TensorDataset(torch.randn(40, 5), torch.randint(0, 2, (40,)))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        draws, drawn = (
            torch.Generator().manual_seed(i) if own else None for i in (1, 2)
        )
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
        if accelerator and not first:
            self.net, self.optimizer, self.loader = accelerator.prepare(
                self.net, self.optimizer, self.loader
            )

    def epoch(self, half=False):
        for x, y in self.loader:
            self.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                logits = self.net(x)
            loss = self.criterion(F.cross_entropy(logits.float(), y, reduction="none"))
            self.accelerator.backward(loss) if self.accelerator else loss.backward()
            self.optimizer.step()
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


@every_mode
def test_prepare_before_make_private(mode, fresh):
    assert torch.equal(Run(mode, fresh(), first=True).epoch(), Run(mode).epoch())


@every_mode
def test_seedable_sampler(mode, fresh):
    """It takes the place of a shuffling sampler, and not of Poisson sampling."""
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = fresh(dataloader_config=config)
    assert torch.equal(Run(mode, accelerator).epoch(), Run(mode).epoch())


@every_mode
def test_bf16(mode, fresh):
    run = Run(mode, fresh(mixed_precision="bf16"))
    weights = run.epoch()
    torch.testing.assert_close(weights, Run(mode).epoch(half=True), rtol=0, atol=1e-3)
    assert not torch.equal(weights, Run(mode).epoch())


@every_mode
def test_state_that_is_loaded(mode, fresh, tmp_path):
    """
    With the accountant registered: as if the run had not been stopped, but for the
    noise, which is drawn afresh each time.
    """

    def make(noise):
        run = Run(mode, fresh(), own=False, noise=noise)
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
            same = (found[i] - found[j]).abs().max() < 1e-3
            assert same == (noise == 0)
    assert other.engine.get_epsilon(1e-3) == run.engine.get_epsilon(1e-3)


@every_mode
def test_evaluation_and_saving(mode, fresh, tmp_path):
    """Metrics over a loader, and a file of the weights that the model itself loads."""
    run = Run(mode, fresh())
    run.epoch()
    held_out = run.accelerator.prepare(DataLoader(run.loader.dataset, batch_size=16))
    run.net.eval()
    with torch.no_grad():
        found = [
            run.accelerator.gather_for_metrics((run.net(x).argmax(1), y))
            for x, y in held_out
        ]
    assert sum(len(y) for _, y in found) == 40
    run.accelerator.save_model(run.model, tmp_path, safe_serialization=False)
    saved = torch.load(tmp_path / "pytorch_model.bin")
    assert list(saved) == list(run.model.state_dict())
    inner = run.accelerator.unwrap_model(run.net)
    assert inner._module is run.model
