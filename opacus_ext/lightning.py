"""Lightning's Trainer, made private by a callback.

For both packages, ``lightning`` and ``pytorch_lightning``; nothing else of opacus_ext
imports either.
"""

from __future__ import annotations

import functools
import math
import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Callable, Dict, Iterator, List, Optional

import torch
from opacus import PrivacyEngine
from opacus.accountants.accountant import IAccountant
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from opacus_ext.accountants.budget import least_noise
from opacus_ext.data.draws import Draws
from opacus_ext.data.logical import LogicalBatches, Part, derive_seed, logical_loader
from opacus_ext.data.sampling import Poisson, Sampling
from opacus_ext.grad_sample.factors.rows import upcast
from opacus_ext.grad_sample.modes.ghost import ClippedLoss
from opacus_ext.refused import Refused

try:
    from lightning.pytorch import Callback
except ImportError:  # the same under its older name
    from pytorch_lightning import Callback  # type: ignore[assignment]

__all__ = ["PrivacyCallback"]


class PrivacyCallback(Callback):
    """
    Trains a LightningModule with differential privacy: ``Trainer(callbacks=[...])``.

    Optimization is automatic or manual. A step draws each record of the training
    loader's data set with the same probability B / N, for the loader's batch size B and
    N records; an epoch has as many steps as the loader. Steps, epochs, schedules and
    checkpoints count these logical batches. A draw without
    records is a step of noise, for which ``training_step`` is not called.

    "epsilon" is logged after each epoch. Checkpoints hold the accountant's history and
    the random state of the noise: whoever has one can subtract the noise, so publish
    weights alone. A run that goes on from one has the same draws, in the middle of an
    epoch too, and noise that is drawn afresh.

    Args:
        target_delta: delta of the guarantee, below one over the number of records
        target_epsilon: what all steps may spend; the noise is chosen for it
        noise_multiplier: in the place of ``target_epsilon``
        max_grad_norm: to which each record's gradient is clipped
        grad_sample_mode: see ``make_private``. In all but "hooks" the loss must be made
            by ``criterion``; "hooks" takes any that is a mean over the records
        criterion: the LightningModule's attribute that makes the loss, such as an
            ``nn.CrossEntropyLoss()``; within ``training_step`` it clips by record
        module: the name of what ``training_step`` calls, such as "model"; by default
            the LightningModule itself, ``self(...)``
        max_physical_batch_size: the most records ``training_step`` is given at once
        accountant: "prv", "prv_bounds" or "rdp"
        sampling: another way to draw batches, of ``opacus_ext.data``, such as
            ``TruncatedPoisson`` where memory is fixed; its ``steps`` are the loader's
        seed: of noise and batches, for tests. By default nobody knows it
        repeat_noise: whether a run that goes on from a checkpoint has the noise that it
            would have had, and is what it would have been (but for dropout, whose
            random state Lightning does not keep). Two runs that go on from one
            checkpoint then have the same noise: the difference of their weights has
            none, and no epsilon covers that
        kwargs: of ``make_private``, such as ``clipping``

    Raises:
        Refused: when training begins, for settings of the Trainer that break privacy or
            are not supported

    Example:
        >>> from lightning import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> privacy = PrivacyCallback(
        ...     target_delta=1e-3, noise_multiplier=1.0, grad_sample_mode="hooks"
        ... )
        >>> Trainer(
        ...     max_steps=2, callbacks=[privacy], accelerator="cpu", logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False,
        ...     enable_model_summary=False,
        ... ).fit(BoringModel())
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
        accountant: str = "prv",
        sampling: Optional[Sampling] = None,
        seed: Optional[int] = None,
        repeat_noise: bool = False,
        **kwargs: Any,
    ):
        if (target_epsilon is None) == (noise_multiplier is None):
            raise Refused(
                "Give either target_epsilon or noise_multiplier; got "
                f"{target_epsilon} and {noise_multiplier}.",
                parameter="target_epsilon",
                remedy="The noise is chosen for the one, or is the other.",
            )
        self.target_delta, self.target_epsilon = target_delta, target_epsilon
        self.noise_multiplier = noise_multiplier
        self.criterion, self.module = criterion, module
        self.max_physical_batch_size = max_physical_batch_size
        self.engine = PrivacyEngine(accountant=accountant)
        self.sampling, self.repeat_noise = sampling, repeat_noise
        self._kwargs = dict(
            kwargs, max_grad_norm=max_grad_norm, grad_sample_mode=grad_sample_mode
        )
        self._seed = secrets.randbits(63) if seed is None else seed
        self._draw = 0  # how many logical batches there have been
        self._noise: Optional[torch.Generator] = None
        self._saved: Dict[str, Any] = {}
        self._undo: List[Callable[[], Any]] = []

    def get_epsilon(self, delta: Optional[float] = None) -> float:
        """What has been spent, at ``target_delta`` or another one."""
        if any(noise == 0 for noise, _, _ in self.engine.accountant.history):
            return float("inf")
        if not len(self.engine.accountant):
            return 0.0
        return float(self.engine.get_epsilon(delta or self.target_delta))

    # -- a run ---------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuses what can't be had, before anything is changed."""
        if stage == "fit":
            ghost = self._kwargs["grad_sample_mode"] != "hooks"
            criterion = self.criterion if ghost else None
            for problem in _refusals(trainer, pl_module, criterion):
                raise problem
            if self.max_physical_batch_size and not pl_module.automatic_optimization:
                raise Refused(
                    "max_physical_batch_size with manual optimization, where Lightning "
                    "would count a step for each part of a batch.",
                    parameter="max_physical_batch_size",
                    remedy="Use automatic optimization; or "
                    'grad_sample_mode="scan", whose memory is that of one record.',
                )

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Makes model, optimizer, criterion and loader private."""
        source = trainer.fit_loop._data_source
        loader = source.dataloader()
        for problem in _data_refusals(loader, trainer.optimizers):
            raise problem
        size, steps = len(loader.dataset), len(loader)
        sampling = replace(
            self.sampling or Poisson(expected_batch_size=min(loader.batch_size, size)),
            steps=steps,
        )
        sampling.check(size, self.engine.accountant)
        self._config = {
            "records": size,
            "sampling": repr(sampling),
            "target_epsilon": self.target_epsilon,
            "noise_multiplier": self.noise_multiplier,
            **{name: str(value) for name, value in self._kwargs.items()},
        }
        self._sigma = self._restore(trainer, pl_module.device)
        if self._sigma is None:
            self._sigma = self._choose_noise(trainer, sampling, size)
        generator = torch.Generator()
        draws = Draws(sampling, size, generator)
        (plain,) = trainer.optimizers
        hooks, optimizer, *criterion, _ = self.engine.make_private(
            module=pl_module.get_submodule(self.module),
            optimizer=plain,
            criterion=getattr(pl_module, self.criterion, None),
            data_loader=DataLoader(loader.dataset, batch_sampler=draws),
            noise_multiplier=self._sigma,
            sampling=sampling,
            noise_generator=self._noise,
            wrap_model=False,
            **self._kwargs,
        )
        self._undo.append(functools.partial(_make_ordinary, hooks, optimizer))
        trainer.strategy.optimizers = [optimizer]
        self._batches = LogicalBatches(
            draws,
            generator,
            self.max_physical_batch_size or size,
            items=1,
            seed=self._seed,
            first=self._draw,
        )
        trainer.fit_loop._combined_loader = None
        self._set(source, "instance", _private_loader(loader, self._batches))
        step = self._step(pl_module, optimizer, criterion[0] if criterion else None)
        self._set(pl_module, "training_step", step)
        for owner in filter(None, (pl_module, trainer.datamodule)):
            for name in _TRANSFERS:
                self._set(owner, name, _by_part(getattr(owner, name)))

    def _restore(self, trainer: Any, device: torch.device) -> Optional[float]:
        """Reads the state of a checkpoint, if there is one, and gives its noise."""
        saved = self._saved
        if self._noise is None:
            self._noise = torch.Generator(device)
            self._noise.manual_seed(derive_seed(self._seed, "noise"))
        if not trainer.ckpt_path:
            return None
        before = saved.get("config", {"a PrivacyCallback": False})
        here = self._config if saved else {"a PrivacyCallback": True}
        changed = "; ".join(
            f"{name}: {before.get(name)!r} there, {value!r} here"
            for name, value in here.items()
            if before.get(name) != value
        )
        if changed:
            raise Refused(
                f"{trainer.ckpt_path} belongs to another run; these must be the same: "
                f"{changed}.",
                parameter="ckpt_path",
                remedy="Give the settings that it was written with; or, to train with "
                "its weights anew, load it by load_from_checkpoint.",
            )
        self._seed, self._draw = saved["seed"], saved["draw"]
        self._noise.seed()
        self.engine.accountant.load_state_dict(saved["accountant"])
        return saved["noise_multiplier"]

    def _choose_noise(self, trainer: Any, sampling: Sampling, size: int) -> float:
        if self.noise_multiplier is not None:
            return self.noise_multiplier
        epsilon, delta = self.target_epsilon, self.target_delta
        assert epsilon is not None  # one of the two was given
        steps = trainer.estimated_stepping_batches
        if not 0 < steps < math.inf:
            raise Refused(
                "target_epsilon needs to know how many steps there will be.",
                parameter="target_epsilon",
                remedy="Give the Trainer max_epochs or max_steps.",
            )

        def record(trial: IAccountant, noise_multiplier: float) -> None:
            sampling.account(trial, size, noise_multiplier, steps)

        return least_noise(self.engine.accountant, record, epsilon, delta)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """The optimizer's state is loaded, which draws noise afresh."""
        saved, self._saved = self._saved, {}
        if trainer.ckpt_path and self.repeat_noise:
            self._noise.set_state(saved["noise"].cpu())

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Draws go on where training is, not where the loader has looked ahead to."""
        self._batches.next = self._draw

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Logs what has been spent."""
        pl_module.log("epsilon", self.get_epsilon())

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The model is an ordinary one again."""
        while self._undo:
            self._undo.pop()()

    def on_exception(
        self, trainer: Any, pl_module: Any, exception: BaseException
    ) -> None:
        """As after training."""
        self.teardown(trainer, pl_module, "fit")

    def state_dict(self) -> Dict[str, Any]:
        """What a checkpoint holds."""
        if self._noise is None:
            return {}
        return {
            "config": self._config,
            "accountant": dict(self.engine.accountant.state_dict()),
            "noise_multiplier": self._sigma,
            "noise": self._noise.get_state(),
            "seed": self._seed,
            "draw": self._draw,
        }

    def load_state_dict(self, state_dict: Dict[str, Any]) -> None:
        """Keeps it until training begins."""
        self._saved = state_dict

    # -- a step --------------------------------------------------------------------

    def _step(self, pl_module: Any, optimizer: Any, criterion: Any) -> Callable:
        """``training_step`` of a logical batch."""
        stock, automatic = pl_module.training_step, pl_module.automatic_optimization

        def steps_taken() -> int:
            accountant = self.engine.accountant
            others = getattr(accountant, "mechanisms", [])
            return sum(steps for *_, steps in accountant.history) + sum(
                entry["participations"] for entry in others
            )

        def output_of(part: Part, *rest: Any) -> Any:
            if criterion is None:
                return stock(part.inputs, *rest)
            # In front of the module of this name, which validation calls.
            vars(pl_module)[self.criterion] = criterion
            try:
                return stock(part.inputs, *rest)
            finally:
                del vars(pl_module)[self.criterion]

        @functools.wraps(stock)
        def training_step(parts: List[Part], *rest: Any) -> Any:
            self._draw, before = parts[-1].draw + 1, steps_taken()
            optimizer.drop_logical_batch()  # one that failed in its middle
            for part in parts:
                optimizer.zero_grad()
                optimizer.signal_skip_step(part is not parts[-1])
                output = output_of(part, *rest) if part.records else _nothing(optimizer)
                if automatic:
                    _check_loss(output, criterion, self.criterion)
                elif not part.records:
                    output.backward()
                    pl_module.optimizers().step()
                if part is not parts[-1]:
                    _loss(output).backward()
                    optimizer.pre_step()  # its step() is at work: Lightning's closure
            if not automatic and steps_taken() - before != 1:
                raise Refused(
                    f"training_step took {steps_taken() - before} steps with one "
                    "batch, which is accounted for as one draw.",
                    remedy="Call manual_backward and the optimizer's step once each.",
                )
            return output

        return training_step

    def _set(self, place: Any, name: str, value: Any) -> None:
        """Sets an attribute of an instance, until training ends."""
        before = dict(vars(place))

        def undo() -> None:
            del vars(place)[name]
            if name in before:
                vars(place)[name] = before[name]

        vars(place)[name] = value
        self._undo.append(undo)


_TRANSFERS = (
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)


def _by_part(transfer: Callable) -> Callable:
    """A hook for batches, on batches that are lists of parts."""

    @functools.wraps(transfer)
    def by_part(batch: Any, *rest: Any) -> Any:
        if not isinstance(batch, list) or not all(isinstance(x, Part) for x in batch):
            return transfer(batch, *rest)
        return [
            part._replace(inputs=transfer(part.inputs, *rest)) if part.records else part
            for part in batch
        ]

    return by_part


def _private_loader(loader: DataLoader, batches: LogicalBatches) -> DataLoader:
    private = logical_loader(
        loader.dataset,
        batches,
        loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        persistent_workers=loader.persistent_workers,
        prefetch_factor=loader.prefetch_factor,
        multiprocessing_context=loader.multiprocessing_context,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout,
    )
    # By these Lightning knows a loader that can go on in the middle of an epoch.
    vars(private).update(state_dict=dict, load_state_dict=lambda state: None)
    return private


def _loss(output: Any) -> Any:
    return output.get("loss") if isinstance(output, Mapping) else output


def _check_loss(output: Any, criterion: Any, name: str) -> None:
    loss = _loss(output)
    if loss is None:
        raise Refused(
            "training_step returned no loss: that a batch is left out for what it "
            "holds is not covered by epsilon.",
            remedy="Return the loss of every batch.",
        )
    nothing = hasattr(loss, "is_nothing")
    if criterion is not None and not isinstance(loss, ClippedLoss) and not nothing:
        raise Refused(
            f"The loss of training_step was not made by self.{name}, which clips by "
            "record.",
            parameter="criterion",
            remedy=f"Compute it as self.{name}(outputs, targets); or take "
            'grad_sample_mode="hooks", to which any mean over the records will do.',
        )


def _nothing(optimizer: Any) -> torch.Tensor:
    """The loss of no records: few models run on B = 0."""

    def contribute(grad: torch.Tensor) -> None:
        if hasattr(optimizer, "take"):
            zeros = {p: upcast(torch.zeros_like(p)) for p in optimizer.params}
            optimizer.take(zeros, next(iter(zeros)).new_zeros(0))
            return
        for p in optimizer.params:
            p.grad_sample = p.new_zeros(0, *p.shape)

    loss = torch.zeros((), requires_grad=True)
    loss.register_hook(contribute)
    loss.is_nothing = True  # type: ignore[attr-defined]
    return loss


def _make_ordinary(hooks: Any, optimizer: Any) -> None:
    hooks.cleanup()
    for p in optimizer.params:
        p.grad = None
        if hasattr(p, "summed_grad"):
            del p.summed_grad


# -- what is refused ------------------------------------------------------------------


def _refusals(
    trainer: Any, pl_module: Any, criterion: Optional[str]
) -> Iterator[Refused]:
    strategy = type(trainer.strategy).__name__
    if strategy != "SingleDeviceStrategy":
        yield Refused(
            f"{strategy} with {trainer.world_size} processes: PrivacyCallback trains "
            "in one process on one device.",
            parameter="strategy",
            remedy="Give the Trainer devices=1, and no strategy.",
        )
    if trainer.gradient_clip_val:
        yield Refused(
            f"gradient_clip_val={trainer.gradient_clip_val} clips the sum of the "
            "batch before the noise.",
            parameter="gradient_clip_val",
            remedy="Leave it out: PrivacyCallback(max_grad_norm=...) clips each "
            "record's gradient.",
        )
    if trainer.accumulate_grad_batches != 1:
        yield Refused(
            f"accumulate_grad_batches={trainer.accumulate_grad_batches} scales losses "
            "before they are clipped, and batches are drawn one by one.",
            parameter="accumulate_grad_batches",
            remedy="Give the loader the whole batch_size, and PrivacyCallback "
            "max_physical_batch_size, what fits into memory.",
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        yield Refused(
            f"precision={trainer.precision!r} scales the loss, so that gradients would "
            "be clipped at another norm, and skips steps by what private data do.",
            parameter="precision",
            remedy='Use "bf16-mixed" or 32.',
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield Refused(
            "reload_dataloaders_every_n_epochs puts other loaders in the place of the "
            "one that draws.",
            parameter="reload_dataloaders_every_n_epochs",
            remedy="Leave it out.",
        )
    if criterion is not None and not callable(getattr(pl_module, criterion, None)):
        yield Refused(
            f"{type(pl_module).__name__} has no self.{criterion}, which would clip by "
            "record.",
            module=type(pl_module).__name__,
            parameter="criterion",
            remedy="Give it one, such as nn.CrossEntropyLoss(), and compute the loss "
            'by it; or take grad_sample_mode="hooks", to which any mean over the '
            "records will do.",
        )


def _data_refusals(loader: Any, optimizers: List[Any]) -> Iterator[Refused]:
    sampler = getattr(loader, "sampler", None)
    known = isinstance(sampler, (RandomSampler, SequentialSampler))
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not known:
        yield Refused(
            f"The training loader ({type(loader).__name__} with a sampler "
            f"{type(sampler).__name__}) can't be replaced by Poisson sampling.",
            parameter="train_dataloaders",
            remedy="Give one DataLoader with a batch_size, shuffled or not, of a data "
            "set with a length; not one that is private already (DPDataLoader, "
            "DPLightningDataModule).",
        )
    if len(optimizers) != 1:
        yield Refused(
            f"configure_optimizers gave {len(optimizers)} optimizers.",
            parameter="configure_optimizers",
            remedy="Train with one; for several call make_private yourself, once a "
            "model.",
        )
