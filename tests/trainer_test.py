"""transformers' Trainer with differential privacy.

The oracle of a run takes the draws and the noise of the same seed, and clips the
gradient of each record alone, by plain autograd. That of a resumed run is the run that
was not stopped.
"""

import copy
import dataclasses
import os
import shutil
import warnings

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    HfArgumentParser,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from opacus_ext.data.collators import RecordCollator
from opacus_ext.data.logical import LogicalBatches, derive_seed, logical_loader
from opacus_ext.losses import PerRecord, cross_entropy, model_losses
from opacus_ext.refused import Refused
from opacus_ext.trainer import PRIVACY_STATE, PrivacyArguments, PrivateTrainer

from .common import assert_same, clipped_sum, every_mode, oracle

pytestmark = pytest.mark.filterwarnings("ignore")
N, V, T, LR = 37, 30, 8, 0.1
CONSTANT = {"lr_scheduler_type": "constant"}
SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    drops = {f"{name}_pdrop": dropout for name in ("resid", "embd", "attn")}
    sizes = {"vocab_size": V, "n_embd": 16, "n_layer": 2, "n_head": 2}
    config = transformers.GPT2Config(
        **sizes, **drops, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def bert(head="ForSequenceClassification", dropout=0.0):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=V,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return getattr(transformers, f"Bert{head}")(config)


def texts(n=N):
    """Records whose labels are their tokens, the first ones of them ignored."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, V, (n, T), generator=generator)
    labels = ids.clone()
    for i in range(n):
        labels[i, : i % 4] = -100
    return [{"input_ids": x, "labels": y} for x, y in zip(ids, labels)]


def sentences(n=N):
    """Records of different lengths with a class."""
    rows = [x["input_ids"][: 3 + i % (T - 2)].tolist() for i, x in enumerate(texts(n))]
    return [{"input_ids": row, "labels": sum(row) % 2} for row in rows]


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(V - 3)}
    words |= {"[PAD]": V - 1, "[UNK]": V - 2, "[MASK]": V - 3}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"},
    )


def private(mode="ghost_bk", **kwargs):
    kwargs = {"noise_multiplier": 1.0, "target_delta": 1e-3, "privacy_seed": 3} | kwargs
    kwargs = {"accountant": "rdp", "repeat_noise": True} | kwargs
    return PrivacyArguments(grad_sample_mode=mode, **kwargs)


BUDGET = {"noise_multiplier": None, "target_epsilon": 4.0}


def arguments(out, **kwargs):
    chosen = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": LR,
        "optim": "sgd",
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "logging_steps": 100,
        "use_cpu": True,
    }
    return TrainingArguments(str(out), **(chosen | kwargs))


def trainer(
    out,
    model=None,
    data=None,
    privacy=None,
    mode="ghost_bk",
    cls=PrivateTrainer,
    **kwargs,
):
    ours = ("data_collator", "eval_dataset", "callbacks", "optimizers", "model_init")
    ours += ("compute_loss_func", "processing_class", "compute_metrics")
    given = {name: kwargs.pop(name) for name in ours if name in kwargs}
    if model is None and "model_init" not in given:
        model = gpt2()
    return cls(
        model,
        arguments(out, **kwargs),
        train_dataset=texts() if data is None else data,
        privacy=private(mode) if privacy is None else privacy,
        **given,
    )


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def history(run):
    return run.engine.accountant.history


class Watch(TrainerCallback):
    """Calls a function at the end of each step."""

    def __init__(self, call):
        self.call = call

    def on_step_end(self, args, state, control, **kwargs):
        self.call(state, control, **kwargs)


# -- steps -------------------------------------------------------------------------


def drawn_in(seed, step, records, size):
    generator = torch.Generator().manual_seed(derive_seed(seed, "draw", step))
    keys = torch.rand(records, generator=generator, dtype=torch.float64)
    return (keys < size / records).nonzero().flatten().tolist()


def check_run(run, loss_of=None, collate=default_data_collator):
    """
    A run with constant learning rate equals the oracle's; the sizes of its draws.

    ``loss_of(model, record)`` is the loss of a record alone, by default the model's.
    """
    privacy, records = run.privacy, run.train_dataset
    size = run.sampling.expected_batch_size
    model = copy.deepcopy(run.model).double()
    seed, sizes = derive_seed(privacy.privacy_seed, 0), []
    noise = torch.Generator().manual_seed(derive_seed(seed, "noise"))
    std = privacy.noise_multiplier * privacy.per_sample_max_grad_norm
    names = {p: name for name, p in run.model.named_parameters()}
    groups = run.create_optimizer().param_groups  # in whose order noise is drawn
    order = [names[p] for group in groups for p in group["params"]]
    params = dict(model.named_parameters())

    def loss(model, record):
        if loss_of is not None:
            return loss_of(model, record)[None]
        return model_losses(model, record)

    for step in range(run.args.max_steps):
        drawn = drawn_in(seed, step, len(records), size)
        sizes.append(len(drawn))
        total = dict.fromkeys(order, 0.0)
        if drawn:
            grads = oracle(model, collate([records[i] for i in drawn]), loss)
            bound = privacy.per_sample_max_grad_norm
            total = clipped_sum(grads, privacy.clipping, bound)
        with torch.no_grad():
            sizes_of = [params[name].numel() for name in order]
            drawn = torch.normal(0, std, (sum(sizes_of),), generator=noise)
            for name, x in zip(order, drawn.split(sizes_of)):
                p = params[name]
                p -= LR * (total[name] + x.view_as(p)) / size
    before = weights(run.model)
    run.train()
    assert_same(weights(run.model), weights(model.float()), 1e-4)
    assert distance(before, weights(run.model)) > 1e-3
    rate = size / len(records)
    assert history(run) == [(privacy.noise_multiplier, rate, run.args.max_steps)]
    return sizes


@every_mode
@pytest.mark.parametrize("clipping", ["flat", "automatic"])
def test_a_run_is_that_of_the_oracle(mode, clipping, tmp_path):
    """More steps than an epoch has, with Trainer's max_grad_norm at its default."""
    privacy = private(mode, per_sample_max_grad_norm=0.5, clipping=clipping)
    run = trainer(tmp_path, privacy=privacy, max_steps=9, **CONSTANT)
    sizes = check_run(run)
    assert max(sizes) > 6 and sizes[0] != sizes[1]


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan", "auto"])
def test_a_draw_without_records_is_a_step_of_noise(mode, tmp_path):
    """GPT-2 can't run on B = 0."""
    one = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}
    privacy = private(mode, privacy_seed=5)
    run = trainer(tmp_path, None, texts(9), privacy, max_steps=9, **one, **CONSTANT)
    assert 0 in check_run(run)


@every_mode
@pytest.mark.parametrize("setting", ["smoothed", "summed", "own"])
def test_losses_of_single_records(mode, setting, tmp_path):
    """Trainer's own code for each record alone: label smoothing, functions, methods."""

    def summed(outputs, labels, num_items_in_batch=None):
        return cross_entropy(outputs.logits, labels, reduction="sum").mean()

    class Own(PrivateTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            loss, outputs = super().compute_loss(model, inputs, True, **kwargs)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    more = {
        "smoothed": {"label_smoothing_factor": 0.2},
        "summed": {"compute_loss_func": summed},
        "own": {"cls": Own},
    }[setting]
    privacy = private(mode, per_sample_max_grad_norm=0.3)
    more |= {"eval_dataset": texts(5), "max_steps": 2, **CONSTANT}
    run = trainer(tmp_path, bert("ForMaskedLM"), privacy=privacy, **more)
    check_run(run, run.compute_loss)
    assert run.evaluate()["eval_loss"] > 0


@every_mode
def test_records_of_several_sequences(mode, tmp_path):
    """Clipped as a whole; the model is saved without what makes it one of records."""
    sequences = texts(3 * N)
    people = [sequences[3 * i : 3 * i + 1 + i % 3] for i in range(N)]
    collate = RecordCollator(default_data_collator)

    def make(**kwargs):
        privacy = private(mode, per_sample_max_grad_norm=0.3)
        given = {"data_collator": collate, "eval_dataset": people[:5], **CONSTANT}
        model = PerRecord(gpt2())
        return trainer(tmp_path, model, people, privacy, **given, **kwargs)

    def loss_of(model, record):
        ids, labels = record["input_ids"][0], record["labels"][0, :, 1:]
        logits = model.model(input_ids=ids).logits[:, :-1]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    check_run(make(max_steps=2), loss_of, collate)
    run = make(**SAVING, eval_strategy="steps", eval_steps=2)
    run.train()
    assert any("eval_loss" in entry for entry in run.state.log_history)
    other = make(**SAVING)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert distance(weights(saved), weights(run.model.model)) == 0


def test_records_without_labels_count_as_zero(tmp_path):
    data = [{**x, "labels": torch.full_like(x["labels"], -100)} for x in texts()]
    run = trainer(tmp_path, data=data, privacy=private(noise_multiplier=0.0))
    before = weights(run.model)
    assert run.train().training_loss == 0 and run.get_epsilon() == float("inf")
    assert distance(before, weights(run.model)) == 0


# -- draws -------------------------------------------------------------------------


def test_items_of_a_logical_batch():
    draws = [list(range(n)) for n in (0, 1, 4, 5, 9)]
    for count in (1, 2, 3):
        batches = LogicalBatches(draws, torch.Generator(), 2, items=count, seed=0)
        items = list(batches)
        assert len(items) == len(batches) == 5 * count
        for t, drawn in enumerate(draws):
            own = [item.numbers for item in items[count * t : count * (t + 1)]]
            assert sum(sum(own, []), []) == drawn
            assert count == 1 or len(own[-1]) == 1
            assert all(len(numbers) <= 2 for numbers in sum(own, []))
            assert items[count * t].draw == t
        assert [x.draw for x in list(batches)[::count]] == [5, 6, 7, 8, 9]


class Jitter(torch.utils.data.Dataset):
    """Records with a random part."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i, float(torch.rand(()))])


def test_physical_batches_are_the_same_whoever_makes_them():
    """In workers or not."""
    found = []
    for workers in (0, 2):
        draws = torch.arange(30).split(10)
        batches = LogicalBatches(draws, torch.Generator(), 4, items=2, seed=5)
        loader = logical_loader(Jitter(), batches, torch.stack, num_workers=workers)
        found.append([batch for item in loader for batch in item])
    for a, b in zip(*found):
        assert a.draw == b.draw and torch.equal(a.inputs, b.inputs)


def test_nobody_knows_noise_and_draws(tmp_path):
    """TrainingArguments.seed, 42 for everybody, fixes neither."""
    privacy = private(privacy_seed=None)
    runs = [trainer(tmp_path, privacy=privacy, max_steps=2) for _ in range(2)]
    for run in runs:
        run.train()
    assert distance(*(weights(run.model) for run in runs)) > 1e-2
    assert runs[0]._training.seed != runs[1]._training.seed


@every_mode
def test_a_batch_or_an_epoch_that_is_left(mode, tmp_path):
    """No draw comes again, and no sum is added to the next, which may have a record."""
    seen, left, begun = [], [], []

    def sums(run):
        return any(p.summed_grad is not None for p in run.model.parameters())

    class Leave(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if not left and sums(run):
                left.append(state.global_step)
                control.should_epoch_stop = True

    class Watching(PrivateTrainer):
        def get_batch_samples(self, *args):
            items, count = super().get_batch_samples(*args)
            seen.extend({batch.draw for item in items for batch in item})
            begun.append(sums(self))
            return items, count

    run = trainer(tmp_path, mode=mode, cls=Watching, max_steps=9, callbacks=[Leave()])
    run.train()
    assert left and len(begun) > left[0] + 1 and not any(begun)
    assert seen == list(range(len(seen))) and len(seen) >= 7


# -- privacy -----------------------------------------------------------------------


def test_target_epsilon_is_kept_and_logged(tmp_path):
    """Over two runs, the first of which is stopped; its checkpoint is for its steps."""

    def stop(state, control, **kwargs):
        control.should_training_stop |= state.global_step == 2 and not run._runs > 1

    given = {**SAVING, "logging_steps": 3, "callbacks": [Watch(stop)]}
    privacy = private(**BUDGET, log_loss=False)
    run = trainer(tmp_path, privacy=privacy, **given | {"max_steps": 6})
    run.train()
    once = run.get_epsilon()
    with pytest.raises(ValueError, match="max_steps: 6 there, 5 here"):
        trainer(tmp_path, privacy=privacy, max_steps=5).train(True)
    output = run.train()
    (first, _, steps), (second, _, more) = history(run)
    assert steps == 2 and more == 6 and second > first
    begin, *rest, end = run.state.log_history
    assert begin["noise_multiplier"] == second and begin["sample_rate"] == 6 / N
    assert begin["expected_batch_size"] == 6 and len(run.get_train_dataloader()) == 14
    assert [entry["step"] for entry in rest] == [3, 6] and run.steps_per_epoch == 7
    assert once < 3.5 and once < rest[0]["epsilon"] < rest[1]["epsilon"] <= 4.0
    assert end["epsilon"] == output.metrics["epsilon"] == run.get_epsilon() > 3.9
    assert all(entry["delta"] == 1e-3 for entry in (*rest, end))
    unknown = {"loss", "train_loss", "grad_norm"}
    assert not any(unknown & entry.keys() for entry in run.state.log_history)
    with pytest.raises(ValueError, match="target_epsilon=4.0 is spent"):
        run.train()


def test_a_greatest_batch_is_kept_and_accounted_for(tmp_path):
    privacy = private(**BUDGET | {"accountant": "prv_bounds", "max_batch_size": 7})
    sizes = []

    class Watching(PrivateTrainer):
        def get_batch_samples(self, *args):
            items, count = super().get_batch_samples(*args)
            sizes.append(count)
            return items, count

    run = trainer(tmp_path, privacy=privacy, cls=Watching, max_steps=7)
    run.train()
    assert max(sizes) == 7 and not history(run)
    (entry,) = run.engine.accountant.mechanisms
    assert entry["max_batch_size"] == 7 and entry["participations"] == 7
    assert entry["sample_rate"] == 6 / N and 3.9 < run.get_epsilon() <= 4
    for changed, message in (
        ({"accountant": "rdp"}, "knows Poisson sampling alone"),
        ({"max_batch_size": 5}, "below the expected batch size"),
    ):
        refused = dataclasses.replace(privacy, **changed)
        with pytest.raises(Refused, match=message):
            trainer(tmp_path, privacy=refused).train()


def test_all_records_in_each_step_and_the_loss_logged(tmp_path):
    """The mean over records, as Trainer logs it."""
    privacy = private(accountant="prv")
    run = trainer(tmp_path, None, texts(5), privacy, max_steps=2, logging_steps=1)
    losses = model_losses(run.model, default_data_collator(texts(5))).mean()
    run.train()
    assert history(run) == [(1.0, 1.0, 2)] and run.get_epsilon() > 1
    logged = run.state.log_history[1]
    assert logged["loss"] == pytest.approx(float(losses), rel=1e-5)
    assert "grad_norm" not in logged


def test_shuffling_is_named_what_it_is(tmp_path):
    run = trainer(tmp_path, privacy=private(poisson_sampling=False), max_steps=7)
    sizes = [sum(b.records for b in item) for item in run.get_train_dataloader()]
    assert [a + b for a, b in zip(sizes[::2], sizes[1::2])] == [6] * 6 + [1]
    run.train()
    assert not any("epsilon" in entry for entry in run.state.log_history)
    assert run.state.log_history[-1]["epsilon_if_poisson"] > 0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"target_delta": 0}, "between 0 and 1"),
        ({"target_delta": None}, "between 0 and 1"),
        ({"target_epsilon": 1.0}, "either target_epsilon or noise_multiplier"),
        ({"noise_multiplier": None}, "either target_epsilon or noise_multiplier"),
        ({**BUDGET, "target_epsilon": 0.0}, "not positive"),
        ({"noise_multiplier": -1.0}, "negative"),
        ({"privacy_seed": -1}, "negative"),
        ({"per_sample_max_grad_norm": 0.0}, "not positive"),
        ({"per_sample_max_grad_norm": [1.0, -1.0]}, "not positive"),
        ({"clipping": "adaptive"}, "'flat', 'automatic'"),
        ({"accountant": "gdp"}, "'prv', 'rdp'"),
        ({"mode": "ew"}, "grad_sample_mode='ew'"),
        ({**BUDGET, "poisson_sampling": False}, "know Poisson sampling alone"),
        ({"max_batch_size": 7, "poisson_sampling": False}, "max_batch_size=7 with"),
    ],
)
def test_privacy_arguments_that_do_not_fit(kwargs, message):
    with pytest.raises(ValueError, match=message):
        private(**kwargs)


def test_privacy_arguments_from_a_command_line():
    """Beside those of Trainer, whose names are other ones."""
    given = (
        "--use_cpu --output_dir out --max_grad_norm 1.0 --seed 7 --target_epsilon 8 "
        "--target_delta 1e-5 --clipping per_layer --per_sample_max_grad_norm 0.5 2 "
        "--privacy_seed 3 --log_loss False"
    )
    parser = HfArgumentParser((PrivacyArguments, transformers.Seq2SeqTrainingArguments))
    parsed, args = parser.parse_args_into_dataclasses(given.split())
    chosen = {"clipping": "per_layer", "per_sample_max_grad_norm": [0.5, 2.0]}
    chosen |= {"privacy_seed": 3, "log_loss": False}
    assert parsed == PrivacyArguments(1e-5, 8.0, **chosen)
    assert args.seed == 7 and args.max_grad_norm == 1.0
    one = "--target_delta 1e-5 --noise_multiplier 1 --per_sample_max_grad_norm 0.1"
    parser = HfArgumentParser((PrivacyArguments,))
    (parsed,) = parser.parse_args_into_dataclasses(one.split())
    assert parsed.per_sample_max_grad_norm == 0.1 and parsed.noise_multiplier == 1


def test_what_is_mostly_a_mistake_is_said(tmp_path):
    for given, message in (
        ({}, None),
        ({"privacy": private(target_delta=1 / N)}, f"over the {N} records or more"),
        ({"gradient_accumulation_steps": N}, f"A batch of {3 * N} "),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            trainer(tmp_path, **given)
        (*told,) = (str(w.message) for w in found if "records" in str(w.message))
        assert not told if message is None else message in told[0]


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    "name, value",
    [
        ("max_grad_norm", 0.5),
        ("torch_compile", True),
        ("use_liger_kernel", True),
        ("neftune_noise_alpha", 5.0),
        ("auto_find_batch_size", True),
        ("include_num_input_tokens_seen", "all"),
        ("ignore_data_skip", True),
        ("debug", "underflow_overflow"),
        ("data_seed", 0),
        ("dataloader_drop_last", True),
        ("dataloader_in_order", False),
        ("train_sampling_strategy", "group_by_length"),
        ("optim", "lomo"),
        ("optim", "galore_adamw_layerwise"),
        ("optim", "schedule_free_adamw"),
        ("fp16", True),
        ("_n_gpu", 2),
        ("deepspeed", "zero.json"),
        ("fsdp", True),
        ("hub_strategy", "all_checkpoints"),
    ],
)
def test_arguments_that_break_privacy(name, value, tmp_path):
    args, model = arguments(tmp_path), gpt2()
    object.__setattr__(args, name, value)
    object.__setattr__(args, "push_to_hub", name == "hub_strategy")
    state = torch.get_rng_state()
    with pytest.raises(ValueError, match=f"{name.strip('_')}="):
        PrivateTrainer(model, args, train_dataset=texts(), privacy=private())
    assert torch.equal(state, torch.get_rng_state())  # set_seed was not reached


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts())


class Old(PrivateTrainer):
    def get_train_dataloader(self):
        super().get_train_dataloader()
        return DataLoader(self.train_dataset, 3, collate_fn=default_data_collator)

    def get_batch_samples(self, iterator, count, device):
        return [next(iterator) for _ in range(count)], None


class Rows(PrivateTrainer):
    def compute_loss(self, model, inputs, **kwargs):
        return model(**inputs).logits


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(T), nn.Linear(T, 2)

    def forward(self, input_ids, labels):
        return {"loss": self.head(self.norm(input_ids.float())).mean()}


def halves(records):
    batch = default_data_collator(records)
    return {key: x.reshape(2 * len(x), -1) for key, x in batch.items()}


@pytest.mark.parametrize(
    "given, message",
    [
        ({"data": Stream()}, "a data set with a length"),
        ({"data": []}, "a data set with a length"),
        ({"data": {"train": texts(), "test": texts()}}, "several data sets by name"),
        ({"privacy": {"target_epsilon": 8.0}}, "privacy=PrivacyArguments"),
        ({"data_collator": DataCollatorWithFlattening()}, "packs the records"),
        ({"data_collator": halves}, "made 6 samples of 3 records"),
        ({"cls": Rows}, "The loss of a record is not one number"),
        ({"cls": Old}, "get_train_dataloader draws"),
        ({"model": Normalized()}, "BatchNorm"),
    ],
)
def test_what_is_refused_leaves_the_model_as_it_was(given, message, tmp_path):
    model = given.get("model", gpt2())
    before = weights(model)
    with pytest.raises(Exception, match=message):
        run = trainer(tmp_path, **{"model": model, **given})
        run.train()
    assert distance(before, weights(model)) == 0
    assert not any(hasattr(p, "grad_sample") for p in model.parameters())


def test_hyperparameter_search(tmp_path):
    with pytest.raises(Refused, match="Each trial"):
        trainer(tmp_path).hyperparameter_search()


def test_other_trainers_in_the_bases(tmp_path):
    """A compute_loss of one's own is given single records; it need not be known."""

    class Other(transformers.Trainer):
        def __init__(self, *args, scale, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale

        def compute_loss(self, model, inputs, **kwargs):
            assert len(inputs["input_ids"]) == 1
            return self.scale * model(**inputs).loss

    class Scaled(PrivateTrainer, Other):
        pass

    class Seq2Seq(PrivateTrainer, transformers.Seq2SeqTrainer):
        pass

    args, runs = arguments(tmp_path, max_steps=2), []
    kept = {f.name: getattr(args, f.name) for f in dataclasses.fields(args) if f.init}
    other = transformers.Seq2SeqTrainingArguments(**kept)
    for cls, more in ((Scaled, {"scale": 1.0}), (Seq2Seq, {}), (PrivateTrainer, {})):
        given = {"train_dataset": texts(), "privacy": private(), **more}
        run = cls(gpt2(), other if cls is Seq2Seq else args, **given)
        run.train()
        runs.append(weights(run.model))
    assert distance(runs[0], runs[2]) < 1e-6 and distance(runs[1], runs[2]) == 0
    with pytest.raises(Refused, match="no records that can be drawn"):
        Scaled(gpt2(), train_dataset=[], scale=1.0, privacy=private())
    with pytest.raises(Refused, match=r"Write class Wrong\(PrivateTrainer, Other\)"):
        type("Wrong", (Other, PrivateTrainer), {})


def test_collators_that_keep_records_apart(tmp_path):
    words = tokenizer()
    plain = [{"input_ids": x["input_ids"]} for x in sentences()]
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(vocab_size=V, decoder_start_token_id=0, **sizes)
    )
    pairs = [{**x, "labels": x["input_ids"][: 2 + i % 3]} for i, x in enumerate(plain)]
    for model, data, collator in (
        (bert(), sentences(), DataCollatorWithPadding(words)),
        (gpt2(), plain, DataCollatorForLanguageModeling(words, mlm=False)),
        (t5, pairs, DataCollatorForSeq2Seq(words, t5)),
    ):
        before = weights(model)
        run = trainer(tmp_path, model, data, data_collator=collator, max_steps=2)
        run.train()
        assert distance(before, weights(model)) > 1e-3
        assert history(run) == [(1.0, 6 / N, 2)]


# -- checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_resumed_run_is_the_one_that_was_not_stopped(mode, tmp_path):
    """In the middle of an epoch, with dropout, random masks, Adam and evaluation."""
    data = [{"input_ids": x["input_ids"]} for x in sentences()]
    saving = {"save_strategy": "steps", "save_steps": 4, "logging_steps": 4}
    adam = {"optim": "adamw_torch", "learning_rate": 1e-2, "max_steps": 9}
    evaluated = {"eval_dataset": data[:5], "eval_strategy": "epoch"}

    def make(**given):
        model, collate = bert("ForMaskedLM", 0.2), DataCollatorForLanguageModeling
        given |= {"data_collator": collate(tokenizer()), "mode": mode}
        return trainer(tmp_path, model, data, **saving, **adam, **evaluated, **given)

    whole = make(dataloader_num_workers=2 * (mode == "hooks"))
    whole.train()
    losses = [x["loss"] for x in whole.state.log_history if "loss" in x]
    os.rename(tmp_path / "checkpoint-9", tmp_path / "gone")
    for checkpoint in (str(tmp_path / "checkpoint-4"), True):
        other = make()
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


def test_a_checkpoint_resumed_twice(tmp_path):
    """The same draws; other noise, unless it is asked to be the same."""

    def make(repeat_noise):
        return trainer(tmp_path, privacy=private(repeat_noise=repeat_noise), **SAVING)

    whole, found = make(False), []
    whole.train()
    for repeat_noise in (False, False, True, True):
        run = make(repeat_noise)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert history(run) == [(1.0, 6 / N, 4)]
        found.append(weights(run.model))
    first, second, same, again = found
    assert distance(first, second) > 1e-2 and distance(first, same) > 1e-2
    assert distance(same, again) == distance(same, weights(whole.model)) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run = trainer(out, max_steps=4, save_strategy="steps", save_steps=3)
    run.train()
    return out / "checkpoint-3"


@pytest.mark.parametrize(
    "name, value",
    [
        ("grad_sample_mode", "ghost"),
        ("noise_multiplier", 2.0),
        ("per_sample_max_grad_norm", 2.0),
        ("clipping", "automatic"),
        ("target_delta", 1e-4),
        ("accountant", "prv"),
        ("poisson_sampling", False),
        ("records", 36),
        ("logical_batch_size", 9),
    ],
)
def test_a_checkpoint_of_another_run(name, value, checkpoint, tmp_path):
    data, kwargs, privacy = texts(), {}, private()
    if name == "records":
        data = data[:value]
    elif name == "logical_batch_size":
        kwargs = {"gradient_accumulation_steps": 3}
    else:
        privacy = dataclasses.replace(privacy, **{name: value})
    run = trainer(tmp_path, None, data, privacy, **kwargs)
    before = weights(run.model)
    with pytest.raises(ValueError, match=f"be the same: {name}: .* there, .* here"):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert distance(before, weights(run.model)) == 0 and history(run) == []


def test_a_checkpoint_resumed_in_other_physical_batches(checkpoint, tmp_path):
    """What fits into memory may change; the logical batch is the same."""
    runs = []
    for physical, items in ((3, 2), (2, 3), (6, 1)):
        sizes = {"per_device_train_batch_size": physical, "max_steps": 6, **CONSTANT}
        run = trainer(tmp_path, gradient_accumulation_steps=items, **sizes)
        run.train(resume_from_checkpoint=str(checkpoint))
        runs.append(weights(run.model))
    assert distance(runs[0], runs[1]) < 1e-6 and distance(runs[0], runs[2]) < 1e-6


def test_a_checkpoint_without_privacy(tmp_path):
    trainer(tmp_path, **SAVING, save_only_model=True).train()
    with pytest.raises(ValueError, match="checkpoint-4 has no privacy.pt"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


def test_a_checkpoint_that_was_not_finished(checkpoint, tmp_path, monkeypatch):
    """
    Cut short, or with files of another checkpoint: killed while weights are written to
    a folder that there was, it holds them without the privacy state of others.
    """
    folder = tmp_path / "checkpoint-3"
    shutil.copytree(checkpoint, folder)
    run, state = trainer(tmp_path), folder / "privacy.pt"
    whole = state.read_bytes()
    for length in (0, len(whole) // 2, len(whole) - 1):
        state.write_bytes(whole[:length])
        with pytest.raises(Refused, match="privacy.pt can't be read: it was cut short"):
            run.train(resume_from_checkpoint=str(folder))
    state.write_bytes(whole)
    for text in ('{"global_step": 2}', '{"global_st'):
        (folder / "trainer_state.json").write_text(text)
        with pytest.raises(Refused, match="privacy.pt of step 3, and trainer_state"):
            run.train(resume_from_checkpoint=str(folder))
    assert history(run) == []

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("opacus_ext.checkpoints.write", killed)
    other = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    with pytest.raises(KeyboardInterrupt):
        other.train()
    with pytest.raises(Refused, match="the process was killed while it wrote"):
        run.train(resume_from_checkpoint=str(folder))


def test_what_is_saved_is_an_ordinary_model(tmp_path):
    run = trainer(tmp_path, max_steps=2)
    run.train()
    once, before = run.get_epsilon(), weights(run.model)
    run.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert distance(weights(saved), weights(run.model)) == 0
    assert PRIVACY_STATE not in os.listdir(tmp_path / "saved")
    for p in run.model.parameters():
        assert p.grad is None
        assert not any(hasattr(p, name) for name in ("grad_sample", "summed_grad"))
    assert not any(m._forward_hooks for m in run.model.modules())
    assert type(run.optimizer) is torch.optim.SGD
    run.train()  # which adds up
    assert history(run) == [(1.0, 6 / N, 4)] and run.get_epsilon() > once
    assert distance(before, weights(run.model)) > 1e-3


# -- evaluation and errors ---------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_evaluation_changes_nothing(family, tmp_path):
    """Of a model of from_pretrained, which is in evaluation mode, as it leaves one."""
    data = [{**x, "labels": i % 2} for i, x in enumerate(texts())]
    model, data = (bert(), data) if family == "bert" else (gpt2(), texts())
    model.config.update({"attn_pdrop": 0.1, "hidden_dropout_prob": 0.1})
    model.save_pretrained(tmp_path / "model")
    found = []
    for strategy in ("no", "steps"):
        model = type(model).from_pretrained(tmp_path / "model")
        evaluated = {"eval_dataset": data[:4], "eval_strategy": strategy}
        run = trainer(tmp_path, model, data, max_steps=3, eval_steps=1, **evaluated)
        if strategy == "steps":
            run.evaluate()
        run.train()
        assert history(run) == [(1.0, 6 / N, 3)]
        found.append(weights(run.model))
        logged = [x["eval_loss"] for x in run.state.log_history if "eval_loss" in x]
        metrics = run.predict(data[:4]).metrics
        assert not logged or metrics["test_loss"] == pytest.approx(logged[-1])
        run.train()  # from evaluation mode again
        assert distance(found[-1], weights(run.model)) > 1e-3
    assert distance(*found) == 0


def test_the_best_model_is_loaded(tmp_path):
    evaluated = {"eval_dataset": texts(10), "eval_strategy": "steps", "eval_steps": 2}
    best = {"load_best_model_at_end": True, "max_steps": 6}
    run = trainer(tmp_path, **evaluated, **SAVING | best)
    run.train()
    scores = [x["eval_loss"] for x in run.state.log_history if "eval_loss" in x]
    path = tmp_path / f"checkpoint-{2 * scores.index(min(scores)) + 2}"
    assert run.state.best_model_checkpoint == str(path)
    saved = transformers.GPT2LMHeadModel.from_pretrained(path)
    assert distance(weights(saved), weights(run.model)) == 0


@every_mode
def test_an_error_in_a_step_leaves_no_trace(mode, tmp_path):
    """In the second part of the third step; then the trainer trains on."""

    class Failing(PrivateTrainer):
        calls = 0

        def _prepare_inputs(self, inputs):
            Failing.calls += 1
            if Failing.calls == 4:
                raise OSError("disk")
            return super()._prepare_inputs(inputs)

    kept = []

    def keep(state, control, model, optimizer, **kwargs):
        kept.append((weights(model), copy.deepcopy(optimizer.state_dict())))

    given = {"optim": "adamw_torch", "max_steps": 4, "callbacks": [Watch(keep)]}
    run = trainer(tmp_path, mode=mode, cls=Failing, **given)
    with pytest.raises(OSError):
        run.train()
    before, state = kept[-1]
    steps = len(kept)
    assert distance(before, weights(run.model)) == 0
    now = run.optimizer.state_dict()["state"]
    for key, entry in state["state"].items():
        for name, x in entry.items():
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(now[key][name]))
    assert history(run) == [(1.0, 6 / N, steps)]
    assert not any(hasattr(p, "summed_grad") for p in run.model.parameters())
    run.train()
    assert history(run) == [(1.0, 6 / N, steps + 4)]


# -- what works with it ------------------------------------------------------------


@every_mode
def test_activation_checkpointing_and_bf16(mode, tmp_path):
    runs = []
    for given in ({}, {"gradient_checkpointing": True}, {"bf16": True}):
        privacy = private(mode, noise_multiplier=0.0)
        run = trainer(tmp_path, privacy=privacy, max_steps=2, **given)
        run.train()
        runs.append(weights(run.model))
    assert distance(runs[0], runs[1]) < 1e-6
    assert 0 < distance(runs[0], runs[2]) < 0.02 * distance(runs[0], weights(gpt2()))


@every_mode
def test_lora(mode, tmp_path):
    peft = pytest.importorskip("peft")
    config = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": ["c_attn"]}

    def make():
        model = peft.get_peft_model(gpt2(), peft.LoraConfig(**config))
        return trainer(tmp_path, model, mode=mode, **SAVING)

    run, other = make(), make()
    frozen = weights(run.model)
    run.train()
    for name, p in weights(run.model).items():
        assert torch.equal(p, frozen[name]) != ("lora" in name)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-4")
    assert distance(weights(loaded), weights(run.model)) == 0


def test_optimizer_and_schedule_of_ones_own(tmp_path):
    """Steps of the schedule are logical batches."""
    model, rates = gpt2(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))

    def watch(state, control, optimizer, **kwargs):
        rates.append(optimizer.param_groups[0]["lr"])

    given = {"optimizers": (optimizer, schedule), "callbacks": [Watch(watch)]}
    run = trainer(tmp_path, model, **given, max_steps=3)
    run.train()
    assert rates == pytest.approx([1e-2 / t for t in (2, 3, 4)])
    assert run.optimizer is optimizer


def test_model_init_and_per_layer_bounds(tmp_path):
    bounds = [0.1] * len(list(gpt2().parameters()))
    privacy = private(clipping="per_layer", per_sample_max_grad_norm=bounds)
    run = trainer(tmp_path, model_init=lambda: gpt2(), privacy=privacy, max_steps=2)
    run.train()
    first = run.model
    run.train()
    assert run.model is not first and history(run) == [(1.0, 6 / N, 4)]
