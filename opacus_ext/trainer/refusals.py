"""Arguments of Trainer that PrivateTrainer refuses, as one table."""

from __future__ import annotations

from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sized, Union

from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments

from opacus_ext.accountants.solver import default_delta
from opacus_ext.data.choice import check_sampling
from opacus_ext.data.copies import refuse_copies
from opacus_ext.refused import Refused
from opacus_ext.trainer.arguments import POISSON, PrivacyArguments
from opacus_ext.trainer.sharded import refuse_config


def _is_on(value: Any, args: Any) -> bool:
    return not (value is None or value is False or value in ("", "no", [], {}))


# DPOTrainer's losses of one pair; "aot" sorts those of a batch.
_OF_A_PAIR = (
    "sigmoid hinge ipo exo_pair nca_pair robust bco_pair sppo_hard apo_zero apo_down "
    "discopop sft sigmoid_norm"
).split()


def _is_by_record(loss_type: Union[None, str, List[str]]) -> bool:
    """Whether SFTTrainer's or DPOTrainer's loss, or losses, are of one record."""
    if isinstance(loss_type, list):
        return all(name in _OF_A_PAIR for name in loss_type)
    return loss_type in (None, "nll")


class Argument(NamedTuple):
    """
    An argument that is refused for some values.

    Attributes:
        name: of the argument
        reason: what is wrong, a text that follows the name and the value
        remedy: what to do
        is_refused: takes the value and all TrainingArguments
    """

    name: str
    reason: str
    remedy: str = "Leave it out."
    is_refused: Callable[[Any, Any], bool] = _is_on


_NOT_ONE_BY_ONE = "so they can't be clipped one by one"
_LEAVE_OUT = (
    "Leave it out: several processes train data parallel, or shard the model by "
    "TrainingArguments(fsdp=True)."
)
ARGUMENTS = (
    Argument(
        "fp16",
        "scales the loss, and with it what is clipped",
        "Use bf16=True or float32.",
    ),
    Argument("use_liger_kernel", "puts kernels over the whole batch into the model"),
    Argument(
        "neftune_noise_alpha",
        "scales its noise by the longest record of the batch, so records change each "
        "other's gradients",
    ),
    Argument(
        "auto_find_batch_size",
        "repeats steps that failed with another batch size, which changes the sampling",
        "Choose per_device_train_batch_size yourself: it is only what fits into "
        "memory, gradient_accumulation_steps make up for it.",
    ),
    Argument("ignore_data_skip", "would draw batches again after resuming"),
    Argument("parallelism_config", "splits a model or sequence", _LEAVE_OUT),
    Argument("deepspeed", "computes gradients by itself", _LEAVE_OUT),
    Argument(
        "max_grad_norm",
        "is Trainer's clipping of the whole batch's gradient, which is off here",
        "Each record's is clipped to PrivacyArguments(per_sample_max_grad_norm=...); "
        "leave the other at its default.",
        lambda value, args: value not in (None, 0, 1.0),
    ),
    Argument(
        "hub_strategy",
        "would publish the random state of the noise, by which it can be subtracted",
        'Use "end" or "every_save".',
        lambda value, args: args.push_to_hub and "checkpoint" in str(value),
    ),
    Argument(
        "n_gpu",
        "is several GPUs in one process",
        "Start one process for each by torchrun, or set CUDA_VISIBLE_DEVICES to one.",
        lambda value, args: value > 1,
    ),
    # Of TRL's trainers.
    Argument("packing", f"puts several records into one sequence, {_NOT_ONE_BY_ONE}"),
    Argument(
        "padding_free", f"puts a batch's records into one sequence, {_NOT_ONE_BY_ONE}"
    ),
    Argument(
        "activation_offloading", f"moves what the batch has saved, {_NOT_ONE_BY_ONE}"
    ),
    Argument(
        "loss_type",
        "is not computed record by record",
        'Use loss_type="nll" with SFTTrainer, "sigmoid" with DPOTrainer.',
        lambda value, args: not _is_by_record(value),
    ),
    Argument(
        "sync_ref_model",
        "moves the reference while it trains, and no checkpoint has it",
    ),
)

# Trainer's own methods that are not public and are relied on here.
_RELIED_ON = (
    "_clip_grad_norm _get_grad_norm _save_optimizer_and_scheduler _save "
    "_load_optimizer_and_scheduler _load_from_checkpoint _load_best_model "
    "_set_signature_columns_if_needed"
).split()


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuses arguments that break privacy."""
    for name in _RELIED_ON:
        if not hasattr(Trainer, name):
            raise Refused(
                f"This version of transformers has no Trainer.{name}, which "
                "PrivateTrainer relies on.",
                remedy="Use the version that it was tested with.",
            )
    for argument in ARGUMENTS:
        name, value = argument.name, getattr(args, argument.name, None)
        if argument.is_refused(value, args):
            shown = f"{name}={getattr(value, 'value', value)!r}"
            raise Refused(
                f"{shown} {argument.reason}.", parameter=name, remedy=argument.remedy
            )
    if args.fsdp:
        refuse_config(args.fsdp_config)


def refuse_data(dataset: Any) -> None:
    """Refuses a data set without records that can be drawn by number, each once."""
    others = isinstance(dataset, (IterableDataset, Mapping))
    if (
        others
        or dataset is not None
        and not (hasattr(dataset, "__len__") and len(dataset))
    ):
        raise Refused(
            f"train_dataset ({type(dataset).__name__}) has no records that can be "
            "drawn by number: Poisson sampling needs a data set with a length.",
            parameter="train_dataset",
            remedy="Give one with __len__ and __getitem__, such as a list of records.",
        )
    if dataset is not None:
        refuse_copies(dataset, "train_dataset")


def refuse_sampling(sampling: Any, privacy: PrivacyArguments) -> None:
    """Refuses what does not draw batches, and a second argument that says how."""
    check_sampling(sampling, True)
    given = {"sampling": privacy.sampling, "public_records": privacy.public_records}
    for name, value in given.items():
        if value not in (POISSON, None):
            raise Refused(
                f"PrivacyArguments({name}={value!r}) and sampling={sampling} both say "
                "how batches are drawn.",
                parameter=name,
                remedy="Give one of the two.",
            )


def given_delta(delta: Optional[float], dataset: Optional[Sized]) -> float:
    """Returns delta; where it is left out, the refusal offers one for the records."""
    if delta is not None:
        return delta
    remedy = "Give one below one over the number of records."
    if dataset is not None:
        records = len(dataset)
        offered = f"{default_delta(records):g}"
        remedy = (
            f"Give PrivacyArguments(target_delta={offered}, ...), or --target_delta "
            f"{offered} on a command line: 1 / N^1.1 for the {records} records of "
            "train_dataset."
        )
    raise Refused(
        "The guarantee needs a delta, and target_delta is missing.",
        parameter="target_delta",
        remedy=remedy,
    )


def refuse_order(cls: type, private: type) -> None:
    """Refuses a subclass of PrivateTrainer with its bases in the wrong order."""
    for base in cls.__mro__[: cls.__mro__.index(private)]:
        if issubclass(base, Trainer) and not issubclass(base, private):
            raise Refused(
                f"{cls.__name__} has {base.__name__} before PrivateTrainer, whose "
                "methods would not be reached.",
                module=cls.__name__,
                remedy=f"Write class {cls.__name__}(PrivateTrainer, {base.__name__}).",
            )


def refuse_environment(trainer: Any) -> None:
    """Refuses settings of the environment, before training."""
    accelerator = trainer.accelerator
    if (
        accelerator.scaler is not None
        or trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or trainer.is_model_parallel
    ):
        raise Refused(
            "PrivateTrainer trains on one device a process, without fp16, DeepSpeed, "
            "accelerate's FSDP or a model on several devices. One of them is set by "
            "the environment (accelerate config) or by the model's device_map.",
            remedy="Leave it out there. For FSDP give TrainingArguments(fsdp=True).",
        )
