"""Mode "auto": all samples at once, or one after the other, whichever takes less time.

Both give the same update. Short samples are run at once ("ghost_bk"), as starting
kernels takes longer than running them; of long ones each fills the machine by itself,
and "scan" has no norm to compute beside the gradient. Where it is not plain which, the
first steps tell, and all that follow are run in the same way.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Callable, Dict, List, Optional

import torch
from opacus.grad_sample import (
    GradSampleHooksFastGradientClipping,
    GradSampleModuleFastGradientClipping,
)

from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.modes.common import Wrapper
from opacus_ext.grad_sample.modes.ghost import BookKeeping

T = torch.Tensor
logger = logging.getLogger(__name__)

AT_ONCE, ONE_BY_ONE = "ghost_bk", "scan"
# The first time counts for neither: what is learned of a model is learned then.
_TRIALS = AT_ONCE, AT_ONCE, ONE_BY_ONE, ONE_BY_ONE, AT_ONCE, ONE_BY_ONE
# A layer takes some 20 kernels, there and back, and each takes some seconds to start.
_START = 20 * 5e-6


class Choice:
    """
    Which way takes less time.

    Args:
        layers: of the model, with parameters
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.times: Dict[str, List[float]] = {AT_ONCE: [], ONE_BY_ONE: []}
        self.way: Optional[str] = None

    @property
    def next(self) -> str:
        """How the next batch is run."""
        return self.way or _TRIALS[sum(map(len, self.times.values()))]

    def add(self, seconds: float, size: int) -> None:
        """The time that a step took, of one sample, and perhaps the choice."""
        self.times[self.next].append(seconds / size)
        once, each = (self._best(way) for way in (AT_ONCE, ONE_BY_ONE))
        trials = sum(map(len, self.times.values()))
        if once is not None and self.layers * _START > once:
            self.way = AT_ONCE  # one by one, starting kernels alone takes longer
        elif trials == len(_TRIALS):
            self.way = AT_ONCE if once <= each else ONE_BY_ONE

    def _best(self, way: str) -> Optional[float]:
        return min(self.times[way][1:], default=None)

    def __str__(self) -> str:
        known = ((way, self._best(way)) for way in self.times)
        return ", ".join(f"{w} {1e3 * t:.1f} ms" for w, t in known if t is not None)


class Auto(BookKeeping):
    """At once or one after the other."""

    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        layers = sum(1 for m in self._module.modules() if m._parameters)
        self.choice = Choice(layers)
        self._start: Optional[float] = None
        self.private.begin = self._begin

    def _begin(self, size: int) -> None:
        """A forward pass begins."""
        self.private.one_by_one = self.choice.next == ONE_BY_ONE
        self._start = self._now() if self.choice.way is None and size else None

    def clipped_backward(self, optimizer: Any, losses: T, scale: float = 1.0) -> None:
        """See mode "ghost_bk"."""
        super().clipped_backward(optimizer, losses, scale)
        self._end(len(losses))

    def clip(
        self, optimizer: Any, samples: List[Samples], loss: Callable[[Any], T]
    ) -> T:
        """See mode "ghost_bk"."""
        losses = super().clip(optimizer, samples, loss)
        self._end(len(losses))
        return losses

    def _end(self, size: int) -> None:
        """The gradients of a batch are there."""
        if self._start is None or not size:
            return
        self.choice.add(self._now() - self._start, size)
        self._start = None
        if self.choice.way is not None:
            logger.info(
                '%s: mode "auto" is "%s" (of a sample, %s)',
                self.private.describe(),
                self.choice.way,
                self.choice,
            )

    def _now(self) -> float:
        device = next(iter(self.private.params.values())).device
        if device.type == "cuda":  # for the first steps alone
            torch.cuda.synchronize(device)
        return time.perf_counter()


class AutoHooks(Auto, GradSampleHooksFastGradientClipping):
    """Mode "auto", attached to a model that is not wrapped."""


class AutoModule(Wrapper, Auto, GradSampleModuleFastGradientClipping):
    """Mode "auto", wrapped around a model."""
