"""Forward passes in which errors are tracked, and which of them is running."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager
from functools import partial
from typing import Any, Iterator, List, Mapping, Optional

import torch
from torch import Tensor, nn

from opacus_ext.grad_sample.core.vmap import saved_tensor_hooks
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.table import Table
from opacus_ext.refused import Refused


class TrackedPass(Propagation):
    """
    The propagation of one forward pass.

    Args:
        tracker: of the model
        errors: see :class:`~opacus_ext.re_attention.propagation.Propagation`
        table: the same

    Attributes:
        asked: the attentions that were corrected, in order
    """

    def __init__(self, tracker: Any, errors: Mapping[int, Tensor], table: Table):
        super().__init__(errors, table)
        self.tracker = tracker
        self.asked: List[Optional[nn.Module]] = []
        self._packing = torch.is_grad_enabled(), saved_tensor_hooks()

    def count(self, module: Optional[nn.Module]) -> None:
        """
        Counts an attention.

        Raises:
            Refused: under activation checkpointing, which would compute the attention
                again where errors are not tracked
        """
        if self._packing != (torch.is_grad_enabled(), saved_tensor_hooks()):
            raise Refused(
                "Re-Attention under activation checkpointing: the attention would be "
                "computed again without its correction.",
                module=None if module is None else type(module).__name__,
                remedy="Turn gradient checkpointing off, or detach the tracker.",
            )
        self.asked.append(module)


_running = threading.local()


@contextmanager
def tracked(mode: TrackedPass) -> Iterator[None]:
    """Errors are tracked within, by this thread."""
    _running.mode = mode
    try:
        with mode:
            yield
    finally:
        _running.mode = None


def active() -> Optional[TrackedPass]:
    """The propagation of the forward pass that runs, if errors are tracked in it."""
    return getattr(_running, "mode", None)


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
