"""Model families: one architecture at several sizes, and what it is trained on."""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, TensorDataset

from opacus_ext.models.dpformer import DPFormer
from opacus_ext.refused import Refused


@dataclass(frozen=True)
class Family:
    """
    Models of several sizes and their data, for
    :func:`opacus_ext.planner.measure.measure`.

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


class _TokenLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.reduction = "mean"

    def forward(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="none"
        )
        loss = loss.view(targets.shape).mean(1)
        return loss.mean() if self.reduction == "mean" else loss


SIZES = ("16x2", "32x2", "64x2", "128x2", "192x2")


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
    content = text if isinstance(text, bytes) else Path(text).read_bytes()
    examples = (len(content) - 1) // length
    if examples < 1:
        raise Refused(
            f"A text of {len(content)} bytes has no example of {length}.",
            parameter="text",
        )
    for size in sizes:
        _shape(size)
    # Bytes are numbered from 1: DPFormer takes 0 for padding.
    ids = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64)) + 1
    inputs = ids[: examples * length].view(examples, length)
    targets = ids[1 : examples * length + 1].view(examples, length)

    def build(size: str) -> nn.Module:
        width, depth = _shape(size)
        heads = max(1, width // 32)
        return DPFormer(256, length, width, depth, heads, dropout=0.0)

    dataset = TensorDataset(inputs, targets)
    return Family("bytes", tuple(sizes), build, dataset, _TokenLoss(), length)


def _shape(size: str) -> Tuple[int, int]:
    width, depth = map(
        int, (size if re.fullmatch(r"\d+x\d+", size) else "0x0").split("x")
    )
    if width < 1 or depth < 1 or (width > 32 and width % 32):
        raise Refused(
            f"{size!r} is no WIDTHxDEPTH, of a width below 32 or a multiple of it.",
            parameter="sizes",
        )
    return width, depth


def find_family(name: str, text: Optional[str] = None) -> Family:
    """
    The family "bytes", of a text, or that which "package.module:function" returns,
    called with the text if there is one.
    """
    if name == "bytes":
        if text is None:
            raise Refused("The family of bytes needs a text.", parameter="text")
        return byte_transformers(text)
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
