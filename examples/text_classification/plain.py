"""Fine-tunes a classifier as transformers' run_glue.py does."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import List, Optional

from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    EvalPrediction,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)

from examples import tiny

DEFAULT = (
    "--num_train_epochs=3 --per_device_train_batch_size=250 --learning_rate=3e-3 "
    "--eval_strategy=epoch"
).split()


@dataclass
class ScriptArguments:
    """
    Attributes:
        model_name_or_path: by default a tiny random BERT is made
        train_file: CSV or JSON with "sentence" and "label"; by default it is made up
        validation_file: the same
        max_seq_length: where longer sentences are cut
    """

    model_name_or_path: Optional[str] = None
    train_file: Optional[str] = None
    validation_file: Optional[str] = None
    max_seq_length: int = 128


def read(path: Optional[str], count: int, seed: int) -> Dataset:
    if path is None:
        return Dataset.from_list(tiny.reviews(count, seed))
    return load_dataset(path.rsplit(".", 1)[-1], data_files=path, split="train")


def main(argv: Optional[List[str]] = None) -> None:
    script, args = HfArgumentParser(
        (ScriptArguments, TrainingArguments)
    ).parse_args_into_dataclasses(argv or DEFAULT)
    path = script.model_name_or_path or tiny.pretrained("runs/tiny-bert", "bert")
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2)

    def preprocess(examples):
        return tokenizer(
            examples["sentence"], max_length=script.max_seq_length, truncation=True
        )

    def compute_metrics(p: EvalPrediction):
        return {"accuracy": float((p.predictions.argmax(1) == p.label_ids).mean())}

    train = read(script.train_file, 5000, seed=0).map(preprocess, batched=True)
    validation = read(script.validation_file, 100, seed=1).map(preprocess, batched=True)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=train,
        eval_dataset=validation,
        compute_metrics=compute_metrics,
        processing_class=tokenizer,
        data_collator=DataCollatorWithPadding(tokenizer),
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    metrics = trainer.evaluate()
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main(sys.argv[1:])
