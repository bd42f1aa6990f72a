"""A private model that ``torch.compile`` was used on: its forward, and its clipping.

Samples run as in ``clipped_grads`` under ``torch.compile`` (core/traced.py), in two
programs, as the criterion is in between: the forward with its slots, whose backward
gives their gradients, and what makes norms and clipped sums of these.
"""

from __future__ import annotations

import math
from typing import (
    Any,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from opacus_ext.clipping import ClippingFunction
from opacus_ext.grad_sample.adapter.outputs import Leaf, Returned, read_output
from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.clip import ClippedSum, GroupNorms
from opacus_ext.grad_sample.core.dynamo import Settings
from opacus_ext.grad_sample.core.groups import why
from opacus_ext.grad_sample.core.traced import (
    TracedGroup,
    collect,
    find_uses,
    run_with_slots,
)
from opacus_ext.grad_sample.core.vmap import is_batched
from opacus_ext.grad_sample.rules import NotAtOnce

T = torch.Tensor

_PROGRAMS = 64  # the most that are made of a model, for its sizes and lengths


class NotCompiled(Exception):
    """Raised with the reason where samples run as if the model were not compiled."""


class First(NamedTuple):
    """
    What a first run has found, of samples of one kind.

    Attributes:
        group: the uses of parameters
        slots: leaves, zero
        output: as a sample returns it, with None for tensors
        words: what must be the same in each run
        changed: names of what the forward leaves changed, none of it made of data
        clips: compiled, by what is clipped
        numbers: which these are given
    """

    group: TracedGroup
    slots: List[T]
    output: Any
    words: str
    changed: Tuple[str, ...]
    clips: Dict[tuple, Callable]
    numbers: Dict[tuple, List[T]]


class CompiledModel:
    """
    The programs of a model.

    Args:
        model: the private model (forward.py)
        settings: of ``torch.compile``
    """

    def __init__(self, model: Any, settings: Settings):
        self.model, self.settings = model, settings
        self.params = list(model.params.values())
        self.programs = self._looked_at = 0
        self._known: Dict[tuple, First] = {}
        self._failed: Dict[tuple, str] = {}
        self.module = getattr(model.module, "_orig_mod", model.module)
        module, params = self.module, self.params

        def forward(
            tree: Any,
            by_sample: Tuple[bool, ...],
            size: int,
            slots: List[T],
            tracked: Tuple[bool, ...],
        ) -> Any:
            if not torch.compiler.is_compiling():
                raise NotCompiled("torch.compiler.set_stance says so")
            words: List[str] = []
            run, leaves = _runner(module, tree, by_sample, words)
            traced = run_with_slots(run, leaves, params, size, slots, tracked)
            kept = [[x.detach() for x in data] for data in traced.kept]
            return traced.output, kept, words[0] + traced.group.uses_in_words()

        self._forward = torch.compile(
            forward, backend=self._backend, fullgraph=True, dynamic=False
        )

    def _backend(self, graph: Any, inputs: Sequence[Any]) -> Callable:
        self.programs += 1
        return self.settings.backend(graph, inputs)

    def run(self, samples: Samples) -> Tuple[Returned, CompiledGroup]:
        """
        Runs some samples.

        Raises:
            NotCompiled: where that can't be had; nothing has changed
        """
        count = samples.size
        size = padded(count)
        if size > count:  # with samples that nothing is asked of
            rows = torch.arange(size).clamp(max=count - 1)
            samples = samples.select(rows)
        tree = samples.tree(lambda x: x)
        by_sample = tuple(samples.by_sample)
        key = _kind(samples, self.model.module.training)
        if key in self._failed:
            raise NotCompiled(self._failed[key])
        given = tree, by_sample, size
        state = self.model.state
        try:
            first = self._known.get(key) or self._first(key, *given)
            if any(known.changed for known in self._known.values()):
                state.remember()
                self._looked_at = -1
            found = self._call(*given, first)
            if found is None:  # the code takes another path than before
                if self._looked_at < 0:
                    state.restore()
                first = self._first(key, *given)
                state.remember()
                self._looked_at = -1
                found = self._call(*given, first)
            if found is None:
                raise NotAtOnce("a forward that is another one when it is compiled")
            if self._looked_at >= 0 and self._looked_at != self.programs:
                state.remember()  # a new program, that may have changed something
                found = self._call(*given, first)
                self._looked_at = -1
            if self._looked_at < 0:
                if tuple(c.name for c in state.changes()) != first.changed:
                    state.restore()
                    raise NotAtOnce("a forward that changes other things when compiled")
                self._looked_at = self.programs
        except Exception as error:
            self._failed[key] = _reason(error)
            raise NotCompiled(self._failed[key]) from error
        outputs, kept = found
        given = iter(outputs)
        whole = tree_unflatten(
            [next(given) if x is None else x for x in first.output[0]], first.output[1]
        )

        def read(x: Any) -> Leaf:
            return Leaf(x[:count], True) if isinstance(x, T) else Leaf(x, False)

        returned = read_output(whole, read, None, count)
        return returned, CompiledGroup(self, first, outputs, kept, count)

    def _first(
        self, key: tuple, tree: Any, by_sample: Tuple[bool, ...], size: int
    ) -> First:
        """The first run of a kind, eagerly."""
        state = self.model.state
        state.remember()
        words: List[str] = []
        outputs: List[Any] = []
        run, leaves = _runner(self.module, tree, by_sample, words, outputs)
        group = _Group(self.params, size)
        try:
            find_uses(run, leaves, group)
            changes = state.changes()
        finally:
            name = state.restore()
        if any(isinstance(c.value, T) and is_batched(c.value) for c in changes):
            raise NotAtOnce("a forward that keeps what it computes")
        changed = tuple(c.name for c in changes)
        if name is not None:
            raise NotAtOnce(f"a forward that changes {name}")
        slots = [slot.requires_grad_() for slot in group.make_slots()]
        text = words[0] + group.uses_in_words()
        first = First(group, slots, outputs[0], text, changed, {}, {})
        self._known[key] = first
        return first

    def _call(
        self, tree: Any, by_sample: Tuple[bool, ...], size: int, first: First
    ) -> Optional[Tuple[List[T], List[List[T]]]]:
        """The outputs and the data kept; None if it is not what was found first."""
        tracked = tuple(first.group.tracked)
        with torch._dynamo.config.patch(recompile_limit=_PROGRAMS):
            found = self._forward(tree, by_sample, size, first.slots, tracked)
        outputs, kept, words = found
        return (outputs, kept) if words == first.words else None


def _runner(
    module: nn.Module,
    tree: Any,
    by_sample: Tuple[bool, ...],
    words: List[str],
    outputs: Optional[List[Any]] = None,
) -> Tuple[Callable, List[T]]:
    """
    What runs a sample, and the tensors of all of them.

    Args:
        words: is added what the sample returned, but for numbers of data
        outputs: is added what it returned, with None for tensors
    """
    every, spec = tree_flatten(tree)
    places = [i for i, own in enumerate(by_sample) if own]

    def run(own: List[T]) -> List[T]:
        leaves = list(every)
        for i, x in zip(places, own):
            leaves[i] = x
        args, kwargs = tree_unflatten(leaves, spec)
        output = module._call_impl(*args, **kwargs)
        found, of_output = tree_flatten(output)
        tensors = [x for x in found if isinstance(x, T)]
        if not all(map(is_batched, tensors)):
            raise NotAtOnce("an output that all samples share")
        others = [None if isinstance(x, T) else x for x in found]
        if not all(isinstance(x, (int, float, str, type(None))) for x in others):
            raise NotAtOnce("an output that is no tensor")
        words.append(" ".join([str(x) for x in others]) + "; ")
        if outputs is not None:
            outputs.append((others, of_output))
        return tensors

    return run, [every[i] for i in places]


class _Group(TracedGroup):
    """A first run, of a model."""

    def _is_constant(self, x: T) -> bool:
        constant = super()._is_constant(x)
        if constant and isinstance(x, nn.Parameter):
            raise NotAtOnce("a parameter that is not known")
        return constant


def padded(size: int) -> int:
    """How many samples run in the place of some: four sizes up to each power of two."""
    step = 2 ** max(0, size.bit_length() - 3)
    return max(2, -(-size // step) * step)


def _kind(samples: Samples, training: bool) -> tuple:
    leaves = (
        (x.shape, x.dtype, x.device) if isinstance(x, T) else repr(x)
        for x in samples.leaves
    )
    return training, str(samples.spec), tuple(samples.by_sample), *leaves


def _reason(error: BaseException) -> str:
    """An error of the compiler, in a line."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    return why(error)


class CompiledGroup:
    """
    Samples that have run in a program.

    Args:
        compiled: the model
        first: what is known of such samples
        outputs: tensors ``[S, ...]``, with their graph
        kept: by use, what the factors need
        count: how many samples are meant; the others fill up
    """

    def __init__(
        self,
        compiled: CompiledModel,
        first: First,
        outputs: List[T],
        kept: List[List[T]],
        count: int,
    ):
        self.compiled, self.first, self.outputs = compiled, first, outputs
        self.kept, self.size = kept, count

    def add_to(
        self, total: Any, rows: Optional[T], outputs: Sequence[T], grads: Sequence[Any]
    ) -> None:
        """
        Adds the samples' gradients.

        Args:
            total: a ClippedSum, or another sum (core/)
            rows: which samples of the batch these are; None: all
            outputs: of the samples, with their graph
            grads: of these
        """
        pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
        if not pairs:
            return
        ys, gs = zip(*pairs)
        slots = self.first.slots
        found = list(torch.autograd.grad(ys, slots, gs, allow_unused=True))
        if not isinstance(total, ClippedSum):
            count, group = self.size, self.first.group
            kept = [[x[:count] for x in data] for data in self.kept]
            found = [None if g is None else g[:count] for g in found]
            total.add(rows, collect(group.uses, kept, found, group.all, count))
            return
        clipping: ClippingFunction = total.clipping
        key = tuple(g is None for g in found), clipping.clipping, *map(id, total.params)
        given = [*self._numbers(total), *(g for g in found if g is not None)]
        given += [x for data in self.kept for x in data]
        clip = self.first.clips.get(key)
        with torch.no_grad():
            if clip is None:
                graph = make_fx(self._clip(key[0], total.params, clipping))(*given)
                clip = self.compiled.settings.backend(graph, given)
                self.first.clips[key] = clip
            norms, *sums = clip(*given)
        total.add_clipped(rows, norms[..., : self.size], sums)

    def _numbers(self, total: ClippedSum) -> List[T]:
        """The bound, the scale, and which samples are meant."""
        like, known = total.norms, self.first.numbers
        key = str(total.clipping.bound), total.scale, self.size
        if key not in known:
            given = dict(dtype=like.dtype, device=like.device)
            known.clear()
            known[key] = [
                torch.as_tensor(total.clipping.bound, **given),
                torch.as_tensor(total.scale, **given),
                torch.arange(self.first.group.size, device=like.device) < self.size,
            ]
        return known[key]

    def _clip(
        self, unused: Tuple[bool, ...], params: List[T], clipping: ClippingFunction
    ) -> Callable:
        group, every = self.first.group, self.compiled.params

        def clip(bound: T, scale: T, own: T, *given: T) -> List[Optional[T]]:
            rest = iter(given)
            grads = [None if none else next(rest) for none in unused]
            kept = [[next(rest) for _ in data] for data in self.kept]
            found = GroupNorms(params, group.size, clipping.per_parameter)
            found.finish(collect(group.uses, kept, grads, every, group.size))
            norms = found.norms / scale
            finite = norms.isfinite() & own
            finite = finite.all(0) if finite.dim() > 1 else finite
            found.drop(~finite)
            factors = clipping.clipping.factors(
                norms.masked_fill(~finite, math.inf), bound
            )
            factors = factors.masked_fill(~finite, 0) / scale
            return [norms, *found.weighted_sums(factors)]

        return clip
