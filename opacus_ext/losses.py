"""One loss a sample: what DP-SGD clips, and what few models compute by themselves.

A model's own ``loss`` is one number for the batch, mostly the mean over all of its
tokens: how much a sample weighs in it depends on how long the others are, so clipping
each sample bounds nothing. :func:`model_losses` runs the model's own code, label shift
and all, with its loss functions computed sample by sample.

No other module of this package needs transformers, and neither does this one: it takes
any model that computes its loss from its labels by torch's loss functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import torch
from opacus.grad_sample import AbstractGradSampleModule
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from opacus_ext.grad_sample.factors import wide, workspace
from opacus_ext.layers.linear_cross_entropy import LinearCrossEntropy, PendingLogits

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
        ValueError: if shapes do not fit, or ``reduction`` is another one

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
        raise ValueError(
            "cross_entropy takes logits [B, ..., V] and labels [B, ...], got shapes "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}."
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
        Args:
            losses: ``[B]``
            weights: of the samples, ``[B]``, without gradient. They multiply the
                losses, before the clipping: a sample whose gradient is clipped anyway
                gains nothing by a larger weight, and what it can add to the sum stays
                bounded. A sample's weight must not depend on other samples.

        Raises:
            ValueError: for anything but one loss a sample
        """
        if losses.dim() != 1:
            raise ValueError(
                f"PerSample takes one loss a sample, [B], got shape "
                f"{tuple(losses.shape)}. A model's own loss is one number for the "
                "batch: take opacus_ext.losses.model_losses(model, batch)."
            )
        if weights is not None:
            if weights.shape != losses.shape or weights.requires_grad:
                raise ValueError(
                    "PerSample takes weights [B] without gradient for losses [B], got "
                    f"shapes {tuple(weights.shape)} and {tuple(losses.shape)}."
                )
            losses = losses * weights
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()


def model_losses(
    model: nn.Module, batch: Mapping[str, Any], *, reduction: str = "mean"
) -> torch.Tensor:
    """
    The losses that a model computes of its labels, one a sample.

    The model is called with the batch as it is, so labels are shifted, decoder inputs
    made and problem types told by its own code. Where that calls one of torch's loss
    functions, each sample gets its own mean.

    Args:
        model: a model of transformers with a head, or any that gives ``loss`` for
            keyword arguments; wrapped by ``make_private``, PEFT or not at all
        batch: the model's keyword arguments, labels among them, the batch first
        reduction: "mean" over a sample's own labels that are not ignored, or their
            "sum"

    Returns:
        Losses ``[B]``; zero for a sample without labels.

    Raises:
        ValueError: without labels, or if the model's loss is not made of terms that
            belong to one sample each: a balancing loss over the batch, a loss function
            that is not known here

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
        raise ValueError(
            "num_items_in_batch divides each sample's loss by a number of other "
            "samples' tokens. Leave it out of the batch."
        )
    inner = next(m for m in model.modules() if not isinstance(m, _wrappers()))
    with _Rebuild(inner, reduction) as rebuild:
        output = model(**batch)
    losses = _loss_of(output)
    if losses is None or not rebuild.knows(losses):
        name = type(inner).__name__
        what = "gave no loss" if losses is None else "computes its loss by other means"
        raise ValueError(
            f"{name} {what}: what torch's loss functions made of the batch's labels "
            f"({', '.join(_label_names(batch)) or 'there are none'}) is not its output "
            '"loss". Compute one loss a sample from its other outputs, for example by '
            "opacus_ext.losses.cross_entropy(logits, labels)."
        )
    return losses


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
        ValueError: when called with a tensor without these two dims

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
        self.rows_per_sample = 1  # of the call at work, for the tape

    def forward(self, **inputs: Any) -> Any:
        """See the class."""
        tensors = {n: x for n, x in inputs.items() if isinstance(x, torch.Tensor)}
        shapes = {x.shape[:2] for x in tensors.values()}
        if len(shapes) != 1 or len(next(iter(shapes))) != 2:
            given = ", ".join(f"{n} {tuple(x.shape)}" for n, x in tensors.items())
            raise ValueError(
                "PerRecord takes tensors [R, S, ...] with the same R and S, got "
                f"{given or 'none'}."
            )
        (lead,) = shapes
        flat = {n: x.flatten(0, 1) if n in tensors else x for n, x in inputs.items()}
        self.rows_per_sample = lead[1]

        def by_record(x: Any) -> Any:
            x = settled(x)  # a model with parameters of its own may leave it open
            rows = isinstance(x, torch.Tensor) and x.shape[:1] == (lead.numel(),)
            return x.unflatten(0, lead) if rows else x

        output = self.model(**flat)
        if _loss_of(output) is not None:
            return output
        return tree_map(by_record, output)


def _check_reduction(reduction: str) -> None:
    if reduction not in _REDUCTIONS:
        raise ValueError(f'reduction must be "mean" or "sum", got {reduction!r}.')


def _wrappers() -> Tuple[type, ...]:
    return AbstractGradSampleModule, nn.parallel.DistributedDataParallel


def _loss_of(output: Any) -> Optional[torch.Tensor]:
    if isinstance(output, Mapping):
        return output.get("loss")
    if isinstance(output, tuple):
        return output[0] if output else None
    return getattr(output, "loss", None)


def _label_names(batch: Mapping[str, Any]) -> List[str]:
    return [n for n in batch if "label" in n or n.endswith("_positions")]


def _count(
    labels: torch.Tensor, ignore_index: int, weight: Optional[torch.Tensor]
) -> torch.Tensor:
    """What each label counts in a mean."""
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
    if isinstance(x, PendingLogits):
        plain = given["weight"] is None and not given.get("label_smoothing")
        if function is not F.cross_entropy or x.dim() != 2 or not plain:
            raise ValueError(
                "a chunked head (chunked_head) takes cross_entropy of logits "
                "[rows, V], without class weights and label smoothing"
            )
        return x.losses(target, given["ignore_index"])
    step = len(x)
    if x.dim() == 2 and not (torch.is_grad_enabled() and x.requires_grad):
        step = workspace() // max(1, 4 * x.shape[1])
    parts = [
        function(**{**given, "input": wide(a), "target": b}, reduction="none")
        for a, b in zip(x.split(max(1, step)), target.split(max(1, step)))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _by_sample(x: torch.Tensor, size: int) -> torch.Tensor:
    return x.reshape(size, x.numel() // max(size, 1))


# -- the model's own loss, sample by sample ----------------------------------------

_Losses = Callable[..., Tuple[torch.Tensor, Optional[torch.Tensor]]]
_TABLE: Dict[Callable, _Losses] = {}


def _rows_of(function: Callable) -> Callable[[_Losses], _Losses]:
    """Registers how a loss function's rows, and what each counts, are computed."""

    def decorator(rows: _Losses) -> _Losses:
        _TABLE[function] = rows
        return rows

    return decorator


@_rows_of(F.cross_entropy)
@_rows_of(F.nll_loss)
def _classes(function: Callable, given: Dict[str, Any]) -> tuple:
    target = given["target"]
    if target.is_floating_point():
        raise ValueError("cross_entropy with a distribution as its target")
    count = _count(target, given["ignore_index"], given["weight"])
    return _by_rows(function, given), count


@_rows_of(F.mse_loss)
@_rows_of(F.l1_loss)
@_rows_of(F.smooth_l1_loss)
@_rows_of(F.huber_loss)
@_rows_of(F.binary_cross_entropy)
@_rows_of(F.binary_cross_entropy_with_logits)
def _entries(function: Callable, given: Dict[str, Any]) -> tuple:
    return function(**given, reduction="none"), None


@_rows_of(F.ctc_loss)
def _sequences(function: Callable, given: Dict[str, Any]) -> tuple:
    return function(**given, reduction="none"), given["target_lengths"].clamp(min=1)


# What a model does with its loss before it gives it out.
_ARITHMETIC = {
    *("add", "sub", "mul", "div", "true_divide", "neg", "__add__", "__radd__"),
    *("__iadd__", "__sub__", "__rsub__", "__isub__", "__mul__", "__rmul__"),
    *("__imul__", "__truediv__", "__itruediv__", "__neg__", "add_", "mul_", "div_"),
    *("to", "float", "double", "type", "clone", "contiguous", "mean", "sum"),
}


class _Rebuild(TorchFunctionMode):
    """
    Within it, the loss functions that ``module`` calls give one loss a sample.

    Args:
        module: the model, in whose calls the labels are met
        reduction: in the place of the model's "mean"
    """

    def __init__(self, module: nn.Module, reduction: str):
        super().__init__()
        self.module, self.reduction = module, reduction
        self._losses: List[torch.Tensor] = []
        self._given: Optional[Dict[str, torch.Tensor]] = None  # None: outside of it

    def __enter__(self) -> "_Rebuild":
        begin = self.module.register_forward_pre_hook(self._begin, with_kwargs=True)
        # First, as what follows may look at the losses by ops of any kind.
        end = self.module.register_forward_hook(self._end, prepend=True)
        self._handles = [begin, end]
        self._pend(True)
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()
        self._pend(False)
        super().__exit__(*exc)

    def _pend(self, pending: bool) -> None:
        for module in self.module.modules():
            if isinstance(module, LinearCrossEntropy):
                module.pending = pending

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._given = {n: x for n, x in kwargs.items() if isinstance(x, torch.Tensor)}
        names = _label_names(self._given)
        if not names:
            raise ValueError(
                f"{type(module).__name__}: no labels among {', '.join(kwargs)}. Give "
                'them as tensors by keyword, "labels" or what the model calls them.'
            )
        self._size = len(self._given["labels" if "labels" in names else names[0]])

    def _end(self, module: nn.Module, args: tuple, output: Any) -> Any:
        self._given = None
        losses = _loss_of(output)
        # Nothing else is needed: the logits of a large vocabulary can go.
        known = losses is not None and self.knows(losses)
        return {"loss": losses} if known else output

    def knows(self, x: torch.Tensor) -> bool:
        """Whether these are losses of samples."""
        return any(x is y for y in self._losses)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._given is None:
            return func(*args, **kwargs)
        rows = _TABLE.get(func)
        if rows is not None:
            return self._rebuilt(func, rows, args, kwargs)
        name = getattr(func, "__name__", "")
        if name == "float" and args[0].dtype == torch.float64:
            return args[0]  # many models widen half precision so
        if any(self.knows(x) for x in args if isinstance(x, torch.Tensor)):
            return self._arithmetic(name, func, args, kwargs)
        return func(*args, **kwargs)

    def _arithmetic(self, name: str, func: Callable, args: tuple, kwargs: dict) -> Any:
        tensors = [x for x in tree_leaves((args, kwargs)) if torch.is_tensor(x)]
        if name in ("mean", "sum"):
            return args[0]  # of one number, to the model
        result = func(*args, **kwargs)
        if name in _ARITHMETIC:
            others = [x for x in tensors if not self.knows(x)]
            if others:
                raise ValueError(
                    f"{type(self.module).__name__} adds to its loss a number computed "
                    f"of the whole batch ({name} with a tensor of shape "
                    f"{tuple(others[0].shape)}), such as the balancing loss of a "
                    "mixture of experts. Turn it off (output_router_logits=False in "
                    "the model's config or in the batch) and add opacus_ext.layers."
                    "balancing_loss, one term a sample, to the losses."
                )
            self._losses.append(result)
        return result

    def _rebuilt(
        self, func: Callable, rows: _Losses, args: tuple, kwargs: dict
    ) -> torch.Tensor:
        bound = inspect.signature(func).bind(*args, **kwargs)
        bound.apply_defaults()
        given = {
            n: x
            for n, x in bound.arguments.items()
            if n not in ("size_average", "reduce", "reduction")
        }
        reduction = bound.arguments["reduction"]
        if reduction == "none":
            return func(*args, **kwargs)
        where = f"{type(self.module).__name__}, {func.__name__}"
        try:
            self._check(given)
            each, count = rows(func, given)
        except ValueError as error:
            raise ValueError(
                f"{where}: {error}. Its rows can't be assigned to the {self._size} "
                "samples: compute one loss a sample from the model's other outputs, "
                "for example by opacus_ext.losses.cross_entropy(logits, labels)."
            ) from error
        if reduction == "mean":
            reduction = self.reduction
        losses = _reduce(each, count, self._size, reduction)
        self._losses.append(losses)
        return losses

    def _check(self, given: Dict[str, Any]) -> None:
        """
        Raises:
            ValueError: if the rows are not those of one sample after the other
        """
        if "target_lengths" in given:
            if len(given["target_lengths"]) == self._size:
                return
        else:
            target = given["target"]
            ignore = given.get("ignore_index")
            fits = target.numel() % max(self._size, 1) == 0
            if fits and any(
                _is_of(_by_sample(target, self._size), labels, ignore)
                for labels in self._candidates()
            ):
                return
        raise ValueError("its target is not a label tensor of the batch")

    def _candidates(self) -> Iterator[torch.Tensor]:
        """Labels ``[B, length]``, as they were given and as next tokens."""
        for labels in self._given.values():
            if not labels.dim() or labels.numel() % max(self._size, 1):
                continue
            yield _by_sample(labels, self._size)
            if labels.dim() > 1 and not labels.is_floating_point():
                yield _by_sample(labels[..., 1:], self._size)
                shifted = F.pad(labels, (0, 1), value=-100)[..., 1:]
                yield _by_sample(shifted, self._size)


def _is_of(
    target: torch.Tensor, labels: torch.Tensor, ignore_index: Optional[int]
) -> bool:
    """Whether the rows of a target are some labels, each sample's in its place."""
    labels = labels.to(target)
    if target.shape == labels.shape:
        same = target == labels
        if ignore_index is not None:
            same |= target == ignore_index
        elif target.is_floating_point():
            same |= target.isnan() & labels.isnan()
        return bool(same.all())
    if ignore_index is None:
        return False
    # With other ignored ones between them, such as those of a prompt.
    a, b = target != ignore_index, labels != ignore_index
    return torch.equal(a.sum(1), b.sum(1)) and torch.equal(target[a], labels[b])
