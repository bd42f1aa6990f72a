"""Small runs of private training, which scaling laws are fitted to."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader, Subset
from tqdm import tqdm

import opacus_ext  # noqa: F401  the modes
from opacus_ext.accountants.solver import checked
from opacus_ext.planner.families import Family
from opacus_ext.planner.measurements import Measurements, read_runs
from opacus_ext.progress import progress as show_progress
from opacus_ext.refused import Refused

# Settings of a run; runs of equal settings are the same.
_KEY = (
    "family size ratio learning_rate batch_size tokens total_steps every warmup "
    "max_grad_norm data seed"
).split()


def measure(
    family: Family,
    path: Union[str, Path],
    *,
    ratios: Sequence[float] = (0, 2**-14, 2**-12, 2**-10, 2**-8, 2**-6, 2**-4),
    learning_rates: Sequence[float] = (3e-3,),
    sizes: Optional[Sequence[str]] = None,
    steps: int = 1000,
    every: int = 20,
    batch_size: int = 32,
    warmup: int = 20,
    max_grad_norm: float = 0.1,
    seed: int = 0,
    progress: bool = True,
) -> Measurements:
    """
    Trains a family at every size, noise-batch ratio and learning rate, and returns the
    losses of all these runs.

    The ratio fixes the noise of each run, at any epsilon. Clipping is "normalized", so
    that the ratio has the same meaning at any ``max_grad_norm``. The learning rate
    rises in ``warmup`` steps and stays: the loss halfway is that of half the steps.

    **These runs are not private in their text**: measure on public data.

    Args:
        family: see :mod:`opacus_ext.planner.families`
        path: file that runs are appended to, one a line; runs on file are not repeated,
            so that the same call continues after a stop
        ratios: noise-batch ratios; 0 is noise-free
        learning_rates: of Adam; of several, a law uses the best
        sizes: some of the family's; None for all
        steps: T of a run
        every: steps between two readings, each the mean loss of those steps
        batch_size: the physical batch size
        warmup: steps until the learning rate is reached
        max_grad_norm: bound of a clipped gradient, to be lower than most norms
        seed: of weights, order and noise
        progress: True for a progress bar

    Raises:
        Refused: for an empty grid, and arguments out of range

    Example:
        >>> from opacus_ext.planner.families import byte_transformers
        >>> family = byte_transformers(b"To be, or not to be" * 20, 8, ["8x1"])
        >>> grid = dict(ratios=[0, 0.01], steps=4, every=2, batch_size=4)
        >>> runs = measure(family, "runs.jsonl", **grid, progress=False)
        >>> len(runs), runs.steps
        (2, array([2., 4., 2., 4.]))
    """
    sizes = list(family.sizes if sizes is None else sizes)
    if not sizes or not set(sizes) <= set(family.sizes):
        raise Refused(
            f"{family.name} has the sizes {family.sizes}, not {sizes}.",
            parameter="sizes",
        )
    checked("ratios", ratios, at_least=0)
    checked("learning_rates", learning_rates, above=0)
    checked("every", every, at_least=1)
    checked("steps", steps, at_least=every)
    checked("batch_size", batch_size, at_least=1, at_most=len(family.dataset))
    path = Path(path)
    path.open("a").close()  # or it can't be written, which is known before training
    known = {_key(run): run for run in read_runs(path)}
    if known and not path.read_bytes().endswith(b"\n"):
        with path.open("a") as file:
            file.write("\n")
    settings = dict(
        batch_size=batch_size,
        tokens=family.tokens,
        total_steps=steps,
        every=every,
        warmup=warmup,
        max_grad_norm=max_grad_norm,
        data=_digest(family.dataset),
        seed=seed,
    )
    cells = itertools.product(learning_rates, sizes, ratios)
    grid: List[Dict[str, Any]] = [
        dict(family=family.name, size=size, ratio=float(r), learning_rate=float(rate))
        | settings
        for rate, size, r in cells
    ]
    todo = [run for run in grid if _key(run) not in known]
    total = steps * len(todo)
    with show_progress(total=total, unit="step", show=progress) as bar:
        for run in todo:
            bar.set_postfix_str(f"{run['size']}, ratio {run['ratio']:.2g}")
            train(family, run, bar)
            with path.open("a") as file:
                file.write(json.dumps(run, allow_nan=False) + "\n")
            known[_key(run)] = run
    return Measurements.of_runs(known[_key(run)] for run in grid)


def _digest(dataset: Any) -> str:
    """A hash of the number of examples and a hundred of them."""
    digest = hashlib.sha256(str(len(dataset)).encode())
    for i in range(0, len(dataset), max(1, len(dataset) // 100)):
        for part in dataset[i]:
            digest.update(torch.as_tensor(part).numpy().tobytes())
    return digest.hexdigest()[:12]


def _key(run: Dict[str, Any]) -> str:
    return json.dumps([run.get(name) for name in _KEY])


def train(family: Family, run: Dict[str, Any], bar: tqdm) -> None:
    """Trains one run, and adds its size, readings and seconds to ``run``."""
    every, warmup = run["every"], run["warmup"]
    torch.manual_seed(run["seed"])
    model = family.build(run["size"])
    batch_size = run["batch_size"]
    # Whole batches, so that Opacus's expected batch size is the physical one.
    whole = len(family.dataset) // batch_size * batch_size
    loader = DataLoader(
        Subset(family.dataset, range(whole)), batch_size=batch_size, shuffle=True
    )
    params = [p for p in model.parameters() if p.requires_grad]
    run["parameters"] = sum(p.numel() for p in params)
    with warnings.catch_warnings():  # about arguments that are meant here
        warnings.simplefilter("ignore")
        model, optimizer, criterion, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.Adam(params, lr=run["learning_rate"]),
            criterion=family.criterion,
            data_loader=loader,
            noise_multiplier=run["ratio"] * batch_size,
            max_grad_norm=run["max_grad_norm"],
            clipping="normalized",
            grad_sample_mode="ghost_bk",
            poisson_sampling=False,
        )
    run["steps"], run["loss"] = [], []
    began, total = time.process_time(), torch.zeros(())
    batches = _forever(loader)
    for step in range(1, run["total_steps"] + 1):
        for group in optimizer.param_groups:
            group["lr"] = run["learning_rate"] * min(1.0, step / max(warmup, 1))
        inputs, targets = next(batches)
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        if not math.isfinite(loss.item()):
            bar.update(run["total_steps"] - step + 1)
            break
        loss.backward()
        optimizer.step()
        total += loss.item()
        if step % every == 0:
            run["steps"].append(step)
            run["loss"].append(round(total.item() / every, 5))
            total.zero_()
        bar.update()
    run["cpu_seconds"] = round(time.process_time() - began, 1)


def _forever(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader
