"""The training loop of transformers' Trainer, made private.

:class:`PrivateTrainer` is used as ``Trainer`` is, with one more argument. What makes it
private is Opacus's ``PrivacyEngine.make_private``, called when training begins; what is
overridden here is where Trainer would go round it: how batches are drawn, which loss is
backpropagated, what is clipped, logged and saved.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Dict, Iterator, List, Mapping, Optional, Tuple, Union

import torch
from opacus import PrivacyEngine
from opacus.accountants.accountant import IAccountant
from torch import nn
from torch.utils.data import DataLoader
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from opacus_ext.accountants.budget import least_noise
from opacus_ext.data.logical import Part, derive_seed
from opacus_ext.grad_sample.core.groups import Samples, samples_of
from opacus_ext.monitor import Monitor
from opacus_ext.refused import Refused
from opacus_ext.trainer.arguments import PrivacyArguments
from opacus_ext.trainer.batches import BatchTrainer
from opacus_ext.trainer.callbacks import NoiseLog
from opacus_ext.trainer.checkpoint import forget_state, read_state, write_state
from opacus_ext.trainer.objectives import objective_of
from opacus_ext.trainer.records import RecordTrainer
from opacus_ext.trainer.refusals import (
    by_name,
    refusals,
    refuse_environment,
    refuse_order,
    warnings_about,
)


@dataclass
class _PrivateRun:
    """
    What make_private has attached, from when training begins until it ends.

    Attributes:
        hooks: on the model
        optimizer: Opacus's
        noise: the random numbers of the noise
        monitor: of the optimizer, if one was asked for
    """

    hooks: Any
    optimizer: Any
    noise: torch.Generator
    monitor: Optional[Monitor] = None


class PrivateTrainer(BatchTrainer):
    """
    ``transformers.Trainer``, with differential privacy.

    A step takes a logical batch: each record is in it with the same probability B / N,
    for N records and a logical batch size B of ``per_device_train_batch_size *
    gradient_accumulation_steps``. An epoch is N / B steps, rounded up. A batch is
    computed in parts of at most ``per_device_train_batch_size`` records, each record's
    gradient clipped, and noise is added once to their sum. Steps, epochs and the
    learning rate's schedule count logical batches.

    Args:
        args: of ``Trainer``. Of its TrainingArguments, ``max_grad_norm`` is off (its
            default, 1.0, is taken for "not given"); what breaks privacy is refused
        privacy: the privacy of the run
        kwargs: of ``Trainer``. A ``compute_loss_func`` gets the model's outputs and the
            labels of one record, in evaluation of a batch

    The loss of a record is what ``compute_loss`` gives for it alone, as a batch of one
    (:func:`opacus_ext.clipped_grads`). To train on another loss override that, as with
    ``Trainer``; it must keep nothing of the record.

    Another Trainer is made private by ``class Private(PrivateTrainer, Other)``. TRL's
    SFTTrainer and DPOTrainer, which log numbers of the batch, are known
    (objectives.py).

    For the privacy of people with several sequences each, make each person one record:
    a model in :class:`~opacus_ext.losses.PerRecord` (what is saved is the model itself)
    and :class:`~opacus_ext.data.collators.RecordCollator`.

    What is logged with the training loss, and at the end: "epsilon" and "delta"; at the
    start "noise_multiplier", "sample_rate" and "expected_batch_size". A checkpoint has
    one more file, privacy.pt, with the accountant's history and the random state of the
    noise: whoever has that can subtract the noise, so do not publish it. The model's
    files are what epsilon is about.

    Raises:
        Refused: for arguments that break privacy or are not supported; nothing has
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

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        refuse_order(cls, PrivateTrainer)

    def __init__(
        self, *args: Any, privacy: Optional[PrivacyArguments] = None, **kwargs: Any
    ):
        if not isinstance(privacy, PrivacyArguments):
            raise Refused(
                f"{type(self).__name__} was given no PrivacyArguments as privacy, but "
                f"{type(privacy).__name__}.",
                parameter="privacy",
                remedy="Add privacy=PrivacyArguments(target_epsilon=8, "
                "target_delta=1e-5), or what you need.",
            )
        values = (*args, *kwargs.values())
        chosen = next((x for x in values if isinstance(x, TrainingArguments)), None)
        given = by_name(self, RecordTrainer, args, kwargs)
        if chosen is not None:
            self._refuse(chosen, given)
        super().__init__(*args, **kwargs)
        if chosen is None:
            self._refuse(self.args, given)
        self._objective = objective_of(type(self))(self)
        self.privacy = privacy
        self.engine = PrivacyEngine(accountant=privacy.accountant)
        self.add_callback(NoiseLog(self))
        self._runs = 0
        self._seed, self._draw = 0, 0  # of this run, and its next draw
        self._saved: Optional[Dict[str, Any]] = None  # the state it goes on from
        self._run: Optional[_PrivateRun] = None  # None outside of training
        for warning in warnings_about(self):
            warnings.warn(warning, stacklevel=2)

    def _refuse(self, args: TrainingArguments, given: Mapping[str, Any]) -> None:
        if hasattr(self, "sample_losses"):
            raise Refused(
                f"{type(self).__name__}.sample_losses would not be called.",
                remedy="Override compute_loss(model, inputs): in training it is called "
                "with one record, a batch of one.",
            )
        for problem in objective_of(type(self)).refusals(args, given):
            raise problem
        for problem in refusals(args, given):
            raise problem

    # -- batches -------------------------------------------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator, num_batches: int, device: torch.device
    ) -> Tuple[List[List[Part]], int]:
        """The items of a logical batch, and how many records it has."""
        if self._run is not None:
            self._run.optimizer.drop_logical_batch()  # one that was left, too
        items = list(islice(epoch_iterator, num_batches))
        if items:
            self._draw = items[-1][-1].draw + 1
        return items, sum(part.records for item in items for part in item)

    # -- a step --------------------------------------------------------------------

    def create_optimizer(self, model: Optional[nn.Module] = None) -> Any:
        """The optimizer; as training begins, everything is made private here."""
        optimizer = super().create_optimizer(model)
        if self.is_in_train and self._run is None:
            refuse_environment(self)
            self._make_private(optimizer)
        return self.optimizer

    def _make_private(self, optimizer: torch.optim.Optimizer) -> None:
        privacy, saved = self.privacy, self._saved
        drawn = (
            {"sampling": self.sampling}
            if privacy.poisson_sampling
            else {"poisson_sampling": False}
        )
        noise_multiplier = self._noise_multiplier()
        noise = torch.Generator(self.args.device)
        if saved is None:
            noise.manual_seed(derive_seed(self._seed, "noise"))
        else:
            noise.seed()
            self.engine.accountant.load_state_dict(saved["accountant"])
        self.model.train()  # from_pretrained leaves it in evaluation mode
        made = self.engine.make_private(
            module=self.model,
            optimizer=optimizer,
            data_loader=DataLoader(self.train_dataset, batch_sampler=self._draws),
            noise_multiplier=noise_multiplier,
            max_grad_norm=privacy.per_sample_max_grad_norm,
            clipping=privacy.clipping,
            grad_sample_mode=privacy.grad_sample_mode,
            noise_generator=noise,
            wrap_model=False,
            **drawn,
        )
        hooks, self.optimizer, *_ = made
        self._run = _PrivateRun(hooks, self.optimizer, noise)
        # Where batches are shuffled, Opacus has int(N / steps).
        self.optimizer.expected_batch_size = self.sampling.expected_batch_size
        if privacy.monitor != "off":
            private = privacy.monitor == "private"
            monitor = Monitor(self.engine, self.optimizer, private=private)
            if saved is not None:
                monitor.load_state_dict(saved["monitor"])
            self._run.monitor = monitor

    def _noise_multiplier(self) -> float:
        privacy, accountant = self.privacy, self.engine.accountant
        if self._saved is not None:
            return self._saved["noise_multiplier"]
        if privacy.noise_multiplier is not None:
            return privacy.noise_multiplier
        epsilon, delta = privacy.target_epsilon, privacy.target_delta
        assert epsilon is not None  # PrivacyArguments has one of the two
        records, steps = len(self.train_dataset), self.state.max_steps
        self.sampling.check(records, accountant)
        # The noise was chosen to leave less than this.
        if self.get_epsilon() > epsilon - 0.01:
            raise Refused(
                f"target_epsilon={epsilon} is spent by what this trainer has trained "
                f"before ({self.get_epsilon():.2f}).",
                parameter="target_epsilon",
                remedy="Make a new one with a budget for what is to come: budgets of "
                "the same records add up.",
            )

        def record(trial: IAccountant, noise_multiplier: float) -> None:
            self.sampling.account(trial, records, noise_multiplier, steps)

        return least_noise(accountant, record, epsilon, delta)

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
        if not isinstance(inputs, list) or not all(isinstance(x, Part) for x in inputs):
            raise Refused(
                "PrivateTrainer trains on what its own get_train_dataloader draws, got "
                f"{type(inputs).__name__}.",
                remedy="Do not override it: change the data set or the collator.",
            )
        assert self._run is not None
        optimizer = self._run.optimizer
        loss = torch.zeros((), device=self.args.device)
        for i, part in enumerate(inputs):
            optimizer.zero_grad(set_to_none=True)
            losses = self._clip(model, part)
            loss += losses.sum() / num_items_in_batch
            if i < len(inputs) - 1 or not self.accelerator.sync_gradients:
                optimizer.signal_skip_step()
                optimizer.step()
        return loss

    def _clip(self, model: nn.Module, part: Part) -> torch.Tensor:
        """Leaves the clipped gradients of a part's records; their losses."""
        run = self._run
        assert run is not None
        samples: List[Samples] = []
        if part.records:  # of a draw without records the step is noise
            model.train()
            inputs = dict(self._prepare_inputs(part.inputs))
            inputs = self._objective.prepare(model, inputs)
            samples, size = samples_of(inputs, self._objective.take)
            if size != part.records:
                raise Refused(
                    f"data_collator made {size} samples of {part.records} records.",
                    parameter="data_collator",
                    remedy="It must make one of each record, and not pack, chunk or "
                    "drop any.",
                )
            if self._objective.one_by_one:
                rows = [(some, torch.arange(some.size).split(1)) for some in samples]
                samples = [some.select(i) for some, each in rows for i in each]

        def loss(record: Dict[str, Any]) -> torch.Tensor:
            found = self._objective(model, record)
            if not isinstance(found, torch.Tensor) or found.numel() != 1:
                raise Refused(
                    "The loss of a record is not one number.",
                    parameter="compute_loss",
                    remedy="compute_loss and compute_loss_func are called with one "
                    "record, a batch of one: reduce over it.",
                )
            return found.reshape(())

        with self.compute_loss_context_manager():
            return run.hooks.clip(run.optimizer, samples, loss).detach()

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
                with the same draws, and with noise drawn afresh (see
                ``PrivacyArguments.repeat_noise``)
            args: of ``Trainer.train``
            kwargs: of ``Trainer.train``

        Raises:
            Refused: if the checkpoint has no privacy state, or belongs to a run with
                other settings; nothing has been changed then
        """
        path = resume_from_checkpoint
        if path is True:
            path = get_last_checkpoint(self.args.output_dir)
        self._config = self._settings()
        self._saved = read_state(path, self._config) if path else None
        if self._saved is not None:
            self._runs, self._seed = self._saved["runs"], self._saved["seed"]
            # Trainer skips those of the epoch that come before the checkpoint.
            skipped = self._saved["step"] % self.steps_per_epoch
            self._draw = self._saved["draw"] - skipped
        else:
            known = self.privacy.privacy_seed
            self._seed = secrets.randbits(63) if known is None else known
            self._seed = derive_seed(self._seed, self._runs)
            self._runs, self._draw = self._runs + 1, 0
        try:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self._make_ordinary()

    def _make_ordinary(self) -> None:
        """Takes away what make_private attached."""
        run, self._run = self._run, None
        self._saved = None
        self.is_in_train = False
        if run is None:
            return
        run.hooks.cleanup()
        self.optimizer = run.optimizer.original_optimizer
        for p in run.hooks._module.parameters():
            p.grad = None
            if hasattr(p, "summed_grad"):
                del p.summed_grad

    def _settings(self) -> Dict[str, Any]:
        """What a run that goes on must have as it was."""
        loader, config = self.get_train_dataloader(), asdict(self.privacy)
        for name in ("privacy_seed", "log_loss", "repeat_noise"):
            del config[name]
        config["records"] = len(self.train_dataset)
        config["logical_batch_size"] = self.logical_batch_size
        config["sample_rate"] = self.sampling.rate(config["records"])
        if self.privacy.target_epsilon is not None:  # for so many it chose the noise
            values = self.set_initial_training_values(self.args, loader)
            config["max_steps"] = values[-1]
        return config

    def save_model(
        self, output_dir: Optional[str] = None, *args: Any, **kw: Any
    ) -> None:
        """As ``Trainer``. Weights never lie beside the privacy state of others."""
        forget_state(output_dir or self.args.output_dir)
        super().save_model(output_dir, *args, **kw)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        run = self._run
        assert run is not None
        state = {
            "config": self._config,
            "accountant": self.engine.accountant.state_dict(),
            "noise_multiplier": run.optimizer.noise_multiplier,
            "noise": run.noise.get_state(),
            "seed": self._seed,
            "runs": self._runs,
            "draw": self._draw,
            "step": self.state.global_step,
        }
        if run.monitor is not None:
            state["monitor"] = run.monitor.state_dict()
        write_state(output_dir, state)

    def _load_optimizer_and_scheduler(self, checkpoint: Optional[str]) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self._saved is not None and self._run is not None:
            if self.privacy.repeat_noise:
                self._run.noise.set_state(self._saved["noise"])

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """
        Raises:
            Refused: always
        """
        raise Refused(
            "Each trial of a hyperparameter search trains on the private records and "
            "spends privacy of its own.",
            remedy="Search on public data.",
        )

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
            if self._run is not None and self._run.monitor is not None:
                logs.update(self._run.monitor.read())
            if not self.privacy.log_loss:
                logs.pop("loss", None)
                logs.pop("train_loss", None)
        super().log(logs, start_time)
