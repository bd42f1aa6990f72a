"""Trains a generative adversarial network on scikit-learn's digits, with privacy."""

from __future__ import annotations

import argparse
from typing import List, Optional

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401  (registers the modes with Opacus)


def generator(nz: int, ngf: int) -> nn.Module:
    """Noise ``[nz, 1, 1]`` to images ``[1, 8, 8]`` between -1 and 1."""
    return nn.Sequential(
        nn.ConvTranspose2d(nz, 2 * ngf, 2, 1, 0, bias=False),
        nn.BatchNorm2d(2 * ngf),
        nn.ReLU(True),
        nn.ConvTranspose2d(2 * ngf, ngf, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf, 1, 4, 2, 1),
        nn.Tanh(),
    )


def discriminator(ndf: int) -> nn.Module:
    """Images to one logit each, positive for real ones."""
    return nn.Sequential(
        nn.Conv2d(1, ndf, 4, 2, 1),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(ndf, 2 * ndf, 4, 2, 1, bias=False),
        nn.GroupNorm(4, 2 * ndf),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(2 * ndf, 1, 2),
        nn.Flatten(0),
    )


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--nz", type=int, default=32)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    netG = generator(args.nz, 16).to(device)
    netD = discriminator(16).to(device)
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    dataloader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True)
    optimizerD = torch.optim.Adam(netD.parameters(), lr=args.lr, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=args.lr, betas=(0.5, 0.999))
    criterion = nn.BCEWithLogitsLoss()
    netD, optimizerD, dataloader = PrivacyEngine().make_private_with_epsilon(
        module=netD,
        optimizer=optimizerD,
        data_loader=dataloader,
        target_epsilon=8,
        target_delta=1e-4,
        epochs=args.epochs,
        max_grad_norm=1.0,
        grad_sample_mode="hooks",
    )

    for epoch in range(args.epochs):
        for (real,) in dataloader:
            real = real.to(device)
            ones = torch.ones(len(real), device=device)
            fake = netG(torch.randn(len(real), args.nz, 1, 1, device=device))

            # The discriminator: real images are 1, fake ones are 0.
            optimizerD.zero_grad()
            errD = criterion(netD(real), ones) + criterion(
                netD(fake.detach()), 0 * ones
            )
            errD.backward()
            optimizerD.step()

            # The generator: the discriminator should say 1.
            netD.requires_grad_(False)
            optimizerG.zero_grad()
            errG = criterion(netD(fake), ones)
            errG.backward()
            optimizerG.step()
            netD.requires_grad_(True)
        print(f"epoch {epoch + 1}: D {errD.item():.3f}, G {errG.item():.3f}")


if __name__ == "__main__":
    main()
