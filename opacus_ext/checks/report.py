"""What the check of per-sample gradients found, and how it is printed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

import torch

from opacus_ext.tables import text_table


@dataclass(frozen=True)
class Cell:
    """What one mode made of one parameter.

    Args:
        status: "ok"; "differs" (the parameter's own gradient or norm is wrong);
            "factor" (its own gradient is right, but the norm over all parameters, and
            so the clipping factor, is not); "refused" (the mode raised); "not run".
        own: largest relative error of the parameter by itself, per sample: of
            ``p.grad_sample`` where the mode keeps it, else of the sum after clipping by
            the parameter's own norm. ``None`` where it could not be had.
        clipped: largest relative error of the sum over samples after flat clipping.
    """

    status: str
    own: Optional[float] = None
    clipped: Optional[float] = None

    def __str__(self) -> str:
        errors = [e for e in (self.own, self.clipped) if e is not None]
        return f"{self.status} {max(errors):.0e}" if errors else self.status


@dataclass
class PerSampleGradientReport:
    """The outcome of :func:`check_per_sample_gradients`; ``print`` it for the table.

    Args:
        cells: ``cells[parameter name][mode]``.
        modes: the modes that were checked, in the order of the columns.
        refused: error text of each mode that raised.
        cross_sample: the samples whose loss or gradient depends on the rest of the
            batch, by position.
        random: the loss changes from call to call, so that nothing can be compared.
        findings: what is wrong with the model itself, in words, one line each.
        max_grad_norm: the clipping norm used.
        tolerance: largest relative error that counts as equal.
        dtype: the floating point type that the comparison ran in; the lowest one if
            the model computes parts of it, such as norms, in another.
    """

    cells: Dict[str, Dict[str, Cell]]
    modes: Tuple[str, ...]
    max_grad_norm: float
    tolerance: float
    dtype: torch.dtype
    refused: Dict[str, str] = field(default_factory=dict)
    cross_sample: List[int] = field(default_factory=list)
    random: bool = False
    findings: List[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Every mode is exact for every parameter, and the model itself is sound."""
        return not self.findings and all(
            cell.status == "ok" for row in self.cells.values() for cell in row.values()
        )

    @property
    def differing(self) -> List[str]:
        """Names of the parameters that some mode gets wrong.

        One wrong norm spoils the clipping factor of all parameters; the list names the
        cause, and names the others only where no cause could be told.
        """
        for status in ("differs", "factor"):
            names = [
                name
                for name, row in self.cells.items()
                if any(cell.status == status for cell in row.values())
            ]
            if names:
                return names
        return []

    def __str__(self) -> str:
        rows = [
            [name, *(str(row[mode]) for mode in self.modes)]
            for name, row in self.cells.items()
        ]
        lines = [text_table(["parameter", *self.modes], rows, rule=True)]
        lines += [f"! {finding}" for finding in self.findings]
        lines += [f"! {mode} refused: {text}" for mode, text in self.refused.items()]
        if any(
            c.status == "factor" for row in self.cells.values() for c in row.values()
        ):
            lines.append(
                "! factor: the gradient itself is right; the norm over all parameters "
                "that it is clipped by is not"
            )
        lines.append(
            f"{'ok' if self.ok else 'NOT ok'}: max_grad_norm {self.max_grad_norm:.3g}, "
            f"{str(self.dtype).removeprefix('torch.')}, tolerance {self.tolerance:.0e}"
        )
        return "\n".join(lines)
