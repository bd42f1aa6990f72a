"""What another budget would change: twice of it, or adapters of another rank."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Dict, NamedTuple, Optional

from opacus_ext.planner.budget import MOST_EPSILON, Budget
from opacus_ext.planner.candidates import Candidates
from opacus_ext.planner.noise import noise_of
from opacus_ext.planner.plan import Plan
from opacus_ext.refused import Refused


class DoubledLoss(NamedTuple):
    """What twice of a budget would change: relative decrease of the loss."""

    epsilon: float
    users: float
    flops: float


def doubled_loss(table: Candidates, flops: Optional[float] = None) -> DoubledLoss:
    """
    How much lower the best loss would be (in shares of it) with twice the epsilon,
    users or compute; nan where no loss is expected, and for an epsilon above 100.

    Args:
        table: of the budget
        flops: C at most; the budget's if not given

    Raises:
        Refused: as :meth:`Candidates.best`
    """
    budget = table.budget
    flops = budget.flops if flops is None else flops
    loss = table.best(flops).loss
    if not table.law.tells_loss:
        return DoubledLoss(math.nan, math.nan, math.nan)

    def less(other: Plan) -> float:
        if loss is None or other.loss is None:
            return math.nan
        return 1 - other.loss / loss

    def gain(larger: Budget) -> float:
        try:
            return less(Candidates(larger, table.law, table.probe).best(flops))
        except Refused:  # as when its noise would take too long
            return math.nan

    return DoubledLoss(
        epsilon=(
            gain(replace(budget, epsilon=2 * budget.epsilon))
            if 2 * budget.epsilon <= MOST_EPSILON
            else math.nan
        ),
        users=gain(replace(budget, users=2 * budget.users)),
        flops=less(table.best(2 * flops)),
    )


def doubled_noise(plan: Plan) -> Dict[str, float]:
    """
    What twice the epsilon, batch or users would take off the plan's noise-batch ratio,
    ``ratio(x) / ratio(2 x) - 1``; an epsilon above 100 is left out, and a batch of more
    than all examples.
    """
    budget, batch = plan.budget, plan.batch_size
    twice = {}
    if 2 * budget.epsilon <= MOST_EPSILON:
        twice["epsilon"] = replace(budget, epsilon=2 * budget.epsilon), batch
    twice |= {
        "batch_size": (budget, 2 * batch),
        "users": (replace(budget, users=2 * budget.users), batch),
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
    What a higher rank may learn that a lower one can't is not in them.

    Args:
        table: of a budget with ``trainable``
        rank: of the adapters that have so many
        flops: C at most; the budget's if not given

    Returns:
        of the rank, 4 and 2 times less and more, where that is whole and the law knows
        so few parameters

    Raises:
        Refused: for a rank that is not a whole number of 1 or more, and a budget
            without trainable parameters

    Example:
        >>> from opacus_ext.planner import LossModel
        >>> ends = dict(parameters=(1e9, 1e9), steps=(1000, 1100), flops=1e18)
        >>> budget = Budget(5e4, 8, 1e-6, trainable=1e6, **ends)
        >>> list(by_rank(Candidates(budget, LossModel.rule_of_thumb()), rank=2))
        [1, 2, 4, 8]
    """
    if not (rank >= 1 and rank == int(rank)):
        raise Refused(
            f"rank must be a whole number of 1 or more; got {rank!r}.",
            parameter="rank",
        )
    budget = table.budget
    flops = budget.flops if flops is None else flops
    if budget.trainable is None or budget.tuned is None:
        raise Refused(
            "Ranks are of adapters: the budget has no trainable parameters.",
            parameter="trainable",
            remedy="Pass how many parameters the adapters have.",
        )
    plans = {}
    fewer = [int(rank) // by for by in (4, 2) if rank % by == 0]
    for other in (*fewer, int(rank), 2 * int(rank), 4 * int(rank)):
        trainable = round(budget.trainable * other / rank)
        if not 1 <= trainable <= budget.tuned:
            continue
        try:
            one = replace(budget, trainable=trainable)
            plans[other] = Candidates(one, table.law, table.probe).best(flops)
        except Refused:  # the law does not know so few, or nothing can be learnt
            continue
    return plans
