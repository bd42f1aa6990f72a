"""Clipping functions: each one in every mode, against the factors of its paper."""

import re

import pytest
import torch
from torch import nn

from opacus_ext import Refused
from opacus_ext.clipping import find_clipping
from tests.common import (
    CRASHES,
    MODES,
    assert_same,
    clipped_sum,
    every_clipping,
    every_mode,
    half_clipped,
    make_private,
    oracle,
    run_mode,
    square_loss,
)


def model_of():
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Embedding(7, 3), nn.LayerNorm(3), nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)
    )
    return model.double()


IDS = torch.tensor(
    [[0, 1, 2, 3], [6, 6, 6, 6], [4, 5, 4, 5], [1, 1, 2, 2], [3, 3, 3, 0]]
)


def bound_of(clipping, grads):
    """A bound that clips some samples; one for each parameter in "per_layer"."""
    if clipping == "per_layer":
        return [half_clipped({name: g}) for name, g in grads.items()]
    return half_clipped(grads)


def tied():
    """A parameter that is used twice has one norm, of its summed gradient."""
    layers = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 7))
    layers[1].weight = layers[0].weight
    return layers.double()


def frozen():
    """ "per_layer" counts trainable parameters."""
    model = model_of()
    model[1].requires_grad_(False)
    return model


def some_zero(model, ids):
    """A sample without any gradient adds nothing, and no NaN."""
    return square_loss(model, ids) * (ids[:, 0] != 6)


CASES = {
    "plain": (model_of, square_loss),
    "shared": (tied, square_loss),
    "frozen": (frozen, square_loss),
    "zero": (model_of, some_zero),
}


@every_mode
@every_clipping
@pytest.mark.parametrize("case", CASES)
def test_exact(mode, clipping, case):
    build, loss_fn = CASES[case]
    model = build()
    grads = oracle(model, IDS, loss_fn)
    bound = bound_of(clipping, grads)
    got = run_mode(mode, True, model, IDS, loss_fn, clipping, bound)
    assert_same(got, clipped_sum(grads, clipping, bound), message=f"{mode} {clipping}")
    got = run_mode(mode, True, model, IDS[:0], loss_fn, clipping, bound)
    assert all((total == 0).all() for total in got.values())


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_bound_that_changes_within_a_step(mode):
    """The noise would be that of the last one."""
    private = make_private(model_of(), mode, batch_size=4, max_grad_norm=10.0)
    private.optimizer.signal_skip_step(True)
    private.step(IDS[:2], square_loss)
    private.optimizer.max_grad_norm = 0.1
    with pytest.raises(Refused, match="noise would not fit"):
        private.step(IDS[2:], square_loss)
    private.optimizer.drop_logical_batch()
    private.step(IDS, square_loss)


def _state(model):
    hooks = {
        name: (
            len(m._forward_hooks),
            len(m._forward_pre_hooks),
            len(m._backward_hooks),
            len(m._backward_pre_hooks),
        )
        for name, m in model.named_modules()
    }
    attributes = {name: sorted(vars(m)) for name, m in model.named_modules()}
    on_parameters = {n: sorted(vars(p)) for n, p in model.named_parameters()}
    return hooks, attributes, on_parameters


EACH = [1.0] * 8
WRONG = [
    ("nonsense", 1.0, "nonsense.*Known: automatic"),
    ("per_layer", [1.0, 1.0], "per_layer.* 7 "),
    ("per_layer", 1.0, "per_layer"),
    *((name, EACH, f"{name}|max_grad_norm") for name in ("flat", "automatic")),
    ("normalized", EACH, "normalized|max_grad_norm"),
]


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize(
    "mode, clipping, bound, words",
    [
        *((mode, *wrong) for mode in MODES for wrong in WRONG),
        *((mode, "adaptive", EACH, "flat.*max_grad_norm") for mode in MODES),
    ],
)
def test_refused_before_anything_is_changed(mode, wrap, clipping, bound, words):
    model = model_of()
    before, given = _state(model), dict(clipping=clipping, max_grad_norm=bound)
    with pytest.raises(Exception, match=words) as info:
        make_private(model, mode, wrap, batch_size=4, **given)
    assert not isinstance(info.value, CRASHES), info.value
    assert _state(model) == before


def test_the_bounds_of_an_error_work_when_pasted():
    """And have the sensitivity of the one bound that was given."""
    model = model_of()
    with pytest.raises(Refused) as told:
        find_clipping("per_layer").at(2.0)
    count, bounds = re.search(
        r"give (n = .*) bounds: (max_grad_norm=.*)\.$", told.value.remedy
    ).groups()
    names = {"model": model}
    exec(f"{count}\nfound = dict({bounds})", names)
    assert len(names["found"]["max_grad_norm"]) == 7
    clipping = find_clipping("per_layer").at(names["found"]["max_grad_norm"])
    assert clipping.sensitivity("add_or_remove_one") == pytest.approx(2.0)
    given = dict(clipping="per_layer", batch_size=4, **names["found"])
    assert make_private(model, "ghost_bk", **given)
