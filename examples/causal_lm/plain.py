"""Fine-tunes a causal language model as transformers' run_clm.py does."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from itertools import chain
from typing import List, Optional

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from examples import tiny

DEFAULT = (
    "--num_train_epochs=6 --per_device_train_batch_size=50 --learning_rate=5e-3 "
    "--eval_strategy=epoch"
).split()


@dataclass
class ScriptArguments:
    """
    Attributes:
        model_name_or_path: by default a tiny random Llama is made
        train_file: with a text a line; by default texts are made up
        validation_file: the same
        block_size: how many tokens a record has
    """

    model_name_or_path: Optional[str] = None
    train_file: Optional[str] = None
    validation_file: Optional[str] = None
    block_size: int = 32


def read(path: Optional[str], count: int, seed: int) -> Dataset:
    if path is None:
        return Dataset.from_list(tiny.texts(count, seed))
    return load_dataset("text", data_files=path, split="train")


def main(argv: Optional[List[str]] = None) -> None:
    script, args = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses(argv or DEFAULT)
    path = script.model_name_or_path or tiny.pretrained("runs/tiny-llama")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path)

    def tokenize(examples):
        return tokenizer(examples["text"], return_token_type_ids=False)

    def group_texts(examples):
        joined = {k: list(chain(*examples[k])) for k in examples}
        size = script.block_size
        total = len(joined["input_ids"]) // size * size
        result = {
            k: [t[i : i + size] for i in range(0, total, size)]
            for k, t in joined.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    def prepare(data):
        tokens = data.map(tokenize, batched=True, remove_columns=data.column_names)
        return tokens.map(group_texts, batched=True)

    train = prepare(read(script.train_file, 600, seed=0))
    validation = prepare(read(script.validation_file, 40, seed=1))
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
