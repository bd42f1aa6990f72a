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
from typing import Any, Callable, ContextManager, Iterator, Sequence

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
from opacus.utils.module_utils import has_trainable_params
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

    def params(self) -> dict[str, Any]:
        """Returns the layer's trainable parameters, with those of its children."""
        return {n: p for n, p in self.layer.named_parameters() if p.requires_grad}

    def refuse_dropout(self) -> None:
        """
        Refuses a layer whose random numbers are not known. It is called in training:
        before, the model may be handed on to ``make_private``.
        """
        dropped = random_part(self.layer)
        if dropped:
            raise self._refused(
                f"drops values at random (dropout={dropped:g}), and its per-sample "
                "gradients would be computed with other random numbers than its output",
                "set its dropout to 0",
            )

    def refuse(self) -> None:
        """Refuses a layer that can't be computed again, sample by sample."""
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

    def _refuse_computed(self) -> None:
        """Refuses weights that a hook has computed, as old ``weight_norm`` does."""
        for part in self.layer.modules():
            for name, x in vars(part).items():
                if isinstance(x, T) and x.grad_fn is not None:
                    raise self._refused(
                        f"reads {name}, which is computed outside of its forward, and "
                        "per-sample gradients would not reach what is behind it",
                        "compute it by torch.nn.utils.parametrizations",
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
        self.refuse_dropout()
        self._refuse_computed()
        seen = Seen(self, self.layout(self.what, layer, args, kwargs), places)
        for p in params.values():
            p._forward_counter += 1
        tapped = _Tap.apply(seen.arrive, *(leaves[i] for i in places))
        for i, y in zip(places, tapped):
            leaves[i] = y
        return tree_unflatten(leaves, spec)

    def add(self, grads: dict[Any, T]) -> None:
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


class Search:
    """
    The search for the layers of a wrapper's model that are watched.

    Attributes:
        watches: those that were found so far
    """

    def __init__(self, hooks: Any):
        self.hooks, self.watches = hooks, list[Watch]()
        named = list(hooks._module.named_modules(remove_duplicate=False))
        self.names = {id(layer): name for name, layer in reversed(named)}
        owners = Counter(id(p) for _, x in named for p in x._parameters.values())
        self._tied = {p for p, n in owners.items() if n > 1}
        self._visited: set[int] = set()

    def visit(self, layer: nn.Module) -> bool:
        """Returns True if a layer is watched, or was visited under another name."""
        if id(layer) in self._visited:
            return True
        self._visited.add(id(layer))
        layout = self._layout(layer)
        if layout is not None:
            name = self.names[id(layer)]
            self.watches.append(Watch(self.hooks, name, layer, layout))
        return layout is not None

    def _layout(self, layer: nn.Module) -> Layout | None:
        """Returns where the samples of a layer are; None if Opacus's hooks know."""
        if not any(p.requires_grad for p in layer.parameters()):
            return None
        norms = getattr(self.hooks, "NORM_SAMPLERS", {})
        if type(layer) in norms and self._is_tied(layer):
            return self._tied_layout(layer)
        if type(layer) in norms or type(layer) in self.hooks.GRAD_SAMPLERS:
            return None
        layout = layout_of(layer)
        if layout is None and has_trainable_params(layer):
            self._refuse_inside(layer)
        return layout

    def _refuse_inside(self, layer: nn.Module) -> None:
        """Refuses layers in one that functorch computes again as a whole."""
        for name, part in layer.named_modules(prefix=self.names[id(layer)]):
            simple = isinstance(part, nn.MultiheadAttention) and not random_part(part)
            if layout_of(part) is None or simple:
                continue
            outer = f"{self.names[id(layer)] or 'the model'} ({type(layer).__name__})"
            raise Refused(
                f"{outer} owns parameters, so that Opacus computes all of it again by "
                f"functorch, which can't run {name} ({type(part).__name__}) in it.",
                module=outer,
                remedy="Train it with PrivacyEngine.make_private of the model itself, "
                "or let a module of their own own these parameters.",
            )

    def _is_tied(self, layer: nn.Module) -> bool:
        own = (p for p in layer.parameters(recurse=False) if p.requires_grad)
        return any(id(p) in self._tied for p in own)

    def _tied_layout(self, layer: nn.Module) -> Layout:
        """Returns the layout of a layer whose ghost norms miss a term."""
        if type(layer) in LAYERS and not isinstance(layer, nn.EmbeddingBag):
            return plain(0 if self.hooks.batch_first else 1)
        what = f"{self.names[id(layer)] or 'the model'} ({type(layer).__name__})"
        raise Refused(
            f"{what} shares a parameter with another layer, or is used under several "
            "names, and the ghost norms of the uses have no term for all of them.",
            module=what,
            remedy="Train it with PrivacyEngine.make_private of the model itself, "
            'grad_sample_mode="ghost_bk", or use GradSampleModule.',
        )


def iterate_submodules(iterate: Callable) -> Callable:
    """
    Wraps ``GradSampleHooks.iterate_submodules``: leaves out what is watched, and layers
    under a second name, which would get hooks twice.
    """

    @functools.wraps(iterate)
    def submodules(self: Any, module: nn.Module) -> Iterator[nn.Module]:
        """The layers that get Opacus's hooks."""
        search = vars(self).get("_search")
        if search is None:
            search = Search(self)
        if not search.visit(module):
            yield from iterate(self, module)

    return submodules


def add_hooks(add: Callable) -> Callable:
    """Wraps ``GradSampleHooks.add_hooks``: watches layers as a whole."""

    @functools.wraps(add)
    def add_all(self: Any, *, loss_reduction: str = "mean", **kwargs: Any) -> None:
        """Adds hooks; refuses before a layer has any."""
        try:
            if not hasattr(self._module, "autograd_grad_sample_hooks"):
                _refuse(self)
            vars(self)["_search"] = search = Search(self)
            add(self, loss_reduction=loss_reduction, **kwargs)
        finally:
            vars(self).pop("_search", None)
        for watch in search.watches:
            self.autograd_grad_sample_hooks.append(watch.attach(loss_reduction))

    return add_all


def _refuse(hooks: Any) -> None:
    """Refuses what can't be watched; leaves no attributes of Opacus's behind then."""
    vars(hooks)["_search"] = search = Search(hooks)
    try:
        for _ in hooks.iterate_submodules(hooks._module):
            pass
        for watch in search.watches:
            watch.refuse()
    except Refused:
        for p in hooks._module.parameters():
            for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                vars(p).pop(name, None)
        raise
