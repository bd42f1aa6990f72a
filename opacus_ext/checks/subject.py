"""A model, a batch and a loss, which the checks run on copies, from the same state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Callable, List, Optional, Sequence, Union

import torch
from opacus import PrivacyEngine
from torch import nn

from opacus_ext.losses import PerSample
from opacus_ext.refused import Refused, add_note, check_argument, describe

T = torch.Tensor
LossFn = Callable[[nn.Module, Any], T]


class Subject:
    """
    A model under test. It runs in ``dtype``, or as it is if it can't.

    Args:
        model: is copied; the copy is in training mode as a whole, without dropout
        batch: tensors, nested in tuples, lists and mappings
        loss_fn: gives the losses ``[B]``, see :func:`per_sample`
        dtype: of the copy and of the floating-point tensors in the batch

    Attributes:
        losses: those of the batch
        samples: each sample as a batch of one

    Raises:
        Refused: if ``loss_fn`` does not give one loss per sample
        Exception: the model's own error on the batch
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: Union[nn.Module, LossFn],
        dtype: Optional[torch.dtype],
    ):
        _check_parts(batch, loss_fn, dtype)
        plain = without_dropout(model)
        for kind in (dtype, None) if dtype else (None,):

            def cast(tensor: T) -> T:
                return tensor.to(kind) if tensor.is_floating_point() else tensor

            self._model = copy.deepcopy(plain).to(kind) if kind else plain
            self.batch = map_tensors(cast, batch)
            self._loss_fn = per_sample(loss_fn, kind)
            try:
                self.losses = self.run(self.model(), self.batch)
                break
            except Exception as error:
                # A kernel is missing in this dtype, or the model fails.
                if kind is None:
                    if isinstance(error, (AttributeError, TypeError)):
                        add_note(error, _CALLED[self._loss_fn is loss_fn])
                    raise
        size = len(self.losses)
        if all(len(tensor) != size for tensor in tensors_of(batch)):
            raise Refused(
                f"loss_fn returned {size} losses, and no tensor of the batch has "
                f"{size} rows, which would be the samples.",
                parameter="batch",
                remedy="Put samples together to tensors [B, ...], for example by "
                "torch.utils.data.default_collate(samples).",
            )
        self.samples = [rows_of(self.batch, [b], size) for b in range(size)]

    def model(self) -> nn.Module:
        """A new copy: a forward may change buffers, and a mode changes the model."""
        return copy.deepcopy(self._model)

    def run(self, model: nn.Module, batch: Any, seed: int = 0) -> T:
        """The losses ``[B]``, from the same random state each time."""
        if any(p.is_cuda for p in model.parameters()):
            torch.manual_seed(seed)
        else:  # manual_seed would seed devices whose state nobody restores
            torch.default_generator.manual_seed(seed)
        # A model may change its inputs in place.
        losses = self._loss_fn(model, map_tensors(lambda t: t.detach().clone(), batch))
        if isinstance(losses, T) and losses.dim() == 1:
            return losses
        got = describe(losses)
        if isinstance(losses, T):
            got = f"a tensor of shape {(*losses.shape,)}"
        raise not_per_sample(got)


_OF_TORCH = nn.modules.loss.__name__
# By whether loss_fn is called as it is.
_CALLED = {
    True: "It was called as loss_fn(model, batch), and has to return the losses [B].",
    False: "A criterion is called as criterion(model(*inputs), target), where batch is "
    "(*inputs, target). For any other batch or model give loss_fn a function: "
    "loss_fn(model, batch) returns the losses [B].",
}


def _check_parts(batch: object, loss_fn: object, dtype: Optional[torch.dtype]) -> None:
    """Refuses arguments of the wrong kind."""
    check_argument(
        "loss_fn",
        loss_fn,
        callable(loss_fn)
        and not isinstance(loss_fn, type)
        and getattr(loss_fn, "__module__", "") != "torch.nn.functional",
        "a criterion, or a function of the model and the batch",
        "Give torch.nn.CrossEntropyLoss(), say, opacus_ext.model_losses for a model "
        "that computes its own loss, or a function: loss_fn(model, batch) returns the "
        "losses [B].",
    )
    check_argument(
        "dtype",
        dtype,
        dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point,
        "a floating-point type",
        "Give torch.float64, torch.float32 or None.",
    )
    if not _is_criterion(loss_fn):
        return
    if not isinstance(batch, (tuple, list)) or not all(map(tensors_of, batch)):
        names = (
            f" of {', '.join(map(str, batch))}" if isinstance(batch, Mapping) else ""
        )
        raise Refused(
            "A criterion takes a batch (*inputs, target) of tensors, got "
            f"{describe(batch)}{names}.",
            parameter="batch",
            remedy="Give (inputs, target), where inputs may be a dict, or give loss_fn "
            "a function: loss_fn(model, batch) returns the losses [B]. Of a model that "
            "computes its own loss that is opacus_ext.model_losses.",
        )


def not_per_sample(got: str) -> Refused:
    """The error for what is not one loss per sample."""
    return Refused(
        f"loss_fn returned {got}; it has to return one loss per sample, [B].",
        parameter="loss_fn",
        remedy='Leave out the mean over the batch: take reduction="none", and average '
        "within each sample. A model that computes its own loss has "
        "loss_fn=opacus_ext.model_losses.",
    )


def _is_criterion(loss_fn: object) -> bool:
    return isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction")


def per_sample(
    loss_fn: Union[nn.Module, LossFn], dtype: Optional[torch.dtype]
) -> LossFn:
    """
    A loss function, or a criterion as one: ``batch`` is ``(*inputs, target)`` then, and
    the criterion's values are averaged in each sample, or summed if it sums.
    """
    if not _is_criterion(loss_fn):
        return loss_fn
    criterion: Any = copy.deepcopy(loss_fn)
    criterion.to(dtype)
    reduce = torch.sum if criterion.reduction == "sum" else torch.mean
    criterion.reduction = "none"

    def losses(model: nn.Module, batch: Any) -> T:
        *inputs, target = batch
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            output = model(**inputs[0])
        else:
            output = model(*inputs)
        if not isinstance(output, T) and type(criterion).__module__ == _OF_TORCH:
            raise Refused(
                f"The model returned {describe(output)}, and "
                f"{type(criterion).__name__} takes a tensor.",
                parameter="loss_fn",
                remedy="Give loss_fn a function that computes the losses [B] from it, "
                'by a criterion with reduction="none", or opacus_ext.model_losses for '
                "the loss of the model itself.",
            )
        values = criterion(output, target)
        return values if values.dim() < 2 else reduce(values.flatten(1), 1)

    return losses


def close(a: T, b: T, tolerance: float, least: float = 1e-12) -> bool:
    """
    True if tensors of one shape differ by at most ``tolerance`` times the largest
    finite entry of b, or times ``least``.
    """
    if a.shape != b.shape:
        return False
    a, b = a.detach().double(), b.detach().double()
    return torch.allclose(a, b, 0, tolerance * max(largest(b), least), True)


def largest(x: T) -> float:
    """The largest finite entry, in absolute value."""
    return float(x.detach().abs().nan_to_num(posinf=0).max()) if x.numel() else 0.0


# -- batches -------------------------------------------------------------------------


def map_tensors(fn: Callable[[T], Any], batch: Any) -> Any:
    """``fn`` on every tensor of a nested batch; the containers keep their types."""
    kind: Any = type(batch)
    if isinstance(batch, T):
        return fn(batch)
    if isinstance(batch, Mapping):
        return kind({key: map_tensors(fn, value) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(fn, value) for value in batch]
        return kind(*values) if hasattr(batch, "_fields") else kind(values)
    return batch


def tensors_of(batch: Any) -> List[T]:
    """The tensors of a nested batch that have dimensions."""
    tensors: List[T] = []
    map_tensors(tensors.append, batch)
    return [tensor for tensor in tensors if tensor.dim()]


def rows_of(batch: Any, rows: Sequence[int], size: int) -> Any:
    """These samples: rows of the tensors whose first dimension is ``size``."""
    return map_tensors(
        lambda t: t[list(rows)] if t.dim() and len(t) == size else t, batch
    )


def without_dropout(model: nn.Module) -> nn.Module:
    """
    A copy, in training mode if the model as a whole is not, with zero for numbers named
    ``*drop*``, and for ``p`` of modules named ``*Drop*``.
    """
    model = copy.deepcopy(model)
    if not model.training:
        model.train()
    for part in model.modules():
        dropout = "drop" in type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                setattr(part, name, type(value)(0))
    return model


# -- steps of make_private -----------------------------------------------------------


class PrivateStep:
    """
    Steps of SGD as a model trains them after ``make_private``.

    Args:
        engine: whose steps they are
        model: is trained
        loss_fn: takes a model and a batch, returns losses ``[B]``
        **options: of ``make_private``
    """

    def __init__(
        self,
        engine: PrivacyEngine,
        model: nn.Module,
        loss_fn: LossFn,
        lr: float,
        **options: Any,
    ):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self._loss_fn = loss_fn
        self._private, self._optimizer, *criterion, self.loader = engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(self.params, lr=lr),
            criterion=PerSample(),
            **options,
        )
        self._mean = criterion[0] if criterion else PerSample()

    def step(self, batch: Any) -> None:
        """Takes one step from the current parameters."""
        self._optimizer.zero_grad()
        self._mean(self._loss_fn(self._private, batch)).backward()
        self._optimizer.step()
