"""Trains a diffusion model on scikit-learn's digits, with privacy."""

from __future__ import annotations

import argparse
from typing import List, Optional

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401  (registers the modes with Opacus)


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; by default a small U-Net is made")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--output", help="a folder for the pipeline")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.model:
        model = UNet2DModel.from_pretrained(args.model)
        model.train()
    else:
        model = UNet2DModel(
            sample_size=8,
            in_channels=1,
            out_channels=1,
            layers_per_block=1,
            block_out_channels=(16, 32),
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            norm_num_groups=8,
        )
    model.to(device)
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)

    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 8 - 1
    train_dataloader = DataLoader(TensorDataset(images), args.batch_size, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    criterion = nn.MSELoss()
    (
        model,
        optimizer,
        criterion,
        train_dataloader,
    ) = PrivacyEngine().make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        criterion=criterion,
        data_loader=train_dataloader,
        target_epsilon=8,
        target_delta=1e-4,
        epochs=args.epochs,
        max_grad_norm=1.0,
        grad_sample_mode="ghost_bk",
    )

    for epoch in range(args.epochs):
        losses = []
        for (clean_images,) in train_dataloader:
            clean_images = clean_images.to(device)
            noise = torch.randn_like(clean_images)
            timesteps = torch.randint(0, 1000, (len(clean_images),), device=device)
            noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)

            optimizer.zero_grad()
            noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
            loss = criterion(noise_pred, noise)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: loss {sum(losses) / len(losses):.3f}")

    if args.output:
        unet = getattr(model, "_module", model)
        DDPMPipeline(unet=unet, scheduler=noise_scheduler).save_pretrained(args.output)


if __name__ == "__main__":
    main()
