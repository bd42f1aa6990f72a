"""The best configuration for so many users, so much privacy and so much compute.

As in "Scaling laws for differentially private language models", configurations of model
size, batch size and steps are enumerated, noise is calibrated for each, a law predicts
the loss of each, and the best is the plan.

Configurations lie on a fixed lattice, so that a larger budget contains all
configurations of a smaller one: more privacy, users or compute never plan a worse loss.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np

from opacus_ext.accountants.solver import checked
from opacus_ext.data.sampling import Poisson
from opacus_ext.planner.budget import MOST_EPSILON, Budget, HopelessError, Range
from opacus_ext.planner.loss_model import (
    FINE_TUNE,
    MOST_LOSS,
    RULE,
    LossModel,
    compute,
)
from opacus_ext.planner.noise import (
    advantage,
    noise_grid,
    noise_of,
    six_digits,
    verified_noise,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused
from opacus_ext.tables import html_table, in_short

_NEAR_END = 1.1  # a point of the lattice of sizes, and of steps
# Points to a factor of two. Those of batches and steps divide those of sizes: at any
# size, batches and steps then leave the same share of the compute unused, which does
# not favor a size.
POINTS = {"parameters": 8, "trainable": 8, "batch_size": 4, "steps": 8}
_AXES = "parameters", "batch_size", "steps"


@dataclass(frozen=True)
class Near:
    """Configurations about as good as the best: least and largest of each."""

    parameters: Tuple[int, int]
    batch_size: Tuple[int, int]
    steps: Tuple[int, int]
    count: int


@dataclass(frozen=True)
class Plan:
    """
    A configuration, and what is expected of it.

    Attributes:
        parameters: M
        trainable: m of them: M, if the model is trained whole
        batch_size: B
        steps: T
        examples: N, each in a batch with probability B / N
        flops: C = (4 M + 2 m) B T S
        tokens_per_parameter: B T S / M
        noise_multiplier: sigma, relative to the bound of a clipped gradient
        ratio: the noise-batch ratio, sigma / B
        amplified: True for Poisson samples; False for fixed batches of every epoch,
            where their noise is lower
        noise_norm: of the noise in the mean gradient, whose own is at most 1
        loss: in nats a token, or a record where an example has one token; None for a
            rule of thumb
        kind: of the answer: "measured", "paper's law", "run without noise" or "rule of
            thumb"
        ends: by parameters, batch_size or steps at an end of its range: "lower" or
            "upper". The optimum lies there or beyond
        caveats: the same, and what is extrapolated, for people
        advantage: of membership inference at most, delta at epsilon 0
        learning_rate: None where the law does not know
        budget: what it was planned for
    """

    parameters: int
    trainable: int
    batch_size: int
    steps: int
    examples: int
    flops: float
    tokens_per_parameter: float
    noise_multiplier: float
    ratio: float
    noise_norm: float
    amplified: bool
    loss: Optional[float]
    kind: str
    ends: Dict[str, str]
    caveats: Tuple[str, ...]
    advantage: float
    learning_rate: Optional[float]
    budget: Budget

    @property
    def parts(self) -> int:
        """Physical batches of a logical one, in expectation."""
        return math.ceil(self.batch_size / self.budget.physical_batch_size)

    def arguments(self) -> Dict[str, Any]:
        """
        For ``PrivacyEngine(accountant="prv_bounds").make_private``, beside module,
        optimizer, criterion and a loader of ``examples``. ``sampling`` draws all
        ``steps`` batches in one epoch; the noise keeps to the accountant's upper bound.
        """
        return dict(self._make_private)

    @cached_property
    def _make_private(self) -> Dict[str, Any]:
        noise, budget = self.noise_multiplier, self.budget
        if not self.amplified:
            drawn: Dict[str, Any] = {"poisson_sampling": False}
        else:
            sampling = Poisson(expected_batch_size=self.batch_size, steps=self.steps)
            drawn = {"sampling": sampling}
            if budget.sampling == "users":
                spent = self.steps, budget.epsilon, budget.delta
                noise = verified_noise(noise, sampling, self.examples, *spent)
        # As measured: gradients brought to norm 1, whatever they were.
        clipping: Any = dict(max_grad_norm=0.1, clipping="normalized")
        return dict(
            noise_multiplier=six_digits(noise),
            **clipping,
            grad_sample_mode="ghost_bk",
            **drawn,
        )

    def notes(self) -> List[str]:
        """Conditions under which epsilon is the budget's, for people."""
        budget, found = self.budget, []
        if not self.amplified:
            found.append(
                f"Batches are fixed: epsilon {budget.epsilon:g} holds if each example "
                "is in one batch of an epoch at most. The engine counts Poisson "
                "samples: its get_epsilon does not hold here. Keep the batches whole "
                "(shuffle, drop_last)."
            )
        if budget.sampling == "records":
            found.append(
                f"Epsilon {budget.epsilon:g} is of a user with all of "
                f"{budget.records_per_user} records; the engine's get_epsilon is of "
                "one record."
            )
        elif budget.records_per_user > 1:
            found.append(
                "An item of the data set must be a user, and return one of their "
                "records, drawn anew each time."
            )
        return found

    def code(self) -> str:
        """Code to paste: imports, the engine, :meth:`arguments`, and the loop."""
        trained, parts = "", f"{self.parts:,}"
        if self.trainable != self.parameters:
            trained = f" (all but {self.trainable:,} parameters frozen)"
        if self.amplified:
            imports, sampling = "", "from opacus_ext.data import Poisson\n"
            loader, expected, batches = "DataLoader(dataset)", "", "parts"
            parts = f"about {parts}"
        else:
            imports, sampling = "from itertools import chain, islice, repeat\n\n", ""
            loader = (
                f"DataLoader(\n        dataset, batch_size={self.batch_size}, "
                "shuffle=True, drop_last=True\n    )"
            )
            expected = f"optimizer.expected_batch_size = {self.batch_size}\n"
            total = self.steps * self.parts
            batches = f"islice(chain.from_iterable(repeat(parts)), {total})"
        notes = "".join(f"# {note}\n" for note in self.notes())
        arguments = "\n".join(
            f"    {name}={self._sampling if name == 'sampling' else repr(value)},"
            for name, value in self.arguments().items()
        )
        return f"""\
{imports}from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

import opacus_ext  # the modes and arguments of make_private
{sampling}
{notes}# Yours: model{trained}, optimizer, criterion, a dataset of {self.examples:,} \
(inputs, targets).
engine = PrivacyEngine(accountant="prv_bounds")
model, optimizer, criterion, loader = engine.make_private(
    module=model,
    optimizer=optimizer,
    criterion=criterion,
    data_loader={loader},
{arguments}
)
{expected}with BatchMemoryManager(
    data_loader=loader,
    max_physical_batch_size={self.budget.physical_batch_size},  # what fits into memory
    optimizer=optimizer,
) as parts:
    for inputs, targets in {batches}:  # {self.steps:,} steps of {parts} parts
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()"""

    def trainer_code(self) -> str:
        """
        Code to paste for ``PrivateTrainer``, which calibrates the noise itself.

        Raises:
            Refused: for fixed batches and batches of records: it draws other ones
        """
        budget = self.budget
        if not self.amplified or budget.sampling == "records":
            raise Refused(
                "PrivateTrainer draws Poisson samples of the units that privacy "
                "protects; this plan has other batches.",
                parameter="code",
                remedy='Plan with amplification="poisson" and sampling="users", or '
                "take Plan.code().",
            )
        part = self.batch_size // self.parts
        notes = "".join(f"# {note}\n" for note in self.notes())
        rate = self.learning_rate
        learning_rate = f"        learning_rate={rate!r},\n" if rate else ""
        return f"""\
from transformers import TrainingArguments

from opacus_ext.trainer import PrivacyArguments, PrivateTrainer

{notes}# Yours: model, a dataset of {self.examples:,} records, with labels.
trainer = PrivateTrainer(
    model,
    TrainingArguments(
        "out",
        max_steps={self.steps},
        per_device_train_batch_size={part},
        # {part * self.parts:,} records a step; on several GPUs divide by their number.
        gradient_accumulation_steps={self.parts},
{learning_rate}    ),
    train_dataset=dataset,
    privacy=PrivacyArguments(
        target_epsilon={budget.epsilon!r},
        target_delta={budget.delta!r},
        per_sample_max_grad_norm=0.1,
        clipping="normalized",
    ),
)
trainer.train()"""

    @property
    def _sampling(self) -> str:
        return f"Poisson(steps={self.steps}, expected_batch_size={self.batch_size})"

    def as_dict(self) -> Dict[str, Any]:
        """For JSON; what is unlimited is None."""
        arguments, budget = self.arguments(), asdict(self.budget)
        if self.amplified:
            sampling = dict(steps=self.steps, expected_batch_size=self.batch_size)
            arguments["sampling"] = {"name": "Poisson", **sampling}
        if self.budget.flops == math.inf:
            budget["flops"] = None
        more = dict(budget=budget, make_private=arguments)
        return {**asdict(self), **more, "parts": self.parts, "notes": self.notes()}

    def _repr_html_(self) -> str:
        values = self.__dict__.items()
        shown = {k: v for k, v in values if isinstance(v, (int, float, str))}
        rows = [[name, in_short(value)] for name, value in shown.items()]
        return html_table(["plan", ""], rows, [*self.caveats, *self.notes()])

    def doubled_noise(self) -> Dict[str, float]:
        """
        Relative decrease of the noise-batch ratio with twice the epsilon, batch or
        users, ``ratio(x) / ratio(2 x) - 1``; without an epsilon above 100, and without
        a batch of more than all examples.
        """
        budget, gains = self.budget, {}
        for name in ("epsilon", "batch_size", "users"):
            batch, other = self.batch_size, budget
            if name == "batch_size":
                batch *= 2
            elif name == "users" or 2 * budget.epsilon <= MOST_EPSILON:
                other = _doubled(budget, name)
            else:
                continue
            if batch <= other.examples:
                ratio = float(noise_of(other, batch, self.steps).ratio)
                gains[name] = self.ratio / ratio - 1
        return gains


def _doubled(budget: Budget, name: str) -> Budget:
    twice: Dict[str, Any] = {name: 2 * getattr(budget, name)}
    return replace(budget, **twice)


def lattice(name: str, covered: Tuple[float, float], wanted: Range) -> np.ndarray:
    """Whole numbers of a range, the same for every budget, and its ends if given."""
    (low, high), points = covered, POINTS[name]
    if wanted is not None:
        low, high = max(low, wanted[0]), min(high, wanted[1])
        if low > high:
            ends = " to ".join(f"{end:g}" for end in sorted(set(wanted)))
            raise Refused(
                f"{name}={ends} is outside of what is known, {covered[0]:g} to "
                f"{covered[1]:g}.",
                parameter=name,
            )
    first, last = points * np.log2([low, high])
    values = np.round(2.0 ** (np.arange(math.floor(first), last + 1) / points))
    # An end that was asked for, not one that a budget set: a larger one moves that.
    if wanted is not None or name != "batch_size":
        least, most = wanted or covered
        values = np.append(values, [math.ceil(least), math.floor(most)])
    values = np.unique(values[(values >= low) & (values <= high)])
    if not len(values):
        raise Refused(
            f"There is no whole number of {name} in [{low:g}, {high:g}].",
            parameter=name,
        )
    return values


class Candidates:
    """
    All configurations of a budget, with their noise and expected loss.

    Args:
        budget: its ``flops`` are the default of :meth:`best` and no bound here
        law: predicts the loss

    Attributes:
        parameters, trainable: ``[M]``
        batch_size: ``[B]``
        steps: ``[T]``
        ratio, noise_multiplier, amplified: ``[B, T]``
        flops: ``[M, B, T]``
        loss: ``[M, B, T]``; nan beyond the law's range

    Raises:
        Refused: for ranges that have nothing in common with the law's, and tokens
            other than the measured ones
    """

    def __init__(self, budget: Budget, law: LossModel):
        law.check(budget)
        self.budget, self.law = budget, law
        if budget.tuned is None:
            self.trainable = lattice("parameters", law.parameters, budget.trained)
            self.parameters = self.trainable
        else:
            self.trainable = lattice("trainable", law.parameters, budget.trained)
            self.parameters = np.full(1, budget.tuned)
        batches = 1, budget.examples
        self.batch_size = lattice("batch_size", batches, budget.batch_size)
        self.steps = lattice("steps", law.steps, budget.steps)
        self.noise_multiplier, self.ratio, self.amplified = noise_grid(
            budget, self.batch_size, self.steps
        )
        self.flops, loss = self._predict(self.batch_size[:, None], self.ratio)
        self.loss = np.broadcast_to(loss, self.flops.shape).copy()

    def _predict(self, batch: Any, ratio: Any) -> Tuple[np.ndarray, np.ndarray]:
        """FLOPs and losses ``[M, B, T]`` at batches ``[B, 1]``, ratios ``[B, T]``."""
        size, trained = (x[:, None, None] for x in (self.parameters, self.trainable))
        flops = compute(size, batch, self.steps, self.budget.tokens, trained)
        return flops, self.law.loss(trained, batch, self.steps, ratio)

    def _within(self, flops: Optional[float]) -> Tuple[float, np.ndarray]:
        """A compute budget, and losses ``[M, B, T]`` within it; inf elsewhere."""
        flops = self.budget.flops if flops is None else flops
        return flops, _affordable(self.flops, self.loss, flops)

    def best(self, flops: Optional[float] = None, within: float = 0.0) -> Plan:
        """
        The configuration of the lowest loss within a compute budget, or the cheapest
        one whose loss is about as low: the last per cent may cost a hundred times the
        compute.

        Args:
            flops: C at most; the budget's by default
            within: share above the lowest loss that is allowed

        Raises:
            Refused: if no configuration is left; the message says why
        """
        flops, loss = self._within(flops)
        if np.isinf(loss).all():
            self._refuse(flops)
        spent = np.where(loss <= loss.min() * (1 + within), self.flops, np.inf)
        cheapest = np.where(spent <= spent.min(), loss, np.inf)
        return self.plan(np.unravel_index(cheapest.argmin(), loss.shape), flops)

    def _refuse(self, flops: float) -> None:
        """Says why no configuration within the compute has a loss."""
        budget, law, within = self.budget, self.law, self.flops <= flops * (1 + 1e-9)
        if not within.any():
            raise Refused(
                f"flops={flops:.3g} is less than the smallest configuration needs, "
                f"{self.flops.min():.3g}.",
                parameter="flops",
                remedy="Allow more compute, fewer steps or smaller models.",
            )
        ratio = np.broadcast_to(self.ratio, within.shape)[within].min()
        trained = self.trainable[:, None, None]
        if np.isfinite(law.loss(trained, 1.0, law.steps[0], ratio)).any():
            raise Refused(
                f"The {law.name} knows so many steps ({self.steps[0]:g} and more) for "
                "no configuration within these bounds, at its size and noise.",
                parameter="steps",
                remedy="Allow fewer steps, or measure longer.",
            )
        if law.formula is not None:
            told = law.formula(
                trained, self.batch_size[:, None], self.steps, self.ratio
            )
            told = np.where(within & np.isfinite(told), told, np.inf)
            i, j, k = np.unravel_index(told.argmin(), told.shape)
            if np.isfinite(told[i, j, k]):
                raise HopelessError(
                    f"Nothing can be learned with this budget: by the {law.name} the "
                    f"best configuration, {self.parameters[i]:g} parameters with a "
                    f"noise-batch ratio of {self.ratio[j, k]:.2g}, has a loss of "
                    f"{told[i, j, k]:.3g}, and a model that knows nothing has "
                    f"{MOST_LOSS:.3g}.",
                    parameter="parameters",
                    remedy="That much noise allows smaller models; or allow more "
                    f"epsilon, users or larger batches. {FINE_TUNE}",
                )
        raise HopelessError(
            f"Nothing can be learned with this budget, by the {law.name}: "
            f"epsilon={budget.epsilon:g} with {budget.users:g} users leaves a "
            f"noise-batch ratio of {ratio:.2g} at the least within this compute, more "
            "than the law knows.",
            parameter="epsilon",
            remedy="More epsilon, users, compute or larger batches are needed; or "
            "measure (opacus-ext measure at larger ratios, or --noise-free)."
            + (f" {FINE_TUNE}" if budget.tuned is None else ""),
        )

    def plan(self, at: Sequence[Any], flops: float = math.inf) -> Plan:
        """The configuration at an index of ``loss``."""
        i, j, k = index = tuple(map(int, at))
        size, trained = int(self.parameters[i]), int(self.trainable[i])
        batch, steps = int(self.batch_size[j]), int(self.steps[k])
        law, budget = self.law, self.budget
        # The grid's noise is interpolated, so that a plan has its own.
        noise, ratio, amplified = noise_of(budget, batch, steps)
        ratio = float(ratio)
        loss = float(law.loss(trained, batch, steps, ratio))
        if not math.isfinite(loss):  # the grid's noise is lower, at the law's very edge
            loss = float(self.loss[index])
        rate = law.learning_rate and float(law.learning_rate(trained, steps, ratio))
        ends = [*self._ends(index)]
        return Plan(
            parameters=size,
            trainable=trained,
            batch_size=batch,
            steps=steps,
            examples=int(budget.examples),
            flops=float(self.flops[index]),
            tokens_per_parameter=float(batch * steps * budget.tokens / size),
            noise_multiplier=float(noise),
            ratio=ratio,
            noise_norm=ratio * math.sqrt(trained),
            amplified=bool(amplified),
            loss=None if law.kind == RULE else loss,
            kind=law.kind,
            ends={name: end for name, end, _ in ends},
            caveats=(
                *self._at_ends(ends),
                *law.caveats(budget, trained, batch, steps, ratio),
            ),
            advantage=advantage(budget, float(noise), batch, steps, bool(amplified)),
            learning_rate=rate if rate and rate > 0 else None,
            budget=replace(budget, flops=float(flops)),
        )

    def _ends(self, at: Sequence[int]) -> Iterator[Tuple[str, str, float]]:
        """Names of ranges that a configuration is at an end of, the end, its value."""
        for position, (name, i) in enumerate(zip(_AXES, at)):
            axis = getattr(self, name)
            value = axis[i]
            if name != "batch_size":
                # The law may know fewer steps of this size, and of these steps fewer
                # sizes.
                others = (*at[:position], slice(None), *at[position + 1 :])
                axis = axis[np.isfinite(self.loss[others])]
            elif self.budget.batch_size is None:
                continue  # a batch of one, or of all examples, is no end
            # Compute may not allow the very end: a point of the lattice beside counts.
            if axis[-1] <= axis[0] * _NEAR_END**2:
                continue
            if value <= axis[0] * _NEAR_END:
                yield name, "lower", axis[0]
            elif value >= axis[-1] / _NEAR_END:
                yield name, "upper", axis[-1]

    def _at_ends(self, ends: Sequence[Tuple[str, str, float]]) -> Iterator[str]:
        """Ends of ranges, for people."""
        for name, end, value in ends:
            low, high = getattr(self.budget, name) or (0.0, 0.0)
            given = " given" if value in (math.ceil(low), math.floor(high)) else ""
            verb = "is" if name == "batch_size" else "are"
            yield (
                f"{name} {verb} at the {end} end of the range{given}, {value:,.0f}: "
                "the optimum lies there or beyond."
            )

    def near(self, flops: Optional[float] = None, within: float = 0.01) -> Near:
        """The configurations whose loss is at most a share above the best one's."""
        flops = self.best(flops).budget.flops  # or the reason why there is none
        loss = self._within(flops)[1]
        at = np.nonzero(loss <= loss.min() * (1 + within))
        values = [getattr(self, name)[i] for name, i in zip(_AXES, at)]
        size, batch, steps = ((int(x.min()), int(x.max())) for x in values)
        return Near(size, batch, steps, len(at[0]))

    def by_batch_size(
        self,
        flops: Optional[float] = None,
        within: float = math.inf,
        most: Optional[int] = None,
    ) -> List[Plan]:
        """
        The best plan of each batch size within a compute budget: equal in epsilon, not
        in the advantage of a membership test (figure 15).

        Args:
            within: share above the best loss up to which batch sizes are included
            most: number of batch sizes at most, evenly spaced, and the best one
        """
        flops, loss = self._within(flops)
        lowest = loss.min(axis=(0, 2))
        known = (lowest < np.inf) & (lowest <= lowest.min() * (1 + within))
        chosen = np.flatnonzero(known)
        if most and len(chosen) > most:
            chosen = chosen[np.linspace(0, len(chosen) - 1, most).round().astype(int)]
            chosen = np.union1d(chosen, lowest.argmin())
        plans = []
        for j in progress(chosen, "planning by batch size"):
            i, k = np.unravel_index(loss[:, j].argmin(), loss[:, j].shape)
            plans.append(self.plan((i, j, k), flops))
        return plans

    def by_rank(
        self, rank: int, flops: Optional[float] = None, within: float = 0.0
    ) -> Dict[int, Plan]:
        """
        The plans of adapters of other ranks, whose trainable parameters are in
        proportion. They don't include what a higher rank may learn that a lower one
        can't.

        Args:
            rank: 1 or more, of adapters of the budget's ``trainable`` parameters
            flops, within: of :meth:`best`

        Returns:
            plans of the rank, and of 4 and 2 times less and more, where that is whole
            and the law knows so few parameters

        Example:
            >>> from opacus_ext.planner import LossModel
            >>> ends = dict(parameters=(1e9, 1e9), steps=(1000, 1100), flops=1e18)
            >>> budget = Budget(5e4, 8, 1e-6, trainable=1e6, **ends)
            >>> list(Candidates(budget, LossModel.rule_of_thumb()).by_rank(2))
            [1, 2, 4, 8]
        """
        checked("rank", rank, at_least=1, whole=True)
        budget, plans = self.budget, {}
        if budget.trainable is None or budget.tuned is None:
            raise Refused(
                "Ranks are of adapters: the budget has no trainable parameters.",
                parameter="trainable",
                remedy="Pass trainable (--trainable), the adapters' parameters.",
            )
        for factor in (0.25, 0.5, 1.0, 2.0, 4.0):
            trainable = round(budget.trainable * factor)
            if (rank * factor).is_integer() and 1 <= trainable <= budget.tuned:
                try:
                    table = Candidates(replace(budget, trainable=trainable), self.law)
                    plans[int(rank * factor)] = table.best(flops, within)
                except Refused:  # the law does not know so few, or nothing is learned
                    continue
        return plans

    def doubled_loss(self, flops: Optional[float] = None) -> Dict[str, float]:
        """
        Relative decrease of the best loss, within C of ``flops`` or the budget's, with
        twice the epsilon, users or compute; nan where no loss is expected, and for an
        epsilon above 100.
        """
        plan = self.best(flops)
        gains = dict.fromkeys(("epsilon", "users", "flops"), math.nan)
        for name in gains if plan.loss else ():
            try:
                twice = _doubled(plan.budget, name)
                table = self if name == "flops" else Candidates(twice, self.law)
                less = table.best(twice.flops).loss
                gains[name] = 1 - less / plan.loss  # type: ignore[operator]
            except Refused:  # above 100, or its noise would take too long
                continue
        return gains

    def not_private(self, flops: Optional[float] = None) -> Optional[Dict[str, Any]]:
        """
        The best configuration of training without noise, of this compute and physical
        batches of the measurements, as in the paper; None if the law has none. Of the
        paper's law it is the formula at ratio 0: none of its rows was without noise.
        """
        batch = self.law.batch_size
        flops, _ = self._within(flops)
        spent, loss = self._predict(np.array([[batch]]), 0.0)
        loss = _affordable(spent, np.broadcast_to(loss, spent.shape), flops)
        if not batch or np.isinf(loss).all():
            return None
        i, _, k = np.unravel_index(loss.argmin(), loss.shape)
        size, steps = int(self.parameters[i]), int(self.steps[k])
        return dict(parameters=size, batch_size=batch, steps=steps, loss=loss.min())

    def saturating(self, within: float = 0.01) -> Plan:
        """The plan of the least compute whose loss is within a share of the lowest."""
        return self.best(math.inf, within)

    def frontier(self, flops: Sequence[float]) -> List[Optional[Plan]]:
        """The best plan at each compute budget; None where there is no plan."""
        plans: List[Optional[Plan]] = []
        for budget in flops:
            try:
                plans.append(self.best(float(budget)))
            except Refused:
                plans.append(None)
        return plans


def _affordable(spent: np.ndarray, loss: np.ndarray, flops: float) -> np.ndarray:
    """Losses that are known and within the compute; inf elsewhere."""
    return np.where((spent <= flops * (1 + 1e-9)) & np.isfinite(loss), loss, np.inf)
