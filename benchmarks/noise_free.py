"""What one run without noise tells of private fine-tuning, against private runs.

    python benchmarks/noise_free.py --base input.txt --sst2 train.tsv --out runs.jsonl

A byte transformer of 120,512 parameters is trained on one text (tiny shakespeare), then
fine-tuned on another (the sentences of SST-2) as a whole and by adapters (LoRA) of rank
1 and 8 in all linear layers, at five noise-batch ratios, two learning rates each, 300
steps of 32 examples of 64 bytes. The law of :mod:`opacus_ext.planner.noise_free` has
seen none of it; it is asked for the private losses from the noise-free run of each,
both at the better learning rate. Stopped, the same command goes on; with all runs on
file, it only compares. About 11 minutes on one core.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import peft
import torch
from scipy.optimize import isotonic_regression
from torch.utils.data import DataLoader

from opacus_ext.planner.measure import Family, byte_transformers, measure
from opacus_ext.planner.measurements import Measurements, read_runs
from opacus_ext.planner.noise_free import NoiseFree
from opacus_ext.tables import text_table

SIZE, LENGTH, BYTES = "64x2", 64, 2_000_000
RATES = {"rank 1": (1e-2, 3e-3), "rank 8": (3e-3, 1e-2), "whole": (1e-3, 3e-3)}
RATIOS = (0, 2**-11, 2**-9, 2**-7, 2**-5)
STEPS, EVERY = 300, 10


def pretrained(text: Path) -> dict:
    """The weights of a model that was trained on a text, two epochs."""
    torch.manual_seed(0)
    family = byte_transformers(text, LENGTH)
    model = family.build(SIZE)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(2):
        for inputs, targets in DataLoader(family.dataset, 32, shuffle=True):
            loss = family.criterion(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.state_dict()


def tuned(base: dict, sentences: Path) -> Family:
    """The pre-trained model and its adapters as "sizes" of a family."""
    lines = sentences.read_text("utf-8").splitlines()[1:]
    text = "\n".join(line.split("\t")[1] for line in lines)
    data = byte_transformers(text.encode()[:BYTES], LENGTH)

    def build(size: str) -> torch.nn.Module:
        model = data.build(SIZE)
        model.load_state_dict(base)
        if size == "whole":
            return model
        rank = int(size.split()[1])
        adapters = peft.LoraConfig(r=rank, lora_alpha=16, target_modules="all-linear")
        return peft.get_peft_model(model, adapters)

    return Family("tuned", (*RATES,), build, data.dataset, data.criterion, LENGTH)


def compare(runs) -> None:
    """The law's losses beside the measured ones, at the end and over all readings."""

    def best(size: float, ratio: float) -> np.ndarray:
        at = (runs.parameters == size) & (runs.ratio == ratio)
        curves = runs.loss[at].reshape(-1, len(steps))
        fallen = [isotonic_regression(c, increasing=False).x for c in curves]
        return np.min(fallen, axis=0)

    steps, rows, errors = np.unique(runs.steps), [], []
    for size in runs.sizes:
        free = NoiseFree(steps, best(size, 0))
        for ratio in runs.ratios[1:]:
            norm, measured = ratio * math.sqrt(size), best(size, ratio)
            error = free.after(steps, norm) / measured - 1
            errors.append(error)
            rows.append(
                [
                    f"{size:,.0f}",
                    f"2^{math.log2(ratio):.0f}",
                    f"{norm:.2f}",
                    f"{free.loss[-1]:.2f}",
                    f"{measured[-1]:.2f}",
                    f"{free.after(STEPS, norm):.2f}",
                    f"{np.abs(error).mean():.1%}",
                ]
            )
    names = "trainable ratio noise noise-free private told error".split()
    print(text_table(names, rows, right=True))
    found = np.abs(np.concatenate(errors))
    print(f"error of all readings: {found.mean():.1%} in the mean, {found.max():.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=Path, required=True, help="tiny shakespeare")
    parser.add_argument("--sst2", type=Path, required=True, help="its train.tsv")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    family = tuned(pretrained(args.base), args.sst2)
    for size, rates in RATES.items():
        grid = dict(ratios=RATIOS, learning_rates=rates, sizes=[size])
        measure(family, args.out, **grid, steps=STEPS, every=EVERY)
    compare(Measurements.of_runs(read_runs(args.out)))


if __name__ == "__main__":
    main()
