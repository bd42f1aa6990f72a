"""Loops and collate functions that mix records before the model is called, and others.

The first batches of a loader are enough to tell: a loop of ``MIXING`` warns once, and
one of ``ALONE``, in which each row is made of its own record, says nothing.
"""

import warnings

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from opacus_ext import PrivacyEngine
from opacus_ext.grad_sample.adapter.mixing import (
    MixingMonitor,
    entries_of_batch,
    entries_of_records,
    find_mixed,
)
from tests.common import MODES

IMAGES = torch.rand(64, 3, 8, 8)
ROWS = torch.randn(64, 10)
BYTES = (255 * IMAGES).byte()
BITS = (torch.rand(64, 12) < 0.3).float()
LABELS = torch.randint(0, 2, (64,))


def noisy(x):
    """A step of diffusion."""
    share = torch.rand(len(x), *[1] * (x.dim() - 1))
    return share.sqrt() * x + (1 - share).sqrt() * torch.randn_like(x)


def mixup(x):
    share = np.random.beta(0.4, 0.4)
    return share * x + (1 - share) * x[torch.randperm(len(x))]


def mixup_by_row(x):
    share = torch.rand(len(x), *[1] * (x.dim() - 1))
    return share * x + (1 - share) * x.roll(1, 0)


def mixup_in_place(x):
    """As timm's Mixup."""
    return x.mul_(0.7).add_(x.flip(0).mul_(0.3 / 0.7))


def cutmix(x):
    x = x.clone()
    x[..., 1:6, 2:5] = x.flip(0)[..., 1:6, 2:5]
    return x


def erased(x):
    x = x.clone()
    x[..., 2:6] = 0
    return x


MIXING = {
    "mixup": (IMAGES, mixup),
    "mixup of rows": (ROWS, mixup),
    "by row": (IMAGES, mixup_by_row),
    "in place": (IMAGES, mixup_in_place),
    "at times": (IMAGES, lambda x: mixup(x) if torch.rand(()) < 0.6 else x),
    "of bytes": (BYTES, lambda x: mixup(x / 255)),
    "then scaled by channel": (
        IMAGES,
        lambda x: mixup(x) / torch.tensor([1.0, 2, 3]).view(3, 1, 1),
    ),
    "cutmix": (IMAGES, cutmix),
    "cutmix of bytes": (BYTES, lambda x: cutmix(x / 255)),
    "centered": (ROWS, lambda x: x - x.mean(0)),
    "standardized": (ROWS, lambda x: (x - x.mean(0)) / x.std(0)),
}

ALONE = {
    "as drawn": (IMAGES, lambda x: x),
    "scaled": (BYTES, lambda x: (x / 255 - 0.5) / 0.3),
    "noise": (IMAGES, lambda x: x + torch.randn_like(x)),
    "diffusion": (IMAGES, noisy),
    "fakes": (IMAGES, torch.randn_like),
    "flipped": (IMAGES, lambda x: x.flip(-1)),
    "shuffled": (IMAGES, lambda x: x[torch.randperm(len(x))]),
    "erased": (IMAGES, erased),
    "dropout": (ROWS, lambda x: F.dropout(x, 0.3)),
    "gamma": (IMAGES, lambda x: x**0.7),
    "jitter": (IMAGES, lambda x: x * torch.rand(len(x), 1, 1, 1)),
    "bits": (BITS, lambda x: (x - (torch.rand_like(x) < 0.2).float()).abs()),
    "few features": (ROWS[:, :3], lambda x: x + torch.randn_like(x)),
}


class Loop:
    """A loop on batches that ``change`` has changed."""

    def __init__(self, data, change=lambda x: x, mode="hooks", wrap=True, **options):
        torch.manual_seed(0)
        np.random.seed(0)
        self.change = change
        module = nn.Sequential(nn.Flatten(), nn.Linear(data[0].numel(), 2))
        loader = DataLoader(TensorDataset(data, LABELS), 16, **options)
        made = PrivacyEngine().make_private(
            module=module,
            optimizer=torch.optim.SGD(module.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=loader,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
            wrap_model=wrap,
        )
        self.optimizer, self.loader = made[1], made[-1]
        self.model = made[0] if wrap else module
        self.criterion = made[2] if len(made) > 3 else nn.CrossEntropyLoss()

    def train(self, loader=None):
        """Returns the warnings at lines of this loop in two epochs."""
        with warnings.catch_warnings(record=True) as met:
            warnings.simplefilter("always")
            for _ in range(2):
                for x, y in loader or self.loader:
                    self.optimizer.zero_grad()
                    self.criterion(self.model(self.change(x)), y).backward()
                    self.optimizer.step()
        met = [w for w in met if (w.filename, w.category) == (__file__, UserWarning)]
        # Other tests have the same seed.
        return [w for w in met if "another run" not in str(w.message)]


def assert_told(met):
    (warned,) = met
    assert "one record moves a step by more than max_grad_norm" in str(warned.message)
    assert str(warned.message).startswith("Sequential: ")


@pytest.mark.parametrize("name", MIXING)
def test_mixing_is_told_once(name):
    loop = Loop(*MIXING[name])
    assert_told(loop.train())


@pytest.mark.parametrize("name", ALONE)
def test_what_each_record_is_made_into_is_not(name):
    assert not [str(w.message) for w in Loop(*ALONE[name]).train()]


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", [*MODES, "scan"])
def test_modes(mode, wrap):
    loop = Loop(IMAGES, mixup_by_row, mode, wrap)
    assert_told(loop.train())


def mixed(records):
    """As a page of torchvision has it."""
    x, y = default_collate(records)
    return mixup_by_row(x), y


def as_arrays(records):
    """As timm's loaders have them."""
    return default_collate([(torch.from_numpy(np.array(x)), y) for x, y in records])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    "change, collate",
    [(mixup_by_row, None), (mixup_by_row, as_arrays), (torch.clone, mixed)],
)
def test_loaders(change, collate, workers):
    loop = Loop(IMAGES, change, collate_fn=collate, num_workers=workers)
    assert_told(loop.train())


def test_physical_batches():
    loop = Loop(IMAGES, mixup_by_row)
    with BatchMemoryManager(
        data_loader=loop.loader, max_physical_batch_size=8, optimizer=loop.optimizer
    ) as loader:
        assert_told(loop.train(loader))


def test_nothing_is_kept_for_long():
    """Entries of a few draws, however many there were."""
    loop = Loop(IMAGES)
    loop.train()
    mixing = loop.optimizer.mode.private.inputs.mixing
    for _ in range(16):
        loop.loader.collate_fn([loop.loader.dataset[i] for i in range(8)])
    assert sum(len(entries) for _, entries in mixing.drawn) <= 16


def test_the_statement_says_so():
    loop = Loop(IMAGES, mixup_by_row)
    loop.train()
    (reason,) = loop.optimizer.run["broken"]
    assert "mixup" in reason


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_rounded(dtype):
    torch.manual_seed(0)
    monitor = MixingMonitor()
    monitor.add(entries_of_batch(IMAGES[:16], 16))
    assert monitor.look(mixup_by_row(IMAGES[:16]).to(dtype))
    assert monitor.look(noisy(IMAGES[:16]).to(dtype)) is None


@pytest.mark.parametrize("dim", [8, 40, 200])
def test_chance(dim):
    """Of what is made of noise alone, nothing is found in 50 tries."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        records = rng.standard_normal((12, dim)) ** 2
        assert find_mixed(records * rng.random((12, 1)), records) is None
        assert find_mixed(rng.integers(0, 3, (12, dim)) * records, records) is None


def waves(phases):
    return np.sin(np.linspace(0, 20, 200) + phases[:, None])


@pytest.mark.parametrize("size", [2, 3, 4, 16])
def test_structure_proves_nothing(size):
    """What other records explain by chance, as they are alike, sparse or few."""
    rng = np.random.default_rng(0)
    phases = rng.random(size)
    assert find_mixed(waves(phases + rng.random(size)), waves(phases)) is None
    bits = np.floor(2 * rng.random((size, 300)))
    assert find_mixed(2 * bits - 1, bits) is None
    noise = rng.standard_normal((size - size // 2, 300))
    pairs = np.concatenate([noise, -noise])[:size]
    assert find_mixed(pairs, rng.random((size, 300))) is None


def test_items_that_are_left_out():
    """A user of one item is what another one has lost."""
    for seed in range(100):
        rng = np.random.default_rng(seed)
        items = np.zeros((int(rng.integers(4, 24)), 300))
        for row in items:
            row[(300 * rng.random(1 + rng.geometric(0.5)) ** 6).astype(int)] = 1
        assert find_mixed(items * (rng.random(items.shape) < 0.9), items) is None


class Refusing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise RuntimeError(function)


ARRAYS = {
    "flipped": lambda x: x[:, ::-1],
    "read-only": lambda x: np.frombuffer(x.tobytes()).reshape(x.shape),
    "of other bytes": lambda x: x.astype(">f4"),
    "long": lambda x: x.astype(np.longdouble),
    "masked": np.ma.array,
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.filterwarnings("error")
def test_arrays_of_a_data_set(name):
    records = [ARRAYS[name](np.random.rand(4, 8)) for _ in range(4)]
    kept = entries_of_records(records)
    assert len(kept) == (name != "long")
    if kept:
        np.testing.assert_allclose(kept[0].values[1], np.array(records[1]).ravel())


def fake(x):
    with FakeTensorMode():
        return torch.rand(x.shape)


INPUTS = {
    "fake": fake,
    "meta": lambda x: x.to("meta"),
    "sparse": torch.Tensor.to_sparse,
    "expanded": lambda x: x[:1].expand(x.shape),
    "complex": lambda x: x.to(torch.complex64).conj(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.quint8),
    "of a subclass": lambda x: x.as_subclass(Refusing),
    "empty": lambda x: x[:, :0],
}


@pytest.mark.filterwarnings("ignore:torch.quantize")
@pytest.mark.parametrize("name", INPUTS)
def test_inputs_that_cannot_be_read(name):
    x = INPUTS[name](torch.rand(16, 20))
    monitor = MixingMonitor()
    monitor.add(entries_of_batch(torch.rand(16, 20), 16))
    assert monitor.look(x) is None
    entries_of_batch(x, 16)


def test_transforms():
    monitor = MixingMonitor()
    monitor.add(entries_of_batch(torch.rand(16, 20), 16))

    def loss(x):
        assert monitor.look(x) is None
        assert not entries_of_batch(IMAGES, 64)
        return x.sum()

    torch.func.grad(loss)(torch.rand(16, 20))
    torch.vmap(loss)(torch.rand(2, 16, 20))


def test_inference_mode():
    with torch.inference_mode():
        assert entries_of_batch(torch.rand(16, 20), 16)
