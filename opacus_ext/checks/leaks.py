"""Where a model lets one sample's loss depend on another's.

The model runs on the batch, and on each sample alone. Where these differ, what is said
is for the user: in which module it begins, or which of the model's own numbers for the
whole batch mixes samples, and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import keystr, tree_leaves, tree_leaves_with_path, tree_map

from opacus_ext.checks.subject import copied, no_dropout
from opacus_ext.refused import Refused

T = torch.Tensor
LossFn = Callable[[nn.Module, Any], T]

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
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn] = None
) -> List[Leak]:
    """
    Looks for anything that makes one sample's loss depend on another: statistics over
    the batch, an expert's capacity counted over the batch, a mean over all tokens of
    the batch. Clipping each sample bounds nothing then. In training each sample runs by
    itself, so that a model is trained as its samples alone would be; what a loss
    function does outside the model only this function and
    :func:`~opacus_ext.check_per_sample_gradients` see.

    A copy of the model runs on the batch, and on each sample alone, which must give the
    same outputs and losses. So give a real batch, with samples of different lengths (of
    a large one, 8 samples are looked at). Dropout is off, and random numbers are their
    mean.

    Args:
        model: before ``make_private``; its train/eval mode is kept
        batch: a tensor, or a tuple or dict of tensors with the batch first
        loss_fn: ``loss_fn(model, batch)`` gives the losses ``[B]``. None: only the
            model's outputs are looked at, ``model(batch)``, ``model(*batch)`` or
            ``model(**batch)``

    Returns:
        What was found, nothing if all is well.

    Raises:
        Refused: for a batch of less than two different samples

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus_ext import find_leaks
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        >>> for leak in find_leaks(model, torch.randn(5, 3)):
        ...     print(leak.where)
        1 (BatchNorm1d)
        >>> find_leaks(nn.Linear(3, 2), torch.randn(5, 3))
        []
    """
    tensors = [x for x in tree_leaves(batch) if isinstance(x, T) and x.dim()]
    size = len(tensors[0]) if tensors else 0
    own = [x for x in tensors if len(x) == size]
    if size < 2 or all(torch.equal(x, x[:1].expand_as(x)) for x in own):
        raise Refused(
            "To look for leaks takes a batch of two samples or more that differ.",
            parameter="batch",
            remedy="Pass more samples, of real data.",
        )
    rows = torch.linspace(0, size - 1, min(size, 8)).long()
    some = _taken(batch, rows, size)
    wide = tree_map(
        lambda x: x.double() if isinstance(x, T) and x.is_floating_point() else x, some
    )
    try:  # in float64 less is hidden by rounding
        whole = _run(copied(model).double(), wide, loss_fn)
        model, some = copied(model).double(), wide
    except Exception:  # a kernel that is not there, or the model's own error
        whole = _run(copied(model), some, loss_fn)
    alone = []
    for b in range(len(rows)):
        one = _taken(some, torch.tensor([b]), len(rows))
        ran = _run(copied(model), one, loss_fn, raising=False)
        if ran.error is not None:
            name, module = ran.error[0]
            reason = f"it can't run one sample alone ({ran.error[1]})."
            return [_module_leak(name, module, reason)]
        alone.append(ran)
    return _compare(model, whole, alone)


def _taken(batch: Any, rows: T, size: int) -> Any:
    def taken(x: Any) -> Any:
        cut = isinstance(x, T) and x.dim() and len(x) == size
        return x[rows.to(x.device)] if cut else x

    return tree_map(taken, batch)


class _NoChance(TorchFunctionMode):
    """Random numbers are their mean, and nothing is dropped: the same in every run."""

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
        if name in _MEANS and isinstance(found, T):
            with torch.no_grad():
                found.fill_(_MEANS[name])
        elif name == "uniform_":
            low, high = (*args[1:], *kwargs.values(), 0.0, 1.0)[:2]
            with torch.no_grad():
                found.fill_((low + high) / 2)
        return found


_MEANS = {"rand": 0.5, "rand_like": 0.5, "randn": 0, "randn_like": 0, "normal_": 0}
_MEANS.update({"bernoulli": 1, "bernoulli_": 1, "exponential_": 1})


class _Call(NamedTuple):
    """One call of a module: its name, and tensors that went in and came out."""

    name: str
    module: nn.Module
    inputs: List[T]
    outputs: List[T]


class _Ran(NamedTuple):
    """A run: calls of modules in the order in which they end, and what it gave."""

    calls: List[_Call]
    outputs: List[Tuple[str, T]]
    losses: Optional[T]
    error: Optional[Tuple[Tuple[str, nn.Module], Exception]] = None


def _run(
    model: nn.Module, batch: Any, loss_fn: Optional[LossFn], raising: bool = True
) -> _Ran:
    """Runs a copy of the model, which is not used again."""
    no_dropout(model)
    calls: List[_Call] = []
    opened: List[_Call] = []
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
    batch = tree_map(lambda x: x.clone() if isinstance(x, T) else x, batch)
    losses = None
    with torch.random.fork_rng(), _NoChance():
        torch.manual_seed(0)
        try:
            if loss_fn is not None:
                losses = loss_fn(model, batch)
            elif isinstance(batch, Mapping):
                model(**batch)
            else:
                model(*batch if isinstance(batch, tuple) else [batch])
        except Exception as error:
            if raising:
                raise
            call = opened[-1] if opened else _Call("", model, [], [])
            return _Ran(calls, [], None, ((call.name, call.module), error))
    found = tree_leaves_with_path(outputs[0]) if len(outputs) == 1 else []
    named = [(keystr(path), x) for path, x in found if isinstance(x, T)]
    return _Ran(calls, named, losses)


def _copied(value: Any) -> List[T]:
    return [x.detach().clone() for x in tree_leaves(value) if isinstance(x, T)]


def _compare(model: nn.Module, whole: _Ran, alone: Sequence[_Ran]) -> List[Leak]:
    mixed, numbers = False, []
    columns = list(zip(*(ran.outputs for ran in alone)))
    for (name, y), column in zip(whole.outputs, columns):
        each = [x for _, x in column]
        if not y.dim():
            if y.requires_grad and not all(_close(x, y) for x in each):
                numbers.append(name)
        elif not _holds(y, each):
            mixed = True
    losses = [] if whole.losses is None else _losses(model, whole, alone)
    if mixed or losses:
        call = _first_mixing(whole, alone)
        if call is not None:
            return [_module_leak(call.name, call.module)]
        if mixed:
            return [_module_leak("", model)]
    if whole.losses is not None:
        return losses
    return [_number_leak(f"output{name}") for name in numbers]


def _losses(model: nn.Module, whole: _Ran, alone: Sequence[_Ran]) -> List[Leak]:
    """Whether losses, or the gradients of these, differ."""
    losses = whole.losses
    if losses.shape != (len(alone),):
        reason = (
            f"it gives losses of shape {tuple(losses.shape)} for {len(alone)} samples, "
            "so their shares can't be told apart."
        )
        return [Leak("loss_fn", reason, _NUMBER)]
    for loss, ran in zip(losses, alone):
        if not _close(ran.losses.reshape(()), loss):
            return [_number_leak("loss_fn")]
        if not _close(_gradient(ran.losses.sum()), _gradient(loss)):
            return [_number_leak("loss_fn")]
    return []


def _gradient(loss: T) -> T:
    """The gradient of all parameters in a graph, as one vector by their order in it."""
    if not loss.requires_grad:
        return torch.zeros(1)
    leaves, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop(0)
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        todo += [parent for parent, _ in node.next_functions]
    grads = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
    norms = [0.0 if g is None else float(g.double().norm()) for g in grads]
    return torch.tensor(sorted(n for n in norms if n), dtype=torch.float64)


def _first_mixing(whole: _Ran, alone: Sequence[_Ran]) -> Optional[_Call]:
    """
    The first call that was given the same values for the batch as for its samples one
    by one, and gave others.
    """
    each: Dict[Tuple[str, int], List[_Call]] = {}
    for ran in alone:
        for key, call in _numbered(ran.calls):
            each.setdefault(key, []).append(call)
    for key, call in _numbered(whole.calls):
        calls = each.get(key, [])
        if len(calls) != len(alone):
            continue
        if not _same(call.outputs, [c.outputs for c in calls]):
            if _same(call.inputs, [c.inputs for c in calls]):
                return call
    return None


def _numbered(calls: Sequence[_Call]) -> List[Tuple[Tuple[str, int], _Call]]:
    times: Dict[str, int] = {}
    found = []
    for call in calls:
        times[call.name] = times.get(call.name, 0) + 1
        found.append(((call.name, times[call.name]), call))
    return found


def _same(whole: List[T], columns: List[List[T]]) -> bool:
    if {len(column) for column in columns} != {len(whole)}:
        return True  # of another structure: nothing can be told
    return all(_holds(y, xs) for y, xs in zip(whole, zip(*columns)))


def _holds(y: T, xs: Sequence[T]) -> bool:
    """
    Whether a tensor holds the values of the samples', in whatever order, or is each of
    them. Of other lengths nothing can be told.
    """
    if not y.dim() or all(_close(x, y) for x in xs):
        return True
    flat = torch.cat([x.flatten() for x in xs])
    if flat.numel() != y.numel():
        return len({x.shape for x in xs}) > 1
    return _close(flat.to(y.dtype).sort().values, y.flatten().sort().values)


def _close(a: T, b: T) -> bool:
    if a.shape != b.shape:
        return False
    tolerance = {8: 1e-5, 4: 1e-3}.get(b.dtype.itemsize, 0.1)
    a, b = a.detach().double(), b.detach().double()
    scale = float(b.abs().nan_to_num(posinf=0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, 0, tolerance * max(scale, 1e-12), True)


def _number_leak(where: str) -> Leak:
    """A number, or losses, in which samples are mixed."""
    reason = "what one sample adds to it depends on the others of the batch."
    return Leak(where, reason, _NUMBER)


_MIXES = "what it gives for a sample changes with another sample of the batch."


def _module_leak(name: str, module: nn.Module, reason: str = _MIXES) -> Leak:
    """A module that mixes samples."""
    kind = type(module).__name__
    parts = {kind.lower(), *name.lower().split(".")}
    parts |= {n for n, _ in module.named_children()}
    fix = _ANY
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        fix = _NORM
    elif any(m in p for p in parts for m in ("expert", "router", "moe", "gate")):
        fix = _EXPERTS
    return Leak(f"{name or 'the model'} ({kind})", reason, fix)
