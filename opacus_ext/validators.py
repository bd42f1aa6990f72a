"""``ModuleValidator``'s methods, which find norms that Opacus's own miss.

Opacus looks layers up by their exact type, among those with trainable parameters. It
misses a subclass of BatchNorm, a BatchNorm without scale and shift, and the second name
of a shared layer. Here they are found, and replaced as Opacus replaces a BatchNorm.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple, Type

import torch
from opacus.utils.module_utils import clone_module, trainable_modules
from opacus.validators import ModuleValidator, batch_norm, instance_norm
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportedModuleError,
)
from torch import nn
from torch.nn.parameter import is_lazy

from opacus_ext.private_torch import _BatchNorm, _InstanceNorm

#: Opacus refuses or replaces these; here they are trained as they are.
TRAINED_AS_IS = (nn.LSTM, nn.GRU, nn.MultiheadAttention)
# Opacus's own entries in its tables, which this file handles; a user's entries stay.
_OF_OPACUS = [f for m in (batch_norm, instance_norm) for f in (m.validate, m.fix)]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_FIX = (
    "Before the optimizer is made: model = opacus.validators.ModuleValidator.fix(model)"
)
_TRACKS = f"keeps running statistics of the data, without noise. {_FIX}."
_MIXES = "normalizes over the batch, so samples change each other's outputs."
_KEEP = "call eval() on it, to keep its statistics."
_REPLACE = f"{_FIX}, which has GroupNorm instead. Or {_KEEP}"
_EVALUATED = "Model needs to be in training mode: call model.train() first."
_LAZY = (
    "ModuleValidator.fix can't replace it: it is lazy. Run the model on a batch first, "
    f"which gives the layer its shape. {_FIX}"
)
_REGISTER = f"""\
ModuleValidator.fix does not know what its own forward does. Say what replaces it \
before the optimizer is made:

    from opacus.validators import ModuleValidator, batch_norm, register_module_fixer

    @register_module_fixer(type(model.get_submodule({{name!r}})))
    def fixer(layer, **kwargs):
        return batch_norm.fix(layer, **kwargs)  # and what {{kind}}.forward does besides

    model = ModuleValidator.fix(model)

Or {_KEEP}"""


class _Complaint(NamedTuple):
    """What is wrong with all layers of a class; the text has a field for a name."""

    error: Type[UnsupportedModuleError]
    kind: str
    text: str


def _layers(module: nn.Module) -> Iterator[Tuple[str, nn.Module]]:
    """
    Yields what is looked at, inner layers first: all with trainable parameters, and
    norms without any. Frozen norms stay; those that mix samples are refused later.
    """
    trainable = {id(layer) for _, layer in trainable_modules(module)}
    for name, layer in reversed(list(module.named_modules())):
        norm = isinstance(layer, (_BatchNorm, _InstanceNorm))
        bare = norm and not list(layer.parameters(recurse=False))
        if bare or id(layer) in trainable:
            yield name, layer


def _of_user(layer: nn.Module, table: Dict[type, Any]) -> Any:
    """Looks up what a user has registered for the layer's type."""
    found = None if type(layer) in TRAINED_AS_IS else table.get(type(layer))
    return None if found in _OF_OPACUS else found


def _is_lazy(layer: nn.Module) -> bool:
    """Whether a layer has no shapes yet."""
    return any(map(is_lazy, [*layer.parameters(), *layer.buffers()]))


def _parts(layer: Any) -> Optional[List[nn.Module]]:
    """Returns what a BatchNorm's forward does after the norm; None if it can't tell."""
    if _is_lazy(layer):
        return None
    kind = type(layer)
    if kind.forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        return []
    if kind.__name__ == "BatchNormAct2d" and {"drop", "act"} <= {*layer._modules}:
        return [layer.drop, layer.act]  # timm's, or a copy of it
    return None


def _remedy(layer: nn.Module) -> str:
    """Says how a BatchNorm is replaced."""
    if _is_lazy(layer):
        return _LAZY
    return _REGISTER if _parts(layer) is None else _REPLACE


def _complaint(layer: nn.Module) -> Optional[_Complaint]:
    """Says what is wrong with a norm that mixes samples, or keeps data in buffers."""
    kind = type(layer).__name__
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        return _Complaint(IllegalModuleConfigurationError, kind, _TRACKS)
    if not isinstance(layer, _BatchNorm):
        return None
    if not layer.training and layer.running_mean is not None:
        return None
    return _Complaint(ShouldReplaceModuleError, kind, f"{_MIXES} {_remedy(layer)}")


def _described(complaint: _Complaint, names: List[str]) -> UnsupportedModuleError:
    """Makes the error for all layers of one class."""
    layers = names[0] or "the model"
    if names[1:]:
        layers += f" and {len(names) - 1} more"
    text = complaint.text.format(name=names[0], kind=complaint.kind)
    return complaint.error(f"{complaint.kind} ({layers}) {text}")


def _fixed(layer: nn.Module, **kwargs: Any) -> nn.Module:
    """Returns the replacement of a layer, or the layer itself."""
    fix = _of_user(layer, ModuleValidator.FIXERS)
    if fix is not None:
        like = next(layer.parameters(), None)
        made: nn.Module = fix(layer, **kwargs)
        return made if like is None else made.to(like.device)
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        layer.track_running_stats = False
        for name in _STATISTICS:
            layer.register_buffer(name, None)
    parts = _parts(layer) if isinstance(layer, _BatchNorm) else None
    if parts is None:
        return layer
    norm = batch_norm.fix(layer, **kwargs)
    for tensor in (layer.running_mean, layer.weight):
        if isinstance(tensor, torch.Tensor):
            norm.to(tensor.device, tensor.dtype)
    return (nn.Sequential(norm, *parts) if parts else norm).train(layer.training)


# -- the methods of ModuleValidator ----------------------------------------------------


def validate(
    cls: Type[ModuleValidator], module: nn.Module, *, strict: bool = False
) -> List[UnsupportedModuleError]:
    """
    ``ModuleValidator.validate``, with the errors of this file: one for all layers of a
    class.
    """
    errors: List[UnsupportedModuleError] = []
    if not module.training:
        errors.append(IllegalModuleConfigurationError(_EVALUATED))
    names: Dict[_Complaint, List[str]] = {}
    for name, layer in reversed(list(_layers(module))):
        check = _of_user(layer, ModuleValidator.VALIDATORS)
        if check is not None:
            errors += check(layer)
        elif (complaint := _complaint(layer)) is not None:
            names.setdefault(complaint, []).append(name)
    errors += [_described(complaint, names[complaint]) for complaint in names]
    if strict and errors:
        raise UnsupportedModuleError("\n".join(map(str, errors)))
    return errors


def fix(cls: Type[ModuleValidator], module: nn.Module, **kwargs: Any) -> nn.Module:
    """
    ``ModuleValidator.fix``: a copy in which norms are replaced as this file says.
    GroupNorms are new (scale 1, shift 0), on the device and in the dtype of the
    BatchNorm.
    """
    module = clone_module(module)
    for _, layer in list(_layers(module)):
        new = _fixed(layer, **kwargs)
        for parent in [] if new is layer else list(module.modules()):
            for name, child in parent._modules.items():  # under each of its names
                if child is layer:
                    parent._modules[name] = new
        module = new if layer is module else module
    return module
