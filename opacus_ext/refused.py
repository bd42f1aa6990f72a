"""The package's one exception, checks of arguments that raise it, and warnings."""

from __future__ import annotations

import math
import numbers
import sys
import warnings
from typing import Any, Optional


class Refused(ValueError, RuntimeError):
    """
    Raised when exact per-sample gradients can't be computed, or when an argument is
    impossible. The model and the optimizer are unchanged. It is both a ValueError and a
    RuntimeError, so that handlers of either work.

    Args:
        reason: what is wrong, with the module or argument and its shape or value
        module: name and class of the module that can't be trained, if there is one
        parameter: name of the parameter or argument that is meant, if there is one
        remedy: what to do about it, in a sentence or more

    Attributes:
        reason: see above, as are ``module``, ``parameter`` and ``remedy``

    Example:
        >>> from opacus_ext import Refused
        >>> try:
        ...     raise Refused("sigma is -1.", parameter="sigma", remedy="Take 1.")
        ... except ValueError as error:
        ...     print(error, error.parameter)
        sigma is -1. Take 1. sigma
    """

    def __init__(
        self,
        reason: str = "",
        *,
        module: Optional[str] = None,
        parameter: Optional[str] = None,
        remedy: Optional[str] = None,
    ):
        super().__init__(f"{reason} {remedy}" if remedy else reason)
        self.reason, self.remedy = reason, remedy
        self.module, self.parameter = module, parameter

    def __reduce__(self) -> Any:
        return _restored, (self.reason, self.module, self.parameter, self.remedy)


def check_number(
    name: str,
    value: Any,
    *,
    zero: bool = False,
    below: float = math.inf,
    whole: bool = False,
) -> None:
    """Refuses what is no number above zero (or zero, if allowed) and below another."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    fits = number and (0 < value < below or zero and value == 0)
    if not fits or whole and value % 1:
        most = "finite" if below == math.inf else f"below {below:g}"
        least = "zero or more" if zero else "above zero"
        tensor = hasattr(value, "tolist")
        raise Refused(
            f"{name} must be a {'whole ' if whole else ''}number, {most} and {least}, "
            f"got {value!r}.",
            parameter=name,
            remedy=f"Give plain numbers: {name}.tolist()." if tensor else None,
        )


def check_argument(
    name: str, value: object, fits: bool, what: str, remedy: str
) -> None:
    """
    Refuses an argument of the wrong kind.

    Args:
        name, value: of the argument
        fits: False for the wrong kind
        what: it must be, with its article
        remedy: what to do about it
    """
    if not fits:
        raise Refused(
            f"{name} must be {what}, got {describe(value)}.",
            parameter=name,
            remedy=remedy,
        )


def describe(value: object) -> str:
    """
    Returns a few words on a value: itself if it is short, and its type otherwise.

    Example:
        >>> describe(None), describe("adam"), describe([0.5] * 100), describe(list)
        ('None', "'adam'", 'a value of type list', 'the class list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    # Long values and default texts, <... object at 0x...>, tell less than their type.
    short = value is None or isinstance(value, (str, numbers.Number))
    if short and len(repr(value)) < 60:
        return repr(value)
    return f"a value of type {type(value).__name__}"


class ProcessFailure(Refused):
    """Raised for what went wrong in another process, or between processes."""


#: What a process may fail in, where it tells the others.
STAGES = ("forward pass", "criterion", "backward pass", "step")


def failed_elsewhere(rank: int, stage: int) -> ProcessFailure:
    """Makes the error of the others, where a process has failed."""
    return ProcessFailure(
        f"Process {rank} has failed in its {STAGES[stage]}; its error says why. No "
        "weight was changed."
    )


def waited_in_vain(rank: int, error: Exception) -> ProcessFailure:
    """Makes the error of a process that the others have left waiting."""
    return ProcessFailure(
        f"Process {rank} waited in vain for the others ({error}). One of them has "
        "died, failed or come too late (see the timeout of init_process_group). This "
        "step was not taken here:",
        remedy="start all processes again from the last checkpoint.",
    )


def add_note(error: Exception, note: str) -> None:
    """Adds a sentence to another library's error; to its text before Python 3.11."""
    if hasattr(error, "add_note"):
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    elif error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n{note}", *error.args[1:])
    elif not error.args:
        error.args = (note,)


def _restored(
    reason: str, module: Optional[str], parameter: Optional[str], remedy: Optional[str]
) -> Refused:
    return Refused(reason, module=module, parameter=parameter, remedy=remedy)


_INSIDE = "opacus", "torch.", "contextlib"


def warn_once(owner: Any, key: str, message: str) -> None:
    """Warns once for each ``owner``, an engine or an optimizer, at the user's line."""
    told = owner.__dict__.setdefault("_opacus_ext_told", set())
    if key in told:
        return
    told.add(key)
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(_INSIDE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
