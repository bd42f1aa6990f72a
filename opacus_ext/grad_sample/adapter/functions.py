"""Functions of samples that ``torch.compile`` turns into one program each.

Dynamo traces all that is in them: the code of a user's model, vmap, and the rules.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import partial
from typing import Any, Callable, Sequence

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.adapter.outputs import NotEqual, is_hidden
from opacus_ext.grad_sample.core.clip import GroupNorms, norms_and_sums
from opacus_ext.grad_sample.core.gradients import no_autocast
from opacus_ext.grad_sample.core.groups import Samples
from opacus_ext.grad_sample.core.traced import TracedGroup
from opacus_ext.grad_sample.core.values import key_function
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.private_torch import is_batched, tree_flatten, tree_unflatten

T = torch.Tensor
Code = Callable[[Any], Any]  # runs a sample, the tree of its arguments
_TENSOR = "<tensor>"  # stands for a tensor in an output
_OBJECT = "<object> "  # and this for an object, before the name of its type


class NotCompiled(Exception):
    """Raised with the reason if samples can't run in a compiled program."""


class ModelSamples(TracedGroup):
    """Samples of a private model."""

    def check_leaves(self, leaves: list[T]) -> None:
        if any(isinstance(leaf, nn.Parameter) for leaf in leaves):
            raise NotAtOnce("a parameter that the model does not have")


class Recorder:
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
        rest = iter(tensors)
        leaves = list(self.others)
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


def run_forward(
    code: Code, params: list[T], slots: list[T], *batch: Any
) -> tuple[list[T], list[list[T]], str]:
    """Returns the outputs ``[B, ...]``, the saved data of each use, and a signature."""
    samples = _samples(*batch)
    recorder = Recorder(code)
    group = TracedGroup(params, samples.size, attaches=True)
    outputs, saved = group.run(recorder, samples, slots)
    saved = [[*map(T.detach, data)] for data in saved]
    return outputs, saved, recorder.signature(group)


def run_step(
    code: Code, params: list[T], slots: list[T], mask: T, clipping: tuple, *batch: Any
) -> tuple[T, tuple[T, list[T | None]], str]:
    """Returns the losses ``[B]``, norms and clipped sums, and a signature."""
    samples = _samples(*batch)
    recorder = Recorder(code)
    first = ModelSamples(params, samples.size)
    # The first run finds the uses of parameters, as each needs a slot.
    with torch.enable_grad():
        first.run(recorder, samples)
    signature = recorder.signature(first)
    slots = first.make_slots()

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
            clipped = clip_samples(first, saved, grads, mask, *clipping)
            return losses, clipped, signature


def clip_samples(
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
    by_parameter = clipping.per_parameter
    norms = GroupNorms(params, group.size, by_parameter, tensor_key=key_function())
    norms.finish(group.collect(saved, grads, group.size, mask))
    factors = partial(clipping.factors, bound=bound)
    return norms_and_sums(norms, factors, scale, mask > 0)
