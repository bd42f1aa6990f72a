"""Inputs of a model whose rows are made of several records, as mixup makes them.

Each row of a batch is clipped as that of one record. Where a loop or a ``collate_fn``
mixes records before the model is called, a record moves several rows. So some entries
of the records are kept when they are drawn, and compared with those of the model's next
inputs. Only a proof that rows are made of two records is reported: noise, masks and
other changes of each record by itself are none.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple, Sequence

import numpy as np
import torch

from opacus_ext.private_torch import (
    DisableTorchFunctionSubclass,
    current_level,
    tree_leaves,
)

T = torch.Tensor
Array = np.ndarray

_ENTRIES = 512  # of a record that are kept
_ROWS = 8  # of a batch that are compared with the records
_CALLS = 8  # of the model that are compared with one draw
_EVIDENCE = 8  # entries that must agree, and values that must differ
_FEWEST = 4  # records of a batch: fewer explain too much by chance
_REMEDY = (
    "one record moves a step by more than max_grad_norm, and epsilon does not hold. "
    "Change each record by itself, in __getitem__ of the data set; "
    "check_per_sample_gradients(model, batch, step=step) tries your loop."
)
# Where these are read, nothing may tell of the records that were drawn.
_MIXED = (
    "rows of its input are made of two records of the batch, as by mixup or cutmix: "
    f"{_REMEDY}"
)
_CENTERED = f"its input has a mean of zero over each batch: {_REMEDY}"


# -- what was drawn --------------------------------------------------------------------


class Entries(NamedTuple):
    """
    Some entries of the records of a batch.

    Attributes:
        length: how many entries a record has
        positions: of those that are kept
        values: the entries that are kept, ``[B, positions]``
    """

    length: int
    positions: Array
    values: Array


def entries_of_records(records: Sequence[Any]) -> list[Entries]:
    """Returns entries of records as the data set gives them."""
    columns = zip(*[_leaves(record) for record in records])
    return [*filter(None, map(_entries_of, columns))]


def entries_of_batch(batch: Any, size: int) -> list[Entries]:
    """Returns entries of ``size`` records as the collate function gives them."""
    columns = [leaf for leaf in _leaves(batch) if leaf.dim() and len(leaf) == size]
    return [*filter(None, map(_entries_of, columns))]


def _entries_of(rows: Sequence[T] | T) -> Entries | None:
    """Returns entries of one tensor of each record; None if they are too few."""
    if len({row.shape for row in rows}) != 1:
        return None
    positions = _positions(rows[0].shape)
    if len(positions) < _EVIDENCE:
        return None
    values = [_read(row[None], positions) for row in rows]
    return Entries(rows[0].numel(), positions, np.concatenate(values))


def _leaves(value: Any) -> list[T]:
    """Returns the tensors and arrays of numbers in a record or a batch."""
    leaves: list[T] = []
    if current_level() is not None:  # Transforms of torch.func wrap what is read.
        return leaves
    for leaf in tree_leaves(value):
        if isinstance(leaf, Mapping):  # a BatchEncoding
            leaves += _leaves(dict(leaf))
        if isinstance(leaf, np.ndarray) and _is_of_numbers(leaf):
            # There is no tensor of a flipped, read-only or byte-swapped array.
            native = leaf.dtype.newbyteorder("=")
            leaf = torch.from_numpy(leaf.astype(native, order="C", subok=False))
        with DisableTorchFunctionSubclass():
            if isinstance(leaf, T) and _can_be_read(leaf):
                leaves.append(leaf.detach())
    return leaves


def _is_of_numbers(array: Array) -> bool:
    """Returns True for an array of real numbers that torch has a type for."""
    return array.dtype.kind in "uif" and array.dtype.itemsize <= 8


def _can_be_read(tensor: T) -> bool:
    """Returns True for a tensor of real numbers that holds them itself."""
    is_other = type(tensor).__torch_dispatch__ is not T.__torch_dispatch__
    if is_other or tensor.is_nested or tensor.is_meta:
        return False
    is_real = not (tensor.is_complex() or tensor.is_quantized)
    return is_real and tensor.layout is torch.strided


def _positions(shape: torch.Size) -> Array:
    """Returns which entries of a record are kept: of images, those of one channel."""
    length = math.prod(shape)
    if len(shape) == 3 and 0 < shape[0] <= 4:
        length //= shape[0]  # each channel may be scaled by itself
    return np.linspace(0, max(length - 1, 0), min(length, _ENTRIES)).astype(int)


def _read(rows: T, positions: Array) -> Array:
    """Returns entries of rows ``[B, ...]`` as they are now."""
    flat = rows.reshape(len(rows), -1)
    chosen = flat[:, torch.from_numpy(positions).to(flat.device)]
    return chosen.cpu().double().numpy()


# -- the draws and the model -----------------------------------------------------------


class MixingMonitor:
    """
    Compares the inputs of a model with the records that its loader has drawn, for
    batches 1, 2, 4, 8, ...: to compare, the device has to be waited for.

    Attributes:
        key: names it in worker processes
        drawn: entries of the last draws, by the calls that they are compared with yet
    """

    def __init__(self) -> None:
        self.key = next(_keys)
        self.drawn: deque[tuple[int, list[Entries]]] = deque(maxlen=_CALLS)
        _monitors[self.key] = self

    def add(self, entries: list[Entries]) -> None:
        """Notes entries of records that were drawn, if there are some."""
        if entries:
            self.drawn.append((_CALLS, entries))

    def look(self, inputs: Any) -> str | None:
        """Returns what is wrong with the inputs of a call; None if nothing is known."""
        found = None
        tensors = _leaves(inputs)
        for _ in range(len(self.drawn)):
            calls, entries = self.drawn.popleft()
            for tensor, drawn in itertools.product(tensors, entries):
                found = found or _compare(tensor, drawn)
            if calls > 1:
                self.drawn.append((calls - 1, entries))
        return found


_keys = itertools.count()
_monitors: weakref.WeakValueDictionary[int, MixingMonitor] = (
    weakref.WeakValueDictionary()
)


class Sent(NamedTuple):
    """A batch that a worker process sends, with entries of its records."""

    batch: Any
    key: int
    entries: list[Entries]

    def __reduce__(self) -> Any:
        return _arrived, tuple(self)


def _arrived(batch: Any, key: int, entries: list[Entries]) -> Any:
    """Called in the process that trains; returns the batch as it was collated."""
    monitor = _monitors.get(key)
    if monitor is not None:
        monitor.add(entries)
    return batch


# -- rows of two records ---------------------------------------------------------------


def _compare(tensor: T, drawn: Entries) -> str | None:
    """Returns what an input has of several records; None if that is not proven."""
    size = len(drawn.values)
    if tensor.is_floating_point() or tensor.dtype is torch.uint8:
        is_long = tensor.dim() > 0 and len(tensor) == size
        if is_long and tensor.numel() == size * drawn.length:
            rows = _read(tensor, drawn.positions)
            rounding = 1e-4
            if tensor.is_floating_point():
                rounding = max(rounding, 4 * torch.finfo(tensor.dtype).eps)
            return find_mixed(rows, drawn.values, rounding)
    return None


def find_mixed(rows: Array, records: Array, rounding: float = 1e-4) -> str | None:
    """
    Says how rows ``[B, N]`` are made of several of the records ``[B, N]``: as a sum or
    a patchwork of two, or centered by the mean of all. None if that is not proven: then
    each row may be made of its own record.

    Args:
        rounding: relative error of the entries
    """
    if len(records) < _FEWEST:
        return None
    if not (np.isfinite(rows).all() and np.isfinite(records).all()):
        return None
    if _are_centered(rows, records, rounding):
        return _CENTERED
    mixed = 0
    for row in np.unique(np.linspace(0, len(rows) - 1, _ROWS).astype(int)):
        # What rounding may have made tells nothing.
        if _remainder(rows[row], records[row]) <= 10 * rounding:
            continue
        if len(np.unique(rows[row])) < _EVIDENCE and len(rows[row]) < 8 * _EVIDENCE:
            return None
        other = _added(rows[row], records, row, rounding)
        if other is None:
            other = _pasted(rows[row], records, row, rounding)
        if other is None:
            return None
        # Another record alone is one, too: the loop may have changed their order.
        mixed += _remainder(rows[row], records[other]) > rounding
    # One may be chance.
    return _MIXED if mixed > 1 else None


def _are_centered(rows: Array, records: Array, rounding: float) -> bool:
    """Returns True for rows that are records less their mean, scaled by column."""
    spread, spread_before = rows.std(axis=0), records.std(axis=0)
    means, means_before = rows.mean(axis=0), records.mean(axis=0)
    differ = (spread > 1e-6) & (spread_before > 1e-6)
    is_zero = np.abs(means) <= rounding * spread
    was_zero = np.abs(means_before) <= 0.01 * spread_before
    if differ.sum() < _EVIDENCE or was_zero[differ].all() or not is_zero[differ].all():
        return False
    scaled = rows[:, differ] / spread[differ]
    before = (records - means_before)[:, differ] / spread_before[differ]
    return float(np.abs(scaled - before).max()) <= 10 * rounding


def _without(entries: Array, record: Array) -> Array:
    """Returns what no multiple of a record, plus a number, explains of entries."""
    basis, _ = np.linalg.qr(np.stack([np.ones_like(record), record], axis=1))
    return entries - (entries @ basis) @ basis.T


def _size(entries: Array) -> float:
    """Returns the norm of entries around their mean."""
    return float(np.linalg.norm(entries - entries.mean()))


def _remainder(row: Array, record: Array) -> float:
    """Returns the share of a row that its own record, scaled, does not explain."""
    size = _size(row)
    if not size:
        return 0.0
    return float(np.linalg.norm(_without(row, record))) / size


def _added(row: Array, records: Array, own: int, rounding: float) -> int | None:
    """Returns the record that a row is a sum of, with its own, if there is one."""
    rest, others = _without(row, records[own]), _without(records, records[own])
    squares = (others**2).sum(axis=1)
    # Multiples of the own record explain nothing more.
    differ = squares > 1e-6 * (records**2).sum(axis=1)
    # A record of a few entries may be what a mask has left out of its own one.
    usual = np.median(records, axis=1, keepdims=True)
    differ &= (records != usual).sum(axis=1) >= _EVIDENCE
    shares = others @ rest / np.where(differ, squares, 1.0)
    errors = np.linalg.norm(rest - shares[:, None] * others, axis=1)
    errors[~differ] = np.inf
    explain = np.flatnonzero(errors <= rounding * np.linalg.norm(rest))
    # Records that are alike, as waves of one frequency, explain any other one.
    return int(explain[0]) if len(explain) == 1 else None


def _pasted(row: Array, records: Array, own: int, rounding: float) -> int | None:
    """Returns the record that a row has a patch of, on its own one, if there is one."""
    steps = np.diff(records[own])
    differ = steps != 0
    if not differ.any():
        return None
    # The loop may have scaled records; most entries of a row are its own record's.
    scale = float(np.median(np.diff(row)[differ] / steps[differ]))
    for factor in (1.0, scale):
        if not factor:
            continue
        shift = 0.0 if factor == 1.0 else float(np.median(row - factor * records[own]))
        entries = (row - shift) / factor
        near = rounding * max(np.abs(entries).max(), 1e-12)
        same = np.abs(records - entries) <= near
        changed = ~same[own]
        if changed.sum() < _EVIDENCE:
            continue
        whole = same[:, changed].all(axis=1)
        for other in np.flatnonzero(whole):
            patch = records[other, changed]
            kept = same[own] & ~same[other]
            # A patch of one color may be another's by chance.
            if len(np.unique(patch)) >= 3 and kept.sum() >= _EVIDENCE:
                return int(other)
    return None
