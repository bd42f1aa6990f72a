"""
What is said of arguments that are mistakes; of training loops, see optimizers.loop.

What would void the guarantee, or can't work, is refused; what holds but is seldom meant
is told once. All of it is looked at in ``make_private``.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
from typing import Any, Callable, Dict, Iterable, Optional

import torch
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
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

from opacus_ext.optimizers.loop import LOOPS
from opacus_ext.refused import Refused, warn_once

_POISSON = UniformWithReplacementSampler, DistributedUniformWithReplacementSampler
_EVERY_RECORD = SequentialSampler, RandomSampler, DistributedSampler
_OF_OPACUS = ("hooks", "functorch", "ew", "ghost", "ghost_fsdp", "no_op")
# Arguments of Opacus's that get through it by ``**kwargs``: of accountants, of adaptive
# clipping; and those that this package adds.
_MORE_ARGUMENTS = (
    "alphas poisson eps_error delta_error target_unclipped_quantile "
    "clipbound_learning_rate max_clipbound min_clipbound unclipped_num_std "
    "take shared on_nonfinite sampling"
).split()


# -- arguments -------------------------------------------------------------------------


def check_arguments(
    engine: PrivacyEngine,
    known: Iterable[str],
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
    **others: Any,
) -> None:
    """
    The arguments of ``make_private``, before anything is changed.

    Args:
        known: the names that it takes
        others: what is not looked at, but for the names

    Raises:
        Refused: for what can't be, or can't work
    """
    if clipping != "adaptive":
        _refuse_unknown(others, known)
    noise = _number("noise_multiplier", noise_multiplier)
    if not (math.isfinite(noise) and noise >= 0):
        raise Refused(
            "noise_multiplier must be finite and zero or more, got "
            f"{noise_multiplier}.",
            parameter="noise_multiplier",
            remedy="It is the noise's standard deviation over max_grad_norm; zero "
            "trains without privacy.",
        )
    several = isinstance(max_grad_norm, (list, tuple))
    for bound in max_grad_norm if several else [max_grad_norm]:
        _check_positive(
            "max_grad_norm",
            bound,
            "It is the norm to which each sample's gradient is clipped.",
        )
    _check_model(module)
    _check_optimizer(engine, optimizer, module)
    check_loader(engine, data_loader, poisson_sampling)
    reduction = getattr(criterion, "reduction", loss_reduction)
    # "hooks" doesn't use the criterion, but a sum is nobody's default.
    used = "ghost" in str(grad_sample_mode) or grad_sample_mode in ("scan", "auto")
    if reduction != loss_reduction and (used or reduction == "sum"):
        raise Refused(
            f"The criterion has reduction={reduction!r}, and make_private "
            f"loss_reduction={loss_reduction!r}.",
            parameter="loss_reduction",
            remedy="Make them the same.",
        )


def _refuse_unknown(given: Dict[str, Any], known: Iterable[str]) -> None:
    more = inspect.signature(get_noise_multiplier).parameters
    names = {*known, *more, *_MORE_ARGUMENTS}
    for name in given:
        if name not in names:
            raise Refused(
                f"make_private has no argument {name!r}.",
                parameter=name,
                remedy=_closest(name, names) or "Leave it out.",
            )


def _closest(name: str, names: Iterable[str]) -> Optional[str]:
    found = difflib.get_close_matches(name, list(names), 1)
    return f"Is {found[0]!r} meant?" if found else None


def check_mode(mode: Any, modes: Iterable[str]) -> None:
    """
    Raises:
        Refused: for a ``grad_sample_mode`` that is none of these nor Opacus's
    """
    names = list(dict.fromkeys((*modes, *_OF_OPACUS)))
    if mode not in names:
        raise Refused(
            f"Unexpected grad_sample_mode: {mode!r}. There are {', '.join(names)}.",
            parameter="grad_sample_mode",
            remedy=_closest(str(mode), names) or 'Take "auto" if in doubt.',
        )


def _number(name: str, value: Any) -> float:
    scalar = isinstance(value, torch.Tensor) and not value.dim()
    if isinstance(value, bool) or not (scalar or isinstance(value, numbers.Real)):
        raise Refused(
            f"{name} must be a number, got {value!r} ({type(value).__name__}).",
            parameter=name,
            remedy=f"Give {name} as a float.",
        )
    return float(value)


def _check_positive(name: str, value: Any, remedy: str) -> None:
    if not (math.isfinite(_number(name, value)) and value > 0):
        raise Refused(
            f"{name} must be finite and above zero, got {value}.",
            parameter=name,
            remedy=remedy,
        )


def _check_model(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if isinstance(part, nn.DataParallel):
            what = f"{name or 'the model'} (DataParallel)"
            raise Refused(
                f"{what} copies the model to each device at each step, and "
                "per-sample gradients are lost with the copies.",
                module=what,
                remedy="Pass the model itself; for several devices one process each, "
                "with opacus.distributed."
                "DifferentiallyPrivateDistributedDataParallel.",
            )


def _check_optimizer(
    engine: PrivacyEngine, optimizer: torch.optim.Optimizer, module: nn.Module
) -> None:
    given = getattr(optimizer, "original_optimizer", optimizer)
    kind = type(given).__name__
    closure = inspect.signature(given.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise Refused(
            f"{kind} computes the loss several times in one step, each time on private "
            "data, and only one gradient a step is noised and accounted.",
            parameter="optimizer",
            remedy="Take an optimizer that needs one gradient a step: SGD, Adam, ...",
        )
    if isinstance(given, torch.optim.SparseAdam):
        raise Refused(
            f"{kind} takes sparse gradients only, and noise makes them dense.",
            parameter="optimizer",
            remedy="Take Adam or AdamW.",
        )
    names = {p: name for name, p in module.named_parameters()}
    held = [p for group in given.param_groups for p in group["params"]]
    strange = [p for p in held if p not in names]
    if strange:
        raise Refused(
            "Module parameters are different than optimizer Parameters: "
            f"{len(strange)} of the {len(held)} in the optimizer are not the model's, "
            f"the first of shape {tuple(strange[0].shape)}. It is another model's, or "
            "layers were replaced after it was made (by ModuleValidator.fix, "
            "get_peft_model, an assignment).",
            parameter="optimizer",
            remedy="Build it from the parameters of the model that is passed.",
        )
    known = set(held)
    left = [n for p, n in names.items() if p.requires_grad and p not in known]
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
    if watch is not None and watch.engine() not in (None, engine) and watch.active:
        warn_once(
            engine,
            "engines",
            "The model was made private before, by another PrivacyEngine: each counts "
            "its own steps, and the budgets add up. Use one engine for all of it.",
        )


def check_loader(
    engine: PrivacyEngine, loader: DataLoader, poisson_sampling: bool
) -> None:
    """
    A loader from whose records batches are to be drawn.

    Raises:
        Refused: if they can't be
    """
    dataset: Any = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise Refused(
            f"The data set ({type(dataset).__name__}) has no length, and records can't "
            "be drawn from it by chance.",
            parameter="data_loader",
            remedy="Take a data set with __len__ and __getitem__.",
        )
    batches = getattr(loader, "batch_sampler", None)
    if isinstance(batches, _POISSON):
        return
    records, size = len(dataset), getattr(loader, "batch_size", None)
    if batches is None:
        raise Refused(
            "The loader makes no batches: it has batch_size=None.",
            parameter="data_loader",
            remedy="Give it a batch size; it is the expected one of a step.",
        )
    if not len(loader):
        raise Refused(
            f"The loader has no batch: {records} records, batch_size={size}, "
            f"drop_last={getattr(loader, 'drop_last', None)}.",
            parameter="data_loader",
            remedy="Take a smaller batch size, or drop_last=False.",
        )
    if not poisson_sampling:
        if type(batches) is BatchSampler:
            warn_once(
                engine,
                "poisson",
                "poisson_sampling=False: get_epsilon goes on as if each step drew "
                "records by chance, which a shuffled loader does not, and the true "
                "epsilon may be larger. Leave it out, or take "
                "sampling=opacus_ext.data.FixedSize(...) for batches of one size.",
            )
        return
    if size is not None and size > records:
        warn_once(
            engine,
            "size",
            f"batch_size={size} is over the {records} records of the data set: every "
            "step takes all of them, and privacy gains nothing from sampling.",
        )
    _check_sampler(engine, loader, batches, records)


def _check_sampler(
    engine: PrivacyEngine, loader: DataLoader, batches: Any, records: int
) -> None:
    sampler: Any = getattr(batches, "sampler", None)
    own = type(batches) is not BatchSampler
    try:
        covered = None if own else len(sampler)
    except TypeError:
        covered = None
    name = type(batches if own else sampler).__name__
    distributed = isinstance(sampler, DistributedSampler)
    if covered is not None and covered != records and not distributed:
        raise Refused(
            f"The loader's {name} draws {covered} of the {records} records, and "
            "Poisson sampling, which takes its place, would draw from all of them.",
            parameter="data_loader",
            remedy="Pass torch.utils.data.Subset(dataset, indices) and no sampler.",
        )
    if own or not isinstance(sampler, _EVERY_RECORD):
        warn_once(
            engine,
            "sampler",
            f"The loader's {name} is replaced by Poisson sampling, which draws every "
            "record with the same probability: weights, order and buckets are lost. "
            "Pass the loader without it.",
        )


# -- the budget ------------------------------------------------------------------------


def check_delta(engine: PrivacyEngine, delta: Any, name: str = "delta") -> None:
    """
    Raises:
        Refused: if it is no probability
    """
    _number(name, delta)
    if not 0 < delta < 1:
        raise Refused(
            f"{name} must be above 0 and below 1, got {delta}.",
            parameter=name,
            remedy="Take less than one over the number of records.",
        )
    records = len(engine.dataset) if hasattr(engine.dataset, "__len__") else 0
    if records and delta > 1 / records:
        warn_once(
            engine,
            "delta",
            f"{name}={delta:g} is over one over the {records} records: publishing a "
            "record would satisfy it. Take less.",
        )


def checked_epsilon(get_epsilon: Callable) -> Callable:
    """``PrivacyEngine.get_epsilon``, never below 0, and infinite without noise."""

    @functools.wraps(get_epsilon)
    def get(self: PrivacyEngine, delta: float) -> float:
        check_delta(self, delta)
        if any(noise == 0 for noise, *_ in self.accountant.history):
            return math.inf  # of which some accountants raise an error
        return max(get_epsilon(self, delta), 0.0) if len(self.accountant) else 0.0

    return get


def checked_budget(make_private_with_epsilon: Callable) -> Callable:
    """``PrivacyEngine.make_private_with_epsilon``, its budget looked at."""

    @functools.wraps(make_private_with_epsilon)
    def make(self: PrivacyEngine, **kwargs: Any) -> Any:
        for name in ("target_epsilon", "epochs"):
            if name in kwargs:
                _check_positive(name, kwargs[name], "Give the budget of the run.")
        loader = kwargs.get("data_loader")
        if loader is not None:
            check_loader(self, loader, kwargs.get("poisson_sampling", True))
        if "target_delta" in kwargs:
            before = self.dataset
            self.dataset = getattr(loader, "dataset", before)
            try:
                check_delta(self, kwargs["target_delta"], "target_delta")
            finally:
                self.dataset = before
        return make_private_with_epsilon(self, **kwargs)

    return make


#: Of ``PrivacyEngine``: what wraps each of its methods.
WRAPPERS: Dict[str, Callable[[Callable], Callable]] = {
    "get_epsilon": checked_epsilon,
    "make_private_with_epsilon": checked_budget,
}
