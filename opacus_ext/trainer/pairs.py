"""The loss of a pair, for TRL's trainers of preferences.

Their batches have the rows of all chosen texts before those of all rejected ones. Here
a pair is a record, and its loss is what the trainer's own ``compute_loss`` gives for
these two rows alone. TRL is not imported.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import Any, Dict, Iterator

import torch
from torch.distributed.fsdp import FSDPModule

from opacus_ext.refused import Refused

T = torch.Tensor
TRAINERS = (
    "trl.trainer.dpo_trainer.DPOTrainer",
    "trl.trainer.reward_trainer.RewardTrainer",
)
# What is another one while the loss of a pair is computed.
_CHANGED = "accelerator", "_metrics", "precompute_ref_logps"


class _Alone:
    """An accelerator whose process waits for no other one: records differ in number."""

    def __init__(self, accelerator: Any):
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def gather(self, value: T) -> T:
        return value

    gather_for_metrics = gather


def split_pairs(inputs: Dict[str, Any], pairs: int) -> Dict[str, Any]:
    """Makes ``[B, 2, ...]`` of rows ``[2 B, ...]``: B chosen ones, then B rejected."""

    rows = {
        n: x for n, x in inputs.items() if getattr(x, "shape", ())[:1] == (2 * pairs,)
    }
    split = {n: x.unflatten(0, (2, pairs)).transpose(0, 1) for n, x in rows.items()}
    return {**inputs, **split}


def with_reference(
    trainer: Any, model: torch.nn.Module, inputs: Dict[str, Any], pairs: int
) -> Dict[str, Any]:
    """
    Adds what DPOTrainer's reference says of each pair alone, to ``[B, 2, ...]``. It is
    no part of the loss: there PEFT's adapters and checkpointing can't be turned off.
    """
    if getattr(trainer, "precompute_ref_logps", True):
        return inputs
    reference = trainer.ref_model or model
    alone = [_rows(inputs, slice(i, i + 1)) for i in range(pairs)]
    found = [trainer.compute_ref_log_probs(reference, rows) for rows in alone]
    chosen, rejected = (torch.cat(column) for column in zip(*found))
    return {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}


def _rows(inputs: Dict[str, T], some: slice = slice(None)) -> Dict[str, T]:
    """Makes rows of pairs, chosen before rejected, as ``split_pairs`` found them."""
    return {
        name: x[some].transpose(0, 1).flatten(0, 1) if x.dim() > 1 else x[some]
        for name, x in inputs.items()
    }


def pair_loss(trainer: Any, model: torch.nn.Module, pair: Dict[str, T]) -> T:
    """Returns the trainer's own loss of a pair, of ``[1, 2, ...]`` and ``[1]``."""
    with _keeping_nothing(trainer):
        return trainer.compute_loss(model, _rows(pair))


@contextmanager
def _keeping_nothing(trainer: Any) -> Iterator[None]:
    """
    Keeps no number of the pair, unless the loss is logged: rewards, margins and
    accuracies are as private as it is. Tokens are not counted, as in PrivateTrainer.
    """
    before = {name: vars(trainer)[name] for name in _CHANGED if hasattr(trainer, name)}
    metrics = trainer._metrics
    trainer.accelerator = _Alone(trainer.accelerator)
    trainer.precompute_ref_logps = True  # with_reference has computed them
    if not trainer.privacy.log_loss:
        trainer._metrics = defaultdict(lambda: defaultdict(list))
    try:
        yield
    finally:
        vars(trainer).update(before)
        trainer._total_train_tokens = 0
        metrics["train"].pop("num_tokens", None)


def has_pairs(trainer: Any) -> bool:
    """Whether a trainer is one of TRL's whose records are pairs, or derived from it."""
    bases = type(trainer).__mro__
    return any(f"{x.__module__}.{x.__qualname__}" in TRAINERS for x in bases)


def refuse_pairs(trainer: Any, owner: str) -> None:
    """
    Refuses another ``compute_loss`` than TRL's, of the class ``owner``, images, and
    models that are sharded, before anything is changed.
    """
    if owner not in TRAINERS:
        raise Refused(
            f"{type(trainer).__name__} has the compute_loss of {owner}, and what that "
            "makes of the rows of a pair is not known.",
            parameter="compute_loss",
            remedy="Leave it out, or compute the loss in a PrivateTrainer of your own, "
            "see docs/how-to/preferences.md.",
        )
    if getattr(trainer, "_is_vision_dataset", False):
        raise Refused(
            "The collator of pairs with images does not make two rows of each pair.",
            parameter="train_dataset",
            remedy="Train on pairs of texts.",
        )
    if trainer.args.fsdp or isinstance(trainer.model, FSDPModule):
        raise Refused(
            f"{type(trainer).__name__} would gather a sharded model for each pair, "
            "and processes have different numbers of pairs.",
            parameter="fsdp",
            remedy="Train data parallel, with LoRA if memory is short, or compute the "
            "loss in a PrivateTrainer of your own, see docs/how-to/preferences.md.",
        )
