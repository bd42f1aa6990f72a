"""A user's forward hooks see the batch, as without privacy, and see it once."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample.samplewise.compare import _TABLES, is_own_hook
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.walk import map_tensors

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.run import Run


class _SeenByBatch:
    """
    A hook that is shown ordinary tensors ``[B, ...]`` through which gradients flow. One
    that returns something is part of what the model computes: it runs by sample.
    """

    def __init__(self, run: "Run", hook: Callable, returning: set):
        self.run, self.hook, self.returning = run, hook, returning

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.hook in self.returning or not torch.is_grad_enabled():
            return self.hook(*args, **kwargs)
        run = self.run
        module, *values = args

        def batch(x: torch.Tensor) -> torch.Tensor:
            return run.leave(x) if is_batched(x) else x

        with run.outside():
            values, kwargs_seen = map_tensors(batch, (values, kwargs))
            found = self.hook(module, *values, **kwargs_seen)
        if found is None:
            return None
        self.returning.add(self.hook)
        return self.hook(*args, **kwargs)


@contextmanager
def seen_by_batch(run: "Run", module: nn.Module) -> Iterator[None]:
    """Within it the user's forward hooks on parts of ``module`` are shown batches."""
    before: List[Tuple[Dict, Dict]] = []
    for part in module.modules():
        if part is module:
            continue  # its hooks are outside of the run
        state = vars(part)
        for name in _TABLES:
            table = state[name]
            if table:
                before.append((table, dict(table)))
                for i, hook in table.items():
                    if not is_own_hook(hook):
                        table[i] = _SeenByBatch(run, hook, run.engine.returning)
    try:
        yield
    finally:
        for table, hooks in before:
            for i, hook in list(table.items()):
                if isinstance(hook, _SeenByBatch):
                    table[i] = hook.hook
