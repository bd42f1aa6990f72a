"""Refusals of adapters (PEFT's LoRA and others) that would be trained on noise alone.

A parameter that no sample uses has a gradient of zero, and DP-SGD adds noise to it: an
adapter that is merged, disabled, not active, never called or unknown to the optimizer
is trained on noise silently. PEFT's layers are recognized by their attributes, so PEFT
is not imported.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch
from torch import nn

from opacus_ext.refused import Refused


def adapters_in(module: nn.Module) -> Dict[str, Any]:
    """Returns PEFT's layers in ``module`` with trainable adapters, by name."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if hasattr(type(layer), "adapter_layer_names")
        and hasattr(type(layer), "disable_adapters")
        and any(_trainable(layer).values())
    }


def _trainable(layer: Any) -> Dict[str, List[nn.Parameter]]:
    """Returns the trainable parameters of a layer's adapters, by adapter."""
    found: Dict[str, List[nn.Parameter]] = {}
    for name in layer.adapter_layer_names:
        try:
            adapters = attrgetter(name)(layer)
        except AttributeError:
            continue
        if not isinstance(adapters, (nn.ModuleDict, nn.ParameterDict)):
            continue
        for adapter, held in adapters.items():
            params = held.parameters() if isinstance(held, nn.Module) else [held]
            trained = [p for p in params if p.requires_grad]
            found.setdefault(adapter, []).extend(trained)
    return found


def _state(layer: Any) -> Tuple[tuple, bool, tuple]:
    active = layer.active_adapters
    active = (active,) if isinstance(active, str) else tuple(active)
    return active, bool(layer.disable_adapters), tuple(layer.merged_adapters)


def _check(name: str, layer: Any, before: Any = None) -> None:
    """
    Refuses a layer an adapter of which would get no gradient; in a step also one whose
    state is not the state before.
    """
    active, disabled, merged = state = _state(layer)
    if state == before:
        return
    what, when = _named(name, layer), " before make_private" if before is None else ""
    reason = remedy = ""
    if disabled:
        reason = "is disabled, so its adapters would get no gradient."
        remedy = "Leave disable_adapter(), or call enable_adapter_layers()"
    for adapter, params in _trainable(layer).items() if not reason else ():
        if params and adapter in merged:
            reason = (
                f"has its adapter {adapter!r} merged into the base weights, so it "
                "would get no gradient."
            )
            remedy = "Call unmerge_adapter()"
            break
        if params and adapter not in active:
            reason = (
                f"has an adapter {adapter!r} that is trainable and not active "
                f"({', '.join(active) or 'none'} is), so it would get no gradient."
            )
            remedy = "Make it active (set_adapter), or freeze it"
            break
    if before is not None and not reason:
        reason = "has other adapters active than when the model was made private."
        remedy = "Make those active again, or call make_private with the new ones"
    if reason:
        raise Refused(f"{what} {reason}", module=what, remedy=f"{remedy}{when}.")


def _named(name: str, layer: nn.Module) -> str:
    return f"{name} ({type(layer).__name__})"


def refuse(module: nn.Module, params: Optional[Iterable[nn.Parameter]] = None) -> None:
    """
    Refuses a model with an adapter that would be trained on noise alone.

    Args:
        module: the user's model
        params: those of the optimizer, if known
    """
    held = None if params is None else set(params)
    for name, layer in adapters_in(module).items():
        what = _named(name, layer)
        _check(name, layer)
        trained = [p for each in _trainable(layer).values() for p in each]
        if held is not None and not held.issuperset(trained):
            raise Refused(
                f"{what}: the optimizer does not have its adapters' parameters.",
                module=what,
                parameter="optimizer",
                remedy="Build the optimizer after the adapters were added "
                "(get_peft_model), from the model's trainable parameters.",
            )
    everything = list(module.named_parameters(remove_duplicate=False))
    for name, layer in module.named_modules():
        what = _named(name, layer)
        trains = any(p.requires_grad for p in layer.parameters())
        if hasattr(layer, "lstm_head") and trains:
            raise Refused(
                f"{what}: makes one prompt for all samples by an LSTM, which can't be "
                "told apart by sample.",
                module=what,
                remedy='Use encoder_reparameterization_type="MLP".',
            )
        if not isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
            continue
        inside = f"{name}.original_module." if name else "original_module."
        own = {p for n, p in everything if n.startswith(inside) and p.requires_grad}
        own -= {p for n, p in everything if not n.startswith(inside)}
        if own and not layer.disable_adapters:
            raise Refused(
                f"{what}: original_module is trainable, but its copy for the adapter "
                "is used instead, so it would get no gradient.",
                module=what,
                remedy="Freeze it before make_private: "
                f"model.get_submodule({inside[:-1]!r}).requires_grad_(False).",
            )


def attach_checks(module: nn.Module) -> Iterator[Any]:
    """
    Attaches hooks that refuse a training step in which an adapter gets no gradient: it
    was merged, disabled or switched after make_private, or the module around its layer
    reads the layer's weight without calling it. Yields the hooks' handles.
    """
    layers = adapters_in(module)
    if not layers:
        return
    before = {layer: _state(layer) for layer in layers.values()}
    around = {n: module.get_submodule(n.rpartition(".")[0]) for n in layers}
    called: Set[nn.Module] = set()

    def note(layer: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled():
            called.add(layer)

    def begin(root: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled() and root.training:
            for name, layer in layers.items():
                _check(name, layer, before[layer])

    def end(root: nn.Module, args: tuple, output: Any) -> None:
        if not (torch.is_grad_enabled() and root.training):
            return
        for name, layer in layers.items():
            if around[name] in called and layer not in called:
                what = _named(name, layer)
                raise Refused(
                    f"{what}: {type(around[name]).__name__} ran "
                    "without calling it, so that its adapters get no gradient, or "
                    "none that can be seen (it reads the weight itself, as "
                    "nn.MultiheadAttention does with out_proj).",
                    module=what,
                    remedy="Leave it out of target_modules (exclude_modules), or "
                    "freeze its adapters.",
                )

    for layer in {*layers.values(), *around.values()}:
        yield layer.register_forward_pre_hook(note)
    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)
