"""Time and memory of a mixture of experts, by the number of experts and their load.

Run as ``python benchmarks/moe.py``. A small transformer whose feed-forward layers are
mixtures of experts, trained privately in "ghost" and "ghost_bk". Which expert a token
goes to is fixed by its id, so that the data set the load: the router is trained as
always, but a number is added to the logit of the expert that is to win.

Ways to arrange the tokens of stacked experts:

- gathered: a product for each expert, the default of ``opacus_ext.layers``.
- padded: ``dispatch="padded"`` of these layers, one product of all experts.
- by sample: gathered, but per-sample gradients are computed from the tokens that are
  padded in each sample, as in the paper's main text (:func:`padded_by_sample`).

Models:

- stacked: ``opacus_ext.layers.SwitchFeedForward``, all experts in one parameter.
- top-2: ``opacus_ext.layers.TopKFeedForward``, gated, two experts a token.
- modules: transformers' ``SwitchTransformersSparseMLP``, each expert a module.

Loads:

- even: each sample sends equally many tokens to each expert.
- zipf s: the i-th expert gets a share of 1 / i ** s of all tokens, at random.
- one: one expert gets all tokens of all samples.
- own: each sample sends all of its tokens to one expert, the next sample to the next.

Sections, each printed as a table:

- baselines: nxBP, multiLoss, vmap over the whole model and Opacus as it ships, on the
  load zipf 1. (On the even one Opacus is right by chance where experts are modules and
  as many as tokens: each is given one token of each sample, in the samples' order.)
- time: of a step of ours, by the minima / by the median of the turns, as ratios to
  the non-private one, which is gathered.
- memory: the peak of each mode in a process of its own, as a ratio.
- growth: the time with most experts over the time with fewest.

Before a step is timed its clipped gradients are compared with those of multiLoss and
of nxBP, and the benchmark fails if ours deviate from both by more than ``LIMIT``. (Both
are right, but a forward pass of one sample at a time rounds otherwise, which turns some
ReLU on or off. Where experts are modules, ours run some samples by themselves, too.)

Steps, noise and turns are those of ``step_time.py``, but with one thread on a CPU it is
the process's CPU time that counts, which other work on the machine disturbs less than
the time on the wall. "padded rows" are the rows of the padded batch for each token,
padded over all samples / by sample.
"""

import argparse
import datetime
import gc
import json
import math
import multiprocessing
import os
import time
import warnings
from itertools import islice
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple
from unittest.mock import patch

import _baselines
import step_time
import torch
import torch.nn.functional as F
from fast_clipping import deviation, print_cells, pyplot
from step_time import (
    BASELINE,
    GIVE_BACK,
    Block,
    Mode,
    Row,
    Step,
    functorch_vmap,
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
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers.modeling_switch_transformers import (
    SwitchTransformersSparseMLP,
)

from opacus_ext.grad_sample.factors import Factor, OneHot
from opacus_ext.grad_sample.rules import experts
from opacus_ext.layers import Experts, SwitchFeedForward, TopKFeedForward

WIDTH, HIDDEN, LAYERS, VOCABULARY = 64, 256, 2, 256
PULL = 4.0  # what is added to the logit of the expert that is to win
# Of the deviation of clipped gradients in float32: relative to a parameter's gradient,
# or to a share of all gradients where that is more (sums that cancel are all rounding).
LIMIT, FLOOR = 1e-4, 1e-2
PRELOAD = ["opacus_ext", SwitchTransformersSparseMLP.__module__]
FULL = {
    "models": ["stacked", "modules"],
    "experts": [4, 16, 64],
    "loads": ["even", "zipf 1", "own"],
    "batch": 32,
    "length": 64,
    "repeats": 5,
}
QUICK = {
    "models": ["stacked", "top-2", "modules"],
    "experts": [2, 4],
    "loads": ["even", "zipf 1", "own"],
    "batch": 4,
    "length": 8,
    "repeats": 2,
}


class Case(NamedTuple):
    """What is measured: a model and a load; ``batch`` samples of ``length`` tokens."""

    model: str
    experts: int
    load: str
    batch: int
    length: int


# -- models and loads --------------------------------------------------------------


class Steered(nn.Module):
    """A router whose decision is forced by what is added to its logits."""

    transient = ("pull",)  # set by each forward of the model

    def __init__(self, experts: int):
        super().__init__()
        self.gate = nn.Linear(WIDTH, experts, bias=False)
        self.pull: Optional[torch.Tensor] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x) + self.pull


class MixtureBlock(Block):
    """step_time's transformer block with a mixture of experts as its feed-forward."""

    def __init__(self, case: Case):
        super().__init__(WIDTH)
        self.up = self.down = None
        self.mixture = MIXTURES[case.model](case)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixture(x)


def stacked(case: Case) -> nn.Module:
    layer = SwitchFeedForward(WIDTH, HIDDEN, case.experts)
    layer.router = Steered(case.experts)
    return layer


def top_2(case: Case) -> nn.Module:
    layer = TopKFeedForward(WIDTH, HIDDEN, case.experts, top_k=2)
    layer.router = Steered(case.experts)
    return layer


def modules(case: Case) -> nn.Module:
    config = SwitchTransformersConfig(
        d_model=WIDTH,
        d_ff=HIDDEN,
        num_experts=case.experts,
        expert_capacity=case.length,  # of a sequence: nothing is dropped
        dropout_rate=0.0,
        router_jitter_noise=0.0,
    )
    layer = SwitchTransformersSparseMLP(config)
    layer.router.classifier = Steered(case.experts)
    return layer


MIXTURES: Dict[str, Callable[[Case], nn.Module]] = {
    "stacked": stacked,
    "top-2": top_2,
    "modules": modules,
}


class LanguageModel(nn.Module):
    """Token ids [B, T] -> logits [B, T, V]; id i goes to expert i modulo experts."""

    def __init__(self, case: Case):
        super().__init__()
        self.experts = case.experts
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*(MixtureBlock(case) for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for p in self.parameters():  # small logits, as in step_time.py
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        size = self.experts
        first, second = (F.one_hot((ids + i) % size, size) for i in (0, 1))
        for router in self.modules():
            if isinstance(router, Steered):
                router.pull = PULL * first + PULL / 2 * second
        return self.head(self.norm(self.blocks(self.tokens(ids))))


def chosen_experts(case: Case) -> torch.Tensor:
    """The expert of each token, [B, T]; where two are chosen, the first."""
    shape, sample = (case.batch, case.length), torch.arange(case.batch)[:, None]
    if case.load.startswith("zipf"):
        power = float(case.load.split()[1])
        share = torch.arange(1, case.experts + 1) ** -power
        return share.multinomial(math.prod(shape), replacement=True).view(shape)
    if case.load == "one":
        return torch.zeros(shape, dtype=torch.long)
    if case.load == "own":
        return (sample % case.experts).repeat(1, case.length)
    order = torch.rand(shape).argsort(dim=1)
    return (order + sample) % case.experts


def padded_rows(case: Case) -> Dict[str, float]:
    """The rows of the padded batch for each token; where two are chosen, a choice."""
    torch.manual_seed(0)
    counts = F.one_hot(random_ids(case) % case.experts, case.experts)
    if case.model == "top-2":
        counts = torch.cat([counts, counts.roll(1, dims=2)], dim=1)
    tokens, counts = float(counts.sum()), counts.sum(1)  # of each sample
    most, of_sample = float(counts.sum(0).max()), float(counts.max())
    return {
        "padded_rows": case.experts * most / tokens,
        "padded_rows_by_sample": case.experts * case.batch * of_sample / tokens,
    }


def random_ids(case: Case) -> torch.Tensor:
    """Token ids [B, T], the id modulo ``experts`` being the expert."""
    chosen, others = chosen_experts(case), VOCABULARY // case.experts
    return chosen + case.experts * torch.randint(others, chosen.shape)


def model_and_data(case: Case, device: str) -> Tuple[nn.Module, TensorDataset]:
    """The same for the same case."""
    torch.manual_seed(0)
    ids = random_ids(case)
    model, targets = LanguageModel(case), torch.randint(VOCABULARY, ids.shape)
    return model.to(device), TensorDataset(ids.to(device), targets.to(device))


# -- modes -------------------------------------------------------------------------


GATHERED = experts._experts


def padded_by_sample(
    size: int,
    transposed: bool,
    backprops: torch.Tensor,
    x: torch.Tensor,
    index: torch.Tensor,
) -> List[Tuple[Factor, ...]]:
    """
    The factors of rows that were sent to experts, but padded: each expert's tokens as
    ``[B, C_max, width]``, zeros after the last one of a sample, ``C_max`` the most that
    one expert was given of one sample. The more uneven the load and the more experts,
    the more of it is padding.

    Source: DP mixture of experts, "Expert per-sample gradient computation" (here only
    the per-sample gradients see the padding, not the experts).
    """
    ((expert, *rows),) = GATHERED(size, transposed, backprops, x, index)
    chosen = F.one_hot(expert.index, size)
    place = chosen.cumsum(1).sub(1).gather(2, expert.index[..., None]).squeeze(2)
    sample = torch.arange(len(index), device=index.device)[:, None]
    most = int(chosen.sum(1).max()) if index.numel() else 0

    def pad(x: torch.Tensor) -> torch.Tensor:
        wide = x.new_zeros(len(x), size, most, x.shape[2])
        return wide.index_put((sample, expert.index, place), x).flatten(1, 2)

    slots = torch.arange(size, device=index.device).repeat_interleave(most)
    return [(OneHot(slots.expand(len(index), -1), size), *map(pad, rows))]


def padded(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """A private step whose experts are dispatched padded."""
    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.dispatch = "padded"
    return private(model, data, mode)


def by_sample(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """A private step whose experts' gradients are of tokens padded by sample."""
    inner = private(model, data, mode)

    def step() -> None:
        with patch.object(experts, "_experts", padded_by_sample):
            inner()

    return step


WAYS = {"gathered": private, "padded": padded, "by sample": by_sample}
OURS = {
    f"{mode} {way}": Mode(build, mode, ours=True)
    for mode, ways in (("ghost", ("gathered", "padded")), ("ghost_bk", WAYS))
    for way, build in WAYS.items()
    if way in ways
}
OTHERS = {
    "nxBP": Mode(_baselines.nx_bp),
    "multiLoss": Mode(_baselines.multi_loss),
    "functorch vmap": Mode(functorch_vmap),
    "Opacus hooks": Mode(private, "hooks"),
    "Opacus ghost": Mode(private, "ghost"),
}
MODES = {BASELINE: Mode(non_private), **OURS, **OTHERS}
SLOW, SLOW_EVERY = ("nxBP", "multiLoss"), 5


def ours(case: Case) -> List[str]:
    """Modes of ours; where experts are modules their tokens are always gathered."""
    every = case.model != "modules"
    return [name for name in OURS if every or name.endswith("gathered")]


def build(name: str, case: Case, device: str) -> Step:
    select(MODES[name])
    model, data = model_and_data(case, device)
    return MODES[name].build(model, data, MODES[name].grad_sample_mode)


# -- do the modes agree? -----------------------------------------------------------


def update(name: str, case: Case, device: str) -> Dict[str, torch.Tensor]:
    """What one step subtracts from each parameter."""
    select(MODES[name])
    model, data = model_and_data(case, device)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    MODES[name].build(model, data, MODES[name].grad_sample_mode)()
    return {key: before[key] - value for key, value in model.state_dict().items()}


def compare(case: Case, names: List[str], device: str) -> Dict[str, Row]:
    """
    The deviation of the modes' steps, free of noise, from those of multiLoss and nxBP,
    whichever is nearer, with about half of the samples clipped. The learning rate makes
    the step larger than the parameters, whose rounding would hide it.

    Raises:
        AssertionError: if a mode of ours deviates from both
    """
    gradients = _baselines.nx_bp_gradients(*model_and_data(case, device))
    bound = median(float(get_total_norm(g)) for g in islice(gradients, 5))
    found: Dict[str, Row] = {}
    constants = {"SIGMA": 0.0, "LR": 2.0**14, "MAX_GRAD_NORM": bound}
    with patch.multiple(step_time, **constants):
        true = [update(name, case, device) for name in SLOW]
        for name in names:
            try:
                got = update(name, case, device)
                off = min(deviation(got, each, floor=FLOOR) for each in true)
                found[name] = {"deviation": off}
            except Exception as error:
                if name in OURS:
                    raise
                found[name] = {"refused": refusal(name, error)}
    for name in OURS:
        off = found.get(name, {}).get("deviation", 0.0)
        assert off <= LIMIT, f"{name} deviates from {SLOW} by {off:.0e} on {case}."
    return found


# -- time --------------------------------------------------------------------------


def time_case(case: Case, names: List[str], repeats: int, device: str) -> List[Row]:
    """Compare the modes with multiLoss and time them, interleaved; one row a mode."""
    rows: Dict[str, Row] = {name: {**case._asdict(), "mode": name} for name in names}
    private_ = [name for name in names if name != BASELINE]
    for name, row in compare(case, private_, device).items():
        rows[name].update(row)
    gc.collect()
    steps: Dict[str, Step] = {}
    for name in names:
        if "refused" not in rows[name]:
            steps[name] = build(name, case, device)
            for _ in range(2):  # how samples are laid out is looked for at both
                steps[name]()
    clock = time.process_time if counts_cpu_time(device) else time.perf_counter
    times = take_turns(steps, MODES, repeats, device, SLOW, SLOW_EVERY, clock)
    for name, row in times.items():
        rows[name].update(row)
    rows[BASELINE].update(padded_rows(case))
    return list(rows.values())


def counts_cpu_time(device: str) -> bool:
    """Where one thread does it all: other work on the machine has no part in it."""
    return device == "cpu" and torch.get_num_threads() == 1


def run_time(cases: List[Case], args: argparse.Namespace) -> List[Row]:
    columns = ["model", "experts", "load", "padded rows", f"{BASELINE}, ms", *OURS]
    print_header("## Time of a step", columns + ["largest deviation"])
    results: List[Row] = []
    for case in cases:
        names = [BASELINE, *ours(case)]
        base, *rows = time_case(case, names, args.repeats, args.device)
        cells = [*case_cells(case), milliseconds(base)]
        timed = {r["mode"]: f"{r['ratio']:.2f} / {r['ratio_median']:.2f}" for r in rows}
        cells += [timed.get(name, "-") for name in OURS]
        worst = max(row["deviation"] for row in rows)
        print_cells([*cells, f"{worst:.0e}"])
        results += [base, *rows]
    return results


def run_baselines(cases: List[Case], args: argparse.Namespace) -> List[Row]:
    columns = ["model", "experts", f"{BASELINE}, ms", *OTHERS]
    print_header("## Baselines: time of a step (deviation)", columns)
    results: List[Row] = []
    for case in cases:
        base, *rows = time_case(case, [BASELINE, *OTHERS], args.repeats, args.device)
        cells = [case.model, str(case.experts), milliseconds(base)]
        for row in rows:
            timed = "{ratio:.2f} / {ratio_median:.2f} ({deviation:.0e})"
            cells.append(row.get("refused") or timed.format(**row))
        print_cells(cells)
        results += [base, *rows]
    return results


def case_cells(case: Case) -> List[str]:
    padding = " / ".join(f"{rows:.1f}" for rows in padded_rows(case).values())
    return [case.model, str(case.experts), case.load, padding]


def milliseconds(row: Row) -> str:
    return f"{row['min_ms']:.1f} / {row['median_ms']:.1f}"


# -- memory ------------------------------------------------------------------------


def peak(name: str, case: Case, device: str, threads: int) -> float:
    """MiB at the peak of a step, over an empty process; call it in a fresh one."""
    torch.set_num_threads(threads)
    quiet()
    tiny = case._replace(experts=2, batch=2, length=4)
    sizes = (lambda: build(name, tiny, device)), (lambda: build(name, case, device))
    return peak_memory(*sizes, device) / 2**20


def run_memory(cases: List[Case], args: argparse.Namespace) -> List[Row]:
    """One process a mode, forked off one that has imported what takes long."""
    columns = ["model", "experts", "load", "padded rows", f"{BASELINE}, MiB", *OURS]
    print_header("## Peak memory", columns)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    results: List[Row] = []
    with patch.dict(os.environ, GIVE_BACK), context.Pool(1, maxtasksperchild=1) as pool:
        for case in cases:
            rows: List[Row] = []
            for name in (BASELINE, *ours(case)):
                mib = pool.apply(peak, (name, case, args.device, args.threads))
                rows.append({**case._asdict(), "mode": name, "peak_mib": mib})
                rows[-1]["ratio"] = mib / rows[0]["peak_mib"]
            cells = [*case_cells(case), f"{rows[0]['peak_mib']:.1f}"]
            ratios = {row["mode"]: f"{row['ratio']:.2f}" for row in rows[1:]}
            print_cells(cells + [ratios.get(name, "-") for name in OURS])
            results += rows
    return results


# -- growth with the number of experts ---------------------------------------------


def series(rows: List[Row], value: str, **fields: Any) -> Dict[int, float]:
    """A value of the rows that have these fields, by the number of experts."""
    chosen = (r for r in rows if all(r[key] == x for key, x in fields.items()))
    return {row["experts"]: row[value] for row in chosen}


def growth(rows: List[Row]) -> List[Row]:
    """The time with most experts over that with fewest, by model, load and mode."""
    columns = ["model", "load", "experts", BASELINE, *OURS]
    print_header("## Growth: time with most experts over fewest", columns)
    results: List[Row] = []
    for model, load in dict.fromkeys((row["model"], row["load"]) for row in rows):
        if len(series(rows, "min_ms", model=model, load=load, mode=BASELINE)) < 2:
            continue
        found: List[Row] = []
        for mode in (BASELINE, *OURS):
            times = series(rows, "min_ms", model=model, load=load, mode=mode)
            if not times:
                continue
            few, many = min(times), max(times)
            grown = {"from": few, "to": many, "growth": times[many] / times[few]}
            found.append({"model": model, "load": load, "mode": mode, **grown})
        grew = {row["mode"]: f"{row['growth']:.2f}" for row in found}
        cells = [grew.get(mode, "-") for mode in (BASELINE, *OURS)]
        print_cells([model, load, f"{few} to {many}", *cells])
        results += found
    return results


# -- picture -----------------------------------------------------------------------


def plot(results: Dict[str, List[Row]], path: str) -> None:
    """A line of panels a model: time and memory over the experts, for each load."""
    if not results.get("time") or not results.get("memory"):
        raise SystemExit("The picture needs the sections time and memory.")
    models, loads = (
        list(dict.fromkeys(row[key] for row in results["time"]))
        for key in ("model", "load")
    )
    panels = [(section, load) for section in ("time", "memory") for load in loads]
    size = (3.6 * len(panels), 3.4 * len(models))
    figure, grid = pyplot().subplots(
        len(models), len(panels), figsize=size, layout="constrained", squeeze=False
    )
    for line, model in zip(grid, models):
        for axes, (section, load) in zip(line, panels):
            axes.set_title(f"{model}: {section}, load: {load}")
            for i, mode in enumerate(OURS):
                fields = {"model": model, "load": load, "mode": mode}
                ratios = series(results[section], "ratio", **fields)
                if ratios:
                    style = f"C{i}{'o-' if 'ghost_bk' in mode else 'o--'}"
                    axes.plot(*zip(*ratios.items()), style, markersize=4, label=mode)
                    axes.set_xscale("log", base=2)
                    axes.set_xticks(list(ratios), list(ratios))
            axes.axhline(1, color="gray", linewidth=0.8)
            axes.set(xlabel="experts", yscale="log", ylabel=f"ratio to {BASELINE}")
            ticks = [1, 1.5, 2, 3, 5, 10, 20, 50]
            axes.set_yticks(ticks, ticks)
            axes.minorticks_off()
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(OURS))
    figure.savefig(path, dpi=100)


# -- command line ------------------------------------------------------------------


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    sections = ["baselines", "time", "memory"]
    add("--sections", nargs="+", choices=sections, default=sections)
    add("--models", nargs="+", choices=list(MIXTURES))
    add("--experts", nargs="+", type=int, metavar="N")
    add("--loads", nargs="+", metavar="LOAD", help='"even", "zipf 1.5", "one", "own"')
    add("--batch", type=int)
    add("--length", type=int)
    add("--repeats", type=int)
    add("--quick", action="store_true", help="small sizes, two repeats")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--threads", type=int, default=1)
    add("--note", help="about the machine, written with the results")
    add("--json", metavar="PATH", help="also write the results there, as JSON lines")
    add("--plot", metavar="PATH", help="also draw the results there, e.g. moe.png")
    add("--from-json", metavar="PATH", help="only draw these results")
    args = parser.parse_args()
    if args.from_json and not args.plot:
        parser.error("--from-json needs --plot")
    for name, default in (QUICK if args.quick else FULL).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def cases(args: argparse.Namespace) -> List[Case]:
    return [
        Case(model, count, load, args.batch, args.length)
        for model in args.models
        for load in args.loads
        for count in args.experts
    ]


def measure(args: argparse.Namespace) -> Iterator[Tuple[str, List[Row]]]:
    """The sections that were asked for, each when it is done."""
    if "baselines" in args.sections:
        ends = sorted({args.experts[0], args.experts[-1]})
        chosen = [
            Case(model, count, "zipf 1", args.batch, args.length)
            for model in args.models
            for count in ends
        ]
        yield "baselines", run_baselines(chosen, args)
    if "time" in args.sections:
        rows = run_time(cases(args), args)
        yield "time", rows
        yield "growth", growth(rows)
    if "memory" in args.sections:
        yield "memory", run_memory(cases(args), args)


def machine(args: argparse.Namespace) -> Row:
    """What the results were measured on, printed."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    found = {"torch": torch.__version__, "device": device, "threads": args.threads}
    load = found["load_average"] = os.getloadavg()[0]
    found["date"] = datetime.date.today().isoformat()
    print(f"torch {found['torch']}, {device}, {args.threads} CPU threads")
    print(f"{os.cpu_count()} CPU cores, load average {load:.1f} at the start")
    if args.note:
        print(args.note)
        found["note"] = args.note
    sizes = f"B={args.batch}, T={args.length}, width {WIDTH}, hidden {HIDDEN}"
    kind = "CPU time" if counts_cpu_time(args.device) else "time"
    print(f"{LAYERS} layers, {sizes}; {kind}, minimum / median of {args.repeats} turns")
    return found


def quiet() -> None:
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="There is a performance drop")


def main() -> None:
    quiet()
    args = parse_arguments()
    if args.plot:
        pyplot()  # fails now rather than after the measurements
    results: Dict[str, List[Row]] = {}
    if args.from_json:
        with open(args.from_json) as file:
            for row in map(json.loads, file):
                results.setdefault(row.pop("section"), []).append(row)
        return plot(results, args.plot)
    torch.set_num_threads(args.threads)
    results["machine"] = [machine(args)]
    results.update(measure(args))
    if args.json:
        with open(args.json, "w") as file:
            for section, rows in results.items():
                for row in rows:
                    print(json.dumps({"section": section, **row}), file=file)
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
