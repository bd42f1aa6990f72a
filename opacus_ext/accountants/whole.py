"""Counting of steps, each completely or not at all."""

from __future__ import annotations

from typing import Any, Callable, List


def add_steps(history: List[Any], noise: float, rate: float, steps: int) -> None:
    """Adds steps to a history, to the last entry if that is of the same kind."""
    last = history[-1:]
    if last and tuple(last[0][:2]) == (noise, rate):
        last = [(noise, rate, last[0][2] + steps)]
    else:
        last = [*last, (noise, rate, steps)]
    history[-1:] = last  # at once: an interrupt leaves it as it was


def record_whole(accountant: Any, record: Callable[[], None]) -> None:
    """
    Calls ``record``, which counts a step, and restores the history if it fails or is
    interrupted: Opacus's accountants take the last entry out and add it again with one
    more step, so an error in between would lose it.
    """
    before = list(accountant.history)
    try:
        record()
    except BaseException:
        accountant.history = before
        raise


def count_whole(optimizer: Any, accountant: Any) -> None:
    """Wraps an optimizer's step hook in :func:`record_whole`."""
    hook = optimizer.step_hook

    def count(optimizer: Any) -> None:
        record_whole(accountant, lambda: hook(optimizer))

    optimizer.step_hook = count
