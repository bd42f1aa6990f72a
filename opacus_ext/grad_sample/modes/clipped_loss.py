"""The loss of the ghost modes: a tensor whose ``backward()`` clips by sample."""

from __future__ import annotations

from typing import Any, Callable, Optional, Sequence

import torch
from opacus.utils.fast_gradient_clipping_utils import DPTensorFastGradientClipping
from torch.utils._pytree import tree_map

from opacus_ext.misuse import tell
from opacus_ext.refused import Refused

# Functions of tensors that are the same for each sample's loss, by their names, with
# what they are called otherwise; those of two arguments know at most one loss, but for
# sums and differences.
_SUMS = {"add", "__add__", "__radd__", "sub", "subtract", "__sub__", "__rsub__", "rsub"}
_PRODUCTS = {"mul", "multiply", "__mul__", "__rmul__"}
_QUOTIENTS = {"div", "divide", "true_divide", "__div__", "__truediv__"}
_SIGNS = {"neg", "negative", "__neg__", "positive", "__pos__"}
_LINEAR = _SUMS | _PRODUCTS | _QUOTIENTS | _SIGNS
_IN_PLACE = {f"{name}_" for name in ("add", "sub", "mul", "div")}
# What leaves the one number that a loss is as it is.
_SAME = set("mean sum clone squeeze contiguous to cpu cuda float double".split())
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

    loss_per_sample: torch.Tensor
    divisor: float = 1.0  # by what number it was divided
    lost: Optional[Refused] = None  # why it is but a number, after backward()

    def __new__(
        cls,
        module: Any,
        optimizer: Any,
        loss_per_sample: torch.Tensor,
        loss_reduction: str = "mean",
        value: Optional[torch.Tensor] = None,
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
        loss_per_sample: torch.Tensor,
        loss_reduction: str = "mean",
        value: Optional[torch.Tensor] = None,
    ):
        self.module, self.optimizer = module, optimizer
        self.loss_per_sample, self.loss_reduction = loss_per_sample, loss_reduction

    def backward(  # type: ignore[override]  # its first argument is a number
        self,
        scale: float = 1.0,
        retain_graph: Optional[bool] = None,
        create_graph: bool = False,
        inputs: Optional[Sequence[torch.Tensor]] = None,
        gradient: Optional[torch.Tensor] = None,
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
            function = getattr(torch.Tensor, name[:-1])
            return args[0]._become(function(*args, **kwargs))
        with torch._C.DisableTorchFunctionSubclass():
            if name in _NUMBER:
                args = _each(_detached, args)
            given = tree_map(_plain, kwargs) if kwargs else kwargs
            value = func(*_each(_plain, args), **given)
            if not losses or not torch.is_grad_enabled():
                return value
            if name in _SAME and isinstance(value, torch.Tensor) and not value.dim():
                return losses[0]._like(losses[0].loss_per_sample, value)
            if name in _LINEAR and _knows_samples(name, losses, args):
                each = _each(_per_sample, args)
                found = losses[0]._like(func(*each, **kwargs), value)
                found.divisor = max(x.divisor for x in losses)
                if name in _QUOTIENTS and isinstance(args[1], int) and args[1] > 1:
                    found.divisor *= args[1]
                return found
        return value

    def _like(self, losses: torch.Tensor, value: torch.Tensor) -> "ClippedLoss":
        known = None if value.dim() else value  # each sample has its own weight
        new = ClippedLoss(
            self.module, self.optimizer, losses, self.loss_reduction, known
        )
        new.divisor = self.divisor
        return new

    def _become(self, other: torch.Tensor) -> "ClippedLoss":
        """Takes over another's value and samples, as operations in place do."""
        with torch._C.DisableTorchFunctionSubclass():
            _plain(self).data.copy_(_detached(other))  # autograd does not look
        if isinstance(other, ClippedLoss):
            self.loss_per_sample, self.divisor = other.loss_per_sample, other.divisor
            self.lost = None
        elif torch.is_grad_enabled():
            self.lost = _without_samples("A total of losses")
        return self


# Opacus's arithmetic is reached as that of tensors is.
for _name in ("item", "detach", "__repr__", "__str__"):
    setattr(ClippedLoss, _name, getattr(torch.Tensor, _name))


class _WithoutSamples(torch.autograd.Function):
    """A value through which no gradient goes back."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        raise _without_samples("A backward pass through what was computed from a loss")


_anchor = torch.zeros((), requires_grad=True)


def refuse_reduced(function: Any) -> None:
    """
    Args:
        function: of a node that losses depend on

    Raises:
        Refused: if a loss was multiplied by what was computed from one, as in
            ``(1 - torch.exp(-loss)) ** 2 * loss``
    """
    if function is _WithoutSamples:
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


def _each(function: Callable, args: tuple) -> tuple:
    if any(isinstance(x, (list, tuple, dict)) for x in args):
        return tree_map(function, args)
    return tuple(map(function, args))  # seldom anything else, and faster


def _plain(x: Any) -> Any:
    if not isinstance(x, ClippedLoss):
        return x
    value = x.as_subclass(torch.Tensor)
    return value if x.lost is None else value.detach()


def _detached(x: Any) -> Any:
    return _plain(x).detach() if isinstance(x, torch.Tensor) else x


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
