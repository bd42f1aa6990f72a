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
        loss = nn.functional.cross_entropy(logits, y)
        return {"loss": loss, "logits": logits}


class Step(NamedTuple):
    """
    Attributes:
        records: numbers of those that the data set gave since the step before
        moved: what it added to the weights
    """

    records: List[int]
    moved: torch.Tensor


class Watched(Dataset):
    """
    Records of zeros.

    Args:
        form: makes a record of a pair of tensors
    """

    def __init__(self, form: Any = tuple):
        self.form = form
        self.taken: List[List[int]] = []  # by batch

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, i: int) -> Any:
        return self.form((torch.zeros(WIDTH), torch.tensor(int(i) % OUT)))

    def __getitems__(self, numbers: List[int]) -> List[Any]:
        self.taken.append([int(i) for i in numbers])
        return [self[i] for i in numbers]


class Observer:
    """
    Args:
        form: see :class:`Watched`
        ahead: number of batches that the loop takes before the step on the first

    Attributes:
        model: to be made private
        optimizer: a plain one, of its weights
        data: to be trained on
        steps: what was seen
    """

    def __init__(self, form: Any = tuple, ahead: int = 0):
        self.model, self.data = Model(), Watched(form)
        self.steps: List[Step] = []
        observer, given = self, list(self.model.parameters())

        class Optimizer(torch.optim.SGD):
            def step(self, closure=None):
                before = given[0].detach().clone()
                found = super().step(closure)
                moved = given[0].detach() - before
                taken = observer.data.taken
                now = taken[:1] if ahead else taken[:]
                del taken[: len(now)]
                observer.steps.append(Step(sum(now, []), moved))
                return found

        self.optimizer = Optimizer(given, lr=LR)

    def check(self, content: Any, bound: float, size: int, replays: int = 0) -> None:
        """
        Compares what was seen with the content of a statement.

        Args:
            bound: of clipping
            size: the expected records of a step, which sums are divided by
            replays: the number of steps on draws that came back
        """
        phases = content["phases"]
        drawn = [step for step in self.steps if step.records]
        rate = size / RECORDS
        stated = {phase["sample_rate"]: 0 for phase in phases}
        for phase in phases:
            stated[phase["sample_rate"]] += phase["steps"]
        # Steps: as many as are stated; those without a draw count at rate 1.
        assert stated.pop(rate) >= len(drawn)
        assert len(self.steps) - len(drawn) <= stated.pop(1.0, 0) + 1
        assert not stated and content["steps"] >= len(self.steps)
        if not replays:
            assert len(drawn) == len(self.steps) == content["steps"]
            assert content["holds"] == "yes"
        else:
            assert len(self.steps) - len(drawn) == replays
            assert content["holds"] == "no" and content["epsilon"] is None
        # Draws: each record at most once a step, at the rate, independently.
        for step in drawn:
            assert max(Counter(step.records).values()) == 1
        count, several = sum(len(step.records) for step in drawn), len(drawn)
        deviation = (several * RECORDS * rate * (1 - rate)) ** 0.5
        assert abs(count - several * size) <= 5 * deviation
        assert len({frozenset(step.records) for step in drawn}) == several
        # Noise: that of the statement, and new in each step.
        moves = torch.stack([step.moved.flatten() for step in self.steps]) * size / LR
        for row in moves:
            (noise,) = {phase["noise_multiplier"] for phase in phases}
            assert 0.9 < float(row.std()) / (noise * bound) < 1.1
        together = torch.corrcoef(moves).fill_diagonal_(0).abs()
        assert float(together.max()) < 0.25
