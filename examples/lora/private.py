"""Fine-tunes a Llama-like model with LoRA, as in PEFT's quicktour, with privacy."""

from __future__ import annotations

import argparse
from typing import List, Optional

from datasets import Dataset
from peft import LoraConfig, TaskType, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    TrainingArguments,
)

from examples import tiny
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; by default a tiny Llama is made")
    parser.add_argument("--epochs", type=int, default=2)
    options = parser.parse_args(argv)

    path = options.model or tiny.pretrained("runs/tiny-llama")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)
    peft_config = LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        r=8,
        lora_alpha=32,
        lora_dropout=0.1,
        target_modules="all-linear",
    )
    model = get_peft_model(model, peft_config)
    model.print_trainable_parameters()

    data = Dataset.from_list(tiny.texts(200))
    data = data.map(
        lambda examples: tokenizer(examples["text"], truncation=True, max_length=64),
        batched=True,
        remove_columns=["text"],
    )
    trainer = PrivateTrainer(
        model=model,
        args=TrainingArguments(
            output_dir="runs/lora",
            learning_rate=1e-2,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            num_train_epochs=options.epochs,
            logging_steps=5,
        ),
        train_dataset=data,
        processing_class=tokenizer,
        privacy=PrivacyArguments(target_epsilon=8, target_delta=1e-4),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    model.save_pretrained("runs/lora/adapter")


if __name__ == "__main__":
    main()
