"""The programs of ``torch.compile`` in which the samples of a private model run.

A loop of the user's own has two, as the criterion is between them: the forward, whose
backward gives the gradients of the slots (core/traced.py), and the clipping, which
turns these into norms and clipped sums. Where the loss is known, a whole step is one.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence, Union, cast

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from opacus_ext.grad_sample.adapter.functions import (
    Code,
    ModelSamples,
    NotCompiled,
    Recorder,
    clip_samples,
    run_forward,
    run_step,
)
from opacus_ext.grad_sample.adapter.settings import Settings, changed_config
from opacus_ext.grad_sample.adapter.state import Change
from opacus_ext.grad_sample.core.clip import (
    ClippedSum,
    DenseGrads,
    is_finite,
)
from opacus_ext.grad_sample.core.gradients import Root, has_graph
from opacus_ext.grad_sample.core.groups import Samples, why
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.values import key_of, key_of_tree
from opacus_ext.grad_sample.factors import full_precision
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import dynamo_config as config
from opacus_ext.private_torch import is_batched, tree_flatten, tree_map, tree_unflatten

T = torch.Tensor
Total = Union[ClippedSum, DenseGrads]


class Traced(NamedTuple):
    """The results of the first, eager forward for one kind of sample."""

    group: TracedGroup  # the uses of parameters
    slots: list[T]  # leaves that are zero
    recorder: Recorder  # the rest of the output
    signature: str  # must be equal in each call
    changed: list[str]  # names of changed state that is not made of data
    clips: dict[tuple, Callable]  # compiled clipping programs


class CompiledModel:
    """The programs of a function of samples, for their numbers and lengths."""

    function: Callable = staticmethod(run_forward)

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
        self._config = changed_config()

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
        count = samples.size
        kind = _kind(samples, self.model.module.training)
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
            traced = self._traced[key]
            before = self.programs
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
        state = self.model.state
        recorder = Recorder(self.code)
        state.remember()
        group = ModelSamples(self.params, samples.size)
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
        signature = recorder.signature(group)
        names = _names_of(changes)
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
    # torch 2.11 leaves out what our errors say, but knows the line that raises them.
    if "UserDefinedException" in str(error):
        return str(error.real_stack[-1].line)
    return why(error)


class CompiledStep(CompiledModel):
    """The programs of whole steps, given the code of the loss."""

    function = staticmethod(run_step)

    def _results(
        self, key: tuple, samples: Samples, count: int, total: Any
    ) -> tuple[Any, Any] | None:
        if total.scales:  # gradients are divided eagerly
            return None
        like, clipping = total.norms, total.clipping
        mask = _mask(samples.size, count, like)
        bound = like.new_tensor(clipping.bound)
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
        self, total: Total, rows: T | None, outputs: Sequence[Root], grads: Sequence[T]
    ) -> None:
        """Adds the gradients to a total, see ``ClippedSum.add_group``."""
        pairs = [(y, grad) for y, grad in zip(outputs, grads) if has_graph(y)]
        if not pairs:
            return
        roots, of_roots = zip(*pairs)
        slots = self.traced.slots
        of_slots = torch.autograd.grad(roots, slots, of_roots, allow_unused=True)
        if not isinstance(total, ClippedSum) or total.scales:
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
        like = total.norms
        params = total.params
        group = self.traced.group
        function = cast(Any, total.clipping)
        clipping = function.clipping
        bound = like.new_tensor(function.bound)
        scale = like.new_tensor(total.scale)
        mask = _mask(group.size, self.size, like)
        leaves, spec = tree_flatten((bound, scale, mask, [*grads], self.saved))
        used = tuple(i for i, leaf in enumerate(leaves) if leaf is not None)
        tensors = [leaves[i] for i in used]
        # Layers with one input may have saved it once for all: a trace depends on it.
        first: dict[int, int] = {}
        addresses = enumerate(map(T.data_ptr, tensors))
        shared = tuple(first.setdefault(address, i) for i, address in addresses)

        def clip(*tensors: T) -> list[T | None]:
            filled: list[T | None] = [None] * spec.num_leaves
            for i, tensor in zip(used, tensors):
                filled[i] = tensor
            bound, scale, mask, grads, saved = tree_unflatten(filled, spec)
            norms, sums = clip_samples(
                group, saved, grads, mask, params, clipping, bound, scale
            )
            return [norms, *sums]

        programs = self.traced.clips
        key = (used, shared, clipping, *map(id, params))
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
