"""Whether a model computes each sample by itself: its outputs, beside those by sample.

Looked at once for each kind of input. It decides how outputs are put together, and
refuses models whose samples are not independent, with the first module that mixes them.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

import torch
from torch import nn

from opacus_ext.grad_sample.samplewise.run import Refused
from opacus_ext.grad_sample.samplewise.walk import close, tensors_in

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.inputs import Inputs


class _NotTrained(torch.autograd.Function):
    """Behind a number that the batch has and no sample: nobody may train on it."""

    @staticmethod
    def forward(ctx, x, text):
        ctx.text = text
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise Refused(ctx.text)


class Join(NamedTuple):
    """
    How one tensor of the output is put together from those of the samples.

    Attributes:
        dim: of the samples in it, if it has one
        how: "" for along ``dim``; "mean", "sum" or "number" for one number; "shared"
            for one that all samples agree on
    """

    dim: Optional[int] = None
    how: str = ""

    def __call__(self, inner: torch.Tensor, engine: "Engine") -> torch.Tensor:
        """``[B, *shape]`` to the batch's."""
        if self.how == "shared":
            return inner[0]
        if self.how == "mean":
            return inner if engine.each else inner.mean(0)
        if self.how == "sum":
            return inner if engine.each else inner.sum(0)
        if self.how == "number":
            return self.guarded(inner if engine.each else inner.mean(0), engine)
        if self.dim is None:
            return inner.flatten(0, 1) if inner.dim() > 1 else inner
        return inner.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    def guarded(self, x: torch.Tensor, engine: "Engine") -> torch.Tensor:
        """Refuses to be trained on, if it is what no sample has."""
        if self.how == "number" and x.requires_grad and not x.dim():
            return _NotTrained.apply(
                x,
                f"{engine.describe()}: trained on a number that it computes for the "
                "whole batch, and that is neither the mean nor the sum of what it "
                "computes for each sample alone (a mean over the tokens of all "
                "samples, a balancing loss). Use opacus_ext.losses.model_losses, which "
                "gives one loss a sample, or the model's other outputs.",
            )
        return x

    def split(
        self, grad: torch.Tensor, size: int, shape: torch.Size
    ) -> List[torch.Tensor]:
        """The gradient of each sample's own, ``[*shape]``, from the batch's."""
        if self.how == "shared":
            return [grad / size] * size
        if self.how and not grad.dim():
            return [grad / size if self.how != "sum" else grad] * size
        if self.how or not shape:
            return list(grad.unbind())
        return list(grad.chunk(size, self.dim or 0))


def joins_of(
    engine: "Engine",
    inputs: "Inputs",
    own: List[torch.Tensor],
    raw: List[Tuple[torch.Tensor, bool]],
) -> List[Optional[Join]]:
    """
    Args:
        own: the tensors of the model's output
        raw: of the output by sample, and whether each has one value a sample

    Raises:
        Refused: if they differ
    """
    if len(own) != len(raw):
        raise Refused(
            f"{engine.describe()} returns {len(own)} tensors for a batch of "
            f"{inputs.size} and {len(raw)} for one sample. Return the same from each."
        )
    joins: List[Optional[Join]] = []
    for whole, (found, batched) in zip(own, raw):
        join = _join(engine, inputs, whole, found, batched)
        if join is None:
            _refuse(engine, inputs, whole, found)
        joins.append(join)
    return joins


def _join(
    engine: "Engine",
    inputs: "Inputs",
    own: torch.Tensor,
    found: Any,
    batched: bool,
) -> Optional[Join]:
    if isinstance(found, list):  # samples of several shapes
        joined = torch.cat(found) if found[0].dim() else torch.stack(found)
        return Join() if close(joined, own) else None
    if not batched:
        if close(found, own):
            return Join(how="shared")
        found = found.expand(inputs.size, *found.shape)
    if found.dim() == 1 and own.dim() == 0:
        if not found.is_floating_point():
            same = bool((found == found[0]).all())
            return Join(how="shared") if same else Join(how="number")
        for how in ("mean", "sum"):
            if close(getattr(found, how)(0), own):
                return Join(how=how)
        return Join(how="number")
    if close(Join()(found, engine), own):
        return Join()
    for dim in range(found.dim() - 1):
        join = Join(dim)
        if close(join(found, engine), own):
            return join
    if found.shape[1:] == own.shape and all(close(x, own) for x in found):
        return Join(how="shared")
    return None


def _refuse(
    engine: "Engine", inputs: "Inputs", own: torch.Tensor, found: Any
) -> None:
    shape = [tuple(x.shape) for x in (found if isinstance(found, list) else [found])]
    where = first_mixing(engine, inputs)
    if where == "random":
        return
    raise Refused(
        f"{engine.describe()}: its output of shape {tuple(own.shape)} for a batch of "
        f"{inputs.size} is not what it gives for each sample alone "
        f"({' and '.join(map(str, shape[:3]))} side by side). {where}"
    )


def first_mixing(engine: "Engine", inputs: "Inputs") -> str:
    """The first module whose output for the batch is not that for each sample."""
    calls: List[Tuple[str, List[torch.Tensor]]] = []
    handles = []

    def note(name: str):
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            found = [x.detach().clone() for x in tensors_in(output)]
            calls.append((f"{name or 'the model'} ({type(module).__name__})", found))

        return hook

    def run(args: tuple, kwargs: dict) -> List[Tuple[str, List[torch.Tensor]]]:
        calls.clear()
        with engine.paused():
            engine.module(*args, **kwargs)
        return list(calls)

    try:
        for name, module in engine.module.named_modules():
            handles.append(module.register_forward_hook(note(name)))
        whole = run(inputs.args, inputs.kwargs)
        again = run(inputs.args, inputs.kwargs)
        if any(
            not close(x, y)
            for (_, xs), (_, ys) in zip(whole, again)
            for x, y in zip(xs, ys)
        ):
            return "random"
        alone = [
            run(*part.alone(b)[:2]) for _, part in inputs.parts() for b in range(part.size)
        ]
    except Exception as error:
        return f"A sample can't be run alone ({type(error).__name__}: {error})."
    finally:
        for handle in handles:
            handle.remove()
    for i, (name, found) in enumerate(whole):
        each = [a[i][1] if i < len(a) and a[i][0] == name else None for a in alone]
        if any(x is None or len(x) != len(found) for x in each):
            continue
        for y, xs in zip(found, zip(*each)):
            if not _is_joined(y, xs):
                return (
                    f"Samples are mixed first in {name}: a statistic over the batch "
                    "(BatchNorm, a capacity or a loss counted over the batch), or an "
                    "input that is no batch of samples. Compute it for each sample; "
                    "give make_private take=..., which takes a sample out of the "
                    "inputs, or shared=[...], the names of inputs that samples share."
                )
    return (
        "Samples are mixed in the model's own forward, or an input is no batch of "
        "samples. Compute each sample by itself; give make_private take=..., which "
        "takes a sample out of the inputs, or shared=[...], the names of inputs that "
        "samples share."
    )


def _is_joined(y: torch.Tensor, xs: Tuple[torch.Tensor, ...]) -> bool:
    if not y.dim():
        return all(close(x, y) for x in xs) or not y.is_floating_point()
    if all(close(x, y) for x in xs):
        return True
    for dim in range(y.dim()):
        if all(x.dim() == y.dim() for x in xs):
            same = [x.shape[:dim] + x.shape[dim + 1 :] for x in xs]
            if all(s == y.shape[:dim] + y.shape[dim + 1 :] for s in same):
                if close(torch.cat(xs, dim), y):
                    return True
    return False


# -- running a model once more, as if it had not been --------------------------------


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """Within it, modules named ``*Drop*`` and numbers named ``*drop*`` are zero."""
    before: List[Tuple[nn.Module, str, Any]] = []
    for part in module.modules():
        dropout = "Drop" in type(part).__name__
        for name, value in list(vars(part).items()):
            number = type(value) in (int, float) and value
            if number and ("drop" in name.lower() or (dropout and name == "p")):
                before.append((part, name, value))
                setattr(part, name, type(value)(0))
    try:
        yield
    finally:
        for part, name, value in before:
            setattr(part, name, value)


_TORCH = ("torch.nn.utils", "torch.nn.modules", "accelerate.", "peft.", "opacus_ext.")


def is_own_hook(hook: Any) -> bool:
    """Whether a forward hook belongs to how a layer computes, not to the user."""
    for part in (hook, getattr(hook, "func", None), getattr(hook, "__self__", None)):
        where = getattr(part, "__module__", None) or type(part).__module__
        if isinstance(where, str) and where.startswith(_TORCH):
            return True
    return False


_TABLES = ("_forward_hooks", "_forward_pre_hooks")


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Within it, the user's forward hooks see nothing."""
    before = []
    for part in module.modules():
        for name in _TABLES:
            table = vars(part)[name]
            if table and not all(map(is_own_hook, table.values())):
                kept = {i: h for i, h in table.items() if is_own_hook(h)}
                before.append((table, dict(table)))
                table.clear()
                table.update(kept)
    try:
        yield
    finally:
        for table, hooks in before:
            table.clear()
            table.update(hooks)


_CONTAINERS = (list, dict, set)


def _reachable(module: nn.Module) -> Iterator[Any]:
    """Lists and the like that a model's code may write to, its globals among them."""
    for part in module.modules():
        for name, value in vars(part).items():
            if type(value) in _CONTAINERS and not name.startswith("_"):
                yield value
    for kind in {type(part) for part in module.modules()}:
        code = getattr(kind.forward, "__code__", None)
        if code is None or kind.__module__.startswith(("torch.", "transformers.")):
            continue
        scope = kind.forward.__globals__
        names = set(code.co_names)
        for inner in code.co_consts:
            names.update(getattr(inner, "co_names", ()))
        for name in names:
            if type(scope.get(name)) in _CONTAINERS:
                yield scope[name]
        for cell in kind.forward.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if type(value) in _CONTAINERS:
                yield value


@contextmanager
def preserved(module: nn.Module) -> Iterator[None]:
    """Afterwards the model is as it was: buffers, attributes, random numbers."""
    parts = list(module.modules())
    attributes = [dict(vars(part)) for part in parts]
    buffers: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {
        id(b): (b, b.detach().clone()) for b in module.buffers()
    }
    tables = [dict(part._buffers) for part in parts]
    held = {id(value): (value, copy.copy(value)) for value in _reachable(module)}
    devices = {p.device for p in module.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            yield
        finally:
            for part, kept, table in zip(parts, attributes, tables):
                vars(part).clear()
                vars(part).update(kept)
                part._buffers.clear()
                part._buffers.update(table)
            with torch.no_grad():
                for buffer, value in buffers.values():
                    if not torch.equal(buffer, value):
                        buffer.copy_(value)
            for value, kept in held.values():
                if isinstance(value, list):
                    value[:] = kept
                else:
                    value.clear()
                    value.update(kept)
