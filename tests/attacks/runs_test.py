"""Attacks on bounds, users, copies of records, empty batches, copies and settings."""

import collections
import copy
import decimal
import io
import itertools
import pickle
import uuid

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.grad_sample import (
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import (
    PrivacyEngineAdaptiveClipping,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    random_split,
)

import opacus_ext.clipping
from opacus_ext import Clipping, Refused, clipped_grads
from opacus_ext.clipping import CLIPPINGS, find_clipping
from opacus_ext.data import Poisson, UserRecords
from opacus_ext.data.copies import find_copies
from tests.common import (
    assert_same,
    clipped_sum,
    make_private,
    oracle,
    run_mode,
    square_loss,
)

EVERY_MODE = pytest.mark.parametrize(
    "grad_sample_mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"]
)

# -- bounds ----------------------------------------------------------------------------


def _sixteen():
    """A loss of 16 parameters, whose gradients are 1,000 times a record."""
    params = {f"w{i}": torch.zeros(2, requires_grad=True) for i in range(16)}

    def loss(x):
        return sum(1e3 * (x * w).sum() for w in params.values())

    return loss, params


class _Broadcast:
    """A function by parameter of one's own, whose one bound is meant for all."""

    per_parameter = True

    def __call__(self, norms):
        return (torch.ones(1, 1) / norms).clamp(max=1.0)

    def sensitivity(self, relation):
        return 1.0


def _by_parameter(norms, bound):
    return (torch.as_tensor(bound).to(norms)[:, None] / norms).clamp(max=1.0)


_OWN = Clipping("by_parameter", _by_parameter, per_parameter=True)


@pytest.mark.parametrize(
    "clipping, words",
    [
        (lambda: CLIPPINGS["per_layer"].at([1.0]), "each of the 16 .* got 1 of them"),
        (lambda: CLIPPINGS["per_layer"].at([1.0] * 15), "16 .* got 15 of them"),
        (lambda: CLIPPINGS["per_layer"].at([1.0] * 17), "16 .* got 17 of them"),
        (lambda: CLIPPINGS["per_layer"].at(1.0), "list .* got 1.0"),
        (lambda: CLIPPINGS["per_layer"].at([1.0, -1.0]), "got 2 of them"),
        (lambda: CLIPPINGS["per_layer"].at([1.0, float("nan")]), "got 2 of them"),
        (lambda: _OWN.at([1.0]), "by_parameter.* 16 .* got 1 of them"),
        (lambda: _OWN.at(1.0), "by_parameter.* list .* got 1.0"),
        (lambda: CLIPPINGS["flat"].at([1.0]), "flat.* one positive number; got 1 of"),
        (lambda: CLIPPINGS["automatic"].at([1.0] * 16), "automatic.*got 16 of them"),
        (lambda: CLIPPINGS["normalized"].at(float("inf")), "normalized.*got inf"),
        (lambda: CLIPPINGS["flat"].at(True), "flat.*got True"),
        (_Broadcast, "norm 4, and states a sensitivity of 1"),
        (lambda: Clipping("long", lambda n, b: 2 * b / n).at(1.0), "norm 2, and"),
        (lambda: Clipping("nan", lambda n, b: n * float("nan")).at(1.0), "norm nan"),
    ],
)
def test_bounds_for_another_number_of_parameters(clipping, words):
    loss, params = _sixteen()
    with pytest.raises(Refused, match=words):
        clipped_grads(loss, params, torch.ones(3, 2), clipping())


@pytest.mark.parametrize("fullgraph", [True, False])
def test_bounds_for_another_number_of_parameters_compiled(fullgraph):
    loss, params = _sixteen()
    clipping = CLIPPINGS["per_layer"].at([1.0])
    step = torch.compile(
        lambda x: clipped_grads(loss, params, x, clipping).sums,
        fullgraph=fullgraph,
        backend="eager",
    )
    with pytest.raises(RuntimeError, match="each of the 16 trained parameter tensors"):
        step(torch.ones(3, 2))


@pytest.mark.parametrize("given", [torch.ones(16), (1.0,) * 16, [torch.ones(())] * 16])
def test_bounds_that_fit(given):
    loss, params = _sixteen()
    clipping = CLIPPINGS["per_layer"].at(given)
    found = clipped_grads(loss, params, torch.ones(1, 2), clipping)
    assert clipping.sensitivity() == pytest.approx(4.0)
    total = torch.stack([x.norm() for x in found.sums.values()]).norm()
    assert float(total) == pytest.approx(4.0, rel=1e-4)


@pytest.mark.parametrize("name", sorted({*CLIPPINGS, "by_parameter"}))
@pytest.mark.parametrize("bound", [0.03, 1.0, 40.0])
def test_the_sensitivity_is_what_one_record_moves(name, bound, monkeypatch):
    """At least for any record, and nearly for one of a large gradient."""
    monkeypatch.setitem(opacus_ext.clipping.CLIPPINGS, "by_parameter", _OWN)
    loss, params = _sixteen()
    kind = find_clipping(name)
    several = [bound * (1 + i) / 16 for i in range(16)]
    clipping = kind.at(several if kind.per_parameter else bound)
    torch.manual_seed(0)
    base = torch.randn(4, 2)
    records = [s * torch.randn(2) for s in (1e-6, 1e-4, 1e-2, 1.0, 1e3) for _ in "ab"]

    def total(*more):
        given = torch.cat([base, *(x[None] for x in more)])
        sums = clipped_grads(loss, params, given, clipping).sums
        return torch.cat([x.flatten().double() for x in sums.values()])

    gaps = [float((total(x) - total()).norm()) for x in records]
    assert max(gaps) <= clipping.sensitivity("add_or_remove_one") * (1 + 1e-5)
    assert max(gaps) >= clipping.sensitivity("add_or_remove_one") * 0.99
    pairs = itertools.product(records[-2:], records[-2:])
    swapped = [float((total(x) - total(y)).norm()) for x, y in pairs]
    assert max(swapped) <= clipping.sensitivity("replace_one") * (1 + 1e-5)


# -- parameters that are frozen and thawed ---------------------------------------------

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()


def _three():
    torch.manual_seed(1)
    layers = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
    return nn.Sequential(*layers).double()


def _moved(private, model, change):
    """What a call changes, times the batch size."""
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    change(private)
    return {n: 4 * (before[n] - p.detach()) for n, p in model.named_parameters()}


def _expected(model, names, clipping, bounds):
    given = [bounds[n] for n in names] if clipping == "per_layer" else 0.5
    found = clipped_sum(oracle(model, X, square_loss), clipping, given)
    every = model.named_parameters()
    return {n: found.get(n, torch.zeros_like(p)).detach() for n, p in every}


def _private(mode, model, clipping, **kwargs):
    bounds = {n: 0.1 * 2**i for i, (n, _) in enumerate(model.named_parameters())}
    given = [*bounds.values()] if clipping == "per_layer" else 0.5
    given = dict(max_grad_norm=given, clipping=clipping, **kwargs)
    params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=1.0)
    return bounds, make_private(model, mode, batch_size=4, optimizer=optimizer, **given)


@EVERY_MODE
@pytest.mark.parametrize("clipping", ["per_layer", "flat"])
def test_frozen_in_a_run_and_thawed(grad_sample_mode, clipping):
    model = _three()
    bounds, private = _private(grad_sample_mode, model, clipping)
    every = [n for n, _ in model.named_parameters()]
    for frozen in ((), (0,), (0, 2), (), (2, 3), (1,), ()):
        names = [n for i, n in enumerate(every) if i not in frozen]
        for n, p in model.named_parameters():
            p.requires_grad_(n in names)
        expected = _expected(model, names, clipping, bounds)
        got = _moved(private, model, lambda x: x.step(X, square_loss))
        assert_same(got, expected)
        own = [bounds[n] for n in names] if clipping == "per_layer" else [0.5]
        squares = sum(bound**2 for bound in own)
        assert private.optimizer.sensitivity == pytest.approx(squares**0.5)


@EVERY_MODE
@pytest.mark.parametrize("clipping", ["per_layer", "flat"])
@pytest.mark.parametrize("at", [0, -1])
def test_frozen_between_backward_and_step(grad_sample_mode, clipping, at):
    """It is left as it is: its gradient has no noise. Later it begins anew."""
    model = _three()
    bounds, private = _private(grad_sample_mode, model, clipping)
    name, p = [*model.named_parameters()][at]
    p.requires_grad_(grad_sample_mode != "hooks")  # which clips within the step
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    expected = _expected(model, trained, clipping, bounds)
    expected[name] = torch.zeros_like(p)
    p.requires_grad_(True)

    def step(private):
        private.optimizer.zero_grad()
        private.backward(X, square_loss)
        p.requires_grad_(False)
        private.optimizer.step()

    assert_same(_moved(private, model, step), expected)
    private.optimizer.zero_grad()
    p.requires_grad_(True)
    expected = _expected(model, [*bounds], clipping, bounds)
    assert_same(_moved(private, model, lambda x: x.step(X, square_loss)), expected)


@EVERY_MODE
@pytest.mark.parametrize("clipping", ["per_layer", "flat"])
def test_frozen_within_a_logical_batch(grad_sample_mode, clipping):
    """What it has of the first half is not added to a later step."""
    model = _three()
    bounds, private = _private(grad_sample_mode, model, clipping)
    p = model[2].weight

    def half(private, x, skip):
        private.optimizer.signal_skip_step(skip)
        private.optimizer.zero_grad()
        private.backward(x, square_loss)
        private.optimizer.step()

    half(private, X[:2], True)
    p.requires_grad_(False)
    half(private, X[2:], False)
    private.optimizer.zero_grad()
    p.requires_grad_(True)
    expected = _expected(model, [*bounds], clipping, bounds)
    assert_same(_moved(private, model, lambda x: x.step(X, square_loss)), expected)


@EVERY_MODE
def test_thawed_without_a_bound(grad_sample_mode):
    model = _three()
    model[2].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    given = dict(max_grad_norm=[0.1] * 4, clipping="per_layer", optimizer=optimizer)
    private = make_private(model, grad_sample_mode, batch_size=4, **given)
    private.step(X, square_loss)
    model[2].requires_grad_(True)
    before = [p.detach().clone() for p in model.parameters()]
    private.optimizer.zero_grad()
    with pytest.raises(Refused, match="2.weight was frozen at make_private") as caught:
        private.backward(X, square_loss)
        private.optimizer.step()
    assert caught.value.parameter == "2.weight"
    assert all(map(torch.equal, before, model.parameters()))
    private.optimizer.zero_grad()
    model[2].requires_grad_(False)
    private.step(X, square_loss)


@EVERY_MODE
def test_thawed_between_backward_and_step(grad_sample_mode):
    model = _three()
    model[0].requires_grad_(False)
    _, private = _private(grad_sample_mode, model, "flat")
    private.optimizer.zero_grad()
    private.backward(X, square_loss)
    model[0].requires_grad_(True)
    with pytest.raises(ValueError):
        private.optimizer.step()


# -- users -----------------------------------------------------------------------------

FOUR = [i % 4 for i in range(24)]
_U = [uuid.UUID(int=i) for i in range(4)]
_KEYED = [{"x": i, "by": torch.tensor(u)} for i, u in enumerate(FOUR)]


@pytest.mark.parametrize(
    "users, expected",
    [
        ([torch.tensor(i) for i in FOUR], [0, 1, 2, 3]),
        ([torch.tensor([[i]]) for i in FOUR], [0, 1, 2, 3]),
        ([torch.tensor(float(i)) for i in FOUR], [0, 1, 2, 3]),
        (torch.tensor(FOUR)[:, None], [0, 1, 2, 3]),
        (torch.tensor(FOUR).float(), [0, 1, 2, 3]),
        (np.array(FOUR), [0, 1, 2, 3]),
        ([np.array([i]) for i in FOUR], [0, 1, 2, 3]),
        ([np.array(i) for i in FOUR], [0, 1, 2, 3]),
        ([np.int16(i) if i else torch.tensor(0) for i in FOUR], [0, 1, 2, 3]),
        ([np.float32(i) for i in FOUR], [0, 1, 2, 3]),
        ([float(i) for i in FOUR], [0, 1, 2, 3]),
        ([torch.tensor(i > 1) for i in FOUR], [0, 1]),
        ([np.bool_(i > 1) if i % 2 else i > 1 for i in FOUR], [0, 1]),
        ([np.str_(f"u{i}") for i in FOUR], ["u0", "u1", "u2", "u3"]),
        (np.array([f"u{i}" for i in FOUR]), ["u0", "u1", "u2", "u3"]),
        (np.array([f"u{i}" for i in FOUR], object), ["u0", "u1", "u2", "u3"]),
        ([np.array(f"u{i}") for i in FOUR], ["u0", "u1", "u2", "u3"]),
        ([uuid.UUID(int=i) for i in FOUR], [str(u) for u in _U]),
        ([_U[i] if k % 2 else str(_U[i]) for k, i in enumerate(FOUR)], [*map(str, _U)]),
        ([b"u%d" % i for i in FOUR], [b"u0", b"u1", b"u2", b"u3"]),
        ([np.bytes_(b"u%d" % i) for i in FOUR], [b"u0", b"u1", b"u2", b"u3"]),
        ([(torch.tensor(i), "a") for i in FOUR], [(i, "a") for i in range(4)]),
    ],
)
def test_users_are_as_many_as_their_values(users, expected):
    found = UserRecords(list(range(24)), users)
    assert found.users == expected and len(found) == len(expected)
    kinds = {type(x) for x in found.users}
    assert kinds <= {int, str, bytes, tuple}
    every = sorted(found[i] for i in range(len(found)) for _ in range(200))
    assert {*every} == {*range(24)}


@pytest.mark.parametrize(
    "users, words",
    [
        ([7, "7", 8], "Users 7 and '7' differ"),
        ([b"a", "a", "b"], "Users b'a' and 'a' differ"),
        ([(1, "a"), ("1", "a"), (2, "a")], "differ in nothing but their type"),
        ({0: "a", 1: "a", 2: "b"}, "is a mapping"),
    ],
)
def test_users_who_may_be_one(users, words):
    with pytest.raises(Refused, match=words) as caught:
        UserRecords(list(range(3)), users)
    assert caught.value.parameter == "users"


def test_a_record_without_a_user():
    with pytest.raises(Refused, match="Record 1 has no user 'by'.*KeyError"):
        UserRecords([{"x": 1, "by": 1}, {"x": 2}], "by")


def test_users_of_two_data_sets():
    """They are drawn twice if they are in both."""
    one, two = UserRecords(ROWS, [*"aabbccdd"]), UserRecords(
        [{"x": 1}, {"x": 2}], ["d", "a"]
    )
    assert find_copies(ConcatDataset([one])) is None
    assert find_copies(ConcatDataset([one, two])) is not None
    three = UserRecords([{"x": 1}, {"x": 2}], ["e", "f"])
    assert find_copies(ConcatDataset([one, three])) is None


def test_users_by_a_key_that_holds_tensors():
    assert UserRecords(_KEYED, "by").users == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        float("nan"),
        np.float64("nan"),
        torch.tensor(float("nan")),
        float("inf"),
        0.5,
        torch.tensor(0.5),
        torch.tensor([1, 2]),
        np.array([1, 2]),
        np.array([]),
        (1, float("nan")),
        None,
        object(),
        [1],
        {"id": 1},
        1j,
        decimal.Decimal(1),
        np.datetime64("2020-01-01"),
    ],
    ids=lambda wrong: type(wrong).__name__,
)
def test_users_of_whom_it_is_not_known_whether_they_are_one(wrong):
    users = [*FOUR]
    users[5] = wrong
    with pytest.raises(Refused, match="user of record 5") as caught:
        UserRecords(list(range(24)), users)
    assert caught.value.parameter == "users"


# -- copies of a record ----------------------------------------------------------------

ROWS = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
LIST = [{"x": torch.randn(3), "y": i % 2} for i in range(8)]


class _Plain(Dataset):
    """Of which no more is known than its length."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return ROWS[i]


class _Around(Dataset):
    """Augments another data set."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        return self.dataset[i]


class _Unsized(Dataset):
    def __getitem__(self, i):
        return ROWS[i]


class _Selected(_Plain):
    """As ``datasets.Dataset.select`` makes it."""

    def __init__(self, data, indices=None):
        self._data, self._indices = data, None
        if indices is not None:
            self._indices = _Column(indices)

    def __len__(self):
        return 8 if self._indices is None else len(self._indices.values)


class _Column:
    def __init__(self, values):
        self.values = np.array(values)

    def column(self, i):
        assert i == 0
        return self

    def to_numpy(self):
        return self.values


PLAIN, DATA = _Plain(), object()
INPUTS, LABELS = ROWS.tensors
COPIED = {
    "an index twice": (Subset(PLAIN, [0, 1, 2, 1]), (1, 3)),
    "from the end": (Subset(PLAIN, [0, 1, -8]), (0, 2)),
    "of a tensor": (Subset(PLAIN, torch.tensor([3, 1, 3])), (0, 2)),
    "of tensors": (Subset(PLAIN, [*torch.tensor([3, 1, 3])]), (0, 2)),
    "of numpy": (Subset(PLAIN, np.array([3, 1, 1])), (1, 2)),
    "of unsized": (Subset(_Unsized(), [3, 1, 1]), (1, 2)),
    "of a list": (Subset(LIST, [3, 1, 1]), (1, 2)),
    "twice": (ConcatDataset([PLAIN, PLAIN]), (0, 8)),
    "tensors twice": (ConcatDataset([ROWS, ROWS]), (0, 8)),
    "the same tensors": (ConcatDataset([ROWS, TensorDataset(INPUTS, LABELS)]), (0, 8)),
    "slices": (
        ConcatDataset(
            [
                TensorDataset(INPUTS[:5], LABELS[:5]),
                TensorDataset(INPUTS[4:], LABELS[4:]),
            ]
        ),
        (4, 5),
    ),
    "overlapping": (
        ConcatDataset([Subset(PLAIN, range(5)), Subset(PLAIN, range(4, 8))]),
        (4, 5),
    ),
    "a subset of a subset": (Subset(Subset(PLAIN, [5, 6, 5]), [2, 0]), (0, 1)),
    "a part of both": (Subset(ConcatDataset([PLAIN, PLAIN]), [3, 11]), (0, 1)),
    "all and some": (ConcatDataset([PLAIN, Subset(PLAIN, [6])]), (6, 8)),
    "deep": (ConcatDataset([_Around(Subset(PLAIN, [2])), PLAIN]), (0, 3)),
    "augmented": (ConcatDataset([PLAIN, _Around(PLAIN)]), (0, 8)),
    "around a subset": (_Around(Subset(PLAIN, [1, 1])), (0, 1)),
    "stacked": (
        StackDataset(Subset(INPUTS, [1, 2, 1]), Subset(LABELS, [1, 2, 1])),
        (0, 2),
    ),
    "stacked by name": (
        StackDataset(x=Subset(INPUTS, [1, 1]), y=Subset(LABELS, [3, 3])),
        (0, 1),
    ),
    "expanded": (TensorDataset(INPUTS[:1].expand(4, 3), LABELS[:1].expand(4)), (0, 1)),
    "one object": ([*LIST, LIST[3]], (3, 8)),
    "one object of both": (ConcatDataset([LIST, LIST[2:4]]), (2, 8)),
    "one pair": ([(INPUTS[0], 1), (INPUTS[1], 1)] * 2, (0, 2)),
    "selected": (_Selected(DATA, [0, 0, 1]), (0, 1)),
    "selected twice": (
        ConcatDataset([_Selected(DATA, [0, 1]), _Selected(DATA, [1, 2])]),
        (1, 2),
    ),
    "a user twice": (Subset(UserRecords(ROWS, [0, 1] * 4), [0, 0]), (0, 1)),
    "users twice": (ConcatDataset([UserRecords(ROWS, [0, 1] * 4)] * 2), (0, 2)),
    "as a record, too": (ConcatDataset([UserRecords(ROWS, [5] * 8), ROWS]), (0, 1)),
}
ONCE = {
    "a subset": Subset(PLAIN, [5, 3, 1]),
    "split": ConcatDataset(random_split(PLAIN, [3, 5])),
    "two": ConcatDataset([PLAIN, _Plain()]),
    "two of tensors": ConcatDataset([ROWS, TensorDataset(INPUTS.clone(), LABELS)]),
    "stacked": StackDataset(Subset(INPUTS, [0, 1, 2]), Subset(LABELS, [1, 1, 1])),
    "a label for all": TensorDataset(INPUTS, torch.zeros(()).expand(8)),
    "numbers": [1, 2, 1, 1],
    "words": ["a", "b", "a"],
    "pairs of numbers": [(1, 0)] * 4,
    "empty tensors": ConcatDataset(
        [TensorDataset(torch.zeros(4, 0)), TensorDataset(torch.zeros(4, 0))]
    ),
    "selected": _Selected(DATA, [3, 1, 2]),
    "not selected": _Selected(DATA),
    "users": UserRecords(Subset(ROWS, [0, 1, 0, 1]), ["a", "b", "a", "b"]),
    "slices": ConcatDataset(
        [TensorDataset(INPUTS[:5], LABELS[:5]), TensorDataset(INPUTS[5:], LABELS[5:])],
    ),
}


@pytest.mark.parametrize("name", COPIED)
def test_one_record_under_two_numbers(name):
    dataset, numbers = COPIED[name]
    assert find_copies(dataset) == numbers


@pytest.mark.parametrize("name", ONCE)
def test_each_record_once(name):
    assert find_copies(ONCE[name]) is None


def _given(dataset, **kwargs):
    model = nn.Linear(3, 2)
    return dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=2),
        max_grad_norm=1.0,
        **kwargs,
    )


_BUDGET = dict(target_epsilon=3.0, target_delta=1e-3, epochs=1)
TWICE = Subset(ROWS, [0, 1, 2, 1])


@pytest.mark.parametrize(
    "given",
    [
        *(dict(grad_sample_mode=m) for m in ("hooks", "functorch", "ghost", "scan")),
        *(dict(grad_sample_mode=m) for m in ("ghost_bk", "auto", "ew")),
        dict(poisson_sampling=False),
        dict(sampling=Poisson(expected_batch_size=2)),
        dict(wrap_model=False),
    ],
    ids=str,
)
def test_copies_are_refused_by_make_private(given):
    match = r"Records 1 and 3 of the data set \(Subset\)"
    with pytest.raises(Refused, match=match) as caught:
        PrivacyEngine().make_private(noise_multiplier=1.0, **_given(TWICE, **given))
    assert caught.value.parameter == "data_loader"
    with pytest.raises(Refused, match=match):
        PrivacyEngine().make_private_with_epsilon(**_BUDGET, **_given(TWICE, **given))


def test_copies_are_refused_by_other_engines_and_loaders():
    given = dict(noise_multiplier=1.0, target_unclipped_quantile=0.5)
    given.update(min_clipbound=0.1, max_clipbound=9.0, clipbound_learning_rate=0.1)
    with pytest.raises(Refused, match="Records 1 and 3"):
        PrivacyEngineAdaptiveClipping().make_private(**_given(TWICE, **given))
    opacus_ext.unregister()
    try:
        loader = PrivacyEngine().make_private(noise_multiplier=1.0, **_given(TWICE))[2]
    finally:
        opacus_ext.register()
    given = {**_given(ROWS), "data_loader": loader}
    with pytest.raises(Refused, match="Records 1 and 3"):
        PrivacyEngine().make_private(noise_multiplier=1.0, **given)


def test_copies_are_refused_by_trainers(tmp_path):
    pytest.importorskip("transformers")
    from transformers import TrainingArguments

    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    args = TrainingArguments(tmp_path, use_cpu=True, report_to="none")
    privacy = PrivacyArguments(noise_multiplier=1.0, target_delta=1e-3)
    with pytest.raises(Refused, match="Records 3 and 8") as caught:
        PrivateTrainer(
            nn.Linear(3, 2), args, train_dataset=[*LIST, LIST[3]], privacy=privacy
        )
    assert caught.value.parameter == "train_dataset"


def test_copies_are_refused_by_lightning():
    L = pytest.importorskip("lightning")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from opacus_ext.lightning import PrivacyCallback

    privacy = PrivacyCallback(
        target_delta=1e-3, noise_multiplier=1.0, grad_sample_mode="hooks"
    )
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    off.update(accelerator="cpu", enable_model_summary=False)
    data = torch.randn(4, 32)
    with pytest.raises(Refused, match="Records 0 and 1") as caught:
        L.Trainer(callbacks=[privacy], max_steps=1, **off).fit(
            BoringModel(), DataLoader(Subset(data, [2, 2, 1]), batch_size=2)
        )
    assert caught.value.parameter == "train_dataloaders"


def test_copies_of_two_users():
    twice = Subset(ROWS, [0, 1, 2, 1])
    with pytest.raises(Refused, match="1 and 3 .* belong to users 'b' and 'd'"):
        UserRecords(twice, ["a", "b", "c", "d"])
    assert UserRecords(twice, ["a", "b", "c", "b"]).users == ["a", "b", "c"]
    with pytest.raises(Refused, match="1 and 2 .* belong to users 5 and 6"):
        UserRecords(Subset(ROWS, [7, 7, 7]), [5, 5, 6])


# -- draws without records -------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x text")


class _Batch(collections.UserDict):
    """As a BatchEncoding of transformers is."""


def _records(of):
    return [of(torch.ones(3) + i, i) for i in range(4)]


def _listed(records):
    """Tensors, and what else there is of each record and of the batch."""
    x = torch.stack([x for x, _ in records])
    names = [f"record {i}" for _, i in records]
    return {
        "x": x,
        "names": names,
        "lengths": tuple(i for _, i in records),
        "objects": [object() for _ in records],
        "arrays": [np.ones(i + 1) for _, i in records],
        "boxes": [torch.ones(i + 1, 2) for _, i in records],
        "array": np.stack([x.numpy() for x, _ in records]),
        "number": torch.tensor(len(records)),
        "most": max(i for _, i in records),
        "kind": names[0],
        "is_last": False,
        "nothing": None,
        "nested": ({"ids": names}, [x, names]),
    }


def _one_by_one(records):
    return Pair(torch.stack([x for x, _ in records]), [str(i) for _, i in records])


_NONE = torch.zeros(0, 3)
_EMPTY = {
    "x": _NONE,
    "names": [],
    "lengths": (),
    "objects": [],
    "arrays": [],
    "boxes": [],
    "array": np.zeros((0, 3), np.float32),
    "number": torch.tensor(0),
    "most": 0,
    "kind": "",
    "is_last": False,
    "nothing": None,
    "nested": ({"ids": []}, [_NONE, []]),
}
DRAWS = {
    "tensors and text": (lambda x, i: (x, f"text {i}"), None, [_NONE, ()]),
    "a dict": (lambda x, i: {"x": x, "of": "abcd"[i]}, None, {"x": _NONE, "of": []}),
    "words": (
        lambda x, i: {"x": x, "words": ["a", "b"]},
        None,
        {"x": _NONE, "words": [(), ()]},
    ),
    "one word": (lambda x, i: (x, ["a"]), None, [_NONE, [()]]),
    "a named tuple": (lambda x, i: (x, i), _one_by_one, Pair(_NONE, [])),
    "all kinds": (lambda x, i: (x, i), _listed, _EMPTY),
    "a user's dict": (
        lambda x, i: (x, i),
        lambda records: _Batch(_listed(records)),
        _Batch(_EMPTY),
    ),
    "of tensors alone": (
        lambda x, i: (x, i),
        lambda records: _Batch(x=torch.stack([x for x, _ in records])),
        _Batch(x=_NONE),
    ),
}


def _is_same(got, expected):
    assert type(got) in (type(expected), {list: tuple, tuple: list}.get(type(expected)))
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert (got == expected).all()
    elif isinstance(expected, collections.abc.Mapping):
        assert [*got] == [*expected]
        for key in expected:
            _is_same(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert len(got) == len(expected)
        for pair in zip(got, expected):
            _is_same(*pair)
    else:
        assert got == expected


def _drawn(records, collate, rate=0.2, **kwargs):
    """A private loader, whose draws are often empty."""
    given = dict(_given(records), **kwargs)
    workers = given.pop("workers", 0)
    given["data_loader"] = DataLoader(
        records,
        batch_size=1,
        collate_fn=collate,
        num_workers=workers,
        generator=torch.Generator().manual_seed(given.pop("seed", 0)),
    )
    sampling = Poisson(sample_rate=rate, steps=12)
    return PrivacyEngine().make_private(
        noise_multiplier=1.0, sampling=sampling, **given
    )


def _x(batch):
    return batch[0] if isinstance(batch, (list, tuple)) else batch["x"]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("first", [True, False])
def test_a_draw_without_records(name, grad_sample_mode, first):
    """The first one and later ones, which are trained on as others are."""
    of, collate, expected = DRAWS[name]
    data = _records(of)
    for seed in range(20):
        made = _drawn(data, collate, seed=seed, grad_sample_mode=grad_sample_mode)
        model, optimizer, *criterion, loader = made
        state = torch.get_rng_state()
        batches = [*loader]
        assert torch.equal(torch.get_rng_state(), state)
        empty = [not len(_x(batch)) for batch in batches]
        if empty[0] == first and len({*empty}) == 2:
            break
    for batch in batches:
        if not len(_x(batch)):
            _is_same(batch, expected)
        optimizer.zero_grad()
        losses = model(_x(batch).clone())
        labels = torch.zeros(len(losses), dtype=torch.long)
        if criterion:
            criterion[0](losses, labels).backward()
        else:
            F.cross_entropy(losses, labels).nan_to_num().backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_draw_without_records_in_workers():
    made = _drawn(_records(lambda x, i: (x, f"text {i}")), None, workers=1)
    batches = [*made[-1]]
    empty = [batch for batch in batches if not len(batch[0])]
    assert empty and len(empty) < len(batches)
    for batch in empty:
        _is_same(batch, [_NONE, ()])


def test_a_draw_without_records_batch_second_or_random():
    def collate(records):
        x = torch.stack([x for x, _ in records], 1)
        return {"x": x, "y": torch.arange(len(records)), "text": ["t"] * len(records)}

    data = _records(lambda x, i: (x, i))
    loader = _drawn(data, collate, 1e-9, batch_first=False)[-1]
    expected = {"x": torch.zeros(3, 0), "y": torch.arange(0), "text": []}
    _is_same(next(iter(loader)), expected)
    loader = _drawn(data, _listed, 1e-9, rand_on_empty=True)[-1]
    found = next(iter(loader))
    assert found["x"].shape == (1, 3) and found["names"] == [""]
    assert found["lengths"] == (0,) and found["array"].shape == (1, 3)


def test_a_draw_without_records_of_a_batch_encoding():
    transformers = pytest.importorskip("transformers")

    def collate(records):
        x = torch.stack([x for x, _ in records])
        return transformers.BatchEncoding({"input_ids": x, "text": ["t"] * len(x)})

    found = next(iter(_drawn(_records(lambda x, i: (x, i)), collate, 1e-9)[-1]))
    assert isinstance(found, transformers.BatchEncoding) and found["text"] == []
    assert found.to("cpu")["input_ids"].shape == (0, 3)


def test_a_draw_without_records_of_another_kind():
    class Graphs:
        pass

    loader = _drawn(_records(lambda x, i: (x, i)), lambda records: Graphs(), 1e-9)[-1]
    with pytest.raises(Refused, match="Graphs, which the loader's") as caught:
        next(iter(loader))
    assert caught.value.parameter == "collate_fn"


# -- sequences of no tokens ------------------------------------------------------------


class _Table(nn.Module):
    """Rows of tables, and a position for each token."""

    def __init__(self):
        super().__init__()
        self.rows, self.bias = nn.Parameter(torch.randn(7, 4)), nn.Parameter(
            torch.ones(7)
        )
        self.places = nn.Embedding(5, 4)

    def forward(self, ids):
        x = self.rows[ids] * self.bias[ids].unsqueeze(-1)
        return x + self.places(torch.arange(ids.shape[1]))


class _Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 4))
        self.embedding = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, ids):
        x = torch.cat([self.first.expand(len(ids), 1, 4), self.embedding(ids)], 1)
        return self.attention(x, x, x)[0]


def _tagger():
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7))


class _Mean(nn.Module):
    def forward(self, x):
        return x.mean(1)


NO_IDS = torch.zeros(3, 0, dtype=torch.long)
NO_ROWS = torch.zeros(3, 0, 4).double()
NO_TOKENS = {
    "embedding": (_tagger, NO_IDS),
    "table": (_Table, NO_IDS),
    "linear": (lambda: nn.Linear(4, 7), NO_ROWS),
    "one before": (_Attends, NO_IDS),
}
EVERY_WAY = pytest.mark.parametrize(
    "grad_sample_mode", ["hooks", "functorch", "ghost", "ghost_bk", "scan", "auto"]
)


def _cross_entropy(model, ids):
    """The mean over tokens, which is NaN over none, with gradients of zero."""
    y = model(ids)
    return F.cross_entropy(
        y.mT, y.new_zeros(y.shape[:2]).long(), reduction="none"
    ).mean(1)


@EVERY_WAY
@pytest.mark.parametrize("name", NO_TOKENS)
@pytest.mark.parametrize("loss", [square_loss, _cross_entropy])
def test_sequences_of_no_tokens(grad_sample_mode, name, loss):
    make, x = NO_TOKENS[name]
    model = make().double()
    for size in (3, 1, 0):
        expected = clipped_sum(oracle(model, x[:size], loss))
        assert all(total.isfinite().all() for total in expected.values())
        assert_same(run_mode(grad_sample_mode, True, model, x[:size], loss), expected)


@EVERY_WAY
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens_in_a_criterion_with_a_shape(grad_sample_mode, reduction):
    model, criterion = _tagger(), nn.CrossEntropyLoss(reduction=reduction)
    given = dict(criterion=criterion, loss_reduction=reduction, batch_size=3)
    private = make_private(model, grad_sample_mode, **given)
    before = [p.detach().clone() for p in model.parameters()]
    outputs = private.module(NO_IDS).flatten(0, 1)
    if private.criterion is None:
        loss = criterion(outputs, NO_IDS.flatten())
    else:
        loss = private.criterion(outputs, NO_IDS.flatten(), shape=[3, 0])
    assert loss.isnan() if reduction == "mean" else loss == 0
    loss.backward()
    private.optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@EVERY_WAY
def test_no_tokens_whose_mean_is_not_finite(grad_sample_mode):
    model = nn.Sequential(_Mean(), nn.Linear(4, 2)).double()
    with pytest.warns(RuntimeWarning, match="not finite"):
        found = run_mode(grad_sample_mode, True, model, NO_ROWS, square_loss)
    assert all((total == 0).all() for total in found.values())
    given = dict(batch_size=3, on_nonfinite="raise")
    private = make_private(model, grad_sample_mode, **given)
    with pytest.raises(Refused, match="not finite"):
        private.step(NO_ROWS, square_loss)


def test_no_tokens_in_clipped_grads():
    model = _tagger().double()
    params, rows = dict(model.named_parameters()), [torch.arange(n) for n in (3, 0, 2)]

    def loss(ids):
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    for x in (NO_IDS, NO_IDS[:1]):
        found = clipped_grads(loss, params, x, 1.0)
        assert found.losses.isnan().all() and (found.norms == 0).all()
    norms = clipped_grads(loss, params, rows, 1.0, take=lambda x, i: x[i][None]).norms
    assert (norms > 0).tolist() == [True, False, True]


# -- copies of an optimizer ------------------------------------------------------------

COPIES = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "with the model": lambda x: copy.deepcopy((x.mode, x)),
    "in a scheduler": lambda x: copy.deepcopy(torch.optim.lr_scheduler.StepLR(x, 1)),
    "before": lambda x: type(x)
    .__new__(type(x))
    .__setstate__({"state": {}, "param_groups": [], "defaults": {}}),
}


@EVERY_MODE
@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_copy_of_an_optimizer_breaks_no_other(grad_sample_mode, name, clipping):
    given = dict(batch_size=4, clipping=clipping)
    first = make_private(_three(), grad_sample_mode, **given)
    second = make_private(_three(), grad_sample_mode, **given)
    first.step(X, square_loss)
    with pytest.raises(Refused, match="is not copied or pickled") as caught:
        COPIES[name](first.optimizer)
    assert caught.value.parameter == "optimizer"
    for private in (first, second, make_private(_three(), grad_sample_mode, **given)):
        private.step(X, square_loss)
        state = copy.deepcopy(private.optimizer.state_dict())
        private.optimizer.load_state_dict(state)


# -- wrappers of Opacus that were made by hand -----------------------------------------

BY_HAND = {
    "hooks": GradSampleModule,
    "functorch": GradSampleModule,
    "ghost": GradSampleModuleFastGradientClipping,
    "ghost_bk": GradSampleModuleFastGradientClipping,
    "scan": GradSampleModuleFastGradientClipping,
    "auto": GradSampleModuleFastGradientClipping,
}


@EVERY_WAY
@pytest.mark.parametrize("used", [False, True])
def test_a_wrapper_by_hand_trains_as_without(grad_sample_mode, used):
    """Whoever is called: the wrapper, what was returned, or the model."""
    plain, model = _three(), _three()
    expected = make_private(plain, grad_sample_mode, batch_size=4)
    by_hand = BY_HAND[grad_sample_mode](model)
    if used:
        square_loss(by_hand, X).mean().backward()
        by_hand(X)
    private = make_private(by_hand, grad_sample_mode, batch_size=4)
    returned = private.module
    if used:  # a second time, as for a GAN
        given = dict(batch_size=4, optimizer=private.optimizer)
        private = make_private(by_hand, grad_sample_mode, **given)
    assert private.module is returned and returned._module is model
    for module in (by_hand, returned, model, by_hand):
        private.module = module
        expected.step(X, square_loss)
        private.step(X, square_loss)
        assert all(map(torch.equal, plain.parameters(), model.parameters()))
    with pytest.raises(Refused if private.criterion else ValueError):
        private.optimizer.zero_grad()
        private.optimizer.step()
    standard = by_hand.to_standard_module()
    assert standard is model and not hasattr(model, "autograd_grad_sample_hooks")
    for module in (by_hand, returned, model):
        before = [p.detach().clone() for p in model.parameters()]
        square_loss(module, X).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not any(hasattr(p, "grad_sample") for p in model.parameters())
        assert all(map(torch.equal, before, model.parameters()))
    assert not model[0]._forward_hooks and not model[0]._backward_hooks


@EVERY_WAY
@pytest.mark.parametrize(
    "given",
    [dict(batch_first=False), dict(loss_reduction="sum"), dict(noise_multiplier=-1.0)],
    ids=str,
)
def test_a_wrapper_by_hand_with_other_arguments(grad_sample_mode, given):
    """Opacus's own error, or ours; the wrapper works on as it did."""
    by_hand = BY_HAND[grad_sample_mode](_three())
    with pytest.raises(
        ValueError, match="doesn't match new arg|Make them the same|must be a num"
    ):
        make_private(by_hand, grad_sample_mode, batch_size=4, **given)
    assert type(by_hand) is BY_HAND[grad_sample_mode]
    square_loss(by_hand, X).mean().backward()
    name = "grad_sample" if "hooks" == grad_sample_mode else "_norm_sample"
    if grad_sample_mode not in ("functorch",):
        assert all(len(getattr(p, name)) == 4 for p in by_hand.parameters())


@EVERY_WAY
def test_a_wrapper_by_hand_of_what_is_refused(grad_sample_mode, monkeypatch):
    by_hand = BY_HAND[grad_sample_mode](_three())

    def fail(*args, **kwargs):
        raise Refused("no", remedy="none")

    monkeypatch.setattr(opacus_ext.PrivacyEngine, "_prepare_optimizer", fail)
    with pytest.raises(Refused, match="no none"):
        make_private(by_hand, grad_sample_mode, batch_size=4)
    monkeypatch.undo()
    assert type(by_hand) is BY_HAND[grad_sample_mode]
    make_private(by_hand, grad_sample_mode, batch_size=4).step(X, square_loss)


@pytest.mark.parametrize("kind", [GradSampleModule, None])
def test_a_wrapper_by_hand_of_another_mode(kind):
    class Own(GradSampleModule):
        pass

    with pytest.raises(ValueError, match="doesn't match new arguments"):
        mode = "hooks" if kind is None else "ghost"
        make_private((kind or Own)(_three()), mode, batch_size=4)


# -- what a run rests on, changed in its middle ----------------------------------------


def _set(where, name, change):
    """Changes an attribute at the end of an attribute's path."""

    def apply(owner):
        for part in where.split(".") if where else ():
            owner = getattr(owner, part)
        setattr(owner, name, change(getattr(owner, name)))

    return apply


def _twice(x):
    return 2 * x


def _halved(x):
    return x / 2


IN_TRAINER = {
    "gradient_accumulation_steps": _set("args", "gradient_accumulation_steps", _twice),
    "per_device_train_batch_size": _set("args", "per_device_train_batch_size", _twice),
    "max_steps": _set("args", "max_steps", _twice),
    "max_steps of the state": _set("state", "max_steps", _twice),
    "args": _set("", "args", copy.copy),
    "train_dataset": _set("", "train_dataset", list),
    "len": lambda trainer: trainer.train_dataset.append(trainer.train_dataset[0]),
    "target_delta": _set("privacy", "target_delta", _halved),
    "noise_multiplier": _set("privacy", "noise_multiplier", _halved),
    "seed": _set("args", "seed", lambda x: x + 1),
    "privacy_seed": _set("privacy", "privacy_seed", lambda x: x + 1),
    "noise_multiplier of the optimizer": _set(
        "_training.optimizer", "noise_multiplier", _halved
    ),
    "max_grad_norm": _set("_training.optimizer", "max_grad_norm", _twice),
    "expected_batch_size": _set("_training.optimizer", "expected_batch_size", _twice),
    "accountant": _set("engine", "accountant", copy.deepcopy),
    "optimizer": _set(
        "", "optimizer", lambda x: torch.optim.SGD(x.param_groups[0]["params"], 0.1)
    ),
    "sampling": _set(
        "_training.sampler", "sampling", lambda x: Poisson(sample_rate=0.9)
    ),
}
HARMLESS = {
    "log_loss": _set("privacy", "log_loss", lambda x: not x),
    "logging_steps": _set("args", "logging_steps", _twice),
    "should_save": _set("control", "should_save", lambda x: False),
    "lr": lambda trainer: trainer.optimizer.param_groups[0].update(lr=1e-3),
}


class _Linear(nn.Linear):
    def forward(self, x, y):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def _trained(tmp_path, change, hook, **kwargs):
    """The error of a run with a callback, its weights after steps, and the trainer."""
    import transformers

    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    found = []

    class Changes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            found.append(trainer.model.weight.detach().clone())

    def changes(self, args, state, control, **kwargs):
        if state.global_step == 2:
            change(trainer)

    before = getattr(Changes, hook)

    def both(self, *args, **kwargs):
        before(self, *args, **kwargs)
        changes(self, *args, **kwargs)

    setattr(Changes, hook, both)
    torch.manual_seed(0)
    args = transformers.TrainingArguments(
        tmp_path,
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
    )
    privacy = dict(noise_multiplier=1.0, target_delta=1e-3, privacy_seed=1)
    privacy.update(grad_sample_mode="ghost_bk")
    trainer = PrivateTrainer(
        _Linear(3, 2),
        args,
        train_dataset=[{"x": torch.randn(3), "y": i % 2} for i in range(8)],
        privacy=PrivacyArguments(**privacy),
        callbacks=[Changes()],
    )
    try:
        trainer.train()
    except Refused as refused:
        return refused, found, trainer
    return None, found, trainer


@pytest.mark.parametrize("hook", ["on_step_end", "on_substep_end", "on_step_begin"])
@pytest.mark.parametrize("name", IN_TRAINER)
def test_a_callback_that_changes_what_a_run_rests_on(name, hook, tmp_path):
    pytest.importorskip("transformers")
    error, weights, trainer = _trained(tmp_path, IN_TRAINER[name], hook)
    assert error is not None and error.parameter == name.partition(" ")[0]
    assert "when training began" in str(error)
    assert len(weights) == 2
    assert torch.equal(trainer.model.weight, weights[-1])


@pytest.mark.parametrize("name", ["noise_multiplier of the optimizer", "args", "len"])
def test_a_callback_just_before_the_step(name, tmp_path):
    pytest.importorskip("transformers")
    given = IN_TRAINER[name], "on_pre_optimizer_step"
    error, weights, trainer = _trained(tmp_path, *given)
    assert error is not None and len(weights) == 2
    assert torch.equal(trainer.model.weight, weights[-1])


@pytest.mark.parametrize("name", HARMLESS)
def test_a_callback_that_changes_something_else(name, tmp_path):
    pytest.importorskip("transformers")
    error, weights, trainer = _trained(tmp_path, HARMLESS[name], "on_step_end")
    assert error is None and len(weights) == 4
    trainer.args.per_device_train_batch_size = 4  # of the next run
    trainer.args.max_steps = 2
    trainer.train()
    assert len(weights) == 6


IN_LIGHTNING = {
    "max_steps": lambda trainer, model, privacy: vars(
        trainer.fit_loop.epoch_loop
    ).update(max_steps=9),
    "max_epochs": lambda trainer, *_: setattr(trainer.fit_loop, "max_epochs", 9),
    "limit_train_batches": lambda trainer, *_: setattr(
        trainer, "limit_train_batches", 2
    ),
    "accumulate_grad_batches": lambda trainer, *_: setattr(
        trainer, "accumulate_grad_batches", 2
    ),
    "records": lambda trainer, *_: trainer.train_dataloader.dataset.dataset.append(0),
    "dataset": lambda trainer, *_: setattr(
        trainer.train_dataloader.dataset, "dataset", [(torch.ones(3), 0)] * 8
    ),
    "noise_multiplier": lambda trainer, model, privacy: setattr(
        privacy._training.optimizer, "noise_multiplier", 0.1
    ),
    "max_grad_norm": lambda trainer, model, privacy: setattr(
        privacy._training.optimizer, "max_grad_norm", 9.0
    ),
    "max_grad_norm of the callback": lambda trainer, model, privacy: (
        privacy._kwargs.update(max_grad_norm=3.0)
    ),
    "sampling": lambda trainer, model, privacy: setattr(
        privacy._training.sampler, "sampling", Poisson(sample_rate=0.9)
    ),
    "accountant": lambda trainer, model, privacy: setattr(
        privacy.engine, "accountant", copy.deepcopy(privacy.engine.accountant)
    ),
    "criterion": lambda trainer, model, privacy: setattr(
        model, "criterion", nn.CrossEntropyLoss(label_smoothing=0.1)
    ),
    "criterion's reduction": lambda trainer, model, privacy: setattr(
        model.criterion, "reduction", "sum"
    ),
    "train_dataloaders": lambda trainer, *_: setattr(
        trainer.fit_loop._data_fetcher, "iterator", iter(_foreign())
    ),
    None: lambda trainer, model, privacy: setattr(model.criterion, "ignore_index", 7),
}


def _foreign():
    for i in range(9):
        yield (torch.randn(2, 3), torch.zeros(2).long()), i, 0


@pytest.mark.parametrize("name", IN_LIGHTNING)
@pytest.mark.parametrize("automatic", [True, False])
def test_a_lightning_callback_that_changes_what_a_run_rests_on(name, automatic):
    L = pytest.importorskip("lightning")
    from opacus_ext.lightning import PrivacyCallback

    class Model(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.criterion = nn.Linear(3, 2), nn.CrossEntropyLoss()
            self.automatic_optimization = automatic

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, i):
            loss = self.criterion(self(batch[0]), batch[1])
            if automatic:
                return loss
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    weights = []

    class Changes(L.Callback):
        def on_train_batch_end(self, trainer, module, *given):
            weights.append(module.layer.weight.detach().clone())
            if len(weights) == 2:
                IN_LIGHTNING[name](trainer, module, privacy)

    privacy = PrivacyCallback(
        target_delta=1e-3, noise_multiplier=1.0, seed=1, grad_sample_mode="ghost_bk"
    )
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    off.update(accelerator="cpu", enable_model_summary=False)
    model, data = Model(), [(torch.randn(3), i % 2) for i in range(8)]
    trainer = L.Trainer(
        callbacks=[privacy, Changes()], max_steps=4, max_epochs=5, **off
    )
    loader = DataLoader(data, batch_size=2)
    if name is None:
        trainer.fit(model, loader)
        assert len(weights) == 4
        return
    with pytest.raises(Refused) as caught:
        trainer.fit(model, loader)
    assert caught.value.parameter == name.partition(" ")[0].partition("'")[0]
    assert len(weights) == 2
    assert torch.equal(model.layer.weight, weights[-1])
