"""All modes on a GPU beside plain steps and other libraries, by one command.

Run as ``make gpu``, or ``python -m benchmarks gpu --minutes 8``: steps of models that
people train, the rows that say most first, and at the end the tests marked ``gpu``.
Each row is written to a file of JSON lines as soon as it is measured, so that a run
which was cut off, or whose minutes are over, goes on where it stopped by the same
command. ``python -m benchmarks tables`` makes the table of docs/explanation/speed.md.

A step is forward, backward, clipping, noise and ``SGD.step()``, with noise in the plain
step too; data are random, and models are built on the device. Of each way to make it a
row says:

- ms, plain_ms, ratio: the least time of a step, and of the plain eager step, which
  takes turns with it
- host_ms: of these, until the host has started all of the step
- busy_ms: how long the device ran something; what overlaps counts once
- kernels: how many the device ran, without copies
- calls: of Python and of C functions, as cProfile counts them
- mib: peak memory of a step, with the model
- ran: eagerly or in how many compiled programs, and what warnings say about that
- ready_s: seconds to build the model and to make the steps in which programs compile
- largest: in ``largest`` rows, the largest batch that fits, by doubling
- refused: the first line of the error, where there is one
- device, torch: the name, and the version

One process measures row after row. Beside it, others of low priority make steps of the
compiled ways until nothing is left to compile, which leaves the programs in Inductor's
caches on disk: all have one ``TORCHINDUCTOR_CACHE_DIR``, a folder beside the file of
rows that goes when all is measured. Then such a way is measured as any other: the model
is traced anew, and the code of each graph found in the caches by a hash of the graph
(where torch keeps no graph, that of its kernels). Compilers disturb what is measured
meanwhile, so that of ten turns the shortest counts. The largest batch, and what ran out
of memory beside them, is measured when they are through.

``--rehearse`` runs everything on a CPU with models that are tiny: it shows that the
command works, and its numbers mean nothing.
"""

import argparse
import gc
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, TimeoutError, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import peers
import step_time
import torch
from step_time import Step, TokenLoss, noisy_sgd, non_private, private
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
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


def gpt2(tiny: bool) -> Tuple[nn.Module, int]:
    """GPT-2 with its tied head, as transformers ships it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    layers, width, heads, vocabulary = (1, 16, 2, 64) if tiny else (12, 768, 12, 50257)
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


def untied(tiny: bool) -> Tuple[nn.Module, int]:
    """A model as large as GPT-2 small, of layers that other libraries know."""
    shape = step_time.Shape(12, 768, 50257, 256, 8)
    shape = step_time.TINY if tiny else shape
    return step_time.LanguageModel(shape, tied=False), shape.vocabulary


MODELS: Dict[str, Callable[[bool], Tuple[nn.Module, int]]] = {
    "GPT-2 small": gpt2,
    "Llama 1.1 B, LoRA": llama_lora,
    "Mixtral-like": mixtral,
    "DPFormer": dpformer,
    "untied": untied,
}


# -- ways to make a step ---------------------------------------------------------------


class Way(NamedTuple):
    """How to build a step, its grad_sample_mode, and what of it is compiled how."""

    build: Callable[[nn.Module, TensorDataset, str], Step]
    mode: str = ""
    ours: bool = False
    compiles: str = ""


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
_EAGER, _GRAPHS, _INSIDE = "default", "reduce-overhead", "by the step itself"
WAYS = {
    PLAIN: Way(non_private),
    "ghost_bk": Way(private, "ghost_bk", True),
    "plain, compiled": Way(non_private, compiles=_EAGER),
    "ghost_bk, compiled": Way(private, "ghost_bk", True, _EAGER),
    "auto": Way(private, "auto", True, _INSIDE),
    "hooks": Way(private, "hooks", True),
    "ghost": Way(private, "ghost", True),
    "scan": Way(private, "scan", True),
    "clipped_grads, compiled": Way(whole, "", True, _INSIDE),
    "plain, CUDA graphs": Way(non_private, compiles=_GRAPHS),
    "ghost_bk, CUDA graphs": Way(private, "ghost_bk", True, _GRAPHS),
    "Opacus hooks": Way(private, "hooks"),
    "Opacus ghost": Way(private, "ghost"),
    "fastDP": Way(peers.fast_dp),
    "Opake": Way(peers.opake, "1"),
}
_NAMES = list(WAYS)
_FEW, _MOST, _LARGEST = _NAMES[:6], _NAMES[:9], [PLAIN, "ghost_bk", "hooks", "scan"]


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


_ONE = "GPT-2 small"
CASES = [
    Case(_ONE, 256, 8, "bf16", _MOST),
    Case(_ONE, 128, 64, "bf16", _FEW),
    Case("Llama 1.1 B, LoRA", 512, 8, "bf16", _FEW),
    Case("DPFormer", 200, 512, "float32", _FEW),
    Case("Mixtral-like", 256, 16, "bf16", _FEW),
    Case(_ONE, 256, 8, "bf16", _NAMES[9:13]),
    Case("untied", 256, 8, "float32", [PLAIN, "ghost_bk", *_NAMES[11:]]),
    Case(_ONE, 256, 8, "bf16", _LARGEST, True),
    Case(_ONE, 1024, 8, "bf16", [PLAIN, "ghost_bk", "hooks", "ghost"]),
]
_TURNS, _MOST_SAMPLES = 10, 2**14


def rehearsed() -> Iterator[Case]:
    """Tiny cases: each model, kind of row, and way once, but for CUDA graphs."""
    seen: set = {way for way in WAYS if WAYS[way].compiles == _GRAPHS}
    for case in CASES:
        kind = case.model, case.largest
        done = seen if kind in seen else seen - {PLAIN, "ghost_bk"}
        ways = [way for way in case.ways if way not in done]
        seen |= {kind, *ways}
        yield case._replace(length=4, batch=2, ways=ways)


# -- measuring -------------------------------------------------------------------------


def step_of(name: str, case: Case, device: str, tiny: bool) -> Step:
    """Builds a step, with its model on the device from the start."""
    way = WAYS[name]
    step_time.select(step_time.Mode(way.build, way.mode, way.ours))
    torch.manual_seed(0)
    with torch.device(device):
        model, vocabulary = MODELS[case.model](tiny)
        ids, targets = torch.randint(1, vocabulary, (2, case.batch, case.length))
    if case.dtype == "bf16":
        model = Autocast(model)
    if way.compiles not in ("", _INSIDE):
        mode = {} if tiny else {"mode": way.compiles}
        model = torch.compile(model, **mode, **KIND)
    return way.build(model, TensorDataset(ids, targets), way.mode)


def warmed(name: str, case: Case, device: str, tiny: bool) -> Tuple[Step, str]:
    """A step with nothing left to compile or to choose, and warnings of slow ones."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        step = step_of(name, case, device, tiny)
        for _ in range(1 if tiny else 4):  # "auto" chooses, CUDA graphs are recorded
            step()
    texts = (str(warning.message).replace("|", "/") for warning in heard)
    slow = ("not compiled", "one sample after the other")
    return step, "; ".join(text for text in texts if any(s in text for s in slow))


def wait_for(device: str) -> None:
    """Waits until the device has done what it was given."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(step: Step, device: str) -> Tuple[float, float]:
    """Times one step, and how long the host takes to start all of it."""
    begin = time.perf_counter()
    step()
    host = time.perf_counter()
    wait_for(device)
    return time.perf_counter() - begin, host - begin


def of_device(events: List[Any], kind: DeviceType) -> Row:
    """
    What ran on a device, by the profiler's events. Launches are events of the host, and
    ranges that code marks do not run.
    """
    own = [e for e in events if e.device_type == kind and not e.is_user_annotation]
    busy, until = 0.0, -math.inf
    for start, end in sorted((e.time_range.start, e.time_range.end) for e in own):
        busy += max(end - max(start, until), 0)
        until = max(end, until)
    copies = sum(e.name.startswith(("Memcpy", "Memset")) for e in own)
    return {"busy_ms": busy / 1e3, "kernels": len(own) - copies}


def profiled(step: Step, device: str) -> Row:
    """What runs on the device in one step."""
    kind = "CUDA" if device == "cuda" else "CPU"
    with profile(activities=[getattr(ProfilerActivity, kind)]) as found:
        step()
        wait_for(device)
    return of_device(found.events(), getattr(DeviceType, kind))


def called(step: Step) -> Tuple[int, int]:
    """Counts the Python calls of one step, and the compiled programs among them."""
    calls = programs = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls, programs
        calls += event in ("call", "c_call")
        # AOTAutograd has this function around each program, of any backend.
        programs += event == "call" and frame.f_code.co_name == "runtime_wrapper"

    # Otherwise the backward pass of a GPU runs in a thread that is not counted.
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
    return calls, programs


def timed(name: str, case: Case, device: str, tiny: bool, plain: Step) -> Row:
    """Measures one way, in turns with the plain step."""
    gpu = device == "cuda"
    before = torch.cuda.memory_allocated() if gpu else 0
    begin = time.perf_counter()
    step, slow = warmed(name, case, device, tiny)
    found: Row = {"ready_s": time.perf_counter() - begin}
    turns: List[Tuple[float, ...]] = []
    for _ in range(1 if tiny else _TURNS):
        step_time.select(step_time.Mode(non_private))
        one, _ = seconds(plain, device)
        step_time.select(step_time.Mode(private, ours=WAYS[name].ours))
        turns.append((one, *seconds(step, device)))
    plain_ms, ms, host_ms = (1e3 * min(times) for times in zip(*turns))
    found.update(ms=ms, plain_ms=plain_ms, ratio=ms / plain_ms, host_ms=host_ms)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    found.update(profiled(step, device))
    most = torch.cuda.max_memory_allocated() if gpu else 0
    calls, programs = called(step)
    ran = f"compiled, programs: {programs}" if programs else "eager"
    ran = "; ".join([ran, *filter(None, [slow[:200]])])
    return {**found, "mib": (most - before) / 2**20, "calls": calls, "ran": ran}


def largest(name: str, case: Case, device: str, tiny: bool) -> Row:
    """Finds the largest batch that fits, by doubling."""
    fits, size, most = 0, case.batch, 4 if tiny else _MOST_SAMPLES
    while size <= most:
        try:
            step = step_of(name, case._replace(batch=size), device, tiny)
            step()
            step()
        except torch.cuda.OutOfMemoryError:
            break
        fits, size = size, 2 * size
        del step
        free()
    return {"largest": fits}


# -- in other processes ----------------------------------------------------------------

_PLAIN: Dict[str, Step] = {}  # of the case of the last row


def prepare(rehearse: bool, niceness: int) -> None:
    """Prepares a process."""
    warnings.simplefilter("ignore")
    os.nice(niceness)
    if rehearse:
        KIND.update(backend="aot_eager")


def machine_of(device: str) -> Row:
    """The names of the device and of torch."""
    name = torch.cuda.get_device_name() if device == "cuda" else device
    return {"device": name, "torch": torch.__version__}


def free() -> None:
    """Gives memory back, and forgets programs."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()  # does nothing where CUDA is not used


def compile_only(case: Case, name: str, device: str, tiny: bool) -> None:
    """Compiles what a way needs. If that fails, its row will say so."""
    with suppress(Exception):
        warmed(name, case, device, tiny)
    free()


def measured(case: Case, name: str, device: str, tiny: bool) -> Row:
    """Measures a row."""
    try:
        if case.key not in _PLAIN:
            _PLAIN.clear()
            free()
        if case.largest:
            return largest(name, case, device, tiny)
        if not _PLAIN:
            _PLAIN[case.key] = step_of(PLAIN, case, device, tiny)
            _PLAIN[case.key]()
        return timed(name, case, device, tiny, _PLAIN[case.key])
    except Exception as error:
        first = (str(error).splitlines() or [""])[0].replace("|", "/")
        return {"refused": f"{type(error).__name__}: {first[:120]}"}
    finally:
        free()


# -- the command -----------------------------------------------------------------------


def known(path: Path) -> Dict[Tuple[str, str], Row]:
    """The rows of a file; of a line that was cut off, none."""
    found: Dict[Tuple[str, str], Row] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            with suppress(ValueError):
                row = json.loads(line)
                found[row["case"], row["way"]] = row
    return found


def pool(args: argparse.Namespace, count: int = 1, niceness: int = 0) -> Any:
    """Processes that measure or compile; one way may break one."""
    given = dict(initializer=prepare, initargs=(args.rehearse, niceness))
    return ProcessPoolExecutor(count, get_context("spawn"), **given)


def run_cases(cases: List[Case], args: argparse.Namespace, end: float) -> None:
    """
    Measures what the file has not: of all that is ready, what comes first. Raises
    TimeoutError if time is over.
    """
    on, done = ("cpu" if args.rehearse else "cuda", args.rehearse), known(args.out)
    whole = (json.dumps(row) + "\n" for row in done.values())
    args.out.write_text("".join(whole), "utf-8")  # without a line that was cut off
    todo = {(case.key, way): case for case in cases for way in case.ways}
    todo = {row: case for row, case in todo.items() if row not in done}
    alone = {row for row, case in todo.items() if case.largest}
    one, others = pool(args), pool(args, args.compilers, 0 if args.rehearse else 10)
    compiling = {
        row: others.submit(compile_only, case, row[1], *on)
        for row, case in todo.items()
        if WAYS[row[1]].compiles
    }
    machine = one.submit(machine_of, on[0]).result(end - time.monotonic())
    while todo:
        left = end - time.monotonic()
        busy = {row: future for row, future in compiling.items() if not future.done()}
        if not busy:
            others.shutdown()  # what they hold of the device's memory is needed
        waiting = {*busy, *(alone if busy else ())}
        row = next((row for row in todo if row not in waiting), None)
        if left <= 0:
            raise TimeoutError
        if row is None:
            wait(busy.values(), left, FIRST_COMPLETED)
            continue
        try:
            found = one.submit(measured, todo[row], row[1], *on).result(left)
        except BrokenProcessPool:
            found, one = {"refused": CUT}, pool(args)
        if busy and found.get("refused", "").startswith("OutOfMemoryError"):
            alone.add(row)
            continue
        del todo[row]
        found = {"case": row[0], "way": row[1], **found, **machine}
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
        print(shown(found), flush=True)
    one.shutdown()


def shown(row: Row) -> str:
    """A row as a line."""
    if "refused" in row:
        what = row["refused"]
    elif "largest" in row:
        what = f"largest batch {row['largest']}"
    else:
        what = (
            "{ratio:.2f} of plain, {ms:.1f} ms (host {host_ms:.1f}, device "
            "{busy_ms:.1f}), {calls} calls, {kernels} kernels, {mib:.0f} MiB, {ran}"
        ).format(**row)
    return f"{row['case']:<34} {row['way']:<24} {what}"


def main() -> None:
    """Reads the arguments, and runs what is left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--minutes", type=float, default=8, help="stop after so many; 8 by default")
    add("--out", type=Path, default=OUT, help="the file of JSON lines")
    few = min(max((os.cpu_count() or 1) // 3, 1), 5)
    add("--compilers", type=int, default=few, help="processes that compile")
    add("--rehearse", action="store_true", help="tiny models on a CPU")
    add("--no-tests", action="store_true", help="leave out the tests marked gpu")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        parser.error("there is no GPU; --rehearse runs tiny models on a CPU")
    end = time.monotonic() + 60 * args.minutes
    out = args.out = args.out.resolve()
    cache = out.with_name(f"{out.name}.cache")
    os.environ.update(TORCHINDUCTOR_CACHE_DIR=str(cache), KINETO_LOG_LEVEL="99")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")  # of each compiler
    out.parent.mkdir(parents=True, exist_ok=True)
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    try:
        run_cases([*rehearsed()] if args.rehearse else CASES, args, end)
        if not args.rehearse and not args.no_tests:
            subprocess.run(tests, cwd=ROOT, timeout=end - time.monotonic())
        shutil.rmtree(cache, ignore_errors=True)
    except (TimeoutError, subprocess.TimeoutExpired):
        raise SystemExit(f"The time is over; the same command goes on ({out}).")
    finally:
        for child in active_children():
            child.kill()


if __name__ == "__main__":
    import gpu  # the name by which other processes find what they run

    gpu.main()
