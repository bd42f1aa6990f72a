"""
Opacus for the models people train today.

Importing this package beside ``opacus.PrivacyEngine`` extends its modes, and adds
"ghost_bk", "scan" and "auto"; :class:`PrivacyEngine` shows its new arguments.
:func:`clipped_grads` is what all modes stand on.
"""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Iterable, List

from opacus_ext import take
from opacus_ext.checks import check_per_sample_gradients, find_leaks
from opacus_ext.clipping import (
    Clipping,
    ClippingFunction,
    register_clipping,
)
from opacus_ext.data import UserRecords
from opacus_ext.engine import PrivacyEngine
from opacus_ext.grad_sample import (
    ClippedGrads,
    GradSample,
    OneHot,
    Op,
    PerSampleGrads,
    as_op,
    clipped_grads,
    per_sample_grads,
    register_rule,
    workspace,
)
from opacus_ext.losses import PerSample, model_losses
from opacus_ext.monitor import Monitor
from opacus_ext.re_attention import ErrorTracker, track_errors
from opacus_ext.refused import Refused
from opacus_ext.registry import register, unregister

if TYPE_CHECKING:  # __getattr__ imports these
    from opacus_ext import (
        accountants,
        audit,
        checks,
        data,
        distributed,
        layers,
        lightning,
        losses,
        models,
        optimizers,
        re_attention,
        releases,
        secure,
        statement,
        strategies,
        trainer,
    )
    from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

__version__ = "0.1.0"

__all__ = [
    "ClippedGrads",
    "Clipping",
    "ClippingFunction",
    "ErrorTracker",
    "GradSample",
    "Monitor",
    "OneHot",
    "Op",
    "PerSample",
    "PerSampleGrads",
    "PrivacyArguments",
    "PrivacyEngine",
    "PrivateTrainer",
    "Refused",
    "UserRecords",
    "as_op",
    "check_per_sample_gradients",
    "clipped_grads",
    "find_leaks",
    "model_losses",
    "per_sample_grads",
    "register",
    "register_clipping",
    "register_rule",
    "take",
    "track_errors",
    "unregister",
    "workspace",
]

#: Names of opacus_ext.trainer, which needs transformers and takes seconds to import.
_OF_TRAINER = {"PrivacyArguments", "PrivateTrainer"}


def __getattr__(name: str) -> Any:
    """Imports a part of the package when it is asked for: ``opacus_ext.trainer``."""
    if name in _OF_TRAINER:
        return getattr(importlib.import_module("opacus_ext.trainer"), name)
    try:
        return importlib.import_module(f"{__name__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__name__}.{name}":
            raise
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message) from None


def __dir__() -> List[str]:
    """The public names."""
    return sorted(__all__)


def _leave_out(names: Iterable[str]) -> None:
    """Leaves out public names that can't be imported, for ``import *``."""
    for name in names:
        __all__.remove(name)


if find_spec("transformers") is None:
    _leave_out(_OF_TRAINER)
register()
