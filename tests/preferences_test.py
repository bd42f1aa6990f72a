"""Preferences without TRL: a pair is a record of two sequences.

The oracle is the loss of each pair alone, not padded, its gradient clipped: for
several steps, in float64.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
import transformers
from torch.nn import functional as F

from opacus_ext import clipped_grads
from opacus_ext.data import RecordCollator
from opacus_ext.data.logical import derive_seed
from opacus_ext.losses import RecordModel, cross_entropy
from opacus_ext.refused import Refused
from opacus_ext.trainer import PrivateTrainer
from opacus_ext.trainer.pairs import (
    TRAINERS,
    has_pairs,
    pair_loss,
    refuse_pairs,
    split_pairs,
)

from . import tiny
from .common import assert_same
from .training import SHORT, distance, drawn, private, tokenizer, train_alone, weights

BOUND, RATE, RECORDS, STEPS = 0.3, 0.5, 12, 3


def log_probs(model, inputs):
    """Log-probabilities ``[N]`` of the labels of rows ``[N, T]``."""
    labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
    asked = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    return -cross_entropy(model(**asked).logits, labels, reduction="sum")


def prefer(scores, scale=1.0):
    return -F.logsigmoid(scale * (scores[:, 0] - scores[:, 1])).mean()


class PrivateDPO(PrivateTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        rows = {name: x.flatten(0, 1) for name, x in inputs.items()}
        gains = log_probs(model, rows) - rows["reference"]
        return prefer(gains.view(-1, 2))


def prefer_outputs(outputs, labels, num_items_in_batch=None):
    return prefer(outputs.logits.squeeze(-1))


def language_model(factor=1.0):
    model = tiny.build("causal-lm", "llama", "LlamaForCausalLM").double()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)
    return model


def reward_model():
    config = language_model().config
    config.num_labels, config.pad_token_id = 1, tiny.V - 1
    torch.manual_seed(4)
    return transformers.LlamaForSequenceClassification(config).double()


def pairs():
    """Pairs of different lengths; both texts of the last one are the same."""
    generator = torch.Generator().manual_seed(1)
    reference = language_model(0.7).eval()

    def ids():
        count = int(torch.randint(1, 7, (), generator=generator))
        return torch.randint(0, tiny.V - 3, (count,), generator=generator)

    def text(prompt, answer):
        row = {"input_ids": torch.cat([prompt, answer])}
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        row["labels"] = F.pad(answer, (len(prompt), 0), value=-100)
        alone = {name: x[None] for name, x in row.items()}
        with torch.no_grad():
            row["reference"] = log_probs(reference, alone)[0].item()
        return {name: getattr(x, "tolist", lambda x=x: x)() for name, x in row.items()}

    made = []
    for i in range(RECORDS):
        prompt, chosen, rejected = ids(), ids(), ids()
        last = chosen if i == RECORDS - 1 else rejected
        made.append([text(prompt, chosen), text(prompt, last)])
    return made


def collator():
    words = tokenizer("unk", "eos", "pad")
    return RecordCollator(transformers.DataCollatorForSeq2Seq(words))


def dpo(out, privacy, records):
    run = PrivateDPO(
        language_model(),
        arguments(out),
        train_dataset=records,
        data_collator=collator(),
        privacy=privacy,
    )

    def loss_of(model, i):
        scores = []
        for text in records[i]:
            rows = {name: torch.tensor([x]) for name, x in text.items()}
            scores.append(log_probs(model, rows) - rows["reference"])
        return prefer(torch.stack(scores, 1))

    return run, loss_of


def reward(out, privacy, records):
    records = [
        [{n: x[n] for n in ("input_ids", "attention_mask", "labels")} for x in pair]
        for pair in records
    ]
    run = PrivateTrainer(
        RecordModel(reward_model()),
        arguments(out),
        train_dataset=records,
        data_collator=collator(),
        compute_loss_func=prefer_outputs,
        privacy=privacy,
    )

    def loss_of(model, i):
        ids = [torch.tensor([x["input_ids"]]) for x in records[i]]
        scores = [model.model(input_ids=x).logits[:, 0] for x in ids]
        return prefer(torch.stack(scores, 1))

    return run, loss_of


def arguments(out):
    chosen = {**SHORT, "max_steps": STEPS, "learning_rate": RATE}
    chosen |= {"lr_scheduler_type": "constant"}
    return transformers.TrainingArguments(str(out), **chosen)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("make", [dpo, reward])
def test_steps_are_sums_of_clipped_gradients_of_pairs(make, mode, tmp_path, recwarn):
    settings = {"noise_multiplier": 0.0, "per_sample_max_grad_norm": BOUND}
    privacy, records = private(grad_sample_mode=mode, **settings), pairs()
    run, loss_of = make(tmp_path, privacy, records)
    model, _ = make(tmp_path, privacy, records)
    model, size = model.model.train(), run.sampling.expected_batch_size
    before, seed = weights(model), derive_seed(privacy.privacy_seed, 0)
    clipped = train_alone(
        model,
        torch.optim.SGD(model.parameters(), lr=RATE),
        [drawn(seed, step, RECORDS, size) for step in range(STEPS)],
        loss_of,
        size,
        BOUND,
    )
    run.train()
    assert clipped > 0
    assert distance(before, weights(model)) > 1e-3
    assert_same(weights(run.model), weights(model), 1e-8)
    assert not [w for w in recwarn if "one sample after the other" in str(w.message)]


def test_a_loop_of_ones_own_and_a_pair_of_equal_texts():
    model, batch = language_model(), collator()(pairs())
    batch["reference"] = batch["reference"].double()

    def loss(pair):
        rows = {name: x[0] for name, x in pair.items()}
        return prefer((log_probs(model, rows) - rows["reference"])[None])

    params = dict(model.named_parameters())
    norms = clipped_grads(loss, params, batch, BOUND).norms
    assert norms[-1] < 1e-12 < norms[:-1].min()


def stand_in(log_loss):
    """What the loss of a pair needs of TRL's trainers."""
    made = SimpleNamespace(
        accelerator=SimpleNamespace(gather=None, device="cpu"),
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        privacy=SimpleNamespace(log_loss=log_loss),
    )

    def compute_loss(model, rows):
        chosen, rejected = rows["input_ids"].chunk(2)
        margin = made.accelerator.gather(chosen - rejected).sum() + rows["margin"]
        made._metrics["train"]["margins"].append(margin.item())
        made._metrics["train"]["num_tokens"] = [chosen.numel()]
        made._total_train_tokens += chosen.numel()
        return margin

    made.compute_loss = compute_loss
    return made


@pytest.mark.parametrize("log_loss", [True, False])
def test_loss_of_a_pair_keeps_what_is_logged(log_loss):
    """Chosen rows stand before rejected ones; no process is waited for."""
    trainer = stand_in(log_loss)
    accelerator, metrics = trainer.accelerator, trainer._metrics
    inputs = {"input_ids": torch.arange(12).view(6, 2) ** 2, "margin": torch.arange(3)}
    split = split_pairs(inputs, 3)
    assert split["input_ids"].shape == (3, 2, 2)
    for i in range(3):
        alone = {name: x[i : i + 1] for name, x in split.items()}
        chosen, rejected = inputs["input_ids"][[i, i + 3]].sum(1)
        assert pair_loss(trainer, None, alone) == chosen - rejected + i
    assert (trainer.accelerator, trainer._metrics) == (accelerator, metrics)
    assert len(metrics["train"]["margins"]) == 3 * log_loss
    assert "num_tokens" not in metrics["train"] and not trainer._total_train_tokens


@pytest.mark.parametrize(
    "fsdp, images, match",
    [(True, False, "gather a sharded model"), (None, True, "pairs with images")],
)
def test_pairs_that_are_refused(fsdp, images, match):
    trainer = stand_in(True)
    trainer.args, trainer.model = SimpleNamespace(fsdp=fsdp), None
    trainer._is_vision_dataset = images
    with pytest.raises(Refused, match=match):
        refuse_pairs(trainer, TRAINERS[0])


def test_a_loss_of_ones_own_on_pairs_of_trl_is_refused():
    """Rows of pairs are not rows of records, and all pairs would share them."""
    stock = type("RewardTrainer", (), {"__module__": TRAINERS[1].rpartition(".")[0]})
    mine = type("Mine", (stock,), {"__module__": "mine"})()
    assert has_pairs(mine) and not has_pairs(stand_in(True))
    with pytest.raises(Refused, match="Mine has the compute_loss of mine.Mine"):
        refuse_pairs(mine, "mine.Mine")
