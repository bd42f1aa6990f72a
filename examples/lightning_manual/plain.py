"""Classifies digits with Lightning: manual optimization."""

from __future__ import annotations

import argparse
from typing import Any, List, Optional

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset


class Digits(L.LightningModule):
    """A perceptron for images of 8 by 8 pixels, which steps by itself."""

    def __init__(self, lr: float):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer, schedule = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        loss = F.cross_entropy(self(x), y)
        self.manual_backward(loss)
        optimizer.step()
        schedule.step()
        self.log("train_loss", loss, prog_bar=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        accuracy = (self(x).argmax(1) == y).float().mean()
        self.log("accuracy", accuracy, prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [schedule]


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args(argv)

    L.seed_everything(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    data = TensorDataset(images, torch.tensor(labels))
    train, test = torch.utils.data.random_split(data, [1500, len(data) - 1500])

    trainer = L.Trainer(
        max_epochs=args.epochs,
        accelerator="auto",
        devices=1,
        log_every_n_steps=5,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        logger=False,
    )
    trainer.fit(
        Digits(args.lr),
        DataLoader(train, batch_size=args.batch_size, shuffle=True),
        DataLoader(test, batch_size=256),
    )
    print({name: round(float(x), 3) for name, x in trainer.callback_metrics.items()})


if __name__ == "__main__":
    main()
