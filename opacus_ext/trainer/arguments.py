"""What privacy a run of PrivateTrainer has."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from opacus_ext.clipping import CLIPPINGS
from opacus_ext.refused import Refused
from opacus_ext.registry import MODES


def _field(default: Any, text: str, count: Optional[str] = None) -> Any:
    parsed = {"help": text} if count is None else {"help": text, "nargs": count}
    return field(default=default, metadata=parsed)


# What Opacus and PrivacyEngine call them; TrainingArguments has these names too, with
# another meaning, and one command line can't have both.
_TAKEN = {"max_grad_norm": "per_sample_max_grad_norm", "seed": "privacy_seed"}


@dataclass
class PrivacyArguments:
    """
    What privacy a run has. ``HfArgumentParser`` takes it beside ``TrainingArguments``.

    The unit of privacy is one record of the training set.

    Attributes:
        target_delta: delta of the guarantee, below one over the number of records
        target_epsilon: what all steps of the run may spend; the noise is chosen for it
        noise_multiplier: in the place of ``target_epsilon``
        per_sample_max_grad_norm: to which each record's gradient is clipped; for
            ``clipping="per_layer"`` a list, in the order of the optimizer's parameters
        clipping: "flat", "automatic", "normalized", "per_layer" or one that was
            registered
        grad_sample_mode: "auto", "ghost_bk", "ghost", "scan" or "hooks"
        accountant: "prv_bounds", "prv" or "rdp" ("gdp" of Opacus can report too little)
        max_batch_size: the most records of a step, where memory is fixed: of larger
            draws a random subset is taken, which is accounted for (the accountant must
            be "prv_bounds"). Six standard deviations above the logical batch size cost
            nothing that can be seen
        poisson_sampling: False shuffles. No accountant's numbers hold for that: what
            they would be is logged under another name
        log_loss: whether the training loss is logged. It is the mean over private
            records, without noise, and epsilon does not cover it
        monitor: "private" logs the share of records clipped, quantiles of the norms of
            their gradients and the ratio of noise to signal, by
            :class:`opacus_ext.monitor.Monitor`, within the same epsilon;
            "not_private" logs exact ones, under names that say so; "off" none
        privacy_seed: of noise and batches, for tests. By default nobody knows it;
            ``TrainingArguments.seed`` has no part in either
        repeat_noise: whether a run that goes on from a checkpoint has the noise that it
            would have had, and is bit for bit what it would have been. Two runs that go
            on from one checkpoint then have the same noise: the difference of their
            weights has none, and no epsilon covers that

    Raises:
        Refused: for arguments that do not fit

    Example:
        >>> PrivacyArguments(target_epsilon=8, target_delta=1e-5).clipping
        'flat'
    """

    target_delta: float = field(metadata={"help": "delta of the guarantee"})
    target_epsilon: Optional[float] = _field(None, "what all steps may spend")
    noise_multiplier: Optional[float] = _field(None, "instead of a target epsilon")
    per_sample_max_grad_norm: float = _field(
        1.0, "to which each record's gradient is clipped; a list for per_layer", "+"
    )
    clipping: str = _field("flat", "flat, automatic, normalized or per_layer")
    grad_sample_mode: str = _field("auto", "auto, ghost_bk, ghost, scan or hooks")
    accountant: str = _field("prv", "prv_bounds, prv or rdp")
    max_batch_size: Optional[int] = _field(None, "the most records of a step")
    poisson_sampling: bool = _field(True, "False shuffles, for which nothing is proven")
    log_loss: bool = _field(True, "log the training loss, which is not private")
    monitor: str = _field("off", "log clipping and norms: private, not_private or off")
    privacy_seed: Optional[int] = _field(
        None, "of noise and batches, for tests; secret"
    )
    repeat_noise: bool = _field(False, "of a run that goes on from a checkpoint")

    def __new__(cls, *args: Any, **kwargs: Any) -> "PrivacyArguments":
        """Refuses names that TrainingArguments has."""
        for name in _TAKEN.keys() & kwargs.keys():
            raise Refused(
                f"PrivacyArguments has no {name}, which is TrainingArguments'.",
                parameter=name,
                remedy=f"Write {_TAKEN[name]}={kwargs[name]!r}.",
            )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        bound: Any = self.per_sample_max_grad_norm
        if isinstance(bound, (list, tuple)) and len(bound) == 1:  # a command line's
            self.per_sample_max_grad_norm = bound = bound[0]
        if not all(c > 0 for c in (bound if isinstance(bound, list) else [bound])):
            raise Refused(
                f"per_sample_max_grad_norm={bound} is not positive.",
                parameter="per_sample_max_grad_norm",
                remedy="Give a number above zero, such as 1.",
            )
        if not 0 < (self.target_delta or 0) < 1:
            raise Refused(
                f"target_delta must be between 0 and 1, got {self.target_delta}.",
                parameter="target_delta",
                remedy="Choose it below one over the number of records.",
            )
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise Refused(
                "Give either target_epsilon or noise_multiplier; got "
                f"{self.target_epsilon} and {self.noise_multiplier}.",
                parameter="target_epsilon",
                remedy="The noise is chosen for the one, or is the other.",
            )
        if self.target_epsilon is not None and not self.target_epsilon > 0:
            raise Refused(
                f"target_epsilon={self.target_epsilon} is not positive.",
                parameter="target_epsilon",
                remedy="Give a number above zero, such as 8.",
            )
        if self.noise_multiplier is not None and not self.noise_multiplier >= 0:
            raise Refused(
                f"noise_multiplier={self.noise_multiplier} is negative.",
                parameter="noise_multiplier",
                remedy="Give zero, which is no privacy, or more.",
            )
        if self.privacy_seed is not None and self.privacy_seed < 0:
            raise Refused(
                f"privacy_seed={self.privacy_seed} is negative.",
                parameter="privacy_seed",
                remedy="Give a whole number from zero, or none.",
            )
        for name, known in (
            ("clipping", CLIPPINGS),
            ("grad_sample_mode", MODES),
            ("accountant", ("prv_bounds", "prv", "rdp")),
            ("monitor", ("off", "private", "not_private")),
        ):
            if getattr(self, name) not in known:
                raise Refused(
                    f"{name}={getattr(self, name)!r} is not one of "
                    f"{', '.join(map(repr, known))}.",
                    parameter=name,
                    remedy="Give one of these.",
                )
        if self.max_batch_size is not None and not self.poisson_sampling:
            raise Refused(
                f"max_batch_size={self.max_batch_size} with poisson_sampling=False, "
                "whose batches are all of one size.",
                parameter="max_batch_size",
                remedy="Leave one of them out.",
            )
        if self.target_epsilon is not None and not self.poisson_sampling:
            raise Refused(
                "No target_epsilon can be kept with poisson_sampling=False: "
                "accountants know Poisson sampling alone.",
                parameter="poisson_sampling",
                remedy="Give noise_multiplier.",
            )
