"""TRL's SFTTrainer and DPOTrainer with privacy.

The oracle is TRL's own compute_loss of each record alone, collated alone, its gradient
clipped: for several steps.
"""

import os

import pytest
import torch
import transformers

from opacus_ext.data.logical import derive_seed
from opacus_ext.refused import Refused
from opacus_ext.trainer import PrivateTrainer

from . import tiny
from .common import assert_same
from .training import (
    SHORT,
    distance,
    drawn,
    private,
    tokenizer,
    train_alone,
    weights,
)

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")
V, BOUND, RATE, RECORDS = tiny.V, 0.3, 0.5, 14
every_mode = pytest.mark.parametrize(
    "mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"]
)


class PrivateSFT(PrivateTrainer, trl.SFTTrainer):
    pass


class PrivateDPO(PrivateTrainer, trl.DPOTrainer):
    pass


@pytest.fixture(autouse=True, scope="module")
def quiet():
    os.environ["CI"] = "1"  # TRL reports who uses it
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A Llama, saved: DPOTrainer loads its reference model from there."""
    path = tmp_path_factory.mktemp("model")
    tiny.build("causal-lm", "llama", "LlamaForCausalLM").save_pretrained(path)
    return path


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def words(generator, longest):
    count = int(torch.randint(1, longest, (), generator=generator))
    ids = torch.randint(0, V - 3, (count,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def records(*columns):
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_list(
        [{name: words(generator, 7) for name in columns} for _ in range(RECORDS)]
    ).map(lambda row: {"prompt": row["prompt"] + " "})


COLUMNS = {
    "SFT": ("prompt", "completion"),
    "DPO": ("prompt", "chosen", "rejected"),
    "Reward": ("prompt", "chosen", "rejected"),
}


def trainer(cls, model, out, lora=None, privacy=None, **kwargs):
    """An SFT, DPO or reward trainer of TRL or of ours."""
    kind = next(x for x in COLUMNS if x in cls.__name__)
    chosen = {**SHORT, "max_steps": 3, "learning_rate": RATE, "logging_steps": 1}
    chosen |= {"lr_scheduler_type": "constant", "bf16": False}
    return cls(
        model if isinstance(model, torch.nn.Module) else load(model),
        args=getattr(trl, f"{kind}Config")(str(out), **(chosen | kwargs)),
        train_dataset=records(*COLUMNS[kind]),
        processing_class=tokenizer("pad", "unk", "eos"),
        peft_config=lora,
        **({} if privacy is None else {"privacy": privacy}),
    )


def exactly(mode="ghost_bk", **kwargs):
    """Without noise."""
    chosen = {"noise_multiplier": 0.0, "per_sample_max_grad_norm": BOUND}
    return private(grad_sample_mode=mode, **(chosen | kwargs))


def check_steps(run, stock):
    """A run, against the same steps by TRL's loss of each record alone."""
    model, size = stock.model.train(), run.sampling.expected_batch_size
    before, seed = weights(model), derive_seed(run.privacy.privacy_seed, 0)
    params = [p for p in model.parameters() if p.requires_grad]

    def loss_of(model, i):
        batch = stock.data_collator([stock.train_dataset[i]])
        return stock.compute_loss(model, batch)

    clipped = train_alone(
        model,
        torch.optim.SGD(params, lr=RATE),
        [drawn(seed, step, RECORDS, size) for step in range(run.args.max_steps)],
        loss_of,
        size,
        run.privacy.per_sample_max_grad_norm,
    )
    run.train()
    assert clipped > 0
    assert_same(weights(run.model), weights(model), 1e-4)
    assert distance(before, weights(model)) > 1e-3


# -- SFT ---------------------------------------------------------------------------


@every_mode
def test_sft_steps_are_sums_of_clipped_gradients_of_records(mode, path, tmp_path):
    """Completions only, padded, with checkpointing (its default)."""
    run = trainer(PrivateSFT, path, tmp_path, privacy=exactly(mode))
    assert (torch.tensor(run.train_dataset[0]["labels"]) == -100).any()
    check_steps(run, trainer(trl.SFTTrainer, path, tmp_path))


def test_sft_with_lora_resumes(path, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    privacy = private()
    run, other = (
        trainer(PrivateSFT, path, tmp_path, adapter(), privacy, **saving)
        for _ in range(2)
    )
    run.train()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    assert 0 < run.get_epsilon() == run.state.log_history[-1]["epsilon"]


# -- DPO ---------------------------------------------------------------------------


@every_mode
def test_dpo_steps_are_sums_of_clipped_gradients_of_pairs(mode, path, tmp_path):
    run = trainer(PrivateDPO, path, tmp_path, privacy=exactly(mode), beta=2.0)
    check_steps(run, trainer(trl.DPOTrainer, path, tmp_path, beta=2.0))
    assert "rewards/margins" in run.state.log_history[1]
    assert not any("num_tokens" in entry for entry in run.state.log_history)


def adapter():
    return peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


@pytest.mark.parametrize(
    "setting", ["adapter off", "adapter before", "computed before"]
)
def test_dpo_with_other_references(setting, path, tmp_path):
    """The base model; the adapter that it came with; what the data set has."""

    def make(cls, **more):
        torch.manual_seed(1)
        kwargs, model = {"beta": 2.0}, load(path)
        if setting == "computed before":
            kwargs["precompute_ref_log_probs"] = True
        elif setting == "adapter off":
            kwargs["lora"] = adapter()
        else:
            model = peft.get_peft_model(model, adapter())
        return trainer(cls, model, tmp_path, **kwargs, **more)

    bound = BOUND if setting == "computed before" else 0.01
    stock = make(trl.DPOTrainer)
    run = make(PrivateDPO, privacy=exactly(per_sample_max_grad_norm=bound))
    check_steps(run, stock)


LOSSES = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down "
    "discopop sft sigmoid_norm"
)


def test_dpo_losses_are_those_of_pairs_alone(path, tmp_path):
    """Every loss type that is not refused, weights of WPO, and parts of lengths."""
    kwargs = {"label_smoothing": 0.1, "beta": 0.5, "use_weighting": True}
    kwargs |= {"ld_alpha": 0.3, "loss_type": LOSSES.split()}
    run = trainer(PrivateDPO, path, tmp_path, privacy=exactly(log_loss=False), **kwargs)
    with torch.no_grad():
        for p in run.model.parameters():
            p += 0.02 * torch.randn_like(p)
    rows = [run.train_dataset[i] for i in range(4)]
    objective, batch = run._objective, run.data_collator(rows)
    batch = objective.prepare(run.model, batch)
    pairs = [objective.take(batch, i) for i in range(4)]
    losses = torch.stack([objective(run.model, pair) for pair in pairs])
    alone = [run.compute_loss(run.model, run.data_collator([row])) for row in rows]
    assert losses.shape == (4,) and len(set(losses.tolist())) == 4
    torch.testing.assert_close(losses, torch.stack(alone))


def test_dpo_without_the_loss_logs_nothing_of_records(path, tmp_path):
    run = trainer(PrivateDPO, path, tmp_path, privacy=exactly(log_loss=False))
    run.train()
    unknown = ("loss", "rewards", "logps", "logits", "entropy", "mean_token", "num_")
    for entry in run.state.log_history:
        assert not any(name.startswith(unknown) for name in entry)


# -- what is refused ---------------------------------------------------------------


@pytest.mark.parametrize(
    "cls, name, value",
    [
        (PrivateSFT, "packing", True),
        (PrivateSFT, "padding_free", True),
        (PrivateSFT, "activation_offloading", True),
        (PrivateSFT, "loss_type", "dft"),
        (PrivateDPO, "padding_free", True),
        (PrivateDPO, "sync_ref_model", True),
        (PrivateDPO, "loss_type", ["sigmoid", "aot"]),
        (PrivateDPO, "loss_type", "aot_unpaired"),
    ],
)
def test_arguments_that_break_privacy(cls, name, value, path, tmp_path):
    with pytest.raises(Refused, match=name):
        trainer(cls, path, tmp_path, privacy=exactly(), **{name: value})


def test_batches_that_are_not_records(path, tmp_path):
    """RewardTrainer's pairs are rows one after the other, and it is not known."""

    class Reward(PrivateTrainer, trl.RewardTrainer):
        pass

    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_pretrained(path, num_labels=1)
    model.config.pad_token_id = V - 3
    run = trainer(Reward, model, tmp_path, privacy=exactly())
    with pytest.raises(Refused, match="samples of . records"):
        run.train()
