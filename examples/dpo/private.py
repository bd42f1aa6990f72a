"""Direct preference optimization on pairs of answers by TRL's DPOTrainer, privately."""

from __future__ import annotations

import argparse
from typing import List, Optional

import torch
from datasets import Dataset, load_dataset
from trl import DPOConfig, DPOTrainer

from examples import tiny
from opacus_ext.trainer import PrivacyArguments, PrivateTrainer


class PrivateDPOTrainer(PrivateTrainer, DPOTrainer):
    pass


def main(argv: Optional[List[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder; by default a tiny Llama is made")
    parser.add_argument(
        "--data", help='JSON lines with "prompt", "chosen" and "rejected"'
    )
    options = parser.parse_args(argv)

    if options.data:
        data = load_dataset("json", data_files=options.data, split="train")
    else:
        data = Dataset.from_list(tiny.preferences(200))
    trainer = PrivateDPOTrainer(
        model=options.model or tiny.pretrained("runs/tiny-llama"),
        args=DPOConfig(
            output_dir="runs/dpo",
            learning_rate=2e-3,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            num_train_epochs=2,
            logging_steps=5,
            use_cpu=not torch.cuda.is_available(),
        ),
        train_dataset=data,
        privacy=PrivacyArguments(target_epsilon=8, target_delta=1e-4),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
