"""transformers' Trainer with differential privacy.

:class:`PrivateTrainer` is used as ``Trainer`` is, with one more argument. What makes it
private is Opacus's ``PrivacyEngine.make_private``, called when training begins; what is
overridden here is where Trainer would go round it: how batches are drawn, which loss is
backpropagated, what is clipped, logged and saved.

This module needs transformers and accelerate, so ``import opacus_ext`` leaves it out.
"""

from __future__ import annotations

import inspect
import os
import secrets
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from transformers import (
    DataCollatorWithFlattening,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL_LMS,
)
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import find_labels

from opacus_ext.data.logical import LogicalBatches, Part, logical_loader, number
from opacus_ext.losses import PerRecord, PerSample, cross_entropy, model_losses
from opacus_ext.optimizers.clipping import CLIPPINGS
from opacus_ext.refused import Refused
from opacus_ext.registry import MODES
from opacus_ext.accountants.budget import noise_left

PRIVACY_STATE = "privacy.pt"  # in a checkpoint's folder


def _field(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class PrivacyArguments:
    """
    What privacy a run has. ``HfArgumentParser`` takes it beside ``TrainingArguments``.

    The unit of privacy is one record of the training set.

    Attributes:
        target_delta: delta of the guarantee, below one over the number of records
        target_epsilon: what all steps of the run may spend; the noise is chosen for it
        noise_multiplier: in the place of ``target_epsilon``
        max_grad_norm: to which each record's gradient is clipped; for
            ``clipping="per_layer"`` a list, in the order of the optimizer's parameters
        clipping: "flat", "automatic", "normalised", "per_layer" or one that was
            registered
        grad_sample_mode: "auto", "ghost_bk", "ghost", "scan" or "hooks"
        accountant: "prv_bounds", "prv" or "rdp" ("gdp" of Opacus can report too little)
        poisson_sampling: False shuffles. No accountant's numbers hold for that: what
            they would be is logged under another name
        log_loss: whether the training loss is logged. It is the mean over private
            records, without noise, and epsilon does not cover it
        seed: of noise and batches, for tests. By default nobody knows it;
            ``TrainingArguments.seed`` has no part in either

    Raises:
        ValueError: for arguments that do not fit

    Example:
        >>> PrivacyArguments(target_epsilon=8, target_delta=1e-5).clipping
        'flat'
    """

    target_delta: float = _field(None, "delta of the guarantee")
    target_epsilon: Optional[float] = _field(None, "what all steps may spend")
    noise_multiplier: Optional[float] = _field(None, "instead of a target epsilon")
    max_grad_norm: float = _field(1.0, "to which each record's gradient is clipped")
    clipping: str = _field("flat", "flat, automatic, normalised or per_layer")
    grad_sample_mode: str = _field("auto", "auto, ghost_bk, ghost, scan or hooks")
    accountant: str = _field("prv", "prv_bounds, prv or rdp")
    poisson_sampling: bool = _field(True, "False shuffles, for which nothing is proven")
    log_loss: bool = _field(True, "log the training loss, which is not private")
    seed: Optional[int] = _field(None, "of noise and batches, for tests; secret")

    def __post_init__(self) -> None:
        if self.target_delta is None or not 0 < self.target_delta < 1:
            raise Refused(
                f"target_delta must be between 0 and 1, got {self.target_delta}. "
                "Choose it below one over the number of records."
            )
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise Refused(
                "Give either target_epsilon or noise_multiplier; got "
                f"{self.target_epsilon} and {self.noise_multiplier}."
            )
        if self.target_epsilon is not None and not self.target_epsilon > 0:
            raise Refused(f"target_epsilon={self.target_epsilon} is not positive.")
        if self.noise_multiplier is not None and not self.noise_multiplier >= 0:
            raise Refused(f"noise_multiplier={self.noise_multiplier} is negative.")
        if self.seed is not None and self.seed < 0:
            raise Refused(f"seed={self.seed} is negative.")
        for name, known in (
            ("clipping", CLIPPINGS),
            ("grad_sample_mode", MODES),
            ("accountant", ("prv_bounds", "prv", "rdp")),
        ):
            if getattr(self, name) not in known:
                raise Refused(
                    f"{name}={getattr(self, name)!r} is not one of "
                    f"{', '.join(map(repr, known))}."
                )
        if self.target_epsilon is not None and not self.poisson_sampling:
            raise Refused(
                "No target_epsilon can be kept with poisson_sampling=False: "
                "accountants know Poisson sampling alone. Give noise_multiplier."
            )


# -- what is refused ---------------------------------------------------------------

# Arguments that are refused unless they are off: why, and what to do.
_REFUSED: Dict[str, str] = {
    "fp16": "scales the loss, and with it what is clipped; use bf16=True or float32",
    "torch_compile": "compiles a model that runs samples by themselves; leave it out",
    "use_liger_kernel": "puts fused layers and losses over the whole batch in the "
    "place of the model's; leave it out",
    "neftune_noise_alpha": "scales its noise by the longest record of the batch, so "
    "records change each other's gradients; leave it out",
    "auto_find_batch_size": "repeats steps that failed with another batch size, which "
    "changes the sampling; choose per_device_train_batch_size yourself: it is only "
    "what fits into memory, gradient_accumulation_steps make up for it",
    "include_num_input_tokens_seen": "counts the tokens of private draws; leave it out",
    "ignore_data_skip": "would draw batches again after resuming; leave it out",
    "data_seed": "would make the draws known; PrivacyArguments(seed=...) is for tests",
    "debug": "looks into a forward pass of single samples; leave it out",
    "dataloader_drop_last": "has no meaning for batches that are drawn; leave it out",
    "parallelism_config": "splits a model or sequence; one process is supported",
    "deepspeed": "computes gradients by itself; one process is supported",
    "fsdp": "computes gradients by itself; one process is supported",
}
_OPTIMIZERS = ("lomo", "adalomo", "schedule_free", "layerwise")


def _refusals(args: TrainingArguments, given: Mapping[str, Any]) -> Iterator[str]:
    """What breaks differential privacy, or is not supported, each with what to do."""
    for name, reason in _REFUSED.items():
        value = getattr(args, name, None)
        off = value is None or value is False or value in ("", "no", [], {})
        if not off:
            yield f"{name}={value!r} {reason}."
    if args.max_grad_norm not in (None, 0, 1.0):
        yield (
            f"max_grad_norm={args.max_grad_norm} is Trainer's clipping of the whole "
            "batch's gradient, which is off here. Each record's is clipped to "
            "PrivacyArguments(max_grad_norm=...); leave the other at its default."
        )
    if args.train_sampling_strategy != "random":
        yield (
            f"train_sampling_strategy={args.train_sampling_strategy!r} chooses batches "
            "by their records. Leave it out: batches are Poisson samples."
        )
    optim = getattr(args.optim, "value", args.optim)
    if any(name in optim for name in _OPTIMIZERS):
        yield (
            f"optim={optim!r} updates weights during the backward pass, or has modes "
            "that Opacus's optimizer does not pass on. Use another, such as "
            '"adamw_torch".'
        )
    if args.push_to_hub and "checkpoint" in str(getattr(args, "hub_strategy", "")):
        yield (
            f"hub_strategy={args.hub_strategy!r} would publish the random state of the "
            'noise, by which it can be subtracted. Use "end" or "every_save".'
        )
    if args.world_size > 1 or args.n_gpu > 1:
        yield (
            f"{args.world_size} processes with {args.n_gpu} GPUs each: PrivateTrainer "
            "trains in one process on one device. Set CUDA_VISIBLE_DEVICES to one."
        )
    data = given.get("train_dataset")
    if isinstance(data, IterableDataset) or (
        data is not None and not (hasattr(data, "__len__") and len(data))
    ):
        yield (
            f"train_dataset ({type(data).__name__}) has no records that can be drawn "
            "by number: Poisson sampling needs a data set with a length."
        )
    if not args.dataloader_in_order:
        yield "dataloader_in_order=False mixes the parts of logical batches."
    collator = given.get("data_collator")
    if isinstance(collator, DataCollatorWithFlattening):
        yield (
            f"data_collator ({type(collator).__name__}) packs the records of a batch "
            "into one sequence, so they can't be clipped one by one. Use one that "
            "pads, such as DataCollatorWithPadding."
        )


# Trainer's own methods that are not public and are relied on here.
_RELIED_ON = (
    *("_clip_grad_norm", "_get_grad_norm", "_save_optimizer_and_scheduler"),
    *("_save", "_load_from_checkpoint", "_load_best_model"),
    "_set_signature_columns_if_needed",
)


class PrivateTrainer(Trainer):
    """
    ``transformers.Trainer``, with differential privacy.

    A step takes a logical batch: each record is in it with the same probability, one
    over the steps of an epoch. These are the records divided by
    ``per_device_train_batch_size * gradient_accumulation_steps``, rounded up. It is
    computed in parts of at most ``per_device_train_batch_size`` records, each record's
    gradient clipped, and noise is added once to their sum. Steps, epochs and the
    learning rate's schedule count logical batches.

    Args:
        args: of these, Trainer's own ``max_grad_norm`` is off (its default, 1.0, is
            taken for "not given"); what breaks privacy is refused
        privacy: the privacy of the run
        compute_loss_func: gets the model's outputs and the labels, and must return one
            loss a record, ``[B]``
        kwargs: of ``Trainer``

    The loss is :func:`opacus_ext.losses.model_losses`, one a record. To train on
    another override :meth:`sample_losses`; ``compute_loss`` is for evaluation.

    For the privacy of people with several sequences each, make each person one record:
    a model in :class:`~opacus_ext.losses.PerRecord` (what is saved is the model itself)
    and :class:`~opacus_ext.data.collators.RecordCollator`.

    What is logged with the training loss, and at the end: "epsilon" and "delta"; at the
    start "noise_multiplier", "sample_rate" and "expected_batch_size". A checkpoint has
    one more file, privacy.pt, with the accountant's history and the random state of the
    noise: whoever has that can subtract the noise, so do not publish it. The model's
    files are what epsilon is about.

    Raises:
        ValueError: for arguments that break privacy or are not supported; nothing has
            been changed then

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
        >>> config = GPT2Config(
        ...     vocab_size=20, n_embd=8, n_layer=1, n_head=1,
        ...     bos_token_id=0, eos_token_id=0,
        ... )
        >>> ids = torch.randint(0, 20, (32, 6))
        >>> trainer = PrivateTrainer(
        ...     GPT2LMHeadModel(config),
        ...     TrainingArguments(
        ...         "out", max_steps=2, per_device_train_batch_size=8,
        ...         report_to="none", disable_tqdm=True, save_strategy="no",
        ...     ),
        ...     train_dataset=[{"input_ids": x, "labels": x} for x in ids],
        ...     privacy=PrivacyArguments(target_epsilon=8, target_delta=1e-3),
        ... )
        >>> output = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> 0 < output.metrics["epsilon"] <= 8
        True
    """

    # What compute_loss returns is not divided by the number of accumulation steps.
    loss_is_scaled_for_ga = True

    def __init__(
        self,
        model: Optional[nn.Module] = None,
        args: Optional[TrainingArguments] = None,
        *rest: Any,
        privacy: PrivacyArguments,
        **kwargs: Any,
    ):
        args = TrainingArguments("tmp_trainer") if args is None else args
        given = inspect.signature(Trainer.__init__).bind(
            self, model, args, *rest, **kwargs
        )
        for problem in self._unsupported(args, given.arguments):
            raise Refused(problem)
        super().__init__(model, args, *rest, **kwargs)
        self.privacy = privacy
        self.engine = PrivacyEngine(accountant=privacy.accountant)
        self.add_callback(_Announce(self))
        self._runs, self._records = 0, 0  # the latter of the part at work
        self._seed, self._draw = 0, 0  # of this run, and its next draw
        self._saved: Optional[Dict[str, Any]] = None  # the state it goes on from
        self._noise: Optional[torch.Generator] = None
        self._hooks = self._criterion = self._private_optimizer = None
        if isinstance(self.model, PerRecord):
            self.model_accepts_loss_kwargs = False
            with self._inside():
                self._set_signature_columns_if_needed()
                if args.label_names is None:
                    self.label_names = find_labels(type(self.model))
                    self._signature_columns += self.label_names

    def _unsupported(
        self, args: TrainingArguments, given: Mapping[str, Any]
    ) -> Iterator[str]:
        if type(self).compute_loss is not PrivateTrainer.compute_loss:
            yield (
                f"{type(self).__name__} overrides compute_loss, whose loss is one "
                "number for the batch. Override sample_losses(model, inputs), which "
                "returns one loss a record, [B]."
            )
        missing = [name for name in _RELIED_ON if not hasattr(Trainer, name)]
        if missing:
            yield (
                f"This version of transformers has no Trainer.{missing[0]}, which "
                "PrivateTrainer relies on. Use the version that it was tested with."
            )
        yield from _refusals(args, given)

    # -- batches -------------------------------------------------------------------

    @property
    def logical_batch_size(self) -> int:
        """What a step has of records, at most, in expectation."""
        args = self.args
        return args.per_device_train_batch_size * args.gradient_accumulation_steps

    @property
    def steps_per_epoch(self) -> int:
        """One over the probability with which a step draws a record."""
        return -(-len(self.train_dataset) // self.logical_batch_size)

    def get_train_dataloader(self) -> DataLoader:
        """
        The training loader. ``gradient_accumulation_steps`` of its items make a logical
        batch; each is a list of :class:`~opacus_ext.data.logical.Part`.
        """
        stock = super().get_train_dataloader()
        generator = torch.Generator()
        self._draws = self._sampler(generator)
        batches = LogicalBatches(
            *(self._draws, generator, self.args.per_device_train_batch_size),
            items=self.args.gradient_accumulation_steps,
            seed=self._seed,
            first=self._draw,
        )
        kept = ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor")
        return logical_loader(
            *(stock.dataset, batches, stock.collate_fn),
            multiprocessing_context=stock.multiprocessing_context,
            **{name: getattr(stock, name) for name in kept},
        )

    def _sampler(self, generator: torch.Generator) -> Sampler:
        size, steps = len(self.train_dataset), self.steps_per_epoch
        if not self.privacy.poisson_sampling:
            shuffled = RandomSampler(range(size), generator=generator)
            return BatchSampler(shuffled, self.logical_batch_size, drop_last=False)
        # Opacus's loader would take int(1 / (1 / steps)), 92 of 93.
        return UniformWithReplacementSampler(
            num_samples=size, sample_rate=1 / steps, steps=steps, generator=generator
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> Tuple[List[List[Part]], int]:
        """The items of a logical batch, and how many records it has."""
        if self._private_optimizer is not None:
            self._forget_gradients()
        items = list(islice(epoch_iterator, num_batches))
        if items:
            self._draw = items[-1][-1].draw + 1
        return items, sum(part.records for item in items for part in item)

    # -- a step --------------------------------------------------------------------

    def create_optimizer(self, model: Optional[nn.Module] = None) -> Any:
        """The optimizer; as training begins, everything is made private here."""
        optimizer = super().create_optimizer(model)
        if self.is_in_train and self._private_optimizer is None:
            self._refuse_accelerator()
            self._make_private(optimizer)
        return self.optimizer

    def _refuse_accelerator(self) -> None:
        """What the environment can set as well as arguments."""
        accelerator = self.accelerator
        if (
            accelerator.scaler is not None
            or accelerator.num_processes > 1
            or self.is_deepspeed_enabled
            or self.is_fsdp_enabled
            or self.is_model_parallel
            or str(accelerator.state.dynamo_plugin.backend.value).lower() != "no"
        ):
            raise Refused(
                "PrivateTrainer trains in one process on one device, without fp16, "
                "DeepSpeed, FSDP, a model on several devices or torch.compile. One of "
                "them is set by the environment (accelerate config) or by the model's "
                "device_map."
            )

    def _make_private(self, optimizer: torch.optim.Optimizer) -> None:
        privacy, saved = self.privacy, self._saved
        size, steps = len(self.train_dataset), self.steps_per_epoch
        noise_multiplier = self._noise_multiplier()
        noise = torch.Generator(self.args.device)
        if saved is None:
            noise.manual_seed(number(self._seed, "noise"))
        else:
            noise.set_state(saved["noise"])
            self.engine.accountant.load_state_dict(saved["accountant"])
        made = self.engine.make_private(
            module=self.model,
            optimizer=optimizer,
            criterion=PerSample(),
            data_loader=DataLoader(self.train_dataset, batch_sampler=self._draws),
            noise_multiplier=noise_multiplier,
            max_grad_norm=privacy.max_grad_norm,
            clipping=privacy.clipping,
            grad_sample_mode=privacy.grad_sample_mode,
            poisson_sampling=False,  # the loader does that already
            noise_generator=noise,
            wrap_model=False,
        )
        # Modes with a criterion of their own return it as the third of four.
        self._hooks, self.optimizer, *criterion, _ = made
        self._criterion = criterion[0] if criterion else PerSample()
        if privacy.poisson_sampling:
            self._hooks.forbid_grad_accumulation()
        self._private_optimizer, self._noise = self.optimizer, noise
        # Not int(size * (1 / steps)), which may be one too few, and zero.
        self.optimizer.expected_batch_size = size // steps

    def _noise_multiplier(self) -> float:
        privacy, accountant = self.privacy, self.engine.accountant
        if self._saved is not None:
            return self._saved["noise_multiplier"]
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        budget = privacy.target_epsilon, privacy.target_delta
        rate, steps = 1 / self.steps_per_epoch, self.state.max_steps
        # The noise was chosen to leave less than this.
        if self.get_epsilon() > privacy.target_epsilon - 0.01:
            raise Refused(
                f"target_epsilon={privacy.target_epsilon} is spent by what this "
                f"trainer has trained before ({self.get_epsilon():.2f}). Make a new "
                "one with a budget for what is to come: budgets of the same records "
                "add up."
            )
        if len(accountant):
            return noise_left(accountant, *budget, rate, steps)
        return get_noise_multiplier(
            target_epsilon=budget[0],
            target_delta=budget[1],
            sample_rate=rate,
            steps=steps,
            accountant=privacy.accountant,
        )

    def training_step(
        self, model: nn.Module, inputs: List[Part], num_items_in_batch: Any = None
    ) -> torch.Tensor:
        """
        Adds the clipped gradients of some parts of a logical batch.

        Args:
            model: as Trainer has prepared it
            inputs: the parts
            num_items_in_batch: the records of the logical batch

        Returns:
            The share of these parts in the logical batch's mean loss.
        """
        optimizer = self._private_optimizer
        if not isinstance(inputs, list) or not all(isinstance(x, Part) for x in inputs):
            raise TypeError(
                "PrivateTrainer trains on what its own get_train_dataloader draws. Do "
                "not override it: change the data set or the collator."
            )
        loss = torch.zeros((), device=self.args.device)
        for i, part in enumerate(inputs):
            optimizer.zero_grad(set_to_none=True)
            if part.records:
                self._records = part.records
                mean = super().training_step(model, part.inputs)
                loss += mean * (part.records / num_items_in_batch)
            else:
                self._contribute_nothing()
            if i < len(inputs) - 1 or not self.accelerator.sync_gradients:
                optimizer.signal_skip_step()
                optimizer.step()
        return loss

    def _contribute_nothing(self) -> None:
        """Of a draw without records the step is noise; few models run on B = 0."""
        optimizer = self._private_optimizer
        if hasattr(optimizer, "take"):
            optimizer.take({p: torch.zeros_like(p) for p in optimizer.params})
            return
        for p in optimizer.params:
            p.grad_sample = p.new_zeros(0, *p.shape)

    def _forget_gradients(self) -> None:
        """Of a logical batch that was left in the middle, too."""
        optimizer = self._private_optimizer
        optimizer._step_skip_queue.clear()
        optimizer._is_last_step_skipped = False
        optimizer.zero_grad(set_to_none=True)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """The loss that clips per record; in evaluation that of ``Trainer``."""
        if return_outputs or self._criterion is None:
            return super().compute_loss(
                model, inputs, return_outputs, num_items_in_batch=num_items_in_batch
            )
        losses = self.sample_losses(model, inputs)
        if losses.shape != (self._records,):
            raise Refused(
                f"{self._records} records gave losses of shape {tuple(losses.shape)} "
                "instead of one loss a record, [B]. data_collator must make one sample "
                "of each record (not pack, chunk or drop any), and compute_loss_func "
                "or sample_losses return losses [B]."
            )
        return self._criterion(losses)

    def sample_losses(self, model: nn.Module, inputs: Dict[str, Any]) -> torch.Tensor:
        """
        One loss a record. Override it to train on another loss; a record's loss must
        not depend on other records.

        Args:
            model: to be called with some of the inputs
            inputs: what the collator made of a part, on the device

        Returns:
            Losses ``[B]``.
        """
        function = self.compute_loss_func
        if function is None and self.label_smoother is None:
            return model_losses(model, inputs)
        inputs = dict(inputs)
        labels = inputs.pop("labels", None)
        outputs = model(**inputs)
        if function is not None:
            return function(outputs, labels, num_items_in_batch=None)
        if labels is None or labels.is_floating_point():
            raise Refused(
                "label_smoothing_factor is for labels that are classes; the batch has "
                f"{'none' if labels is None else labels.dtype}. Leave it out."
            )
        if self._is_causal():
            labels = F.pad(labels, (0, 1), value=-100)[..., 1:]
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs[0]
        smoothing = self.args.label_smoothing_factor
        return cross_entropy(logits, labels, label_smoothing=smoothing)

    def _is_causal(self) -> bool:
        model = self.model
        if hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        return type(model).__name__ in CAUSAL_LMS.values()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Trainer``; that it was evaluated changes nothing in what follows."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return super().evaluation_loop(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Trainer would clip before the noise."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Without noise it is not to be logged."""

    # -- a run ---------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: Union[str, bool, None] = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """
        Trains. Afterwards, also if it fails, the model is an ordinary one again.

        A second call adds to what the first has spent. With ``target_epsilon`` it has
        what is left of that.

        Args:
            resume_from_checkpoint: a folder, or True for the last one; the run goes on
                bit for bit
            args: of ``Trainer.train``
            kwargs: of ``Trainer.train``

        Raises:
            ValueError: if the checkpoint has no privacy state, or belongs to a run with
                other settings; nothing has been changed then
        """
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)
        self._config = self._settings()
        self._saved = self._state_of(path) if path else None
        if self._saved is not None:
            self._runs, self._seed = self._saved["runs"], self._saved["seed"]
            # Trainer skips those of the epoch that come before the checkpoint.
            skipped = self._saved["step"] % self.steps_per_epoch
            self._draw = self._saved["draw"] - skipped
        else:
            known = self.privacy.seed
            self._seed = secrets.randbits(63) if known is None else known
            self._seed = number(self._seed, self._runs)
            self._runs, self._draw = self._runs + 1, 0
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._make_ordinary()

    def _make_ordinary(self) -> None:
        """Takes away what make_private attached."""
        optimizer, hooks = self._private_optimizer, self._hooks
        self._hooks = self._criterion = self._private_optimizer = None
        self._saved = self._noise = None
        self.is_in_train = False
        if optimizer is None:
            return
        self._records = 0
        hooks.cleanup()
        self.optimizer = optimizer.original_optimizer
        for p in hooks._module.parameters():
            p.grad = None
            if hasattr(p, "summed_grad"):
                del p.summed_grad

    def _settings(self) -> Dict[str, Any]:
        """What a run that goes on must have as it was."""
        loader, config = self.get_train_dataloader(), asdict(self.privacy)
        for name in ("seed", "log_loss"):
            del config[name]
        config["records"] = len(self.train_dataset)
        config["logical_batch_size"] = self.logical_batch_size
        if self.privacy.target_epsilon is not None:  # for so many it chose the noise
            values = self.set_initial_training_values(self.args, loader)
            config["max_steps"] = values[-1]
        return config

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        state = {
            "config": self._config,
            "accountant": self.engine.accountant.state_dict(),
            "noise_multiplier": self._private_optimizer.noise_multiplier,
            "noise": self._noise.get_state(),
            "seed": self._seed,
            "runs": self._runs,
            "draw": self._draw,
            "step": self.state.global_step,
        }
        path = os.path.join(output_dir, PRIVACY_STATE)
        torch.save(state, f"{path}.part")
        os.replace(f"{path}.part", path)

    def _state_of(self, checkpoint: str) -> Dict[str, Any]:
        """The privacy state of a checkpoint, once it is known to fit."""
        path = os.path.join(checkpoint, PRIVACY_STATE)
        if not os.path.isfile(path):
            raise Refused(
                f"{checkpoint} has no {PRIVACY_STATE}: it was not written by "
                "PrivateTrainer, or with save_only_model. How much privacy its weights "
                "have spent is not known, so it can't go on. To train a model with "
                "them anew, load it by from_pretrained."
            )
        saved = torch.load(path, map_location="cpu", weights_only=True)
        before, now = saved["config"], self._config
        changed = [
            f"{name}: {before.get(name)!r} there, {now.get(name)!r} here"
            for name in sorted(before.keys() | now.keys())
            if before.get(name) != now.get(name)
        ]
        if changed:
            raise Refused(
                f"{checkpoint} belongs to another run; these must be the same: "
                + "; ".join(changed)
            )
        return saved

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            NotImplementedError: always
        """
        raise NotImplementedError(
            "Each trial of a hyperparameter search trains on the private records and "
            "spends privacy of its own. Search on public data."
        )

    # -- records of several sequences ----------------------------------------------

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Within it ``self.model`` is the model in a PerRecord: that one is saved."""
        model = self.model
        try:
            if isinstance(model, PerRecord):
                self.model = model.model
            yield
        finally:
            self.model = model

    def _save(self, *args: Any, **kwargs: Any) -> None:
        with self._inside():
            super()._save(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._inside():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._inside():
            super()._load_best_model()

    # -- what is logged ------------------------------------------------------------

    def get_epsilon(self, delta: Optional[float] = None) -> float:
        """
        What has been spent.

        Args:
            delta: by default ``target_delta``
        """
        history = self.engine.accountant.history
        if any(noise == 0 for noise, _, _ in history):
            return float("inf")
        if not len(self.engine.accountant):
            return 0.0
        return float(self.engine.get_epsilon(delta or self.privacy.target_delta))

    def log(self, logs: Dict[str, float], start_time: Optional[float] = None) -> None:
        """As ``Trainer``, with what has been spent."""
        if "loss" in logs or "train_runtime" in logs:
            poisson = self.privacy.poisson_sampling
            name = "epsilon" if poisson else "epsilon_if_poisson"
            logs[name] = self.get_epsilon()
            logs["delta"] = self.privacy.target_delta
            if not self.privacy.log_loss:
                logs.pop("loss", None)
                logs.pop("train_loss", None)
        super().log(logs, start_time)


class _Announce(TrainerCallback):
    """Logs the noise as training begins."""

    def __init__(self, trainer: PrivateTrainer):
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        optimizer = self.trainer._private_optimizer
        self.trainer.log(
            {
                "noise_multiplier": optimizer.noise_multiplier,
                "sample_rate": 1 / self.trainer.steps_per_epoch,
                "expected_batch_size": optimizer.expected_batch_size,
            }
        )
