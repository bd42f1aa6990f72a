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

from opacus_ext.grad_sample.core.clipped_grads import per_sample_grads
from opacus_ext.grad_sample.layouts import Call, Layout, layout_of, plain, random_part
from opacus_ext.grad_sample.parallel.sharding import group_of
from opacus_ext.grad_sample.samplers import LAYERS, describe, trained_parameters
from opacus_ext.private_torch import tree_flatten, tree_leaves, tree_unflatten
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
    def forward(context: Any, arrive: Callable, *outputs: T) -> tuple[T, ...]:
        context.arrive = arrive
        context.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(context: Any, *gradients: T | None) -> Any:
        context.arrive(gradients)
        return (None, *gradients)


class Seen:
    """
    One call of a watched layer, until its gradients arrive.

    Args:
        numbers: which tensors of the output have a gradient
    """

    def __init__(self, watch: Watch, call: Call, numbers: Sequence[int]):
        self.watch = watch
        self.call = call
        self.numbers = numbers
        self.inputs = [tensor.detach() for tensor in call.inputs]
        self.versions = self._versions()
        # The layer is to run again in the precision of its own forward.
        self.context: Callable[[], ContextManager] = nullcontext
        device_type = self.inputs[0].device.type
        if torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            self.context = functools.partial(torch.autocast, device_type, dtype)
        self.done = False

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self.inputs]

    def arrive(self, gradients: Sequence[T | None]) -> None:
        """Computes the per-sample gradients, given those of the outputs."""
        if not self.watch.hooks.hooks_enabled:
            return
        layer_name = self.watch.what
        if self.done:
            raise Refused(
                f"{layer_name}: a second backward pass of one forward pass, whose "
                "gradients would count twice.",
                module=layer_name,
                remedy="Add the losses and call backward() once.",
            )
        if self.versions != self._versions():
            raise Refused(
                f"{layer_name}: one of its inputs was changed in place after it was "
                "called, and per-sample gradients are computed from it.",
                module=layer_name,
                remedy="Give it a copy (x.clone()).",
            )
        self.done = True
        dims = self.call.dims
        numbers, of_outputs = [], []
        # An output that no loss uses has no gradient.
        for number, gradient in zip(self.numbers, gradients):
            if gradient is not None:
                numbers.append(number)
                of_outputs.append(gradient.detach().movedim(dims[number], 0))

        def loss(sample: Any) -> T:
            inputs, of_outputs = sample
            with self.context():
                outputs = tree_leaves(self.call.run(inputs))
            total: Any = 0
            for number, gradient in zip(numbers, of_outputs):
                output = outputs[number].movedim(dims[number], 0)
                total = total + (output.to(gradient.dtype) * gradient).sum()
            return total

        params = trained_parameters(self.watch.layer)
        dense = per_sample_grads(loss, params, (self.inputs, of_outputs)).grads
        # The graph of the loss keeps this object, which need not keep the inputs.
        self.inputs = []
        self.watch.add({params[name]: gradient for name, gradient in dense.items()})


class Watch:
    """
    A layer that is watched as a whole, for one of Opacus's wrappers.

    Args:
        hooks: the wrapper
        name: the layer's name in the model
        layout: tells where its samples are
    """

    def __init__(self, hooks: Any, name: str, layer: nn.Module, layout: Layout):
        self.hooks = hooks
        self.layer = layer
        self.layout = layout
        self.what = describe(name, layer)
        self.reduction = "mean"

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
        # Its forward waits for other processes, which do not compute it again.
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
            for name, value in vars(part).items():
                if isinstance(value, T) and value.grad_fn is not None:
                    raise self._refused(
                        f"reads {name}, which is computed outside of its forward, and "
                        "per-sample gradients would not reach what is behind it",
                        "compute it by torch.nn.utils.parametrizations",
                    )

    def _refused(self, reason: str, remedy: str) -> Refused:
        return Refused(
            f"{self.what} {reason}.",
            module=self.what,
            remedy="Train it with PrivacyEngine.make_private of the model itself, "
            f'grad_sample_mode="ghost_bk", or {remedy}.',
        )

    def attach(self, reduction: str) -> Any:
        """Sets the hook, before others that may change the layer's output."""
        self.reduction = reduction
        return self.layer.register_forward_hook(
            self.capture, with_kwargs=True, prepend=True
        )

    def capture(
        self, layer: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Any | None:
        """The forward hook: keeps the call, and shows the gradients of its outputs."""
        watching = self.hooks.hooks_enabled and layer.training
        if not watching or not torch.is_grad_enabled():
            return None
        leaves, structure = tree_flatten(output)
        numbers = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, T) and leaf.requires_grad and leaf.is_floating_point():
                numbers.append(number)
        params = trained_parameters(self.layer)
        if not numbers or not params:
            return None
        self.refuse()
        self.refuse_dropout()
        self._refuse_computed()
        cut_call = self.layout(self.what, layer, args, kwargs)
        seen = Seen(self, cut_call, numbers)
        # Opacus counts the uses of a parameter, whose gradients it waits for.
        for parameter in params.values():
            parameter._forward_counter += 1
        tapped = _Tap.apply(seen.arrive, *[leaves[number] for number in numbers])
        for number, output in zip(numbers, tapped):
            leaves[number] = output
        return tree_unflatten(leaves, structure)

    def add(self, gradients: dict[Any, T]) -> None:
        """Adds per-sample gradients of a call, as Opacus's hooks do for theirs."""
        ghost = isinstance(self.hooks, GradSampleHooksFastGradientClipping)
        for parameter, gradient in gradients.items():
            size = len(gradient)
            before = getattr(parameter, "_current_grad_sample", gradient)
            if len(before) != size:
                raise Refused(
                    f"{self.what}: a parameter of shape {tuple(parameter.shape)} was "
                    f"used for {size} and for {len(before)} samples in one pass.",
                    module=self.what,
                    remedy="Use one batch size, and inputs [B, ...] in all layers that "
                    "share it: rows [B * T, ...] are taken for samples.",
                )
            # A mean over the batch has divided the gradients of each sample.
            if self.reduction == "mean":
                gradient = gradient * size
            create_or_accumulate_grad_sample(
                param=parameter, grad_sample=gradient, max_batch_len=size
            )
            parameter._forward_counter -= 1
            if parameter._forward_counter:
                continue
            promote_current_grad_sample(parameter)
            sums = parameter.grad_sample
            if ghost:
                create_norm_sample(
                    param=parameter, grad_sample=sums, max_batch_len=size
                )
                parameter.grad_sample = None
            elif isinstance(sums, list) and not self.hooks.grad_accumulation_allowed:
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
        self.hooks = hooks
        self.watches: list[Watch] = []
        # The first name of each layer.
        self.names: dict[int, str] = {}
        owners: Counter[int] = Counter()
        for name, layer in hooks._module.named_modules(remove_duplicate=False):
            self.names.setdefault(id(layer), name)
            owners.update(map(id, layer._parameters.values()))
        self._tied = {key for key, count in owners.items() if count > 1}
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
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            return None
        norms = getattr(self.hooks, "NORM_SAMPLERS", {})
        # The norms of a weight's uses do not tell the norm of their sum.
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
        outer_name = self.names[id(layer)]
        for name, inner in layer.named_modules(prefix=outer_name):
            simple = isinstance(inner, nn.MultiheadAttention) and not random_part(inner)
            # Attention without dropout is products, which functorch can run.
            if layout_of(inner) is None or simple:
                continue
            outer = describe(outer_name, layer)
            raise Refused(
                f"{outer} owns parameters, so that Opacus computes all of it again by "
                f"functorch, which can't run {describe(name, inner)} in it.",
                module=outer,
                remedy="Train it with PrivacyEngine.make_private of the model itself, "
                "or let a module of their own own these parameters.",
            )

    def _is_tied(self, layer: nn.Module) -> bool:
        for parameter in layer.parameters(recurse=False):
            if parameter.requires_grad and id(parameter) in self._tied:
                return True
        return False

    def _tied_layout(self, layer: nn.Module) -> Layout:
        """Returns the layout of a layer whose ghost norms miss a term."""
        if type(layer) in LAYERS and not isinstance(layer, nn.EmbeddingBag):
            return plain(int(not self.hooks.batch_first))
        layer_name = describe(self.names[id(layer)], layer)
        raise Refused(
            f"{layer_name} shares a parameter with another layer, or is used under "
            "several names, and the ghost norms of the uses have no term for all of "
            "them.",
            module=layer_name,
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
        # Outside of add_hooks() each layer is looked at by itself.
        search = vars(self).get("_search") or Search(self)
        if not search.visit(module):
            yield from iterate(self, module)

    return submodules


def add_hooks(add: Callable) -> Callable:
    """Wraps ``GradSampleHooks.add_hooks``: watches layers as a whole."""

    @functools.wraps(add)
    def add_all(self: Any, *, loss_reduction: str = "mean", **kwargs: Any) -> None:
        """Adds hooks; refuses before a layer has any."""
        try:
            # Opacus itself refuses a module that has hooks already.
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
        list(hooks.iterate_submodules(hooks._module))
        for watch in search.watches:
            watch.refuse()
    except Refused:
        for parameter in hooks._module.parameters():
            for name in OPACUS_PARAM_MONKEYPATCH_ATTRS:
                vars(parameter).pop(name, None)
        raise
