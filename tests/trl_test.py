"""TRL's SFTTrainer with privacy.

The oracle is TRL's own compute_loss of each record alone, collated alone, its gradient
clipped: for several steps.
"""

import os

import pytest
import torch
import transformers

from opacus_ext.data.logical import derive_seed
from opacus_ext.trainer import PrivateTrainer

from . import tiny
from .common import assert_same
from .training import SHORT, distance, drawn, private, tokenizer, train_alone, weights

trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore")
V, BOUND, RATE, RECORDS = tiny.V, 0.3, 0.5, 14


class PrivateSFT(PrivateTrainer, trl.SFTTrainer):
    pass


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A Llama, saved."""
    os.environ["CI"] = "1"  # TRL reports who uses it
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    path = tmp_path_factory.mktemp("model")
    tiny.build("causal-lm", "llama", "LlamaForCausalLM").save_pretrained(path)
    return path


def words(generator):
    count = int(torch.randint(1, 7, (), generator=generator))
    ids = torch.randint(0, V - 3, (count,), generator=generator)
    return " ".join(f"w{i}" for i in ids.tolist())


def records():
    generator = torch.Generator().manual_seed(1)
    rows = [(words(generator), words(generator)) for _ in range(RECORDS)]
    return datasets.Dataset.from_list(
        [{"prompt": f"{prompt} ", "completion": answer} for prompt, answer in rows]
    )


def trainer(cls, path, out, **given):
    """An SFTTrainer of TRL or of ours."""
    chosen = {**SHORT, "max_steps": 3, "learning_rate": RATE, "logging_steps": 1}
    chosen |= {"lr_scheduler_type": "constant", "bf16": False}
    return cls(
        transformers.AutoModelForCausalLM.from_pretrained(path),
        args=trl.SFTConfig(str(out), **chosen),
        train_dataset=records(),
        processing_class=tokenizer("pad", "unk", "eos"),
        **given,
    )


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_bk", "scan", "auto"])
def test_steps_are_sums_of_clipped_gradients_of_records(mode, path, tmp_path):
    """Completions only, padded, with checkpointing (its default); without noise."""
    chosen = {"noise_multiplier": 0.0, "per_sample_max_grad_norm": BOUND}
    privacy = private(grad_sample_mode=mode, **chosen)
    run = trainer(PrivateSFT, path, tmp_path, privacy=privacy)
    stock = trainer(trl.SFTTrainer, path, tmp_path)
    assert (torch.tensor(run.train_dataset[0]["labels"]) == -100).any()
    model, size = stock.model.train(), run.sampling.expected_batch_size
    before, seed = weights(model), derive_seed(privacy.privacy_seed, 0)

    def loss_of(model, i):
        batch = stock.data_collator([stock.train_dataset[i]])
        return stock.compute_loss(model, batch)

    clipped = train_alone(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        [drawn(seed, step, RECORDS, size) for step in range(3)],
        loss_of,
        size,
        BOUND,
    )
    run.train()
    assert clipped > 0
    assert_same(weights(run.model), weights(model), 1e-4)
    assert distance(before, weights(model)) > 1e-3
