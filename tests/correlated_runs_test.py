"""Runs with correlated noise that are interrupted, go back, or take others' batches."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext import PrivacyEngine
from opacus_ext.data import CyclicPoisson
from opacus_ext.data.draws import Draws
from opacus_ext.refused import Refused
from opacus_ext.strategies import (
    Banded,
    BufferedToeplitz,
    InverseBanded,
    LambdaCGD,
    Strategy,
)
from opacus_ext.strategies.strategy import Filter

pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = CyclicPoisson(bands=5, expected_batch_size=8)
BANDED, BUFFERS = Banded(5, 40), BufferedToeplitz(2, 40)
LAMBDA = LambdaCGD(40, correlation=0.8)


class Private:
    """A model, its optimizer and its loader, of which steps take the batches."""

    def __init__(self, noise, engine=None, sampling=PARTS, workers=0):
        self.engine = engine or PrivacyEngine()
        model, data = nn.Linear(3, 1), TensorDataset(torch.ones(40, 3))
        self.model, self.optimizer, self.loader = self.engine.make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=8, num_workers=workers),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sampling=None if noise == "independent" else sampling,
            noise=noise,
        )
        self.batches = iter(())

    @property
    def noise(self):
        return self.optimizer.correlated

    @property
    def spent(self):
        """What accountants add up: the steps, each over its squared noise."""
        history = self.engine.accountant.history
        return sum(steps / noise**2 for noise, _, steps in history)

    def next(self):
        batch = next(self.batches, None)
        if batch is None:
            self.batches = iter(self.loader)
            batch = next(self.batches)
        return batch[0]

    def step(self, x):
        self.optimizer.zero_grad()
        self.model(x).sum().backward()
        self.optimizer.step()

    def train(self, steps):
        for _ in range(steps):
            self.step(self.next())


@pytest.mark.parametrize("noise", [BANDED, LAMBDA, BUFFERS])
def test_a_step_that_failed_after_its_noise_is_made_anew_as_the_same_step(noise):
    """So a record's steps stay apart. The round counts again: both may be seen."""
    run = Private(noise)
    run.train(3)
    before, x = run.spent, run.next()

    def fails(optimizer):
        optimizer.step_hook = None
        raise KeyboardInterrupt

    run.optimizer.attach_step_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        run.step(x)
    assert run.noise.taken == 3
    if not noise.can_redraw:
        with pytest.raises(Refused, match="last checkpoint"):
            run.step(x)
        return
    run.step(x)
    assert run.noise.taken == 4 and run.spent == pytest.approx(2 * before)
    run.train(1)  # the loader agrees
    assert run.noise.taken == 5


def test_rows_are_drawn_again_only_if_that_makes_the_matrix_less():
    """Of ``C^-1`` a positive entry is missing in such a row, and columns grow."""
    grows = InverseBanded(6, 40, momentum=0.9, separation=10)
    assert max(grows.filter.numerator[1:]) > 0 and not grows.can_redraw
    assert InverseBanded(6, 40).can_redraw and InverseBanded(1, 40).can_redraw


@pytest.mark.parametrize("noise", [BANDED, LAMBDA])
def test_a_history_without_the_round_that_is_under_way_counts_it(noise, tmp_path):
    """A checkpoint of model and accountant alone, while the optimizer goes on."""
    run = Private(noise)
    run.train(2)
    path = tmp_path / "run.pt"
    run.engine.save_checkpoint(path=path, module=run.model)
    run.train(6)
    both = run.spent
    run.engine.load_checkpoint(path=path, module=run.model)
    assert run.spent < both
    run.train(1)
    assert run.spent == pytest.approx(both)


@pytest.mark.parametrize("noise", [BANDED, LAMBDA])
def test_two_runs_from_one_state_count_what_both_have_taken(noise):
    """In one process, by one accountant, whichever optimizer has the state."""
    first = Private(noise)
    first.train(2)
    state = copy.deepcopy(first.optimizer.state_dict())
    first.train(2)
    second = Private(noise, first.engine)
    second.optimizer.load_state_dict(state)
    second.train(2)
    history = first.engine.accountant.history
    kind = history[0][:2]
    assert sum(steps for *of, steps in history if tuple(of) == kind) == 2
    other = Private(noise)  # of another process, which has not gone on
    state["opacus_ext_correlated_noise"]["stream"] = 1
    other.optimizer.load_state_dict(state)
    other.train(2)
    assert other.spent == 0  # its round is in the accountant that it would load


@pytest.mark.parametrize("noise", [BANDED, BUFFERS])
def test_later_steps_leave_a_state_as_it_is(noise):
    run = Private(noise)
    run.train(3)
    state = run.optimizer.state_dict()["opacus_ext_correlated_noise"]
    before = copy.deepcopy(state["past"])
    run.train(2)
    assert all(torch.equal(x, before[name]) for name, x in state["past"].items())


@pytest.mark.parametrize("noise, drawn", [(BANDED, "independent"), (LAMBDA, BANDED)])
def test_batches_of_another_loader_are_refused(noise, drawn):
    """Its draws may come back sooner than correlated noise is accounted for."""
    run, other = Private(noise), Private(drawn)
    run.next()
    with pytest.raises(Refused, match="another loader.*drawn again so soon"):
        run.step(other.next())


def test_a_batch_that_is_left_out_is_refused_though_workers_draw_ahead():
    run = Private(BANDED, workers=2)
    with pytest.raises(Refused, match="1 batches that the loop has taken had no step"):
        for number, (x,) in enumerate(run.loader):
            if number != 2:
                run.step(x)
    assert run.noise.taken == 2


def test_independent_noise_on_draws_from_parts_counts_as_on_all_records():
    run, other = Private("independent"), Private(BANDED)
    run.next()
    run.step(other.next())
    assert run.engine.accountant.history == [(1.0, 1.0, 1)]


@pytest.mark.parametrize("noise", [BANDED, LAMBDA])
def test_noise_of_an_earlier_run_does_not_come_back(noise):
    """Also if that was counted as releases on all records."""
    seeds, history = [], None
    for _ in range(2):
        torch.manual_seed(0)
        engine = PrivacyEngine()
        if history is not None:
            engine.accountant.load_state_dict(history)
        run = Private(noise, engine)
        seeds.append(run.optimizer.noise_state()["seed"])
        run.train(1)
        history = copy.deepcopy(engine.accountant.state_dict())
    assert seeds[0] != seeds[1]


def test_an_interrupt_leaves_no_round_uncounted(monkeypatch):
    """Neither before nor after the accountant has it."""
    for after in (False, True):
        run = Private(BANDED)
        accountant, x = run.engine.accountant, run.next()
        step = accountant.step

        def fails(**entry):
            if after:
                step(**entry)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(accountant, "step", fails)
            with pytest.raises(KeyboardInterrupt):
                run.step(x)
        run.step(x)
        assert accountant.history == [(1.0, 1.0, 1)]


def test_processes_that_have_taken_other_steps_are_refused(monkeypatch):
    """One has loaded a checkpoint: the others would draw from another part."""
    draws = Draws(PARTS, 40, place=(1, 2))
    draws.taken = lambda: 0

    def of_process_0(given):
        given[3] = 7

    monkeypatch.setattr("torch.distributed.broadcast_object_list", of_process_0)
    with pytest.raises(Refused, match="after 0 steps.*after 7. .*a checkpoint in all"):
        next(iter(draws))


def test_a_statement_of_steps_on_all_records_tells_of_the_noise():
    run = Private(LAMBDA, sampling=CyclicPoisson(bands=1, expected_batch_size=8))
    run.train(2)
    text = run.engine.privacy_statement(1e-3).text
    assert "After 2 steps" in text and "noise that is correlated over all" in text
    assert "draw from all of the data. What is counted are single steps, each" in text


@dataclass(frozen=True)
class Own(Strategy):
    """A strategy of a user."""

    steps: int
    momentum: float = 0.0

    @property
    def filter(self):
        return Filter((1.0, -0.5), (1.0,))


def test_a_strategy_of_a_user_goes_on():
    run = Private(Own(40))
    run.train(2)
    state = run.optimizer.state_dict()
    other = Private(Own(40))
    other.optimizer.load_state_dict(state)
    assert other.noise.taken == 2
    with pytest.raises(Refused, match=r"noise of Own\(steps=40, momentum=0.0\) and 5"):
        Private(Own(30)).optimizer.load_state_dict(state)
