"""Loops: the ways in which a batch of records reaches a release, or does not."""

from typing import Callable, List, Optional

import torch

from tests import events
from tests.common import trainable
from tests.neighbors.records import Record
from tests.neighbors.search import Run


def physical(run: Run, records: List[Record]) -> torch.Tensor:
    """Physical batches of two; the last may have one record."""
    parts = [records[i : i + 2] for i in range(0, len(records), 2)] or [[]]
    events.physical(run.private, [run.collate(part) for part in parts], run.step)
    return run.released()


def accumulated(run: Run, records: List[Record]) -> torch.Tensor:
    """Two backward passes before a step, as Opacus allows in "hooks"."""
    half = len(records) // 2
    run.private.optimizer.zero_grad()
    run.backward(run.collate(records[:half]))
    run.backward(run.collate(records[half:]))
    run.private.optimizer.step()
    return run.released()


def resumed(run: Run, records: List[Record]) -> torch.Tensor:
    """A checkpoint after the batch; new objects resume from it."""
    run.step(run.collate(records))
    released, model = run.released(), run.setting.model().double()
    run.private = events.resumed(run.private, run.made_private(model))
    run.model = model
    return released


def silent(name: str) -> Callable[[Run, List[Record]], None]:
    """A loop of an event that other batches must not show."""

    def loop(run: Run, records: List[Record]) -> None:
        if records or name != "passed_again":
            batch = run.collate(records)
            events.SILENT[name](run.private, batch, run.setting.loss)

    loop.__name__ = name
    return loop


def thawed(run: Run, records: List[Record]) -> Optional[torch.Tensor]:
    """A parameter is frozen for one batch, and then trained again."""
    name, p = next(iter(trainable(run.model).items()))
    p.requires_grad_(False)
    run.step(run.collate(records))
    p.requires_grad_(True)
    return None
