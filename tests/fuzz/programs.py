"""A random model, its batches and its loss."""

import random
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional as F

from tests.common import squares
from tests.fuzz.ops import BINARY, LONGEST, REFUSABLE, UNARY, VOCAB, D, weights

OUTPUTS = ("all", "pooled", "losses", "two", "named", "logits")
INPUTS = ("x", "ids", "mask", "table", "note")
SHARED = ("table", "note")  # by all samples
Batch = Dict[str, Any]


class Note:
    """A number in an object that looks like any other."""

    def __init__(self, value: float):
        self.value = value

    def __repr__(self) -> str:
        return "Note()"

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Note)

    def __hash__(self) -> int:
        return 0


class Line(NamedTuple):
    """One op of a program: its name, its module, and the earlier values it takes."""

    name: str
    module: str
    values: Tuple[int, ...]


class Program(nn.Module):
    """
    A forward that is a list of lines. It takes ``x [B, T, D]`` and maybe ids
    ``[B, T]``, a mask ``[B, T]``, and a table ``[K, D]`` and a note that all samples
    share.
    """

    def __init__(self, rng: random.Random):
        super().__init__()
        self.inputs = ["x"] + [n for n in INPUTS[1:] if rng.random() < 0.25]
        self.output = rng.choice(OUTPUTS)
        self.squash, self.overwrites = rng.random() < 0.7, rng.random() < 0.1
        self.steps, self.lines = nn.ModuleDict(), []
        if "ids" in self.inputs:
            padding = rng.choice([None, 0])
            self.tokens = nn.Embedding(VOCAB, D, padding_idx=padding)
        if self.output == "logits":
            tied = "ids" in self.inputs and rng.random() < 0.7
            self.head = self.tokens.weight if tied else nn.Parameter(weights(VOCAB, D))
        for number in range(rng.randint(1, 5)):
            self._add(rng, number)
        self.double()
        for step in self.modules():
            if getattr(step, "single", False):
                step.float()
        self._freeze(rng)

    def _add(self, rng: random.Random, number: int) -> None:
        last = number  # value 0 is the input
        two = number and rng.random() < 0.3
        values = (last, rng.randint(0, last - 1)) if two else (last,)
        same = [line for line in self.lines if len(line.values) == len(values)]
        if same and rng.random() < 0.25:
            old = rng.choice(same)
            self.lines.append(old._replace(values=values))
            return
        table = BINARY if two else REFUSABLE if rng.random() < 0.05 else UNARY
        name = rng.choice(list(table))
        self.steps[f"s{number}"] = table[name](rng)
        self.lines.append(Line(name, f"s{number}", values))

    def _freeze(self, rng: random.Random) -> None:
        parameters = list(self.parameters())
        for p in parameters[1:]:
            p.requires_grad_(rng.random() > 0.15)

    @property
    def refusable(self) -> bool:
        """True if a line of it may be refused."""
        return any(line.name in REFUSABLE for line in self.lines)

    @property
    def tolerance(self) -> float:
        """What gradients may differ by, relatively, as some ops are rounded more."""
        single = any(p.dtype == torch.float32 for p in self.parameters())
        steps = [getattr(step, "tolerance", 0.0) for step in self.steps.values()]
        return max(2e-4 if single else 1e-8, *steps)

    @property
    def takes_one(self) -> bool:
        """True if sequences may have one item: torch's norms over time need more."""
        return not any("norm" in line.name for line in self.lines)

    def describe(self) -> str:
        lines = [
            f"v{i} = {line.name} {line.module}{[f'v{v}' for v in line.values]}"
            for i, line in enumerate(self.lines, 1)
        ]
        frozen = [n for n, p in self.named_parameters() if not p.requires_grad]
        return (
            f"inputs {self.inputs}; {'; '.join(lines)}; output {self.output}; "
            f"tanh {self.squash}, overwrites {self.overwrites}; frozen {frozen}"
        )

    def forward(self, x, ids=None, mask=None, table=None, note=None):
        if self.overwrites:
            x[:, 0] += x[:, -1]
        if note is not None:
            x = x * note.value
        if ids is not None:
            x = x + self.tokens(ids)
        if table is not None:
            x = x + (x @ table.T).softmax(-1) @ table
        values = [x]
        for line in self.lines:
            y = self.steps[line.module](*(values[i] for i in line.values))
            y = torch.tanh(y) if self.squash else y
            values.append(y if mask is None else y.masked_fill(~mask[..., None], 0.0))
        return self._finish(values)

    def _finish(self, values: List[torch.Tensor]) -> Any:
        y = values[-1]
        if self.output == "pooled":
            return y.mean(1)
        if self.output == "losses":
            return squares(y)
        if self.output == "two":
            return y, values[len(values) // 2].sum(1)
        if self.output == "named":
            return {"y": y, "none": None, "length": y.shape[1]}
        return F.linear(y, self.head) if self.output == "logits" else y


def losses(outputs: Any, ids: Optional[torch.Tensor] = None) -> torch.Tensor:
    """One loss for each sample ``[B]``, from any output of a program."""
    if isinstance(outputs, dict):
        return squares(outputs["y"])
    if isinstance(outputs, tuple):
        return sum(map(squares, outputs))
    if outputs.dim() == 1:
        return outputs
    if outputs.shape[-1] == VOCAB and ids is not None:
        found = F.cross_entropy(outputs.transpose(1, 2), ids, reduction="none")
        return found.mean(1)
    return squares(outputs)


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    return losses(model(**batch), batch.get("ids"))


def batch_of(program: Program, rng: random.Random, size: int) -> Batch:
    """``size`` samples of some length; the table may have as many rows."""
    T = rng.randint(1 if program.takes_one else 2, LONGEST - 1)
    scale = rng.choice([1.0, 1.0, 1.0, 10.0])
    made = {
        "x": scale * torch.randn(size, T, D, dtype=torch.double),
        "ids": torch.randint(VOCAB, (size, T)),
        "mask": torch.rand(size, T) < rng.choice([0.5, 0.8, 1.1]),
        "table": torch.randn(rng.choice([1, 2, 3, 7]), D, dtype=torch.double),
        "note": Note(rng.choice([1.0, 0.5, -2.0])),
    }
    if size and rng.random() < 0.1:  # samples that share memory
        for name in ("x", "ids", "mask"):
            made[name] = made[name][:1].expand(size, *made[name].shape[1:])
    return {name: made[name] for name in program.inputs}


def batched(program: Program) -> List[str]:
    return [name for name in program.inputs if name not in SHARED]
