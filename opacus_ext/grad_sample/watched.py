"""Layers of which Opacus's hooks see too little, for Opacus's own classes.

Opacus's hooks keep the inputs that a layer got by position, and the gradient of its
first output. That is not enough for recurrent layers, attention and experts, which have
several of both, and for the ghost norms of a weight that several layers own. These
layers are watched as a whole. Their own forward runs as it is; in the backward pass it
is computed again for each sample alone, and the gradients of all of its outputs give
the per-sample gradients of all of its parameters. What can't be computed again, as it
draws random numbers, is refused.
"""

from __future__ import annotations

import functools
from collections import Counter
from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Iterable, Iterator, Sequence

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.grad_sample.grad_sample_module import (
    create_or_accumulate_grad_sample,
    promote_current_grad_sample,
)
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    create_norm_sample,
)
from opacus.grad_sample.gsm_base import OPACUS_PARAM_MONKEYPATCH_ATTRS
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from opacus_ext.grad_sample.core.clipped_grads import per_sample_grads
from opacus_ext.grad_sample.layouts import Call, Layout, layout_of, plain, random_part
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.grad_sample.samplers import LAYERS
from opacus_ext.refused import Refused

T = torch.Tensor

# The methods whose sums this file adds to; classes with others shard parameters.
_KNOWN = (
    GradSampleHooks.capture_backprops_hook,
    GradSampleHooksFastGradientClipping.capture_backprops_hook,
)


class _Tap(torch.autograd.Function):
    """The identity, which shows the gradients of its outputs."""

    @staticmethod
    def forward(ctx: Any, arrive: Callable, *outputs: T) -> tuple[T, ...]:
        ctx.arrive = arrive
        ctx.set_materialize_grads(False)
        return tuple(y.view_as(y) for y in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: T | None) -> Any:
        ctx.arrive(grads)
        return (None, *grads)


class Seen:
    """One call of a watched layer, until its gradients arrive."""

    def __init__(self, watch: Watch, call: Call, places: Sequence[int]):
        self.watch, self.call, self.places = watch, call, list(places)
        self.inputs = [x.detach() for x in call.inputs]
        self.versions = [x._version for x in self.inputs]
        self.context: Callable[[], ContextManager] = nullcontext
        kind = self.inputs[0].device.type
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
            self.context = functools.partial(torch.autocast, kind, dtype)
        self.done = False

    def arrive(self, grads: Sequence[T | None]) -> None:
        """Computes the per-sample gradients, given those of the outputs."""
        if not self.watch.hooks.hooks_enabled:
            return
        what = self.watch.what
        if self.done:
            raise Refused(
                f"{what}: a second backward pass of one forward pass, whose gradients "
                "would count twice.",
                module=what,
                remedy="Add the losses and call backward() once.",
            )
        if self.versions != [x._version for x in self.inputs]:
            raise Refused(
                f"{what}: one of its inputs was changed in place after it was called, "
                "and per-sample gradients are computed from it.",
                module=what,
                remedy="Give it a copy (x.clone()).",
            )
        self.done = True
        found = {i: g for i, g in zip(self.places, grads) if g is not None}
        dims = self.call.dims
        of_outputs = [g.detach().movedim(dims[i], 0) for i, g in found.items()]

        def loss(sample: Any) -> T:
            inputs, grads = sample
            with self.context():
                outputs = tree_leaves(self.call.run(inputs))
            pairs = ((outputs[i].movedim(dims[i], 0), g) for i, g in zip(found, grads))
            total: Any = sum((y.to(g.dtype) * g).sum() for y, g in pairs)
            return total

        params = self.watch.params()
        dense = per_sample_grads(loss, params, (self.inputs, of_outputs)).grads
        self.inputs = []
        self.watch.add({params[name]: g for name, g in dense.items()})


class Watch:
    """
    A layer that is watched as a whole, for one of Opacus's wrappers.

    Args:
        hooks: the wrapper
        name: the layer's name in the model
        layout: tells where its samples are
    """

    def __init__(self, hooks: Any, name: str, layer: nn.Module, layout: Layout):
        self.hooks, self.layer, self.layout = hooks, layer, layout
        self.what = f"{name or 'the model'} ({type(layer).__name__})"
        self.reduction = "mean"

    def params(self) -> dict[str, nn.Parameter]:
        """Returns the layer's trainable parameters, with those of its children."""
        return {n: p for n, p in self.layer.named_parameters() if p.requires_grad}

    def refuse(self) -> None:
        """Refuses a layer that can't be computed again, sample by sample."""
        dropped = random_part(self.layer)
        if dropped:
            raise self._refused(
                f"drops values at random (dropout={dropped:g}), and its per-sample "
                "gradients would be computed with other random numbers than its output",
                "set its dropout to 0",
            )
        if group_of(self.layer) is not None:
            raise self._refused(
                "is spread over processes", "leave out opacus_ext.distributed"
            )
        if type(self.hooks).capture_backprops_hook not in _KNOWN:
            raise self._refused(
                "has per-sample gradients in GradSampleModule and GradSampleModuleFast"
                f"GradientClipping alone, not in {type(self.hooks).__name__}",
                "use one of these",
            )

    def _refused(self, why: str, remedy: str) -> Refused:
        return Refused(
            f"{self.what} {why}.",
            module=self.what,
            remedy="Train it with PrivacyEngine.make_private of the model itself, "
            f'grad_sample_mode="ghost_bk", or {remedy}.',
        )

    def attach(self, reduction: str) -> Any:
        """Sets the hook, before others that may change the layer's output."""
        self.reduction = reduction
        hook = self.capture
        return self.layer.register_forward_hook(hook, with_kwargs=True, prepend=True)

    def capture(
        self, layer: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Any | None:
        """The forward hook: keeps the call, and shows the gradients of its outputs."""
        watching = self.hooks.hooks_enabled and layer.training
        if not watching or not torch.is_grad_enabled():
            return None
        leaves, spec = tree_flatten(output)
        places = [
            i
            for i, y in enumerate(leaves)
            if isinstance(y, T) and y.requires_grad and y.is_floating_point()
        ]
        params = self.params()
        if not places or not params:
            return None
        self.refuse()
        seen = Seen(self, self.layout(self.what, layer, args, kwargs), places)
        for p in params.values():
            p._forward_counter += 1
        tapped = _Tap.apply(seen.arrive, *(leaves[i] for i in places))
        for i, y in zip(places, tapped):
            leaves[i] = y
        return tree_unflatten(leaves, spec)

    def add(self, grads: dict[nn.Parameter, T]) -> None:
        """Adds per-sample gradients of a call, as Opacus's hooks do for theirs."""
        ghost = isinstance(self.hooks, GradSampleHooksFastGradientClipping)
        for p, g in grads.items():
            size = len(g)
            before = getattr(p, "_current_grad_sample", g)
            if len(before) != size:
                raise Refused(
                    f"{self.what}: a parameter of shape {tuple(p.shape)} was used for "
                    f"{size} and for {len(before)} samples in one pass.",
                    module=self.what,
                    remedy="Use one batch size, and inputs [B, ...] in all layers that "
                    "share it: rows [B * T, ...] are taken for samples.",
                )
            scale = size if self.reduction == "mean" else 1
            create_or_accumulate_grad_sample(
                param=p, grad_sample=g * scale, max_batch_len=size
            )
            p._forward_counter -= 1
            if p._forward_counter:
                continue
            promote_current_grad_sample(p)
            if ghost:
                create_norm_sample(
                    param=p, grad_sample=p.grad_sample, max_batch_len=size
                )
                p.grad_sample = None
            elif not self.hooks.grad_accumulation_allowed:
                if isinstance(p.grad_sample, list):
                    raise ValueError(
                        "Poisson sampling is not compatible with grad accumulation. "
                        "You need to call optimizer.step() after every "
                        "forward/backward pass or consider using BatchMemoryManager"
                    )


# -- patches of GradSampleHooks --------------------------------------------------------


def _tied(hooks: Any) -> set[int]:
    """Returns the ids of parameters that several layers own."""
    owners: Counter[int] = Counter()
    for layer in hooks._module.modules():
        owners.update({id(p) for p in layer.parameters(recurse=False)})
    return {p for p, n in owners.items() if n > 1}


def _watch_of(hooks: Any, layer: nn.Module) -> Watch | None:
    """Returns what watches a layer; None if Opacus's hooks do."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    if not trained or type(layer) in hooks.GRAD_SAMPLERS and not _is_tied(hooks, layer):
        return None
    names = {id(x): name for name, x in hooks._module.named_modules()}
    name = names.get(id(layer), "")
    layout = layout_of(layer)
    if layout is not None:
        return Watch(hooks, name, layer, layout)
    if not _is_tied(hooks, layer):
        return None
    if type(layer) not in LAYERS or isinstance(layer, nn.EmbeddingBag):
        what = f"{name or 'the model'} ({type(layer).__name__})"
        raise Refused(
            f"{what} shares a parameter with another layer, and the ghost norms of "
            "both have no term for the two together.",
            module=what,
            remedy="Train it with PrivacyEngine.make_private of the model itself, "
            'grad_sample_mode="ghost_bk", or by GradSampleModule.',
        )
    return Watch(hooks, name, layer, plain(0 if hooks.batch_first else 1))


def _is_tied(hooks: Any, layer: nn.Module) -> bool:
    """Returns True if the ghost norms of a layer leave out those of another's use."""
    if type(layer) not in getattr(hooks, "NORM_SAMPLERS", {}):
        return False
    own = [p for p in layer.parameters(recurse=False) if p.requires_grad]
    return any(id(p) in _tied(hooks) for p in own)


def iterate_submodules(iterate: Callable) -> Callable:
    """Wraps ``GradSampleHooks.iterate_submodules``: leaves out what is watched."""

    @functools.wraps(iterate)
    def submodules(self: Any, module: nn.Module) -> Iterator[nn.Module]:
        """The layers that get Opacus's hooks."""
        watch = _watch_of(self, module)
        if watch is None:
            yield from iterate(self, module)
        elif "_watched" in vars(self):
            self._watched.append(watch)

    return submodules


def add_hooks(add: Callable) -> Callable:
    """Wraps ``GradSampleHooks.add_hooks``: watches layers as a whole."""

    @functools.wraps(add)
    def add_all(self: Any, *, loss_reduction: str = "mean", **kwargs: Any) -> None:
        """Adds hooks; refuses before a layer has any."""
        if not hasattr(self._module, "autograd_grad_sample_hooks"):
            try:
                _refuse(self)
            except Refused:
                _forget(self._module.parameters())
                raise
        self._watched = []
        add(self, loss_reduction=loss_reduction, **kwargs)
        for watch in self._watched:
            self.autograd_grad_sample_hooks.append(watch.attach(loss_reduction))
        del self._watched

    return add_all


def _refuse(hooks: Any) -> None:
    hooks._watched = found = []
    for _ in hooks.iterate_submodules(hooks._module):
        pass
    del hooks._watched
    for watch in found:
        watch.refuse()


def _forget(params: Iterable[Any]) -> None:
    """Removes the attributes that Opacus has set before it adds hooks."""
    for p in params:
        for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
            vars(p).pop(name, None)
