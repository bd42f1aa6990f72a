"""
The methods of ``PrivacyEngine`` that this package extends by ways to draw batches,
correlated noise and secure mode. ``registry.py`` puts them in the place of Opacus's.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple, Union

import opacus
import opacus.grad_sample
import opacus.optimizers
import torch
import torch.distributed as dist
from opacus.accountants.accountant import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader

from opacus_ext.accountants import calibration, noise_left
from opacus_ext.accountants.prv import PRVBoundsAccountant
from opacus_ext.accountants.whole import count_whole, record_whole
from opacus_ext.data.draws import count_records
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling
from opacus_ext.ledger import ledger_of, note_trained
from opacus_ext.misuse import check_delta, check_loader, check_number, checked_epsilon
from opacus_ext.optimizers.banded import Banded, BandedNoise, choose_bands
from opacus_ext.refused import Refused
from opacus_ext.runs import add_run, runs_of
from opacus_ext.secure import SecureSource

INDEPENDENT = "independent"  # noise of each step


def with_secure_source(init: Callable) -> Callable:
    """``PrivacyEngine.__init__``, whose secure mode needs no torchcsprng."""

    @functools.wraps(init)
    def make(
        self: opacus.PrivacyEngine, *, secure_mode: bool = False, **kwargs: Any
    ) -> None:
        """``PrivacyEngine.__init__``, with this package's source of random numbers."""
        with warnings.catch_warnings():
            if secure_mode:  # Opacus would warn that it is off
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            init(self, secure_mode=False, **kwargs)
        if secure_mode:
            self.secure_mode, self.secure_rng = True, SecureSource()

    return make


def with_sampling(make_private: Callable) -> Callable:
    """``PrivacyEngine.make_private`` with the arguments ``sampling`` and ``noise``."""

    @functools.wraps(make_private)
    def make(
        self: opacus.PrivacyEngine,
        *,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Banded] = INDEPENDENT,
        **kwargs: Any,
    ) -> Any:
        """Makes a model private, and keeps the settings for statements."""
        correlated, place = None, _place_of(kwargs["module"])
        if noise != INDEPENDENT:
            correlated = _correlated(self, noise, **kwargs)
            sampling = _cyclic(sampling, correlated.bands, kwargs["data_loader"])
        if self.secure_mode:
            _refuse_insecure(self, noise, **kwargs)
            sampling = sampling or _stock_sampling(kwargs["data_loader"])
        elif sampling is None:
            _check_drawn(**kwargs)
            # Opacus's own loader leaves empty batches out, so that processes get out of
            # step, and draws equal masks where they are seeded alike.
            if place is not None and kwargs.get("poisson_sampling", True):
                sampling = Poisson(sample_rate=1 / len(kwargs["data_loader"]))
        own = make_private
        if place is not None:
            own = functools.partial(_of_several_processes, make_private)
        if sampling is None:
            made = own(self, **kwargs)
            count_whole(made[1], self.accountant)
        else:
            made = _with_drawn_batches(self, own, sampling, place, **kwargs)
        if correlated is not None:
            made[1].correlated = correlated
            made[-1].batch_sampler.taken = lambda: correlated.taken
        bands = 1 if correlated is None else correlated.bands
        made[1].run = add_run(self, sampling, made, bands, **kwargs)
        groups = made[1].param_groups
        note_trained(self, (p for group in groups for p in group["params"]))
        if hasattr(made[1], "spent"):  # not one of Opacus's own
            _count_steps(self, made[1])
        ledger_of(self).made(self.accountant, made[1], made[-1].batch_sampler)
        return made

    return make


# -- steps -----------------------------------------------------------------------------

_COUNTED = "It is counted as one at rate {rate:g}, so that epsilon grows faster."
_NOT_COUNTED = (
    'The accountant "gdp" knows one rate, and can\'t count that: its epsilon is too '
    "small."
)


def _count_steps(engine: opacus.PrivacyEngine, optimizer: Any) -> None:
    """Counts the steps of an optimizer by the draws that they spend, in the ledger."""
    hook, accountant, ledger = optimizer.step_hook, engine.accountant, ledger_of(engine)

    def count(dp_optimizer: Any) -> None:
        spent, before = dp_optimizer.spent, accountant.history[-1:]
        if spent is None or spent.rate is None:
            pass
        elif accountant.mechanism() == "gdp":
            dp_optimizer.spent = spent._replace(reason=f"{spent.reason} {_NOT_COUNTED}")
        else:
            told = f"{spent.reason} {_COUNTED.format(rate=spent.rate)}"
            dp_optimizer.spent = spent._replace(reason=told)
            record_whole(accountant, lambda: add(dp_optimizer, spent))
            return
        hook(dp_optimizer)
        if accountant.history[-1:] != before:
            ledger.add(*accountant.history[-1][:2])

    def add(dp_optimizer: Any, spent: Any) -> None:
        noise = float(dp_optimizer.noise_multiplier)
        rate = min(1.0, spent.rate * dp_optimizer.accumulated_iterations)
        for _ in range(spent.steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
            ledger.add(noise, rate)

    optimizer.count, optimizer.ledger, optimizer.step_hook = count, ledger, None


# -- correlated noise and secure mode --------------------------------------------------


def _correlated(
    engine: opacus.PrivacyEngine, noise: Union[str, Banded], **kwargs: Any
) -> BandedNoise:
    """Makes the noise that the optimizer is to add."""
    if not isinstance(noise, Banded):
        raise Refused(
            f"noise={noise!r} is neither {INDEPENDENT!r} nor a Banded.",
            parameter="noise",
            remedy="Give opacus_ext.optimizers.Banded(bands, steps), or leave it to "
            'make_private_with_epsilon(noise="banded") to choose one.',
        )
    if isinstance(kwargs["module"], FSDPModule):
        raise Refused(
            "Correlated noise is not drawn for models sharded by fully_shard.",
            parameter="noise",
            remedy="Leave noise out.",
        )
    _refuse_noise_of_opacus(engine, "noise", **kwargs)
    return BandedNoise(noise)


def _refuse_noise_of_opacus(
    engine: opacus.PrivacyEngine,
    parameter: str,
    clipping: Any = "flat",
    grad_sample_mode: str = "hooks",
    **kwargs: Any,
) -> None:
    """Refuses an optimizer that is not one of this package's."""
    opacus.grad_sample.get_gsm_class(grad_sample_mode)  # refuses unknown modes
    made = opacus.optimizers.get_optimizer_class(clipping, False, grad_sample_mode)
    if has_own_criterion(engine) or not hasattr(made, "correlated"):
        raise Refused(
            f"grad_sample_mode={grad_sample_mode!r} of {type(engine).__name__} with "
            f"clipping={clipping!r} draws its noise in Opacus, where it is independent "
            "and not secure.",
            parameter=parameter,
            remedy='Take grad_sample_mode="auto" or "hooks" of opacus.PrivacyEngine, '
            'and another clipping than "adaptive".',
        )


def _refuse_insecure(
    engine: opacus.PrivacyEngine,
    noise: Union[str, Banded],
    *,
    module: nn.Module,
    data_loader: DataLoader,
    poisson_sampling: bool = True,
    **kwargs: Any,
) -> None:
    """Refuses what would draw noise or batches from another source in secure mode."""
    if _place_of(module) is not None:
        what = f"{type(module).__name__} of several processes"
    elif noise != INDEPENDENT:
        what = "Correlated noise"
    elif not poisson_sampling:
        what = "poisson_sampling=False, which leaves the loader as it is,"
    else:
        _refuse_noise_of_opacus(engine, "secure_mode", **kwargs)
        return check_loader(engine, data_loader, poisson_sampling)
    raise Refused(
        f"{what} has no secure mode.",
        parameter="secure_mode",
        remedy="Leave it out, or train without secure mode.",
    )


def has_own_criterion(engine: opacus.PrivacyEngine) -> bool:
    """Whether it is a subclass with a criterion of its own (adaptive clipping)."""
    own = type(engine)._prepare_criterion
    return own is not opacus.PrivacyEngine._prepare_criterion


# -- batches ---------------------------------------------------------------------------


def _cyclic(
    sampling: Optional[Sampling], bands: int, loader: DataLoader
) -> CyclicPoisson:
    """The sampling that correlated noise needs, of the same expected batch size."""
    if sampling is None:
        return CyclicPoisson(bands=bands, sample_rate=1 / len(loader))
    if type(sampling) is Poisson:
        return CyclicPoisson(bands=bands, **vars(sampling))
    if not isinstance(sampling, CyclicPoisson) or sampling.bands != bands:
        raise Refused(
            f"Noise of {bands} bands needs CyclicPoisson of as many parts, not "
            f"{sampling}.",
            parameter="sampling",
            remedy="Leave sampling out.",
        )
    return sampling


def _stock_sampling(loader: DataLoader) -> Poisson:
    """Opacus's own sampling, by a loader that draws from any generator."""
    sampling = Poisson(sample_rate=1 / len(loader))
    if getattr(loader.batch_sampler, "sampling", None) != sampling:
        _check_drawn(data_loader=loader)
    return sampling


def _check_drawn(
    *, data_loader: Any, poisson_sampling: bool = True, **kwargs: Any
) -> None:
    """Refuses a loader that draws by chance in another way than is accounted for."""
    sampler = getattr(data_loader, "batch_sampler", None)
    if not isinstance(sampler, UniformWithReplacementSampler):
        return
    sampling, rate = getattr(sampler, "sampling", None), sampler.sample_rate
    steps = len(sampler)
    if sampling is not None:
        raise Refused(
            f"The loader draws by {sampling}, and would be accounted for as Poisson "
            f"sampling with probability 1/{steps}.",
            parameter="sampling",
            remedy="Give make_private the same sampling=... as before.",
        )
    if not poisson_sampling and rate * steps > 1 + 1e-6:
        raise Refused(
            f"The loader draws with probability {rate:g} in each of {steps} steps, and "
            f"poisson_sampling=False would have it accounted for as 1/{steps}.",
            parameter="sampling",
            remedy="Leave poisson_sampling out, and give "
            f"sampling=opacus_ext.data.Poisson(sample_rate={rate:g}, steps={steps}).",
        )


def _with_drawn_batches(
    engine: opacus.PrivacyEngine,
    make_private: Callable,
    sampling: Sampling,
    place: Optional[Tuple[int, int]],
    *,
    data_loader: DataLoader,
    poisson_sampling: bool = True,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    **kwargs: Any,
) -> Any:
    """``make_private`` with a loader that draws by ``sampling``."""
    module = kwargs["module"]
    _check_sampling(sampling, module, poisson_sampling)
    records = count_records(data_loader.dataset)
    sampling.check(records)
    loader, sampler = data_loader, getattr(data_loader, "batch_sampler", None)
    if place is not None or getattr(sampler, "sampling", None) != sampling:
        loader = sampling.loader(
            data_loader,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            place=place,
        )

    def prepare(stock: DataLoader, **options: Any) -> DataLoader:
        """Opacus's method, for the loader that draws."""
        options["poisson_sampling"] = False  # the loader does it already
        return type(engine)._prepare_data_loader(engine, loader, **options)

    engine._prepare_data_loader = prepare
    try:
        made = make_private(
            engine, data_loader=data_loader, batch_first=batch_first, **kwargs
        )
    finally:
        del engine._prepare_data_loader
    optimizer, loader = made[1], made[-1]
    if engine.secure_mode:  # worker processes are seeded by a torch.Generator
        loader.generator = data_loader.generator
    optimizer.expected_batch_size = sampling.divisor(records)
    if place is not None:  # of one process
        optimizer.expected_batch_size /= place[1]
    # In the place of the hook for Poisson sampling.
    optimizer.step_hook = sampling.hook(engine.accountant, records)
    return made


def _place_of(module: nn.Module) -> Optional[Tuple[int, int]]:
    """
    Returns the number of this process and how many there are; None for a model of one
    process.
    """
    if not isinstance(module, (FSDPModule, DDP, DPDDP)):
        return None
    return dist.get_rank(), dist.get_world_size()


def _of_several_processes(
    make_private: Callable, engine: opacus.PrivacyEngine, **kwargs: Any
) -> Any:
    """``make_private`` of a model of several processes."""

    def prepare(**options: Any) -> Any:
        """Opacus's method, which does not know torch's own wrappers."""
        options["distributed"] = True
        return type(engine)._prepare_optimizer(engine, **options)

    engine._prepare_optimizer = prepare
    try:
        return make_private(engine, **kwargs)
    finally:
        del engine._prepare_optimizer


def _check_sampling(sampling: Any, module: nn.Module, poisson_sampling: bool) -> None:
    """Refuses what does not draw the batches of this model."""
    if not isinstance(sampling, Sampling):
        raise Refused(
            f"sampling={sampling!r} is no way to draw batches.",
            parameter="sampling",
            remedy="Give opacus_ext.data.Poisson(...).",
        )
    if not poisson_sampling:
        raise Refused(
            f"poisson_sampling=False leaves the loader as it is, and {sampling} "
            "replaces it.",
            parameter="poisson_sampling",
            remedy="Leave one of them out.",
        )


# -- noise for a budget ----------------------------------------------------------------


def with_epsilon(make_private_with_epsilon: Callable) -> Callable:
    """``PrivacyEngine.make_private_with_epsilon`` with ``sampling`` and ``noise``."""

    @functools.wraps(make_private_with_epsilon)
    def make(
        self: opacus.PrivacyEngine,
        *,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Banded] = INDEPENDENT,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
        **kwargs: Any,
    ) -> Any:
        """``make_private`` with the least noise for the budget."""
        loader = kwargs["data_loader"]
        check_number("target_epsilon", target_epsilon)
        check_number("epochs", epochs)
        check_loader(self, loader, kwargs.get("poisson_sampling", True))
        check_delta(self, target_delta, loader.dataset, "target_delta")
        budget: Any = dict(epsilon=target_epsilon, delta=target_delta, epochs=epochs)
        if noise == "banded":
            noise = banded(
                sampling or Poisson(sample_rate=1 / len(loader)),
                self.accountant,
                count_records(loader.dataset),
                kwargs["optimizer"],
                **budget,
            )
        if isinstance(noise, Banded):
            sampling = _cyclic(sampling, noise.bands, loader)
        if sampling is None:
            made = make_private_with_epsilon(
                self,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                epochs=epochs,
                **kwargs,
            )
        else:
            records = count_records(loader.dataset)
            kwargs["noise_multiplier"] = noise_of_run(
                sampling, self.accountant, records, **budget
            )
            made = self.make_private(sampling=sampling, noise=noise, **kwargs)
        runs_of(self)[-1]["target_delta"] = target_delta
        return made

    return make


def noise_of_run(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
) -> float:
    """
    The noise multiplier of a run on so many records, for a budget of which the
    accountant's history is a part.

    Raises:
        Refused: if nothing is left of the budget
    """
    sampling.check(records)
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)

    def account(trial: IAccountant, noise_multiplier: float) -> None:
        """Adds the run to a trial."""
        sampling.account(trial, records, noise_multiplier, steps)

    return noise_left(accountant, epsilon, delta, record=account)


def banded(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    optimizer: torch.optim.Optimizer,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
) -> Banded:
    """
    The best correlated noise for a run, see :func:`choose_bands`. The arguments are
    those of :func:`noise_of_run` for the same run with Poisson sampling; the optimizer
    tells its momentum, or the first beta of Adam and its like.
    """
    groups = optimizer.param_groups
    found = [g.get("momentum", g.get("betas", (0.0,))[0]) for g in groups]
    momentum = max((float(m) for m in found if 0 <= m < 1), default=0.0)
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)
    rate = sampling.rate(records)
    if len(accountant):  # the epsilon that a run alone may spend
        if not isinstance(accountant, PRVBoundsAccountant):  # a quick one
            accountant, before = PRVBoundsAccountant(), accountant.history
            accountant.history = list(before)
        noise = noise_of_run(
            sampling, accountant, records, epsilon=epsilon, delta=delta, epochs=epochs
        )
        alone = PRVBoundsAccountant()
        alone.history = [(noise, rate, steps)]
        epsilon = alone.get_epsilon(delta)
    noises = functools.partial(calibration.noise_multiplier, epsilon, delta)
    return choose_bands(noises, rate, steps, momentum)


#: Methods of ``PrivacyEngine`` and what wraps them.
WRAPPERS: Dict[str, Callable[[Callable], Callable]] = {
    "__init__": with_secure_source,
    "make_private": with_sampling,
    "make_private_with_epsilon": with_epsilon,
    "get_epsilon": checked_epsilon,
}


# -- the engine with all arguments in its signature ------------------------------------


class PrivacyEngine(opacus.PrivacyEngine):
    """
    Opacus's ``PrivacyEngine``, whose ``make_private`` shows the arguments that this
    package adds. Opacus's own takes them as well, and so does
    ``make_private_with_epsilon``.

    Args:
        accountant: "prv", "rdp", "gdp" or "prv_bounds"
        secure_mode: True draws noise and batches by random numbers of the operating
            system, and noise without the traces of floating-point numbers
            (:mod:`opacus_ext.secure`)
    """

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable = nn.CrossEntropyLoss(),
        data_loader: DataLoader,
        noise_multiplier: float,
        max_grad_norm: Union[float, List[float]],
        batch_first: bool = True,
        loss_reduction: str = "mean",
        poisson_sampling: bool = True,
        clipping: Any = "flat",
        noise_generator: Optional[torch.Generator] = None,
        grad_sample_mode: str = "hooks",
        wrap_model: bool = True,
        rand_on_empty: bool = False,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Banded] = INDEPENDENT,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Sequence[str] = (),
        on_nonfinite: str = "drop",
        **kwargs: Any,
    ) -> Any:
        """
        Makes a model, its optimizer and its loader private, as Opacus's method does.
        Nothing is changed if it fails. Beside Opacus's arguments:

        Args:
            criterion: the loss function, for the modes that return one
            clipping: "flat", "per_layer", "automatic", "normalized", "adaptive", or one
                of :func:`~opacus_ext.register_clipping`
            grad_sample_mode: "hooks", "functorch", "ghost", "ghost_bk", "scan", "auto",
                or another of Opacus's; all give the same update
            wrap_model: True returns a wrapper in the model's place; False makes the
                model itself private and returns an object with ``cleanup()``
            sampling: how batches are drawn, in the place of ``poisson_sampling``:
                ``Poisson`` or ``CyclicPoisson`` of :mod:`opacus_ext.data`
            noise: "independent" from step to step, or
                :class:`~opacus_ext.optimizers.banded.Banded`, correlated noise, which
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
            kwargs: arguments of the optimizer of "adaptive" clipping

        Returns:
            ``(model, optimizer, loader)``, or ``(model, optimizer, criterion, loader)``
            in the modes "ghost", "ghost_bk", "scan" and "auto".

        Raises:
            Refused: for what can't be trained exactly, or not with these arguments
        """
        if not hasattr(opacus.PrivacyEngine, "privacy_statement"):
            raise Refused(
                "opacus_ext.unregister() has undone what opacus_ext.PrivacyEngine "
                "needs.",
                remedy="Call opacus_ext.register(), or take opacus.PrivacyEngine.",
            )
        given = {**locals(), **kwargs}
        for name in ("self", "kwargs", "__class__"):
            del given[name]
        return super().make_private(**given)
