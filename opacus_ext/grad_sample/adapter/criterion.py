"""A criterion that gives one loss a sample, by running it for each sample alone."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from opacus_ext.grad_sample.adapter.state import State
from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.group import EagerGroup
from opacus_ext.grad_sample.core.groups import in_groups
from opacus_ext.refused import Refused

T = torch.Tensor

#: By type of criterion: what computes its losses ``[B]`` at once, as ``function(
#: criterion, shape, *args)``, with ``shape`` as a criterion is given it; None: not in
#: this call.
AT_ONCE: Dict[type, Callable[..., Optional[T]]] = {}

# Where the samples of each argument are, if not in dim 0.
_DIMS: Dict[type, Tuple[int, ...]] = {nn.CTCLoss: (1, 0, 0, 0)}


class SampleCriterion:
    """
    A criterion, sample by sample: its value for a sample alone, with its own reduction,
    is the loss of that sample.

    Args:
        criterion: the user's
        reduction: "mean" or "sum", of the losses of samples
        tell: warns once, called with a key and a text

    Attributes:
        looks: how often a call was compared with the value for the whole batch
    """

    def __init__(
        self,
        criterion: Callable,
        reduction: str = "mean",
        tell: Callable[[str, str], None] = lambda key, text: None,
    ):
        self.criterion, self.reduction, self.tell = criterion, reduction, tell
        self.state = State(criterion)
        self.name = getattr(criterion, "__name__", type(criterion).__name__)
        self._calls: Dict[tuple, int] = {}  # by kind of arguments
        self._tables: Dict[tuple, Set[int]] = {}  # arguments that are no samples
        self.looks = 0

    def __call__(self, args: tuple, kwargs: dict, shape: Any, size: int) -> T:
        """
        Args:
            args: of the criterion
            kwargs: the same
            shape: ``[B, T]`` where outputs and targets are of flattened tokens
            size: number of samples of the model's last call

        Returns:
            ``[B]``

        Raises:
            Refused: if the loss of a sample depends on other samples, if arguments are
                no samples, or if the criterion keeps something
        """
        direct = AT_ONCE.get(type(self.criterion))
        losses = None
        if direct is not None and not kwargs:
            losses = direct(self.criterion, shape, *args)
        kind = _kind(args, kwargs)
        if losses is None:
            losses = self._by_sample(kind, args, kwargs, shape, size)
        if losses.shape != (size,):
            raise self._not_samples(args, size)
        count = self._calls.get(kind, 0)
        if count & (count + 1) == 0 and len(losses):  # now and then
            self._compare(losses.detach(), args, kwargs)
        self._calls[kind] = count + 1
        return losses

    # -- samples -----------------------------------------------------------------------

    def _by_sample(
        self, kind: tuple, args: tuple, kwargs: dict, shape: Any, size: int
    ) -> T:
        leaves, spec = tree_flatten((args, kwargs))
        dims = _DIMS.get(type(self.criterion), ())
        rows = size if shape is None else torch.Size(shape[:2]).numel()
        by_sample, tables = [], self._tables.setdefault(kind, set())
        for i, x in enumerate(leaves):
            dim = dims[i] if i < len(dims) else 0
            own = isinstance(x, T) and x.dim() > dim and x.shape[dim] == rows
            if isinstance(x, T) and x.requires_grad and not own:
                raise self._not_samples(args, size)
            if isinstance(x, T) and x.dim() and not own:
                tables.add(i)
            own = own and i not in tables
            by_sample.append(own)
            if own:
                x = x.movedim(dim, 0)
                leaves[i] = (
                    x.unsqueeze(1 + dim)
                    if shape is None
                    else x.unflatten(0, torch.Size(shape[:2]))
                )
        count = size if shape is None else shape[0]
        samples = Samples(None, leaves, by_sample, spec, count)
        return self._run(samples)

    def _run(self, samples: Samples) -> T:
        found: List[Tuple[Optional[T], T]] = []
        state = self.state
        state.remember()

        def call(sample: Any) -> T:
            args, kwargs = sample
            loss = self.criterion(*args, **kwargs)
            if not isinstance(loss, T) or loss.numel() != 1:
                raise Refused(
                    f"The criterion {self.name} gives "
                    f"{tuple(loss.shape) if isinstance(loss, T) else loss!r} for a "
                    "sample alone, which is not one number.",
                    parameter="criterion",
                    remedy='Give it reduction="mean" or "sum".',
                )
            return loss.reshape(())

        def at_once(some: Samples) -> None:
            group = EagerGroup((), some.size)
            with group.level:
                sample = some.tree(group.wrap)
                with group:
                    loss = call(sample)
                found.append((some.rows, group.inner(loss)))

        def alone(some: Samples, i: int) -> None:
            row = torch.tensor([i]) if some.rows is None else some.rows[i : i + 1]
            found.append((row, call(some.alone(i))[None]))

        if not samples.size:
            like = next(x for x, own in zip(samples.leaves, samples.by_sample) if own)
            return like.sum() + like.new_zeros(0)
        in_groups([samples], at_once, alone)
        changes = state.changes()
        if changes:
            state.restore()
            raise Refused(
                f"The criterion {self.name} changes {changes[0].name} when it is "
                "called: what it keeps of one batch would reach the next without "
                "noise.",
                parameter="criterion",
                remedy="Compute the loss of a sample from that sample alone.",
            )
        if len(found) == 1 and found[0][0] is None:
            return found[0][1]
        order = torch.cat([rows for rows, _ in found]).argsort()
        return torch.cat([losses for _, losses in found])[order.to(found[0][1].device)]

    def _not_samples(self, args: Sequence[Any], size: int) -> Refused:
        shapes = [tuple(x.shape) for x in args if isinstance(x, T)]
        return Refused(
            f"The criterion {self.name} was given shapes {shapes} for a batch of "
            f"{size} samples.",
            parameter="criterion",
            remedy="The privacy unit is the sample: give outputs and targets [B, ...], "
            "or for losses of flattened tokens call criterion(logits.flatten(0, 1), "
            "targets.flatten(), shape=[B, T]); for a model's own loss, "
            "criterion(opacus_ext.losses.model_losses(model, batch)).",
        )

    # -- the whole batch ---------------------------------------------------------------

    @torch.no_grad()
    def _compare(self, losses: T, args: tuple, kwargs: dict) -> None:
        """With what the criterion gives for the batch."""
        self.looks += 1
        self.state.remember()
        devices = [losses.device] if losses.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices):
                whole, again = (self.criterion(*args, **kwargs) for _ in range(2))
        except Exception:
            return  # it takes single samples only
        finally:
            self.state.restore()
        if not isinstance(whole, T) or whole.shape != again.shape:
            return
        if not torch.allclose(whole, again, equal_nan=True):
            return  # it draws random numbers
        mine = losses
        if not whole.dim():
            mine = losses.mean() if self.reduction == "mean" else losses.sum()
        elif whole.shape != losses.shape:
            raise self._mixes(f"it gives shape {tuple(whole.shape)} for the batch")
        if torch.allclose(mine, whole.to(mine), rtol=1e-3, atol=1e-5, equal_nan=True):
            return
        values = (
            f"it gives {float(whole.flatten()[0]):.6g} for the batch, and the "
            f"{self.reduction} of what it gives for each sample alone is "
            f"{float(mine.flatten()[0]):.6g}."
        )
        if type(self.criterion).__module__ != nn.modules.loss.__name__:
            raise self._mixes(values)
        self.tell(
            "criterion",
            f"The loss of {self.name} is the {self.reduction} over samples: {values} "
            "Labels that are ignored, class weights and lengths make a sample count by "
            "what the others have in the one and not in the other.",
        )

    def _mixes(self, found: str) -> Refused:
        return Refused(
            f"The criterion {self.name} mixes samples: {found} What depends on the "
            "batch (its largest loss, class weights counted in it, negatives from "
            "other samples, a mean over all of its tokens) is not private.",
            parameter="criterion",
            remedy="Compute the loss of each sample from that sample alone.",
        )


def _kind(args: tuple, kwargs: dict) -> tuple:
    leaves, spec = tree_flatten((args, kwargs))
    return str(spec), *(
        (x.dim(), x.dtype) if isinstance(x, T) else type(x) for x in leaves
    )


def _cross_entropy(
    criterion: nn.CrossEntropyLoss, shape: Any, input: T, target: T
) -> Optional[T]:
    """Of labels without class weights: by rows, then over each sample's own."""
    if criterion.weight is not None or target.is_floating_point():
        return None
    if criterion.reduction not in ("mean", "sum") or input.dim() < 2:
        return None
    rows = F.cross_entropy(
        input,
        target,
        ignore_index=criterion.ignore_index,
        reduction="none",
        label_smoothing=criterion.label_smoothing,
    )
    size = len(target) if shape is None else shape[0]
    losses = rows.reshape(size, rows.numel() // max(size, 1)).sum(1)
    if criterion.reduction == "sum":
        return losses
    counts = (target != criterion.ignore_index).reshape(rows.shape)
    return losses / counts.reshape(size, rows.numel() // max(size, 1)).sum(1)


AT_ONCE[nn.CrossEntropyLoss] = _cross_entropy
