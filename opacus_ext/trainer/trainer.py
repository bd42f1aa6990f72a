"""The training loop of transformers' Trainer, made private.

:class:`PrivateTrainer` is used as ``Trainer`` is, with one more argument. Opacus's
``PrivacyEngine.make_private`` makes it private as training begins. The class overrides
the methods by which Trainer would bypass that: how batches are drawn, which loss is
backpropagated, and what is clipped, logged and saved.
"""

from __future__ import annotations

import os
import secrets
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from itertools import islice
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from transformers.utils import find_labels

from opacus_ext.data.allocation import BallsInBins, RandomAllocation
from opacus_ext.data.choice import public_batches
from opacus_ext.data.logical import (
    PhysicalBatch,
    derive_seed,
    logical_loader,
)
from opacus_ext.data.sampling import Poisson, Sampling
from opacus_ext.data.users import unit_of
from opacus_ext.engine import INDEPENDENT
from opacus_ext.grad_sample.adapter.settings import settings_of
from opacus_ext.grad_sample.core.groups import Samples, samples_of
from opacus_ext.losses import RecordModel, sample_loss
from opacus_ext.misuse import check_delta, check_size
from opacus_ext.monitor import Monitor
from opacus_ext.private_torch import (
    _BatchNorm,
    tree_flatten,
    tree_map,
    tree_unflatten,
)
from opacus_ext.private_training import (
    Basis,
    PrivateTraining,
    Same,
    check_noise,
    upgraded,
)
from opacus_ext.refused import Refused, describe
from opacus_ext.runs import add_before, spent_by
from opacus_ext.statement import PrivacyStatement
from opacus_ext.supported import Run, kind_of, refuse
from opacus_ext.trainer.arguments import (
    ALLOCATION,
    BALLS_IN_BINS,
    PrivacyArguments,
)
from opacus_ext.trainer.checkpoint import (
    forget_state,
    read_noise,
    read_spent,
    read_state,
    write_noise,
    write_spent,
    write_state,
)
from opacus_ext.trainer.pairs import (
    TRAINERS,
    has_pairs,
    pair_loss,
    refuse_pairs,
    split_pairs,
    with_reference,
)
from opacus_ext.trainer.refusals import (
    given_delta,
    refuse_arguments,
    refuse_data,
    refuse_environment,
    refuse_order,
    refuse_sampling,
)
from opacus_ext.trainer.sharded import (
    adopt,
    loads_whole,
    reshard,
    saves_whole,
    shard,
    whole,
)

_LOGGED = "log_loss", "log_draws"  # arguments that a run's privacy does not depend on
# Trainers whose loss is the model's own; TRL is not imported.
_STOCK = "transformers.trainer.Trainer", "trl.trainer.sft_trainer.SFTTrainer"


def _refuse_model(
    model: nn.Module, privacy: PrivacyArguments, processes: int = 1
) -> None:
    """Refuses a model that is not trained with these arguments."""
    kind = kind_of(model)
    noise = check_noise(privacy.noise, privacy.target_epsilon, privacy.secure_mode)
    if processes > 1 and kind == "one process":
        kind = "DistributedDataParallel"
    mode, clipping = privacy.grad_sample_mode, privacy.clipping
    run = Run("PrivateTrainer", kind, mode, clipping, noise)
    refuse(run, type(model).__name__)


class _NoiseLog(TrainerCallback):
    def __init__(self, trainer: Any):
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Logs the noise, and how batches are drawn."""
        trainer, optimizer = self.trainer, self.trainer._training.optimizer
        trainer.log(
            {
                "noise_multiplier": optimizer.noise_multiplier,
                "sample_rate": trainer.sampling.rate(len(trainer.train_dataset)),
                "expected_batch_size": trainer.sampling.divisor(
                    len(trainer.train_dataset)
                ),
                "max_steps": trainer.state.max_steps,
                "secure_mode": trainer.privacy.secure_mode,
            }
        )


def _with_shared(samples: Samples, shared: Dict[str, Any]) -> Samples:
    """Adds inputs that all records share."""

    def join(leaves: List[Any], others: Dict[str, Any]) -> Tuple[List[Any], Any]:
        return tree_flatten({**tree_unflatten(leaves, samples.spec), **others})

    leaves, spec = join(samples.leaves, shared)
    by_sample, _ = join(samples.by_sample, tree_map(lambda x: False, shared))
    return samples._replace(leaves=leaves, by_sample=by_sample, spec=spec)


class PrivateTrainer(Trainer):
    """
    ``transformers.Trainer``, with differential privacy.

    A step takes a logical batch: each record is in it with the same probability B / N,
    for N records and a logical batch size B of ``per_device_train_batch_size *
    gradient_accumulation_steps``. It is computed in physical batches of at most
    ``per_device_train_batch_size`` records, and noise is added once to the sum of
    clipped gradients. Steps, epochs (N / B steps, rounded up) and schedules count
    logical batches.

    The loss of a record is what ``compute_loss`` gives for it alone, as a batch of one
    (:func:`opacus_ext.clipped_grads`). If you override it, it must keep nothing of the
    record. ``class Private(PrivateTrainer, Other)`` makes another Trainer private;
    among TRL's, SFTTrainer, DPOTrainer and RewardTrainer are. A model in a
    :class:`~opacus_ext.losses.RecordModel` is saved without that wrapper.

    What weights have spent is saved beside them, in privacy.json, and
    ``create_model_card`` puts :meth:`privacy_statement` into the model card. A
    checkpoint has privacy.pt as well, with the random state of the noise: whoever has
    it can subtract the noise, so do not publish it. Of a sharded model with correlated
    noise each process writes and reads a file of its own, noise_0.pt and so on.

    On several processes B is times their number, and each has its share of a logical
    batch. ``TrainingArguments(fsdp=True, fsdp_config={...})`` shards the model by
    ``fully_shard``, and one that is sharded already is taken as it is. What is saved of
    it is whole, as of one process, so all processes must call ``save_model``.

    Args:
        args: of ``Trainer``. Of its TrainingArguments, ``max_grad_norm`` is off (its
            default, 1.0, counts as not given); what breaks privacy is refused
        privacy: the privacy of the run
        sampling: how batches are drawn, of :mod:`opacus_ext.data`, in the place of
            ``privacy.sampling``: its steps and sizes are those of the run
        kwargs: of ``Trainer``. A ``compute_loss_func`` gets the model's outputs and the
            labels of one record, in evaluation of a batch

    Raises:
        Refused: for arguments that break privacy or are not supported; nothing has been
            changed then

    Example:
        >>> import torch
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> ids = torch.randint(0, 20, (32, 6))
        >>> config = GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=1)
        >>> trainer = PrivateTrainer(
        ...     GPT2LMHeadModel(config),
        ...     TrainingArguments("out", max_steps=2, save_strategy="no"),
        ...     train_dataset=[{"input_ids": x, "labels": x} for x in ids],
        ...     privacy=PrivacyArguments(target_epsilon=8, target_delta=1e-3),
        ... )
        >>> output = trainer.train()  # doctest: +ELLIPSIS
        {...}
        >>> 0 < output.metrics["epsilon"] <= 8
        True
    """

    model: Any
    optimizer: Any
    _adopted: Any = None  # the sharded model that accelerate takes as it is

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        refuse_order(cls, PrivateTrainer)

    def __init__(
        self,
        *args: Any,
        privacy: Optional[PrivacyArguments] = None,
        sampling: Optional[Sampling] = None,
        **kwargs: Any,
    ):
        if not isinstance(privacy, PrivacyArguments):
            raise Refused(
                f"{type(self).__name__} needs the argument privacy, a "
                f"PrivacyArguments, got {describe(privacy)}.",
                parameter="privacy",
                remedy="Add privacy=PrivacyArguments(target_epsilon=8, "
                "target_delta=1e-5), or what you need.",
            )
        if sampling is not None:
            refuse_sampling(sampling, privacy)
        self._given_sampling = sampling
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, TrainingArguments):
                refuse_arguments(argument)
            elif isinstance(argument, nn.Module):
                _refuse_model(argument, privacy)
        super().__init__(*args, **kwargs)
        refuse_arguments(self.args)
        refuse_data(self.train_dataset)
        delta = given_delta(privacy.target_delta, self.train_dataset)
        if has_pairs(self):
            refuse_pairs(self, self._loss_owner())
        if isinstance(self.model, RecordModel):
            self.model_accepts_loss_kwargs = False
            with self._inner_model():
                self._set_signature_columns_if_needed()
                if self.args.label_names is None:
                    self.label_names = find_labels(type(self.model))
                    self._signature_columns += self.label_names
        self.privacy = privacy
        self._training = PrivateTraining(
            privacy.accountant,
            delta,
            privacy.target_epsilon,
            privacy.noise_multiplier,
            privacy.secure_mode,
        )
        self._training.process = self.args.process_index, self.args.world_size
        self.engine = self._training.engine
        self._monitor: Optional[Monitor] = None
        self._runs = 0
        self._evaluated: List[nn.Module] = []  # BatchNorm that keeps its statistics
        self._drawn: List[int] = []  # records of the steps since the last log
        self.add_callback(_NoiseLog(self))
        if self.train_dataset is not None:
            check_delta(self.engine, delta, self.train_dataset, "target_delta")
            check_size(self.engine, self.logical_batch_size, len(self.train_dataset))
        self._shard()

    # -- a sharded model -----------------------------------------------------------

    def _build_accelerator_args(self, **kwargs: Any) -> Dict[str, Any]:
        """Leaves out FSDP: see :meth:`_shard`."""
        kwargs.pop("fsdp_plugin", None)
        return super()._build_accelerator_args(**kwargs)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Moves a model as a whole, unless ``fully_shard`` moves it part by part."""
        if not (self.args.fsdp or isinstance(model, FSDPModule)):
            super()._move_model_to_device(model, device)

    @property
    def _is_sharded(self) -> bool:
        return isinstance(self.model, FSDPModule)

    def _shard(self) -> None:
        """Shards the model if ``fsdp`` says so, and prepares one that is sharded."""
        model = self.model
        _refuse_model(model, self.privacy, self.args.world_size)
        precision = self.accelerator.mixed_precision
        if self.args.fsdp and not self._is_sharded:
            refuse_environment(self)
            if self.optimizer is not None:
                raise Refused(
                    "The optimizer was made before fsdp=True has sharded the model.",
                    parameter="optimizers",
                    remedy="Override create_optimizer, or shard the model by "
                    "fully_shard before the optimizer is made.",
                )
            shard(model, self.args, precision)
        elif self._is_sharded and self._adopted is not model and precision != "no":
            raise Refused(
                f"{precision}=True, and the model is sharded by fully_shard already, "
                "which says by mp_policy what it computes in.",
                parameter=precision,
                remedy="Leave it out, and give fully_shard a MixedPrecisionPolicy.",
            )
        if self._is_sharded and self._adopted is not model:
            self._adopted = model
            self.is_distributed_loading_by_transformers = False
            with self._inner_model():
                adopt(model, self.model)
            if hasattr(model, "generate"):
                register_fsdp_forward_method(model, "generate")

    @contextmanager
    def _inner_model(self) -> Iterator[None]:
        """Within it ``self.model`` is the model in a RecordModel."""
        model = self.model
        try:
            if isinstance(model, RecordModel):
                self.model = model.model
            yield
        finally:
            self.model = model

    # -- batches -------------------------------------------------------------------

    @property
    def logical_batch_size(self) -> int:
        """The expected number of records of a step; at most all of them are drawn."""
        args = self.args
        each = args.per_device_train_batch_size * args.gradient_accumulation_steps
        return each * args.world_size

    @property
    def steps_per_epoch(self) -> int:
        """Records over the logical batch size, rounded up, as Trainer counts them."""
        if self._given_sampling is not None:
            return self._given_sampling.steps_per_epoch(len(self.train_dataset))
        records = self.privacy.public_records or len(self.train_dataset)
        return -(-records // self.logical_batch_size)

    @property
    def sampling(self) -> Sampling:
        """
        How batches are drawn: as given, or as ``privacy.sampling`` says. By default
        each record with the probability B / N, or B / ``public_records``; for
        correlated noise from the parts of the data set in turn.
        """
        if self._training.sampling is not None:
            return self._training.sampling
        if self._given_sampling is not None:
            return self._given_sampling
        public, steps = self.privacy.public_records, self.steps_per_epoch
        if self.privacy.sampling == ALLOCATION:
            return RandomAllocation(steps=steps, public_records=public)
        if self.privacy.sampling == BALLS_IN_BINS:
            return BallsInBins(bins=steps, public_records=public)
        if public is not None:
            return public_batches(public, self.logical_batch_size)
        size = min(self.logical_batch_size, len(self.train_dataset))
        return Poisson(expected_batch_size=size, steps=steps)

    def get_train_dataloader(self) -> DataLoader:
        """
        Returns the training loader. ``gradient_accumulation_steps`` of its items, lists
        of physical batches, make a logical batch.
        """
        stock = super().get_train_dataloader()
        batches = self._training.logical_batches(
            self.sampling,
            len(self.train_dataset),
            self.args.per_device_train_batch_size,
            self.args.gradient_accumulation_steps,
        )
        arguments = stock.dataset, batches, stock.collate_fn, stock
        example = self._is_sharded or bool(self.args.fsdp)  # it will be
        return logical_loader(*arguments, example=example)

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> Tuple[List[List[PhysicalBatch]], int]:
        """Returns the items of a logical batch, and its number of records."""
        self._training.refuse_changes()  # a callback's, of arguments
        if self._training.hooks is not None:
            self._training.optimizer.drop_logical_batch()  # one that was left, too
        if self.state.global_step >= self.state.max_steps:
            return [], 0  # Trainer takes one more step of a run that was complete
        items = list(islice(epoch_iterator, num_batches))
        if items:
            self._training.draw = items[-1][-1].draw + 1
            self._drawn.append(items[-1][-1].drawn)
        # Trainer takes the mean of what processes log.
        return items, items[-1][-1].drawn / self.args.world_size if items else 0

    # -- a step --------------------------------------------------------------------

    def create_optimizer(self, model: Optional[nn.Module] = None) -> Any:
        """Creates the optimizer; as training begins, makes everything private."""
        self._shard()
        reshard(self.model)
        optimizer = super().create_optimizer(model)
        if self.is_in_train and self._training.hooks is None:
            refuse_environment(self)
            self._make_private(optimizer)
        return self.optimizer

    def _make_private(self, optimizer: torch.optim.Optimizer) -> None:
        privacy, training, sampling = self.privacy, self._training, self.sampling
        records = len(self.train_dataset)
        config = {**self._config, "max_steps": self.state.max_steps}
        done = 0 if training.saved is None else training.saved["step"]
        loader: DataLoader = DataLoader(self.train_dataset)
        noise, sampling = training.choose_strategy(
            privacy.noise, sampling, loader, optimizer, config, done
        )
        multiplier = training.choose_noise(sampling, records, config, done, noise)
        self._set_training(self.model)  # from_pretrained leaves it in evaluation mode
        training.make_private(
            self.model,
            optimizer,
            loader,
            multiplier,
            self.args.device,
            sampling,
            noise=noise,
            max_grad_norm=privacy.per_sample_max_grad_norm,
            clipping=privacy.clipping,
            target_unclipped_quantile=privacy.target_unclipped_quantile,
            grad_sample_mode=privacy.grad_sample_mode,
        )
        self.optimizer = training.optimizer
        training.keep(self._basis)
        self._monitor = None
        if privacy.monitor != "off":
            self._monitor = Monitor(self.engine, self.optimizer)
            if training.saved is not None:
                self._monitor.load_state_dict(training.saved["monitor"])

    def _basis(self) -> Basis:
        """Returns what the privacy of the run depends on."""
        args, data = self.args, self.train_dataset
        names = "per_device_train_batch_size gradient_accumulation_steps world_size"
        names += " max_steps seed"
        basis: Basis = {("args", name): getattr(args, name) for name in names.split()}
        privacy = {**asdict(self.privacy), "noise": str(self.privacy.noise)}
        for name in _LOGGED:
            del privacy[name]
        basis.update({("privacy", name): value for name, value in privacy.items()})
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # Accelerate's
        basis["trainer", "optimizer"] = Same(optimizer)
        basis["trainer", "args"] = Same(args)
        basis["trainer", "train_dataset"] = Same(data)
        basis["train_dataset", "len"] = len(data)
        basis["state", "max_steps"] = self.state.max_steps
        return basis

    def training_step(
        self,
        model: nn.Module,
        inputs: List[PhysicalBatch],
        num_items_in_batch: Any = None,
    ) -> torch.Tensor:
        """
        Adds the clipped gradients of an item of a logical batch of
        ``num_items_in_batch`` records. Returns the share of the item in the logical
        batch's mean loss.
        """
        self._training.refuse_changes()
        optimizer = self._training.optimizer
        loss = torch.zeros((), device=self.args.device)
        for i, batch in enumerate(inputs):
            optimizer.zero_grad(set_to_none=True)
            with self._training.taking(batch):
                losses = self._clip(model, batch)
            loss += losses.sum() / num_items_in_batch
            if i < len(inputs) - 1 or not self.accelerator.sync_gradients:
                optimizer.signal_skip_step()
                optimizer.step()
        return loss

    def _clip(self, model: nn.Module, batch: PhysicalBatch) -> torch.Tensor:
        """Leaves the clipped gradients of a physical batch. Returns the losses."""
        training, samples = self._training, list[Samples]()
        if (settings := settings_of(model)) is not None:  # torch_compile=True
            training.hooks.private.settings = settings
        model = self.accelerator.unwrap_model(model)  # DDP would add gradients up
        model = getattr(model, "_orig_mod", model)  # compiled with its loss, if at all
        self._set_training(model)
        if batch.inputs is not None:  # without records the step is noise
            inputs = dict(self._prepare_inputs(batch.inputs))
            names = {*(self.privacy.shared or ())} & {*inputs}
            shared = {name: inputs.pop(name) for name in names}
            if self._loss_owner() in TRAINERS:
                inputs = split_pairs(inputs, batch.records or 1)
                inputs = with_reference(self, model, inputs, batch.records or 1)
            samples, size = self._samples(inputs, batch.records or 1)
            if size != (batch.records or 1):
                raise Refused(
                    f"data_collator made {size} samples of {batch.records} records.",
                    parameter="data_collator",
                    remedy="It must make one of each record, and not pack, chunk or "
                    "drop any.",
                )
            samples = [_with_shared(x, shared) for x in samples]
        if not batch.records:  # one that is sharded takes part in others' passes
            samples = [x.select(torch.arange(0)) for x in samples]
        with self.compute_loss_context_manager():
            loss = partial(self._record_loss, model)
            return training.hooks.clip(training.optimizer, samples, loss).detach()

    def _set_training(self, model: nn.Module) -> None:
        """Sets training mode, but for BatchNorm that was in evaluation mode before."""
        model.train()
        for layer in self._evaluated:
            layer.eval()

    def _samples(
        self, inputs: Dict[str, Any], records: int
    ) -> Tuple[List[Samples], int]:
        try:
            return samples_of(inputs)
        except Refused as error:
            # Texts, and several rows for each record, are private.
            tensors = {n: x for n, x in inputs.items() if hasattr(x, "shape")}
            names = [n for n, x in tensors.items() if not x.shape or len(x) % records]
            shared = (
                "If all records share an input, name it: "
                f"PrivacyArguments(shared={names}); otherwise let "
            )
            raise Refused(
                error.reason,
                parameter="data_collator",
                remedy=f"{shared if names else 'Let '}data_collator "
                "return a tensor with a row for each record.",
            ) from error

    def _loss_owner(self) -> str:
        """Returns the name of the class that defines ``compute_loss``."""
        owner = next(c for c in type(self).__mro__ if "compute_loss" in vars(c))
        return f"{owner.__module__}.{owner.__qualname__}"

    def _record_loss(self, model: nn.Module, record: Dict[str, Any]) -> torch.Tensor:
        """Returns the loss of a record, a batch of one, with what all records share."""
        owner = self._loss_owner()
        if owner in TRAINERS:
            loss = pair_loss(self, model, record)
        elif owner not in _STOCK:
            loss = self.compute_loss(model, record)
        # SFTTrainer's method computes numbers of the batch as well.
        elif self.compute_loss_func is None and self.label_smoother is None:
            loss = sample_loss(model, record)
        else:
            loss = Trainer.compute_loss(self, model, record)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise Refused(
                "The loss of a record is not one number.",
                parameter="compute_loss",
                remedy="compute_loss and compute_loss_func are called with one record, "
                "a batch of one: reduce over it.",
            )
        return loss.reshape(())

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluates like ``Trainer``, and restores the state of random numbers."""
        device = self.args.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            return super().evaluation_loop(*args, **kwargs)

    def _clip_grad_norm(self, model: nn.Module) -> None:
        """Does nothing: Trainer would clip before the noise."""

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> None:
        """Returns nothing: a norm without noise is not to be logged."""

    # -- a run ---------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: Union[str, bool, None] = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """
        Trains. Afterwards, also after an error, the model is an ordinary model again. A
        second call spends more epsilon with ``noise_multiplier``, and the rest of the
        budget with ``target_epsilon``.

        Args:
            resume_from_checkpoint: a folder, or True for the last one; the run goes on
                with the same draws, and with noise drawn afresh (see
                ``PrivacyArguments.repeat_noise``). With another ``target_epsilon``, or
                other steps, the noise of what is left is chosen anew
            args, kwargs: of ``Trainer.train``

        Raises:
            Refused: if the checkpoint has no privacy state, or belongs to a run with
                other settings, or if nothing is left of ``target_epsilon``; nothing has
                been changed then
        """
        path, training = resume_from_checkpoint, self._training
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)
        layers = [x for x in self.model.modules() if isinstance(x, _BatchNorm)]
        self._evaluated = [layer for layer in layers if not layer.training]
        self._config = self._settings()
        saved = upgraded(read_state(path)) if path else None
        if saved is not None:
            name = "resume_from_checkpoint"
            training.refuse_others(saved, self._config, path, name)
            if training.plans(saved, self._config, saved["step"]):
                training.refuse_spent(saved, "steps (num_train_epochs or max_steps)")
            self._runs, training.seed = saved["runs"], saved["seed"]
            # Trainer skips those of the epoch that come before the checkpoint.
            skipped = saved["step"] % self.steps_per_epoch
            training.draw = saved["draw"] - skipped
        else:
            training.refuse_spent(None, "steps (num_train_epochs or max_steps)")
            if not self._runs:
                self._count_before()
            seed = self.privacy.privacy_seed
            seed = training.agreed(secrets.randbits(63) if seed is None else seed)
            training.seed = derive_seed(seed, self._runs)
            self._runs, training.draw = self._runs + 1, 0
        training.saved, training.noise = saved, None
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.is_in_train = False
            if training.hooks is not None:
                self.optimizer = training.optimizer.original_optimizer
            training.end()

    def _count_before(self) -> None:
        """Lets statements tell what the weights had spent when they were loaded."""
        with self._inner_model():
            folder = str(getattr(self.model, "name_or_path", ""))
        if spent := read_spent(folder):
            add_before(self.engine, spent, folder, unit_of(self.train_dataset))

    def _settings(self) -> Dict[str, Any]:
        """Returns the settings that must be the same in a run that goes on."""
        loader, config = self.get_train_dataloader(), asdict(self.privacy)
        for name in ("privacy_seed", "repeat_noise", *_LOGGED):
            del config[name]
        config["noise"] = str(self.privacy.noise)
        config["records"] = len(self.train_dataset)
        config["logical_batch_size"] = self.logical_batch_size
        if self._given_sampling is not None:
            config["sampling"] = repr(self._given_sampling)
        config["sample_rate"] = self.sampling.rate(config["records"])
        has_budget = self.privacy.target_epsilon is not None
        if has_budget or self.privacy.noise != INDEPENDENT:  # chosen for so many
            values = self.set_initial_training_values(self.args, loader)
            config["max_steps"] = values[-1]
        return config

    def save_model(
        self, output_dir: Optional[str] = None, *args: Any, **kw: Any
    ) -> None:
        """
        Saves like ``Trainer``, with one more file, privacy.json: what the weights have
        spent, of which ``opacus-ext statement`` makes a statement. Removes the files of
        other weights.
        """
        folder = output_dir or self.args.output_dir
        if self.args.should_save:
            forget_state(folder)
        super().save_model(output_dir, *args, **kw)
        if self.args.should_save and len(self.engine.accountant):
            write_spent(folder, spent_by(self.engine))

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Creates a model card like ``Trainer``, with the privacy statement."""
        with self._inner_model():
            super().create_model_card(*args, **kwargs)
        if self.is_world_process_zero() and len(self.engine.accountant):
            path = os.path.join(self.args.output_dir, "README.md")
            with open(path, "a", encoding="utf-8") as file:
                file.write(f"\n{self.privacy_statement()}")

    def _save(self, *args: Any, **kwargs: Any) -> None:
        sharded = self._is_sharded
        reshard(self.model)
        with self._inner_model():
            if sharded:
                state = self.model.state_dict(keep_vars=True)
                kwargs["state_dict"] = whole(state, self.args.should_save)
            super()._save(*args, **kwargs)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self._inner_model():
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_best_model(self) -> None:
        with self._inner_model():
            super()._load_best_model()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        with self._if_sharded(partial(saves_whole, keep=self.args.should_save)):
            if self._is_sharded and not self.args.should_save:
                self.optimizer.state_dict()  # takes part
            super()._save_optimizer_and_scheduler(output_dir)
        state = self._training.state_dict(self._config)
        state.update(runs=self._runs, step=self.state.global_step)
        if self._monitor is not None:
            state["monitor"] = self._monitor.state_dict()
        if self.args.should_save:
            write_state(output_dir, state)
        noise = self._training.optimizer.correlated
        if self._is_sharded and noise is not None:
            write_noise(output_dir, self.args.process_index, noise.state_dict())

    def _if_sharded(self, change: Callable[[Any], Any]) -> Any:
        """Changes the optimizer within a context, if the model is sharded."""
        if not self._is_sharded:
            return nullcontext()
        return change(self._training.optimizer.original_optimizer)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        with self._if_sharded(loads_whole):
            super()._load_optimizer_and_scheduler(checkpoint)
        optimizer, noise = self._training.optimizer, self._training.optimizer.correlated
        if checkpoint and self._is_sharded and noise is not None:
            # optimizer.pt has that of process 0.
            noise.go_back()
            noise.load_state_dict(read_noise(checkpoint, self.args.process_index))
            optimizer.check_rows(noise)
        if self.privacy.repeat_noise:
            self._training.repeat_noise()

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refuses: each trial spends privacy of its own."""
        raise Refused(
            "Each trial of a hyperparameter search trains on the private records and "
            "spends privacy of its own.",
            remedy="Search on public data.",
        )

    # -- what is logged ------------------------------------------------------------

    def get_epsilon(self, delta: Optional[float] = None) -> float:
        """Returns the epsilon spent so far, at ``target_delta`` or another delta."""
        return self._training.get_epsilon(delta)

    def privacy_statement(
        self, delta: Optional[float] = None, *, unit: Optional[str] = None
    ) -> PrivacyStatement:
        """
        Returns what may be said of the weights, see
        :func:`opacus_ext.statement.privacy_statement`; at ``target_delta`` or another
        delta.
        """
        return self._training.privacy_statement(delta, unit)

    def log(self, logs: Dict[str, float], start_time: Optional[float] = None) -> None:
        """Logs like ``Trainer``, with epsilon and delta."""
        if {"loss", "train_runtime", "noise_multiplier"} & logs.keys():
            logs.update(epsilon=self.get_epsilon(), delta=self._training.target_delta)
            is_read = self._training.hooks is not None and "max_steps" not in logs
            if is_read and self._monitor is not None:
                logs.update(self._monitor.read())
            if self._drawn and self.privacy.log_draws:
                logs["drawn"] = sum(self._drawn) / len(self._drawn)
            self._drawn.clear()
            if not self.privacy.log_loss:
                logs.pop("loss", None)
                logs.pop("train_loss", None)
        super().log(logs, start_time)
