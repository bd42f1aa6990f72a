"""Figure 5 of the DPFormer paper: how long the tails of its data sets are.

    python benchmarks/long_tail.py ml-1m.txt Video.txt --plot figure5.png

Prints the numbers of users, items and actions, how sparse the data are (1 - density),
and the share of all actions that the most popular items have. ``--plot`` draws how
often each item occurs, by its rank (matplotlib).
"""

import argparse
import sys
from pathlib import Path
from typing import List, Optional

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.tables import written  # noqa: E402
from opacus_ext.recommend import SequenceData, read_sequences  # noqa: E402

SHARES = (0.01, 0.1, 0.5)  # of the items


def counts_of(data: SequenceData) -> Tensor:
    """How often each item occurs, held out or not, the most popular first."""
    held_out = torch.bincount(data.held_out, minlength=data.num_items + 1)
    return (data.popularity() + held_out)[1:].sort(descending=True).values


def row_of(data: SequenceData) -> List[str]:
    """What is printed of a data set."""
    counts, users = counts_of(data), len(data.histories)
    total, size = int(counts.sum()), len(counts)
    tops = (counts[: round(share * size)].sum() / total for share in SHARES)
    sizes = (f"{number:,}" for number in (users, size, total))
    sparse = f"{1 - total / (users * size):.2%}"
    return [data.name, *sizes, sparse, *(f"{float(top):.1%}" for top in tops)]


def plot(sets: List[SequenceData], path: Path) -> None:
    """One panel a data set, both axes logarithmic: a power law is a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, _ = pyplot.subplots(1, len(sets), figsize=(4 * len(sets), 3))
    for axis, data in zip(figure.axes, sets):
        counts = counts_of(data)
        axis.loglog(range(1, len(counts) + 1), counts)
        axis.set(title=data.name, xlabel="rank of the item", ylabel="actions")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", help="SASRec text or ratings.dat")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    args = parser.parse_args(argv)
    sets = [read_sequences(path) for path in args.files]
    tops = (f"actions of the top {share:.0%}" for share in SHARES)
    head = ("data", "users", "items", "actions", "1 - density", *tops)
    print(written(head, [row_of(data) for data in sets]))
    if args.plot:
        plot(sets, args.plot)


if __name__ == "__main__":
    main()
