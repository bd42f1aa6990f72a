"""Values that do not know their sample yet.

The output of a layer that saw no sample (an embedding of position ids ``[1, T]`` or
``[T]``, of relative positions ``[q, k]``) enters every sample of the batch. Autograd
would hand back its gradient already summed over the batch, so it has to be expanded
to ``[B, ...]`` before it meets the batch, with one copy for each sample. But its
shape can coincide with that of a batch (T = B), and shape ops may stand between the
layer and the batch (T5 permutes and unsqueezes its bias).

So such an output travels as an :class:`Undecided` tensor. Shape ops and scalar
arithmetic are noted down. Where it first meets a batch, the way in which the two
broadcast tells what it is: batched already, or to be expanded; then the noted ops are
run on the real thing. A wrong guess is found by the check in layout.py.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

# Asked of the value itself; nothing flows from the answer to the loss.
_QUERIES = {
    *("size", "dim", "ndimension", "numel", "stride", "storage_offset", "data_ptr"),
    *("is_floating_point", "is_complex", "is_contiguous", "get_device", "__len__"),
    *("__get__", "__repr__", "__str__", "__format__", "__hash__", "element_size"),
    *("untyped_storage", "requires_grad_", "nelement", "_is_view", "is_same_size"),
    *("result_type", "can_cast", "__dir__"),
}
_TRANSPOSES = {"T", "mT", "H", "mH"}
# Noted down and run again once the value is decided.
_UNARY = {
    *("view", "reshape", "permute", "transpose", "unsqueeze", "squeeze", "flatten"),
    *("unflatten", "contiguous", "to", "type", "type_as", "float", "double", "half"),
    *("bfloat16", "__getitem__", "t", "movedim", "moveaxis", "swapaxes", "narrow"),
    *("select", "clone", "neg", "__neg__", "relu", "gelu", "tanh", "sigmoid", "silu"),
    *("exp", "log", "sqrt", "rsqrt", "pow", "__pow__", "swapdims", "view_as"),
}
_BROADCAST = {
    *("add", "sub", "mul", "div", "true_divide", "rsub", "where", "maximum"),
    *("minimum", "__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__"),
    *("__mul__", "__rmul__", "__imul__", "__truediv__", "__rtruediv__", "add_"),
    *("sub_", "mul_", "div_", "__itruediv__", "masked_fill", "__rdiv__", "__div__"),
}


_OUT_OF_PLACE = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
}


class Tripwire(torch.autograd.Function):
    """
    Stands where the gradient of an undecided value would flow if an op escaped the
    bookkeeping here; met in the graph, it is an error (graph.py).
    """

    @staticmethod
    def forward(ctx, anchor, value, name):
        ctx.undecided = name
        return value.detach()

    @staticmethod
    def backward(ctx, grad):
        return None, None, None


class Source:
    """
    One output of a layer that saw no sample.

    Args:
        output: the layer's output as it computed it
        record: puts the layer's record behind its output; given the output itself or
            its expansion to ``[B, *output.shape]``
        batch_size: ``B``
        name: the layer's name, for errors
    """

    def __init__(
        self,
        output: torch.Tensor,
        record: Callable[[torch.Tensor], torch.Tensor],
        batch_size: int,
        name: str,
    ):
        self.output = output
        self.record = record
        self.batch_size = batch_size
        self.name = name
        self.batched: Optional[bool] = None
        self._recorded: Optional[torch.Tensor] = None

    def recorded(self, batched: bool) -> torch.Tensor:
        """The recorded output, ``[*shape]`` if batched, else ``[B, *shape]``."""
        if not torch.is_grad_enabled():  # no record is made and nothing decided
            output = self.output.detach()
            return output if batched else output.expand(self.batch_size, *output.shape)
        if self.batched is None:
            output = self.output
            if not batched:
                output = output.expand(self.batch_size, *output.shape)
            self.batched, self._recorded = batched, self.record(output)
        if self.batched is not batched:
            raise RuntimeError(
                f"{self.name}: its output of shape {tuple(self.output.shape)} is used "
                f"both as a batch of {self.batch_size} and as one value for all "
                "samples. Give it a batch dimension of its own by expanding its input "
                "to [B, ...]."
            )
        return self._recorded


class Undecided(torch.Tensor):
    """A value that is either batched or the same for all samples; see the module."""

    source: Source
    ops: Tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    changed: Optional[torch.Tensor]  # the decided value, once an op has changed it

    @staticmethod
    def of(source: Source, anchor: torch.Tensor) -> "Undecided":
        """Wraps the output of ``source``."""
        plain = Tripwire.apply(anchor, source.output, source.name)
        return _wrap(plain, source, ())

    def becomes(self, value: torch.Tensor) -> torch.Tensor:
        """From now on this stands for ``value``, which is changed in place."""
        self.changed = value
        return value

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _TRANSPOSES:
                return _run(func, args, kwargs)
        if name in _QUERIES:
            return _run(func, args, kwargs)
        if name == "detach":
            return _plain(args[0])
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        undecided = [x for x in leaves if isinstance(x, Undecided)]
        x, alone = undecided[0], len(undecided) == 1
        if args and isinstance(args[0], Undecided) and _in_place(name, kwargs):
            value = args[0].becomes(settled(args[0]))
            args, kwargs = tree_map(settled, ((value, *args[1:]), kwargs))
            return func(*args, **kwargs)
        if alone and x.source.batched is not True and x.changed is None:
            if name in ("expand", "expand_as", "repeat", "broadcast_to"):
                return _expand(func, name, x, args, kwargs)
            others = [y for y in leaves if y is not x]
            if name in _UNARY or name in _TRANSPOSES:
                return _defer(func, x, args, kwargs)
            if name in _BROADCAST and not _meets_batch(x, others):
                if args[0] is x or not name.startswith("__i"):
                    return _defer(_OUT_OF_PLACE.get(name, func), x, args, kwargs)
        rank = max(len(_shape(y)) for y in leaves) if name in _BROADCAST else None
        args, kwargs = tree_map(lambda y: _settle(y, rank), (args, kwargs))
        if leaves[0] is x:
            func = _OUT_OF_PLACE.get(name, func)  # the record's output is not to change
        return func(*args, **kwargs)


def _in_place(name: str, kwargs: dict) -> bool:
    if kwargs.get("inplace"):
        return True
    return name == "__setitem__" or (name.endswith("_") and name[0] != "_")


def settled(x: Any) -> Any:
    """The ordinary tensor that an undecided value stands for; others as they are."""
    return _settle(x, None)


def _run(func: Callable, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _plain(x: Any) -> Any:
    if not isinstance(x, Undecided):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return x.as_subclass(torch.Tensor).detach()


def _wrap(plain: torch.Tensor, source: Source, ops: tuple) -> Undecided:
    with torch._C.DisableTorchFunctionSubclass():
        out = plain.as_subclass(Undecided)
    out.source, out.ops, out.changed = source, ops, None
    return out


def _defer(func: Callable, x: Undecided, args: tuple, kwargs: dict) -> Any:
    """Runs an op for its shape and notes it down for the real value."""
    plain = _run(func, args, kwargs)
    if not isinstance(plain, torch.Tensor):
        raise RuntimeError(f"{x.source.name}: {func} on its output is not supported.")

    def op(value: torch.Tensor) -> torch.Tensor:
        real = tree_map(lambda y: value if y is x else y, (args, kwargs))
        return func(*real[0], **real[1])

    return _wrap(plain, x.source, (*x.ops, op))


def _value(x: Undecided, batched: bool) -> torch.Tensor:
    """The noted ops on the recorded output: ``[*x.shape]``, or ``[B, *x.shape]``."""
    value = x.source.recorded(batched)

    def run(value: torch.Tensor) -> torch.Tensor:
        for op in x.ops:
            value = op(value)
        return value

    if batched or not x.ops:
        return run(value)
    return torch.func.vmap(run)(value)


def _shape(x: torch.Tensor) -> Tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(x.shape)


def _settle(x: Any, rank: Optional[int]) -> Any:
    """
    Decides ``x`` where it meets an op of which ``rank`` is that of the broadcast
    result (None: an op that does not broadcast).
    """
    if not isinstance(x, Undecided):
        return x
    if x.changed is not None:
        return x.changed
    shape, batch_size = _shape(x), x.source.batch_size
    lower = rank is not None and len(shape) < rank
    batched = x.source.batched
    if batched is None:
        leading = bool(shape) and shape[0] == 1
        sizes = [n for n in shape if n and n % batch_size == 0]
        batched = bool(sizes) and not lower and not leading
    value = _value(x, batched)
    return value if batched else _align(value, shape, rank or len(shape))


def _align(value: torch.Tensor, shape: Tuple[int, ...], rank: int) -> torch.Tensor:
    """``[B, *shape]`` so that it broadcasts as ``shape`` did, samples leading."""
    if rank > len(shape):
        ones = [1] * (rank - len(shape) - 1)
        return value.reshape(value.shape[0], *ones, *shape)
    if shape and shape[0] == 1:
        return value.squeeze(1)
    return value


def _meets_batch(x: Undecided, others: List[torch.Tensor]) -> bool:
    """Whether another operand of a broadcasting op brings the batch along."""
    rank = max(len(_shape(x)), *(y.dim() for y in others), 0)
    batch_size = x.source.batch_size
    return any(
        y.dim() == rank > 0 and y.shape[0] > 0 and y.shape[0] % batch_size == 0
        for y in others
        if not isinstance(y, torch.nn.Parameter)
    )


def _expand(
    func: Callable, name: str, x: Undecided, args: tuple, kwargs: dict
) -> torch.Tensor:
    """``expand`` or ``repeat`` to the batch: the explicit way to say "batch-less"."""
    plain_shape = tuple(_run(func, args, kwargs).shape)
    shape, batch_size = _shape(x), x.source.batch_size
    new = len(plain_shape) > len(shape) or shape[:1] != plain_shape[:1]
    if not new or plain_shape[0] != batch_size:
        return _defer(func, x, args, kwargs)
    value = _align(_value(x, False), shape, len(plain_shape))
    if name == "repeat":
        return value.repeat([m // n for m, n in zip(plain_shape, value.shape)])
    return value.expand(plain_shape)
