"""Which noise to take: what each strategy leaves of it in the weights of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Dict, List, Optional, Sequence

from opacus_ext.accountants import calibration
from opacus_ext.accountants.solver import checked
from opacus_ext.data.sampling import CyclicPoisson
from opacus_ext.planner.noise import six_digits, verified_noise
from opacus_ext.refused import Refused
from opacus_ext.strategies import (
    Banded,
    BufferedToeplitz,
    InverseBanded,
    LambdaCGD,
    Participation,
    Strategy,
)

_ABOUT = 1.05  # times the least noise is about as good
_LITTLE = 0.95  # of independent noise is hardly less
#: Steps for which all strategies, and two of them, are searched for in two seconds.
MOST_STEPS, MANY_STEPS = 10_000, 50_000
_BYTES = 4  # of a number that the optimizer keeps


@dataclass(frozen=True)
class NoiseChoice:
    """
    A strategy of noise for a run, and what it leaves.

    Attributes:
        strategy: for ``make_private(noise=...)``; ``Banded(bands=1, ...)`` is
            independent noise
        noise_multiplier: that the budget asks for
        parts: parts of the data set that steps draw from in turn; 1 for Poisson samples
            of all records
        is_amplified: True if sampling amplifies privacy
        prefix: root mean square, over all steps, of the noise in the weights, as a
            share of that of independent noise
        last: standard deviation of the noise in the weights after the last step, as
            such a share
        memory: tensors of the model's size that the optimizer keeps
    """

    strategy: Strategy
    noise_multiplier: float
    parts: int
    is_amplified: bool
    prefix: float
    last: float
    memory: int

    @property
    def is_independent(self) -> bool:
        """True for the noise that Opacus adds."""
        return isinstance(self.strategy, Banded) and self.strategy.bands == 1

    @property
    def name(self) -> str:
        """The strategy in words, without what is the same for all of them."""
        strategy = self.strategy
        if self.is_independent:
            return "independent"
        words = [type(strategy).__name__]
        for field in ("bands", "buffers"):
            count = getattr(strategy, field, None)
            if count is not None:
                words.append(f"{count} {field if count > 1 else field[:-1]}")
        return ", ".join(words)

    def safe_noise_multiplier(
        self, records: int, batch_size: float, epsilon: float, delta: float
    ) -> float:
        """Returns the noise multiplier of the run, by the accountant's upper bound."""
        sampling = CyclicPoisson(bands=self.parts, expected_batch_size=batch_size)
        spent = self.strategy.steps, epsilon, delta
        run = self.noise_multiplier, sampling, records, *spent
        return six_digits(verified_noise(*run, strategy=self.strategy))

    def as_dict(self) -> Dict[str, Any]:
        """All of it in plain numbers and names; the strategy as code to paste."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"name": self.name, **plain, "strategy": repr(self.strategy)}


def noise_strategies(
    records: int,
    batch_size: float,
    steps: int,
    epsilon: float,
    delta: float,
    momentum: float = 0.0,
) -> List[NoiseChoice]:
    """
    What each strategy of noise leaves in the weights of a run, at the same epsilon and
    batch size. The first is independent noise, with Poisson samples.

    Bands are amplified by sampling from parts of the data set. All other strategies
    have each record in at most one step of an epoch, and no amplification. For them
    coefficients are searched for, which takes long if there are many steps: above
    10,000 two strategies are left out, above 50,000 all of them.

    Args:
        records: that batches are drawn from
        batch_size: expected, at most all records
        steps: of the whole run
        epsilon, delta: of the whole run
        momentum: of SGD, or the first of Adam's betas

    Raises:
        Refused: if an argument is out of its range; if a record is drawn at all with a
            probability below delta, so that no noise is asked for

    Example:
        >>> choices = noise_strategies(50_000, 50, 2000, epsilon=8, delta=1e-6)
        >>> best = recommended(choices)
        >>> print(best.name, f"{best.prefix:.2f}")
        BufferedToeplitz, 2 buffers 0.23
    """
    for name, value in (("records", records), ("steps", steps)):
        checked(name, value, at_least=1, whole=True)
    checked("batch_size", batch_size, above=0, at_most=records)
    rate = batch_size / records
    counts = [2**k for k in range(7) if 2**k <= steps and 2**k * rate <= 1]
    rounds, rates = [-(-steps // b) for b in counts], [b * rate for b in counts]
    multipliers = calibration.noise_multiplier(epsilon, delta, rounds, rates)
    if not multipliers[0]:
        raise Refused(
            f"A record is drawn with a probability below delta={delta:g}, so that no "
            "noise is asked for.",
            parameter="delta",
            remedy="Give a smaller delta: about 1 / records.",
        )
    alone = Banded(1, steps, momentum)
    errors = alone.prefix_error(), alone.last_error()

    def choice(
        strategy: Strategy, multiplier: float, parts: int, is_amplified: bool
    ) -> NoiseChoice:
        """A strategy beside independent noise."""
        times = multiplier / multipliers[0]
        return NoiseChoice(
            strategy,
            float(multiplier),
            parts,
            is_amplified,
            float(times * strategy.prefix_error() / errors[0]),
            float(times * strategy.last_error() / errors[1]),
            strategy.memory,
        )

    choices = [
        choice(Banded(bands, steps, momentum), multiplier, bands, True)
        for bands, multiplier in zip(counts, multipliers)
    ]
    parts = int(1 / rate + 1e-9)
    participation = Participation(parts, -(-steps // parts))
    once = calibration.noise_multiplier(epsilon, delta, 1, 1.0)
    for strategy in _unamplified(steps, momentum, parts):
        sensitivity = strategy.sensitivity(participation)
        choices.append(choice(strategy, once * sensitivity, parts, False))
    return choices


def _unamplified(steps: int, momentum: float, separation: int) -> List[Strategy]:
    """The strategies whose C has all bands, each with its best coefficients."""
    run = steps, momentum, separation
    if steps > MANY_STEPS:
        return []
    found: List[Strategy] = [
        LambdaCGD(steps, None, *run[1:]),
        BufferedToeplitz(1, *run),
    ]
    if steps <= MOST_STEPS:
        found += [BufferedToeplitz(2, *run), InverseBanded(min(4, steps), *run)]
    return found


def recommended(choices: Sequence[NoiseChoice]) -> NoiseChoice:
    """
    The choice to take: independent noise if nothing leaves 5 % less, or else that of
    least memory among those within 5 % of the least noise.
    """
    least = min(choice.prefix for choice in choices)
    if least > _LITTLE:
        return choices[0]
    near = [choice for choice in choices if choice.prefix <= _ABOUT * least]
    return min(near, key=lambda choice: (choice.memory, choice.prefix))


def advice(choices: Sequence[NoiseChoice], parameters: Optional[int] = None) -> str:
    """
    Says which noise to take, in a sentence or two.

    Args:
        choices: of :func:`noise_strategies`
        parameters: that are trained, if memory is to be told in bytes
    """
    best = recommended(choices)
    if best is choices[0]:
        least = min(choices[1:], key=lambda choice: choice.prefix, default=best)
        return (
            "Take independent noise: no strategy leaves much less in the weights "
            f"({least.name}: {least.prefix:.2f} of it)."
        )
    text = (
        f"Take noise={best.strategy!r}: it leaves {best.prefix:.2f} of independent "
        f"noise in the weights, and keeps {in_memory(best.memory, parameters)}."
    )
    small = [choice for choice in choices[1:] if 4 * choice.memory <= best.memory]
    other = min(small, key=lambda choice: choice.prefix, default=best)
    if best.memory and other.prefix <= _LITTLE:
        text += (
            f" With less memory, {other.strategy!r} leaves {other.prefix:.2f} and "
            f"keeps {in_memory(other.memory, parameters)}."
        )
    return text


def in_memory(tensors: int, parameters: Optional[int] = None) -> str:
    """What so many tensors of the model's size take, in words."""
    if not tensors:
        return "nothing"
    text = f"{tensors} x the model"
    if parameters is None:
        return text
    size, units = float(tensors * parameters * _BYTES), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{text}, {size:.3g} {units[0]}"
