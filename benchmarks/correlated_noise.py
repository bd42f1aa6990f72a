"""Correlated noise by strategy: accuracy of a linear model, time and memory of a step.

    python -m benchmarks correlated_noise --mnist FOLDER   # with t10k-*-ubyte.gz
    python -m benchmarks correlated_noise --parameters 10_000_000

Accuracy: the 10,000 images of MNIST's test file, split into 7,000 to train on, 1,000 to
choose the learning rate by, and 2,000 that are reported. Initial weights are 0,
max_grad_norm is 1, delta 1e-5. The learning rate is the best on the part to choose by,
with noise of another seed that epsilon does not count; rates are a factor of 2 apart,
and more are tried while the best is at an end.
"""

import argparse
import gzip
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext  # noqa: F401
from opacus_ext.data import CyclicPoisson, Poisson
from opacus_ext.planner.strategies import NoiseChoice, noise_strategies
from opacus_ext.strategies import (
    Banded,
    BufferedToeplitz,
    InverseBanded,
    LambdaCGD,
    Strategy,
)
from opacus_ext.strategies.stream import CorrelatedNoise

DELTA = 1e-5
#: Batch size, epochs, momentum, epsilon.
SETTINGS = ((10, 5, 0.0, 8.0), (10, 5, 0.0, 1.0), (100, 5, 0.0, 8.0), (10, 5, 0.9, 8.0))


@dataclass(frozen=True)
class Split:
    """Images as rows, and labels."""

    x: torch.Tensor
    y: torch.Tensor

    def accuracy(self, weights: torch.Tensor) -> float:
        """In percent."""
        hits = (self.x @ weights).argmax(1) == self.y
        return 100 * hits.double().mean().item()


def mnist(folder: Path) -> Tuple[Split, Split, Split]:
    """The parts to train on, to choose by and to report, in an order drawn once."""

    def read(name: str, header: int) -> torch.Tensor:
        data = gzip.decompress((folder / name).read_bytes())[header:]
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    x = read("t10k-images-idx3-ubyte.gz", 16).view(-1, 784) / 255
    x = torch.cat([x, torch.ones(len(x), 1)], 1)
    y = read("t10k-labels-idx1-ubyte.gz", 8).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    parts = order.split([7000, 1000, 2000])
    train, choose, report = (Split(x[part], y[part]) for part in parts)
    return train, choose, report


def trained(
    choice: NoiseChoice, data: Split, batch_size: int, rate: float, seed: int
) -> torch.Tensor:
    """Weights of a linear softmax model. Gradients and their norms are closed forms."""
    generator = torch.Generator().manual_seed(seed)
    strategy, records = choice.strategy, len(data.x)
    sampling = CyclicPoisson(bands=choice.parts, expected_batch_size=batch_size)
    noise = CorrelatedNoise(strategy, choice.parts)
    weights = torch.zeros(data.x.shape[1], 10)
    moved = torch.zeros_like(weights)
    lengths = data.x.norm(dim=1)

    def draw(source: torch.Generator) -> torch.Tensor:
        return torch.randn(weights.shape, generator=source)

    for step in range(strategy.steps):
        batch = sampling.draw(records, generator, step)
        x, y = data.x[batch], data.y[batch]
        backprops = (x @ weights).softmax(1)
        backprops[torch.arange(len(batch)), y] -= 1
        norms = backprops.norm(dim=1) * lengths[batch]
        backprops /= norms.clamp(min=1)[:, None]
        row = noise("weights", draw, generator)
        noise.taken += 1
        gradient = x.T @ backprops + choice.noise_multiplier * row
        moved = strategy.momentum * moved + gradient / batch_size
        weights = weights - rate * moved
    return weights


def best_rate(choice: NoiseChoice, data: Split, other: Split, batch_size: int) -> float:
    """The learning rate that is best on other images."""
    found: Dict[float, float] = {}
    rate = (1 - choice.strategy.momentum) * 0.5
    todo = [rate / 4, rate / 2, rate, rate * 2]
    while todo:
        for rate in todo:
            weights = trained(choice, data, batch_size, rate, seed=100)
            found[rate] = other.accuracy(weights)
        best = max(found, key=lambda rate: found[rate])
        ends = {best / 2, best * 2} - found.keys()
        todo = [rate for rate in ends if 1e-4 < rate < 100]
    return best


def shown(choices: List[NoiseChoice]) -> Iterator[NoiseChoice]:
    """Independent noise, the best number of bands, and all others."""
    yield choices[0]
    bands = [x for x in choices[1:] if isinstance(x.strategy, Banded)]
    yield min(bands, key=lambda choice: choice.prefix)
    yield from (x for x in choices if not isinstance(x.strategy, Banded))


def accuracies(folder: Path, seeds: int) -> None:
    """Prints a line for each setting and strategy."""
    train, choose, report = mnist(folder)
    records = len(train.x)
    print("batch, epochs, momentum, epsilon | noise | left, last | rate | accuracy")
    for batch_size, epochs, momentum, epsilon in SETTINGS:
        run = records, batch_size, epochs * records // batch_size, epsilon, DELTA
        for choice in shown(noise_strategies(*run, momentum)):
            rate = best_rate(choice, train, choose, batch_size)
            found = [
                report.accuracy(trained(choice, train, batch_size, rate, seed))
                for seed in range(seeds)
            ]
            print(
                f"{batch_size}, {epochs}, {momentum:g}, {epsilon:g} | {choice.name} | "
                f"{choice.prefix:.2f}, {choice.last:.2f} | {rate:g} | "
                f"{statistics.mean(found):.1f} +- {statistics.stdev(found):.1f}",
                flush=True,
            )


def step_time(parameters: int, steps: int) -> None:
    """Prints the milliseconds of CPU of a step, and the bytes that noise keeps."""
    width, n = round(parameters**0.5), 1000
    separation = 100
    strategies: List[Optional[Strategy]] = [
        None,
        Banded(8, n),
        Banded(32, n),
        InverseBanded(4, n, separation=separation),
        BufferedToeplitz(1, n, separation=separation),
        BufferedToeplitz(2, n, separation=separation),
        LambdaCGD(n, separation=separation),
    ]
    print("noise | ms of CPU a step | MB kept")
    for strategy in strategies:
        model = nn.Linear(width, width, bias=False)
        data = TensorDataset(torch.randn(800, width), torch.randint(width, (800,)))
        arguments = {} if strategy is None else {"noise": strategy}
        model, optimizer, criterion, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            criterion=nn.CrossEntropyLoss(),
            data_loader=DataLoader(data),
            sampling=Poisson(expected_batch_size=8, steps=n),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode="ghost_bk",
            **arguments,
        )
        seconds = []
        for step, (x, y) in zip(range(steps), loader):
            start = time.process_time()
            optimizer.zero_grad()
            criterion(model(x), y).backward()
            optimizer.step()
            seconds.append(time.process_time() - start)
        kept = 0
        if strategy is not None:
            state = optimizer.correlated.state_dict()
            tensors = [*state["past"].values(), *state["states"].values()]
            kept = sum(x.numel() * x.element_size() for x in tensors)
        median = 1000 * statistics.median(seconds[2:])
        print(f"{strategy} | {median:.0f} | {kept / 1e6:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--mnist", type=Path, help="folder of t10k-*-ubyte.gz")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parameters", type=int, help="of a layer that is timed")
    parser.add_argument("--steps", type=int, default=15, help="to be timed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.mnist:
        accuracies(args.mnist, args.seeds)
    if args.parameters:
        step_time(args.parameters, args.steps)


if __name__ == "__main__":
    main()
