"""Time and memory of a step of private training on this machine, measured briefly."""

from __future__ import annotations

import gc
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from opacus_ext.accountants.solver import checked
from opacus_ext.planner.families import Family, privately
from opacus_ext.refused import Refused


@dataclass(frozen=True)
class Probe:
    """
    Time and memory of steps at a few sizes, interpolated in logarithms between them and
    in proportion to the parameters beyond.

    Attributes:
        parameters: of the sizes, ascending, ``[sizes]``
        per_step: seconds of a step beside its examples (noise, optimizer), ``[sizes]``
        per_example: seconds of an example of ``tokens`` tokens, ``[sizes]``
        bytes: peak memory at ``batch_size`` examples at once; nan where the system
            does not report it, ``[sizes]``
        batch_size: the physical batch; a larger logical one consists of several
        tokens: S
        device: the one that was probed
    """

    parameters: np.ndarray
    per_step: np.ndarray
    per_example: np.ndarray
    bytes: np.ndarray
    batch_size: int
    tokens: int
    device: str

    def seconds(
        self, parameters: Any, batch_size: Any, steps: Any, tokens: Optional[int] = None
    ) -> np.ndarray:
        """Seconds of a run, in proportion to the length of its examples."""
        length = (tokens or self.tokens) / self.tokens
        return steps * (
            self._at(self.per_step, parameters)
            + batch_size * length * self._at(self.per_example, parameters)
        )

    def memory(self, parameters: Any) -> np.ndarray:
        """Peak bytes at the physical batch."""
        if np.isnan(self.bytes).any():
            raise Refused(
                "This system does not report peak memory.", parameter="memory"
            )
        return self._at(self.bytes, parameters)

    def _at(self, values: np.ndarray, parameters: Any) -> np.ndarray:
        x = np.log(np.asarray(parameters, dtype=float))
        known = np.log(self.parameters)
        inside = np.exp(np.interp(x, known, np.log(values)))
        beyond = np.exp(np.maximum(x - known[-1], 0))
        return inside * beyond


def probe(
    family: Family,
    sizes: Optional[Sequence[str]] = None,
    *,
    batch_size: int = 32,
    repeats: int = 3,
    device: str = "cpu",
) -> Probe:
    """
    Times private steps of a family ("ghost_bk") at each size.

    Args:
        sizes: some of the family's, for all of them None
        batch_size: the physical batch size that would be trained with
        repeats: steps timed for each size; the fastest counts
        device: "cpu" or "cuda"

    Raises:
        Refused: for a data set of fewer examples than ``batch_size``

    Example:
        >>> from opacus_ext.planner.families import byte_transformers
        >>> family = byte_transformers(b"To be, or not to be" * 20, 8, ["8x1", "16x1"])
        >>> bool(probe(family, batch_size=4).seconds(1e4, 100, 1000) > 0)
        True
    """
    checked("batch_size", batch_size, at_least=2, at_most=len(family.dataset))
    rows: List[Tuple[float, ...]] = []
    for size in family.sizes if sizes is None else sizes:
        params, few, _ = _steps(family, size, 1, repeats, device)
        _, many, used = _steps(family, size, batch_size, repeats, device)
        each = max(many - few, 1e-3 * many) / (batch_size - 1)
        rows.append((params, max(few - each, 1e-3 * few), each, used))
    columns = [np.array(c) for c in zip(*sorted(rows))]
    # What a small model leaves behind may hide what a larger one takes.
    columns[3] = np.maximum.accumulate(columns[3])
    return Probe(*columns, batch_size, family.tokens, device)


def _steps(
    family: Family, size: str, batch_size: int, repeats: int, device: str
) -> Tuple[float, float, float]:
    """Parameters, seconds of the fastest step, and peak bytes of a few steps."""
    gc.collect()
    before = _reset_peak(device)
    model = family.build(size).to(device)
    params = sum(p.numel() for p in model.parameters() if p.requires_grad)
    data: Dataset = Subset(family.dataset, range(batch_size))
    loader = DataLoader(data, batch_size=batch_size)
    inputs, targets = (x.to(device) for x in next(iter(loader)))
    model, optimizer, criterion, _ = privately(
        family, model, loader, 1e-3, noise_multiplier=1.0, max_grad_norm=1.0
    )
    times = []
    # The first steps look into the model, and take longer.
    for _ in range(2 + repeats):
        began = time.perf_counter()
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    cuda = device != "cpu"
    used = (torch.cuda.max_memory_allocated() if cuda else _status("VmHWM")) - before
    return params, min(times[2:]), used


def _reset_peak(device: str) -> float:
    """Forgets the peak so far; returns the bytes in use, nan if they are not known."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return _status("VmRSS")
    return math.nan


def _status(name: str) -> float:
    """A number of bytes that Linux reports of this process, else nan."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    found = [line for line in lines if line.startswith(name)]
    return 1024.0 * int(found[0].split()[1]) if found else math.nan
