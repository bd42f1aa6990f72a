"""Figures 1, 3, 4, 5 and 15 of "Scaling laws for differentially private language
models", of your own law and budgets. They take matplotlib (``pip install
opacus_ext[plots]``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Dict, Mapping, Sequence, Tuple

import numpy as np

try:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "Figures take matplotlib: pip install opacus_ext[plots]"
    ) from error

from opacus_ext.accountants import calibration
from opacus_ext.planner.budget import DELTA, Budget
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.plan import Candidates

_OF = {"parameters": "parameters M", "batch_size": "batch size B", "steps": "steps T"}


def allocation(
    tables: Mapping[str, Candidates], flops: Sequence[float], within: float = 0.01
) -> Figure:
    """
    Figure 1: how the best plan spends compute, beside what is about as good.

    Args:
        tables: by label, such as "epsilon 4"
        flops: compute budgets
        within: of the shaded region, by what share its losses may be higher
    """
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")
    for label, table in tables.items():
        plans = table.frontier(flops)
        known = [(c, p, table.near(c, within)) for c, p in zip(flops, plans) if p]
        if not known:
            continue
        x = [c for c, _, _ in known]
        for axis, name in zip(axes, _OF):
            (line,) = axis.plot(x, [getattr(p, name) for _, p, _ in known], label=label)
            low, high = zip(*(getattr(near, name) for _, _, near in known))
            axis.fill_between(x, low, high, alpha=0.15, color=line.get_color())
    for axis, title in zip(axes, _OF.values()):
        axis.set(xscale="log", yscale="log", xlabel="compute in FLOPs", title=title)
    axes[0].legend()
    return figure


def compute_benefit(tables: Mapping[str, Candidates], flops: Sequence[float]) -> Figure:
    """
    Figure 3: the best loss, where compute saturates (dots), and the tokens for each
    parameter, by compute.
    """
    figure, (losses, tokens) = plt.subplots(
        1, 2, figsize=(10, 3.8), layout="constrained"
    )
    for label, table in tables.items():
        plans = [p for p in table.frontier(flops) if p]
        if not plans:
            continue
        x = [p.budget.flops for p in plans]
        (line,) = losses.plot(x, [p.loss for p in plans], label=label)
        tokens.plot(x, [p.tokens_per_parameter for p in plans], label=label)
        enough = table.saturating()
        if enough.flops <= max(flops):
            losses.plot(enough.flops, enough.loss, "o", color=line.get_color())
    losses.set(xscale="log", xlabel="compute in FLOPs", ylabel="loss, nats a token")
    tokens.set(
        xscale="log", yscale="log", xlabel="compute in FLOPs", ylabel="tokens / M"
    )
    losses.legend()
    return figure


Axis = Tuple[str, Sequence[float]]

#: The planes of figure 4: two budgets that vary, and the one that does not.
PLANES: Tuple[Tuple[Axis, Axis, Dict[str, float]], ...] = (
    (
        ("batch_size", 2.0 ** np.arange(10, 23, 2)),
        ("epsilon", 2.0 ** np.arange(-5, 8, 2)),
        {"users": 2.0**24},
    ),
    (
        ("batch_size", 2.0 ** np.arange(9, 22, 2)),
        ("users", 2.0 ** np.arange(17, 30, 2)),
        {"epsilon": 4.0},
    ),
    (
        ("users", 2.0 ** np.arange(17, 30, 2)),
        ("epsilon", 2.0 ** np.arange(-5, 8, 2)),
        {"batch_size": 65536.0},
    ),
)


def synergy(
    steps: int = 16000, delta: float = DELTA, planes: Sequence = PLANES
) -> Figure:
    """
    Figure 4: how much twice of a budget lowers the noise-batch ratio (longer arrows:
    more; to the right and up the budgets of the axes), and the ratio itself (color).

    Args:
        steps: T
        delta: of the whole run
        planes: as :data:`PLANES`; cells whose batch is larger than all users stay empty
    """
    figure, axes = plt.subplots(
        1, len(planes), figsize=(4.2 * len(planes), 3.8), layout="constrained"
    )
    for axis, ((first, xs), (second, ys), fixed) in zip(np.atleast_1d(axes), planes):
        x, y = np.meshgrid(xs, ys)
        given = {
            first: x,
            second: y,
            **{k: np.full(x.shape, v) for k, v in fixed.items()},
        }
        # Twice the batch must be had, too.
        ok = 2 * given["batch_size"] <= given["users"]
        cell = {name: values[ok] for name, values in given.items()}
        more = [{**cell, name: 2 * cell[name]} for name in cell]
        at = {n: np.stack([c[n] for c in (cell, *more)]) for n in cell}
        ratio, *doubled = calibration.calibrate(
            at["epsilon"], delta, steps, at["batch_size"], at["users"]
        ).ratio
        arrows = dict(zip(cell, ratio / doubled - 1))
        color = np.full(x.shape, np.nan)
        color[ok] = np.log2(ratio)
        shown = axis.pcolormesh(
            np.log2(xs), np.log2(ys), color, cmap="YlGnBu", alpha=0.6
        )
        axis.quiver(
            np.log2(x[ok]),
            np.log2(y[ok]),
            arrows[first],
            arrows[second],
            pivot="mid",
            scale=1.5 * len(xs),  # the longest, sqrt(2), stays in its cell
            width=0.008,
        )
        figure.colorbar(shown, ax=axis, label="log2 noise-batch ratio")
        rest = ", ".join(f"{k} 2^{np.log2(v):g}" for k, v in fixed.items())
        axis.set(xlabel=f"log2 {first}", ylabel=f"log2 {second}", title=rest)
    return figure


def baselines(
    budget: Budget,
    law: LossModel,
    epsilons: Sequence[float],
    configurations: Mapping[str, Tuple[float, float, float]],
) -> Figure:
    """
    Figure 5: fixed configurations beside the best one of the same compute.

    Args:
        budget: its epsilon is not looked at
        law: what tells the loss
        epsilons: the budgets of privacy
        configurations: by label, (parameters, batch_size, steps)
    """
    figure, axis = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    tables = [Candidates(replace(budget, epsilon=e), law) for e in epsilons]

    def losses(tables: Sequence[Candidates], flops: float) -> Sequence[float]:
        plans = [table.frontier([flops])[0] for table in tables]
        return [plan.loss if plan else np.nan for plan in plans]

    for label, (size, batch, steps) in configurations.items():
        one = dict(parameters=(size,) * 2, batch_size=(batch,) * 2, steps=(steps,) * 2)
        own = [Candidates(replace(t.budget, **one), law) for t in tables]
        axis.plot(epsilons, losses(own, np.inf), "--", label=label)
    axis.plot(epsilons, losses(tables, budget.flops), "k", label="compute-optimal")
    axis.set(xscale="log", xlabel="epsilon", ylabel="loss, nats a token")
    axis.legend()
    return figure


def vulnerability(table: Candidates, flops: float) -> Figure:
    """
    Figure 15: at one epsilon, the loss and the membership-inference advantage of the
    best plan of each batch size.
    """
    plans = table.by_batch_size(flops)
    figure, axis = plt.subplots(figsize=(5.5, 3.8), layout="constrained")
    x = [p.batch_size for p in plans]
    axis.plot(x, [p.loss for p in plans], "C0o-")
    axis.set(xscale="log", xlabel="batch size")
    axis.set_ylabel("loss, nats a token", color="C0")
    other = axis.twinx()
    other.plot(x, [p.advantage for p in plans], "C3s-")
    other.set_ylabel("membership advantage", color="C3")
    axis.set_title(f"epsilon {table.budget.epsilon:g}, {flops:.2g} FLOPs")
    return figure
