"""Mode "auto": all samples at once, or one after the other, whichever takes less time.

Both give the same update. Short samples are run at once ("ghost_bk"), as starting
kernels takes longer than running them; of long ones each fills the machine by itself,
and "scan" has no norm to compute beside the gradient. Where it is not plain which, the
first steps of each shape of input tell: they are training steps like others.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Dict, List, Optional, Tuple

import torch

from opacus_ext.grad_sample.modes.ghost import BookKeepingHooks, BookKeepingModule

logger = logging.getLogger(__name__)

AT_ONCE, ONE_BY_ONE = "ghost_bk", "scan"
# The first time counts for neither: what is learnt of a kind of input is learnt then.
_TRIALS = AT_ONCE, AT_ONCE, ONE_BY_ONE, ONE_BY_ONE, AT_ONCE, ONE_BY_ONE
# A layer takes some 20 kernels, there and back, and each takes some seconds to start.
_START = 20 * 5e-6
_HOPELESS = 1.5  # times as long as at once


class Plan:
    """
    What is known of the ways to run batches of about one shape.

    Args:
        layers: of the model, with parameters
    """

    def __init__(self, layers: int):
        self.layers = layers
        self.times: Dict[str, List[float]] = {AT_ONCE: [], ONE_BY_ONE: []}
        self.choice: Optional[str] = None

    @property
    def way(self) -> str:
        """How the next batch is run."""
        if self.choice is not None:
            return self.choice
        return _TRIALS[sum(map(len, self.times.values()))]

    def add(self, way: str, seconds: float, size: int) -> None:
        """What a step of ``size`` samples took, and perhaps the choice."""
        self.times[way].append(seconds)
        once, each = (self.best(w) for w in (AT_ONCE, ONE_BY_ONE))
        trials = sum(map(len, self.times.values()))
        if once is not None and size * self.layers * _START > once:
            self.choice = AT_ONCE
        elif once is not None and each is not None and each > _HOPELESS * once:
            self.choice = AT_ONCE
        elif trials == len(_TRIALS):
            self.choice = AT_ONCE if once <= each else ONE_BY_ONE

    def best(self, way: str) -> Optional[float]:
        """The least time of a way, in seconds; None if it is not known yet."""
        return min(self.times[way][1:], default=None)


class _Auto:
    def add_hooks(self, **kwargs: Any) -> None:
        super().add_hooks(**kwargs)
        self.plans: Dict[tuple, Plan] = {}
        self._layers = sum(1 for m in self.engine.module.modules() if m._parameters)
        self._trial: Optional[Tuple[Plan, str, int, float]] = None
        self.engine.chooser = self

    def begin(self, inputs: Any) -> bool:
        """Whether a batch is run one sample after the other."""
        self._trial = None
        kind = inputs.kind, inputs.shapes
        plan = self.plans.get(kind)
        if plan is None:
            plan = self.plans[kind] = Plan(self._layers)
        way = plan.way
        if plan.choice is None:
            self._trial = plan, way, inputs.size, self._now()
        return way == ONE_BY_ONE

    def give_up(self) -> None:
        """Samples can't be run one by one: at once they may."""
        if self._trial is not None:
            self._trial[0].choice, self._trial = AT_ONCE, None

    def end(self) -> None:
        """After the forward pass."""
        if self._trial is not None:
            plan, way, size, start = self._trial
            self._trial = plan, way, size, self._now() - start

    def clipped_backward(
        self, optimizer: Any, losses: torch.Tensor, scale: float = 1.0
    ) -> None:
        """See mode "ghost_bk"."""
        trial, self._trial = self._trial, None
        if trial is None:
            return super().clipped_backward(optimizer, losses, scale)
        plan, way, size, forward = trial
        start = self._now()
        super().clipped_backward(optimizer, losses, scale)
        plan.add(way, forward + self._now() - start, size)
        if plan.choice is not None:
            times = ", ".join(
                f"{way} {1e3 * best:.1f} ms"
                for way in plan.times
                if (best := plan.best(way)) is not None
            )
            logger.info(
                '%s: mode "auto" is "%s" for batches like this one of %d samples (%s)',
                self.engine.describe(),
                plan.choice,
                size,
                times,
            )

    def _now(self) -> float:
        device = self.engine.anchor.device
        if device.type == "cuda":  # for the first steps alone
            torch.cuda.synchronize(device)
        return time.perf_counter()


class AutoHooks(_Auto, BookKeepingHooks):
    """Mode "auto", attached to a model that is not wrapped."""


class AutoModule(_Auto, BookKeepingModule):
    """Mode "auto", wrapped around a model."""
