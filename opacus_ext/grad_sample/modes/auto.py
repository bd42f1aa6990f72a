"""Mode "auto": "ghost_bk" or "scan", whichever is faster; both give the same update.

Short samples run together ("ghost_bk"), as launching kernels takes longer than running
them. A long sample uses the whole device by itself, and "scan" needs no ghost norms. If
neither is certain, the first steps are timed.

On a GPU the steps of a user's loop are compiled, as starting kernels is most of their
time there. There are at most four programs, and a smaller batch is filled up to the
size of one.
"""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch
from torch import nn

from opacus_ext.grad_sample.adapter.model import PrivateOptimizer
from opacus_ext.grad_sample.adapter.settings import settings_of
from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.grad_sample.modes.ghost import BookKeeping

logger = logging.getLogger(__name__)

AT_ONCE, ONE_BY_ONE = "ghost_bk", "scan"
# The first time of each mode includes set-up, and is not used.
_TRIALS = AT_ONCE, AT_ONCE, ONE_BY_ONE, ONE_BY_ONE, AT_ONCE, ONE_BY_ONE
# A layer launches about 20 kernels in forward and backward, 5 microseconds each.
_START = 20 * 5e-6
_COMPILED_ON = {"cuda"}  # types of devices
_PROGRAMS = 4


class Choice:
    """Chooses the faster mode for a model with this number of layers."""

    def __init__(self, layers: int):
        self.layers = layers
        self.times: dict[str, list[float]] = {AT_ONCE: [], ONE_BY_ONE: []}
        self.way: str | None = None

    @property
    def _steps(self) -> int:
        return sum(map(len, self.times.values()))

    @property
    def next(self) -> str:
        """The mode of the next batch."""
        return self.way or _TRIALS[self._steps]

    def best(self, way: str) -> float:
        """Returns the shortest time for a sample so far, in seconds."""
        return min(self.times[way][1:], default=math.inf)

    def add(self, seconds: float, size: int) -> None:
        """Adds the time of a step of ``size`` samples, and chooses if possible."""
        self.times[self.next].append(seconds / size)
        # "scan" launches the kernels of each sample, which alone takes longer.
        if self.best(AT_ONCE) < self.layers * _START:
            self.way = AT_ONCE
        elif self._steps == len(_TRIALS):
            self.way = min(self.times, key=self.best)


class Auto(BookKeeping):
    """Mode "auto": "ghost_bk" or "scan", whichever takes less time."""

    def add_hooks(self, **kwargs: Any) -> None:
        """Intercepts the model's calls, and times them."""
        super().add_hooks(**kwargs)
        layers = [module for module in self._module.modules() if module._parameters]
        self.choice = Choice(len(layers))
        # All processes must choose the same. What vmap can't run runs one by one here,
        # too.
        if self.private.is_shared_out:
            self.choice.way = AT_ONCE
        self._start: float | None = None
        self._began = False

    def begin_forward(self, size: int) -> None:
        """See :class:`~adapter.model.Mode`; passes from the second on are compiled."""
        if not self._began and self._compiles:
            # Nothing is compiled here: this is how torch tells its default settings.
            compiled: Any = torch.compile(nn.Identity())
            settings = settings_of(compiled)
            if settings is not None:
                self.private.settings = settings._replace(most=_PROGRAMS)
                self.choice.way = AT_ONCE
        self._began = True
        self.private.one_by_one = self.choice.next == ONE_BY_ONE
        self._start = None
        if self.choice.way is None and size and self.private.params:
            self._start = self._now()

    @property
    def _compiles(self) -> bool:
        """True if the model can be compiled, is on a GPU, and is not compiled yet."""
        private = self.private
        devices = {p.device.type for p in private.params.values()}
        if not devices or not devices <= _COMPILED_ON:
            return False
        return private.compiles and not private.has_compiled

    def _set_grads(self, optimizer: PrivateOptimizer, total: ClippedSum) -> None:
        """Called after the backward pass of a batch."""
        super()._set_grads(optimizer, total)
        if self._start is None or not len(total.norms):
            return
        self.choice.add(self._now() - self._start, len(total.norms))
        self._start = None
        if self.choice.way is not None:
            ways = self.choice.times
            best = {way: round(1e3 * self.choice.best(way), 1) for way in ways}
            logger.info(
                '%s: mode "auto" is "%s" (milliseconds of a sample: %s)',
                self.private.describe(),
                self.choice.way,
                best,
            )

    def _now(self) -> float:
        """Returns the time when the device has finished what it was given."""
        device = next(iter(self.private.params.values())).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()
