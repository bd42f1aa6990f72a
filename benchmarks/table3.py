"""Table 3 of the DPFormer paper: variances after ReLU and GELU, sampled and analytic.

    python benchmarks/table3.py
    python benchmarks/table3.py --plot figure8.png

The input is Gaussian with mean 0. The second argument of the paper's N(0, 0.01) is a
standard deviation. "Analytic" are the moments of ``opacus_ext.re_attention.moments``;
the paper takes those of ReLU for GELU, too. ``--plot`` draws the two functions, which
is figure 8 (matplotlib).
"""

import argparse
import sys
from pathlib import Path
from typing import List, Optional

import torch
from torch import Tensor
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.tables import written  # noqa: E402
from opacus_ext.re_attention import moments  # noqa: E402

DRAWS = (10, 100, 1_000, 10_000, 100_000, 1_000_000)
ACTIVATIONS = {"ReLU": (F.relu, moments.relu), "GELU": (F.gelu, moments.gelu)}
# The paper's, by the standard deviation: by 1,000,000 draws, and analytic.
PAPER = {
    0.01: {"ReLU": (3.40e-5, 3.40e-5), "GELU": (2.49e-5, 3.40e-5)},
    0.1: {"ReLU": (0.0034, 0.0034), "GELU": (0.0025, 0.0034)},
    1.0: {"ReLU": (0.3418, 0.3408), "GELU": (0.3467, 0.3408)},
}


def analytic(name: str, std: float) -> float:
    """The variance after an activation, as Re-Attention computes it."""
    zero = torch.zeros(1, dtype=torch.float64)
    return float(ACTIVATIONS[name][1](moments.Moments(zero, zero + std**2)))


def sampled(name: str, std: float, draws: Tensor) -> List[float]:
    """The same by the first 10, 100, ... draws of a standard Gaussian."""
    values = ACTIVATIONS[name][0](std * draws)
    return [float(values[:number].var()) for number in DRAWS]


def table(seed: int = 0) -> str:
    """All inputs and activations, in Markdown."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(DRAWS[-1], generator=generator, dtype=torch.float64)
    body = []
    for std, paper in PAPER.items():
        for name in ACTIVATIONS:
            found = (*sampled(name, std, draws), analytic(name, std), *paper[name])
            body.append((f"{std:g}", name, *(f"{x:.4g}" for x in found)))
    head = ("std", "activation", *(f"{number:,}" for number in DRAWS))
    head = (*head, "analytic", "paper, 1,000,000", "paper, analytic")
    return written(head, body)


def plot(path: Path) -> None:
    """Figure 8."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    x = torch.linspace(-3, 3, 301)
    figure, axis = pyplot.subplots(figsize=(4, 3))
    for name, (function, _) in ACTIVATIONS.items():
        axis.plot(x, function(x), label=name)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw figure 8")
    args = parser.parse_args(argv)
    print(table(args.seed))
    if args.plot:
        plot(args.plot)


if __name__ == "__main__":
    main()
