"""The figure of ``opacus-ext plan --plot``."""

from __future__ import annotations

from typing import Any, Sequence

import numpy as np

from opacus_ext.planner.plan import Candidates, Plan
from opacus_ext.refused import Refused

_AXES = {
    "loss": "loss",
    "parameters": "parameters M",
    "batch_size": "batch size B",
    "steps": "steps T",
}
_POINTS = 12  # of a line


def draw(path: str, plans: Sequence[Plan], tables: Sequence[Candidates]) -> None:
    """
    Draws how the best loss, size, batch and steps change with compute, a line for each
    table, and the plans as dots.

    Args:
        path: file to be written; its ending is the format
        tables: of the plans; several may have the same

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
    names = [name for name in _AXES if getattr(plans[0], name)]
    figure = Figure(figsize=(3.4 * len(names), 3.6), layout="constrained")
    axes: Any = figure.subplots(1, len(names))
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
