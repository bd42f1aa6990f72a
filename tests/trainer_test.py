"""transformers' Trainer with differential privacy.

The oracle of a run (training.py) takes the draws and the noise of the same seed, and
clips the gradient of each record alone. That of a resumed run is the run that was not
stopped.
"""

import copy
import functools
import inspect
import json
import os
import re
import shutil
import unittest.mock

import pytest
import torch
import transformers
from torch import nn
from torch.utils.data import IterableDataset
from transformers import DataCollatorForLanguageModeling, TrainerCallback
from transformers import default_data_collator as collate

from opacus_ext.accountants.mechanisms import Allocated, Binned
from opacus_ext.data import RandomAllocation
from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.logical import derive_seed
from opacus_ext.grad_sample.adapter.model import PrivateModel
from opacus_ext.ledger import LEDGER
from opacus_ext.losses import RecordModel, cross_entropy
from opacus_ext.optimizers import AdamBC, ScaledAdam
from opacus_ext.refused import Refused
from opacus_ext.runs import ACCOUNTANT
from opacus_ext.runs import RUNS as SETTINGS
from opacus_ext.statement import read_statement
from opacus_ext.trainer import PRIVACY_STATE, PrivacyArguments, PrivateTrainer

from . import tiny
from .common import assert_same
from .training import SHORT, distance, drawn, private, tokenizer, train_alone, weights

pytestmark = pytest.mark.filterwarnings("ignore")
N, V, T, LR = 37, tiny.V, 8, 0.1
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
WORDS = tokenizer("mask", "unk", "pad")
BUDGET = {"noise_multiplier": None, "target_epsilon": 4.0}


def gpt2():
    return tiny.build("causal-lm", "gpt2", "GPT2LMHeadModel")


def bert(head="ForSequenceClassification", dropout=0.0):
    drops = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return tiny.build("", "bert", f"Bert{head}", **dict.fromkeys(drops, dropout))


def texts(n=N):
    """Records whose labels are their tokens, the first ones of them ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (n, T), generator=generator)
    labels = ids.clone()
    for i in range(n):
        labels[i, : i % 4] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]


def sentences(**labels):
    """Records of different lengths."""
    rows = [x["input_ids"][: 3 + i % (T - 2)].tolist() for i, x in enumerate(texts())]
    return [{"input_ids": row, **labels} for row in rows]


def people():
    """Records of one to three sequences."""
    sequences = texts(3 * N)
    return [sequences[3 * i : 3 * i + 1 + i % 3] for i in range(N)]


def arguments(out, **kwargs):
    chosen = {**SHORT, "max_steps": 5, "learning_rate": LR, "logging_steps": 100}
    return transformers.TrainingArguments(str(out), **(chosen | kwargs))


def trainer(
    out, model=None, data=None, privacy=None, cls=PrivateTrainer, noise=1.0, **kwargs
):
    own = inspect.signature(transformers.Trainer).parameters
    given = {name: kwargs.pop(name) for name in own if name in kwargs}
    return cls(
        gpt2() if model is None else model,
        arguments(out, **kwargs),
        train_dataset=texts() if data is None else data,
        privacy=private(noise_multiplier=noise) if privacy is None else privacy,
        **given,
    )


def history(run):
    return run.engine.accountant.history


# -- steps -------------------------------------------------------------------------


class Doubled(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
        return (2 * loss, outputs) if return_outputs else 2 * loss


def summed(outputs, labels, num_items_in_batch=None):
    return cross_entropy(outputs.logits, labels, reduction="sum").mean()


def padded(name, *args, **kwargs):
    return {"data_collator": getattr(transformers, name)(WORDS, *args, **kwargs)}


ONE = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
PEOPLE = {"data": people(), "data_collator": RecordCollator(collate)}
# A model, and what a trainer is given beside.
RUNS = {
    "flat": (gpt2, {"max_steps": 9}),  # more than an epoch
    "automatic": (gpt2, {"privacy": {"clipping": "automatic"}}),
    # GPT-2 can't run on B = 0.
    "empty draws": (gpt2, {"data": texts(9), "privacy": {"privacy_seed": 5}, **ONE}),
    "checkpointed": (gpt2, {"gradient_checkpointing": True}),
    "bf16": (gpt2, {"bf16": True}),
    "smoothed": (gpt2, {"label_smoothing_factor": 0.2}),
    "function": (gpt2, {"compute_loss_func": summed}),
    "method": (gpt2, {"cls": Doubled}),
    "people": (lambda: RecordModel(gpt2()), PEOPLE),
    "classes": (
        bert,
        {"data": sentences(labels=1), **padded("DataCollatorWithPadding")},
    ),
    "tokens": (
        gpt2,
        {"data": sentences(), **padded("DataCollatorForLanguageModeling", mlm=False)},
    ),
}
COMPILED = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
COMPILED["data"] = [{**x, "attention_mask": torch.ones(T).long()} for x in texts()]
RUNS["compiled"] = gpt2, COMPILED
RUNS["compiled function"] = gpt2, {"compute_loss_func": summed, **COMPILED}
RUNS["compiled method"] = gpt2, {"cls": Doubled, "bf16": True, **COMPILED}
RUNS["compiled people"] = lambda: RecordModel(gpt2()), {**COMPILED, **PEOPLE}
EVERY = ("hooks", "ghost", "ghost_bk", "scan", "auto")


@pytest.mark.parametrize(
    "name, mode",
    [
        *(("flat", mode) for mode in EVERY),
        *(("empty draws", mode) for mode in ("hooks", "scan", "auto")),
        *((name, "ghost_bk") for name in RUNS if name != "flat"),
    ],
)
def test_a_run_is_that_of_the_oracle(name, mode, tmp_path, monkeypatch):
    """The loss of a record is that of Trainer's own code for a batch of one."""
    monkeypatch.delattr(PrivateModel, "not_compiled")
    build, given = RUNS[name]
    settings = {"per_sample_max_grad_norm": 0.3, **given.get("privacy", {})}
    privacy = private(**settings, grad_sample_mode=mode)
    steps = 9 if name == "empty draws" else 2
    given = {"max_steps": steps, "lr_scheduler_type": "constant", **given}
    run = trainer(tmp_path, build(), **given | {"privacy": privacy})
    records, size = run.train_dataset, run.sampling.expected_batch_size
    run.eval_dataset = records[:5]
    expected, steps = copy.deepcopy(run.model).double(), range(run.args.max_steps)
    seed = derive_seed(privacy.privacy_seed, 0)
    draws = [drawn(seed, step, len(records), size) for step in steps]
    # Noise is drawn in the optimizer's order, and the weights' own dtype.
    names = {p: name for name, p in run.model.named_parameters()}
    groups = run.create_optimizer().param_groups
    order = [names[p] for group in groups for p in group["params"]]
    generator = torch.Generator().manual_seed(derive_seed(seed, "noise"))
    train_alone(
        expected,
        torch.optim.SGD([expected.get_parameter(name) for name in order], lr=LR),
        draws,
        lambda model, i: run.compute_loss(model, run.data_collator([records[i]])),
        size,
        0.3,
        privacy.clipping,
        noise=(0.3, generator, torch.float32),
    )
    before = weights(run.model)
    run.train()
    tolerance = 2e-3 if given.get("bf16") else 1e-4
    assert_same(weights(run.model), weights(expected.float()), tolerance)
    assert distance(before, weights(run.model)) > 1e-3
    assert history(run) == [(1.0, size / len(records), len(steps))]
    assert run.evaluate()["eval_loss"] > 0
    assert name != "empty draws" or 0 in map(len, draws)


# -- draws -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [AdamBC, ScaledAdam])
def test_optimizers_that_know_the_noise(kind, tmp_path):
    """They are told of each step's noise, and go on as if they had not been stopped."""

    def run(**given):
        model = gpt2()
        optimizer, told = kind(model.parameters(), lr=0.01), []
        name = "noise_variance"
        optimizer.register_step_pre_hook(lambda o, *_: told.append(getattr(o, name, 0)))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        run = trainer(tmp_path, model, optimizers=(optimizer, schedule), **SAVING)
        run.train(**given)
        return run, optimizer, told

    whole, optimizer, told = run()
    again, _, _ = run(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(whole.model), weights(again.model)) == 0
    if kind is AdamBC:
        assert told == [pytest.approx((1.0 / 6) ** 2)] * 4
    else:
        assert len(optimizer.gradient_scales()) == len([*whole.model.parameters()])


class Counting(PrivateTrainer):
    """Keeps the number of each step's draw; leaves an epoch with a sum in hand."""

    seen, left = (), False

    def get_batch_samples(self, *args):
        items, count = super().get_batch_samples(*args)
        self.seen += (items[-1][-1].draw,)
        assert not self.has_sums()
        return items, count

    def has_sums(self):
        return any(p.summed_grad is not None for p in self.model.parameters())

    def training_step(self, *args):
        loss = super().training_step(*args)
        if self.has_sums() and not self.left:
            self.left = self.control.should_epoch_stop = True
        return loss


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_batch_or_an_epoch_that_is_left(mode, tmp_path):
    """No draw comes again, and no sum is added to the next, which may have a record."""
    run = trainer(tmp_path, privacy=private(grad_sample_mode=mode), cls=Counting)
    run.train()
    assert run.left and run.seen == tuple(range(len(run.seen)))


def test_nobody_knows_noise_and_draws(tmp_path):
    """TrainingArguments.seed, 42 for everybody, fixes neither."""
    runs = [trainer(tmp_path, privacy=private(privacy_seed=None)) for _ in range(2)]
    for run in runs:
        run.train()
    assert distance(*(weights(run.model) for run in runs)) > 1e-2
    assert runs[0]._training.seed != runs[1]._training.seed


# -- privacy -----------------------------------------------------------------------


def test_target_epsilon_is_kept_and_logged(tmp_path):
    """Over two runs, the first of which is stopped; its checkpoint is for its steps."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            stopped = state.global_step == 2 and run._runs == 1
            control.should_training_stop |= stopped

    given = {**SAVING, "logging_steps": 3, "max_steps": 6, "callbacks": [Stop()]}
    privacy = private(**BUDGET, log_loss=False, log_draws=True)
    run = trainer(tmp_path, privacy=privacy, **given)
    run.train()
    output = run.train()
    (first, _, steps), (second, _, more) = history(run)
    assert steps == 2 and more == 6 and second > first
    begin, *rest, end = run.state.log_history
    assert begin["noise_multiplier"] == second and begin["sample_rate"] == 6 / N
    assert begin["max_steps"] == 6 and begin["epsilon"] > 0 and not begin["secure_mode"]
    sizes = [len(drawn(run._training.seed, step, N, 6)) for step in range(6)]
    means = [sum(sizes[:3]) / 3, sum(sizes[3:]) / 3]
    assert [entry["drawn"] for entry in rest] == pytest.approx(means)
    assert begin["expected_batch_size"] == 6 and len(run.get_train_dataloader()) == 14
    assert [entry["step"] for entry in rest] == [3, 6] and run.steps_per_epoch == 7
    assert rest[0]["epsilon"] < rest[1]["epsilon"] <= 4.0
    assert end["epsilon"] == output.metrics["epsilon"] == run.get_epsilon() > 3.9
    assert all(entry["delta"] == 1e-3 for entry in (*rest, end))
    unknown = {"loss", "train_loss", "grad_norm"}
    assert not any(unknown & entry.keys() for entry in run.state.log_history)
    with pytest.raises(Refused, match="target_epsilon=4.0 is spent"):
        run.train()


MORE = {
    "more steps and a larger target": (5.0, 6, 2),
    "after the last step": (6.0, 8, 4),
    "no steps left": (6.0, 4, 4),
}


@pytest.mark.parametrize("name", MORE)
def test_a_run_that_goes_on_with_another_plan(name, tmp_path):
    """The noise of the rest is chosen for what is left, and both are accounted for."""
    epsilon, steps, done = MORE[name]
    first = trainer(tmp_path, privacy=private(**BUDGET), **SAVING)
    first.train()
    before = history(first)[0][0]
    budget = private(**{**BUDGET, "target_epsilon": epsilon})
    run = trainer(tmp_path, privacy=budget, **{**SAVING, "max_steps": steps})
    run.train(str(tmp_path / f"checkpoint-{done}"))
    if steps == done:
        assert history(run) == [(before, 6 / N, done)]
        return
    phases = [(before, 6 / N, done), (history(run)[1][0], 6 / N, steps - done)]
    assert history(run) == phases and epsilon - 0.01 <= run.get_epsilon() <= epsilon
    assert "noise_multiplier" in run.state.log_history[-3]
    # And once more, from a checkpoint of two phases that is complete.
    again = trainer(tmp_path, privacy=budget, **{**SAVING, "max_steps": steps})
    again.train(str(tmp_path / f"checkpoint-{steps}"))
    assert history(again) == phases


def test_another_plan_in_the_middle_of_an_allocation(tmp_path):
    """The epoch that is under way counts once more with less noise, as was planned."""
    cls = functools.partial(PrivateTrainer, sampling=RandomAllocation(steps=4))
    first = trainer(tmp_path, cls=cls, privacy=private(**BUDGET), **SAVING)
    first.train()
    budget = private(**{**BUDGET, "target_epsilon": 20.0})
    run = trainer(tmp_path, cls=cls, privacy=budget, **{**SAVING, "max_steps": 6})
    run.train(str(tmp_path / "checkpoint-2"))
    assert [steps for *_, steps in history(run)] == [1, 2]
    assert 19.9 <= run.get_epsilon() <= 20


def test_a_budget_that_is_spent_is_told_before_weights_are_loaded(tmp_path):
    trainer(tmp_path, privacy=private(**BUDGET), **SAVING).train()
    run = trainer(tmp_path, privacy=private(**BUDGET), **{**SAVING, "max_steps": 9})
    before = weights(run.model)
    words = r"the steps so far have spent 3\.99.*num_train_epochs.*target_epsilon=6"
    with pytest.raises(Refused, match=words):
        run.train(True)
    assert distance(before, weights(run.model)) == 0 and history(run) == []


SECURE = {"privacy_seed": None, "repeat_noise": False, "secure_mode": True}


@pytest.mark.parametrize("mode", ["hooks", "auto"])
def test_secure_mode(mode, tmp_path, recwarn):
    """No seed fixes the noise, and a checkpoint has nothing to draw it from."""
    privacy = private(**SECURE, grad_sample_mode=mode, monitor="private")
    runs = [trainer(tmp_path / i, privacy=privacy, **SAVING) for i in "ab"]
    for run in runs:
        with unittest.mock.patch("secrets.randbits", return_value=0):
            run.train()
        assert not any("Secure RNG" in str(each.message) for each in recwarn)
    assert distance(*(weights(run.model) for run in runs)) > 1e-2
    folder = tmp_path / "a" / "checkpoint-2"
    saved = torch.load(folder / PRIVACY_STATE, weights_only=True)
    assert saved["noise"] is None and saved["config"]["secure_mode"]
    other = trainer(tmp_path, privacy=privacy, **SAVING)
    other.train(str(folder))
    assert history(other) == [(1.0, 6 / N, 4)]
    for statement in (
        read_statement(folder, 1e-3),
        other.engine.privacy_statement(1e-3),
    ):
        assert "cryptographically secure" in str(statement)
    with pytest.raises(Refused, match="secure_mode: True there, False here"):
        trainer(tmp_path).train(str(folder))


@pytest.mark.parametrize("secure", [False, True])
def test_no_seed_fixes_the_draws_of_secure_mode(secure, tmp_path):
    """Without noise runs of one seed are equal, but for their draws."""
    found = []
    for _ in range(2):
        privacy = private(**{**SECURE, "secure_mode": secure, "noise_multiplier": 0.0})
        run = trainer(tmp_path, privacy=privacy, max_steps=2)
        with unittest.mock.patch("secrets.randbits", return_value=0):
            run.train()
        found.append(weights(run.model))
    assert (distance(*found) > 1e-4) is secure


def test_a_model_of_several_processes_has_no_secure_mode(tmp_path, monkeypatch):
    several = property(lambda self: 2)
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", several)
    with pytest.raises(Refused, match="several processes has no secure mode"):
        trainer(tmp_path, privacy=private(**SECURE))


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({**SECURE, "privacy_seed": 3}, "privacy_seed=3 can't fix"),
        ({**SECURE, "repeat_noise": True}, "repeat_noise=True can't fix"),
        ({"target_delta": "x"}, "target_delta must be a number"),
        ({"target_epsilon": 1.0}, "either target_epsilon or noise_multiplier"),
        ({**BUDGET, "target_epsilon": 0.0}, "target_epsilon must be .*above zero"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be .*zero or more"),
        ({"per_sample_max_grad_norm": [1.0, -1.0]}, "must be .*above zero, got -1"),
        ({"accountant": "gdp"}, "'prv', 'rdp'"),
    ],
)
def test_privacy_arguments_that_do_not_fit(kwargs, message):
    with pytest.raises(Refused, match=message):
        private(**kwargs)


def test_privacy_arguments_from_a_command_line():
    """Beside those of Trainer, whose names are other ones."""
    given = (
        "--use_cpu --output_dir out --max_grad_norm 1.0 --seed 7 --target_epsilon 8 "
        "--target_delta 1e-5 --clipping per_layer --per_sample_max_grad_norm 0.5 2 "
        "--privacy_seed 3 --log_loss False"
    )
    parser = transformers.HfArgumentParser(
        (PrivacyArguments, transformers.TrainingArguments)
    )
    parsed, args = parser.parse_args_into_dataclasses(given.split())
    chosen = {"clipping": "per_layer", "per_sample_max_grad_norm": [0.5, 2.0]}
    chosen |= {"privacy_seed": 3, "log_loss": False}
    assert parsed == PrivacyArguments(1e-5, 8.0, **chosen)
    assert args.seed == 7 and args.max_grad_norm == 1.0


def test_a_delta_that_is_left_out_is_offered(tmp_path):
    """By the argument and by the option, which train when pasted."""
    data = texts()
    parser = transformers.HfArgumentParser(PrivacyArguments)
    given = ["--noise_multiplier", "1"]
    (privacy,) = parser.parse_args_into_dataclasses(given)
    with pytest.raises(Refused, match="target_delta is missing") as told:
        trainer(tmp_path, data=data, privacy=privacy)
    argument, option = re.findall(r"target_delta[= ]([\d.e-]+)", told.value.remedy)
    assert 0 < float(argument) == float(option) < 1 / len(data)
    (privacy,) = parser.parse_args_into_dataclasses([*given, "--target_delta", option])
    trainer(tmp_path, data=data, privacy=privacy)
    with pytest.raises(Refused, match="one over the number of records"):
        PrivateTrainer(gpt2(), arguments(tmp_path), privacy=private(target_delta=None))


class Images(nn.Module):
    """A backbone with BatchNorm, and a head."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2))
        self.head = nn.Linear(2, 2)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x, labels):
        logits = self.head(self.dropout(self.backbone(x).mean(2)))
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.parametrize("frozen", [True, False])
def test_batch_norm_keeps_its_statistics(frozen, tmp_path):
    """If it is in evaluation mode as training begins; everything else trains."""
    model = Images()
    model.backbone.requires_grad_(not frozen)
    data = [{"x": torch.randn(1, 5), "labels": i % 2} for i in range(N)]
    with pytest.raises(Exception, match="BatchNorm1d"):
        trainer(tmp_path, model, data).train()
    run = trainer(tmp_path, model.eval(), data)
    means, before = model.backbone[1].running_mean.clone(), weights(model)
    run.train()
    assert torch.equal(means, model.backbone[1].running_mean)
    assert model.dropout.training and distance(before, weights(model)) > 1e-3


# -- what is refused ---------------------------------------------------------------


BREAKING = {
    **dict.fromkeys(("use_liger_kernel", "fp16"), True),
    **dict.fromkeys(("auto_find_batch_size", "ignore_data_skip"), True),
    **{"max_grad_norm": 0.5, "neftune_noise_alpha": 5.0, "_n_gpu": 2},
    **{"deepspeed": "zero.json", "hub_strategy": "all_checkpoints"},
    **dict.fromkeys(("packing", "padding_free", "activation_offloading"), True),
    "loss_type": "dft",
}


@pytest.mark.parametrize("name, value", BREAKING.items())
def test_arguments_that_break_privacy(name, value, tmp_path):
    args, state = arguments(tmp_path), torch.get_rng_state()
    object.__setattr__(args, name, value)
    object.__setattr__(args, "push_to_hub", name == "hub_strategy")
    with pytest.raises(Refused, match=f"{name.strip('_')}="):
        PrivateTrainer(nn.Identity(), args, privacy=private())
    assert torch.equal(state, torch.get_rng_state())  # set_seed was not reached


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts())


class Rows(PrivateTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs).logits


class Searching(PrivateTrainer):
    def train(self):
        self.hyperparameter_search()


def halves(records):
    batch = collate(records)
    return {key: x.reshape(2 * len(x), -1) for key, x in batch.items()}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"data": Stream()}, "a data set with a length"),
        ({"data": []}, "a data set with a length"),
        ({"privacy": {"target_epsilon": 8.0}}, "privacy=PrivacyArguments"),
        ({"data_collator": halves}, "made 6 samples of 3 records"),
        ({"cls": Rows}, "The loss of a record is not one number"),
        ({"cls": Searching}, "Each trial"),
        ({"model": nn.BatchNorm1d(T)}, "BatchNorm"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(given, message, tmp_path):
    model = given.get("model", gpt2())
    before = weights(model)
    with pytest.raises(Exception, match=message):
        trainer(tmp_path, **{"model": model, **given}).train()
    assert distance(before, weights(model)) == 0
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_arguments_that_do_nothing(tmp_path):
    """They would choose draws, or count tokens of private ones."""
    given = {"train_sampling_strategy": "group_by_length", "data_seed": 0}
    given |= {"dataloader_in_order": False, "dataloader_num_workers": 2}
    given |= {"dataloader_drop_last": True, "include_num_input_tokens_seen": "all"}
    runs = [trainer(tmp_path, **more, logging_steps=1) for more in ({}, given)]
    for run in runs:
        run.train()
        assert not any(x.get("num_input_tokens_seen") for x in run.state.log_history)
    assert distance(*(weights(run.model) for run in runs)) == 0


def test_the_other_order_of_bases():
    other = transformers.Seq2SeqTrainer
    with pytest.raises(Refused, match=r"class Wrong\(PrivateTrainer, Seq2SeqTrainer"):
        type("Wrong", (other, PrivateTrainer), {})


# -- checkpoints -------------------------------------------------------------------


class Sized(PrivateTrainer):
    sizes = ()  # of draws

    def get_batch_samples(self, *args):
        items, count = super().get_batch_samples(*args)
        self.sizes += tuple(item[-1].drawn for item in items[-1:])
        return items, count


SAMPLINGS = {
    "allocation": ({"sampling": "allocation"}, Allocated(1.0, 7, 1)),
    "bins": ({"sampling": "balls_in_bins"}, Binned(1.0, 7)),
    "public": ({"sampling": "allocation", "public_records": 30}, Allocated(1.0, 5, 1)),
    "two of three": (RandomAllocation(steps=3, selected=2), Allocated(1.0, 3, 2)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_batches_of_an_epoch_that_are_drawn_at_once(name, tmp_path):
    """A run that is stopped in an epoch goes on in it, and counts it once."""
    given, kind = SAMPLINGS[name]
    cls, privacy = functools.partial(Sized, sampling=given), private()
    if isinstance(given, dict):
        cls, privacy = Sized, private(**given)

    def make():
        saving = {**SAVING, "save_steps": 4, "max_steps": 9}
        return trainer(tmp_path, cls=cls, privacy=privacy, **saving)

    whole, rest = make(), make()
    whole.train()
    t, selected = kind.values[1], (*kind.values, 1)[2]
    epochs = [whole.sizes[i : i + t] for i in range(0, 10 - t, t)]
    assert [sum(epoch) for epoch in epochs] == [N * selected] * len(epochs)
    assert (whole.sizes[:2] == whole.sizes[t : t + 2]) == (name == "bins")
    assert history(whole) == [(kind, 1.0, -(-9 // t) * selected)]
    rest.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert distance(weights(whole.model), weights(rest.model)) == 0
    assert history(rest) == history(whole)
    phases = read_statement(tmp_path / "checkpoint-4", 1e-3).content["phases"]
    assert phases == [kind.describe(-(-4 // t) * selected)]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"privacy": {"sampling": "shuffle"}}, "is not one of 'poisson', 'allocation'"),
        (
            {
                "privacy": {"sampling": "allocation"},
                "sampling": RandomAllocation(steps=3),
            },
            "both say how batches are drawn",
        ),
        ({"sampling": "allocation"}, "sampling must say how batches are drawn"),
    ],
)
def test_samplings_that_are_refused(given, message, tmp_path):
    with pytest.raises(Refused, match=message):
        privacy = private(**given.get("privacy", {}))
        PrivateTrainer(gpt2(), arguments(tmp_path), **{**given, "privacy": privacy})


def test_a_resumed_run_is_the_one_that_was_not_stopped(tmp_path):
    """
    In the middle of an epoch, with dropout, random masks, Adam, a bound that moves and
    evaluation, which changes nothing. A model of from_pretrained is in evaluation mode.
    """
    data = sentences()
    saving = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 4}
    adam = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 9}
    evaluated = {"eval_dataset": data[:5], "eval_strategy": "epoch"}

    def make(**given):
        model, collate = bert("ForMaskedLM", 0.2), DataCollatorForLanguageModeling
        given = {"privacy": private(clipping="adaptive"), **given}
        given = {**saving, **adam, **given, "data_collator": collate(WORDS)}
        return trainer(tmp_path, model.eval(), data, **given)

    whole = make(dataloader_num_workers=2)
    whole.train()
    losses = [x["loss"] for x in whole.state.log_history if "loss" in x]
    os.rename(tmp_path / "checkpoint-9", tmp_path / "gone")
    for checkpoint in (str(tmp_path / "checkpoint-4"), True):
        other = make(**evaluated)
        with torch.no_grad():
            for p in other.model.parameters():
                p.zero_()
        other.train(resume_from_checkpoint=checkpoint)
        assert distance(weights(whole.model), weights(other.model)) == 0
        assert other.get_epsilon() == whole.get_epsilon()
        assert history(other) == [(1.0, 6 / N, 9)]
        again = [x["loss"] for x in other.state.log_history if "loss" in x]
        assert again == losses
        shutil.rmtree(tmp_path / "checkpoint-9")
    other_noise = private(repeat_noise=False, clipping="adaptive")
    fresh = [make(privacy=other_noise) for _ in range(2)]
    for other in fresh:
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert distance(weights(whole.model), weights(other.model)) > 1e-3
    assert distance(*(weights(other.model) for other in fresh)) > 1e-3


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run = trainer(out, max_steps=4, save_strategy="steps", save_steps=3)
    run.train()
    return out / "checkpoint-3"


OTHER_RUNS = {
    "noise_multiplier": {"noise": 2.0},
    "accountant": {"privacy": private(accountant="prv")},
    "records": {"data": texts()[:-1]},
    "logical_batch_size": {"gradient_accumulation_steps": 3},
}


def test_a_checkpoint_of_another_run(checkpoint, tmp_path):
    for name, given in OTHER_RUNS.items():
        run = trainer(tmp_path, **given)
        before = weights(run.model)
        with pytest.raises(Refused, match=f"be the same: {name}: .* there, .* here"):
            run.train(resume_from_checkpoint=str(checkpoint))
        assert distance(before, weights(run.model)) == 0 and history(run) == []


def test_a_checkpoint_that_was_not_finished(checkpoint, tmp_path, monkeypatch):
    """With files of another, or without privacy: killed while weights are written."""
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(checkpoint, folder)
    run = trainer(tmp_path)
    for text in ('{"global_step": 2}', '{"global_st'):
        (folder / "trainer_state.json").write_text(text)
        with pytest.raises(Refused, match="privacy.pt of step 3, and trainer_state"):
            run.train(resume_from_checkpoint=str(folder))
    assert history(run) == []
    killed = unittest.mock.Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr("opacus_ext.checkpoints.write", killed)
    other = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    with pytest.raises(KeyboardInterrupt):
        other.train()
    with pytest.raises(Refused, match="the process was killed while it wrote"):
        run.train(resume_from_checkpoint=str(folder))


SAVED = {
    "gpt2": (gpt2, lambda run: run.model, {}),
    "people": (lambda: RecordModel(gpt2()), lambda run: run.model.model, PEOPLE),
}


@pytest.mark.parametrize("name", SAVED)
def test_what_is_saved_is_an_ordinary_model(name, tmp_path):
    """Without RecordModel, hooks and the state of the noise, with what was spent."""
    build, inner, given = SAVED[name]
    given = {**given, **SAVING, "eval_strategy": "steps", "eval_steps": 2}
    given |= {"load_best_model_at_end": True}
    given["eval_dataset"] = given.get("data", texts())[:5]
    run, other = (trainer(tmp_path, build(), **given) for _ in range(2))
    run.save_model(str(tmp_path / "saved"))
    run.create_model_card()
    assert "privacy.json" not in os.listdir(tmp_path / "saved")
    assert "Privacy statement" not in (tmp_path / "README.md").read_text()
    run.train()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    scores = [x["eval_loss"] for x in run.state.log_history if "eval_loss" in x]
    best = tmp_path / f"checkpoint-{2 * scores.index(min(scores)) + 2}"
    run.save_model(str(tmp_path / "saved"))
    assert PRIVACY_STATE not in os.listdir(tmp_path / "saved")
    stated = run.privacy_statement()
    assert stated.content["epsilon"] == run.get_epsilon()
    assert read_statement(tmp_path / "saved").content == stated.content
    for _ in range(2):
        run.create_model_card(tags="private")
    card = (tmp_path / "README.md").read_text()
    assert card.count(stated.text) == 1 and "### Training hyperparameters" in card
    assert read_statement(best).content["steps"] <= stated.content["steps"]
    for path in (tmp_path / "saved", best):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(path)
        assert distance(weights(loaded), weights(inner(run))) == 0
    for p in run.model.parameters():
        assert p.grad is None
        assert not any(hasattr(p, x) for x in ("grad_sample", "summed_grad"))
    assert not any(m._forward_pre_hooks for m in run.model.modules())
    assert type(run.optimizer) is torch.optim.SGD
    once = run.get_epsilon()
    run.train()  # which adds up
    assert history(run) == [(1.0, 6 / N, 8)] and run.get_epsilon() > once


def test_weights_that_were_trained_before(tmp_path):
    """What their folder says was spent is in the statement of what follows."""
    folders = [tmp_path / name for name in "abc"]
    trainer(folders[0], **SAVING).train()
    before = folders[0] / "checkpoint-4"
    for folder, steps in zip(folders[1:], (8, 12)):
        model = transformers.GPT2LMHeadModel.from_pretrained(before)
        run = trainer(folder, model, **SAVING)
        run.train()
        stated = run.privacy_statement().content
        assert stated["steps"] == steps and "earlier training" in stated["notes"][0]
        before = folder / "checkpoint-4"
        assert read_statement(before).content == stated
    resumed = trainer(folders[2], gpt2(), **{**SAVING, "max_steps": 5})
    resumed.train(str(before))
    assert resumed.privacy_statement().content["steps"] == 13


def test_weights_that_were_trained_before_on_users(tmp_path):
    """Theirs is another guarantee, of which the statement tells."""
    trainer(tmp_path, **SAVING).train()
    before = tmp_path / "checkpoint-4"
    spent = json.loads((before / "privacy.json").read_text())
    spent[SETTINGS][0]["unit"] = "user"
    (before / "privacy.json").write_text(json.dumps(spent))
    model = transformers.GPT2LMHeadModel.from_pretrained(before)
    run = trainer(tmp_path / "more", model, **SAVING)
    run.train()
    stated = run.privacy_statement().content
    assert stated["steps"] == 4 and stated["holds"] == "yes"
    assert any("protect one user" in text for text in stated["not_covered"])


def test_a_checkpoint_of_an_older_version(tmp_path):
    """It has no ledger, and the accountant's state by another key."""
    trainer(tmp_path, **SAVING).train()
    path = tmp_path / "checkpoint-2" / PRIVACY_STATE
    state = torch.load(path)
    state["accountant"] = state.pop(ACCOUNTANT)
    del state[LEDGER], state[SETTINGS], state["config"]["secure_mode"]
    torch.save(state, path)
    run = trainer(tmp_path, **SAVING)
    run.train(str(path.parent))
    assert history(run) == [(1.0, 6 / N, 4)]
    assert run.privacy_statement().content["steps"] == 4


# -- errors ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_an_error_in_a_step_leaves_no_trace(mode, tmp_path):
    """In the second part of the third step; then the trainer trains on."""

    class Failing(PrivateTrainer):
        calls = 0

        def _prepare_inputs(self, inputs):
            Failing.calls += 1
            if Failing.calls == 4:
                raise OSError("disk")
            return super()._prepare_inputs(inputs)

    privacy = private(grad_sample_mode=mode)
    given = {"optim": "adamw_torch", "max_steps": 4, "cls": Failing}
    run = trainer(tmp_path, privacy=privacy, **given)
    with pytest.raises(OSError):
        run.train()
    steps = run.state.global_step
    assert history(run) == [(1.0, 6 / N, steps)] and steps > 0
    states = run.optimizer.state_dict()["state"].values()
    assert all(state["step"] == steps for state in states)
    assert not any(hasattr(p, "summed_grad") for p in run.model.parameters())
    run.train()
    assert history(run) == [(1.0, 6 / N, steps + 4)]
