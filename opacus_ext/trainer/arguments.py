"""The privacy of a run of PrivateTrainer, as arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, List, Optional

from opacus_ext.clipping import CLIPPINGS
from opacus_ext.data.sampling import plain_count
from opacus_ext.engine import INDEPENDENT
from opacus_ext.optimizers.adaptive import ADAPTIVE
from opacus_ext.private_training import check_budget, check_noise, check_random
from opacus_ext.refused import Refused, check_argument, check_number
from opacus_ext.registry import MODES
from opacus_ext.supported import Run, refuse

#: Ways to draw batches, see PrivacyArguments.
POISSON, ALLOCATION, BALLS_IN_BINS = "poisson", "allocation", "balls_in_bins"


def _field(default: Any, text: str, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, **more})


@dataclass
class PrivacyArguments:
    """
    The privacy of a run. ``HfArgumentParser`` takes it beside ``TrainingArguments``.

    The unit of privacy is one record of the training set.

    Attributes:
        target_delta: delta of the guarantee, below one over the number of records. It
            is needed: without it PrivateTrainer ends in an error that offers one
        target_epsilon: the most that all steps spend; the noise is chosen for it
        noise_multiplier: instead of ``target_epsilon``
        noise: "independent" from step to step; "banded", correlated noise for which the
            number of bands is chosen (``target_epsilon`` must be given); or a strategy
            of correlated noise, such as :class:`opacus_ext.optimizers.Banded`
        per_sample_max_grad_norm: the bound of each record's gradient; for
            ``clipping="per_layer"`` a list, in the order of the optimizer's parameters
        clipping: "flat", "automatic", "normalized", "per_layer", "adaptive" or one that
            was registered
        target_unclipped_quantile: the fraction of records that "adaptive" clipping
            leaves as they are
        grad_sample_mode: "auto", "ghost_bk", "ghost", "scan" or "hooks"
        shared: names of inputs made by data_collator that all records of a batch
            share, such as a table of positions; all other inputs have one row for each
            record
        accountant: "prv_bounds", whose epsilon is an upper bound, "prv" or "rdp" ("gdp"
            of Opacus can report too little)
        log_loss: logs the training loss, which is not private
        log_draws: logs how many records a step drew, as "drawn", the mean since the log
            before. It is not private: it tells of the number of records, which epsilon
            does not cover
        monitor: "private" logs clipping and gradient norms by
            :class:`opacus_ext.monitor.Monitor`, within the same epsilon; "off" logs
            none
        privacy_seed: of noise and batches, for tests. By default it is secret, and does
            not depend on ``TrainingArguments.seed``
        repeat_noise: a run that goes on from a checkpoint has the noise that the run
            would have had without the interruption. Two runs from one checkpoint then
            have the same noise, so that their difference has none, and no epsilon
            covers that
        secure_mode: draws noise and batches by random numbers of the operating system,
            and noise without the traces of floating-point numbers; in one process
        public_records: a number of records that does not depend on the data, from which
            sampling rate and steps come: see ``make_private``
        sampling: how batches are drawn: "poisson", each record with the same
            probability; "allocation", each record in one batch of an epoch, drawn anew
            each epoch; "balls_in_bins", each record in the same batch of all epochs

    Raises:
        Refused: for arguments that do not fit

    Example:
        >>> privacy = PrivacyArguments(target_epsilon=8, target_delta=1e-5)
        >>> privacy.grad_sample_mode, privacy.per_sample_max_grad_norm
        ('auto', 1.0)
    """

    target_delta: Optional[float] = _field(
        None, "needed: delta of the guarantee, below one over the number of records"
    )
    target_epsilon: Optional[float] = _field(None, "the most that all steps spend")
    noise_multiplier: Optional[float] = _field(None, "instead of a target epsilon")
    per_sample_max_grad_norm: float = _field(
        1.0, "bound of each record's gradient; a list for per_layer", nargs="+"
    )
    clipping: str = _field("flat", "flat, automatic, normalized, per_layer or adaptive")
    target_unclipped_quantile: float = _field(0.5, "of adaptive clipping")
    grad_sample_mode: str = _field("auto", "auto, ghost_bk, ghost, scan or hooks")
    shared: Optional[List[str]] = _field(
        None, "names of inputs that all records share", nargs="*"
    )
    accountant: str = _field("prv_bounds", "prv_bounds, prv or rdp")
    log_loss: bool = _field(True, "log the training loss, which is not private")
    log_draws: bool = _field(False, "log how many records were drawn, not private")
    monitor: str = _field("off", "log clipping and norms: private or off")
    privacy_seed: Optional[int] = _field(None, "of noise and batches, for tests")
    repeat_noise: bool = _field(False, "of a run that goes on from a checkpoint")
    secure_mode: bool = _field(False, "random numbers of the operating system")
    public_records: Optional[int] = _field(None, "a number known without the data")
    noise: str = _field(INDEPENDENT, "independent, or banded, which is correlated")
    sampling: str = _field(POISSON, "poisson, allocation or balls_in_bins")

    def __post_init__(self) -> None:
        bound: Any = self.per_sample_max_grad_norm
        if isinstance(bound, (list, tuple)) and len(bound) == 1:  # a command line's
            self.per_sample_max_grad_norm = bound = bound[0]
        for each in bound if isinstance(bound, (list, tuple)) else [bound]:
            check_number("per_sample_max_grad_norm", each)
        check_number(
            "target_unclipped_quantile", self.target_unclipped_quantile, below=1
        )
        check_argument(
            "shared",
            self.shared,
            not isinstance(self.shared, str),
            "a list of names",
            f"Give [{self.shared!r}].",
        )
        self.public_records = plain_count(self.public_records)
        if self.public_records is not None:
            check_number("public_records", self.public_records, whole=True)
        mode, clipping = self.grad_sample_mode, self.clipping
        noise = check_noise(self.noise, self.target_epsilon, self.secure_mode)
        refuse(Run("PrivateTrainer", mode=mode, clipping=clipping, noise=noise))
        fixed = {"privacy_seed": self.privacy_seed, "repeat_noise": self.repeat_noise}
        check_random(self.secure_mode, **fixed)
        if self.target_delta is not None:
            check_number("target_delta", self.target_delta, below=1)
        check_budget(self.target_epsilon, self.noise_multiplier)
        for name, choices in (
            ("clipping", (*CLIPPINGS, ADAPTIVE)),
            ("grad_sample_mode", MODES),
            ("accountant", ("prv_bounds", "prv", "rdp")),
            ("monitor", ("off", "private")),
            ("sampling", (POISSON, ALLOCATION, BALLS_IN_BINS)),
        ):
            if getattr(self, name) not in choices:
                raise Refused(
                    f"{name}={getattr(self, name)!r} is not one of "
                    f"{', '.join(map(repr, choices))}.",
                    parameter=name,
                    remedy="Give one of these.",
                )
