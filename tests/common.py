"""The common base of the tests: the oracle, and one way into every mode.

The oracle is each sample alone through plain autograd, in float64. The modes are
reached through the public ``PrivacyEngine`` only, and are judged by what they do to the
parameters: SGD with a learning rate of 1, known C and no noise, so that the update of a
parameter is the sum of its clipped gradients over the expected batch size.

Everywhere ``loss_fn(model, batch)`` gives the losses [B], and ``batch`` is a tensor, or
a tuple or dict of tensors of which those in ``batched`` (by default all) have the batch
first.
"""

import copy
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.losses import PerSample

MODES = ("hooks", "ghost", "ghost_bk")
CLIPPINGS = ("flat", "automatic", "normalized", "per_layer")

every_mode = pytest.mark.parametrize("mode", MODES)
# Layers are tested in two modes, wrapped; all modes, wrapped and not, in modes_test.py.
layer_modes = pytest.mark.parametrize("mode", ("hooks", "ghost_bk"))
wrapped = pytest.mark.parametrize("wrap", [True], ids=["wrap"])
every_clipping = pytest.mark.parametrize("clipping", CLIPPINGS)
wrapped_or_not = pytest.mark.parametrize("wrap", [True, False], ids=["wrap", "nowrap"])


# What a refusal may look like: an error that says so. An AttributeError or an
# IndexError from the depths is a crash, whatever it says.
CRASHES = (AssertionError, AttributeError, IndexError, KeyError, TypeError)


def with_notes(error):
    """The text of an error, with its notes, which Python 3.10 has in the text."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


class Net(nn.Module):
    """A forward ``then(net, *inputs)``, on parts: modules, parameters and numbers."""

    def __init__(self, then, **parts):
        super().__init__()
        self.then = then
        for name, value in parts.items():
            value = nn.Parameter(value) if isinstance(value, torch.Tensor) else value
            setattr(self, name, value)

    def forward(self, *inputs, **named):
        return self.then(self, *inputs, **named)


def net(then, **parts):
    """
    What makes a :class:`Net`: a part ``(m, n)`` is a linear layer of this size, and a
    function is called, so that each model has parameters of its own.
    """

    def part(of):
        return nn.Linear(*of) if isinstance(of, tuple) else of() if callable(of) else of

    return lambda: Net(then, **{name: part(of) for name, of in parts.items()})


def sample_of(batch, b, batched=None):
    """Sample ``b`` with its batch dimension; ``batched`` names what has one."""
    if isinstance(batch, torch.Tensor):
        return batch[b : b + 1]
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    cut = {
        key: value[b : b + 1] if batched is None or key in batched else value
        for key, value in items
    }
    return cut if isinstance(batch, dict) else tuple(cut.values())


def size_of(batch, batched=None):
    if isinstance(batch, torch.Tensor):
        return len(batch)
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return next(len(v) for key, v in items if batched is None or key in batched)


def trainable(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def oracle(model, batch, loss_fn, batched=None):
    """Gradients [B, *shape] of every trainable parameter, one sample at a time."""
    rows = []
    for b in range(size_of(batch, batched)):
        alone = copy.deepcopy(model)
        (loss,) = loss_fn(alone, sample_of(batch, b, batched))
        # backward, as autograd.grad refuses reentrant activation checkpointing
        loss.backward()
        rows.append(
            {
                name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense()
                for name, p in trainable(alone).items()
            }
        )
    if not rows:
        return {name: p.new_zeros(0, *p.shape) for name, p in trainable(model).items()}
    # By name: a forward may take parameters out of a module, and put them back.
    return {n: torch.stack([row[n] for row in rows]) for n in trainable(model)}


def norms_of(grads):
    """Norm of each sample's gradient over all parameters, [B]."""
    return torch.stack(
        [g.flatten(1).norm(dim=1) if g.dim() > 1 else g.abs() for g in grads.values()]
    ).norm(dim=0)


def factors(clipping, norms, max_grad_norm):
    """Clipping factors as the papers give them, [B]; see ``clipped_sum``."""
    if clipping == "automatic":
        return max_grad_norm / (norms + 0.01)
    clip = (max_grad_norm / (norms + 1e-6)).clamp(max=1)
    return clip / max_grad_norm if clipping == "normalized" else clip


def moved(bound, norms, expected, quantile=0.5, lr=0.2):
    """The bound after a batch of adaptive clipping, without noise in the count."""
    fraction = float(((norms <= bound).double() - 0.5).sum()) / expected + 0.5
    return bound * math.exp(-lr * (fraction - quantile))


def clipped_sum(grads, clipping="flat", max_grad_norm=1.0):
    """Sum over samples of the clipped gradients [B, *shape], by parameter."""
    if clipping == "per_layer":
        return {
            name: clipped_sum({name: g}, "flat", c)[name]
            for (name, g), c in zip(grads.items(), max_grad_norm)
        }
    c = factors(clipping, norms_of(grads), max_grad_norm)
    return {name: torch.einsum("b,b...->...", c, g) for name, g in grads.items()}


@dataclass
class Private:
    """What ``make_private`` gives, under one form for all modes."""

    engine: PrivacyEngine
    module: nn.Module  # what the user calls: the wrapper, or his own model
    handle: object  # what make_private returned first; it can clean up
    optimizer: torch.optim.Optimizer
    criterion: object  # None where the mode takes a plain loss
    loader: DataLoader

    def backward(self, batch, loss_fn):
        losses = loss_fn(self.module, batch)
        if self.criterion is None:
            loss = losses.mean()
        else:
            loss = self.criterion(losses, None)
        loss.backward()

    def step(self, batch, loss_fn):
        self.optimizer.zero_grad()
        self.backward(batch, loss_fn)
        self.optimizer.step()

    def parts(self, size):
        """The loader of physical batches, in a ``with`` statement."""
        return BatchMemoryManager(
            data_loader=self.loader,
            max_physical_batch_size=size,
            optimizer=self.optimizer,
        )


def make_private(
    model,
    mode,
    wrap=True,
    *,
    batch_size,
    max_grad_norm=1.0,
    clipping="flat",
    noise_multiplier=0.0,
    optimizer=None,
    dataset=None,
    criterion=None,
    poisson_sampling=False,
    lr=1.0,
    accountant="prv_bounds",
    workers=0,
    sampler=None,
    **kwargs,
):
    engine = PrivacyEngine(accountant=accountant)
    if dataset is None:
        dataset = TensorDataset(torch.zeros(max(batch_size, 1), 1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="poisson_sampling=False")
        first, *rest = engine.make_private(
            module=model,
            optimizer=optimizer or torch.optim.SGD(trainable(model).values(), lr=lr),
            criterion=criterion or PerSample(),
            data_loader=DataLoader(
                dataset, max(batch_size, 1), sampler=sampler, num_workers=workers
            ),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            grad_sample_mode=mode,
            wrap_model=wrap,
            **kwargs,
        )
    dp_optimizer, *dp_criterion, loader = rest
    return Private(
        engine,
        first if wrap else model,
        first,
        dp_optimizer,
        dp_criterion[0] if dp_criterion else None,
        loader,
    )


def run_mode(
    mode,
    wrap,
    model,
    batch,
    loss_fn,
    clipping="flat",
    max_grad_norm=1.0,
    batched=None,
    **kwargs,
):
    """The clipped sums by parameter, told from the parameters' update in one step."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in trainable(model).items()}
    size = size_of(batch, batched)
    private = make_private(
        model,
        mode,
        wrap,
        batch_size=size,
        max_grad_norm=max_grad_norm,
        clipping=clipping,
        **kwargs,
    )
    private.step(batch, loss_fn)
    after = trainable(model)
    return {
        name: (before[name] - after[name].detach()) * max(size, 1) for name in before
    }


def assert_same(got, expected, tolerance=1e-8, message=""):
    """Equal by parameter, relative to the largest entry of any parameter and its own.

    A gradient that is zero in theory (an attention's key bias) comes out as 1e-17.
    """
    assert list(got) == list(expected)
    largest = max(
        (float(e.abs().max()) for e in expected.values() if e.numel()), default=0
    )
    wrong = []
    for name, e in expected.items():
        assert got[name].shape == e.shape, f"{name}: {got[name].shape} for {e.shape}"
        if not e.numel():
            continue
        scale = max(float(e.abs().max()), 1e-3 * largest, 1e-30)
        gap = float((got[name] - e).abs().max())
        if not gap <= tolerance * scale:
            wrong.append(f"{name} by {gap / scale:.1e}")
    assert not wrong, f"{message} differs: " + ", ".join(wrong)


def half_clipped(grads):
    """A C that clips half of the samples."""
    norms = norms_of(grads)
    norms = norms[norms > 0]
    return float(norms.median()) if len(norms) else 1.0


def check(
    mode,
    wrap,
    model,
    batch,
    loss_fn,
    batched=None,
    max_grad_norm=None,
    tolerance=1e-8,
    grads=None,
    **kwargs,
):
    """One step of a mode equals the oracle. C clips half the samples by default.

    Several checks of one model and batch are given the oracle's ``grads``.

    A wrong norm shows as a wrong factor, and a wrong gradient of one parameter shows
    even where it does not move the norm by much, as it is compared by itself as well.
    """
    if grads is None:
        grads = oracle(model, batch, loss_fn, batched)
    c = half_clipped(grads) if max_grad_norm is None else max_grad_norm
    got = run_mode(mode, wrap, model, batch, loss_fn, "flat", c, batched, **kwargs)
    assert_same(got, clipped_sum(grads, "flat", c), tolerance, f"{mode}")


def squares(output):
    """A loss [B] that weighs every entry of ``output`` differently."""
    flat = output.flatten(1) if output.dim() > 1 else output.unsqueeze(1)
    weights = torch.linspace(0.5, 1.5, flat.size(1)).to(flat)
    return (weights * flat * flat).sum(dim=1) + (weights * flat).sum(dim=1)


def square_loss(model, batch):
    """``squares`` of a model called on a tensor, a tuple or a dict."""
    if isinstance(batch, dict):
        return squares(model(**batch))
    return squares(model(*batch) if isinstance(batch, tuple) else model(batch))


def next_token_loss(logits, ids):
    """Mean cross-entropy [B] of logits [B, T, V] on the following ids [B, T]."""
    losses = F.cross_entropy(
        logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none"
    )
    return losses.mean(dim=1)
