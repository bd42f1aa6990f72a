"""What PrivateTrainer logs as training begins."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback


class NoiseLog(TrainerCallback):
    """
    Logs the noise as training begins.

    Args:
        trainer: a PrivateTrainer
    """

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Logs the noise, and how batches are drawn."""
        optimizer = self.trainer._run.optimizer
        self.trainer.log(
            {
                "noise_multiplier": optimizer.noise_multiplier,
                "sample_rate": self.trainer.sampling.rate(
                    len(self.trainer.train_dataset)
                ),
                "expected_batch_size": optimizer.expected_batch_size,
            }
        )
