"""What PrivateTrainer refuses: a table of arguments, and what needs a closer look."""

from __future__ import annotations

import inspect
from typing import Any, Dict, Iterator, Mapping, NamedTuple

from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from opacus_ext.refused import Refused


class _Argument(NamedTuple):
    """An argument of Trainer that is refused unless it is off."""

    name: str
    reason: str
    remedy: str = "Leave it out."


_ARGUMENTS = (
    _Argument(
        "fp16",
        "scales the loss, and with it what is clipped",
        "Use bf16=True or float32.",
    ),
    _Argument("torch_compile", "compiles a model that runs samples by themselves"),
    _Argument(
        "use_liger_kernel",
        "puts fused layers and losses over the whole batch in the place of the model's",
    ),
    _Argument(
        "neftune_noise_alpha",
        "scales its noise by the longest record of the batch, so records change each "
        "other's gradients",
    ),
    _Argument(
        "auto_find_batch_size",
        "repeats steps that failed with another batch size, which changes the sampling",
        "Choose per_device_train_batch_size yourself: it is only what fits into "
        "memory, gradient_accumulation_steps make up for it.",
    ),
    _Argument("include_num_input_tokens_seen", "counts the tokens of private draws"),
    _Argument("ignore_data_skip", "would draw batches again after resuming"),
    _Argument(
        "data_seed",
        "would make the draws known",
        "PrivacyArguments(privacy_seed=...) is for tests.",
    ),
    _Argument("debug", "looks into a forward pass of single samples"),
    _Argument("dataloader_drop_last", "has no meaning for batches that are drawn"),
    _Argument(
        "parallelism_config", "splits a model or sequence", "One process is supported."
    ),
    _Argument("deepspeed", "computes gradients by itself", "One process is supported."),
    _Argument("fsdp", "computes gradients by itself", "One process is supported."),
)
_OPTIMIZERS = ("lomo", "adalomo", "schedule_free", "layerwise")

# Trainer's own methods that are not public and are relied on here.
_RELIED_ON = (
    "_clip_grad_norm",
    "_get_grad_norm",
    "_save_optimizer_and_scheduler",
    "_load_optimizer_and_scheduler",
    "_save",
    "_load_from_checkpoint",
    "_load_best_model",
    "_set_signature_columns_if_needed",
)


def refusals(args: TrainingArguments, given: Mapping[str, Any]) -> Iterator[Refused]:
    """
    What breaks differential privacy, or is not supported.

    Args:
        args: Trainer's
        given: what else Trainer was given, by name
    """
    missing = [name for name in _RELIED_ON if not hasattr(Trainer, name)]
    if missing:
        yield Refused(
            f"This version of transformers has no Trainer.{missing[0]}, which "
            "PrivateTrainer relies on.",
            remedy="Use the version that it was tested with.",
        )
    for name, reason, remedy in _ARGUMENTS:
        value = getattr(args, name, None)
        off = value is None or value is False or value in ("", "no", [], {})
        if not off:
            yield Refused(f"{name}={value!r} {reason}.", parameter=name, remedy=remedy)
    if args.max_grad_norm not in (None, 0, 1.0):
        yield Refused(
            f"max_grad_norm={args.max_grad_norm} is Trainer's clipping of the whole "
            "batch's gradient, which is off here.",
            parameter="max_grad_norm",
            remedy="Each record's is clipped to PrivacyArguments("
            "per_sample_max_grad_norm=...); leave the other at its default.",
        )
    if args.train_sampling_strategy != "random":
        yield Refused(
            f"train_sampling_strategy={args.train_sampling_strategy!r} chooses batches "
            "by their records.",
            parameter="train_sampling_strategy",
            remedy="Leave it out: batches are Poisson samples.",
        )
    optim = getattr(args.optim, "value", args.optim)
    if any(name in optim for name in _OPTIMIZERS):
        yield Refused(
            f"optim={optim!r} updates weights during the backward pass, or has modes "
            "that Opacus's optimizer does not pass on.",
            parameter="optim",
            remedy='Use another, such as "adamw_torch".',
        )
    if args.push_to_hub and "checkpoint" in str(getattr(args, "hub_strategy", "")):
        yield Refused(
            f"hub_strategy={args.hub_strategy!r} would publish the random state of the "
            "noise, by which it can be subtracted.",
            parameter="hub_strategy",
            remedy='Use "end" or "every_save".',
        )
    if args.world_size > 1 or args.n_gpu > 1:
        yield Refused(
            f"{args.world_size} processes with {args.n_gpu} GPUs each: PrivateTrainer "
            "trains in one process on one device.",
            remedy="Set CUDA_VISIBLE_DEVICES to one.",
        )
    data = given.get("train_dataset")
    if isinstance(data, Mapping):
        yield Refused(
            f"train_dataset ({type(data).__name__}) is several data sets by name: "
            f"{', '.join(map(repr, data))}.",
            parameter="train_dataset",
            remedy="Give one of them.",
        )
    if isinstance(data, IterableDataset) or (
        data is not None and not (hasattr(data, "__len__") and len(data))
    ):
        yield Refused(
            f"train_dataset ({type(data).__name__}) has no records that can be drawn "
            "by number: Poisson sampling needs a data set with a length.",
            parameter="train_dataset",
            remedy="Give one with __len__ and __getitem__, such as a list of records.",
        )
    if not args.dataloader_in_order:
        yield Refused(
            "dataloader_in_order=False mixes the parts of logical batches.",
            parameter="dataloader_in_order",
            remedy="Leave it out.",
        )
    collator = given.get("data_collator")
    if isinstance(collator, DataCollatorWithFlattening):
        yield Refused(
            f"data_collator ({type(collator).__name__}) packs the records of a batch "
            "into one sequence, so they can't be clipped one by one.",
            parameter="data_collator",
            remedy="Use one that pads, such as DataCollatorWithPadding.",
        )


def by_name(
    trainer: Any, base: type, args: tuple, kwargs: Mapping[str, Any]
) -> Dict[str, Any]:
    """
    What a Trainer is given, by the names that its ``__init__`` has.

    Args:
        trainer: that is being made
        base: the class of this package after which its own ``__init__`` comes
        args: by position
        kwargs: by keyword
    """
    after = type(trainer).__mro__[type(trainer).__mro__.index(base) + 1 :]
    owner: Any = next(c for c in after if "__init__" in vars(c))
    given = inspect.signature(owner.__init__).bind(trainer, *args, **kwargs).arguments
    return {**given, **given.get("kwargs", {})}


def refuse_order(cls: type, private: type) -> None:
    """
    Refuses bases in the wrong order.

    Args:
        cls: a subclass of PrivateTrainer
        private: PrivateTrainer
    """
    for base in cls.__mro__[: cls.__mro__.index(private)]:
        if issubclass(base, Trainer) and not issubclass(base, private):
            raise Refused(
                f"{cls.__name__} has {base.__name__} before PrivateTrainer, whose "
                "methods would not be reached.",
                module=cls.__name__,
                remedy=f"Write class {cls.__name__}(PrivateTrainer, {base.__name__}).",
            )


def refuse_environment(trainer: Any) -> None:
    """
    Refuses what the environment can set as well as arguments.

    Args:
        trainer: a PrivateTrainer that begins to train
    """
    accelerator = trainer.accelerator
    if (
        accelerator.scaler is not None
        or accelerator.num_processes > 1
        or trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or trainer.is_model_parallel
        or str(accelerator.state.dynamo_plugin.backend.value).lower() != "no"
    ):
        raise Refused(
            "PrivateTrainer trains in one process on one device, without fp16, "
            "DeepSpeed, FSDP, a model on several devices or torch.compile. One of "
            "them is set by the environment (accelerate config) or by the model's "
            "device_map.",
            remedy="Leave it out there.",
        )


def warnings_about(trainer: Any) -> Iterator[str]:
    """
    What is allowed, and mostly a mistake.

    Args:
        trainer: a PrivateTrainer
    """
    if trainer.train_dataset is None:
        return
    records, delta = len(trainer.train_dataset), trainer.privacy.target_delta
    if delta * records >= 1:
        yield (
            f"target_delta={delta} is one over the {records} records or more: a run "
            "that publishes a record as it is can have that delta. Choose it well "
            f"below {1 / records:.1e}."
        )
    if trainer.logical_batch_size > records:
        yield (
            f"A batch of {trainer.logical_batch_size} (per_device_train_batch_size * "
            f"gradient_accumulation_steps) is more than the {records} records: each "
            "step takes all of them."
        )
