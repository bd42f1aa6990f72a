"""The experiments of Lee & Kifer 2021 on the speed of per-example gradient clipping.

Run as ``python -m benchmarks fast_clipping --out PATH`` (twelve minutes of one core).
The paper's networks on random data of the right shapes, in every mode: its baselines
nxBP and multiLoss, Opacus as it ships, and opacus_ext. The experiments:

- exact: one step of each mode against nxBP's: no noise, double precision, half of the
  samples clipped.
- batch: five architectures at several batch sizes (figures 5 and 6 of the paper).
- depth: MLP and CNN with more layers (figure 7).
- networks: ResNet and VGG with frozen BatchNorm (figure 8).
- image: ResNet-18 on larger images (figure 9). multiLoss and modes that hold the
  gradients of all samples are left out: they take minutes or gigabytes.
- memory: the largest batch of ResNet-18 under a cap of memory (section 6.7), to 5 %,
  each mode in a process of its own. Of nxBP and multiLoss only three samples' gradients
  are taken, as those of the others need no more memory.

Steps, noise and turns are those of ``step_time.py``. Time is process time of one
thread, the least of the turns; a ratio is that to the non-private step. nxBP and
multiLoss take every fifth turn. Opacus gets its own layers in the place of torch's
recurrent ones and attention (DPLSTM, DPRNN, DPMultiheadAttention); all other modes run
torch's. At the end the claims of ``docs/explanation/papers.md`` are compared with their
bounds. All goes to one file of JSON lines, of which ``python -m benchmarks tables``
makes the tables of that page, and ``--plot`` a picture.
"""

import argparse
import gc
import json
import math
import os
import platform
import subprocess
import sys
import time
import warnings
from datetime import date
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple
from unittest.mock import patch

import _baselines
import step_time
import torch
from _architectures import NETWORKS, Case, Recurrent, model_and_data
from figure3 import largest_batch
from opacus.layers import DPRNN, DPMultiheadAttention
from opacus.validators import ModuleValidator
from step_time import (
    BASELINE,
    GIVE_BACK,
    Mode,
    Row,
    Step,
    non_private,
    peak_memory,
    print_header,
    private,
    refusal,
    select,
    take_turns,
)
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import TensorDataset

CHECK_LIMIT = 1e-6
SMALL = ("MLP", "CNN", "RNN", "LSTM", "Transformer")
MOST = 1024  # no larger batch is tried
COLUMNS = 4  # of panels
MEMORY = Case("ResNet-18", image=64)


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
LIGHT = (BASELINE, "nxBP", "Opacus ghost", "ghost", "ghost_bk")


def build(name: str, case: Case) -> Step:
    select(MODES[name])
    return MODES[name].build(*model_and_data(case), MODES[name].grad_sample_mode)


class Experiment(NamedTuple):
    """The field of Case that varies, its values, and what does not vary."""

    varies: str
    values: Tuple[int, ...]
    architectures: Tuple[str, ...]
    fixed: Dict[str, int] = {}
    modes: Tuple[str, ...] = tuple(MODES)

    def cases(self) -> Iterator[Case]:
        for architecture in self.architectures:
            for value in self.values:
                yield Case(architecture, **{**self.fixed, self.varies: value})


EXPERIMENTS = {
    "batch": Experiment("batch", (16, 32, 64, 128), SMALL),
    "depth": Experiment("depth", (2, 4, 6, 8), ("MLP", "CNN"), {"batch": 128}),
    "networks": Experiment("image", (64,), ("ResNet-18", "VGG-11"), {"batch": 20}),
    "image": Experiment(
        "image", (32, 64, 96, 128), ("ResNet-18",), {"batch": 32}, LIGHT
    ),
}
QUICK = {
    "batch": Experiment("batch", (4, 8), SMALL),
    "depth": Experiment("depth", (2, 3), ("MLP",), {"batch": 4}),
    "networks": Experiment("image", (32,), ("ResNet-18", "VGG-11"), {"batch": 2}),
    "image": Experiment("image", (32, 64), ("ResNet-18",), {"batch": 2}, LIGHT),
}


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
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    select(MODES[name])
    MODES[name].build(model, data, MODES[name].grad_sample_mode)()
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
    gradients = _baselines.nx_bp_gradients(*model_and_data(case))
    bound = median(float(get_total_norm(g)) for g in gradients)  # clips half of them
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


def check(architectures: Tuple[str, ...] = tuple(NETWORKS)) -> Iterator[Row]:
    """Compare the modes on each architecture, and print the deviations."""
    print_header("## Largest relative deviation from nxBP", ["architecture", *CHECKED])
    torch.set_default_dtype(torch.float64)
    try:
        for architecture in architectures:
            image = 28 if architecture in SMALL else 32
            rows = compare(Case(architecture, batch=4, depth=3, image=image))
            print_cells([architecture, *(cell(row, "{deviation:.0e}") for row in rows)])
            yield from rows
    finally:
        torch.set_default_dtype(torch.float32)


# -- time --------------------------------------------------------------------------


def time_case(case: Case, names: Tuple[str, ...], seconds: float) -> List[Row]:
    """
    As many turns as fit into the seconds, 2 to 50; one row a mode, a refusal in place
    of times.
    """
    gc.collect()
    steps: Dict[str, Step] = {}
    rows: Dict[str, Row] = {name: {**case._asdict(), "mode": name} for name in names}
    start = time.process_time()
    for name in names:
        try:
            steps[name] = build(name, case)
            if name not in SLOW:
                steps[name]()
        except Exception as error:
            steps.pop(name, None)
            rows[name]["refused"] = refusal(name, error)
    turns = round(seconds / (time.process_time() - start))
    times = take_turns(
        steps,
        MODES,
        max(2, min(turns, 50)),
        slow=SLOW,
        every=SLOW_EVERY,
        clock=time.process_time,
    )
    for name, row in times.items():
        rows[name].update(row)
    return list(rows.values())


def run(experiment: Experiment, seconds: float) -> Iterator[Row]:
    """Time the cases, printed as a table with a column a mode."""
    names = experiment.modes
    columns = ["architecture", experiment.varies, f"{BASELINE}, ms", *names[1:]]
    print_header("## Time of a step", columns)
    for case in experiment.cases():
        base, *rows = time_case(case, names, seconds)
        cells = [case.architecture, str(getattr(case, experiment.varies))]
        cells.append(cell(base, "{min_ms:.1f}"))
        print_cells(cells + [cell(row, "{ratio:.2f}") for row in rows])
        yield from (base, *rows)


def cell(row: Row, template: str) -> str:
    return row.get("refused") or template.format(**row)


def print_cells(cells: List[str]) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


# -- memory ------------------------------------------------------------------------


def of_three(gradients: Callable[..., Any]) -> Callable[..., Step]:
    """A baseline that ends after three samples."""
    return _baselines.baseline(lambda *args: islice(gradients(*args), 3))


def print_largest(name: str, cap: float) -> None:
    """What the child process of ``largest`` does: batch, and MiB by batch."""
    MODES["nxBP"] = Mode(of_three(_baselines.nx_bp_gradients))
    MODES["multiLoss"] = Mode(of_three(_baselines.multi_loss_gradients))
    tiny = partial(build, name, MEMORY._replace(batch=2, image=32))

    def peak(batch: int) -> float:
        return peak_memory(
            tiny, partial(build, name, MEMORY._replace(batch=batch)), "cpu", steps=2
        )

    first = MOST if name == "nxBP" else 8  # a batch costs nxBP its images only
    batch, peaks = largest_batch(peak, cap * 2**20, MOST, first=first)
    print(json.dumps([batch, {b: round(peak / 2**20) for b, peak in peaks.items()}]))


def largest(cap: float) -> Iterator[Row]:
    """The largest batch of each mode under a cap in MiB."""
    columns = ["mode", "largest batch", "MiB by batch"]
    print_header(f"## Memory under {cap:g} MiB", columns)
    root = str(Path(__file__).parents[1])
    env = dict(os.environ, PYTHONPATH=root, **GIVE_BACK)
    for name in MODES:
        command = [sys.executable, __file__, "--largest", name, "--cap", str(cap)]
        child = subprocess.run(command, env=env, capture_output=True, text=True)
        if child.returncode:
            raise RuntimeError(f"{name}:\n{child.stderr}")
        batch, peaks = json.loads(child.stdout.splitlines()[-1])
        print_cells([name, str(batch), str(peaks)])
        case = MEMORY._replace(batch=batch)._asdict()
        yield {**case, "mode": name, "peak_mib": peaks, "cap_mib": cap}


# -- claims ------------------------------------------------------------------------


def claims(rows: List[Row]) -> Iterator[Row]:
    """
    What the page says, as bounds that leave room for other machines. One of cases that
    were not run is left out.
    """

    def ms(experiment: str, architecture: str, *names: str, **case: int) -> float:
        """The least time of the modes; infinite where all of them refuse."""
        wanted = {"experiment": experiment, "architecture": architecture, **case}
        found = [
            row.get("min_ms", math.inf)
            for row in rows
            if wanted.items() <= row.items() and row["mode"] in names
        ]
        return min(found, default=math.nan)

    def most(limit: float, claim: str, value: float) -> Row:
        return {"claim": claim, "value": value, "at_most": limit}

    def least(limit: float, claim: str, value: float) -> Row:
        return {"claim": claim, "value": value, "at_least": limit}

    exact = [
        row.get("deviation", math.inf)
        for row in rows
        if row["experiment"] == "exact" and row["mode"] not in OPACUS
    ]
    name = "largest deviation of multiLoss and opacus_ext from nxBP"
    told = [most(CHECK_LIMIT, name, max(exact, default=math.nan))]

    mlp = partial(ms, "batch", "MLP")
    faster = mlp("nxBP", batch=128) / mlp("ghost_bk", batch=128)
    told.append(least(5, 'MLP, batch 128: nxBP to "ghost_bk"', faster))
    for batch in (16, 128):
        added = mlp("ghost_bk", batch=batch) - mlp(BASELINE, batch=batch)
        name = f'MLP, batch {batch}: ms that "ghost_bk" adds'
        told.append(most(6, name, added))
    for mode, bound in (("nxBP", least), ("ghost", most), ("ghost_bk", most)):
        grown = mlp(mode, batch=128) / mlp(mode, batch=16) / 8
        name = f'MLP: time of an epoch in "{mode}", batch 128 to batch 16'
        told.append(bound(0.5, name, grown))
    for architecture in SMALL[1:]:  # Opacus has less Python for an MLP
        for batch in (32, 128):
            time_of = partial(ms, "batch", architecture, batch=batch)
            name = f"{architecture}, batch {batch}: our best mode to Opacus's best"
            told.append(most(1, name, time_of(*OURS) / time_of(*OPACUS)))
    for architecture in NETWORKS:
        time_of = partial(ms, "networks", architecture)
        name = f'{architecture}, batch 20: "ghost_bk" to nxBP'
        told.append(most(1, name, time_of("ghost_bk") / time_of("nxBP")))
    gain = {
        image: ms("image", "ResNet-18", "nxBP", image=image)
        / ms("image", "ResNet-18", "ghost", image=image)
        for image in (32, 128)
    }
    name = 'ResNet-18, 128 to 32 pixels: gain of "ghost" over nxBP'
    told.append(most(1, name, gain[128] / gain[32]))
    batches = {row["mode"]: row["batch"] for row in rows if "cap_mib" in row}
    for mode, share in (("ghost", 0.5), ("ghost_bk", 0.35)):
        found = batches.get(mode, math.nan) / batches.get(BASELINE, math.nan)
        told.append(least(share, f'largest batch of "{mode}" to non-private', found))

    for row in told:
        if not math.isnan(row["value"]):
            limits = row.get("at_least", -math.inf), row.get("at_most", math.inf)
            yield {**row, "holds": limits[0] <= row["value"] <= limits[1]}


# -- the paper's figures -----------------------------------------------------------


def pyplot() -> Any:
    """matplotlib, which nothing else here needs."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def plot(rows: List[Row], path: str) -> None:
    """A panel for each architecture in each experiment: time of a sample by mode."""
    panels: Dict[Tuple[str, str], List[Row]] = {}
    for row in rows:
        if "min_ms" in row:
            key = row["experiment"], row["architecture"]
            panels.setdefault(key, []).append(row)
    height = math.ceil(len(panels) / COLUMNS)
    size = (4 * COLUMNS, 3.2 * height)
    figure, grid = pyplot().subplots(
        height, COLUMNS, figsize=size, layout="constrained", squeeze=False
    )
    for axes in grid.flat[len(panels) :]:
        axes.remove()
    for axes, ((name, architecture), timed) in zip(grid.flat, panels.items()):
        field = EXPERIMENTS[name].varies
        for i, mode in enumerate(MODES):
            points = [
                (row[field], row["min_ms"] / row["batch"])
                for row in timed
                if row["mode"] == mode
            ]
            line = f"C{i}o-" if MODES[mode].ours else f"C{i}o--"
            axes.plot(*zip(*points), line, markersize=4, label=mode)
        axes.set(xlabel=field, yscale="log", ylabel="ms a sample")
        axes.set_title(f"{architecture} by {field}")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(MODES))
    figure.savefig(path, dpi=100)


# -- the command -------------------------------------------------------------------


def machine() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        return next(x.split(": ")[1] for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def where() -> Row:
    """What every row says: when, with what, and on which machine."""
    packages = ("torch", "opacus", "opacus_ext")
    versions = {name: version(name) for name in packages}
    cores = f"{machine()}, {os.cpu_count()} cores, one thread"
    return {"date": date.today().isoformat(), **versions, "machine": cores}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """The rows of the experiments, and of the claims that they allow."""
    experiments = QUICK if args.quick else EXPERIMENTS
    rows: List[Row] = []
    for name in args.experiments:
        if name == "exact":
            found = check()
        elif name == "memory":
            found = largest(args.cap)
        else:
            found = run(experiments[name], args.seconds)
        for row in found:
            rows.append({"experiment": name, **row})
            yield rows[-1]
    print("\n## Claims\n")
    for row in claims(rows):
        bound = "at most" if "at_most" in row else "at least"
        limit = row[bound.replace(" ", "_")]
        verdict = "holds" if row["holds"] else "FAILS"
        print(f"{verdict}  {row['value']:.2g}, {bound} {limit:g}  {row['claim']}")
        yield {"experiment": "claims", **row}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    names = ["exact", *EXPERIMENTS, "memory"]
    add("--experiments", nargs="+", choices=names, default=names, metavar="NAME")
    add("--quick", action="store_true", help="small sizes")
    add("--seconds", type=float, default=6.0, help="for the turns of a case, about")
    add("--cap", type=float, default=256, help="MiB of memory for the largest batch")
    add("--out", metavar="PATH", help="write the results there, as lines of JSON")
    add("--plot", metavar="PATH", help="draw the results there, e.g. times.png")
    add("--largest", choices=list(MODES), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    warnings.simplefilter("ignore")  # on noise, which is nobody's here
    args = parse_arguments()
    torch.set_num_threads(1)
    if args.largest:
        return print_largest(args.largest, args.cap)
    if args.plot:
        pyplot()  # fails now rather than after the measurements
    rows = []
    with open(args.out or os.devnull, "w") as file:
        for row in measure(args):
            rows.append({**row, **where()})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
    spent = sum(os.times()[:4])
    print(f"\n{spent / 60:.1f} minutes of process time")
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
