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

import functools
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from opacus_ext.grad_sample import graph

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
        name: the layer's name
        remembered: by layer name, whether its output was batched when the shapes left
            no doubt; kept from step to step, because B may vary and coincide
    """

    def __init__(
        self,
        output: torch.Tensor,
        record: Callable[[torch.Tensor], torch.Tensor],
        batch_size: int,
        name: str,
        remembered: Optional[Dict[str, bool]] = None,
    ):
        self.output = output
        self.record = record
        self.batch_size = batch_size
        self.name = name
        self.remembered = {} if remembered is None else remembered
        self.batched: Optional[bool] = None
        self._recorded: Optional[torch.Tensor] = None

    def guess(self, shape: Tuple[int, ...]) -> bool:
        """Whether a value of this shape is batched, where the op tells nothing."""
        if self.batched is not None:
            return self.batched
        leads = bool(shape) and shape[0] > 1 and shape[0] % self.batch_size == 0
        sequence_first = shape[:1] != (1,) and self.batch_size in shape[1:-1]
        if not leads and not sequence_first:
            self.remembered[self.name] = False
            return False
        return self.remembered.get(self.name, True)

    def recorded(self, batched: bool) -> torch.Tensor:
        """The recorded output, ``[*shape]`` if batched, else ``[B, *shape]``."""
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
    op: Callable[[torch.Tensor], torch.Tensor]  # from the source's output to this
    changed: Optional[torch.Tensor]  # the real value, once changed in place

    @staticmethod
    def of(source: Source, anchor: torch.Tensor) -> "Undecided":
        """Wraps the output of ``source``."""
        plain = Tripwire.apply(anchor, source.output, source.name)
        return _wrap(plain, source, lambda output: output)

    @classmethod
    @torch.compiler.disable
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = getattr(getattr(func, "__self__", None), "__name__", "")
            if name not in _TRANSPOSES:
                return _run(func, args, kwargs)
        if name in _QUERIES:
            return _run(func, args, kwargs)
        if name == "detach" or not torch.is_grad_enabled():
            # No gradient passes here, so nothing is decided. Inside a custom autograd
            # function the tripwire is behind the plain value.
            return _run(func, *tree_map(plain, (args, kwargs)))
        leaves = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        mine = [x for x in leaves if isinstance(x, Undecided)]
        x, others = mine[0], [y for y in leaves if not isinstance(y, Undecided)]
        open_ = all(
            y.source is x.source and y.changed is None and y.source.batched is not True
            for y in mine
        )
        met = any(_brings_batch(y, each) for y in others for each in mine)
        in_place = _in_place(name, kwargs)
        if in_place and leaves[0] is x:
            if open_ and not met:
                return _note_change(func, x, args, kwargs)
            # On a copy: the record's output stays what it is.
            first = x.changed = settled(x).clone()
            args, kwargs = tree_map(
                lambda y: first if y is x else settled(y), (args, kwargs)
            )
            return func(*args, **kwargs)
        # What changes an ordinary tensor must not be run again.
        in_place = in_place or (name[:3] == "__i" and leaves[0] is not x)
        open_ = open_ and not in_place
        if name in _BROADCAST and not in_place and not met:
            if open_:
                return _note(_OUT_OF_PLACE.get(name, func), x, args, kwargs)
            if all(map(seems_shared, mine)):
                return _join(_OUT_OF_PLACE.get(name, func), mine, args, kwargs)
        if open_ and name in ("expand", "expand_as", "repeat", "broadcast_to"):
            return _expand(func, name, x, args, kwargs)
        if open_ and (name in _UNARY or name in _TRANSPOSES):
            return _note(func, x, args, kwargs)
        if open_ and name not in _BROADCAST and not x.source.guess(_shape(x)):
            if name in _PRODUCTS and any(_is_batch([y], y.dim(), x) for y in others):
                return _product(func, args, kwargs, x.source.batch_size)
            if not any(_depends(y, x) for y in others) and not _random(name):
                return _note(func, x, args, kwargs)
        if leaves[0] is x:
            func = _OUT_OF_PLACE.get(name, func)
        alone = not met and not any(_may_hold_samples(y, x) for y in others)
        if alone and not in_place and all(map(_is_shared, mine)):
            return _apart(func, mine, args, kwargs)
        rank = None
        if name in _BROADCAST:
            rank = max(len(_shape(y)) for y in leaves)
        real = tree_map(lambda y: _settle(y, rank, others), (args, kwargs))
        if in_place or not any(map(_is_shared, mine)):
            return func(*real[0], **real[1])
        shapes = None
        if name in _BROADCAST:
            shapes = [tuple(torch.broadcast_shapes(*map(_shape, leaves)))]
        return _met(x, func, real, (args, kwargs), shapes)


def _is_shared(x: Undecided) -> bool:
    """Whether one value for all samples is, or is going to be, what it stands for."""
    if x.changed is not None:
        return False
    return x.source.batched is False or seems_shared(x)


def _may_hold_samples(y: torch.Tensor, x: Undecided) -> bool:
    return _depends(y, x) and not graph.only_weights(y)


def shared(value: torch.Tensor, like: torch.Tensor, source: Source) -> Undecided:
    """
    What stands for ``value``, ``[B, *shape]``, where the model goes on with ``like``,
    ``[*shape]``: it must not see another shape than the one it computes with.
    """
    of = Source(like, source.record, source.batch_size, source.name)
    of.batched, of._recorded = False, value
    return _wrap(like, of, lambda output: output)


def _apart(func: Callable, mine: List[Undecided], args: tuple, kwargs: dict) -> Any:
    """An op that meets no batch, on each of the copies."""
    leaves, spec = tree_flatten(_run(func, args, kwargs))
    values = [decided(y, False) for y in mine]
    where = [i for i, y in enumerate(leaves) if isinstance(y, torch.Tensor)]

    def op(*values: torch.Tensor) -> List[torch.Tensor]:
        each = {id(y): value for y, value in zip(mine, values)}
        real = tree_map(lambda y: each.get(id(y), y), (args, kwargs))
        out = tree_leaves(func(*real[0], **real[1]))
        return [out[i] for i in where]

    results = torch.func.vmap(op, randomness="different")(*values)
    for i, value in zip(where, results):
        leaves[i] = shared(value, leaves[i], mine[0].source)
    return tree_unflatten(leaves, spec)


def _met(
    x: Undecided, func: Callable, real: Any, plain: Any, shapes: Optional[List[tuple]]
) -> Any:
    """
    An op of copies and a batch.

    Args:
        shapes: of what the op gives of the value itself, None: to be found out

    Raises:
        RuntimeError: if that can't be computed, or gives something of another shape,
            so that the batch is not where it seems to be
    """
    try:
        result, why = func(*real[0], **real[1]), ""
    except RuntimeError as error:
        result, why = None, f": {error}"
    if not why and _shapes(result) == (shapes or _shapes_of(func, *plain)):
        return result
    raise RuntimeError(
        f"{x.source.name}: saw no sample, and {getattr(func, '__name__', func)} of its "
        f"output, here of shape {_shape(x)}, can't be computed with one copy for each "
        f"sample{why}. Expand its input to [B, ...]."
    )


@torch.no_grad()
def _shapes_of(func: Callable, args: tuple, kwargs: dict) -> List[tuple]:
    """What an op of plain values gives, if possible without computing it."""

    def empty(y: Any) -> Any:
        if not isinstance(y, torch.Tensor):
            return y
        return torch.empty(_shape(y), dtype=y.dtype, device="meta")

    try:
        return _shapes(_run(func, *tree_map(empty, (args, kwargs))))
    except Exception:  # an index whose values tell the shape, say
        return _shapes(_run(func, args, kwargs))


def _shapes(value: Any) -> List[Tuple[int, ...]]:
    return [tuple(y.shape) for y in tree_leaves(value) if isinstance(y, torch.Tensor)]


# Met by these with a batch, every sample is multiplied by its own copy.
_PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "linear", "bmm", "mm"}
_OUT_OF_PLACE = {
    "__iadd__": torch.add,
    "__isub__": torch.sub,
    "__imul__": torch.mul,
    "__itruediv__": torch.div,
}


def settled(x: Any) -> Any:
    """The ordinary tensor that an undecided value stands for; others as they are."""
    return _settle(x, None, [])


def _in_place(name: str, kwargs: dict) -> bool:
    if kwargs.get("inplace"):
        return True
    return name == "__setitem__" or (name.endswith("_") and name[0] != "_")


def _run(func: Callable, args: tuple, kwargs: dict) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def seems_shared(x: Any) -> bool:
    """Whether it is a value that nothing has decided, and that looks like no batch."""
    if not isinstance(x, Undecided) or x.changed is not None:
        return False
    return x.source.batched is None and not x.source.guess(_shape(x))


def plain(x: Any) -> Any:
    """The value as it was computed, for one sample or a batch; others as they are."""
    if not isinstance(x, Undecided):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        return _noted(x.as_subclass(torch.Tensor), x)


def _wrap(plain: torch.Tensor, source: Source, op: Callable) -> Undecided:
    with torch._C.DisableTorchFunctionSubclass():
        out = plain.as_subclass(Undecided)
    out.source, out.op, out.changed = source, op, None
    return _noted(out, plain)


def _shape(x: torch.Tensor) -> Tuple[int, ...]:
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(x.shape)


def _unchanged(x: Undecided, args: tuple, kwargs: dict) -> Callable[[], None]:
    """Makes sure that an op is run again on what it was run on."""
    others = [y for y in tree_leaves((args, kwargs)) if isinstance(y, torch.Tensor)]
    versions = [(y, y._version) for y in others if not isinstance(y, Undecided)]

    def check() -> None:
        if any(y._version != version for y, version in versions):
            raise RuntimeError(
                f"{x.source.name}: a tensor that its output was combined with was "
                "changed in place afterwards. Replace the in-place op by one that "
                "returns a new tensor."
            )

    return check


def _note(func: Callable, x: Undecided, args: tuple, kwargs: dict) -> Undecided:
    """Runs an op for its shape and notes it down for the real value."""
    plain = _run(func, args, kwargs)
    unchanged = _unchanged(x, args, kwargs)

    def op(output: torch.Tensor) -> Any:
        unchanged()
        real = tree_map(
            lambda y: y.op(output) if isinstance(y, Undecided) else y, (args, kwargs)
        )
        return func(*real[0], **real[1])

    if isinstance(plain, torch.Tensor):
        return _wrap(plain, x.source, op)
    leaves, spec = tree_flatten(plain)  # several outputs, such as those of chunk
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            part = functools.partial(lambda i, output: tree_leaves(op(output))[i], i)
            leaves[i] = _wrap(leaf, x.source, part)
    return tree_unflatten(leaves, spec)


def _join(func: Callable, mine: List[Undecided], args: tuple, kwargs: dict) -> Any:
    """Of an op on values from several layers, a value to be decided like theirs."""
    plain = _run(func, args, kwargs)
    source, unchanged = mine[0].source, _unchanged(mine[0], args, kwargs)

    def record(output: torch.Tensor) -> torch.Tensor:
        batched = output.dim() == plain.dim()
        values = [decided(x, batched) for x in mine]

        def op(*values: torch.Tensor) -> torch.Tensor:
            unchanged()
            each = {id(x): value for x, value in zip(mine, values)}
            real = tree_map(lambda y: each.get(id(y), y), (args, kwargs))
            return func(*real[0], **real[1])

        return op(*values) if batched else torch.func.vmap(op)(*values)

    names = ", ".join(x.source.name for x in mine)
    joined = Source(plain, record, source.batch_size, names, source.remembered)
    return _wrap(plain, joined, lambda output: output)


def _product(func: Callable, args: tuple, kwargs: dict, batch_size: int) -> Any:
    """A product with a batch: one sample's rows with one copy, under vmap."""
    leaves, spec = tree_flatten((args, kwargs))
    dims: List[Optional[int]] = []
    for i, y in enumerate(leaves):
        mine = isinstance(y, Undecided)
        if mine:
            leaves[i] = decided(y, False)
        tensor = isinstance(y, torch.Tensor)
        batch = tensor and y.requires_grad and y.shape[:1] == (batch_size,)
        dims.append(0 if mine or batch else None)
    where = [i for i, y in enumerate(leaves) if isinstance(y, torch.Tensor)]

    def one(*tensors: torch.Tensor) -> torch.Tensor:
        mixed = list(leaves)
        for i, y in zip(where, tensors):
            mixed[i] = y
        real = tree_unflatten(mixed, spec)
        return func(*real[0], **real[1])

    in_dims = tuple(dims[i] for i in where)
    return torch.func.vmap(one, in_dims)(*(leaves[i] for i in where))


def _note_change(func: Callable, x: Undecided, args: tuple, kwargs: dict) -> Undecided:
    """Notes down an op that changes ``x`` in place; its shape stays."""
    before = x.op

    def op(output: torch.Tensor) -> torch.Tensor:
        first = before(output).clone()
        real = tree_map(
            lambda y: (
                first if y is x else y.op(output) if isinstance(y, Undecided) else y
            ),
            (args, kwargs),
        )
        func(*real[0], **real[1])
        return first

    x.op = op
    return x


def decided(x: Undecided, batched: bool) -> torch.Tensor:
    """The noted ops on the recorded output: ``[*x.shape]``, or ``[B, *x.shape]``."""
    output = x.source.recorded(batched)
    return x.op(output) if batched else torch.func.vmap(x.op)(output)


def _settle(x: Any, rank: Optional[int], others: List[torch.Tensor]) -> Any:
    """:func:`_decide`, noted as ``x`` is."""
    value = _decide(x, rank, others)
    return value if value is x else _noted(value, x)


def _noted(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """With what errors/propagation.py has noted on the other tensor."""
    if "_spread" in vars(like):
        value._spread = like._spread
    return value


def _decide(x: Any, rank: Optional[int], others: List[torch.Tensor]) -> Any:
    """
    Decides ``x`` where it meets an op.

    Args:
        rank: of the broadcast result, None for an op that does not broadcast
        others: the ordinary tensors in the op
    """
    if not isinstance(x, Undecided):
        return x
    if x.changed is not None:
        return x.changed
    shape, source = _shape(x), x.source
    if rank is not None and len(shape) < rank:
        batched = False
    elif rank is not None and shape[0] != 1 and _is_batch(others, rank, x):
        batched = True
    else:
        batched = source.guess(shape)
        return decided(x, True) if batched else _meet(x, rank, others)
    if source.batched is None:
        source.remembered[source.name] = batched
    return decided(x, True) if batched else _meet(x, rank, others)


def _meet(x: Undecided, rank: Optional[int], others: List[torch.Tensor]) -> Any:
    """The copies of a batch-less value, one for each row of the batch it meets."""
    value = _align(decided(x, False), _shape(x), rank)
    rows = {
        len(y) // x.source.batch_size
        for y in others
        if y.dim() >= value.dim() and _brings_batch(y, x)
    }
    # Windows of an image, say: several rows a sample, one sample's after the other.
    return value.repeat_interleave(max(rows), 0) if max(rows, default=1) > 1 else value


def _align(
    value: torch.Tensor, shape: Tuple[int, ...], rank: Optional[int]
) -> torch.Tensor:
    """``[B, *shape]`` so that it broadcasts as ``shape`` did, samples leading."""
    if rank is not None and rank > len(shape):
        ones = [1] * (rank - len(shape) - 1)
        return value.reshape(value.shape[0], *ones, *shape)
    if shape and shape[0] == 1:
        return value.squeeze(1)
    return value


def _is_batch(others: List[torch.Tensor], rank: int, x: Undecided) -> bool:
    """Whether one of ``others``, computed by the model, leads as a batch would."""
    sizes = (_shape(x)[:1], (x.source.batch_size,))
    return any(
        y.requires_grad
        and not isinstance(y, torch.nn.Parameter)
        and y.dim() == rank
        and y.shape[:1] in sizes
        for y in others
    )


def _depends(y: torch.Tensor, x: Undecided) -> bool:
    """Whether an operand may differ from sample to sample, or is trained."""
    return y.requires_grad or y.shape[:1] == (x.source.batch_size,)


def _random(name: str) -> bool:
    return any(part in name for part in ("dropout", "rand", "bernoulli", "normal_"))


def _brings_batch(y: torch.Tensor, x: Undecided) -> bool:
    """Whether another operand of a broadcasting op brings the batch along."""
    shape, batch_size = _shape(x), x.source.batch_size
    if isinstance(y, torch.nn.Parameter) or y.dim() < max(len(shape), 1):
        return False
    lead = y.shape[0]
    if lead == 0 or lead % batch_size:
        return False
    # A constant of the same size tells nothing: it may be one row a position.
    if y.requires_grad:
        return True
    if y.dim() == len(shape):
        return lead > 1 and (shape[0] == 1 or (lead == batch_size != shape[0]))
    return lead == batch_size


def _expand(
    func: Callable, name: str, x: Undecided, args: tuple, kwargs: dict
) -> torch.Tensor:
    """``expand`` or ``repeat`` to the batch: the explicit way to say "batch-less"."""
    plain_shape = tuple(_run(func, args, kwargs).shape)
    shape, batch_size = _shape(x), x.source.batch_size
    new = len(plain_shape) > len(shape) or shape[:1] != plain_shape[:1]
    if not new or plain_shape[0] != batch_size:
        return _note(func, x, args, kwargs)
    x.source.remembered[x.source.name] = False
    value = _align(decided(x, False), shape, len(plain_shape))
    if name == "repeat":
        return value.repeat([m // n for m, n in zip(plain_shape, value.shape)])
    return value.expand(plain_shape)
