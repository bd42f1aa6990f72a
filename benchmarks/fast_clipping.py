"""The experiments of Lee & Kifer 2021 on the speed of per-example gradient clipping.

Run as ``python benchmarks/fast_clipping.py``. The paper's models on random data of the
right shapes, in every mode: its baselines nxBP and multiLoss, Opacus as it ships, and
opacus_ext. Three experiments, each printed as a table:

- batch: all architectures at several batch sizes (figures 5 and 6 of the paper).
- depth: MLP and CNN with more layers (figure 7).
- image: the CNN on larger images (figure 9, where the paper has ResNet 18).

Steps, noise and turns are those of ``step_time.py``. A cell shows the ratio to the
non-private step, by the minima / by the median of the turns. nxBP and multiLoss take
every fifth turn. Opacus gets its own layers in the place of torch's recurrent ones and
attention (DPLSTM, DPRNN, DPMultiheadAttention); all other modes run torch's.

``--check`` first compares one step of each mode with nxBP's: no noise, double
precision, half of the samples clipped. ``--plot`` draws the paper's figures as one
picture, with ``--from-json`` from an earlier run's results. The bars at the end are for
the batch sizes 32 and 128, and use the minimum.
"""

import argparse
import gc
import json
import math
import warnings
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Tuple
from unittest.mock import patch

import _baselines
import step_time
import torch
from opacus.layers import DPRNN, DPMultiheadAttention
from opacus.validators import ModuleValidator
from step_time import (
    BASELINE,
    Mode,
    Row,
    Step,
    bar,
    non_private,
    print_header,
    private,
    refusal,
    select,
    take_turns,
)
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import TensorDataset

CLASSES, VOCABULARY, LENGTH, WIDTH, HIDDEN = 10, 2000, 64, 200, 128
EPOCH = 60_000  # samples, the size of MNIST's training set
BARS = {"MLP, nxBP": 40.0, "MLP, non-private": 1.6, "best": 1.0}
CHECK_LIMIT = 1e-6
COLUMNS = 4  # of panels
FULL = {
    "batch": [16, 32, 64, 128],
    "depth": [2, 4, 6, 8],
    "image": [28, 64, 96, 128],
    "repeats": 10,
}
QUICK = {"batch": [4, 8], "depth": [2, 3], "image": [28, 36], "repeats": 2}


class Case(NamedTuple):
    """What is timed; ``depth`` is for MLP and CNN, ``image`` for the CNN."""

    architecture: str
    batch: int = 32
    depth: int = 2
    image: int = 28


# -- the paper's architectures -----------------------------------------------------


class Recurrent(nn.Module):
    """A recurrent layer's output at the last step: [B, T, d] -> [B, width]."""

    def __init__(self, layer: nn.RNNBase):
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


class Positions(nn.Module):
    """Adds the sinusoidal encoding of the positions: [B, T, d] -> [B, T, d]."""

    def __init__(self, length: int, width: int):
        super().__init__()
        rates = 1e4 ** (-torch.arange(0, width, 2) / width)
        angles = torch.arange(length)[:, None] * rates
        self.register_buffer("encoding", torch.cat([angles.sin(), angles.cos()], 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.encoding


class Mean(nn.Module):
    """Averages over the tokens: [B, T, d] -> [B, d]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1)


def mlp(case: Case) -> List[nn.Module]:
    """Hidden layers of 128, 256, 256, ... units."""
    layers: List[nn.Module] = [nn.Flatten()]
    width = 28 * 28
    for next_width in [128] + [256] * (case.depth - 1):
        layers += [nn.Linear(width, next_width), nn.Sigmoid()]
        width = next_width
    return [*layers, nn.Linear(width, CLASSES)]


def cnn(case: Case) -> List[nn.Module]:
    """
    The paper's two convolutions, each with max pooling, and a hidden linear layer; more
    depth is more convolutions, which keep the size, after them.
    """
    layers: List[nn.Module] = []
    for channels, next_channels in ((1, 20), (20, 50)):
        layers += [nn.Conv2d(channels, next_channels, 5), nn.Sigmoid()]
        layers += [nn.MaxPool2d(2)]
    for _ in range(case.depth - 2):
        layers += [nn.Conv2d(50, 50, 5, padding=2), nn.Sigmoid()]
    side = ((case.image - 4) // 2 - 4) // 2
    layers += [nn.Flatten(), nn.Linear(50 * side * side, 128), nn.Sigmoid()]
    return [*layers, nn.Linear(128, CLASSES)]


def recurrent(cell: Callable[..., nn.RNNBase], tokens: bool) -> Callable:
    """
    One layer over an image's rows, or over embedded tokens. Gradients that vanish on
    the way to the first tokens have products in denormal numbers, slow on CPU.
    """

    def build(case: Case) -> List[nn.Module]:
        layers: List[nn.Module] = [nn.Embedding(VOCABULARY, WIDTH)] if tokens else []
        layer = cell(WIDTH if tokens else 28, HIDDEN, batch_first=True)
        return [*layers, Recurrent(layer), nn.Linear(HIDDEN, CLASSES)]

    return build


def transformer(case: Case) -> List[nn.Module]:
    """One encoder block on embeddings of 200 dimensions."""
    block = nn.TransformerEncoderLayer(
        WIDTH, nhead=8, dim_feedforward=4 * WIDTH, dropout=0.0, batch_first=True
    )
    embedding = [nn.Embedding(VOCABULARY, WIDTH), Positions(LENGTH, WIDTH)]
    return [*embedding, block, Mean(), nn.Linear(WIDTH, CLASSES)]


ARCHITECTURES: Dict[str, Callable[[Case], List[nn.Module]]] = {
    "MLP": mlp,
    "CNN": cnn,
    "RNN": recurrent(nn.RNN, tokens=False),
    "LSTM": recurrent(nn.LSTM, tokens=False),
    "RNN-tokens": recurrent(nn.RNN, tokens=True),
    "LSTM-tokens": recurrent(nn.LSTM, tokens=True),
    "Transformer": transformer,
}
EXPERIMENTS = {  # each varies the field of Case that has its name
    "batch": list(ARCHITECTURES),
    "depth": ["MLP", "CNN"],
    "image": ["CNN"],
}


def random_data(case: Case) -> TensorDataset:
    """Images, their rows, or tokens; step_time's loss takes one target a token."""
    if case.architecture in ("RNN", "LSTM"):
        inputs = torch.rand(case.batch, 28, 28)
    elif case.architecture in ("MLP", "CNN"):
        inputs = torch.rand(case.batch, 1, case.image, case.image)
    else:
        inputs = torch.randint(VOCABULARY, (case.batch, LENGTH))
    return TensorDataset(inputs, torch.randint(CLASSES, (case.batch, 1)))


def model_and_data(case: Case) -> Tuple[nn.Module, TensorDataset]:
    """The same for the same case; the loss takes logits [B, tokens, classes]."""
    torch.manual_seed(0)
    layers, data = ARCHITECTURES[case.architecture](case), random_data(case)
    return nn.Sequential(*layers, nn.Unflatten(1, (1, CLASSES))), data


# -- modes -------------------------------------------------------------------------


def dp_rnn(layer: nn.RNN) -> DPRNN:
    """What ``ModuleValidator.fix`` does for an LSTM, but not for an RNN."""
    new = DPRNN(layer.input_size, layer.hidden_size, batch_first=layer.batch_first)
    new.load_state_dict(layer.state_dict())
    return new


def stock(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """
    A step of Opacus, on the layers that it has in the place of torch's.

    They do the same work, but not always compute the same: Opacus 1.6's
    DPMultiheadAttention mixes up heads and tokens if ``batch_first=True``.
    """
    for name, part in model.named_children():
        if isinstance(part, Recurrent) and isinstance(part.layer, nn.RNN):
            part.layer = dp_rnn(part.layer)
        setattr(model, name, ModuleValidator.fix(part))
    return private(model, data, mode)


MODES = {
    BASELINE: Mode(non_private),
    "nxBP": Mode(_baselines.nx_bp),
    "multiLoss": Mode(_baselines.multi_loss),
    "Opacus hooks": Mode(stock, "hooks"),
    "Opacus ghost": Mode(stock, "ghost"),
    "hooks": Mode(private, "hooks", ours=True),
    "ghost": Mode(private, "ghost", ours=True),
    "ghost_bk": Mode(private, "ghost_bk", ours=True),
}
SLOW, SLOW_EVERY = ("nxBP", "multiLoss"), 5
OPACUS = [name for name, mode in MODES.items() if mode.build is stock]
OURS = [name for name, mode in MODES.items() if mode.ours]
CHECKED = ["multiLoss", *OPACUS, *OURS]


def build(name: str, model: nn.Module, data: TensorDataset) -> Step:
    select(MODES[name])
    return MODES[name].build(model, data, MODES[name].grad_sample_mode)


# -- do the modes agree? -----------------------------------------------------------


def state(model: nn.Module) -> Dict[str, torch.Tensor]:
    """``state_dict``, with the names of torch's attention for Opacus's too."""
    found = dict(model.state_dict())
    for name, layer in model.named_modules():
        if isinstance(layer, DPMultiheadAttention):
            found.update({f"{name}.{key}": p for key, p in layer.state_dict().items()})
    return found


def update(name: str, case: Case) -> Dict[str, torch.Tensor]:
    """What one step subtracts from each parameter."""
    model, data = model_and_data(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    build(name, model, data)()
    after = state(model)
    return {key: before[key] - after[key] for key in before}


def deviation(
    found: Dict[str, torch.Tensor], true: Dict[str, torch.Tensor], floor: float = 1e-6
) -> float:
    """
    The largest relative one of a parameter; what is smaller than ``floor`` times all of
    them is relative to that.
    """
    least = floor * float(get_total_norm(true.values()))
    return max(
        float((found[key] - value).norm()) / max(float(value.norm()), least)
        for key, value in true.items()
    )


def compare(case: Case) -> List[Row]:
    """The deviation of each private mode's step, free of noise, from that of nxBP."""
    norms = [
        get_total_norm(g) for g in _baselines.nx_bp_gradients(*model_and_data(case))
    ]
    bound = median(map(float, norms))  # clips half of the samples
    rows: List[Row] = []
    with patch.multiple(step_time, SIGMA=0.0, LR=1.0, MAX_GRAD_NORM=bound):
        true = update("nxBP", case)
        for name in CHECKED:
            rows.append({**case._asdict(), "mode": name})
            try:
                rows[-1]["deviation"] = deviation(update(name, case), true)
            except Exception as error:
                rows[-1]["refused"] = refusal(name, error)
    return rows


def check(architectures: List[str]) -> List[Row]:
    """Compare the modes on each architecture, and print the deviations."""
    print_header("## Largest relative deviation from nxBP", ["architecture", *CHECKED])
    results: List[Row] = []
    torch.set_default_dtype(torch.float64)
    try:
        for architecture in architectures:
            rows = compare(Case(architecture, batch=4, depth=3))
            print_cells([architecture, *(cell(row, "{deviation:.0e}") for row in rows)])
            results += rows
    finally:
        torch.set_default_dtype(torch.float32)
    print("\nA gradient of zero is compared relative to all gradients.")
    exact = [row for row in results if row["mode"] not in OPACUS]
    worst = max(row.get("deviation", math.inf) for row in exact)
    verdict = "agree" if worst <= CHECK_LIMIT else "DO NOT AGREE"
    print(f"The baselines and opacus_ext {verdict}: {worst:.0e}.", flush=True)
    return results


# -- time --------------------------------------------------------------------------


def time_case(case: Case, repeats: int) -> List[Row]:
    """Interleave the modes; one row a mode, a refusal in place of times."""
    gc.collect()
    steps: Dict[str, Step] = {}
    rows: Dict[str, Row] = {name: {**case._asdict(), "mode": name} for name in MODES}
    for name in MODES:
        try:
            step = build(name, *model_and_data(case))
            step()
            steps[name] = step
        except Exception as error:
            rows[name]["refused"] = refusal(name, error)
    times = take_turns(steps, MODES, repeats, slow=SLOW, every=SLOW_EVERY)
    for name, row in times.items():
        rows[name].update(row)
    return list(rows.values())


def run(experiment: str, cases: List[Case], repeats: int) -> List[Row]:
    """Time the cases, printed as a table with a column a mode."""
    columns = ["architecture", experiment, f"{BASELINE}, ms"]
    names = [name for name in MODES if name != BASELINE]
    print_header(f"## Time of a step by {experiment}", columns + names)
    results: List[Row] = []
    for case in cases:
        base, *rows = time_case(case, repeats)
        cells = [case.architecture, str(getattr(case, experiment))]
        cells.append(cell(base, "{min_ms:.1f} / {median_ms:.1f}"))
        ratios = [cell(row, "{ratio:.2f} / {ratio_median:.2f}") for row in rows]
        print_cells(cells + ratios)
        results += [base, *rows]
    return results


def cell(row: Row, template: str) -> str:
    return row.get("refused") or template.format(**row)


def print_cells(cells: List[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


# -- bars --------------------------------------------------------------------------


def best(rows: Dict[str, Row], names: List[str]) -> float:
    """The least time; infinite where all of the modes refuse."""
    return min(rows[name].get("min_ms", math.inf) for name in names)


def check_bars(rows: List[Row]) -> List[Row]:
    """Compare the times by batch size with the bars; other sizes have none."""
    cases: Dict[Tuple[str, int], Dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["architecture"], row["batch"]), {})[row["mode"]] = row
    print("\n## Bars, by the minimum\n")
    bars = []
    if ("MLP", 128) in cases:
        times = cases["MLP", 128]
        ours = best(times, ["ghost_bk"])
        name = "ghost_bk, times faster than nxBP, MLP, batch 128"
        faster = best(times, ["nxBP"]) / ours
        bars.append(bar(name, faster, BARS["MLP, nxBP"], at_least=True))
        name = "ghost_bk, ratio to non-private, MLP, batch 128"
        bars.append(bar(name, ours / best(times, [BASELINE]), BARS["MLP, non-private"]))
    for (architecture, batch), times in cases.items():
        if batch in (32, 128):
            name = f"our best mode to Opacus's best, {architecture}, batch {batch}"
            ratio = best(times, OURS) / best(times, OPACUS)
            bars.append(bar(name, ratio, BARS["best"]))
    if not bars:
        print("None: they are for the batch sizes 32 and 128.")
    return bars


# -- the paper's figures -----------------------------------------------------------


def pyplot() -> Any:
    """matplotlib, which nothing else here needs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def epoch(row: Row) -> float:
    """Seconds per epoch, the paper's measure, of as many samples as MNIST has."""
    return row["min_ms"] / 1e3 * EPOCH / row["batch"]


def draw(axes: Any, rows: List[Row], field: str, bars: bool = False) -> None:
    """The time of every mode over a field of the cases, as lines or groups of bars."""
    ticks = list(dict.fromkeys(row[field] for row in rows))
    for i, name in enumerate(MODES):
        timed = [row for row in rows if row["mode"] == name and "min_ms" in row]
        times = [epoch(row) for row in timed]
        if bars:
            width = 0.9 / len(MODES)
            shift = (i - (len(MODES) - 1) / 2) * width
            places = [ticks.index(row[field]) + shift for row in timed]
            axes.bar(places, times, width, color=f"C{i}", label=name)
        else:
            line = f"C{i}o-" if MODES[name].ours else f"C{i}o--"
            places = [row[field] for row in timed]
            axes.plot(places, times, line, markersize=4, label=name)
    axes.set_xticks(range(len(ticks)) if bars else ticks, ticks)
    axes.set(xlabel=field, yscale="log", ylabel="seconds per epoch")


def plot(results: Dict[str, Any], path: str) -> None:
    """The architectures at one batch size, and below a panel for each experiment."""
    panels: Dict[Tuple[str, str], List[Row]] = {}
    for experiment in EXPERIMENTS:
        for row in results.get(experiment, []):
            panels.setdefault((row["architecture"], experiment), []).append(row)
    if not panels:
        raise SystemExit("No times to draw.")
    at_once = results.get("batch", [])
    sizes = {row["batch"] for row in at_once}
    batch = 32 if 32 in sizes else max(sizes, default=0)
    at_once = [row for row in at_once if row["batch"] == batch]

    height = bool(at_once) + math.ceil(len(panels) / COLUMNS)
    size = (4 * COLUMNS, 3.2 * height)
    figure = pyplot().figure(figsize=size, layout="constrained")
    grid = figure.add_gridspec(height, COLUMNS)
    if at_once:
        axes = figure.add_subplot(grid[0, :])
        axes.set_title(f"Batch size {batch}")
        draw(axes, at_once, "architecture", bars=True)
    for i, ((architecture, experiment), rows) in enumerate(panels.items()):
        axes = figure.add_subplot(grid[divmod(i + COLUMNS * bool(at_once), COLUMNS)])
        axes.set_title(f"{architecture} by {experiment}")
        draw(axes, rows, experiment)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(MODES))
    figure.savefig(path, dpi=100)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    names, architectures = list(EXPERIMENTS), list(ARCHITECTURES)
    add("--experiments", nargs="*", choices=names, default=names)
    add("--architectures", nargs="+", choices=architectures, default=architectures)
    add("--batches", nargs="+", type=int, dest="batch", metavar="N")
    add("--depths", nargs="+", type=int, dest="depth", metavar="N")
    add("--images", nargs="+", type=int, dest="image", metavar="N")
    add("--repeats", type=int)
    add("--quick", action="store_true", help="small sizes, two repeats")
    add("--check", action="store_true", help="first check that the modes agree")
    add("--threads", type=int, default=1)
    add("--json", metavar="PATH", help="also write the results there")
    add("--plot", metavar="PATH", help="also draw the results there, e.g. times.png")
    add("--from-json", metavar="PATH", help="only draw these results")
    args = parser.parse_args()
    if args.from_json and not args.plot:
        parser.error("--from-json needs --plot")
    for name, default in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def measure(args: argparse.Namespace) -> Dict[str, Any]:
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, cpu, {threads} CPU threads")
    results: Dict[str, Any] = {"device": "cpu", "threads": threads}
    if args.check:
        results["check"] = check(args.architectures)
    for experiment in args.experiments:
        cases = [
            Case(architecture)._replace(**{experiment: size})
            for architecture in EXPERIMENTS[experiment]
            if architecture in args.architectures
            for size in getattr(args, experiment)
        ]
        results[experiment] = run(experiment, cases, args.repeats)
    if "batch" in results:
        results["bars"] = check_bars(results["batch"])
    return results


def main() -> None:
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    args = parse_arguments()
    if args.plot:
        pyplot()  # fails now rather than after the measurements
    if args.from_json:
        with open(args.from_json) as file:
            return plot(json.load(file), args.plot)
    torch.set_num_threads(args.threads)
    results = measure(args)
    if args.json:
        with open(args.json, "w") as file:
            json.dump(results, file, indent=1)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
