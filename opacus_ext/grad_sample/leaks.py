"""Where a model lets one sample's loss depend on another's.

That a model does is found by replacing samples (independence.py). What is said about
it here is for the user: in which module it begins, or which of the model's own numbers
for the whole batch (a loss, a balancing loss) mixes samples, and what to do.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from opacus_ext.grad_sample.calls import tensors_in
from opacus_ext.grad_sample.independence import (
    RandomState,
    again,
    changes,
    no_dropout,
    replace,
)

LossFn = Callable[[nn.Module, Any], torch.Tensor]

_NORM = (
    "It normalises over the batch. Use GroupNorm or LayerNorm: opacus.validators."
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
    the batch, an expert's capacity counted over the batch, a balancing loss over the
    batch, a mean over all tokens of the batch. Clipping each sample bounds nothing
    then, and the modes of this package refuse such a model where they can see it; what
    a loss function does outside the model only this function and
    :func:`~opacus_ext.check_per_sample_gradients` see.

    Each sample is put among copies of itself, and is taken away from the others, and
    nothing may change for those that stay: neither their outputs nor their losses nor
    the gradient of these. So give a real batch, with samples of different lengths (of a
    large one, 8 samples are looked at).
    Random numbers are the same in all runs, dropout is off; model and random state stay
    as they were.

    Args:
        model: before ``make_private``; its train/eval mode is kept
        batch: a tensor, or a tuple or dict of tensors with the batch first
        loss_fn: ``loss_fn(model, batch)`` gives the losses ``[B]``. None: only the
            model's outputs are looked at, ``model(batch)``, ``model(*batch)`` or
            ``model(**batch)``

    Returns:
        What was found, nothing if all is well.

    Raises:
        ValueError: for a batch of less than two different samples

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
    subject = _in_float64(model, batch, loss_fn) or _Subject(model, batch, loss_fn)
    found: Dict[str, Leak] = {}
    samples = range(subject.size - 1, -1, -max(1, (subject.size - 1) // 7))
    looked = False
    for change in changes(subject.size, samples if subject.size > 1 else ()):
        given = subject.batch, subject.size, 0, change
        other = replace(*given, lambda first, x: True)
        if other is not None:
            looked = True
            for leak in subject.compare(other, change.keep):
                found.setdefault(leak.where, leak)
    if not looked:
        raise ValueError(
            "To look for leaks takes a batch of two samples or more that differ."
        )
    return list(found.values())


def _in_float64(model: nn.Module, batch: Any, loss_fn: Optional[LossFn]) -> Any:
    """The same in float64, where less is hidden by rounding, if it runs in it."""

    def widened(x: Any) -> Any:
        is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.double() if is_float else x

    try:
        wide = copy.deepcopy(model).double()
        subject = _Subject(wide, tree_map(widened, batch), loss_fn)
        subject.run(subject.batch)
        return subject
    except Exception:  # a kernel that is not there, or the model's own error
        return None


class _Subject:
    def __init__(self, model: nn.Module, batch: Any, loss_fn: Optional[LossFn]):
        model = copy.deepcopy(model)
        no_dropout(model)
        self.model, self.batch, self.loss_fn = model, batch, loss_fn
        tensors = [x for x in tree_flatten(batch)[0] if isinstance(x, torch.Tensor)]
        self.size = len(tensors[0]) if tensors and tensors[0].dim() else 0
        device = next((x.device for x in tensors if x.is_cuda), torch.device("cpu"))
        self.state = RandomState(device)

    def call(self, batch: Any) -> Any:
        if isinstance(batch, Mapping):
            return self.model(**batch)
        return self.model(*batch) if isinstance(batch, tuple) else self.model(batch)

    def run(self, batch: Any) -> Tuple["Trace", Any]:
        losses: Any = None
        with Trace(self.model) as trace, torch.enable_grad():
            if self.loss_fn is None:
                again(self.model, lambda: self.call(batch), self.state, False)
            else:
                fn = self.loss_fn
                run = functools.partial(fn, self.model, batch)
                losses = again(self.model, run, self.state, False)
        return trace, losses

    def compare(self, other: Any, keep: List[int]) -> Iterator[Leak]:
        (before, losses), (after, changed) = self.run(self.batch), self.run(other)
        leak = begins_in(before, after, self.size, keep)
        if leak is not None:
            yield leak
            return
        if losses is None:
            for name in mixed_numbers(before, after, self.size, keep):
                yield number_leak(f"output {name}")
            return
        if losses.dim() != 1 or len(losses) != self.size:
            yield Leak(
                "loss_fn",
                f"it gives losses of shape {tuple(losses.shape)} for {self.size} "
                "samples, so their shares can't be told apart.",
                _NUMBER,
            )
            return
        params = [p for p in self.model.parameters() if p.requires_grad]
        values = [x[keep] for x in (losses, changed)]
        grads = [
            torch.autograd.grad(v.sum(), params, allow_unused=True) for v in values
        ]
        pairs = [tuple(v.detach() for v in values)]
        pairs += [p for p in zip(*grads) if p[0] is not None and p[1] is not None]
        alone = any((a is None) != (b is None) for a, b in zip(*grads))
        if alone or any(_differ(a, b) for a, b in pairs):
            yield number_leak("loss_fn")


def number_leak(where: str) -> Leak:
    """A number, or losses, in which samples are mixed."""
    reason = "what one sample adds to it depends on the others of the batch."
    return Leak(where, reason, _NUMBER)


_HOLDERS = (torch.Tensor, list, tuple, dict)


class _Seen(NamedTuple):
    name: str
    module: nn.Module
    inputs: List[torch.Tensor]
    outputs: List[torch.Tensor]


class Trace:
    """
    Within it, what goes into and comes out of every module, in order; and, if asked
    for, what numbers modules keep as ``attributes``.
    """

    def __init__(self, model: nn.Module, attributes: bool = False):
        self.model = model
        self.seen: List[_Seen] = []
        self.output: Any = None
        self.attributes = attributes
        self.kept: Dict[str, torch.Tensor] = {}

    def __enter__(self) -> "Trace":
        def note(name: str) -> Callable:
            def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
                values = tensors_in((args, kwargs)), tensors_in(output)
                self.seen.append(_Seen(name, module, *values))
                if not name:
                    self.output = output
                    self.kept = kept_numbers(self.model) if self.attributes else {}

            return hook

        self.handles = [
            m.register_forward_hook(note(name), with_kwargs=True)
            for name, m in self.model.named_modules()
        ]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self.handles:
            handle.remove()


def begins_in(
    before: Trace, after: Trace, size: int, keep: List[int]
) -> Optional[Leak]:
    """
    The first module that gives the samples ``keep`` something else because the others
    are other ones, though it was given the same for them; None if the model as a whole
    gives them the same.
    """

    def differ(a: List[torch.Tensor], b: List[torch.Tensor]) -> bool:
        return _samples_differ(a, b, size, keep)

    pairs = list(zip(before.seen, after.seen))
    if not pairs or not differ(pairs[-1][0].outputs, pairs[-1][1].outputs):
        return None
    for a, b in pairs:
        if a.name != b.name:
            break
        if differ(a.outputs, b.outputs) and not differ(a.inputs, b.inputs):
            return module_leak(a.name, a.module)
    return module_leak("", before.model)


def module_leak(name: str, module: nn.Module) -> Leak:
    """A module that mixes samples."""
    kind = type(module).__name__
    fix = _ANY
    if "BatchNorm" in kind or "InstanceNorm" in kind:
        fix = _NORM
    else:
        parts = {kind.lower(), *name.lower().split(".")}
        parts |= {n for n, _ in module.named_children()}
        if any(
            m in part for part in parts for m in ("expert", "router", "moe", "gate")
        ):
            fix = _EXPERTS
    reason = "what it gives for a sample changes with another sample of the batch."
    return Leak(f"{name or 'the model'} ({kind})", reason, fix)


def mixed_numbers(before: Trace, after: Trace, size: int, keep: List[int]) -> List[str]:
    """
    Which of the model's outputs are numbers for the whole batch that are no sum of one
    term a sample: the gradient for samples ``keep`` depends on the others.
    """
    found = []
    numbers = [dict(named_tensors(t.output)) | t.kept for t in (before, after)]
    for name, a in numbers[0].items():
        b = numbers[1].get(name)
        if not is_number(a, size) or b is None or not b.requires_grad:
            continue
        grads = [_gradients(x.sum(), t, size) for x, t in ((a, before), (b, after))]
        pairs = [p for p in zip(*grads) if p[0] is not None and p[1] is not None]
        if len(grads[0]) != len(grads[1]) or any(
            _samples_differ([x], [y], size, keep) for x, y in pairs
        ):
            found.append(name)
    return found


def is_number(x: torch.Tensor, size: int) -> bool:
    """
    Whether it could be trained on and is a number for the whole batch of ``size``, or
    a few (one a layer). Losses of flattened tokens have this form too, and pass.
    """
    some = x.dim() == 1 and len(x) > 0 and (len(x) != size or size == 1)
    return x.grad_fn is not None and (x.dim() == 0 or x.numel() == 1 or some)


# Of a sum of numbers, or a multiple of one, the parts are looked at.
_LINEAR = ("Add", "Sub", "Mul", "Div", "Neg", "ToCopy", "Clone", "Alias")
_OF_ENTRIES = (
    *("MseLoss", "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropyWithLogits"),
)


def over_tokens(
    number: torch.Tensor, inputs: List[torch.Tensor], size: int
) -> Optional[bool]:
    """
    Whether a model's own loss is a mean of several rows a sample, or of some rows only,
    so that a sample's share in it depends on how many rows the others have. Read off
    the loss functions in its graph; None if that does not tell.

    Args:
        number: computed by the model
        inputs: the tensors that the model was given
        size: the number of samples, ``B``
    """
    todo, seen, known = [number.grad_fn], set(), True
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        kind = node.name().partition("Backward")[0]
        mean = getattr(node, "_saved_reduction", None) == 1
        if kind in ("NllLoss", "NllLoss2D"):
            if mean and not _one_a_sample(node, inputs, size):
                return True
            known = known and mean
        elif kind in _OF_ENTRIES:
            known = known and mean and node._saved_self.shape[:1] == (size,)
        else:
            parts = [n for n, _ in node.next_functions if n is not None]
            one = kind in ("Add", "Sub") or len(parts) == 1
            known = known and kind in _LINEAR and one
            if not hasattr(node, "record"):  # behind it is a layer
                todo += parts
    return False if known else None


def _one_a_sample(node: Any, inputs: List[torch.Tensor], size: int) -> bool:
    """Whether a mean is over labels ``[B]`` that the model was given, and all count."""
    target = node._saved_target
    return (
        target.numel() == size
        and node._saved_weight is None
        and float(node._saved_total_weight) == size  # none is ignored
        and any(
            x.numel() == size and torch.equal(x.reshape(-1).to(target), target.view(-1))
            for x in inputs
        )
    )


def kept_numbers(model: nn.Module) -> Dict[str, torch.Tensor]:
    """Numbers for the whole batch that modules keep as attributes, by their names."""
    found = {}
    for prefix, module in model.named_modules():
        for key, value in list(vars(module).items()):
            if key.startswith("_") or not isinstance(value, _HOLDERS):
                continue
            name = f"{prefix}.{key}" if prefix else key
            for path, x in named_tensors(value):
                if x.grad_fn is not None and (x.dim() == 0 or x.numel() == 1):
                    many = not isinstance(value, torch.Tensor)
                    found[f"{name}.{path}" if many else name] = x
    return found


def _gradients(x: torch.Tensor, trace: Trace, size: int) -> Tuple:
    among = [
        y
        for seen in trace.seen
        for y in seen.outputs
        if y.requires_grad and y.dim() > 1 and len(y) and len(y) % size == 0
    ]
    if not among:
        return ()
    return torch.autograd.grad(x, among, retain_graph=True, allow_unused=True)


def named_tensors(value: Any, name: str = "") -> Iterator[Tuple[str, torch.Tensor]]:
    """The tensors in a model's output, by name or position."""
    items: Any = ()
    if isinstance(value, torch.Tensor):
        yield name or "0", value
    elif isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, x in items:
        yield from named_tensors(x, f"{name}.{key}" if name else str(key))


def _samples_differ(
    before: List[torch.Tensor], after: List[torch.Tensor], size: int, keep: List[int]
) -> bool:
    """Whether rows of samples ``keep`` differ, where the shape shows the samples."""
    if len(before) != len(after):
        return False
    return any(_rows_differ(a, b, size, keep) for a, b in zip(before, after))


def _rows_differ(a: torch.Tensor, b: torch.Tensor, size: int, keep: List[int]) -> bool:
    if a.shape != b.shape or not a.dim() or not len(a):
        return False
    if len(a) == 1 and a.dim() > 1:  # the batch flattened to one sequence
        a, b = a[0], b[0]
    views, rows = [], torch.tensor(keep, device=a.device)
    for dim in range(min(2, a.dim())):
        if a.shape[dim] == size:
            views.append([x.index_select(dim, rows) for x in (a, b)])
        elif dim == 0 and len(a) % size == 0:
            views.append([x.unflatten(0, (size, -1))[rows] for x in (a, b)])
    return bool(views) and all(_differ(*view) for view in views)


def _differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    if not a.numel():
        return False
    # Many norms compute in float32 inside a model in float64.
    allowed = 0.0
    if a.is_floating_point():
        allowed = min(max(1e3 * torch.finfo(a.dtype).eps, 1e-6), 0.05)
    a, b = (x.detach().double().nan_to_num() for x in (a, b))
    return float((a - b).abs().max()) > allowed * max(float(a.abs().max()), 1e-30)
