"""Fine-tunes a causal language model on texts of authors, with privacy by author."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from typing import Any, Dict, List, Optional

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    TrainingArguments,
)

from examples import tiny
from opacus_ext.data import UserRecords
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

DEFAULT = (
    "--num_train_epochs=8 --per_device_train_batch_size=64 --learning_rate=5e-3"
).split()


@dataclass
class ScriptArguments:
    """
    Attributes:
        model_name_or_path: by default a tiny random Llama is made
        train_file: lines of JSON with "text" and "author"; by default made up
    """

    model_name_or_path: Optional[str] = None
    train_file: Optional[str] = None


def read(path: Optional[str]) -> List[Dict[str, Any]]:
    """Texts; of some authors there are many."""
    if path is not None:
        return load_dataset("json", data_files=path, split="train").to_list()
    rng = random.Random(0)
    authors = [author for author in range(300) for _ in range(rng.randint(1, 4))]
    return [{**x, "author": a} for x, a in zip(tiny.texts(len(authors)), authors)]


def main(argv: Optional[List[str]] = None) -> None:
    script, args = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses(argv or DEFAULT)
    path = script.model_name_or_path or tiny.pretrained("runs/tiny-llama")
    tokenizer = AutoTokenizer.from_pretrained(path)
    texts = read(script.train_file)
    records = [
        {"input_ids": tokenizer(x["text"])["input_ids"], "author": x["author"]}
        for x in texts
    ]
    trainer = PrivateTrainer(
        model=AutoModelForCausalLM.from_pretrained(path),
        args=args,
        train_dataset=UserRecords(records, "author"),
        privacy=PrivacyArguments(target_epsilon=8, target_delta=1e-3),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(sys.argv[1:])
