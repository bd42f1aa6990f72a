"""
Where Opacus, torch and transformers are touched.

:func:`register` names all that is replaced or added there, and :func:`unregister`
undoes it. Opacus's own engines, and subclasses of them, have the methods of
:class:`opacus_ext.PrivacyEngine`.
"""

from __future__ import annotations

import functools
import operator
import sys
from importlib import import_module
from typing import Any, Callable, List, MutableMapping, Tuple

import opacus
import opacus.accountants.registry
import opacus.utils.batch_memory_manager
from opacus.validators import ModuleValidator

from opacus_ext import validators
from opacus_ext.accountants import PRVBoundsAccountant
from opacus_ext.accountants.stock import BoundedPRVAccountant, SolvedGaussianAccountant
from opacus_ext.data.draws import Splits
from opacus_ext.engine import PrivacyEngine
from opacus_ext.grad_sample.rules import experts
from opacus_ext.modes import MODES, Mode
from opacus_ext.private_torch import is_batched, take_checkpoints

_METHODS = "make_private make_private_with_epsilon get_epsilon privacy_statement "
_METHODS += "save_checkpoint load_checkpoint __init__ __repr__ "
# Users' engines may call these by super(), or by the name of Opacus's class.
_METHODS += "_prepare_model _prepare_optimizer _prepare_data_loader _prepare_criterion"
_ACCOUNTANTS = PRVBoundsAccountant, BoundedPRVAccountant, SolvedGaussianAccountant

_undo: List[Callable[[], None]] = []
_extended = False  # True if transformers has our experts


def _entries() -> List[Tuple[Any, str, Any]]:
    """Returns what is replaced or added: owners, names and new values."""
    engine, validator = opacus.PrivacyEngine, ModuleValidator
    return [
        *((engine, name, _by_ours(name)) for name in _METHODS.split()),
        (PrivacyEngine, "_begin", staticmethod(extend_transformers)),
        (validator, "validate", classmethod(validators.validate)),
        (validator, "fix", classmethod(validators.fix)),
        (opacus.utils.batch_memory_manager, "BatchSplittingSampler", Splits),
        *(
            (opacus.accountants.registry._ACCOUNTANTS, kind.mechanism(), kind)
            for kind in _ACCOUNTANTS
        ),
    ]


def register() -> None:
    """
    Registers everything with Opacus; importing ``opacus_ext`` does it. Idempotent.

    Example:
        >>> import opacus_ext
        >>> opacus_ext.unregister()
        >>> opacus_ext.register()
    """
    if _undo:
        return
    for owner, name, new in _entries():
        _set(owner, name, new)
    _undo.append(take_checkpoints())
    extend_transformers()


def unregister() -> None:
    """Leaves Opacus, torch and transformers as they were before. Idempotent."""
    global _extended
    while _undo:
        _undo.pop()()
    _extended = False


def extend_transformers() -> None:
    """
    Adds the experts of samples that run at once to transformers, if it has been
    imported. ``make_private`` calls it again. Idempotent.
    """
    global _extended
    if _extended or "transformers.modeling_utils" not in sys.modules:
        return
    _extended = True
    functions = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    _undo.append(experts.register_with(functions, is_batched))


_MISSING = object()


def _set(owner: Any, name: Any, new: Any) -> None:
    """Sets an attribute, or an entry of a table, until ``unregister``."""
    put: Callable = setattr
    remove: Callable = delattr
    entries = vars(owner) if not isinstance(owner, MutableMapping) else owner
    if entries is owner:
        put, remove = operator.setitem, operator.delitem
    old = entries.get(name, _MISSING)
    put(owner, name, new)

    def undo() -> None:
        if entries.get(name) is not new:  # somebody else's by now
            return
        if old is _MISSING:
            remove(owner, name)
        else:
            put(owner, name, old)

    _undo.append(undo)


# -- engines ---------------------------------------------------------------------------


def _by_ours(name: str) -> Callable:
    """Makes a method that calls ours, with the signature of Opacus's."""
    ours = getattr(PrivacyEngine, name)
    # Programs for Opacus load checkpoints of its default accountant.
    defaults = {"accountant": "prv"} if name == "__init__" else {}

    @functools.wraps(getattr(opacus.PrivacyEngine, name, ours))
    def method(self: opacus.PrivacyEngine, *args: Any, **kwargs: Any) -> Any:
        return ours(self, *args, **{**defaults, **kwargs})

    return method


__all__ = ["MODES", "Mode", "register", "unregister"]
