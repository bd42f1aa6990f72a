"""TRL's DPOTrainer and RewardTrainer with privacy, where a pair is one record.

The oracle is TRL's own compute_loss of each pair alone, collated alone, its gradient
clipped: for several steps, in float64.
"""

import inspect
import os
import re

import accelerate
import pytest
import torch
import transformers

from opacus_ext.data.logical import derive_seed
from opacus_ext.refused import Refused
from opacus_ext.trainer import PrivateTrainer

from . import tiny
from .common import assert_same
from .training import SHORT, distance, drawn, private, tokenizer, train_alone, weights

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
V, BOUND, RATE, RECORDS = tiny.V, 0.3, 0.5, 12


class PrivateDPO(PrivateTrainer, trl.DPOTrainer):
    pass


class PrivateReward(PrivateTrainer, trl.RewardTrainer):
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A Llama, saved."""
    os.environ["CI"] = "1"  # TRL reports who uses it
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    path = tmp_path_factory.mktemp("model")
    tiny.build("causal-lm", "llama", "LlamaForCausalLM").save_pretrained(path)
    return str(path)


def words(generator, most=7):
    count = int(torch.randint(1, most, (), generator=generator))
    ids = torch.randint(0, V - 3, (count,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def pairs():
    """Pairs of different lengths; both texts of the last one are the same."""
    generator = torch.Generator().manual_seed(1)
    names = "prompt", "chosen", "rejected"
    rows = [{name: words(generator) for name in names} for _ in range(RECORDS)]
    rows[-1]["rejected"] = rows[-1]["chosen"]
    rows = [{**row, "prompt": row["prompt"] + " "} for row in rows]
    return datasets.Dataset.from_list(rows)


def reference(path):
    """The model with other weights: a policy that differs from it from the start."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path).double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.7)
    return model


def dpo(cls, path, out, privacy=None, lora=False, **chosen):
    settings = {**SHORT, "max_steps": 3, "learning_rate": RATE, "logging_steps": 1}
    settings |= {"lr_scheduler_type": "constant", "bf16": False, "beta": 0.5}
    model = transformers.AutoModelForCausalLM.from_pretrained(path).double()
    given = {} if privacy is None else {"privacy": privacy}
    if lora:
        torch.manual_seed(3)
        given["peft_config"] = peft.LoraConfig(
            r=2, target_modules=["q_proj", "up_proj"], init_lora_weights=False
        )
    else:
        given["ref_model"] = reference(path)
    return cls(
        model,
        args=trl.DPOConfig(str(out), **settings | chosen),
        train_dataset=pairs(),
        processing_class=tokenizer("pad", "unk", "eos"),
        **given,
    )


def reward(cls, path, out, privacy=None, lora=False, **chosen):
    settings = {**SHORT, "max_steps": 3, "learning_rate": RATE, "logging_steps": 1}
    settings |= {"lr_scheduler_type": "constant", "bf16": False}
    torch.manual_seed(4)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=1
    )
    return cls(
        model.double(),
        args=trl.RewardConfig(str(out), **settings | chosen),
        train_dataset=pairs(),
        processing_class=tokenizer("pad", "unk", "eos"),
        **({} if privacy is None else {"privacy": privacy}),
    )


def check(make, classes, path, tmp_path, mode="ghost_bk", tolerance=1e-8, **chosen):
    """Compares a private run without noise with clipped gradients of pairs alone."""
    settings = {"noise_multiplier": 0.0, "per_sample_max_grad_norm": BOUND}
    privacy = private(grad_sample_mode=mode, **settings)
    run = make(classes[0], path, tmp_path, privacy, **chosen)
    stock = make(classes[1], path, tmp_path, **chosen)
    model, size = stock.model.train(), run.sampling.expected_batch_size
    before, seed = weights(model), derive_seed(privacy.privacy_seed, 0)
    assert_same(weights(run.model), before, 0)
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss_of(model, i):
        return stock.compute_loss(model, stock.data_collator([stock.train_dataset[i]]))

    clipped = train_alone(
        model,
        torch.optim.SGD(trained, lr=RATE),
        [drawn(seed, step, RECORDS, size) for step in range(run.args.max_steps)],
        loss_of,
        size,
        BOUND,
    )
    run.train()
    assert clipped > 0
    assert distance(before, weights(model)) > 1e-3
    assert_same(weights(run.model), weights(model), tolerance)
    return run


DPO, REWARD = (PrivateDPO, trl.DPOTrainer), (PrivateReward, trl.RewardTrainer)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"])
def test_modes(mode, path, tmp_path):
    check(dpo, DPO, path, tmp_path, mode)


# loss_type, and what it needs.
LOSSES = {
    "sigmoid": {"label_smoothing": 0.1},
    "hinge": {},
    "ipo": {},
    "exo_pair": {"label_smoothing": 1e-3},
    "nca_pair": {},
    "robust": {"label_smoothing": 0.2},
    "bco_pair": {},
    "sppo_hard": {},
    "apo_zero": {},
    "apo_down": {},
    "discopop": {},
    "sft": {},
    "sigmoid_norm": {},
}


def test_all_losses_of_pairs_are_here():
    """Also those that a new version of TRL has: this list is what was looked at."""
    source = inspect.getsource(trl.DPOTrainer._compute_loss)
    names = set(re.findall(r'loss_type == "(\w+)"', source))
    assert names == {*LOSSES, "aot", "aot_unpaired"}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, path, tmp_path):
    check(dpo, DPO, path, tmp_path, loss_type=name, max_steps=2, **LOSSES[name])


@pytest.mark.parametrize(
    "chosen",
    [
        {"lora": True},
        {"lora": True, "precompute_ref_log_probs": True},
        {"precompute_ref_log_probs": True},
        {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]},
        {"f_divergence_type": "js_divergence"},
        {"ld_alpha": 0.5},
        {"use_weighting": True},
        {"max_length": 6, "pad_to_multiple_of": 4},
        {"gradient_checkpointing": False},
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 6},
    ],
    ids=str,
)
def test_arguments_of_dpo(chosen, path, tmp_path):
    check(dpo, DPO, path, tmp_path, max_steps=2, **chosen)


@pytest.mark.parametrize("chosen", [{}, {"center_rewards_coefficient": 0.1}], ids=str)
def test_arguments_of_rewards(chosen, path, tmp_path):
    check(reward, REWARD, path, tmp_path, **chosen)


@pytest.mark.parametrize(
    "chosen, match",
    [
        ({"loss_type": "aot"}, "loss_type.*not computed record by record"),
        ({"loss_type": ["sigmoid", "aot_unpaired"]}, "loss_type.*record by record"),
        ({"sync_ref_model": True}, "sync_ref_model.*reference"),
        ({"use_liger_kernel": True}, "use_liger_kernel"),
        ({"activation_offloading": True}, "activation_offloading"),
        ({"padding_free": True}, "padding_free"),
    ],
    ids=str,
)
def test_arguments_that_are_refused(chosen, match, path, tmp_path):
    with pytest.raises(Refused, match=match):
        dpo(PrivateDPO, path, tmp_path, private(), **chosen)


@pytest.mark.parametrize("make, base", [(dpo, DPO[1]), (reward, REWARD[1])])
def test_a_loss_of_ones_own_is_refused(make, base, path, tmp_path):
    class Mine(PrivateTrainer, base):
        def compute_loss(self, *args, **kwargs):
            return super().compute_loss(*args, **kwargs)

    with pytest.raises(Refused, match="has the compute_loss of .*Mine"):
        make(Mine, path, tmp_path, private())


@pytest.mark.parametrize("make, cls", [(dpo, PrivateDPO), (reward, PrivateReward)])
@pytest.mark.parametrize("log_loss", [True, False])
def test_numbers_of_pairs_are_logged_with_the_loss_or_not(
    make, cls, log_loss, path, tmp_path
):
    """Rewards, accuracies and margins tell of the records; tokens are never counted."""
    run = make(cls, path, tmp_path, private(log_loss=log_loss))
    run.train()
    history = run.state.log_history
    number = "margin" if cls is PrivateReward else "rewards/margins"
    names = {name for log in history for name in log}
    assert (number in names) == log_loss == ("loss" in names)
    tells = "loss reward margin accurac logits logps entropy num_tokens".split()
    shown = {name for name in names if any(word in name for word in tells)}
    assert log_loss or not shown
    assert "num_tokens" not in names
    run.evaluate(run.train_dataset)
    assert f"eval_{number}" in run.state.log_history[-1]
    assert not run.state.log_history[-1].get("eval_num_tokens")


def test_the_reference_is_frozen_and_has_no_dropout(path, tmp_path):
    run = dpo(PrivateDPO, path, tmp_path, private(), max_steps=2)
    before = weights(run.ref_model)
    run.train()
    assert_same(weights(run.ref_model), before, 0)
    assert all(p.grad is None for p in run.ref_model.parameters())
    assert not run.ref_model.training
    count = sum(p.numel() for p in run.model.parameters())
    assert count == sum(p.numel() for p in run.model.parameters() if p.requires_grad)


def test_processes_wait_for_nobody_in_a_loss(path, tmp_path, monkeypatch):
    """Processes have different numbers of pairs, so a gather would never end."""

    def gather(self, *args):
        raise AssertionError("a loss gathers")

    run = reward(PrivateReward, path, tmp_path, private(log_loss=False), max_steps=1)
    other = dpo(PrivateDPO, path, tmp_path, private(log_loss=False), max_steps=1)
    for name in ("gather", "gather_for_metrics"):
        monkeypatch.setattr(accelerate.Accelerator, name, gather)
    run.train()
    other.train()


def test_bfloat16(path, tmp_path):
    run = dpo(PrivateDPO, path, tmp_path, private(), lora=True, bf16=True)
    run.model.float()
    before = weights(run.model)
    run.train()
    assert distance(before, weights(run.model)) > 0
