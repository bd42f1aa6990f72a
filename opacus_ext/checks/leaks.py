"""The search for what lets one sample's loss depend on another's."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
    cast,
)

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path

from opacus_ext.checks.subject import (
    LossFn,
    Subject,
    T,
    as_in_batch,
    close,
    per_sample,
    random_state_kept,
    rows_of,
    tensors_of,
)
from opacus_ext.refused import Refused

_NORM = (
    "It normalizes over the batch. Use GroupNorm or LayerNorm: opacus.validators."
    "ModuleValidator.fix replaces it."
)
_EXPERTS = (
    "If an expert's capacity is counted over the batch, one sample's tokens drop "
    "another's: count it in each sequence, as opacus_ext.layers.SwitchFeedForward "
    "does, or set none."
)
_ANY = "Let it compute each sample by itself."
_NUMBER = (
    "Compute one loss a sample, [B]: opacus_ext.losses.model_losses(model, batch) "
    "makes them by the model's own code, or take its other outputs. In the place of a "
    "balancing loss over the batch add opacus_ext.layers.balancing_loss to the losses, "
    "or freeze the routers with opacus_ext.layers.freeze_routers."
)
_MIXES = "its output for a sample changes with another sample in the batch."
_ADDS = "the part of one sample in it depends on the other samples in the batch."


class Leak(NamedTuple):
    """
    One way in which a sample depends on another.

    Attributes:
        where: the module, output or loss in which it begins
        reason: what was seen
        fix: what to do
    """

    where: str
    reason: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason} {self.fix}"


def find_leaks(
    model: nn.Module, batch: Any, loss_fn: Union[None, nn.Module, LossFn] = None
) -> List[Leak]:
    """
    Finds what makes one sample's loss depend on another: statistics over the batch, an
    expert's capacity counted over the batch, a mean over all tokens of the batch. Then
    clipping each sample bounds nothing.

    A copy of the model runs on the batch, and on each sample alone. Where the outputs
    or losses differ, the module is named in which that begins. So pass a real batch,
    with samples of different lengths; of a large one, 8 samples are compared. Dropout
    is off, and random numbers are replaced by their mean.

    Args:
        model: before ``make_private``; its train/eval mode is kept
        batch: tensors with the batch first, also nested in tuples, lists and mappings
        loss_fn: ``loss_fn(model, batch)`` returns the losses ``[B]``; or a criterion,
            with a batch of ``(*inputs, target)``. With None the outputs of
            ``model(batch)``, ``model(*batch)`` or ``model(**batch)`` are compared

    Returns:
        the leaks; none if all is well

    Raises:
        Refused: for a batch of fewer than two different samples

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> for leak in find_leaks(model, torch.randn(5, 3)):
        ...     print(leak.where)
        1 (BatchNorm1d)
        >>> find_leaks(nn.Linear(3, 2), torch.randn(5, 3))
        []
    """
    tensors = tensors_of(batch)
    size = len(tensors[0]) if tensors else 0
    own = [x for x in tensors if len(x) == size]
    if size < 2 or all(torch.equal(x, x[:1].expand_as(x)) for x in own):
        raise Refused(
            "find_leaks needs a batch of two samples or more that differ.",
            parameter="batch",
            remedy="Pass more samples, of real data.",
        )
    count = min(size, 8)
    some = rows_of(batch, torch.linspace(0, size - 1, count).long(), size)
    opened: List[_Call] = []
    alone = []
    with random_state_kept(model), torch.enable_grad(), _NoChance():

        def call(dtype: Optional[torch.dtype]) -> Callable[[nn.Module, Any], _Trace]:
            return partial(_traced, per_sample(loss_fn, dtype), opened)

        # In float64 rounding hides less.
        subject = Subject(model, some, call, torch.float64)
        opened.clear()
        for _, trace, error in subject.alone(count):
            if error is not None:
                name, module = opened[-1][:2] if opened else ("", model)
                reason = f"it can't run one sample alone ({error})."
                return [_module_leak(name, module, reason)]
            alone.append(trace)
        return _compare(subject.result, alone)


class _NoChance(TorchFunctionMode):
    """Replaces random numbers by their mean, and drops nothing."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        found = func(*args, **kwargs)
        mean = _MEANS.get(name)
        if name == "uniform_":
            mean = sum((*args[1:], *kwargs.values(), 0.0, 1.0)[:2]) / 2
        if mean is not None and isinstance(found, T):
            with torch.no_grad():
                found.fill_(mean)
        return found


_MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0, "randn_like": 0, "normal_": 0}
_MEANS.update({"bernoulli": 1, "bernoulli_": 1, "exponential_": 1})


class _Call(NamedTuple):
    """One call of a module, with the tensors that went in and came out."""

    name: str
    module: nn.Module
    inputs: List[T]
    outputs: List[T]


class _Trace(NamedTuple):
    """One call of the model, with those of its modules in the order they end in."""

    model: nn.Module
    calls: List[_Call]
    outputs: List[Tuple[str, T]]
    losses: Optional[T]


def _traced(
    loss_fn: Optional[LossFn], opened: List[_Call], model: nn.Module, batch: Any
) -> _Trace:
    """Runs a copy of the model; ``opened`` holds the calls that have not ended."""
    calls: List[_Call] = []
    outputs: List[Any] = []
    names = {module: name for name, module in model.named_modules()}

    def before(module: nn.Module, args: tuple, kwargs: dict) -> None:
        opened.append(_Call(names[module], module, _copied((args, kwargs)), []))

    def after(module: nn.Module, args: tuple, output: Any) -> None:
        call = opened.pop()
        call.outputs.extend(_copied(output))
        calls.append(call)
        if module is model:
            outputs.append(output)

    for module in names:
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)
    losses = None
    if loss_fn is not None:
        losses = loss_fn(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(*batch if isinstance(batch, tuple) else [batch])
    found = tree_leaves_with_path(outputs[0]) if len(outputs) == 1 else []
    named = [(keystr(path), x) for path, x in found if isinstance(x, T)]
    return _Trace(model, calls, named, losses)


def _copied(value: Any) -> List[T]:
    return [x.detach().clone() for x in tree_leaves(value) if isinstance(x, T)]


def _compare(whole: _Trace, alone: Sequence[_Trace]) -> List[Leak]:
    mixed, numbers = False, []
    for (name, y), *column in zip(whole.outputs, *(trace.outputs for trace in alone)):
        each = [x for _, x in column]
        if y.dim():
            mixed = mixed or not _holds(y, each)
        elif y.requires_grad and not all(_close(x, y) for x in each):
            numbers.append(f"output{name}")
    losses = [] if whole.losses is None else _compare_losses(whole, alone)
    if mixed or losses:
        call = _first_mixing(whole, alone)
        if call is not None:
            return [_module_leak(call.name, call.module)]
        if mixed:
            return [_module_leak("", whole.model)]
    if whole.losses is not None:
        return losses
    return [Leak(where, _ADDS, _NUMBER) for where in numbers]


def _compare_losses(whole: _Trace, alone: Sequence[_Trace]) -> List[Leak]:
    losses = whole.losses
    assert losses is not None
    if losses.shape != (len(alone),):
        reason = (
            f"it gives losses of shape {(*losses.shape,)} for {len(alone)} samples."
        )
        return [Leak("loss_fn", reason, _NUMBER)]
    for loss, trace in zip(losses, alone):
        own = cast(T, trace.losses).sum()
        compared = own, trace.model, loss, whole.model, _tolerance(loss)
        if not as_in_batch(*compared)[0]:
            return [Leak("loss_fn", _ADDS, _NUMBER)]
    return []


def _first_mixing(whole: _Trace, alone: Sequence[_Trace]) -> Optional[_Call]:
    """The first call with the same inputs in the batch as alone, and other outputs."""
    each: Dict[Tuple[str, int], List[_Call]] = {}
    for trace in alone:
        for key, call in _numbered(trace.calls).items():
            each.setdefault(key, []).append(call)
    for key, call in _numbered(whole.calls).items():
        calls = each.get(key, [])
        if len(calls) != len(alone):
            continue
        if not _same(call.outputs, [c.outputs for c in calls]):
            if _same(call.inputs, [c.inputs for c in calls]):
                return call
    return None


def _numbered(calls: Sequence[_Call]) -> Dict[Tuple[str, int], _Call]:
    """The calls by module and by their number among the module's calls."""
    found: Dict[Tuple[str, int], _Call] = {}
    times: Dict[str, int] = {}
    for call in calls:
        times[call.name] = times.get(call.name, 0) + 1
        found[call.name, times[call.name]] = call
    return found


def _same(whole: List[T], columns: List[List[T]]) -> bool:
    if {len(column) for column in columns} != {len(whole)}:
        return True  # structures differ, and can't be compared
    return all(_holds(y, xs) for y, xs in zip(whole, zip(*columns)))


def _holds(y: T, xs: Sequence[T]) -> bool:
    """
    True if a tensor holds the samples' values in any order, or equals each sample's;
    also if lengths differ, and nothing can be compared.
    """
    if not y.dim() or all(_close(x, y) for x in xs):
        return True
    flat = torch.cat([x.flatten() for x in xs])
    if flat.numel() != y.numel():
        return len({x.shape for x in xs}) > 1
    return _close(flat.to(y.dtype).sort().values, y.flatten().sort().values)


def _close(a: T, b: T) -> bool:
    return close(a, b, _tolerance(b))


def _tolerance(x: T) -> float:
    return {8: 1e-5, 4: 1e-3}.get(x.dtype.itemsize, 0.1)


def _module_leak(name: str, module: nn.Module, reason: str = _MIXES) -> Leak:
    kind = type(module).__name__
    parts = {kind.lower(), *name.lower().split(".")}
    parts |= {n for n, _ in module.named_children()}
    fix = _ANY
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        fix = _NORM
    elif any(m in p for p in parts for m in ("expert", "router", "moe", "gate")):
        fix = _EXPERTS
    return Leak(f"{name or 'the model'} ({kind})", reason, fix)
