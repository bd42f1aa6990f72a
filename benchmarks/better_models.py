"""What helps at the same epsilon: views, averaged weights, batch size, clipping.

    python benchmarks/better_models.py images --data MNIST --views 4 --seeds 0 1 2
    python benchmarks/better_models.py words --data SST-2 --lr 16 --batch-size 8192 \
        --epochs 16

images: a linear model on fixed features (edges of 16 kinds in 7 by 7 places) of the
10,000 images of MNIST's test set (t10k-*.gz): 7,000 to train on, 1,000 to choose
settings by, 2,000 to measure on. words: a linear model on hashed words and pairs of
words of SST-2's train.tsv, of which 3,000 rows are left to choose settings by; dev.tsv
is measured. Batches are Poisson batches. A line of JSON a seed: accuracy in percent of
the last weights and of their moving average.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import re
import sys
import warnings
import zlib
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
import opacus_ext  # noqa: F401,E402  (registers the modes)
from opacus_ext.losses import PerSample, RecordModel, cross_entropy  # noqa: E402
from opacus_ext.recommend.loop import (  # noqa: E402
    ignore_standing_warnings,
    moving_average,
)

Rows = Tuple[torch.Tensor, torch.Tensor]  # what the model reads, classes
POOL = 16  # views of an image, made once


class Splits(NamedTuple):
    """To train on, to choose settings by, to measure on."""

    train: Rows
    validation: Rows
    test: Rows
    views: Optional[torch.Tensor] = None  # of what is trained on: [N, POOL, features]


class Words(nn.Module):
    """Logits of hashed words ``[..., T]``, 0 for none, weighted to a norm of 4."""

    def __init__(self, buckets: int):
        super().__init__()
        self.rows = nn.Embedding(buckets + 1, 2, padding_idx=0)
        self.bias = nn.Parameter(torch.zeros(2))
        nn.init.zeros_(self.rows.weight)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Logits ``[..., 2]``."""
        count = (input > 0).sum(-1, keepdim=True).clamp(min=1)
        return self.rows(input).sum(-2) * 4 / count.sqrt() + self.bias


def filters() -> torch.Tensor:
    """Gabor filters: two scales, eight directions, two phases, ``[32, 1, 9, 9]``."""
    y, x = torch.meshgrid(*2 * [torch.arange(-4.0, 5.0)], indexing="ij")
    found = []
    for scale, frequency in ((1.2, math.pi / 2), (2.2, math.pi / 4)):
        window = torch.exp(-(x**2 + y**2) / (2 * scale**2))
        for k in range(8):
            along = x * math.cos(k * math.pi / 8) + y * math.sin(k * math.pi / 8)
            even = window * torch.cos(frequency * along)
            even -= window * even.sum() / window.sum()
            odd = window * torch.sin(frequency * along)
            found += [even / even.norm(), odd / odd.norm()]
    return torch.stack(found)[:, None]


def edges(images: torch.Tensor) -> torch.Tensor:
    """Features ``[N, 784]`` of images ``[N, 1, 28, 28]``, of norm 8, each by itself."""
    found = []
    for some in images.split(1000):
        x = F.conv2d(some, filters(), padding=4)
        x = F.avg_pool2d((x[:, ::2] ** 2 + x[:, 1::2] ** 2 + 1e-12).sqrt(), 4)
        found.append(8 * F.normalize(F.group_norm(x, 4).flatten(1)))
    return torch.cat(found)


def moved(images: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Turned by up to 10 degrees and shifted by up to two pixels."""
    n = len(images)
    turn = (torch.rand(n, generator=rng) * 2 - 1) * math.pi / 18
    shift = (torch.rand(n, 2, generator=rng) * 2 - 1) / 7
    rows = [turn.cos(), -turn.sin(), shift[:, 0], turn.sin(), turn.cos(), shift[:, 1]]
    where = torch.stack(rows, 1).view(n, 2, 3)
    grid = F.affine_grid(where, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


def read_images(folder: Path, views: bool) -> Splits:
    """MNIST's test set, shuffled once."""
    pixels = gzip.open(folder / "t10k-images-idx3-ubyte.gz").read()[16:]
    names = gzip.open(folder / "t10k-labels-idx1-ubyte.gz").read()[8:]
    x = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28) / 255
    y = torch.frombuffer(bytearray(names), dtype=torch.uint8).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    sizes = [7000, 1000, 2000]
    parts = [(edges(a), b) for a, b in zip(x.split(sizes), y.split(sizes))]
    rng, pool = torch.Generator().manual_seed(5), None
    if views:
        pool = torch.stack([edges(moved(x[:7000], rng)) for _ in range(POOL)], 1)
    return Splits(*parts, pool)


def read_words(folder: Path, buckets: int, most: int = 80) -> Splits:
    """SST-2; a text is the set of its words and pairs of words."""

    def read(name: str) -> Rows:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()[1:]
        ids = torch.zeros(len(lines), most, dtype=torch.int32)
        classes = torch.zeros(len(lines), dtype=torch.long)
        for i, line in enumerate(lines):
            label, text = line.split("\t")
            words = re.findall(r"[\w']+|[^\w\s]", text.lower())
            grams = {*words, *map(" ".join, zip(words, words[1:]))}
            found = sorted({1 + zlib.crc32(g.encode()) % buckets for g in grams})
            row = torch.tensor(found[:most], dtype=torch.int32)
            ids[i, : len(row)], classes[i] = row, int(label)
        return ids, classes

    ids, classes = read("train.tsv")
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    ids, classes = ids[order], classes[order]
    chosen_by = ids[:3000], classes[:3000]
    return Splits((ids[3000:], classes[3000:]), chosen_by, read("dev.tsv"))


def accuracy(model: nn.Module, rows: Rows) -> float:
    """In percent."""
    x, y = rows
    with torch.no_grad():
        found = model(x if x.is_floating_point() else x.long()).argmax(1)
    return 100 * (found == y).float().mean().item()


def train(data: Splits, seed: int, args: argparse.Namespace) -> Dict[str, Any]:
    """One run: its settings, noise and accuracies."""
    x, y = data.train
    size = min(args.batch_size, len(x))
    rate, views = size / len(x), args.views
    steps = math.ceil(args.epochs / rate - 1e-9)
    noise = get_noise_multiplier(
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        sample_rate=rate,
        steps=steps,
        accountant="prv",
    )
    torch.manual_seed(seed)
    rng = torch.Generator().manual_seed(seed + 1000)
    net: nn.Module = nn.Linear(x.shape[1], 10)
    if args.what == "words":
        net = Words(args.buckets)
    for p in net.parameters():
        nn.init.zeros_(p)
    average = moving_average(net, args.ema)
    kind = torch.optim.Adam if args.adam else torch.optim.SGD
    model, optimizer, criterion, _ = PrivacyEngine().make_private(
        module=RecordModel(net) if views else net,
        optimizer=kind(net.parameters(), lr=args.lr),
        criterion=PerSample(),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=size),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        clipping=args.clipping,
        grad_sample_mode="ghost_bk",
    )
    # A loader takes rows one by one: slow for so small a model. The batches are drawn
    # here, and so is their expected size.
    optimizer.expected_batch_size = size
    part = max(args.physical_batch_size // max(views, 1), 1)
    for _ in range(steps):
        drawn = (torch.rand(len(x), generator=rng) < rate).nonzero()[:, 0]
        parts = drawn.split(part) or (drawn,)
        for i, rows in enumerate(parts):
            if len(parts) > 1:
                optimizer.signal_skip_step(do_skip=i < len(parts) - 1)
            optimizer.zero_grad()
            targets = y[rows]
            if views:
                few = torch.rand(len(rows), POOL, generator=rng).argsort(1)[:, :views]
                logits = model(input=data.views[rows[:, None], few])
                targets = targets[:, None].expand(-1, views)
            elif x.is_floating_point():
                logits = model(x[rows])
            else:
                longest = max(int((x[rows] > 0).any(0).sum()), 1)
                logits = model(x[rows, :longest].long())
            criterion(cross_entropy(logits, targets)).backward()
            optimizer.step()
        average.update_parameters(net)
    found: Dict[str, Any] = {"seed": seed, "noise_multiplier": noise, "steps": steps}
    for name in ("validation", "test"):
        rows = getattr(data, name)
        found[name] = accuracy(net.eval(), rows)
        found[f"{name}_averaged"] = accuracy(average.module, rows)
    return found


def main(argv: Optional[List[str]] = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("what", choices=("images", "words"))
    add("--data", type=Path, required=True, help="folder of the files")
    add("--epsilon", type=float, default=3.0)
    add("--delta", type=float, default=1e-5)
    add("--batch-size", type=int, default=256)
    add("--epochs", type=float, default=20)
    add("--lr", type=float, default=2.0)
    add("--adam", action="store_true", help="in the place of SGD")
    add("--clipping", default="normalized")
    add("--views", type=int, default=0, help="of each image; 0: the image")
    add("--ema", type=float, default=0.99, help="decay of the moving average")
    add("--buckets", type=int, default=16384, help="for words")
    add("--physical-batch-size", type=int, default=8192)
    add("--seeds", type=int, nargs="+", default=[0])
    args = parser.parse_args(argv)
    ignore_standing_warnings()
    warnings.filterwarnings("ignore", "Secure RNG")
    torch.set_num_threads(1)
    data = (
        read_images(args.data, args.views > 0)
        if args.what == "images"
        else read_words(args.data, args.buckets)
    )
    for seed in args.seeds:
        given = {k: v for k, v in vars(args).items() if k not in ("data", "seeds")}
        print(json.dumps({**given, **train(data, seed, args)}), flush=True)


if __name__ == "__main__":
    main()
