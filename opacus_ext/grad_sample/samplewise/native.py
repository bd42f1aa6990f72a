"""Calls on whole batches, outside of vmap, inside of a run.

For kernels that vmap does not know, and for layers whose rule is about the whole layer.
They must be known to treat samples independently. Ordinary autograd sees them.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, List, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor, Ragged
from opacus_ext.grad_sample.rules.registry import (
    Factors,
    Rule,
    find_forward,
    find_rule,
    own_parameters,
)
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.run import Refused, Run, Use, handles
from opacus_ext.grad_sample.samplewise.walk import map_tensors

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

T = torch.Tensor


def copies(run: Run, x: Any) -> Any:
    """What is made of parameters, as a copy for each sample."""
    if isinstance(x, T) and x.requires_grad and not is_batched(x):
        return run.copy(run.root(x)) if torch.is_grad_enabled() else x
    return x


@handles(F.scaled_dot_product_attention)
def attention(
    run: Run,
    func: Callable,
    query: T,
    key: T,
    value: T,
    attn_mask: Optional[T] = None,
    *args: Any,
    **kwargs: Any,
) -> T:
    """The fused kernels, on whole batches."""
    given = [copies(run, x) for x in (query, key, value, attn_mask)]
    if not any(is_batched(x) for x in given if x is not None):
        return func(query, key, value, attn_mask, *args, **kwargs)
    if not run.level.innermost:
        raise NotImplementedError("attention inside of another transform")
    heads = max(x.dim() for x in given[:3])
    inner = []
    for x in given[:3]:
        x = run.inner(x)
        inner.append(x.reshape(x.shape[:1] + (1,) * (heads + 1 - x.dim()) + x.shape[1:]))
    mask = given[3]
    if mask is not None and is_batched(mask):
        mask = run.inner(mask)
        mask = mask.reshape(mask.shape[:1] + (1,) * (heads + 1 - mask.dim()) + mask.shape[1:])
    merged = heads >= 3  # [1, heads, T, d] of each sample: the batch is dim 0
    with run.outside():
        if merged and all(x.shape[1] == inner[0].shape[1] for x in inner):
            n = inner[0].shape[1]
            inner = [x.flatten(0, 1) for x in inner]
            if mask is not None and mask.dim() == heads + 1:
                mask = mask.expand(-1, n, *mask.shape[2:]).flatten(0, 1)
            y = func(*inner, mask, *args, **kwargs)
            y = y.unflatten(0, (run.size, n))
        else:
            y = func(*inner, mask, *args, **kwargs)
    return run.level.wrap(y)


class Recorder:
    """
    What a stand-in is given as ``record``; see :class:`~rules.registry.Record`.

    Args:
        samples: of each row, where rows are not those of one sample after the other
        size: how many samples these are numbers of
    """

    def __init__(
        self, run: Run, samples: Optional[T] = None, size: Optional[int] = None
    ):
        self.run, self.samples, self.size = run, samples, size

    def value(self, param: Optional[T]) -> Optional[T]:
        """What to compute with, so that ``param`` is shown no gradient of its own."""
        if param is None or not param.requires_grad or not torch.is_grad_enabled():
            return param
        return self.run.root(param).shared

    def __call__(
        self,
        output: T,
        activations: Any,
        params: Iterable[Optional[T]],
        factors: Callable[[Any, T], Factors],
        event_dims: int = 1,
        by_row: bool = False,
        batch_dim: int = 0,
    ) -> T:
        params = list(params)
        trained = [p for p in params if p is not None and p.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return output
        run, several = self.run, isinstance(activations, tuple)
        given = activations if several else (activations,)
        kept = [x for x in given if x is not None]

        def found(backprops: T, *saved: T) -> List[Optional[Tuple[Factor, ...]]]:
            values = iter(saved)
            arranged = tuple(None if x is None else next(values) for x in given)
            by_param = factors(arranged if several else arranged[0], backprops)
            return [by_param.get(p) for p in trained]

        roots = tuple(run.root(p) for p in trained)
        if self.samples is not None:
            return self._by_table(output, kept, roots, found, event_dims)

        def by_sample(x: T) -> T:
            if batch_dim:
                x = x.movedim(batch_dim, 0)
            return x.unflatten(0, (run.size, -1)) if run.size else x.unsqueeze(1)

        y = by_sample(output)
        saved = [by_sample(x) for x in kept]
        rows = y.dim() - 1 - event_dims
        use = Use(run, roots, found, rows, tuple(rows for _ in saved))
        y = run._note(y, use, saved).flatten(0, 1)
        return y.movedim(0, batch_dim) if batch_dim else y

    def _by_table(
        self, output: T, kept: List[T], roots: tuple, found: Callable, event_dims: int
    ) -> T:
        samples = self.samples
        rows = output.dim() - event_dims
        repeats = max(1, output.shape[1:rows].numel())
        table = samples.repeat_interleave(repeats)

        def ragged(backprops: T, *saved: T) -> List[Optional[Tuple[Factor, ...]]]:
            return [
                None if f is None else (Ragged(table), *f)
                for f in found(backprops, *saved)
            ]

        use = Use(
            self.run, roots, ragged, rows, tuple(rows for _ in kept), self.size
        )
        y = self.run._note(output[None], use, [x[None] for x in kept])
        return y[0]

    def dealt(self, samples: T, size: int) -> "Recorder":
        """For rows of these samples, of ``size`` in all processes."""
        return Recorder(self.run, samples, size)


NATIVE: Dict[type, bool] = {}


def register_native(*kinds: type) -> None:
    """
    Declares modules, or autograd functions, that treat samples independently: they run
    on the whole batch as they always do, where vmap can't run what is inside of them
    (custom kernels, quantised layers). Their own parameters must be frozen, or have a
    rule (:func:`~opacus_ext.register_rule`).

    Args:
        kinds: types of modules, or of ``torch.autograd.Function``

    Example:
        >>> from torch import nn
        >>> from opacus_ext import register_native
        >>> class Quantised(nn.Module):
        ...     def forward(self, x):
        ...         return x.round()
        >>> register_native(Quantised)
    """
    for kind in kinds:
        NATIVE[kind] = True
        if issubclass(kind, torch.autograd.Function):
            _Function.declare(kind)


class _Function:
    """``apply`` of an autograd function that is declared native."""

    current: List[Run] = []

    @classmethod
    def declare(cls, kind: type) -> None:
        plain = kind.apply

        def apply(*args: Any) -> Any:
            run = cls.current[-1] if cls.current else None
            batched = [isinstance(x, T) and is_batched(x) for x in args]
            if run is None or not any(batched):
                return plain(*args)
            return call_outside(run, plain, args, {})

        kind.apply = staticmethod(apply)


def call_outside(
    run: Run, function: Callable, args: tuple, kwargs: dict, all_: bool = False
) -> Any:
    """
    Calls a function on whole batches.

    Args:
        all_: whether every tensor has samples; else one that they share stays as it is
    """

    def down(x: T) -> T:
        x = copies(run, x)
        if is_batched(x) or all_:
            inner = run.inner(x)
            return inner.flatten(0, 1) if inner.dim() > 1 else inner
        return x

    def up(y: T) -> T:
        if y.dim() and run.size and len(y) % run.size == 0:
            return run.track(run.level.wrap(y.unflatten(0, (run.size, -1))))
        if y.dim() and not run.size:
            return run.track(run.level.wrap(y.unsqueeze(1)))
        raise Refused(
            f"{getattr(function, '__name__', function)} gives a tensor of shape "
            f"{tuple(y.shape)} for {run.size} samples, so it does not treat them "
            "independently. Do not declare it with register_native."
        )

    args, kwargs = map_tensors(down, (args, kwargs))
    with run.outside():
        out = function(*args, **kwargs)
    return map_tensors(up, out)


class NativeForward:
    """
    In the place of a layer's ``forward``, for as long as the model is private: where
    samples run, a stand-in or a rule for the whole layer is used.
    """

    def __init__(self, engine: "Engine", name: str, layer: nn.Module, how: Any):
        self.engine, self.name, self.layer, self.how = engine, name, layer, how
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, run = self.layer, self.engine.current
        own = type(layer).forward.__get__(layer)
        if not isinstance(run, Run) or run.away:
            return own(*args, **kwargs)
        if self.how is None:
            return call_outside(run, own, args, kwargs)
        if isinstance(self.how, Rule):
            return self._by_rule(run, own, self.how, args, kwargs)
        forward = self.how

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            return forward(layer, Recorder(run), *args, **kwargs)

        return call_outside(run, stand_in, args, kwargs, all_=True)

    def _by_rule(
        self, run: Run, own: Callable, rule: Rule, args: tuple, kwargs: dict
    ) -> Any:
        layer = self.layer
        params = [p for p in own_parameters(layer).values() if p.requires_grad]
        with run.unseen():
            output = own(*args, **kwargs)
        if not torch.is_grad_enabled() or not params:
            return output
        if not isinstance(output, T):
            raise Refused(
                f"{self.name} ({type(layer).__name__}) has a rule, and returns "
                f"{type(output).__name__}, not a tensor."
            )
        names, inputs = _named_inputs(layer, args, kwargs)
        rows = rule.row_dims(layer, output)
        event = output.dim() - rows
        if not is_batched(output):
            output = run.level.wrap(output.expand(run.size, *output.shape))

        def factors(backprops: T, *saved: T) -> List[Optional[Tuple[Factor, ...]]]:
            given: Any = dict(zip(names, saved)) if rule.all_inputs else saved[0]
            found = rule.fn(layer, given, backprops)
            missing = [p for p in params if p not in found]
            if missing:
                lacking = [self.engine.names.get(p, "?") for p in missing]
                raise Refused(
                    f"The rule for {self.name} ({type(layer).__name__}) gives no "
                    f"gradient for its trainable parameter(s) {', '.join(lacking)}. "
                    "Complete the rule, or freeze the parameter."
                )
            return [found[p] for p in params]

        saved_dims = [x.dim() - rows for x in inputs]
        roots = tuple(run.root(p) for p in params)
        return run.note(output, roots, factors, event, inputs, saved_dims)

    def remove(self) -> None:
        """Gives the layer its own ``forward`` back."""
        vars(self.layer).pop("forward", None)


def _named_inputs(
    layer: nn.Module, args: tuple, kwargs: dict
) -> Tuple[List[str], List[T]]:
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    named = {n: x for n, x in bound.arguments.items() if isinstance(x, T)}
    return list(named), list(named.values())


def attach_natives(engine: "Engine") -> List[NativeForward]:
    """Puts stand-ins in the place of the layers that have one."""
    found = []
    for name, layer in engine.module.named_modules():
        forward = find_forward(layer)
        rule = find_rule(layer) if own_parameters(layer) else None
        if forward is None and rule is None and type(layer) not in NATIVE:
            continue
        found.append(NativeForward(engine, name or "the model", layer, forward or rule))
    return found
