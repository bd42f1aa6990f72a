"""The modes of ``make_private``: their classes, and what each of them refuses."""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Type

import opacus.grad_sample
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.grad_sample import (
    GradSampleHooks,
    GradSampleHooksFastGradientClipping,
    GradSampleModule,
    GradSampleModuleFastGradientClipping,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

from opacus_ext import misuse, peft
from opacus_ext.clipping import find_clipping
from opacus_ext.grad_sample.modes import common
from opacus_ext.grad_sample.modes.auto import Auto
from opacus_ext.grad_sample.modes.ghost import (
    BookKeeping,
    ClippedCriterion,
    Ghost,
    Scan,
)
from opacus_ext.grad_sample.modes.hooks import GradSampleMode
from opacus_ext.grad_sample.parallel.sharding import find_group
from opacus_ext.optimizers.adaptive import ADAPTIVE
from opacus_ext.optimizers.distributed import (
    DistributedGhostDPOptimizer,
    DistributedHooksDPOptimizer,
)
from opacus_ext.optimizers.noise_aware import refuse_scales
from opacus_ext.optimizers.optimizer import (
    GhostDPOptimizer,
    HooksDPOptimizer,
    optimizer_class,
)
from opacus_ext.refused import Refused
from opacus_ext.supported import kind_of
from opacus_ext.validators import TRAINED_AS_IS


class Mode(NamedTuple):
    """The classes of a ``grad_sample_mode``."""

    module: Type[nn.Module]
    hooks: type
    optimizer: type
    distributed: type
    criterion: Optional[type] = None  # if the mode returns one


_RECORDING = common.classes(GradSampleMode, GradSampleHooks, GradSampleModule)
_FAST = GradSampleHooksFastGradientClipping, GradSampleModuleFastGradientClipping
_GHOST = GhostDPOptimizer, DistributedGhostDPOptimizer, ClippedCriterion
_HOOKS_MODE = Mode(*_RECORDING, HooksDPOptimizer, DistributedHooksDPOptimizer)
_GHOST_MODE = Mode(*common.classes(Ghost, *_FAST), *_GHOST)
#: The modes of this package. Any other is Opacus's own.
MODES: Dict[str, Mode] = {
    "hooks": _HOOKS_MODE,
    "functorch": _HOOKS_MODE,
    "ghost": _GHOST_MODE,
    "ghost_bk": Mode(*common.classes(BookKeeping, *_FAST), *_GHOST),
    "scan": Mode(*common.classes(Scan, *_FAST), *_GHOST),
    "auto": Mode(*common.classes(Auto, *_FAST), *_GHOST),
}
#: Modes of Opacus that compute the same as one of ours, which takes their place.
_SAME = {"ew": "hooks", "ghost_fsdp": "ghost"}


def find_mode(name: Any) -> Optional[Mode]:
    """Returns our mode of this name; None for one of Opacus's. Refuses unknown ones."""
    mode = MODES.get(name_of(name))
    if mode is None:
        try:
            opacus.grad_sample.get_gsm_class(name)
        except ValueError:
            names = (*MODES, *_SAME, "no_op")
            raise Refused(
                f"Unexpected grad_sample_mode: {name!r}. There are {', '.join(names)}.",
                parameter="grad_sample_mode",
                remedy=misuse.closest(str(name), names, 'Take "auto" if in doubt.'),
            ) from None
    return mode


def name_of(name: Any) -> Any:
    """Returns the name of the mode that runs under this name."""
    return _SAME.get(name, name)


def find_optimizer(mode: Mode, clipping: Any, distributed: bool) -> type:
    """Returns the class of the optimizer of one of our modes."""
    base = mode.distributed if distributed else mode.optimizer
    return optimizer_class(base, find_clipping(clipping))


def refuse_unfit(
    module: nn.Module,
    is_new: bool,
    optimizer: Optimizer,
    grad_sample_mode: str,
    clipping: Any,
) -> None:
    """
    Refuses a model, or an optimizer, that can't be trained in a mode.

    Args:
        is_new: False for a model that is private already
    """
    _refuse_sharded(module)
    inner = getattr(module, "_module", None)
    if not is_new and isinstance(inner, (FSDPModule, DDP, DPDDP)):
        # Opacus takes the wrapper for a model of one process.
        raise Refused(
            f"{type(inner).__name__} of several processes is private already.",
            module=type(module).__name__,
            remedy="Call cleanup() of what make_private returned first, and pass the "
            "model itself again, which it has as _module.",
        )
    wrapped = getattr(optimizer, "original_optimizer", optimizer)
    kind, scales = type(wrapped), hasattr(wrapped, "gradient_scales")
    if scales and kind_of(module) in ("fully_shard", "expert_parallel"):
        refuse_scales(kind.__name__)
    if find_mode(grad_sample_mode) is None:
        if scales or hasattr(wrapped, "noise_variance"):
            raise Refused(
                f"{kind.__name__} asks for the noise or the clipping of each step, "
                f"which mode {grad_sample_mode!r} of Opacus does not tell it.",
                parameter="grad_sample_mode",
                remedy=f"Choose one of {', '.join(MODES)}, or torch.optim.AdamW.",
            )
        _refuse_trained_as_is(module, grad_sample_mode)
        return
    if clipping != ADAPTIVE:
        find_clipping(clipping)
    if is_new:
        common.refuse(module)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    peft.refuse(module, params)
    if not any(p.requires_grad for p in params):
        raise Refused(
            "The optimizer has no trainable parameter: all of its parameters are "
            "frozen.",
            parameter="optimizer",
            remedy="Build it from parameters that require gradients, after "
            "adapters were added (get_peft_model, without inference_mode).",
        )


def _refuse_sharded(module: nn.Module) -> None:
    """Refuses experts that are spread over processes in another way than here."""
    group = find_group(module.modules())
    if group is None:
        return
    if not isinstance(module, DPDDP):
        raise Refused(
            f"{type(module).__name__} has experts that are spread over processes.",
            module=type(module).__name__,
            remedy="Pass what opacus_ext.distributed.expert_parallel has returned.",
        )
    if group.size != dist.get_world_size():
        raise Refused(
            f"The experts are spread over {group.size} of {dist.get_world_size()} "
            "processes.",
            remedy="Call opacus_ext.distributed.expert_parallel without a group.",
        )


def _refuse_trained_as_is(module: nn.Module, mode: str) -> None:
    """Refuses layers that only our own modes can train."""
    for name, layer in module.named_modules():
        trained = any(p.requires_grad for p in layer.parameters())
        if trained and type(layer) in TRAINED_AS_IS:
            what = f"{name or 'the model'} ({type(layer).__name__})"
            raise Refused(
                f"{what} is trained as it is in the modes {', '.join(MODES)} of "
                f"PrivacyEngine alone; got grad_sample_mode={mode!r}.",
                module=what,
                remedy="Choose one of them, or replace the layer by that of "
                f"opacus.layers, DP{type(layer).__name__}.",
            )
