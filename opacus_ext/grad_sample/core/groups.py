"""Samples in groups: at once, split by their branches, or one by one."""

from __future__ import annotations

import traceback
import warnings
from collections import deque
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

import torch

from opacus_ext.grad_sample.core.batch import Samples
from opacus_ext.grad_sample.core.group import BranchesDiffer
from opacus_ext.grad_sample.rules import NotAtOnce
from opacus_ext.refused import Refused

T = torch.Tensor


def in_groups(
    samples: Sequence[Samples],
    at_once: Callable[[Samples], None],
    one: Callable[[Samples, int], None],
    *,
    microbatch: Optional[int] = None,
    one_by_one: bool = False,
    tell: Optional[Callable[[str], None]] = None,
) -> None:
    """
    Runs all samples.

    Args:
        samples: those of one kind each
        at_once: runs some at once; raises BranchesDiffer where they must be split, and
            any error where vmap can't run them. It has no effect if it fails
        one: runs one of some samples, alone
        microbatch: the most that run at once
        one_by_one: whether none run at once
        tell: is told why samples run one by one that should not
    """
    todo = deque(samples)
    while todo:
        some = todo.popleft()
        if microbatch is not None and some.size > microbatch:
            every = torch.arange(some.size)
            todo.extendleft(some.select(i) for i in reversed(every.split(microbatch)))
            continue
        if some.size > 1 and not one_by_one:
            try:
                at_once(some)
                continue
            except BranchesDiffer as differ:
                answers = differ.answers.cpu()
                parts = (answers == k for k in answers.unique())
                todo.extendleft(some.select(part.nonzero()[:, 0]) for part in parts)
                continue
            except Refused:
                raise
            except Exception as error:  # what vmap can't run, or the code's own
                reason = why(error)
        else:
            reason = None
        for i in range(some.size):
            one(some, i)
        if reason and tell is not None:
            tell(reason)


def why(error: BaseException) -> str:
    """An error in a line, with the line of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not any(part in f.filename for part in _INSIDE)]
    text = next((x for x in str(error).splitlines() if x.strip()), "").strip()
    what = text if isinstance(error, NotAtOnce) else f"{type(error).__name__}: {text}"
    if not own:
        return what[:200]
    return f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line} ({what[:200]})"


_INSIDE = ("/torch/", "opacus_ext/grad_sample/")


def warn_one_by_one(name: str, reason: str) -> None:
    """Warns that samples run one by one, and why."""
    warnings.warn(
        f"{name} runs one sample after the other, as vmap can't run {reason}. That is "
        "exact, and slower where samples are short.",
        stacklevel=3,
    )


@contextmanager
def no_autocast() -> Iterator[None]:
    """Gradients, norms and sums are computed in the types that they have."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    with ExitStack() as stack:
        for kind in kinds:
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def gradients_alone(
    outputs: Sequence[T], grads: Sequence[Optional[T]], leaves: Sequence[T]
) -> Dict[int, T]:
    """
    The gradients of one sample, by ordinary autograd.

    Args:
        outputs: of the sample
        grads: of these
        leaves: parameters, and inputs

    Returns:
        Dense gradients by the ids of leaves; none for those that were not used.
    """
    pairs = [(y, g) for y, g in zip(outputs, grads) if y.requires_grad]
    if not pairs or not leaves:
        return {}
    ys, gs = zip(*pairs)
    reached, own_functions = graph_of(ys)
    if not own_functions:
        found = torch.autograd.grad(ys, leaves, gs, allow_unused=True)
    else:
        # A function of the user's may call backward() in its own, as checkpoints do,
        # which autograd.grad would not see.
        everywhere = list({id(x): x for x in (*leaves, *reached)}.values())
        before = [x.grad for x in everywhere]
        for x in everywhere:
            x.grad = None
        try:
            torch.autograd.backward(ys, gs)
            found = [x.grad for x in leaves]
        finally:
            for x, grad in zip(everywhere, before):
                x.grad = grad
    return {
        id(x): g.to_dense() if g.is_sparse else g
        for x, g in zip(leaves, found)
        if g is not None
    }


def graph_of(outputs: Sequence[T]) -> Tuple[List[T], bool]:
    """
    The leaves that the graph of some tensors ends in, and whether there are autograd
    functions of the user's in it.
    """
    leaves: List[T] = [y for y in outputs if y.grad_fn is None and y.requires_grad]
    own, seen = False, set()
    todo = [y.grad_fn for y in outputs]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            leaves.append(leaf)
        elif isinstance(node, torch.autograd.function.BackwardCFunction):
            own = True
        for parent, _ in node.next_functions:
            todo.append(parent)
    return leaves, own


__all__: List[Any] = ["gradients_alone", "in_groups", "no_autocast", "warn_one_by_one"]
