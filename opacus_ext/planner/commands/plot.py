"""The figures of ``opacus-ext plan --plot``."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import numpy as np

from opacus_ext.planner.plan import Candidates, Plan
from opacus_ext.planner.strategies import NoiseChoice
from opacus_ext.refused import Refused

_AXES = {
    "loss": "loss",
    "parameters": "parameters M",
    "batch_size": "batch size B",
    "steps": "steps T",
}
_POINTS = 12  # of a line


def _figure(count: int, width: float) -> Tuple[Any, Any]:
    """
    A figure, and its axes beside each other.

    Raises:
        Refused: without matplotlib
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise Refused(
            "--plot takes matplotlib, which is not installed.",
            parameter="--plot",
            remedy="pip install opacus_ext[plots]",
        ) from error
    figure = Figure(figsize=(width * count, 3.6), layout="constrained")
    return figure, figure.subplots(1, count)


def draw(path: str, plans: Sequence[Plan], tables: Sequence[Candidates]) -> None:
    """
    Draws how the best loss, size, batch and steps change with compute, a line for each
    table, and the plans as dots.

    Args:
        path: file to be written; its ending is the format
        tables: of the plans; several may have the same
    """
    names = [name for name in _AXES if getattr(plans[0], name)]
    figure, axes = _figure(len(names), 3.4)
    for table in dict.fromkeys(tables):
        own = [plan for plan, other in zip(plans, tables) if other is table]
        most = max(table.best(plan.budget.flops).flops for plan in own)
        line = table.frontier([*np.geomspace(most / 1e4, most, _POINTS)])
        budget = table.budget
        label = f"{budget.users:,.0f} users, epsilon {budget.epsilon:g}"
        for name, axis in zip(names, axes):
            points = [(x.budget.flops, getattr(x, name)) for x in line if x]
            (drawn,) = axis.plot(*zip(*points), label=label)
            dots = [(plan.flops, getattr(plan, name)) for plan in own]
            axis.plot(*zip(*dots), "o", color=drawn.get_color())
    for name, axis in zip(names, axes):
        axis.set(xscale="log", xlabel="compute in FLOPs", title=_AXES[name])
        if name != "loss":
            axis.set_yscale("log")
    axes[0].legend(fontsize="small", title="best for a compute; dots: plans")
    figure.savefig(path)


def draw_noise(path: str, choices: Sequence[NoiseChoice]) -> None:
    """
    Draws the noise in the weights after each step by the best of each strategy, and
    beside it what each strategy leaves and keeps.

    Args:
        path: file to be written; its ending is the format
        choices: of :func:`~opacus_ext.planner.strategies.noise_strategies`
    """
    figure, (by_step, by_memory) = _figure(2, 5.0)
    kinds = dict.fromkeys(type(choice.strategy) for choice in choices)
    for number, kind in enumerate(kinds):
        own = [choice for choice in choices if type(choice.strategy) is kind]
        color, memory = f"C{number}", [choice.memory for choice in own]
        for style, left in (("full", "prefix"), ("none", "last")):
            shares = [getattr(choice, left) for choice in own]
            by_memory.plot(memory, shares, "o-", color=color, fillstyle=style, lw=0.7)
        best = min(own, key=lambda choice: choice.prefix)
        for choice in dict.fromkeys((own[0], best)):
            if choice is best or choice.is_independent:
                steps = np.arange(1, choice.strategy.steps + 1)
                left_by_step = choice.noise_multiplier * choice.strategy.errors()
                shown = dict(label=choice.name, color=color, ls="-")
                if choice.is_independent:
                    shown |= dict(color="black", ls="--")
                by_step.plot(steps, left_by_step, **shown)
    by_step.set(xscale="log", yscale="log", xlabel="step")
    by_step.set_ylabel("std x batch size / (learning rate x max_grad_norm)", fontsize=8)
    by_step.set_title("noise in the weights")
    by_memory.set_xscale("symlog", linthresh=1)
    ticks = sorted({choice.memory for choice in choices})
    by_memory.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    by_memory.set(ylim=(0, None), xlabel="times the model's size that are kept")
    by_memory.set_title("share of independent noise (rings: after the last step)")
    by_memory.legend(*by_step.get_legend_handles_labels(), fontsize="small")
    figure.savefig(path)
