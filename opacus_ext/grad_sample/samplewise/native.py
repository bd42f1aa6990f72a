"""Calls on whole batches, outside of vmap, inside of a run.

For kernels that vmap does not know, and for layers whose rule is about the whole layer.
They must be known to treat samples independently. Ordinary autograd sees them.
"""

from __future__ import annotations

import functools
import inspect
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch.nn import functional as F

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.rules.registry import (
    NATIVE,
    Factors,
    Rule,
    find_forward,
    find_rule,
    find_substitute,
    own_parameters,
)
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.ops import carry, handles
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.uses import Root, Use
from opacus_ext.grad_sample.samplewise.walk import map_tensors
from opacus_ext.refused import Refused

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
        inner.append(
            x.reshape(x.shape[:1] + (1,) * (heads + 1 - x.dim()) + x.shape[1:])
        )
    mask = given[3]
    if mask is not None and is_batched(mask):
        mask = run.inner(mask)
        mask = mask.reshape(
            mask.shape[:1] + (1,) * (heads + 1 - mask.dim()) + mask.shape[1:]
        )
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
        roots: of which it is given what samples share
    """

    def __init__(self, run: Run, roots: Sequence[Root] = ()):
        self.run = run
        self.roots = {id(root.shared): root for root in roots}

    def value(self, param: Optional[T]) -> Optional[T]:
        """What to compute with, so that ``param`` is shown no gradient of its own."""
        param = self._own(param)
        if param is None or not param.requires_grad or not torch.is_grad_enabled():
            return param
        return self.run.root(param).shared

    def _own(self, param: Optional[T]) -> Optional[T]:
        root = self.roots.get(id(param))
        return param if root is None else root.tensor

    def __call__(
        self,
        output: T,
        activations: Any,
        params: Iterable[Optional[T]],
        factors: Callable[[Any, T], Factors],
        event_dims: int = 1,
        batch_dim: int = 0,
    ) -> T:
        params = list(map(self._own, params))
        trained = [p for p in params if p is not None and p.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return output
        run, several = self.run, isinstance(activations, tuple)
        given = activations if several else (activations,)
        kept = [x for x in given if x is not None]

        def found(backprops: T, *saved: T) -> List[Optional[Tuple[Factor, ...]]]:
            values = iter(saved)
            arranged = tuple(None if x is None else next(values) for x in given)
            each = factors(arranged if several else arranged[0], backprops)
            by_param = {self._own(p): f for p, f in each.items()}
            return [by_param.get(p) for p in trained]

        roots = tuple(run.root(p) for p in trained)

        def by_sample(x: T) -> T:
            if batch_dim:
                x = x.movedim(batch_dim, 0)
            return x.unflatten(0, (run.size, -1)) if run.size else x.unsqueeze(1)

        y = by_sample(output)
        saved = [by_sample(x) for x in kept]
        rows = y.dim() - 1 - event_dims
        use = Use(run, roots, found, rows, tuple(rows for _ in saved))
        y = carry(y, run.note_whole(y, use, saved)).flatten(0, 1)
        return y.movedim(0, batch_dim) if batch_dim else y


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
            return carry(x, inner(x), inner)
        return x

    def inner(x: T) -> T:
        x = run.inner(x)
        return x.flatten(0, 1) if x.dim() > 1 else x

    def up(y: T) -> T:
        if y.dim() and run.size and len(y) % run.size == 0:
            return carry(y, run.track(samples(y)), samples)
        if y.dim() and not run.size:
            return run.track(run.level.wrap(y.unsqueeze(1)))
        raise Refused(
            f"{getattr(function, '__name__', function)} gives a tensor of shape "
            f"{tuple(y.shape)} for {run.size} samples, so it does not treat them "
            "independently.",
            remedy="Do not declare it with register_native.",
        )

    def samples(y: T) -> T:
        return run.level.wrap(y.unflatten(0, (run.size, -1)))

    args, kwargs = map_tensors(down, (args, kwargs))
    with run.outside():
        out = function(*args, **kwargs)
    return map_tensors(up, out)


@contextmanager
def _on_shared(run: Run, layer: nn.Module) -> Iterator[List[Root]]:
    """Within it a layer computes with what samples share of its parameters."""
    before = [
        (m._parameters, name, p)
        for m in layer.modules()
        for name, p in m._parameters.items()
        if p is not None and p.requires_grad and torch.is_grad_enabled()
    ]
    roots = [run.root(p) for _, _, p in before]
    for (table, name, _), root in zip(before, roots):
        table[name] = root.shared
    try:
        yield roots
    finally:
        for table, name, p in before:
            table[name] = p


class _Substitute(NamedTuple):
    """What is run in the place of a layer's forward, sample by sample."""

    forward: Callable


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
        if not isinstance(run, Run) or run.inactive:
            return own(*args, **kwargs)
        if self.how is None:
            return call_outside(run, own, args, kwargs)
        if isinstance(self.how, _Substitute):
            return self.how.forward(layer, *args, **kwargs)
        if isinstance(self.how, Rule):
            return self._by_rule(run, own, self.how, args, kwargs)
        with _on_shared(run, layer) as roots:
            forward = functools.partial(self.how, layer, Recorder(run, roots))
            return call_outside(run, forward, args, kwargs, all_=True)

    def _by_rule(
        self, run: Run, own: Callable, rule: Rule, args: tuple, kwargs: dict
    ) -> Any:
        layer = self.layer
        # Those of its parts as well: what is done inside is not looked at.
        params = [p for p in layer.parameters() if p.requires_grad]
        with run.unrecorded(), _on_shared(run, layer):
            output = own(*args, **kwargs)
        if not torch.is_grad_enabled() or not params:
            return output
        if not isinstance(output, T):
            raise Refused(
                f"{self.name} ({type(layer).__name__}) has a rule, and returns "
                f"{type(output).__name__}, not a tensor.",
                module=self.name,
                remedy="Let its forward return one tensor.",
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
                    f"gradient for its trainable parameter(s) {', '.join(lacking)}.",
                    remedy="Complete the rule, or freeze the parameter.",
                )
            return [found[p] for p in params]

        saved_dims = [x.dim() - rows for x in inputs]
        roots = tuple(run.root(p) for p in params)
        noted = run.note(output, roots, factors, event, inputs, saved_dims)
        return carry(output, noted)

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
        how: Any = forward or rule
        if how is None:
            other = find_substitute(layer)
            how = None if other is None else _Substitute(other)
        if how is None and type(layer) not in NATIVE:
            continue
        found.append(NativeForward(engine, name or "the model", layer, how))
    return found
