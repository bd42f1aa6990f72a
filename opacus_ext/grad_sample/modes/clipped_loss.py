"""The loss of the ghost modes: a tensor whose ``backward()`` clips by sample."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch.utils._pytree import tree_map

from opacus_ext.refused import Refused, tell

T = torch.Tensor
# Functions of tensors that are the same for each sample's loss; products and quotients
# are with numbers.
_SUMS = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__", "rsub"}
_PRODUCTS = {"mul", "__mul__", "__rmul__", "neg", "__neg__"}
_QUOTIENTS = {"div", "__div__", "__truediv__"}
_LINEAR = _SUMS | _PRODUCTS | _QUOTIENTS
_IN_PLACE = {f"{name}_" for name in ("add", "sub", "mul", "div")}
# What leaves the one number that a loss is as it is.
_SAME = {"mean", "sum", "clone", "squeeze", "to", "cpu", "cuda", "float", "double"}
# What gives a number, as of a tensor that needs no gradient.
_NUMBER = {"__float__", "__int__", "__array__", "numpy", "__format__"}
_NO_SAMPLES = {"grad", "register_hook", "retain_grad"}


class ClippedLoss(torch.Tensor, DPTensorFastGradientClipping):
    """
    The mean or sum of per-sample losses, whose ``backward()`` leaves clipped sums in
    ``p.grad``.

    It is a tensor without dims and goes where one goes: it is formatted, compared,
    logged, moved, stacked. Sums and differences of such losses, and their products with
    numbers, are such losses again. Of anything else that is computed from it the
    samples are lost, and a backward pass through that is refused.

    Args:
        module: of a ghost mode, as ``make_private`` has returned it
        optimizer: the DP optimizer, whose clipping is applied
        loss_per_sample: ``[B]``
        loss_reduction: "mean" or "sum", for the value

    Example:
        >>> losses = torch.tensor([1.0, 2.0])
        >>> loss = ClippedLoss(None, None, losses) * 2
        >>> f"{loss:.1f}", loss.loss_per_sample.tolist(), loss > 2
        ('3.0', [2.0, 4.0], tensor(True))
    """

    loss_per_sample: T
    divisor: float = 1.0  # by what number it was divided
    lost: Optional[Refused] = None  # why it is but a number, after backward()

    def __new__(
        cls,
        module: Any,
        optimizer: Any,
        loss_per_sample: T,
        loss_reduction: str = "mean",
        value: Optional[T] = None,
    ) -> "ClippedLoss":
        """``value`` is that of the loss, if it is known."""
        if value is None:
            losses = loss_per_sample.detach()
            value = losses.sum() if loss_reduction == "sum" else losses.mean()
        value = value.detach()
        if loss_per_sample.requires_grad and torch.is_grad_enabled():
            value = _WithoutSamples.apply(value, _anchor)
        return value.as_subclass(cls)

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        loss_per_sample: T,
        loss_reduction: str = "mean",
        value: Optional[T] = None,
    ):
        self.module, self.optimizer = module, optimizer
        self.loss_per_sample, self.loss_reduction = loss_per_sample, loss_reduction

    def backward(  # type: ignore[override]  # its first argument is a number
        self,
        scale: float = 1.0,
        retain_graph: Optional[bool] = None,
        create_graph: bool = False,
        inputs: Optional[Sequence[T]] = None,
        gradient: Optional[T] = None,
    ) -> None:
        """
        See ``clipped_backward`` of the ghost modes (ghost.py).

        Args:
            scale: the losses are multiplied by it on the way back, and the gradients
                divided by it before they are clipped: for models that compute in
                float16, where small gradients vanish
            retain_graph: allowed; a second ``backward()`` before the step is refused

        Raises:
            Refused: with any other argument of ``Tensor.backward``
        """
        if create_graph or inputs is not None or gradient is not None:
            raise Refused(
                "backward() of a private loss takes no gradient, inputs or "
                "create_graph: it clips the gradients of all parameters by sample.",
                remedy="Call loss.backward(), and multiply the loss itself by numbers.",
            )
        if self.lost is not None:
            raise self.lost
        if self.divisor != 1:
            tell(
                self.optimizer,
                "divided",
                f"The loss was divided by {self.divisor:g} before backward(). Each "
                "sample's gradient is clipped after that: the guarantee holds, but "
                f"gradients below max_grad_norm are {self.divisor:g} times smaller "
                "against the same noise. To accumulate batches leave the division out "
                "and use opacus.utils.batch_memory_manager.BatchMemoryManager.",
            )
        self.module.clipped_backward(self.optimizer, self.loss_per_sample, scale)
        self.lost = Refused(
            "backward() a second time through the same loss.",
            remedy="Compute the loss anew, with a forward pass.",
        )
        self.loss_per_sample = self.loss_per_sample.detach()  # the graph can go

    @classmethod
    def __torch_function__(
        cls, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        """Of what is done to losses the samples are kept, where they can be."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        losses = [x for x in args if isinstance(x, ClippedLoss) and x.lost is None]
        if name in _NO_SAMPLES:
            raise _without_samples(f"{name} of a private loss")
        if name in _IN_PLACE and isinstance(args[0], ClippedLoss):
            return getattr(T, name[:-1])(*args, **kwargs)  # a new one
        with torch._C.DisableTorchFunctionSubclass():
            plain = _detached if name in _NUMBER else _plain
            value = func(*tree_map(plain, args), **tree_map(plain, kwargs))
            keeps = losses and torch.is_grad_enabled() and isinstance(value, T)
            if not keeps or value.dim():
                return value
            first = losses[0]
            if name in _SAME:
                return first._like(first.loss_per_sample, value, first.divisor)
            if name in _LINEAR and _knows_samples(name, losses, args):
                divisor = max(x.divisor for x in losses)
                if name in _QUOTIENTS and isinstance(args[1], int) and args[1] > 1:
                    divisor *= args[1]
                each = func(*tree_map(_per_sample, args), **kwargs)
                return first._like(each, value, divisor)
        return value

    def _like(self, losses: T, value: T, divisor: float) -> "ClippedLoss":
        reduction = self.loss_reduction
        new = ClippedLoss(self.module, self.optimizer, losses, reduction, value)
        new.divisor = divisor
        return new


# Opacus's arithmetic is reached as that of tensors is.
for _name in ("item", "detach", "__repr__", "__str__"):
    setattr(ClippedLoss, _name, getattr(T, _name))


class _WithoutSamples(torch.autograd.Function):
    """A value through which no gradient goes back."""

    @staticmethod
    def forward(ctx: Any, value: T, anchor: T) -> T:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: T) -> Any:
        raise _without_samples("A backward pass through what was computed from a loss")


_anchor = torch.zeros((), requires_grad=True)


def refuse_reduced(leaf: T) -> None:
    """
    Args:
        leaf: that losses depend on

    Raises:
        Refused: if a loss was multiplied by what was computed from one, as in
            ``(1 - torch.exp(-loss)) ** 2 * loss``
    """
    if leaf is _anchor:
        raise _without_samples("A product with what was computed from a loss")


def _without_samples(what: str) -> Refused:
    return Refused(
        f"{what} would not know the samples, whose gradients are clipped one by one.",
        remedy=(
            "Call backward() on the loss that the private criterion returns. It can be "
            "multiplied by numbers and added (total = total + loss) to losses of the "
            "same samples and model; anything else belongs into the criterion. For a "
            "number to log take loss.item() or loss.detach()."
        ),
    )


def _plain(x: Any) -> Any:
    if not isinstance(x, ClippedLoss):
        return x
    value = x.as_subclass(T)
    return value if x.lost is None else value.detach()


def _detached(x: Any) -> Any:
    return _plain(x).detach() if isinstance(x, T) else x


def _per_sample(x: Any) -> Any:
    known = isinstance(x, ClippedLoss) and x.lost is None
    return x.loss_per_sample if known else _plain(x)


def _knows_samples(name: str, losses: Sequence[ClippedLoss], args: tuple) -> bool:
    """Whether a function of losses is the same for each sample's."""
    first, *others = losses
    for other in others:  # one at most
        if (
            name not in _SUMS
            or other.module is not first.module
            or other.loss_reduction != first.loss_reduction
            or other.loss_per_sample.shape != first.loss_per_sample.shape
        ):
            return False
    return name not in _QUOTIENTS or isinstance(args[0], ClippedLoss)
