"""Whole runs: what an observer sees of them is what their statements say.

For each front end, and each way to use draws again, the records that the data set gave,
the steps of the plain optimizer and the noise in the weights are compared with the
statement.
"""

import itertools
import random

import pytest
import torch
from opacus.accountants import create_accountant
from opacus.grad_sample import GradSampleModule
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

from opacus_ext import PrivacyEngine, Refused
from opacus_ext.losses import PerSample
from opacus_ext.optimizers import Banded
from opacus_ext.statement import read_statement
from tests.zoo import every_mode

from .front_ends import lightning_of, trainer_of
from .observer import LR, RECORDS, Model, Observer, steps_of

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE, SIGMA, BOUND, DELTA, STEPS = 16, 1.5, 0.3, 1e-3, 12
RATE = SIZE / RECORDS


class Run:
    """A run of ``make_private``, observed."""

    def __init__(self, mode="ghost_bk", observer=None, prepare=None, **kwargs):
        self.seen = seen = observer or Observer()
        engine = kwargs.pop("engine", None)
        self.engine = engine or PrivacyEngine(accountant="prv_bounds")
        workers = kwargs.pop("workers", 0)
        loader = DataLoader(seen, batch_size=SIZE, num_workers=workers)
        given = seen.model, seen.optimizer, loader
        module, optimizer, loader = prepare(*given) if prepare else given
        chosen = dict(noise_multiplier=SIGMA, max_grad_norm=BOUND, **kwargs)
        self.module, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=module,
            optimizer=optimizer,
            data_loader=loader,
            criterion=PerSample(),
            grad_sample_mode=mode,
            **chosen,
        )
        self.criterion = criterion[0] if criterion else torch.mean

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(self.module(x), y, reduction="none")
        self.criterion(losses).backward()
        self.optimizer.step()

    def physical(self):
        return BatchMemoryManager(
            data_loader=self.loader, max_physical_batch_size=5, optimizer=self.optimizer
        )

    def content(self):
        return self.engine.privacy_statement(delta=DELTA).content

    def check(self, replays=0):
        self.seen.check(self.engine, BOUND, SIZE, replays)


# -- loops that are the user's ---------------------------------------------------------


def plainly(run, make=iter):
    for _ in range(STEPS // 4):
        for batch in make(run.loader):
            run.step(batch)


def left_early(run):
    for _ in range(STEPS // 2):
        for batch in itertools.islice(run.loader, 2):
            run.step(batch)


def physically(run):
    for _ in range(STEPS // 4):
        with run.physical() as loader:
            for batch in loader:
                run.step(batch)


@every_mode
@pytest.mark.parametrize("loop", [plainly, left_early, physically])
def test_a_loop(mode, loop):
    run = Run(mode)
    loop(run)
    run.check()


def test_draws_that_are_made_before_they_are_used():
    """The batches of an epoch are made before the first step."""
    run = Run("hooks")
    plainly(run, list)
    content = run.content()
    assert content["holds"] == "yes" and content["steps"] == len(run.seen.steps)


# -- draws that come back --------------------------------------------------------------


def cycled(run):
    for batch in itertools.islice(itertools.cycle(run.loader), STEPS):
        run.step(batch)


def one_batch(run):
    """As one tests whether a model can learn anything."""
    batch = next(iter(run.loader))
    for _ in range(STEPS):
        run.step(batch)


def list_again(run, form=list):
    batches = list(run.loader)
    for _ in range(STEPS // 4):
        for batch in batches:
            run.step(form(batch))


def at_random(run):
    batches, chooses = list(run.loader), random.Random(0)
    for _ in range(STEPS):
        run.step(chooses.choice(batches))


def cloned(batch):
    """What goes to another device is in other tensors."""
    return [x.clone() for x in batch]


def copied(run):
    list_again(run, cloned)


def seeded(run, form=list):
    for _ in range(STEPS // 4):
        torch.manual_seed(3)
        run.loader.batch_sampler.generator = None
        for batch in run.loader:
            run.step(form(batch))


def seeded_and_copied(run):
    seeded(run, cloned)


def in_turn(run):
    """Each batch twice in a row."""
    for batch in run.loader:
        run.step(batch)
        run.step(batch)


def epsilon_of(*history):
    accountant = create_accountant("prv_bounds")
    accountant.history = list(history)
    return accountant.get_epsilon(DELTA)


AGAIN = {
    **dict.fromkeys((cycled, list_again, at_random, copied, seeded), STEPS - 4),
    **{seeded_and_copied: STEPS - 4, one_batch: STEPS - 1, in_turn: 4},
}


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("loop", AGAIN, ids=lambda x: x.__name__)
def test_a_draw_that_comes_back(mode, loop):
    """It trains, is told once, and is counted as a step on all records."""
    run = Run(mode)
    with pytest.warns(UserWarning, match="no new draw") as caught:
        loop(run)
    assert sum("no new draw" in str(w.message) for w in caught) == 1
    content, steps = run.content(), steps_of(run.content())
    assert content["holds"] == "no" and content["epsilon"] is None
    assert "no new draw" in run.engine.privacy_statement(delta=DELTA).text
    assert steps.pop(RATE) <= 5 and steps.pop(1.0) >= AGAIN[loop] and not steps
    least = epsilon_of((SIGMA, RATE, 4), (SIGMA, 1.0, AGAIN[loop] - 1))
    assert run.engine.get_epsilon(DELTA) >= least
    assert content["epsilon_if_poisson"] >= least


@pytest.mark.parametrize("loop", [cycled, in_turn])
def test_a_draw_that_comes_back_to_correlated_noise(loop):
    run = Run(noise=Banded(2, steps=STEPS))
    with pytest.raises(Refused, match="no new draw"):
        loop(run)


def test_parts_of_a_draw_that_come_back():
    """Physical batches of a second round are steps of their own."""
    run = Run()
    with run.physical() as loader:
        for batch in itertools.islice(itertools.cycle(loader), 40):
            run.step(batch)
    replays = len(run.seen.steps) - 4
    assert replays > 10
    run.check(replays)


def test_draws_by_workers():
    run = Run(workers=2)
    plainly(run)
    assert run.content()["holds"] == "yes"
    assert steps_of(run.content()) == {RATE: len(run.seen.steps)}
    run = Run(workers=2)
    cycled(run)
    steps = steps_of(run.content())
    assert run.content()["holds"] == "no"
    assert steps[RATE] <= 5 and steps[1.0] >= STEPS - 4


# -- front ends ------------------------------------------------------------------------

PRIVACY = dict(noise_multiplier=SIGMA, accountant="prv_bounds")


def by_accelerate():
    """Its loader takes a batch before the step on the one before."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    run = Run("ghost_bk", Observer(ahead=True), accelerator.prepare)
    plainly(run)
    return run.seen, run.engine


def by_trainer(folder, observer=None, cls=None, resume=None, **given):
    observer = observer or Observer(named=True)
    trainer = trainer_of(
        *(folder, observer.model, observer),
        cls=cls,
        optimizer=observer.optimizer,
        privacy=dict(PRIVACY, per_sample_max_grad_norm=BOUND),
        max_steps=STEPS,
        learning_rate=LR,
        lr_scheduler_type="constant",
        per_device_train_batch_size=SIZE // 2,
        **given,
    )
    trainer.train(resume_from_checkpoint=resume)
    return observer, trainer.engine


def by_lightning(observer=None, *callbacks):
    observer = observer or Observer()
    given = observer.model, observer.optimizer, *callbacks
    trainer, module, privacy = lightning_of(
        *given, steps=STEPS, max_grad_norm=BOUND, **PRIVACY
    )
    trainer.fit(module, DataLoader(observer, batch_size=SIZE))
    return observer, privacy.engine


@pytest.mark.parametrize("front", [by_accelerate, by_trainer, by_lightning])
def test_front_ends(front, tmp_path):
    observer, engine = front(*[tmp_path] * (front is by_trainer))
    observer.check(engine, BOUND, SIZE)


def test_trainer_that_replays_a_draw(tmp_path):
    """Where the loop is ours, a draw that comes back is refused."""
    from opacus_ext.trainer import PrivateTrainer

    class Replays(PrivateTrainer):
        kept = None

        def get_batch_samples(self, *args):
            self.kept = self.kept or super().get_batch_samples(*args)
            return self.kept

    class TwoPasses(PrivateTrainer):
        def training_step(self, *args):
            return super().training_step(*args) + super().training_step(*args)

    for cls, most in (Replays, 1), (TwoPasses, 0):
        observer = Observer(named=True)
        with pytest.raises(Refused, match="came back"):
            by_trainer(tmp_path, observer, cls)
        assert len(observer.steps) == most


def test_lightning_that_replays_a_draw():
    L = pytest.importorskip("lightning.pytorch")

    class Replays(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, i):
            trainer.fit_loop._data_fetcher.iterator = itertools.repeat((batch, i, 0))

    observer = Observer()
    with pytest.raises(Refused, match="came back"):
        by_lightning(observer, Replays())
    assert len(observer.steps) == 1


# -- runs that go on -------------------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("with_optimizer", [True, False])
def test_a_run_that_goes_on(before, with_optimizer, tmp_path):
    """
    Neither noise nor draws are those of before: in the same process, seeded as the
    first, whether the checkpoint is loaded before make_private or after it.
    """
    torch.manual_seed(0)
    first, path = Run(), str(tmp_path / "checkpoint.pt")
    plainly(first)
    given = dict(module=first.module, optimizer=first.optimizer)
    first.engine.save_checkpoint(path=path, **given)
    torch.manual_seed(0)
    if before:
        engine = PrivacyEngine(accountant="prv_bounds")
        engine.load_checkpoint(path=path, module=GradSampleModule(Model()))
        second = Run(engine=engine)
    else:
        second = Run()
        given = dict(optimizer=second.optimizer) if with_optimizer else {}
        second.engine.load_checkpoint(path=path, module=second.module, **given)
    plainly(second)
    second.seen.steps[:0] = first.seen.steps
    second.check()
    assert read_statement(path, DELTA).content["steps"] == STEPS


def test_trainer_that_goes_on(tmp_path):
    saves = dict(save_strategy="steps", save_steps=STEPS // 2, seed=3)
    first, _ = by_trainer(tmp_path, **saves)
    resume = str(tmp_path / f"checkpoint-{STEPS // 2}")
    second, engine = by_trainer(tmp_path, resume=resume, **saves)
    same, other = first.steps[STEPS // 2 :], second.steps
    assert [step.records for step in same] == [step.records for step in other]
    for one, two in itertools.product(same, other):
        assert not torch.equal(one.moved, two.moved)
    second.steps[:0] = first.steps[: STEPS // 2]
    second.check(engine, BOUND, SIZE)
