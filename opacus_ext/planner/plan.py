"""A plan: a configuration, what is expected of it, and how to train it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Dict, List, Optional, Tuple

from opacus_ext.planner import snippet
from opacus_ext.planner.budget import Budget


@dataclass(frozen=True)
class Plan:
    """
    A configuration, and what is expected of it.

    Attributes:
        parameters: M
        trainable: m, of them: M, if the model is trained whole
        batch_size: B
        steps: T
        examples: N, of which each is in a batch with probability B / N
        flops: C = (4 M + 2 m) B T S
        tokens_per_parameter: B T S / M
        noise_multiplier: sigma, relative to the bound of a clipped gradient
        ratio: the noise-batch ratio, sigma / B
        amplified: whether batches are Poisson samples; if not, fixed batches of every
            epoch, whose noise is lower here
        noise_norm: of the noise in the mean gradient, whose own is at most 1
        loss: in nats a token, of examples of one token a record; None of a rule of
            thumb
        kind: of the answer: "measured", "paper's law", "run without noise" or "rule of
            thumb"
        ends: which of parameters, batch_size and steps are at an end of their range,
            "lower" or "upper": the optimum lies there or beyond
        caveats: that, and what is extrapolated, for people
        advantage: of membership inference at most, delta at epsilon 0
        learning_rate: None where the law does not know
        seconds: on the probed machine; None without a probe
        interval: of the loss, 95 %; None where the law does not know
        budget: what it was planned for
    """

    parameters: int
    trainable: int
    batch_size: int
    steps: int
    examples: int
    flops: float
    tokens_per_parameter: float
    noise_multiplier: float
    ratio: float
    noise_norm: float
    amplified: bool
    loss: Optional[float]
    kind: str
    ends: Dict[str, str]
    caveats: Tuple[str, ...]
    advantage: float
    learning_rate: Optional[float]
    seconds: Optional[float]
    interval: Optional[Tuple[float, float]]
    budget: Budget

    def arguments(self) -> Dict[str, Any]:
        """
        For ``PrivacyEngine(accountant="prv_bounds").make_private``, beside module,
        optimizer, criterion and a loader of ``examples``; ``sampling`` draws batches of
        ``batch_size`` in expectation, all ``steps`` of them in one epoch.

        The noise of Poisson samples of users is checked by the accountant, whose upper
        bound is no more than epsilon, and raised a little if it must be. See
        :meth:`notes` for what the engine's own epsilon means.
        """
        return dict(self._make_private)

    @cached_property
    def _make_private(self) -> Dict[str, Any]:
        return snippet.arguments(self)

    def notes(self) -> List[str]:
        """What must hold for epsilon to be that of the budget, for people."""
        return snippet.notes(self)

    def code(self) -> str:
        """What to paste: imports, the engine, :meth:`arguments`, and the loop."""
        return snippet.code(self)

    def as_dict(self) -> Dict[str, Any]:
        """For JSON; what is unlimited is None."""
        found = asdict(self)
        found["budget"] = {
            k: None if v == math.inf else v for k, v in found["budget"].items()
        }
        found["make_private"] = snippet.plain(self.arguments())
        found["parts"] = snippet.parts(self)
        found["notes"] = self.notes()
        return found
