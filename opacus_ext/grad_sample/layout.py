"""Which row of a layer's output belongs to which sample.

Shapes alone can mislead: ``[T, d]`` looks like a batch where T = B. So a layout is a
*guess by shape that is checked on the gradients themselves*: the loss of each sample
is weighted with a power of two that tells the samples apart, and the gradient of a
row must be multiplied by exactly the weight of the sample it is said to belong to.
Powers of two scale floating-point numbers without rounding, so the check is sharp. It
runs once for each way in which shapes relate to the batch size, and it also finds
models in which a sample's loss depends on another sample.
"""

from __future__ import annotations

from typing import Any, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.factors import pad_rows

_BASE = 16  # samples are told apart by digits to this base, one backward pass each


class Layout(NamedTuple):
    """
    The dim that holds the samples: "plain" when its size is B, "outer" when rows are
    sample-major in a dim of size B * k, "inner" when sample-minor, "prefix" when it
    holds the first samples only (a step of a packed sequence), "routed" when
    ``samples`` names the sample of each row of dim 0; "read" when it does so for those
    rows that had a gradient when it was read off them, and -1 for the others.
    """

    dim: int
    kind: str
    samples: Optional[torch.Tensor] = None

    @property
    def sample_major(self) -> bool:
        """Whether the rows are those of one sample after the other."""
        return self.dim in (0, -1) and self.kind in ("plain", "outer")


Key = Tuple[str, str, Tuple[str, ...]]


def relation(shape: Sequence[int], batch_size: int) -> Tuple[str, ...]:
    """
    How a shape relates to the batch size, dim by dim.

    Example:
        >>> relation((4, 8, 1, 5), batch_size=4)
        ('B', 'kB', '1', 'x')
    """
    return tuple(
        (
            "B"
            if n == batch_size
            else "1" if n == 1 else "kB" if n and n % batch_size == 0 else "x"
        )
        for n in shape
    )


class Root(NamedTuple):
    """Where a backward pass starts: a tensor, and the sample of each index of a dim."""

    tensor: torch.Tensor
    dim: int
    samples: Optional[torch.Tensor]

    def cotangent(self, code: torch.Tensor) -> torch.Tensor:
        """The weights ``[B]`` of the samples as a gradient of the tensor."""
        if self.samples is None:
            return torch.zeros_like(self.tensor)
        shape = [1] * self.tensor.dim()
        shape[self.dim] = -1
        weights = code[self.samples].view(shape)
        if self.tensor.dim() > 1:
            # Model outputs: not all entries alike, lest gradients cancel.
            generator = torch.Generator().manual_seed(0)
            some = torch.rand(self.tensor.shape, generator=generator) + 0.5
            weights = weights * some.to(weights)
        return weights.expand(self.tensor.shape).to(self.tensor.dtype)


def batch_root(tensor: torch.Tensor, dim: int, batch_size: int) -> Root:
    """A root with the samples in ``dim``, or sample-major rows in it."""
    dim = min(dim, tensor.dim() - 1)
    size = tensor.shape[dim] if dim >= 0 else 0
    if size == 0 or batch_size == 0 or size % batch_size:
        return Root(tensor, dim, None)
    samples = torch.arange(batch_size, device=tensor.device)
    return Root(tensor, dim, samples.repeat_interleave(size // batch_size))


def packed_root(sequence: PackedSequence) -> Root:
    """The root of a packed sequence, samples in the order before it was packed."""
    steps = [torch.arange(n) for n in sequence.batch_sizes.tolist()]
    data, order = sequence.data, sequence.sorted_indices
    samples = torch.cat(steps).to(data.device)
    return Root(data, 0, samples if order is None else order[samples])


def candidates(
    rows: Sequence[int], batch_size: int, packed: bool = False
) -> List[Layout]:
    """
    The layouts that the leading dims ``rows`` of a shape allow, likeliest first.

    Args:
        packed: whether steps of a packed sequence are to be expected
    """
    if batch_size == 1:
        return [Layout(-1, "plain")]  # every row belongs to the one sample
    found = [Layout(i, "plain") for i, n in enumerate(rows) if n == batch_size]
    for i, n in enumerate(rows):
        if n > batch_size and n % batch_size == 0:
            found += [Layout(i, "outer"), Layout(i, "inner")]
    if packed and rows and 0 < rows[0] < batch_size:
        found.append(Layout(0, "prefix"))
    return found


def arrange(
    x: torch.Tensor, row_dims: int, layout: Layout, batch_size: int
) -> torch.Tensor:
    """
    Brings rows in sample order.

    Args:
        x: ``[*rows, *event]``
        row_dims: number of dims in ``rows``

    Returns:
        ``[B, T, *event]``, a view where possible.
    """
    if layout.dim == -1:
        return x.reshape(1, -1, *x.shape[row_dims:])
    dim = layout.dim
    if layout.samples is not None:
        x = _collect(x, layout.samples, batch_size)
        return x.flatten(1, row_dims)
    if layout.kind == "prefix":
        rest = x.new_zeros(batch_size - len(x), *x.shape[1:])
        x = torch.cat([x, rest])
    elif layout.kind != "plain":
        k = x.shape[dim] // batch_size
        split = (batch_size, k) if layout.kind == "outer" else (k, batch_size)
        x, row_dims = x.unflatten(dim, split), row_dims + 1
        dim += layout.kind == "inner"
    x = x.movedim(dim, 0) if dim else x
    return x.flatten(1, row_dims - 1) if row_dims > 1 else x.unsqueeze(1)


def _collect(x: torch.Tensor, samples: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Rows ``[N, ...]`` by sample: ``[B, most rows of one, ...]``, zeros after them."""
    known = samples >= 0
    return pad_rows(x[known], samples[known], batch_size)


def code_weights(
    batch_size: int, dtype: torch.dtype, device: torch.device
) -> List[torch.Tensor]:
    """
    Weights ``[B]``, all powers of two, that together tell all samples apart; the
    first are ones.
    """
    codes = [torch.ones(batch_size, dtype=dtype, device=device)]
    rest = torch.arange(batch_size, device=device)
    while bool((rest > 0).any()):
        digit = (rest % _BASE - _BASE // 2).to(torch.float64)
        codes.append(torch.exp2(digit).to(dtype))
        rest = rest // _BASE
    return codes


class Evidence:
    """What the probing passes showed of one call of a layer: |gradient| a row."""

    def __init__(
        self,
        name: str,
        shape: torch.Size,
        row_dims: int,
        packed: bool = False,
        routed: Optional[torch.Tensor] = None,
    ):
        self.name = name
        self.routed = routed
        self.above: Any = None  # the call whose rows were gathered for this one
        self.packed = packed
        self.shape = shape
        self.row_dims = row_dims
        self.seen: List[torch.Tensor] = []
        self.eps = 0.0

    def add(self, grad: torch.Tensor) -> None:
        """Adds the output gradient ``[*rows, *event]`` of one more probing pass."""
        wide = grad if grad.dtype is torch.float64 else grad.float()
        wide = wide.abs()
        if grad.dim() > self.row_dims:
            wide = wide.flatten(self.row_dims).sum(-1)
        self.eps = torch.finfo(grad.dtype).eps
        self.seen.append(wide)

    def decide(self, codes: List[torch.Tensor]) -> Tuple[Optional[Layout], bool]:
        """
        Returns:
            The layout, and whether there was no other choice; None where neither the
            shape nor a gradient tells.

        Raises:
            ValueError: if no layout agrees with the gradients
        """
        batch_size = len(codes[0])
        if self.row_dims and self.shape[0] == 0:  # an expert without a token
            none = torch.zeros(0, dtype=torch.long, device=codes[0].device)
            return Layout(0, "read", none), False
        found = candidates(self.shape[: self.row_dims], batch_size, self.packed)
        if self.routed is not None:
            found = [Layout(0, "routed", self.routed), *found]
        fits = [layout for layout in found if self._fits(layout, codes)]
        if not self.seen and len(found) != 1:
            return None, False  # no gradient reached it, and the shape can't tell
        if fits:
            return fits[0], len(fits) == 1 or fits[0].kind == "routed"
        read = self._read(codes)
        if read is not None and self._fits(read, codes):
            return read, False  # true of this step only
        raise ValueError(
            f"{self.name}: its output of shape {tuple(self.shape)} holds rows that "
            f"can't be assigned to the {batch_size} samples of the batch. Either the "
            "loss of a sample depends on other samples (BatchNorm, a statistic or a "
            "loss term over the batch), and then no per-sample gradient exists: "
            "opacus_ext.check_per_sample_gradients(model, batch, loss_fn) tells. Or "
            "the rows are in another order than batch-first, flattened or sequence-"
            "first: reshape the layer's input to [B, ..., features]. Or the output is "
            "the same for all samples and only looks like a batch: give the layer's "
            "input a leading dimension of 1, or expand it to [B, ...]."
        )

    def _read(self, codes: List[torch.Tensor]) -> Optional[Layout]:
        """The sample of each row of dim 0, as the weights in its gradients tell."""
        if not self.seen or not self.row_dims:
            return None
        first, *others = (s.unsqueeze(-1).flatten(1).sum(1) for s in self.seen)
        samples = torch.zeros_like(first, dtype=torch.long)
        for i, got in enumerate(others):
            digit = torch.log2(got / first).nan_to_num(-_BASE // 2).round()
            digit = digit.clamp(-_BASE // 2, _BASE // 2 - 1).long() + _BASE // 2
            samples += digit * _BASE**i
        samples = samples.clamp(max=len(codes[0]) - 1)
        return Layout(0, "read", samples.masked_fill(first == 0, -1))

    def _fits(self, layout: Layout, codes: List[torch.Tensor]) -> bool:
        batch_size = len(codes[0])
        rows = [arrange(s, self.row_dims, layout, batch_size) for s in self.seen]
        # Exact but for sums whose order a device does not fix.
        rtol = min(64 * self.eps, 1e-2)
        largest = max((float(s.max()) for s in rows[:1] if s.numel()), default=0.0)
        atol = 16 * self.eps * largest
        for code, got in zip(codes[1:], rows[1:]):
            weight = code.to(got.dtype)[:, None]
            wrong = (got - weight * rows[0]).abs() > weight * (rtol * rows[0] + atol)
            if bool(wrong.any()):
                return False
        return True
