"""AdamW, AdamBC and ScaledAdam at one epsilon, on small models of text and of films.

    python benchmarks/adaptive_optimizers.py text --data tinyshakespeare/input.txt
    python benchmarks/adaptive_optimizers.py films --data ml-1m/ml-1m.txt

text: a causal transformer of bytes (one block, width 32). A record is a window of 32
bytes; the last tenth of the file is held out, one half to choose by and one to measure
on. films: DPFormer without Re-Attention (one block, width 32), of the 500 films that
most have seen, a list that is taken as public. A record is a user's last 17 of these
films before the held-out ones.

For each optimizer a learning rate of three is chosen by the first seed, by the loss on
what is held out for that, and kept for all seeds. A line of JSON a run, of which
``python -m benchmarks tables`` makes the table of docs/how-to/optimizers.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, List, NamedTuple, Optional

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from opacus_ext import PrivacyEngine  # noqa: E402
from opacus_ext.losses import PerSample, cross_entropy  # noqa: E402
from opacus_ext.models import DPFormer  # noqa: E402
from opacus_ext.optimizers import AdamBC, ScaledAdam  # noqa: E402
from opacus_ext.recommend import read_sequences  # noqa: E402
from opacus_ext.recommend.loop import ignore_standing_warnings  # noqa: E402

OPTIMIZERS: Dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamBC": AdamBC,
    "ScaledAdam": ScaledAdam,
}
#: Learning rates to choose from. Steps of AdamBC are longer at the same rate.
RATES = {
    "text": {
        "AdamW": (1e-2, 3e-2, 1e-1),
        "AdamBC": (3e-3, 1e-2, 3e-2),
        "ScaledAdam": (1e-2, 3e-2, 1e-1),
    },
    "films": {
        "AdamW": (3e-3, 1e-2, 3e-2),
        "AdamBC": (1e-3, 3e-3, 1e-2),
        "ScaledAdam": (3e-3, 1e-2, 3e-2),
    },
}


class Task(NamedTuple):
    """Inputs and targets ``[N, T]``, 0 for padding, and a model of the next one."""

    train: TensorDataset
    validation: TensorDataset
    test: TensorDataset
    model: Callable[[], nn.Module]


class Bytes(nn.Module):
    """Logits ``[B, T, V]`` of the next byte."""

    def __init__(self, size: int, length: int, width: int = 32):
        super().__init__()
        self.rows = nn.Embedding(size, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        options: Any = dict(dropout=0.0, batch_first=True, norm_first=True)
        self.block = nn.TransformerEncoderLayer(width, 2, 4 * width, **options)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, size)
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        self.register_buffer("mask", mask)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Computes the logits."""
        hidden = self.rows(ids) + self.places
        hidden = self.block(hidden, src_mask=self.mask, is_causal=True)
        return self.head(self.norm(hidden))


def text(path: Path, length: int = 32) -> Task:
    """Windows of bytes, none of which overlap."""
    raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    known, ids = raw.unique(return_inverse=True)
    ids = ids + 1  # 0 is padding
    count = (len(ids) - 1) // length
    inputs = ids[: count * length].view(count, length)
    targets = ids[1 : count * length + 1].view(count, length)
    first, second = int(0.9 * count), int(0.95 * count)
    parts = slice(0, first), slice(first, second), slice(second, None)
    data = [TensorDataset(inputs[part], targets[part]) for part in parts]
    return Task(*data, lambda: Bytes(len(known) + 1, length))


def films(path: Path, length: int = 16, count: int = 500) -> Task:
    """Users' last films: the last one to measure on, the one before to choose by."""
    data = read_sequences(path)
    top = data.popularity()[1:].topk(count).indices.tolist()
    data = read_sequences(path, items=[data.items[i] for i in top])
    earlier = data.without_last()

    def held_out(some: Any) -> TensorDataset:
        targets = torch.zeros(len(some.held_out), length, dtype=torch.long)
        contexts = some.contexts(length)
        lengths = (contexts > 0).sum(1)
        targets[torch.arange(len(targets)), lengths - 1] = some.held_out
        return TensorDataset(contexts, targets)

    train = earlier.training_set(length)
    parts = train, held_out(earlier), held_out(data)
    options: Any = dict(max_len=length, width=32, depth=1, dropout=0.0)
    return Task(*parts, lambda: DPFormer(data.num_items, **options))


def loss_of(model: nn.Module, data: TensorDataset) -> float:
    """The mean loss of a target, in nats."""
    total = 0.0
    inputs, targets = data.tensors
    with torch.no_grad():
        for ids, wanted in zip(inputs.split(512), targets.split(512)):
            logits = model(ids).flatten(0, 1)
            options: Any = dict(ignore_index=0, reduction="sum")
            total += float(F.cross_entropy(logits, wanted.flatten(), **options))
    return total / int((targets > 0).sum())


def run(task: Task, name: str, rate: float, seed: int, args: Any) -> Dict[str, Any]:
    """Trains once; returns the settings and the losses."""
    torch.manual_seed(seed)
    model = task.model()
    began = time.perf_counter()
    private, optimizer, criterion, loader = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=OPTIMIZERS[name](model.parameters(), lr=rate),
        criterion=PerSample(),
        data_loader=DataLoader(task.train, batch_size=args.batch_size),
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        public_records=len(task.train),
        epochs=args.epochs,
        max_grad_norm=args.max_grad_norm,
        grad_sample_mode="ghost_bk",
    )
    steps = 0
    for _ in range(args.epochs):
        for ids, wanted in loader:
            optimizer.zero_grad()
            losses = cross_entropy(private(ids), wanted, ignore_index=0)
            criterion(losses).backward()
            optimizer.step()
            steps += 1
    return {
        "optimizer": name,
        "lr": rate,
        "seed": seed,
        "noise_multiplier": round(float(optimizer.noise_multiplier), 4),
        "steps": steps,
        "validation": loss_of(model, task.validation),
        "test": loss_of(model, task.test),
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(argv: Optional[List[str]] = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("what", choices=("text", "films"))
    add("--data", type=Path, required=True)
    add("--epsilon", type=float, default=8.0)
    add("--delta", type=float, default=1e-5)
    add("--batch-size", type=int, default=512)
    add("--epochs", type=int, default=5)
    add("--max-grad-norm", type=float, default=1.0)
    add("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    add("--rates", type=float, nargs="+", help="in the place of the three")
    add("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    args = parser.parse_args(argv)
    ignore_standing_warnings()
    warnings.filterwarnings("ignore", "Secure RNG")
    torch.set_num_threads(1)
    task = text(args.data) if args.what == "text" else films(args.data)
    for name in args.optimizers:
        found = []

        def measure(rate: float, seed: int) -> None:
            found.append(run(task, name, rate, seed, args))
            print(json.dumps({"task": args.what, **found[-1]}), flush=True)

        for rate in args.rates or RATES[args.what][name]:
            measure(rate, args.seeds[0])
        chosen = min(found, key=lambda result: result["validation"])["lr"]
        for seed in args.seeds[1:]:
            measure(chosen, seed)


if __name__ == "__main__":
    main()
