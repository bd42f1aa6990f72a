"""The search: two runs side by side, whose batches differ in one record.

The learning rate and the noise are 0. So the weights stay, and ``p.grad`` holds the
clipped sum that would be released with noise. A record added or removed may move the
sum of its own batch by C, a replaced one by 2 C, and the sum of any other batch not at
all, whatever the model may have kept.
"""

import copy
import math
import random
import warnings
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

from opacus_ext import Refused
from tests.common import Private, make_private, trainable
from tests.neighbors.records import KINDS, Record, Records

C = 0.5
BATCH = 9  # samples that are expected; no other dim is as long
LIFE = 9  # pairs that two runs see before they begin anew
SLACK = 1e-7


@dataclass
class Setting:
    """
    A model, the records it is trained on, and how.

    Attributes:
        loss: ``(model, batch)`` to losses ``[B]``
        loop: how a batch is trained on, see ``loops``
        kwargs: of ``make_private``
        note: for its label
    """

    name: str
    model: Callable[[], nn.Module]
    records: Records
    loss: Callable
    mode: str = "ghost_bk"
    wrap: bool = True
    loop: Optional[Callable] = None
    backend: Optional[str] = None
    kwargs: Dict[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def label(self) -> str:
        loop = "" if self.loop is None else self.loop.__name__
        wrap = "" if self.wrap else "nowrap"
        parts = self.name, self.mode, loop, wrap, self.note, self.backend
        return "-".join(p for p in parts if p)


class Run:
    """A private run of a setting."""

    def __init__(self, setting: Setting, model: nn.Module):
        self.setting, self.model = setting, model
        self.private = self.made_private(model)

    def made_private(self, model: nn.Module) -> Private:
        setting = self.setting
        private = make_private(
            model,
            setting.mode,
            setting.wrap,
            batch_size=BATCH,
            lr=0.0,
            **{"max_grad_norm": C, **setting.kwargs},
        )
        if setting.backend is not None:
            private.module = torch.compile(private.module, backend=setting.backend)
        return private

    @property
    def bound(self) -> float:
        """The bound of one record, which the optimizer scales the noise by."""
        return float(self.private.optimizer.sensitivity)

    def backward(self, batch: Any) -> None:
        self.private.backward(batch, self.setting.loss)

    def step(self, batch: Any) -> None:
        self.private.optimizer.zero_grad()
        self.backward(batch)
        self.private.optimizer.step()

    def released(self) -> torch.Tensor:
        """The clipped sum of the last step, all parameters in one row."""
        optimizer = self.private.optimizer
        scale = BATCH * optimizer.accumulated_iterations
        grads = [p.grad for p in trainable(self.model).values()]
        return scale * torch.cat([g.detach().flatten() for g in grads])

    def sees(self, records: List[Record]) -> Optional[torch.Tensor]:
        """The release for a batch, or None if there is none."""
        if self.setting.loop is not None:
            return self.setting.loop(self, records)
        self.step(self.collate(records))
        return self.released()

    def collate(self, records: List[Record]) -> Any:
        made = self.setting.records
        return made.collate(records) if records else made.empty()


def runs_of(setting: Setting, seed: int) -> Tuple[Run, Run]:
    torch.manual_seed(seed)
    model = setting.model().double()
    return Run(setting, copy.deepcopy(model)), Run(setting, model)


@dataclass
class Found:
    """
    Attributes:
        own: largest change of the record's own batch, as a share of the allowed one
        other: largest change of a batch without the record, in units of the bound
        pair: the seed of the worst pair
        pairs: how many were tried
        refusals: messages of refusals
    """

    own: float = 0.0
    other: float = 0.0
    pair: int = -1
    pairs: int = 0
    refusals: List[str] = field(default_factory=list)

    def note(self, pair: int, own: float, other: float) -> None:
        if own > max(self.own, 1) or other > max(self.other, SLACK):
            self.pair = pair
        self.own, self.other = max(self.own, own), max(self.other, other)

    @property
    def sound(self) -> bool:
        return self.own <= 1 + SLACK and self.other <= SLACK

    def __str__(self) -> str:
        said = f", refused: {self.refusals[0][:200]}" if self.refusals else ""
        return (
            f"one record moves its batch by {self.own:.3g} of what it may, others by "
            f"{self.other:.1e} C (pair {self.pair} of {self.pairs}{said})"
        )


def neighbors(records: Records, seed: int) -> Tuple[List[Record], List[Record], float]:
    """Two batches that differ in one record, and the allowed change in bounds."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    length, size = rng.randint(1, 4), rng.choice([1, 2, 2, 3, 4, 5])
    kind = KINDS[seed % len(KINDS)]
    batch = [
        records.draw(rng.randint(1, 4) if records.ragged else length)
        for _ in range(size)
    ]
    at = rng.randrange(size)
    if kind == "equal":
        changed = dict(batch[(at + 1) % size])
    else:
        changed = records.draw(length, kind)
    other = batch[:at] + [changed] + batch[at + 1 :]
    if rng.random() < 0.5:
        return other, other[:at] + other[at + 1 :], 1.0
    return batch, other, 2.0


def norm_of_change(one: Optional[torch.Tensor], two: Optional[torch.Tensor]) -> float:
    if one is None or two is None:
        return 0.0
    gap = float((one - two).norm())
    return math.inf if math.isnan(gap) else gap


def search(setting: Setting, pairs: int, seed: int = 0) -> Found:
    """Tries pairs of neighbors; after each, both runs get the same batch."""
    found = Found()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for pair in range(seed, seed + pairs):
            if (pair - seed) % LIFE == 0:
                left, right = runs_of(setting, pair)
            one, two, bounds = neighbors(setting.records, pair)
            same = neighbors(setting.records, pair + 10_000)[0]
            found.pairs += 1
            try:
                sums = [_seen(run, x, pair) for run, x in ((left, one), (right, two))]
                after = [_seen(run, same, pair) for run in (left, right)]
            except Refused as error:
                found.refusals.append(str(error))
                left, right = runs_of(setting, pair)
                continue
            own = norm_of_change(*sums) / (bounds * left.bound)
            found.note(pair, own, norm_of_change(*after) / left.bound)
    return found


def _seen(run: Run, records: List[Record], pair: int) -> Optional[torch.Tensor]:
    torch.manual_seed(pair)  # what a model draws at random
    return run.sees(records)
