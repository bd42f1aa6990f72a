"""Norms in ``ModuleValidator``: subclasses, and norms without parameters.

Opacus looks layers up by their exact type, among those with trainable parameters. It
misses a subclass of BatchNorm (timm's BatchNormAct2d), a BatchNorm without scale and
shift, and the second name of a shared layer. Here they are found, and replaced as
Opacus replaces a BatchNorm.
"""

from __future__ import annotations

from typing import Any, Dict, Iterator, List, Tuple, Type

import torch
from opacus.utils.module_utils import clone_module, trainable_modules
from opacus.validators import ModuleValidator, batch_norm, instance_norm
from opacus.validators.errors import (
    IllegalModuleConfigurationError,
    ShouldReplaceModuleError,
    UnsupportableModuleError,
    UnsupportedModuleError,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.overrides import TorchFunctionMode

from opacus_ext.refused import Refused

#: Opacus refuses or replaces these; here they are trained as they are.
TRAINED_AS_IS = (nn.LSTM, nn.GRU, nn.MultiheadAttention)
# Opacus's own entries in its tables, which this file handles; a user's entries stay.
_OF_OPACUS = [f for m in (batch_norm, instance_norm) for f in (m.validate, m.fix)]
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class ReplacedNorm(nn.Module):
    """
    The forward of a subclass of BatchNorm, with another norm in the place of its one
    call of ``F.batch_norm``. All else stays: an activation, dropout.

    Args:
        norm: called as ``norm(input)``
        layer: of the subclass; loses its scale, shift and statistics

    Raises:
        Refused: from ``forward``, if the layer does not call ``F.batch_norm`` once

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class WithReLU(nn.BatchNorm2d):
        ...     def forward(self, x):
        ...         return super().forward(x).relu()
        >>> layer = ReplacedNorm(nn.GroupNorm(2, 4), WithReLU(4))
        >>> x = torch.randn(3, 4, 2, 2)
        >>> bool((layer(x) == layer.norm(x).relu()).all())
        True
    """

    def __init__(self, norm: nn.Module, layer: _BatchNorm):
        super().__init__()
        self.norm, self.layer = norm, layer
        layer.affine = layer.track_running_stats = False
        for name in ("weight", "bias"):
            layer.register_parameter(name, None)
        for name in _STATISTICS:
            layer.register_buffer(name, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The layer's output, with the other norm."""
        calls, output, failure = _InPlaceOfBatchNorm(self.norm), None, None
        try:
            with calls:
                output = self.layer(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            if calls.number:
                raise
            failure = error  # it uses what was taken away
        if calls.number != 1:
            what = type(self.layer).__name__
            raise Refused(
                f"The forward of {what}, a subclass of BatchNorm, calls F.batch_norm "
                f"{calls.number} times, and ModuleValidator.fix can't replace it.",
                module=what,
                remedy="Replace it by a norm of one sample (GroupNorm) before fix, or "
                "register what replaces it with "
                "opacus.validators.register_module_fixer.",
            ) from failure
        return output


class _InPlaceOfBatchNorm(TorchFunctionMode):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm, self.number = norm, 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in (F.batch_norm, torch.batch_norm):
            return func(*args, **kwargs)
        self.number += 1
        return self.norm(args[0] if args else kwargs["input"])


# -- the layers ------------------------------------------------------------------------


def _has_entry(layer: nn.Module, table: Dict[type, Any]) -> bool:
    """Returns True if a table of Opacus has an entry for the layer that holds here."""
    kind = type(layer)
    return kind in table and kind not in TRAINED_AS_IS and table[kind] not in _OF_OPACUS


def _norms(
    module: nn.Module, table: Dict[type, Any]
) -> Iterator[Tuple[str, nn.Module]]:
    """
    Yields norms without an entry of a user's in the table, inner ones first. Frozen
    ones stay: in training mode they are refused when samples are mixed.
    """
    found = dict(module.named_modules())
    done = {id(m.layer) for m in found.values() if isinstance(m, ReplacedNorm)}
    for name, layer in reversed(list(found.items())):
        if id(layer) in done or not isinstance(layer, (_BatchNorm, _InstanceNorm)):
            continue
        own = list(layer.parameters(recurse=False))
        if own and not any(p.requires_grad for p in own):
            continue
        if not _has_entry(layer, table):
            yield name, layer


def _is_lazy(layer: nn.Module) -> bool:
    return isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params()


def _errors(module: nn.Module) -> Iterator[UnsupportedModuleError]:
    """Yields an error for each norm that mixes samples or keeps data in buffers."""
    kind: Type[UnsupportedModuleError]
    for name, layer in reversed(list(_norms(module, ModuleValidator.VALIDATORS))):
        if isinstance(layer, _InstanceNorm):
            kind, reason = IllegalModuleConfigurationError, (
                "keeps running stats of the data, without noise. Use "
                "ModuleValidator.fix(model) before make_private, or "
                "track_running_stats=False."
            )
            if not layer.track_running_stats:
                continue
        elif not layer.training and layer.running_mean is not None:
            continue
        elif _is_lazy(layer):
            kind, reason = UnsupportableModuleError, (
                "does not know its number of channels yet. Call the model once, then "
                "use ModuleValidator.fix(model)."
            )
        else:
            kind, reason = ShouldReplaceModuleError, (
                "normalizes over the batch, so that a sample's output depends on the "
                "other samples. Use ModuleValidator.fix(model) before make_private, "
                "which puts GroupNorm in its place, or call eval() on this layer: it "
                "trains with the statistics that it has."
            )
        yield kind(f"{name or 'the model'} ({type(layer).__name__}) {reason}")


def _faulty(module: nn.Module) -> List[nn.Module]:
    return [
        layer
        for _, layer in _norms(module, ModuleValidator.FIXERS)
        if not _is_lazy(layer)
        and (isinstance(layer, _BatchNorm) or layer.track_running_stats)
    ]


def _replacement(layer: nn.Module, **kwargs: Any) -> nn.Module:
    if isinstance(layer, _InstanceNorm):
        layer.track_running_stats = False
        for name in _STATISTICS:
            layer.register_buffer(name, None)
        return layer
    fixers = ModuleValidator.FIXERS
    fix = next((fixers[c] for c in type(layer).__mro__ if c in fixers), batch_norm.fix)
    norm: nn.Module = fix(layer, **kwargs)
    for like in (layer.running_mean, layer.weight):
        if isinstance(like, torch.Tensor):
            norm.to(like.device, like.dtype)
    if type(layer) not in fixers and isinstance(layer, _BatchNorm):
        norm = ReplacedNorm(norm, layer)
    return norm.train(layer.training)


# -- the methods of ModuleValidator ----------------------------------------------------


def validate(
    cls: Type[ModuleValidator], module: nn.Module, *, strict: bool = False
) -> List[UnsupportedModuleError]:
    """``ModuleValidator.validate``, with the errors of this file."""
    errors: List[UnsupportedModuleError] = []
    if not module.training:
        errors.append(
            IllegalModuleConfigurationError(
                "Model needs to be in training mode: call model.train() first "
                "(from_pretrained gives a model in evaluation mode)."
            )
        )
    for _, layer in trainable_modules(module):
        if _has_entry(layer, ModuleValidator.VALIDATORS):
            errors += ModuleValidator.VALIDATORS[type(layer)](layer)
    errors += _errors(module)
    if strict and errors:
        raise UnsupportedModuleError(errors)
    return errors


def fix(cls: Type[ModuleValidator], module: nn.Module, **kwargs: Any) -> nn.Module:
    """
    ``ModuleValidator.fix``: a copy in which norms are replaced as this file says.
    GroupNorms are new (scale 1, shift 0), on the device and in the dtype of the
    BatchNorm.
    """
    module = clone_module(module)
    norms = {id(layer): _replacement(layer, **kwargs) for layer in _faulty(module)}
    module = _with(norms, module)
    for name in [name for name, _ in trainable_modules(module)]:
        try:
            layer = module.get_submodule(name)
        except AttributeError:  # of a block that has been replaced
            continue
        if _has_entry(layer, ModuleValidator.FIXERS):
            device = next(layer.parameters()).device
            new = ModuleValidator.FIXERS[type(layer)](layer, **kwargs).to(device)
            module = _with({id(layer): new}, module)
    return module


def _with(new: Dict[int, nn.Module], module: nn.Module) -> nn.Module:
    """Replaces layers, by their ``id``, under each of their names."""
    for parent in list(module.modules()):
        if isinstance(parent, ReplacedNorm):
            continue
        for name, child in parent._modules.items():
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    return new.get(id(module), module)


__all__ = ["ReplacedNorm"]
