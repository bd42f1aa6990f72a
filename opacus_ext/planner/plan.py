"""What to train, and how, with so many users, so much privacy and so much compute.

The questions and their answers are those of "Scaling laws for differentially private
language models": configurations of model size, batch size and steps are enumerated,
noise is calibrated for each, a law tells the loss of each, and the best is the plan.

Configurations lie on a fixed lattice, so that a larger budget has all that a smaller
one has: more privacy, users or compute never plan a worse loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from scipy.interpolate import make_interp_spline
from scipy.optimize import brentq
from scipy.special import log_ndtr, logsumexp
from scipy.stats import binom

from opacus_ext.planner import calibration
from opacus_ext.planner.laws import Fit
from opacus_ext.planner.probe import Probe
from opacus_ext.planner.surface import Surface
from opacus_ext.refused import Refused

Range = Optional[Tuple[float, float]]

DELTA = 1e-8  # the paper's, for any number of users
PAPER_STEPS = 1e3, 8.2e6
NOISE_NORM = 0.2
MOSTLY_NOT_PRIVATE = 100.0  # an epsilon, see _noise_by_counts
SIZES_PER_DECADE, BATCHES_PER_OCTAVE, STEPS_PER_OCTAVE = 25, 4, 8


def compute(parameters: Any, batch_size: Any, steps: Any, tokens: Any) -> Any:
    """
    Floating-point operations of a training run: C = 6 M B T S.

    Args:
        parameters: M
        batch_size: B, examples a step
        steps: T
        tokens: S, tokens of an example

    Example:
        >>> f"{compute(4.6e6, 510, 1.8e3, 512):.1e}"  # table 2: N = 1e5, epsilon 1
        '1.3e+16'
    """
    return 6.0 * parameters * batch_size * steps * tokens


# -- laws --------------------------------------------------------------------------


@dataclass(frozen=True)
class LossModel:
    """
    What a plan expects of a configuration.

    Attributes:
        loss: of (parameters, batch_size, steps, ratio), which broadcast; nan where the
            law says nothing
        parameters: the sizes it may be asked for, least and most
        steps: the steps it may be asked for
        tokens: S, of the examples that it was measured on; 0 for any
        batch_size: the physical batch that it was measured with; 0 if that is unknown
        private: whether its losses are of private training. If not they are a bound:
            no private run is expected to get below
        source: what it rests on, for people
        excess: of a bound: of (parameters, ratio), how much more noise there is than
            a plan should have; above 1 the least of it is planned
        measured_steps: up to which its curves were measured; beyond, extrapolated
        learning_rate: of (parameters, steps, ratio), if that is known
        interval: of (parameters, steps, ratio), low and high, if that is known
    """

    loss: Callable[..., np.ndarray]
    parameters: Tuple[float, float]
    steps: Tuple[float, float]
    tokens: int
    batch_size: int
    private: bool
    source: str
    measured_steps: float = math.inf
    learning_rate: Optional[Callable[..., float]] = None
    interval: Optional[Callable[..., Tuple[float, float]]] = None
    excess: Optional[Callable[..., np.ndarray]] = None

    @classmethod
    def of_surface(
        cls, surface: Surface, source: str, tokens: int = 0, batch_size: int = 0
    ) -> LossModel:
        """A fitted surface: between and within what was measured."""

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            return surface.loss(parameters, steps, ratio, outside="nan")

        ranges = surface.ranges
        return cls(
            loss,
            tuple(ranges["parameters"]),
            tuple(ranges["steps"]),
            tokens,
            batch_size,
            True,
            source,
            ranges["measured_steps"][1],
            surface.learning_rate,
            None if surface.samples is None else surface.interval,
        )

    @classmethod
    def of_fit(
        cls,
        fit: Fit,
        parameters: Tuple[float, float],
        steps: Tuple[float, float] = PAPER_STEPS,
        tokens: int = 0,
        batch_size: int = 0,
    ) -> LossModel:
        """
        A parametric law of private training: ``private`` or ``private_sigmoid`` of
        :mod:`opacus_ext.planner.laws` (L1 and L2 of the paper's appendix E).
        """

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            return fit.predict(
                parameters=parameters, examples=batch_size * steps, ratio=ratio
            )

        source = f"{fit.law.name}, fitted to {fit.rows} rows"
        return cls(loss, parameters, steps, tokens, batch_size, True, source)

    @classmethod
    def bound(
        cls,
        fit: Fit,
        tokens: int,
        noise_norm: float = NOISE_NORM,
        parameters: Tuple[float, float] = (1e4, 1e12),
        steps: Tuple[float, float] = PAPER_STEPS,
    ) -> LossModel:
        """
        Where no private run was measured: a law of non-private training, as a bound.

        The noise in the mean gradient has the norm ratio * sqrt(parameters), and the
        gradient's is at most 1. Of the configurations whose noise is no larger than
        ``noise_norm`` the one with the lowest bound is planned; where there is none,
        the one with the least noise. How much loss the noise costs, only measurements
        can tell.

        Args:
            fit: of Chinchilla's form, in parameters and training tokens
            tokens: S, of an example
            noise_norm: the largest norm of the noise; the default is about what the
                best plans of the paper's table 2 have (median 0.18)
        """

        def loss(parameters: Any, batch_size: Any, steps: Any, ratio: Any) -> Any:
            seen = np.multiply(batch_size, steps) * float(tokens)
            return fit.predict(parameters=parameters, tokens=seen)

        def excess(parameters: Any, ratio: Any) -> Any:
            return ratio * np.sqrt(parameters) / noise_norm

        source = (
            f"a bound only: {fit.law.name}, without privacy, where the noise's norm is "
            f"at most {noise_norm:g} (the gradient's is 1 at most)"
        )
        return cls(loss, parameters, steps, 0, 0, False, source, excess=excess)


# -- budgets and plans -------------------------------------------------------------


@dataclass(frozen=True)
class Budget:
    """
    What there is to spend, and what is settled already.

    Attributes:
        users: N, units that privacy protects; a batch is drawn of them
        epsilon: of the whole run
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
        ValueError: for what is not positive, a delta of 1 or more, an empty range

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
                    f"{'' if unlimited else ' and finite'}; got {value!r}."
                )
        if not 0 < self.delta < 1:
            raise Refused(f"delta must be between 0 and 1; got {self.delta!r}.")
        for name in ("parameters", "batch_size", "steps"):
            value = getattr(self, name)
            if value is not None and not 1 <= value[0] <= value[1] < math.inf:
                raise Refused(
                    f"{name} must be a range of numbers of 1 or more, low before high; "
                    f"got {value!r}."
                )
        if self.batch_size and self.batch_size[0] > self.examples:
            raise Refused(
                f"batch_size must be at most {self.examples:g}, all examples; got "
                f"{self.batch_size[0]:g}."
            )

    @property
    def examples(self) -> float:
        """Of these a batch is drawn: users, or all of their records."""
        return self.users * (self.records_per_user if self.sampling == "records" else 1)


@dataclass(frozen=True)
class Plan:
    """
    A configuration, and what is expected of it.

    Attributes:
        parameters: M
        batch_size: B
        steps: T
        examples: to train on, a multiple of B: Opacus makes as many batches an epoch
            as a loader has, and samples at that rate
        flops: C = 6 M B T S
        tokens_per_parameter: B T S / M
        noise_multiplier: sigma, relative to the bound of a clipped gradient
        ratio: the noise-batch ratio, sigma / B
        amplified: whether batches are Poisson samples; if not, fixed batches of every
            epoch, whose noise is lower here
        noise_norm: of the noise in the mean gradient, whose own is at most 1
        loss: in nats a token; of a law that is not private, a lower bound, and inf
            where there is too much noise for it to mean anything
        private_law: whether ``loss`` was fitted to private training
        advantage: of membership inference at most, delta at epsilon 0
        learning_rate: None where the law does not know
        seconds: on the probed machine; None without a probe
        interval: of the loss, 95 %; None where the law does not know
        budget: what it was planned for
    """

    parameters: int
    batch_size: int
    steps: int
    examples: int
    flops: float
    tokens_per_parameter: float
    noise_multiplier: float
    ratio: float
    noise_norm: float
    amplified: bool
    loss: float
    private_law: bool
    advantage: float
    learning_rate: Optional[float]
    seconds: Optional[float]
    interval: Optional[Tuple[float, float]]
    budget: Budget

    def arguments(self) -> Dict[str, Any]:
        """
        For ``PrivacyEngine(accountant="prv_bounds").make_private``, beside module,
        optimizer, criterion and a loader of ``examples`` with batches of
        ``batch_size``.

        The noise of Poisson samples of users is checked by the accountant, whose upper
        bound is no more than epsilon, and raised a little if it must be. See
        :meth:`notes` for what the engine's own epsilon means.
        """
        noise = self.noise_multiplier
        if self.amplified and self.budget.sampling == "users":
            noise = certified(
                noise,
                self.batch_size / self.examples,
                self.steps,
                self.budget.epsilon,
                self.budget.delta,
            )
        return dict(
            noise_multiplier=noise,
            # As measured: gradients brought to norm 1, whatever they were.
            max_grad_norm=0.1,
            clipping="normalised",
            grad_sample_mode="ghost_bk",
            poisson_sampling=self.amplified,
        )

    def notes(self) -> List[str]:
        """What must hold for epsilon to be that of the budget, for people."""
        budget, found = self.budget, []
        if not self.amplified:
            found.append(
                f"Batches are fixed: epsilon {budget.epsilon:g} is that of each example"
                " once an epoch. The engine counts Poisson samples: its get_epsilon "
                "does not hold here. Keep the batches whole (shuffle, drop_last)."
            )
        if budget.sampling == "records":
            found.append(
                f"Epsilon {budget.epsilon:g} is of a user with all of "
                f"{budget.records_per_user} records; the engine's get_epsilon is of "
                "one record."
            )
        elif budget.records_per_user > 1:
            found.append(
                "An item of the data set must be a user, and give one of their "
                "records, drawn anew each time."
            )
        return found

    def as_dict(self) -> Dict[str, Any]:
        """For JSON; what is unlimited is None."""
        found = asdict(self)
        found["budget"] = {
            k: None if v == math.inf else v for k, v in found["budget"].items()
        }
        found["make_private"] = self.arguments()
        found["notes"] = self.notes()
        return found


def certified(
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    epsilon: float,
    delta: float,
    most: float = 1.05,
) -> float:
    """
    The noise multiplier, raised until the accountant's upper bound is epsilon at most.

    Args:
        most: how much more than what was calibrated is still believed

    Raises:
        ArithmeticError: if that much more is not enough: the accountants disagree
    """
    from opacus_ext.accountants import PRVBoundsAccountant

    factor, step = 1.0, 1e-3
    while factor <= most:
        accountant = PRVBoundsAccountant()
        accountant.history = [(noise_multiplier * factor, sample_rate, int(steps))]
        if accountant.get_epsilon(delta) <= epsilon:
            return noise_multiplier * factor
        factor, step = factor + step, 2 * step
    raise ArithmeticError(
        f"noise_multiplier={noise_multiplier:g} was calibrated for epsilon={epsilon:g},"
        f" delta={delta:g}, {steps} steps at sample rate {sample_rate:g}; the "
        f"accountant finds more, up to {most} times that noise. Please report it."
    )


class Near(NamedTuple):
    """Configurations about as good as the best: least and largest of each."""

    parameters: Tuple[int, int]
    batch_size: Tuple[int, int]
    steps: Tuple[int, int]
    count: int


class NotPrivate(NamedTuple):
    """The best configuration without noise."""

    parameters: int
    batch_size: int
    steps: int
    loss: float


class Candidates:
    """
    All configurations of a budget, with their noise and expected loss.

    Args:
        budget: its ``flops`` are not a bound here; :meth:`best` takes one
        law: what tells the loss
        probe: what tells time and memory; needed for a budget that bounds them

    Attributes:
        parameters: ``[M]``
        batch_size: ``[B]``
        steps: ``[T]``
        ratio: ``[B, T]``
        noise_multiplier: ``[B, T]``
        amplified: ``[B, T]``
        flops: ``[M, B, T]``
        loss: ``[M, B, T]``; nan where the law says nothing, or a bound is broken; above
            1000 where a bound on the loss has too much noise to mean anything

    Raises:
        ValueError: for ranges that have nothing in common with the law's, tokens other
            than those it was measured on, and bounds on time or memory without a probe
    """

    def __init__(self, budget: Budget, law: LossModel, probe: Optional[Probe] = None):
        if law.tokens and law.tokens != budget.tokens:
            raise Refused(
                f"tokens={budget.tokens}: the law was measured on examples of "
                f"{law.tokens} tokens, and says nothing of others. Plan with "
                f"tokens={law.tokens}, or measure."
            )
        bounded = min(budget.seconds, budget.memory) < math.inf
        if bounded and probe is None:
            raise Refused("A bound on seconds or memory needs a probe of the machine.")
        self.budget, self.law, self.probe = budget, law, probe
        self.parameters = _lattice(
            "parameters", law.parameters, budget.parameters, 10, SIZES_PER_DECADE
        )
        self.batch_size = _lattice(
            "batch_size", (1, budget.examples), budget.batch_size, 2, BATCHES_PER_OCTAVE
        )
        self.steps = _lattice("steps", law.steps, budget.steps, 2, STEPS_PER_OCTAVE)
        self.noise_multiplier, self.ratio, self.amplified = _noise_grid(
            budget, self.batch_size, self.steps
        )
        batch, steps = self.batch_size[:, None], self.steps[None, :]
        size = self.parameters[:, None, None]
        self.flops = compute(size, batch, steps, budget.tokens)
        self.loss = np.array(law.loss(size, batch, steps, self.ratio), dtype=float)
        self.loss = np.broadcast_to(self.loss, self.flops.shape).copy()
        if law.excess is not None:
            excess = law.excess(size, self.ratio)
            self.loss = np.where(excess > 1, 1000 * excess, self.loss)
        if probe is not None:
            late = probe.seconds(size, batch, steps, budget.tokens) > budget.seconds
            self.loss[late] = np.nan
            if budget.memory < math.inf:  # some systems don't tell memory
                large = probe.memory(size) > budget.memory
                self.loss[large.reshape(-1)] = np.nan

    def best(self, flops: Optional[float] = None) -> Plan:
        """
        The configuration of the lowest loss within a compute budget.

        Args:
            flops: C at most; the budget's if not given

        Raises:
            ValueError: if no configuration is left; the message says what stands in
                the way
        """
        flops = self.budget.flops if flops is None else flops
        within = self.flops <= flops * (1 + 1e-9)
        if not within.any():
            raise Refused(
                f"flops={flops:.3g} is less than the smallest configuration takes, "
                f"{self.flops.min():.3g} ({self.parameters[0]:.3g} parameters, a batch "
                f"of {self.batch_size[0]:g}, {self.steps[0]:g} steps)."
            )
        loss = np.where(within & np.isfinite(self.loss), self.loss, np.inf)
        if np.isinf(loss).all():
            raise Refused(self._why_nothing(within))
        # Of equal losses the cheapest.
        least = loss.min()
        same = np.where(loss <= least, self.flops, np.inf)
        return self.plan(np.unravel_index(same.argmin(), same.shape), flops)

    def _why_nothing(self, within: np.ndarray) -> str:
        budget = self.budget
        if min(budget.seconds, budget.memory) < math.inf:
            free = replace(budget, seconds=math.inf, memory=math.inf)
            rest = Candidates(free, self.law, self.probe)
            if np.isfinite(rest.loss[within]).any():
                return (
                    f"No configuration keeps to seconds={budget.seconds:g} and "
                    f"memory={budget.memory:g} on this machine."
                )
        ratio = np.broadcast_to(self.ratio, within.shape)[within].min()
        return (
            f"epsilon={budget.epsilon:g} with {budget.users:g} users leaves a "
            f"noise-batch ratio of {ratio:.2g} at the least within this compute, more "
            f"than the law knows ({self.law.source}). More epsilon, users or compute "
            "are needed, or smaller models and larger ratios measured."
        )

    def plan(self, at: Tuple[int, int, int], flops: float = math.inf) -> Plan:
        """The configuration at an index of ``loss``."""
        i, j, k = (int(x) for x in at)
        size, batch, steps = self.parameters[i], self.batch_size[j], self.steps[k]
        law, budget = self.law, self.budget
        parts = _parts(budget, batch)
        # Of the grid's noise, which is interpolated, nothing is reported.
        noise, ratio, amplified = _noise(budget, batch, steps)
        loss = float(law.loss(size, batch, steps, ratio))
        at_grid = float(self.loss[i, j, k])
        if law.excess is not None and at_grid >= 1000:
            loss = at_grid = math.inf
        known = law.learning_rate and float(law.learning_rate(size, steps, ratio))
        between = law.interval and law.interval(size, steps, ratio)
        return Plan(
            parameters=int(size),
            batch_size=int(batch),
            steps=int(steps),
            examples=int(batch * parts),
            flops=float(self.flops[i, j, k]),
            tokens_per_parameter=float(batch * steps * budget.tokens / size),
            noise_multiplier=float(noise),
            ratio=float(ratio),
            noise_norm=float(ratio * math.sqrt(size)),
            amplified=bool(amplified),
            # At the very edge of what the law knows, the grid's noise is the lower one.
            loss=loss if math.isfinite(loss) else at_grid,
            private_law=law.private,
            advantage=_advantage(
                budget, float(noise), float(parts), float(steps), bool(amplified)
            ),
            learning_rate=known if known and known > 0 else None,
            seconds=(
                float(self.probe.seconds(size, batch, steps, budget.tokens))
                if self.probe
                else None
            ),
            interval=tuple(map(float, between)) if between is not None else None,
            budget=replace(budget, flops=float(flops)),
        )

    def near(self, flops: Optional[float] = None, within: float = 0.01) -> Near:
        """
        The region of configurations whose loss is almost the best one's.

        Args:
            flops: C at most; the budget's if not given
            within: by what share their loss may be higher
        """
        flops = self.budget.flops if flops is None else flops
        self.best(flops)  # or why there is none
        loss = np.where(self.flops <= flops * (1 + 1e-9), self.loss, np.nan)
        ok = loss <= np.nanmin(loss) * (1 + within)
        i, j, k = np.nonzero(ok)
        of = lambda axis, at: (int(axis[at.min()]), int(axis[at.max()]))  # noqa: E731
        return Near(
            of(self.parameters, i), of(self.batch_size, j), of(self.steps, k), len(i)
        )

    def by_batch_size(
        self,
        flops: Optional[float] = None,
        within: float = math.inf,
        most: Optional[int] = None,
    ) -> List[Plan]:
        """
        The best plan of each batch size within a compute budget: equal in epsilon, not
        in what a membership test gains (figure 15).

        Args:
            within: of the batch sizes whose loss is at most this share above the best
            most: no more than so many of them, evenly spaced
        """
        flops = self.budget.flops if flops is None else flops
        loss = np.where(self.flops <= flops * (1 + 1e-9), self.loss, np.nan)
        loss = np.where(np.isfinite(loss), loss, np.inf)
        lowest = loss.min(axis=(0, 2))
        chosen = np.flatnonzero(
            (lowest < np.inf) & (lowest <= lowest.min() * (1 + within))
        )
        if most and len(chosen) > most:
            chosen = chosen[np.linspace(0, len(chosen) - 1, most).round().astype(int)]
        found = [
            np.unravel_index(loss[:, j].argmin(), loss[:, j].shape) for j in chosen
        ]
        return [self.plan((i, j, k), flops) for j, (i, k) in zip(chosen, found)]

    def not_private(self, flops: Optional[float] = None) -> Optional[NotPrivate]:
        """
        The best configuration of training without noise, of this compute; None if
        there is none, or the law knows no noise-free training.

        Batches are the physical ones of the measurements, as in the paper: without
        noise larger ones gain little. Of a bound, any batch is as good.
        """
        flops = self.budget.flops if flops is None else flops
        batch = self.law.batch_size
        if not batch:
            return None
        size, steps = self.parameters[:, None], self.steps[None, :]
        loss = np.array(self.law.loss(size, batch, steps, 0.0), dtype=float)
        spent = compute(size, batch, steps, self.budget.tokens)
        loss = np.where((spent <= flops * (1 + 1e-9)) & np.isfinite(loss), loss, np.inf)
        i, k = np.unravel_index(loss.argmin(), loss.shape)
        if np.isinf(loss[i, k]):
            return None
        return NotPrivate(int(size[i, 0]), batch, int(steps[0, k]), float(loss[i, k]))

    def saturating(self, within: float = 0.01) -> Plan:
        """
        The plan at the least compute whose loss is within a share of the best there is
        (appendix C.1, table 2): beyond it compute hardly helps.
        """
        self.best(math.inf)  # or why there is none
        enough = self.loss <= np.nanmin(self.loss) * (1 + within)
        return self.best(float(self.flops[enough].min()))

    def frontier(self, flops: Sequence[float]) -> List[Optional[Plan]]:
        """The best plan at each compute budget; None where there is no plan."""
        plans: List[Optional[Plan]] = []
        for budget in flops:
            try:
                plans.append(self.best(float(budget)))
            except ValueError:
                plans.append(None)
        return plans

    def expected(self, parameters: float, batch_size: float, steps: float) -> float:
        """The loss of one configuration, on the lattice or not."""
        ratio = _noise(self.budget, batch_size, steps)[1]
        return float(self.law.loss(parameters, batch_size, steps, ratio))

    def savings(self, parameters: float, batch_size: float, steps: float) -> Savings:
        """
        What planning saves, compared with a configuration that someone would choose.

        Args:
            parameters: of the baseline; so are the others

        Raises:
            ValueError: if the law says nothing of the baseline, or its batch is larger
                than all examples
        """
        if not 1 <= batch_size <= self.budget.examples:
            raise Refused(
                f"The baseline's batch_size must be from 1 to "
                f"{self.budget.examples:g}, all examples; got {batch_size:g}."
            )
        loss = self.expected(parameters, batch_size, steps)
        if not math.isfinite(loss):
            raise Refused(
                f"The law says nothing of a model of {parameters:g} parameters with "
                f"batches of {batch_size:g} and {steps:g} steps at this budget: it "
                f"knows {self.law.parameters} parameters and {self.law.steps} steps, "
                "and ratios up to its largest."
            )
        spent = float(compute(parameters, batch_size, steps, self.budget.tokens))
        enough = self.loss <= loss
        needed = float(self.flops[enough].min()) if enough.any() else spent
        try:
            instead = self.best(spent).loss
        except ValueError:
            instead = loss
        return Savings(loss, min(instead, loss), spent, min(needed, spent))


class Savings(NamedTuple):
    """
    A baseline beside the best.

    Attributes:
        loss: of the baseline
        best_loss: of the plan with the same compute
        flops: of the baseline
        needed_flops: of the cheapest plan that is no worse than the baseline
    """

    loss: float
    best_loss: float
    flops: float
    needed_flops: float

    @property
    def share(self) -> float:
        """Share of the baseline's compute that is saved at equal loss."""
        return 1 - self.needed_flops / self.flops


class Doubling(NamedTuple):
    """What twice of a budget would change: relative decrease of loss, or of noise."""

    epsilon: float
    users: float
    flops: float


def doubled_loss(
    budget: Budget, law: LossModel, probe: Optional[Probe] = None
) -> Tuple[Plan, Doubling]:
    """
    The plan of a budget, and how much lower its loss would be (in shares of it) with
    twice the epsilon, users or compute; nan where no loss is expected.

    Raises:
        ValueError: as :meth:`Candidates.best`
    """
    table = Candidates(budget, law, probe)
    plan = table.best()

    def gain(**changed: float) -> float:
        other = replace(budget, **changed)
        return less(Candidates(other, law, probe).best())

    def less(other: Plan) -> float:
        return 1 - other.loss / plan.loss if plan.loss < math.inf else math.nan

    return plan, Doubling(
        gain(epsilon=2 * budget.epsilon),
        gain(users=2 * budget.users),
        less(table.best(2 * budget.flops)),
    )


def doubled_noise(plan: Plan) -> Dict[str, float]:
    """
    What twice the epsilon, batch or users would take off the plan's noise-batch ratio,
    ``ratio(x) / ratio(2 x) - 1``; a batch that can't be doubled is left out.
    """
    budget, batch = plan.budget, plan.batch_size
    twice = {
        "epsilon": (replace(budget, epsilon=2 * budget.epsilon), batch),
        "batch_size": (budget, 2 * batch),
        "users": (replace(budget, users=2 * budget.users), batch),
    }
    return {
        name: plan.ratio / float(_noise(other, size, plan.steps).ratio) - 1
        for name, (other, size) in twice.items()
        if size <= other.examples
    }


# -- the lattice -------------------------------------------------------------------


def _lattice(
    name: str, known: Tuple[float, float], wanted: Range, base: int, points: int
) -> np.ndarray:
    """
    Whole numbers, ``points`` to a factor ``base``, the same for every budget: a wider
    range has all that a narrower one has. Ends that were asked for are in it.
    """
    low, high = known
    if wanted is not None:
        low, high = max(low, wanted[0]), min(high, wanted[1])
        if low > high:
            raise Refused(
                f"{name} from {wanted[0]:g} to {wanted[1]:g} is outside of what is "
                f"known: from {known[0]:g} to {known[1]:g}."
            )
    first = math.floor(points * math.log(low, base))
    last = math.ceil(points * math.log(high, base))
    values = np.round(base ** (np.arange(first, last + 1) / points))
    values = values[(values >= low) & (values <= high)]
    # An end that was asked for, not one that a budget set: a larger one moves that.
    ends = [] if wanted is None else [math.ceil(wanted[0]), math.floor(wanted[1])]
    if name == "parameters" and wanted is None:
        ends = [math.ceil(low), math.floor(high)]
    values = np.unique([*values, *(e for e in ends if low <= e <= high)])
    if not len(values):
        raise Refused(f"There is no whole number of {name} in [{low:g}, {high:g}].")
    return values


def _parts(budget: Budget, batch: Any) -> np.ndarray:
    """
    Batches of an epoch. Opacus samples at rates of 1 / whole number: so many whole
    batches are made of the examples, and what is over stays out. More users then never
    mean more noise.
    """
    return np.floor(budget.examples / np.asarray(batch, dtype=float) * (1 + 1e-12))


def _noise(budget: Budget, batch: Any, steps: Any, **changed: Any) -> Any:
    """Noise multiplier, ratio and whether batches are Poisson; arguments broadcast."""
    if budget.epsilon > MOSTLY_NOT_PRIVATE and budget.sampling == "users":
        return _noise_by_counts(budget, batch, steps, **changed)
    names = "amplification", "records_per_user", "sampling"
    options = {name: getattr(budget, name) for name in names} | changed
    users = batch * _parts(budget, batch)
    if budget.sampling == "records":
        users = users / budget.records_per_user
    given = budget.epsilon, budget.delta, steps, batch, users
    found = calibration.calibrate(*given, **options)
    # No noise at all is within the letter of a delta that is more than the chance of
    # ever being sampled. It is not what anyone means by private.
    none = np.asarray(found.noise_multiplier) == 0
    if none.any() and options["amplification"] == "lower":
        fixed = calibration.calibrate(*given, **{**options, "amplification": "none"})
        noise, ratio = (
            np.where(none, b, a) for a, b in zip(found[:2], fixed[:2], strict=True)
        )
        found = calibration.Calibration(noise, ratio, found.amplified & ~none)
    return found


def _noise_by_counts(
    budget: Budget, batch: Any, steps: Any, amplification: Optional[str] = None
) -> calibration.Calibration:
    """
    The same for an epsilon at which the exact calibration of tiny noise takes seconds
    a cell, and hardly matters: there a bound, never too little and up to 3 % too much.

    A user who is in j of T batches has Gaussian noise against sqrt(j). The divergence
    is convex in both laws, so with any weights w_j of the counts, whose probabilities
    are p_j, delta(epsilon) <= sum_j p_j delta_j(epsilon + log(w_j / p_j)), delta_j of
    the Gaussian mechanism. Here they are even.
    """
    how = amplification or budget.amplification
    batch, steps = np.broadcast_arrays(batch, steps)
    parts = _parts(budget, batch)
    fixed = calibration.gaussian_noise_multiplier(
        budget.epsilon, budget.delta, np.ceil(steps / parts)
    )
    noise, amplified = np.array(fixed), np.zeros(batch.shape, dtype=bool)
    if how != "none":
        every = zip(parts.ravel().tolist(), steps.ravel().tolist())
        cells = [_by_counts(budget.epsilon, budget.delta, t, 1 / k) for k, t in every]
        poisson = np.reshape(cells, batch.shape)
        amplified = (poisson <= noise) | (how == "poisson")
        noise = np.where(amplified, poisson, noise)
    return calibration.Calibration(noise, noise / batch, amplified)


@lru_cache(maxsize=100_000)
def _by_counts(epsilon: float, delta: float, steps: float, rate: float) -> float:
    if rate == 1:
        return float(calibration.gaussian_noise_multiplier(epsilon, delta, steps))
    low, high = binom.ppf(delta / 1e3, steps, rate), binom.isf(delta / 1e3, steps, rate)
    counts = np.arange(max(low, 1), max(high, 1) + 1)
    log_p = binom.logpmf(counts, steps, rate)
    at = np.maximum(epsilon - log_p - math.log(len(counts)), 1e-9)
    rest = binom.cdf(counts[0] - 1, steps, rate) if counts[0] > 1 else 0.0
    rest += binom.sf(counts[-1], steps, rate)

    def excess(log_noise: float) -> float:
        mu = np.sqrt(counts) / math.exp(log_noise)
        a, b = log_ndtr(mu / 2 - at / mu), at + log_ndtr(-mu / 2 - at / mu)
        of_counts = log_p + a + np.log1p(-np.exp(np.minimum(b - a, -1e-16)))
        return np.logaddexp(logsumexp(of_counts), math.log(rest + 1e-300)) - math.log(
            delta
        )

    noise = math.exp(brentq(excess, math.log(1e-4), math.log(1e5)))
    if noise < 0.08:
        return noise
    return float(calibration.noise_multiplier(epsilon, delta, steps, rate))


def _noise_grid(
    budget: Budget, batch: np.ndarray, steps: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    The same of a grid, ``[B, T]``. Calibrated at powers of two of rates and steps;
    between, how far the noise is off its central limit is interpolated: to 1 % at
    worst, mostly to 0.01 %. What is found is calibrated by itself.
    """
    key = replace(budget, flops=1, seconds=1, memory=1, tokens=1)
    key = replace(key, parameters=None, batch_size=None, steps=None)
    return _noise_of(key, tuple(batch), tuple(steps))


@lru_cache(maxsize=32)
def _noise_of(
    budget: Budget, batch: Tuple[float, ...], steps: Tuple[float, ...]
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    b, t = np.array(batch), np.array(steps)
    noise = _noise(budget, b[:, None], t, amplification="none").noise_multiplier
    amplified = np.zeros(noise.shape, dtype=bool)
    if budget.amplification != "none":
        parts = _parts(budget, b)
        octaves = 1 if budget.epsilon <= MOSTLY_NOT_PRIVATE else 3
        axes = (parts, _knots(parts, octaves)), (t, _knots(t, octaves))
        kp, kt = axes[0][1], axes[1][1]
        known = _noise(
            budget, (budget.examples / kp)[:, None], kt, amplification="poisson"
        ).noise_multiplier
        limit = _central_limit(budget, kp, kt)
        off = np.log(np.where(known > 0, known, limit) / limit)
        for axis, (wanted, knots) in enumerate(axes):
            degree = min(3, len(knots) - 1)
            if degree == 0:
                off = np.repeat(off, len(wanted), axis=axis)
                continue
            spline = make_interp_spline(np.log(knots), off, degree, axis=axis)
            off = spline(np.log(wanted))
        poisson = np.exp(off) * _central_limit(budget, parts, t)
        ever = -np.expm1(t * np.log1p(-1 / np.maximum(parts, 1 + 1e-12)[:, None]))
        poisson = np.where(ever > budget.delta, poisson, np.inf)  # see _noise
        amplified = (poisson <= noise) | (budget.amplification == "poisson")
        noise = np.where(amplified, poisson, noise)
    return noise, noise / b[:, None], amplified


def _knots(values: np.ndarray, octaves: int) -> np.ndarray:
    """Powers of two, the same for every range but for its ends."""
    inner = 2.0 ** np.arange(0, 100, octaves)
    low, high = values.min(), values.max()
    inside = (inner > 1.2 * low) & (inner < high / 1.2)
    return np.unique([low, *inner[inside], high])


def _central_limit(budget: Budget, parts: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """
    The noise of many steps, mu = q sqrt(T (exp(1 / sigma^2) - 1)), ``[parts, T]`` (Bu
    et al., "Deep learning with Gaussian differential privacy", 2020).
    """
    mu = 1 / calibration.gaussian_noise_multiplier(budget.epsilon, budget.delta)
    return 1 / np.sqrt(np.log1p((mu * parts[:, None]) ** 2 / steps))


@lru_cache(maxsize=1024)
def _advantage(
    budget: Budget, noise: float, parts: float, steps: float, amplified: bool
) -> float:
    records = budget.records_per_user if budget.sampling == "records" else 1
    if amplified:
        return float(calibration.delta(noise, 1 / parts, steps, 0.0, records))
    # In fixed batches all records of a user are in the same one at worst.
    times = math.ceil(steps / parts)
    return float(calibration.delta(noise / records, 1.0, times, 0.0))
