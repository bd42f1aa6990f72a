"""The result of an audit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, NamedTuple, Tuple

from opacus_ext.tables import html_table, text_table


class Finding(NamedTuple):
    """One test of a claim."""

    test: str  # "sensitivity" or "noise" of steps, "membership" or "accountant" of runs
    subject: str
    claimed: float
    measured: float
    unit: str  # of both numbers
    broken: bool  # the measured number contradicts the claim


@dataclass
class Audit:
    """
    The result of an audit; ``str()`` of it is a table.

    Attributes:
        epsilon: a lower bound at ``delta``; 0 for single steps, and where attacks found
            nothing
        claimed: the epsilon that is claimed at ``delta``
        confidence: a correct run passes all tests with at least this probability
        findings: one for each test
    """

    epsilon: float
    claimed: float
    delta: float
    confidence: float
    findings: List[Finding]

    @property
    def broken(self) -> List[Finding]:
        """The findings that contradict the claim."""
        return [finding for finding in self.findings if finding.broken]

    @property
    def ok(self) -> bool:
        """True if no finding contradicts the claim."""
        return not self.broken

    def __str__(self) -> str:
        return f"{text_table(*self._table(), rule=True)}\n{self._verdict()}"

    def _repr_html_(self) -> str:
        return html_table(*self._table(), [self._verdict()])

    def _table(self) -> Tuple[List[str], List[List[str]]]:
        rows = [
            [f.test, f.subject, f"{f.claimed:.4g}", f"{f.measured:.4g}", f.unit]
            + ["BROKEN" if f.broken else "ok"]
            for f in self.findings
        ]
        return ["test", "of", "claimed", "measured", "in", ""], rows

    def _verdict(self) -> str:
        return (
            f"epsilon at delta={self.delta:g}: at least {self.epsilon:.3g}, claimed "
            f"{self.claimed:.3g}; {len(self.broken)} of {len(self.findings)} tests "
            f"contradict the claim (confidence {self.confidence:g})"
        )
