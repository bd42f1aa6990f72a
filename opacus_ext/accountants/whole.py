"""Counting of steps, each completely or not at all."""

from __future__ import annotations

from typing import Any, Callable

from opacus_ext.ledger import ledger_of


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


def count_steps(engine: Any, optimizer: Any) -> None:
    """Counts the steps of an optimizer by the draws that they spend, in the ledger."""
    hook, accountant, ledger = optimizer.step_hook, engine.accountant, ledger_of(engine)

    def count(dp_optimizer: Any) -> None:
        spent, before = dp_optimizer.spent, accountant.history[-1:]
        if spent is not None and accountant.mechanism() != "gdp":  # it knows one rate
            record_whole(accountant, lambda: add(dp_optimizer, spent))
            return
        hook(dp_optimizer)
        if accountant.history[-1:] != before:
            ledger.add(*accountant.history[-1][:2])

    def add(dp_optimizer: Any, spent: Any) -> None:
        noise = float(dp_optimizer.noise_multiplier)
        rate = min(1.0, spent.rate * dp_optimizer.accumulated_iterations)
        for _ in range(spent.steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
            ledger.add(noise, rate)

    optimizer.step_hook, optimizer.ledger = count, ledger
