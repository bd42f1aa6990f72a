"""The limits of a plan: users, privacy and compute, checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple

from opacus_ext.accountants.solver import checked, default_delta
from opacus_ext.refused import Refused

Range = Optional[Tuple[float, float]]

MOST_EPSILON = 100.0  # above, there is no privacy to plan for


class HopelessError(Refused):
    """Nothing can be learned with a budget: the noise is above the law's range."""

    status = 3  # of the command


@dataclass(frozen=True)
class Budget:
    """
    The limits of a plan, and the choices that are made already.

    Attributes:
        users: N, units that privacy protects; a batch is drawn from them
        epsilon: of the whole run, 100 at most
        delta: of the whole run; None for :func:`default_delta` of the users. The
            paper's is 1e-8 for any number of them
        flops: C at most; inf for no limit
        tokens: S, tokens of an example
        parameters: the least and largest model size; None for the law's range
        trainable: m, where a model of M parameters is fine-tuned and the others are
            frozen: noise falls on these, compute on all. ``parameters`` is then one
            size, (M, M). None for models that are trained whole
        batch_size: the least and largest batch, in examples; None for 1 to all users
        steps: the fewest and most steps; None for the law's range
        records_per_user: examples that a user has
        sampling: "users", a step draws users and one example of each; or "records", it
            draws examples, and a user is protected in all of theirs
        amplification: "poisson" for Poisson samples, "none" for fixed batches, "lower"
            for the one of lower noise
        physical_batch_size: examples that fit into memory at once: a batch is processed
            in parts of so many, which changes nothing but time

    Raises:
        Refused: for values that are not positive, an epsilon above 100, a delta of 1
            or more, and an empty range

    Example:
        >>> Budget(users=1e6, epsilon=4, flops=1e19).delta
        2e-07
    """

    users: float
    epsilon: float
    delta: float = None  # type: ignore[assignment]
    flops: float = math.inf
    tokens: int = 512
    parameters: Range = None
    trainable: Optional[float] = None
    batch_size: Range = None
    steps: Range = None
    records_per_user: int = 1
    sampling: str = "users"
    amplification: str = "lower"
    physical_batch_size: int = 32

    def __post_init__(self) -> None:
        for name in ("users", "tokens", "records_per_user", "physical_batch_size"):
            checked(name, getattr(self, name), at_least=1)
        if self.delta is None:
            object.__setattr__(self, "delta", default_delta(self.users))
        checked("delta", self.delta, above=0, below=1)
        checked("epsilon", self.epsilon, above=0)
        if self.flops != math.inf:
            checked("flops", self.flops, above=0)
        if self.epsilon > MOST_EPSILON:
            raise Refused(
                f"epsilon={self.epsilon:g} is above {MOST_EPSILON:g}: that is no "
                "privacy, and nothing is planned for it.",
                parameter="epsilon",
                remedy=f"Choose an epsilon of at most {MOST_EPSILON:g}, or train "
                "without privacy.",
            )
        for name in ("parameters", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value[0] <= value[1] < math.inf:
                raise Refused(
                    f"{name} must be a range of numbers of 1 or more, low before high; "
                    f"got {value!r}.",
                    parameter=name,
                    remedy="Pass (low, high), or None for the law's range.",
                )
        if self.trainable is not None:
            low, high = self.parameters or (0.0, 0.0)
            if low != high or not low:
                raise Refused(
                    f"trainable={self.trainable:g} is of one model; its size is "
                    f"{'not one number' if self.parameters else 'missing'}.",
                    parameter="parameters",
                    remedy="Pass all of its parameters: (M, M), or --parameters M.",
                )
            checked("trainable", self.trainable, at_least=1, at_most=high)
        if self.batch_size:
            checked("batch_size", self.batch_size[0], at_most=self.examples)

    @property
    def tuned(self) -> Optional[float]:
        """M of a model that is fine-tuned; None for models that are trained whole."""
        return self.parameters[0] if self.trainable and self.parameters else None

    @property
    def trained(self) -> Range:
        """The range of trainable parameters: one number, or the model sizes."""
        only = self.trainable
        return self.parameters if only is None else (only, only)

    @property
    def examples(self) -> float:
        """The number that batches are drawn from: users, or all of their records."""
        return float(math.floor(self.users) * self.records)

    @property
    def records(self) -> int:
        """Records of a user that are drawn independently."""
        return self.records_per_user if self.sampling == "records" else 1
