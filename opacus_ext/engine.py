"""
The methods of ``PrivacyEngine`` that this package extends by ways to draw batches,
correlated noise and secure mode. ``registry.py`` puts them in the place of Opacus's.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from typing import Any, Callable, Dict, List, Optional, Sequence, Union

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

from opacus_ext.accountants import calibration
from opacus_ext.accountants.budget import least_noise
from opacus_ext.accountants.prv import PRVBoundsAccountant
from opacus_ext.accountants.whole import count_whole
from opacus_ext.data.draws import Draws, count_records
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling
from opacus_ext.misuse import (
    check_delta,
    check_loader,
    check_number,
    checked_epsilon,
)
from opacus_ext.optimizers.banded import Banded, BandedNoise, coefficients, error
from opacus_ext.refused import Refused
from opacus_ext.runs import add_run, runs_of
from opacus_ext.secure import SecureSource

INDEPENDENT = "independent"  # noise of each step


_DISTRIBUTED = (DPDDP, DDP, FSDPModule)  # models of several processes


def with_secure_source(init: Callable) -> Callable:
    """``PrivacyEngine.__init__``, whose secure mode needs no torchcsprng."""

    @functools.wraps(init)
    def make(
        self: opacus.PrivacyEngine,
        *,
        accountant: str = "prv",
        secure_mode: bool = False,
    ) -> None:
        with warnings.catch_warnings():
            if secure_mode:  # Opacus would warn that it is off
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            init(self, accountant=accountant, secure_mode=False)
        if secure_mode:
            self.secure_mode, self.secure_rng = True, SecureSource()

    return make


def with_sampling(make_private: Callable) -> Callable:
    """
    ``PrivacyEngine.make_private`` with the arguments ``sampling`` and ``noise``. It
    records what it was given.
    """

    @functools.wraps(make_private)
    def make(
        self: opacus.PrivacyEngine,
        *,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Banded] = INDEPENDENT,
        **kwargs: Any,
    ) -> Any:
        correlated = None
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
            if isinstance(kwargs["module"], _DISTRIBUTED):
                if kwargs.get("poisson_sampling", True):
                    sampling = Poisson(sample_rate=1 / len(kwargs["data_loader"]))
        if sampling is None:
            made = make_private(self, **kwargs)
            count_whole(made[1], self.accountant)
        else:
            made = _with_drawn_batches(self, make_private, sampling, **kwargs)
        if correlated is not None:
            made[1].correlated = correlated
            made[-1].batch_sampler.taken = lambda: correlated.taken
        bands = 1 if correlated is None else correlated.bands
        add_run(self, sampling, made, bands, **kwargs)
        return made

    return make


# -- correlated noise and secure mode --------------------------------------------------


def _correlated(
    engine: opacus.PrivacyEngine,
    noise: Union[str, Banded],
    *,
    clipping: Any = "flat",
    grad_sample_mode: str = "hooks",
    **kwargs: Any,
) -> BandedNoise:
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
    if clipping == "adaptive":
        raise Refused(
            "Adaptive clipping changes the noise from step to step; correlated noise "
            "must be the same at every step.",
            parameter="noise",
            remedy="Choose another clipping.",
        )
    if not _adds_own_noise(engine, clipping, grad_sample_mode):
        raise Refused(
            f"grad_sample_mode={grad_sample_mode!r} of {type(engine).__name__} adds "
            "independent noise.",
            parameter="noise",
            remedy='Take grad_sample_mode="ghost_bk" or "hooks" of '
            'opacus.PrivacyEngine, or noise="independent".',
        )
    return BandedNoise(noise)


def _adds_own_noise(engine: opacus.PrivacyEngine, clipping: Any, mode: str) -> bool:
    """Returns True if an optimizer of this package adds the noise."""
    own = hasattr(type(engine)._prepare_criterion, "_opacus_ext")
    made = opacus.optimizers.get_optimizer_class(clipping, False, mode)
    return own and hasattr(made, "correlated")


def _refuse_insecure(
    engine: opacus.PrivacyEngine,
    noise: Union[str, Banded],
    *,
    module: nn.Module,
    data_loader: DataLoader,
    poisson_sampling: bool = True,
    clipping: Any = "flat",
    grad_sample_mode: str = "hooks",
    **kwargs: Any,
) -> None:
    """Refuses what would draw noise or batches from another source in secure mode."""
    opacus.grad_sample.get_gsm_class(grad_sample_mode)  # refuses unknown modes
    own = _adds_own_noise(engine, clipping, grad_sample_mode)
    cases = (
        (
            isinstance(module, _DISTRIBUTED),
            "secure_mode",
            f"{type(module).__name__} of several processes has no secure mode.",
            "Train in one process, or without secure mode.",
        ),
        (
            noise != INDEPENDENT,
            "noise",
            "Correlated noise is not drawn in secure mode.",
            f"Take noise={INDEPENDENT!r}, or train without secure mode.",
        ),
        (
            not own,
            "secure_mode",
            f"grad_sample_mode={grad_sample_mode!r} of {type(engine).__name__} with "
            f"clipping={clipping!r} draws its noise in Opacus, which is not secure.",
            'Take grad_sample_mode="auto" or "hooks" of opacus.PrivacyEngine, and '
            'another clipping than "adaptive".',
        ),
        (
            not poisson_sampling,
            "poisson_sampling",
            "poisson_sampling=False leaves the loader to draw batches as it does, "
            "which is not secure.",
            "Leave it out, or give sampling=opacus_ext.data.FixedSize(...) for batches "
            "of one size.",
        ),
    )
    for wrong, parameter, reason, remedy in cases:
        if wrong:
            raise Refused(reason, parameter=parameter, remedy=remedy)
    check_loader(engine, data_loader, poisson_sampling)


# -- batches ---------------------------------------------------------------------------


def _cyclic(
    sampling: Optional[Sampling], bands: int, loader: DataLoader
) -> CyclicPoisson:
    """The sampling that correlated noise needs, of the same expected batch size."""
    if isinstance(sampling, CyclicPoisson):
        if sampling.bands != bands:
            raise Refused(
                f"The sampling has {sampling.bands} parts and the noise {bands} bands.",
                parameter="sampling",
                remedy="Give them the same number, or leave sampling out.",
            )
        return sampling
    if sampling is None:
        return CyclicPoisson(bands=bands, sample_rate=1 / len(loader))
    if type(sampling) is not Poisson:
        raise Refused(
            f"Correlated noise is accounted for with CyclicPoisson, not with "
            f"{type(sampling).__name__}.",
            parameter="sampling",
            remedy="Leave sampling out.",
        )
    return CyclicPoisson(bands=bands, **vars(sampling))


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
    *,
    data_loader: DataLoader,
    poisson_sampling: bool = True,
    batch_first: bool = True,
    rand_on_empty: bool = False,
    **kwargs: Any,
) -> Any:
    """
    ``make_private`` with a loader that draws by ``sampling``.

    Raises:
        Refused: before anything is changed, as :meth:`Sampling.check`; for DDP and
            FSDP; with ``poisson_sampling=False``
    """
    module = kwargs["module"]
    _check_sampling(sampling, module, poisson_sampling)
    distributed = isinstance(module, _DISTRIBUTED)
    records = count_records(data_loader.dataset)
    sampling.check(records, engine.accountant)
    sampler = getattr(data_loader, "batch_sampler", None)
    drawn = isinstance(sampler, Draws) and sampler.sampling == sampling
    if drawn and not distributed:
        loader = data_loader
    else:
        loader = sampling.loader(
            data_loader,
            batch_first=batch_first,
            rand_on_empty=rand_on_empty,
            distributed=distributed,
        )

    def prepare(stock: DataLoader, **options: Any) -> DataLoader:
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
    if distributed:  # of one process
        optimizer.expected_batch_size /= dist.get_world_size()
    # In the place of the hook for Poisson sampling.
    optimizer.step_hook = sampling.hook(engine.accountant, records)
    return made


def _check_sampling(sampling: Any, module: nn.Module, poisson_sampling: bool) -> None:
    if not isinstance(sampling, Sampling):
        raise Refused(
            f"sampling={sampling!r} is no way to draw batches.",
            parameter="sampling",
            remedy="Give opacus_ext.data.Poisson(...), opacus_ext.data."
            "TruncatedPoisson(...) or opacus_ext.data.FixedSize(...).",
        )
    if not poisson_sampling:
        raise Refused(
            f"poisson_sampling=False leaves the loader as it is, and sampling="
            f"{sampling} replaces it.",
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
        loader = kwargs["data_loader"]
        check_number("target_epsilon", target_epsilon)
        check_number("epochs", epochs)
        check_loader(self, loader, kwargs.get("poisson_sampling", True))
        check_delta(self, target_delta, loader.dataset, "target_delta")
        budget: Any = dict(epsilon=target_epsilon, delta=target_delta, epochs=epochs)
        if noise == "banded":
            noise = choose_bands(
                sampling or Poisson(sample_rate=1 / len(loader)),
                self.accountant,
                count_records(loader.dataset),
                momentum=_momentum(kwargs["optimizer"]),
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
            kwargs["noise_multiplier"] = calibrate(
                sampling, self.accountant, records, **budget
            )
            made = self.make_private(sampling=sampling, noise=noise, **kwargs)
        runs_of(self)[-1]["target_delta"] = target_delta
        return made

    return make


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    """The momentum of SGD, or the first beta of Adam and its like."""
    groups = optimizer.param_groups
    found = [g.get("momentum", g.get("betas", (0.0,))[0]) for g in groups]
    return max((float(m) for m in found if 0 <= m < 1), default=0.0)


def calibrate(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
) -> float:
    """
    The noise multiplier of a run, for a budget.

    Args:
        sampling: how batches are drawn
        accountant: its history is part of the budget; it is not changed
        records: number of records in the data set
        epsilon, delta: the whole budget
        epochs: length of the run

    Raises:
        Refused: if nothing is left of the budget

    Example:
        >>> from opacus.accountants import create_accountant
        >>> from opacus_ext.data import FixedSize
        >>> accountant = create_accountant("prv_bounds")
        >>> sampling = FixedSize(batch_size=9)
        >>> noise = calibrate(
        ...     sampling, accountant, 900, epsilon=2.0, delta=1e-5, epochs=1
        ... )
        >>> sampling.account(accountant, 900, noise, steps=100)
        >>> 1.98 < accountant.get_epsilon(1e-5) <= 2
        True
    """
    sampling.check(records, accountant)
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)

    def account(trial: IAccountant, noise_multiplier: float) -> None:
        sampling.account(trial, records, noise_multiplier, steps)

    return least_noise(accountant, account, epsilon, delta)


def choose_bands(
    sampling: Sampling,
    accountant: IAccountant,
    records: int,
    *,
    epsilon: float,
    delta: float,
    epochs: float,
    momentum: float = 0.0,
    max_bands: int = 64,
) -> Banded:
    """
    The number of bands that leaves the least noise in the weights: the noise multiplier
    that the budget asks for, times :func:`opacus_ext.optimizers.banded.error`. More
    bands cancel more noise, but gain less privacy from sampling; 1 is independent
    noise.

    Args:
        sampling: Poisson sampling of the same run with independent noise
        accountant, records, epsilon, delta, epochs: as in :func:`calibrate`
        momentum: momentum of SGD, or the first of Adam's betas
        max_bands: bounds memory: b bands keep b - 1 times the model's size

    Returns:
        The best of 1, 2, 4, ...; the search ends at the first that is worse.

    Example:
        >>> from opacus_ext.accountants import PRVBoundsAccountant
        >>> choose_bands(
        ...     Poisson(expected_batch_size=50), PRVBoundsAccountant(), 1000,
        ...     epsilon=8.0, delta=1e-5, epochs=5,
        ... )
        Banded(bands=8, steps=100, momentum=0.0)
    """
    steps = max(math.ceil(epochs * sampling.steps_per_epoch(records)), 1)
    rate = sampling.rate(records)
    if len(accountant):  # the epsilon that a run alone may spend
        if not isinstance(accountant, PRVBoundsAccountant):  # a quick one
            accountant, before = PRVBoundsAccountant(), accountant.history
            accountant.history = list(before)
        noise = calibrate(
            sampling, accountant, records, epsilon=epsilon, delta=delta, epochs=epochs
        )
        epsilon = calibration.epsilon(noise, rate, steps, delta)
    counts = [2**k for k in range(max_bands.bit_length())]
    counts = [b for b in counts if b <= min(max_bands, steps) and b * rate <= 1]
    noises = calibration.noise_multiplier(
        epsilon, delta, [-(-steps // b) for b in counts], [b * rate for b in counts]
    )
    best = (math.inf, Banded(1, steps, momentum))
    for bands, noise in zip(counts, noises):
        left = noise * error(coefficients(bands, steps, momentum), steps, momentum)
        if left >= best[0]:
            break
        best = (left, Banded(bands, steps, momentum))
    return best[1]


#: Methods of ``PrivacyEngine`` and what wraps them.
WRAPPERS: Dict[str, Callable[[Callable], Callable]] = {
    "__init__": with_secure_source,
    "make_private": with_sampling,
    "make_private_with_epsilon": with_epsilon,
    "get_epsilon": checked_epsilon,
}


# -- the engine with all arguments in its signatures -----------------------------------


def _for_budget(make_private: Callable) -> inspect.Signature:
    """The signature of ``make_private``, with a budget in the place of the noise."""
    signature = inspect.signature(make_private)
    parameters = dict(signature.parameters)
    keyword = parameters.pop("noise_multiplier")
    names = ("target_epsilon", "target_delta", "epochs")
    budget = [keyword.replace(name=name, annotation="float") for name in names]
    first, *rest = parameters.values()
    return signature.replace(parameters=[first, *budget, *rest])


class PrivacyEngine(opacus.PrivacyEngine):
    """
    Opacus's ``PrivacyEngine``, whose methods show the arguments that this package adds.
    Opacus's own takes them as well.

    Args:
        accountant: "prv", "rdp", "gdp" or "prv_bounds"
        secure_mode: True draws noise and batches by random numbers of the operating
            system, and noise without the traces of floating-point numbers
            (:mod:`opacus_ext.secure`)

    Example:
        >>> import inspect, opacus_ext
        >>> make_private = opacus_ext.PrivacyEngine.make_private
        >>> "take" in inspect.signature(make_private).parameters
        True
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
        Makes a model, its optimizer and its loader private. Nothing is changed if it
        fails.

        Args:
            module: the model
            optimizer: an optimizer of its parameters that takes one gradient a step
            criterion: the loss function, for the modes that return one
            data_loader: its batch size is the expected batch size of a step
            noise_multiplier: standard deviation of the noise, over the sensitivity
            max_grad_norm: the norm to which each sample's gradient is clipped; a list
                for "per_layer" clipping
            batch_first: True if dim 0 of the model's inputs and outputs is the batch,
                False if it is dim 1
            loss_reduction: "mean" or "sum", of the loss over samples
            poisson_sampling: True makes the loader draw each record by chance, as the
                accountant assumes; False leaves it as it is
            clipping: "flat", "per_layer", "automatic", "adaptive", or one of
                :func:`~opacus_ext.register_clipping`
            noise_generator: draws the noise
            grad_sample_mode: "hooks", "functorch", "ghost", "ghost_bk", "scan", "auto",
                or another of Opacus's; all give the same update
            wrap_model: True returns a wrapper in the model's place; False makes the
                model itself private and returns an object with ``cleanup()``
            rand_on_empty: True fills a batch without samples with random numbers, which
                add nothing to the gradient
            sampling: how batches are drawn, in the place of ``poisson_sampling``:
                ``Poisson``, ``TruncatedPoisson``, ``FixedSize`` or ``CyclicPoisson`` of
                :mod:`opacus_ext.data`
            noise: "independent" from step to step, or
                :class:`~opacus_ext.optimizers.banded.Banded`, correlated noise
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
        return super().make_private(**_given(locals()))

    def make_private_with_epsilon(self, **kwargs: Any) -> Any:
        """
        :meth:`make_private` with the least noise for a budget. Arguments that are not
        listed are those of :meth:`make_private`.

        Args:
            target_epsilon, target_delta: the budget of the whole run
            epochs: length of the run
            noise: as in :meth:`make_private`; "banded" chooses the number of bands
            kwargs: arguments of the accountant as well

        Returns:
            As :meth:`make_private`.

        Raises:
            Refused: as :meth:`make_private`, and if nothing is left of the budget
        """
        return super().make_private_with_epsilon(**_given(locals()))

    setattr(make_private_with_epsilon, "__signature__", _for_budget(make_private))


def _given(variables: Dict[str, Any]) -> Dict[str, Any]:
    """The arguments of a method of :class:`PrivacyEngine`, by its local variables."""
    if not hasattr(opacus.PrivacyEngine._prepare_criterion, "_opacus_ext"):
        raise Refused(
            "opacus_ext.PrivacyEngine needs what opacus_ext.unregister() has undone.",
            remedy="Call opacus_ext.register() before, or take opacus.PrivacyEngine.",
        )
    given = {**variables, **variables.get("kwargs", {})}
    for name in ("self", "kwargs", "__class__"):
        given.pop(name, None)
    return given
