"""The best configuration for so many users, so much privacy and so much compute.

As in "Scaling laws for differentially private language models", configurations of model
size, batch size and steps are enumerated, noise is calibrated for each, a law predicts
the loss of each, and the best is the plan.

Configurations lie on a fixed lattice, so that a larger budget contains all
configurations of a smaller one: more privacy, users or compute never plan a worse loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from opacus_ext.planner.budget import Budget, HopelessError, Range
from opacus_ext.planner.loss_model import (
    MEASURED,
    NOISE_FREE,
    PAPER,
    RULE,
    LossModel,
    compute,
)
from opacus_ext.planner.noise import advantage, noise_grid, noise_of
from opacus_ext.planner.plan import Plan
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

_NEAR_END = 1.1  # a point of the lattice of sizes, and of steps
# Points to a factor of two. Those of batches and steps divide those of sizes: at any
# size, batches and steps then leave the same share of the compute unused, which does
# not favor a size.
POINTS = {"parameters": 8, "trainable": 8, "batch_size": 4, "steps": 8}


def lattice(name: str, covered: Tuple[float, float], wanted: Range) -> np.ndarray:
    """Whole numbers of a range, the same for every budget, and its ends if given."""
    points = POINTS[name]
    low, high = covered
    if wanted is not None:
        low, high = max(low, wanted[0]), min(high, wanted[1])
        if low > high:
            given = " to ".join(f"{end:g}" for end in sorted(set(wanted)))
            raise Refused(
                f"{name}={given} is outside of what is known, {covered[0]:g} to "
                f"{covered[1]:g}.",
                parameter=name,
            )
    first = math.floor(points * math.log2(low))
    last = math.ceil(points * math.log2(high))
    values = np.round(2.0 ** (np.arange(first, last + 1) / points))
    values = values[(values >= low) & (values <= high)]
    # An end that was asked for, not one that a budget set: a larger one moves that.
    ends = [] if wanted is None else [math.ceil(wanted[0]), math.floor(wanted[1])]
    if name != "batch_size" and wanted is None:
        ends = [math.ceil(low), math.floor(high)]
    values = np.unique([*values, *(e for e in ends if low <= e <= high)])
    if not len(values):
        raise Refused(
            f"There is no whole number of {name} in [{low:g}, {high:g}].",
            parameter=name,
        )
    return values


class Near(NamedTuple):
    """Configurations about as good as the best: least and largest of each."""

    parameters: Tuple[int, int]
    batch_size: Tuple[int, int]
    steps: Tuple[int, int]
    count: int


class NotPrivate(NamedTuple):
    """The best configuration without noise."""

    parameters: int
    batch_size: int
    steps: int
    loss: float


class Candidates:
    """
    All configurations of a budget, with their noise and expected loss.

    Args:
        budget: its ``flops`` are the default of :meth:`best` and no bound here
        law: predicts the loss

    Attributes:
        parameters, trainable: ``[M]``
        batch_size: ``[B]``
        steps: ``[T]``
        ratio, noise_multiplier, amplified: ``[B, T]``
        flops: ``[M, B, T]``
        loss: ``[M, B, T]``; nan beyond the law's range

    Raises:
        Refused: for ranges that have nothing in common with the law's, and tokens
            other than the measured ones
    """

    def __init__(self, budget: Budget, law: LossModel):
        _check(budget, law)
        self.budget, self.law = budget, law
        tuned = budget.tuned
        name = "parameters" if tuned is None else "trainable"
        self.trainable = lattice(name, law.parameters, budget.trained)
        self.parameters = self.trainable if tuned is None else np.full(1, tuned)
        batches = 1, budget.examples
        self.batch_size = lattice("batch_size", batches, budget.batch_size)
        self.steps = lattice("steps", law.steps, budget.steps)
        self.noise_multiplier, self.ratio, self.amplified = noise_grid(
            budget, self.batch_size, self.steps
        )
        batch, steps = self.batch_size[:, None], self.steps[None, :]
        size, trained = (x[:, None, None] for x in (self.parameters, self.trainable))
        self.flops = compute(size, batch, steps, budget.tokens, trained)
        self.loss = np.array(law.loss(trained, batch, steps, self.ratio), dtype=float)
        self.loss = np.broadcast_to(self.loss, self.flops.shape).copy()

    def _within(self, flops: float) -> np.ndarray:
        """Losses within a compute budget; inf elsewhere, ``[M, B, T]``."""
        within = (self.flops <= flops * (1 + 1e-9)) & np.isfinite(self.loss)
        return np.where(within, self.loss, np.inf)

    def _flops(self, flops: Optional[float]) -> float:
        return self.budget.flops if flops is None else flops

    def best(self, flops: Optional[float] = None) -> Plan:
        """
        The configuration of the lowest loss within a compute budget.

        Args:
            flops: C at most; the budget's by default

        Raises:
            Refused: if no configuration is left; the message says why
        """
        flops = self._flops(flops)
        if not (self.flops <= flops * (1 + 1e-9)).any():
            raise Refused(
                f"flops={flops:.3g} is less than the smallest configuration needs, "
                f"{self.flops.min():.3g}.",
                parameter="flops",
                remedy="Allow more compute, fewer steps or smaller models.",
            )
        loss = self._within(flops)
        if np.isinf(loss).all():
            self._refuse(self.flops <= flops * (1 + 1e-9))
        # Of equal losses the cheapest.
        same = np.where(loss <= loss.min(), self.flops, np.inf)
        return self.plan(np.unravel_index(same.argmin(), same.shape), flops)

    def _refuse(self, within: np.ndarray) -> None:
        """Says why no configuration within the compute has a loss."""
        budget, law = self.budget, self.law
        ratio = np.broadcast_to(self.ratio, within.shape)[within].min()
        trained = self.trainable[:, None, None]
        if np.isfinite(law.loss(trained, 1.0, law.steps[0], ratio)).any():
            raise Refused(
                f"The {law.name} knows so many steps ({self.steps[0]:g} and more) for "
                "no configuration within these bounds, at its size and noise.",
                parameter="steps",
                remedy="Allow fewer steps, or measure longer.",
            )
        raise HopelessError(
            f"Nothing can be learned with this budget, by the {law.name}: "
            f"epsilon={budget.epsilon:g} with {budget.users:g} users leaves a "
            f"noise-batch ratio of {ratio:.2g} at the least within this compute, more "
            "than the law knows.",
            parameter="epsilon",
            remedy="More epsilon, users, compute or larger batches are needed; or "
            "measure (opacus-ext measure at larger ratios, or --noise-free).",
        )

    def plan(self, at: Sequence[Any], flops: float = math.inf) -> Plan:
        """The configuration at an index of ``loss``."""
        i, j, k = (int(x) for x in at)
        size, trained = self.parameters[i], self.trainable[i]
        batch, steps = self.batch_size[j], self.steps[k]
        law, budget = self.law, self.budget
        # The grid's noise is interpolated, so that a plan has its own.
        noise, ratio, amplified = map(float, noise_of(budget, batch, steps))
        loss = float(law.loss(trained, batch, steps, ratio))
        if not math.isfinite(loss):  # the grid's noise is lower, at the law's very edge
            loss = float(self.loss[i, j, k])
        rate = law.learning_rate and float(law.learning_rate(trained, steps, ratio))
        drawn = noise, float(batch), float(steps), bool(amplified)
        return Plan(
            parameters=int(size),
            trainable=int(trained),
            batch_size=int(batch),
            steps=int(steps),
            examples=int(budget.examples),
            flops=float(self.flops[i, j, k]),
            tokens_per_parameter=float(batch * steps * budget.tokens / size),
            noise_multiplier=noise,
            ratio=ratio,
            noise_norm=float(ratio * math.sqrt(trained)),
            amplified=bool(amplified),
            loss=None if law.kind == RULE else loss,
            kind=law.kind,
            ends={name: end for name, end, _ in self._ends((i, j, k))},
            caveats=tuple(self._caveats((i, j, k), ratio)),
            advantage=advantage(budget, *drawn),
            learning_rate=rate if rate and rate > 0 else None,
            budget=replace(budget, flops=float(flops)),
        )

    def _ends(self, at: Sequence[int]) -> Iterator[Tuple[str, str, float]]:
        """Names of ranges that a configuration is at an end of, the end, its value."""
        for name, i in zip(("parameters", "batch_size", "steps"), at):
            axis, value = getattr(self, name), getattr(self, name)[i]
            # The law may know fewer steps of this size, and of these steps fewer sizes.
            # Compute may not allow the very end: a point of the lattice beside counts.
            if name == "steps":
                axis = axis[np.isfinite(self.loss[at[0], at[1]])]
            elif name == "parameters":
                axis = axis[np.isfinite(self.loss[:, at[1], at[2]])]
            # A batch of one, or of all examples, is no end of a law's range.
            settled = axis[-1] <= axis[0] * _NEAR_END**2
            if settled or name == "batch_size" and self.budget.batch_size is None:
                continue
            if value <= axis[0] * _NEAR_END:
                yield name, "lower", axis[0]
            elif value >= axis[-1] / _NEAR_END:
                yield name, "upper", axis[-1]

    def _caveats(self, at: Tuple[int, int, int], ratio: float) -> Iterator[str]:
        """Ends of ranges and extrapolations, for people."""
        law = self.law
        size, steps = self.trainable[at[0]], self.steps[at[2]]
        trainable = "" if self.budget.trainable is None else "trainable "
        for name, end, value in self._ends(at):
            wanted = getattr(self.budget, name) or (0.0, 0.0)
            given = value in (math.ceil(wanted[0]), math.floor(wanted[1]))
            yield (
                f"{name} {'is' if name == 'batch_size' else 'are'} at the {end} end of "
                f"the range{' given' if given else ''}, {value:,.0f}: the optimum lies "
                "there or beyond."
            )
        low, high = law.known_steps[0], float(law.measured_to(size, ratio))
        if steps > high:
            yield (
                f"Runs were measured to {high:,.0f} steps; {steps:,.0f} are "
                f"extrapolated: {law.continuation}."
            )
        elif steps < low:
            yield f"{steps:,.0f} steps are fewer than were measured, {low:,.0f}."
        low, high = law.known_parameters
        if not low <= size <= high:
            yield (
                f"{size:,.0f} {trainable}parameters are outside of the measured sizes, "
                f"{low:,.0f} to {high:,.0f}: extrapolated."
            )
        batch = self.batch_size[at[1]]
        if batch < law.batch_size:
            yield (
                f"The batch of {batch:,.0f} is smaller than the {law.batch_size:,} of "
                "the measurements: what fewer examples a step lose is not counted."
            )
        if law.kind == MEASURED and self.budget.tuned is not None:
            yield (
                "Sizes of the measurements count as trainable parameters of this "
                "model: they must be runs of adapters on it."
            )
        if ratio < law.least_ratio:
            yield (
                f"The noise-batch ratio {ratio:.2g} is below the lowest measured one, "
                f"{law.least_ratio:.2g}: extrapolated."
            )

    def near(self, flops: Optional[float] = None, within: float = 0.01) -> Near:
        """The configurations whose loss is at most a share above the best one's."""
        flops = self._flops(flops)
        self.best(flops)  # or the reason why there is none
        loss = self._within(flops)
        axes = self.parameters, self.batch_size, self.steps
        at = np.nonzero(loss <= loss.min() * (1 + within))
        ends = [(int(x[i.min()]), int(x[i.max()])) for x, i in zip(axes, at)]
        return Near(*ends, len(at[0]))

    def by_batch_size(
        self,
        flops: Optional[float] = None,
        within: float = math.inf,
        most: Optional[int] = None,
    ) -> List[Plan]:
        """
        The best plan of each batch size within a compute budget: equal in epsilon, not
        in the advantage of a membership test (figure 15).

        Args:
            within: share above the best loss up to which batch sizes are included
            most: number of batch sizes at most, evenly spaced
        """
        flops = self._flops(flops)
        loss = self._within(flops)
        lowest = loss.min(axis=(0, 2))
        chosen = np.flatnonzero(
            (lowest < np.inf) & (lowest <= lowest.min() * (1 + within))
        )
        if most and len(chosen) > most:
            chosen = chosen[np.linspace(0, len(chosen) - 1, most).round().astype(int)]
        plans = []
        for j in progress(chosen, "planning by batch size"):
            i, k = np.unravel_index(loss[:, j].argmin(), loss[:, j].shape)
            plans.append(self.plan((i, j, k), flops))
        return plans

    def not_private(self, flops: Optional[float] = None) -> Optional[NotPrivate]:
        """
        The best configuration of training without noise, of this compute and physical
        batches of the measurements, as in the paper; None if the law has none.
        """
        flops, batch = self._flops(flops), self.law.batch_size
        if not batch:
            return None
        size, trained = self.parameters[:, None], self.trainable[:, None]
        steps = self.steps[None, :]
        loss = np.array(self.law.loss(trained, batch, steps, 0.0), dtype=float)
        spent = compute(size, batch, steps, self.budget.tokens, trained)
        loss = np.where((spent <= flops * (1 + 1e-9)) & np.isfinite(loss), loss, np.inf)
        i, k = np.unravel_index(loss.argmin(), loss.shape)
        if np.isinf(loss[i, k]):
            return None
        return NotPrivate(int(size[i, 0]), batch, int(steps[0, k]), float(loss[i, k]))

    def saturating(self, within: float = 0.01) -> Plan:
        """The plan of the least compute whose loss is within a share of the lowest."""
        self.best(math.inf)  # or the reason why there is none
        enough = self.loss <= np.nanmin(self.loss) * (1 + within)
        return self.best(float(self.flops[enough].min()))

    def frontier(self, flops: Sequence[float]) -> List[Optional[Plan]]:
        """The best plan at each compute budget; None where there is no plan."""
        plans: List[Optional[Plan]] = []
        for budget in flops:
            try:
                plans.append(self.best(float(budget)))
            except Refused:
                plans.append(None)
        return plans


def _check(budget: Budget, law: LossModel) -> None:
    if law.tokens and law.tokens != budget.tokens:
        raise Refused(
            f"tokens={budget.tokens}: the law was measured on examples of "
            f"{law.tokens} tokens, and says nothing of others.",
            parameter="tokens",
            remedy=f"Plan with tokens={law.tokens}, or measure.",
        )
    if budget.tuned is not None and law.kind == PAPER:
        raise Refused(
            "The paper's law is of models that are trained whole.",
            parameter="trainable",
            remedy="Plan by a rule of thumb, or by a run without noise.",
        )
    sizes = budget.trained
    if law.kind == NOISE_FREE and not (sizes and sizes[0] == sizes[1]):
        raise Refused(
            "A run without noise is of one model.",
            parameter="parameters",
            remedy="Pass its size, (M, M).",
        )
