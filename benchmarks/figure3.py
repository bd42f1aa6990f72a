"""Figure 3 of the DPFormer paper: largest batch and time of a step, in one memory.

    python benchmarks/figure3.py --out figure3.jsonl
    python benchmarks/figure3.py --out figure3.jsonl --data Games     # that half alone
    python benchmarks/dpformer_report.py figure3.jsonl --figures plots/

The model is DPFormer, at the size of MovieLens-1M and of Amazon Games; ids are random.

- non-private: shared embedding.
- phantom clipping: the same model in this package's "ghost_bk" and "ghost".
- ghost clipping, Embedding head: what the paper compares with. Ghost clipping knows no
  shared parameters, so input and output have embeddings of their own, of half the width
  (the paper's footnote 4). The output's gets the ids of all M candidates from each
  sample, and its norms take Grams ``[B, M, M]`` (equation B.4, not simplified).
- ghost clipping, Linear head: the same with the output as a linear layer, whose Grams
  are ``[B, T, T]``. This is how ghost clipping would be used, and the paper leaves it
  out: most of what the figure shows is the M x M of the line above.
- ghost, Linear head: this package's "ghost" on that same model.

The two in between are written out here (:class:`Ghost`), as well as could be done
without leaving the method: the first backward pass skips the parameters' gradients and
the M x M Grams are masked in place. First of all every method takes a step on small
models in float64, which must be the one of gradients clipped one sample at a time.

The largest batch is searched with the peak memory of one process a trial, over what the
process needs before it has a model (``step_time.py``). Peaks are close to a line in the
batch, which the search follows; it ends within 5 % below the cap. Time is that of
forward, both backward passes, clipping and ``SGD.step()``, without noise; the smallest
of several repeats, in which the methods take turns. On one CPU thread it is CPU time.

Measured under 2 GiB on one thread: ``results/figure3-cpu.jsonl``, of which ``python -m
benchmarks tables`` makes the table of docs/explanation/papers.md.
"""

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from opacus import PrivacyEngine
from step_time import GIVE_BACK, peak_memory, synchronize
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.losses import PerSample, cross_entropy
from opacus_ext.models import DPFormer

CLIP, WIDTH = 1.0, 64
Step = Callable[[], None]
user_losses = partial(cross_entropy, ignore_index=0)  # 0 is padding


class Size(NamedTuple):
    """Items M, sequence length T."""

    items: int
    length: int


DATA = {"MovieLens": Size(3416, 50), "Games": Size(23715, 50)}
TINY, SMALL = Size(8, 4), Size(12, 6)


class EmbeddingHead(DPFormer):
    """Not shared; the output is an embedding, of all candidates for each sample."""

    def __init__(self, items: int, length: int, width: int, **kwargs: Any):
        super().__init__(items, length, width, tied=False, **kwargs)
        self.candidates = nn.Embedding(items + 1, width)
        self.candidates.weight = self.head.weight
        del self.head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        everything = torch.arange(self.candidates.num_embeddings, device=ids.device)
        candidates = self.candidates(everything.expand(len(ids), -1))  # [B, M, d]
        return self.encode(ids) @ candidates.mT


class Ghost:
    """Ghost clipping (Li et al., 2022): norms from Grams, then a second backward pass.

    Args:
        model: of Linear, LayerNorm and Embedding layers that each run once
    """

    def __init__(self, model: nn.Module):
        self.model, self.squares, self.listening = model, None, False
        self.first: List[torch.Tensor] = []
        for layer in model.modules():
            if isinstance(layer, tuple(RULES)):
                layer.register_forward_hook(self.note)

    def note(self, layer: nn.Module, args: Any, out: torch.Tensor) -> None:
        (a,) = args
        if isinstance(layer, nn.Embedding):
            self.first.append(out)

        def collect(g: torch.Tensor) -> None:
            if self.listening:
                with torch.no_grad():
                    self.squares += RULES[type(layer)](layer, a.detach(), g)

        out.register_hook(collect)

    def backward(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        losses = user_losses(self.model(inputs), targets)
        self.squares, self.listening = torch.zeros_like(losses.detach()), True
        # Nothing lies before the embeddings: all gradients of layers are on the way.
        torch.autograd.backward(losses.sum(), retain_graph=True, inputs=self.first)
        self.listening, self.first = False, []
        factors = (CLIP / (self.squares.sqrt() + 1e-6)).clamp(max=1)
        (losses * factors).mean().backward()


def linear(layer: nn.Linear, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """a ``[B, T, p]``, g ``[B, T, q]``: the squared norm of each g^T a, ``[B]``."""
    squares = ((a @ a.mT) * (g @ g.mT)).sum((1, 2))
    return squares if layer.bias is None else squares + g.sum(1).square().sum(1)


def layer_norm(layer: nn.LayerNorm, a: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    normal = F.layer_norm(a, layer.normalized_shape, eps=layer.eps)
    return sum(z.sum(1).square().sum(1) for z in (normal * g, g))


def embedding(layer: nn.Embedding, ids: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """Equation B.4: one-hot rows have the product 1 where the ids are the same."""
    if layer.padding_idx is not None:
        g = g.masked_fill((ids == layer.padding_idx)[..., None], 0)
    differ = ids[:, :, None] != ids[:, None, :]
    return (g @ g.mT).masked_fill_(differ, 0).sum((1, 2))


RULES = {nn.Linear: linear, nn.LayerNorm: layer_norm, nn.Embedding: embedding}


def non_private(model: nn.Module, data: TensorDataset, mode: str, lr: float) -> Step:
    inputs, targets = data.tensors
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def step() -> None:
        user_losses(model(inputs), targets).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ghost(model: nn.Module, data: TensorDataset, mode: str, lr: float) -> Step:
    optimizer, clipping = torch.optim.SGD(model.parameters(), lr), Ghost(model)

    def step() -> None:
        clipping.backward(*data.tensors)
        optimizer.step()
        optimizer.zero_grad()

    return step


def package(model: nn.Module, data: TensorDataset, mode: str, lr: float) -> Step:
    inputs, targets = data.tensors
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr),
        criterion=PerSample(),
        data_loader=DataLoader(data, batch_size=len(inputs)),
        noise_multiplier=0.0,
        max_grad_norm=CLIP,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )

    def step() -> None:
        criterion(user_losses(model(inputs), targets)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class Method(NamedTuple):
    """The model, its width, how a step is made, and in which mode of this package."""

    model: Callable[..., nn.Module]
    width: int
    build: Callable[[nn.Module, TensorDataset, str, float], Step]
    mode: str = ""


untied = partial(DPFormer, tied=False)
METHODS = {
    "non-private": Method(DPFormer, WIDTH, non_private),
    "phantom clipping (ghost_bk)": Method(DPFormer, WIDTH, package, "ghost_bk"),
    "phantom clipping (ghost)": Method(DPFormer, WIDTH, package, "ghost"),
    "ghost clipping, Linear head": Method(untied, WIDTH // 2, ghost),
    "this package's ghost, Linear head": Method(untied, WIDTH // 2, package, "ghost"),
    "ghost clipping, Embedding head": Method(EmbeddingHead, WIDTH // 2, ghost),
}


def made(
    name: str, size: Size, batch: int, device: str = "cpu", **kwargs: Any
) -> Tuple[nn.Module, TensorDataset]:
    """A model and random data for it."""
    torch.manual_seed(0)
    method = METHODS[name]
    model = method.model(*size, method.width, **kwargs).to(device)
    shape = (2, batch, size.length)
    tensors = torch.randint(1, size.items + 1, shape, device=device)
    return model, TensorDataset(*tensors)


def build(name: str, size: Size, batch: int, device: str) -> Step:
    method = METHODS[name]
    return method.build(*made(name, size, batch, device), method.mode, 1e-3)


def check() -> None:
    """A step of each method is that of gradients clipped one sample at a time.

    All samples are clipped, so a wrong norm makes a wrong step.
    """
    for name, method in METHODS.items():
        model, data = made(name, SMALL, 5, dropout=0.0)
        with torch.no_grad():
            for p in model.parameters():  # gradients of a size that is clipped
                p.add_(0.3 * torch.randn_like(p))
            model.embedding.weight[0].zero_()
        model.double().train()
        ids, targets = data.tensors
        ids[1, 3:], targets[1, 2:] = 0, 0  # a sequence that is padded
        params = list(model.parameters())
        wanted = [torch.zeros_like(p) for p in params]
        for x, y in zip(ids, targets):
            (loss,) = user_losses(model(x[None]), y[None])
            grads = torch.autograd.grad(loss, params)
            norm = torch.stack([g.norm() for g in grads]).norm()
            assert norm > CLIP, norm
            factor = 1.0 if method.build is non_private else CLIP / (norm + 1e-6)
            for sum_, g in zip(wanted, grads):
                sum_ += g * factor / len(ids)
        before = [p.detach().clone() for p in params]
        method.build(model, data, method.mode, 1.0)()
        for p, old, step in zip(params, before, wanted):
            torch.testing.assert_close(old - p, step, rtol=1e-7, atol=1e-9)
    print(f"{len(METHODS)} methods: steps of clipped per-sample gradients")


def peak_of(name: str, size: Size, batch: int, device: str) -> float:
    """Bytes at the peak, measured in a process of its own."""
    command = [sys.executable, __file__, "--peak-of", name, "--device", device]
    command += ["--batch", str(batch), "--size", *map(str, size)]
    env = dict(os.environ, **GIVE_BACK)
    child = subprocess.run(command, env=env, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{name} at {size}, batch {batch}:\n{child.stderr}")
    return float(child.stdout.splitlines()[-1])


def print_peak(name: str, size: Size, batch: int, device: str) -> None:
    """What the child process of ``peak_of`` does."""
    try:
        peak = peak_memory(
            partial(build, name, TINY, 2, device),
            partial(build, name, size, batch, device),
            device,
            steps=2,
        )
    except torch.OutOfMemoryError:
        peak = math.inf
    print(peak)


def largest_batch(
    peak: Callable[[int], float],
    cap: float,
    most: int,
    close: float = 0.95,
    first: int = 1,
) -> Tuple[int, Dict[int, float]]:
    """
    The largest batch whose peak is below the cap, and the peaks that were measured.

    Each trial is where the line through the last two reaches a little below the cap,
    kept between the largest that fits and the smallest that does not.
    """
    fits, fails, batch = 0, most + 1, first
    peaks: Dict[int, float] = {}
    while fits + 1 < fails:
        peaks[batch] = peak(batch)
        if peaks[batch] > cap:
            fails = batch
        else:
            fits = batch
            if peaks[batch] > close * cap:
                break
        known = sorted(peaks.items(), key=lambda point: abs(point[1] - cap))
        (x, y), (x0, y0) = known[0], known[1] if len(known) > 1 else (0, 0.0)
        slope = (y - y0) / (x - x0)
        aim = x + ((1 + close) / 2 * cap - y) / slope if slope > 0 else 2 * x
        batch = int(min(max(aim, fits + 1), fails - 1, 64 * batch))
    return fits, peaks


def measure(args: argparse.Namespace, name: str) -> List[Dict[str, Any]]:
    size, cap = DATA[name], args.cap * 2**30
    rows, steps = [], {}
    for method in METHODS:
        batch, peaks = largest_batch(
            lambda b: peak_of(method, size, b, args.device), cap, args.most
        )
        shown = {b: round(peak / 2**20) for b, peak in peaks.items()}
        print(f"{name}, {method}: batch {batch}, MiB by batch {shown}", flush=True)
        timed = min(batch, args.batch)
        if timed:
            steps[method] = timed, build(method, size, timed, args.device)
        row = {
            "experiment": "figure3",
            "data": name,
            "method": method,
            "memory_cap_gib": args.cap,
            "machine": machine(args.device),
        }
        key = hashlib.sha256(json.dumps(row).encode()).hexdigest()[:16]
        row.update(
            key=key,
            largest_batch=batch,
            most=args.most,
            ms_per_sample=None,
            timed_batch=timed,
            peak_mib=shown,
            items=size.items,
            length=size.length,
            width=METHODS[method].width,
        )
        rows.append(row)

    clock = time.perf_counter
    if args.device == "cpu" and torch.get_num_threads() == 1:
        clock = time.process_time
    times: Dict[str, float] = {}
    for turn in range(args.repeats + 1):
        for method, (batch, step) in steps.items():
            synchronize(args.device)
            start = clock()
            step()
            synchronize(args.device)
            if turn:  # the first is to warm up
                ms = 1e3 * (clock() - start) / batch
                times[method] = min(ms, times.get(method, ms))
    for row in rows:
        row["ms_per_sample"] = times.get(row["method"])
    return rows


def machine(device: str) -> str:
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return (
        f"{os.cpu_count()} CPU cores, shared; torch {torch.__version__}, "
        f"{torch.get_num_threads()} thread(s)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, help="file of JSON lines, to which results are added")
    add("--data", nargs="+", choices=list(DATA), default=list(DATA))
    add("--cap", type=float, default=2.0, help="GiB")
    add("--most", type=int, default=1024, help="no larger batch is tried")
    add("--batch", type=int, default=32, help="to be timed, if it fits")
    add("--repeats", type=int, default=5)
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--peak-of", choices=list(METHODS), help=argparse.SUPPRESS)
    add("--size", type=int, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # Opacus on noise
    if args.peak_of:
        print_peak(args.peak_of, Size(*args.size), args.batch, args.device)
        return
    check()
    for name in args.data:
        for row in measure(args, name):
            print(json.dumps(row), flush=True)
            if args.out:
                with args.out.open("a") as file:
                    file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
