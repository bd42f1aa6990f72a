"""A plan: a configuration, its expected loss, and the code that trains it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Dict, List, Optional, Tuple

from opacus_ext.data.sampling import Poisson
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.noise import verified_noise

_CODE = """\
{imports}from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader

import opacus_ext  # the modes and arguments of make_private
{sampling}
{notes}# Yours: {names}, a dataset of {examples:,} (inputs, targets).
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
    max_physical_batch_size={physical},  # what fits into memory
    optimizer=optimizer,
) as parts:
    for inputs, targets in {batches}:  # {steps:,} steps of {parts} parts
        optimizer.zero_grad()
        criterion(model(inputs), targets).backward()
        optimizer.step()"""


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
        drawn: Dict[str, Any] = {"poisson_sampling": False}
        if self.amplified:
            sampling = Poisson(expected_batch_size=self.batch_size, steps=self.steps)
            drawn = {"sampling": sampling}
            if budget.sampling == "users":
                spent = self.steps, budget.epsilon, budget.delta
                noise = verified_noise(noise, sampling, self.examples, *spent)
        return dict(
            noise_multiplier=_six_digits(noise),
            # As measured: gradients brought to norm 1, whatever they were.
            max_grad_norm=0.1,
            clipping="normalized",
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
        given, total = self.arguments(), self.steps * self.parts
        frozen = f" (all but {self.trainable:,} parameters frozen)"
        frozen *= self.trainable != self.parameters
        values = dict(
            imports="",
            sampling="",
            notes="".join(f"# {note}\n" for note in self.notes()),
            names=f"model{frozen}, optimizer, criterion",
            examples=self.examples,
            loader="DataLoader(dataset)",
            arguments="\n".join(f"    {n}={_shown(x)}," for n, x in given.items()),
            expected="",
            physical=self.budget.physical_batch_size,
            batches="parts",
            steps=self.steps,
            parts=f"about {self.parts:,}",
        )
        if self.amplified:
            name = type(given["sampling"]).__name__
            values["sampling"] = f"from opacus_ext.data import {name}\n"
        else:
            values |= dict(
                imports="from itertools import chain, islice, repeat\n\n",
                loader=f"DataLoader(\n        dataset, batch_size={self.batch_size}, "
                "shuffle=True, drop_last=True\n    )",
                expected=f"optimizer.expected_batch_size = {self.batch_size}\n",
                batches=f"islice(chain.from_iterable(repeat(parts)), {total})",
                parts=f"{self.parts:,}",
            )
        return _CODE.format(**values)

    def as_dict(self) -> Dict[str, Any]:
        """For JSON; what is unlimited is None."""
        found = asdict(self)
        found["budget"] = {
            k: None if v == math.inf else v for k, v in found["budget"].items()
        }
        given = self.arguments()
        drawn = given.get("sampling")
        if drawn is not None:
            given["sampling"] = {"name": type(drawn).__name__} | _options(drawn)
        found["make_private"] = given
        found["parts"] = self.parts
        found["notes"] = self.notes()
        return found


def _options(sampling: Poisson) -> Dict[str, Any]:
    return {name: x for name, x in vars(sampling).items() if x is not None}


def _shown(value: Any) -> str:
    if not isinstance(value, Poisson):
        return repr(value)
    given = ", ".join(f"{name}={x}" for name, x in _options(value).items())
    return f"{type(value).__name__}({given})"


def _six_digits(noise: float) -> float:
    """Rounded up, so that the noise that is printed is enough."""
    digits = 5 - math.floor(math.log10(noise)) if noise > 0 else 0
    rounded = round(noise, digits)
    return rounded if rounded >= noise else round(noise + 10.0**-digits, digits)
