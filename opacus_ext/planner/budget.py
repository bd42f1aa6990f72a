"""What a plan may spend: users, privacy and compute, checked in one place."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Optional, Tuple

from opacus_ext.refused import Refused

Range = Optional[Tuple[float, float]]

DELTA = 1e-8  # the paper's, for any number of users
MOST_EPSILON = 100.0  # above, there is no privacy to plan for


@dataclass(frozen=True)
class Budget:
    """
    What there is to spend, and what is settled already.

    Attributes:
        users: N, units that privacy protects; a batch is drawn of them
        epsilon: of the whole run, 100 at most
        delta: of the whole run; the default is the paper's
        flops: C at most; inf for as much as it takes
        tokens: S, tokens of an example
        parameters: the least and largest model size; None for the law's range
        batch_size: the least and largest batch, in examples; None for 1 to all users
        steps: the fewest and most steps; None for the law's range
        seconds: of training on the probed machine at most
        memory: bytes at most, on the probed machine
        records_per_user: examples that a user has
        sampling: "users", a step draws users and one example of each; or "records", it
            draws examples, and a user is protected in all of theirs
        amplification: "lower" of Poisson sampling ("poisson") and fixed batches
            ("none")

    Raises:
        Refused: for what is not positive, an epsilon above 100, a delta of 1 or more,
            and an empty range

    Example:
        >>> Budget(users=1e6, epsilon=4, flops=1e19).delta
        1e-08
    """

    users: float
    epsilon: float
    delta: float = DELTA
    flops: float = math.inf
    tokens: int = 512
    parameters: Range = None
    batch_size: Range = None
    steps: Range = None
    seconds: float = math.inf
    memory: float = math.inf
    records_per_user: int = 1
    sampling: str = "users"
    amplification: str = "lower"

    def __post_init__(self) -> None:
        for name, least in (
            ("users", 1),
            ("epsilon", 0),
            ("flops", 0),
            ("tokens", 1),
            ("seconds", 0),
            ("memory", 0),
            ("records_per_user", 1),
        ):
            value = getattr(self, name)
            unlimited = name in ("flops", "seconds", "memory")
            if not (least <= value and value > 0 and (unlimited or value < math.inf)):
                raise Refused(
                    f"{name} must be {'above 0' if least == 0 else f'{least} or more'}"
                    f"{'' if unlimited else ' and finite'}; got {value!r}.",
                    parameter=name,
                )
        if self.epsilon > MOST_EPSILON:
            raise Refused(
                f"epsilon={self.epsilon:g} is above {MOST_EPSILON:g}: that is no "
                "privacy, and nothing is planned for it.",
                parameter="epsilon",
                remedy=f"Take an epsilon of at most {MOST_EPSILON:g}, or train without "
                "privacy.",
            )
        if not 0 < self.delta < 1:
            raise Refused(
                f"delta must be between 0 and 1; got {self.delta!r}.",
                parameter="delta",
                remedy="Take less than one in the number of users.",
            )
        for name in ("parameters", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value[0] <= value[1] < math.inf:
                raise Refused(
                    f"{name} must be a range of numbers of 1 or more, low before high; "
                    f"got {value!r}.",
                    parameter=name,
                    remedy="Pass (low, high), or None for all that is known.",
                )
        if self.batch_size and self.batch_size[0] > self.examples:
            raise Refused(
                f"batch_size must be at most {self.examples:g}, all examples; got "
                f"{self.batch_size[0]:g}.",
                parameter="batch_size",
                remedy="Lower it, or plan for more users.",
            )

    @property
    def examples(self) -> float:
        """Of these a batch is drawn: users, or all of their records."""
        records = self.records_per_user if self.sampling == "records" else 1
        return float(math.floor(self.users) * records)
