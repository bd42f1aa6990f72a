"""A user is the sample: who has more records adds no more to a step."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

from opacus_ext import Refused
from opacus_ext.data import RecordCollator, UserRecords
from opacus_ext.losses import PerSample, RecordModel, model_losses

from ..common import make_private


class Tagger(nn.Module):
    """With a loss as a model of transformers has."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.head = nn.Linear(6, 10)

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids).tanh())
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten())}


USERS = [5, 5, 8, 5, 1, 8, 8, 8]


def data():
    torch.manual_seed(1)
    return TensorDataset(torch.randn(8, 3, dtype=torch.float64), torch.arange(8))


def test_one_record_of_each_user_uniformly():
    users = UserRecords(data(), torch.tensor(USERS))
    assert users.users == [5, 8, 1] and len(users) == 3
    for i, user in enumerate(users.users):
        own = [k for k, each in enumerate(USERS) if each == user]
        seen = Counter(int(users[i][1]) for _ in range(400))
        assert sorted(seen) == own
        assert min(seen.values()) > 250 / len(own)


@pytest.mark.parametrize("count, given", [(2, [2, 2, 1]), (None, [3, 4, 1])])
def test_several_are_different_ones(count, given):
    users = UserRecords(data(), USERS, records_per_step=count)
    for i, size in enumerate(given):
        drawn = [int(y) for _, y in users[i]]
        assert len(set(drawn)) == len(drawn) == size
        assert {USERS[k] for k in drawn} == {users.users[i]}


def update(dataset, mode):
    """The change of weights by a step of all users without noise, times B."""
    torch.manual_seed(0)
    model = RecordModel(Tagger().double())
    before = [p.detach().clone() for p in model.parameters()]
    private = make_private(
        model,
        mode,
        batch_size=len(dataset),
        criterion=PerSample(),
        max_grad_norm=0.1,
    )
    torch.manual_seed(4)
    collate = RecordCollator(default_collate)
    batch = collate([dataset[i] for i in range(len(dataset))])
    private.step(batch, lambda model, batch: model_losses(model, batch))
    after = list(model.parameters())
    return torch.cat([(a - b).flatten() for a, b in zip(after, before)]) * len(dataset)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_changing_a_user_changes_one_clipped_gradient(mode):
    """Whole records of one user, of which there are many, are taken away or changed."""

    def texts(keep, seed=7):
        torch.manual_seed(seed)
        ids = torch.randint(0, 10, (9, 5))
        users = [0, 1, 2, 2, 2, 2, 2, 2, 1]
        rows = [{"input_ids": x, "labels": x, "by": u} for x, u in zip(ids, users)]
        return UserRecords([row for row in rows if keep(row)], "by", None)

    whole = update(texts(lambda row: True), mode)
    without = update(texts(lambda row: row["by"] != 2), mode)
    gap = (whole - without).norm()
    assert 0.09 < gap <= 0.1 + 1e-9  # C: this user's gradient was clipped
    fewer = update(texts(lambda row: row["by"] != 2 or row["labels"][0] > 4), mode)
    assert 0 < (whole - fewer).norm() <= 0.2 + 1e-9


def test_a_run_that_goes_on_draws_the_same_records(tmp_path):
    """PrivateTrainer's seed is that of the draws of records, too."""
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    off = {"embd_pdrop": 0, "attn_pdrop": 0, "resid_pdrop": 0}
    config = GPT2Config(vocab_size=10, n_embd=8, n_layer=1, n_head=1, **off)
    ids = torch.randint(0, 10, (24, 5))
    rows = [{"input_ids": x, "labels": x, "by": i % 8} for i, x in enumerate(ids)]

    def fit(steps, resume=None):
        torch.manual_seed(0)
        trainer = PrivateTrainer(
            GPT2LMHeadModel(config),
            TrainingArguments(
                tmp_path,
                max_steps=steps,
                save_steps=3,
                per_device_train_batch_size=4,
                report_to="none",
                disable_tqdm=True,
            ),
            train_dataset=UserRecords(rows, "by"),
            privacy=PrivacyArguments(
                noise_multiplier=0.0,
                target_delta=1e-2,
                grad_sample_mode="ghost_bk",
                privacy_seed=1,
            ),
        )
        trainer.train(resume_from_checkpoint=resume)
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    whole = fit(5)
    assert torch.equal(fit(5, str(tmp_path / "checkpoint-3")), whole)


@pytest.mark.parametrize(
    "given, message",
    [
        ((data(), [1, 2]), "8 records, and users has 2 entries"),
        (([], []), "0 records"),
        ((data(), USERS, 0), "records_per_step must be a whole number.*got 0"),
    ],
)
def test_refused(given, message):
    with pytest.raises(Refused, match=message):
        UserRecords(*given)
