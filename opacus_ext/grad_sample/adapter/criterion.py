"""A criterion that computes the loss of each sample from that sample alone."""

from __future__ import annotations

from functools import partial
from numbers import Number
from typing import Any, Callable, Hashable, Iterable, Sequence

import numpy as np
import torch
from torch import nn

from opacus_ext.grad_sample.adapter.outputs import SQUEEZED, NotEqual
from opacus_ext.grad_sample.adapter.state import State
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, in_groups
from opacus_ext.grad_sample.core.values import key_of_tree, set_apart
from opacus_ext.private_torch import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
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
        self.criterion = criterion
        self.reduction = reduction
        self.warn = warn
        self.alone = ""  # why it has run for one sample after the other
        self.state = State(criterion)
        self.dims = dict(enumerate(_DIMS.get(type(criterion), ())))
        self.name = getattr(criterion, "__name__", type(criterion).__name__)
        # The number of calls with each kind of arguments.
        self._calls: dict[tuple, int] = {}
        # Arguments that all samples share, by kind and number.
        self._tables: set[tuple] = set()
        # The lengths of lists that are constants.
        self._lengths: dict[Any, int] = {}

    def __call__(
        self, args: tuple, kwargs: dict, shape: Sequence[int] | None, batch_size: int
    ) -> T:
        """
        Returns the losses ``[B]`` of ``size`` samples; ``shape`` is ``[B, T]`` if
        outputs and targets are of flattened tokens. Refuses arguments that are no
        samples, losses that depend on other samples, and a state that changes.
        """
        rows = batch_size if shape is None else shape[0] * shape[1]
        for key, value in (*enumerate(args), *kwargs.items()):
            self._check_constants(key, value, (batch_size, rows))
        losses = None
        if not kwargs and type(self.criterion) in AT_ONCE:
            losses = AT_ONCE[type(self.criterion)](self.criterion, shape, *args)
        leaves, structure = tree_flatten((args, kwargs))
        kind = key_of_tree(structure) or object(), *map(_kind_of, leaves)
        if shape is None and not torch.is_grad_enabled():
            batch_size = self._size_of(leaves, batch_size)
        if losses is None:
            samples = self._samples(kind, leaves, structure, shape, batch_size)
            losses = self._explained(samples)
            if torch.is_grad_enabled():
                for number, by_sample in enumerate(samples.by_sample):
                    if not by_sample:
                        self._tables.add((kind, number))
        if losses.shape != (batch_size,):
            raise self._not_samples(leaves, batch_size)
        count = self._calls.get(kind, 0)
        # Calls 1, 2, 4, 8 and so on are compared with the criterion of the batch.
        if count & (count + 1) == 0 and len(losses):
            compared: T | None = losses.detach()
            if any(map(_is_half, leaves)):
                # Numbers of 16 bits are rounded differently, which is no mixing.
                leaves = [leaf.float() if _is_half(leaf) else leaf for leaf in leaves]
                args, kwargs = tree_unflatten(leaves, structure)
                compared = self._losses_of_wide(
                    kind, leaves, structure, shape, batch_size
                )
            if compared is not None:
                self._compare(compared, args, kwargs)
        self._calls[kind] = count + 1
        return losses

    def _size_of(self, leaves: list, batch_size: int) -> int:
        """Returns the batch size of outputs that have no graph, which would tell it."""
        for number, leaf in enumerate(leaves):
            batch_dim = self.dims.get(number, 0)
            if isinstance(leaf, T) and leaf.dim() > batch_dim:
                return leaf.shape[batch_dim]
        return batch_size

    def _samples(
        self,
        kind: tuple,
        leaves: list,
        structure: TreeSpec,
        shape: Sequence[int] | None,
        batch_size: int,
    ) -> Samples:
        tokens = torch.Size([batch_size, 1] if shape is None else shape[:2])
        batched: dict[int, T] = {}
        for number, leaf in enumerate(leaves):
            if not isinstance(leaf, T):
                continue
            batch_dim = self.dims.get(number, 0)
            if leaf.dim() <= batch_dim or leaf.shape[batch_dim] != tokens.numel():
                if leaf.requires_grad:
                    raise self._not_samples(leaves, batch_size)
            # An argument that was shared once stays so in a batch that is as long.
            elif leaf.requires_grad or (kind, number) not in self._tables:
                batched[number] = leaf.unflatten(batch_dim, tokens).movedim(
                    batch_dim, 0
                )
        samples, by_sample = list(leaves), [False] * len(leaves)
        apart = set_apart([*batched.values()], [0] * len(batched))
        for number, tensor in zip(batched, apart):
            samples[number], by_sample[number] = tensor, True
        return Samples(None, samples, by_sample, structure, batch_size)

    def _explained(self, samples: Samples) -> T:
        """Returns the losses; an error says that samples are alone in the criterion."""
        try:
            return self._losses(samples)
        except Exception as error:
            if not isinstance(error, (Refused, torch.OutOfMemoryError)):
                pairs = zip(samples.leaves, samples.by_sample)
                shapes = [
                    tuple(leaf.shape[1:]) for leaf, by_sample in pairs if by_sample
                ]
                add_note(
                    error,
                    f"The criterion {self.name} is given each sample alone, as a batch "
                    f"of one: shapes {shapes} of {samples.size} samples. Compute the "
                    "loss of a sample from that sample alone.",
                )
            raise

    def _loss(self, sample: tuple[tuple, dict]) -> T:
        """Returns the loss of a sample alone."""
        args, kwargs = sample
        loss = self.criterion(*args, **kwargs)
        if isinstance(loss, T) and loss.numel() == 1:
            return loss.reshape(())
        value = tuple(loss.shape) if isinstance(loss, T) else loss
        raise self._refused(
            f"returns {value!r} for a sample alone, which is not one number.",
            'Give it reduction="mean" or "sum".',
        )

    def _losses(self, samples: Samples) -> T:
        if not samples.size:
            for leaf, by_sample in zip(samples.leaves, samples.by_sample):
                if by_sample:
                    return leaf.sum() + leaf.new_zeros(0)
            raise self._not_samples(samples.leaves, 0)
        rows: list[Any] = []
        losses: list[T] = []
        self.state.remember()

        def at_once(some: Samples) -> None:
            group = SampleGroup((), some.size)
            with group.level:
                sample = some.tree(group.wrap_input)
                loss = group.watch(lambda: self._loss(sample))
                losses.append(group.inner(loss))
                rows.append(some.rows)

        def alone(some: Samples, number: int) -> None:
            row = torch.tensor([number])
            if some.rows is not None:
                row = some.rows[number : number + 1]
            losses.append(self._loss(some.alone(number))[None])
            rows.append(row)

        self.alone = ""
        in_groups([samples], at_once, alone, warn=partial(setattr, self, "alone"))
        changes = self.state.changes()
        if changes:
            self.state.restore()
            raise self._refused(
                f"changes {changes[0].name} when it is called, which would carry data "
                "of one batch to the next without noise."
            )
        if rows == [None]:
            return losses[0]
        return torch.cat(losses)[torch.cat(rows).argsort().to(losses[0].device)]

    @torch.no_grad()
    def _losses_of_wide(self, *args: Any) -> T | None:
        """Returns losses of float32 inputs, or None: its weights may have 16 bits."""
        try:
            return self._losses(self._samples(*args))
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
                batch, again = (self.criterion(*args, **kwargs) for _ in range(2))
        except Exception:
            # A criterion may support single samples only.
            return
        finally:
            self.state.restore()
        is_one = isinstance(batch, T) and batch.shape == again.shape
        # A criterion that draws random numbers gives two values.
        if not is_one or not torch.allclose(batch, again, equal_nan=True):
            return
        reduced = losses
        if not batch.dim():
            reduced = getattr(losses, self.reduction)()
        values = f"it gives shape {tuple(batch.shape)} for the batch."
        if reduced.shape == batch.shape:
            if torch.allclose(reduced, batch.to(reduced), 1e-3, 1e-5, equal_nan=True):
                return
            values = (
                f"it gives {float(batch.flatten()[0]):.6g} for the batch, and the "
                f"{self.reduction} of what it gives for each sample alone is "
                f"{float(reduced.flatten()[0]):.6g}."
            )
        is_of_torch = type(self.criterion).__module__ == nn.modules.loss.__name__
        if not is_of_torch or reduced.shape != batch.shape:
            raise self._refused(
                f"mixes samples: {values} What depends on the batch (its largest loss, "
                "class weights counted in it, negatives from other samples, a mean "
                "over all of its tokens) is not private."
            )
        self.warn(
            "criterion",
            f"{self.name} is applied to each sample alone: {values} The second number "
            f"is what is trained. {self._advice()}",
        )

    def _advice(self) -> str:
        """Returns what to do where the batch's loss is not that of its samples."""
        if getattr(self.criterion, "weight", None) is not None:
            return (
                "Class weights cancel in the mean over one label. To weigh samples, "
                "pass criterion=opacus_ext.PerSample() to make_private, and call "
                "criterion(losses, weights=class_weights[labels])."
            )
        return (
            "Nothing has to be done if labels are ignored or lengths differ. If not, "
            "compare the shapes of outputs and targets."
        )

    def _check_constants(
        self, key: Hashable, value: Any, sizes: tuple[int, int]
    ) -> None:
        """
        Refuses what may hold items of single samples and is no tensor of samples. A
        list is a constant if it keeps its length while batch sizes differ.
        """
        if isinstance(value, (T, *_CONSTANTS)) or callable(value):
            return
        # An array without dims is a number.
        if isinstance(value, np.ndarray) and not value.ndim:
            return
        kind = type(value).__name__
        leaves = tree_leaves(value)
        # An object of a class that torch does not know is a leaf of its own.
        refused = len(leaves) == 1 and leaves[0] is value
        items: Iterable[tuple] = ()
        if isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple, np.ndarray)):
            items = enumerate(value)
            if len(value):
                kind += f" of {type(value[0]).__name__}"
            refused = self._may_be_samples(key, value, leaves, sizes)
        if refused:
            raise self._refused(
                f"was given a {kind}, whose items may belong to single samples.",
                "Give tensors [B, ...]: labels as numbers, torch.tensor(...).",
            )
        for inner, item in items:
            self._check_constants((key, inner), item, sizes)

    def _may_be_samples(
        self,
        key: Hashable,
        items: list | tuple | np.ndarray,
        leaves: list,
        sizes: tuple[int, int],
    ) -> bool:
        """Returns True for a list whose items may belong to single samples."""
        length = len(items)
        batch_size = sizes[0]
        # Several items a sample, or one, are as many as a multiple of the batch.
        if length not in sizes and (batch_size < 2 or length % batch_size):
            self._lengths.setdefault(key, length)
        has_tensors = has_others = False
        for leaf in leaves:
            if isinstance(leaf, T):
                has_tensors = True
                by_sample = leaf.dim() and len(leaf) in sizes
                has_others |= not by_sample and not leaf.requires_grad
        if not length or has_tensors and not has_others:
            return False
        # A sentence is of a sample, however many there are.
        if any(isinstance(item, str) for item in items):
            return True
        return length != self._lengths.get(key)

    def _not_samples(self, leaves: list, batch_size: int) -> Refused:
        shapes = []
        is_squeezed = False
        for leaf in leaves:
            if isinstance(leaf, T):
                shapes.append(tuple(leaf.shape))
                is_squeezed |= leaf.requires_grad and not leaf.dim()
        if is_squeezed:
            return self._refused(
                f"was given a number that the model returns for each sample (shapes "
                f"{shapes}).",
                SQUEEZED + " If it is the model's own loss, call loss.backward(), or "
                "criterion(opacus_ext.losses.model_losses(model, batch)).backward().",
            )
        return self._refused(
            f"was given shapes {shapes} for a batch of {batch_size} samples.",
            "The privacy unit is the sample: give outputs and targets [B, ...]; for "
            "flattened tokens criterion(logits.flatten(0, 1), targets.flatten(), shape="
            "[B, T]), for a model's own loss "
            "criterion(opacus_ext.losses.model_losses(model, batch)).",
        )

    def _refused(self, reason: str, remedy: str = "") -> Refused:
        return Refused(
            f"The criterion {self.name} {reason}",
            parameter="criterion",
            remedy=remedy or "Compute the loss of a sample from that sample alone.",
        )


def _kind_of(leaf: Any) -> Any:
    """Returns what calls with arguments of one kind have in common."""
    return (leaf.dim(), leaf.dtype) if isinstance(leaf, T) else type(leaf)


def _is_half(leaf: Any) -> bool:
    """Returns True for a tensor of 16-bit floating point numbers."""
    if not isinstance(leaf, T):
        return False
    return leaf.is_floating_point() and leaf.dtype.itemsize == 2
