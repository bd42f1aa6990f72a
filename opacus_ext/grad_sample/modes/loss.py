"""The criterion and the loss of the ghost modes: ``loss.backward()`` as always."""

from __future__ import annotations

from typing import Any, Callable, NoReturn

from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)


class ClippedLoss(DPTensorFastGradientClipping):
    """Per-sample losses; ``backward()`` leaves clipped sums in ``p.grad``."""

    def backward(self, scale: float = 1.0) -> None:
        """
        See ``clipped_backward`` of the ghost modes (modes.py).

        Args:
            scale: the losses are multiplied by it on the way back, and the gradients
                divided by it before they are clipped: for models that compute in
                float16, where small gradients vanish
        """
        self.module.clipped_backward(self.optimizer, self.loss_per_sample, scale)

    def __iter__(self) -> NoReturn:
        raise TypeError(  # where torch.amp.GradScaler ends up
            "The loss of a ghost mode has no items, and no GradScaler can scale it. "
            "Call loss.backward(scale=1024.0) for a model that computes in float16."
        )


def _keeping_type(name: str) -> Callable:
    arithmetic = getattr(DPTensorFastGradientClipping, name)

    def method(self: ClippedLoss, *args: Any) -> ClippedLoss:
        out = arithmetic(self, *args)
        return ClippedLoss(
            out.module, out.optimizer, out.loss_per_sample, out.loss_reduction
        )

    method.__doc__ = arithmetic.__doc__
    return method


for _name in ("truediv", "mul", "rmul", "add", "radd", "sub", "rsub", "neg"):
    _name = f"__{_name}__"
    if hasattr(DPTensorFastGradientClipping, _name):
        setattr(ClippedLoss, _name, _keeping_type(_name))


class ClippedCriterion(DPLossFastGradientClipping):
    """
    A criterion whose loss clips per sample.

    With its ``reduction`` set to "none" the user's criterion must give one loss a
    sample, ``[B]``. Further dims ``[B, ...]`` are reduced per sample, by mean or sum
    as ``loss_reduction`` says. Losses of flattened tokens ``[B * T]`` need
    ``shape=[B, T]``, as in Opacus; positions at ``ignore_index`` do not count.
    """

    def __call__(self, *args: Any, shape: Any = None, **kwargs: Any) -> ClippedLoss:
        before = self.criterion.reduction
        try:
            loss = super().__call__(*args, shape=shape, **kwargs)
        finally:
            self.criterion.reduction = before
        losses = loss.loss_per_sample
        if losses.dim() > 1:
            losses = losses.flatten(1)
            mean = self.loss_reduction == "mean"
            losses = losses.mean(1) if mean else losses.sum(1)
        return ClippedLoss(self.module, self.optimizer, losses, self.loss_reduction)
