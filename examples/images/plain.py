"""Trains an image model of timm on scikit-learn's digits."""

from __future__ import annotations

import argparse
from typing import List, Optional

import timm
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


def digits(size: int) -> TensorDataset:
    """1797 images ``[1, size, size]`` between -1 and 1, and their labels."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 8 - 1
    images = F.interpolate(images, size=(size, size), mode="bilinear")
    return TensorDataset(images, torch.tensor(data.target))


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="test_resnet", help="resnet18, vit_tiny...")
    parser.add_argument("--weights", help="a file of pretrained weights for the model")
    parser.add_argument("--size", type=int, default=24, help="pixels of a side")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    of_file = {"pretrained": True, "pretrained_cfg_overlay": {"file": args.weights}}
    of_vit = {"img_size": args.size} if "vit" in args.model else {}
    model = timm.create_model(
        args.model,
        num_classes=10,
        in_chans=1,
        **of_vit,
        **(of_file if args.weights else {}),
    )
    model.to(device)

    train, test = random_split(digits(args.size), [1500, 297])
    loader = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.CrossEntropyLoss()

    for epoch in range(args.epochs):
        model.train()
        for images, labels in loader:
            optimizer.zero_grad()
            loss = criterion(model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            images, labels = next(iter(DataLoader(test, batch_size=len(test))))
            right = model(images.to(device)).argmax(1).cpu() == labels
        print(f"epoch {epoch + 1}: accuracy {right.float().mean():.3f}")


if __name__ == "__main__":
    main()
