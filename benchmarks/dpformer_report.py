"""Tables and figures from the JSON lines of ``dpformer.py`` and ``figure3.py``.

    python benchmarks/dpformer_report.py table1.jsonl figure2.jsonl --figures plots/

Prints the tables; with ``--figures`` figures 2, 3, 6 and 7 are drawn into that folder
(matplotlib). Figure 6 is drawn of every experiment whose runs have curves. Of several
settings of a method (batch sizes, learning rates, ...) at an
epsilon the tables show the one with the best mean over its seeds, as the paper does.
Choosing it by the held-out items spends privacy that is not accounted for, here as
there.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Dict, Iterator, List, Optional, Tuple

from dpformer import NAMES

# NDCG@10 and HIT@10 in percent, tables 1 and 2 of the paper.
PAPER = {
    "table1": {
        "gru": [(2.26, 4.58), (2.40, 4.75), (2.81, 5.53)],
        "lstm": [(2.65, 5.08), (2.76, 5.41), (2.95, 5.55)],
        "transformer-untied": [(2.33, 4.47), (2.56, 5.11), (2.74, 5.39)],
        "transformer": [(4.57, 8.69), (7.05, 13.17), (7.99, 14.82)],
        "dpformer": [(5.88, 11.13), (7.70, 14.31), (8.42, 15.40)],
    },
    "table2": {
        "gru": [(1.13, 2.46), (1.33, 2.22), (1.47, 2.48)],
        "lstm": [(1.19, 2.46), (1.23, 2.46), (1.34, 2.51)],
        "transformer-untied": [(1.16, 2.36), (1.20, 2.38), (1.40, 2.47)],
        "transformer": [(1.37, 2.47), (1.54, 2.77), (1.57, 2.83)],
        "dpformer": [(1.64, 3.01), (1.98, 3.70), (1.99, 3.73)],
    },
}
PAPER["paper"] = PAPER["table1"]  # the same, at the paper's settings
EPSILONS = (5.0, 8.0, 10.0)
# What tells the settings of a method apart.
SETTING = (
    *("batch_size", "lr", "epochs_planned", "max_len", "dropout", "width", "depth"),
    *("clipping", "no_prior", "shares", "where", "cap", "error_scale", "share_noise"),
    *("prior", "popularity_share", "train_share", "ema"),
)
Row = Dict[str, Any]


def read(paths: List[Path]) -> List[Row]:
    rows = {}
    for path in paths:
        for line in path.read_text().splitlines():
            row = json.loads(line)
            rows[row["key"]] = row
    return list(rows.values())


def method(row: Row) -> str:
    half = row["model"] == "transformer-untied" and row["width"] == 32
    return row["model"] + ("-half" if half else "")


def prior_of(row: Row) -> str:
    """What a run starts from. Old ones say "no_prior" of popularity."""
    return row.get("prior") or ("none" if row.get("no_prior") else "popularity")


def variants(rows: List[Row]) -> Iterator[Tuple[str, List[Row]]]:
    """What tables are apart in: where runs start, and how a user's own items count."""
    for prior in dict.fromkeys(map(prior_of, rows)):
        mine = [row for row in rows if prior_of(row) == prior]
        yield f"prior {prior}", mine
        others = [row for row in mine if "own_last_ndcg_at_10" in row]
        others = [row for row in others if not row["once"]]
        last = [
            {**row, **{m: row[f"own_last_{m}"] for m in ("ndcg_at_10", "hit_at_10")}}
            for row in others
        ]
        if last:
            yield f"prior {prior}, own items last", last


def best(rows: List[Row]) -> Dict[Tuple[str, float], List[Row]]:
    """Of each method and epsilon, the runs of the setting with the best mean."""
    settings = defaultdict(list)
    for row in rows:
        setting = tuple(str(row.get(name)) for name in SETTING)
        settings[method(row), row["epsilon"], setting].append(row)
    found: Dict[Tuple[str, float], List[Row]] = {}
    for (name, epsilon, _), group in settings.items():
        before = found.get((name, epsilon))
        # One lucky seed must not beat several.
        rank = len(group) > 1, mean(r["ndcg_at_10"] for r in group)
        if before is None or rank > (
            len(before) > 1,
            mean(r["ndcg_at_10"] for r in before),
        ):
            found[name, epsilon] = group
    return found


def shown(values: List[float]) -> str:
    spread = f"{stdev(values):.2f}" if len(values) > 1 else "--"
    return f"{mean(values):5.2f} +-{spread:>5}"


def releases(rows: List[Row]) -> str:
    """NDCG@10 and HIT@10 of what is released once, as a table in Markdown."""
    lines = [
        "| epsilon | top | NDCG@10 | HIT@10 | NDCG@10, own last | HIT@10, own last |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for epsilon in sorted({row["epsilon"] for row in rows}):
        group = [row for row in rows if row["epsilon"] == epsilon]
        cells = [f"{epsilon:g}", f"{mean(row['top'] for row in group):.0f}"]
        for name in (
            "own_ranked_ndcg",
            "own_ranked_hit",
            "own_last_ndcg",
            "own_last_hit",
        ):
            cells.append(shown([row[f"{name}_at_10"] for row in group]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table(rows: List[Row], experiment: str) -> str:
    found = best(rows)
    lines = [
        f"{'':<20}"
        + "".join(f"{f'epsilon {e:g}':^38}" for e in EPSILONS)
        + "    (NDCG@10, HIT@10 in %; in brackets the paper's NDCG)"
    ]
    for name, title in NAMES.items():
        cells = []
        for i, epsilon in enumerate(EPSILONS):
            group = found.get((name, epsilon))
            paper = PAPER.get(experiment, {}).get(name)
            beside = f"({paper[i][0]:.2f})" if paper else ""
            if not group:
                cells.append(f"{'--':^29}{beside:>9}")
                continue
            values = [[r[m] for r in group] for m in ("ndcg_at_10", "hit_at_10")]
            cell = "  ".join(map(shown, values))
            cells.append(f"{cell:>29} {beside:>6} n={len(group)}")
        if any("+-" in cell for cell in cells):
            lines.append(f"{title:<20}" + " ".join(cells))
    gains = []
    for epsilon in EPSILONS:
        pair = [found.get((n, epsilon)) for n in ("dpformer", "transformer")]
        if not all(pair):
            continue
        ours, plain = ({r["seed"]: r["ndcg_at_10"] for r in group} for group in pair)
        seeds = ours.keys() & plain.keys()
        if seeds:
            ratio = sum(ours[i] for i in seeds) / sum(plain[i] for i in seeds)
            gains.append(f"epsilon {epsilon:g}: {ratio - 1:+.1%} (n={len(seeds)})")
    if gains:
        lines.append("DPFormer against Transformer, NDCG@10: " + ", ".join(gains))
    settings = defaultdict(list)
    for (name, epsilon), group in sorted(found.items()):
        text = ", ".join(f"{n} {group[0].get(n)}" for n in SETTING if n in group[0])
        settings[text].append(f"{NAMES[name]} {epsilon:g}")
    lines.append("settings, by method and epsilon:")
    lines += [f"  {', '.join(runs)}: {text}" for text, runs in settings.items()]
    return "\n".join(lines)


def cells(rows: List[Row], name: str) -> Tuple[List[int], List[float], List[List]]:
    """Batch sizes, learning rates, and a method's NDCG@10, mean over seeds, or None."""
    found = defaultdict(list)
    for row in rows:
        if method(row) == name:
            found[row["batch_size"], row["lr"]].append(row["ndcg_at_10"])
    sizes, lrs = (sorted({key[i] for key in found}) for i in (0, 1))
    at = [[found.get((size, lr)) for lr in lrs] for size in sizes]
    return sizes, lrs, [[mean(x) if x else None for x in line] for line in at]


def methods(rows: List[Row]) -> List[str]:
    return [name for name in NAMES if any(method(row) == name for row in rows)]


def grid(rows: List[Row]) -> str:
    """Figures 2 and 7."""
    lines = []
    for name in methods(rows):
        sizes, lrs, found = cells(rows, name)
        lines.append(
            f"{NAMES[name]}: NDCG@10 in % by batch size (down) and lr (across)"
        )
        lines.append(f"{'':>8}" + "".join(f"{lr:>8g}" for lr in lrs))
        for size, line in zip(sizes, found):
            shown = [f"{'--':>8}" if x is None else f"{x:8.2f}" for x in line]
            lines.append(f"{size:>8}" + "".join(shown))
    return "\n".join(lines)


def figure3(rows: List[Row]) -> str:
    """The first private method is compared with all others."""
    lines = [f"{'data':<11}{'method':<36}{'largest batch':>14}{'ms a sample':>13}"]
    for row in rows:
        lines.append(
            f"{row['data']:<11}{row['method']:<36}{batch_shown(row):>14}"
            f"{time_shown(row):>13}"
        )
    for data in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == data]
        ours = next((r for r in mine if r["method"].startswith("phantom")), None)
        if ours is None or not ours["largest_batch"]:
            continue
        lines.append(f"{data}: {ours['method']} has, against")
        for row in mine:
            if row is ours:
                continue
            if not row["largest_batch"]:
                ratios = "not one sample of which fits"
            else:
                batch = ours["largest_batch"] / row["largest_batch"]
                time = ours["ms_per_sample"] / row["ms_per_sample"]
                ratios = f"{batch:.3g} times the batch, {time:.3g} times the time"
            lines.append(f"  {row['method']:<36}{ratios}")
    lines += sorted({f"{r['memory_cap_gib']:g} GiB; {r['machine']}" for r in rows})
    return "\n".join(lines)


def batch_shown(row: Row) -> str:
    more = ">= " if row["largest_batch"] == row.get("most") else ""
    return f"{more}{row['largest_batch']}" if row["largest_batch"] else "none fits"


def time_shown(row: Row) -> str:
    return f"{row['ms_per_sample']:.2f}" if row["ms_per_sample"] else "--"


def axes_of(rows: int, columns: int, size: Tuple[float, float]) -> Tuple[Any, Any]:
    """A figure of so many panels of this size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = size[0] * columns, size[1] * rows
    return pyplot.subplots(rows, columns, figsize=size, squeeze=False)


def draw_grid(rows: List[Row]) -> Any:
    """Figures 2 and 7: a panel a method, in colors that compare."""
    names = methods(rows)
    figure, axes = axes_of(1, len(names), (4, 3.2))
    top = max(row["ndcg_at_10"] for row in rows)
    for axis, name in zip(axes[0], names):
        sizes, lrs, found = cells(rows, name)
        filled = [[x or 0.0 for x in line] for line in found]
        axis.imshow(filled, vmin=0, vmax=top, origin="lower", aspect="auto")
        axis.set(title=NAMES[name], xlabel="learning rate", ylabel="batch size")
        axis.set_xticks(range(len(lrs)), [f"{lr:g}" for lr in lrs])
        axis.set_yticks(range(len(sizes)), sizes)
        for i, line in enumerate(found):
            for j, x in enumerate(line):
                text = "--" if x is None else f"{x:.2f}"
                axis.text(j, i, text, ha="center", color="white")
    return figure


def draw_curves(rows: List[Row]) -> Any:
    """Figure 6: both measures by the epoch, means over seeds and their range."""
    panels = sorted({(row["data"], row["epsilon"]) for row in rows})
    figure, axes = axes_of(2, len(panels), (4, 3))
    for column, panel in zip(axes.T, panels):
        curves = defaultdict(list)
        for row in rows:
            if (row["data"], row["epsilon"]) == panel:
                label = f"{NAMES[method(row)]}, prior {prior_of(row)}"
                curves[label].append(row["curve"])
        for axis, place, measure in zip(column, (1, 2), ("NDCG@10", "HIT@10")):
            for label, seeds in curves.items():
                epochs = [point[0] for point in seeds[0]]
                found = [[x[place] for x in points] for points in zip(*seeds)]
                axis.plot(epochs, [mean(x) for x in found], marker=".", label=label)
                low, high = ([f(x) for x in found] for f in (min, max))
                axis.fill_between(epochs, low, high, alpha=0.3)
            axis.set(xlabel="epoch", ylabel=f"{measure} in %")
            axis.legend(fontsize=7)
        column[0].set(title=f"{panel[0]}, epsilon {panel[1]:g}")
    return figure


def draw_figure3(rows: List[Row]) -> Any:
    data = list(dict.fromkeys(row["data"] for row in rows))
    figure, axes = axes_of(2, len(data), (5.5, 2.5))
    for column, name in enumerate(data):
        mine = [row for row in rows if row["data"] == name]
        for axis, what, shown in (
            (axes[0, column], "largest_batch", batch_shown),
            (axes[1, column], "ms_per_sample", time_shown),
        ):
            names = [row["method"] for row in mine]
            bars = axis.barh(names, [row[what] or 0 for row in mine])
            axis.bar_label(bars, [shown(row) for row in mine], padding=3)
            axis.margins(x=0.2)
            axis.set(title=name, xlabel=what.replace("_", " "))
            axis.invert_yaxis()
            axis.tick_params(axis="y", labelsize=7)
    return figure


PRINTED = {"figure2": grid, "figure3": figure3, "figure7": grid, "releases": releases}
DRAWN = {"figure2": draw_grid, "figure3": draw_figure3, "figure7": draw_grid}


def draw(groups: Dict[str, List[Row]], folder: Path) -> None:
    """One file an experiment, and one for its curves."""
    figures = {name: DRAWN[name](groups[name]) for name in DRAWN if groups.get(name)}
    for name, rows in groups.items():
        curves = [row for row in rows if row.get("curve")]
        if curves:
            of = "" if name == "figure6" else f"-{name}"
            figures[f"figure6{of}"] = draw_curves(curves)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in figures.items():
        figure.tight_layout()
        figure.savefig(folder / f"{name}.png", dpi=120)
        print(f"drawn: {folder / name}.png")


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines")
    parser.add_argument("--figures", type=Path, help="folder to draw figures into")
    args = parser.parse_args(argv)
    groups = defaultdict(list)
    for row in read(args.files):
        groups[row["experiment"]].append(row)
    for name, rows in groups.items():
        print(f"== {name}: {len(rows)} runs")
        if name in PRINTED:
            print(PRINTED[name](rows))
            continue
        for title, chosen in variants(rows):
            print(f"{title}:\n{table(chosen, name)}")
    if args.figures:
        draw(groups, args.figures)


if __name__ == "__main__":
    main()
