"""The effect of another budget: twice of it, or adapters of another rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Dict, NamedTuple, Optional

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.budget import MOST_EPSILON, Budget
from opacus_ext.planner.candidates import Candidates
from opacus_ext.planner.noise import noise_of
from opacus_ext.planner.plan import Plan
from opacus_ext.refused import Refused


class DoubledLoss(NamedTuple):
    """Relative decrease of the loss with twice of a budget."""

    epsilon: float
    users: float
    flops: float


def _doubled(budget: Budget, name: str) -> Budget:
    given: Dict[str, Any] = {name: 2 * getattr(budget, name)}
    return replace(budget, **given)


def doubled_loss(table: Candidates, flops: Optional[float] = None) -> DoubledLoss:
    """
    Relative decrease of the best loss, within C of ``flops`` or the budget's, with
    twice the epsilon, users or compute; nan where no loss is expected, and for an
    epsilon above 100.
    """
    budget = table.budget
    flops = budget.flops if flops is None else flops
    loss = table.best(flops).loss
    if loss is None:
        return DoubledLoss(math.nan, math.nan, math.nan)

    def gain(name: str) -> float:
        try:
            larger = Candidates(_doubled(budget, name), table.law)
            return 1 - (larger.best(flops).loss or math.nan) / loss
        except Refused:  # above 100, or its noise would take too long
            return math.nan

    more_compute = table.best(2 * flops).loss or math.nan
    return DoubledLoss(gain("epsilon"), gain("users"), 1 - more_compute / loss)


def doubled_noise(plan: Plan) -> Dict[str, float]:
    """
    Relative decrease of the plan's noise-batch ratio with twice the epsilon, batch or
    users, ``ratio(x) / ratio(2 x) - 1``; without an epsilon above 100, and without a
    batch of more than all examples.
    """
    budget, batch = plan.budget, plan.batch_size
    twice = {}
    if 2 * budget.epsilon <= MOST_EPSILON:
        twice["epsilon"] = _doubled(budget, "epsilon"), batch
    twice |= {
        "batch_size": (budget, 2 * batch),
        "users": (_doubled(budget, "users"), batch),
    }
    return {
        name: plan.ratio / float(noise_of(other, size, plan.steps).ratio) - 1
        for name, (other, size) in twice.items()
        if size <= other.examples
    }


def by_rank(
    table: Candidates, rank: int, flops: Optional[float] = None
) -> Dict[int, Plan]:
    """
    The plans of adapters of other ranks, whose trainable parameters are in proportion.
    They don't include what a higher rank may learn that a lower one can't.

    Args:
        table: of a budget with ``trainable``, the parameters of adapters of ``rank``
        rank: 1 or more
        flops: C at most; the budget's by default

    Returns:
        plans of the rank, and of 4 and 2 times less and more, where that is whole and
        the law knows so few parameters

    Example:
        >>> from opacus_ext.planner import LossModel
        >>> ends = dict(parameters=(1e9, 1e9), steps=(1000, 1100), flops=1e18)
        >>> budget = Budget(5e4, 8, 1e-6, trainable=1e6, **ends)
        >>> list(by_rank(Candidates(budget, LossModel.rule_of_thumb()), rank=2))
        [1, 2, 4, 8]
    """
    checked("rank", rank, at_least=1, whole=True)
    budget = table.budget
    flops = budget.flops if flops is None else flops
    if budget.trainable is None or budget.tuned is None:
        raise Refused(
            "Ranks are of adapters: the budget has no trainable parameters.",
            parameter="trainable",
        )
    plans = {}
    fewer = [int(rank) // by for by in (4, 2) if rank % by == 0]
    for other in (*fewer, int(rank), 2 * int(rank), 4 * int(rank)):
        trainable = round(budget.trainable * other / rank)
        if not 1 <= trainable <= budget.tuned:
            continue
        try:
            one = replace(budget, trainable=trainable)
            plans[other] = Candidates(one, table.law).best(flops)
        except Refused:  # the law does not know so few, or nothing can be learned
            continue
    return plans
