"""Forward passes in which errors are tracked, and which of them is running."""

from __future__ import annotations

import inspect
import threading
import weakref
from functools import partial
from typing import Any, List, Mapping, Optional

import torch
from torch import Tensor, nn

from opacus_ext.grad_sample.core.vmap import saved_tensor_hooks
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.table import Table
from opacus_ext.re_attention.variances import Lost, quietly
from opacus_ext.refused import Refused


class TrackedPass(Propagation):
    """
    The propagation of one forward pass of a tracker's model.

    Attributes:
        asked: the attentions that were corrected, in order
    """

    def __init__(self, tracker: Any, errors: Mapping[int, Tensor], table: Table):
        super().__init__(errors, table)
        self.tracker = tracker
        self.asked: List[Optional[nn.Module]] = []
        self._packing = torch.is_grad_enabled(), saved_tensor_hooks()

    def key_variance(self, key: Tensor, module: Optional[nn.Module]) -> Tensor:
        """
        The variance ``[*, U, 1]`` of the keys of an attention, which counts as asked.

        Raises:
            Refused: if it is not known, or under activation checkpointing, which would
                compute the attention again where errors are not tracked
        """
        name = None if module is None else type(module).__name__
        known = self.of(key)
        if known is None or isinstance(known, Lost):
            way = " (no operation led to them)"
            if known is not None:
                way = f" by the operation {known.operation!r}"
            raise Refused(
                f"{name or 'an attention'}: the errors of keys {list(key.shape)} can't "
                f"be tracked: they are lost on the way{way}.",
                module=name,
                remedy="Add a rule with opacus_ext.re_attention.register_propagation, "
                "or use another attention.",
            )
        if self._packing != (torch.is_grad_enabled(), saved_tensor_hooks()):
            raise Refused(
                "Re-Attention under activation checkpointing: the attention would be "
                "computed again without its correction.",
                module=name,
                remedy="Turn gradient checkpointing off, or detach the tracker.",
            )
        self.asked.append(module)
        if module is not None:
            corrected[module] = self.tracker
        with quietly(key):
            return known.token()

    def __enter__(self) -> "TrackedPass":
        _running.mode = self
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        _running.mode = None
        super().__exit__(*args)


_running = threading.local()  # the pass of this thread

# Attention modules that were corrected, and by whom.
corrected: "weakref.WeakKeyDictionary[nn.Module, Any]" = weakref.WeakKeyDictionary()


def active() -> Optional[TrackedPass]:
    """The propagation of the forward pass that runs, if errors are tracked in it."""
    return getattr(_running, "mode", None)


@torch.compiler.assume_constant_result  # what is tracked is not compiled
def is_corrected(number: int, training: bool) -> bool:
    """
    True if the attention with this id is corrected. Dynamo of torch 2.11 takes no
    module for a constant, and its id it does.
    """
    for module, tracker in corrected.items():
        if id(module) == number:
            return bool(tracker.acts(training))
    return False


class TrackedForward:
    """
    In the place of a model's own ``forward``, inside of what runs it sample by sample.
    """

    def __init__(self, tracker: Any, model: nn.Module):
        self.tracker: Optional[Any] = tracker
        self.model = model
        self.__signature__ = inspect.signature(model.forward)
        self.before = vars(model).get("forward")
        model.forward = self

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.before or partial(type(self.model).forward, self.model)
        plain = partial(forward, *args, **kwargs)
        if self.tracker is None or not self.tracker.acts(self.model.training):
            return plain()
        return self.tracker.forward(self.model, plain)

    def remove(self) -> None:
        """Gives the model its forward back, or passes on if that has been wrapped."""
        self.tracker = None
        if vars(self.model).get("forward") is self:
            del self.model.forward
            if self.before is not None:
                self.model.forward = self.before
