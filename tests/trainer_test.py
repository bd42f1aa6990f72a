"""transformers' Trainer with differential privacy.

The oracle of a run is a plain loop with PrivacyEngine and BatchMemoryManager over the
same draws and with the same noise; that of a step is each record alone through plain
autograd; that of a resumed run is the run that was not stopped.
"""

import copy
import dataclasses
import os
import shutil
import warnings
from typing import Optional

import pytest
import torch
import transformers
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
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
from opacus_ext.data.logical import LogicalBatches, Part, derive_seed, logical_loader
from opacus_ext.losses import PerRecord, PerSample, cross_entropy, model_losses
from opacus_ext.refused import Refused
from opacus_ext.trainer import PRIVACY_STATE, PrivacyArguments, PrivateTrainer

from .common import every_mode

pytestmark = pytest.mark.filterwarnings("ignore")
N, V, T = 37, 30, 8


@pytest.fixture(autouse=True, scope="module")
def quiet():
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield


def gpt2(dropout=0.0):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=V,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
    )
    return transformers.GPT2LMHeadModel(config)


def bert(head="ForSequenceClassification", dropout=0.0, **kwargs):
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
        **kwargs,
    )
    return getattr(transformers, f"Bert{head}")(config)


def texts(n=N, **more):
    """Records whose labels are their tokens, the first ones of them ignored."""
    generator = torch.Generator().manual_seed(1)
    records = []
    for i in range(n):
        ids = torch.randint(1, V, (T,), generator=generator)
        labels = ids.clone()
        labels[: i % 4] = -100
        records.append({"input_ids": ids, "labels": labels, **more})
    return records


def sentences(n=N, longest=T):
    """Records of different lengths with a class."""
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "input_ids": torch.randint(5, V, (length,), generator=generator).tolist(),
            "labels": int(torch.randint(0, 2, (), generator=generator)),
        }
        for length in (3 + i % (longest - 2) for i in range(n))
    ]


def tokenizer():
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(V)}
    special = {"[PAD]": V - 1, "[UNK]": V - 2, "[MASK]": V - 3}
    words = {w: i for w, i in words.items() if i < V - 3} | special
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="[UNK]")),
        **{"pad_token": "[PAD]", "unk_token": "[UNK]", "mask_token": "[MASK]"},
    )


def private(mode="ghost_bk", **kwargs):
    kwargs = {"noise_multiplier": 1.0, "target_delta": 1e-3, "privacy_seed": 3} | kwargs
    kwargs = {"accountant": "rdp", "repeat_noise": True} | kwargs
    return PrivacyArguments(grad_sample_mode=mode, **kwargs)


def arguments(out, **kwargs):
    chosen = {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 2,
        "max_steps": 5,
        "learning_rate": 0.1,
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


def plain_loop(model, records, privacy, steps, logical=6, physical=3, lr=0.1):
    """PrivacyEngine and BatchMemoryManager over the draws of a run; the draws."""
    rate, seed = logical / len(records), derive_seed(privacy.privacy_seed, 0)
    generator, draws = torch.Generator(), []
    for t in range(steps):
        generator.manual_seed(derive_seed(seed, "draw", t))
        keys = torch.rand(len(records), generator=generator, dtype=torch.float64)
        drawn = keys < rate
        draws.append(drawn.nonzero().flatten().tolist())
    engine = PrivacyEngine(accountant="rdp")
    model.train()
    decayed = PrivateTrainer.get_decay_parameter_names(None, model)
    groups = [[], []]  # Trainer's, in whose order noise is drawn
    for name, p in model.named_parameters():
        groups[name not in decayed].append(p)
    made = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([{"params": group} for group in groups], lr=lr),
        criterion=PerSample(),
        data_loader=DataLoader(
            records,
            batch_sampler=draws,
            collate_fn=lambda some: default_data_collator(some) if some else None,
        ),
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.per_sample_max_grad_norm,
        clipping=privacy.clipping,
        grad_sample_mode=privacy.grad_sample_mode,
        poisson_sampling=False,
        noise_generator=torch.Generator().manual_seed(derive_seed(seed, "noise")),
    )
    model, optimizer, *criterion, loader = made
    criterion = criterion[0] if criterion else PerSample()
    optimizer.expected_batch_size = logical
    with BatchMemoryManager(
        data_loader=loader, max_physical_batch_size=physical, optimizer=optimizer
    ) as loader:
        for batch in loader:
            optimizer.zero_grad()
            criterion(model_losses(model, batch)).backward()
            optimizer.step()
    return draws


@pytest.mark.parametrize(
    "mode, clipping",
    [
        ("hooks", "flat"),
        ("ghost", "automatic"),
        ("ghost_bk", "flat"),
        ("ghost_bk", "automatic"),
        ("scan", "flat"),
    ],
)
def test_a_run_is_that_of_a_plain_loop(mode, clipping, tmp_path):
    """With Trainer's max_grad_norm at its default; more steps than an epoch has."""
    privacy = private(mode, per_sample_max_grad_norm=0.5, clipping=clipping)
    expected = gpt2()
    before = weights(expected)
    draws = plain_loop(expected, texts(), privacy, steps=9)
    run = trainer(tmp_path, privacy=privacy, max_steps=9, lr_scheduler_type="constant")
    run.train()
    assert distance(weights(run.model), weights(expected)) < 1e-6
    assert distance(weights(run.model), before) > 1e-3
    assert max(map(len, draws)) > 6 and len(draws[0]) != len(draws[1])
    assert run.engine.accountant.history == [(1.0, 6 / N, 9)]


@every_mode
def test_a_step_sums_clipped_gradients_of_single_records(mode, tmp_path):
    model, bound = gpt2(), 0.3
    before = weights(model)
    privacy = private(mode, noise_multiplier=0.0, per_sample_max_grad_norm=bound)
    run = trainer(
        tmp_path, model, privacy=privacy, max_steps=1, lr_scheduler_type="constant"
    )
    items = [part for item in list(first_items(run, 2)) for part in item]
    records = torch.cat([part.inputs["input_ids"] for part in items])
    labels = torch.cat([part.inputs["labels"] for part in items])
    total = {name: torch.zeros_like(p) for name, p in before.items()}
    for ids, label in zip(records, labels):
        model.zero_grad()
        model(input_ids=ids[None], labels=label[None]).loss.backward()
        norm = sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt()
        for name, p in model.named_parameters():
            total[name] += p.grad * min(1, bound / (float(norm) + 1e-6))
    model.zero_grad()
    run.train()
    for name, p in model.named_parameters():
        update = (before[name] - p) * 6 / 0.1
        torch.testing.assert_close(update, total[name], rtol=1e-4, atol=1e-5)
    assert run.get_epsilon() == float("inf")


def first_items(run, count):
    """What a run will draw, read before it begins."""
    run._seed, run._draw = derive_seed(run.privacy.privacy_seed, 0), 0
    items = iter(run.get_train_dataloader())
    return [next(items) for _ in range(count)]


@every_mode
def test_a_draw_without_records_is_a_step_of_noise(mode, tmp_path):
    """GPT-2 can't run on B = 0; 8 of 9 records are left out of most draws."""
    for seed in range(20):
        run = trainer(
            tmp_path,
            gpt2(),
            texts(9),
            private(mode, privacy_seed=seed),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            max_steps=4,
            lr_scheduler_type="constant",
        )
        sizes = [sum(p.records for p in item) for item in first_items(run, 4)]
        if sizes[0] and 0 in sizes:
            break
    steps = []

    class Watch(TrainerCallback):
        def on_step_end(self, *args, model, **kwargs):
            steps.append(weights(model))

    run.add_callback(Watch())
    run.train()
    empty = sizes.index(0)
    moved = distance(steps[empty], steps[empty - 1])
    assert 0.1 < moved < 1  # noise of 1, lr 0.1, one record expected
    assert run.engine.accountant.history == [(1.0, 1 / 9, 4)]
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


# -- draws -------------------------------------------------------------------------


def test_items_of_a_logical_batch():
    draws = [list(range(n)) for n in (0, 1, 4, 5, 9)]
    batches = LogicalBatches(draws, torch.Generator(), 2, items=2, seed=0)
    items = list(batches)
    assert len(items) == len(batches) == 10
    for t, drawn in enumerate(draws):
        first, last = (item.parts for item in items[2 * t : 2 * t + 2])
        assert sum(first + last, []) == drawn
        assert len(last) == 1
        assert all(len(part) <= 2 for part in first + last)
        assert items[2 * t].draw == t
    assert [item.draw for item in list(batches)[::2]] == [5, 6, 7, 8, 9]


class Jitter(torch.utils.data.Dataset):
    """Records with a random part."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        return torch.tensor([i, float(torch.rand(()))])


def test_parts_are_the_same_whoever_makes_them():
    """In workers or not, at once or after those before were skipped."""

    def read(first=0, **kwargs):
        generator = torch.Generator()
        shuffled = RandomSampler(range(N), generator=generator)
        batches = LogicalBatches(
            BatchSampler(shuffled, 10, False),
            generator,
            4,
            items=2,
            seed=5,
            first=first,
        )
        items = list(logical_loader(Jitter(), batches, torch.stack, **kwargs))
        return [part for item in items for part in item]

    alone, workers = read(), read(num_workers=2)
    assert len(alone) == len(workers)
    for a, b in zip(alone, workers):
        assert a.draw == b.draw and torch.equal(a.inputs, b.inputs)
    assert not torch.equal(alone[0].inputs, read(first=1)[0].inputs)


def test_sampling_is_poisson(tmp_path):
    """Each record with probability 6 / N, for itself."""
    run, steps = trainer(tmp_path), 420
    drawn = torch.zeros(steps, N)
    sampler = run.get_train_dataloader().batch_sampler
    for _ in range(steps // 7):
        for item in sampler:
            for part in item.parts:
                assert len(part) <= 3
                drawn[item.draw, part] += 1
    assert drawn.max() == 1
    rate, sizes, variance = drawn.mean(0), drawn.sum(1), 6 / N * (1 - 6 / N)
    assert (rate - 6 / N).abs().max() < 4 * (variance / steps) ** 0.5
    assert 0.8 < sizes.var() / (N * variance) < 1.25
    run = trainer(
        tmp_path,
        gpt2(),
        texts(93),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
    )
    assert run.steps_per_epoch == len(run.get_train_dataloader()) == 93


def test_nobody_knows_noise_and_draws(tmp_path):
    """TrainingArguments.seed, 42 for everybody, fixes neither."""
    privacy = private(privacy_seed=None)
    runs = [trainer(tmp_path, privacy=privacy, max_steps=2) for _ in range(2)]
    for run in runs:
        run.train()
    assert distance(*(weights(run.model) for run in runs)) > 1e-2
    assert runs[0]._seed != runs[1]._seed


def test_an_epoch_left_early_repeats_no_draw(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step == 3

    seen = []

    class Watch(PrivateTrainer):
        def get_batch_samples(self, *args):
            items, count = super().get_batch_samples(*args)
            seen.extend({part.draw for item in items for part in item})
            return items, count

    run = Watch(
        gpt2(),
        arguments(tmp_path, max_steps=9),
        train_dataset=texts(),
        privacy=private(),
        callbacks=[Stop()],
    )
    run.train()
    assert seen == list(range(len(seen))) and len(seen) >= 9


@every_mode
def test_a_logical_batch_left_in_the_middle_is_forgotten(mode, tmp_path):
    """Its sum must not be added to the next one, where a record may be again."""
    left, begun = [], []

    def sums(run):
        return [p.summed_grad is not None for p in run.model.parameters()]

    class Leave(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            if not left and any(sums(run)):
                left.append(state.global_step)
                control.should_epoch_stop = True

    class Watch(PrivateTrainer):
        def get_batch_samples(self, *args):
            found = super().get_batch_samples(*args)
            begun.append(any(sums(self)))
            return found

    run = Watch(
        gpt2(),
        arguments(tmp_path, gradient_accumulation_steps=2, max_steps=9),
        train_dataset=texts(),
        privacy=private(mode),
        callbacks=[Leave()],
    )
    run.train()
    assert left and len(begun) > left[0] + 1 and not any(begun)


# -- privacy -----------------------------------------------------------------------


def test_target_epsilon_is_kept_and_logged(tmp_path):
    privacy = private(noise_multiplier=None, target_epsilon=4.0, log_loss=False)
    run = trainer(
        tmp_path, privacy=privacy, max_steps=-1, num_train_epochs=2, logging_steps=5
    )
    output = run.train()
    begin, *rest, end = run.state.log_history
    entry = begin["noise_multiplier"], 6 / N, 14
    assert run.engine.accountant.history == [entry]
    assert begin["sample_rate"] == 6 / N and begin["expected_batch_size"] == 6
    assert [entry["step"] for entry in rest] == [5, 10]
    assert 0 < rest[0]["epsilon"] < rest[1]["epsilon"] < end["epsilon"] <= 4.0
    assert end["epsilon"] == output.metrics["epsilon"] == run.get_epsilon() > 3.9
    assert all(entry["delta"] == 1e-3 for entry in (*rest, end))
    unknown = {"loss", "train_loss", "grad_norm"}
    assert not any(unknown & entry.keys() for entry in run.state.log_history)
    with pytest.raises(ValueError, match="target_epsilon=4.0 is spent"):
        run.train()


def test_what_is_left_of_a_budget_is_for_the_next_run(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop |= state.global_step == 2 and not run._runs > 1

    privacy = private(noise_multiplier=None, target_epsilon=4.0)
    run = trainer(tmp_path, privacy=privacy, max_steps=6, callbacks=[Stop()])
    run.train()
    once = run.get_epsilon()
    run.train()
    (first, _, steps), (second, _, more) = run.engine.accountant.history
    assert steps == 2 and more == 6 and second > first
    assert once < 3.5 < 3.9 < run.get_epsilon() <= 4.0


def test_a_greatest_batch_is_kept_and_accounted_for(tmp_path):
    privacy = private(
        noise_multiplier=None,
        target_epsilon=4.0,
        accountant="prv_bounds",
        max_batch_size=7,
    )
    run = trainer(tmp_path, privacy=privacy, max_steps=7)
    sizes = [sum(p.records for p in item) for item in first_items(run, 14)]
    sizes = [a + b for a, b in zip(sizes[::2], sizes[1::2])]
    run.train()
    assert max(sizes) == 7 and run.optimizer is not None
    (entry,) = run.engine.accountant.mechanisms
    assert entry["max_batch_size"] == 7 and entry["participations"] == 7
    assert entry["sample_rate"] == 6 / N and not run.engine.accountant.history
    assert 3.9 < run.get_epsilon() <= 4
    for changed, message in (
        ({"accountant": "rdp"}, "knows Poisson sampling alone"),
        ({"max_batch_size": 5}, "below the expected batch size"),
    ):
        refused = dataclasses.replace(privacy, **changed)
        with pytest.raises(Refused, match=message):
            trainer(tmp_path, privacy=refused).train()
    with pytest.raises(Refused, match="max_batch_size=7 with poisson_sampling=False"):
        private(max_batch_size=7, poisson_sampling=False)


def test_all_records_in_each_step(tmp_path):
    privacy = private(accountant="prv")
    run = trainer(tmp_path, gpt2(), texts(5), privacy, max_steps=2)
    run.train()
    assert run.engine.accountant.history == [(1.0, 1.0, 2)] and run.get_epsilon() > 1


def test_the_loss_logged_is_the_mean_over_records(tmp_path):
    privacy = private(noise_multiplier=0.0)
    run = trainer(tmp_path, privacy=privacy, max_steps=1, logging_steps=1)
    parts = [part for item in first_items(run, 2) for part in item]
    with torch.no_grad():
        losses = [
            model_losses(run.model, part.inputs) for part in parts if part.records
        ]
    run.train()
    logged = run.state.log_history[1]
    assert logged["loss"] == pytest.approx(float(torch.cat(losses).mean()), rel=1e-5)
    assert "grad_norm" not in logged


def test_training_again_adds_up(tmp_path):
    run = trainer(tmp_path, max_steps=3)
    run.train()
    once, before = run.get_epsilon(), weights(run.model)
    run.train()
    assert run.engine.accountant.history == [(1.0, 6 / N, 6)]
    assert run.get_epsilon() > once and distance(before, weights(run.model)) > 1e-3


def test_shuffling_is_named_what_it_is(tmp_path):
    run = trainer(tmp_path, privacy=private(poisson_sampling=False), max_steps=7)
    sizes = [sum(p.records for p in item) for item in first_items(run, 14)]
    assert sum(sizes) == N and [a + b for a, b in zip(sizes[::2], sizes[1::2])] == [
        6,
        6,
        6,
        6,
        6,
        6,
        1,
    ]
    run.train()
    for entry in run.state.log_history:
        assert "epsilon" not in entry
    assert run.state.log_history[-1]["epsilon_if_poisson"] > 0


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"target_delta": 0}, "between 0 and 1"),
        ({"target_delta": None}, "between 0 and 1"),
        ({"target_epsilon": 1.0}, "either target_epsilon or noise_multiplier"),
        ({"noise_multiplier": None}, "either target_epsilon or noise_multiplier"),
        ({"noise_multiplier": None, "target_epsilon": 0.0}, "not positive"),
        ({"noise_multiplier": -1.0}, "negative"),
        ({"privacy_seed": -1}, "negative"),
        ({"per_sample_max_grad_norm": 0.0}, "not positive"),
        ({"per_sample_max_grad_norm": [1.0, -1.0]}, "not positive"),
        ({"clipping": "adaptive"}, "'flat', 'automatic'"),
        ({"accountant": "gdp"}, "'prv', 'rdp'"),
        (
            {
                "noise_multiplier": None,
                "target_epsilon": 1.0,
                "poisson_sampling": False,
            },
            "know Poisson sampling alone",
        ),
    ],
)
def test_privacy_arguments_that_do_not_fit(kwargs, message):
    with pytest.raises(ValueError, match=message):
        private(**kwargs)
    with pytest.raises(ValueError, match="grad_sample_mode='ew'"):
        private("ew")


@pytest.mark.examples
def test_privacy_arguments_from_a_command_line(capsys):
    """Beside all that scripts of transformers and TRL have."""
    trl = pytest.importorskip("trl")

    @dataclasses.dataclass
    class DataTrainingArguments:  # as in run_clm and run_glue
        model_name_or_path: Optional[str] = None
        task_name: Optional[str] = None
        block_size: Optional[int] = None
        max_seq_length: int = 128
        max_train_samples: Optional[int] = None
        streaming: bool = False

    scripts = (trl.ScriptArguments, trl.ModelConfig, trl.DatasetMixtureConfig)
    given = (
        "--use_cpu --output_dir out --max_grad_norm 1.0 --seed 7 --target_epsilon 8 "
        "--target_delta 1e-5 --clipping per_layer --per_sample_max_grad_norm 0.5 2 "
        "--privacy_seed 3 --log_loss False --no_poisson_sampling"
    )
    for others in (
        (TrainingArguments, DataTrainingArguments),
        (transformers.Seq2SeqTrainingArguments, DataTrainingArguments),
        (trl.SFTConfig, *scripts),
        (trl.DPOConfig, *scripts),
    ):
        parser = HfArgumentParser((PrivacyArguments, *others))
        with pytest.raises(ValueError, match="poisson_sampling=False"):
            parser.parse_args_into_dataclasses(given.split())
        parsed, args, *_ = parser.parse_args_into_dataclasses(given.split()[:-1])
        assert parsed == PrivacyArguments(
            1e-5,
            8.0,
            clipping="per_layer",
            per_sample_max_grad_norm=[0.5, 2.0],
            privacy_seed=3,
            log_loss=False,
        )
        assert args.seed == 7 and args.max_grad_norm == 1.0
        assert "--per_sample_max_grad_norm" in parser.format_help()
    parser = HfArgumentParser((PrivacyArguments,))
    with pytest.raises(SystemExit):
        parser.parse_args_into_dataclasses(["--target_epsilon", "8"])
    assert "arguments are required: --target_delta" in capsys.readouterr().err
    one = ["--target_delta", "1e-5", "--noise_multiplier", "1"]
    (parsed,) = parser.parse_args_into_dataclasses(one)
    assert parsed == PrivacyArguments(1e-5, noise_multiplier=1.0)
    one += ["--per_sample_max_grad_norm", "0.1"]
    (parsed,) = parser.parse_args_into_dataclasses(one)
    assert parsed.per_sample_max_grad_norm == 0.1


@pytest.mark.parametrize("name", ["max_grad_norm", "seed"])
def test_names_that_are_training_arguments(name):
    with pytest.raises(Refused, match=f"Write p.*{name}=2"):
        PrivacyArguments(1e-5, 8.0, **{name: 2})


def test_what_is_mostly_a_mistake_is_said(tmp_path):
    def said(run):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            run()
        return [str(w.message) for w in found if "records" in str(w.message)]

    assert not said(lambda: trainer(tmp_path))
    (delta,) = said(lambda: trainer(tmp_path, privacy=private(target_delta=1 / N)))
    assert f"one over the {N} records or more" in delta
    (size,) = said(lambda: trainer(tmp_path, gradient_accumulation_steps=N))
    assert f"A batch of {3 * N} " in size and f"more than the {N} records" in size


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    "kwargs",
    [
        {"max_grad_norm": 0.5},
        {"torch_compile": True},
        {"use_liger_kernel": True},
        {"neftune_noise_alpha": 5.0},
        {"auto_find_batch_size": True},
        {"include_num_input_tokens_seen": "all"},
        {"ignore_data_skip": True},
        {"debug": "underflow_overflow"},
        {"data_seed": 0},
        {"data_seed": 7},
        {"dataloader_drop_last": True},
        {"dataloader_in_order": False},
        {"train_sampling_strategy": "group_by_length"},
        {"train_sampling_strategy": "sequential"},
        {"optim": "lomo"},
        {"optim": "galore_adamw_layerwise", "optim_target_modules": ["attn"]},
        {"optim": "schedule_free_adamw"},
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_arguments_that_break_privacy(kwargs, tmp_path):
    try:
        args = arguments(tmp_path, **kwargs)
    except ImportError as error:
        pytest.skip(str(error))
    model, state = gpt2(), torch.get_rng_state()
    with pytest.raises(ValueError, match=next(iter(kwargs))):
        PrivateTrainer(model, args, train_dataset=texts(), privacy=private())
    assert torch.equal(state, torch.get_rng_state())  # set_seed was not reached


def test_more_than_one_device_and_fp16(tmp_path):
    for name, value, message in (
        ("fp16", True, "fp16=True scales the loss"),
        ("_n_gpu", 2, "one process on one device"),
        ("deepspeed", "zero.json", "deepspeed='zero.json'"),
        ("fsdp", True, "fsdp=True"),
    ):
        args = arguments(tmp_path)
        object.__setattr__(args, name, value)
        with pytest.raises(ValueError, match=message):
            PrivateTrainer(gpt2(), args, train_dataset=texts(), privacy=private())


def test_publishing_the_noise(tmp_path):
    args = arguments(tmp_path)
    args.push_to_hub, args.hub_strategy = True, "all_checkpoints"
    with pytest.raises(ValueError, match="random state of the noise"):
        PrivateTrainer(gpt2(), args, train_dataset=texts(), privacy=private())


def test_data_that_has_no_numbered_records(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(texts())

    for data in (Stream(), []):
        with pytest.raises(ValueError, match="a data set with a length"):
            trainer(tmp_path, data=data)
    with pytest.raises(Refused, match="several data sets by name"):
        trainer(tmp_path, data={"train": texts(), "test": texts()})


@pytest.mark.parametrize("privacy", [None, {"target_epsilon": 8.0}])
def test_no_privacy_arguments(privacy, tmp_path):
    with pytest.raises(Refused, match="privacy=PrivacyArguments"):
        PrivateTrainer(
            gpt2(), arguments(tmp_path), train_dataset=texts(), privacy=privacy
        )


@pytest.mark.examples
def test_unusual_arguments(tmp_path):
    """Each of which Trainer takes; a datasets.Dataset loses its other columns."""
    datasets = pytest.importorskip("datasets")
    columns = [{k: x.tolist() for k, x in row.items()} for row in texts()]
    data = datasets.Dataset.from_list([{**x, "idx": 1} for x in columns])
    model = gpt2()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for change in (
        {"model": model, "optimizers": (optimizer, None)},
        {"model_init": lambda: gpt2()},
        {"data": data, "processing_class": tokenizer()},
        {"average_tokens_across_devices": False, "torch_empty_cache_steps": 1},
        {"eval_dataset": {"a": texts(2), "b": texts(1)}, "eval_strategy": "steps"},
    ):
        given = {"max_steps": 2, "lr_scheduler_type": "constant", **change}
        privacy = private(noise_multiplier=0.0)  # whose order is the optimizer's
        run = trainer(tmp_path, privacy=privacy, eval_steps=1, **given)
        run.train()
        found.append(weights(run.model))
    assert max(distance(found[0], other) for other in found) < 1e-6
    assert distance(found[0], weights(gpt2())) > 1e-3


def test_other_trainers_in_the_bases(tmp_path):
    """A compute_loss of one's own is given single records; it need not be known."""

    class Other(transformers.Trainer):
        def __init__(self, *args, scale, **kwargs):
            super().__init__(*args, **kwargs)
            self.scale = scale

        def compute_loss(self, model, inputs, **kwargs):
            assert len(inputs["input_ids"]) == 1
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            labels = inputs["labels"][:, 1:]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return self.scale * loss

    class Scaled(PrivateTrainer, Other):
        pass

    class Seq2Seq(PrivateTrainer, transformers.Seq2SeqTrainer):
        pass

    runs = []
    for cls, more in ((Scaled, {"scale": 1.0}), (Seq2Seq, {}), (PrivateTrainer, {})):
        args = arguments(tmp_path, max_steps=2)
        if cls is Seq2Seq:
            kept = {f.name for f in dataclasses.fields(args) if f.init}
            given = {name: getattr(args, name) for name in kept}
            args = transformers.Seq2SeqTrainingArguments(**given)
        given = {"train_dataset": texts(), "privacy": private(), **more}
        run = cls(gpt2(), args, **given)
        run.train()
        runs.append(weights(run.model))
    assert distance(runs[0], runs[2]) < 1e-6 and distance(runs[1], runs[2]) == 0
    with pytest.raises(Refused, match="no records that can be drawn"):
        Scaled(gpt2(), train_dataset=[], scale=1.0, privacy=private())


def test_what_is_no_longer_called_and_what_is_no_loss(tmp_path):
    class Old(PrivateTrainer):
        def sample_losses(self, model, inputs):
            return model_losses(model, inputs)

    class Rows(PrivateTrainer):
        def compute_loss(self, model, inputs, **kwargs):
            return model(**inputs).logits

    given = {"train_dataset": texts(), "privacy": private()}
    with pytest.raises(Refused, match="Override compute_loss"):
        Old(gpt2(), arguments(tmp_path), **given)
    with pytest.raises(Refused, match="The loss of a record is not one number"):
        Rows(gpt2(), arguments(tmp_path), **given).train()


def test_a_loader_of_ones_own(tmp_path):
    class Own(PrivateTrainer):
        def get_train_dataloader(self):
            super().get_train_dataloader()
            return DataLoader(self.train_dataset, 3, collate_fn=default_data_collator)

        def get_batch_samples(self, iterator, count, device):
            return [next(iterator) for _ in range(count)], None

    run = Own(gpt2(), arguments(tmp_path), train_dataset=texts(), privacy=private())
    with pytest.raises(Refused, match="get_train_dataloader draws"):
        run.train()


def test_hyperparameter_search(tmp_path):
    with pytest.raises(Refused, match="Each trial"):
        trainer(tmp_path).hyperparameter_search()


# -- collators and losses ----------------------------------------------------------


def test_collators_that_keep_records_apart(tmp_path):
    words = tokenizer()
    padding = DataCollatorWithPadding(words)
    plain = [{"input_ids": x["input_ids"]} for x in sentences()]
    masked = DataCollatorForLanguageModeling(words, mlm_probability=0.5)
    causal = DataCollatorForLanguageModeling(words, mlm=False)
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=V,
            d_model=16,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    pairs = [{**x, "labels": x["input_ids"][: 2 + i % 3]} for i, x in enumerate(plain)]
    for model, data, collator in (
        (bert(), sentences(), padding),
        (bert("ForMaskedLM"), plain, masked),
        (gpt2(), plain, causal),
        (t5, pairs, DataCollatorForSeq2Seq(words, t5)),
    ):
        before = weights(model)
        run = trainer(tmp_path, model, data, data_collator=collator, max_steps=2)
        run.train()
        assert distance(before, weights(model)) > 1e-3
        assert run.engine.accountant.history == [(1.0, 6 / N, 2)]


def test_collators_that_pack(tmp_path):
    with pytest.raises(ValueError, match="packs the records of a batch"):
        trainer(tmp_path, data_collator=DataCollatorWithFlattening())

    def halves(records):
        batch = default_data_collator(records)
        return {key: x.reshape(2 * len(x), -1) for key, x in batch.items()}

    model = gpt2()
    before = weights(model)
    run = trainer(tmp_path, model, data_collator=halves)
    with pytest.raises(ValueError, match="made 6 samples of 3 records"):
        run.train()
    assert distance(before, weights(model)) == 0


@pytest.mark.parametrize("setting", ["smoothed", "summed", "own"])
@every_mode
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
        "own": {},
    }[setting]
    model, bound = bert("ForMaskedLM"), 0.3
    before = weights(model)
    run = trainer(
        tmp_path,
        model,
        privacy=private(mode, noise_multiplier=0.0, per_sample_max_grad_norm=bound),
        cls=Own if setting == "own" else PrivateTrainer,
        eval_dataset=texts(5),
        max_steps=1,
        lr_scheduler_type="constant",
        **more,
    )
    parts = [part for item in first_items(run, 2) for part in item if part.records]
    total = {name: torch.zeros_like(p) for name, p in before.items()}
    for part in parts:
        for i in range(part.records):
            model.zero_grad()
            record = {name: x[i : i + 1] for name, x in part.inputs.items()}
            run.compute_loss(model, record).backward()
            norm = sum(
                p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None
            ).sqrt()
            for name, p in model.named_parameters():
                if p.grad is not None:
                    total[name] += p.grad * min(1, bound / (float(norm) + 1e-6))
    model.zero_grad()
    run.train()
    for name, p in model.named_parameters():
        update = (before[name] - p) * 6 / 0.1
        torch.testing.assert_close(update, total[name], rtol=1e-4, atol=1e-5)
    assert run.evaluate()["eval_loss"] > 0


def test_records_without_labels_count_as_zero(tmp_path):
    data = [{**x, "labels": torch.full_like(x["labels"], -100)} for x in texts()]
    privacy = private(noise_multiplier=0.0)
    run = trainer(tmp_path, data=data, privacy=privacy, max_steps=2)
    before = weights(run.model)
    assert run.train().training_loss == 0
    assert distance(before, weights(run.model)) == 0


@every_mode
def test_records_of_several_sequences(mode, tmp_path):
    """Clipped as a whole; the model is saved without what makes it one of records."""
    sequences = texts(3 * N)
    people = [sequences[3 * i : 3 * i + 1 + i % 3] for i in range(N)]
    collate = RecordCollator(default_data_collator)

    def make(model, **kwargs):
        return trainer(
            tmp_path,
            PerRecord(model),
            people,
            privacy=private(mode, noise_multiplier=0.0, per_sample_max_grad_norm=0.3),
            data_collator=collate,
            eval_dataset=people[:5],
            lr_scheduler_type="constant",
            **kwargs,
        )

    model = gpt2()
    before = weights(model)
    run = make(model, max_steps=1)
    parts = [part for item in first_items(run, 2) for part in item]
    total = {name: torch.zeros_like(p) for name, p in before.items()}
    for part in parts:
        for i in range(part.records):
            model.zero_grad()
            ids, labels = (part.inputs[name][i] for name in ("input_ids", "labels"))
            logits = model(input_ids=ids).logits[:, :-1]
            nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[:, 1:].flatten()
            ).backward()
            norm = float(sum(p.grad.pow(2).sum() for p in model.parameters()).sqrt())
            for name, p in model.named_parameters():
                total[name] += p.grad * min(1, 0.3 / (norm + 1e-6))
    model.zero_grad()
    run.train()
    for name, p in model.named_parameters():
        update = (before[name] - p) * 6 / 0.1
        torch.testing.assert_close(update, total[name], rtol=1e-4, atol=1e-5)
    if mode != "ghost_bk":
        return
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run = make(gpt2(), **saving, eval_strategy="steps", eval_steps=2)
    run.train()
    assert any("eval_loss" in entry for entry in run.state.log_history)
    other = make(gpt2(), **saving)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-4")
    assert distance(weights(saved), weights(run.model.model)) == 0


# -- checkpoints -------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_a_resumed_run_is_the_one_that_was_not_stopped(mode, tmp_path):
    """In the middle of an epoch, with dropout, random masks, Adam and evaluation."""

    def make(**kwargs):
        return trainer(
            tmp_path,
            bert("ForMaskedLM", dropout=0.2),
            data,
            mode=mode,
            data_collator=DataCollatorForLanguageModeling(tokenizer()),
            eval_dataset=data[:5],
            optim="adamw_torch",
            learning_rate=1e-2,
            max_steps=9,
            save_strategy="steps",
            save_steps=4,
            logging_steps=4,
            eval_strategy="epoch",
            **kwargs,
        )

    data = [{"input_ids": x["input_ids"]} for x in sentences()]
    whole = make()
    whole.train()
    losses = [x for x in whole.state.log_history if "loss" in x]
    for checkpoint in ("checkpoint-4", True):
        other = make()
        with torch.no_grad():
            for p in other.model.parameters():
                p.zero_()
        if checkpoint is True:
            os.rename(tmp_path / "checkpoint-9", tmp_path / "gone")
        else:
            checkpoint = str(tmp_path / checkpoint)
        other.train(resume_from_checkpoint=checkpoint)
        assert distance(weights(whole.model), weights(other.model)) == 0
        assert other.get_epsilon() == whole.get_epsilon()
        assert other.engine.accountant.history == [(1.0, 6 / N, 9)]
        again = [x for x in other.state.log_history if "loss" in x]
        assert [x["loss"] for x in again] == [x["loss"] for x in losses]
        assert other._draw == whole._draw == 9


def test_a_checkpoint_resumed_twice(tmp_path):
    """The same draws; other noise, unless it is asked to be the same."""

    def make(repeat_noise):
        privacy = private(repeat_noise=repeat_noise)
        saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
        return trainer(tmp_path, privacy=privacy, **saving)

    whole = make(False)
    whole.train()
    found = []
    for repeat_noise in (False, False, True, True):
        run = make(repeat_noise)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert run.engine.accountant.history == [(1.0, 6 / N, 4)]
        found.append(weights(run.model))
    first, second, same, again = found
    for other in (second, same):
        assert distance(first, other) > 1e-2
    assert distance(same, again) == distance(same, weights(whole.model)) == 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    out = tmp_path_factory.mktemp("run")
    run = trainer(out, max_steps=4, save_strategy="steps", save_steps=3)
    run.train()
    return out / "checkpoint-3"


@pytest.mark.parametrize(
    "changed",
    [
        {"mode": "ghost"},
        {"noise_multiplier": 2.0},
        {"per_sample_max_grad_norm": 2.0},
        {"clipping": "automatic"},
        {"target_delta": 1e-4},
        {"accountant": "prv"},
        {"poisson_sampling": False},
        {"records": 36},
        {"logical_batch_size": 9},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_checkpoint_of_another_run(changed, checkpoint, tmp_path):
    name, value = next(iter(changed.items()))
    model, data, kwargs = gpt2(), texts(), {}
    privacy = private()
    if name == "records":
        data = data[:value]
    elif name == "logical_batch_size":
        kwargs = {"gradient_accumulation_steps": 3}
    elif name == "mode":
        privacy, name = private(value), "grad_sample_mode"
    else:
        privacy = dataclasses.replace(privacy, **changed)
    run = trainer(tmp_path, model, data, privacy, **kwargs)
    before = weights(model)
    with pytest.raises(
        ValueError, match=f"must be the same: {name}: .* there, .* here"
    ):
        run.train(resume_from_checkpoint=str(checkpoint))
    assert distance(before, weights(model)) == 0
    assert run.engine.accountant.history == []


def test_a_checkpoint_resumed_in_other_parts(checkpoint, tmp_path):
    """What fits into memory may change; the logical batch is the same."""
    runs = []
    for physical, parts in ((3, 2), (2, 3), (6, 1)):
        run = trainer(
            tmp_path,
            per_device_train_batch_size=physical,
            gradient_accumulation_steps=parts,
            max_steps=6,
            lr_scheduler_type="constant",
        )
        run.train(resume_from_checkpoint=str(checkpoint))
        runs.append(weights(run.model))
    assert distance(runs[0], runs[1]) < 1e-6 and distance(runs[0], runs[2]) < 1e-6


def test_a_checkpoint_without_privacy(checkpoint, tmp_path):
    run = trainer(tmp_path, max_steps=2, save_strategy="steps", save_only_model=True)
    run.train()
    run = trainer(tmp_path)
    with pytest.raises(ValueError, match="checkpoint-2 has no privacy.pt"):
        run.train(resume_from_checkpoint=True)
    stock = transformers.Trainer(
        gpt2(),
        arguments(tmp_path / "stock", save_strategy="steps"),
        train_dataset=texts(),
    )
    stock.train()
    with pytest.raises(ValueError, match="was not written by PrivateTrainer"):
        run.train(resume_from_checkpoint=str(tmp_path / "stock" / "checkpoint-5"))
    empty = trainer(tmp_path / "empty")
    with pytest.raises(ValueError, match="No valid checkpoint"):
        empty.train(resume_from_checkpoint=True)


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
    assert run.engine.accountant.history == []

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("opacus_ext.checkpoints.write", killed)
    other = trainer(tmp_path, max_steps=4, save_strategy="steps", save_steps=3)
    with pytest.raises(KeyboardInterrupt):
        other.train()
    with pytest.raises(Refused, match="the process was killed while it wrote"):
        run.train(resume_from_checkpoint=str(folder))


def test_a_budget_is_for_so_many_steps(tmp_path):
    privacy = private(noise_multiplier=None, target_epsilon=3.0)

    def make(steps):
        return trainer(
            tmp_path,
            privacy=privacy,
            max_steps=steps,
            save_strategy="steps",
            save_steps=2,
        )

    run = make(3)
    run.train()
    with pytest.raises(ValueError, match="max_steps: 3 there, 5 here"):
        make(5).train(resume_from_checkpoint=True)
    other = make(3)
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert other.engine.accountant.history == run.engine.accountant.history
    assert distance(weights(run.model), weights(other.model)) == 0


def test_what_is_saved_is_an_ordinary_model(checkpoint, tmp_path):
    model = transformers.GPT2LMHeadModel.from_pretrained(checkpoint)
    assert weights(model).keys() == weights(gpt2()).keys()
    run = trainer(tmp_path, max_steps=2)
    run.train()
    run.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert distance(weights(saved), weights(run.model)) == 0
    assert PRIVACY_STATE not in os.listdir(tmp_path / "saved")
    for p in run.model.parameters():
        assert p.grad is None
        assert not any(hasattr(p, name) for name in ("grad_sample", "summed_grad"))
    assert not any(m._forward_hooks for m in run.model.modules())
    assert type(run.optimizer) is torch.optim.SGD
    copy.deepcopy(run.model).generate(torch.tensor([[1, 2]]), max_new_tokens=2)


# -- evaluation --------------------------------------------------------------------


def test_evaluation_changes_nothing(tmp_path):
    def accuracy(given):
        return {
            "accuracy": float((given.predictions.argmax(-1) == given.label_ids).mean())
        }

    def make(**kwargs):
        return trainer(
            tmp_path,
            bert(dropout=0.2),
            sentences(),
            data_collator=DataCollatorWithPadding(tokenizer()),
            eval_dataset=sentences(10),
            compute_metrics=accuracy,
            max_steps=6,
            **kwargs,
        )

    alone = make()
    alone.train()
    run = make(eval_strategy="steps", eval_steps=2, eval_on_start=True)
    run.train()
    assert distance(weights(alone.model), weights(run.model)) == 0
    assert run.engine.accountant.history == alone.engine.accountant.history
    found = [x for x in run.state.log_history if "eval_accuracy" in x]
    assert len(found) == 4
    prediction = run.predict(sentences(10))
    assert prediction.metrics["test_accuracy"] == found[-1]["eval_accuracy"]
    assert prediction.metrics["test_loss"] == pytest.approx(found[-1]["eval_loss"])


def test_the_best_model_is_loaded(tmp_path):
    run = trainer(
        tmp_path,
        max_steps=6,
        eval_dataset=texts(10),
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        load_best_model_at_end=True,
    )
    run.train()
    scores = [x["eval_loss"] for x in run.state.log_history if "eval_loss" in x]
    best = tmp_path / f"checkpoint-{2 * scores.index(min(scores)) + 2}"
    assert run.state.best_model_checkpoint == str(best)
    saved = transformers.GPT2LMHeadModel.from_pretrained(best)
    assert distance(weights(saved), weights(run.model)) == 0
    assert run.engine.accountant.history == [(1.0, 6 / N, 6)]


# -- errors ------------------------------------------------------------------------


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

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, model, optimizer, **kwargs):
            kept.append((weights(model), copy.deepcopy(optimizer.state_dict())))

    run = Failing(
        gpt2(),
        arguments(tmp_path, optim="adamw_torch", max_steps=4),
        train_dataset=texts(),
        privacy=private(mode),
        callbacks=[Watch()],
    )
    with pytest.raises(OSError):
        run.train()
    before, state = kept[-1]
    steps = len(kept)
    assert distance(before, weights(run.model)) == 0
    now = run.optimizer.state_dict()["state"]
    for key, entry in state["state"].items():
        for name, x in entry.items():
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(now[key][name]))
    assert run.engine.accountant.history == [(1.0, 6 / N, steps)]
    assert not any(hasattr(p, "summed_grad") for p in run.model.parameters())
    run.train()
    assert run.engine.accountant.history == [(1.0, 6 / N, steps + 4)]


def test_models_that_are_refused_stay_as_they_were(tmp_path):
    class Normalised(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)

        def forward(self, x, labels):
            logits = self.head(self.norm(x))
            return {"loss": nn.functional.cross_entropy(logits, labels)}

    data = [{"x": torch.randn(4), "labels": 1} for _ in range(12)]
    run = trainer(tmp_path, Normalised(), data)
    with pytest.raises(Exception, match="BatchNorm"):
        run.train()
    assert not any(hasattr(p, "grad_sample") for p in run.model.parameters())
    assert type(run.optimizer) is torch.optim.SGD


# -- models as they come -----------------------------------------------------------


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_models_of_from_pretrained(family, tmp_path):
    """They are in evaluation mode, as is one that was evaluated before or between."""
    if family == "bert":
        model, data = bert(dropout=0.1), [
            {**x, "labels": i % 2} for i, x in enumerate(texts())
        ]
    elif family == "gpt2":
        model, data = gpt2(dropout=0.1), texts()
    else:
        config = transformers.LlamaConfig(
            vocab_size=V,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
        )
        model, data = transformers.LlamaForCausalLM(config), texts()
    model.save_pretrained(tmp_path / "model")
    model = type(model).from_pretrained(tmp_path / "model")
    assert not model.training
    found = []
    for evaluates in (False, True):
        model = type(model).from_pretrained(tmp_path / "model")
        run = trainer(
            tmp_path,
            model,
            data,
            eval_dataset=data[:4],
            eval_strategy="steps" if evaluates else "no",
            eval_steps=1,
            max_steps=3,
        )
        if evaluates:
            run.evaluate()
        run.train()
        if evaluates:
            run.evaluate()
            assert not run.model.training
        found.append(weights(run.model))
        before = weights(run.model)
        run.train()  # from evaluation mode again
        assert distance(before, weights(run.model)) > 1e-3
    assert distance(*found) == 0


# -- what works with it ------------------------------------------------------------


@every_mode
def test_activation_checkpointing(mode, tmp_path):
    found = []
    for on in (False, True):
        run = trainer(tmp_path, mode=mode, gradient_checkpointing=on, max_steps=2)
        run.train()
        found.append(weights(run.model))
    assert distance(*found) < 1e-6


@every_mode
def test_bf16(mode, tmp_path):
    found = []
    for on in (False, True):
        privacy = private(mode, noise_multiplier=0.0)
        run = trainer(tmp_path, privacy=privacy, bf16=on, max_steps=3)
        run.train()
        found.append(weights(run.model))
    assert 0 < distance(*found) < 0.02 * distance(found[0], weights(gpt2()))


@every_mode
def test_lora(mode, tmp_path):
    peft = pytest.importorskip("peft")

    def make():
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, target_modules=["c_attn"], lora_dropout=0.0
        )
        return trainer(
            tmp_path,
            peft.get_peft_model(gpt2(), config),
            mode=mode,
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
        )

    run = make()
    frozen = weights(run.model)
    run.train()
    for name, p in weights(run.model).items():
        assert torch.equal(p, frozen[name]) != ("lora" in name)
    other = make()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    loaded = peft.PeftModel.from_pretrained(gpt2(), tmp_path / "checkpoint-4")
    assert distance(weights(loaded), weights(run.model)) == 0


def test_optimizer_and_schedule_of_ones_own(tmp_path):
    """Steps of the schedule are logical batches."""
    model, rates = gpt2(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (t + 1))

    class Watch(TrainerCallback):
        def on_step_begin(self, args, state, control, optimizer, **kwargs):
            rates.append(optimizer.param_groups[0]["lr"])

    run = trainer(
        tmp_path,
        model,
        optimizers=(optimizer, schedule),
        callbacks=[Watch()],
        max_steps=4,
    )
    run.train()
    assert rates == pytest.approx([1e-2 / t for t in (1, 2, 3, 4)])
    assert run.optimizer is optimizer


def test_model_init_and_per_layer_bounds(tmp_path):
    count = len(list(gpt2().parameters()))
    privacy = private(clipping="per_layer", per_sample_max_grad_norm=[0.1] * count)
    run = trainer(tmp_path, model_init=lambda: gpt2(), privacy=privacy, max_steps=2)
    run.train()
    first = run.model
    run.train()
    assert run.model is not first
    assert run.engine.accountant.history == [(1.0, 6 / N, 4)]


@pytest.mark.slow
def test_workers(tmp_path):
    found = []
    for workers in (0, 2):
        run = trainer(
            tmp_path,
            bert("ForMaskedLM", dropout=0.1),
            data_collator=DataCollatorForLanguageModeling(tokenizer()),
            data=[{"input_ids": x["input_ids"]} for x in texts()],
            dataloader_num_workers=workers,
            max_steps=3,
        )
        run.train()
        found.append(weights(run.model))
    assert distance(*found) == 0
    assert isinstance(next(iter(run.get_train_dataloader()))[-1], Part)
