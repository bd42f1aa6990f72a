"""One loss a sample: what DP-SGD clips, and what few models compute by themselves.

A model's own ``loss`` is one number for the batch, mostly the mean over all of its
tokens: how much a sample weighs in it depends on how long the others are, so clipping
each sample bounds nothing. :func:`model_losses` gives what the model's own code, label
shift and all, computes for each sample alone.

No other module of this package needs transformers, and neither does this one: it takes
any model that computes its loss from its labels.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Mapping
from typing import Any, Callable, Dict, Optional, Tuple

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from opacus_ext.grad_sample.adapter.criterion import AT_ONCE
from opacus_ext.grad_sample.adapter.model import PrivateModel
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.factors import upcast, workspace
from opacus_ext.grad_sample.modes.common import private_model_of
from opacus_ext.layers.linear_cross_entropy import LinearCrossEntropy, PendingLogits
from opacus_ext.refused import Refused

__all__ = ["PerRecord", "PerSample", "cross_entropy", "model_losses", "sample_loss"]

_REDUCTIONS = ("mean", "sum")


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    ignore_index: int = -100,
    weight: Optional[torch.Tensor] = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """
    The cross-entropy of each sample over its own labels. Logits in half precision are
    widened to float32.

    Args:
        logits: ``[B, ..., V]``, such as ``[B, T, V]`` or ``[B, V]``
        labels: ``[B, ...]``; for next tokens shift them, not the logits, which would
            be copied: ``F.pad(ids, (0, 1), value=-100)[:, 1:]``
        ignore_index: of labels that do not count
        weight: of each class, ``[V]``. In a "mean" it is divided away where a sample
            has a single label: take the "sum", or weight the losses (PerSample)
        label_smoothing: between 0 and 1, as torch's
        reduction: "mean" over a sample's labels that count (weighted, if there are
            class weights), or their "sum"

    Returns:
        Losses ``[B]``. A sample none of whose labels count has loss zero.

    Raises:
        Refused: if shapes do not fit, or ``reduction`` is another one

    Example:
        >>> import torch
        >>> logits = torch.zeros(2, 3, 4)
        >>> labels = torch.tensor([[0, 1, 2], [3, -100, -100]])
        >>> cross_entropy(logits, labels)
        tensor([1.3863, 1.3863])
        >>> cross_entropy(logits, labels, reduction="sum")
        tensor([4.1589, 1.3863])
    """
    _check_reduction(reduction)
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape:
        raise Refused(
            "cross_entropy takes logits [B, ..., V] and labels [B, ...], got shapes "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}.",
            parameter="labels",
            remedy="Give a label for each row of logits, without reduction.",
        )
    given = {
        "input": logits.flatten(0, -2),
        "target": labels.flatten(),
        "weight": weight,
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
    }
    rows = _by_rows(F.cross_entropy, given)
    count = _count(labels, ignore_index, weight)
    return _reduce(rows, count, len(labels), reduction)


class PerSample(nn.Module):
    """
    The criterion for losses ``[B]`` that are there already. Given to ``make_private``,
    it makes one line right in every mode: ``criterion(losses).backward()``.

    Args:
        reduction: "mean" or "sum", as ``loss_reduction`` of ``make_private``; "none"
            gives the losses themselves

    Example:
        >>> import torch
        >>> criterion = PerSample()
        >>> criterion(torch.tensor([1.0, 3.0]))
        tensor(2.)
        >>> criterion(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5]))
        tensor(1.2500)
    """

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        if reduction != "none":
            _check_reduction(reduction)
        self.reduction = reduction

    def forward(
        self, losses: torch.Tensor, weights: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """
        The mean, the sum, or the losses themselves, by ``reduction``.

        Args:
            losses: ``[B]``
            weights: of the samples, ``[B]``, without gradient. They multiply the
                losses, before the clipping: a sample whose gradient is clipped anyway
                gains nothing by a larger weight, and what it can add to the sum stays
                bounded. A sample's weight must not depend on other samples.

        Raises:
            Refused: for anything but one loss a sample
        """
        if losses.dim() != 1:
            raise Refused(
                f"PerSample takes one loss a sample, [B], got shape "
                f"{tuple(losses.shape)}.",
                parameter="losses",
                remedy="A model's own loss is one number for the batch: take "
                "opacus_ext.losses.model_losses(model, batch).",
            )
        if weights is not None:
            if weights.shape != losses.shape or weights.requires_grad:
                raise Refused(
                    "PerSample takes weights [B] without gradient for losses [B], got "
                    f"shapes {tuple(weights.shape)} and {tuple(losses.shape)}.",
                    parameter="weights",
                    remedy="Give one weight a sample, detached.",
                )
            losses = losses * weights
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


def _per_sample(
    criterion: PerSample,
    shape: Any,
    losses: torch.Tensor,
    weights: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    before, criterion.reduction = criterion.reduction, "none"
    try:
        return criterion(losses, weights)
    finally:
        criterion.reduction = before


AT_ONCE[PerSample] = _per_sample


def model_losses(
    model: nn.Module, batch: Mapping[str, Any], *, reduction: str = "mean"
) -> torch.Tensor:
    """
    The losses that a model computes of its labels: of each sample what the model gives
    for it alone, as a batch of one.

    The model is called with the batch as it is, so labels are shifted, decoder inputs
    made and problem types recognized by its own code. What that computes over the batch
    (the balancing loss of a mixture of experts, a mean over tokens) is computed over
    each sample. A private model runs all samples at once, others one after the other.

    Args:
        model: a model of transformers with a head, or any that gives ``loss`` for
            keyword arguments; wrapped by ``make_private``, PEFT or not at all
        batch: the model's keyword arguments, labels among them, the batch first
        reduction: "mean" over a sample's own labels that are not ignored, or their
            "sum": what torch's loss functions are asked for in the place of a mean

    Returns:
        Losses ``[B]``; zero where none of a sample's labels counts.

    Raises:
        Refused: if the model gives no loss, or not one number for a sample; with
            "num_items_in_batch", by which the tokens of other samples would count

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.nn import functional as F
        >>> class Tagger(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = nn.Embedding(9, 3)
        ...
        ...     def forward(self, ids, labels):
        ...         logits = self.embedding(ids)
        ...         loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        ...         return {"loss": loss, "logits": logits}
        >>> labels = torch.tensor([[0, 1, 2], [1, -100, -100]])
        >>> batch = {"ids": torch.ones(2, 3, dtype=torch.long), "labels": labels}
        >>> losses = model_losses(Tagger(), batch)
        >>> losses.shape
        torch.Size([2])
    """
    _check_reduction(reduction)
    if batch.get("num_items_in_batch") is not None:
        raise Refused(
            "num_items_in_batch divides each sample's loss by a number of other "
            "samples' tokens.",
            parameter="num_items_in_batch",
            remedy="Leave it out of the batch.",
        )
    each = _Each(model, reduction)

    def loss_of(forward: Callable, **sample: Any) -> torch.Tensor:
        return each(forward, **sample)

    private = next(filter(None, map(private_model_of, model.modules())), None)
    if private is not None and private.enabled and torch.is_grad_enabled():
        return private.losses(dict(batch), loss_of)
    if model not in _plain:
        _plain[model] = PrivateModel(model)
    inputs = _plain[model].read_losses(dict(batch), loss_of)
    losses: Dict[int, torch.Tensor] = {}
    for some in inputs.samples:
        for i in range(some.size):
            loss = loss_of(model, **some.alone(i)[1])
            losses[i if some.rows is None else int(some.rows[i])] = loss
    if not losses:
        return next(model.parameters()).new_zeros(0)
    return torch.stack([losses[i] for i in range(len(losses))])


def sample_loss(
    model: nn.Module, sample: Mapping[str, Any], *, reduction: str = "mean"
) -> torch.Tensor:
    """
    The loss that a model computes of the labels of one sample, as :func:`model_losses`
    does of each: what :func:`opacus_ext.clipped_grads` takes.

    Args:
        model: see :func:`model_losses`; not a private one
        sample: the model's keyword arguments, a batch of one
        reduction: see :func:`model_losses`

    Returns:
        A number; zero where no label counts.

    Raises:
        Refused: if the model gives no loss, or not one number
    """
    _check_reduction(reduction)
    return _Each(model, reduction)(model, **sample)


# Readers of the inputs of models that are not private.
_plain: "weakref.WeakKeyDictionary[nn.Module, PrivateModel]"
_plain = weakref.WeakKeyDictionary()


class PerRecord(nn.Module):
    """
    A model for records of several sequences: someone's messages, visits, documents. It
    makes the record the sample, so that clipping bounds what a whole record adds.

    It takes what the model takes by keyword, with one more dim: ``[R, S, ...]`` for
    ``R`` records of ``S`` sequences. Shorter records are padded by sequences without
    labels (all ignored; give them an attention mask of ones). Outputs come as
    ``[R, S, ...]``, and :func:`model_losses` gives one loss a record, over all labels
    of its sequences.

    Args:
        model: takes ``[B, ...]``; it becomes ``self.model``

    Raises:
        Refused: when called with a tensor without these two dims

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Model(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.embedding = nn.Embedding(9, 3)
        ...
        ...     def forward(self, input_ids):
        ...         return self.embedding(input_ids)
        >>> PerRecord(Model())(input_ids=torch.ones(2, 4, 5).long()).shape
        torch.Size([2, 4, 5, 3])
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """Runs the model on all sequences; see the class."""
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        shapes = {x.shape[:2] for x in tensors.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
            raise Refused(
                "PerRecord takes tensors [R, S, ...] with the same R and S, got "
                f"{given or 'none'}.",
                remedy="opacus_ext.data.collators.RecordCollator makes them.",
            )
        (lead,) = shapes
        flat = {n: x.flatten(0, 1) if n in tensors else x for n, x in inputs.items()}

        def by_record(x: Any) -> Any:
            rows = isinstance(x, torch.Tensor) and x.shape[:1] == (lead.numel(),)
            return x.unflatten(0, lead) if rows else x

        output = self.model(**flat)
        if _find_loss(output) is not None:
            return output
        return tree_map(by_record, output)


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise Refused(
            f'reduction must be "mean" or "sum", got {reduction!r}.',
            parameter="reduction",
            remedy="Take one of these.",
        )


def _is_batched(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_batched(x)


def _wrappers() -> Tuple[type, ...]:
    return AbstractGradSampleModule, nn.parallel.DistributedDataParallel


def _find_loss(output: Any) -> Optional[torch.Tensor]:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple):
        return output[0] if output else None
    return getattr(output, "loss", None)


def _count(
    labels: torch.Tensor, ignore_index: int, weight: Optional[torch.Tensor]
) -> torch.Tensor:
    """How much each label counts in a mean."""
    counts = labels != ignore_index
    return counts if weight is None else weight[labels * counts] * counts


def _reduce(
    rows: torch.Tensor, count: Optional[torch.Tensor], size: int, reduction: str
) -> torch.Tensor:
    """Losses of rows, those of one sample after the other, to ``[size]``."""
    rows = _by_sample(rows, size)
    if reduction == "sum":
        return rows.sum(1)
    if count is None:
        return rows.mean(1)
    whole = _by_sample(count, size).sum(1)
    return rows.sum(1) / torch.where(whole > 0, whole, 1)


def _by_rows(function: Callable, given: Dict[str, Any]) -> torch.Tensor:
    """A loss of logits ``[rows, V]``; without gradients, some rows at a time."""
    x, target = given["input"], given["target"]
    step = len(x)
    if x.dim() == 2 and not (torch.is_grad_enabled() and x.requires_grad):
        step = workspace() // max(1, 4 * x.shape[1])
    parts = [
        function(**{**given, "input": upcast(a), "target": b}, reduction="none")
        for a, b in zip(x.split(max(1, step)), target.split(max(1, step)))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_sample(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(size, x.numel() // max(size, 1))


# -- the model's own loss, sample by sample ----------------------------------------

_CLASSES = {F.cross_entropy, F.nll_loss}
_LOSSES = _CLASSES | {
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.ctc_loss,
    F.kl_div,
    F.binary_cross_entropy,
    F.binary_cross_entropy_with_logits,
}


class _Each(TorchFunctionMode):
    """
    Calls a model for one sample: torch's loss functions give the reduction that is
    asked for, and zero where no label counts.

    Args:
        model: whose chunked heads wait for a loss function
        reduction: in the place of the model's "mean"
    """

    def __init__(self, model: nn.Module, reduction: str):
        super().__init__()
        inner = next(m for m in model.modules() if not isinstance(m, _wrappers()))
        self.model, self.reduction = type(inner).__name__, reduction
        self._heads = [m for m in model.modules() if isinstance(m, LinearCrossEntropy)]
        exact = any(p.dtype == torch.float64 for p in model.parameters())
        self._is_quick = reduction == "mean" and not self._heads and not exact

    def __call__(self, forward: Callable, **sample: Any) -> torch.Tensor:
        """The loss of a sample that ``forward`` gives."""
        if self._is_quick and not any(map(_is_batched, sample.values())):
            # Mostly the model's own mean is a number, and what is asked for.
            loss = _find_loss(forward(**sample))
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                if bool(loss.isfinite()):
                    return loss.reshape(())
        for head in self._heads:
            head.pending = True
        try:
            with self:
                loss = _find_loss(forward(**sample))
        finally:
            for head in self._heads:
                head.pending = False
        instead = (
            "compute one loss a sample from its other outputs, for example by "
            "opacus_ext.losses.cross_entropy(logits, labels)."
        )
        if not isinstance(loss, torch.Tensor):
            raise Refused(
                f"{self.model} gave no loss for {', '.join(sample)}.",
                module=self.model,
                remedy='Give it labels by keyword, "labels" or what it calls them, or '
                f"{instead}",
            )
        if loss.numel() != 1:
            raise Refused(
                f"{self.model} gives a loss of shape {tuple(loss.shape)}, which is not "
                "one number.",
                module=self.model,
                remedy=f"Reduce it in the model, or {instead}",
            )
        return loss.reshape(())

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _LOSSES:
            return self._loss(func, args, kwargs)
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]  # many models widen half precision so
        return func(*args, **kwargs)

    def _loss(self, func: Callable, args: tuple, kwargs: dict) -> torch.Tensor:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = dict(bound.arguments)
        asked = given.pop("reduction")
        given.pop("size_average", None), given.pop("reduce", None)
        reduction = self.reduction if asked == "mean" else asked
        if func not in _CLASSES or given["target"].is_floating_point():
            return func(**given, reduction=reduction)
        if isinstance(given["input"], PendingLogits):
            rows = _pending(func, given)
            if reduction == "none":
                return rows
            total = rows.sum()
        elif reduction == "none":
            return func(**given, reduction="none")
        else:
            total = func(**given, reduction="sum")
        if reduction == "sum":
            return total
        count = _count(given["target"], given["ignore_index"], given["weight"]).sum()
        return total / torch.where(count > 0, count, 1)


def _pending(function: Callable, given: Dict[str, Any]) -> torch.Tensor:
    x = given["input"]
    plain = given["weight"] is None and not given.get("label_smoothing")
    if function is not F.cross_entropy or x.dim() != 2 or not plain:
        raise Refused(
            "A chunked head (chunked_head) takes cross_entropy of logits [rows, V], "
            "without class weights and label smoothing.",
            remedy="Leave opacus_ext.layers.chunked_head away.",
        )
    return x.losses(given["target"], given["ignore_index"])
