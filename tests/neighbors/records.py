"""Records, random and adversarial, and how they become batches."""

from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch

from tests.fuzz.programs import Note

KINDS = (
    "random",
    "zeros",
    "large",
    "one entry",
    "equal",
    "longer",
    "shorter",
    "not a number",
    "infinite",
)
Record = Dict[str, torch.Tensor]


class Field(NamedTuple):
    """
    One tensor of a record.

    Attributes:
        width: floats in an item; 0 for scalars
        values: number of different ids; 0 for floats
        whole: True for one item, False for a sequence of them
    """

    width: int = 0
    values: int = 0
    whole: bool = False

    def draw(self, length: int, kind: str) -> torch.Tensor:
        shape = () if self.whole else (length,)
        if self.values:
            high = 1 if kind == "zeros" else self.values
            low = high - 1 if kind in ("zeros", "large") else 0
            return torch.randint(low, high, shape)
        x = torch.randn(*shape, self.width, dtype=torch.double)
        return self.changed(x, kind)

    def changed(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        special = {"one entry": 1e4, "not a number": torch.nan, "infinite": torch.inf}
        if kind == "zeros":
            return torch.zeros_like(x)
        if kind == "large":
            return 1e3 * x
        if kind in special and x.numel():
            x.view(-1)[int(torch.randint(x.numel(), ()))] = special[kind]
        return x


class Records(NamedTuple):
    """
    Attributes:
        fields: of a record, by name
        collate: makes a batch from a list of records
        ragged: True if sequences of a batch may have different lengths
    """

    fields: Dict[str, Field]
    collate: Callable[[List[Record]], Any]
    ragged: bool = False

    def draw(self, length: int, kind: str = "random") -> Record:
        length += {"longer": 3, "shorter": 1 - length}.get(kind, 0) * self.ragged
        return {name: f.draw(length, kind) for name, f in self.fields.items()}

    def empty(self) -> Any:
        """A batch without samples, as a loader of Opacus returns it."""
        return _first_rows(self.collate([self.draw(2)]), 0)


def _first_rows(batch: Any, rows: int) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch[:rows]
    if isinstance(batch, list):
        return batch[:rows]
    if any(isinstance(x, tuple) for x in batch):
        x, states = batch
        return x[:rows], tuple(s[:, :rows] for s in states)
    return tuple(_first_rows(x, rows) for x in batch)


def stacked(records: List[Record]) -> Tuple[torch.Tensor, ...]:
    return tuple(torch.stack([r[name] for r in records]) for name in records[0])


def padded(records: List[Record]) -> Tuple[torch.Tensor, ...]:
    """Sequences padded to the longest, and a mask that is true at their items."""
    names = list(records[0])
    made = [
        (
            torch.nn.utils.rnn.pad_sequence([r[n] for r in records], batch_first=True)
            if records[0][n].dim()
            else torch.stack([r[n] for r in records])
        )
        for n in names
    ]
    lengths = torch.tensor([len(r[names[0]]) for r in records])
    return *made, torch.arange(int(lengths.max())) < lengths[:, None]


def listed(records: List[Record]) -> Tuple[List[torch.Tensor]]:
    return ([r["x"] for r in records],)


def with_offsets(records: List[Record]) -> Tuple[torch.Tensor, torch.Tensor]:
    """As ``nn.EmbeddingBag`` takes ids."""
    lengths = torch.tensor([0] + [len(r["ids"]) for r in records])
    return torch.cat([r["ids"] for r in records]), lengths.cumsum(0)[:-1]


def with_notes(records: List[Record]) -> Tuple[List[torch.Tensor], List[Note]]:
    """Numbers in objects that print alike."""
    rows = [r["x"] for r in records]
    return rows, [Note(float(x.nan_to_num(0, 0, 0).sum())) for x in rows]


def overlapping(records: List[Record]) -> Tuple[torch.Tensor, torch.Tensor]:
    """Rows, and a flag for each that is one number in memory."""
    (x,) = stacked(records)
    return x, torch.ones(1, 1, dtype=torch.bool).expand(len(records), 1)


def with_states(records: List[Record]) -> Tuple[torch.Tensor, Tuple[torch.Tensor, ...]]:
    """``x [B, T, D]`` and hidden states ``[layers, B, D]`` of two layers."""
    x, h, c = stacked(records)
    return x, (h.expand(2, *h.shape).clone(), c.expand(2, *c.shape).clone())
