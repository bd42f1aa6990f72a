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
from .training import SHORT, distance, drawn, private, tokenizer, train_alone, weights

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")
V, BOUND, RATE, RECORDS = tiny.V, 0.3, 0.5, 14


class PrivateSFT(PrivateTrainer, trl.SFTTrainer):
    pass


class PrivateDPO(PrivateTrainer, trl.DPOTrainer):
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A Llama, saved: DPOTrainer loads its reference model from there."""
    os.environ["CI"] = "1"  # TRL reports who uses it
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    path = tmp_path_factory.mktemp("model")
    tiny.build("causal-lm", "llama", "LlamaForCausalLM").save_pretrained(path)
    return path


def load(path):
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def adapter():
    return peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)


def words(generator):
    count = int(torch.randint(1, 7, (), generator=generator))
    ids = torch.randint(0, V - 3, (count,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def records(*columns):
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_list(
        [{name: words(generator) for name in columns} for _ in range(RECORDS)]
    ).map(lambda row: {"prompt": row["prompt"] + " "})


def trainer(cls, model, out, lora=None, privacy=None, **kwargs):
    """An SFT or DPO trainer of TRL or of ours."""
    sft = issubclass(cls, trl.SFTTrainer)
    chosen = {**SHORT, "max_steps": 3, "learning_rate": RATE, "logging_steps": 1}
    chosen |= {"lr_scheduler_type": "constant", "bf16": False}
    columns = ["completion"] if sft else ["chosen", "rejected"]
    return cls(
        model if isinstance(model, torch.nn.Module) else load(model),
        args=(trl.SFTConfig if sft else trl.DPOConfig)(str(out), **(chosen | kwargs)),
        train_dataset=records("prompt", *columns),
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

    def loss_of(model, i):
        batch = stock.data_collator([stock.train_dataset[i]])
        return stock.compute_loss(model, batch)

    clipped = train_alone(
        model,
        torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=RATE),
        [drawn(seed, step, RECORDS, size) for step in range(run.args.max_steps)],
        loss_of,
        size,
        run.privacy.per_sample_max_grad_norm,
    )
    run.train()
    assert clipped > 0
    assert_same(weights(run.model), weights(model), 1e-4)
    assert distance(before, weights(model)) > 1e-3


@pytest.mark.parametrize("cls", [PrivateSFT, PrivateDPO])
@pytest.mark.parametrize("mode", ["hooks", "ghost_bk", "scan"])
def test_steps_are_sums_of_clipped_gradients_of_records(cls, mode, path, tmp_path):
    """Completions only, padded, with checkpointing (its default); pairs."""
    stock = trl.SFTTrainer if cls is PrivateSFT else trl.DPOTrainer
    run = trainer(cls, path, tmp_path, privacy=exactly(mode))
    check_steps(run, trainer(stock, path, tmp_path))
    assert not any("num_tokens" in entry for entry in run.state.log_history)


def test_sft_with_lora_resumes(path, tmp_path):
    saving = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    run, other = (
        trainer(PrivateSFT, path, tmp_path, adapter(), private(), **saving)
        for _ in range(2)
    )
    run.train()
    other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert distance(weights(run.model), weights(other.model)) == 0
    assert 0 < run.get_epsilon() == run.state.log_history[-1]["epsilon"]


@pytest.mark.parametrize("setting", ["off", "before", "computed before"])
def test_dpo_with_other_references(setting, path, tmp_path):
    """The base model; the adapter that it came with; what the data set has."""

    def make(cls, **more):
        torch.manual_seed(1)
        kwargs, model = {"beta": 2.0}, load(path)
        if setting == "computed before":
            kwargs["precompute_ref_log_probs"] = True
        elif setting == "off":
            kwargs["lora"] = adapter()
        else:
            model = peft.get_peft_model(model, adapter())
        return trainer(cls, model, tmp_path, **kwargs, **more)

    bound = BOUND if setting == "computed before" else 0.01
    privacy = exactly(per_sample_max_grad_norm=bound, log_loss=False)
    run = make(PrivateDPO, privacy=privacy)
    check_steps(run, make(trl.DPOTrainer))
    unknown = ("loss", "rewards", "logps", "logits", "entropy", "mean_token", "num_")
    for entry in run.state.log_history:
        assert not any(name.startswith(unknown) for name in entry)


@pytest.mark.parametrize(
    "cls, name, value",
    [
        (PrivateSFT, "packing", True),
        (PrivateSFT, "activation_offloading", True),
        (PrivateSFT, "loss_type", "dft"),
        (PrivateDPO, "padding_free", True),
        (PrivateDPO, "sync_ref_model", True),
        (PrivateDPO, "loss_type", ["sigmoid", "aot"]),
    ],
)
def test_arguments_that_break_privacy(cls, name, value, path, tmp_path):
    with pytest.raises(Refused, match=name):
        trainer(cls, path, tmp_path, privacy=exactly(), **{name: value})
