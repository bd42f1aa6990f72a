"""Attacks by what an epsilon can hide, a table for each kind."""

import copy
import itertools

import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import Refused
from opacus_ext.losses import PerSample
from opacus_ext.statement import read_statement
from tests.common import assert_same, clipped_sum, make_private, oracle, square_loss
from tests.zoo import every_mode

pytestmark = pytest.mark.filterwarnings("ignore")
C, N, DELTA = 1.0, 6, 1e-3


# -- two passes over records that were drawn once --------------------------------------


def accumulated(private, parts):
    private.optimizer.zero_grad()
    for part in parts:
        private.backward(part, square_loss)
    private.optimizer.step()


def skipped(private, parts):
    """As BatchMemoryManager accumulates."""
    for i, part in enumerate(parts, 1):
        private.optimizer.signal_skip_step(i < len(parts))
        private.step(part, square_loss)


class Drawn:
    """A private layer, and the records of a draw of its loader."""

    def __init__(self, mode, records=None):
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double()
        records = torch.randn(N, 3).double() if records is None else records
        given = dict(batch_size=N, dataset=TensorDataset(records), max_grad_norm=C)
        self.private = make_private(self.model, mode, lr=0.0, **given)
        self.batches = [x for (x,) in self.private.loader]

    def check(self, act, loss=square_loss):
        """What ``act(private, x)`` releases is the clipped sum of the first draw."""
        x = self.batches[0]
        expected = clipped_sum(oracle(self.model, x, loss), "flat", C)
        act(self.private, x)
        found = {n: p.grad * N for n, p in self.model.named_parameters()}
        assert_same(found, expected, 1e-8)


TWICE = {
    "same": lambda x: (x, x),
    "copied": lambda x: (x, x.clone()),
    "viewed": lambda x: (x, x[:]),
    "overlapping": lambda x: (x[:-1], x[1:]),
    "a part again": lambda x: (x, x[:1]),
    "turned": lambda x: (x, x.flip(0)),
    "two views of each": lambda x: (x + 0.1, x - 0.1),
}


@every_mode
@pytest.mark.parametrize("loop", [accumulated, skipped])
@pytest.mark.parametrize("parts", TWICE)
def test_records_are_clipped_once(mode, loop, parts):
    drawn = Drawn(mode)
    private, before = drawn.private, copy.deepcopy(drawn.model.state_dict())
    with pytest.raises(Refused, match="second backward pass|a second time"):
        loop(private, TWICE[parts](drawn.batches[0]))
    assert_same(drawn.model.state_dict(), before, 0)
    assert not private.engine.accountant.history
    private.optimizer.zero_grad()
    private.optimizer.drop_logical_batch()
    drawn.batches = [x for (x,) in private.loader]
    drawn.check(lambda private, x: private.step(x, square_loss))


def both(model, x):
    """A loss that calls the model twice is one pass, of which a record has one part."""
    return square_loss(model, x) + square_loss(model, 2 * x)


ONES = torch.ones(2 * N, 3).double()
modes_of_hooks = "hooks", "functorch"


@every_mode
def test_parts_of_a_draw_are_added(mode):
    """Also of records whose bits are equal, if the loader tells."""
    Drawn(mode).check(lambda private, x: skipped(private, (x[:2], x[2:])))
    Drawn(mode).check(lambda private, x: skipped(private, x.split(1)))
    Drawn(mode, ONES[:N]).check(lambda p, x: skipped(p, x.clone().chunk(2)))
    if mode in modes_of_hooks:
        Drawn(mode).check(lambda private, x: private.step(x, both), both)


@pytest.mark.parametrize("mode", modes_of_hooks)
def test_other_draws_are_accumulated(mode):
    """Where Opacus allows it; equal records may be drawn by both."""
    drawn = Drawn(mode, ONES)
    drawn.check(lambda private, x: accumulated(private, drawn.batches))
    ((_, rate, steps),) = drawn.private.engine.accountant.history
    assert (rate, steps) == (1.0, 1)


@every_mode
def test_another_optimizer_on_clipped_sums(mode):
    """In hooks, ``p.grad`` is of the whole batch, and is what Opacus leaves there."""
    drawn = Drawn(mode)
    private, before = drawn.private, copy.deepcopy(drawn.model.state_dict())
    other = torch.optim.SGD(drawn.model.parameters(), 0.1)
    private.optimizer.zero_grad()
    private.backward(drawn.batches[0], square_loss)
    if mode in modes_of_hooks:
        return
    with pytest.raises(Refused, match="have no noise yet"):
        other.step()
    assert_same(drawn.model.state_dict(), before, 0)
    private.optimizer.step()
    private.optimizer.zero_grad()
    other.step()  # of nothing


# -- statements ------------------------------------------------------------------------


class Run:
    """A run with noise, and its statement."""

    def __init__(self, engine=None, model=None, rate=0.25, records=40, **kwargs):
        self.model = model or nn.Linear(3, 1)
        self.engine = engine or PrivacyEngine(accountant="prv_bounds")
        made = self.engine.make_private(
            module=self.model,
            optimizer=torch.optim.SGD(self.model.parameters(), 0.1),
            data_loader=DataLoader(
                TensorDataset(torch.randn(records, 3)), int(rate * records)
            ),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            criterion=PerSample(),
            **{"grad_sample_mode": "hooks", **kwargs},
        )
        self.module, self.optimizer, self.loader = made[0], made[1], made[-1]
        self.criterion = made[2] if len(made) > 3 else torch.mean

    def train(self, steps=4, loader=None, form=None):
        for (x,) in itertools.islice(loader or self.loader, steps):
            self.optimizer.zero_grad()
            outputs = self.module(x if form is None else form(x))
            self.criterion(outputs[:, 0]).backward()
            self.optimizer.step()
        return self

    def at(self, path):
        return dict(path=str(path), module=self.module, optimizer=self.optimizer)

    def saved(self, folder):
        """The content of the statement of a checkpoint, and its path."""
        self.engine.save_checkpoint(**self.at(folder / "run.pt"))
        return read_statement(folder / "run.pt", DELTA).content, folder / "run.pt"

    def loads(self, path):
        self.engine.load_checkpoint(**self.at(path))
        return self

    @property
    def stated(self):
        return self.engine.privacy_statement(delta=DELTA).content


def epsilon(*history):
    accountant = create_accountant("prv_bounds")
    accountant.history = list(history)
    return accountant.get_epsilon(DELTA)


def fixed(run):
    """Another loader, whose batches all have one size."""
    batches = DataLoader(TensorDataset(torch.randn(400, 3)), 5)
    run.train(steps=40, loader=batches)


def of_a_list(run):
    run.train(steps=9, loader=list(run.loader) * 3)


def at_a_larger_rate(run):
    run.loader.batch_sampler.sample_rate *= 2
    run.train(2)


BROKEN = {
    fixed: "no new draw",
    of_a_list: "no new draw",
    at_a_larger_rate: "probability 0.5",
}


@pytest.mark.parametrize("loop", BROKEN, ids=lambda x: x.__name__)
def test_a_warning_is_in_the_statement(loop, tmp_path):
    run = Run()
    assert run.train(4).stated["holds"] == "yes"
    with pytest.warns(UserWarning, match=BROKEN[loop]):
        loop(run)
    for again in range(2):
        content = run.stated
        assert content["holds"] == "no" and content["epsilon"] is None
        assert any(BROKEN[loop] in note for note in content["notes"])
        run.train(2)
    content, path = run.saved(tmp_path)
    assert content["holds"] == "no"
    assert any(BROKEN[loop] in note for note in content["notes"])
    assert Run().loads(path).train(2).stated["holds"] == "no"


def test_a_run_that_never_takes_from_its_loader():
    """One step may be a smoke test. It is told of, and the guarantee holds yet."""
    run, raw = Run(), DataLoader(TensorDataset(torch.randn(40, 3)), 10)
    with pytest.warns(UserWarning, match="no batch from the loader"):
        run.train(1, loader=raw)
    assert run.stated["holds"] == "yes"
    run.train(3, loader=raw)
    assert run.stated["holds"] == "no" and run.stated["epsilon"] is None
    assert run.stated["steps"] == 4  # and trains as with Opacus


def test_an_accountant_of_one_rate_says_what_it_can_not_count():
    run = Run(engine=PrivacyEngine(accountant="gdp"))
    with pytest.warns(UserWarning, match='"gdp".*too small'):
        run.train(steps=9, loader=list(run.loader) * 3)
    assert run.stated["holds"] == "no"


def cleared(optimizer, hook):
    optimizer.step_hook = None
    optimizer.attach_step_hook(hook)


@pytest.mark.parametrize(
    "change",
    [
        cleared,
        lambda optimizer, hook: setattr(optimizer, "step_hook", hook),
        lambda optimizer, hook: optimizer.attach_step_hook(hook),
    ],
)
@every_mode
def test_hooks_that_users_set_leave_the_count(change, mode):
    run, called = Run(grad_sample_mode=mode), []
    change(run.optimizer, called.append)
    run.train(3)
    assert run.engine.accountant.history == [(1.0, 0.25, 3)]
    assert len(called) == 3


def test_a_checkpoint_has_what_others_have_spent(tmp_path):
    """Of other engines, which trained the same parameters, and what is not covered."""
    first = Run().train(4)
    first.module.cleanup()
    content, path = Run(model=first.model).train(3).saved(tmp_path)
    whole = epsilon((1.0, 0.25, 7))
    assert content["epsilon"] == pytest.approx(whole)
    third = Run().loads(path)
    assert third.stated["epsilon"] == pytest.approx(whole)
    third.train(2)
    assert third.stated["epsilon"] == pytest.approx(epsilon((1.0, 0.25, 9)))


def test_a_checkpoint_has_what_its_accountant_has_lost(tmp_path):
    run = Run().train(4)
    run.engine.accountant.history.clear()
    content, _ = run.saved(tmp_path)
    assert content["epsilon"] == pytest.approx(epsilon((1.0, 0.25, 4)))


def numbers_of(run):
    """The records of the next draw, and the noise of a step on them."""
    torch.manual_seed(1)
    batch = next(iter(run.loader))[0]
    before = run.model.weight.detach().clone()
    run.optimizer.zero_grad()
    run.module(batch * 0).mean().backward()
    run.optimizer.step()
    return batch, run.model.weight.detach() - before


def by_its_accountant(run, other):
    """The steps of another run, given to an accountant by hand."""
    engine = PrivacyEngine(accountant="prv_bounds")
    engine.accountant.load_state_dict(other.engine.accountant.state_dict())
    torch.manual_seed(2)
    return Run(engine=engine, model=nn.Linear(3, 1))


def by_its_optimizer(run, other):
    run.optimizer.load_state_dict(other.optimizer.state_dict())
    return run


@pytest.mark.parametrize("load", [by_its_accountant, by_its_optimizer])
def test_a_state_that_is_loaded_by_hand(load):
    """Records and noise are none of before."""
    torch.manual_seed(2)
    first = Run(records=400, rate=0.1)
    expected = numbers_of(first)
    torch.manual_seed(2)
    again = load(Run(records=400, rate=0.1), first)
    found = numbers_of(again)
    for one, two in zip(found, expected):
        assert one.shape != two.shape or not torch.equal(one, two)


def test_two_engines_train_the_same_parameters():
    first = Run().train(4)
    first.module.cleanup()
    second = Run(model=first.model).train(3)
    expected = epsilon((1.0, 0.25, 7))
    for run in first, second:
        assert run.stated["epsilon"] == pytest.approx(expected)
        assert run.stated["steps"] == 7
        assert any("other engines" in note for note in run.stated["notes"])
    assert second.engine.get_epsilon(DELTA) < expected  # of its own steps


@pytest.mark.parametrize(
    "change",
    [
        lambda engine: engine.accountant.history.clear(),
        lambda engine: setattr(engine, "accountant", create_accountant("prv_bounds")),
        lambda engine: setattr(engine, "accountant", create_accountant("rdp")),
        lambda engine: engine.accountant.load_state_dict(
            create_accountant("prv_bounds").state_dict()
        ),
        lambda engine: engine.accountant.history.__setitem__(0, (9.0, 0.25, 4)),
    ],
)
def test_an_accountant_that_is_replaced_forgets_nothing(change):
    run = Run().train(4)
    least = run.engine.get_epsilon(DELTA)
    change(run.engine)
    assert run.engine.get_epsilon(DELTA) >= least
    content = run.stated
    assert content["epsilon"] >= least and content["steps"] >= 4
    assert any("the accountant does not have" in note for note in content["notes"])
    run.train(2)
    more = epsilon((1.0, 0.25, 6)) - 1e-9
    assert run.engine.get_epsilon(DELTA) >= more
    assert run.stated["epsilon"] >= more


@pytest.mark.parametrize("rate, counts", [(0.5, 0.5), (0.25, 0.25), (0.1, 0.25)])
def test_the_loader_of_another_engine(rate, counts):
    """The larger rate is counted."""
    torch.manual_seed(1)
    run, other = Run(records=200), Run(rate=rate, records=20)
    run.train(2)
    run.train(2, loader=other.loader)
    steps = {p["sample_rate"]: p["steps"] for p in run.stated["phases"]}
    assert sum(steps.values()) == 4
    assert max(steps) == counts
    assert run.stated["holds"] == ("no" if rate > 0.25 else "yes")


def test_runs_that_are_seeded_alike():
    """Their noise is the same, as Opacus's is; what that means is told and stated."""

    def is_told(run):
        return any("the same" in text for text in run.stated["not_covered"])

    torch.manual_seed(3)
    first = Run().train(2)
    torch.manual_seed(3)
    second = Run()
    with pytest.warns(UserWarning, match="their noise is the same"):
        second.train(2)
    others = Run().train(2), Run().train(2)
    assert is_told(second) and not any(map(is_told, (first, *others)))
