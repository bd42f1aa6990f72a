"""What the check compares on: copies of a model, its batch and its losses."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import Any, Callable, Dict, List, Optional, Set, Union

import torch
from torch import nn

from opacus_ext.checks.batch import Slicer, cast, clone, map_tensors, tensors_of
from opacus_ext.refused import Refused

LossFn = Callable[[nn.Module, Any], torch.Tensor]


class ModelUnderTest:
    """The model under test as a source of fresh copies, the batch and the loss."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss_fn: LossFn,
        take_sample: Callable[[Any, int], Any],
    ):
        self._model = model
        self.batch = batch
        self.loss_fn = loss_fn
        self.take_sample = take_sample
        losses = self.run(self.model(), batch)
        self.losses, self.batch_size = losses.detach(), len(losses)
        dtype = next(p for p in model.parameters() if p.requires_grad).dtype
        self.dtype = _lowest(losses, dtype)
        self.tolerance = {torch.float64: 1e-8, torch.float32: 1e-4}.get(
            self.dtype, 5e-2
        )

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        batch: Any,
        loss_fn: Union[nn.Module, LossFn],
        dtype: Optional[torch.dtype],
        take_sample: Optional[Callable[[Any, int], Any]],
    ) -> ModelUnderTest:
        take = take_sample or Slicer()
        plain = _without_dropout(copied(model))
        if dtype is not None:
            try:
                # An error here may be the type's fault (a kernel that is not there in
                # float64) or the model's own: the run below tells, as it repeats it.
                subject = cls(
                    copied(plain).to(dtype),
                    map_tensors(lambda t: cast(t, dtype), batch),
                    _per_sample(loss_fn, dtype),
                    take,
                )
            except Exception:
                subject = cls(plain, clone(batch), _per_sample(loss_fn, None), take)
        else:
            subject = cls(plain, clone(batch), _per_sample(loss_fn, None), take)
        if isinstance(take, Slicer):
            take.batch_size = subject.batch_size
            if not any(take.cuts(t) for t in tensors_of(batch)):
                raise Refused(
                    f"loss_fn gives {subject.batch_size} losses, but no tensor of the "
                    "batch has that many rows:",
                    parameter="loss_fn",
                    remedy="it must give one loss per sample.",
                )
        return subject

    def model(self) -> nn.Module:
        """A fresh copy: a forward may change buffers, and a mode changes the model."""
        return copied(self._model)

    def run(self, model: nn.Module, batch: Any, seed: int = 0) -> torch.Tensor:
        """Losses [B] of ``batch``, from the same random state at each call."""
        if any(p.is_cuda for p in model.parameters()):
            torch.manual_seed(seed)
        else:  # manual_seed would reach for devices whose state nobody restores
            torch.default_generator.manual_seed(seed)
        # A model may change its inputs in place; the next run needs them as they were.
        losses = self.loss_fn(model, clone(batch))
        if not isinstance(losses, torch.Tensor) or losses.dim() != 1:
            got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else losses
            raise Refused(
                f"loss_fn must give one loss per sample, of shape [B]; got {got}.",
                parameter="loss_fn",
                remedy='Give it a reduction of "none", and average within samples.',
            )
        return losses


def copied(model: nn.Module) -> nn.Module:
    """A copy. Functions that the model holds (a lambda over self) are over the copy."""
    memo: Dict[int, Any] = {}
    new = copy.deepcopy(model, memo)
    for part in new.modules():
        held = vars(part)
        held.update({name: _of_copy(x, memo, set()) for name, x in held.items()})
    return new


def _of_copy(x: Any, memo: Dict[int, Any], seen: Set[int]) -> Any:
    """A function whose closure holds what was copied, over the copies."""
    if id(x) in memo:
        return memo[id(x)]
    if not isinstance(x, types.FunctionType) or not x.__closure__ or id(x) in seen:
        return x
    seen.add(id(x))
    try:
        held = [cell.cell_contents for cell in x.__closure__]
    except ValueError:  # a cell that is empty
        return x
    found = [_of_copy(y, memo, seen) for y in held]
    if all(new is old for new, old in zip(found, held)):
        return x
    cells = tuple(map(types.CellType, found))
    new = types.FunctionType(
        x.__code__, x.__globals__, x.__name__, x.__defaults__, cells
    )
    new.__kwdefaults__ = x.__kwdefaults__
    return new


def no_dropout(module: nn.Module) -> None:
    """
    Sets numbers named ``*drop*``, and the rates of modules named ``*Drop*``, to zero.
    """
    for part in module.modules():
        dropout = "drop" in type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                setattr(part, name, type(value)(0))


def _lowest(losses: torch.Tensor, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or the least exact one that the losses' graph has gradients in."""
    todo: List[Any] = [losses.grad_fn]
    seen: Set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        inputs = getattr(node, "_input_metadata", ())
        for other in (getattr(x, "dtype", dtype) for x in inputs):
            if (
                other.is_floating_point
                and torch.finfo(other).eps > torch.finfo(dtype).eps
            ):
                dtype = other
        todo += [child for child, _ in node.next_functions]
    return dtype


def _without_dropout(model: nn.Module) -> nn.Module:
    """Changes ``model``, a copy: training mode, and no dropout of any usual kind."""
    if not model.training:
        model.train()
    no_dropout(model)
    return model


def _per_sample(
    loss_fn: Union[nn.Module, LossFn], dtype: Optional[torch.dtype]
) -> LossFn:
    """``loss_fn(model, batch) -> [B]`` from a criterion, or as it is."""
    if not (isinstance(loss_fn, nn.Module) and hasattr(loss_fn, "reduction")):
        return loss_fn
    criterion: Any = copy.deepcopy(loss_fn)
    if dtype:
        criterion.to(dtype)
    total = criterion.reduction == "sum"
    criterion.reduction = "none"

    def losses(model: nn.Module, batch: Any) -> torch.Tensor:
        *inputs, target = batch
        if len(inputs) == 1 and isinstance(inputs[0], Mapping):
            output = model(**inputs[0])
        else:
            output = model(*inputs)
        loss = criterion(output, target)
        if loss.dim() == 0:
            return loss
        loss = loss.flatten(1) if loss.dim() > 1 else loss.unsqueeze(1)
        return loss.sum(dim=1) if total else loss.mean(dim=1)

    return losses
