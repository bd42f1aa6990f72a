"""Small runs of private training, which scaling laws are fitted to."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import time
import warnings
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from tqdm import tqdm

import opacus_ext  # noqa: F401  the modes
from opacus_ext.accountants.solver import checked
from opacus_ext.models.dpformer import DPFormer
from opacus_ext.planner.measurements import Measurements, read_runs
from opacus_ext.progress import progress as show_progress
from opacus_ext.re_attention.attention import SelfAttention
from opacus_ext.refused import Refused

# Settings of a run; runs of equal settings are the same.
_KEY = (
    "family size ratio learning_rate batch_size tokens total_steps every warmup "
    "max_grad_norm data seed"
).split()


@dataclass(frozen=True)
class Family:
    """
    One architecture at several sizes, and what it is trained on, for
    :func:`measure`.

    Attributes:
        name: of the measurements
        sizes: names of the sizes, small to large
        build: function of a size's name that returns a model with new random weights
        dataset: items (inputs, targets); one is an example, the unit of clipping
        criterion: returns a loss for each example, or their mean, by its ``reduction``
        tokens: S, tokens of an example (6 M S operations a step and example)
    """

    name: str
    sizes: Sequence[str]
    build: Callable[[str], nn.Module]
    dataset: Dataset
    criterion: nn.Module
    tokens: int


class _TokenLoss(nn.CrossEntropyLoss):
    """The mean loss of an example's tokens, but for those of target -100."""

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        flat = logits.flatten(0, 1), targets.flatten()
        loss = nn.functional.cross_entropy(*flat, reduction="none")
        loss = loss.view(targets.shape).sum(1) / (targets != self.ignore_index).sum(1)
        return loss.mean() if self.reduction == "mean" else loss


SIZES = ("16x2", "32x2", "64x2", "128x2", "192x2")
MASKED_SHARE = 0.15  # of an example's tokens, as BERT
# It follows the bytes, which are numbered from 1: DPFormer takes 0 for padding.
_MASK = 257


def byte_transformers(
    text: Union[str, Path, bytes], length: int = 64, sizes: Sequence[str] = SIZES
) -> Family:
    """
    Causal transformers on the bytes of a text: :class:`opacus_ext.models.DPFormer`.

    Args:
        text: a file, or the bytes themselves
        length: S, bytes of an example; examples do not overlap
        sizes: as "WIDTHxDEPTH"; heads are 32 wide

    Raises:
        OSError: if the file can't be read
        Refused: for another form of a size, or a text shorter than an example

    Example:
        >>> family = byte_transformers(b"To be, or not to be" * 20, length=8)
        >>> sum(p.numel() for p in family.build("16x2").parameters())
        10800
    """
    ids, build = _examples_of(text, length, 1), partial(_transformer, length, 256)
    for size in sizes:
        _shape(size)
    dataset = TensorDataset(ids[:, :-1], ids[:, 1:])
    return Family("bytes", tuple(sizes), build, dataset, _TokenLoss(), length)


def masked_transformers(
    text: Union[str, Path, bytes], length: int = 64, sizes: Sequence[str] = SIZES
) -> Family:
    """
    Transformers that guess hidden bytes of a text from both sides, as BERT does: of 15
    % of an example's bytes, drawn once, 80 % are hidden, 10 % are others and 10 % are
    left; the loss is that of these bytes alone. Arguments and errors are those of
    :func:`byte_transformers`.

    Example:
        >>> family = masked_transformers(b"To be, or not to be" * 20, length=20)
        >>> inputs, targets = family.dataset[0]
        >>> int((targets >= 0).sum())
        3
    """
    ids = _examples_of(text, length, 0)
    for size in sizes:
        _shape(size)
    dataset = TensorDataset(*_masked(ids, torch.Generator().manual_seed(0)))

    def build(size: str) -> nn.Module:
        model = _transformer(length, _MASK, size)
        for module in model.modules():
            if isinstance(module, SelfAttention):
                module.causal = False
        return model

    return Family("masked", tuple(sizes), build, dataset, _TokenLoss(), length)


def _examples_of(text: Union[str, Path, bytes], length: int, more: int) -> torch.Tensor:
    """Numbers of bytes, ``[examples, length + more]``, ``length`` apart."""
    content = text if isinstance(text, bytes) else Path(text).read_bytes()
    if len(content) < length + more:
        raise Refused(
            f"A text of {len(content)} bytes has no example of {length}.",
            parameter="text",
        )
    ids = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64)) + 1
    return ids.unfold(0, length + more, length)


def _masked(
    ids: torch.Tensor, generator: torch.Generator
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Inputs with hidden bytes, and targets, -100 where nothing is to be guessed."""
    # As many in each example, so that the mean loss of none is that of fewer bytes.
    order = torch.rand(ids.shape, generator=generator).argsort(1)
    chosen = order < max(1, round(MASKED_SHARE * ids.shape[1]))
    kind = torch.rand(ids.shape, generator=generator)
    others = torch.randint(1, _MASK, ids.shape, generator=generator)
    inputs = torch.where(chosen & (kind < 0.9), others, ids)
    inputs = inputs.masked_fill(chosen & (kind < 0.8), _MASK)
    return inputs, ids.masked_fill(~chosen, -100)


def _transformer(length: int, ids: int, size: str) -> DPFormer:
    width, depth = _shape(size)
    return DPFormer(ids, length, width, depth, max(1, width // 32), dropout=0.0)


def _shape(size: str) -> Tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", size)
    width, depth = map(int, found.groups() if found else (0, 0))
    if min(width, depth) < 1 or (width > 32 and width % 32):
        raise Refused(
            f"{size!r} is no WIDTHxDEPTH, of a width below 32 or a multiple of it.",
            parameter="sizes",
        )
    return width, depth


_OF_TEXT = {"bytes": byte_transformers, "masked": masked_transformers}


def find_family(name: str, text: Optional[str] = None) -> Family:
    """
    The family "bytes" or "masked", of a text, or that which "package.module:function"
    returns, called with the text if there is one.
    """
    if name in _OF_TEXT:
        if text is None:
            raise Refused(f"The family {name!r} needs a text.", parameter="text")
        return _OF_TEXT[name](text)
    family = made_by(name, "family", *(() if text is None else (text,)))
    if not isinstance(family, Family):
        raise Refused(f"{name!r} returned {type(family).__name__}, not a Family.")
    return family


def made_by(name: str, parameter: str, *args: Any) -> Any:
    """The result of "package.module:function", which an argument of this name names."""
    module, _, function = name.partition(":")
    try:
        return getattr(import_module(module), function)(*args)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise Refused(
            f"{parameter} {name!r} is not to be had as module:function: {error}.",
            parameter=parameter,
            remedy="Name a function that can be imported and called so.",
        ) from error


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
        family: see :class:`Family`
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
    # A file that can't be written is told of before training.
    path.open("a", encoding="utf-8").close()
    known = {_key(run): run for run in read_runs(path)}
    settings = dict(
        family=family.name,
        batch_size=batch_size,
        tokens=family.tokens,
        total_steps=steps,
        every=every,
        warmup=warmup,
        max_grad_norm=max_grad_norm,
        data=_digest(family.dataset),
        unigram=_unigram(family.dataset),
        seed=seed,
    )
    grid: List[Dict[str, Any]] = [
        dict(settings, size=size, ratio=float(ratio), learning_rate=float(rate))
        for rate, size, ratio in itertools.product(learning_rates, sizes, ratios)
    ]
    todo = [run for run in grid if _key(run) not in known]
    # The end of the last line may be missing.
    lines = "\n" * (bool(known) and not path.read_bytes().endswith(b"\n"))
    with show_progress(total=steps * len(todo), unit="step", show=progress) as bar:
        for run in todo:
            bar.set_postfix_str(f"{run['size']}, ratio {run['ratio']:.2g}")
            train(family, run, bar)
            with path.open("a", encoding="utf-8") as file:
                file.write(lines + json.dumps(run, allow_nan=False) + "\n")
            lines, known[_key(run)] = "", run
    return Measurements.of_runs(known[_key(run)] for run in grid)


def _digest(dataset: Any) -> str:
    """A hash of the number of examples and a hundred of them."""
    digest = hashlib.sha256(str(len(dataset)).encode())
    for i in range(0, len(dataset), max(1, len(dataset) // 100)):
        for part in dataset[i]:
            digest.update(torch.as_tensor(part).numpy().tobytes())
    return digest.hexdigest()[:12]


def _unigram(dataset: Any) -> Optional[float]:
    """The loss of guessing targets by their frequency; None if they are no tokens."""
    some = range(0, len(dataset), max(1, len(dataset) // 10_000))
    targets = torch.cat([torch.as_tensor(dataset[i][1]).flatten() for i in some])
    if targets.is_floating_point():
        return None
    counts = targets[targets >= 0].unique(return_counts=True)[1]
    return float(torch.distributions.Categorical(counts.double()).entropy())


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
    began, total = time.process_time(), 0.0
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for step, (inputs, targets) in enumerate(epochs, 1):
        for group in optimizer.param_groups:
            group["lr"] = run["learning_rate"] * min(1.0, step / max(warmup, 1))
        optimizer.zero_grad()
        loss = criterion(model(inputs), targets)
        if not math.isfinite(loss.item()):
            bar.update(run["total_steps"] - step + 1)
            break
        loss.backward()
        optimizer.step()
        bar.update()
        total += loss.item()
        if step % every == 0:
            run["steps"].append(step)
            run["loss"].append(round(total / every, 5))
            total = 0.0
        if step == run["total_steps"]:
            break
    run["cpu_seconds"] = round(time.process_time() - began, 1)
