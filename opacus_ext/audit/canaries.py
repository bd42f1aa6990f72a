"""Canaries: records whose presence an attacker guesses, and their scores."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any, Iterable, List, Tuple

import numpy as np
import torch
from torch import nn

from opacus_ext.checks.subject import LossFn
from opacus_ext.private_torch import tree_leaves, tree_map
from opacus_ext.refused import Refused


class WithCanaries(nn.Module):
    """
    A model and its loss as one module, with gradient canaries beside the records. The
    gradient of a canary is zero except for one large entry, which is clipped: no record
    is easier to detect. Source: Nasr et al., 2023 (white box).

    Args:
        model: is not copied
        loss_fn: takes a model and a batch, returns losses ``[B]``
        count: m canaries, each with an entry of its own; the trainable parameters take
            turns, while they have entries left
        norm: of a canary's gradient; take more than the clipping bound

    Raises:
        Refused: for more canaries than entries
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, count: int, norm: float):
        super().__init__()
        self.model, self.loss_fn, self.norm = model, loss_fn, norm
        source = torch.Generator().manual_seed(0)
        orders, before = [], 0
        for p in self._trainable():
            order = torch.randperm(p.numel(), generator=source)[:count]
            orders.append((before + order).tolist())
            before += p.numel()
        turns = [i for turn in zip_longest(*orders) for i in turn if i is not None]
        if count > len(turns):
            what = f"{count} canaries do not fit into {len(turns)} entries."
            raise Refused(what, parameter="canaries", remedy="Take fewer.")
        #: Each canary's entry, counted over all trainable parameters.
        self.places = torch.tensor(turns[:count])

    def _trainable(self) -> List[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def _entries(self) -> torch.Tensor:
        flat = torch.cat([p.flatten() for p in self._trainable()])
        return flat[self.places.to(flat.device)]

    def forward(self, batch: Tuple[torch.Tensor, Any]) -> torch.Tensor:
        """Losses ``[B]`` of marks ``[B]`` (a canary's number, or -1) and records."""
        mark, records = batch
        losses = self.loss_fn(self.model, records)
        canaries = self.norm * self._entries()[mark.clamp(min=0)].to(losses.dtype)
        return torch.where(mark >= 0, canaries, losses)

    def entries(self) -> torch.Tensor:
        """The current values of the canaries' entries ``[m]``."""
        return self._entries().detach().cpu()


def marked(records: Any, canaries: Iterable[int] = ()) -> List[Any]:
    """
    Samples for :class:`WithCanaries`: first all records (a list of samples, or a tree
    of tensors ``[B, ...]``), then the canaries with the given numbers.
    """
    if not isinstance(records, list):
        rows = range(len(tree_leaves(records)[0]))
        records = [tree_map(lambda x: x[i], records) for i in rows]
    return [*((-1, record) for record in records), *((i, records[0]) for i in canaries)]


def loss_scores(
    model: nn.Module, before: nn.Module, loss_fn: LossFn, batch: Any
) -> np.ndarray:
    """
    Scores ``[m]``: by how much training lowered the loss of each canary in a batch.
    They need only the trained model and the model ``before`` training. Both are put
    into evaluation mode.
    """
    with torch.no_grad():
        losses = [loss_fn(each.eval(), batch) for each in (before, model)]
    return (losses[0] - losses[1]).double().cpu().numpy()
