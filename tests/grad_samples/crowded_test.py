"""Rows that are added to one entry of a table: a GPU adds them one after another."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from opacus_ext import workspace
from opacus_ext.grad_sample.factors import OneHot, places
from opacus_ext.grad_sample.factors.grad_sample import Method, OuterProducts
from opacus_ext.models import DPFormer
from tests.common import Net, make_private, square_loss
from tests.grad_samples.rule_case import BOTH, exact
from tests.releases_test import prior_of
from tests.zoo import WITH_IDS as IDS
from tests.zoo import D

#: Ops that add rows, by name, and the position of the index among their arguments.
ADDS = {
    **dict.fromkeys(("index_add", "index_add_"), 2),
    **dict.fromkeys(("scatter_add", "scatter_add_", "scatter_reduce_"), 2),
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), 1),
    "embedding_dense_backward": 1,
    "_embedding_bag_dense_backward": 1,
}


class Crowds(TorchDispatchMode):
    """Notes, by name, how many rows an op adds to the same entry at most."""

    def __init__(self):
        super().__init__()
        self.most = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._overloadpacket.__name__
        overwrites = "put" in name and not (len(args) > 3 and args[3])
        if name in ADDS and not overwrites:
            index = [x for x in tree_leaves(args[ADDS[name]]) if x is not None]
            index = torch.broadcast_tensors(*index)
            if name.startswith("scatter"):  # each entry of a row has a place
                index = [index[0].movedim(args[1], 0)[:, :1]]
            entries = torch.stack([x.flatten() for x in index])
            counts = entries.unique(dim=1, return_counts=True)[1]
            self.most[name] = max(self.most[name], *counts.tolist(), 0)
        return func(*args, **kwargs or {})


def kinds():
    """Two kinds of tokens, and padding."""
    return Net(
        lambda m, ids: (m.words(ids) + m.kinds(ids % 2)).tanh(),
        words=nn.Embedding(64, D, padding_idx=0),
        kinds=nn.Embedding(2, D),
    )


def prior():
    return Net(lambda m, ids: m.prior(ids), prior=prior_of(length=3))


def dpformer():
    model = DPFormer(7, 8, width=4, depth=1, dropout=0.0)
    model.set_prior(prior_of(length=3))
    return model


MODELS = {**IDS, "kinds": kinds, "prior": prior, "DPFormer": dpformer}


@pytest.fixture
def one_by_one(monkeypatch):
    """A CPU is taken for a GPU."""
    monkeypatch.setattr(places, "_ONE_BY_ONE", {"cpu"})


def batch_of(name, B, T):
    ids = torch.randint(1, 8, (B, T))
    if name == "kinds":
        ids[:, 5:] = 0  # padding
    return ids


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["ghost_bk", "ghost"])
@pytest.mark.parametrize("name", MODELS)
def test_few_rows_are_added_to_an_entry(name, mode, one_by_one):
    torch.manual_seed(0)
    model, ids = MODELS[name](), batch_of(name, 128, 8)
    private = make_private(model, mode, batch_size=128)
    private.step(ids, square_loss)
    with Crowds() as crowds:
        private.step(ids, square_loss)
    assert crowds.most["index_add_"] or name == "prior"
    assert max(crowds.most.values()) <= 16, crowds.most


@pytest.mark.parametrize("at", [None, torch.arange(64) % 8])
def test_prior_without_privacy(at):
    """Its gradients are products and sums: indices choose from releases alone."""
    model = prior_of(length=3)
    with Crowds() as crowds:
        model(batch_of("prior", 64, 8), at).square().sum().backward()
    assert crowds.most == {"index_add": 1}  # scores of items, each its own


@pytest.mark.parametrize("num_bytes", [64, 2**20])
@pytest.mark.parametrize("name", ["kinds", "prior", "DPFormer"])
def test_crowds_are_exact(name, num_bytes, one_by_one):
    """Products in several blocks, also within a sample of 40 tokens of two kinds."""
    torch.manual_seed(0)
    T = 8 if name == "DPFormer" else 40
    with workspace(num_bytes):
        exact(MODELS[name]().double(), batch_of(name, 3, T), square_loss, BOTH)


@pytest.mark.parametrize("num_bytes", [64, 2**20])
def test_sums_of_crowds(num_bytes, one_by_one, monkeypatch):
    monkeypatch.setattr(places, "_MOST_BLOCKS", 2**10)
    index, rows = torch.randint(3, (2, 50)), torch.randn(2, 50, 4).double()
    table = torch.ones(2, 3, 4).double()
    expected = table + torch.zeros_like(table).scatter_add(
        1, index[..., None].expand(rows.shape), rows
    )
    with workspace(num_bytes), Crowds() as crowds:
        places.add_by_index(table, index, rows)
        term = OuterProducts(OneHot(index, 3), rows)
        squares = term.squares_by(Method.SEGMENTS).values
    assert not crowds.most
    torch.testing.assert_close(table, expected)
    torch.testing.assert_close(squares, (expected - 1).square().sum((1, 2)))
