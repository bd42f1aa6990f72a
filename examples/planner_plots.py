"""The figures of "Scaling laws for differentially private language models", of your own
measurements and budgets: 1, 3 to 10, 14 to 19, and one of the learning rates (C.7).
They take matplotlib (``pip install opacus_ext[plots]``).

    python -m examples.planner_plots example --out runs/plots
    python -m examples.planner_plots example --out runs/plots \\
        --ratio-runs benchmarks/results/noise-batch-ratio-cpu.jsonl

The first draws all of them but 7 to 10, of the runs that the package comes with or of a
file of ``opacus-ext measure``, and prints the errors of both parametric laws. Figures 7
to 10 are of runs of ``benchmarks/noise_batch_ratio.py``.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import numpy as np

try:
    import matplotlib.pyplot as plt
    from matplotlib.figure import Figure
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "Figures take matplotlib: pip install opacus_ext[plots]"
    ) from error

from opacus_ext.accountants import calibration
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.laws import Fit, private, private_rows, private_sigmoid, squash
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.measurements import EXAMPLE, Measurements
from opacus_ext.planner.plan import Candidates
from opacus_ext.planner.surface import Surface, best_curves, scaled_options

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
    steps: int = 16000, delta: float = 1e-8, planes: Sequence = PLANES
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


def full_grid(tables: Mapping[str, Candidates], flops: Sequence[float]) -> Figure:
    """Figure 6: the lowest loss of each model size, batch and number of steps."""
    figure, axes = plt.subplots(
        len(tables),
        3,
        figsize=(12, 3.2 * len(tables)),
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, (label, table) in zip(axes, tables.items()):
        row[0].set_ylabel(f"loss, {label}")
        loss = np.where(np.isfinite(table.loss), table.loss, np.inf)
        for most in flops:
            within = np.where(table.flops <= most, loss, np.inf)
            for i, (axis, name) in enumerate(zip(row, _OF)):
                lowest = within.min(axis=tuple({0, 1, 2} - {i}))
                lowest[np.isinf(lowest)] = np.nan
                axis.plot(getattr(table, name), lowest, label=f"{most:.0e} FLOPs")
                axis.set(xscale="log", xlabel=_OF[name])
    axes[0, 0].legend()
    return figure


def physical_batch(cells: Sequence[Any]) -> Figure:
    """
    Figures 7, 9 and 10: loss by steps at equal noise-batch ratios (columns) and sizes
    (rows), a line for each physical batch, of cells of
    ``benchmarks/noise_batch_ratio.py``.
    """
    sizes, ratios = (sorted({cell[i] for cell in cells}) for i in (0, 1))
    figure, axes = plt.subplots(
        len(sizes),
        len(ratios),
        figsize=(2.8 * len(ratios), 2.8 * len(sizes)),
        squeeze=False,
        layout="constrained",
    )
    for cell in cells:
        axis = axes[sizes.index(cell.size), ratios.index(cell.ratio)]
        axis.plot(cell.steps, cell.loss, label=f"batch {cell.batch_size}")
        axis.set(
            title=f"{cell.size}, ratio 2^{np.log2(cell.ratio):.3g}", xlabel="steps"
        )
        axis.legend()
    for axis in axes.flat:
        axis.set_visible(axis.has_data())
    return figure


def tuned(cells: Sequence[Any]) -> List[Any]:
    """For figure 8: the best of several learning rates, step by step."""
    rates: Dict[Any, List[Any]] = {}
    for cell in cells:
        rates.setdefault((*cell[:3], cell.total_steps), []).append(cell)
    return [
        of[0]._replace(loss=np.min([cell.loss for cell in of], axis=0))
        for of in rates.values()
        if len(of) > 1
    ]


def smoothing(measured: Measurements, parameters: float) -> Figure:
    """
    Figure 14: the readings of one model size (dots), their rolling means (thin), and
    the curves made monotone (thick) and continued (dashed); a color for each ratio.
    """
    options: Any = scaled_options(measured)
    surface = Surface.fit(measured, **options)
    rolling = best_curves(measured, options["min_steps"], options["window"])
    size = int(np.searchsorted(surface.parameters, parameters))
    figure, axis = plt.subplots(figsize=(8, 5), layout="constrained")
    for j, ratio in enumerate(surface.ratio):
        color, curve = f"C{j}", rolling[parameters, ratio]
        raw = measured.select(
            (measured.parameters == parameters) & (measured.ratio == ratio)
        )
        axis.plot(raw.steps, raw.loss, ".", color=color, alpha=0.2, markersize=3)
        axis.plot(curve.steps, curve.loss, color=color, linewidth=0.7)
        smooth, end = np.exp(surface.log_loss[size, :, j]), surface.measured_to[size, j]
        for part, style in ((surface.steps <= end, "-"), (surface.steps >= end, "--")):
            label = f"ratio {ratio:.2g}" if style == "-" else None
            axis.plot(
                surface.steps[part], smooth[part], style, color=color, lw=2, label=label
            )
    axis.set(xscale="log", xlabel="steps", ylabel="loss, nats a token")
    axis.set_title(f"{parameters:,.0f} parameters")
    axis.legend()
    return figure


def fitted(measured: Measurements) -> Dict[str, Fit]:
    """The paper's two parametric laws, fitted to measurements."""
    loss, inputs = private_rows(measured)
    return {
        name: law.fit(loss, **inputs)
        for name, law in (("L1", private), ("L2", private_sigmoid))
    }


def predicted(measured: Measurements, name: str, fit: Fit) -> Figure:
    """Figure 16 (of L1) and 18 (of L2): what the law predicts beside the measured."""
    loss, inputs = private_rows(measured)
    expected = fit.predict(**inputs)
    figure, axis = plt.subplots(figsize=(5.5, 4.2), layout="constrained")
    for ratio in np.unique(inputs["ratio"]):
        of = inputs["ratio"] == ratio
        axis.plot(loss[of], expected[of], ".", markersize=3, label=f"ratio {ratio:.2g}")
    ends = [loss.min(), loss.max()]
    axis.plot(ends, ends, "k--", linewidth=0.8)
    axis.set(xscale="log", yscale="log", xlabel="measured loss", ylabel="predicted")
    axis.set_title(f"{name}, mean error {np.abs(expected / loss - 1).mean():.1%}")
    axis.legend(markerscale=3)
    return figure


def by_ratio(measured: Measurements) -> Figure:
    """Figure 17: the last loss of each size by the ratio, and by the sigmoid of it."""
    surface = Surface.fit(measured, **scaled_options(measured))  # type: ignore
    steps = surface.ranges["measured_steps"][1]
    ratio = surface.ratio[surface.ratio > 0]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for size in surface.parameters:
        loss = surface.loss(size, steps, ratio)
        for axis, x in zip(axes, (ratio, np.exp(squash(ratio)))):
            axis.plot(x, loss, "o-", label=f"{size:,.0f} parameters")
    for axis, name in zip(
        axes, ("noise-batch ratio", "sigmoid((log ratio + 8) / 1.6)")
    ):
        axis.set(xscale="log", yscale="log", xlabel=name, ylabel=f"loss at {steps:g}")
    axes[0].legend()
    return figure


def best_size(measured: Measurements, fit: Fit, flops: Sequence[float]) -> Figure:
    """Figure 19: the best model size by compute, by L2, a line for each ratio."""
    low, high = measured.sizes[[0, -1]]
    sizes = np.geomspace(low / 10, high * 100, 400)[:, None]
    examples = np.asarray(flops) / (6 * sizes * measured.tokens)
    figure, axis = plt.subplots(figsize=(5.5, 4.2), layout="constrained")
    for ratio in measured.ratios:
        loss = fit.predict(parameters=sizes, examples=examples, ratio=ratio)
        style = "-" if ratio else "k--"
        axis.plot(flops, sizes[loss.argmin(0), 0], style, label=f"ratio {ratio:.2g}")
    axis.set(xscale="log", yscale="log", xlabel="compute in FLOPs", ylabel="best size")
    axis.legend()
    return figure


def learning_rates(measured: Measurements) -> Figure:
    """
    C.7: the best of the learning rates by size and ratio, after as many steps as all
    curves have; what was measured at one rate alone is empty.
    """
    surface = Surface.fit(measured, **scaled_options(measured))  # type: ignore
    steps = surface.ranges["measured_steps"][1]
    figure, axis = plt.subplots(figsize=(8, 3.8), layout="constrained")
    shown = np.full((len(surface.parameters), len(surface.ratio)), np.nan)
    for i, size in enumerate(surface.parameters):
        for j, ratio in enumerate(surface.ratio):
            of = (measured.parameters == size) & (measured.ratio == ratio)
            if len(np.unique(measured.learning_rate[of])) > 1:
                shown[i, j] = surface.learning_rate(size, steps, ratio)
                axis.text(j, i, f"{shown[i, j]:g}", ha="center", va="center")
    image = axis.imshow(np.log10(shown), cmap="YlGnBu", aspect="auto", alpha=0.6)
    figure.colorbar(image, label="log10 learning rate")
    axis.set_xticks(range(len(surface.ratio)), [f"{r:.2g}" for r in surface.ratio])
    axis.set_yticks(range(len(shown)), [f"{m:,.0f}" for m in surface.parameters])
    axis.set(xlabel="noise-batch ratio", ylabel="parameters")
    axis.set_title(f"best learning rate after {steps:g} steps")
    return figure


def plans(
    measured: Measurements, users: float, epsilons: Sequence[float], flops: np.ndarray
) -> Iterator[Tuple[str, Figure]]:
    """The figures of plans: 1, 3, 5, 6 and 15."""
    law = LossModel.of_measurements(measured, "measurements")
    budget = Budget(users, epsilons[0], 1e-8, flops=flops[-1], tokens=measured.tokens)
    tables = {
        f"epsilon {e:g}": Candidates(replace(budget, epsilon=e), law) for e in epsilons
    }
    yield "1", allocation(tables, flops)
    yield "3", compute_benefit(tables, flops)
    steps, sizes = law.known_steps[1], measured.sizes
    fixed = {
        f"{size:,.0f} parameters": (size, max(1.0, batch // 1), steps)
        for size in sizes[[-1, len(sizes) // 2, 0]]
        for batch in [flops[-1] / (6 * size * measured.tokens * steps)]
    }
    yield "5", baselines(budget, law, epsilons, fixed)
    yield "6", full_grid(tables, flops[:: max(1, len(flops) // 4)])
    yield "15", vulnerability([*tables.values()][len(tables) // 2], flops[-1])


def laws(
    measured: Measurements, fits: Mapping[str, Fit], flops: np.ndarray
) -> Iterator[Tuple[str, Figure]]:
    """The figures of measurements and laws: 14, 16 to 19 and that of C.7."""
    yield "14", smoothing(measured, measured.sizes[len(measured.sizes) // 2])
    yield "16", predicted(measured, "L1", fits["L1"])
    yield "17", by_ratio(measured)
    yield "18", predicted(measured, "L2", fits["L2"])
    yield "19", best_size(measured, fits["L2"], flops)
    yield "c7", learning_rates(measured)


def batches(path: Path) -> Iterator[Tuple[str, Figure]]:
    """The figures of runs at equal ratios: 7 (with 9 and 10) and 8."""
    from benchmarks.noise_batch_ratio import cells, read_runs

    found = cells(read_runs(path))
    ((rate, _),) = Counter(cell.learning_rate for cell in found).most_common(1)
    yield "7", physical_batch([c for c in found if c.learning_rate == rate])
    if best := tuned(found):
        yield "8", physical_batch(best)


def print_errors(measured: Measurements, fits: Mapping[str, Fit]) -> None:
    """Prints a table of the laws' mean errors by the ratio, and of the largest."""
    loss, inputs = private_rows(measured)
    errors = [np.abs(fit.predict(**inputs) / loss - 1) for fit in fits.values()]
    print("| ratio | rows |", *(f"{name} |" for name in fits))
    print("| --- | --- |", *("--- |" for _ in fits))
    for ratio in measured.ratios:
        of = inputs["ratio"] == ratio
        print(
            f"| {ratio:.2g} | {of.sum()} |", *(f"{e[of].mean():.1%} |" for e in errors)
        )
    print(f"| all | {len(loss)} |", *(f"{e.mean():.1%} |" for e in errors))
    print("| largest | |", *(f"{e.max():.1%} |" for e in errors))


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("measurements", help='a file of opacus-ext measure, or "example"')
    add("--out", type=Path, required=True, help="folder of the figures")
    add("--ratio-runs", type=Path, help="a file of benchmarks/noise_batch_ratio.py")
    add("--users", type=float, default=1e6, help="of the plans")
    add("--epsilons", type=float, nargs="+", default=[1, 4, 16], help="of the plans")
    add("--flops", type=float, nargs=2, default=(1e11, 1e15), help="least and most")
    args = parser.parse_args(arguments)
    named = args.measurements
    measured = Measurements.read(EXAMPLE if named == "example" else named)
    fits, flops = fitted(measured), np.geomspace(*args.flops, 13)
    print_errors(measured, fits)
    figures = [
        plans(measured, args.users, args.epsilons, flops),
        laws(measured, fits, flops),
        iter([("4", synergy())]),
        batches(args.ratio_runs) if args.ratio_runs else iter(()),
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    for number, figure in chain.from_iterable(figures):
        figure.savefig(args.out / f"figure{number}.png", dpi=100)
        plt.close(figure)


if __name__ == "__main__":
    main()
