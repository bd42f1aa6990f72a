"""Norms in ``ModuleValidator``: what it finds and replaces beside Opacus's own types.

Opacus looks layers up by their very type, among those with trainable parameters. A
subclass of BatchNorm (timm's BatchNormAct2d), a BatchNorm without scale and shift and
the second name of a layer that a model holds twice are left as they are. Here they are
found, and replaced as Opacus replaces a BatchNorm.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch
from opacus.utils.module_utils import clone_module
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

# Entries of Opacus's tables that are seen to here; a user's own entries count.
_OF_OPACUS = [f for m in (batch_norm, instance_norm) for f in (m.validate, m.fix)]


class ReplacedNorm(nn.Module):
    """
    The forward of a subclass of BatchNorm, with another norm in the place of its one
    call of ``F.batch_norm``. What else it computes stays: an activation, dropout.

    Args:
        norm: what takes the place, as ``norm(input)``
        layer: of the subclass; its own scale, shift and statistics are taken away

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
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            layer.register_buffer(name, None)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes, with the other norm."""
        calls, output, failure = _InPlaceOfBatchNorm(self.norm), None, None
        try:
            with calls:
                output = self.layer(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            if calls.number:
                raise
            failure = error  # it looks at what was taken away
        if calls.number != 1:
            what = type(self.layer).__name__
            raise Refused(
                f"{what} is a subclass of BatchNorm whose forward calls F.batch_norm "
                f"{calls.number} times, so that ModuleValidator.fix can't replace it.",
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


# -- which layers --------------------------------------------------------------------


def _norms(
    module: nn.Module, table: Dict[type, Any]
) -> Iterator[Tuple[str, nn.Module]]:
    """
    The norms that are not left to a table of Opacus, parts before what they are in.
    """
    found = dict(module.named_modules())
    done = {id(m.layer) for m in found.values() if isinstance(m, ReplacedNorm)}
    for name, layer in reversed(list(found.items())):
        if id(layer) in done or not isinstance(layer, (_BatchNorm, _InstanceNorm)):
            continue
        if type(layer) not in table or is_hidden(type(layer), table):
            yield name, layer


def is_hidden(kind: type, table: Dict[type, Any]) -> bool:
    """Whether Opacus does not see its own entry of a table, as it is seen to here."""
    return table.get(kind) in _OF_OPACUS


def _is_trained(layer: nn.Module) -> bool:
    """Frozen parameters say that the layer is to stay; without any, nothing does."""
    own = list(layer.parameters(recurse=False))
    return not own or any(p.requires_grad for p in own)


def _irreplaceable(layer: nn.Module) -> str:
    """Why a BatchNorm can't be replaced, and what to do; empty if it can."""
    if isinstance(layer, LazyModuleMixin) and layer.has_uninitialized_params():
        return (
            "does not know its number of channels yet. Call the model once, then use "
            "ModuleValidator.fix(model)."
        )
    if isinstance(layer, nn.SyncBatchNorm) and type(layer) is not nn.SyncBatchNorm:
        return (
            "normalizes over the batches of all processes. Use "
            "ModuleValidator.fix(model) on the model before its BatchNorms are "
            "converted: GroupNorm has nothing to synchronize."
        )
    return ""


# -- what ModuleValidator does --------------------------------------------------------


def errors_of(module: nn.Module) -> List[UnsupportedModuleError]:
    """
    Norms of a model that mix samples or write data into buffers.

    One that is frozen is not among them; if it is in training mode nevertheless, it is
    refused when samples are seen to be mixed.

    Returns:
        one error a layer, with its name and what to do

    Example:
        >>> from torch import nn
        >>> class WithReLU(nn.BatchNorm2d):
        ...     def forward(self, x):
        ...         return super().forward(x).relu()
        >>> for error in errors_of(nn.Sequential(nn.Conv2d(1, 4, 3), WithReLU(4))):
        ...     print(str(error).split(",")[0])
        1 (WithReLU) normalizes over the batch
    """
    found: List[UnsupportedModuleError] = []
    for name, layer in _norms(module, ModuleValidator.VALIDATORS):
        what = f"{name or 'the model'} ({type(layer).__name__})"
        if not _is_trained(layer):
            continue
        if isinstance(layer, _InstanceNorm):
            if layer.track_running_stats:
                found.append(
                    IllegalModuleConfigurationError(
                        f"{what} keeps running stats of the data, without noise. "
                        "Use ModuleValidator.fix(model) before make_private, or "
                        "track_running_stats=False."
                    )
                )
        elif layer.training or layer.running_mean is None:
            reason = _irreplaceable(layer)
            if reason:
                found.append(UnsupportableModuleError(f"{what} {reason}"))
                continue
            found.append(
                ShouldReplaceModuleError(
                    f"{what} normalizes over the batch, so that a sample's output "
                    "depends on the other samples. Use ModuleValidator.fix(model) "
                    "before make_private, which puts GroupNorm in its place, or call "
                    "eval() on this layer: it trains with the statistics that it has."
                )
            )
    return found[::-1]


def fixed(module: nn.Module, **kwargs: Any) -> nn.Module:
    """
    A copy of a model without norms that mix samples or write data into buffers.

    A BatchNorm is replaced as Opacus replaces it, by a new GroupNorm (scale 1, shift
    0), on its device and of its type; a subclass by :class:`ReplacedNorm` around that.
    An InstanceNorm keeps no running statistics any more.

    Args:
        kwargs: ``num_groups``, ``replace_bn_with_in``, as for ``ModuleValidator.fix``

    Returns:
        The copy; ``module`` itself if there is nothing to do.
    """
    table = ModuleValidator.FIXERS

    def todo(module: nn.Module) -> List[nn.Module]:
        return [
            layer
            for _, layer in _norms(module, table)
            if _is_trained(layer)
            and not _irreplaceable(layer)
            and (isinstance(layer, _BatchNorm) or layer.track_running_stats)
        ]

    if not todo(module):
        return module
    module = clone_module(module)
    new = {id(layer): _replacement(layer, **kwargs) for layer in todo(module)}
    for parent in list(module.modules()):
        if isinstance(parent, ReplacedNorm):
            continue
        for name, child in parent._modules.items():  # each name of a shared layer
            if id(child) in new:
                parent._modules[name] = new[id(child)]
    return new.get(id(module), module)


def _replacement(layer: nn.Module, **kwargs: Any) -> nn.Module:
    if isinstance(layer, _InstanceNorm):
        layer.track_running_stats = False
        for name in ("running_mean", "running_var", "num_batches_tracked"):
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


def validate_norms(validate: Callable) -> Callable:
    """``ModuleValidator.validate``, with the errors of this file."""

    @functools.wraps(validate)
    def all_errors(
        cls: type, module: nn.Module, *, strict: bool = False
    ) -> List[UnsupportedModuleError]:
        errors = validate(cls, module) + errors_of(module)
        if not module.training:  # Opacus's says what is wrong, not what to do
            what = (
                "Model needs to be in training mode: call model.train() first "
                "(from_pretrained gives a model in evaluation mode)."
            )
            errors[0] = IllegalModuleConfigurationError(what)
        if strict and errors:
            raise UnsupportedModuleError(errors)
        return errors

    return all_errors


def fix_norms(fix: Callable) -> Callable:
    """``ModuleValidator.fix``, which replaces what this file replaces first."""

    @functools.wraps(fix)
    def fix_all(cls: type, module: nn.Module, **kwargs: Any) -> nn.Module:
        return fix(cls, fixed(module, **kwargs), **kwargs)

    return fix_all


__all__ = ["ReplacedNorm", "errors_of", "fix_norms", "fixed", "validate_norms"]
