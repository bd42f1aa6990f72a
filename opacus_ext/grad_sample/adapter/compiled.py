"""The compiled programs of a private model on which ``torch.compile`` was called.

Samples run as in compiled ``clipped_grads`` (core/traced.py), but in two programs, as
the criterion is in between: the forward, whose backward gives the gradients of the
slots, and the clipping, which turns these into norms and clipped sums.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import is_dataclass
from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map_only,
    tree_unflatten,
)

from opacus_ext.clipping import ClippingFunction
from opacus_ext.grad_sample.adapter.outputs import NotEqual, is_hidden
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    GroupNorms,
    is_finite,
    norms_and_sums,
)
from opacus_ext.grad_sample.core.dynamo import Settings, compile_whole, leave_out
from opacus_ext.grad_sample.core.gradients import nodes_of
from opacus_ext.grad_sample.core.group import SampleGroup
from opacus_ext.grad_sample.core.groups import Samples, why
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.values import key_of, key_of_tree
from opacus_ext.grad_sample.core.vmap import is_batched, modes_above, without_modes
from opacus_ext.grad_sample.factors import full_precision
from opacus_ext.grad_sample.rules import NotAtOnce

T = torch.Tensor
Found = tuple[list[T], list[list[T]]]  # outputs, and the saved data of each use
_TENSOR = "<tensor>"  # stands for a tensor in an output
_OBJECT = "<object> "  # and this for an object, before the name of its type


class NotCompiled(Exception):
    """Raised with the reason if samples can't run in a compiled program."""


class Traced(NamedTuple):
    """The results of the first, eager forward for one kind of sample."""

    group: TracedGroup  # the uses of parameters
    slots: list[T]  # leaves that are zero
    output: tuple[list[Any], Any]  # leaves, _TENSOR for tensors, and their tree
    signature: str  # must be equal in each call
    changed: tuple[str, ...]  # names of changed state that is not made of data
    clips: dict[tuple, Callable]  # compiled clipping programs
    own: dict[tuple, T]  # masks of the samples that do not only fill up


class CompiledModel:
    """
    The compiled programs of a private model (model.py). ``mode`` is a torch function
    mode in which it is called, or None.
    """

    def __init__(self, model: Any, settings: Settings, mode: Any = None):
        self.model, self.settings, self.mode = model, settings, mode
        self.params = list(model.params.values())
        self.programs = self._checked = 0
        self._sizes: dict[tuple, list[int]] = {}  # batch sizes of programs, by kind
        self._traced: dict[tuple, Traced] = {}
        self._failed: dict[tuple, str] = {}
        module = getattr(model.module, "_orig_mod", model.module)
        self.module = module.module if isinstance(module, DDP) else module
        module, params = self.module, self.params

        def forward(
            tree: Any,
            by_sample: tuple[bool, ...],
            size: int,
            slots: list[T],
        ) -> Any:
            if not torch.compiler.is_compiling():
                raise NotCompiled("torch.compiler.set_stance says so")
            group = TracedGroup(params, size, attaches=True)
            call, returned = _caller(module, mode)
            leaves, spec = tree_flatten(tree)
            samples = Samples(None, leaves, by_sample, spec, size)
            outputs, kept = group.run(call, samples, slots)
            kept = [[x.detach() for x in data] for data in kept]
            return outputs, kept, _signature(returned, group)

        leave_out(torch.ops.opacus_ext.attach.default)
        self._forward = compile_whole(forward, self._backend, settings.most)

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable:
        self.programs += 1
        return self.settings.backend(graph, inputs)

    def run(self, samples: Samples) -> tuple[Any, CompiledGroup]:
        """
        Runs samples, or raises NotCompiled with nothing changed. Returns the output, a
        tree of tensors ``[B, ...]``.
        """
        count, kind = samples.size, _kind(samples, self.model.module.training)
        size = self._size_for(kind, count)
        if size > count:  # fills up with samples that are ignored
            samples = samples.select(torch.arange(size).clamp(max=count - 1))
        key = size, *kind
        if key in self._failed:
            raise NotCompiled(self._failed[key])
        try:
            traced = self._traced.get(key) or self._trace(key, samples)
            changes = any(each.changed for each in self._traced.values())
            found = self._call(samples, traced, changes)
            if found is None:  # the code takes another path than before
                traced = self._trace(key, samples)
                found = self._call(samples, traced, True)
            if found is None:
                raise NotAtOnce("a forward that differs when it is compiled")
        except Exception as error:
            self._failed[key] = _reason(error)
            raise NotCompiled(self._failed[key]) from error
        outputs, kept = found
        # No slice if not needed: its backward copies.
        rest = iter([x[:count] if len(x) > count else x for x in outputs])
        others, spec = traced.output
        leaves = [next(rest) if x == _TENSOR else self._plain(x) for x in others]
        return tree_unflatten(leaves, spec), CompiledGroup(self, traced, kept, count)

    def _plain(self, x: Any) -> Any:
        """Replaces objects (caches) of an output, as where samples run eagerly."""
        if not (isinstance(x, str) and x.startswith(_OBJECT)):
            return x
        name = x.removeprefix(_OBJECT)
        what = f"is a {name}, which may hold values of samples"
        return NotEqual(self.model.describe(), "output", what)

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
        state, (call, returned) = self.model.state, _caller(self.module, self.mode)
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
        signature, changed = _signature(returned, group), tuple(c.name for c in changes)
        self._traced[key] = Traced(
            group, slots, returned[0], signature, changed, {}, {}
        )
        return self._traced[key]

    def _call(self, samples: Samples, traced: Traced, check: bool) -> Found | None:
        """
        Runs the program; returns None if it differs from the trace. Compares the state
        that it changes if ``check``, and for each new program.
        """
        state = self.model.state
        if check:
            state.remember()
        own = tuple(samples.by_sample)
        given = samples.tree(lambda x: x), own, samples.size, traced.slots
        outputs, kept, signature = self._forward(*given)
        if signature != traced.signature:
            if check:
                state.restore()
            return None
        if not check and self._checked != self.programs:
            return self._call(samples, traced, True)
        if check:
            if tuple(c.name for c in state.changes()) != traced.changed:
                state.restore()
                raise NotAtOnce("a forward that changes other state when compiled")
            self._checked = self.programs
        return outputs, kept


def _caller(module: nn.Module, mode: Any) -> tuple[Callable, list[Any]]:
    """
    Returns a function that runs a sample and returns its output tensors, and a list
    to which it appends the leaves (_TENSOR for tensors) and their tree.
    """
    returned: list[Any] = []

    def call(sample: Any) -> list[T]:
        args, kwargs = sample
        with nullcontext() if mode is None else mode:
            found, spec = tree_flatten(module._call_impl(*args, **kwargs))
        tensors = [x for x in found if isinstance(x, T)]
        if not all(map(is_batched, tensors)):
            raise NotAtOnce("an output that all samples share")
        others = [_TENSOR if isinstance(x, T) else _other(x) for x in found]
        returned.append((others, spec))
        return tensors

    return call, returned


def _other(x: Any) -> Any:
    if isinstance(x, (int, float, str, type(None))):
        return x
    if torch.compiler.is_compiling():  # checked in the first forward
        return _OBJECT + type(x).__name__
    if is_dataclass(x) or isinstance(x, PackedSequence) or not is_hidden(x):
        raise NotAtOnce("an output that is no tensor")
    return _OBJECT + type(x).__name__


def _signature(returned: list[Any], group: TracedGroup) -> str:
    """Describes the outputs and uses of a forward, which must not change."""
    return " ".join([repr(x) for x in returned[0][0]]) + "; " + group.signature()


class _Group(TracedGroup):
    """The group of the first forward."""

    def check_leaves(self, leaves: list[T]) -> None:
        if any(isinstance(x, nn.Parameter) for x in leaves):
            raise NotAtOnce("a parameter that the model does not have")


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


def _reason(error: BaseException) -> str:
    """Formats an error of the compiler as one line."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    return why(error)


class InsideLoss:
    """
    A model that a loss calls: it runs in a compiled program, the loss itself eagerly.
    ``program`` is set by the call.
    """

    program: CompiledGroup | None = None
    _ends: Sequence[Any] = ()  # the nodes of the program's outputs

    def __init__(self, compiled_in: Callable[[Any], CompiledModel], group: SampleGroup):
        self.compiled_in, self.group = compiled_in, group

    def __call__(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Runs all samples of the group; called where one of them calls the model."""
        group, modes = self.group, modes_above(self.group)
        if self.program is not None:
            raise NotCompiled("the loss calls the model twice")
        if (
            not all(getattr(mode, "is_compiled", False) for mode in modes[:1])
            or modes[1:]
        ):
            raise NotCompiled(f"the loss calls the model in {type(modes[-1]).__name__}")
        leaves, spec = tree_flatten((args, kwargs))
        own = [isinstance(x, T) and is_batched(x) for x in leaves]
        if any(isinstance(x, T) and x.requires_grad for x in leaves):
            raise NotCompiled("gradients of the model's inputs are asked for")
        leaves = [group.level.unwrap(x) if by else x for x, by in zip(leaves, own)]
        compiled = self.compiled_in(modes[0] if modes else None)
        if compiled.model.state.changes():  # they are looked for behind the loss
            raise NotCompiled("the loss changes the model before it calls it")
        with without_modes([group, *modes]), group.outside():
            with torch.compiler.set_stance("default"):
                samples = Samples(None, leaves, own, spec, group.size)
                output, self.program = compiled.run(samples)
        self._ends = [x.grad_fn for x in tree_leaves(output) if isinstance(x, T)]
        return tree_map_only(T, group.wrap, output)

    def check(self, losses: Sequence[T]) -> None:
        """Raises NotCompiled if losses use parameters beside the program."""
        nodes = nodes_of(losses, self._ends)
        if self.group.uses or any(hasattr(node, "variable") for node in nodes):
            raise NotCompiled("the loss uses parameters by itself")


class CompiledGroup:
    """
    Samples that have run in a compiled program. ``kept`` is the saved data of each use;
    samples from ``size`` on only fill up the program's batch.
    """

    def __init__(
        self, compiled: CompiledModel, traced: Traced, kept: list[list[T]], size: int
    ):
        self.compiled, self.traced, self.kept, self.size = compiled, traced, kept, size

    def add_to(
        self, total: Any, rows: T | None, outputs: Sequence[T], grads: Sequence[Any]
    ) -> None:
        """Adds the gradients to a total, see ``ClippedSum.add_group``."""
        pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
        if not pairs:
            return
        ys, gs = zip(*pairs)
        group, count = self.traced.group, self.size
        found = torch.autograd.grad(ys, self.traced.slots, gs, allow_unused=True)
        if not isinstance(total, ClippedSum):
            self._add_eagerly(total, rows, found)
            return
        clipping: ClippingFunction = total.clipping
        unused = tuple(g is None for g in found)
        like = total.norms
        key: tuple = count, like.dtype, like.device
        own = self.traced.own.get(key)
        if own is None:
            own = (torch.arange(group.size, device=like.device) < count).to(like)
            self.traced.own[key] = own
        bounds = clipping.bound, total.scale
        given: list[Any] = [*map(like.new_tensor, bounds), own]
        given += [g for g in found if g is not None]
        given += [x for data in self.kept for x in data]
        # Layers with one input may have saved it once for all: a trace depends on it.
        places = [x.data_ptr() for x in given]
        shared = tuple(map(places.index, places))

        def clip(bound: T, scale: T, own: T, *given: T) -> list[T | None]:
            rest = iter(given)
            grads = [None if none else next(rest) for none in unused]
            kept = [[next(rest) for _ in data] for data in self.kept]
            norms = GroupNorms(total.params, group.size, clipping.per_parameter)
            norms.finish(group.collect(kept, grads, group.size, own))

            def factors(norms: T) -> T:
                return clipping.clipping.factors(norms, bound)

            found, sums = norms_and_sums(norms, factors, scale, own > 0)
            return [found, *sums]

        clips, ids = self.traced.clips, map(id, total.params)
        kind = unused, shared, clipping.clipping, *ids
        with torch.no_grad(), full_precision(like.device):
            if kind not in clips:
                graph = make_fx(clip)(*given)
                clips[kind] = self.compiled.settings.backend(graph, given)
            norms, *sums = clips[kind](*given)
            if is_finite(norms):
                total.add_clipped(rows, norms[..., :count], sums)
            else:  # rare: some are computed anew, or dropped
                self._add_eagerly(total, rows, found)

    def _add_eagerly(self, total: Any, rows: T | None, grads: Sequence[Any]) -> None:
        """Adds the gradients, given those of the slots, without a compiled program."""
        kept = [[x[: self.size] for x in data] for data in self.kept]
        own = [None if g is None else g[: self.size] for g in grads]
        samples = self.traced.group.collect(kept, own, self.size)
        if not isinstance(total, ClippedSum):
            total.add(rows, samples)
            return
        total.add(rows, total.group_norms(self.size), samples)
