"""Notes on tensors: as long as the tensor, and with it where it goes."""

import gc

import torch

from opacus_ext.re_attention.table import Table
from opacus_ext.re_attention.variances import Variance


def noted(table, x, value):
    table.set(x, Variance(torch.tensor(value)))
    return x


def test_a_note_goes_with_its_tensor():
    table = Table()
    x, y = (noted(table, torch.ones(2), value) for value in (0.1, 0.2))
    assert float(table.variance(x).own) == float(torch.tensor(0.1))
    del x
    gc.collect()
    assert len(table._notes) == 1 and table.variance(torch.ones(2)) is None
    assert table.variance(y) is not None


def test_a_tensor_that_autograd_has_keeps_its_note():
    """Python forgets it and gets it back."""
    table = Table()
    x = noted(table, torch.ones(2, requires_grad=True) * 2, 0.1)
    out = x * x
    del x
    gc.collect()
    assert len(table._notes) == 1
    assert table.variance(out.grad_fn._saved_self) is not None
