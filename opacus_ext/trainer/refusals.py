"""Arguments of Trainer that PrivateTrainer refuses, as one table."""

from __future__ import annotations

from typing import Any, Callable, Iterable, Mapping, NamedTuple

from torch.utils.data import IterableDataset
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from opacus_ext.refused import Refused


def _is_on(value: Any, args: Any) -> bool:
    return not (value is None or value is False or value in ("", "no", [], {}))


def _has_no_length(value: Any, args: Any) -> bool:
    if value is None:
        return False
    return isinstance(value, IterableDataset) or not (
        hasattr(value, "__len__") and len(value)
    )


class Argument(NamedTuple):
    """
    An argument that is refused for some values.

    Attributes:
        name: of the argument
        reason: what is wrong, behind the name and the value
        remedy: what to do
        is_refused: tells of a value and of all TrainingArguments
    """

    name: str
    reason: str
    remedy: str = "Leave it out."
    is_refused: Callable[[Any, Any], bool] = _is_on


ARGUMENTS = (
    Argument(
        "fp16",
        "scales the loss, and with it what is clipped",
        "Use bf16=True or float32.",
    ),
    Argument("torch_compile", "compiles a model that runs samples by themselves"),
    Argument(
        "use_liger_kernel",
        "puts fused layers and losses over the whole batch in the place of the model's",
    ),
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
    Argument("include_num_input_tokens_seen", "counts the tokens of private draws"),
    Argument("ignore_data_skip", "would draw batches again after resuming"),
    Argument(
        "data_seed",
        "would make the draws known",
        "PrivacyArguments(privacy_seed=...) is for tests.",
    ),
    Argument("debug", "looks into a forward pass of single samples"),
    Argument("dataloader_drop_last", "has no meaning for batches that are drawn"),
    Argument(
        "dataloader_in_order",
        "mixes the physical batches of logical ones",
        is_refused=lambda value, args: value is False,
    ),
    Argument("parallelism_config", "splits a model or sequence", "Use one process."),
    Argument("deepspeed", "computes gradients by itself", "Use one process."),
    Argument("fsdp", "computes gradients by itself", "Use one process."),
    Argument(
        "max_grad_norm",
        "is Trainer's clipping of the whole batch's gradient, which is off here",
        "Each record's is clipped to PrivacyArguments(per_sample_max_grad_norm=...); "
        "leave the other at its default.",
        lambda value, args: value not in (None, 0, 1.0),
    ),
    Argument(
        "train_sampling_strategy",
        "chooses batches by their records",
        "Leave it out: batches are Poisson samples.",
        lambda value, args: value != "random",
    ),
    Argument(
        "optim",
        "updates weights during the backward pass, or has modes that Opacus's "
        "optimizer does not pass on",
        'Use another, such as "adamw_torch".',
        lambda value, args: any(
            name in getattr(value, "value", value)
            for name in ("lomo", "adalomo", "schedule_free", "layerwise")
        ),
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
    Argument(
        "train_dataset",
        "is several data sets by name",
        "Give one of them.",
        lambda value, args: isinstance(value, Mapping),
    ),
    Argument(
        "train_dataset",
        "has no records that can be drawn by number: Poisson sampling needs a data set "
        "with a length",
        "Give one with __len__ and __getitem__, such as a list of records.",
        _has_no_length,
    ),
    Argument(
        "data_collator",
        "packs the records of a batch into one sequence, so they can't be clipped one "
        "by one",
        "Use one that pads, such as DataCollatorWithPadding.",
        lambda value, args: isinstance(value, DataCollatorWithFlattening),
    ),
)

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


def refuse_arguments(
    args: TrainingArguments, given: Mapping[str, Any], table: Iterable[Argument]
) -> None:
    """Refuses arguments that break privacy: those of ``args``, and Trainer's own."""
    for name in _RELIED_ON:
        if not hasattr(Trainer, name):
            raise Refused(
                f"This version of transformers has no Trainer.{name}, which "
                "PrivateTrainer relies on.",
                remedy="Use the version that it was tested with.",
            )
    for argument in (*ARGUMENTS, *table):
        name, value = argument.name, given.get(argument.name)
        shown = f"{name} ({type(value).__name__})"
        if hasattr(args, name):
            value = getattr(args, name)
            shown = f"{name}={getattr(value, 'value', value)!r}"
        elif value is None:
            continue
        if argument.is_refused(value, args):
            raise Refused(
                f"{shown} {argument.reason}.", parameter=name, remedy=argument.remedy
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
    """Refuses what the environment can set as well as arguments, before training."""
    accelerator = trainer.accelerator
    if (
        accelerator.scaler is not None
        or trainer.is_deepspeed_enabled
        or trainer.is_fsdp_enabled
        or trainer.is_model_parallel
        or str(accelerator.state.dynamo_plugin.backend.value).lower() != "no"
    ):
        raise Refused(
            "PrivateTrainer trains on one device a process, without fp16, DeepSpeed, "
            "FSDP, a model on several devices or torch.compile. One of them is set by "
            "the environment (accelerate config) or by the model's device_map.",
            remedy="Leave it out there.",
        )
