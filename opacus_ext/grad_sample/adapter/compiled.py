"""The programs of ``torch.compile`` in which the samples of a private model run.

A loop of the user's own has two, as the criterion is between them: the forward, whose
backward gives the gradients of the slots (core/traced.py), and the clipping, which
turns these into norms and clipped sums. Where the loss is known, a whole step is one.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from logging import Logger
from typing import Any, Callable, NamedTuple, Sequence, cast

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.grad_sample.adapter.outputs import NotEqual, is_hidden
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    GroupNorms,
    is_finite,
    norms_and_sums,
)
from opacus_ext.grad_sample.core.gradients import no_autocast
from opacus_ext.grad_sample.core.groups import Samples, why
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.values import key_of, key_of_tree
from opacus_ext.grad_sample.factors import full_precision
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import OptimizeContext, OptimizedModule
from opacus_ext.private_torch import dynamo_config as config
from opacus_ext.private_torch import is_batched

T = torch.Tensor
Code = Callable[[Any], Any]  # runs a sample, the tree of its arguments
_TENSOR = "<tensor>"  # stands for a tensor in an output
_OBJECT = "<object> "  # and this for an object, before the name of its type

# -- torch.compile's settings, from private names of torch -----------------------------


class Settings(NamedTuple):
    """Arguments of ``torch.compile``."""

    backend: Callable  # called with a graph and its inputs
    fullgraph: bool  # True if a graph break is an error
    most: int = 64  # the most programs of one model, for its batch sizes and lengths


def settings_of(module: nn.Module) -> Settings | None:
    """Returns the settings of ``torch.compile(model)`` or ``model.compile()``."""
    if isinstance(module, OptimizedModule):
        return settings_from(module.dynamo_ctx.callback)
    call = vars(module).get("_compiled_call_impl")
    for cell in getattr(call, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return settings_from(cell.cell_contents.callback)
    return None


def settings_from(compiler: Any) -> Settings | None:
    """Returns the settings of a compiler, see ``set_compiler`` of private_torch.py."""
    fullgraph, backend = False, compiler
    while callable(backend):
        fullgraph = fullgraph or "Assert" in type(backend).__name__
        inner = getattr(backend, "_torchdynamo_orig_callable", None)
        inner = getattr(backend, "_torchdynamo_orig_backend", inner)
        if inner is None:
            break
        backend = inner
    is_known = callable(compiler) and backend is not compiler
    return Settings(backend, fullgraph) if is_known else None


def _changed_config() -> dict[str, Any]:
    """
    Returns Dynamo's settings for our functions: programs are counted by model, and what
    code logs was logged where it ran eagerly.
    """
    limits = "recompile_limit", "accumulated_recompile_limit"
    changes: dict[str, Any] = dict.fromkeys(limits, 2**30)
    if hasattr(config, "ignore_logger_methods"):
        names = filter(partial(hasattr, Logger), _LOGGING)
        changes["ignore_logger_methods"] = {getattr(Logger, name) for name in names}
    return changes


# The last two are those of transformers.
_LOGGING = "debug", "info", "warning", "error", "info_once", "warning_once"


def frame_to_count(x: T) -> T:
    """Can be compiled: ``fullgraph=True`` expects one such function."""
    return x + 1


# -- functions that are compiled -------------------------------------------------------


class NotCompiled(Exception):
    """Raised with the reason if samples can't run in a compiled program."""


class _Group(TracedGroup):
    """Samples of a private model."""

    def check_leaves(self, leaves: list[T]) -> None:
        if any(isinstance(x, nn.Parameter) for x in leaves):
            raise NotAtOnce("a parameter that the model does not have")


class _Call:
    """Calls code with a sample, and keeps what else it returns beside tensors."""

    def __init__(self, code: Code):
        self.code = code
        self.others: list[Any] = []  # leaves of the output; _TENSOR for tensors
        self.spec: Any = None

    def __call__(self, sample: Any) -> list[T]:
        leaves, self.spec = tree_flatten(self.code(sample))
        tensors = [x for x in leaves if isinstance(x, T)]
        if not all(map(is_batched, tensors)):
            raise NotAtOnce("an output that all samples share")
        self.others = [_TENSOR if isinstance(x, T) else _other(x) for x in leaves]
        return tensors

    def signature(self, group: TracedGroup) -> str:
        """Describes the outputs and uses of a forward, which must not change."""
        return f"{self.others}; {group.signature()}"


def _other(x: Any) -> Any:
    if isinstance(x, (int, float, str, type(None))):
        return x
    if not torch.compiler.is_compiling() and (  # where the first forward has checked
        is_dataclass(x) or isinstance(x, PackedSequence) or not is_hidden(x)
    ):
        raise NotAtOnce("an output that is no tensor")
    return _OBJECT + type(x).__name__


def _samples(tree: Any, by_sample: Sequence[bool], size: int) -> Samples:
    if not torch.compiler.is_compiling():
        raise NotCompiled("torch.compiler.set_stance says so")
    leaves, spec = tree_flatten(tree)
    # Clones, as Dynamo would make a program for each tensor whose id is asked for.
    leaves = [x.clone() if isinstance(x, T) else x for x in leaves]
    return Samples(None, leaves, [*by_sample], spec, size)


def _forward(
    code: Code, params: list[T], slots: list[T], *given: Any
) -> tuple[list[T], list[list[T]], str]:
    """Returns the outputs ``[B, ...]``, the saved data of each use, and a signature."""
    samples, call = _samples(*given), _Call(code)
    group = TracedGroup(params, samples.size, attaches=True)
    outputs, kept = group.run(call, samples, slots)
    kept = [[x.detach() for x in data] for data in kept]
    return outputs, kept, call.signature(group)


def _step(
    code: Code, params: list[T], slots: list[T], own: T, clipping: tuple, *given: Any
) -> tuple[T, tuple[T, list[T | None]], str]:
    """Returns the losses ``[B]``, norms and clipped sums, and a signature."""
    samples, call = _samples(*given), _Call(code)
    first = _Group(params, samples.size)
    with torch.enable_grad():
        first.run(call, samples)
    signature, slots = call.signature(first), first.make_slots()

    def losses(slots: list[T]) -> tuple[T, Any]:
        group = TracedGroup(params, samples.size)
        (found,), kept = group.run(call, samples, slots)
        if call.signature(group) != signature:
            raise NotAtOnce("a loss that uses parameters differently in each call")
        return found, kept

    with torch.no_grad():
        vjp: Any = torch.func.vjp  # of three results here
        found, pull, kept = vjp(losses, slots, has_aux=True)
        with no_autocast():
            (grads,) = pull(own.to(found))
            return found, _clip(first, kept, grads, own, *clipping), signature


def _clip(
    group: TracedGroup,
    kept: list[list[T]],
    grads: Sequence[T | None],
    own: T,
    params: list[T],
    clipping: Any,
    bound: T,
    scale: Any,
) -> tuple[T, list[T | None]]:
    """Returns norms and clipped sums of the samples that are in the mask ``own``."""
    norms = GroupNorms(params, group.size, clipping.per_parameter)
    norms.finish(group.collect(kept, grads, group.size, own))
    factors = partial(clipping.factors, bound=bound)
    return norms_and_sums(norms, factors, scale, own > 0)


# -- programs --------------------------------------------------------------------------


class Traced(NamedTuple):
    """The results of the first, eager forward for one kind of sample."""

    group: TracedGroup  # the uses of parameters
    slots: list[T]  # leaves that are zero
    call: _Call  # the rest of the output
    signature: str  # must be equal in each call
    changed: list[str]  # names of changed state that is not made of data
    clips: dict[tuple, Callable]  # compiled clipping programs


class CompiledModel:
    """The programs of a function of samples, for their numbers and lengths."""

    function: Callable = staticmethod(_forward)

    def __init__(self, model: Any, settings: Settings, code: Code):
        self.model, self.settings, self.code = model, settings, code
        self.params = list(model.params.values())
        self._made = made = list[None]()  # one for each program
        self._sizes: dict[tuple, list[int]] = {}  # batch sizes of programs, by kind
        self._traced: dict[tuple, Traced] = {}
        self._failed: dict[tuple, str] = {}

        def backend(graph: Any, inputs: Sequence[Any]) -> Callable:
            if len(made) >= settings.most:
                raise NotCompiled(f"{len(made)} programs are built, and it changes")
            made.append(None)
            return settings.backend(graph, inputs)

        given: Any = dict(backend=backend, fullgraph=True, dynamic=False)
        self._run = torch.compile(self.function, **given)
        self._config = _changed_config()

    @property
    def programs(self) -> int:
        """How many programs were made."""
        return len(self._made)

    def run(self, samples: Samples, total: Any = None) -> tuple[Any, Any] | None:
        """
        Runs samples, or raises NotCompiled with nothing changed. Returns the output, a
        tree of tensors ``[B, ...]``, and what adds the gradients to a total; None if
        these samples are to run eagerly.
        """
        count, kind = samples.size, _kind(samples, self.model.module.training)
        size = self._size_for(kind, count)
        if size > count:  # fills up with samples that are ignored
            samples = samples.select(torch.arange(size).clamp(max=count - 1))
        key = size, *kind
        if key in self._failed:
            raise NotCompiled(self._failed[key])
        try:
            return self._results(key, samples, count, total)
        except Exception as error:
            self._failed[key] = _reason(error)
            raise NotCompiled(self._failed[key]) from error

    def _results(self, key: tuple, samples: Samples, count: int, total: Any) -> Any:
        found, traced = self._call(key, samples, [])
        outputs, kept, _ = found
        # No slice if not needed: its backward copies.
        rest = iter([x[:count] if len(x) > count else x for x in outputs])
        others = map(self._object, traced.call.others)
        leaves = [next(rest) if x == _TENSOR else x for x in others]
        output = tree_unflatten(leaves, traced.call.spec)
        return output, CompiledGroup(self, traced, kept, count)

    def _object(self, x: Any) -> Any:
        """Replaces an object (a cache) of an output, as where samples run eagerly."""
        if not (isinstance(x, str) and x.startswith(_OBJECT)):
            return x
        what = f"is a {x.removeprefix(_OBJECT)}, which may hold values of samples"
        return NotEqual(self.model.describe(), "output", what)

    def _call(self, key: tuple, samples: Samples, given: list) -> tuple[Any, Traced]:
        """Runs the program of these samples; traces them anew if it differs."""
        tree = samples.tree(lambda x: x), tuple(samples.by_sample), samples.size
        if key in self._traced:
            traced, programs = self._traced[key], self.programs
            check = any(each.changed for each in self._traced.values())
            found = self._checked(traced, given, tree, check)
            if found is not None and (check or programs == self.programs):
                return found, traced
        traced = self._trace(key, samples)
        found = self._checked(traced, given, tree, True)
        if found is None:
            raise NotAtOnce("a forward that differs when it is compiled")
        return found, traced

    def _checked(self, traced: Traced, given: list, tree: tuple, check: bool) -> Any:
        """
        Runs the program; None if it differs from the trace. If ``check``, the state
        must change as it did there.
        """
        state = self.model.state
        if check:
            state.remember()
        with config.patch(self._config):
            found = self._run(self.code, self.params, traced.slots, *given, *tree)
        differs = found[-1] != traced.signature
        if check and (differs or [c.name for c in state.changes()] != traced.changed):
            state.restore()
            if not differs:
                raise NotAtOnce("a forward that changes other state when compiled")
        return None if differs else found

    def _size_for(self, kind: tuple, count: int) -> int:
        """Returns the batch size of a program for ``count`` samples; it builds few."""
        sizes = self._sizes.setdefault(kind, [])
        left = self.settings.most - sum(map(len, self._sizes.values()))
        fits = min((size for size in sizes if size >= count), default=None)
        if fits is not None and (left < 2 or 4 * fits <= 5 * padded(count)):
            return fits  # the last program is for larger batches
        if left < 1:
            raise NotCompiled(
                f"{self.settings.most} programs are built, and none is for {count} "
                "samples of this length (pad lengths to a multiple: pad_to_multiple_of)"
            )
        sizes.append(padded(count if left > 1 else count + count // 2))
        return sizes[-1]

    def _trace(self, key: tuple, samples: Samples) -> Traced:
        """Runs samples of a new kind eagerly, to find the uses of parameters."""
        state, call = self.model.state, _Call(self.code)
        state.remember()
        group = _Group(self.params, samples.size)
        try:
            with torch.enable_grad():
                group.run(call, samples)
            changes = state.changes()
        finally:
            name = state.restore()
        if any(isinstance(c.value, T) and is_batched(c.value) for c in changes):
            raise NotAtOnce("a forward that keeps what it computes")
        if name is not None:
            raise NotAtOnce(f"a forward that changes {name}")
        slots = [slot.requires_grad_() for slot in group.make_slots()]
        names, signature = [c.name for c in changes], call.signature(group)
        self._traced[key] = Traced(group, slots, call, signature, names, {})
        return self._traced[key]


def _mask(size: int, count: int, like: T) -> T:
    """Returns a mask ``[size]`` of the samples that do not only fill up."""
    return (torch.arange(size, device=like.device) < count).to(like)


def padded(size: int) -> int:
    """Returns the batch size of a program: four sizes up to each power of two."""
    step = 2 ** max(0, size.bit_length() - 3)
    return max(2, -(-size // step) * step)


def _kind(samples: Samples, training: bool) -> tuple:
    """Describes samples, without their number."""
    leaves: list[Any] = []
    for x, own in zip(samples.leaves, samples.by_sample):
        if isinstance(x, T):
            leaves.append((x.shape[1:] if own else x.shape, x.dtype, x.device))
            continue
        leaves.append(key_of(x))
        if leaves[-1] is None:
            raise NotCompiled(f"an input is a {type(x).__name__}, whose value may vary")
    tree = key_of_tree(samples.spec)
    if tree is None:
        raise NotCompiled("an input is a tree with nodes that may vary")
    return training, tree, tuple(samples.by_sample), *leaves


def _reason(error: Any) -> str:
    """Formats an error of the compiler as one line."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    if type(error).__module__ == "torch._dynamo.exc" and error.__cause__ is not None:
        error = error.__cause__  # which the code has raised
    return why(error)


class CompiledStep(CompiledModel):
    """The programs of whole steps, given the code of the loss."""

    function = staticmethod(_step)

    def _results(self, key: tuple, samples: Samples, count: int, total: Any) -> Any:
        like, clipping = total.norms, total.clipping
        own = _mask(samples.size, count, like)
        clips = total.params, clipping.clipping, like.new_tensor(clipping.bound), 1.0
        with full_precision(like.device):
            (losses, (norms, sums), _), _ = self._call(key, samples, [own, clips])
        if not is_finite(norms):  # rare: some are computed anew, or dropped
            return None
        return losses[:count], ClippedStep(norms[..., :count], sums)


class ClippedStep(NamedTuple):
    """The norms and clipped sums of samples that have run in a compiled step."""

    norms: T
    sums: list[T | None]

    def add_to(self, total: ClippedSum, rows: T | None, *given: Any) -> None:
        """Adds the gradients to a total."""
        total.add_clipped(rows, self.norms, self.sums)


class CompiledGroup(NamedTuple):
    """Samples that have run in a compiled program, in a loop of the user's own."""

    compiled: CompiledModel
    traced: Traced
    kept: list[list[T]]  # saved data of each use
    size: int  # samples from here on only fill up the program's batch

    def add_to(
        self, total: Any, rows: T | None, outputs: Sequence[T], grads: Sequence[Any]
    ) -> None:
        """Adds the gradients to a total, see ``ClippedSum.add_group``."""
        pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
        if not pairs:
            return
        ys, gs = zip(*pairs)
        traced, group = self.traced, self.traced.group
        found = torch.autograd.grad(ys, traced.slots, gs, allow_unused=True)
        if not isinstance(total, ClippedSum):
            self._add_eagerly(total, rows, found)
            return
        like, params, function = total.norms, total.params, cast(Any, total.clipping)
        clipping, own = function.clipping, _mask(group.size, self.size, like)
        given = [like.new_tensor(function.bound), like.new_tensor(total.scale), own]
        given += [g for g in found if g is not None]
        given += [x for data in self.kept for x in data]
        unused = tuple(g is None for g in found)
        # Layers with one input may have saved it once for all: a trace depends on it.
        first: dict[int, int] = {}
        shared = tuple(first.setdefault(x.data_ptr(), i) for i, x in enumerate(given))

        def clip(bound: T, scale: T, own: T, *rest: T) -> list[T | None]:
            left = iter(rest)
            grads = [None if none else next(left) for none in unused]
            kept = [[next(left) for _ in data] for data in self.kept]
            norms, sums = _clip(group, kept, grads, own, params, clipping, bound, scale)
            return [norms, *sums]

        kind = unused, shared, clipping, *map(id, params)
        with torch.no_grad(), full_precision(like.device):
            if kind not in traced.clips:
                graph = make_fx(clip)(*given)
                traced.clips[kind] = self.compiled.settings.backend(graph, given)
            norms, *sums = traced.clips[kind](*given)
            if is_finite(norms):
                total.add_clipped(rows, norms[..., : self.size], sums)
            else:  # rare: some are computed anew, or dropped
                self._add_eagerly(total, rows, found)

    def _add_eagerly(self, total: Any, rows: T | None, grads: Sequence[Any]) -> None:
        """Adds the gradients, given those of the slots, without a compiled program."""
        kept = [[x[: self.size] for x in data] for data in self.kept]
        own = [None if g is None else g[: self.size] for g in grads]
        samples = self.traced.group.collect(kept, own, self.size)
        if isinstance(total, ClippedSum):
            total.add(rows, total.group_norms(self.size), samples)
        else:
            total.add(rows, samples)
