"""Lightning's Trainer, made private by a callback.

It works with both packages, ``lightning`` and ``pytorch_lightning``. No other module of
opacus_ext imports them.
"""

from __future__ import annotations

import functools
import inspect
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable, Dict, List, Optional, Union

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from opacus_ext.accountants.mechanisms import count_of
from opacus_ext.data.choice import public_batches, public_sampling
from opacus_ext.data.copies import refuse_copies
from opacus_ext.data.draws import count_records
from opacus_ext.data.logical import PhysicalBatch, logical_loader
from opacus_ext.data.sampling import Poisson, Sampling, plain_count
from opacus_ext.engine import INDEPENDENT
from opacus_ext.grad_sample.modes.ghost import ClippedLoss
from opacus_ext.optimizers.noise import CORRELATED
from opacus_ext.private_training import (
    Basis,
    PrivateTraining,
    Same,
    check_noise,
    check_random,
    upgraded,
)
from opacus_ext.refused import Refused
from opacus_ext.statement import PrivacyStatement
from opacus_ext.strategies import Strategy
from opacus_ext.supported import Run, kind_of, refuse

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]

__all__ = ["PrivacyCallback"]

_STRATEGIES = "SingleDeviceStrategy", "DDPStrategy"
_TRANSFERS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


_FULLY_SHARD = (
    "A model that is too large for one device trains by opacus_ext.trainer."
    "PrivateTrainer with TrainingArguments(fsdp=True), or in a loop of your own by "
    "fully_shard and make_private."
)
_OR_HOOKS = 'or take grad_sample_mode="hooks", which takes any mean over the records.'


class PrivacyCallback(Callback):
    """
    Trains a LightningModule with differential privacy: ``Trainer(callbacks=[...])``.

    A step draws each record of the training loader's data set with the same probability
    B / N, for the loader's batch size B and N records; an epoch has as many steps as
    the loader. Steps, epochs, schedules and checkpoints count these logical batches. A
    draw without records is a step of noise, for which ``training_step`` is not called.
    With ``Trainer(strategy="ddp")`` each process has its share of the same batches, and
    calls ``training_step`` only if it has records. A model that ``fully_shard`` has
    sharded trains by ``PrivateTrainer`` or ``make_private``.

    "epsilon" is logged after each epoch. Checkpoints hold the accountant's history and
    the random state of the noise. Whoever has a checkpoint can subtract the noise, so
    publish weights alone. A run that goes on from a checkpoint has the same draws, and
    new noise.

    Args:
        target_delta: delta of the guarantee, below one over the number of records
        target_epsilon: the most that all steps spend; the noise is chosen for it
        noise_multiplier: instead of ``target_epsilon``
        max_grad_norm: the bound of each record's gradient
        grad_sample_mode: see ``make_private``. In "hooks" the loss may be any mean over
            the records; in other modes ``criterion`` must compute it
        criterion: the LightningModule's attribute that computes the loss, such as an
            ``nn.CrossEntropyLoss()``; within ``training_step`` it clips by record
        module: the name of the module that ``training_step`` calls, such as "model"; by
            default the LightningModule itself, ``self(...)``
        max_physical_batch_size: the most records ``training_step`` is given at once
        accountant: "prv_bounds", whose epsilon is an upper bound, "prv" or "rdp"
        sampling: of ``opacus_ext.data``, if batches are to be drawn otherwise
        noise: "independent" from step to step; "banded", correlated noise for which the
            number of bands is chosen (``target_epsilon`` must be given); or a strategy
            of correlated noise, such as :class:`opacus_ext.optimizers.Banded`
        seed: of noise and batches, for tests. By default it is secret
        repeat_noise: see :class:`~opacus_ext.trainer.PrivacyArguments`; dropout is not
            repeated, as Lightning does not keep its random state
        secure_mode: see :class:`~opacus_ext.trainer.PrivacyArguments`
        public_records: a number of records that does not depend on the data, from which
            sampling rate and steps come: see ``make_private``
        kwargs: of ``make_private``, such as ``clipping``

    Raises:
        Refused: when training begins, for settings of the Trainer that break privacy or
            are not supported

    Example:
        >>> from lightning import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> settings = {"noise_multiplier": 1.0, "grad_sample_mode": "hooks"}
        >>> privacy = PrivacyCallback(target_delta=1e-3, **settings)
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> quiet |= {"logger": False, "enable_checkpointing": False}
        >>> quiet |= {"accelerator": "cpu", "callbacks": [privacy]}
        >>> Trainer(max_steps=2, **quiet).fit(BoringModel())
        >>> privacy.get_epsilon() > 0
        True
    """

    def __init__(
        self,
        *,
        target_delta: float,
        target_epsilon: Optional[float] = None,
        noise_multiplier: Optional[float] = None,
        max_grad_norm: Any = 1.0,
        grad_sample_mode: str = "auto",
        criterion: str = "criterion",
        module: str = "",
        max_physical_batch_size: Optional[int] = None,
        accountant: str = "prv_bounds",
        sampling: Optional[Sampling] = None,
        noise: Union[str, Strategy] = INDEPENDENT,
        seed: Optional[int] = None,
        repeat_noise: bool = False,
        secure_mode: bool = False,
        public_records: Optional[int] = None,
        **kwargs: Any,
    ):
        self._run = Run(
            "PrivacyCallback",
            mode=grad_sample_mode,
            clipping=kwargs.get("clipping", "flat"),
            noise=check_noise(noise, target_epsilon, secure_mode),
        )
        refuse(self._run)
        check_random(secure_mode, seed=seed, repeat_noise=repeat_noise)
        self._training = PrivateTraining(
            accountant, target_delta, target_epsilon, noise_multiplier, secure_mode
        )
        self._training.seed = secrets.randbits(63) if seed is None else seed
        self.engine = self._training.engine
        self.criterion, self.module = criterion, module
        self.max_physical_batch_size = max_physical_batch_size
        self.sampling, self.noise, self.repeat_noise = sampling, noise, repeat_noise
        self.public_records = plain_count(public_records)
        self._kwargs = dict(
            kwargs, max_grad_norm=max_grad_norm, grad_sample_mode=grad_sample_mode
        )
        self._saved: Dict[str, Any] = {}  # of a checkpoint, until training begins
        self._saved_noise: Any = None  # the same, of its optimizer
        self._undo: List[Callable[[], Any]] = []

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

    def _refuse_model(self, pl_module: Any) -> None:
        """Refuses a model that is not trained here."""
        kind = kind_of(pl_module)
        if self._training.process[1] > 1 and kind == "one process":
            kind = "DistributedDataParallel"
        run = self._run._replace(model=kind)
        refuse(run, type(pl_module).__name__)

    # -- a run ---------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what is not supported, before anything is changed."""
        if stage != "fit":
            return
        _refuse_trainer(trainer)
        self._training.process = trainer.global_rank, trainer.world_size
        self._refuse_model(pl_module)
        self._saved = {}
        self._several = trainer.world_size > 1
        if hasattr(trainer.strategy, "configure_ddp"):
            # DDP would average gradients that have no noise yet.
            self._set(trainer.strategy, "configure_ddp", lambda: None)
        # All processes draw from one loader, and no DistributedSampler shares it out.
        connector = trainer._data_connector
        prepare = _but_for_training(connector._prepare_dataloader)
        self._set(connector, "_prepare_dataloader", prepare)
        clips = self._kwargs["grad_sample_mode"] != "hooks"
        if clips and not callable(getattr(pl_module, self.criterion, None)):
            raise Refused(
                f"{type(pl_module).__name__} has no self.{self.criterion}, which would "
                "clip by record.",
                module=type(pl_module).__name__,
                parameter="criterion",
                remedy="Give it one, such as nn.CrossEntropyLoss(), and compute the "
                f"loss by it; {_OR_HOOKS}",
            )
        if self.max_physical_batch_size and not pl_module.automatic_optimization:
            raise Refused(
                "max_physical_batch_size with manual optimization, where Lightning "
                "would count a step for each physical batch.",
                parameter="max_physical_batch_size",
                remedy="Use automatic optimization; or "
                'grad_sample_mode="scan", whose memory is that of one record.',
            )
        self._begin_later(trainer, pl_module)

    def _begin_later(self, trainer: Any, pl_module: Any) -> None:
        """Begins once a checkpoint was read, and refuses to train until then."""
        run, loop, begun = trainer._run_stage, trainer.fit_loop.run, []

        def begin() -> Any:
            self._begin(trainer, pl_module)
            begun.append(True)
            return run()

        def train() -> Any:
            if not begun:
                raise Refused(
                    "A callback runs the Trainer's training loop by itself (to find a "
                    "learning rate or a batch size): on private data, without noise.",
                    parameter="callbacks",
                    remedy="Leave out LearningRateFinder, BatchSizeFinder and Tuner, "
                    "or use them on public data, without PrivacyCallback.",
                )
            begun.pop()
            return loop()

        self._set(trainer, "_run_stage", begin)
        self._set(trainer.fit_loop, "run", train)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        """Makes model, optimizer, criterion and loader private."""
        self._refuse_model(pl_module)  # as configure_model has left it
        if self._several:
            for x in (*pl_module.parameters(), *pl_module.buffers()):
                dist.broadcast(x.detach(), 0)
        source, training = trainer.fit_loop._data_source, self._training
        loader, module = source.dataloader(), pl_module.get_submodule(self.module)
        strategy, plain = trainer.strategy, trainer.optimizers
        _refuse_data(loader, plain)
        size, sampling = len(loader.dataset), self._sampling(loader)
        sampling.check(size)
        self._config = {
            "records": size,
            "sampling": repr(sampling),
            "noise": str(self.noise),
            "target_epsilon": training.target_epsilon,
            "noise_multiplier": training.noise_multiplier,
            "secure_mode": training.engine.secure_mode,
            **{name: str(value) for name, value in self._kwargs.items()},
        }
        if training.target_epsilon is not None or self.noise != INDEPENDENT:
            self._config["max_steps"] = _count_steps(trainer, sampling, size)
        self._undo.append(training.end)
        if trainer.ckpt_path:
            self._restore(trainer.ckpt_path)
        done = trainer.global_step
        if training.saved is None or training.plans(training.saved, self._config, done):
            training.refuse_spent(training.saved, "steps (max_epochs or max_steps)")
        training.seed = training.agreed(training.seed)
        noise, sampling = training.choose_strategy(
            self.noise, sampling, loader, plain[0], self._config, done
        )
        settings = self._config, done, noise
        multiplier = training.choose_noise(sampling, size, *settings)
        most = self.max_physical_batch_size or size
        batches = training.logical_batches(sampling, size, most)
        criterion = training.make_private(
            module,
            plain[0],
            loader,
            multiplier,
            pl_module.device,
            sampling,
            noise=noise,
            criterion=getattr(pl_module, self.criterion, None),
            **self._kwargs,
        )
        if training.saved is not None:
            training.optimizer.load_noise(self._saved_noise)
        if self.repeat_noise:
            training.repeat_noise()
        self._undo.append(lambda: setattr(strategy, "optimizers", plain))
        strategy.optimizers = [training.optimizer]
        private = logical_loader(loader.dataset, batches, loader.collate_fn, loader)
        # By these Lightning knows a loader that can go on in the middle of an epoch.
        vars(private).update(state_dict=dict, load_state_dict=lambda state: None)
        trainer.fit_loop._combined_loader = None
        self._set(source, "instance", private)
        self._loader = private
        training.keep(functools.partial(self._basis, trainer))
        self._set(pl_module, "training_step", self._step(pl_module, criterion))
        for owner in filter(None, (pl_module, trainer.datamodule)):
            for name in _TRANSFERS:
                self._set(owner, name, _by_physical_batch(getattr(owner, name)))

    def _sampling(self, loader: DataLoader) -> Sampling:
        """Returns how batches are drawn, in as many steps as the loader has batches."""
        records, sampling = count_records(loader.dataset), self.sampling
        if sampling is not None and self.public_records is not None:  # is refused
            return public_sampling(sampling, loader, self.public_records)
        if sampling is not None and (sampling.is_public or sampling.allocates):
            steps = sampling.steps_per_epoch(records)
            return (
                replace(sampling, steps=steps) if sampling.steps is None else sampling
            )
        if sampling is not None:
            return replace(sampling, steps=len(loader))
        assert loader.batch_size is not None
        if self.public_records is not None:
            return public_batches(self.public_records, loader.batch_size)
        size = min(loader.batch_size, records)
        return Poisson(expected_batch_size=size, steps=len(loader))

    def _basis(self, trainer: Any) -> Basis:
        """Returns what the privacy of the run depends on."""
        names = "max_steps", "max_epochs", "limit_train_batches", "world_size"
        basis: Basis = {("trainer", name): getattr(trainer, name) for name in names}
        for name, value in self._kwargs.items():
            basis["callback", name] = str(value)
        basis["callback", "sampling"] = repr(self.sampling)
        basis["callback", "noise"] = str(self.noise)
        loader: Any = self._loader
        data = loader.dataset.dataset
        basis["loader", "dataset"], basis["loader", "records"] = Same(data), len(data)
        return basis

    def _restore(self, path: Any) -> None:
        """Goes on from the state of a checkpoint."""
        training = self._training
        if not self._saved:
            raise Refused(
                f"{path} has no state of a PrivacyCallback: how much privacy its "
                "weights have spent is not known.",
                parameter="ckpt_path",
                remedy="To train with its weights anew, load it by "
                "load_from_checkpoint.",
            )
        training.refuse_others(self._saved, self._config, path, "ckpt_path")
        training.saved, self._saved = self._saved, {}
        training.seed, training.draw = training.saved["seed"], training.saved["draw"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Refuses changes of what is private."""
        wrapped = isinstance(trainer.model, DistributedDataParallel)
        if trainer.train_dataloader is not self._loader or wrapped:
            raise Refused(
                "The private training loader was replaced, or the model wrapped by "
                "DistributedDataParallel.",
                parameter="strategy",
                remedy='Give the Trainer strategy="ddp", and leave out callbacks that '
                "replace the loader or wrap the model.",
            )

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *given: Any) -> None:
        """Refuses a draw that took no step, or several."""
        steps = _steps_of(self._training) - self._before
        if steps != 1:
            raise Refused(
                f"{type(pl_module).__name__} took {steps} steps with one batch, which "
                "is accounted for as one draw.",
                module=type(pl_module).__name__,
                remedy="Call manual_backward and the optimizer's step once each, and "
                "leave out an optimizer_step() of your own that skips some.",
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs epsilon."""
        pl_module.log("epsilon", self.get_epsilon(), sync_dist=self._several)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves an ordinary model."""
        while self._undo:
            self._undo.pop()()

    def on_exception(self, trainer: Any, pl_module: Any, exception: Any) -> None:
        """Leaves an ordinary model."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> Dict[str, Any]:
        """Returns what a checkpoint holds."""
        if self._training.optimizer is None:
            return {}
        return self._training.state_dict(self._config)

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Keeps the state until training begins."""
        self._saved = upgraded(state_dict) if state_dict else {}

    def on_load_checkpoint(
        self, trainer: Any, pl_module: Any, checkpoint: Dict[str, Any]
    ) -> None:
        """Keeps the state of correlated noise until training begins."""
        states = checkpoint.get("optimizer_states") or [{}]
        self._saved_noise = states[0].get(CORRELATED)

    # -- a step --------------------------------------------------------------------

    def _step(self, pl_module: Any, criterion: Any) -> Callable:
        """Returns a ``training_step`` for a logical batch."""
        stock, automatic = pl_module.training_step, pl_module.automatic_optimization
        training, optimizer = self._training, self._training.optimizer
        described = _described(pl_module, self.criterion)
        # Attributes that training_step sees in place of those that validation sees.
        within = {} if criterion is None else {self.criterion: criterion}
        if self._several:
            for name in ("log", "all_gather"):
                within[name] = _alone(getattr(pl_module, name))
        # Likewise the function by which torchmetrics sums over processes.
        places = [(vars(pl_module), within)]
        for name, part in pl_module.named_modules() if self._several else ():
            if "dist_sync_fn" in vars(part):
                places.append((vars(part), {"dist_sync_fn": _no_sync(name)}))

        def output_of(batch: PhysicalBatch, *rest: Any) -> Any:
            if batch.inputs is None:
                return _empty_loss(training)
            before = [{k: own[k] for k in new if k in own} for own, new in places]
            for own, new in places:
                own.update(new)
            try:
                return stock(batch.inputs, *rest)
            finally:
                for (own, new), old in zip(places, before):
                    for name in new:
                        del own[name]
                    own.update(old)

        @functools.wraps(stock)
        def training_step(batches: List[PhysicalBatch], *rest: Any) -> Any:
            if not _is_drawn(batches):
                raise Refused(
                    f"training_step was given a {type(batches).__name__}, and not a "
                    "draw of the private loader: a callback has replaced the loader.",
                    parameter="train_dataloaders",
                    remedy="Leave the Trainer's training loader as it is in a run.",
                )
            _refuse_trainer(pl_module.trainer)  # callbacks may have changed it since
            training.refuse_changes()
            if (
                criterion is not None
                and _described(pl_module, self.criterion) != described
            ):
                raise Refused(
                    f"self.{self.criterion} was replaced, or its reduction changed, "
                    "after training began: the one that clips by record was made of "
                    "what it was.",
                    parameter="criterion",
                    remedy="Change its other attributes in place (weight, say), or "
                    "begin another run.",
                )
            if pl_module.trainer.optimizers != [optimizer]:
                raise Refused(
                    "The Trainer's optimizer was replaced after training began: its "
                    "steps would have no noise.",
                    parameter="configure_optimizers",
                    remedy="Change its param_groups in place, or replace it in "
                    "on_fit_start.",
                )
            training.draw = batches[-1].draw + 1
            self._before = _steps_of(self._training)
            optimizer.drop_logical_batch()  # one that failed in its middle
            for batch in batches:
                optimizer.zero_grad()
                optimizer.signal_skip_step(batch is not batches[-1])
                with training.taking(batch):
                    output = output_of(batch, *rest)
                    if automatic:
                        loss = _loss(output, criterion, self.criterion)
                if not (automatic or batch.records):
                    output.backward()
                    pl_module.optimizers().step()
                if batch is not batches[-1]:
                    loss.backward()
                    optimizer.pre_step()  # its step() is at work: Lightning's closure
            return output

        return training_step

    def _set(self, place: Any, name: str, value: Any) -> None:
        """Sets an attribute of an instance, until training ends."""
        before = dict(vars(place))
        vars(place)[name] = value
        if name in before:
            self._undo.append(lambda: vars(place).update({name: before[name]}))
        else:
            self._undo.append(lambda: vars(place).pop(name))


def _count_steps(trainer: Any, sampling: Sampling, records: int) -> int:
    """Returns the number of steps that the Trainer will take."""
    steps = trainer.estimated_stepping_batches
    is_own = sampling.is_public or sampling.allocates
    if is_own and trainer.max_epochs not in (None, -1):
        # Lightning has counted the batches of the user's loader.
        limit = trainer.limit_train_batches
        batches = sampling.steps_per_epoch(records)
        share = isinstance(limit, float)
        batches = int(batches * limit) if share else min(batches, limit)
        steps = batches * trainer.max_epochs
        if trainer.max_steps != -1:
            steps = min(steps, trainer.max_steps)
    if not 0 < steps < math.inf:
        raise Refused(
            "A target_epsilon, or correlated noise, is for so many steps, and the "
            "Trainer does not say how many there will be.",
            parameter="max_epochs",
            remedy="Give the Trainer max_epochs or max_steps.",
        )
    return steps


def _steps_of(training: PrivateTraining) -> int:
    """Returns the number of steps that were counted."""
    counted = count_of(training.engine.accountant.history)
    return getattr(training.optimizer, "steps_taken", counted)


def _is_drawn(batch: Any) -> bool:
    """Returns True for an item of the private loader."""
    ours = isinstance(batch, list) and bool(batch)
    return ours and all(isinstance(x, PhysicalBatch) for x in batch)


def _described(pl_module: Any, name: str) -> Any:
    criterion = getattr(pl_module, name, None)
    return Same(criterion), getattr(criterion, "reduction", None)


def _by_physical_batch(transfer: Callable) -> Callable:
    """Makes a hook for batches accept lists of physical batches."""

    @functools.wraps(transfer)
    def by_batch(given: Any, *rest: Any) -> Any:
        if not _is_drawn(given):
            return transfer(given, *rest)
        return [
            x if x.inputs is None else x._replace(inputs=transfer(x.inputs, *rest))
            for x in given
        ]

    return by_batch


def _but_for_training(prepare: Callable) -> Callable:
    """Lets Lightning replace the samplers of all loaders but the training loader."""

    @functools.wraps(prepare)
    def prepare_others(loader: Any, *args: Any, mode: Any, **kwargs: Any) -> Any:
        if mode == "train":
            return loader
        return prepare(loader, *args, mode=mode, **kwargs)

    return prepare_others


def _alone(method: Callable) -> Callable:
    """Refuses a method of a LightningModule where it would wait for all processes."""
    name = method.__name__

    @functools.wraps(method)
    def checked(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(method).bind(*args, **kwargs).arguments
        if name == "all_gather" or given.get("sync_dist"):
            raise _waits(f"calls self.{name}", name)
        return method(*args, **kwargs)

    return checked


def _no_sync(name: str) -> Callable:
    """Refuses to sum a metric over processes, by dist_sync_on_step or compute()."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise _waits(f"sums the metric {name} over processes", name)

    return refuse


def _waits(does: str, name: str) -> Refused:
    return Refused(
        f"training_step {does}, which waits for all processes; one without records of "
        "a draw does not call training_step.",
        parameter=name,
        remedy="Log without sync_dist there, leave out dist_sync_on_step, and gather "
        "or compute metrics in another hook, such as on_train_epoch_end.",
    )


def _empty_loss(training: PrivateTraining) -> torch.Tensor:
    """Returns the loss of no records, as few models run on B = 0."""

    def contribute(grad: torch.Tensor) -> None:
        training.hooks.clip(training.optimizer, [], None)

    loss = torch.zeros((), requires_grad=True)
    loss.register_hook(contribute)
    loss.is_empty = True  # type: ignore[attr-defined]
    return loss


# -- what is refused ------------------------------------------------------------------


def _loss(output: Any, criterion: Any, name: str) -> Any:
    """Returns the loss of a training_step. Refuses a loss that is not clipped."""
    loss = output.get("loss") if isinstance(output, Mapping) else output
    if loss is None:
        raise Refused(
            "training_step returned no loss: epsilon does not cover batches that are "
            "left out for what they hold.",
            remedy="Return the loss of every batch.",
        )
    clips = isinstance(loss, ClippedLoss) or hasattr(loss, "is_empty")
    if criterion is not None and not clips:
        raise Refused(
            f"The loss of training_step was not made by self.{name}, which clips by "
            "record.",
            parameter="criterion",
            remedy=f"Compute it as self.{name}(outputs, targets); {_OR_HOOKS}",
        )
    return loss


def _refuse_trainer(trainer: Any) -> None:
    strategy, scale = trainer.strategy, trainer.accumulate_grad_batches
    kind = type(strategy).__name__
    hooks = [getattr(strategy, f"_ddp_comm_{name}", None) for name in ("state", "hook")]
    for name, is_refused, reason, remedy in (
        (
            "strategy",
            kind not in _STRATEGIES,
            f"{kind} computes or shards gradients by itself.",
            'Give the Trainer strategy="ddp" for several processes, or devices=1 and '
            f"no strategy. {_FULLY_SHARD}",
        ),
        (
            "strategy",
            getattr(strategy, "_start_method", "popen") != "popen",
            f"{kind} starts processes by {getattr(strategy, '_start_method', '')!r}, "
            "and what they spend would not be known here.",
            'Use strategy="ddp", in a script.',
        ),
        (
            "strategy",
            any(hook is not None for hook in hooks),
            f"{kind} has a ddp_comm_hook or ddp_comm_state for gradients of DDP, which "
            "is not used.",
            "Leave it out.",
        ),
        (
            "gradient_clip_val",
            trainer.gradient_clip_val,
            f"gradient_clip_val={trainer.gradient_clip_val} clips the sum of the "
            "batch before the noise.",
            "Leave it out: PrivacyCallback(max_grad_norm=...) clips by record.",
        ),
        (
            "accumulate_grad_batches",
            scale != 1,
            f"accumulate_grad_batches={scale} scales losses before they are clipped.",
            "Give the loader the whole batch_size, and PrivacyCallback "
            "max_physical_batch_size, what fits into memory.",
        ),
        (
            "precision",
            getattr(trainer.precision_plugin, "scaler", None) is not None,
            f"precision={trainer.precision!r} scales the loss, so that gradients would "
            "be clipped at another norm, and skips steps by what private data do.",
            'Use "bf16-mixed" or 32.',
        ),
        (
            "reload_dataloaders_every_n_epochs",
            trainer.reload_dataloaders_every_n_epochs,
            "reload_dataloaders_every_n_epochs replaces the loader that draws.",
            "Leave it out.",
        ),
    ):
        if is_refused:
            raise Refused(reason, parameter=name, remedy=remedy)


def _refuse_data(loader: Any, optimizers: List[Any]) -> None:
    sampler = getattr(loader, "sampler", None)
    plain = isinstance(sampler, (RandomSampler, SequentialSampler))
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not plain:
        raise Refused(
            f"The training loader ({type(loader).__name__} with a sampler "
            f"{type(sampler).__name__}) can't be replaced by Poisson sampling.",
            parameter="train_dataloaders",
            remedy="Give one DataLoader with a batch_size, shuffled or not, of a data "
            "set with a length; not one that is private already (DPDataLoader, "
            "DPLightningDataModule).",
        )
    refuse_copies(loader.dataset, "train_dataloaders")
    if len(optimizers) != 1:
        raise Refused(
            f"configure_optimizers gave {len(optimizers)} optimizers.",
            parameter="configure_optimizers",
            remedy="Train with one; for several call make_private yourself, once a "
            "model.",
        )
