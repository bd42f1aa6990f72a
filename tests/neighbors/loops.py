"""Loops: the ways in which a batch of records reaches a release, or does not."""

from typing import List, Optional

import pytest
import torch

from opacus_ext import Refused
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


def broken(run: Run, records: List[Record]) -> None:
    events.broken(run.private, run.collate(records), run.setting.loss)


def dropped(run: Run, records: List[Record]) -> None:
    """A step, and a backward pass whose step never comes."""
    run.step(run.collate(records))
    events.dropped(run.private, run.collate(records), run.setting.loss)


def left(run: Run, records: List[Record]) -> None:
    """A logical batch that is left before its end."""
    run.private.optimizer.signal_skip_step(True)
    run.step(run.collate(records))
    run.private.optimizer.signal_skip_step(False)
    next(iter(run.private.loader))


def passed_again(run: Run, records: List[Record]) -> torch.Tensor:
    """A second backward pass is refused, and the batch is computed anew."""
    run.private.optimizer.zero_grad()
    if records:
        batch = run.collate(records)
        with pytest.raises(Refused):
            run.backward(batch)
            run.backward(batch)
    run.step(run.collate(records))
    return run.released()


def evaluated(run: Run, records: List[Record]) -> None:
    events.evaluated(run.private, run.collate(records), run.setting.loss)


def thawed(run: Run, records: List[Record]) -> Optional[torch.Tensor]:
    """A parameter is frozen for one batch, and then trained again."""
    name, p = next(iter(trainable(run.model).items()))
    p.requires_grad_(False)
    run.step(run.collate(records))
    p.requires_grad_(True)
    return None
