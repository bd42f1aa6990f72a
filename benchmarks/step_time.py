"""Time and memory of one DP-SGD step in every mode, as ratios to a non-private one.

Run as ``python benchmarks/step_time.py``. Four sections, each printed as a table:

- time: all modes take turns in one process (A B C A B C ...), so that a busy machine
  slows all of them alike. ``ratio`` compares the minima over the repeats,
  ``ratio_median`` is the median of the ratios taken turn by turn.
- memory: the peak of each mode in a process of its own.
- growth: ghost_bk against the non-private step at a fixed number of tokens, B * T.
- overhead: a GPT-2 of transformers so small that the Python around the kernels is most
  of a step; process time of one thread, and microseconds beyond the non-private step
  for each layer with parameters.

Every step is forward, backward, noise and ``SGD.step()``. The non-private step draws
the noise too, because drawing it costs every private mode the same. Set
``OMP_NUM_THREADS`` for the number of threads. ``--compile`` adds compiled models, whose
first step takes minutes; the bars say their ratios to the compiled and to the eager
non-private step. ``--peers`` adds other libraries to the
table of times (``peers.py``), with one core and process time for all. The bars at the
end use the minimum, the figure that other work on the machine disturbs least.
"""

import argparse
import functools
import gc
import json
import math
import os
import resource
import subprocess
import sys
import time
import warnings
from contextlib import suppress
from statistics import median
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import DataLoader, TensorDataset

SIGMA, MAX_GRAD_NORM, LR = 1.0, 1.0, 1e-3
BASELINE = "non-private"
BARS = {
    "ghost_bk time": 1.25,
    "ghost speed-up": 1.2,
    "memory": 1.15,
    "growth": 1.2,
    "overhead": 150,
    "eager": 1.0,
    "compiled": 1.2,
    "small": 1.3,
}
GIVE_BACK = {  # freed memory, by glibc's allocator
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
}

Step = Callable[[], None]
Row = Dict[str, Any]


class Shape(NamedTuple):
    """Layers, width, vocabulary, sequence length T and batch size B."""

    layers: int
    width: int
    vocabulary: int
    length: int
    batch: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> "Shape":
        return cls(*(int(number) for number in text.split(",")))


SHAPES = [
    Shape(4, 256, 8192, 128, 8),
    Shape(2, 128, 2048, 512, 4),
    Shape(2, 256, 50257, 64, 4),
]
GROWTH = [Shape(2, 128, 2048, length, 2048 // length) for length in (128, 512, 2048)]
TINY = Shape(1, 32, 64, 8, 2)
SMALL = Shape(12, 32, 100, 8, 2)  # of the section on overhead


class Block(nn.Module):
    """A pre-LN transformer block: [B, T, d] -> [B, T, d]."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.feed_forward(self.norm2(x))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class LanguageModel(nn.Module):
    """A GPT-like language model: token ids [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: Shape, tied: bool):
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape.width) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        # Small logits: the softmax of large ones underflows to denormal numbers, which
        # double the time of a step on CPU. The learning rate keeps them small.
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        batch, length = ids.shape
        positions = torch.arange(length, device=ids.device).repeat(batch, 1)
        x = self.tokens(ids) + self.positions(positions)
        return self.head(self.norm(self.blocks(x)))


class TokenLoss(nn.Module):
    """Cross entropy averaged over each sample's tokens; [B] with reduction "none"."""

    def __init__(self, reduction: str = "mean"):
        super().__init__()
        self.reduction = reduction

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        rows = logits.flatten(0, 1)
        loss = F.cross_entropy(rows, targets.flatten(), reduction="none")
        loss = loss.view(targets.shape).mean(1)
        return loss.mean() if self.reduction == "mean" else loss


def noisy_sgd(model: nn.Module, batch: int) -> Step:
    """Return a step that adds DPOptimizer's noise to ``p.grad`` and applies SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    std = SIGMA * MAX_GRAD_NORM / batch

    def step() -> None:
        for p in model.parameters():
            if p.grad is None:  # an expert that no token chose
                p.grad = torch.zeros_like(p)
            p.grad.add_(torch.normal(0, std, p.shape, device=p.device, dtype=p.dtype))
        optimizer.step()
        optimizer.zero_grad()

    return step


def non_private(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    ids, targets = data.tensors
    criterion, update = TokenLoss(), noisy_sgd(model, len(ids))

    def step() -> None:
        criterion(model(ids), targets).backward()
        update()

    return step


def functorch_vmap(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """Per-sample gradients of the whole model by vmap(grad), without Opacus."""
    ids, targets = data.tensors
    criterion, update = TokenLoss(), noisy_sgd(model, len(ids))
    named = dict(model.named_parameters())

    def loss(params: Dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor):
        return criterion(functional_call(model, params, (x[None],)), y[None])

    def step() -> None:
        params = {name: p.detach() for name, p in named.items()}
        grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, ids, targets)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()])
        clip = (MAX_GRAD_NORM / (norms.norm(dim=0) + 1e-6)).clamp(max=1) / len(ids)
        for name, p in named.items():
            p.grad = torch.einsum("b,b...->...", clip, grads.pop(name))
        update()

    return step


def private(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """A step of ``PrivacyEngine.make_private``, in Opacus's modes or in ours."""
    ids, targets = data.tensors
    model, optimizer, *wrapped, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=LR),
        criterion=TokenLoss(),
        data_loader=DataLoader(data, batch_size=len(ids)),
        noise_multiplier=SIGMA,
        max_grad_norm=MAX_GRAD_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )
    criterion = wrapped[0] if wrapped else TokenLoss()

    def step() -> None:
        criterion(model(ids), targets).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def compiled(build: Callable, model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """The same with the model compiled, before it is made private."""
    return build(torch.compile(model), data, mode)


class Mode(NamedTuple):
    """How to build a step, the grad_sample_mode, and whether it is opacus_ext's."""

    build: Callable[[nn.Module, TensorDataset, str], Step]
    grad_sample_mode: str = ""
    ours: bool = False


MODES = {
    BASELINE: Mode(non_private),
    "Opacus hooks": Mode(private, "hooks"),
    "Opacus ghost": Mode(private, "ghost"),
    "functorch vmap": Mode(functorch_vmap),
    "ghost": Mode(private, "ghost", ours=True),
    "ghost_bk": Mode(private, "ghost_bk", ours=True),
    "hooks": Mode(private, "hooks", ours=True),
    "scan": Mode(private, "scan", ours=True),
    "auto": Mode(private, "auto", ours=True),
}
COMPILED = (BASELINE, "ghost", "ghost_bk")  # what --compile adds


def select(mode: Mode) -> None:
    """Register opacus_ext for its own modes; the others run on Opacus as it ships."""
    if mode.ours:
        import opacus_ext

        opacus_ext.register()
    elif "opacus_ext" in sys.modules:
        sys.modules["opacus_ext"].unregister()


def build(name: str, shape: Shape, tied: bool, device: str) -> Step:
    select(MODES[name])
    torch.manual_seed(0)
    model = LanguageModel(shape, tied).to(device)
    size = (2, shape.batch, shape.length)
    ids, targets = torch.randint(shape.vocabulary, size, device=device)
    mode = MODES[name]
    return mode.build(model, TensorDataset(ids, targets), mode.grad_sample_mode)


class GPT2(nn.Module):
    """GPT-2 as transformers has it: token ids [B, T] -> logits [B, T, V]."""

    def __init__(self, shape: Shape):
        super().__init__()
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=shape.vocabulary,
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=1,
            n_positions=64,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            tie_word_embeddings=False,
            bos_token_id=0,
            eos_token_id=0,
        )
        self.model = GPT2LMHeadModel(config)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def overhead(names: List[str], repeats: int) -> List[Row]:
    """What each layer with parameters costs beyond the non-private step, in Python."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    steps: Dict[str, Step] = {}
    rows: List[Row] = []
    for name in names:
        row = {"shape": str(SMALL), "tied": False, "mode": name}
        rows.append(row)
        try:
            select(MODES[name])
            torch.manual_seed(0)
            model = GPT2(SMALL)
            layers = sum(1 for m in model.modules() if m._parameters)
            data = torch.randint(SMALL.vocabulary, (2, SMALL.batch, SMALL.length))
            mode = MODES[name]
            step = mode.build(model, TensorDataset(*data), mode.grad_sample_mode)
            step()
            steps[name] = step
        except Exception as error:
            row["refused"] = refusal(name, error)
    times = take_turns(steps, MODES, repeats, clock=time.process_time)
    torch.set_num_threads(threads)
    base = times[BASELINE]["min_ms"]
    for row in rows:
        row.update(times.get(row["mode"], {}))
        if "min_ms" in row:
            row["us_per_layer"] = 1e3 * (row["min_ms"] - base) / layers
    return rows


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def refusal(name: str, error: Exception) -> str:
    """The first line of a private mode's error, which is a result: a table cell."""
    if name == BASELINE:
        raise error
    first = (str(error).splitlines() or [""])[0].replace("|", "/")
    return f"{type(error).__name__}: {first[:80]}"


def take_turns(
    steps: Dict[str, Step],
    modes: Dict[str, Mode],
    repeats: int,
    device: str = "cpu",
    slow: Sequence[str] = (),
    every: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Dict[str, Row]:
    """Time the steps, interleaved; those named in ``slow`` only ``every`` few turns."""
    times: Dict[str, Dict[int, float]] = {name: {} for name in steps}
    order = list(steps)
    for turn in range(repeats):
        for name in order:
            if name in slow and turn % every != min(1, repeats - 1):
                continue
            select(modes[name])
            synchronize(device)
            start = clock()
            steps[name]()
            synchronize(device)
            times[name][turn] = clock() - start
        order.append(order.pop(0))  # no mode always follows the same neighbour
    base = times[BASELINE]
    rows: Dict[str, Row] = {}
    for name, t in times.items():
        low, mid = min(t.values()), median(t.values())
        rows[name] = {"min_ms": 1e3 * low, "median_ms": 1e3 * mid}
        turns = [seconds / base[turn] for turn, seconds in t.items()]
        rows[name]["ratio"] = low / min(base.values())
        rows[name]["ratio_median"] = median(turns)
    return rows


def time_modes(
    shape: Shape,
    tied: bool,
    names: List[str],
    repeats: int,
    device: str,
    clock: Callable[[], float] = time.perf_counter,
) -> List[Row]:
    """Interleave the modes; one row a mode, a refusal in place of times."""
    steps: Dict[str, Step] = {}
    rows: List[Row] = []
    for name in names:
        row = {"shape": str(shape), "tied": tied, "mode": name}
        rows.append(row)
        try:
            step = build(name, shape, tied, device)
            step()
            steps[name] = step
        except Exception as error:
            row["refused"] = refusal(name, error)
    times = take_turns(steps, MODES, repeats, device, clock=clock)
    for row in rows:
        row.update(times.get(row["mode"], {}))
    return rows


def status_kib(field: str) -> Optional[int]:
    """A memory field of this process in KiB, where the system has /proc."""
    try:
        with open("/proc/self/status") as status:
            return next(int(x.split()[1]) for x in status if x.startswith(field))
    except (OSError, StopIteration):
        return None


def peak_memory(
    tiny: Callable[[], Step], build: Callable[[], Step], device: str, steps: int = 3
) -> int:
    """Bytes at the peak of a few steps, over those before the model was built.

    Call it in a fresh process. A tiny step of the same mode comes first, so that code
    and allocator pools count in the baseline; model and gradients count in the peak.
    On Linux the peak is VmHWM, reset after the tiny step: ru_maxrss can't be reset and
    a child inherits it from the process that started it.
    """
    tiny()()
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    elif (rss := status_kib("VmRSS:")) is not None:
        with suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
            clear.write("5")  # resets VmHWM
        before = rss * 1024
    else:
        before = max_rss()
    step = build()
    for _ in range(steps):
        step()
    if device == "cuda":
        return torch.cuda.max_memory_allocated() - before
    peak = status_kib("VmHWM:")
    return (max_rss() if peak is None else peak * 1024) - before


def max_rss() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def memory_of_modes(
    shape: Shape, tied: bool, names: List[str], device: str
) -> List[Row]:
    """One process a mode. glibc is told to give freed memory back at once: the peak
    then shows what a step holds, not what the allocator kept."""
    env = dict(os.environ, **GIVE_BACK)
    rows: List[Row] = []
    for name in names:
        row: Row = {"shape": str(shape), "tied": tied, "mode": name}
        rows.append(row)
        command = [sys.executable, __file__, "--peak-of", name, "--device", device]
        command += ["--shapes", str(shape), *(["--tied"] if tied else [])]
        child = subprocess.run(command, env=env, capture_output=True, text=True)
        if child.returncode:
            raise RuntimeError(f"{name} at {shape} failed:\n{child.stderr}")
        row.update(json.loads(child.stdout.splitlines()[-1]))
        if "peak_mib" in row:
            row["ratio"] = row["peak_mib"] / rows[0]["peak_mib"]
    return rows


def print_peak(name: str, shape: Shape, tied: bool, device: str) -> None:
    """What the child process of ``memory_of_modes`` does."""
    try:
        tiny, real = (
            functools.partial(build, name, s, tied, device) for s in (TINY, shape)
        )
        result: Row = {"peak_mib": peak_memory(tiny, real, device) / 2**20}
    except Exception as error:
        result = {"refused": refusal(name, error)}
    print(json.dumps(result))


def print_header(title: str, columns: List[str]) -> None:
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |")
    print("|" + " --- |" * len(columns), flush=True)


def print_rows(rows: List[Row], columns: List[str]) -> None:
    for row in rows:
        cells = [str(row["shape"]), "yes" if row["tied"] else "no", row["mode"]]
        if "refused" in row:
            cells += [row["refused"]] + [""] * (len(columns) - 1)
        else:
            cells += [f"{row[c]:.{2 if 'ratio' in c else 1}f}" for c in columns]
        print("| " + " | ".join(cells) + " |", flush=True)


def bar(name: str, value: float, limit: float, at_least: bool = False) -> Row:
    """Print a comparison; a mode that was refused has the value nan and fails."""
    passed = value >= limit if at_least else value <= limit
    sign = ">=" if at_least else "<="
    print(f"{'pass' if passed else 'FAIL'}  {value:5.2f} {sign} {limit:.2f}  {name}")
    known = None if math.isnan(value) else value
    return {"bar": name, "value": known, "limit": limit, "passed": passed}


def check_bars(results: Dict[str, List[Row]]) -> List[Row]:
    """Compare what was measured with the bars; modes that were left out are skipped."""

    def cases(section: str) -> Dict[Tuple[str, bool], Dict[str, Row]]:
        found: Dict[Tuple[str, bool], Dict[str, Row]] = {}
        for row in results.get(section, []):
            found.setdefault((row["shape"], row["tied"]), {})[row["mode"]] = row
        return found

    def label(shape: str, tied: bool) -> str:
        return f"{shape} {'tied' if tied else 'untied'}"

    print("\n## Bars, by the minimum\n")
    bars, nan = [], math.nan
    for case, rows in cases("time").items():
        if "ghost_bk" in rows:
            ratio = rows["ghost_bk"].get("ratio", nan)
            name = f"ghost_bk time, {label(*case)}"
            bars.append(bar(name, ratio, BARS["ghost_bk time"]))
        step = rows.get("ghost_bk, compiled", {}).get("min_ms")
        for base, key in ((BASELINE, "eager"), (f"{BASELINE}, compiled", "compiled")):
            if step is not None and base in rows:
                name = f"ghost_bk compiled / {base}, {label(*case)}"
                bars.append(bar(name, step / rows[base]["min_ms"], BARS[key]))
        stock = rows.get("Opacus ghost", {}).get("min_ms")
        if "ghost" in rows and stock is not None:
            faster = stock / rows["ghost"].get("min_ms", nan)
            name = f"ghost, times faster than Opacus ghost, {label(*case)}"
            bars.append(bar(name, faster, BARS["ghost speed-up"], at_least=True))
    for case, rows in cases("memory").items():
        if "ghost_bk" in rows:
            ratio = rows["ghost_bk"].get("ratio", nan)
            name = f"ghost_bk peak memory, {label(*case)}"
            bars.append(bar(name, ratio, BARS["memory"]))
    for rows in cases("overhead").values():
        if "ghost_bk" in rows:
            cost = rows["ghost_bk"].get("us_per_layer", nan)
            bars.append(bar("ghost_bk, us a layer", cost, BARS["overhead"]))
        whole = [rows.get(f"{n}, compiled", {}) for n in (BASELINE, "ghost_bk")]
        if all("min_ms" in row for row in whole):
            ratio = whole[1]["min_ms"] / whole[0]["min_ms"]
            name = "ghost_bk compiled / non-private, compiled, small layers"
            bars.append(bar(name, ratio, BARS["small"]))
    for tied in (False, True):
        ratios = [
            rows["ghost_bk"].get("ratio", nan)
            for (_, t), rows in cases("growth").items()
            if t == tied
        ]
        if ratios:
            name = f"growth, longest T over shortest, {'tied' if tied else 'untied'}"
            bars.append(bar(name, ratios[-1] / ratios[0], BARS["growth"]))
    return bars


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--shapes", nargs="+", type=Shape.parse, default=SHAPES, metavar="L,d,V,T,B")
    add("--repeats", type=int, default=7)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--json", metavar="PATH", help="also write the results there")
    add("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    sections = ["time", "memory", "growth", "overhead"]
    add("--sections", nargs="+", choices=sections, default=sections)
    add("--compile", action="store_true", help="also time steps of compiled models")
    add("--peers", action="store_true", help="also time other libraries (peers.py)")
    add("--peak-of", choices=list(MODES), help=argparse.SUPPRESS)
    add("--tied", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.peers and args.device != "cpu":
        parser.error("--peers is for the CPU")
    return args


def main() -> None:
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="There is a performance drop")
    args = parse_arguments()
    if args.peak_of:
        return print_peak(args.peak_of, args.shapes[0], args.tied, args.device)
    names = [n for n in MODES if n in args.modes or n == BASELINE]
    if args.compile:
        for name in set(COMPILED).intersection(names):
            mode = MODES[name]
            build = functools.partial(compiled, mode.build)
            MODES[f"{name}, compiled"] = mode._replace(build=build)
    timed = [*names, *(n for n in MODES if n.endswith(", compiled"))]
    clock = time.perf_counter
    if args.peers:
        import peers

        peers.use_one_core()
        MODES.update(peers.MODES)
        timed, clock = [*timed, *peers.MODES], time.process_time
    results: Dict[str, List[Row]] = {section: [] for section in args.sections}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {device}, {threads} CPU threads")
    case = ["layers,d,V,T,B", "tied", "mode"]
    columns = ["ratio", "ratio_median", "min_ms", "median_ms"]
    if "time" in results:
        print_header("## Time of a step", case + columns)
        for shape in args.shapes:
            for tied in (False, True):
                rows = time_modes(shape, tied, timed, args.repeats, args.device, clock)
                print_rows(rows, columns)
                results["time"] += rows
        if args.peers:
            peers.print_own_ratios(results["time"])
    if "memory" in results:
        print_header("## Peak memory", case + ["ratio", "peak_mib"])
        for shape in args.shapes:
            for tied in (False, True):
                rows = memory_of_modes(shape, tied, names, args.device)
                print_rows(rows, ["ratio", "peak_mib"])
                results["memory"] += rows
    if "overhead" in results:
        print_header("## Overhead of a layer", case + [*columns, "us_per_layer"])
        small = [n for n in timed if not args.peers or n not in peers.MODES]
        rows = overhead(small, 5 * args.repeats)
        print_rows(rows, [*columns, "us_per_layer"])
        results["overhead"] += rows
    if "growth" in results:
        print_header("## Growth with T at fixed B * T", case + columns)
        names = [BASELINE, "ghost_bk"]
        for tied in (False, True):
            for shape in GROWTH:
                rows = time_modes(shape, tied, names, args.repeats, args.device)
                print_rows(rows, columns)
                results["growth"] += rows
    bars = check_bars(results)
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"device": device, **results, "bars": bars}, file, indent=1)


if __name__ == "__main__":
    main()
