"""A criterion that computes the loss of each sample from that sample alone."""

from __future__ import annotations

from numbers import Number
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

from opacus_ext.grad_sample.adapter.outputs import SQUEEZED, NotEqual
from opacus_ext.grad_sample.adapter.state import State
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, in_groups
from opacus_ext.grad_sample.core.values import key_of_tree, set_apart
from opacus_ext.refused import Refused, add_note

T = torch.Tensor

#: By type of criterion: ``function(criterion, shape, *args)`` returns losses ``[B]`` or
#: None if it does not support the arguments.
AT_ONCE: dict[type, Callable[..., T | None]] = {}

# Arguments that are the same for all samples, as functions are.
_CONSTANTS = Number, str, type(None), np.generic, torch.dtype, torch.device, NotEqual

# The batch dims of the arguments, if not 0.
_DIMS: dict[type, tuple[int, ...]] = {nn.CTCLoss: (1, 0, 0, 0)}


class SampleCriterion:
    """
    A criterion for single samples: its value for a sample alone, with its own
    reduction, is the loss of that sample. ``warn(key, text)`` warns once.
    """

    def __init__(self, criterion: Callable, reduction: str, warn: Callable[..., None]):
        self.criterion, self.reduction, self.warn = criterion, reduction, warn
        self.state = State(criterion)
        self.dims = dict(enumerate(_DIMS.get(type(criterion), ())))
        self.name = getattr(criterion, "__name__", type(criterion).__name__)
        self._calls: dict[tuple, int] = {}  # number of calls by kind of arguments
        self._tables: set[tuple] = set()  # shared arguments
        self._lengths: dict[Any, int] = {}  # of lists that are constants

    def __call__(self, args: tuple, kwargs: dict, shape: Any, size: int) -> T:
        """
        Returns the losses ``[B]`` of ``size`` samples; ``shape`` is ``[B, T]`` if
        outputs and targets are of flattened tokens. Refuses arguments that are no
        samples, losses that depend on other samples, and a state that changes.
        """
        rows = size if shape is None else shape[0] * shape[1]
        for place, x in (*enumerate(args), *kwargs.items()):
            self._check_constants(place, x, (size, rows))
        direct = None if kwargs else AT_ONCE.get(type(self.criterion))
        losses = None if direct is None else direct(self.criterion, shape, *args)
        leaves, spec = tree_flatten((args, kwargs))
        kinds = ((x.dim(), x.dtype) if isinstance(x, T) else type(x) for x in leaves)
        kind = key_of_tree(spec) or object(), *kinds
        if shape is None and not torch.is_grad_enabled():  # the batch size is unknown
            dims = ((self.dims.get(i, 0), x) for i, x in enumerate(leaves))
            sizes = (x.shape[d] for d, x in dims if isinstance(x, T) and x.dim() > d)
            size = next(sizes, size)
        if losses is None:
            samples = self._samples(kind, leaves, spec, shape, size)
            losses = self._explained(samples)
            if torch.is_grad_enabled():
                whole = (i for i, own in enumerate(samples.by_sample) if not own)
                self._tables.update((kind, i) for i in whole)
        if losses.shape != (size,):
            raise self._not_samples(leaves, size)
        count = self._calls.get(kind, 0)
        if count & (count + 1) == 0 and len(losses):  # increasingly rarely
            if any(map(_is_half, leaves)):  # whose rounding is no mixing
                leaves = [x.float() if _is_half(x) else x for x in leaves]
                args, kwargs = tree_unflatten(leaves, spec)
                wide = self._losses_of_wide(kind, leaves, spec, shape, size)
                if wide is not None:
                    self._compare(wide, args, kwargs)
            else:
                self._compare(losses.detach(), args, kwargs)
        self._calls[kind] = count + 1
        return losses

    def _samples(
        self, kind: tuple, leaves: list, spec: TreeSpec, shape: Any, size: int
    ) -> Samples:
        tokens = torch.Size([size, 1] if shape is None else shape[:2])
        by_sample, samples = [], list(leaves)
        for i, x in enumerate(leaves):
            dim = self.dims.get(i, 0)
            own = isinstance(x, T) and x.dim() > dim and x.shape[dim] == tokens.numel()
            if isinstance(x, T) and x.requires_grad and not own:
                raise self._not_samples(leaves, size)
            by_sample.append(own and (x.requires_grad or (kind, i) not in self._tables))
            if by_sample[i]:
                samples[i] = x.unflatten(dim, tokens).movedim(dim, 0)
        places = [i for i, own in enumerate(by_sample) if own]
        tensors = set_apart([samples[i] for i in places], [0] * len(places))
        for i, x in zip(places, tensors):
            samples[i] = x
        return Samples(None, samples, by_sample, spec, size)

    def _explained(self, samples: Samples) -> T:
        """Returns the losses; an error says that samples are alone in the criterion."""
        try:
            return self._losses(samples)
        except Exception as error:
            if not isinstance(error, (Refused, torch.OutOfMemoryError)):
                pairs = zip(samples.leaves, samples.by_sample)
                shapes = [tuple(x.shape[1:]) for x, own in pairs if own]
                add_note(
                    error,
                    f"The criterion {self.name} is given each sample alone, as a batch "
                    f"of one: shapes {shapes} of {samples.size} samples. Compute the "
                    "loss of a sample from that sample alone.",
                )
            raise

    def _losses(self, samples: Samples) -> T:
        found: list[tuple[T | None, T]] = []
        self.state.remember()

        def call(sample: Any) -> T:
            loss = self.criterion(*sample[0], **sample[1])
            if not isinstance(loss, T) or loss.numel() != 1:
                raise self._refused(
                    f"returns {tuple(loss.shape) if isinstance(loss, T) else loss!r} "
                    "for a sample alone, which is not one number.",
                    'Give it reduction="mean" or "sum".',
                )
            return loss.reshape(())

        def at_once(some: Samples) -> None:
            group = SampleGroup((), some.size)
            with group.level:
                sample = some.tree(group.wrap)
                loss = group.watch(lambda: call(sample))
                found.append((some.rows, group.inner(loss)))

        def alone(some: Samples, i: int) -> None:
            row = torch.tensor([i]) if some.rows is None else some.rows[i : i + 1]
            found.append((row, call(some.alone(i))[None]))

        if not samples.size:
            given = zip(samples.leaves, samples.by_sample)
            empty = next((x for x, own in given if own), None)
            if empty is None:
                raise self._not_samples(samples.leaves, 0)
            return empty.sum() + empty.new_zeros(0)
        in_groups([samples], at_once, alone)
        changes = self.state.changes()
        if changes:
            self.state.restore()
            raise self._refused(
                f"changes {changes[0].name} when it is called, which would carry data "
                "of one batch to the next without noise."
            )
        rows, losses = zip(*found)
        if rows == (None,):
            return losses[0]
        return torch.cat(losses)[torch.cat(rows).argsort().to(losses[0].device)]

    @torch.no_grad()
    def _losses_of_wide(self, *given: Any) -> T | None:
        """Returns losses of float32 inputs, or None: its weights may have 16 bits."""
        try:
            return self._losses(self._samples(*given))
        except Refused:
            raise
        except Exception:
            return None

    @torch.no_grad()
    def _compare(self, losses: T, args: tuple, kwargs: dict) -> None:
        """Compares the losses with the criterion's value for the batch."""
        self.state.remember()
        try:
            with torch.random.fork_rng([losses.device] if losses.is_cuda else []):
                whole, again = (self.criterion(*args, **kwargs) for _ in range(2))
        except Exception:
            return  # it supports single samples only
        finally:
            self.state.restore()
        same = isinstance(whole, T) and whole.shape == again.shape
        if not same or not torch.allclose(whole, again, equal_nan=True):
            return  # it is random
        mine = losses if whole.dim() else getattr(losses, self.reduction)()
        values = f"it gives shape {tuple(whole.shape)} for the batch."
        if mine.shape == whole.shape:
            if torch.allclose(mine, whole.to(mine), 1e-3, 1e-5, equal_nan=True):
                return
            values = (
                f"it gives {float(whole.flatten()[0]):.6g} for the batch, and the "
                f"{self.reduction} of what it gives for each sample alone is "
                f"{float(mine.flatten()[0]):.6g}."
            )
        own = type(self.criterion).__module__ != nn.modules.loss.__name__
        if own or mine.shape != whole.shape:
            raise self._refused(
                f"mixes samples: {values} What depends on the batch (its largest loss, "
                "class weights counted in it, negatives from other samples, a mean "
                "over all of its tokens) is not private."
            )
        self.warn(
            "criterion",
            f"The loss of {self.name} is the {self.reduction} over samples: {values} "
            "Labels that are ignored, class weights and lengths make a sample count by "
            "what the others have in the one and not in the other.",
        )

    def _check_constants(self, place: Any, x: Any, sizes: tuple[int, int]) -> None:
        """
        Refuses what may hold items of single samples and is no tensor of samples. A
        list is a constant if it keeps its length while batch sizes differ.
        """
        number = isinstance(x, np.ndarray) and not x.ndim
        if number or isinstance(x, (T, *_CONSTANTS)) or callable(x):
            return
        leaves, what, items = tree_leaves(x), type(x).__name__, []
        refused = len(leaves) == 1 and leaves[0] is x  # an opaque object
        if isinstance(x, dict):
            items = list(x.items())
        elif isinstance(x, (list, tuple, np.ndarray)):
            items, size = list(enumerate(x)), sizes[0]
            what += f" of {type(x[0]).__name__}" if items else ""
            # Several items a sample, or one, are as many as a multiple of the batch.
            if len(x) not in sizes and (size < 2 or len(x) % size):
                self._lengths.setdefault(place, len(x))
            tensors = [y for y in leaves if isinstance(y, T)]
            whole = [y for y in tensors if not y.dim() or len(y) not in sizes]
            refused = not tensors or not all(y.requires_grad for y in whole)
            words = any(isinstance(y, str) for y in x)
            refused &= bool(items) and (words or len(x) != self._lengths.get(place))
        if refused:
            raise self._refused(
                f"was given a {what}, whose items may belong to single samples.",
                "Give tensors [B, ...]: labels as numbers, torch.tensor(...).",
            )
        for key, y in items:
            self._check_constants((place, key), y, sizes)

    def _not_samples(self, leaves: list, size: int) -> Refused:
        shapes = [tuple(x.shape) for x in leaves if isinstance(x, T)]
        if any(isinstance(x, T) and x.requires_grad and not x.dim() for x in leaves):
            return self._refused(
                f"was given a number that the model returns for each sample (shapes "
                f"{shapes}).",
                SQUEEZED + " If it is the model's own loss, call loss.backward(), or "
                "criterion(opacus_ext.losses.model_losses(model, batch)).backward().",
            )
        return self._refused(
            f"was given shapes {shapes} for a batch of {size} samples.",
            "The privacy unit is the sample: give outputs and targets [B, ...]; for "
            "flattened tokens criterion(logits.flatten(0, 1), targets.flatten(), shape="
            "[B, T]), for a model's own loss "
            "criterion(opacus_ext.losses.model_losses(model, batch)).",
        )

    def _refused(self, what: str, remedy: str = "") -> Refused:
        remedy = remedy or "Compute the loss of a sample from that sample alone."
        reason = f"The criterion {self.name} {what}"
        return Refused(reason, parameter="criterion", remedy=remedy)


def _is_half(x: Any) -> bool:
    """Returns True for a tensor of 16-bit floating point numbers."""
    return isinstance(x, T) and x.is_floating_point() and x.dtype.itemsize == 2
