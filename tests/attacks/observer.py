"""An observer of whole runs that is no part of the package.

It sees which records the data set gives, and what each step of the optimizer that was
passed in does to the weights. Records are zeros, so that a step moves the weights by
its noise alone.
"""

from collections import Counter
from typing import Any, List, NamedTuple

import torch
from torch import nn
from torch.utils.data import Dataset

RECORDS, WIDTH, OUT = 64, 40, 25
LR = 0.5


class Model(nn.Module):
    """Its gradients are zero where its inputs are."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, OUT, bias=False)

    def forward(self, x, y=None):
        logits = self.layer(x)
        if y is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Step(NamedTuple):
    """
    Attributes:
        records: numbers of those that the data set gave since the step before
        moved: what it added to the weights
    """

    records: List[int]
    moved: torch.Tensor


class Observer(Dataset):
    """
    A data set of zeros, a model and a plain optimizer, which are observed.

    Args:
        named: True for records by name
        ahead: True if the loop takes a batch before the step on the one before

    Attributes:
        steps: what was seen
    """

    def __init__(self, named: bool = False, ahead: bool = False):
        self.model, self.named = Model(), named
        self.taken: List[List[int]] = []  # by batch
        self.steps: List[Step] = []
        observer, weight = self, self.model.layer.weight

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                before = weight.detach().clone()
                super().step(closure)
                taken = observer.taken[:1] if ahead else observer.taken[:]
                del observer.taken[: len(taken)]
                observer.steps.append(Step(sum(taken, []), weight.detach() - before))

        self.optimizer = Optimizer([weight], lr=LR)

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        record = torch.zeros(WIDTH), torch.tensor(int(i) % OUT)
        return dict(zip("xy", record)) if self.named else record

    def __getitems__(self, numbers: List[int]) -> List[Any]:
        self.taken.append([int(i) for i in numbers])
        return [self[i] for i in numbers]

    def check(self, engine: Any, bound: float, size: int, replays: int = 0) -> Any:
        """
        Compares what was seen with the statement of an engine, and returns that.

        Args:
            bound: of clipping
            size: the expected records of a step, which sums are divided by
            replays: the number of steps on draws that came back
        """
        content = engine.privacy_statement(delta=1e-3).content
        drawn, rate = [step for step in self.steps if step.records], size / RECORDS
        stated = steps_of(content)
        # Steps: as many as are stated; those without a draw count at rate 1.
        assert stated.pop(rate) >= len(drawn)
        assert len(self.steps) - len(drawn) <= stated.pop(1.0, 0) + 1
        assert not stated and content["steps"] >= len(self.steps)
        assert len(self.steps) - len(drawn) == replays
        if replays:
            assert content["holds"] == "no" and content["epsilon"] is None
        else:
            assert len(drawn) == content["steps"] and content["holds"] == "yes"
            assert content["epsilon"] == engine.get_epsilon(1e-3)
        # Draws: each record at most once a step, at the rate, independently.
        counts = [len(step.records) for step in drawn]
        assert all(max(Counter(step.records).values()) == 1 for step in drawn)
        deviation = (len(drawn) * RECORDS * rate * (1 - rate)) ** 0.5
        assert abs(sum(counts) - len(drawn) * size) <= 5 * deviation
        assert len({frozenset(step.records) for step in drawn}) == len(drawn)
        # Noise: that of the statement, and new in each step.
        moves = torch.stack([step.moved.flatten() for step in self.steps]) * size / LR
        (noise,) = {phase["noise_multiplier"] for phase in content["phases"]}
        stds = moves.std(dim=1) / (noise * bound)
        assert 0.9 < float(stds.min()) and float(stds.max()) < 1.1
        together = torch.corrcoef(moves).fill_diagonal_(0).abs()
        assert float(together.max()) < 0.25
        return content


def steps_of(content: Any) -> Counter:
    """The number of steps of a statement, by rate."""
    steps: Counter = Counter()
    for phase in content["phases"]:
        steps[phase["sample_rate"]] += phase["steps"]
    return steps
