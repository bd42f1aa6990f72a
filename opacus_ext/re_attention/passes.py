"""Forward passes in which errors are tracked, and which of them is running."""

from __future__ import annotations

import inspect
import threading
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import (
    Any,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
)

import torch
from torch import Tensor, nn

from opacus_ext.grad_sample.core.vmap import saved_tensor_hooks
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.table import Table
from opacus_ext.refused import Refused


class TrackedPass(Propagation):
    """
    The propagation of one forward pass.

    It stops after the last attention, as nobody asks for what follows.

    Args:
        tracker: of the model
        errors: see :class:`~opacus_ext.re_attention.propagation.Propagation`
        table: the same
        expected: how often each attention of the model will ask; None if that is not
            known, and the pass is followed to its end

    Attributes:
        asked: the attentions that were corrected, in order
    """

    def __init__(
        self,
        tracker: Any,
        errors: Mapping[int, Tensor],
        table: Table,
        expected: Optional[Mapping[nn.Module, int]],
    ):
        super().__init__(errors, table)
        self.tracker = tracker
        self.asked: List[Optional[nn.Module]] = []
        self._packing = torch.is_grad_enabled(), saved_tensor_hooks()
        self._left: Optional[Dict[nn.Module, int]] = expected and dict(expected)

    def count(self, module: Optional[nn.Module]) -> None:
        """
        Counts an attention; the pass stops when all have asked.

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
        if self._left is None or module not in self._left:
            return
        self._left[module] -= 1
        if not self._left[module]:
            del self._left[module]
        self.stopped = not self._left

    def _forget(self, x: Any, operation: str) -> None:
        if active() is self:  # else a tracked model inside of this one follows it
            super()._forget(x, operation)


class _Running(threading.local):
    """The passes of tracked models that this thread is in, from the outermost."""

    def __init__(self) -> None:
        self.passes: List[Optional[TrackedPass]] = []


_running = _Running()


@contextmanager
def tracked(mode: Optional[TrackedPass]) -> Iterator[None]:
    """Errors are tracked within; with None they are not, whatever is around it."""
    _running.passes.append(mode)
    try:
        with mode if mode is not None else nullcontext():
            yield
    finally:
        _running.passes.pop()


def active() -> Optional[TrackedPass]:
    """The propagation of the forward pass that runs, if errors are tracked in it."""
    return _running.passes[-1] if _running.passes else None


def around() -> Optional[TrackedPass]:
    """The innermost pass that runs and tracks errors, whoever has turned it off."""
    return next((each for each in reversed(_running.passes) if each), None)


def tracking() -> bool:
    """Returns True inside of a forward pass of a tracked model, in this thread."""
    return bool(_running.passes)


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

    def plain(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward."""
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.model).forward(self.model, *args, **kwargs)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        plain = partial(self.plain, *args, **kwargs)
        return (
            plain() if self.tracker is None else self.tracker.forward(self.model, plain)
        )

    def remove(self) -> None:
        """Gives the model its forward back, or passes on if that has been wrapped."""
        self.tracker = None
        if vars(self.model).get("forward") is self:
            del self.model.forward
            if self.before is not None:
                self.model.forward = self.before
