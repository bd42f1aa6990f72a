"""Objects of another class that have the attributes of a given object."""

from __future__ import annotations

from typing import Any


def view_of(owner: Any, kind: type) -> Any:
    """
    Returns an object of another class that shares all attributes with an object, so
    that what is set on one of them is set on the other.

    Example:
        >>> class Plain: pass
        >>> class Loud(Plain):
        ...     def speak(self): self.said = f"{self.word}!"
        >>> plain = Plain()
        >>> plain.word = "hello"
        >>> view_of(plain, Loud).speak()
        >>> plain.said
        'hello!'
    """
    view: Any = object.__new__(kind)
    view.__dict__ = owner.__dict__
    return view
