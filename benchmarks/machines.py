"""Collectives, bytes and time of a step on several processes, plain and private.

Run as ``torchrun --nproc_per_node 4 -m benchmarks machines``, on whatever processes
and devices there are, or as ``python -m benchmarks machines --processes 4``. Each step
is of one model under torch's DDP or under ``fully_shard`` (FSDP2), plain or private in
"ghost_bk" and "scan".

Counted are the collectives that one process calls in a step, and the bytes that it
gives them: of an all-gather its shard, of a reduce-scatter and an all-reduce all.
"Numbers" are those by which processes of a sharded model agree on what comes next. Time
is the median of the turns, all in one run. Memory is the peak of a few steps over what
was there before the model, in the process that has the most, in a run of its own: on a
CPU glibc is told there to give freed memory back, which takes time.
"""

import argparse
import json
import os
import tempfile
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Callable, Dict, Iterator, List, Tuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from opacus import PrivacyEngine
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401  registers the modes
from benchmarks.step_time import GIVE_BACK, peak_memory
from opacus_ext.losses import PerSample
from opacus_ext.tables import text_table

RESULTS = Path(__file__).parent / "results"
WAYS = ("ddp", "ddp ghost_bk", "fsdp", "fsdp ghost_bk", "fsdp scan")
BOUND = 0.5


class Collectives(TorchDispatchMode):
    """Counts calls of collectives, and the bytes given to them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter = Counter()
        self.bytes: Counter = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, name = func.name().split("::")
        if namespace in ("c10d", "_c10d_functional") and not name.startswith(
            ("wait", "_wrap")
        ):
            given = list(_tensors(args[1:2] if "_base_" in name else args[:1]))
            size = sum(x.numel() * x.itemsize for x in given)
            kind = (
                "number" if size <= 512 else name.strip("_").rsplit(".")[0].strip("_")
            )
            self.calls[kind] += 1
            self.bytes[kind] += size
        return func(*args, **(kwargs or {}))


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)


class Model(nn.Module):
    """A transformer with a tied head."""

    def __init__(self, layers: int, width: int, vocabulary: int):
        super().__init__()
        self.table = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.02)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def losses_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The losses of samples, ``[B]``."""
    logits = model(ids).transpose(1, 2)
    return F.cross_entropy(logits, ids, reduction="none").mean(1)


def made(way: str, args: argparse.Namespace, device: str) -> Tuple[Any, Callable]:
    """A model, and a step of it in one of the ways."""
    kind, _, mode = way.partition(" ")
    torch.manual_seed(0)
    model: nn.Module = Model(args.layers, args.width, args.vocabulary).to(device)
    if kind == "ddp":
        model = DDP(model)
    else:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
    criterion: Any = lambda losses, _: losses.mean()  # noqa: E731
    if mode:
        size = args.batch_size * dist.get_world_size()
        data = TensorDataset(torch.zeros(4 * size, 1))
        model, optimizer, criterion, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            criterion=PerSample(),
            data_loader=DataLoader(data, batch_size=size),
            noise_multiplier=args.noise,
            max_grad_norm=BOUND,
            grad_sample_mode=mode,
            poisson_sampling=False,
            wrap_model=True,
        )

    def step(ids: torch.Tensor) -> None:
        optimizer.zero_grad()
        criterion(losses_of(model, ids), None).backward()
        optimizer.step()

    return model, step


def peaks(args: argparse.Namespace, ids: torch.Tensor, device: str) -> Dict[str, int]:
    """Bytes at the peak of a few steps, by way."""
    least = dict(layers=1, width=16, vocabulary=64, length=4)
    tiny, found = argparse.Namespace(**{**vars(args), **least}), []
    for way in WAYS:
        first = lambda: partial(made(way, tiny, device)[1], ids[:, :4] % 64)  # noqa
        whole = lambda: partial(made(way, args, device)[1], ids)  # noqa: E731
        found.append(peak_memory(first, whole, device))
    most = torch.tensor(found, device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return dict(zip(WAYS, most.tolist()))


def work(rank: int, args: argparse.Namespace) -> None:
    """Measures in one process, and prints the table in the first."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    given = {"rank": rank, "world_size": args.processes} if args.spawned else {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("nccl" if device == "cuda" else "gloo", **given)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    else:
        torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (args.batch_size, args.length)
    ids = torch.randint(args.vocabulary, shape, generator=generator).to(device)
    measures = args.memory or not args.spawned
    most = peaks(args, ids, device) if measures else json.loads(args.peaks.read_text())
    if args.memory:
        args.peaks.write_text(json.dumps(most))
        dist.destroy_process_group()
        return
    runs, rows = {way: made(way, args, device) for way in WAYS}, []
    counts: Dict[str, Collectives] = {}
    for way, (_, step) in runs.items():
        step(ids)
        step(ids)
        with Collectives() as counted:
            step(ids)
        counts[way] = counted
    times: Dict[str, List[float]] = {way: [] for way in WAYS}
    for _ in range(args.turns):
        for way, (_, step) in runs.items():
            if device == "cuda":
                torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            step(ids)
            if device == "cuda":
                torch.cuda.synchronize()
            times[way].append(time.perf_counter() - start)
    model = Model(args.layers, args.width, args.vocabulary)
    size = 4 * sum(p.numel() for p in model.parameters())
    for way in WAYS:
        calls, sizes = counts[way].calls, counts[way].bytes
        names = sorted(set(calls) - {"number"})
        rows.append(
            {
                "way": way,
                "collectives": {name: calls[name] for name in names},
                "model_sizes": {name: round(sizes[name] / size, 4) for name in names},
                "numbers": calls["number"],
                "milliseconds": round(1e3 * median(times[way]), 1),
                "peak_mb": round(most[way] / 1e6, 1),
            }
        )
    if dist.get_rank() == 0:
        kind = torch.cuda.get_device_name() if device == "cuda" else "cpu"
        what = {**vars(args), "processes": dist.get_world_size(), "device": kind}
        what = {k: v for k, v in what.items() if k not in ("memory", "peaks")}
        report({"settings": what, "parameter_bytes": size, "rows": rows}, args.save)
    dist.destroy_process_group()


def report(found: Dict[str, Any], save: bool) -> None:
    """Prints the table, and saves what it is made of."""
    table = []
    for row in found["rows"]:
        calls = ", ".join(f"{n} {name}" for name, n in row["collectives"].items())
        sizes = ", ".join(f"{x:g} {name}" for name, x in row["model_sizes"].items())
        rest = (row[name] for name in ("numbers", "milliseconds", "peak_mb"))
        table.append([row["way"], calls, sizes, *map(str, rest)])
    head = ["way", "collectives", "bytes, in models", "numbers", "ms", "peak MB"]
    print(text_table(head, table))
    if save:
        name = (
            f"machines-{'cpu' if found['settings']['device'] == 'cpu' else 'gpu'}.json"
        )
        (RESULTS / name).write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Reads the arguments, and starts processes unless torchrun has."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    for name, value in dict(
        processes=4, layers=4, width=128, vocabulary=1024, length=64, batch_size=4
    ).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--noise", type=float, default=1.0)
    parser.add_argument("--save", action="store_true", help="into benchmarks/results")
    args = parser.parse_args()
    args.spawned, args.memory = "RANK" not in os.environ, False
    if args.spawned:
        with tempfile.TemporaryDirectory() as folder:
            args.peaks = Path(folder) / "peaks"
            for args.memory in (True, False):
                with patch.dict(os.environ, GIVE_BACK if args.memory else {}):
                    mp.spawn(work, args=(args,), nprocs=args.processes)
    else:
        work(int(os.environ["RANK"]), args)


if __name__ == "__main__":
    main()
