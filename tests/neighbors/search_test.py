"""One record moves the release of its batch by at most the bound, and no other one.

"make test" searches some of the settings, "make test-thorough" the others, and tests
marked slow search all of them with many more pairs.
"""

import pytest
import torch

from tests.neighbors.cases import COMPILED, SETTINGS, setting
from tests.neighbors.search import search

PAIRS = 9  # one of each kind of record
MANY = 200
EVERY = 5  # one setting in so many is quick


def chosen(settings):
    """Marks all settings as thorough, but for a few quick ones."""
    found = []
    for number, one in enumerate(settings):
        marks = [pytest.mark.thorough] if number % EVERY else []
        found.append(pytest.param(one, marks=marks, id=one.label))
    return found


def look(found, one, moves=True):
    assert found.sound, f"{one.label}: {found}"
    # As many layers as samples at the first call: which dim is which is not known.
    refusals = [text for text in found.refusals if "may be a state" not in text]
    assert not refusals, f"{one.label}: {found}"
    if moves:  # or the search would not be one
        assert found.own > 0.3, f"{one.label}: {found}"


@pytest.mark.parametrize("one", chosen(SETTINGS))
def test_one_record(one):
    look(search(one, PAIRS), one, one.loop is None)


@pytest.mark.thorough
@pytest.mark.parametrize("one", COMPILED, ids=lambda one: one.label)
def test_one_record_compiled(one):
    torch._dynamo.reset()
    look(search(one, 5), one)
    torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("one", SETTINGS, ids=lambda one: one.label)
def test_one_record_of_many_pairs(one):
    look(search(one, MANY, seed=1000), one)


# -- the search itself, on leaks that nothing refuses (docs/explanation/unseen.md) -----

KEPT = [0.0]


def mixing(model, batch):
    """A loss in which each sample's value depends on all others."""
    y = model(*batch).flatten(1)
    return y.square().sum(1) * (1 + y.detach().abs().mean())


def remembering(model, batch):
    """State in a global, which no module holds."""
    (x,) = batch
    loss = model(x + KEPT[0]).square().sum(1)
    KEPT[0] = float(x.nan_to_num(0, 0, 0).sum())
    return loss


@pytest.mark.parametrize("loss", [mixing, remembering])
def test_what_the_search_finds(loss):
    one = setting("rows", mode="hooks")
    one.loss = loss
    found = search(one, 4)
    assert not found.sound, str(found)
    assert (found.own > 1) or (loss is remembering and found.other > 0.1)
