"""
``PrivacyEngine``: Opacus's, with other ways to draw batches, correlated noise, secure
mode, and the modes of this package.

It overrides methods by inheritance. ``registry.py`` puts them into Opacus's own engine,
too, so they call nothing of an engine that Opacus's class does not have: users may give
attributes of theirs any other name.
"""

from __future__ import annotations

import inspect
import math
import warnings
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Literal,
    Optional,
    Sequence,
    Tuple,
    Union,
    overload,
)

import opacus
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from opacus.optimizers import DPOptimizer
from opacus.utils.adaptive_clipping import (
    DPLossFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from opacus_ext import checkpoints, misuse, peft
from opacus_ext.accountants.mechanisms import count_of, refuse_mixed
from opacus_ext.accountants.stock import in_place_of
from opacus_ext.accountants.whole import count_whole
from opacus_ext.budget import banded, noise_of_run
from opacus_ext.data.allocation import BallsInBins, Begun
from opacus_ext.data.choice import (
    check_drawn,
    check_sampling,
    chosen_sampling,
    cyclic,
    loader_of,
    stock_sampling,
)
from opacus_ext.data.draws import Draws, PoissonLoader, count_records
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling, plain
from opacus_ext.grad_sample.modes import common
from opacus_ext.grad_sample.modes.ghost import ClippedCriterion
from opacus_ext.ledger import ledger_of, note_trained, with_steps
from opacus_ext.loop import watch_loader, watch_steps
from opacus_ext.losses import PerSample
from opacus_ext.modes import find_mode, find_optimizer, name_of, refuse_unfit
from opacus_ext.optimizers import adaptive
from opacus_ext.optimizers.optimizer import ClippingOptimizer
from opacus_ext.refused import Refused
from opacus_ext.runs import add_run, count_steps, runs_of
from opacus_ext.secure import SecureSource
from opacus_ext.statement import privacy_statement
from opacus_ext.strategies import Strategy
from opacus_ext.strategies.stream import CorrelatedNoise
from opacus_ext.supported import ADAPTIVE_ENGINE, Run, kind_of, refuse
from opacus_ext.tables import in_a_line

if TYPE_CHECKING:
    from typing_extensions import Unpack

# What make_private returns. A wrapped model has the methods of the model as well.
Made = Tuple[Any, ClippingOptimizer, DataLoader]
MadeWithCriterion = Tuple[Any, ClippingOptimizer, Callable[..., Any], DataLoader]
WithCriterion = Literal["ghost", "ghost_bk", "scan", "auto"]
WithoutCriterion = Literal["hooks", "functorch", "ew"]

_DIVISOR = "expected_batch_size"
INDEPENDENT = "independent"  # noise of each step

# Opacus's own methods. registry.py puts those of the class below in their place, so
# that super() would come back to them.
_stock: Dict[str, Any] = dict(vars(opacus.PrivacyEngine))


class PrivacyEngine(opacus.PrivacyEngine):
    """
    Opacus's ``PrivacyEngine``, whose ``make_private`` shows the arguments that this
    package adds. Opacus's own takes them as well, and so does
    ``make_private_with_epsilon``.

    Args:
        accountant: "prv_bounds", whose epsilon is an upper bound, or "prv", "rdp" or
            "gdp" of Opacus
        secure_mode: True draws noise and batches by random numbers of the operating
            system, and noise without the traces of floating-point numbers
            (:mod:`opacus_ext.secure`)
    """

    save_checkpoint = checkpoints.save_checkpoint
    load_checkpoint = checkpoints.load_checkpoint
    privacy_statement = privacy_statement

    def __init__(self, *, accountant: str = "prv_bounds", secure_mode: bool = False):
        PrivacyEngine._begin()
        misuse.check_accountant(accountant)
        with warnings.catch_warnings():
            if secure_mode:  # Opacus would warn that it is off
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            _stock["__init__"](self, accountant=accountant)
        if secure_mode:  # Opacus's own needs torchcsprng
            self.secure_mode, self.secure_rng = True, SecureSource()

    def __repr__(self) -> str:
        return in_a_line(
            self,
            accountant=self.accountant.mechanism(),
            steps=count_of(self.accountant.history),
            secure_mode=self.secure_mode,
        )

    @overload
    def make_private(
        self,
        *,
        noise_multiplier: float,
        grad_sample_mode: WithCriterion,
        **kwargs: Unpack[misuse.Arguments],
    ) -> MadeWithCriterion: ...

    @overload
    def make_private(
        self,
        *,
        noise_multiplier: float,
        grad_sample_mode: WithoutCriterion = "hooks",
        **kwargs: Unpack[misuse.Arguments],
    ) -> Made: ...

    @overload
    def make_private(
        self,
        *,
        noise_multiplier: float,
        grad_sample_mode: str,
        **kwargs: Unpack[misuse.Arguments],
    ) -> Any: ...

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Optional[Callable] = nn.CrossEntropyLoss(),
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: Union[float, Sequence[float]],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: Any = "flat",
        noise_generator: Optional[torch.Generator] = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Strategy] = INDEPENDENT,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Sequence[str] = (),
        on_nonfinite: str = "drop",
        expected_batch_size: Optional[float] = None,
        public_records: Optional[int] = None,
        **kwargs: Any,
    ) -> Any:
        """
        Makes a model, its optimizer and its loader private, as Opacus's method does.
        Nothing is changed if it fails. Beside Opacus's arguments:

        Args:
            criterion: the loss function, for the modes that return one; None for a
                model that computes its own loss, as PerSample of
                :mod:`opacus_ext.losses`
            clipping: "flat", "per_layer", "automatic", "normalized", "adaptive", or one
                of :func:`~opacus_ext.register_clipping`
            grad_sample_mode: "hooks", "functorch", "ghost", "ghost_bk", "scan", "auto",
                or another of Opacus's; all give the same update
            wrap_model: True returns a wrapper in the model's place; False makes the
                model itself private and returns an object with ``cleanup()``
            sampling: how batches are drawn, in the place of ``poisson_sampling``:
                ``Poisson``, ``RandomAllocation``, ``TruncatedPoisson`` or another of
                :mod:`opacus_ext.data`
            noise: "independent" from step to step, or a strategy of correlated noise
                (:mod:`opacus_ext.strategies`), such as ``Banded``, which
                ``make_private_with_epsilon(noise="banded")`` chooses
            take: ``take(inputs, i)`` takes sample ``i`` out of the inputs of the model,
                as a batch of one, for inputs that are no tensors ``[B, ...]``; it
                raises IndexError when there is no such sample. ``inputs`` are the
                positional arguments, a tuple, or those by keyword, a dict.
                :mod:`opacus_ext.take` has some
            shared: names of inputs of the model that all samples share, where their
                first dim may be the batch size
            on_nonfinite: how a sample is treated whose gradient is not finite: "drop"
                (it counts as zero, with a warning) or "raise"
            expected_batch_size: divides the sum of gradients of a batch of all
                processes; by default it is computed from the number of records
            public_records: a number of records that does not depend on the data. Batch
                size, sampling rate and steps come from it, so that epsilon is for one
                record added or removed. If the true number is public, give that one
            kwargs: arguments of "adaptive" clipping, see
                :class:`~opacus_ext.optimizers.adaptive.AdaptiveBound`

        Returns:
            ``(model, optimizer, loader)``, or ``(model, optimizer, criterion, loader)``
            in the modes "ghost", "ghost_bk", "scan" and "auto".

        Raises:
            Refused: for what can't be trained exactly, or not with these arguments
        """
        PrivacyEngine._begin()
        misuse.check_parts(module, optimizer, data_loader)
        mode = find_mode(grad_sample_mode)
        if criterion is None and mode is not None and mode.criterion is not None:
            criterion = PerSample(loss_reduction)
        given: Dict[str, Any] = dict(
            optimizer=optimizer,
            criterion=criterion,
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            poisson_sampling=poisson_sampling,
            clipping=clipping,
            noise_generator=noise_generator,
            grad_sample_mode=grad_sample_mode,
            wrap_model=wrap_model,
            rand_on_empty=rand_on_empty,
            **kwargs,
        )
        module, by_hand = _model_in(module, **given)
        is_new = by_hand is not None
        is_new = is_new or not hasattr(module, "autograd_grad_sample_hooks")
        # First all that may be refused.
        parts: Any = dict(module=module, data_loader=data_loader, take=take)
        misuse.check_arguments(self, _ARGUMENTS, on_nonfinite, **parts, **given)
        run = _run_of(self, module, noise, grad_sample_mode, clipping)
        refuse(run, type(module).__name__)
        refuse_unfit(module, is_new, optimizer, grad_sample_mode, clipping)
        place = _place_of(module)
        divisor = plain(expected_batch_size)
        sampling = chosen_sampling(sampling, data_loader, public_records, divisor)
        chosen = sampling, _strategy_of(noise), module, data_loader
        sampling = _sampling(self, *chosen, **given)
        correlated = _correlated(_strategy_of(noise), sampling)
        loader = data_loader
        if sampling is not None:
            loader = loader_of(sampling, place, data_loader, batch_first, rand_on_empty)
            step = sampling.step_of(1.0, count_records(loader.dataset))
            refuse_mixed([*self.accountant.history, (*step, 1)])
        # Then the model is changed.
        with _put_back_if_it_fails(self, module, data_loader, by_hand, is_new):
            made = _stock["make_private"](
                self, module=module, data_loader=loader, **given
            )
            losses = criterion, loss_reduction
            made = _with_criterion(self, made, run, *losses, **kwargs)
            _refuse_others_model(self, module, made[0], grad_sample_mode)
            if is_new:
                common.set_options(module, take, shared, on_nonfinite)
            _attach(module, made, by_hand, on_nonfinite)
            _count(self, made, sampling, correlated, place, divisor, **given)
            watch_steps(self, module, made)
        if mode is not None:
            misuse.tell_of_samplers(self, module, grad_sample_mode)
        if poisson_sampling:
            misuse.tell_of_records(sampling)
            misuse.tell_of_accountant(self, sampling)
        return made

    @overload
    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        grad_sample_mode: WithCriterion,
        **kwargs: Unpack[misuse.Arguments],
    ) -> MadeWithCriterion: ...

    @overload
    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        grad_sample_mode: WithoutCriterion = "hooks",
        **kwargs: Unpack[misuse.Arguments],
    ) -> Made: ...

    @overload
    def make_private_with_epsilon(
        self,
        *,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        grad_sample_mode: str,
        **kwargs: Unpack[misuse.Arguments],
    ) -> Any: ...

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Strategy] = INDEPENDENT,
        **kwargs: Any,
    ) -> Any:
        """``make_private`` with the least noise for a budget."""
        misuse.check_parts(module, optimizer, data_loader)
        if "noise_multiplier" in kwargs:
            raise Refused(
                "make_private_with_epsilon chooses noise_multiplier for the budget.",
                parameter="noise_multiplier",
                remedy="Leave it out, or call make_private without the budget.",
            )
        kwargs.update(module=module, optimizer=optimizer, data_loader=data_loader)
        loader: Any = data_loader  # a data set may have no length
        misuse.check_number("target_epsilon", target_epsilon)
        misuse.check_number("epochs", epochs)
        misuse.check_loader(self, loader, kwargs.get("poisson_sampling", True))
        misuse.check_delta(self, target_delta, loader.dataset, "target_delta")
        budget: Any = dict(epsilon=target_epsilon, delta=target_delta, epochs=epochs)
        records = len(loader.dataset)
        if kwargs.get("public_records") is not None:
            numbers = kwargs.pop("public_records"), kwargs.pop(_DIVISOR, None)
            sampling = chosen_sampling(sampling, loader, *numbers)
        if sampling is not None:
            check_sampling(sampling, kwargs.get("poisson_sampling", True))
        if noise == "banded":
            poisson = sampling or Poisson(sample_rate=1 / len(loader))
            run = poisson, self.accountant, records, optimizer
            noise = banded(*run, **budget)
        drawn = sampling
        strategy = _strategy_of(noise)
        if strategy is not None:
            drawn = cyclic(sampling, strategy, loader)
        if drawn is None:
            # Of 3 epochs of 75 batches Opacus plans int(3 / (1 / 75)) = 224 steps.
            steps = math.ceil(epochs * len(loader))
            made = _stock["make_private_with_epsilon"](
                self,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                epochs=(steps + 0.5) / len(loader),
                **kwargs,
            )
        else:
            kwargs["noise_multiplier"] = noise_of_run(
                drawn, self.accountant, records, strategy=strategy, **budget
            )
            made = self.make_private(sampling=sampling, noise=noise, **kwargs)
        runs_of(self)[-1]["target_delta"] = target_delta
        return made

    def get_epsilon(self, delta: float) -> float:
        """
        The epsilon spent: never below 0, infinite without noise, and of all steps that
        were taken, also if the accountant was replaced since.
        """
        misuse.check_delta(self, delta, self.dataset)
        delta = float(delta)  # of numpy's, or a fraction
        missing = ledger_of(self).missing(self.accountant.history)
        accountant = in_place_of(with_steps(self.accountant, missing))
        refuse_mixed(accountant.history)  # Opacus's accountants know no relations
        if any(noise == 0 for noise, *_ in accountant.history):
            return math.inf  # some accountants raise an error
        epsilon = accountant.get_epsilon(delta) if len(accountant) else 0.0
        return max(float(epsilon), 0.0)  # of numpy's otherwise

    # -- what Opacus's make_private calls ----------------------------------------------

    def _prepare_model(
        self,
        module: nn.Module,
        *,
        batch_first: bool = True,
        max_grad_norm: Union[float, List[float]] = 1.0,
        loss_reduction: str = "mean",
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
    ) -> Any:
        options: Any = dict(batch_first=batch_first, loss_reduction=loss_reduction)
        mode = find_mode(grad_sample_mode)
        if mode is None:
            return _stock["_prepare_model"](
                self,
                module,
                max_grad_norm=max_grad_norm,
                grad_sample_mode=grad_sample_mode,
                wrap_model=wrap_model,
                **options,
            )
        self.validate(module=module, optimizer=None, data_loader=None)
        if not (wrap_model and isinstance(module, AbstractGradSampleModule)):
            if mode.criterion is not None:
                options["max_grad_norm"] = max_grad_norm
            return (mode.module if wrap_model else mode.hooks)(module, **options)
        known = {name: getattr(module, name) for name in options}
        if type(module) is not mode.module or known != options:
            raise Refused(
                f"Pre-existing {type(module).__name__} doesn't match new arguments: it "
                f"has {known}, and asked for are {options} and "
                f"grad_sample_mode={grad_sample_mode!r}.",
                parameter="module",
                remedy="Pass the model itself.",
            )
        return module

    def _prepare_optimizer(
        self,
        *,
        optimizer: Any,
        distributed: bool = False,
        clipping: Any = "flat",
        noise_generator: Optional[torch.Generator] = None,
        grad_sample_mode: str = "hooks",
        **kwargs: Any,
    ) -> Any:
        mode = find_mode(grad_sample_mode)
        if mode is None:
            if clipping == adaptive.ADAPTIVE:  # Opacus's optimizer has no defaults
                noise, size = kwargs["noise_multiplier"], kwargs["expected_batch_size"]
                std = max(size / 20, noise)
                kwargs = {**adaptive.DEFAULTS, "unclipped_num_std": std, **kwargs}
            return _stock["_prepare_optimizer"](
                self,
                optimizer=optimizer,
                distributed=distributed,
                clipping=clipping,
                noise_generator=noise_generator,
                grad_sample_mode=grad_sample_mode,
                **kwargs,
            )
        if isinstance(optimizer, DPOptimizer):
            optimizer = optimizer.original_optimizer
        adapts = clipping == adaptive.ADAPTIVE
        made = find_optimizer(mode, "flat" if adapts else clipping, distributed)(
            optimizer=optimizer,
            generator=self.secure_rng if self.secure_mode else noise_generator,
            secure_mode=self.secure_mode,
            **kwargs,
        )
        if adapts:
            given = {x: kwargs[x] for x in adaptive.DEFAULTS if x in kwargs}
            adaptive.AdaptiveBound(made, **given)
        return made

    def _prepare_data_loader(
        self, data_loader: DataLoader, *, poisson_sampling: bool, **kwargs: Any
    ) -> DataLoader:
        drawn = isinstance(getattr(data_loader, "batch_sampler", None), Draws)
        generator = getattr(data_loader, "generator", None)
        loader = _stock["_prepare_data_loader"](
            self, data_loader, poisson_sampling=False, **kwargs
        )
        if poisson_sampling and not drawn:
            loader = PoissonLoader.from_data_loader(
                data_loader, generator=self.secure_rng, **kwargs
            )
        if drawn and self.secure_mode:  # torch seeds worker processes by its own
            loader.generator = generator
        return loader

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        **kwargs: Any,
    ) -> Any:
        parts = dict(module=module, optimizer=optimizer, criterion=criterion)
        parts["loss_reduction"] = loss_reduction
        prepare = _stock["_prepare_criterion"]
        if isinstance(self, PrivacyEngineAdaptiveClipping):
            # A class that derives from both engines, this one first.
            prepare = PrivacyEngineAdaptiveClipping._prepare_criterion
        elif hasattr(module, "clipped_backward"):
            prepare = _clipped_criterion
        return prepare(self, **parts, **kwargs)

    # -- parts of make_private ---------------------------------------------------------

    @staticmethod
    def _begin() -> None:
        """Prepares transformers by what registry.py has put here; refuses if nothing"""
        raise Refused(
            "opacus_ext.unregister() has undone what opacus_ext.PrivacyEngine needs.",
            remedy="Call opacus_ext.register(), or take opacus.PrivacyEngine.",
        )


_ARGUMENTS = inspect.signature(PrivacyEngine.make_private).parameters


# -- the model -------------------------------------------------------------------------


def _model_in(
    module: nn.Module,
    *,
    grad_sample_mode: str,
    wrap_model: bool,
    batch_first: bool,
    loss_reduction: str,
    **others: Any,
) -> Tuple[nn.Module, Optional[common.ByHand]]:
    """Returns the model to train, and Opacus's wrapper of it that was made by hand."""
    module, mode = common.trained_of(module), find_mode(grad_sample_mode)
    if mode is None or not wrap_model:
        return module, None
    by_hand = common.ByHand.of(module, mode.module, batch_first, loss_reduction)
    if by_hand is None:
        return module, None
    if common.private_model_of(module) is not None:  # a second time
        return vars(module)["made"], None
    return by_hand.wrapper._module, by_hand


@contextmanager
def _put_back_if_it_fails(
    engine: opacus.PrivacyEngine,
    module: nn.Module,
    loader: DataLoader,
    by_hand: Optional[common.ByHand],
    is_new: bool,
) -> Iterator[None]:
    """Within it the model is made private; an error leaves all as it was before."""
    dataset, settings, runs = engine.dataset, {**vars(loader)}, len(runs_of(engine))
    try:
        if by_hand is not None:
            by_hand.remove()
        yield
    except BaseException:
        engine.dataset = dataset
        vars(loader).update(settings)
        del runs_of(engine)[runs:]
        if is_new:
            _clean(module)
        if by_hand is not None:
            by_hand.put_back()
        raise


def _clean(module: nn.Module) -> None:
    """Removes hooks and attributes that make_private has left."""
    for handle in getattr(module, "autograd_grad_sample_hooks", []):
        handle.remove()
    if hasattr(module, "autograd_grad_sample_hooks"):
        del module.autograd_grad_sample_hooks
    for p in module.parameters():
        for name in (*OPACUS_PARAM_MONKEYPATCH_ATTRS, "summed_grad"):
            if hasattr(p, name):
                delattr(p, name)


def _attach(
    module: nn.Module, made: Any, by_hand: Optional[common.ByHand], on_nonfinite: str
) -> None:
    """Lets what was made know of each other."""
    first, optimizer, *_, loader = made
    optimizer.on_nonfinite, optimizer.mode = on_nonfinite, first
    private = common.private_model_of(module)
    if private is not None:
        private.optimizer = optimizer
        handles: Any = module.autograd_grad_sample_hooks
        handles.extend(peft.attach_checks(module))
        watch_loader(loader, optimizer, private.inputs, private.passes)
    if by_hand is not None:
        by_hand.redirect(first)


def _place_of(module: nn.Module) -> Optional[Tuple[int, int]]:
    """
    Returns the number of this process and how many there are; None for a model of one
    process.
    """
    if not isinstance(module, (FSDPModule, DDP, DPDDP)):
        return None
    return dist.get_rank(), dist.get_world_size()


def _refuse_insecure(strategy: Optional[Strategy], poisson_sampling: bool) -> None:
    """Refuses what would draw noise or batches from another source in secure mode."""
    what = None
    if strategy is not None:
        what = "Correlated noise"
    elif not poisson_sampling:
        what = "poisson_sampling=False, which leaves the loader as it is,"
    if what is not None:
        raise Refused(
            f"{what} has no secure mode.",
            parameter="secure_mode",
            remedy="Leave it out, or train without secure mode.",
        )


# -- parts of make_private -------------------------------------------------------------


def _run_of(
    engine: opacus.PrivacyEngine,
    module: nn.Module,
    noise: Union[str, Strategy],
    mode: str,
    clipping: Any,
) -> Run:
    """Returns the words of supported.py for the arguments of ``make_private``."""
    kind = INDEPENDENT if noise == INDEPENDENT else "banded"
    run = Run(
        model=kind_of(module),
        mode=name_of(mode),
        clipping=clipping,
        noise="secure" if engine.secure_mode else kind,
    )
    adapts = isinstance(engine, PrivacyEngineAdaptiveClipping)
    return run._replace(front_end=ADAPTIVE_ENGINE) if adapts else run


def _clipped_criterion(
    engine: opacus.PrivacyEngine,
    module: Any,
    optimizer: Any,
    criterion: Any,
    loss_reduction: str,
    **kwargs: Any,
) -> ClippedCriterion:
    """Makes the criterion of our modes."""
    return ClippedCriterion(module, optimizer, criterion, loss_reduction)


def _strategy_of(noise: Union[str, Strategy]) -> Optional[Strategy]:
    """Returns the strategy of correlated noise; None if it is independent."""
    if isinstance(noise, Strategy):
        return noise
    if noise == INDEPENDENT:
        return None
    raise Refused(
        f"noise={noise!r} is neither {INDEPENDENT!r} nor a strategy of correlated "
        "noise.",
        parameter="noise",
        remedy="Give opacus_ext.optimizers.Banded(bands, steps) or another one, or "
        'leave it to make_private_with_epsilon(noise="banded") to choose one.',
    )


def _correlated(
    strategy: Optional[Strategy], sampling: Optional[Sampling]
) -> Optional[CorrelatedNoise]:
    """Makes the noise that the optimizer is to add; None if it is independent."""
    if strategy is None:
        return None
    assert isinstance(sampling, (CyclicPoisson, BallsInBins))
    return CorrelatedNoise(strategy, sampling.separation)


def _sampling(
    engine: opacus.PrivacyEngine,
    sampling: Optional[Sampling],
    strategy: Optional[Strategy],
    module: nn.Module,
    data_loader: DataLoader,
    *,
    poisson_sampling: bool,
    **others: Any,
) -> Optional[Sampling]:
    """Chooses how batches are drawn; None for Opacus's own loader, or the given."""
    if strategy is not None:
        sampling = cyclic(sampling, strategy, data_loader)
    if engine.secure_mode:
        _refuse_insecure(strategy, poisson_sampling)
        sampling = sampling or stock_sampling(data_loader)
    if sampling is not None:
        check_sampling(sampling, poisson_sampling)
        return sampling
    check_drawn(data_loader, poisson_sampling)
    # Opacus's own loader leaves empty batches out, so that processes get out of
    # step, and draws equal masks where they are seeded alike.
    if _place_of(module) is not None and poisson_sampling:
        return Poisson(sample_rate=1 / len(data_loader))
    return None


def _refuse_others_model(
    engine: opacus.PrivacyEngine, module: nn.Module, first: Any, mode: str
) -> None:
    """Refuses what a subclass has made of the model without our method."""
    if find_mode(mode) is None or common.private_model_of(module) is not None:
        return
    raise Refused(
        f"_prepare_model of {type(engine).__name__} has made a "
        f"{type(first).__name__} of Opacus, and grad_sample_mode={mode!r} is of "
        "opacus_ext.",
        module=type(module).__name__,
        remedy="Let it call super()._prepare_model, or train with what it makes "
        "without make_private.",
    )


def _with_criterion(
    engine: opacus.PrivacyEngine,
    made: Any,
    run: Run,
    criterion: Any,
    loss_reduction: str,
    **kwargs: Any,
) -> Any:
    """Adds our criterion where Opacus has none, or one that clips wrongly."""
    mode = find_mode(run.mode)
    if mode is None or mode.criterion is None:
        return made
    first, optimizer, *prepared, loader = made
    prepared = prepared or [
        engine._prepare_criterion(
            module=first,
            optimizer=optimizer,
            criterion=criterion,
            loss_reduction=loss_reduction,
            **kwargs,
        )
    ]
    if isinstance(prepared[0], DPLossFastGradientAdaptiveClipping):
        refuse(run._replace(front_end=ADAPTIVE_ENGINE), type(first).__name__)
        prepared = [_adapting(engine, prepared[0])]
    return first, optimizer, *prepared, loader


def _adapting(
    engine: opacus.PrivacyEngine, stock: DPLossFastGradientAdaptiveClipping
) -> ClippedCriterion:
    """Makes the criterion, and lets the bound adapt, as Opacus's criterion says."""
    optimizer: Any = stock.optimizer
    if optimizer.adaptive is None:  # clipping="adaptive" has one already
        adaptive.AdaptiveBound(
            optimizer,
            target_unclipped_quantile=stock.target_unclipped_quantile,
            clipbound_learning_rate=stock.clipbound_learning_rate,
            min_clipbound=stock.min_clipbound,
            max_clipbound=stock.max_clipbound,
        )
    parts = stock.module, optimizer, stock.criterion, stock.loss_reduction
    return _clipped_criterion(engine, *parts)


def _count(
    engine: opacus.PrivacyEngine,
    made: Any,
    sampling: Optional[Sampling],
    correlated: Optional[CorrelatedNoise],
    place: Optional[Tuple[int, int]],
    divisor: Optional[float],
    **given: Any,
) -> None:
    """Lets each step be counted, and keeps the settings for statements."""
    _, optimizer, *_, loader = made
    if sampling is None:
        count_whole(optimizer, engine.accountant)
    else:
        records = count_records(loader.dataset)
        divisor = divisor or sampling.divisor(records)
        # In the place of the hook for Poisson sampling.
        optimizer.step_hook = sampling.hook(engine.accountant, records)
        if sampling.allocates:
            draws = loader.batch_sampler
            # Of an epoch that is under way, batches may still come.
            begun = Begun(lambda: draws.begun, max(draws.begun - 1, 0))
            optimizer.begun_epochs = draws.begun_epochs = begun
    if divisor is not None:
        optimizer.expected_batch_size = divisor
        if place is not None:  # of one process
            optimizer.expected_batch_size /= place[1]
    if correlated is not None:
        optimizer.correlated = correlated
        loader.batch_sampler.taken = lambda: correlated.taken
        loader.batch_sampler.keeper = correlated
    optimizer.run = add_run(engine, sampling, made, correlated, divisor, **given)
    groups = optimizer.param_groups
    note_trained(engine, (p for group in groups for p in group["params"]))
    if hasattr(optimizer, "spent"):  # not one of Opacus's own
        count_steps(engine, optimizer, sampling)
    ledger_of(engine).made(engine.accountant, optimizer, loader.batch_sampler)
