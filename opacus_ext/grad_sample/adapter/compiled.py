"""The programs of ``torch.compile`` in which the samples of a private model run.

A loop of the user's own has two, as the criterion is between them: the forward, whose
backward gives the gradients of the slots (core/traced.py), and the clipping, which
turns these into norms and clipped sums. Where the loss is known, a whole step is one.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from logging import Logger
from typing import Any, Callable, NamedTuple, Sequence, Union, cast

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from opacus_ext.grad_sample.adapter.outputs import NotEqual, is_hidden
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    DenseGrads,
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
Total = Union[ClippedSum, DenseGrads]
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
    compiled = vars(module).get("_compiled_call_impl")
    # The context of the compiler is in the closure of what nn.Module calls.
    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return settings_from(cell.cell_contents.callback)
    return None


def settings_from(compiler: object) -> Settings | None:
    """Returns the settings of a compiler, see ``set_compiler`` of private_torch.py."""
    fullgraph, backend = False, compiler
    # The compiler is wrapped several times, with one wrapper that asserts fullgraph.
    while callable(backend):
        fullgraph = fullgraph or "Assert" in type(backend).__name__
        inner = getattr(backend, "_torchdynamo_orig_callable", None)
        inner = getattr(backend, "_torchdynamo_orig_backend", inner)
        if inner is None:
            break
        backend = inner
    if backend is compiler or not callable(backend):
        return None
    return Settings(backend, fullgraph)


def _changed_config() -> dict[str, Any]:
    """
    Returns Dynamo's settings for our functions: programs are counted by model, and what
    code logs was logged where it ran eagerly.
    """
    limits = "recompile_limit", "accumulated_recompile_limit"
    changes: dict[str, Any] = dict.fromkeys(limits, 2**30)
    if hasattr(config, "ignore_logger_methods"):
        methods = [getattr(Logger, name, None) for name in _LOGGING]
        changes["ignore_logger_methods"] = set(methods) - {None}
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
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise NotAtOnce("a parameter that the model does not have")


class _Recorder:
    """Calls code with a sample, and keeps what else it returns beside tensors."""

    def __init__(self, code: Code):
        self.code = code
        self.others: list[Any] = []  # leaves of the output; _TENSOR for tensors
        self.spec: Any = None

    def __call__(self, sample: object) -> list[T]:
        leaves, self.spec = tree_flatten(self.code(sample))
        tensors = [leaf for leaf in leaves if isinstance(leaf, T)]
        if not all(map(is_batched, tensors)):
            raise NotAtOnce("an output that all samples share")
        self.others = [*map(_stand_in, leaves)]
        return tensors

    def signature(self, group: TracedGroup) -> str:
        """Describes the outputs and uses of a forward, which must not change."""
        return f"{self.others}; {group.signature()}"

    def output(self, tensors: Sequence[T], model: str) -> Any:
        """
        Returns the output, with these tensors in it. An object (a cache) is replaced
        as where samples run eagerly.
        """
        rest, leaves = iter(tensors), list(self.others)
        for i, other in enumerate(self.others):
            if other == _TENSOR:
                leaves[i] = next(rest)
            elif isinstance(other, str) and other.startswith(_OBJECT):
                kind = other.removeprefix(_OBJECT)
                reason = f"is a {kind}, which may hold values of samples"
                leaves[i] = NotEqual(model, "output", reason)
        return tree_unflatten(leaves, self.spec)


def _stand_in(leaf: object) -> Any:
    """Returns a plain value as it is, and a text for anything else."""
    if isinstance(leaf, T):
        return _TENSOR
    if isinstance(leaf, (int, float, str, type(None))):
        return leaf
    # The compiler need not ask: the first forward, which is eager, has done so.
    if not torch.compiler.is_compiling():
        is_known = is_dataclass(leaf) or isinstance(leaf, PackedSequence)
        if is_known or not is_hidden(leaf):
            raise NotAtOnce("an output that is no tensor")
    return _OBJECT + type(leaf).__name__


def _samples(tree: object, by_sample: Sequence[bool], size: int) -> Samples:
    if not torch.compiler.is_compiling():
        raise NotCompiled("torch.compiler.set_stance says so")
    leaves, spec = tree_flatten(tree)
    # Clones, as Dynamo would make a program for each tensor whose id is asked for.
    leaves = [leaf.clone() if isinstance(leaf, T) else leaf for leaf in leaves]
    return Samples(None, leaves, [*by_sample], spec, size)


def _forward(
    code: Code, params: list[T], slots: list[T], *batch: Any
) -> tuple[list[T], list[list[T]], str]:
    """Returns the outputs ``[B, ...]``, the saved data of each use, and a signature."""
    samples, recorder = _samples(*batch), _Recorder(code)
    group = TracedGroup(params, samples.size, attaches=True)
    outputs, saved = group.run(recorder, samples, slots)
    saved = [[*map(T.detach, data)] for data in saved]
    return outputs, saved, recorder.signature(group)


def _step(
    code: Code, params: list[T], slots: list[T], mask: T, clipping: tuple, *batch: Any
) -> tuple[T, tuple[T, list[T | None]], str]:
    """Returns the losses ``[B]``, norms and clipped sums, and a signature."""
    samples, recorder = _samples(*batch), _Recorder(code)
    first = _Group(params, samples.size)
    # The first run finds the uses of parameters, as each needs a slot.
    with torch.enable_grad():
        first.run(recorder, samples)
    signature, slots = recorder.signature(first), first.make_slots()

    def run(slots: list[T]) -> tuple[T, Any]:
        group = TracedGroup(params, samples.size)
        (losses,), saved = group.run(recorder, samples, slots)
        if recorder.signature(group) != signature:
            raise NotAtOnce("a loss that uses parameters differently in each call")
        return losses, saved

    with torch.no_grad():
        # Its type has two results, and with has_aux there are three.
        vjp: Any = torch.func.vjp
        losses, pull, saved = vjp(run, slots, has_aux=True)
        with no_autocast():
            (grads,) = pull(mask.to(losses))
            clipped = _clip(first, saved, grads, mask, *clipping)
            return losses, clipped, signature


def _clip(
    group: TracedGroup,
    saved: list[list[T]],
    grads: Sequence[T | None],
    mask: T,
    params: list[T],
    clipping: Any,
    bound: T,
    scale: T | float,
) -> tuple[T, list[T | None]]:
    """Returns norms and clipped sums of the samples that are in the mask."""
    norms = GroupNorms(params, group.size, clipping.per_parameter)
    norms.finish(group.collect(saved, grads, group.size, mask))
    factors = partial(clipping.factors, bound=bound)
    return norms_and_sums(norms, factors, scale, mask > 0)


# -- programs --------------------------------------------------------------------------


class Traced(NamedTuple):
    """The results of the first, eager forward for one kind of sample."""

    group: TracedGroup  # the uses of parameters
    slots: list[T]  # leaves that are zero
    recorder: _Recorder  # the rest of the output
    signature: str  # must be equal in each call
    changed: list[str]  # names of changed state that is not made of data
    clips: dict[tuple, Callable]  # compiled clipping programs


class CompiledModel:
    """The programs of a function of samples, for their numbers and lengths."""

    function: Callable = staticmethod(_forward)

    def __init__(self, model: Any, settings: Settings, code: Code):
        self.model, self.settings, self.code = model, settings, code
        self.params = list(model.params.values())
        self._built = built = list[None]()  # one for each program
        self._sizes: dict[tuple, list[int]] = {}  # batch sizes of programs, by kind
        self._traced: dict[tuple, Traced] = {}
        self._failed: dict[tuple, str] = {}

        # Dynamo keeps the backend for ever, so it must not hold the model.
        def backend(graph: Any, inputs: Sequence[Any]) -> Callable:
            if len(built) >= settings.most:
                raise NotCompiled(f"{len(built)} programs are built, and it changes")
            built.append(None)
            return settings.backend(graph, inputs)

        options: Any = dict(backend=backend, fullgraph=True, dynamic=False)
        self._run = torch.compile(self.function, **options)
        self._config = _changed_config()

    @property
    def programs(self) -> int:
        """How many programs were made."""
        return len(self._built)

    def run(
        self, samples: Samples, total: Total | None = None
    ) -> tuple[Any, Any] | None:
        """
        Runs samples, or raises NotCompiled with nothing changed. Returns the output, a
        tree of tensors ``[B, ...]``, and what adds the gradients to a total; None if
        these samples are to run eagerly.
        """
        count, kind = samples.size, _kind(samples, self.model.module.training)
        size = self._size_for(kind, count)
        # Copies of the last sample fill up the batch, and are ignored.
        if size > count:
            samples = samples.select(torch.arange(size).clamp(max=count - 1))
        key = size, *kind
        if key not in self._failed:
            try:
                return self._results(key, samples, count, total)
            except Exception as error:
                # It is not tried again, as the compiler takes long to fail.
                self._failed[key] = _reason(error)
                raise NotCompiled(self._failed[key]) from error
        raise NotCompiled(self._failed[key])

    def _results(
        self, key: tuple, samples: Samples, count: int, total: Any
    ) -> tuple[Any, Any] | None:
        (outputs, saved, _), traced = self._call(key, samples)
        # A slice that is not needed would copy in its backward pass.
        if samples.size > count:
            outputs = [output[:count] for output in outputs]
        output = traced.recorder.output(outputs, self.model.describe())
        return output, CompiledGroup(self, traced, saved, count)

    def _call(self, key: tuple, samples: Samples, *more: Any) -> tuple[Any, Traced]:
        """Runs the program of these samples; traces them anew if it differs."""
        leaves = samples.tree(lambda leaf: leaf)
        batch = *more, leaves, tuple(samples.by_sample), samples.size
        if key in self._traced:
            traced, before = self._traced[key], self.programs
            checks = any(other.changed for other in self._traced.values())
            results = self._run_as(traced, batch, checks)
            # A program that was built just now may change state as no other does.
            if results is not None and (checks or self.programs == before):
                return results, traced
        traced = self._traced[key] = self._trace(samples)
        results = self._run_as(traced, batch, True)
        if results is None:
            raise NotAtOnce("a forward that differs when it is compiled")
        return results, traced

    def _run_as(self, traced: Traced, batch: tuple, checks: bool) -> Any:
        """
        Runs the program; None if it differs from the trace. If it ``checks``, the state
        must change as it did there.
        """
        state = self.model.state
        # Looking at the state takes time, and most models have none that changes.
        if checks:
            state.remember()
        with config.patch(self._config):
            results = self._run(self.code, self.params, traced.slots, *batch)
        differs = results[-1] != traced.signature
        if checks and (differs or _names_of(state.changes()) != traced.changed):
            state.restore()
            if not differs:
                raise NotAtOnce("a forward that changes other state when compiled")
        return None if differs else results

    def _size_for(self, kind: tuple, count: int) -> int:
        """Returns the batch size of a program for ``count`` samples; it builds few."""
        sizes = self._sizes.setdefault(kind, [])
        left = self.settings.most - sum(map(len, self._sizes.values()))
        large = [size for size in sizes if size >= count]
        # While several may be built, each fits; the last one is for larger batches.
        if large and (left < 2 or 4 * min(large) <= 5 * padded(count)):
            return min(large)
        if left < 1:
            raise NotCompiled(
                f"{self.settings.most} programs are built, and none is for {count} "
                "samples of this length (pad lengths to a multiple: pad_to_multiple_of)"
            )
        if left == 1:
            count += count // 2
        sizes.append(padded(count))
        return sizes[-1]

    def _trace(self, samples: Samples) -> Traced:
        """Runs samples of a new kind eagerly, to find the uses of parameters."""
        state, recorder = self.model.state, _Recorder(self.code)
        state.remember()
        group = _Group(self.params, samples.size)
        try:
            with torch.enable_grad():
                group.run(recorder, samples)
            changes = state.changes()
        finally:
            name = state.restore()
        for change in changes:
            if isinstance(change.value, T) and is_batched(change.value):
                raise NotAtOnce("a forward that keeps what it computes")
        if name is not None:
            raise NotAtOnce(f"a forward that changes {name}")
        slots = [slot.requires_grad_() for slot in group.make_slots()]
        signature, names = recorder.signature(group), _names_of(changes)
        return Traced(group, slots, recorder, signature, names, {})


def _names_of(changes: Sequence[Change]) -> list[str]:
    return [change.name for change in changes]


def _mask(size: int, count: int, like: T) -> T:
    """Returns a mask ``[size]`` of the samples that do not only fill up."""
    return (torch.arange(size, device=like.device) < count).to(like)


def padded(size: int) -> int:
    """Returns the batch size of a program: four sizes up to each power of two."""
    step = 2 ** max(0, size.bit_length() - 3)
    return max(2, -(-size // step) * step)


def _kind(samples: Samples, training: bool) -> tuple:
    """Describes samples, without their number."""
    kinds: list[Any] = []
    for leaf, is_own in zip(samples.leaves, samples.by_sample):
        if isinstance(leaf, T):
            shape = leaf.shape[1:] if is_own else leaf.shape
            kinds.append((shape, leaf.dtype, leaf.device))
            continue
        key = key_of(leaf)
        if key is None:
            kind = type(leaf).__name__
            raise NotCompiled(f"an input is a {kind}, whose value may vary")
        kinds.append(key)
    tree = key_of_tree(samples.spec)
    if tree is None:
        raise NotCompiled("an input is a tree with nodes that may vary")
    return training, tree, tuple(samples.by_sample), *kinds


def _reason(error: Any) -> str:
    """Formats an error of the compiler as one line."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    if type(error).__module__ == "torch._dynamo.exc" and error.__cause__ is not None:
        # The code of the user has raised it.
        error = error.__cause__
    return why(error)


class CompiledStep(CompiledModel):
    """The programs of whole steps, given the code of the loss."""

    function = staticmethod(_step)

    def _results(
        self, key: tuple, samples: Samples, count: int, total: Any
    ) -> tuple[Any, Any] | None:
        like, clipping = total.norms, total.clipping
        mask, bound = _mask(samples.size, count, like), like.new_tensor(clipping.bound)
        clips = total.params, clipping.clipping, bound, 1.0
        with full_precision(like.device):
            results, _ = self._call(key, samples, mask, clips)
        losses, (norms, sums), _ = results
        # This is rare. Norms of some samples are computed anew, or they are dropped.
        if not is_finite(norms):
            return None
        return losses[:count], ClippedStep(norms[..., :count], sums)


class ClippedStep(NamedTuple):
    """The norms and clipped sums of samples that have run in a compiled step."""

    norms: T
    sums: list[T | None]

    def add_to(self, total: Any, rows: T | None, *outputs_and_grads: Any) -> None:
        """Adds the gradients to a total."""
        total.add_clipped(rows, self.norms, self.sums)


class CompiledGroup(NamedTuple):
    """Samples that have run in a compiled program, in a loop of the user's own."""

    compiled: CompiledModel
    traced: Traced
    saved: list[list[T]]  # saved data of each use
    size: int  # samples from here on only fill up the program's batch

    def add_to(
        self, total: Total, rows: T | None, outputs: Sequence[T], grads: Sequence[T]
    ) -> None:
        """Adds the gradients to a total, see ``ClippedSum.add_group``."""
        pairs = [(y, grad) for y, grad in zip(outputs, grads) if y.requires_grad]
        if not pairs:
            return
        roots, of_roots = zip(*pairs)
        slots = self.traced.slots
        of_slots = torch.autograd.grad(roots, slots, of_roots, allow_unused=True)
        if not isinstance(total, ClippedSum):
            self._add_eagerly(total, rows, of_slots)
            return
        with torch.no_grad(), full_precision(total.norms.device):
            norms, *sums = self._clip(total, of_slots)
            if is_finite(norms):
                total.add_clipped(rows, norms[..., : self.size], sums)
            # This is rare. Norms of some are computed anew, or they are dropped.
            else:
                self._add_eagerly(total, rows, of_slots)

    def _clip(self, total: ClippedSum, grads: Sequence[T | None]) -> Sequence[Any]:
        """Returns norms and clipped sums in a program, given gradients of the slots."""
        like, params, group = total.norms, total.params, self.traced.group
        function = cast(Any, total.clipping)
        clipping = function.clipping
        bound, scale = like.new_tensor(function.bound), like.new_tensor(total.scale)
        mask = _mask(group.size, self.size, like)
        leaves, spec = tree_flatten((bound, scale, mask, [*grads], self.saved))
        used = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)
        tensors = [leaves[i] for i in used]
        # Layers with one input may have saved it once for all: a trace depends on it.
        addresses = [*map(T.data_ptr, tensors)]
        shared = tuple(map(addresses.index, addresses))

        def clip(*tensors: T) -> list[T | None]:
            filled: list[T | None] = [None] * spec.num_leaves
            for i, tensor in zip(used, tensors):
                filled[i] = tensor
            bound, scale, mask, grads, saved = tree_unflatten(filled, spec)
            given = mask, params, clipping, bound, scale
            norms, sums = _clip(group, saved, grads, *given)
            return [norms, *sums]

        programs, key = self.traced.clips, (used, shared, clipping, *map(id, params))
        if key not in programs:
            graph = make_fx(clip)(*tensors)
            programs[key] = self.compiled.settings.backend(graph, tensors)
        return programs[key](*tensors)

    def _add_eagerly(
        self, total: Total, rows: T | None, grads: Sequence[T | None]
    ) -> None:
        """Adds the gradients, given those of the slots, without a compiled program."""
        saved, grads = tree_map(self._without_fill, (self.saved, [*grads]))
        samples = self.traced.group.collect(saved, grads, self.size)
        if isinstance(total, ClippedSum):
            total.add(rows, total.group_norms(self.size), samples)
        else:
            total.add(rows, samples)

    def _without_fill(self, tensor: T | None) -> T | None:
        return None if tensor is None else tensor[: self.size]
