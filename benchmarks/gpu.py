"""All modes on a GPU beside plain steps and other libraries, by one command.

Run as ``make gpu``, or ``python -m benchmarks gpu --minutes 15``: first tests marked
``gpu``, then steps of models that people train, the ones that say most first. Each row
is written to a file of JSON lines as soon as it is measured, so that a run which was
cut off, or whose minutes are over, goes on where it stopped by the same command.
``python -m benchmarks tables`` makes the tables of docs/explanation/speed.md from it.

A step is forward, backward, clipping, noise and ``SGD.step()``, with noise in the plain
step too; data are random and on the device. Of each way to make it a row says:

- ms, plain_ms: the least time of a step by CUDA events (process time on a CPU), and
  that of the plain eager step, which takes turns with it
- mib: peak memory of its steps, with the model
- kernels: those that one step starts, as torch.profiler counts them
- largest: in ``largest`` rows, the largest batch that fits, by doubling
- refused: the first line of the error, where there is one

``--rehearse`` runs everything on a CPU with models that are tiny: it shows that the
command works, and its times mean nothing.
"""

import argparse
import gc
import json
import subprocess
import sys
import threading
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import fast_clipping
import peers
import step_time
import torch
from opacus.validators import ModuleValidator
from step_time import Step, TokenLoss, noisy_sgd, non_private, private
from torch import nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "benchmarks" / "results" / "speed-gpu.jsonl"
PLAIN = "plain"
CUT = "the process that ran it died"
Row = Dict[str, Any]


# -- models ----------------------------------------------------------------------------


class Logits(nn.Module):
    """A model of transformers that returns its logits: ids [B, T] -> [B, T, V]."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


class Autocast(nn.Module):
    """A model that computes in bfloat16 by autocast, and returns float32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            found = self.model(x)
        return found.float()


def gpt2(layers: int, width: int, tiny: bool) -> Tuple[nn.Module, int]:
    """GPT-2 with its tied head, as transformers ships it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads = (1, 16, 2) if tiny else (layers, width, width // 64)
    vocabulary = 64 if tiny else 50257
    config = GPT2Config(
        **dict(vocab_size=vocabulary, n_embd=width, n_layer=layers, n_head=heads),
        **dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False),
        **dict(bos_token_id=0, eos_token_id=0),
    )
    return Logits(GPT2LMHeadModel(config)), vocabulary


def llama_lora(tiny: bool) -> Tuple[nn.Module, int]:
    """A Llama of 1.1 B parameters in bfloat16, with LoRA of rank 16 in float32."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    large = dict(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22)
    large.update(num_attention_heads=32, num_key_value_heads=4, vocab_size=32000)
    small = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1)
    small.update(num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
    given = small if tiny else large
    model = LlamaForCausalLM(LlamaConfig(**given, use_cache=False))
    lora = LoraConfig(r=16, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = get_peft_model(model.to(torch.bfloat16), lora)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return Logits(model), given["vocab_size"]


def mixtral(tiny: bool) -> Tuple[nn.Module, int]:
    """A mixture of eight experts a layer, of which each token takes two."""
    from transformers import MixtralConfig, MixtralForCausalLM

    width, layers, vocabulary = (16, 1, 64) if tiny else (512, 8, 32000)
    config = MixtralConfig(
        **dict(vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width),
        **dict(num_hidden_layers=layers, num_attention_heads=2 if tiny else 8),
        **dict(num_key_value_heads=2, num_local_experts=4 if tiny else 8),
        **dict(num_experts_per_tok=2, use_cache=False),
    )
    return Logits(MixtralForCausalLM(config)), vocabulary


def dpformer(tiny: bool) -> Tuple[nn.Module, int]:
    """DPFormer as its paper has it for MovieLens-1M, without Re-Attention."""
    from opacus_ext.models.dpformer import DPFormer

    items = 64 if tiny else 3416
    return DPFormer(items, 1024, dropout=0.0), items + 1


def lstm(tiny: bool) -> Tuple[nn.Module, int]:
    """The LSTM of the fast-clipping paper, on tokens of which it classifies all."""
    case = fast_clipping.Case("LSTM-tokens")
    layers = fast_clipping.ARCHITECTURES[case.architecture](case)
    model = nn.Sequential(*layers, nn.Unflatten(1, (1, fast_clipping.CLASSES)))
    return model, fast_clipping.CLASSES


def untied(tiny: bool) -> Tuple[nn.Module, int]:
    """A model as large as GPT-2 small, of layers that other libraries know."""
    shape = step_time.Shape(12, 768, 50257, 256, 8)
    shape = step_time.TINY if tiny else shape
    return step_time.LanguageModel(shape, tied=False), shape.vocabulary


MODELS: Dict[str, Callable[[bool], Tuple[nn.Module, int]]] = {
    "GPT-2 small": partial(gpt2, 12, 768),
    "GPT-2 medium": partial(gpt2, 24, 1024),
    "Llama 1.1 B, LoRA": llama_lora,
    "Mixtral-like": mixtral,
    "DPFormer": dpformer,
    "LSTM": lstm,
    "untied": untied,
}


# -- ways to make a step ---------------------------------------------------------------


class Way(NamedTuple):
    """How to build a step, its grad_sample_mode, and how the model is compiled."""

    build: Callable[[nn.Module, TensorDataset, str], Step]
    mode: str = ""
    ours: bool = False
    compiles: str = ""


def stock(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """Opacus as it ships, with its own layers for recurrent ones."""
    return private(ModuleValidator.fix(model), data, mode)


def whole(model: nn.Module, data: TensorDataset, mode: str) -> Step:
    """``clipped_grads`` in one compiled program, then the noise and SGD."""
    from opacus_ext import clipped_grads

    criterion, update = TokenLoss("none"), noisy_sgd(model, len(data))
    params = {n: p for n, p in model.named_parameters() if p.requires_grad}

    def loss(sample: Any) -> torch.Tensor:
        ids, targets = sample
        return criterion(model(ids), targets).sum()

    def sums(*batch: torch.Tensor) -> Any:
        return clipped_grads(loss, params, batch, step_time.MAX_GRAD_NORM).sums

    compiled = torch.compile(sums, fullgraph=True, **KIND)

    def step() -> None:
        for name, total in compiled(*data.tensors).items():
            params[name].grad = total / len(data)
        update()

    return step


KIND = {"backend": "inductor"}  # of torch.compile
_EAGER, _GRAPHS = "default", "reduce-overhead"
WAYS = {
    PLAIN: Way(non_private),
    "ghost_bk": Way(private, "ghost_bk", True),
    "plain, compiled": Way(non_private, compiles=_EAGER),
    "ghost_bk, compiled": Way(private, "ghost_bk", True, _EAGER),
    "auto": Way(private, "auto", True),
    "hooks": Way(private, "hooks", True),
    "ghost": Way(private, "ghost", True),
    "scan": Way(private, "scan", True),
    "clipped_grads, compiled": Way(whole, "", True),
    "plain, CUDA graphs": Way(non_private, compiles=_GRAPHS),
    "ghost_bk, CUDA graphs": Way(private, "ghost_bk", True, _GRAPHS),
    "Opacus hooks": Way(stock, "hooks"),
    "Opacus ghost": Way(stock, "ghost"),
    "ghost, compiled": Way(private, "ghost", True, _EAGER),
    "fastDP": Way(peers.fast_dp),
    "Opake": Way(peers.opake, "1"),
}
_FEW = list(WAYS)[:8]
_PEERS = [PLAIN, "ghost_bk", "Opacus hooks", "Opacus ghost", "fastDP", "Opake"]


class Case(NamedTuple):
    """A model with a length T, a batch size B and a type; the ways to make a step."""

    model: str
    length: int
    batch: int
    dtype: str
    ways: List[str]
    largest: bool = False  # looks for the largest batch instead

    @property
    def key(self) -> str:
        names = [self.model, str(self.length), str(self.batch), self.dtype]
        return ", ".join([*names, *["largest"] * self.largest])


_ONE, _OTHER = "GPT-2 small", "GPT-2 medium"
CASES = [
    Case(_ONE, 256, 8, "bf16", list(WAYS)),
    Case("untied", 256, 8, "float32", _PEERS),
    Case("Llama 1.1 B, LoRA", 512, 8, "bf16", _FEW),
    Case("Mixtral-like", 256, 16, "bf16", _FEW),
    Case("DPFormer", 200, 64, "float32", _FEW),
    Case("LSTM", 64, 64, "float32", _FEW),
    Case(_OTHER, 512, 8, "bf16", _FEW),
    Case(_ONE, 256, 8, "bf16", [PLAIN, "hooks", "ghost_bk", "scan"], True),
    Case(_ONE, 1024, 8, "bf16", _FEW),
    Case(_ONE, 128, 64, "bf16", _FEW),
    Case(_ONE, 256, 8, "float32", _FEW),
    Case(_OTHER, 512, 8, "bf16", [PLAIN, "hooks", "ghost_bk", "scan"], True),
    Case(_OTHER, 1024, 16, "bf16", _FEW),
]
_TURNS, _LARGEST = 10, 2**14


def rehearsed() -> Iterator[Case]:
    """Tiny cases: each model, each way and each kind of row once."""
    seen = set()
    for case in CASES:
        if (case.model, case.largest) not in seen:
            seen.add((case.model, case.largest))
            whole = len(seen) == 1
            ways = case.ways if whole else [PLAIN, "ghost_bk"]
            yield case._replace(length=4, batch=2, ways=ways)


# -- measuring -------------------------------------------------------------------------


def step_of(name: str, case: Case, device: str, tiny: bool) -> Step:
    """Builds a step."""
    way = WAYS[name]
    step_time.select(step_time.Mode(way.build, way.mode, way.ours))
    torch.manual_seed(0)
    model, classes = MODELS[case.model](tiny)
    model = model.to(device)
    vocabulary = fast_clipping.VOCABULARY if case.model == "LSTM" else classes
    ids = torch.randint(1, vocabulary, (case.batch, case.length), device=device)
    shape = (case.batch, 1 if case.model == "LSTM" else case.length)
    targets = torch.randint(1, classes, shape, device=device)
    if case.dtype == "bf16":
        model = Autocast(model)
    if way.compiles:
        mode = {} if tiny else {"mode": way.compiles}
        model = torch.compile(model, **mode, **KIND)
    return way.build(model, TensorDataset(ids, targets), way.mode)


def seconds(step: Step, device: str) -> float:
    """Times one step."""
    if device == "cpu":
        start = time.process_time()
        step()
        return time.process_time() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def kernels(step: Step) -> int:
    """Counts the kernels that one step starts on the GPU."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        step()
        torch.cuda.synchronize()
    names = [event.name for event in found.events()]
    return sum(not name.startswith(("Memcpy", "Memset")) for name in names)


def timed(name: str, case: Case, device: str, tiny: bool, plain: Step) -> Row:
    """Measures one way, in turns with the plain step."""
    gpu = device == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    step = step_of(name, case, device, tiny)
    for _ in range(1 if tiny else 4):  # "auto" chooses, CUDA graphs are recorded
        step()
    found: Row = {}
    if gpu:
        found["mib"] = (torch.cuda.max_memory_allocated() - before) / 2**20
    turns: List[Tuple[float, float]] = []
    for _ in range(1 if tiny else _TURNS):
        step_time.select(step_time.Mode(non_private))
        one = seconds(plain, device)
        step_time.select(step_time.Mode(private, ours=WAYS[name].ours))
        turns.append((one, seconds(step, device)))
    plain_ms, ms = (1e3 * min(times) for times in zip(*turns))
    found.update(ms=ms, plain_ms=plain_ms, ratio=ms / plain_ms)
    if gpu:
        found["kernels"] = kernels(step)
    return found


def largest(name: str, case: Case, device: str, tiny: bool) -> Row:
    """Finds the largest batch that fits, by doubling."""
    fits, size, most = 0, case.batch, 4 if tiny else _LARGEST
    while size <= most:
        try:
            step = step_of(name, case._replace(batch=size), device, tiny)
            step()
            step()
        except torch.cuda.OutOfMemoryError:
            break
        fits, size = size, 2 * size
        del step
        gc.collect()
        torch.cuda.empty_cache()
    return {"largest": fits}


def measure(cases: List[Case], path: Path, device: str, tiny: bool) -> None:
    """Measures what the file has not, and says before each row what it tries."""
    for case in cases:
        done, plain = known(path), None
        for name in (way for way in case.ways if (case.key, way) not in done):
            row = {"case": case.key, "way": name}
            print(json.dumps(row), flush=True)
            try:
                if case.largest:
                    found = largest(name, case, device, tiny)
                else:
                    if plain is None:
                        plain = step_of(PLAIN, case, device, tiny)
                        plain()
                    found = timed(name, case, device, tiny, plain)
            except Exception as error:
                first = (str(error).splitlines() or [""])[0].replace("|", "/")
                found = {"refused": f"{type(error).__name__}: {first[:120]}"}
            write(path, {**row, **found})
            torch._dynamo.reset()
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()


# -- the command -----------------------------------------------------------------------


def known(path: Path) -> Dict[Tuple[str, str], Row]:
    """The rows of a file; of a line that was cut off, none."""
    found: Dict[Tuple[str, str], Row] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if "way" in row:
                found[row["case"], row["way"]] = row
    return found


def run_tests() -> None:
    """Runs the tests marked gpu, once."""
    print("tests marked gpu", flush=True)
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"], cwd=ROOT
    )


def run_cases(cases: List[Case], args: argparse.Namespace, end: float) -> bool:
    """
    Measures what the file has not, in another process, as one way may break it; of
    such a way the row says so. Returns False if time is over.
    """
    every = {(case.key, way) for case in cases for way in case.ways}
    while every - {*known(args.out)}:
        command = [sys.executable, "-m", "benchmarks", "gpu", "--child"]
        command += ["--out", str(args.out), *["--rehearse"] * args.rehearse]
        child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        clock = threading.Timer(max(end - time.monotonic(), 0), child.kill)
        clock.start()
        begun = None
        try:
            for line in child.stdout or ():
                if line.startswith('{"case"'):
                    report(args.out, begun)
                    begun = json.loads(line)
            child.wait()
        finally:
            clock.cancel()
            child.kill()
        if time.monotonic() >= end:
            return False
        if begun is None:
            raise SystemExit("The process that measures has ended: see above.")
        if (begun["case"], begun["way"]) not in known(args.out):
            write(args.out, {**begun, "refused": CUT})
        report(args.out, begun)
    return True


def report(path: Path, begun: Optional[Row]) -> None:
    """Prints the row of what was tried."""
    if begun is not None:
        print(shown(known(path)[begun["case"], begun["way"]]), flush=True)


def write(path: Path, row: Row) -> None:
    """Appends a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def shown(row: Row) -> str:
    """A row as a line."""
    if "refused" in row:
        what = row["refused"]
    elif "largest" in row:
        what = f"largest batch {row['largest']}"
    else:
        what = f"{row['ratio']:.2f} of plain, {row['ms']:.1f} ms"
        if "mib" in row:
            what += f", {row['mib']:.0f} MiB, {row['kernels']} kernels"
    return f"{row['case']:<40} {row['way']:<26} {what}"


def main() -> None:
    """Reads the arguments, and runs what is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=15, help="stop after so many; 15 by default")
    add("--out", type=Path, default=OUT, help="the file of JSON lines")
    add("--rehearse", action="store_true", help="tiny models on a CPU")
    add("--no-tests", action="store_true", help="leave out the tests marked gpu")
    add("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out = args.out.resolve()
    cases = list(rehearsed()) if args.rehearse else CASES
    if args.child:
        warnings.simplefilter("ignore")
        if args.rehearse:
            KIND.update(backend="aot_eager")
        device = "cpu" if args.rehearse else "cuda"
        return measure(cases, args.out, device, args.rehearse)
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs tiny models on a CPU")
    end = time.monotonic() + 60 * (60 if args.rehearse else args.minutes)
    if not known(args.out):
        name = "cpu" if args.rehearse else torch.cuda.get_device_name()
        write(args.out, {"device": name, "torch": torch.__version__})
        if not args.no_tests and not args.rehearse:
            run_tests()
    if not run_cases(cases, args, end):
        raise SystemExit(f"The time is over; the same command goes on ({args.out}).")


if __name__ == "__main__":
    main()
