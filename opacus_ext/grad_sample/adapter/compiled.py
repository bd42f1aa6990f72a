"""A private model that ``torch.compile`` was used on: its forward, and its clipping.

Samples run as in ``clipped_grads`` under ``torch.compile`` (core/traced.py), in two
programs, as the criterion is in between: the forward with its slots, whose backward
gives their gradients, and what makes norms and clipped sums of these.
"""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Sequence

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.clipping import ClippingFunction
from opacus_ext.grad_sample.adapter.outputs import Leaf, Returned, read_output
from opacus_ext.grad_sample.core.clip import ClippedSum, GroupNorms, norms_and_sums
from opacus_ext.grad_sample.core.dynamo import Settings, compile_whole
from opacus_ext.grad_sample.core.groups import Samples, why
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import NotAtOnce

T = torch.Tensor
Found = tuple[list[T], list[list[T]]]  # outputs, and by use what the factors need
_TENSOR = "<tensor>"  # in the place of one
_PROGRAMS = 64  # the most that are made of a model, for its sizes and lengths


class NotCompiled(Exception):
    """Raised with the reason where samples run as if the model were not compiled."""


class First(NamedTuple):
    """What the first run of samples of one kind has found."""

    group: TracedGroup  # the uses of parameters
    slots: list[T]  # leaves, zero
    output: tuple[list[Any], Any]  # of a sample, with words for tensors, and its tree
    words: str  # what must be the same in each run
    changed: tuple[str, ...]  # names of what it leaves changed, not made of data
    clips: dict[tuple, Callable]  # compiled, by what is clipped
    numbers: dict[tuple, list[T]]  # which these are given


class CompiledModel:
    """The compiled programs of a private model (forward.py)."""

    def __init__(self, model: Any, settings: Settings):
        self.model, self.settings = model, settings
        self.params = list(model.params.values())
        self.programs = self._looked_at = 0
        self._known: dict[tuple, First] = {}
        self._failed: dict[tuple, str] = {}
        self.module = getattr(model.module, "_orig_mod", model.module)
        module, params = self.module, self.params

        def forward(
            tree: Any,
            by_sample: tuple[bool, ...],
            size: int,
            slots: list[T],
        ) -> Any:
            if not torch.compiler.is_compiling():
                raise NotCompiled("torch.compiler.set_stance says so")
            group = TracedGroup(params, size)
            call, returned = _caller(module)
            leaves, spec = tree_flatten(tree)
            samples = Samples(None, leaves, by_sample, spec, size)
            outputs, kept = group.run(call, samples, slots)
            kept = [[x.detach() for x in data] for data in kept]
            return outputs, kept, _in_words(returned, group)

        self._forward = compile_whole(forward, self._backend, _PROGRAMS)

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable:
        self.programs += 1
        return self.settings.backend(graph, inputs)

    def run(self, samples: Samples) -> tuple[Returned, CompiledGroup]:
        """Runs some samples, or raises NotCompiled with nothing changed."""
        count, size = samples.size, padded(samples.size)
        if size > count:  # with samples that nothing is asked of
            samples = samples.select(torch.arange(size).clamp(max=count - 1))
        key = _kind(samples, self.model.module.training)
        if key in self._failed:
            raise NotCompiled(self._failed[key])
        try:
            first = self._known.get(key) or self._first(key, samples)
            changes = any(known.changed for known in self._known.values())
            found = self._call(samples, first, changes)
            if found is None:  # the code takes another path than before
                first = self._first(key, samples)
                found = self._call(samples, first, True)
            if found is None:
                raise NotAtOnce("a forward that is another one when it is compiled")
        except Exception as error:
            self._failed[key] = _reason(error)
            raise NotCompiled(self._failed[key]) from error
        outputs, kept = found
        rest = iter(outputs)
        others, spec = first.output
        leaves = [next(rest) if x == _TENSOR else x for x in others]
        whole = tree_unflatten(leaves, spec)

        def read(x: Any) -> Leaf:
            own = isinstance(x, T)  # a slice would be copied on the way back
            return Leaf(x[:count] if own and len(x) > count else x, own)

        returned = read_output(whole, read, None, count)
        return returned, CompiledGroup(self, first, kept, count)

    def _first(self, key: tuple, samples: Samples) -> First:
        """Runs samples of a new kind for the first time, eagerly."""
        state, (call, returned) = self.model.state, _caller(self.module)
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
        words, changed = _in_words(returned, group), tuple(c.name for c in changes)
        self._known[key] = First(group, slots, returned[0], words, changed, {}, {})
        return self._known[key]

    def _call(self, samples: Samples, first: First, look: bool) -> Found | None:
        """
        Runs the program; None if it does not do what was found first. Looks at what
        it leaves changed with ``look``, and with any new program.
        """
        state = self.model.state
        if look:
            state.remember()
        own = tuple(samples.by_sample)
        given = samples.tree(lambda x: x), own, samples.size, first.slots
        outputs, kept, words = self._forward(*given)
        if words != first.words:
            if look:
                state.restore()
            return None
        if not look and self._looked_at != self.programs:
            return self._call(samples, first, True)
        if look:
            if tuple(c.name for c in state.changes()) != first.changed:
                state.restore()
                raise NotAtOnce("a forward that changes other things when compiled")
            self._looked_at = self.programs
        return outputs, kept


def _caller(module: nn.Module) -> tuple[Callable, list[Any]]:
    """
    A function that runs a sample and gives its outputs that are tensors, and a list
    that it fills with the outputs, a word for tensors, and their tree.
    """
    returned: list[Any] = []

    def call(sample: Any) -> list[T]:
        args, kwargs = sample
        found, spec = tree_flatten(module._call_impl(*args, **kwargs))
        tensors = [x for x in found if isinstance(x, T)]
        if not all(map(is_batched, tensors)):
            raise NotAtOnce("an output that all samples share")
        others = [_TENSOR if isinstance(x, T) else x for x in found]
        if not all(isinstance(x, (int, float, str, type(None))) for x in others):
            raise NotAtOnce("an output that is no tensor")
        returned.append((others, spec))
        return tensors

    return call, returned


def _in_words(returned: list[Any], group: TracedGroup) -> str:
    """The outputs and uses of a run in words, which must not change."""
    return " ".join([str(x) for x in returned[0][0]]) + "; " + group.uses_in_words()


class _Group(TracedGroup):
    """The group of a model's first run."""

    def _is_constant(self, x: T) -> bool:
        constant = super()._is_constant(x)
        if constant and isinstance(x, nn.Parameter):
            raise NotAtOnce("a parameter that is not known")
        return constant


def padded(size: int) -> int:
    """How many samples a program has for some: four sizes up to each power of two."""
    step = 2 ** max(0, size.bit_length() - 3)
    return max(2, -(-size // step) * step)


def _kind(samples: Samples, training: bool) -> tuple:
    leaves = (
        (x.shape, x.dtype, x.device) if isinstance(x, T) else repr(x)
        for x in samples.leaves
    )
    return training, str(samples.spec), tuple(samples.by_sample), *leaves


def _reason(error: BaseException) -> str:
    """An error of the compiler as one line of text."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    return why(error)


class CompiledGroup:
    """
    Samples that have run in a compiled program. ``kept`` has what the factors of each
    use need; samples from ``size`` on only fill up the program's batch.
    """

    def __init__(
        self, compiled: CompiledModel, first: First, kept: list[list[T]], size: int
    ):
        self.compiled, self.first, self.kept, self.size = compiled, first, kept, size

    def add_to(
        self, total: Any, rows: T | None, outputs: Sequence[T], grads: Sequence[Any]
    ) -> None:
        """Adds the samples' gradients to a total, see ``ClippedSum.add_group``."""
        pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
        if not pairs:
            return
        ys, gs = zip(*pairs)
        group, count = self.first.group, self.size
        found = torch.autograd.grad(ys, self.first.slots, gs, allow_unused=True)
        if not isinstance(total, ClippedSum):
            kept = [[x[:count] for x in data] for data in self.kept]
            own = [None if g is None else g[:count] for g in found]
            total.add(rows, group.collect(kept, own, count))
            return
        clipping: ClippingFunction = total.clipping
        unused = tuple(g is None for g in found)
        given = [*self._numbers(total), *(g for g in found if g is not None)]
        given += [x for data in self.kept for x in data]

        def run(drop: bool) -> tuple[T, list[T | None]]:
            def clip(bound: T, scale: T, own: T, *given: T) -> list[T | None]:
                rest = iter(given)
                grads = [None if none else next(rest) for none in unused]
                kept = [[next(rest) for _ in data] for data in self.kept]
                norms = GroupNorms(total.params, group.size, clipping.per_parameter)
                norms.finish(group.collect(kept, grads, group.size))

                def factors(norms: T) -> T:
                    return clipping.clipping.factors(norms, bound)

                found, sums = norms_and_sums(norms, factors, scale, own, drop)
                return [found, *sums]

            clips = self.first.clips
            key = unused, clipping.clipping, drop, *map(id, total.params)
            if key not in clips:
                graph = make_fx(clip)(*given)
                clips[key] = self.compiled.settings.backend(graph, given)
            norms, *sums = clips[key](*given)
            return norms, sums

        with torch.no_grad():
            norms, sums = run(drop=False)
            if not bool(norms.isfinite().all()):  # seldom, and masks copy all data
                norms, sums = run(drop=True)
        total.add_clipped(rows, norms[..., :count], sums)

    def _numbers(self, total: ClippedSum) -> list[T]:
        """The bound, the scale, and which samples are meant."""
        like, known = total.norms, self.first.numbers
        bound = torch.as_tensor(total.clipping.bound, dtype=torch.float64)
        key = str(bound.tolist()), total.scale, self.size  # to the last digit
        if key not in known:
            known.clear()
            own = torch.arange(self.first.group.size, device=like.device) < self.size
            known[key] = [
                *map(like.new_tensor, (total.clipping.bound, total.scale)),
                own,
            ]
        return known[key]
