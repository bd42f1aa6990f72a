"""Progress bars on a terminal."""

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
    Shows a bar on the standard error for work of more than a second, and removes it at
    the end. Nothing is written if the standard error is no terminal.

    Args:
        iterable: the steps; None if ``update`` is called
        what: description of the work
        show: False for no bar
        kwargs: of ``tqdm``

    Example:
        >>> list(progress(range(3), "counting"))
        [0, 1, 2]
    """
    given = {"leave": False, "delay": 1.0, **kwargs}
    return tqdm(iterable, what, disable=None if show else True, **given)
