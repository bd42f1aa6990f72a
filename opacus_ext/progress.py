"""Progress bars, where a person is looking."""

from __future__ import annotations

from typing import Any, Iterable, Optional

from tqdm import tqdm


def progress(
    iterable: Optional[Iterable] = None,
    what: Optional[str] = None,
    *,
    show: bool = True,
    **kwargs: Any,
) -> tqdm:
    """
    A bar on the standard error of what takes more than a second, gone when that is
    done. Nothing is written where that is no terminal.

    Args:
        iterable: of the steps; None if ``update`` is called
        what: is being done
        show: False for none
        kwargs: of ``tqdm``

    Example:
        >>> list(progress(range(3), "counting"))
        [0, 1, 2]
    """
    given = {"leave": False, "delay": 1.0, **kwargs}
    return tqdm(iterable, what, disable=None if show else True, **given)


__all__ = ["progress"]
