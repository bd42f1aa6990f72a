"""Whole runs: what an observer sees of them is what their statements say.

For each front end, and each way to use draws again, the records that the data set gave,
the steps of the plain optimizer and the noise in the weights are compared with the
statement.
"""

import itertools
import random
from collections import Counter

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
from tests.training import SHORT

from .observer import LR, RECORDS, Model, Observer

pytestmark = pytest.mark.filterwarnings("ignore")
SIZE, SIGMA, BOUND, DELTA, STEPS = 16, 1.5, 0.3, 1e-3, 12
RATE = SIZE / RECORDS
MODES = pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"])


class Run:
    """A run of ``make_private``, observed."""

    def __init__(self, mode, observer=None, prepare=None, **kwargs):
        self.seen = observer or Observer()
        seen = self.seen
        self.engine = kwargs.pop("engine", None) or PrivacyEngine(accountant="prv")
        loader = DataLoader(
            seen.data, batch_size=SIZE, num_workers=kwargs.pop("workers", 0)
        )
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
        self.criterion = criterion[0] if criterion else None

    def step(self, batch):
        x, y = batch
        self.optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(self.module(x), y, reduction="none")
        if self.criterion is None:
            losses.mean().backward()
        else:
            self.criterion(losses).backward()
        self.optimizer.step()

    def stated(self):
        """The number of steps by rate, and whether the guarantee holds."""
        content = self.engine.privacy_statement(delta=DELTA).content
        steps = Counter()
        for phase in content["phases"]:
            steps[phase["sample_rate"]] += phase["steps"]
        return {**steps, "holds": content["holds"]}

    def check(self, replays=0):
        content = self.engine.privacy_statement(delta=DELTA).content
        self.seen.check(content, BOUND, SIZE, replays)
        assert content["holds"] == "no" or content[
            "epsilon"
        ] == self.engine.get_epsilon(DELTA)


# -- loops that are the user's ---------------------------------------------------------


def plainly(run):
    for _ in range(STEPS // 4):
        for batch in run.loader:
            run.step(batch)


def left_early(run):
    for _ in range(STEPS // 2):
        for batch in itertools.islice(run.loader, 2):
            run.step(batch)


def listed(run):
    """The batches of an epoch are made before the first step."""
    for _ in range(STEPS // 4):
        for batch in list(run.loader):
            run.step(batch)


def physically(run):
    given = dict(max_physical_batch_size=5, optimizer=run.optimizer)
    for _ in range(STEPS // 4):
        with BatchMemoryManager(data_loader=run.loader, **given) as loader:
            for batch in loader:
                run.step(batch)


LOOPS = [plainly, left_early, physically]


@MODES
@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop(mode, loop):
    run = Run(mode)
    loop(run)
    run.check()


def test_draws_that_are_made_before_they_are_used():
    run = Run("hooks")
    listed(run)
    run.seen.steps = [
        step._replace(records=[i]) for i, step in enumerate(run.seen.steps)
    ]
    content = run.engine.privacy_statement(delta=DELTA).content
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


def list_again(run):
    batches = list(run.loader)
    for _ in range(STEPS // 4):
        for batch in batches:
            run.step(batch)


def at_random(run):
    batches, chooses = list(run.loader), random.Random(0)
    for _ in range(STEPS):
        run.step(chooses.choice(batches))


def copied(run):
    """What goes to another device is in other tensors."""
    batches = list(run.loader)
    for _ in range(STEPS // 4):
        for batch in batches:
            run.step([x.clone() for x in batch])


def seeded(run, form=list):
    for _ in range(STEPS // 4):
        torch.manual_seed(3)
        run.loader.batch_sampler.generator = None
        for batch in run.loader:
            run.step(form(batch))


def seeded_and_copied(run):
    seeded(run, lambda batch: [x.clone() for x in batch])


def in_turn(run):
    """Each batch twice in a row."""
    for batch in run.loader:
        run.step(batch)
        run.step(batch)


def epsilon_of(*history):
    accountant = create_accountant("prv")
    accountant.history = list(history)
    return accountant.get_epsilon(DELTA)


AGAIN = {
    cycled: STEPS - 4,
    one_batch: STEPS - 1,
    list_again: STEPS - 4,
    at_random: STEPS - 4,
    copied: STEPS - 4,
    seeded: STEPS - 4,
    seeded_and_copied: STEPS - 4,
    in_turn: 4,
}


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("loop", AGAIN, ids=lambda x: x.__name__)
def test_a_draw_that_comes_back(mode, loop):
    """It trains, is told once, and is counted as a step on all records."""
    run = Run(mode)
    with pytest.warns(UserWarning, match="no new draw") as caught:
        loop(run)
    assert sum("no new draw" in str(w.message) for w in caught) == 1
    content = run.engine.privacy_statement(delta=DELTA).content
    assert content["holds"] == "no" and content["epsilon"] is None
    assert "no new draw" in run.engine.privacy_statement(delta=DELTA).text
    steps = run.stated()
    assert steps[RATE] <= 5 and steps[1.0] >= AGAIN[loop] and len(steps) == 3
    least = epsilon_of((SIGMA, RATE, 4), (SIGMA, 1.0, AGAIN[loop] - 1))
    assert run.engine.get_epsilon(DELTA) >= least
    assert content["epsilon_if_poisson"] >= least


@pytest.mark.parametrize("loop", [cycled, in_turn])
def test_a_draw_that_comes_back_to_correlated_noise(loop):
    run = Run("ghost_bk", noise=Banded(2, steps=STEPS))
    with pytest.raises(Refused, match="come back"):
        loop(run)


def test_parts_of_a_draw_that_come_back():
    """Physical batches of a second round are steps of their own."""
    run = Run("ghost_bk")
    given = dict(max_physical_batch_size=5, optimizer=run.optimizer)
    with BatchMemoryManager(data_loader=run.loader, **given) as loader:
        for batch in itertools.islice(itertools.cycle(loader), 40):
            run.step(batch)
    replays = len(run.seen.steps) - 4
    assert replays > 10
    run.check(replays)


def test_draws_by_workers():
    run = Run("ghost_bk", workers=2)
    plainly(run)
    assert run.stated() == {"holds": "yes", RATE: len(run.seen.steps)}
    run = Run("ghost_bk", workers=2)
    cycled(run)
    found = run.stated()
    assert found.pop("holds") == "no"
    assert found[RATE] <= 5 and found[1.0] >= STEPS - 4


# -- front ends ------------------------------------------------------------------------


def by_accelerate(observer):
    """Accelerate's loader takes a batch before the step on the one before."""
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    run = Run("ghost_bk", observer, accelerator.prepare)
    plainly(run)
    return run.engine


def by_trainer(observer, folder, cls=None, **given):
    transformers = pytest.importorskip("transformers")
    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    arguments = dict(SHORT, max_steps=STEPS, learning_rate=LR, output_dir=str(folder))
    arguments.update(
        lr_scheduler_type="constant", per_device_train_batch_size=SIZE // 2
    )
    privacy = dict(noise_multiplier=SIGMA, per_sample_max_grad_norm=BOUND)
    privacy.update(target_delta=DELTA, grad_sample_mode="ghost_bk", accountant="prv")
    trainer = (cls or PrivateTrainer)(
        observer.model,
        transformers.TrainingArguments(**{**arguments, **given.pop("arguments", {})}),
        train_dataset=observer.data,
        optimizers=(observer.optimizer, None),
        privacy=PrivacyArguments(**privacy),
    )
    trainer.train(**given)
    return trainer.engine


def by_lightning(observer, *callbacks):
    L = pytest.importorskip("lightning.pytorch")
    from opacus_ext.lightning import PrivacyCallback

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner, self.criterion = observer.model, torch.nn.CrossEntropyLoss()

        def forward(self, x):
            return self.inner(x)

        def training_step(self, batch, i):
            return self.criterion(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return observer.optimizer

    privacy = PrivacyCallback(
        target_delta=DELTA,
        noise_multiplier=SIGMA,
        max_grad_norm=BOUND,
        grad_sample_mode="ghost_bk",
        accountant="prv",
    )
    off = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False)
    off.update(accelerator="cpu", enable_model_summary=False)
    trainer = L.Trainer(callbacks=[privacy, *callbacks], max_steps=STEPS, **off)
    loader = DataLoader(observer.data, batch_size=SIZE)
    trainer.fit(Module(), loader)
    return privacy.engine


def test_accelerate():
    observer = Observer(ahead=1)
    engine = by_accelerate(observer)
    observer.check(engine.privacy_statement(delta=DELTA).content, BOUND, SIZE)


def test_trainer(tmp_path):
    observer = Observer(lambda pair: dict(zip("xy", pair)))
    engine = by_trainer(observer, tmp_path)
    observer.check(engine.privacy_statement(delta=DELTA).content, BOUND, SIZE)


def test_lightning():
    observer = Observer()
    engine = by_lightning(observer)
    observer.check(engine.privacy_statement(delta=DELTA).content, BOUND, SIZE)


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
        observer = Observer(lambda pair: dict(zip("xy", pair)))
        with pytest.raises(Refused, match="came back"):
            by_trainer(observer, tmp_path, cls)
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


def go_on(run, folder, how):
    """A run in the same process that goes on from a checkpoint, seeded as the first."""
    path = str(folder / "checkpoint.pt")
    run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    other = GradSampleModule(Model())
    torch.manual_seed(0)
    if how == "before make_private":
        engine, observer = PrivacyEngine(accountant="prv"), Observer()
        engine.load_checkpoint(path=path, module=other)
        return Run("ghost_bk", observer, engine=engine)
    new = Run("ghost_bk")
    given = dict(path=path, module=new.module)
    if how == "with the optimizer":
        given["optimizer"] = new.optimizer
    new.engine.load_checkpoint(**given)
    return new


RESUMES = "before make_private", "without the optimizer", "with the optimizer"


@pytest.mark.parametrize("how", RESUMES)
def test_a_run_that_goes_on(how, tmp_path):
    """Neither noise nor draws are those of before."""
    torch.manual_seed(0)
    first = Run("ghost_bk")
    plainly(first)
    second = go_on(first, tmp_path, how)
    plainly(second)
    second.seen.steps[:0] = first.seen.steps
    second.check()
    read = read_statement(tmp_path / "checkpoint.pt", DELTA).content
    assert read["steps"] == STEPS


def test_trainer_that_goes_on(tmp_path):
    form, saves = lambda pair: dict(zip("xy", pair)), dict(save_strategy="steps")
    saves.update(save_steps=STEPS // 2, seed=3)
    first, second = Observer(form), Observer(form)
    by_trainer(first, tmp_path, arguments=saves)
    given = dict(resume_from_checkpoint=str(tmp_path / f"checkpoint-{STEPS // 2}"))
    engine = by_trainer(second, tmp_path, arguments=saves, **given)
    same, other = first.steps[STEPS // 2 :], second.steps
    assert [step.records for step in same] == [step.records for step in other]
    for one, two in itertools.product(same, other):
        assert not torch.equal(one.moved, two.moved)
    second.steps[:0] = first.steps[: STEPS // 2]
    second.check(engine.privacy_statement(delta=DELTA).content, BOUND, SIZE)
