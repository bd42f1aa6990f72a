"""Correlated noise in PrivateTrainer and in Lightning's PrivacyCallback.

The stream of noise has tests of its own. Here it must be added once a draw, the draws
be of the parts of the data set in turn, and a run that goes on be the one that was not
stopped.
"""

import math

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, TensorDataset

from opacus_ext.refused import Refused
from opacus_ext.strategies import Banded, BufferedToeplitz, LambdaCGD, Participation
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

from . import lightning_test, trainer_test
from .training import distance, private, weights

L = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")
STEPS, SAVED = 10, 6  # an epoch has 7 steps in PrivateTrainer, and 6 in Lightning
BANDED = Banded(bands=3, steps=STEPS)
BUDGET = {"noise": "banded", "noise_multiplier": None, "target_epsilon": 4.0}


class Run:
    """A run of some front end: what it drew, the weights, and what it has spent."""

    def __init__(self, front, folder, resume=None, steps=STEPS, **privacy):
        self.seen, self.folder = [], str(folder)
        given = {"noise": BANDED, "noise_multiplier": 1.0, "repeat_noise": True}
        getattr(self, front)(resume, steps, {**given, **privacy})
        self.noise = self.training.optimizer.correlated
        self.history = self.training.engine.accountant.history
        self.epsilon = self.training.get_epsilon()

    def trainer(self, resume, steps, privacy):
        run, records = self, trainer_test.texts()
        numbers = {tuple(x["input_ids"].tolist()): i for i, x in enumerate(records)}

        class Seeing(PrivateTrainer):
            def _clip(self, model, batch):
                if batch.records:
                    ids = batch.inputs["input_ids"].tolist()
                    run.seen += [(batch.draw, numbers[tuple(row)]) for row in ids]
                return super()._clip(model, batch)

        made = trainer_test.trainer(
            self.folder,
            data=records,
            privacy=private(**privacy),
            cls=Seeing,
            max_steps=steps,
            save_strategy="steps",
            save_steps=SAVED,
        )
        made.train(f"{resume.folder}/checkpoint-{SAVED}" if resume else None)
        self.training, self.weights = made._training, weights(made.model)

    def lightning(self, resume, steps, privacy):
        data = TensorDataset(
            lightning_test.records()[:][0], torch.arange(lightning_test.RECORDS)
        )
        model, seen = lightning_test.Classifier(), lightning_test.Seen()
        model.net[2] = torch.nn.Linear(4, len(data)).double()
        callback = lightning_test.privacy("ghost_bk", **privacy)
        checkpoint = L.callbacks.ModelCheckpoint(
            self.folder, every_n_train_steps=SAVED, save_top_k=-1, filename="{step}"
        )
        lightning_test.trainer(
            callback, seen, checkpoint, max_steps=steps, enable_checkpointing=True
        ).fit(
            model,
            DataLoader(data, batch_size=lightning_test.BATCH),
            ckpt_path=f"{resume.folder}/step={SAVED}.ckpt" if resume else None,
        )
        self.seen = [(draw, i) for draw, drawn in seen.found for i in drawn]
        self.training, self.weights = callback._training, weights(model)


both = pytest.mark.parametrize("front", ["trainer", "lightning"])


@both
def test_a_run_and_one_that_goes_on(front, tmp_path):
    """One row of noise a draw, of parts in turn; bit for bit or with other noise."""
    whole = Run(front, tmp_path / "a")
    assert whole.noise.taken == STEPS and whole.noise.strategy == BANDED
    draws = [draw for draw, _ in whole.seen]
    assert draws == sorted(draws) and len({*draws}) > STEPS / 2
    assert all(i % 3 == draw % 3 for draw, i in whole.seen)
    (multiplier, _, rounds), *others = whole.history
    assert (multiplier, rounds, others) == (1.0, math.ceil(STEPS / 3), [])
    rest = Run(front, tmp_path / "b", whole)
    assert distance(whole.weights, rest.weights) == 0
    assert rest.history == whole.history
    assert rest.seen == [x for x in whole.seen if x[0] >= SAVED]
    afresh = Run(front, tmp_path / "b", whole, repeat_noise=False)
    assert distance(whole.weights, afresh.weights) > 1e-3
    independent = Run(front, tmp_path / "c", noise="independent")
    assert distance(whole.weights, independent.weights) > 1e-3


@both
def test_bands_for_a_budget(front, tmp_path):
    """As many as suit it, and the same ones in a run that goes on."""
    whole = Run(front, tmp_path / "a", **BUDGET)
    assert whole.noise.strategy.bands > 1 and whole.noise.strategy.steps == STEPS
    assert 3.95 < whole.epsilon <= 4.0
    rest = Run(front, tmp_path / "b", whole, **BUDGET)
    assert distance(whole.weights, rest.weights) == 0
    assert rest.noise.strategy == whole.noise.strategy
    for changed in ({"target_epsilon": 6.0}, {"steps": STEPS + 2}):
        with pytest.raises(Refused, match="noise is planned for the steps and the bud"):
            Run(front, tmp_path / "c", whole, **{**BUDGET, **changed})
    with pytest.raises(Refused, match="noise: 'banded' there, 'independent' here"):
        Run(front, tmp_path / "c", whole, **{**BUDGET, "noise": "independent"})


@pytest.mark.parametrize(
    "front, strategy",
    [("trainer", LambdaCGD(STEPS, 0.5)), ("lightning", BufferedToeplitz(2, STEPS))],
)
def test_other_strategies(front, strategy, tmp_path):
    """All steps are one Gaussian release, also for a budget."""
    whole = Run(front, tmp_path / "a", noise=strategy)
    rest = Run(front, tmp_path / "b", whole, noise=strategy)
    assert distance(whole.weights, rest.weights) == 0
    parts = whole.noise.separation
    assert parts > 1 and all(i % parts == draw % parts for draw, i in whole.seen)
    rounds = Participation(parts, math.ceil(STEPS / parts))
    squares = sum(count / noise**2 for noise, _, count in rest.history)
    assert math.sqrt(squares) == pytest.approx(strategy.sensitivity(rounds))
    budget = Run(front, tmp_path / "c", **{**BUDGET, "noise": strategy})
    assert 3.95 < budget.epsilon <= 4.0


SHORT = Banded(bands=3, steps=STEPS - 1)
REFUSED = {
    "a word": ({"noise": "pink"}, "noise='pink' is no noise"),
    "no budget": ({"noise": "banded"}, "bands for a target_epsilon"),
    "secure": (
        {"secure_mode": True, "repeat_noise": False},
        "Correlated noise has no secure mode",
    ),
    "adaptive": ({"clipping": "adaptive"}, "accounted for one bound"),
    "more steps": ({"noise": SHORT}, f"planned for {STEPS - 1} steps"),
}


@both
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, front, tmp_path):
    given, words = REFUSED[name]
    if name == "secure":
        given = {**given, ("seed" if front == "lightning" else "privacy_seed"): None}
    with pytest.raises(Refused, match=words):
        Run(front, tmp_path, **given)


def test_from_a_command_line():
    parser = transformers.HfArgumentParser(PrivacyArguments)
    given = "--noise banded --target_epsilon 8 --target_delta 1e-5"
    assert parser.parse_args_into_dataclasses(given.split())[0].noise == "banded"


def test_a_draw_that_is_left_out_is_refused(tmp_path):
    """The parts of the data set would not come in turn any more."""

    class Skips(PrivateTrainer):
        def get_batch_samples(self, *args):
            if self.state.global_step == 2:
                super().get_batch_samples(*args)
            return super().get_batch_samples(*args)

    run = trainer_test.trainer(tmp_path, privacy=private(noise=BANDED), cls=Skips)
    with pytest.raises(Refused, match="Draw 3 of the run follows 2 steps of corr"):
        run.train()
    assert run._training.optimizer.correlated.taken == 2
