"""Forward passes in which errors are tracked, and which of them is running."""

from __future__ import annotations

import inspect
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Union,
)

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus_ext.grad_sample.modes.common import engine_of
from opacus_ext.grad_sample.samplewise.checkpoint import arguments_of
from opacus_ext.grad_sample.samplewise.functorch import checkpoints
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.table import Table
from opacus_ext.re_attention.variances import Lost, Variance

if TYPE_CHECKING:
    from opacus_ext.re_attention.tracking import ErrorTracker


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
        tracker: "ErrorTracker",
        errors: Mapping[int, Tensor],
        table: Table,
        expected: Optional[Mapping[nn.Module, int]],
    ):
        super().__init__(errors, table)
        self.tracker = tracker
        self.asked: List[Optional[nn.Module]] = []
        self._left: Optional[Dict[nn.Module, int]] = expected and dict(expected)

    def count(self, module: Optional[nn.Module]) -> None:
        """Counts an attention; the pass stops when all have asked."""
        self.asked.append(module)
        if self._left is None or module not in self._left:
            return
        self._left[module] -= 1
        if not self._left[module]:
            del self._left[module]
        self.stopped = not self._left

    def checkpoint(
        self, checkpoint: Callable, function: Callable, *args: Any, **settings: Any
    ) -> Any:
        """
        Activation checkpointing: what is known of the block's inputs goes into it, and
        errors are tracked again where it is computed again.
        """
        function, args, kwargs, settings = arguments_of(function, args, settings)
        known = [self.table.variance(x) for x in _tensors(args, kwargs)]
        found: List[Union[None, Variance, Lost]] = []

        def block(*args: Any, **kwargs: Any) -> Any:
            for x, variance in zip(_tensors(args, kwargs), known):
                if variance is not None:
                    self.set(x, variance)
            if active() is self:
                output = function(*args, **kwargs)
                found[:] = [self.table.variance(x) for x in _tensors(output)]
                return output
            self.stopped, self._left = False, None
            with tracked(self):
                return function(*args, **kwargs)

        output = checkpoint(partial(block, **kwargs), *args, **settings)
        for x, variance in zip(_tensors(output), found):
            if variance is not None:
                self.set(x, variance)
        found.clear()
        return output

    def _forget(self, x: Any, operation: str) -> None:
        if active() is self:  # else a tracked model inside of this one follows it
            super()._forget(x, operation)


def _tensors(args: Any, kwargs: Mapping[str, Any] = {}) -> List[Tensor]:
    leaves = tree_leaves((args, [kwargs[name] for name in sorted(kwargs)]))
    return [x for x in leaves if isinstance(x, Tensor)]


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
        with ExitStack() as contexts:
            if mode is not None:
                contexts.enter_context(checkpoints(mode.checkpoint))
                contexts.enter_context(mode)
            yield
    finally:
        _running.passes.pop()


def active() -> Optional[TrackedPass]:
    """The propagation of the forward pass that runs, if errors are tracked in it."""
    return _running.passes[-1] if _running.passes else None


def around() -> Optional[TrackedPass]:
    """The innermost pass that runs and tracks errors, whoever has turned it off."""
    return next((each for each in reversed(_running.passes) if each), None)


def none_runs() -> bool:
    """Whether this thread is in no forward pass of a tracked model."""
    return not _running.passes


class TrackedForward:
    """
    In the place of a model's own ``forward``, inside of what runs it sample by sample.
    """

    not_compiled = "Re-Attention follows errors from its parameters to its keys"

    def __init__(self, tracker: "ErrorTracker", model: nn.Module):
        self.tracker: Optional["ErrorTracker"] = tracker
        self.model = model
        self.__signature__ = inspect.signature(model.forward)
        engine = engine_of(model)
        if engine is not None:
            self.before, engine.own = engine.own, self
        else:
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
        engine = engine_of(self.model)
        if engine is not None and engine.own is self:
            engine.own = self.before
        elif vars(self.model).get("forward") is self:
            del self.model.forward
            if self.before is not None:
                self.model.forward = self.before
