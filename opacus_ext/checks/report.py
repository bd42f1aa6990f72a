"""The report of the check of per-sample gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, NamedTuple, Optional, Tuple

import torch

from opacus_ext.tables import html_table, text_table


class Cell(NamedTuple):
    """The result of one mode for one parameter.

    Attributes:
        status: "ok"; "differs" (the parameter's own gradient or norm is wrong);
            "factor" (only the norm over all parameters, and so the clipping factor, is
            wrong); "refused" (the mode raised an error); "not run"
        own: the largest relative error of the sum clipped by the parameter's own norm;
            ``None`` where the mode knows no per-layer clipping
        clipped: the largest relative error of the sum after flat clipping
    """

    status: str
    own: Optional[float] = None
    clipped: Optional[float] = None

    @classmethod
    def of(cls, own: Optional[float], clipped: float, tolerance: float) -> Cell:
        """Returns the cell of two errors."""
        if own is not None and not own <= tolerance:
            status = "differs"
        elif clipped <= tolerance:
            status = "ok"
        else:
            status = "differs" if own is None else "factor"
        return cls(status, own, clipped)

    def __str__(self) -> str:
        errors = [error for error in self[1:] if error is not None]
        return f"{self.status} {max(errors):.0e}" if errors else self.status


@dataclass
class PerSampleGradientReport:
    """The result of :func:`check_per_sample_gradients`; ``str()`` of it is a table.

    Attributes:
        cells: ``cells[parameter name][mode]``; empty if only a step was tried
        modes: the modes that were checked, in the order of the columns
        tolerance: the largest relative error that counts as equal
        dtype: the least exact floating-point type that the model computed in
        max_grad_norm: the clipping norm used
        refused: the error text of each mode that raised one
        cross_sample: numbers of the samples whose loss or gradient depends on others
        random: True if the loss changes from call to call: nothing can be compared
        findings: what is wrong with the model itself, one sentence each
        leaks: the module or loss in which samples begin to depend on each other, with
            what to do
    """

    cells: Dict[str, Dict[str, Cell]]
    modes: Tuple[str, ...]
    tolerance: float
    dtype: torch.dtype
    max_grad_norm: float = float("nan")
    refused: Dict[str, str] = field(default_factory=dict)
    cross_sample: List[int] = field(default_factory=list)
    random: bool = False
    findings: List[str] = field(default_factory=list)
    leaks: List[str] = field(default_factory=list)

    def _with(self, status: str) -> List[str]:
        """Names of the parameters that have this status in some mode."""
        return [
            name
            for name, row in self.cells.items()
            if status in [cell.status for cell in row.values()]
        ]

    @property
    def ok(self) -> bool:
        """True if the model is sound, and every mode exact for every parameter."""
        statuses = {cell.status for row in self.cells.values() for cell in row.values()}
        return not self.findings and statuses <= {"ok"}

    @property
    def differing(self) -> List[str]:
        """Names of the parameters that some mode gets wrong.

        One wrong norm spoils the clipping factor of all parameters: only the causes are
        listed, and all parameters where no cause could be found.
        """
        return self._with("differs") or self._with("factor")

    def __str__(self) -> str:
        tables = [text_table(*self._table(), rule=True)] if self.cells else []
        return "\n".join([*tables, *self._notes()])

    def _repr_html_(self) -> str:
        return html_table(*self._table(), self._notes())

    def _table(self) -> Tuple[List[str], List[List[str]]]:
        rows = [[name, *map(str, row.values())] for name, row in self.cells.items()]
        return ["parameter", *self.modes], rows

    def _notes(self) -> List[str]:
        """The lines below the table."""
        lines = [f"! {finding}" for finding in (*self.findings, *self.leaks)]
        lines += [f"! {mode} refused: {text}" for mode, text in self.refused.items()]
        if self._with("factor"):
            lines.append(
                "! factor: the gradient itself is right; the norm over all parameters "
                "that it is clipped by is not"
            )
        last = "ok" if self.ok else "NOT ok"
        if self.cells:
            kind = str(self.dtype).removeprefix("torch.")
            last += f": max_grad_norm {self.max_grad_norm:.3g}, {kind}, "
            last += f"tolerance {self.tolerance:.0e}"
        elif self.ok:
            last += ": no record changes what others add to the gradient of the step"
        return [*lines, last]
