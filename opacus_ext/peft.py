"""Adapters (PEFT's LoRA and others) that would be trained on noise alone.

A parameter that no sample uses has a gradient of zero, and DP-SGD adds noise to it. For
an adapter that is merged, disabled, not active, never called or unknown to the
optimizer that is never meant, and plain autograd says nothing either. PEFT's layers are
recognized by what they offer, so that PEFT is not imported.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import nn

from opacus_ext.refused import Refused

State = Tuple[tuple, bool, tuple]


def adapters_in(module: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """PEFT's layers in ``module`` that hold trainable adapters, with their names."""
    for name, layer in module.named_modules():
        kind = type(layer)
        if hasattr(kind, "adapter_layer_names") and hasattr(kind, "disable_adapters"):
            if any(_trainable(layer).values()):
                yield name, layer


def _trainable(layer: nn.Module) -> Dict[str, List[nn.Parameter]]:
    """The trainable parameters of a layer's adapters, by the adapter's name."""
    found: Dict[str, List[nn.Parameter]] = {}
    for name in layer.adapter_layer_names:
        try:
            parts = attrgetter(name)(layer)
        except AttributeError:
            continue
        if not isinstance(parts, (nn.ModuleDict, nn.ParameterDict)):
            continue
        for adapter, part in parts.items():
            params = part.parameters() if isinstance(part, nn.Module) else [part]
            trained = [p for p in params if p.requires_grad]
            found.setdefault(adapter, []).extend(trained)
    return found


def _state(layer: nn.Module) -> State:
    active = layer.active_adapters
    active = (active,) if isinstance(active, str) else tuple(active)
    return active, bool(layer.disable_adapters), tuple(layer.merged_adapters)


class _Problem(NamedTuple):
    reason: str
    remedy: str


def _problem(layer: nn.Module, state: State) -> Optional[_Problem]:
    """Why an adapter of a layer would get no gradient, and what to do; None if not."""
    active, disabled, merged = state
    if disabled:
        return _Problem(
            "is disabled, so its adapters would get no gradient.",
            "Leave disable_adapter(), or call enable_adapter_layers()",
        )
    for adapter, params in _trainable(layer).items():
        if params and adapter in merged:
            return _Problem(
                f"has its adapter {adapter!r} merged into the base weights, so it "
                "would get no gradient.",
                "Call unmerge_adapter()",
            )
        if params and adapter not in active:
            return _Problem(
                f"has an adapter {adapter!r} that is trainable and not active "
                f"({', '.join(active) or 'none'} is), so it would get no gradient.",
                "Make it active (set_adapter), or freeze it",
            )
    return None


def refuse(module: nn.Module, params: Optional[Iterable[nn.Parameter]] = None) -> None:
    """
    Args:
        module: the user's model
        params: those of the optimizer, if known

    Raises:
        Refused: if an adapter of ``module`` would be trained on noise alone
    """
    known = None if params is None else set(params)
    for name, layer in adapters_in(module):
        what = f"{name} ({type(layer).__name__})"
        problem = _problem(layer, _state(layer))
        if problem is not None:
            raise Refused(
                f"{what} {problem.reason}",
                module=what,
                remedy=f"{problem.remedy} before make_private.",
            )
        trained = [p for each in _trainable(layer).values() for p in each]
        if known is not None and not known.issuperset(trained):
            raise Refused(
                f"{what}: the optimizer does not have its adapters' parameters.",
                module=what,
                parameter="optimizer",
                remedy="Build the optimizer after the adapters were added "
                "(get_peft_model), from the model's trainable parameters.",
            )
    for name, layer in module.named_modules():
        what = f"{name} ({type(layer).__name__})"
        if hasattr(layer, "lstm_head") and any(_requires_grad(layer)):
            raise Refused(
                f"{what}: makes one prompt for all samples by an LSTM, which can't be "
                "told apart by sample.",
                module=what,
                remedy='Use encoder_reparameterization_type="MLP".',
            )
        if not isinstance(getattr(layer, "modules_to_save", None), nn.ModuleDict):
            continue
        inside = f"{name}.original_module." if name else "original_module."
        own = {p for n, p in _each(module) if n.startswith(inside) and p.requires_grad}
        own -= {p for n, p in _each(module) if not n.startswith(inside)}
        if own and not layer.disable_adapters:
            raise Refused(
                f"{what}: original_module is trainable, but "
                "its copy for the adapter is used instead, so it would get no "
                "gradient.",
                module=what,
                remedy="Freeze it before make_private: "
                f"model.get_submodule({inside[:-1]!r}).requires_grad_(False).",
            )


def _requires_grad(layer: nn.Module) -> Iterator[bool]:
    return (p.requires_grad for p in layer.parameters())


def _each(module: nn.Module) -> Iterator[Tuple[str, nn.Parameter]]:
    return module.named_parameters(remove_duplicate=False)


def watch(module: nn.Module) -> Iterator[Any]:
    """
    Attaches hooks that refuse a training step in which an adapter gets no gradient:
    it was merged, disabled or switched after make_private, or the module around its
    layer reads the layer's weight without calling it. Yields the hooks' handles.

    Raises (from the model's forward):
        Refused: which names the layer
    """
    layers = dict(adapters_in(module))
    if not layers:
        return
    before = {layer: _state(layer) for layer in layers.values()}
    called: Set[nn.Module] = set()

    def note(layer: nn.Module, args: tuple) -> None:
        if torch.is_grad_enabled():
            called.add(layer)

    def begin(root: nn.Module, args: tuple) -> None:
        if not (torch.is_grad_enabled() and root.training):
            return
        for name, layer in layers.items():
            state = _state(layer)
            if state == before[layer]:
                continue
            what = f"{name} ({type(layer).__name__})"
            problem = _problem(layer, state) or _Problem(
                "has other adapters active than when the model was made private.",
                "Make those active again, or call make_private with the new ones",
            )
            raise Refused(
                f"{what} {problem.reason}", module=what, remedy=f"{problem.remedy}."
            )

    def end(root: nn.Module, args: tuple, output: Any) -> None:
        if not (torch.is_grad_enabled() and root.training):
            return
        for name, layer in layers.items():
            around = module.get_submodule(name.rpartition(".")[0])
            if around in called and layer not in called:
                what = f"{name} ({type(layer).__name__})"
                raise Refused(
                    f"{what}: {type(around).__name__} ran "
                    "without calling it, so that its adapters get no gradient, or "
                    "none that can be seen (it reads the weight itself, as "
                    "nn.MultiheadAttention does with out_proj).",
                    module=what,
                    remedy="Leave it out of target_modules (exclude_modules), or "
                    "freeze its adapters.",
                )

    arounds = {module.get_submodule(name.rpartition(".")[0]) for name in layers}
    for layer in {*layers.values(), *arounds}:
        yield layer.register_forward_pre_hook(note)
    yield module.register_forward_pre_hook(begin)
    yield module.register_forward_hook(end)
