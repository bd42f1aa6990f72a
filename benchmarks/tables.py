"""The tables of docs/ that come from benchmarks/results; no number is copied by hand.

A page marks a table by its name, in a comment before and one after it::

    <!-- table: releases-ml-1m -->
    <!-- end -->

``python -m benchmarks tables`` writes between the marks; tests/docs_test.py compares.
"""

import json
import math
import re
from pathlib import Path
from statistics import mean, stdev
from typing import Any, Callable, Dict, List, Sequence

from benchmarks import noise_batch_ratio
from opacus_ext.planner.commands.options import build_parser
from opacus_ext.planner.measurements import EXAMPLE, read_runs

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.S)

Row = Dict[str, Any]


def rows_of(name: str) -> List[Row]:
    """The rows of a file of JSON lines."""
    lines = (RESULTS / name).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


def written(head: Sequence[str], body: Sequence[Sequence[Any]]) -> str:
    """A table of Markdown."""
    rule = ["---"] * len(head)
    lines = (f"| {' | '.join(map(str, row))} |" for row in (head, rule, *body))
    return "\n".join(lines).replace("|  |", "| |")


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation over seeds, if there are several."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{mean(values):.2f} +- {stdev(values):.2f}"


def releases(name: str) -> str:
    """Recommenders of released statistics, by epsilon."""
    rows, body = rows_of(f"releases-{name}-cpu.jsonl"), []
    for epsilon in sorted({row["epsilon"] for row in rows}):
        runs = [row for row in rows if row["epsilon"] == epsilon]
        columns = ("ndcg_at_10", "hit_at_10", "own_last_ndcg_at_10")
        columns += ("own_last_hit_at_10",)
        found = (spread([run[c] for run in runs]) for c in columns)
        top = round(mean(run["top"] for run in runs))
        body.append((f"{epsilon:g}", top, *found))
    last = ("NDCG@10, own last", "HIT@10, own last")
    return written(("epsilon", "top", "NDCG@10", "HIT@10", *last), body)


def trained() -> str:
    """MovieLens-1M, trained, beside the paper's numbers (DPFormer, table 1)."""
    rows = rows_of("table1-cpu.jsonl")
    both = ("ndcg_at_10", "hit_at_10")
    plain = " / ".join(f"{rows[0][f'popularity_{of}']:.2f}" for of in both)
    body: List[Sequence[str]] = [("popularity (not private)", *[plain] * 3)]
    names = {
        "gru": "GRU",
        "lstm": "LSTM",
        "transformer-untied": "Transformer without sharing",
        "transformer": "Transformer",
        "dpformer": "DPFormer (Re-Attention on the logits)",
    }
    for model, name in names.items():
        cells = []
        for epsilon in (5, 8, 10):
            runs = [r for r in rows if (r["model"], r["epsilon"]) == (model, epsilon)]
            found = " / ".join(spread([r[of] for r in runs]) for of in both if runs)
            cells.append(found or "not run")
        body.append((f"**this package**, {name}, 20 epochs", *cells))
    paper = {
        "GRU": ("2.26 / 4.58", "2.40 / 4.75", "2.81 / 5.53"),
        "LSTM": ("2.65 / 5.08", "2.76 / 5.41", "2.95 / 5.55"),
        "Transformer without sharing": ("2.33 / 4.47", "2.56 / 5.11", "2.74 / 5.39"),
        "vanilla transformer": ("4.57 / 8.69", "7.05 / 13.17", "7.99 / 14.82"),
        "DPFormer": ("5.88 / 11.13", "7.70 / 14.31", "8.42 / 15.40"),
    }
    body += [(f"paper, {name}", *cells) for name, cells in paper.items()]
    return written(("", "epsilon 5", "epsilon 8", "epsilon 10"), body)


def optimizers() -> str:
    """Adam that knows the noise: learning rates and losses, by task."""
    rows, body = rows_of("adaptive-optimizers-cpu.jsonl"), []
    for name in dict.fromkeys(row["optimizer"] for row in rows):
        cells: List[str] = []
        for task in ("text", "films"):
            runs = [r for r in rows if (r["optimizer"], r["task"]) == (name, task)]
            first = [run for run in runs if run["seed"] == runs[0]["seed"]]
            chosen = min(first, key=lambda run: run["validation"])["lr"]
            losses = [run["test"] for run in runs if run["lr"] == chosen]
            rates = ", ".join(f"{run['lr']:g}" for run in first)
            cells += [f"{chosen:g} of {rates}"]
            cells += [f"{mean(losses):.3f} +- {stdev(losses):.3f}"]
        body.append((f"`{name}`", *cells))
    return written(("", "text: learning rate", "loss", "films: rate", "loss"), body)


def mixtures() -> Dict[Any, str]:
    """
    Mixtures of experts: "ghost_bk" to non-private, by section, model, experts and load;
    tokens gathered / padded / padded by sample, where these were measured.
    """
    found: Dict[Any, List[str]] = {}
    for row in rows_of("moe-cpu.jsonl"):
        if row["section"] in ("time", "memory") and "ghost_bk" in row["mode"]:
            key = row["section"], row["model"], row["experts"], row["load"]
            found.setdefault(key, []).append(f"{row['ratio']:.2f}")
    return {key: " / ".join(ratios) for key, ratios in found.items()}


def mixtures_measured() -> str:
    """When, where and on what."""
    machine, row, *_ = rows_of("moe-cpu.jsonl")
    form = "torch {torch}, {threads} thread, {device}, load average {load_average:.1f}"
    said = f"Measured on {machine['date']} ({form.format(**machine)})"
    note = machine.get("note", "")
    return f"{said} with B {row['batch']}, T {row['length']}. {note}".strip()


def figure3() -> str:
    """Phantom clipping to what it is compared with: largest batch, time of a sample."""
    rows = {(r["data"], r["method"]): r for r in rows_of("figure3-cpu.jsonl")}
    data, methods = (list(dict.fromkeys(key[i] for key in rows)) for i in (0, 1))
    ours, body = "phantom clipping (ghost_bk)", []
    for method in methods:
        cells: List[str] = []
        for name in data:
            row, own = rows[name, method], rows[name, ours]
            if not row["largest_batch"]:
                cells += ["none fits"] * 4
                continue
            batches = own["largest_batch"] / row["largest_batch"]
            times = own["ms_per_sample"] / row["ms_per_sample"]
            numbers = f"{row['largest_batch']}", f"{row['ms_per_sample']:.2f}"
            cells += [*numbers, f"{batches:.3g}", f"{times:.3g}"]
        body.append((method, *cells))
    heads = ("batch", "ms", "batch of ghost_bk to it", "time of ghost_bk to it")
    named = [f"{name}: {head}" for name in data for head in heads]
    return written(("", *named), body)


def experts() -> str:
    """Time and memory by the number of experts and the load."""
    found = mixtures()
    cells = [(s, m) for m in ("stacked", "modules") for s in ("time", "memory")]
    loads = list(dict.fromkeys(load for *_, load in found))
    body = [
        (
            n if load == loads[0] else "",
            load,
            *(found.get((s, m, n, load), "-") for s, m in cells),
        )
        for n in sorted({count for *_, count, _ in found})
        for load in loads
    ]
    heads = ("stacked: time", "stacked: memory")
    heads += ("in modules: time", "in modules: memory")
    table = written(("experts", "load", *heads), body)
    return f"{table}\n\n{mixtures_measured()}"


def experts_cost() -> str:
    """Time with most experts, by load."""
    found = mixtures()
    most = max(count for *_, count, _ in found)
    times = [
        f"{load}: {ratios}"
        for (section, model, count, load), ratios in found.items()
        if (section, model, count) == ("time", "stacked", most)
    ]
    return (
        f'Time of a "ghost_bk" step with {most} experts to that of a non-private one, '
        "gathered / padded over the batch / padded by sample, by load: "
        f"{'; '.join(times)}. {mixtures_measured()}"
    )


def long_sequences() -> str:
    """Memory and time by length and vocabulary."""
    text = (RESULTS / "long.txt").read_text("utf-8")
    cells = [[c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines()]
    found = {(c[0], c[1]): c for c in cells if len(c) == 7}
    shapes = [(1000, t) for t in (2048, 4096, 8192)]
    shapes += [(v, 256) for v in (50_000, 200_000)]
    body = []
    for v, t in shapes:
        shape = f"2, 64, {v}, {t}, 2"
        plain, private = (found[shape, step] for step in ("non-private", "ghost_bk"))
        body.append((t, f"{v:,}", plain[2], private[2], private[6]))
    return written(("T", "V", "non-private", "ghost_bk", "time"), body)


SHAPES = ("4,256,8192,128,8", "2,128,2048,512,4", "2,256,50257,64,4")


def speed(section: str, steps: Sequence[str] = ()) -> List[List[str]]:
    """Rows of ratios to a non-private step, by shape; all steps if none is named."""
    found: Dict[str, Dict[str, List[float]]] = {}
    for row in rows_of("speed-cpu.jsonl"):
        if row["section"] == section:
            found.setdefault(row["step"], {})[row["shape"]] = row["ratios"]
    body = []
    for step in steps or found:
        each = (found[step][shape] for shape in SHAPES)
        ends = ({f"{min(x):.2f}": 0, f"{max(x):.2f}": 0} for x in each)
        body.append([step, *("-".join(pair) for pair in ends)])
    return body


def speed_table(section: str) -> str:
    """Steps by shape."""
    return written(("step", *(s.replace(",", ", ") for s in SHAPES)), speed(section))


def speed_of_readme() -> str:
    """Shapes by step, those of one line of text each."""
    own = speed("own")
    names = ("fastDP 2.0.0", "private-transformers 0.2.3, gradients stored")
    names += ("JAX-Privacy 2.0.0, one by one", "Opake 0.16.0, one by one")
    columns = [own[0], own[2], *speed("peers", names)]
    heads = ("layers, width, vocabulary, T, B", '"ghost_bk"', "under `torch.compile`")
    heads += ("fastDP", "private-transformers", "JAX-Privacy, one by one")
    heads += ("Opake, one by one",)
    body = [
        (shape.replace(",", ", "), *(column[i] for column in columns))
        for i, shape in enumerate(SHAPES, 1)
    ]
    return written(heads, body)


def gpu() -> str:
    """Steps on one GPU by model, as ratios to the plain eager step of each."""
    if not (RESULTS / "speed-gpu.jsonl").exists():
        return "(Not measured yet with the command as it is.)"
    rows = rows_of("speed-gpu.jsonl")
    where = dict.fromkeys(f"{row['device']}, torch {row['torch']}" for row in rows)
    form = "{ratio:.2f} {ms:.1f} {host_ms:.1f} {busy_ms:.1f}"
    form += " {calls} {kernels} {mib:.0f}"
    body: List[Sequence[str]] = []
    for row in rows:
        cells, what = ["--"] * 7, row.get("ran") or row.get("refused")
        if "ms" in row:
            cells = form.format(**row).split()
        what = what or f"largest batch {row['largest']}"
        body.append((row["case"], row["way"], *cells, what))
    heads = ("ratio", "ms", "host", "device", "calls", "kernels", "MiB", "ran")
    return written((f"model, T, B, type ({'; '.join(where)})", "step", *heads), body)


def h100() -> str:
    """Steps on one H100 with the core of 2026-11-27; of equal ones the first."""
    found: Dict[Any, Sequence[Any]] = {}
    for row in rows_of("speed-h100.jsonl"):
        numbers = (f"{row['ratio']:.2f}", *(f"{row[k]:.0f}" for k in ("ms", "mib")))
        names = row["case"].removesuffix(", bf16"), row["way"]
        found.setdefault(names, (*names, *numbers))
    return written(("model, T, B", "step", "ratio", "ms", "MiB"), [*found.values()])


def machines() -> str:
    """Collectives of a step on four processes, and their bytes, in models."""
    found = json.loads((RESULTS / "machines-cpu.json").read_text("utf-8"))
    body = []
    for row in found["rows"]:
        sizes = row["model_sizes"]
        cells = (f"{n} {k}, {sizes[k]:g}" for k, n in row["collectives"].items())
        ms = f"{row['milliseconds']:.0f}"
        peak = f"{row['peak_mb']:.0f}"
        body.append((f"`{row['way']}`", "; ".join(cells), row["numbers"], ms, peak))
    return written(("", "collectives, bytes", "numbers", "ms", "peak MB"), body)


FAST = "fast_clipping-cpu.jsonl"
FAST_MODES = ("nxBP", "multiLoss", "Opacus hooks", "Opacus ghost")
FAST_MODES += ("hooks", "ghost", "ghost_bk")


def fast_clipping(experiment: str, varies: str) -> str:
    """Times of the fast-clipping paper's models, as ratios to the non-private step."""
    found: Dict[Any, Row] = {}
    for row in rows_of(FAST):
        if row["experiment"] == experiment:
            case = row["architecture"], row[varies]
            found.setdefault(case, {})[row["mode"]] = row
    if not found:
        return "(Not measured yet with the command as it is.)"
    body = []
    for case, modes in found.items():
        ratios = (modes.get(mode, {}).get("ratio", math.nan) for mode in FAST_MODES)
        cells = (f"{ratio:.2f}".replace("nan", "--") for ratio in ratios)
        body.append((*case, f"{modes['non-private']['min_ms']:.1f}", *cells))
    return written(("", varies, "non-private, ms", *FAST_MODES), body)


def fast_clipping_memory() -> str:
    """The largest batch of ResNet-18 by mode."""
    rows = [row for row in rows_of(FAST) if "cap_mib" in row]
    if not rows:
        return "(Not measured yet with the command as it is.)"
    head = f"largest batch under {rows[0]['cap_mib']:g} MiB"
    return written(("mode", head), [(row["mode"], row["batch"]) for row in rows])


def fast_clipping_claims() -> str:
    """What the page says of the fast-clipping paper's figures, with its bounds."""
    rows, body = rows_of(FAST), []
    for row in rows:
        if row["experiment"] == "claims":
            bound = "at most" if "at_most" in row else "at least"
            limit = f"{bound} {row[bound.replace(' ', '_')]:g}"
            verdict = "holds" if row["holds"] else "fails"
            body.append((row["claim"], limit, f"{row['value']:.2g}", verdict))
    where = "{date}, torch {torch}, {machine}".format(**rows[0])
    return written((f"claim ({where})", "bound", "measured", ""), body)


# Llama 3 8B: parameters, and of these the largest one; a layer's inputs and gradients,
# of which "ghost_bk" keeps one number a token and feature.
PARAMETERS, LARGEST, LAYERS = 8.03e9, 128256 * 4096, 32
KEPT = 3 * 4096 + 14336 + (4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096)
# Bytes a second of one GPU to the others, of NVLink and of a 400 Gb/s adapter.
SPEEDS = {8: 450e9, 64: 50e9}


def scale() -> str:
    """8 B parameters in bfloat16, sums in float32: computed from what was counted."""
    found = json.loads((RESULTS / "machines-cpu.json").read_text("utf-8"))
    counted = {row["way"]: row["model_sizes"] for row in found["rows"]}
    body = []
    for count, speed in SPEEDS.items():
        for way in ("ddp", "ddp ghost_bk", "fsdp", "fsdp ghost_bk"):
            sizes, private = counted[way], "ghost" in way
            part, moved = (count - 1) / count, 0.0
            for kind, models in sizes.items():
                if "gather" in kind:  # counted of four shards, sent in bfloat16
                    moved += 4 * models * part * 2
                else:
                    moved += models * part * 4 * (2 if kind == "allreduce" else 1)
            moved *= PARAMETERS
            held = 16 * PARAMETERS / (count if "fsdp" in way else 1)
            more = 4 * LARGEST + 25 * 2**20 if private and "fsdp" in way else 0
            token = 2 * LAYERS * KEPT if private else 0
            cells = (f"{moved / 1e9:.0f}", f"{moved / speed:.2f}", f"{held / 1e9:.0f}")
            end = (f"{more / 1e9:.1f}", f"{token / 1e6:.1f}")
            body.append((f"{count} GPUs, `{way}`", *cells, *end))
    head = ("", "GB sent by a GPU", "seconds", "GB of state", "GB more", "MB a token")
    return written(head, body)


def options() -> str:
    """The options of opacus-ext."""
    body = []
    (commands,) = (action for action in build_parser()._actions if action.choices)
    for name, parser in commands.choices.items():
        for action in parser._actions:
            if action.dest not in ("help", "json"):
                flag = (action.option_strings or [action.dest])[0]
                said = action.help
                if action.choices:
                    said = f"{said}: {', '.join(action.choices)}"
                if action.required:
                    said = f"{said} (required)"
                body.append((name, f"`{flag}`", said))
    return written(("command", "option", "what it says"), body)


def equal_ratios() -> str:
    """Losses at equal noise-batch ratios, by physical batch."""
    runs = rows_of("noise-batch-ratio-cpu.jsonl")
    return noise_batch_ratio.table(
        [c for c in noise_batch_ratio.cells(runs) if c.learning_rate == 0.003]
    )


def families() -> str:
    """Masked models beside causal ones: the mean loss of the last hundred steps."""
    causal, every, body = read_runs(EXAMPLE), 20, []
    for run in rows_of("masked-cpu.jsonl"):
        last = slice(run["total_steps"] // every - 5, run["total_steps"] // every)
        others = [
            mean(other["loss"][last])
            for other in causal
            if other["total_steps"] >= run["total_steps"]
            and all(other[k] == run[k] for k in ("size", "ratio", "learning_rate"))
        ]
        settings = (
            f"{run['ratio']:.2g}",
            f"{run['learning_rate']:g}",
            run["total_steps"],
        )
        losses = f"{mean(run['loss'][last]):.2f}", (
            f"{mean(others):.2f}" if others else ""
        )
        body.append((f"{run['parameters']:,}", *settings, *losses))
    heads = ("parameters", "ratio", "learning rate", "steps", "masked", "causal")
    return written(heads, body)


TABLES: Dict[str, Callable[[], str]] = {
    "releases-ml-1m": lambda: releases("ml-1m"),
    "releases-games": lambda: releases("games"),
    "trained": trained,
    "optimizers": optimizers,
    "figure3": figure3,
    "speed": lambda: speed_table("own"),
    "speed-peers": lambda: speed_table("peers"),
    "speed-readme": speed_of_readme,
    "experts": experts,
    "experts-cost": experts_cost,
    "fast-clipping-batch": lambda: fast_clipping("batch", "batch"),
    "fast-clipping-depth": lambda: fast_clipping("depth", "depth"),
    "fast-clipping-networks": lambda: fast_clipping("networks", "image"),
    "fast-clipping-image": lambda: fast_clipping("image", "image"),
    "fast-clipping-memory": fast_clipping_memory,
    "fast-clipping-claims": fast_clipping_claims,
    "long-sequences": long_sequences,
    "gpu": gpu,
    "h100": h100,
    "machines": machines,
    "scale": scale,
    "options": options,
    "noise-batch-ratio": equal_ratios,
    "masked": families,
}


def with_tables(text: str) -> str:
    """A page with its marked tables as the results have them."""
    return MARKED.sub(lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text)


def main() -> None:
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        before = page.read_text("utf-8")
        after = with_tables(before)
        if after != before:
            page.write_text(after, "utf-8")
            print(f"wrote {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
