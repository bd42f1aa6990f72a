"""Parameters that a forward uses more than once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.common import (
    check,
    layer_modes,
    next_token_loss,
    run_mode,
    square_loss,
    squares,
    wrapped,
)


class Tied(nn.Module):
    def __init__(self, V=11, d=4, padding_idx=None, bias=False):
        super().__init__()
        self.embedding = nn.Embedding(V, d, padding_idx=padding_idx)
        self.fc = nn.Linear(d, d)
        self.head = nn.Linear(d, V, bias=bias)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.fc(self.embedding(ids)).tanh())


def token_loss(model, ids):
    return next_token_loss(model(ids), ids)


@layer_modes
@wrapped
@pytest.mark.parametrize("B, T", [(4, 6), (4, 4), (1, 5), (3, 40)])
def test_tied_embedding(mode, wrap, B, T):
    """Phantom Clipping, DPFormer claim 4.1."""
    check(mode, wrap, Tied().double(), torch.randint(0, 11, (B, T)), token_loss)


@layer_modes
@pytest.mark.parametrize("bias", [True, False])
def test_tied_embedding_with_padding(mode, bias):
    """The padding row's gradient comes from the head alone."""
    ids = torch.randint(0, 11, (4, 6))
    ids[:, -2:] = 0
    check(mode, True, Tied(padding_idx=0, bias=bias).double(), ids, token_loss)


@layer_modes
@wrapped
def test_tied_flattened_head(mode, wrap):
    class Model(Tied):
        def forward(self, ids):
            h = self.fc(self.embedding(ids)).tanh()
            return self.head(h.flatten(0, 1)).view(*ids.shape, -1)

    check(mode, wrap, Model().double(), torch.randint(0, 11, (4, 4)), token_loss)


@layer_modes
@wrapped
def test_linear_twice(mode, wrap):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(3, 3)

        def forward(self, x):
            return self.fc(self.fc(x).tanh())

    check(mode, wrap, Model().double(), torch.randn(4, 5, 3).double(), square_loss)


@layer_modes
@wrapped
def test_two_layers_one_weight(mode, wrap):
    """Two Linears of their own biases over one weight, at different lengths."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
            self.two.weight = self.one.weight

        def forward(self, x):
            return self.two(self.one(x).tanh()[:, :2])

    check(mode, wrap, Model().double(), torch.randn(4, 5, 3).double(), square_loss)


class ThreeTimes(nn.Module):
    """One matrix thrice, as T5: encoder ids, decoder ids, output head."""

    def __init__(self, V=9, d=4):
        super().__init__()
        self.shared = nn.Embedding(V, d)
        self.fc = nn.Linear(d, d)
        self.head = nn.Linear(d, V, bias=False)
        self.head.weight = self.shared.weight

    def forward(self, source, target):
        context = self.fc(self.shared(source)).tanh().mean(dim=1, keepdim=True)
        return self.head(self.shared(target) + context)


@layer_modes
@wrapped
@pytest.mark.parametrize("S, T", [(5, 3), (4, 4), (3, 3)])
def test_three_times(mode, wrap, S, T):
    batch = torch.randint(0, 9, (4, S)), torch.randint(0, 9, (4, T))
    check(mode, wrap, ThreeTimes().double(), batch, square_loss)


@layer_modes
@wrapped
@pytest.mark.parametrize("repeats", [1, 2, 5])
def test_block_repeated(mode, wrap, repeats):
    """One block L times, as ALBERT and universal transformers."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = nn.Sequential(
                nn.LayerNorm(3), nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 3)
            )

        def forward(self, x):
            for _ in range(repeats):
                x = x + self.block(x)
            return x

    check(mode, wrap, Model().double(), torch.randn(4, 4, 3).double(), square_loss)


@layer_modes
def test_transposed_use(mode):
    """Autoencoder: a Linear, and transformers' Conv1D over the same matrix."""
    Conv1D = pytest.importorskip("transformers.pytorch_utils").Conv1D

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(4, 2)
            self.decoder = Conv1D(4, 2)
            self.decoder.weight = self.encoder.weight

        def forward(self, x):
            return self.decoder(self.encoder(x).tanh())

    check(mode, True, Model().double(), torch.randn(4, 5, 4).double(), square_loss)


class Cancelling(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(x) - self.fc(x), self.other(x)


@layer_modes
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cancelling_to_zero(mode, dtype):
    """<G1, G1> + <G2, G2> + 2 <G1, G2> = 0, or a little below: never NaN."""

    def loss_fn(model, batch):
        cancelled, other = model(batch)
        return cancelled.flatten(1).sum(dim=1) + squares(other)

    model = Cancelling().to(dtype)
    x = torch.randn(4, 7, 3).to(dtype)
    check(
        mode, True, model, x, loss_fn, tolerance=1e-8 if dtype.itemsize == 8 else 1e-4
    )


@layer_modes
def test_all_gradients_cancel(mode):
    """Nothing left at all: the clipping factor of a norm of zero is finite."""
    model = Cancelling()
    model.other.requires_grad_(False)
    x = torch.randn(4, 7, 3)

    def loss_fn(model, batch):
        return model(batch)[0].flatten(1).sum(dim=1)

    for name, total in run_mode(mode, True, model, x, loss_fn).items():
        assert total.isfinite().all(), name
        assert total.abs().max() < 1e-5, name


_PEAKS = """
import resource, sys, warnings
warnings.simplefilter("ignore")
import torch
import opacus_ext
from tests.common import make_private
from tests.grad_samples.shared_test import Tied

V, d, T, B = 100_000, 64, 4, 8
torch.set_num_threads(1)
ids = torch.randint(0, V, (B, T))

def loss_fn(model, ids):
    return model(ids).flatten(1).logsumexp(dim=1)

def plain():
    model = Tied(V, d)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loss_fn(model, ids).mean().backward()
    optimizer.step()

def private():
    make_private(Tied(V, d), sys.argv[1], batch_size=B).step(ids, loss_fn)

for step in (plain, private):
    step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""


@pytest.mark.parametrize(
    "mode", [pytest.param("ghost", marks=pytest.mark.slow), "ghost_bk"]
)
def test_memory_of_a_large_vocabulary(mode):
    """Never [B, V, d] nor [V, V]: a few [V, d] and [B, T, V] beyond a plain step.

    A process runs a plain step and then a private one; logits, weight and gradient
    are in both, so that the difference is what the mode adds. [B, V, d] is 205 MB; a
    copy of the summed gradient, the noise and the step take [V, d], 26 MB, each, and
    the recorded gradient of the logits [B, T, V] takes 13 MB.
    """
    run = subprocess.run(
        [sys.executable, "-c", _PEAKS, mode],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    plain, private = map(int, run.stdout.split())
    extra = private - plain
    table = 100_000 * 64 * 4
    assert extra < 6 * table, f"{extra / 2**20:.0f} MiB beyond a plain step"
