"""Counting of steps, each completely or not at all."""

from __future__ import annotations

from typing import Any, Callable


def record_whole(accountant: Any, record: Callable[[], None]) -> None:
    """
    Calls ``record``, which counts a step, and restores the history if it fails or is
    interrupted: Opacus's accountants take the last entry out and add it again with one
    more step, so an error in between would lose it.
    """
    kept = [x for x in ("history", "mechanisms") if hasattr(accountant, x)]
    before = {name: list(getattr(accountant, name)) for name in kept}
    try:
        record()
    except BaseException:
        vars(accountant).update(before)
        raise


def count_whole(optimizer: Any, accountant: Any) -> None:
    """Wraps an optimizer's step hook in :func:`record_whole`."""
    hook = optimizer.step_hook

    def count(optimizer: Any) -> None:
        record_whole(accountant, lambda: hook(optimizer))

    optimizer.step_hook = count
