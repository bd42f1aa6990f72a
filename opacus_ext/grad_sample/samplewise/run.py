"""One forward pass of all samples at once, each by itself, and what it uses.

The model runs under vmap, so that every value is known to be one a sample or shared by
all. A :class:`Run` is the mode that sees each op in which something made of parameters
meets data, whichever module calls it. What an op makes of them is passed through a node
of autograd, :class:`Capture`, that keeps the data and is shown the gradient: together
they are the factors of the per-sample gradients (factors.py). An op without a rule is
given a copy of the parameter for each sample instead, whose gradient is the answer.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample.rules.registry import OPS, Op
from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.ops import (
    DRAWS,
    HANDLERS,
    KEEPS_ENTRIES,
    TELLS_NOTHING,
    carry,
    look,
    refuse_carried,
    swapped,
    swapped_dict,
    writes,
)
from opacus_ext.grad_sample.samplewise.recording import Recording, Tensors
from opacus_ext.grad_sample.samplewise.uses import Root, Use
from opacus_ext.grad_sample.samplewise.whole_batch import WHOLE_BATCH

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


class Run(Recording):
    """
    The mode under which the samples run.

    Args:
        engine: of the model
        size: number of samples
        attached: whether gradients of the whole batch will be asked for
    """

    def __init__(self, engine: "Engine", size: int, attached: bool = False):
        super().__init__(engine, size, attached)
        self.made_of_data = engine.made_of_data

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in TELLS_NOTHING or self._inactive:
            return func(*args, **kwargs)
        if self.shown_to_hooks:
            swap = {i: x for i, (_, x) in self.shown_to_hooks.items()}
            args, kwargs = swapped(args, swap), swapped_dict(kwargs, swap)
        handler = HANDLERS.get(func)
        try:
            if handler is not None:
                out = handler(self, func, *args, **kwargs)
            else:
                out = self.call(func, *args, **kwargs)
        except RuntimeError:
            x = args[0] if args else kwargs.get("tensor")
            if not writes(func) or not isinstance(x, torch.Tensor) or is_batched(x):
                raise
            if isinstance(x, nn.Parameter) and not look(args, []):
                with self.outside():  # of a module that the forward makes for all
                    return func(*args, **kwargs)
            if not self.widen(x):
                raise
            return self.__torch_function__(func, types, args, kwargs)
        if isinstance(out, torch.Tensor):
            if is_batched(out) or not any(out is x for x in args):
                self._created.append(weakref.ref(out))
        elif isinstance(out, (tuple, list)):
            self._created += [
                weakref.ref(x) for x in out if isinstance(x, torch.Tensor)
            ]
        return out

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """An op on what samples see, as the mode takes it."""
        roots: List[torch.Tensor] = []
        batched = look(args, roots)
        if kwargs:
            batched |= look(kwargs.values(), roots)
        if self.made_of_data:
            refuse_carried(self.engine, args)
            refuse_carried(self.engine, kwargs.values())
        if not roots or not torch.is_grad_enabled():
            if batched and self.traced:
                return self._on_whole_batch(func, args, kwargs)
            return func(*args, **kwargs)
        rule = OPS.get(func)
        if rule is not None:
            op = rule(*args, **kwargs)
            if op is not None:
                return self._by_rule(func, op, args, kwargs, batched)
        if batched:
            if self.traced and func in WHOLE_BATCH:
                return self._by_copies(func, roots, args, kwargs)
            if functorch.is_composite(func):
                with self:
                    return functorch.descend(func)(*args, **kwargs)
            return self._by_copies(func, roots, args, kwargs)
        if func in DRAWS:
            return self._by_copies(func, roots, args, kwargs)
        made = func(*args, **kwargs)
        if look((made,), []):  # random numbers were drawn
            return self._by_copies(func, roots, args, kwargs)
        if func in KEEPS_ENTRIES and isinstance(made, torch.Tensor):
            if made is not roots[0] and made.shape == roots[0].shape:
                self._same[id(made), made._version] = (made, roots[0])
        return made

    def _by_rule(
        self, func: Callable, op: Op, args: tuple, kwargs: dict, batched: bool
    ) -> Any:
        if op.saved:
            batched = look(op.saved, [])
        if not batched:
            made = func(*args, **kwargs)
            if not any(x is not None and x.requires_grad for x in op.saved):
                self._recipes[id(made), made._version] = (made, op)
            return made
        roots = self._roots_of(op)
        if op.whole is not None and self._directly(op.saved):
            return self._rule_on_whole_batch(op, roots)
        swap = {id(r.tensor): r.shared for r in roots if r is not None}
        # A root among the data is given a copy for each sample.
        saved = op.saved
        if any(x is not None and x.requires_grad for x in saved):
            saved = tuple(self._copied(x) for x in saved)
            swap.update((id(x), y) for x, y in zip(op.saved, saved) if y is not x)
        args, kwargs = swapped(args, swap), swapped_dict(kwargs, swap)
        y = (
            self._on_whole_batch(func, args, kwargs)
            if self.traced
            else func(*args, **kwargs)
        )
        return self.note(y, roots, op.factors, op.event_dims, saved, op.saved_dims)

    def _directly(self, saved: Tensors) -> bool:
        """Whether all data is the samples', and no other transform is at work."""
        return self.level.innermost and all(map(self.level.owns, saved))

    def _rule_on_whole_batch(
        self, op: Op, roots: Tuple[Optional[Root], ...]
    ) -> torch.Tensor:
        """The op on all samples side by side, which costs less than through vmap."""
        level = self.level
        inner = [carry(x, level.unwrap(x), self.inner) for x in op.saved]
        rows = tuple(x.dim() - 1 - n for x, n in zip(inner, op.saved_dims))
        params = [p if r is None else r.shared for p, r in zip(op.params, roots)]
        with level.outside():
            y = op.whole(params, *inner)
            use = Use(self, roots, op.factors, y.dim() - 1 - op.event_dims, rows)
            noted = self.note_whole(y, use, inner)
        return carry(y, level.wrap(noted), level.wrap)

    def _by_copies(
        self, func: Callable, roots: List[torch.Tensor], args: tuple, kwargs: dict
    ) -> Any:
        swap = {id(x): self.copy(self.root(x)) for x in roots}
        args, kwargs = swapped(args, swap), swapped_dict(kwargs, swap)
        return (
            self._on_whole_batch(func, args, kwargs)
            if self.traced
            else func(*args, **kwargs)
        )

    @property
    def traced(self) -> bool:
        """Whether a compiler looks on, for any number of samples."""
        return isinstance(self.size, torch.SymInt)

    def _on_whole_batch(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An op that made no use of parameters, on whole batches if need be."""
        how = WHOLE_BATCH.get(func)
        if how is not None and self.level.innermost:
            out = how(self._outside_of, func, *args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def _outside_of(self, function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
        inner = [self.inner(x) for x in tensors]
        with self.level.outside():
            y = function(*inner)
        return self.level.wrap(y)

    def widen(self, x: torch.Tensor) -> bool:
        """
        Makes of a tensor that samples share one of each, for what they write into it.
        It must have been made in this run, so that nobody else finds data in it.

        Returns:
            whether it could be done
        """
        made = {id(y): y for y in (ref() for ref in self._created) if y is not None}
        memory = x.untyped_storage()._cdata
        same = [
            y
            for y in made.values()
            if not is_batched(y) and y.untyped_storage()._cdata == memory
        ]
        if id(x) not in made:
            return False
        if x.requires_grad:
            if x.is_leaf or x._base is not None or len(same) > 1:
                return False
            root = self.root(x)
            inner = self.level.unwrap(self.copy(root))
            with self.outside():
                wide = self.level.wrap(inner.clone())
            functorch.replace_tensor(x, wide)
            root.tensor = wide  # as it was, under the object that is left
            self.roots[id(root)] = self.roots.pop(id(x))
            return True
        if not functorch.is_memory_of(x, same):
            return False
        with self.outside():
            flat = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            flat = flat.expand(self.size, -1).clone()
            for y in same:
                strides = (flat.shape[1], *y.stride())
                own = flat.as_strided(
                    (self.size, *y.shape), strides, y.storage_offset()
                )
                functorch.replace_tensor(y, self.level.wrap(own))
        return True
