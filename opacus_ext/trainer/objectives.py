"""The losses of records, for each Trainer that PrivateTrainer is put before.

Trainer and its subclasses have one number for a batch, ``compute_loss``. What stands
here gives one loss a record in its place, computed of that record alone. TRL's trainers
are known by name, so nothing here imports TRL.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterator, Mapping, Optional, Type

import torch
from torch import nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS,
)

from opacus_ext.grad_sample.factors import wide
from opacus_ext.losses import PerRecord, cross_entropy, model_losses
from opacus_ext.refused import Refused


class ModelLoss:
    """
    Trainer's: the model's own loss, or one of its outputs and labels.

    Args:
        trainer: a PrivateTrainer
    """

    # Which of the model's inputs are a record, where that is not one row.
    take: Optional[Callable[[Mapping[str, torch.Tensor], int], Any]] = None

    def __init__(self, trainer: Any):
        self.trainer = trainer

    @staticmethod
    def refusals(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
        """What Trainer was given that leaves no loss to a record."""
        yield from ()

    def __call__(self, model: nn.Module, inputs: Dict[str, Any]) -> torch.Tensor:
        """Losses ``[B]`` of what the collator made."""
        trainer = self.trainer
        function = trainer.compute_loss_func
        if function is None and trainer.label_smoother is None:
            return model_losses(model, inputs)
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if function is not None:
            return function(outputs, labels, num_items_in_batch=None)
        if labels is None or labels.is_floating_point():
            raise Refused(
                "label_smoothing_factor is for labels that are classes; the batch has "
                f"{'none' if labels is None else labels.dtype}.",
                parameter="label_smoothing_factor",
                remedy="Leave it out.",
            )
        if self._is_causal():
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        smoothing = trainer.args.label_smoothing_factor
        return cross_entropy(logits, labels, label_smoothing=smoothing)

    def _is_causal(self) -> bool:
        model = self.trainer.model
        if hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        return type(model).__name__ in CAUSAL_LMS.values()


def _of_trl(args: Any, given: Mapping[str, Any]) -> Iterator[Refused]:
    """What neither of TRL's trainers can have."""
    if isinstance(given.get("model"), PerRecord):
        yield Refused(
            "TRL's trainers take a model of transformers, got one in a PerRecord.",
            parameter="model",
            remedy="Use PrivateTrainer by itself, with the data tokenized before.",
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
                remedy='Use "nll", or override sample_losses(model, inputs).',
            )


_REFERENCE = "ref_chosen_logps", "ref_rejected_logps"


class PairLoss(ModelLoss):
    """
    DPOTrainer's: a record is a pair, chosen and rejected, and its loss is what TRL's
    own code computes for a batch of that pair alone. The model runs once on all of
    them, two rows a sample; the reference runs before, without gradients.
    """

    @staticmethod
    def take(inputs: Mapping[str, torch.Tensor], i: int) -> Dict[str, torch.Tensor]:
        """The ``i``-th pair: rows ``2 * i`` and ``2 * i + 1``."""
        tensors = [x for x in inputs.values() if isinstance(x, torch.Tensor)]
        if 2 * i >= len(tensors[0]):
            raise IndexError(i)
        return {
            name: x[2 * i : 2 * i + 2] if isinstance(x, torch.Tensor) else x
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

    def __call__(self, model: nn.Module, inputs: Dict[str, Any]) -> torch.Tensor:
        """Losses ``[B]`` of B pairs, rows ``[chosen; rejected]``."""
        trainer = self.trainer
        if trainer._is_vision_dataset:
            raise Refused(
                "Pairs with images are not known to be rows of one batch.",
                parameter="train_dataset",
                remedy="Train on text, or override sample_losses(model, inputs).",
            )
        if trainer.aux_loss_enabled:
            raise Refused(
                "The balancing loss of a mixture of experts is over all pairs here.",
                parameter="router_aux_loss_coef",
                remedy="Set router_aux_loss_coef=0.0.",
            )
        count = len(inputs["input_ids"]) // 2
        if trainer.precompute_ref_logps:
            references = [inputs[name] for name in _REFERENCE]
        else:
            reference = trainer.ref_model or model
            references = trainer.compute_ref_log_probs(reference, inputs)
        # The rows of a pair side by side.
        pairs = {
            name: x.unflatten(0, (2, count)).transpose(0, 1).flatten(0, 1)
            for name, x in inputs.items()
            if name not in _REFERENCE
        }
        rows = {name: x for name, x in pairs.items() if name != "completion_mask"}
        logits = model(**rows, use_cache=False).logits
        before, trainer.precompute_ref_logps = trainer.precompute_ref_logps, True
        losses = []
        try:
            for i in range(count):
                pair = self.take(pairs, i)
                tokens = self._tokens(logits[2 * i : 2 * i + 2], pair)
                outputs = SimpleNamespace(**tokens)
                pair.update(zip(_REFERENCE, (x[i : i + 1] for x in references)))
                losses.append(trainer.batch_loss(lambda **_: outputs, pair))
        finally:
            trainer.precompute_ref_logps = before
        # Of private draws: the tokens are counted nowhere, as in PrivateTrainer, and
        # the rest goes with the loss.
        trainer._total_train_tokens = 0
        metrics = trainer._metrics["train"]
        for name in list(metrics if not trainer.privacy.log_loss else ["num_tokens"]):
            del metrics[name]
        return torch.stack(losses)

    def _tokens(
        self, logits: torch.Tensor, pairs: Mapping[str, torch.Tensor]
    ) -> Dict[str, torch.Tensor]:
        """What TRL's fused head gives of each token: the names are its own."""
        labels = pairs["input_ids"].masked_fill(pairs["completion_mask"] == 0, -100)
        labels = labels[:, 1:]
        # Virtual tokens of prompt tuning come before the real ones.
        logits = wide(logits[:, -labels.shape[1] - 1 : -1])
        found = {"log_probs": -F.cross_entropy(logits.mT, labels, reduction="none")}
        with torch.no_grad():
            log_probs = logits.log_softmax(-1)
            measured = {
                "entropy": -(log_probs.exp() * log_probs).sum(-1),
                "mean_logits": logits.mean(-1),
                "is_top1": logits.argmax(-1) == labels,
                "log_sum_sq_probs": (2 * log_probs).logsumexp(-1),
            }
        for name, x in measured.items():
            found[name] = x.masked_fill(labels == -100, 0)
        return found


_OBJECTIVES: Dict[str, Type[ModelLoss]] = {
    "transformers.trainer.Trainer": ModelLoss,
    "trl.trainer.sft_trainer.SFTTrainer": SupervisedLoss,
    "trl.trainer.dpo_trainer.DPOTrainer": PairLoss,
}


def objective_of(trainer: Type[Any]) -> Optional[Type[ModelLoss]]:
    """
    What is trained in the place of a Trainer's ``compute_loss``.

    Args:
        trainer: a subclass of PrivateTrainer, or it

    Returns:
        None if that ``compute_loss`` is not known.
    """
    after = [c for c in trainer.__mro__ if not hasattr(c, "sample_losses")]
    owner = next(c for c in after if "compute_loss" in vars(c))
    return _OBJECTIVES.get(f"{owner.__module__}.{owner.__qualname__}")
