"""Whether a model computes each sample by itself: its outputs, beside those by sample.

Looked at once for each kind of input and of output. It decides how outputs are put
together, and refuses models whose samples are not independent, with the first module
that mixes them.
"""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext.grad_sample.samplewise.packed import unpacked
from opacus_ext.grad_sample.samplewise.walk import close, leaves_in, named_tensors
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.inputs import Inputs

T = torch.Tensor


class NewOutput(Exception):
    """A run gave an output of a kind that was not compared yet."""


def kind_of(output: Any, shape: Callable = lambda x: x.shape) -> tuple:
    """
    What outputs of one kind have in common: all but lengths and values.

    Args:
        shape: of a tensor, as samples give it
    """
    return tuple(
        (name, x.dtype, tuple(n == 1 for n in shape(x)))
        for name, x in named_tensors(output)
    )


class _NotTrained(torch.autograd.Function):
    """Behind a number that the batch has and no sample: nobody may train on it."""

    @staticmethod
    def forward(ctx, x, error):
        ctx.error = error
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        raise ctx.error


class Join(NamedTuple):
    """
    How one tensor of the output is put together from those of the samples.

    Attributes:
        dim: of the samples in it, if it has one
        how: "" for along ``dim``; "mean", "sum" or "number" for one value of the batch,
            where "number" is none of the two; "shared" for one that all samples agree
            on; "only" of a batch of one
        name: of the output
        squeezed: whether a sample alone gives it without its dim, as a forward with
            ``squeeze()`` does
    """

    dim: Optional[int] = None
    how: str = ""
    name: str = ""
    squeezed: bool = False

    def __call__(self, inner: T, engine: "Engine") -> T:
        """``[B, *shape]`` to the batch's."""
        if (
            self.how
            and engine.per_sample is not None
            and (self != ONLY or inner.dim() < 2)
        ):
            return inner
        if self.how in ("shared", "only"):
            return inner[0]
        if self.how == "sum":
            return inner.sum(0, dtype=inner.dtype)
        if self.how == "mean":
            return inner.mean(0)
        if self.how == "number":
            wide = inner if _is_real(inner) else inner.double()
            return self.guarded(wide.mean(0).to(inner.dtype), engine)
        if self.squeezed:
            return inner
        if self.dim is None:
            return inner.flatten(0, 1) if inner.dim() > 1 else inner
        return inner.movedim(0, self.dim).flatten(self.dim, self.dim + 1)

    def guarded(self, x: T, engine: "Engine") -> T:
        """Refuses to be trained on, if it is what no sample has."""
        if self.how == "number" and engine.per_sample is None and x.requires_grad:
            error = Refused(
                f"{engine.describe()}: output {self.name or '0'} is trained on, and it "
                "is neither the mean nor the sum of what the model computes for each "
                "sample alone (a mean over the tokens of all samples, a balancing "
                "loss).",
                module=engine.describe(),
                remedy=(
                    "Use opacus_ext.losses.model_losses, which gives one loss a "
                    "sample, or the model's other outputs."
                ),
            )
            return _NotTrained.apply(x, error)
        return x

    def split(self, grad: T, shapes: List[torch.Size]) -> List[T]:
        """The gradient of each sample's own, of these shapes, from the batch's."""
        shape, size = shapes[0], len(shapes)
        if self.how and grad.shape == shape:
            return [grad if self.how == "sum" else grad / size] * size
        if self.how or self.squeezed or not shape:
            return list(grad.unbind())
        dim = self.dim or 0
        each = grad.split([s[dim] for s in shapes], dim)
        return [_cut(x, s) for x, s in zip(each, shapes)]


def padded(values: Sequence[T], *dims: int) -> List[T]:
    """With zeros at the ends of those that are shorter, but for ``dims``."""
    longest = [max(sizes) for sizes in zip(*(x.shape for x in values))]
    found = []
    for x in values:
        gaps = [n - m for n, m in zip(longest, x.shape)]
        ends = [n for d in reversed(range(x.dim())) for n in (0, gaps[d])]
        for d in dims:
            ends[2 * (x.dim() - d) - 1] = 0
        found.append(F.pad(x, ends) if any(ends) else x)
    return found


def _cut(x: T, shape: torch.Size) -> T:
    return x if x.shape == shape else x[tuple(slice(n) for n in shape)]


ONLY = Join(how="only")  # what one sample gives is what its batch gives


def _is_real(x: T) -> bool:
    return x.is_floating_point() or x.is_complex()


Raw = Tuple[Any, bool]  # the samples' values, and whether each has its own


def joins_of(
    engine: "Engine", inputs: "Inputs", own: Sequence[Tuple[str, T]], raw: List[Raw]
) -> List[Join]:
    """
    Args:
        own: the tensors of the model's output, and their names
        raw: of the output by sample, and whether each has one value a sample

    Raises:
        Refused: if they differ
    """
    if len(own) != len(raw):
        raise Refused(
            f"{engine.describe()} returns {len(own)} tensors for a batch of "
            f"{inputs.size} and {len(raw)} for one sample.",
            module=engine.describe(),
            remedy="Return the same from each.",
        )
    joins: List[Join] = []
    for (name, whole), (found, batched) in zip(own, raw):
        values = found if isinstance(found, list) else _each(found, batched, inputs)
        join = join_of(whole, values, fine_of(engine.module))
        if join is None:
            # Other processes do not run it once more.
            where = (
                first_mixing(engine, inputs) if engine.expert_group is None else MIXED
            )
            join = _by_shape(whole, values) if where is None else None
            if join is None:
                _refuse(engine, inputs, name, whole, values, where or MIXED)
        joins.append(join._replace(name=name))
    return joins


def fine_of(module: nn.Module) -> Optional[float]:
    """For :func:`join_of`, by what the model computes in."""
    wide = all(p.dtype.itemsize > 2 for p in module.parameters())
    mixed = any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
    return None if mixed or not wide else 5e-5


def _each(found: T, batched: bool, inputs: "Inputs") -> List[T]:
    return list(found.unbind()) if batched else [found] * inputs.size


def join_of(own: T, each: Sequence[T], fine: Optional[float] = None) -> Optional[Join]:
    """
    How a tensor of the batch is put together of those of its samples; None if it is
    not.

    Args:
        fine: relative error of a mean of the samples' numbers. One over their tokens,
            say, differs by little.
    """
    shapes = {x.shape for x in each}
    if len(shapes) > 1:
        return _of_lengths(own, each)
    # Losses of a new model are close to each other, and each is that of its sample.
    number = _is_real(own) and not own.dim() and any(x is not each[0] for x in each)
    if not number and all(close(x, own) for x in each):
        return Join(how="shared")
    (shape,) = shapes
    if shape == own.shape:
        if len(shape) > 1 and not _is_real(own):
            return None
        stacked = torch.stack(list(each))
        wide = stacked if _is_real(stacked) else stacked.double()
        for how in ("mean", "sum"):
            if close(getattr(wide, how)(0).to(own.dtype), own, fine):
                return Join(how=how)
        return Join(how="number") if len(shape) < 2 else None
    found = _by_shape(own, each)
    if found is None:
        return None
    values = list(each)
    apart = found.squeezed or not shape
    joined = torch.stack(values) if apart else torch.cat(values, found.dim or 0)
    return found if close(joined, own) else None


def _of_lengths(own: T, each: Sequence[T]) -> Optional[Join]:
    """
    Of samples of several lengths: one after the other, or padded. What the batch has
    there belongs to no sample, and is zero where they are put together.
    """
    if any(x.dim() != own.dim() for x in each):
        return None
    for dim in range(own.dim()):
        joined = torch.cat(padded(each, dim), dim)
        if joined.shape == own.shape:
            own_places = [torch.ones_like(x, dtype=torch.bool) for x in each]
            places = torch.cat(padded(own_places, dim), dim)
            if close(joined, own.masked_fill(~places, 0)):
                return Join(dim or None)
    return None


def _by_shape(own: T, each: Sequence[T]) -> Optional[Join]:
    """Where the samples are, as shapes tell."""
    dims = max(1, own.dim())
    fitting = [Join(dim or None) for dim in range(dims)]
    found = next((join for join in fitting if _fits(join, own, each)), None)
    if found is None and own.shape == (len(each), *each[0].shape):
        return Join(squeezed=True)
    return found


def _fits(join: Join, own: T, each: Sequence[T]) -> bool:
    dim = join.dim or 0
    if not each[0].dim():
        return own.shape == (len(each),)
    rest = {x.shape[:dim] + x.shape[dim + 1 :] for x in each if x.dim() > dim}
    return (
        all(x.dim() == own.dim() for x in each)
        and rest == {own.shape[:dim] + own.shape[dim + 1 :]}
        and own.shape[dim] == sum(x.shape[dim] for x in each)
    )


def _refuse(
    engine: "Engine",
    inputs: "Inputs",
    name: str,
    own: T,
    each: Sequence[T],
    where: str,
) -> None:
    shapes = sorted({tuple(x.shape) for x in each})
    alone = " and ".join(map(str, shapes[:3])) + (", ..." if len(shapes) > 3 else "")
    raise Refused(
        f"{engine.describe()}: its output{f' {name}' if name else ''} of shape "
        f"{tuple(own.shape)} for a batch of {inputs.size} is not what it gives for "
        f"each sample alone, of shape {alone}.",
        module=engine.describe(),
        remedy=where,
    )


HELP = (
    "Compute each sample by itself; give make_private take=..., which takes a sample "
    "out of the inputs, or shared=[...], the names of inputs that samples share."
)
MIXED = (
    "Samples are mixed in the model's own forward, or an input is no batch of samples. "
    f"{HELP}"
)


def first_mixing(engine: "Engine", inputs: "Inputs") -> Optional[str]:
    """
    In words, the first module whose output for the batch is not that for each sample.
    None if the model gives other outputs each time that it is called.
    """

    def run(args: tuple, kwargs: dict) -> Trace:
        with engine.paused(), Trace(engine.module) as trace:
            engine.forward(*args, **kwargs)
        return trace

    whole, again = (run(inputs.args, inputs.kwargs) for _ in range(2))
    if not whole.alike(again):
        return None
    alone = []
    for rows, part in inputs.parts():
        for b in range(part.size):
            trace = Trace(engine.module)
            try:
                with engine.paused(), trace:
                    one = part.alone(b)
                    engine.forward(*one.args, **one.kwargs)
            except Exception as error:
                return (
                    f"A sample can't be run alone: {trace.where} fails "
                    f"({type(error).__name__}: {error}). {HELP}"
                )
            alone.append(trace)
    found = mixing_call(whole, alone)
    if found is None:
        return MIXED
    return (
        f"Samples are mixed first in {found.where}: a statistic over the batch "
        "(BatchNorm, a capacity or a loss counted over the batch), or an input that is "
        f"no batch of samples. {HELP}"
    )


class Call(NamedTuple):
    """One call of a module."""

    name: str
    module: nn.Module
    inputs: List[T]
    outputs: List[T]

    @property
    def where(self) -> str:
        """The module, in words."""
        return f"{self.name or 'the model'} ({type(self.module).__name__})"


class Trace:
    """Within it the calls of modules are noted, in the order in which they end."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.calls: List[Call] = []
        self.open: List[Call] = []

    @property
    def where(self) -> str:
        """The innermost module that was called and did not return."""
        return self.open[-1].where if self.open else f"{type(self.model).__name__}"

    def alike(self, other: "Trace") -> bool:
        """Whether the same calls gave the same."""
        names = [[call.name for call in trace.calls] for trace in (self, other)]
        return names[0] == names[1] and all(
            len(a.outputs) == len(b.outputs) and all(map(close, a.outputs, b.outputs))
            for a, b in zip(self.calls, other.calls)
        )

    def __enter__(self) -> "Trace":
        def copied(value: Any) -> List[T]:
            return [unpacked(x).detach().clone() for x in leaves_in(value)]

        def before(name: str) -> Callable:
            def hook(module: nn.Module, args: tuple, kwargs: dict) -> None:
                self.open.append(Call(name, module, copied((args, kwargs)), []))

            return hook

        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = self.open.pop()
            call.outputs.extend(copied(output))
            self.calls.append(call)

        self.handles = []
        for name, m in self.model.named_modules():
            self.handles += [
                m.register_forward_pre_hook(before(name), with_kwargs=True),
                m.register_forward_hook(after),
            ]
        return self

    def __exit__(self, *exc: Any) -> None:
        for handle in self.handles:
            handle.remove()


def mixing_call(whole: Trace, alone: Sequence[Trace]) -> Optional[Call]:
    """
    The first call that was given the same values for the batch as for its samples one
    by one, and gave others.
    """
    each: Dict[Tuple[str, int], List[Call]] = {}
    for trace in alone:
        for key, call in _numbered(trace):
            each.setdefault(key, []).append(call)
    for key, call in _numbered(whole):
        calls = each.get(key, [])
        if len(calls) == len(alone) and not _same(call.outputs, calls, "outputs"):
            if _same(call.inputs, calls, "inputs"):
                return call
    return None


def _numbered(trace: Trace) -> Iterator[Tuple[Tuple[str, int], Call]]:
    times: Dict[str, int] = {}
    for call in trace.calls:
        times[call.name] = times.get(call.name, 0) + 1
        yield (call.name, times[call.name]), call


def _same(whole: List[T], calls: List[Call], what: str) -> bool:
    columns = [getattr(call, what) for call in calls]
    if {len(column) for column in columns} != {len(whole)}:
        return True  # of another structure: nothing can be told
    return all(_holds(y, xs) for y, xs in zip(whole, zip(*columns)))


def _holds(y: T, xs: Sequence[T]) -> bool:
    """Whether a tensor holds the values of others, in whatever order, or is each."""
    if all(close(x, y) for x in xs) or not y.dim():
        return True
    flat = torch.cat([x.flatten() for x in xs])
    return flat.shape == (y.numel(),) and close(
        flat.to(y.dtype).sort().values, y.flatten().sort().values
    )
