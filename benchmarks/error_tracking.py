"""What error tracking and Re-Attention cost, as a share of a training step.

Run as ``python benchmarks/error_tracking.py``. The model is DPFormer at the paper's
sizes (width 64, 2 blocks, 1 head, MovieLens-1M's 3416 items), the tracker the general
one of ``opacus_ext.track_errors``. A step is forward, backward and Adam, ``plain``
without privacy and ``ghost_bk`` with. Beside it

- ``tracked``: variances are propagated, attention stays as it is;
- ``corrected``: attention is corrected by them, as in use.

The three take turns in one process; times are CPU time, and the shares compare the
minima over the repeats, which other work on the machine disturbs least.
``OMP_NUM_THREADS`` sets the number of threads.
"""

import argparse
import json
import time
from contextlib import nullcontext
from functools import partial
from typing import Any, Callable, Dict, List
from unittest import mock

import torch
from opacus import PrivacyEngine
from opacus.optimizers import DPOptimizer
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import opacus_ext
from opacus_ext.losses import PerSample, cross_entropy
from opacus_ext.models import DPFormer
from opacus_ext.re_attention import attention

BAR = 0.15


def uncorrected(query, key, value, variance, *args, where):
    """In the place of ``corrected_attention``."""
    return F.scaled_dot_product_attention(query, key, value, *args[:-1], scale=args[-1])


def clock(run: Callable[[], None], device: str) -> float:
    now = time.perf_counter if device == "cuda" else time.process_time
    if device == "cuda":
        torch.cuda.synchronize()
    start = now()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return now() - start


def measure(length: int, batch: int, args: argparse.Namespace) -> Dict[str, float]:
    torch.manual_seed(0)
    ids = torch.randint(1, args.items + 1, (batch, length), device=args.device)
    shares = torch.rand(args.items + 1) * 0.1

    def build(mode: str, tracked: bool) -> Callable[[], None]:
        model = DPFormer(args.items, length, width=64, depth=2, heads=1)
        model.to(args.device).train()
        adam = torch.optim.Adam(model.parameters(), lr=1e-4)
        criterion: Any = PerSample()
        noise = {"noise_multiplier": 1.0, "max_grad_norm": 1.0}
        if mode == "plain":
            optimizer: Any = adam
            noisy = DPOptimizer(adam, expected_batch_size=batch, **noise)
        else:
            model, optimizer, criterion, _ = PrivacyEngine().make_private(
                module=model,
                optimizer=adam,
                criterion=criterion,
                data_loader=DataLoader(TensorDataset(ids, ids), batch_size=batch),
                poisson_sampling=False,
                grad_sample_mode=mode,
                **noise,
            )
            noisy = optimizer
        if tracked:
            opacus_ext.track_errors(model, noisy, shares.to(args.device))

        def step() -> None:
            optimizer.zero_grad()
            losses = cross_entropy(model(ids), ids, ignore_index=0)
            criterion(losses).backward()
            optimizer.step()

        return step

    row: Dict[str, float] = {"length": length, "batch": batch}
    for mode in ("plain", "ghost_bk"):
        without, within = build(mode, False), build(mode, True)
        ways = [
            ("step", without, nullcontext),
            ("tracked", within, partial(mock.patch.object, *PATCH)),
            ("corrected", within, nullcontext),
        ]
        times: Dict[str, List[float]] = {name: [] for name, *_ in ways}
        for repeat in range(args.repeats + 1):
            for name, step, context in ways:
                with context():
                    seconds = clock(step, args.device)
                if repeat:  # the first warms up
                    times[name].append(seconds)
        base = min(times["step"])
        row[f"{mode}_ms"] = 1e3 * base
        for name in ("tracked", "corrected"):
            row[f"{mode}_{name}"] = min(times[name]) / base - 1
    return row


PATCH = (attention, "corrected_attention", uncorrected)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 100, 200])
    parser.add_argument("--batches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--items", type=int, default=3416)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", help="file for the results")
    args = parser.parse_args()

    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, {args.device}")
    print(f"{'':>9} {'plain':>9} {'':>9} {'':>9} {'ghost_bk':>9}")
    names = ("B", "T", "ms", "tracked", "corrected", "ms", "tracked", "corrected")
    print("{:>4} {:>4} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}".format(*names))
    results = []
    for batch in args.batches:
        for length in args.lengths:
            row = measure(length, batch, args)
            results.append(row)
            shown = [f"{batch:>4} {length:>4}"]
            for mode in ("plain", "ghost_bk"):
                shown.append(f"{row[f'{mode}_ms']:>9.1f}")
                for name in ("tracked", "corrected"):
                    shown.append(f"{row[f'{mode}_{name}']:>+9.1%}")
            print(*shown, flush=True)
    for name in ("tracked", "corrected"):
        worst = max(row[f"plain_{name}"] for row in results)
        verdict = "met" if worst <= BAR else "missed"
        print(f"bar: {name} at most {BAR:.0%} of a plain step: {worst:.1%}, {verdict}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"arguments": vars(args), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
