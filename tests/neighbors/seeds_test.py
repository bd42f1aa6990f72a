"""Cases that were once silently wrong (silence_test.py), as pairs of neighbors.

Each case runs twice over its batches; the second run has one other record in one batch.
Until a batch is refused, that batch's sum moves by at most 2 C, and no other sum moves.
"""

import copy
import warnings

import pytest
import torch

from opacus_ext import Refused
from tests.adapter import silence_test as silence
from tests.adapter.common import EVERY_MODE
from tests.common import make_private, trainable
from tests.neighbors.records import Field
from tests.neighbors.search import SLACK, C

TABLES = {
    "a": silence.LEAVE,
    "b": silence.STATE,
    "c": {**silence.INPUTS, **silence.IN_PLACE},
    "d": silence.HOOKS,
    "e": silence.VIEWS,
    "g": silence.LATER,
    "i": silence.KERNELS,
}
KINDS = ("large", "zeros", "not a number", "one entry", "random")
QUICK = 2  # kinds of "make test"
SIZE = 4


def cases():
    found = []
    for letter, table in TABLES.items():
        for name, case in table.items():
            for mode in EVERY_MODE:
                marks = [] if mode == "ghost_bk" else [pytest.mark.thorough]
                label = f"{letter}-{name}-{mode}"
                found.append(pytest.param(case, mode, id=label, marks=marks))
    return found


def changed(value, at, kind):
    """The batch with another sample at ``at``: a row of a tensor, or a list's item."""
    if isinstance(value, torch.Tensor):
        value = value.clone()
        field = Field(value.shape[-1])
        value[at] = field.changed(torch.randn_like(value[at]), kind)
        return value
    if isinstance(value, dict):
        names = list(value)
        return {**value, names[at]: changed(value[names[at]][None], 0, kind)[0]}
    one = changed(value[at][None], 0, kind)[0]
    return type(value)([*value[:at], one, *value[at + 1 :]])


def neighbor(batch, case, at, kind):
    if case.model is silence.Arguments:
        return changed(batch, at, kind)
    return (changed(batch[0], at, kind), *batch[1:])


def size_of(batch, case):
    return len(batch) if case.model is silence.Arguments else len(batch[0])


def sums(case, mode, batches):
    """The release of each step, and True if a batch was refused."""
    torch.manual_seed(0)
    net = case.model().double()
    private = make_private(
        net, mode, batch_size=SIZE, max_grad_norm=C, lr=0.0, **case.kwargs
    )
    found = []
    for number, batch in enumerate(batches):
        torch.manual_seed(number)
        try:
            private.step(copy.deepcopy(batch), case.loss)
        except Refused:
            return found, True
        grads = [p.grad.flatten() for p in trainable(net).values()]
        found.append(SIZE * torch.cat(grads))
    return found, False


@pytest.mark.parametrize("case, mode", cases())
def test_one_record(case, mode):
    kinds = KINDS[:QUICK] if mode == "ghost_bk" else KINDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, refused = sums(case, mode, case.batches)
        assert refused == (case.refused is not None)
        for number, kind in enumerate(kinds):
            look(case, mode, first, number % len(case.batches), kind)


def look(case, mode, first, place, kind):
    """Compares with a run that has one changed record in the batch at ``place``."""
    batches = list(case.batches)
    at = (place + 1) % size_of(batches[place], case)
    batches[place] = neighbor(batches[place], case, at, kind)
    for step, (one, two) in enumerate(zip(first, sums(case, mode, batches)[0])):
        gap = float((one - two).norm()) / (2 * C)
        bound = 1 + SLACK if step == place else SLACK
        assert gap <= bound, f"{kind} at {place} moves step {step} by {gap:.3g} of 2 C"
