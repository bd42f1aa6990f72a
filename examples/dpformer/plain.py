"""Recommends the next item of a user's history: a transformer with DPFormer's shape."""

from __future__ import annotations

import argparse
from typing import List, Optional

import torch
from torch.utils.data import DataLoader

import opacus_ext.losses
from opacus_ext.models import DPFormer
from opacus_ext.recommend import SequenceData, read_sequences, synthetic_sequences


@torch.no_grad()
def hits(model: torch.nn.Module, data: SequenceData, max_len: int) -> float:
    """The share of users whose held-out item is among the ten best."""
    model.eval()
    best = model.score(data.contexts(max_len)).topk(10).indices
    return float((best == data.held_out[:, None]).any(1).float().mean())


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", help="ratings.dat of MovieLens; by default made up")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--max-len", type=int, default=20)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    if args.data is None:
        data = synthetic_sequences(num_users=2000, num_items=100, num_genres=10)
    else:
        data = read_sequences(args.data)
    train = data.training_set(args.max_len)
    model = DPFormer(data.num_items, args.max_len, width=32, dropout=0.0)
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    criterion = opacus_ext.losses.PerSample()

    for epoch in range(args.epochs):
        model.train()
        for ids, targets in loader:
            optimizer.zero_grad()
            logits = model(ids)
            losses = opacus_ext.losses.cross_entropy(logits, targets, ignore_index=0)
            criterion(losses).backward()
            optimizer.step()
        print(f"epoch {epoch}: HIT@10 {hits(model, data, args.max_len):.3f}")


if __name__ == "__main__":
    main()
