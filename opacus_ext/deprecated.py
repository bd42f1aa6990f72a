"""Old names of public things, which work for one more release."""

from __future__ import annotations

import sys
import warnings
from typing import Any, Callable


def renamed(module: str, names: dict[str, str]) -> Callable[[str], Any]:
    """
    A module's ``__getattr__`` that answers old names with a DeprecationWarning.

    Args:
        module: its ``__name__``
        names: the new name of each old one; both are names of this module

    Example:
        >>> __getattr__ = renamed(__name__, {"Old": "New"})
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        new = names[name]
        warnings.warn(
            f"{module}.{name} is now {module}.{new}; the old name goes with the next "
            "release.",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(sys.modules[module], new)

    return get
