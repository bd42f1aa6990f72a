"""One loss per sample, whose gradient DP-SGD clips.

A model's own ``loss`` is one number for the batch, mostly the mean over all of its
tokens. In such a mean the weight of a sample depends on the length of the other
samples, so clipping each sample bounds nothing. :func:`model_losses` returns what the
model's own code computes for each sample alone. transformers is not imported, and any
model works that computes its loss from its labels.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Mapping
from typing import Any, Callable, Dict

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.adapter.criterion import AT_ONCE
from opacus_ext.grad_sample.adapter.inputs import InputReader
from opacus_ext.grad_sample.factors import upcast
from opacus_ext.grad_sample.modes.common import private_model_of
from opacus_ext.private_torch import tree_map
from opacus_ext.refused import Refused, check_argument, describe

__all__ = ["PerSample", "RecordModel", "cross_entropy", "model_losses", "sample_loss"]

T = torch.Tensor


def cross_entropy(
    logits: T,
    labels: T,
    *,
    ignore_index: int = -100,
    weight: T | None = None,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
) -> T:
    """
    Returns the cross-entropy of each sample over its own labels, ``[B]``. It is zero
    for a sample whose labels are all ignored. Logits in half precision are widened to
    float32.

    Args:
        logits: ``[B, ..., V]``, such as ``[B, T, V]`` or ``[B, V]``
        labels: ``[B, ...]``; for next tokens shift them, not the logits, which would be
            copied: ``F.pad(ids, (0, 1), value=-100)[:, 1:]``
        ignore_index: of labels that do not count
        weight: of each class, ``[V]``. It has no effect on the "mean" of a sample with
        a
            single label: take the "sum", or weight the losses (PerSample)
        label_smoothing: between 0 and 1, as in torch
        reduction: "mean" over a sample's labels that count (weighted, if there are
            class weights), or their "sum"

    Example:
        >>> logits, labels = torch.zeros(2, 2, 4), torch.tensor([[0, 1], [3, -100]])
        >>> cross_entropy(logits, labels, reduction="sum")
        tensor([2.7726, 1.3863])
    """
    _check_reduction(reduction)
    _check_tensor("logits", logits, "Give the tensor itself, such as output.logits.")
    _check_tensor("labels", labels)
    if logits.dim() < 2 or logits.shape[:-1] != labels.shape:
        raise Refused(
            "cross_entropy takes logits [B, ..., V] and labels [B, ...], got shapes "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}.",
            parameter="labels",
            remedy="Give a label for each row of logits, without reduction.",
        )
    rows = F.cross_entropy(
        upcast(logits.flatten(0, -2)),
        labels.flatten(),
        weight=weight,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction="none",
    )
    shape = len(labels), labels.numel() // max(len(labels), 1)
    total = rows.reshape(shape).sum(1)
    if reduction == "sum":
        return total
    return _mean(total, _count(labels, ignore_index, weight).reshape(shape).sum(1))


class PerSample(nn.Module):
    """
    The criterion for losses ``[B]`` that are computed already. With it
    ``criterion(losses).backward()`` is right in every mode. Its ``reduction`` is "mean"
    or "sum", like ``loss_reduction`` of ``make_private``.

    Example:
        >>> PerSample()(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5]))
        tensor(1.2500)
    """

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        _check_reduction(reduction)
        self.reduction = reduction

    def forward(self, losses: T, weights: T | None = None) -> T:
        """
        Reduces losses ``[B]``, which are multiplied by weights ``[B]`` of the samples
        before the clipping: a weight does not change the bound of the sample's
        gradient. It must not depend on other samples.
        """
        losses = _weighted(losses, weights)
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


def _weighted(losses: T, weights: T | None) -> T:
    by_model = "If the model computes them itself, take model_losses(model, batch) of "
    _check_tensor("losses", losses, by_model + "opacus_ext.losses.")
    if losses.dim() != 1:
        raise Refused(
            f"PerSample takes one loss a sample, [B], got shape {tuple(losses.shape)}.",
            parameter="losses",
            remedy="A model's own loss is one number for the batch: call "
            "loss.backward() on that of a private model, or take "
            "opacus_ext.losses.model_losses(model, batch).",
        )
    if weights is None:
        return losses
    _check_tensor("weights", weights)
    if weights.shape != losses.shape or weights.requires_grad:
        raise Refused(
            "PerSample takes weights [B] without gradient for losses [B], got shapes "
            f"{tuple(weights.shape)} and {tuple(losses.shape)}.",
            parameter="weights",
            remedy="Give one weight a sample, detached.",
        )
    return losses * weights


AT_ONCE[PerSample] = lambda criterion, shape, losses, weights=None: _weighted(
    losses, weights
)


def model_losses(model: nn.Module, batch: Mapping[str, Any]) -> T:
    """
    Returns the losses ``[B]`` that a model computes from its labels: for each sample
    the loss that the model gives for it alone, and zero if all of its labels are
    ignored.

    The model's own code shifts labels, makes decoder inputs and recognizes problem
    types. What it computes over the batch (the balancing loss of a mixture of experts,
    a mean over tokens) is computed over each sample. A private model runs all samples
    at once, others one after the other.

    Args:
        model: a model of transformers with a head, or any that gives ``loss`` for
            keyword arguments; wrapped by ``make_private``, PEFT or not at all
        batch: the model's keyword arguments, labels among them, the batch first: a
            dict, a BatchEncoding, a named tuple or a dataclass

    Raises:
        Refused: if the model gives no loss, or not one number for a sample, and if the
            batch has no names

    Example:
        >>> class Regression(nn.Linear):
        ...     def forward(self, x, labels):
        ...         return {"loss": F.mse_loss(super().forward(x), labels)}
        >>> batch = {"x": torch.ones(3, 4), "labels": torch.zeros(3, 1)}
        >>> model_losses(Regression(4, 1), batch).shape
        torch.Size([3])
    """
    batch = _by_name(model, batch)
    if batch.get("num_items_in_batch") is not None:
        raise Refused(
            "num_items_in_batch divides each sample's loss by a number of other "
            "samples' tokens.",
            parameter="num_items_in_batch",
            remedy="Leave it out of the batch.",
        )
    loss_of = _OwnLoss(model)
    private = next(filter(None, map(private_model_of, model.modules())), None)
    if private is not None and private.enabled and torch.is_grad_enabled():
        return private.losses(dict(batch), loss_of)
    losses: Dict[int, T] = {}
    for some in _reader_of(model).read((), dict(batch)).samples:
        for i in range(some.size):
            loss = loss_of(model, **some.alone(i)[1])
            losses[i if some.rows is None else int(some.rows[i])] = loss
    if not losses:
        return next(model.parameters()).new_zeros(0)
    return torch.stack([losses[i] for i in range(len(losses))])


def _by_name(model: nn.Module, batch: Any) -> Mapping[str, Any]:
    """Returns the arguments of a model by name; refuses a batch that has no names."""
    check_argument(
        "model",
        model,
        isinstance(model, nn.Module),
        "a torch.nn.Module",
        "Call model_losses(model, batch).",
    )
    if isinstance(batch, Mapping):
        return batch
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        names = [field.name for field in dataclasses.fields(batch)]
        return {name: getattr(batch, name) for name in names}
    if hasattr(batch, "_asdict"):  # a named tuple
        return batch._asdict()
    raise Refused(
        f"model_losses takes a batch whose values have names, got {describe(batch)}.",
        parameter="batch",
        remedy="Give a dict of the model's arguments, such as "
        f'{{"input_ids": ids, "labels": labels}}.{_arguments_of(model)}',
    )


def _arguments_of(model: nn.Module) -> str:
    """Returns a sentence on what a model takes by name, or the one in its wrappers."""
    for module in model.modules():
        parameters = inspect.signature(module.forward).parameters.values()
        names = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        if names:
            return f" {type(module).__name__} takes {', '.join(names)}."
    return ""


@functools.lru_cache(maxsize=2)  # it holds the model
def _reader_of(model: nn.Module) -> InputReader:
    """Returns what reads the inputs of a model that is not private."""
    return InputReader(model)


def sample_loss(model: nn.Module, sample: Mapping[str, Any]) -> T:
    """
    Returns the loss of one sample, a batch of one, as :func:`model_losses` does. It is
    a scalar, and the loss function of a model for :func:`opacus_ext.clipped_grads`:
    ``lambda sample: sample_loss(model, sample)``.
    """
    return _OwnLoss(model)(model, **sample)


class RecordModel(nn.Module):
    """
    A model for records of several sequences: someone's messages, visits, documents. The
    record is the sample, so that clipping bounds the gradient of a whole record.

    It takes the keyword arguments of ``model`` with one more dim: ``[R, S, ...]`` for
    ``R`` records of ``S`` sequences. Shorter records are padded by sequences without
    labels (all ignored; give them an attention mask of ones). Outputs are ``[R, S,
    ...]``, and :func:`model_losses` returns one loss per record, over all labels of its
    sequences.

    Raises:
        Refused: if the inputs have other shapes

    Example:
        >>> model = RecordModel(nn.Embedding(5, 2))
        >>> model(input=torch.zeros(4, 3, 7, dtype=torch.int64)).shape
        torch.Size([4, 3, 7, 2])
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Any:
        """Runs the model on all sequences; see the class."""
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        shapes = {x.shape[:2] for x in tensors.values()}
        if len(shapes) != 1 or len(min(shapes)) != 2:
            given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
            raise Refused(
                "RecordModel takes tensors [R, S, ...] with the same R and S, got "
                f"{given or 'none'}.",
                remedy="opacus_ext.data.collators.RecordCollator makes them.",
            )
        (shape,) = shapes

        def by_record(x: Any) -> Any:
            rows = isinstance(x, torch.Tensor) and x.shape[:1] == (shape.numel(),)
            return x.unflatten(0, shape) if rows else x

        flat = {name: x.flatten(0, 1) for name, x in tensors.items()}
        output = self.model(**{**inputs, **flat})
        return output if _find_loss(output) is not None else tree_map(by_record, output)


def _check_tensor(
    name: str, value: object, remedy: str = "Make one by torch.tensor(...)."
) -> None:
    check_argument(name, value, isinstance(value, T), "a tensor", remedy)


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum"):
        raise Refused(
            f'reduction must be "mean" or "sum", got {reduction!r}.',
            parameter="reduction",
            remedy="Take one of these.",
        )


def _find_loss(output: Any) -> T | None:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple):
        return output[0] if output else None
    return getattr(output, "loss", None)


def _count(labels: T, ignore_index: int, weight: T | None) -> T:
    """Returns the weight of each label in a mean."""
    counts = labels != ignore_index
    return counts if weight is None else weight[labels * counts] * counts


def _mean(total: T, count: T) -> T:
    return total / torch.where(count > 0, count, 1)


class _OwnLoss(TorchFunctionMode):
    """
    Calls a model for one sample, and returns its loss. torch's means over labels are
    zero if all labels are ignored.
    """

    is_compiled = True  # along with a model that is called in it
    runs_again = True  # it has no state; see SampleGroup.checkpoint

    def __init__(self, model: nn.Module):
        super().__init__()
        self._model = type(model).__name__

    def __call__(self, forward: Callable, **sample: Any) -> T:
        with self:
            loss = _find_loss(forward(**sample))
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            return loss.reshape(())
        given = "no loss"
        if isinstance(loss, torch.Tensor):
            given = f"a loss of shape {tuple(loss.shape)}, not one number,"
        elif loss is not None:
            given = f"a loss that is no tensor, but {describe(loss)},"
        raise Refused(
            f"{self._model} returned {given} for a sample of {', '.join(sample)}.",
            module=self._model,
            remedy='Give it labels by keyword, "labels" or what it calls them, or '
            "compute one loss a sample from its other outputs, for example by "
            "opacus_ext.losses.cross_entropy(logits, labels).",
        )

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (F.cross_entropy, F.nll_loss):
            return _loss_of_labels(func, *args, **kwargs)
        return func(*args, **kwargs)


def _loss_of_labels(
    func: Callable,
    input: T,
    target: T,
    weight: T | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    **smoothing: float,
) -> T:
    """Computes a loss function of torch, whose mean is zero where no label counts."""
    options: Any = dict(weight=weight, ignore_index=ignore_index, **smoothing)
    if size_average is not None or reduce is not None:  # of earlier versions of torch
        old = size_average is not False, reduce is not False
        reduction = "none" if not old[1] else "mean" if old[0] else "sum"
    if reduction != "mean" or target.is_floating_point():
        return func(input, target, reduction=reduction, **options)
    total = func(input, target, reduction="sum", **options)
    return _mean(total, _count(target, ignore_index, weight).sum())
