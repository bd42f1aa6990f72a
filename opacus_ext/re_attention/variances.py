"""The variance of a tensor's error, and the arithmetic that rules do with it."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import (
    Any,
    Iterable,
    Iterator,
    List,
    Mapping,
    NamedTuple,
    Optional,
    Sequence,
)

import torch
from torch import Tensor

from opacus_ext.private_torch import DisableTorchFunction


class Variance(NamedTuple):
    """
    The variance of a tensor's error, ``own + passed * gain``.

    All parts broadcast to the tensor. ``gain`` differs along the last dimension behind
    a linear layer, one number an output, so that queries, keys and values that come out
    of one matrix get their own variances when they are taken apart. ``excess`` is by
    how much the expectation of a square, or of what is made of squares, exceeds the
    value: a norm by hand divides by more than it shows, as those of ``moments`` do.
    """

    own: Tensor
    passed: Optional[Tensor] = None
    gain: Optional[Tensor] = None
    excess: Optional[Tensor] = None

    def every(self) -> Tensor:
        """The variance of each element."""
        if self.passed is None or self.gain is None:
            return self.own
        return self.own + self.passed * self.gain

    def token(self) -> Tensor:
        """The mean over the last dimension, ``[*, 1]``."""
        own = last_mean(self.own)
        if self.passed is None or self.gain is None:
            return own
        return torch.addcmul(own, last_mean(self.passed), mean(self.gain))


class Lost(NamedTuple):
    """In the place of a variance: the operation for which no rule fits."""

    operation: str


@contextmanager
def quietly(x: Tensor, alone: bool = True) -> Iterator[None]:
    """
    A context without gradients and the autocast of ``x``'s device, in which rules
    compute variances; with function modes if they are not ``alone``.
    """
    kind = x.device.type
    with ExitStack() as contexts:
        if alone:
            contexts.enter_context(DisableTorchFunction())
        contexts.enter_context(torch.no_grad())
        if torch.is_autocast_enabled(kind):
            contexts.enter_context(torch.autocast(kind, enabled=False))
        yield


def flat(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterable[Any]:
    """The arguments of an operation, those in lists and tuples one by one."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, (list, tuple)):
            yield from x
        else:
            yield x


def tensors(out: Any) -> List[Tensor]:
    """The tensors that an operation returned."""
    if isinstance(out, Tensor):
        return [out]
    if isinstance(out, (list, tuple)):
        return [x for x in out if isinstance(x, Tensor)]
    return []


def variance_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a tensor's variance."""
    return torch.promote_types(x.dtype, torch.float32)


def zeros(x: Tensor, shape: Any) -> Tensor:
    """The variance of what is known, in the dtype of ``x``'s variances."""
    return x.new_zeros(shape, dtype=variance_dtype(x))


def wide(x: Tensor) -> Tensor:
    """The value of a tensor, in float32 at least."""
    return x.detach().to(variance_dtype(x))


def last_mean(x: Tensor) -> Tensor:
    """The mean over the width; one dimension alone may well be the batch."""
    return x if x.dim() < 2 or x.size(-1) == 1 else mean(x)


def mean(x: Tensor) -> Tensor:
    """The mean over the last dimension, ``[*, 1]``; 0 where that is empty."""
    return x.sum(-1, keepdim=True) / max(x.size(-1), 1)


def mean_square(x: Any, like: Tensor) -> Any:
    """
    The mean square over the width, ``[*, 1]``, and of a number its square. ``x`` is
    broadcast to ``like``; if that has one dimension, there is no width.
    """
    if not isinstance(x, Tensor):
        return x**2
    if like.dim() < 2 or not x.dim() or x.size(-1) <= 1:
        return wide(x).square()
    return squares(x) / x.size(-1)


def squares(x: Tensor) -> Tensor:
    """The sum of squares over the last dimension, ``[*, 1]``."""
    return torch.linalg.vector_norm(wide(x), dim=-1, keepdim=True).square()


def compact(x: Tensor) -> Tensor:
    """A tensor that was expanded, without the repetitions."""
    for dim, (stride, size) in enumerate(zip(x.stride(), x.shape)):
        if stride == 0 and size > 1:
            x = x.narrow(dim, 0, 1)
    return x


def plus(a: Optional[Tensor], b: Optional[Tensor]) -> Optional[Tensor]:
    """A sum in which None is 0."""
    if a is None or b is None:
        return b if a is None else a
    return a + b


def dims_of(x: Tensor, dim: Any) -> List[int]:
    """The dimensions that an operation works on, from the last to the first."""
    dims = range(x.dim()) if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted({d % x.dim() for d in dims}, reverse=True)


def without_dims(variance: Tensor, dims: List[int]) -> Tensor:
    """A variance ``[*, 1]`` where dimensions, the last to the first, are gone."""
    last = variance.dim() - 1 in dims
    for dim in dims:
        variance = variance.squeeze(dim)
    return last_mean(variance) if last else variance


def tidy(known: Variance) -> Variance:
    """Without repetitions; what differs along the last dimension stays as it is."""
    return Variance(*(None if part is None else compact(part) for part in known))
