"""
What ``PrivacyEngine`` has besides modes: ways to draw batches, a record of what it made
private, and the privacy statement. ``registry.py`` puts it there.
"""

from __future__ import annotations

import functools
import math
import warnings
from importlib import import_module
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
from opacus_ext.data.draws import Draws
from opacus_ext.data.sampling import CyclicPoisson, Poisson, Sampling, count_records
from opacus_ext.misuse import check_loader
from opacus_ext.optimizers.banded import Banded, BandedNoise, coefficients, error
from opacus_ext.refused import Refused
from opacus_ext.secure import SecureSource

#: Of an engine and of its checkpoints: one entry for each ``make_private``.
RUNS = "opacus_ext_runs"

INDEPENDENT = "independent"  # the noise of each step is


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
            if secure_mode:  # it is not off
                warnings.filterwarnings("ignore", message="Secure RNG turned off")
            init(self, accountant=accountant, secure_mode=False)
        if secure_mode:
            self.secure_mode, self.secure_rng = True, SecureSource()

    return make


def with_sampling(make_private: Callable) -> Callable:
    """
    ``PrivacyEngine.make_private`` with the arguments ``sampling`` and ``noise``; what
    it was given is recorded.
    """

    @functools.wraps(make_private)
    def make(
        self: opacus.PrivacyEngine,
        *,
        sampling: Optional[Sampling] = None,
        noise: Union[str, Banded] = INDEPENDENT,
        **kwargs: Any,
    ) -> Any:
        correlated = _correlated(self, noise, **kwargs)
        if correlated is not None:
            sampling = _in_turn(sampling, correlated.bands, kwargs["data_loader"])
        if self.secure_mode:
            _refuse_insecure(self, noise, **kwargs)
            sampling = sampling or _stock_sampling(kwargs["data_loader"])
        elif sampling is None:
            _check_drawn(**kwargs)
        if sampling is None:
            made = make_private(self, **kwargs)
            count_whole(made[1], self.accountant)
        else:
            made = _drawn(self, make_private, sampling, **kwargs)
        if correlated is not None:
            made[1].correlated = correlated
            made[-1].batch_sampler.taken = lambda: correlated.taken
        bands = 1 if correlated is None else correlated.bands
        _note(self, sampling, made, bands, **kwargs)
        return made

    return make


def _correlated(
    engine: opacus.PrivacyEngine,
    noise: Union[str, Banded],
    *,
    clipping: Any = "flat",
    grad_sample_mode: str = "hooks",
    **kwargs: Any,
) -> Optional[BandedNoise]:
    if noise == INDEPENDENT:
        return None
    if not isinstance(noise, Banded):
        raise Refused(
            f"noise={noise!r} is neither {INDEPENDENT!r} nor a Banded.",
            parameter="noise",
            remedy="Give opacus_ext.optimizers.Banded(bands, steps), or leave it to "
            'make_private_with_epsilon(noise="banded") to choose one.',
        )
    if clipping == "adaptive":
        raise Refused(
            "Adaptive clipping changes the noise from step to step, and correlated "
            "noise is for the same at all.",
            parameter="noise",
            remedy="Choose another clipping.",
        )
    if not _has_own_optimizer(engine, clipping, grad_sample_mode):
        raise Refused(
            f"grad_sample_mode={grad_sample_mode!r} of {type(engine).__name__} adds "
            "independent noise.",
            parameter="noise",
            remedy='Take grad_sample_mode="ghost_bk" or "hooks" of '
            'opacus.PrivacyEngine, or noise="independent".',
        )
    return BandedNoise(noise)


def _has_own_optimizer(engine: opacus.PrivacyEngine, clipping: Any, mode: str) -> bool:
    """Whether the noise is added by an optimizer of this package."""
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
    """
    Raises:
        Refused: for what would draw noise or batches in another way, in secure mode
    """
    if isinstance(module, (DDP, DPDDP, FSDPModule)):
        raise Refused(
            f"{type(module).__name__} of several processes has no secure mode.",
            parameter="secure_mode",
            remedy="Train in one process, or without secure mode.",
        )
    if noise != INDEPENDENT:
        raise Refused(
            "Correlated noise is not drawn in secure mode.",
            parameter="noise",
            remedy=f"Take noise={INDEPENDENT!r}, or train without secure mode.",
        )
    opacus.grad_sample.get_gsm_class(grad_sample_mode)  # there is such a mode
    if not _has_own_optimizer(engine, clipping, grad_sample_mode):
        raise Refused(
            f"grad_sample_mode={grad_sample_mode!r} of {type(engine).__name__} with "
            f"clipping={clipping!r} draws its noise in Opacus, which is not secure.",
            parameter="secure_mode",
            remedy='Take grad_sample_mode="auto" or "hooks" of opacus.PrivacyEngine, '
            'and another clipping than "adaptive".',
        )
    if not poisson_sampling:
        raise Refused(
            "poisson_sampling=False leaves the loader to draw batches as it does, "
            "which is not secure.",
            parameter="poisson_sampling",
            remedy="Leave it out, or give sampling=opacus_ext.data.FixedSize(...) for "
            "batches of one size.",
        )
    check_loader(engine, data_loader, poisson_sampling)


def _in_turn(
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
    """Opacus's own, by a loader of this package, which draws by any generator."""
    sampling = Poisson(sample_rate=1 / len(loader))
    if getattr(loader.batch_sampler, "sampling", None) != sampling:
        _check_drawn(data_loader=loader)
    return sampling


def _check_drawn(
    *, data_loader: Any, poisson_sampling: bool = True, **kwargs: Any
) -> None:
    """
    Raises:
        Refused: for a loader that draws by chance, but not as would be accounted for
    """
    draws = getattr(data_loader, "batch_sampler", None)
    if not isinstance(draws, UniformWithReplacementSampler):
        return
    drawn, rate, steps = getattr(draws, "sampling", None), draws.sample_rate, len(draws)
    if drawn is not None:
        raise Refused(
            f"The loader draws by {drawn}, and would be accounted for as Poisson "
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


def _drawn(
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
    Raises:
        Refused: before anything is changed, as :meth:`Sampling.check`; for DDP and
            FSDP; with ``poisson_sampling=False``
    """
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
    module = kwargs["module"]
    distributed = isinstance(module, DPDDP)
    if isinstance(module, (DDP, FSDPModule)):
        raise Refused(
            f"{type(sampling).__name__} does not draw for {type(module).__name__}.",
            parameter="sampling",
            remedy="Leave sampling and noise out (Opacus's Poisson sampling draws in "
            "each process), or use opacus.distributed."
            "DifferentiallyPrivateDistributedDataParallel.",
        )
    records = count_records(data_loader.dataset)
    sampling.check(records, engine.accountant)
    draws = getattr(data_loader, "batch_sampler", None)
    if isinstance(draws, Draws) and draws.sampling == sampling and not distributed:
        loader = data_loader  # it draws so already
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
    if engine.secure_mode:  # torch's loader seeds its workers, and knows no other kind
        loader.generator = data_loader.generator
    optimizer.expected_batch_size = sampling.divisor(records)
    if distributed:  # of one process
        optimizer.expected_batch_size /= dist.get_world_size()
    # In the place of the one of Poisson sampling.
    optimizer.step_hook = sampling.hook(engine.accountant, records)
    return made


def with_epsilon(make_private_with_epsilon: Callable) -> Callable:
    """The same of ``PrivacyEngine.make_private_with_epsilon``."""

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
        if noise == "banded":
            noise = choose_bands(
                sampling or Poisson(sample_rate=1 / len(loader)),
                self.accountant,
                count_records(loader.dataset),
                epsilon=target_epsilon,
                delta=target_delta,
                epochs=epochs,
                momentum=_momentum(kwargs["optimizer"]),
            )
        if isinstance(noise, Banded):
            sampling = _in_turn(sampling, noise.bands, loader)
        if sampling is None:
            made = make_private_with_epsilon(
                self,
                target_epsilon=target_epsilon,
                target_delta=target_delta,
                epochs=epochs,
                **kwargs,
            )
        else:
            noise_multiplier = calibrate(
                sampling,
                self.accountant,
                count_records(loader.dataset),
                epsilon=target_epsilon,
                delta=target_delta,
                epochs=epochs,
            )
            made = self.make_private(
                sampling=sampling,
                noise=noise,
                noise_multiplier=noise_multiplier,
                **kwargs,
            )
        runs_of(self)[-1]["target_delta"] = target_delta
        return made

    return make


def _momentum(optimizer: torch.optim.Optimizer) -> float:
    """Of SGD, and that of the gradients in Adam and its like."""
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
        accountant: what it has recorded is part of the budget; it is not changed
        records: of the data set
        epsilon, delta: of the whole budget
        epochs: of the run

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

    def record(trial: IAccountant, noise_multiplier: float) -> None:
        sampling.account(trial, records, noise_multiplier, steps)

    return least_noise(accountant, record, epsilon, delta)


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
    bands cancel more noise, and leave less of the privacy of sampling; 1 is independent
    noise.

    Args:
        sampling: Poisson, of the run without correlated noise
        accountant, records, epsilon, delta, epochs: as of :func:`calibrate`
        momentum: of SGD, or the first of Adam's betas
        max_bands: the optimizer keeps one less times the model's size

    Returns:
        The best of 1, 2, 4, ...; further ones are not looked at where one is worse.

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
    if len(accountant):  # what it leaves is as much as this epsilon, for a run alone
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


# -- the record of what was made private -----------------------------------------------


def runs_of(engine: opacus.PrivacyEngine) -> List[Dict[str, Any]]:
    """What each ``make_private`` of an engine was given: plain numbers and names."""
    return engine.__dict__.setdefault(RUNS, [])


def _note(
    engine: opacus.PrivacyEngine,
    sampling: Optional[Sampling],
    made: Any,
    bands: int,
    *,
    clipping: Any = "flat",
    max_grad_norm: Any = None,
    grad_sample_mode: str = "hooks",
    poisson_sampling: bool = True,
    noise_generator: Any = None,
    **kwargs: Any,
) -> None:
    optimizer, loader = made[1], made[-1]
    records = len(loader.dataset)
    bounds = max_grad_norm if isinstance(max_grad_norm, (list, tuple)) else None
    run = {
        "grad_sample_mode": grad_sample_mode,
        "clipping": getattr(clipping, "name", clipping),
        "max_grad_norm": [*map(float, bounds)] if bounds else float(max_grad_norm),
        "sensitivity": float(
            getattr(optimizer, "sensitivity", math.hypot(*(bounds or [max_grad_norm])))
        ),
        "noise_multiplier": float(optimizer.noise_multiplier),
        "records": records,
        "sampling": (
            sampling.describe(records)
            if sampling is not None
            else _describe_stock(loader, poisson_sampling, records)
        ),
        "bands": bands,
        "secure_mode": bool(engine.secure_mode),
        "seeded": noise_generator is not None,
        "versions": installed_versions(),
    }
    add_runs(engine, [run])


def installed_versions() -> Dict[str, str]:
    """Of what a run's privacy depends on."""
    packages = (import_module(name) for name in ("opacus", "opacus_ext", "torch"))
    return {package.__name__: str(package.__version__) for package in packages}


def _describe_stock(
    loader: DataLoader, poisson_sampling: bool, records: int
) -> Dict[str, Any]:
    """Of Opacus's own loader, or of one that draws Poisson batches by itself."""
    rate, sampler = 1 / len(loader), getattr(loader, "batch_sampler", None)
    drawn = isinstance(sampler, UniformWithReplacementSampler) and math.isclose(
        sampler.sample_rate, rate, rel_tol=1e-9
    )
    if not (poisson_sampling or drawn):
        return {"scheme": "none"}
    return {
        "scheme": "poisson",
        "expected_batch_size": rate * records,
        "sample_rate": rate,
    }


def add_runs(engine: opacus.PrivacyEngine, runs: List[Dict[str, Any]]) -> None:
    """Adds what is not there yet."""
    known = runs_of(engine)
    known += [run for run in runs if run not in known]


#: Of ``PrivacyEngine``: what wraps each of its methods.
WRAPPERS: Dict[str, Callable[[Callable], Callable]] = {
    "__init__": with_secure_source,
    "make_private": with_sampling,
    "make_private_with_epsilon": with_epsilon,
}


# -- the engine with all of it in its signatures ---------------------------------------


class PrivacyEngine(opacus.PrivacyEngine):
    """
    Opacus's ``PrivacyEngine``, whose methods show the arguments that this package adds.
    Opacus's own takes them as well.

    Args:
        accountant: "prv", "rdp", "gdp" or "prv_bounds"
        secure_mode: whether noise and batches are drawn by random numbers of the
            operating system, and noise without the traces of floating-point numbers
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
            optimizer: of its parameters, with one gradient a step
            criterion: the loss function, for the modes that return one
            data_loader: its batch size is the expected one of a step
            noise_multiplier: standard deviation of the noise, over the sensitivity
            max_grad_norm: the norm to which each sample's gradient is clipped; a list
                for "per_layer" clipping
            batch_first: whether dim 0 of the model's inputs and outputs is the batch,
                else dim 1
            loss_reduction: "mean" or "sum", of the loss over samples
            poisson_sampling: whether the loader draws each record by chance, as the
                accountant assumes; else the loader stays as it is
            clipping: "flat", "per_layer", "automatic", "adaptive", or one of
                :func:`~opacus_ext.register_clipping`
            noise_generator: draws the noise
            grad_sample_mode: "hooks", "functorch", "ghost", "ghost_bk", "scan", "auto",
                or another of Opacus's; all give the same update
            wrap_model: whether a wrapper is returned in the model's place; else what is
                returned has only ``cleanup()``, and the model itself is private
            rand_on_empty: whether a batch without samples is filled with random
                numbers, which add nothing to the gradient
            sampling: how batches are drawn in the place of ``poisson_sampling``:
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
            on_nonfinite: what becomes of a sample whose gradient is not finite: "drop"
                (it counts as zero, with a warning) or "raise"
            kwargs: of the optimizer of "adaptive" clipping

        Returns:
            ``(model, optimizer, loader)``, or ``(model, optimizer, criterion, loader)``
            in the modes "ghost", "ghost_bk", "scan" and "auto".

        Raises:
            Refused: for what can't be trained exactly, or not with these arguments
        """
        return super().make_private(**_given(locals()))

    def make_private_with_epsilon(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        criterion: Callable = nn.CrossEntropyLoss(),
        data_loader: DataLoader,
        target_epsilon: float,
        target_delta: float,
        epochs: float,
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
        :meth:`make_private` with the least noise for a budget.

        Args:
            target_epsilon: of the whole run
            target_delta: the same
            epochs: of the run
            noise: see :meth:`make_private`, as are all others; "banded" chooses the
                number of bands
            kwargs: of the accountant as well

        Returns:
            See :meth:`make_private`.

        Raises:
            Refused: see :meth:`make_private`; if nothing is left of the budget
        """
        return super().make_private_with_epsilon(**_given(locals()))

    def load_checkpoint(
        self,
        *,
        path: Any,
        module: nn.Module,
        optimizer: Any = None,
        noise_scheduler: Any = None,
        grad_clip_scheduler: Any = None,
        module_load_dict_kwargs: Optional[Dict[str, Any]] = None,
        torch_load_kwargs: Optional[Dict[str, Any]] = None,
        repeat_noise: bool = False,
    ) -> Dict[str, Any]:
        """
        Loads what ``save_checkpoint`` has saved.

        Args:
            path: of the file
            module, optimizer: as ``make_private`` has returned them
            noise_scheduler, grad_clip_scheduler: of Opacus
            module_load_dict_kwargs: of ``module.load_state_dict``
            torch_load_kwargs: of ``torch.load``, which has ``weights_only=True``
            repeat_noise: whether the run goes on bit for bit, with the noise that it
                would have had. Two runs that go on from one checkpoint then have the
                same noise: the difference of their weights has none, and no epsilon
                covers that. By default noise is drawn afresh

        Returns:
            What else the checkpoint holds.

        Raises:
            Refused: for a file that was cut short, is no checkpoint or holds other
                objects than tensors and plain values; with ``repeat_noise`` for a
                checkpoint without the noise's state
        """
        return super().load_checkpoint(**_given(locals()))


def _given(variables: Dict[str, Any]) -> Dict[str, Any]:
    """
    The arguments of a method of :class:`PrivacyEngine`, by its local variables.

    Raises:
        Refused: after :func:`opacus_ext.unregister`
    """
    if not hasattr(opacus.PrivacyEngine._prepare_criterion, "_opacus_ext"):
        raise Refused(
            "opacus_ext.PrivacyEngine needs what opacus_ext.unregister() has undone.",
            remedy="Call opacus_ext.register() before, or take opacus.PrivacyEngine.",
        )
    given = {**variables, **variables.get("kwargs", {})}
    for name in ("self", "kwargs", "__class__"):
        given.pop(name, None)
    return given
