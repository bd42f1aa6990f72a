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
from tests.zoo import EVERY_MODE, MODES, every_mode, refused

from .front_ends import lightning_of, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")

# -- bounds ----------------------------------------------------------------------------


def sixteen():
    """A loss of 16 parameters, whose gradients are 1,000 times a record."""
    params = {f"w{i}": torch.zeros(2, requires_grad=True) for i in range(16)}
    return lambda x: sum(1e3 * (x * w).sum() for w in params.values()), params


class Broadcast:
    """A function by parameter of one's own, whose one bound is meant for all."""

    per_parameter = True

    def __call__(self, norms):
        return (torch.ones(1, 1) / norms).clamp(max=1.0)

    def sensitivity(self, relation):
        return 1.0


def by_parameter(norms, bound):
    return (torch.as_tensor(bound).to(norms)[:, None] / norms).clamp(max=1.0)


OWN = Clipping("by_parameter", by_parameter, per_parameter=True)
FLAT, PER_LAYER = CLIPPINGS["flat"], CLIPPINGS["per_layer"]


@pytest.mark.parametrize(
    "clipping, words",
    [
        *((lambda n=n: PER_LAYER.at([1.0] * n), f"16 .* got {n}") for n in (1, 15, 17)),
        (lambda: PER_LAYER.at(1.0), "list .* got 1.0"),
        (lambda: PER_LAYER.at([1.0, -1.0]), "got 2 of them"),
        (lambda: PER_LAYER.at([1.0, float("nan")]), "got 2 of them"),
        (lambda: OWN.at([1.0]), "by_parameter.* 16 .* got 1 of them"),
        (lambda: OWN.at(1.0), "by_parameter.* list .* got 1.0"),
        (lambda: FLAT.at([1.0]), "flat.* one positive number; got 1 of"),
        (lambda: FLAT.at(float("inf")), "flat.*got inf"),
        (lambda: FLAT.at(True), "flat.*got True"),
        (lambda: CLIPPINGS["automatic"].at([1.0] * 16), "automatic.*got 16 of them"),
        (Broadcast, "norm 4, and states a sensitivity of 1"),
        (lambda: Clipping("long", lambda n, b: 2 * b / n).at(1.0), "norm 2, and"),
        (lambda: Clipping("nan", lambda n, b: n * float("nan")).at(1.0), "norm nan"),
    ],
)
def test_bounds_for_another_number_of_parameters(clipping, words):
    loss, params = sixteen()
    with pytest.raises(Refused, match=words):
        clipped_grads(loss, params, torch.ones(3, 2), clipping())


def test_bounds_for_another_number_of_parameters_compiled():
    loss, params = sixteen()
    for fullgraph in (True, False):
        step = torch.compile(
            lambda x: clipped_grads(loss, params, x, PER_LAYER.at([1.0])).sums,
            fullgraph=fullgraph,
            backend="eager",
        )
        with pytest.raises(RuntimeError, match="each of the 16 trained parameter"):
            step(torch.ones(3, 2))


@pytest.mark.parametrize("name", [*CLIPPINGS, "by_parameter"])
@pytest.mark.parametrize("bound", [0.03, 40.0])
def test_the_sensitivity_is_what_one_record_moves(name, bound, monkeypatch):
    """At least for any record, and nearly for one of a large gradient."""
    monkeypatch.setitem(opacus_ext.clipping.CLIPPINGS, "by_parameter", OWN)
    loss, params = sixteen()
    kind = find_clipping(name)
    several = torch.arange(1, 17) * bound / 16
    forms = (several, several.tolist(), [*several]) if kind.per_parameter else [bound]
    base = torch.randn(4, 2)
    records = [s * torch.randn(2) for s in (1e-6, 1e-4, 1e-2, 1.0, 1e3) for _ in "ab"]
    for clipping in map(kind.at, forms):

        def total(*more):
            given = torch.cat([base, *(x[None] for x in more)])
            sums = clipped_grads(loss, params, given, clipping).sums
            return torch.cat([x.flatten().double() for x in sums.values()])

        gaps = [float((total(x) - total()).norm()) for x in records]
        one = clipping.sensitivity("add_or_remove_one")
        assert one * 0.99 <= max(gaps) <= one * (1 + 1e-5)
        pairs = itertools.product(records[-2:], records[-2:])
        swapped = [float((total(x) - total(y)).norm()) for x, y in pairs]
        assert max(swapped) <= clipping.sensitivity("replace_one") * (1 + 1e-5)


# -- parameters that are frozen and thawed ---------------------------------------------

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).double()
every_clipping = pytest.mark.parametrize("clipping", ["per_layer", "flat"])
modes = pytest.mark.parametrize("mode", [*MODES, "auto"])


def three():
    torch.manual_seed(1)
    layers = nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3, bias=False), nn.Linear(3, 2)
    return nn.Sequential(*layers).double()


class Frozen:
    """A private model whose parameters are frozen and thawed."""

    def __init__(self, mode, clipping="flat", frozen=(), **kwargs):
        self.model, self.clipping = three(), clipping
        self.params = dict(self.model.named_parameters())
        self.freeze(*frozen)
        trained = [n for n, p in self.params.items() if p.requires_grad]
        self.bounds = {name: 0.1 * 2**i for i, name in enumerate(trained)}
        given = dict(max_grad_norm=self.bound())
        optimizer = torch.optim.SGD(self.params.values(), lr=1.0)
        given.update(clipping=clipping, batch_size=4, optimizer=optimizer, **kwargs)
        self.private = make_private(self.model, mode, **given)
        self.optimizer = self.private.optimizer

    def freeze(self, *names):
        for name, p in self.params.items():
            p.requires_grad_(name not in names)

    def bound(self):
        own = [self.bounds[n] for n, p in self.params.items() if p.requires_grad]
        return own if self.clipping == "per_layer" else 0.5

    def expected(self):
        grads = oracle(self.model, X, square_loss)
        sums = clipped_sum(grads, self.clipping, self.bound())
        return {n: sums.get(n, torch.zeros_like(p)) for n, p in self.params.items()}

    def check(self, expected=None, step=None):
        expected = expected or self.expected()
        before = {n: p.detach().clone() for n, p in self.params.items()}
        (step or self.private.step)(X, square_loss)
        moved = {n: 4 * (before[n] - p.detach()) for n, p in self.params.items()}
        assert_same(moved, expected)


@modes
@every_clipping
def test_frozen_in_a_run_and_thawed(mode, clipping):
    run = Frozen(mode, clipping)
    names = [*run.params]
    for frozen in ((), (0,), (0, 2), (), (2, 3), (1,), ()):
        run.freeze(*(names[i] for i in frozen))
        run.check()
        squared = sum(torch.tensor(run.bound()).square().flatten())
        assert run.optimizer.sensitivity == pytest.approx(float(squared) ** 0.5)


@modes
@every_clipping
@pytest.mark.parametrize("name", ["0.weight", "3.bias"])
def test_frozen_between_backward_and_step(mode, clipping, name):
    """It is left as it is: its gradient has no noise. Later it begins anew."""
    run = Frozen(mode, clipping)
    run.freeze(*[name] * (mode == "hooks"))  # which clips within the step
    expected = {**run.expected(), name: torch.zeros_like(run.params[name])}
    run.freeze()

    def step(*given):
        run.optimizer.zero_grad()
        run.private.backward(*given)
        run.freeze(name)
        run.optimizer.step()

    run.check(expected, step)
    run.optimizer.zero_grad()
    run.freeze()
    run.check()


@modes
@every_clipping
def test_frozen_within_a_logical_batch(mode, clipping):
    """What it has of the first half is not added to a later step."""
    run = Frozen(mode, clipping)
    for x, skip, frozen in ((X[:2], True, ["2.weight"]), (X[2:], False, [])):
        run.optimizer.signal_skip_step(skip)
        run.private.step(x, square_loss)
        run.freeze(*frozen)
    run.check()


@modes
def test_thawed_without_a_bound(mode):
    run = Frozen(mode, "per_layer", frozen=["2.weight"])
    run.private.step(X, square_loss)
    run.freeze()
    before = copy.deepcopy(run.model.state_dict())
    run.optimizer.zero_grad()
    with pytest.raises(Refused, match="2.weight was frozen at make_private") as caught:
        run.private.backward(X, square_loss)
        run.optimizer.step()
    assert caught.value.parameter == "2.weight"
    assert_same(run.model.state_dict(), before, 0)
    run.optimizer.zero_grad()
    run.freeze("2.weight")
    run.private.step(X, square_loss)


@modes
def test_thawed_between_backward_and_step(mode):
    run = Frozen(mode, frozen=["0.weight", "0.bias"])
    run.optimizer.zero_grad()
    run.private.backward(X, square_loss)
    run.freeze()
    with pytest.raises(ValueError):
        run.optimizer.step()


# -- users -----------------------------------------------------------------------------

ROWS = TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
LIST = [{"x": torch.randn(3), "y": i % 2} for i in range(8)]
FOUR = [i % 4 for i in range(24)]
#: By what users are called: forms of user i, of which all records are made.
USERS = {
    lambda i: i: [
        torch.tensor,
        lambda i: torch.tensor([[i]]),
        lambda i: torch.tensor(float(i)),
        np.array,
        lambda i: np.array([i]),
        lambda i: np.int16(i) if i else torch.tensor(0),
        np.float32,
        float,
    ],
    lambda i: f"u{i}": [
        lambda i: np.str_(f"u{i}"),
        lambda i: np.array(f"u{i}"),
    ],
    lambda i: b"u%d" % i: [lambda i: b"u%d" % i, lambda i: np.bytes_(b"u%d" % i)],
    lambda i: str(uuid.UUID(int=i)): [lambda i: uuid.UUID(int=i)],
    lambda i: (i, "a"): [lambda i: (torch.tensor(i), "a")],
    lambda i: int(i > 1): [lambda i: torch.tensor(i > 1), lambda i: np.bool_(i > 1)],
}
WHOLE = [
    torch.tensor(FOUR)[:, None],
    torch.tensor(FOUR).float(),
    np.array(FOUR),
    np.array(FOUR, object),
]


@pytest.mark.parametrize(
    "users, expected",
    [
        *(
            ([form(i) for i in FOUR], key)
            for key, forms in USERS.items()
            for form in forms
        ),
        *((users, lambda i: i) for users in WHOLE),
        (
            [
                uuid.UUID(int=i) if k < 9 else str(uuid.UUID(int=i))
                for k, i in enumerate(FOUR)
            ],
            lambda i: str(uuid.UUID(int=i)),
        ),
    ],
)
def test_users_are_as_many_as_their_values(users, expected):
    found = UserRecords(list(range(24)), users)
    assert found.users == [*dict.fromkeys(map(expected, range(4)))]
    assert {type(x) for x in found.users} <= {int, str, bytes, tuple}
    drawn = {found[i] for i in range(len(found)) for _ in range(200)}
    assert drawn == {*range(24)}


@pytest.mark.parametrize(
    "users, words",
    [
        ([7, "7", 8], "Users 7 and '7' differ"),
        ([b"a", "a", "b"], "Users b'a' and 'a' differ"),
        ([(1, "a"), ("1", "a"), (2, "a")], "differ in nothing but their type"),
        ({0: "a", 1: "a", 2: "b"}, "is a mapping"),
        *(
            ([0, wrong, 1], "user of record 1")
            for wrong in (
                *(np.float64("nan"), torch.tensor(float("nan")), float("inf"), 0.5),
                *(torch.tensor(0.5), torch.tensor([1, 2]), np.array([1, 2])),
                *(np.array([]), (1, float("nan")), None, object(), [1], {"id": 1}, 1j),
                *(decimal.Decimal(1), np.datetime64("2020-01-01")),
            )
        ),
    ],
)
def test_users_who_may_be_one(users, words):
    with pytest.raises(Refused, match=words) as caught:
        UserRecords(list(range(3)), users)
    assert caught.value.parameter == "users"


def test_users_by_a_key():
    keyed = [{"x": i, "by": torch.tensor(u)} for i, u in enumerate(FOUR)]
    assert UserRecords(keyed, "by").users == [0, 1, 2, 3]
    with pytest.raises(Refused, match="Record 1 has no user 'by'.*KeyError"):
        UserRecords([keyed[0], {"x": 2}], "by")


# -- copies of a record ----------------------------------------------------------------


class Plain(Dataset):
    """Of which no more is known than its length."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return ROWS[i]


class Around(Plain):
    """Augments another data set."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)


class Unsized(Dataset):
    def __getitem__(self, i):
        return ROWS[i]


class Selected(Plain):
    """As ``datasets.Dataset.select`` makes it; it is its own column of numbers."""

    def __init__(self, data, indices=None):
        self._data = data
        self._indices = None if indices is None else Selected(np.array(indices))

    def __len__(self):
        return 8 if self._indices is None else len(self._indices._data)

    def column(self, i):
        assert i == 0
        return self

    def to_numpy(self):
        return self._data


PLAIN, DATA = Plain(), object()
INPUTS, LABELS = ROWS.tensors


def both(*datasets):
    return ConcatDataset(datasets)


def part(*numbers):
    return Subset(PLAIN, numbers)


def tensors(start, end):
    return TensorDataset(INPUTS[start:end], LABELS[start:end])


def users_of(dataset, *users):
    return UserRecords(dataset, users)


COPIED = {
    "from the end": (part(0, 1, -8), (0, 2)),
    "of a tensor": (Subset(PLAIN, torch.tensor([3, 1, 3])), (0, 2)),
    "of tensors": (part(*torch.tensor([3, 1, 3])), (0, 2)),
    "of numpy": (Subset(Unsized(), np.array([3, 1, 1])), (1, 2)),
    "of a list": (Subset(LIST, [3, 1, 1]), (1, 2)),
    "twice": (both(PLAIN, PLAIN), (0, 8)),
    "the same tensors": (both(ROWS, TensorDataset(INPUTS, LABELS)), (0, 8)),
    "slices": (both(tensors(0, 5), tensors(4, 8)), (4, 5)),
    "overlapping": (both(part(*range(5)), part(*range(4, 8))), (4, 5)),
    "a subset of a subset": (Subset(part(5, 6, 5), [2, 0]), (0, 1)),
    "a part of both": (Subset(both(PLAIN, PLAIN), [3, 11]), (0, 1)),
    "deep": (both(Around(part(2)), PLAIN), (0, 3)),
    "augmented": (both(PLAIN, Around(PLAIN)), (0, 8)),
    "around a subset": (Around(part(1, 1)), (0, 1)),
    "stacked": (
        StackDataset(x=Subset(INPUTS, [1, 1]), y=Subset(LABELS, [3, 3])),
        (0, 1),
    ),
    "expanded": (TensorDataset(INPUTS[:1].expand(4, 3), LABELS[:1].expand(4)), (0, 1)),
    "one object": ([*LIST, LIST[3]], (3, 8)),
    "one object of both": (both(LIST, LIST[2:4]), (2, 8)),
    "one pair": ([(INPUTS[0], 1), (INPUTS[1], 1)] * 2, (0, 2)),
    "selected": (Selected(DATA, [0, 0, 1]), (0, 1)),
    "selected twice": (both(Selected(DATA, [0, 1]), Selected(DATA, [1, 2])), (1, 2)),
    "a user twice": (Subset(users_of(ROWS, *[0, 1] * 4), [0, 0]), (0, 1)),
    "users twice": (both(*[users_of(ROWS, *[0, 1] * 4)] * 2), (0, 2)),
    "users of both": (
        both(users_of(ROWS, *"aabbccdd"), users_of(LIST[:1], "d")),
        (3, 4),
    ),
    "as a record, too": (both(users_of(ROWS, *[5] * 8), ROWS), (0, 1)),
    # Each record once.
    "a subset": (part(5, 3, 1), None),
    "split": (both(*random_split(PLAIN, [3, 5])), None),
    "two": (both(PLAIN, Plain()), None),
    "two of tensors": (both(ROWS, TensorDataset(INPUTS.clone(), LABELS)), None),
    "stacked labels": (
        StackDataset(Subset(INPUTS, [0, 1, 2]), Subset(LABELS, [1, 1, 1])),
        None,
    ),
    "a label for all": (TensorDataset(INPUTS, torch.zeros(()).expand(8)), None),
    "numbers": ([1, 2, 1, 1], None),
    "words": (["a", "b", "a"], None),
    "pairs of numbers": ([(1, 0)] * 4, None),
    "empty tensors": (both(*(TensorDataset(torch.zeros(4, 0)) for _ in "ab")), None),
    "selected once": (Selected(DATA, [3, 1, 2]), None),
    "not selected": (Selected(DATA), None),
    "users": (users_of(Subset(ROWS, [0, 1, 0, 1]), *"abab"), None),
    "other users": (both(users_of(ROWS, *"aabbccdd"), users_of(LIST[:1], "e")), None),
    "slices of one": (both(tensors(0, 5), tensors(5, 8)), None),
}


@pytest.mark.parametrize("name", COPIED)
def test_one_record_under_two_numbers(name):
    dataset, numbers = COPIED[name]
    assert find_copies(dataset) == numbers


def given_of(dataset, **kwargs):
    model = nn.Linear(3, 2)
    return dict(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=2),
        max_grad_norm=1.0,
        **{"noise_multiplier": 1.0, **kwargs},
    )


TWICE, SAID = part(0, 1, 2, 1), r"Records 1 and 3 of the data set \(Subset\)"
ADAPTIVE = dict(
    target_unclipped_quantile=0.5,
    min_clipbound=0.1,
    max_clipbound=9.0,
    clipbound_learning_rate=0.1,
)


@pytest.mark.parametrize(
    "given",
    [
        *(dict(grad_sample_mode=mode) for mode in (*EVERY_MODE, "ew")),
        dict(poisson_sampling=False),
        dict(sampling=Poisson(expected_batch_size=2)),
        dict(wrap_model=False),
        ADAPTIVE,
    ],
    ids=str,
)
def test_copies_are_refused_by_make_private(given):
    engine = PrivacyEngine if given is not ADAPTIVE else PrivacyEngineAdaptiveClipping
    with pytest.raises(Refused, match=SAID) as caught:
        engine().make_private(**given_of(TWICE, **given))
    assert caught.value.parameter == "data_loader"
    given = given_of(TWICE, **given)
    budget = dict(target_epsilon=3.0, target_delta=1e-3, epochs=1)
    del given["noise_multiplier"]
    with pytest.raises(Refused, match=SAID):
        engine().make_private_with_epsilon(**budget, **given)


def test_copies_are_refused_of_loaders_that_opacus_made():
    opacus_ext.unregister()
    try:
        loader = PrivacyEngine().make_private(**given_of(TWICE))[2]
    finally:
        opacus_ext.register()
    with pytest.raises(Refused, match="Records 1 and 3"):
        PrivacyEngine().make_private(**{**given_of(ROWS), "data_loader": loader})


def test_copies_of_two_users():
    with pytest.raises(Refused, match="1 and 3 .* belong to users 'b' and 'd'"):
        users_of(TWICE, *"abcd")
    assert users_of(TWICE, *"abcb").users == ["a", "b", "c"]
    with pytest.raises(Refused, match="1 and 2 .* belong to users 5 and 6"):
        users_of(part(7, 7, 7), 5, 5, 6)


# -- draws without records -------------------------------------------------------------


class Batch(collections.UserDict):
    """As a BatchEncoding of transformers is."""


def listed(records):
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


def encoded(records):
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding(listed(records))


NONE = torch.zeros(0, 3)
EMPTY = {
    "x": NONE,
    **dict(names=[], lengths=(), objects=[], arrays=[], boxes=[]),
    "array": np.zeros((0, 3), np.float32),
    "number": torch.tensor(0),
    **dict(most=0, kind="", is_last=False, nothing=None),
    "nested": ({"ids": []}, [NONE, []]),
}
#: What a record is, how a batch is made, and the batch of none.
DRAWS = {
    "tensors and text": (lambda x, i: (x, f"text {i}"), None, [NONE, ()]),
    "words": (
        lambda x, i: {"x": x, "words": ["a", "b"]},
        None,
        {"x": NONE, "words": [(), ()]},
    ),
    "all kinds": (lambda *record: record, listed, EMPTY),
    "a user's dict": (
        lambda *record: record,
        lambda records: Batch(listed(records)),
        Batch(EMPTY),
    ),
    "a batch encoding": (lambda *record: record, encoded, EMPTY),
}


def assert_equal(got, expected):
    if isinstance(expected, (torch.Tensor, np.ndarray)):
        assert got.dtype == expected.dtype and got.shape == expected.shape
        assert (got == expected).all()
    elif isinstance(expected, collections.abc.Mapping):
        assert [*got] == [*expected]
        for key in expected:
            assert_equal(got[key], expected[key])
    elif isinstance(expected, (list, tuple)):
        assert type(got) in (type(expected), list, tuple) and len(got) == len(expected)
        for pair in zip(got, expected):
            assert_equal(*pair)
    else:
        assert type(got) is type(expected) and got == expected


def drawn(name_or_collate, rate=0.2, workers=0, seed=0, **kwargs):
    """A private loader, whose draws are often empty."""
    of, collate = lambda *record: record, name_or_collate
    if isinstance(collate, str):
        of, collate, _ = DRAWS[collate]
    records = [of(torch.ones(3) + i, i) for i in range(4)]
    given = given_of(records, **kwargs)
    given["data_loader"] = DataLoader(
        records,
        collate_fn=collate,
        num_workers=workers,
        generator=torch.Generator().manual_seed(seed),
    )
    sampling = Poisson(sample_rate=rate, steps=12)
    return PrivacyEngine().make_private(sampling=sampling, **given)


def inputs_of(batch):
    return batch[0] if isinstance(batch, (list, tuple)) else batch["x"]


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("grad_sample_mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("first", [True, False])
def test_a_draw_without_records(name, grad_sample_mode, first):
    """The first one and later ones, which are trained on as others are."""
    for seed in range(20):
        made = drawn(name, seed=seed, grad_sample_mode=grad_sample_mode)
        model, optimizer, *criterion, loader = made
        state = torch.get_rng_state()
        batches = [*loader]
        assert torch.equal(torch.get_rng_state(), state)
        empty = [not len(inputs_of(batch)) for batch in batches]
        if empty[0] == first and len({*empty}) == 2:
            break
    for batch in batches:
        if not len(inputs_of(batch)):
            assert_equal(batch, DRAWS[name][2])
        optimizer.zero_grad()
        losses = model(inputs_of(batch).clone())
        labels = torch.zeros(len(losses), dtype=torch.long)
        loss = (criterion or [F.cross_entropy])[0](losses, labels)
        (loss if criterion else loss.nan_to_num()).backward()
        optimizer.step()
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_draw_without_records_in_workers():
    batches = [*drawn("tensors and text", workers=1)[-1]]
    empty = [batch for batch in batches if not len(batch[0])]
    assert 0 < len(empty) < len(batches)
    for batch in empty:
        assert_equal(batch, [NONE, ()])


def test_a_draw_without_records_batch_second_or_random():
    def collate(records):
        x = torch.stack([x for x, _ in records], 1)
        return {"x": x, "y": torch.arange(len(records)), "text": ["t"] * len(records)}

    found = next(iter(drawn(collate, 1e-9, batch_first=False)[-1]))
    assert_equal(found, {"x": torch.zeros(3, 0), "y": torch.arange(0), "text": []})
    found = next(iter(drawn(listed, 1e-9, rand_on_empty=True)[-1]))
    assert found["x"].shape == (1, 3) and found["names"] == [""]
    assert found["lengths"] == (0,) and found["array"].shape == (1, 3)


def test_a_draw_without_records_of_another_kind():
    with pytest.raises(Refused, match="Plain, which the loader's") as caught:
        next(iter(drawn(lambda records: PLAIN, 1e-9)[-1]))
    assert caught.value.parameter == "collate_fn"


# -- sequences of no tokens ------------------------------------------------------------


class Attends(nn.Module):
    """Rows of tables, a position for each token, and one token before."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(1, 1, 4))
        self.rows, self.places = nn.Parameter(torch.randn(7, 4)), nn.Embedding(5, 4)
        self.words = nn.Embedding(7, 4, padding_idx=0)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, ids):
        x = self.rows[ids] * self.words(ids)
        x = x + self.places(torch.arange(ids.shape[1]))
        x = torch.cat([self.first.expand(len(ids), 1, 4), x], 1)
        return self.attention(x, x, x)[0]


def tagger():
    return nn.Sequential(nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7))


class Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x.mean(1))


NO_IDS = torch.zeros(3, 0, dtype=torch.long)
NO_ROWS = torch.zeros(3, 0, 4).double()


def mean_entropy(model, ids):
    """The mean over tokens, which is NaN over none, with gradients of zero."""
    y = model(ids)
    target = y.new_zeros(y.shape[:2]).long()
    return F.cross_entropy(y.mT, target, reduction="none").mean(1)


@every_mode
@pytest.mark.parametrize("loss", [square_loss, mean_entropy])
def test_sequences_of_no_tokens(mode, loss):
    for make, x in (
        (tagger, NO_IDS),
        (lambda: nn.Linear(4, 7), NO_ROWS),
        (Attends, NO_IDS),
    ):
        model = make().double()
        for size in (3, 1, 0):
            expected = clipped_sum(oracle(model, x[:size], loss))
            assert all(total.isfinite().all() for total in expected.values())
            assert_same(run_mode(mode, True, model, x[:size], loss), expected)


@every_mode
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_tokens_in_a_criterion_with_a_shape(mode, reduction):
    model, criterion = tagger(), nn.CrossEntropyLoss(reduction=reduction)
    given = dict(criterion=criterion, loss_reduction=reduction, batch_size=3)
    private = make_private(model, mode, **given)
    before = copy.deepcopy(model.state_dict())
    outputs = private.module(NO_IDS).flatten(0, 1)
    shape = dict(shape=[3, 0]) if private.criterion else {}
    loss = (private.criterion or criterion)(outputs, NO_IDS.flatten(), **shape)
    assert loss.isnan() if reduction == "mean" else loss == 0
    loss.backward()
    private.optimizer.step()
    assert_same(model.state_dict(), before, 0)


@every_mode
def test_no_tokens_whose_mean_is_not_finite(mode):
    model = Mean(4, 2).double()
    with pytest.warns(RuntimeWarning, match="not finite"):
        found = run_mode(mode, True, model, NO_ROWS, square_loss)
    assert all((total == 0).all() for total in found.values())
    private = make_private(model, mode, batch_size=3, on_nonfinite="raise")
    with pytest.raises(Refused, match="not finite"):
        private.step(NO_ROWS, square_loss)


def test_no_tokens_in_clipped_grads():
    model = tagger().double()
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
    "pickle": pickle.dumps,
    "torch.save": lambda x: torch.save(x, io.BytesIO()),
    "with the model": lambda x: copy.deepcopy((x.mode, x)),
    "in a scheduler": lambda x: copy.deepcopy(torch.optim.lr_scheduler.StepLR(x, 1)),
    "before": lambda x: type(x)
    .__new__(type(x))
    .__setstate__({"state": {}, "param_groups": [], "defaults": {}}),
}


@modes
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_copy_of_an_optimizer_breaks_no_other(mode, clipping):
    given = dict(batch_size=4, clipping=clipping)
    made = [make_private(three(), mode, **given) for _ in "ab"]
    for name, copies in COPIES.items():
        with pytest.raises(Refused, match="is not copied or pickled") as caught:
            copies(made[0].optimizer)
        assert caught.value.parameter == "optimizer", name
    for private in (*made, make_private(three(), mode, **given)):
        private.step(X, square_loss)
        state = copy.deepcopy(private.optimizer.state_dict())
        private.optimizer.load_state_dict(state)


# -- wrappers of Opacus that were made by hand -----------------------------------------


def by_hand_in(mode):
    hooks = mode in ("hooks", "functorch")
    return GradSampleModule if hooks else GradSampleModuleFastGradientClipping


@every_mode
@pytest.mark.parametrize("used", [False, True])
def test_a_wrapper_by_hand_trains_as_without(mode, used):
    """Whoever is called: the wrapper, what was returned, or the model."""
    plain, model = three(), three()
    expected = make_private(plain, mode, batch_size=4)
    by_hand = by_hand_in(mode)(model)
    if used:
        square_loss(by_hand, X).mean().backward()
        by_hand(X)
    private = make_private(by_hand, mode, batch_size=4)
    returned = private.module
    if used:  # a second time, as for a GAN
        given = dict(batch_size=4, optimizer=private.optimizer)
        private = make_private(by_hand, mode, **given)
    assert private.module is returned and returned._module is model
    for module in (by_hand, returned, model, by_hand):
        private.module = module
        expected.step(X, square_loss)
        private.step(X, square_loss)
        assert_same(model.state_dict(), plain.state_dict(), 0)
    with pytest.raises(Refused if private.criterion else ValueError):
        private.optimizer.zero_grad()
        private.optimizer.step()
    assert by_hand.to_standard_module() is model
    assert not hasattr(model, "autograd_grad_sample_hooks")
    for module in (by_hand, returned, model):
        square_loss(module, X).mean().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert not any(hasattr(p, "grad_sample") for p in model.parameters())
    assert_same(model.state_dict(), plain.state_dict(), 0)
    assert not model[0]._forward_hooks and not model[0]._backward_hooks


class Subclass(GradSampleModule):
    pass


@every_mode
@pytest.mark.parametrize(
    "given",
    [
        dict(batch_first=False),
        dict(loss_reduction="sum"),
        dict(noise_multiplier=-1.0),
        dict(module=Subclass),
        dict(module=GradSampleModule),
        dict(),
    ],
    ids=str,
)
def test_a_wrapper_by_hand_with_other_arguments(mode, given, monkeypatch):
    """Opacus's own error, or ours; the wrapper works on as it did."""

    def fail(*args, **kwargs):
        raise Refused("no", remedy="none")

    kind = given.get("module", by_hand_in(mode))
    if kind is by_hand_in(mode) and "module" in given:
        pytest.skip("it fits")
    by_hand, given = kind(three()), {k: v for k, v in given.items() if k != "module"}
    if not given and kind is by_hand_in(mode):
        monkeypatch.setattr(PrivacyEngine, "_prepare_optimizer", fail)
    said = "doesn't match new arg|Make them the same|must be a num|no none"
    with pytest.raises(ValueError, match=said):
        make_private(by_hand, mode, batch_size=4, **given)
    monkeypatch.undo()
    assert type(by_hand) is kind
    square_loss(by_hand, X).mean().backward()
    name = "grad_sample" if issubclass(kind, GradSampleModule) else "_norm_sample"
    if mode != "functorch":
        assert all(hasattr(p, name) for p in by_hand.parameters())


# -- what a run rests on, changed in its middle ----------------------------------------


def put(path, change):
    """Changes what is at the end of a path of attributes."""

    def apply(owner):
        *parts, name = path.split(".")
        for one in parts:
            owner = getattr(owner, one)
        setattr(owner, name, change(getattr(owner, name)))

    return apply


def changes(table):
    """One case for each row: a parameter, a path, and a change."""
    ids = [f"{parameter} by {path}" for parameter, path, _ in table]
    return pytest.mark.parametrize("parameter, path, change", table, ids=ids)


def twice(x):
    return 2 * x


def halved(x):
    return x / 2


def denser(sampling):
    return Poisson(sample_rate=0.9)


#: What is changed in a PrivateTrainer, by the parameter that the error names.
IN_TRAINER = [
    ("gradient_accumulation_steps", "args.gradient_accumulation_steps", twice),
    ("per_device_train_batch_size", "args.per_device_train_batch_size", twice),
    ("max_steps", "args.max_steps", twice),
    ("max_steps", "state.max_steps", twice),
    ("args", "args", copy.copy),
    ("train_dataset", "train_dataset", list),
    ("len", "train_dataset", lambda data: data.append(data[0]) or data),
    ("target_delta", "privacy.target_delta", halved),
    ("noise_multiplier", "privacy.noise_multiplier", halved),
    ("seed", "args.seed", lambda x: x + 1),
    ("privacy_seed", "privacy.privacy_seed", lambda x: x + 1),
    ("noise_multiplier", "_training.optimizer.noise_multiplier", halved),
    ("max_grad_norm", "_training.optimizer.max_grad_norm", twice),
    ("expected_batch_size", "_training.optimizer.expected_batch_size", twice),
    ("accountant", "engine.accountant", copy.deepcopy),
    (
        "optimizer",
        "optimizer",
        lambda x: torch.optim.SGD(x.param_groups[0]["params"], 0.1),
    ),
    ("sampling", "_training.sampler.sampling", denser),
    (None, "privacy.log_loss", lambda x: not x),
    (None, "args.logging_steps", twice),
    (None, "control.should_save", lambda x: False),
    (None, "optimizer.param_groups", lambda x: x[0].update(lr=1e-3) or x),
]


class Classifier(nn.Linear):
    def forward(self, x, y):
        logits = super().forward(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


def classifier(folder, data, *callbacks):
    given = dict(max_steps=4, per_device_train_batch_size=2)
    given.update(privacy=dict(privacy_seed=1))
    return trainer_of(folder, Classifier(3, 2), data, *callbacks, **given)


HOOKS = "on_step_end", "on_substep_end", "on_step_begin", "on_pre_optimizer_step"


@pytest.mark.parametrize("hook", HOOKS)
@changes(IN_TRAINER)
def test_a_callback_that_changes_what_a_run_rests_on(
    parameter, path, change, hook, tmp_path
):
    """It is refused before the next step; what a run does not rest on may change."""
    transformers = pytest.importorskip("transformers")
    weights = []

    class Notes(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            weights.append(trainer.model.weight.detach().clone())

    class Changes(transformers.TrainerCallback):
        pass

    def act(self, args, state, control, **kwargs):
        if state.global_step == 2:
            put(path, change)(trainer)

    setattr(Changes, hook, act)
    data = [{"x": torch.randn(3), "y": i % 2} for i in range(8)]
    trainer = classifier(tmp_path, data, Notes(), Changes())
    if parameter is None:
        trainer.train()
        trainer.args.per_device_train_batch_size = 4  # of the next run
        trainer.args.max_steps = 2
        trainer.train()
        assert len(weights) == 6
        return
    just_before = "|have no noise yet|noise would not fit" * (hook == HOOKS[-1])
    with pytest.raises(Refused, match="when training began" + just_before) as caught:
        trainer.train()
    assert just_before or caught.value.parameter == parameter
    assert len(weights) == 2
    assert torch.equal(trainer.model.weight, weights[-1])


def foreign(fetcher):
    return ((([torch.randn(2, 3), torch.zeros(2).long()]), i, 0) for i in range(9))


#: What is changed in Lightning: (trainer, module, callback) are the attributes.
IN_LIGHTNING = [
    ("max_steps", "trainer.fit_loop.epoch_loop.max_steps", lambda x: 9),
    ("max_epochs", "trainer.fit_loop.max_epochs", twice),
    ("limit_train_batches", "trainer.limit_train_batches", lambda x: 2),
    ("accumulate_grad_batches", "trainer.accumulate_grad_batches", lambda x: 2),
    (
        "records",
        "trainer.train_dataloader.dataset.dataset",
        lambda data: data.append(0) or data,
    ),
    (
        "dataset",
        "trainer.train_dataloader.dataset.dataset",
        lambda data: [(torch.ones(3), 0)] * 8,
    ),
    ("noise_multiplier", "privacy._training.optimizer.noise_multiplier", halved),
    ("max_grad_norm", "privacy._training.optimizer.max_grad_norm", twice),
    ("max_grad_norm", "privacy._kwargs", lambda x: {**x, "max_grad_norm": 3.0}),
    ("sampling", "privacy._training.sampler.sampling", denser),
    ("accountant", "privacy.engine.accountant", copy.deepcopy),
    ("criterion", "module.criterion", copy.deepcopy),
    ("criterion", "module.criterion.reduction", lambda x: "sum"),
    ("train_dataloaders", "trainer.fit_loop._data_fetcher.iterator", foreign),
    (None, "module.criterion.ignore_index", lambda x: 7),
]


@changes(IN_LIGHTNING)
@pytest.mark.parametrize("automatic", [True, False])
def test_a_lightning_callback_that_changes_what_a_run_rests_on(
    parameter, path, change, automatic
):
    L = pytest.importorskip("lightning")
    weights = []

    class Changes(L.Callback):
        def on_train_batch_end(self, trainer, module, *given):
            weights.append(module.layer.weight.detach().clone())
            self.trainer, self.module, self.privacy = trainer, module, privacy
            if len(weights) == 2:
                put(path, change)(self)

    given = nn.Linear(3, 2), None, Changes()
    trainer, module, privacy = lightning_of(*given, automatic=automatic, seed=1)
    data = [(torch.randn(3), i % 2) for i in range(8)]
    with refused({None: None}.get(parameter, "")) as caught:
        trainer.fit(module, DataLoader(data, batch_size=2))
    assert len(weights) == (2 if parameter else 4)
    if parameter:
        assert caught.value.parameter == parameter
        assert torch.equal(module.layer.weight, weights[-1])


def test_copies_are_refused_by_trainers_and_lightning(tmp_path):
    with pytest.raises(Refused, match="Records 3 and 8") as caught:
        classifier(tmp_path, [*LIST, LIST[3]])
    assert caught.value.parameter == "train_dataset"
    trainer, module, _ = lightning_of(nn.Linear(3, 2), None)
    with pytest.raises(Refused, match="Records 0 and 1") as caught:
        trainer.fit(module, DataLoader(part(2, 2, 1), batch_size=2))
    assert caught.value.parameter == "train_dataloaders"
