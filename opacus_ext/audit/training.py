"""An audit of one run: loader, steps and accountant together."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from opacus_ext.accountants.mechanisms import count_of
from opacus_ext.audit import bounds
from opacus_ext.audit import canaries as inserted
from opacus_ext.audit.report import Audit, Finding
from opacus_ext.audit.steps import PrivateStep, quiet
from opacus_ext.checks.subject import LossFn
from opacus_ext.data.sampling import Poisson, Sampling
from opacus_ext.private_torch import tree_map
from opacus_ext.progress import progress


def audit_scores(
    scores: np.ndarray,
    included: np.ndarray,
    accountant: Any,
    *,
    delta: float = 1e-5,
    confidence: float = 0.95,
) -> Audit:
    """
    Tests the claim of an accountant by one run with canaries of yours. A fair coin for
    each canary decided if it was in the data. The claim must be about data sets of
    which one has one record more.

    The auditor guesses for the 20 % of canaries of which it is most confident.
    :func:`~opacus_ext.audit.bounds.f_dp_p_value` tests the number of right guesses,
    which also gives a lower bound of epsilon. The test and the bound have half the
    error rate each.

    Args:
        scores: one for each canary ``[m]``, higher if it looks like a member
        included: their coins ``[m]``
        accountant: of the run

    Example:
        >>> from opacus_ext.accountants import PRVBoundsAccountant
        >>> accountant = PRVBoundsAccountant()
        >>> accountant.step(noise_multiplier=2.0, sample_rate=1.0)  # is claimed
        >>> source = np.random.default_rng(0)
        >>> coins, noise = source.random(2000) < 0.5, source.normal(size=2000)
        >>> [audit_scores(coins + x * noise, coins, accountant).ok for x in (2.0, 1.0)]
        [True, False]
    """
    level, count = (1 - confidence) / 2, len(scores)
    guesses = max(2, count // 5)
    right = bounds.guess(scores, included, guesses)
    numbers = count, guesses, right
    claim = bounds.accounted_tradeoff(accountant)

    def refutes(correct: int) -> bool:
        return bounds.f_dp_p_value(claim, count, guesses, correct) <= level

    # The most right guesses that the claim permits: more are the less likely.
    permitted = bisect_left(range(guesses + 1), True, key=refutes) - 1
    least = bounds.epsilon_one_run(*numbers, delta, 1 - level)
    most = bounds.epsilon_one_run(count, guesses, guesses, delta, 1 - level)
    claimed = float(accountant.get_epsilon(delta=delta))
    row = f"{guesses} guesses", permitted, right, "right guesses"
    findings = [Finding("membership", *row, right > permitted)]
    can_tell = permitted < guesses
    return Audit(least, claimed, delta, confidence, findings, count, most, can_tell)


def audit_training(
    model: torch.nn.Module,
    loss_fn: LossFn,
    records: Any,
    *,
    canaries: int = 2000,
    noise_multiplier: float = 4.0,
    max_grad_norm: float = 1.0,
    grad_sample_mode: str = "ghost_bk",
    clipping: str = "flat",
    sampling: Sampling = Poisson(sample_rate=0.9, steps=16),
    seed: int = 0,
    **options: Any,
) -> Audit:
    """
    Trains once by SGD, with the loader and the accountant of ``make_private``, on the
    records and on the gradient canaries that fair coins choose. Then guesses the coins
    from the final parameters alone (:func:`audit_scores`). The accountant must have
    counted each step, and must count one on an empty batch.

    Args:
        model: is copied, and the dropout of the copy set to 0
        loss_fn: takes a model and a batch, returns losses ``[B]``
        records: a list of samples of equal shapes, or a tree of tensors ``[B, ...]``
        seed: of the coins
        **options: of :func:`audit_scores`

    Raises:
        Refused: for more canaries than entries
    """
    whole = inserted.WithCanaries(model, loss_fn, canaries, 100 * max_grad_norm)
    coins = np.random.default_rng(seed).random(canaries) < 0.5
    data: Any = inserted.marked(records, np.flatnonzero(coins).tolist())
    with quiet():
        run = PrivateStep(
            whole,
            torch.nn.Module.__call__,
            data[:1],
            data_loader=DataLoader(data),
            noise_multiplier=noise_multiplier,
            max_grad_norm=max_grad_norm,
            grad_sample_mode=grad_sample_mode,
            clipping=clipping,
            sampling=sampling,
        )
    accountant = run.engine.accountant

    def counted(batch: Any) -> int:
        run.step(batch)
        return count_of(accountant.history)

    with quiet():
        total = [counted(batch) for batch in progress(run.loader, "auditing a run")][-1]
    scores = (whole.entries() - run.model.entries()).double().numpy()
    audit = audit_scores(scores, coins, accountant, **options)
    empty = counted(tree_map(lambda x: x[:0], default_collate(data[:1]))) - total
    steps = sampling.steps_per_epoch(len(data))
    for name, n, found in (("the run", steps, total), ("an empty batch", 1, empty)):
        row = "accountant", name, n, found, "steps counted", n != found
        audit.findings.append(Finding(*row))
    return audit
