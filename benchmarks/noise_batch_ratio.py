"""Does the noise-batch ratio alone tell the loss? Runs of equal ratio at several
physical batch sizes, as sections C.3 and C.4 of "Scaling laws for differentially
private language models" have them.

    python benchmarks/noise_batch_ratio.py --text input.txt --out ratio.jsonl
    python benchmarks/noise_batch_ratio.py --text input.txt --out ratio.jsonl \\
        --learning-rates 0.001 0.003 0.01 0.03 --ratios 0.25 --seeds 0

Runs are appended to the file, one a line, and those on file are not repeated: stopped,
the same command goes on. Then it prints tables of all that the file has: the loss of
the last quarter of each run, the mean of seeds, with half of what they differ; and in
brackets, as table 3, the loss of the trained models on the same examples of the text,
which they have seen. The first command takes about 10 minutes on one core.
``examples/planner_plots.py`` draws figures 7 to 10 from the file.
"""

import argparse
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Sequence

import numpy as np
import torch
from tqdm import tqdm

from opacus_ext.planner.measure import Family, byte_transformers, train
from opacus_ext.planner.measurements import read_runs

#: What tells cells apart, and runs.
CELL = "size ratio batch_size learning_rate total_steps".split()
KEY = [*CELL, "seed"]
EVALUATED = 2048  # examples of the text, the first


class Cell(NamedTuple):
    """Runs that differ in their seeds alone."""

    size: str
    ratio: float
    batch_size: int
    learning_rate: float
    total_steps: int
    seeds: int
    steps: np.ndarray
    loss: np.ndarray  # mean of seeds
    spread: float  # half of what the seeds differ in the loss of the last quarter
    evaluated: float

    @property
    def last(self) -> float:
        """The mean loss of the last quarter."""
        return last_quarter(self.loss)


def last_quarter(losses: Sequence[float]) -> float:
    return float(np.mean(losses[-max(1, len(losses) // 4) :]))


def cells(runs: Sequence[Dict[str, Any]]) -> List[Cell]:
    """The cells of runs, by all that tells them apart; runs that diverged are none."""
    of: Dict[Any, List[Dict[str, Any]]] = {}
    for run in runs:
        if run["steps"][-1:] == [run["total_steps"]]:
            of.setdefault(tuple(run[name] for name in CELL), []).append(run)
    found = []
    for kind, same in sorted(of.items(), key=lambda item: item[0]):
        ends = [last_quarter(run["loss"]) for run in same]
        losses = np.mean([run["loss"] for run in same], axis=0)
        evaluated = float(np.mean([run["evaluated"] for run in same]))
        spread = (max(ends) - min(ends)) / 2
        steps = np.array(same[0]["steps"])
        found.append(Cell(*kind, len(same), steps, losses, spread, evaluated))
    return found


def best(of: Sequence[Cell]) -> List[Cell]:
    """Of each size, ratio and batch size the cell of the best learning rate."""
    found: Dict[Any, Cell] = {}
    for cell in sorted(of, key=lambda c: -c.last):
        found[cell[:3]] = cell
    return sorted(found.values(), key=lambda c: c[:3])


@torch.no_grad()
def loss_on_text(model: torch.nn.Module, family: Family) -> float:
    """The mean loss of a trained model on the same examples for all."""
    model.eval()
    tensors = (x[:EVALUATED].split(256) for x in family.dataset.tensors)
    return float(
        np.mean([family.criterion(model(x), y).item() for x, y in zip(*tensors)])
    )


def trained(family: Family, run: Dict[str, Any], bar: tqdm) -> Dict[str, Any]:
    """A run with its readings, and the loss of its model on the text."""
    models = []

    def build(size: str) -> torch.nn.Module:
        models.append(family.build(size))
        return models[0]

    train(replace(family, build=build), run, bar)
    return {**run, "evaluated": round(loss_on_text(models[0], family), 5)}


def grid(args: argparse.Namespace, family: Family) -> Iterator[Dict[str, Any]]:
    """The settings of the runs, whole seeds first."""
    common = dict(family=family.name, tokens=family.tokens, total_steps=args.steps)
    common |= dict(every=20, warmup=20, max_grad_norm=0.1)
    names = "seed size ratio learning_rate batch_size".split()
    values = args.seeds, args.sizes, args.ratios, args.learning_rates, args.batches
    for cell in product(*values):
        yield {**common, **dict(zip(names, cell))}


def measure(args: argparse.Namespace) -> None:
    """Makes the runs that the file does not have."""
    family = byte_transformers(args.text, sizes=args.sizes)
    args.out.touch()
    known = [[run[name] for name in KEY] for run in read_runs(args.out)]
    todo = [r for r in grid(args, family) if [r[name] for name in KEY] not in known]
    with tqdm(total=args.steps * len(todo), unit="step", mininterval=5) as bar:
        for run in todo:
            line = json.dumps(trained(family, run, bar))
            with args.out.open("a") as file:
                file.write(line + "\n")


def table(of: Sequence[Cell]) -> str:
    """Losses by ratio and batch size, in Markdown."""
    here = {(c.ratio, c.batch_size): c for c in of}
    batches = sorted({batch for _, batch in here})
    heads = ["ratio", *(f"batch {b}" for b in batches), "largest against smallest"]
    lines = [heads, ["---"] * len(heads)]
    for ratio in sorted({ratio for ratio, _ in here}):
        row = [here.get((ratio, batch)) for batch in batches]
        ends = [c.last for c in row if c]
        shown = [
            f"{c.last:.3f} +- {c.spread:.3f} ({c.evaluated:.3f})" if c else "-"
            for c in row
        ]
        change = f"{ends[-1] / ends[0] - 1:+.1%}"
        lines.append([f"2^{np.log2(ratio):.3g}", *shown, change])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(of: Sequence[Cell]) -> None:
    """Prints a table of each size and learning rate, and of the best of these."""
    print("Loss of the last quarter, mean of seeds (and of the model on the text)")
    kinds = sorted({(c.size, c.learning_rate) for c in of})
    for size, rate in kinds:
        same = [c for c in of if (c.size, c.learning_rate) == (size, rate)]
        print(f"\n{size}, learning rate {rate:g}\n{table(same)}")
    for size in sorted({size for size, _ in kinds}):
        if len([kind for kind in kinds if kind[0] == size]) > 1:
            same = [c for c in best(of) if c.size == size]
            print(f"\n{size}, the best of its learning rates\n{table(same)}")


def main(arguments: Any = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--text", type=Path, required=True)
    add("--out", type=Path, required=True)
    add("--sizes", nargs="+", default=["16x2"])
    add("--batches", nargs="+", type=int, default=[8, 32, 128])
    ratios = [2.0**-k for k in (12, 9, 6, 4, 2, 0)]
    add("--ratios", nargs="+", type=float, default=ratios, help="2^-12 to 1")
    add("--learning-rates", nargs="+", type=float, default=[0.003])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--steps", type=int, default=400)
    args = parser.parse_args(arguments)
    measure(args)
    report(cells(read_runs(args.out)))


if __name__ == "__main__":
    main()
