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
