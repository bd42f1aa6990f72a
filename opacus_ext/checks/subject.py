"""A model, a batch and a loss, which the checks run on copies, from the same state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import (
    Any,
    Callable,
    ContextManager,
    Iterator,
    List,
    Optional,
    Set,
    Union,
)

import torch
from torch import nn

from opacus_ext.progress import progress
from opacus_ext.refused import Refused

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
        plain = copy.deepcopy(model)
        if not plain.training:
            plain.train()
        no_dropout(plain)
        for kind in (dtype, None) if dtype else (None,):
            self._model = copy.deepcopy(plain).to(kind) if kind else plain
            self.batch = map_tensors(lambda t: _cast(t, kind), batch)
            self._loss_fn = per_sample(loss_fn, kind)
            try:
                self.losses = self.run(self.model(), self.batch)
                break
            except Exception:  # a kernel is missing in this dtype, or the model fails
                if kind is None:
                    raise
        size = len(self.losses)
        if all(len(t) != size for t in tensors_of(batch)):
            raise not_per_sample(f"{size} losses for a batch without {size} rows")

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
        got = f"shape {(*losses.shape,)}" if isinstance(losses, T) else losses
        raise not_per_sample(f"{got} instead of [B]")

    def samples(self) -> Iterator[Any]:
        """Each sample as a batch of one."""
        size = len(self.losses)
        for b in progress(range(size), "running samples alone"):
            yield rows_of(self.batch, [b], size)


def not_per_sample(got: str) -> Refused:
    """The error for what is not one loss per sample."""
    return Refused(
        f"loss_fn gives {got}; it must give one loss per sample.",
        parameter="loss_fn",
        remedy='Give it a reduction of "none", and average within samples.',
    )


def per_sample(
    loss_fn: Union[nn.Module, LossFn], dtype: Optional[torch.dtype]
) -> LossFn:
    """
    A loss function, or a criterion as one: ``batch`` is ``(*inputs, target)`` then, and
    the criterion's values are averaged in each sample, or summed if it sums.
    """
    if not isinstance(loss_fn, nn.Module) or not hasattr(loss_fn, "reduction"):
        return loss_fn
    total = loss_fn.reduction == "sum"
    criterion: Any = copy.deepcopy(loss_fn).to(dtype)
    criterion.reduction = "none"

    def losses(model: nn.Module, batch: Any) -> T:
        """The criterion's values, one a sample."""
        *inputs, target = batch
        by_name = len(inputs) == 1 and isinstance(inputs[0], Mapping)
        output = model(**inputs[0]) if by_name else model(*inputs)
        found = criterion(output, target)
        if found.dim() < 2:
            return found
        return found.flatten(1).sum(1) if total else found.flatten(1).mean(1)

    return losses


def gradients(loss: T, model: nn.Module) -> List[T]:
    """The dense gradient of each trainable parameter; zero where there is none."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not loss.requires_grad:
        return [torch.zeros_like(p) for p in params]
    found = torch.autograd.grad(
        loss, params, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return [g.to_dense() if g.is_sparse else g for g in found]


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


def random_state_kept(model: nn.Module) -> ContextManager:
    """Restores torch's random generators of the devices that the model is on."""
    on_cuda = any(p.is_cuda for p in model.parameters())
    return torch.random.fork_rng(range(torch.cuda.device_count()) if on_cuda else [])


def lowest_dtype(losses: T, dtype: torch.dtype) -> torch.dtype:
    """``dtype``, or the least exact one in the graph of the losses."""
    todo: List[Any] = [losses.grad_fn]
    seen: Set[Any] = {None}
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        found = [
            getattr(x, "dtype", dtype) for x in getattr(node, "_input_metadata", ())
        ]
        kinds = [kind for kind in found if kind.is_floating_point]
        dtype = max([dtype, *kinds], key=lambda kind: torch.finfo(kind).eps)
        todo += [child for child, _ in node.next_functions]
    return dtype


# -- batches -------------------------------------------------------------------------


def map_tensors(fn: Callable[[T], T], batch: Any) -> Any:
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
    found: List[T] = []

    def note(t: T) -> T:
        """Adds a tensor."""
        found.append(t)
        return t

    map_tensors(note, batch)
    return [t for t in found if t.dim()]


def rows_of(batch: Any, rows: Union[List[int], T], size: int) -> Any:
    """These samples: rows of the tensors whose first dimension is ``size``."""
    index = torch.as_tensor(rows)
    return map_tensors(
        lambda t: t[index.to(t.device)] if t.dim() and len(t) == size else t, batch
    )


def _cast(tensor: T, dtype: Optional[torch.dtype]) -> T:
    """The tensor in a dtype if it has floating point, else a copy."""
    cast = dtype is not None and tensor.is_floating_point()
    return tensor.to(dtype) if cast else tensor.detach().clone()


def no_dropout(module: nn.Module) -> None:
    """Sets numbers named ``*drop*``, and ``p`` of modules named ``*Drop*``, to zero."""
    for part in module.modules():
        dropout = "drop" in type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                setattr(part, name, type(value)(0))
