"""A model, a batch and a loss, which the checks run on copies, from the same state."""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
    Union,
)

import torch
from torch import nn

from opacus_ext.progress import progress

T = torch.Tensor
LossFn = Callable[[nn.Module, Any], T]


class Subject:
    """
    A model under test. It runs in ``dtype``, or as it is if it can't.

    Args:
        model: is copied, and the dropout of the copy set to 0
        batch: tensors, nested in tuples, lists and mappings
        call_in: the function ``call(model, batch)`` to be run, for a dtype or None
        dtype: of the copy and of the floating-point tensors in the batch

    Raises:
        Exception: the model's own error on the batch
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        call_in: Callable[[Optional[torch.dtype]], Callable[[nn.Module, Any], Any]],
        dtype: Optional[torch.dtype],
        *,
        train: bool = False,
    ):
        plain = copied(model)
        if train and not plain.training:
            plain.train()
        no_dropout(plain)
        for kind in (dtype, None) if dtype else (None,):
            self._model = copied(plain).to(kind) if kind else plain
            self.batch = map_tensors(lambda t: _cast(t, kind), batch)
            self._call = call_in(kind)
            try:
                self.result = self.run(self.model(), self.batch)
                break
            except Exception:  # a kernel is missing in this dtype, or the model fails
                if kind is None:
                    raise

    def model(self) -> nn.Module:
        """A new copy: a forward may change buffers, and a mode changes the model."""
        return copied(self._model)

    def run(self, model: nn.Module, batch: Any, seed: int = 0) -> Any:
        """The call's result, from the same random state each time."""
        if any(p.is_cuda for p in model.parameters()):
            torch.manual_seed(seed)
        else:  # manual_seed would seed devices whose state nobody restores
            torch.default_generator.manual_seed(seed)
        # A model may change its inputs in place.
        return self._call(model, map_tensors(lambda t: t.detach().clone(), batch))

    def alone(
        self, size: int, take_sample: Optional[Callable[[Any, int], Any]] = None
    ) -> Iterator[Tuple[nn.Module, Any, Optional[Exception]]]:
        """Runs each sample alone; yields a new model, and its result or its error."""
        for b in progress(range(size), "running samples alone"):
            take = take_sample or (lambda batch, b: rows_of(batch, [b], size))
            model, sample = self.model(), take(self.batch, b)
            try:
                result = self.run(model, sample)
            except Exception as error:
                yield model, None, error
            else:
                yield model, result, None


def per_sample(
    loss_fn: Union[None, nn.Module, LossFn], dtype: Optional[torch.dtype]
) -> Optional[LossFn]:
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
        *inputs, target = batch
        by_name = len(inputs) == 1 and isinstance(inputs[0], Mapping)
        output = model(**inputs[0]) if by_name else model(*inputs)
        found = criterion(output, target)
        if found.dim() < 2:
            return found
        return found.flatten(1).sum(1) if total else found.flatten(1).mean(1)

    return losses


def gradients(loss: T, model: nn.Module) -> List[T]:
    """The dense gradient of each trainable parameter."""
    params = [p for p in model.parameters() if p.requires_grad]
    if not loss.requires_grad or not params:
        return [torch.zeros_like(p) for p in params]
    found = torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True)
    return [
        torch.zeros_like(p) if g is None else g.to_dense() if g.is_sparse else g
        for g, p in zip(found, params)
    ]


def as_in_batch(
    own: T, alone: nn.Module, loss: T, together: nn.Module, tolerance: float
) -> Tuple[bool, List[T]]:
    """
    True if a sample's loss alone and its gradients are those of its loss in the batch;
    and the gradients of the sample alone.
    """
    grads, beside = gradients(own, alone), gradients(loss, together)
    scale = max([1e-12, *map(_largest, beside)])
    same = all(close(a, b, tolerance, scale) for a, b in zip(grads, beside))
    return same and close(own, loss, tolerance, 1e-3), grads


def close(a: T, b: T, tolerance: float, least: float = 1e-12) -> bool:
    """
    True if tensors of one shape differ by at most ``tolerance`` times the largest
    finite entry of b, or times ``least``.
    """
    if a.shape != b.shape:
        return False
    a, b = a.detach().double(), b.detach().double()
    return torch.allclose(a, b, 0, tolerance * max(_largest(b), least), True)


def _largest(x: T) -> float:
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
    if isinstance(batch, T):
        return fn(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(fn, value) for key, value in batch.items()}
        try:
            kind: Any = type(batch)
            return kind(items)
        except TypeError:
            return items
    if isinstance(batch, (list, tuple)):
        values = [map_tensors(fn, value) for value in batch]
        return (
            type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
        )
    return batch


def tensors_of(batch: Any) -> List[T]:
    """The tensors of a nested batch that have dimensions."""
    found: List[T] = []

    def note(t: T) -> T:
        found.append(t)
        return t

    map_tensors(note, batch)
    return [t for t in found if t.dim()]


def rows_of(batch: Any, rows: Union[List[int], T], size: int) -> Any:
    """These samples: rows of the tensors whose first dimension is ``size``."""
    index = torch.as_tensor(rows)

    def cut(t: T) -> T:
        return t[index.to(t.device)] if t.dim() and len(t) == size else t

    return map_tensors(cut, batch)


def _cast(tensor: T, dtype: Optional[torch.dtype]) -> T:
    cast = dtype is not None and tensor.is_floating_point()
    return tensor.to(dtype) if cast else tensor.detach().clone()


# -- copies --------------------------------------------------------------------------


def copied(model: nn.Module) -> nn.Module:
    """A deep copy; functions that the model holds (a lambda over self) use the copy."""
    memo: Dict[int, Any] = {}
    new = copy.deepcopy(model, memo)
    for module in new.modules():
        held = vars(module)
        held.update({name: _over_copy(x, memo, set()) for name, x in held.items()})
    return new


def _over_copy(x: Any, memo: Dict[int, Any], seen: Set[int]) -> Any:
    """A function whose closure holds copied objects, over the copies."""
    if id(x) in memo:
        return memo[id(x)]
    if not isinstance(x, types.FunctionType) or not x.__closure__ or id(x) in seen:
        return x
    seen.add(id(x))
    try:
        held = [cell.cell_contents for cell in x.__closure__]
    except ValueError:  # an empty cell
        return x
    found = [_over_copy(y, memo, seen) for y in held]
    if all(new is old for new, old in zip(found, held)):
        return x
    cells = tuple(map(types.CellType, found))
    new = types.FunctionType(
        x.__code__, x.__globals__, x.__name__, x.__defaults__, cells
    )
    new.__kwdefaults__ = x.__kwdefaults__
    return new


def no_dropout(module: nn.Module) -> None:
    """Sets numbers named ``*drop*``, and ``p`` of modules named ``*Drop*``, to zero."""
    for part in module.modules():
        dropout = "drop" in type(part).__name__.lower()
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                setattr(part, name, type(value)(0))
