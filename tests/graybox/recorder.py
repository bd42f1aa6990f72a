"""A recorder of runs, and the comparison of two that differ in one record.

The second run is given what the first one released, so that whatever depends on the
data by noisy releases alone is the same in both, to the last bit. What is not the same
was computed from a record without noise (Cebere et al. 2026, "Privacy in Theory, Bugs
in Practice: Grey-Box Auditing of Differential Privacy Libraries").
"""

import math
import warnings
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import pytest
import torch
from torch.utils.data import Dataset

import opacus_ext.optimizers.noise
import opacus_ext.re_attention.effective
import opacus_ext.releases
import opacus_ext.secure
from opacus_ext.optimizers.optimizer import ClippingOptimizer

RECORDS, WIDTH, OUT = 64, 40, 25
SLACK = 1e-5  # of float32
RECORD = 0  # the number of the record by which data sets differ
WITH_NOISE = (
    opacus_ext.optimizers.noise,
    opacus_ext.re_attention.effective,
    opacus_ext.releases,
)


@dataclass
class Release:
    """
    Something that gets noise.

    Attributes:
        name: what it is
        totals: before the noise
        outputs: ``totals`` with noise, over ``divisor``
        std: that the noise should have, before it is divided
        batch: numbers of the records drawn since the release before
    """

    name: str
    totals: List[torch.Tensor]
    outputs: List[torch.Tensor]
    std: float
    divisor: float
    batch: List[int]

    @property
    def form(self) -> Tuple[Any, ...]:
        return self.name, *((x.shape, x.dtype) for x in self.totals + self.outputs)

    def distance(self, other: "Release") -> float:
        """How far the totals are apart, in standard deviations of the noise."""
        pairs = zip(self.totals, other.totals)
        gaps = [float((a.double() - b.double()).norm()) for a, b in pairs]
        return math.hypot(*gaps) / self.std if self.std else math.inf

    def noise(self) -> List[torch.Tensor]:
        """The noise that was added, of std 1 if it is as it should be."""
        pairs = zip(self.outputs, self.totals)
        return [
            (output.double() * self.divisor - total.double()) / self.std
            for output, total in pairs
        ]


@dataclass
class Trace:
    """
    A run: what got noise, and what an observer sees.

    Attributes:
        public: the values that an observer sees, by name
        history: of the accountant
        told: warnings, which are for the one who trains, and may depend on the data
    """

    releases: List[Release] = field(default_factory=list)
    public: Dict[str, Any] = field(default_factory=dict)
    history: List[Tuple[float, float, int]] = field(default_factory=list)
    told: List[str] = field(default_factory=list)
    error: str = ""


class Records(Dataset):
    """
    Classified rows; one of them is the record by which data sets differ.

    Args:
        row: a factor of that record, or None: it is not given where it is drawn, or, by
            name, without a gradient
        label: of that record
        named: True for records by name
    """

    def __init__(self, row: Any, label: int = 3, named: bool = False):
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(RECORDS, WIDTH, generator=generator)
        self.y = torch.randint(OUT - 1, (RECORDS,), generator=generator)
        self.y[RECORD] = label
        self.x[RECORD] *= 0.0 if row is None else row
        self.absent, self.named = row is None, named
        self.taken: List[int] = []

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        record = self.x[int(i)], self.y[int(i)]
        return dict(zip("xy", record)) if self.named else record

    def __getitems__(self, numbers: List[int]) -> List[Any]:
        self.taken += map(int, numbers)
        left_out = self.absent and not self.named
        return [self[i] for i in numbers if not (left_out and i == RECORD)]


@contextmanager
def recording(records: Any, first: Optional[Trace] = None) -> Iterator[Trace]:
    """
    Records what happens within it. With the trace of a first run, releases are what
    they were there.
    """
    trace = Trace()

    def same(number: int) -> Optional[List[torch.Tensor]]:
        """What the first run released at this point."""
        if first is None or number >= len(first.releases):
            return None
        return first.releases[number].outputs

    def note(name: str, totals: Any, outputs: Any, std: float, divisor: float) -> None:
        totals, outputs = ([x.detach().clone() for x in y] for y in (totals, outputs))
        batch = records.taken[:]
        records.taken.clear()
        trace.releases.append(Release(name, totals, outputs, std, divisor, batch))

    def add_noise(optimizer: Any) -> None:
        params = optimizer.params
        totals = [p.summed_grad.clone() for p in params]
        std = float(optimizer.gradient_noise_multiplier * optimizer.sensitivity)
        stock_add_noise(optimizer)
        divisor = optimizer.divisor if optimizer._divided else 1.0
        replay = same(len(trace.releases))
        note("gradients", totals, [p.grad for p in params], std, divisor)
        for p, x in zip(params, replay or ()):
            p.grad.copy_(x)

    def with_noise(total: Any, noise: float, sensitivity: float, generator: Any) -> Any:
        output = stock_with_noise(total, noise, sensitivity, generator)
        replay = same(len(trace.releases))
        note("statistic", [total], [output], noise * sensitivity, 1.0)
        return output if replay is None else replay[0].clone()

    stock_add_noise = ClippingOptimizer.add_noise
    stock_with_noise = opacus_ext.releases.with_noise
    numbers = torch.Generator().manual_seed(3)

    def random_bytes(count: int) -> bytes:
        """Stands for the operating system, whose numbers would differ between runs."""
        found = torch.randint(256, (count,), dtype=torch.uint8, generator=numbers)
        return bytes(found.tolist())

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(
        record=True
    ) as caught:
        warnings.simplefilter("always")
        patch.setattr(ClippingOptimizer, "add_noise", add_noise)
        patch.setattr(opacus_ext.secure.os, "urandom", random_bytes)
        for module in WITH_NOISE:
            patch.setattr(module, "with_noise", with_noise)
        try:
            yield trace
        except Exception as error:  # whatever a run ends with is seen
            trace.error = f"{type(error).__name__}: {error}"
    trace.told = [str(warning.message).partition(".")[0] for warning in caught]


def compare(one: Trace, two: Trace, rate: float) -> Set[str]:
    """
    Returns the kinds of differences that should not be.

    Args:
        rate: at which the records of a gradient are drawn, by public numbers
    """
    found = {f"public: {name}" for name in one.public.keys() ^ two.public.keys()}
    for name in one.public.keys() & two.public.keys():
        if not equal(one.public[name], two.public[name]):
            found.add(f"public: {name}")
    if one.error != two.error:
        found.add("error")
    if [x.form for x in one.releases] != [x.form for x in two.releases]:
        found.add("control flow")
    pairs = list(zip(one.releases, two.releases))
    if any((a.std, a.divisor) != (b.std, b.divisor) for a, b in pairs):
        found.add("scale")
    same = (
        a.distance(b) <= SLACK for a, b in pairs if a.batch and RECORD not in a.batch
    )
    if not all(same):
        found.add("another batch")
    spent = [noise for noise, _, steps in one.history for _ in range(steps)]
    if one.history != two.history or not _are_counted(one, rate):
        found.add("accounting")
    elif any(not a <= (1 + SLACK) / b for a, b in zip(_distances(pairs), spent)):
        found.add("sensitivity")
    return found | _noise_of(one.releases) | _draws_of(one.releases, rate)


def _distances(pairs: Any) -> Iterator[float]:
    """For each entry of the accountant, of all that it covers; NaN is none."""
    group = 0.0
    for number, (a, b) in enumerate(pairs):
        group = math.hypot(group, a.distance(b))
        after = pairs[number + 1][0] if number + 1 < len(pairs) else None
        beside = after is not None and (a.name, after.name, after.batch) == (
            "gradients",
            "statistic",
            [],
        )
        if not beside:  # a monitor's statistic is released with its gradients
            yield group
            group = 0.0


def _are_counted(trace: Trace, rate: float) -> bool:
    steps = sum(x.name == "gradients" for x in trace.releases)
    counted: Counter = Counter()
    for _, at, number in trace.history:
        counted[at] += number
    alone = sum(x.name == "statistic" for x in trace.releases) if not steps else 0
    return counted.pop(rate, 0) == steps and counted.pop(1.0, 0) >= alone


def _noise_of(releases: List[Release]) -> Set[str]:
    """Noise that is not Gaussian with its std, or that comes back."""
    noises = [x.noise() for x in releases if x.std]
    if any(not x.std for x in releases):
        return {"noise"}
    for parts in zip(*noises) if len({len(x) for x in noises}) == 1 else noises:
        x = torch.cat([part.flatten() for part in parts])
        tolerance = 6 / math.sqrt(len(x))
        inside = (x.abs() < 0.6744898).double()
        values = x.mean(), (x.square().mean() - 1) / 2, inside.mean() - 0.5
        wrong = [not abs(float(value)) < tolerance for value in values]
        if len(x) > 100 and any(wrong):
            return {"noise"}
    rows = [torch.cat([part.flatten() for part in parts]) for parts in noises]
    for i, row in enumerate(rows):
        for other in rows[:i]:
            if len(row) == len(other) > 100:
                match = float(torch.corrcoef(torch.stack([row, other]))[0, 1])
                if not abs(match) < 6 / math.sqrt(len(row)):
                    return {"noise comes back"}
    return set()


def _draws_of(releases: List[Release], rate: float) -> Set[str]:
    """Draws that are not Poisson ones."""
    draws = [Counter(x.batch) for x in releases if x.name == "gradients"]
    if len(draws) < 8:
        return set()
    sizes, expected = [sum(draw.values()) for draw in draws], rate * RECORDS
    deviation = math.sqrt(len(draws) * expected * (1 - rate))
    twice = max((max(draw.values()) for draw in draws if draw), default=0) > 1
    shares = sum(len(a & b) for a, b in zip(draws, draws[1:])) / (len(draws) - 1)
    likely = RECORDS * rate**2
    wrong = abs(sum(sizes) - len(draws) * expected) > 5 * deviation
    if wrong or twice or len({*sizes}) == 1 or shares < likely / 4:
        return {"sampling"}
    return set()


def equal(one: Any, two: Any) -> bool:
    """True for values of the same types and bits, in the same order."""
    if type(one) is not type(two):
        return False
    if isinstance(one, dict):
        return list(one) == list(two) and all(equal(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(equal, one, two))
    if isinstance(one, torch.Tensor):
        same = (one.shape, one.dtype) == (two.shape, two.dtype)
        return same and torch.equal(one.nan_to_num(7), two.nan_to_num(7))
    return bool(one == two or one != one and two != two)
