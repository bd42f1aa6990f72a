"""Loops: the ways in which a batch of records reaches a release, or does not."""

import copy
import tempfile
from pathlib import Path
from typing import List, Optional

import torch

from tests.common import trainable
from tests.neighbors.records import Record
from tests.neighbors.search import Run


class Stop(Exception):
    """An exception of user code in the middle of a step."""


def physical(run: Run, records: List[Record]) -> torch.Tensor:
    """Physical batches of two; the last may have one record."""
    parts = [records[i : i + 2] for i in range(0, len(records), 2)] or [[]]
    for number, part in enumerate(parts, 1):
        run.private.optimizer.signal_skip_step(number < len(parts))
        run.step(run.collate(part))
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
    released, old = run.released(), run.private
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        old.engine.save_checkpoint(
            path=path, module=old.handle, optimizer=old.optimizer
        )
        model = run.setting.model().double()
        private = run.made_private(model)
        private.engine.load_checkpoint(
            path=path, module=private.handle, optimizer=private.optimizer
        )
    run.model, run.private = model, private
    return released


def broken(run: Run, records: List[Record]) -> None:
    """An exception between the forward and the backward pass."""

    def raises(*args):
        raise Stop

    run.private.optimizer.zero_grad()
    forward, run.setting = run.setting, copy.copy(run.setting)
    run.setting.loss = lambda model, batch: raises(forward.loss(model, batch))
    try:
        run.backward(run.collate(records))
    except Stop:
        pass
    run.setting = forward


def dropped(run: Run, records: List[Record]) -> None:
    """A backward pass whose step never comes."""
    run.step(run.collate(records))
    run.private.optimizer.zero_grad()
    run.backward(run.collate(records))


def left(run: Run, records: List[Record]) -> None:
    """A logical batch that is left before its end."""
    run.private.optimizer.signal_skip_step(True)
    run.step(run.collate(records))
    run.private.optimizer.signal_skip_step(False)
    next(iter(run.private.loader))


def evaluated(run: Run, records: List[Record]) -> None:
    """The batch in evaluation mode, and without gradients in training mode."""
    batch = run.collate(records)
    run.private.module.eval()
    with torch.no_grad():
        run.setting.loss(run.private.module, batch)
    run.private.module.train()
    with torch.no_grad():
        run.setting.loss(run.private.module, batch)


def thawed(run: Run, records: List[Record]) -> Optional[torch.Tensor]:
    """A parameter is frozen for one batch, and then trained again."""
    name, p = next(iter(trainable(run.model).items()))
    p.requires_grad_(False)
    run.step(run.collate(records))
    p.requires_grad_(True)
    return None
