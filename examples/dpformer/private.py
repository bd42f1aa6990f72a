"""Recommends the next item of a user's history: DPFormer with its privacy by user."""

from __future__ import annotations

import argparse
from typing import List, Optional

import torch
from opacus import PrivacyEngine
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
    engine = PrivacyEngine(accountant="rdp")
    _, optimizer, criterion, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=0.8,
        max_grad_norm=0.5,
        grad_sample_mode="ghost_bk",
        wrap_model=False,
    )
    opacus_ext.track_errors(
        model,
        optimizer,
        opacus_ext.re_attention.token_shares(
            train.tensors[0],
            data.num_items + 1,
            source="private",
            max_tokens=args.max_len,
            noise_multiplier=5.0,
            accountant=engine.accountant,
        ),
    )

    for epoch in range(args.epochs):
        model.train()
        for ids, targets in loader:
            optimizer.zero_grad()
            logits = model(ids)
            losses = opacus_ext.losses.cross_entropy(logits, targets, ignore_index=0)
            criterion(losses).backward()
            optimizer.step()
        print(
            f"epoch {epoch}: HIT@10 {hits(model, data, args.max_len):.3f}, "
            f"epsilon {engine.get_epsilon(1e-4):.2f}"
        )


if __name__ == "__main__":
    main()
