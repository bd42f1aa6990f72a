"""All samples at once, under vmap: a forward pass, and its outputs as of the batch."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.samplewise.checkpoint import checkpointed
from opacus_ext.grad_sample.samplewise.compare import Join, kind_of
from opacus_ext.grad_sample.samplewise.functions import functions_by_sample
from opacus_ext.grad_sample.samplewise.functorch import is_batched, replace_tensor
from opacus_ext.grad_sample.samplewise.hooks import batch_hooks
from opacus_ext.grad_sample.samplewise.kinds import InputKind, joins_for
from opacus_ext.grad_sample.samplewise.packed import agreed, of_batch, unpacked
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.walk import leaves_in

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.inputs import Part


def run_at_once(
    engine: "Engine", part: "Part", known: InputKind, size: int, whole: bool
) -> Tuple[Run, Any]:
    """
    Runs the samples of a part at once.

    Args:
        known: of the kind of input
        size: of the batch, of which the part has all samples or some
        whole: whether hooks of the user are shown the samples now

    Returns:
        The run, and the output, whose tensors are those of all samples of the part.
    """

    def joined(run: Run, output: Any) -> None:
        run.joins = joins_for(engine, known, output, size)

    with _started(engine, part) as run:
        output = _forward(run, part, whole, joined)
        _to_batch(run, output)
    return run, output


def raw_at_once(
    engine: "Engine", part: "Part", known: InputKind, whole: bool
) -> List[Tuple[torch.Tensor, bool]]:
    """
    The tensors of the output as samples give them, and whether each has its own:
    ``[B, *shape]``, else without the first dim.
    """
    with _started(engine, part) as run:
        output = _forward(run, part, whole)
        known.outputs.add(kind_of(output))
        with run.unrecorded():
            leaves = [unpacked(agreed(run, x)) for x in leaves_in(output)]
        found = [
            (
                (run.level.unwrap(x).detach(), True)
                if is_batched(x)
                else (x.detach(), False)
            )
            for x in leaves
        ]
        del leaves
        _to_batch(run, None)
        return found


@contextmanager
def sample_scope(run: Any, whole: bool) -> Iterator[None]:
    """What is arranged for the samples' code: hooks, checkpoints, own functions."""
    with batch_hooks(run, whole), checkpointed(run), functions_by_sample(run):
        yield


@contextmanager
def _started(engine: "Engine", part: "Part") -> Iterator[Run]:
    run = Run(engine, part.size, engine.attached)
    engine.current = run
    try:
        with run.level:
            yield run
    finally:
        engine.current = None
        run.end()


def _forward(
    run: Run, part: "Part", whole: bool, done: Optional[Callable] = None
) -> Any:
    """The output as samples see it; ``done(run, output)`` is called with it."""
    args, kwargs = part.samples(run)
    try:
        with sample_scope(run, whole), run:
            output = run.engine.forward(*args, **kwargs)
        if done is not None:
            done(run, output)
    except BaseException:
        run.abandoned = True
        _to_batch(run, None)
        raise
    return output


def _to_batch(run: Run, output: Any) -> None:
    """What is left of the samples becomes tensors of the batch."""
    with run.outside():
        run.shown_to_hooks.clear()
        left: List[Tuple[torch.Tensor, torch.Tensor]] = []
        done: set = set()
        if output is not None:
            leaves = list(leaves_in(output))
            for x, join in zip(leaves, run.joins or [None] * len(leaves)):
                if isinstance(x, PackedSequence):
                    pairs = zip(x, of_batch(run, x))
                    left += [(a, b) for a, b in pairs if id(a) not in done]
                    done.update(map(id, x))
                    continue
                done.add(id(x))
                new = _joined(run, x, join)
                if new is not x:
                    left.append((x, new))
            del leaves
        for x in run.survivors():
            if id(x) not in done:
                left.append((x, run.as_batch(x)))
        for x, new in left:
            if x is not new:
                replace_tensor(x, new)
                run.engine.made_of_data.add(x)


def _joined(run: Run, x: torch.Tensor, join: Optional[Join]) -> torch.Tensor:
    engine = run.engine
    if not is_batched(x) and (join is None or join.how in ("shared", "only")):
        return x  # it may be a parameter or a buffer
    if join is None or join == Join(name=join.name):
        return run.as_batch(x) if is_batched(x) else join(run.inner(x), engine)
    y = join(run.inner(x), engine)
    one = join.how and engine.per_sample is None and (join.how != "only" or not y.dim())
    return run.release(y, None if one else join.dim or 0)
