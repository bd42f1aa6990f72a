"""Refusals of adapters (PEFT's LoRA and others) that would be trained on noise alone.

A parameter that no sample uses has a gradient of zero, and DP-SGD adds noise to it. So
an adapter that is merged, disabled, not active, never called or unknown to the
optimizer would silently be trained on noise. PEFT is not imported: its layers are
recognized by their attributes.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, Iterable, Iterator, List, Set

import torch
from torch import nn

from opacus_ext.refused import Refused


def adapters_in(module: nn.Module) -> Dict[str, Any]:
    """Returns PEFT's layers in ``module`` with trainable adapters, by name."""
    return {
        f"{name} ({type(layer).__name__})": layer
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


def _state(layer: Any) -> tuple:
    active = layer.active_adapters
    active = (active,) if isinstance(active, str) else tuple(active)
    return active, bool(layer.disable_adapters), tuple(layer.merged_adapters)


def _check(what: str, layer: Any) -> None:
    """Refuses a layer if one of its adapters would get no gradient."""
    active, disabled, merged = _state(layer)
    for adapter, params in _trainable(layer).items():
        for wrong, state, remedy in (
            (disabled, "disabled", "Leave disable_adapter()."),
            (adapter in merged, "merged", "Call unmerge_adapter()."),
            (adapter not in active, "not active", "Call set_adapter, or freeze it."),
        ):
            if wrong and (params or disabled):  # PEFT freezes those it disables
                raise Refused(
                    f"{what} has an adapter {adapter!r} that is trainable and {state}, "
                    "so it would get no gradient.",
                    module=what,
                    remedy=remedy,
                )


def refuse(module: nn.Module, params: Iterable[nn.Parameter]) -> None:
    """
    Refuses a model with an adapter that would be trained on noise alone.

    Args:
        module: the user's model
        params: those of the optimizer
    """
    held = set(params)
    for what, layer in adapters_in(module).items():
        _check(what, layer)
        if not held.issuperset(sum(_trainable(layer).values(), [])):
            raise Refused(
                f"{what} has adapters whose parameters the optimizer does not have.",
                module=what,
                parameter="optimizer",
                remedy="Build the optimizer after the adapters were added "
                "(get_peft_model), from the model's trainable parameters.",
            )
    for name, layer in module.named_modules():
        what = f"{name} ({type(layer).__name__})"
        trains = any(p.requires_grad for p in layer.parameters())
        if hasattr(layer, "lstm_head") and trains:
            raise Refused(
                f"{what} makes one prompt for all samples by an LSTM, which can't be "
                "told apart by sample.",
                module=what,
                remedy='Use encoder_reparameterization_type="MLP".',
            )
        if not isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
            continue
        if layer.disable_adapters:
            continue
        inside = f"{name}.original_module".lstrip(".")
        everything = module.named_parameters(remove_duplicate=False)
        others = {p for n, p in everything if not n.startswith(f"{inside}.")}
        own = set(layer.original_module.parameters()) - others
        if any(p.requires_grad for p in own):
            raise Refused(
                f"{what} has a trainable original_module, but its copy for the adapter "
                "is used instead, so it would get no gradient.",
                module=what,
                remedy="Freeze it before make_private: "
                f"model.get_submodule({inside!r}).requires_grad_(False).",
            )


def attach_checks(module: nn.Module) -> Iterator[Any]:
    """
    Attaches hooks that refuse a training step in which an adapter gets no gradient.
    That happens if it was merged, disabled or switched after make_private, or if the
    module around its layer reads the layer's weight without calling the layer. Yields
    the handles of the hooks.
    """
    layers = adapters_in(module)
    if not layers:
        return
    before = {what: _state(layer) for what, layer in layers.items()}
    around = {
        what: module.get_submodule(what.split(" (")[0].rpartition(".")[0])
        for what in layers
    }
    called: Set[nn.Module] = set()

    def note(layer: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled():
            called.add(layer)

    def begin(root: nn.Module, args: tuple) -> None:
        for what, layer in layers.items() if _is_step(root) else ():
            if _state(layer) != before[what]:
                _check(what, layer)
                raise Refused(
                    f"{what} has other adapters active than at make_private.",
                    module=what,
                    remedy="Make those active again, or make it private with these.",
                )

    def end(root: nn.Module, args: tuple, output: Any) -> None:
        for what, layer in layers.items() if _is_step(root) else ():
            if around[what] in called and layer not in called:
                raise Refused(
                    f"{what} was not called, but {type(around[what]).__name__} around "
                    "it was, so its adapters get no gradient, or none that can be seen "
                    "(nn.MultiheadAttention reads the weight of out_proj itself).",
                    module=what,
                    remedy="Leave it out of target_modules (exclude_modules), or "
                    "freeze its adapters.",
                )

    for layer in {*layers.values(), *around.values()}:
        yield layer.register_forward_pre_hook(note)
    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)


def _is_step(root: nn.Module) -> bool:
    return torch.is_grad_enabled() and root.training
