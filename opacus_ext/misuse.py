"""
Checks of the arguments of ``make_private``, before anything is changed.

What would void the guarantee, or can't work, is refused. What holds but is seldom meant
gives one warning. ``opacus_ext.loop`` checks training loops.
"""

from __future__ import annotations

import difflib
import inspect
from typing import Any, Callable, Iterable, Sequence, Set, TypedDict

import torch
from opacus import PrivacyEngine
from opacus.accountants.registry import _ACCOUNTANTS
from opacus.accountants.utils import get_noise_multiplier
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from opacus_ext.accountants.mechanisms import Mechanism
from opacus_ext.accountants.solver import default_delta
from opacus_ext.data.allocation import FixedSize
from opacus_ext.data.copies import refuse_copies
from opacus_ext.data.sampling import Sampling
from opacus_ext.loop import LOOPS, plain
from opacus_ext.refused import Refused, check_argument, check_number, warn_once

_POISSON = UniformWithReplacementSampler, DistributedUniformWithReplacementSampler
_EVERY_RECORD = SequentialSampler, RandomSampler, DistributedSampler
# The types of the arguments stand here once for all overloads of the engine.


class NeededArguments(TypedDict):
    """The arguments that ``make_private`` can't do without, beside its noise."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    data_loader: DataLoader
    max_grad_norm: float | Sequence[float]


class Arguments(NeededArguments, total=False):
    """The arguments of ``make_private``, beside its noise and its mode."""

    criterion: Callable | None
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: Any
    noise_generator: torch.Generator | None
    wrap_model: bool
    rand_on_empty: bool
    sampling: Any
    noise: Any
    take: Callable[[Any, int], Any] | None
    shared: Sequence[str]
    on_nonfinite: str
    expected_batch_size: float | None
    public_records: int | None
    # Of accountants.
    alphas: Any
    poisson: bool
    eps_error: float
    delta_error: float
    # Of adaptive clipping.
    target_unclipped_quantile: float
    clipbound_learning_rate: float
    max_clipbound: float
    min_clipbound: float
    unclipped_num_std: float


def check_arguments(
    engine: PrivacyEngine,
    names: Iterable[str],
    on_nonfinite: str,
    /,
    *,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: DataLoader,
    noise_multiplier: Any,
    max_grad_norm: Any,
    criterion: Any = None,
    clipping: Any = "flat",
    loss_reduction: str = "mean",
    poisson_sampling: bool = True,
    grad_sample_mode: str = "hooks",
    noise_generator: object = None,
    take: object = None,
    **others: Any,
) -> None:
    """
    Checks the arguments of ``make_private``.

    Args:
        names: of its arguments
        others: arguments of which only the names are checked

    Raises:
        Refused: for a mistake
    """
    allowed = {*names, *Arguments.__annotations__}
    allowed |= set(inspect.signature(get_noise_multiplier).parameters)
    allowed |= _arguments_of_users(engine)
    for name in others:
        if name not in allowed:
            raise Refused(
                f"make_private has no argument {name!r}.",
                parameter=name,
                remedy=closest(name, allowed, "Leave it out."),
            )
    if on_nonfinite not in ("drop", "raise"):
        raise Refused(
            f'on_nonfinite is "drop" or "raise", got {on_nonfinite!r}.',
            parameter="on_nonfinite",
            remedy='"drop" counts such a sample as zero, with a warning.',
        )
    check_argument(
        "loss_reduction",
        loss_reduction,
        loss_reduction in ("mean", "sum"),
        '"mean" or "sum"',
        "Give the reduction of the criterion.",
    )
    check_argument(
        "noise_generator",
        noise_generator,
        noise_generator is None or isinstance(noise_generator, torch.Generator),
        "a torch.Generator",
        "Leave it out, unless you have to draw the same noise twice.",
    )
    check_argument(
        "take",
        take,
        take is None or callable(take),
        "a function take(inputs, i)",
        "opacus_ext.take has some; tensors [B, ...] need none.",
    )
    check_number("noise_multiplier", noise_multiplier, zero=True)
    several = isinstance(max_grad_norm, (list, tuple))
    for bound in max_grad_norm if several else [max_grad_norm]:
        check_number("max_grad_norm", bound)
    _check_optimizer(engine, optimizer, module)
    check_loader(engine, data_loader, poisson_sampling)
    reduction = getattr(criterion, "reduction", loss_reduction)
    # "hooks" doesn't use the criterion, but a sum is nobody's default.
    used = "ghost" in str(grad_sample_mode) or grad_sample_mode in ("scan", "auto")
    check_argument(
        "criterion",
        criterion,
        not used or callable(criterion) and not isinstance(criterion, type),
        "a loss function",
        "Give an instance, such as torch.nn.CrossEntropyLoss(), or None for losses "
        "that the model computes itself.",
    )
    if reduction != loss_reduction and (used or reduction == "sum"):
        raise Refused(
            f"The criterion has reduction={reduction!r}, and make_private "
            f"loss_reduction={loss_reduction!r}.",
            parameter="loss_reduction",
            remedy="Make them the same.",
        )


def check_parts(module: object, optimizer: object, data_loader: object) -> None:
    """Refuses what is no model, no optimizer or no loader."""
    check_argument(
        "module",
        module,
        isinstance(module, nn.Module),
        "a torch.nn.Module",
        "Give the model itself: module=model.",
    )
    check_argument(
        "optimizer",
        optimizer,
        hasattr(optimizer, "param_groups") and not isinstance(optimizer, type),
        "an optimizer",
        "Give one of the model's parameters, such as "
        "torch.optim.SGD(model.parameters(), lr=0.1).",
    )
    check_argument(
        "data_loader",
        data_loader,
        hasattr(data_loader, "dataset"),
        "a loader of a data set",
        "Give torch.utils.data.DataLoader(dataset, batch_size=...), whose batch size "
        "is the expected one of a step.",
    )


def _arguments_of_users(engine: PrivacyEngine) -> Set[str]:
    """Returns the arguments that methods of an engine's subclasses take."""
    names = "_prepare_optimizer", "_prepare_criterion"
    kinds = type(engine).__mro__
    methods = [
        vars(kind)[name] for kind in kinds for name in names if name in vars(kind)
    ]
    return {name for method in methods for name in inspect.signature(method).parameters}


def closest(name: str, names: Iterable[str], otherwise: str) -> str:
    """Asks whether the name most like this one is meant."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f"Is {found[0]!r} meant?" if found else otherwise


def _check_optimizer(
    engine: PrivacyEngine, optimizer: torch.optim.Optimizer, module: nn.Module
) -> None:
    """Refuses several gradients a step; warns of parameters that are left out."""
    given = getattr(optimizer, "original_optimizer", optimizer)
    _check_prepared(given)
    given = plain(given)
    closure = inspect.signature(given.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refused(
            f"{type(given).__name__} computes the loss several times in one step, and "
            "only one gradient a step is noised and accounted.",
            parameter="optimizer",
            remedy="Take an optimizer that needs one gradient a step: SGD, Adam, ...",
        )
    held = {p for group in given.param_groups for p in group["params"]}
    _check_is_of_model(given, held, module)
    named = module.named_parameters()
    left = [name for name, p in named if p.requires_grad and p not in held]
    if left and held:
        warn_once(
            engine,
            "left",
            f"{len(left)} trainable parameters are not in the optimizer ({left[0]}"
            f"{', ...' if len(left) > 1 else ''}): they are neither clipped nor noised "
            "nor updated. Their gradients are not private, so let no other optimizer "
            "train them; freeze them by requires_grad_(False).",
        )
    watch = LOOPS.get(given)
    if watch is not None and watch.active and watch.is_of_another(engine):
        warn_once(
            engine,
            "engines",
            "The model was made private before, by another PrivacyEngine: each counts "
            "its own steps, and the budgets add up. Use one engine for all of it.",
        )


def _check_is_of_model(
    optimizer: torch.optim.Optimizer, held: Set[torch.Tensor], module: nn.Module
) -> None:
    """Refuses an optimizer that was made before the model had its parameters."""
    others = len(held - set(module.parameters()))
    if not others:
        return
    kind = type(optimizer)
    public = getattr(torch.optim, kind.__name__, None) is kind
    rate = optimizer.defaults.get("lr")
    raise Refused(
        "Module parameters are different than optimizer Parameters: "
        f"{others} of {len(held)} in the optimizer are not the model's. Perhaps "
        "it was made before the model was changed, as by ModuleValidator.fix, which "
        "makes new layers.",
        parameter="optimizer",
        remedy="Make it anew: optimizer = "
        f"{'torch.optim.' if public else ''}{kind.__name__}(model.parameters()"
        f"{'' if rate is None else f', lr={float(rate):g}'}).",
    )


def _check_prepared(optimizer: Any) -> None:
    """Refuses settings of Accelerate by which its optimizer steps in another way."""
    state = getattr(optimizer, "gradient_state", None)
    for parameter, is_refused, reason, remedy in (
        (
            "gradient_accumulation_steps",
            getattr(state, "num_steps", 1) != 1,
            "scales losses before they are clipped, and leaves out steps that are "
            "counted",
            "Give the loader the whole batch size, and enter BatchMemoryManager.",
        ),
        (
            "mixed_precision",
            getattr(optimizer, "scaler", None) is not None,
            'of "fp16" scales losses before they are clipped, and skips steps by what '
            "private records do",
            'Use "bf16" or "no".',
        ),
    ):
        if state is not None and is_refused:
            raise Refused(
                f"{parameter} of Accelerate {reason}.",
                parameter=parameter,
                remedy=remedy,
            )


# -- the model -------------------------------------------------------------------------


class _Process:
    """Was told what each process is told once."""


PROCESS = _Process()


def tell_of_records(sampling: Sampling | None) -> None:
    """Warns once in a process that the number of records counts as public."""
    if sampling is not None and (
        sampling.is_public or isinstance(sampling, FixedSize)  # of data sets of a size
    ):
        return
    warn_once(
        PROCESS,
        "records",
        "Epsilon takes the number of records as public: batch size and sampling rate "
        "come from it. If it is, say public_records=len(dataset); if it is not, "
        "give a number that you know without the data, as public_records=60_000.",
    )


def tell_of_accountant(engine: PrivacyEngine, sampling: Sampling | None) -> None:
    """Warns once of an accountant that does not know how batches are drawn."""
    accountant = engine.accountant.mechanism()
    if sampling is None or accountant in ("prv_bounds", "prv"):
        return
    kind, _ = sampling.step_of(1.0, 1)
    if isinstance(kind, Mechanism):
        warn_once(
            engine,
            "accountant",
            f'The accountant "{accountant}" does not know {type(sampling).__name__}, '
            'and counts far more than it spends. Take accountant="prv_bounds".',
        )


def tell_of_samplers(engine: PrivacyEngine, module: nn.Module, mode: str) -> None:
    """
    Warns once that samplers which users have registered are not used in a mode of this
    package, naming their layers. Modes "functorch" and "ew" have never used any.
    """
    if mode in ("functorch", "ew"):
        return
    tables = [GradSampleHooks.GRAD_SAMPLERS]
    # Only the ghost modes look for norm samplers.
    if mode != "hooks":
        tables.append(GradSampleHooksFastGradientClipping.NORM_SAMPLERS)
    layers = []
    for name, layer in module.named_modules():
        samplers = [table.get(type(layer)) for table in tables]
        parameters = layer.parameters(recurse=False)
        trained = any(parameter.requires_grad for parameter in parameters)
        if trained and any(map(_is_of_user, samplers)):
            layers.append(f"{name or 'the model'} ({type(layer).__name__})")
    if not layers:
        return
    few = ", ".join(layers[:3])
    if layers[3:]:
        few += f" and {len(layers) - 3} more"
    warn_once(
        engine,
        "samplers",
        f"A sampler was registered with Opacus for {few}. It is not used: "
        f"grad_sample_mode={mode!r} computes exact per-sample gradients of every layer "
        "by itself, from the layer's own forward. Where a sampler gives something else "
        "on purpose, use opacus.grad_sample.GradSampleModule.",
    )


def _is_of_user(sampler: Any) -> bool:
    """Returns True for a sampler that is not Opacus's."""
    made_in = str(getattr(sampler, "__module__", "")).partition(".")[0]
    return sampler is not None and made_in != "opacus"


# -- the loader ------------------------------------------------------------------------


def check_loader(
    engine: PrivacyEngine, loader: DataLoader, poisson_sampling: bool
) -> None:
    """Refuses a loader whose records can't be sampled, and warns of one seldom meant"""
    dataset: Any = getattr(loader, "dataset", None)
    batches: Any = getattr(loader, "batch_sampler", None)
    # What Accelerate has prepared gives each process every other batch of these.
    batches = getattr(batches, "batch_sampler", batches)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise Refused(
            f"The data set ({type(dataset).__name__}) is an IterableDataset, or has no "
            "length: its records can't be drawn.",
            parameter="data_loader",
            remedy="Take a data set with __len__ and __getitem__.",
        )
    refuse_copies(dataset)
    if isinstance(batches, _POISSON):
        return
    records, size = len(dataset), getattr(loader, "batch_size", None)
    if batches is None or not len(loader):
        raise Refused(
            f"The loader makes no batches: {records} records, batch_size={size}.",
            parameter="data_loader",
            remedy="Give it a batch size up to the number of records; it is the "
            "expected one of a step.",
        )
    if poisson_sampling:
        if size is not None:
            check_size(engine, size, records)
        _check_sampler(engine, batches, records)
    elif type(batches) is BatchSampler:
        warn_once(
            engine,
            "poisson",
            "poisson_sampling=False leaves the loader as it is, and get_epsilon takes "
            "each step's records as drawn at random: the true epsilon may be larger. "
            "Leave poisson_sampling out.",
        )


def _check_sampler(engine: PrivacyEngine, batches: Any, records: int) -> None:
    """Checks the sampler that Poisson sampling replaces."""
    own = type(batches) is not BatchSampler
    sampler: Any = batches if own else batches.sampler
    name, every = type(sampler).__name__, isinstance(sampler, _EVERY_RECORD)
    whole = own or isinstance(sampler, DistributedSampler)
    covered = records if whole or not hasattr(sampler, "__len__") else len(sampler)
    if covered != records:
        raise Refused(
            f"The loader's {name} draws {covered} of the {records} records, and "
            "Poisson sampling, which takes its place, would draw from all of them.",
            parameter="data_loader",
            remedy="Pass torch.utils.data.Subset(dataset, indices) and no sampler.",
        )
    if not every:
        warn_once(
            engine,
            "sampler",
            f"The loader's {name} is replaced by Poisson sampling, which draws every "
            "record with the same probability: weights, order and buckets are lost. "
            "Pass the loader without it.",
        )


def check_size(engine: PrivacyEngine, size: int, records: int) -> None:
    """Warns of a batch size over the number of records."""
    if size > records:
        warn_once(
            engine,
            "size",
            f"batch_size={size} is over the {records} records of the data set: every "
            "step takes all of them, and privacy gains nothing from sampling.",
        )


# -- the budget ------------------------------------------------------------------------


def check_accountant(name: object) -> None:
    """Refuses what is no accountant's name."""
    known = sorted(_ACCOUNTANTS)
    check_argument(
        "accountant",
        name,
        isinstance(name, str) and name in known,
        "the name of an accountant",
        closest(str(name), known, f"There are {', '.join(known)}."),
    )


def check_delta(
    engine: PrivacyEngine, delta: Any, dataset: Any, name: str = "delta"
) -> None:
    """Refuses a delta that is not between 0 and 1; warns of one over 1 / records."""
    check_number(name, delta, below=1)
    records = len(dataset) if hasattr(dataset, "__len__") else 0
    if records and delta > 1 / records:
        warn_once(
            engine,
            "delta",
            f"{name}={delta:g} is more than 1 / {records}, one over the number of "
            "records. Publishing a whole record would satisfy such a guarantee. Choose "
            f"one well below that, such as {default_delta(records):g}.",
        )
