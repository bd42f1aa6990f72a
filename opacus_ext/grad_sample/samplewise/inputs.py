"""What a model is called with, as samples."""

from __future__ import annotations

from collections import Counter
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
)

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.samplewise.compare import padded
from opacus_ext.grad_sample.samplewise.functorch import replace_tensor
from opacus_ext.grad_sample.samplewise.packed import as_one, rows_of
from opacus_ext.grad_sample.samplewise.walk import leaves_in, tensors_in
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.run import Run

Batched = Tuple[bool, int]  # whether a leaf is one a sample, and where


class Part:
    """
    Samples of one shape, side by side.

    Args:
        leaves: the arguments' leaves
        spec: their structure
        batched: for each leaf the dim of the samples, None if they share it
        size: number of samples
    """

    def __init__(
        self, leaves: List[Any], spec: Any, batched: List[Optional[int]], size: int
    ):
        self.leaves, self.spec, self.batched, self.size = leaves, spec, batched, size

    def select(self, rows: torch.Tensor) -> "Part":
        """Some of the samples."""
        leaves = [
            x if dim is None else x.index_select(dim, rows.to(x.device))
            for x, dim in zip(self.leaves, self.batched)
        ]
        return Part(leaves, self.spec, self.batched, len(rows))

    def samples(self, run: "Run") -> Tuple[tuple, dict]:
        """``(args, kwargs)`` as samples see them, each a batch of one."""
        leaves = []
        for x, dim in zip(self.leaves, self.batched):
            if dim is not None:
                inner = x.movedim(dim, 0).unsqueeze(dim + 1)
                x = run.track(run.level.wrap(inner))
            elif isinstance(x, torch.Tensor) and x.requires_grad:
                # Not made of parameters: its gradient is autograd's own.
                x = run.track(run.level.wrap(x.expand(self.size, *x.shape)))
            leaves.append(x)
        return tree_unflatten(leaves, self.spec)

    def alone(self, b: int, leaf: bool = False) -> "Alone":
        """
        One sample.

        Args:
            leaf: give it inputs of its own where gradients are asked for
        """
        leaves, own = [], []
        for x, dim in zip(self.leaves, self.batched):
            if isinstance(x, torch.Tensor):
                wanted = x.requires_grad
                x = x if dim is None else self._one(x, dim, b)
                if wanted and leaf:
                    x = x.detach().requires_grad_()
                    own.append(x)
            leaves.append(x)
        args, kwargs = tree_unflatten(leaves, self.spec)
        return Alone(*_repacked((args, kwargs)), own)

    def _one(self, x: torch.Tensor, dim: int, b: int) -> torch.Tensor:
        return x.narrow(dim, b, 1)


class Alone(NamedTuple):
    """How a model is called with one sample, and its inputs that want a gradient."""

    args: tuple
    kwargs: dict
    leaves: List[torch.Tensor]


class _Packed(NamedTuple):
    """A packed sequence of one, as a plain structure."""

    data: torch.Tensor
    length: int
    ordered: bool  # by an index


def _repacked(value: Any) -> Any:
    if isinstance(value, _Packed):
        index = [None, None]
        if value.ordered:
            index = list(torch.zeros(2, 1, dtype=torch.long, device=value.data.device))
        sizes = torch.ones(value.length, dtype=torch.long)
        return PackedSequence(value.data, sizes, *index)
    if isinstance(value, dict):
        return {name: _repacked(x) for name, x in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_repacked(x) for x in value)
    return value


class Inputs:
    """
    The arguments of one call.

    Args:
        taken: each sample's ``(args, kwargs)``, where they had to be taken apart
    """

    def __init__(
        self,
        args: tuple,
        kwargs: dict,
        part: Optional[Part],
        taken: Optional[List[Tuple[tuple, dict]]] = None,
    ):
        self.args, self.kwargs = args, kwargs
        lists = _Lists(args, kwargs)
        self.lists = bool(lists.tensors or lists.numbers)  # that may be samples
        self.part = part  # all samples, where they are given side by side
        self._taken = taken
        self.size = part.size if part is not None else len(taken)

    @property
    def kind(self) -> tuple:
        """What inputs of one kind have in common: all but sizes and values."""
        if self.part is None:
            leaves, spec = tree_flatten(self._taken[0] if self._taken else ((), {}))
            return ("taken", str(spec))
        part = self.part
        leaves = tuple(
            (
                (dim, x.dim(), x.dtype, x.requires_grad)
                if isinstance(x, torch.Tensor)
                else (type(x).__name__ if type(x) in (int, float) else repr(x)[:80])
            )
            for x, dim in zip(part.leaves, part.batched)
        )
        return (str(part.spec), leaves)

    @property
    def made_by(self) -> List[Any]:
        """The nodes of autograd that have computed what the model is given."""
        given = tensors_in((self.args, self.kwargs))
        return [x.grad_fn for x in given if x.grad_fn is not None]

    @property
    def shapes(self) -> tuple:
        """The sizes of the batch's tensors, roughly: as powers of two."""
        given = tensors_in((self.args, self.kwargs))
        return tuple(tuple(n.bit_length() for n in x.shape) for x in given)

    def parts(self) -> Iterator[Tuple[Optional[torch.Tensor], Part]]:
        """Samples of one shape together, and which of the batch they are."""
        if self.part is not None:
            yield None, self.part
            return
        groups: Dict[tuple, List[int]] = {}
        flat = [tree_flatten(each) for each in self._taken]
        seen = Counter(id(x) for leaves, _ in flat for x in leaves)
        shared = {i for i, n in seen.items() if n == self.size > 1}
        for i, (leaves, spec) in enumerate(flat):
            groups.setdefault((str(spec), _shapes(leaves)), []).append(i)
        for rows in groups.values():
            columns = list(zip(*(flat[i][0] for i in rows)))
            stacked = [_stacked(column, shared) for column in columns]
            leaves = [x for x, _ in stacked]
            batched = [dim for _, dim in stacked]
            part = Stacked(leaves, flat[rows[0]][1], batched, len(rows))
            yield torch.tensor(rows), part

    def join_raw(self, parts: List[Tuple[torch.Tensor, Any]]) -> List:
        """What samples gave, of all parts."""
        columns = list(zip(*(found for _, found in parts)))
        return [_scattered_raw(parts, c, self.size) for c in columns]

    def join(
        self,
        parts: List[Tuple[torch.Tensor, Any]],
        joins: Optional[List[Any]],
        engine: "Engine",
    ) -> None:
        """
        Makes of the tensors in the first part those of all.

        Args:
            parts: which samples, and what they gave
            joins: how the first tensors are put together of those of samples
        """
        rows = [r for r, _ in parts]
        leaves = [list(leaves_in(found)) for _, found in parts]
        if len({len(each) for each in leaves}) > 1:
            raise Refused(
                f"{engine.describe()} returns another number of tensors for some "
                "samples than for others.",
                module=engine.describe(),
                remedy="Return the same from each.",
            )
        columns = list(zip(*leaves))
        joins = list(joins or ()) + [None] * len(columns)
        joined = []
        for column, join in zip(columns, joins):
            if isinstance(column[0], PackedSequence):
                joined += zip(column[0], self._one_packed(rows, column))
            else:
                joined.append((column[0], _scattered(rows, column, join, engine)))
        for x, new in joined:
            if new is not x:
                replace_tensor(x, new)

    def _one_packed(
        self, rows: List[torch.Tensor], packs: Tuple[PackedSequence, ...]
    ) -> PackedSequence:
        given = leaves_in((self.args, self.kwargs))
        like = next((x for x in given if isinstance(x, PackedSequence)), None)
        new = as_one(packs, [r.tolist() for r in rows], like)
        return PackedSequence(torch.cat([x.data for x in packs])[new.data], *new[1:])


class Stacked(Part):
    """Samples that were taken one by one, each a batch of one."""

    def select(self, rows: torch.Tensor) -> "Part":
        """Some of the samples."""
        part = super().select(rows)
        return Stacked(part.leaves, part.spec, part.batched, part.size)

    def samples(self, run: "Run") -> Tuple[tuple, dict]:
        """``(args, kwargs)`` as samples see them."""
        leaves = [
            x if dim is None else run.track(run.level.wrap(x))
            for x, dim in zip(self.leaves, self.batched)
        ]
        return _repacked(tree_unflatten(leaves, self.spec))

    def _one(self, x: torch.Tensor, dim: int, b: int) -> torch.Tensor:
        return x[b]


def _shapes(leaves: List[Any]) -> tuple:
    return tuple(
        ((tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else repr(x))
        for x in leaves
    )


def _stacked(column: tuple, shared: Set[int]) -> Tuple[Any, Optional[int]]:
    first = column[0]
    if isinstance(first, torch.Tensor) and id(first) not in shared:
        return torch.stack(column), 0
    return first, None


def _scattered(
    rows: List[torch.Tensor], column: tuple, join: Any, engine: "Engine"
) -> torch.Tensor:
    """One tensor of the parts, as the batch has it."""
    first, how = column[0], join.how if join is not None else ""
    if how == "shared" or all(x is first for x in column):
        return first
    if how and not (engine.per_sample is not None and first.dim()):
        shares = [x * (len(r) if how != "sum" else 1) for r, x in zip(rows, column)]
        size = sum(map(len, rows)) if how != "sum" else 1
        return join.guarded((sum(shares) / size).to(first.dtype), engine)
    dim = join.dim or 0 if join is not None and not how else 0
    each = [
        x.movedim(dim, 0).unflatten(0, (len(r), -1))
        for r, x in zip(rows, column)
        if x.dim() > dim and x.shape[dim] % max(1, len(r)) == 0
    ]
    lengths = {x.shape[1] for x in each}
    if len(each) < len(rows) or len({x.dim() for x in each}) > 1:
        if all(x.shape == first.shape and torch.equal(x, first) for x in column):
            return first
        raise Refused(
            f"{engine.describe()}: its outputs have other shapes for some samples "
            f"than for others: {sorted({tuple(x.shape) for x in column})}.",
            module=engine.describe(),
            remedy="Pad them to one shape.",
        )
    each = padded(each, 0, 1)
    order = torch.cat(rows).argsort()
    if len(lengths) > 1:
        pieces = [piece for x in each for piece in x.unbind(0)]
        return torch.cat([pieces[i] for i in order.tolist()]).movedim(0, dim)
    whole = torch.cat(each)[order.to(first.device)]
    return whole.flatten(0, 1).movedim(0, dim)


def _scattered_raw(parts: List, column: tuple, size: int) -> Tuple[torch.Tensor, bool]:
    if not any(batched for _, batched in column):
        return column[0]
    rows = [r for r, _ in parts]
    each = [
        x if batched else x.expand(len(r), *x.shape)
        for r, (x, batched) in zip(rows, column)
    ]
    if len({x.shape[1:] for x in each}) > 1:
        lists = torch.cat(rows).tolist()
        pieces = [piece for x in each for piece in x.unbind(0)]
        return [pieces[lists.index(i)] for i in range(size)], True
    order = torch.cat(rows).argsort()
    return torch.cat(each)[order.to(each[0].device)], True


def read_inputs(engine: "Engine", args: tuple, kwargs: dict) -> Inputs:
    """
    Raises:
        Refused: if there is no tensor to tell the number of samples from
    """
    if engine.take is not None:
        given = kwargs if kwargs and not args else args
        taken = []
        while True:
            try:
                one = engine.take(given, len(taken))
            except IndexError:
                break
            taken.append(_as_call(one))
        return Inputs(args, kwargs, None, taken)
    leaves, spec = tree_flatten(
        (args, kwargs), is_leaf=lambda x: isinstance(x, PackedSequence)
    )
    packed = [x for x in leaves if isinstance(x, PackedSequence)]
    if packed:
        return Inputs(args, kwargs, None, _unpacked(leaves, spec, packed[0]))
    names = _names(engine, args, kwargs) if engine.shared else set()
    dim = engine.batch_dim
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    sizes = Counter(
        x.shape[dim] for x in tensors if x.dim() > dim and id(x) not in names
    )
    if not sizes:
        raise Refused(
            f"{engine.describe()} was called without a tensor that has a batch "
            "dimension, so the batch size is unknown.",
            module=engine.describe(),
            remedy="Pass its inputs as tensors [B, ...].",
        )
    size = sizes.most_common(1)[0][0]
    lists = _Lists(args, kwargs)
    engine.lists_are_samples = engine.lists_are_samples or lists.ragged
    if engine.lists_are_samples and lists.tensors:
        return Inputs(args, kwargs, None, lists.samples(len(lists.tensors[0])))
    if engine.lists_are_samples and any(len(x) == size for x in lists.numbers):
        return Inputs(args, kwargs, None, lists.samples(size))

    def where(x: Any) -> Optional[int]:
        if not isinstance(x, torch.Tensor) or id(x) in names:
            return None
        if x.dim() > dim:
            return dim if x.shape[dim] == size else None
        return 0 if x.dim() == 1 and len(x) == size else None

    batched = [where(x) for x in leaves]
    return Inputs(args, kwargs, Part(leaves, spec, batched, size))


def _as_call(one: Any) -> Tuple[tuple, dict]:
    if isinstance(one, dict):
        return (), one
    return (one if isinstance(one, tuple) else (one,)), {}


def _names(engine: "Engine", args: tuple, kwargs: dict) -> set:
    """Ids of the tensors among arguments that the user said are shared."""
    bound = engine.__signature__.bind(*args, **kwargs).arguments
    kept = {**bound, **bound.get("kwargs", {})}
    found = (tensors_in(kept[name]) for name in engine.shared if name in kept)
    return {id(x) for each in found for x in each}


class _Lists:
    """
    The lists among the arguments. Of tensors of several lengths each is a sample.
    Others are several inputs, and numbers are settings, unless the model can't be run
    so.
    """

    def __init__(self, args: tuple, kwargs: dict):
        self.args, self.kwargs = args, kwargs
        lists = [x for x in (*args, *kwargs.values()) if type(x) is list and x]
        tensor, number = torch.Tensor, (int, float)
        self.tensors = [x for x in lists if all(isinstance(y, tensor) for y in x)]
        self.numbers = [x for x in lists if all(type(y) in number for y in x)]
        first = [{y.shape[:1] for y in x} for x in self.tensors]
        same = len({len(x) for x in self.tensors}) == 1
        self.ragged = same and any(len(sizes) > 1 for sizes in first)

    def samples(self, size: int) -> List[Tuple[tuple, dict]]:
        """Each sample's arguments, of lists one."""

        def one(x: Any, i: int) -> Any:
            if any(x is y for y in (*self.tensors, *self.numbers)):
                return x[i : i + 1] if len(x) == size else x
            if isinstance(x, torch.Tensor) and x.dim() and len(x) == size:
                return x[i : i + 1]
            return x

        return [
            (
                tuple(one(x, i) for x in self.args),
                {name: one(x, i) for name, x in self.kwargs.items()},
            )
            for i in range(size)
        ]


def _unpacked(
    leaves: List[Any], spec: Any, first: PackedSequence
) -> List[Tuple[tuple, dict]]:
    size = int(first.batch_sizes[0])
    rows = {id(x): rows_of(x) for x in leaves if isinstance(x, PackedSequence)}

    def one(x: Any, i: int) -> Any:
        if isinstance(x, PackedSequence):
            data = x.data[rows[id(x)][i].to(x.data.device)]
            return _Packed(data, len(data), x.sorted_indices is not None)
        if isinstance(x, torch.Tensor):
            # States [layers, B, width] have the samples second.
            if x.dim() > 2 and x.shape[1] == size:
                return x[:, i : i + 1]
            if x.dim() and len(x) == size:
                return x[i : i + 1]
        return x

    return [tree_unflatten([one(x, i) for x in leaves], spec) for i in range(size)]
