"""The loss of a record, for each Trainer that PrivateTrainer is put before.

It is what ``compute_loss`` gives for a record alone, a batch of one. TRL's trainers,
which keep numbers of the batch beside it, are known by name, so nothing here imports
TRL.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Type

import torch
from torch import nn
from transformers import Trainer

from opacus_ext.losses import PerRecord, sample_loss
from opacus_ext.refused import Refused

T = torch.Tensor


class OwnLoss:
    """
    ``compute_loss`` of a subclass.

    Args:
        trainer: a PrivateTrainer
    """

    # take(inputs, i) gives record i of what the collator made; None: row i.
    take: Optional[Callable[[Mapping[str, T], int], Any]] = None
    one_by_one = False  # whether it can't run for several records at once

    def __init__(self, trainer: Any):
        self.trainer = trainer

    @staticmethod
    def refusals(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
        """What Trainer was given that leaves no loss to a record."""
        yield from ()

    def prepare(self, model: nn.Module, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """What the collator made, with what is computed of it without gradients."""
        return inputs

    def __call__(self, model: nn.Module, record: Dict[str, Any]) -> T:
        """The loss of a record, a batch of one."""
        return self.trainer.compute_loss(model, record)


class ModelLoss(OwnLoss):
    """Trainer's: the model's own loss, or one of its outputs and labels."""

    def __call__(self, model: nn.Module, record: Dict[str, Any]) -> T:
        """See the base."""
        trainer = self.trainer
        if trainer.compute_loss_func is None and trainer.label_smoother is None:
            return sample_loss(model, record)
        return Trainer.compute_loss(trainer, model, record)


def _of_trl(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
    """What neither of TRL's trainers can have."""
    if isinstance(given.get("model"), PerRecord):
        yield Refused(
            "TRL's trainers take a model of transformers, got one in a PerRecord.",
            parameter="model",
            remedy="Use opacus_ext.trainer.PrivateTrainer by itself, with the data "
            "tokenized before.",
        )
    for name, reason in (
        ("packing", "puts several records into one sequence"),
        ("padding_free", "puts the records of a batch into one sequence"),
        ("activation_offloading", "moves what the whole batch has saved"),
    ):
        if getattr(args, name, False):
            yield Refused(
                f"{name}=True {reason}, so they can't be clipped one by one.",
                parameter=name,
                remedy="Leave it out.",
            )


class SupervisedLoss(ModelLoss):
    """
    SFTTrainer's: of a record the mean over its own tokens that have labels, where TRL
    takes the mean over those of the batch.
    """

    @staticmethod
    def refusals(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
        """See the base."""
        yield from _of_trl(args, given)
        if getattr(args, "loss_type", "nll") != "nll":
            yield Refused(
                f"loss_type={args.loss_type!r} is not computed record by record.",
                parameter="loss_type",
                remedy='Use "nll".',
            )


_REFERENCE = "ref_chosen_logps", "ref_rejected_logps"


class PairLoss(OwnLoss):
    """
    DPOTrainer's: a record is a pair, chosen and rejected. The reference runs before, on
    all pairs at once.
    """

    one_by_one = True  # TRL's code reads numbers to log

    @staticmethod
    def take(inputs: Mapping[str, T], i: int) -> Dict[str, T]:
        """The ``i``-th pair of rows ``[chosen; rejected]``."""
        count = len(inputs["input_ids"]) // 2
        if i >= count:
            raise IndexError(i)
        return {
            name: x[i : i + 1] if name in _REFERENCE else x[i::count]
            for name, x in inputs.items()
        }

    @staticmethod
    def refusals(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
        """See the base."""
        yield from _of_trl(args, given)
        loss_types = getattr(args, "loss_type", None) or []
        for name in [loss_types] if isinstance(loss_types, str) else loss_types:
            if name.startswith("aot"):
                yield Refused(
                    f"loss_type={name!r} sorts the pairs of a batch, so that pairs "
                    "change each other's losses.",
                    parameter="loss_type",
                    remedy='Use another, such as "sigmoid".',
                )
        if getattr(args, "sync_ref_model", False):
            yield Refused(
                "sync_ref_model=True moves the reference model while it trains, and no "
                "checkpoint has it.",
                parameter="sync_ref_model",
                remedy="Leave it out.",
            )

    def prepare(self, model: nn.Module, inputs: Dict[str, Any]) -> Dict[str, Any]:
        """See the base."""
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
        """See the base."""
        trainer = self.trainer
        if not record["attention_mask"].any():  # of zeros, before the first step
            return model(input_ids=record["input_ids"]).logits.sum()
        before, trainer.precompute_ref_logps = trainer.precompute_ref_logps, True
        try:
            return trainer.compute_loss(model, record)
        finally:
            trainer.precompute_ref_logps = before
            # Of private draws: the tokens are counted nowhere, as in PrivateTrainer,
            # and the rest goes with the loss.
            trainer._total_train_tokens = 0
            metrics = trainer._metrics["train"]
            for name in list(
                metrics if not trainer.privacy.log_loss else ["num_tokens"]
            ):
                metrics.pop(name, None)


_OBJECTIVES: Dict[str, Type[OwnLoss]] = {
    "transformers.trainer.Trainer": ModelLoss,
    "trl.trainer.sft_trainer.SFTTrainer": SupervisedLoss,
    "trl.trainer.dpo_trainer.DPOTrainer": PairLoss,
}


def objective_of(trainer: Type[Any]) -> Type[OwnLoss]:
    """
    Whose loss of a record is trained.

    Args:
        trainer: a subclass of PrivateTrainer, or it
    """
    owner = next(c for c in trainer.__mro__ if "compute_loss" in vars(c))
    return _OBJECTIVES.get(f"{owner.__module__}.{owner.__qualname__}", OwnLoss)
