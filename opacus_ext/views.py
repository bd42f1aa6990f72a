"""Objects that stand in for others."""

from __future__ import annotations

from typing import Any, Callable, Iterator


class StandIn:
    """
    Stands in for an iterable object: it has its class, its length and its attributes,
    and is iterated over in another way. The object stays as it is.

    Args:
        before: the object
        iterate: is called with the stand-in, and returns an iterator

    Example:
        >>> numbers = StandIn([1, 2, 3], lambda stand_in: reversed(stand_in.before))
        >>> list(numbers), len(numbers), isinstance(numbers, list)
        ([3, 2, 1], 3, True)
    """

    def __init__(self, before: Any, iterate: Callable[[Any], Iterator]):
        vars(self).update(before=before, iterate=iterate)

    def __iter__(self) -> Iterator:
        return vars(self)["iterate"](self)

    def __len__(self) -> int:
        return len(vars(self)["before"])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(vars(self)["before"])

    def __getattr__(self, name: str) -> Any:
        if "before" not in vars(self):  # while it is copied
            raise AttributeError(name)
        return getattr(vars(self)["before"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["before"], name, value)
