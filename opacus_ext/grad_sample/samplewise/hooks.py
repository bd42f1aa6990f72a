"""A user's forward hooks see the batch, as without privacy, and see it once.

Where all samples run at once a hook is called as always, with the tensors of the batch.
Where they run in parts it is called when the last one has. A hook that returns
something is part of what the model computes: it runs by sample.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, NamedTuple, Tuple

import torch
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.packed import of_batch
from opacus_ext.grad_sample.samplewise.sandbox import is_own_hook
from opacus_ext.grad_sample.samplewise.walk import map_tensors, tensors_in
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine
    from opacus_ext.grad_sample.samplewise.run import Run


BACKWARD_HOOK = (
    "has a hook on its backward pass (register_full_backward_hook), which would see "
    "the gradients of all samples before they are clipped."
)


class HookCall(NamedTuple):
    """A call of a hook, to come."""

    hook: Callable
    module: Any
    values: tuple
    more: dict


class HookReturns(Exception):
    """A hook was found to be part of what the model computes."""


class _MarksMadeOfData(TorchFunctionMode):
    """What a hook makes of the batch must not come back into the forward."""

    def __init__(self, engine: "Engine"):
        super().__init__()
        self.engine = engine

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tensors_in(out if isinstance(out, (list, tuple)) else [out]):
            self.engine.made_of_data.add(x)
        return out


class _CalledNow:
    """A hook that is shown tensors ``[B, ...]`` through which gradients flow."""

    def __init__(self, run: "Run", hook: Callable):
        self.run, self.hook = run, hook

    def __call__(self, module: Any, *values: Any, **more: Any) -> Any:
        run, engine = self.run, self.run.engine

        def batch(x: torch.Tensor) -> torch.Tensor:
            if not is_batched(x):
                return x
            whole = run.as_batch(x)
            run.shown_to_hooks[id(whole)] = (
                whole,
                x,
            )  # should the forward come across it
            return whole

        with run.outside():
            packed = functools.partial(of_batch, run)
            seen, named = map_tensors(batch, (values, more), packed)
            with _MarksMadeOfData(engine):
                found = self.hook(module, *seen, **named)
        if found is None:
            return None
        engine.hooks_that_return.add(self.hook)
        engine.kinds.clear()  # what was compared was another model
        return self.hook(module, *values, **more)


class _CalledLater:
    """A hook whose calls are noted."""

    def __init__(self, run: Any, hook: Callable):
        self.run, self.hook = run, hook

    def __call__(self, module: Any, *values: Any, **more: Any) -> None:
        self.run.hook_calls.append(HookCall(self.hook, module, values, more))


@contextmanager
def batch_hooks(run: Any, at_once: bool) -> Iterator[None]:
    """
    Within it the user's forward hooks on parts of the model are shown batches, at once
    or later.
    """
    engine = run.engine
    replaced: List[Tuple[Dict, int, Callable]] = []
    for table in engine.hook_tables():
        for i, hook in table.items():
            if not is_own_hook(hook) and hook not in engine.hooks_that_return:
                replaced.append((table, i, hook))
                table[i] = _CalledNow(run, hook) if at_once else _CalledLater(run, hook)
    try:
        yield
    finally:
        for table, i, hook in replaced:
            if i in table:
                table[i] = hook


def numbered(calls: List[HookCall]) -> Dict[tuple, HookCall]:
    """The calls by hook, module and how often these had been called before."""
    found: Dict[tuple, HookCall] = {}
    for call in calls:
        n = 0
        while (call.hook, call.module, n) in found:
            n += 1
        found[call.hook, call.module, n] = call
    return found


def of_all(engine: "Engine", parts: List[List[HookCall]]) -> List[List[HookCall]]:
    """
    The calls of each part, in one order.

    Raises:
        Refused: if a module ran for some samples only
    """
    found = [numbered(calls) for calls in parts]
    keys = list(found[0])
    for other in found[1:]:
        for hook, module, _ in set(keys) ^ set(other):
            raise Refused(
                f"{engine.describe()}: a forward hook on {engine.name_of(module)} "
                "can't be shown the batch, as only some of the samples pass that "
                "module.",
                module=engine.describe(),
                remedy="Remove the hook, or return what it looks at from the forward.",
            )
    return [[calls[key] for key in keys] for calls in found]


def deliver(engine: "Engine", calls: List[HookCall]) -> None:
    """
    Calls the hooks, with what is of the batch now.

    Raises:
        HookReturns: if one returns something
    """
    again = False
    for hook, module, values, more in calls:
        if hook in engine.hooks_that_return:
            continue
        with _MarksMadeOfData(engine):
            found = hook(module, *values, **more)
        if found is not None:
            engine.hooks_that_return.add(hook)
            again = True
    if again:
        engine.kinds.clear()
        raise HookReturns()
