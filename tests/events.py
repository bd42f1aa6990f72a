"""What happens in a training loop beside plain steps, for both random searches."""

import tempfile
from pathlib import Path
from typing import Any, Callable, Sequence

import torch
from torch.utils._pytree import tree_map

from opacus_ext import Refused
from tests.common import Private


class Stop(Exception):
    """An exception of user code in the middle of a step."""


def physical(private: Private, batches: Sequence[Any], step: Callable) -> None:
    """A logical batch in several physical ones."""
    for number, batch in enumerate(batches, 1):
        private.optimizer.signal_skip_step(number < len(batches))
        step(batch)


def copied(batch: Any) -> Any:
    """The batch in memory of its own: a model may write to it."""
    return tree_map(lambda x: x.clone() if hasattr(x, "clone") else x, batch)


def evaluated(private: Private, batch: Any, loss: Callable) -> None:
    """A batch in evaluation mode, and without gradients in training mode."""
    with torch.no_grad():
        for training in (False, True):
            private.module.train(training)
            loss(private.module, copied(batch))


def dropped(private: Private, batch: Any, loss: Callable) -> None:
    """A forward without a backward pass, and a backward pass without a step."""
    loss(private.module, copied(batch))
    private.optimizer.zero_grad()
    private.backward(batch, loss)
    private.optimizer.zero_grad()


def broken(private: Private, batch: Any, loss: Callable) -> None:
    """User code raises in the forward, or between it and the backward pass."""

    def raises(*args: Any) -> None:
        loss(*args)
        raise Stop

    private.optimizer.zero_grad()
    try:
        private.backward(batch, raises)
    except Stop:
        pass


def left(private: Private, batch: Any, loss: Callable) -> None:
    """A logical batch that is left before its end."""
    private.optimizer.signal_skip_step(True)
    private.step(batch, loss)
    private.optimizer.signal_skip_step(False)
    next(iter(private.loader))


def passed_again(private: Private, batch: Any, loss: Callable) -> None:
    """A second backward pass over a batch is refused; what it has left is dropped."""
    private.optimizer.zero_grad()
    private.backward(batch, loss)
    try:
        private.backward(batch, loss)
    except Refused as error:
        if "second" not in str(error):
            raise
    else:
        raise AssertionError("a batch counts twice")


#: Events of a private run and a batch of which the next release may show nothing.
SILENT = {
    event.__name__: event for event in (evaluated, dropped, broken, left, passed_again)
}


def resumed(old: Private, new: Private, optimizer: bool = True) -> Private:
    """New objects resume from a checkpoint; the optimizer only if told so."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint.pt"
        for private, act in (old, "save_checkpoint"), (new, "load_checkpoint"):
            wraps = isinstance(private.handle, torch.nn.Module)
            module = private.handle if wraps else private.module
            given = dict(module=module, optimizer=private.optimizer)
            if private is new and not optimizer:
                del given["optimizer"]
            getattr(private.engine, act)(path=path, **given)
    return new
