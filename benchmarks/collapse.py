"""Do experts collapse under DP-SGD? Load entropy per epoch, three ways of training.

Run as ``python benchmarks/collapse.py``. The task: words of a sentence are translated,
and every dialect has its own dictionary; a sequence is four sentences, each in a
dialect of its own. The model: a transformer block whose feed-forward part is a mixture
of eight experts, one a token. It is trained without balancing, with the per-sample
balancing loss and with a frozen router, each with several seeds.

The setting was chosen to be one in which routers are fragile: the tokens that the
router sees share a large common component, as those of language models without centring
norms often do, and one expert is large enough for the whole task. The router starts out
balanced, as that of a pretrained model: its rows are orthogonal to the mean of what it
sees. Loads are those of held-out sequences, and all data are made up.
"""

import argparse
import json
import math
import time
import warnings
from statistics import mean
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401  (registers the modes)
from opacus_ext.layers import SwitchFeedForward, freeze_routers, load_entropy

WORDS, DIALECTS, EXPERTS = 12, 8, 8
DELTA = 1e-5
WAYS = ("no balancing", "balancing loss", "frozen router")

Row = Dict[str, Any]


class Data(NamedTuple):
    """Words, dialects and translations, ``[N, T]`` each."""

    words: torch.Tensor
    dialects: torch.Tensor
    targets: torch.Tensor


def sequences(count: int, generator: torch.Generator) -> Data:
    """Four sentences of four words each, in dialects drawn at random."""
    fixed = torch.Generator().manual_seed(0)
    dictionary = torch.stack(
        [torch.randperm(WORDS, generator=fixed) for _ in range(DIALECTS)]
    )
    dialects = torch.randint(DIALECTS, (count, 4), generator=generator)
    dialects = dialects.repeat_interleave(4, dim=1)
    words = torch.randint(WORDS, dialects.shape, generator=generator)
    return Data(words, dialects, dictionary[dialects, words])


class Translator(nn.Module):
    """A transformer block with experts; gives logits and the balancing loss [B]."""

    def __init__(self, width: int = 32, hidden: int = 64, common: float = 4.0):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.dialects = nn.Embedding(DIALECTS, width)
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.RMSNorm(width)
        self.moe = SwitchFeedForward(width, hidden, EXPERTS)
        self.norm3 = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS)
        with torch.no_grad():
            self.words.weight += common * torch.randn(width)

    def before_experts(
        self, words: torch.Tensor, dialects: torch.Tensor
    ) -> torch.Tensor:
        x = self.words(words) + self.dialects(dialects)
        y = self.norm1(x)
        return x + self.attention(y, y, y, need_weights=False)[0]

    def forward(
        self, words: torch.Tensor, dialects: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        x = self.before_experts(words, dialects)
        x = x + self.moe(self.norm2(x))
        return self.head(self.norm3(x)), self.moe.balancing

    @torch.no_grad()
    def balance_router(self, data: Data, scale: float = 0.3) -> None:
        """A small router that prefers no expert on the average token of ``data``."""
        x = self.norm2(self.before_experts(data.words, data.dialects))
        mean = F.normalize(x.mean((0, 1)), dim=0)
        weight = self.moe.router.weight
        weight.copy_(scale * (weight - (weight @ mean)[:, None] * mean))


class Loss(nn.Module):
    """Cross entropy of a sequence and its balancing loss; [B] for reduction "none"."""

    def __init__(self, balancing: float = 0.0, reduction: str = "mean"):
        super().__init__()
        self.balancing, self.reduction = balancing, reduction

    def forward(self, output: Any, targets: torch.Tensor) -> torch.Tensor:
        logits, balancing = output
        loss = F.cross_entropy(logits.mT, targets, reduction="none").mean(1)
        loss = loss + self.balancing * balancing
        return loss.mean() if self.reduction == "mean" else loss


@torch.no_grad()
def look(net: Translator, data: Data) -> Row:
    """Accuracy, entropy and load of each expert on data that need no privacy."""
    net.eval()
    logits, _ = net(data.words, data.dialects)
    net.train()
    chosen = net.moe.chosen
    load = torch.bincount(chosen.flatten(), minlength=EXPERTS) / chosen.numel()
    return {
        "accuracy": (logits.argmax(-1) == data.targets).double().mean().item(),
        "entropy": load_entropy(chosen, EXPERTS).item(),
        "load": [round(share, 4) for share in load.tolist()],
    }


def train(way: str, seed: int, args: argparse.Namespace) -> List[Row]:
    """One run; a row for each epoch, that before training included."""
    generator = torch.Generator().manual_seed(1000 + seed)
    train_set = sequences(args.samples, generator)
    held_out = sequences(500, generator)
    torch.manual_seed(seed)
    net = Translator(common=args.common)
    net.balance_router(held_out)
    if way == "frozen router":
        freeze_routers(net)
    engine = PrivacyEngine()
    model, optimizer, criterion, loader = engine.make_private_with_epsilon(
        module=net,
        optimizer=torch.optim.Adam(net.parameters(), lr=args.lr),
        criterion=Loss(args.balancing if way == "balancing loss" else 0.0),
        data_loader=DataLoader(TensorDataset(*train_set), batch_size=args.batch),
        target_epsilon=args.epsilon,
        target_delta=DELTA,
        epochs=args.epochs,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
    )
    rows, common = [], {"way": way, "seed": seed}
    rows.append({**common, "epoch": 0, "epsilon": 0.0, **look(net, held_out)})
    for epoch in range(1, args.epochs + 1):
        for words, dialects, targets in loader:
            optimizer.zero_grad()
            criterion(model(words, dialects), targets).backward()
            optimizer.step()
        epsilon = round(engine.get_epsilon(DELTA), 3)
        rows.append(
            {**common, "epoch": epoch, "epsilon": epsilon, **look(net, held_out)}
        )
    return rows


def spread(values: List[float]) -> str:
    return f"{mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def table(rows: List[Row], key: str, title: str) -> None:
    print(f"\n{title}: mean (range) over seeds")
    print("epoch  " + "".join(f"{way:>20}" for way in WAYS))
    for epoch in sorted({row["epoch"] for row in rows}):
        cells = [
            spread([r[key] for r in rows if r["way"] == way and r["epoch"] == epoch])
            for way in WAYS
        ]
        print(f"{epoch:>5}  " + "".join(f"{cell:>20}" for cell in cells))


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=8)
    add("--samples", type=int, default=4000)
    add("--batch", type=int, default=250)
    add("--lr", type=float, default=0.02)
    add("--epsilon", type=float, default=4.0)
    add("--balancing", type=float, default=0.1, help="weight of the balancing loss")
    add("--common", type=float, default=4.0, help="size of the common component")
    add("--json", metavar="PATH", help="also write a line for each run and epoch there")
    args = parser.parse_args(argv)
    warnings.filterwarnings("ignore", message="Secure RNG turned off")
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Optimal order is the")
    torch.set_num_threads(1)

    print(f"torch {torch.__version__}, cpu, 1 thread; {vars(args)}")
    rows: List[Row] = []
    for seed in range(args.seeds):
        for way in WAYS:
            start = time.perf_counter()
            rows += train(way, seed, args)
            seconds = time.perf_counter() - start
            print(f"seed {seed}, {way}: {seconds:.0f} s", flush=True)
    title = f"load entropy, at most log {EXPERTS} = {math.log(EXPERTS):.2f}"
    table(rows, "entropy", title)
    table(rows, "accuracy", "accuracy on held-out sequences")
    if args.json:
        with open(args.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
