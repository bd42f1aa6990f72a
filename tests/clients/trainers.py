"""Trainers of transformers on Opacus: Safe-Synthesizer's and DPTrainer.

Safe-Synthesizer's registers a sampler of its own for ``nn.Linear``, as mostlyai-engine
does. dp-transformers 1.0.0 can't run beside transformers 5, with Opacus alone either:
its callback calls ``signal_skip_step`` of Accelerate's optimizer, which has none.
"""

import tempfile

import torch
from transformers import TrainingArguments

from tests.clients.weights import NOISE, llama, weights

ROWS, LENGTH, BATCH = 16, 9, 4


def rows(positions=True):
    from datasets import Dataset

    torch.manual_seed(1)
    tokens = torch.randint(2, 32, (ROWS, LENGTH)).tolist()
    data = {"input_ids": tokens, "labels": tokens}
    if positions:
        data["position_ids"] = [list(range(LENGTH))] * ROWS
    return Dataset.from_dict(data).with_format("torch")


def arguments(folder, **others):
    return TrainingArguments(
        folder,
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        learning_rate=1e-2,
        optim="sgd",
        report_to=[],
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
        max_grad_norm=0,  # clipping sums of clipped gradients again is refused
        **others,
    )


def lora():
    from peft import LoraConfig, get_peft_model

    options = LoraConfig(target_modules=["q_proj", "v_proj"], r=2)
    return get_peft_model(llama(), options)


def safe_synthesizer():
    """Its GradSampleModule, entity draws, optimizer and accumulated batches."""
    from nemo_safe_synthesizer.privacy.dp_transformers import dp_utils, privacy_args

    model = lora()
    before = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        dp_utils.OpacusDPTrainer(
            train_dataset=rows(),
            model=model,
            args=arguments(folder, gradient_accumulation_steps=2),
            privacy_args=privacy_args.PrivacyArguments(
                noise_multiplier=NOISE, target_delta=1e-3, per_sample_max_grad_norm=1.0
            ),
            secure_mode=False,  # secure noise has no seed
        ).train()
    return before, weights(model)


def with_dptrainer(mode):
    """
    Without accumulation and with rows of one length: else Opacus alone divides each
    sample's loss by the number of tokens of others, which the README names as wrong.
    """
    from dptrainer import DPTrainer, PrivacyArguments

    model = lora()
    before = weights(model)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPTrainer(
            model=model,
            args=arguments(folder),
            train_dataset=rows(),
            privacy_args=PrivacyArguments(
                noise_multiplier=NOISE, grad_sample_mode=mode
            ),
        )
        torch.manual_seed(1)  # the package's noise took a seed (see __main__.py)
        trainer.train()
        return before, weights(trainer.detach_model())


def dptrainer():
    return with_dptrainer("hooks")


def dptrainer_ghost():
    return with_dptrainer("ghost")
