"""The loss of a record, for each Trainer that PrivateTrainer is put before.

It is what ``compute_loss`` gives for a record alone, a batch of one. TRL's trainers,
which keep numbers of the batch as well, are found by name: TRL is not imported.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Type

import torch
from torch import nn
from transformers import Trainer

from opacus_ext.losses import sample_loss
from opacus_ext.refused import Refused
from opacus_ext.trainer.refusals import Argument

T = torch.Tensor


class OwnLoss:
    """
    ``compute_loss`` of a subclass.

    Args:
        trainer: a PrivateTrainer
    """

    #: ``take`` of ``clipped_grads`` for a collated batch; None takes its rows.
    take: Optional[Callable[[Mapping[str, T], int], Any]] = None
    one_by_one = False  # for code that can't run for several records at once
    refused: Tuple[Argument, ...] = ()  # arguments that leave no loss to a record

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def prepare(self, model: nn.Module, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """Adds what is computed of the whole physical batch without gradients."""
        return inputs

    def __call__(self, model: nn.Module, record: Dict[str, Any]) -> T:
        """Returns the loss of a record, a batch of one."""
        return self.trainer.compute_loss(model, record)


class ModelLoss(OwnLoss):
    """The loss of Trainer: the model's own, or one of its outputs and labels."""

    def __call__(self, model: nn.Module, record: Dict[str, Any]) -> T:
        trainer = self.trainer
        if trainer.compute_loss_func is None and trainer.label_smoother is None:
            return sample_loss(model, record)
        return Trainer.compute_loss(trainer, model, record)


_NOT_ONE_BY_ONE = "so they can't be clipped one by one"
_TRL = (
    Argument("packing", f"puts several records into one sequence, {_NOT_ONE_BY_ONE}"),
    Argument(
        "padding_free", f"puts a batch's records into one sequence, {_NOT_ONE_BY_ONE}"
    ),
    Argument(
        "activation_offloading", f"moves what the batch has saved, {_NOT_ONE_BY_ONE}"
    ),
)


class SupervisedLoss(ModelLoss):
    """
    The loss of SFTTrainer: the mean over a record's own tokens that have labels, where
    TRL takes the mean over those of the batch.
    """

    refused = (
        *_TRL,
        Argument(
            "loss_type",
            "is not computed record by record",
            'Use "nll".',
            lambda value, args: value != "nll",
        ),
    )


_REFERENCE = "ref_chosen_logps", "ref_rejected_logps"


class PairLoss(OwnLoss):
    """
    The loss of DPOTrainer, whose record is a pair, chosen and rejected. The reference
    runs before, on all pairs at once.
    """

    one_by_one = True  # TRL's code reads numbers to log
    refused = (
        *_TRL,
        Argument(
            "loss_type",
            "sorts the pairs of a batch, so that pairs change each other's losses",
            'Use another, such as "sigmoid".',
            lambda value, args: any(
                name.startswith("aot")
                for name in ([value] if isinstance(value, str) else value or [])
            ),
        ),
        Argument(
            "sync_ref_model",
            "moves the reference model while it trains, and no checkpoint has it",
        ),
    )

    @staticmethod
    def take(inputs: Mapping[str, T], i: int) -> Dict[str, T]:
        """Takes the ``i``-th pair of rows ``[chosen; rejected]``."""
        count = len(inputs["input_ids"]) // 2
        if i >= count:
            raise IndexError(i)
        return {
            name: x[i : i + 1] if name in _REFERENCE else x[i::count]
            for name, x in inputs.items()
        }

    def prepare(self, model: nn.Module, inputs: Dict[str, Any]) -> Dict[str, Any]:
        trainer = self.trainer
        if trainer._is_vision_dataset:
            raise Refused(
                "Pairs with images are not known to be rows of one batch.",
                parameter="train_dataset",
                remedy="Train on text.",
            )
        if trainer.precompute_ref_logps:
            return inputs
        reference = trainer.ref_model or model
        found = trainer.compute_ref_log_probs(reference, inputs)
        return {**inputs, **dict(zip(_REFERENCE, found))}

    def __call__(self, model: nn.Module, record: Dict[str, Any]) -> T:
        trainer = self.trainer
        if not record["attention_mask"].any():  # of zeros, before the first step
            return model(input_ids=record["input_ids"]).logits.sum()
        before, trainer.precompute_ref_logps = trainer.precompute_ref_logps, True
        try:
            return trainer.compute_loss(model, record)
        finally:
            trainer.precompute_ref_logps = before
            # Numbers of private draws: tokens are counted nowhere, as in
            # PrivateTrainer, and the rest is logged with the loss or not at all.
            trainer._total_train_tokens = 0
            metrics = trainer._metrics["train"]
            logged = trainer.privacy.log_loss
            for name in ["num_tokens"] if logged else list(metrics):
                metrics.pop(name, None)


_OBJECTIVES: Dict[str, Type[OwnLoss]] = {
    "transformers.trainer.Trainer": ModelLoss,
    "trl.trainer.sft_trainer.SFTTrainer": SupervisedLoss,
    "trl.trainer.dpo_trainer.DPOTrainer": PairLoss,
}


def objective_of(trainer: Type[Any]) -> Type[OwnLoss]:
    """Returns the loss of a record that a subclass of PrivateTrainer trains."""
    owner = next(c for c in trainer.__mro__ if "compute_loss" in vars(c))
    return _OBJECTIVES.get(f"{owner.__module__}.{owner.__qualname__}", OwnLoss)
