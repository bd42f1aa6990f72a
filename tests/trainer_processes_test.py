"""PrivateTrainer in two processes against one: weights, logs, checkpoints.

Float64, so that two sums of the same gradients differ by rounding alone.
"""

import functools

import pytest
import torch

pytest.importorskip("accelerate")

from tests.processes import as_torchrun, run  # noqa: E402

LOGGED = ("loss", "epsilon", "expected_batch_size", "sample_rate", "train_loss")


def trained(folder, each, resume=None):
    """Four steps of eight records on average, in all processes together."""
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

    as_torchrun()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 20, (32, 6), generator=generator)
    data = [{"input_ids": x, "labels": x} for x in ids]
    config = GPT2Config(
        **dict(vocab_size=20, n_embd=8, n_layer=1, n_head=1, n_positions=8),
        **dict(resid_pdrop=0, attn_pdrop=0, embd_pdrop=0),
        **dict(bos_token_id=0, eos_token_id=0),
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).double()
    trainer = PrivateTrainer(
        model,
        TrainingArguments(
            folder,
            **dict(max_steps=4, save_steps=2, logging_steps=1, learning_rate=1.0),
            **dict(per_device_train_batch_size=each, gradient_accumulation_steps=2),
            **dict(use_cpu=True, report_to=[], disable_tqdm=True, optim="sgd"),
        ),
        train_dataset=data,
        privacy=PrivacyArguments(
            **dict(noise_multiplier=0.7, target_delta=1e-3, privacy_seed=7),
            **dict(per_sample_max_grad_norm=0.5, repeat_noise=True),
        ),
    )
    trainer.train(resume_from_checkpoint=resume)
    history = [
        {k: v for k, v in entry.items() if k in LOGGED or k == "step"}
        for entry in trainer.state.log_history
    ]
    return trainer.model.state_dict(), history, trainer.engine.accountant.history


def jobs(folder, processes):
    saved = f"{folder}/both/checkpoint-2"
    return {
        "trained": lambda: trained(f"{folder}/both", 2),
        "resumed": lambda: trained(f"{folder}/again", 2, saved),
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("runs"))
    own = str(tmp_path_factory.mktemp("two"))
    return folder, run(2, own, functools.partial(jobs, folder))


def assert_same(found, expected, logs=True):
    for name, value in expected[0].items():
        torch.testing.assert_close(found[0][name], value, rtol=0, atol=1e-12)
    assert found[2] == expected[2]
    if logs:
        for entry, other in zip(found[1], expected[1]):
            assert entry == pytest.approx(other, rel=1e-5)


def test_two_processes_train_as_one(two, tmp_path):
    expected = trained(str(tmp_path), 4)
    for found in two[1].of("trained"):
        assert_same(found, expected, logs=bool(found[1]))
    assert len(two[1].of("trained")[0][1]) == len(expected[1])


def test_resumed_by_two_and_by_one(two, tmp_path):
    folder, group = two
    expected = group.of("trained")[0]
    for found in group.of("resumed"):
        assert_same(found, expected, logs=False)
    alone = trained(str(tmp_path), 4, f"{folder}/both/checkpoint-2")
    assert_same(alone, expected, logs=False)
