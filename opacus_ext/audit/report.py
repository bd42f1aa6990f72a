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
    The result of an audit; ``str()`` of it is a verdict and a table.

    Attributes:
        epsilon: a lower bound at ``delta``; 0 for single steps, and where attacks found
            nothing
        claimed: the epsilon that is claimed at ``delta``
        confidence: a correct run passes all tests with at least this probability
        findings: one for each test
        canaries: their number in a run; 0 for single steps, which bound no epsilon
        most: the largest epsilon that so many canaries could have shown
        can_tell: True if a run that leaks could have contradicted the claim
    """

    epsilon: float
    claimed: float
    delta: float
    confidence: float
    findings: List[Finding]
    canaries: int = 0
    most: float = 0.0
    can_tell: bool = True

    @property
    def broken(self) -> List[Finding]:
        """The findings that contradict the claim."""
        return [finding for finding in self.findings if finding.broken]

    @property
    def ok(self) -> bool:
        """True if no finding contradicts the claim."""
        return not self.broken

    @property
    def verdict(self) -> str:
        """The result in a sentence or two."""
        sure = f"{100 * self.confidence:g} % confidence"
        if self.broken:
            worst = self.broken[0]
            return (
                f"VIOLATION: {len(self.broken)} of {len(self.findings)} tests "
                f"contradict the claim ({sure}). The first is {worst.test} of "
                f"{worst.subject}: {worst.unit} {worst.measured:.4g}, where "
                f"{worst.claimed:.4g} is claimed."
            )
        if not self.canaries:
            return (
                "No fault was seen: no record moves the sum of a step by more than the "
                f"clipping bound, and the noise is what is claimed ({sure})."
            )
        seen = "No leak was seen"
        if not self.can_tell:
            seen = "Too few canaries to tell whether it leaks"
        return (
            f"{seen}: {self.canaries} canaries show epsilon at least "
            f"{self.epsilon:.2g} ({sure}), {self.claimed:.3g} is claimed at delta "
            f"{self.delta:g}. They could show {self.most:.2g} at most, if all guesses "
            "were right."
        )

    def __str__(self) -> str:
        return f"{self.verdict}\n\n{text_table(*self._table(), rule=True)}"

    def _repr_html_(self) -> str:
        return html_table(*self._table(), [self.verdict])

    def _table(self) -> Tuple[List[str], List[List[str]]]:
        noise = [f for f in self.findings if f.test == "noise" and not f.broken]
        others = [f for f in self.findings if f not in noise]
        rows = [
            [f.test, f.subject, f"{f.claimed:.4g}", f"{f.measured:.4g}", f.unit]
            + ["VIOLATION" if f.broken else "ok"]
            for f in others
        ]
        if noise:  # a row for all: a model may have hundreds of parameters
            sizes = [f.measured for f in noise]
            subject = f"{len(noise)} parameters and steps"
            span = f"{min(sizes):.3g} to {max(sizes):.3g}"
            rows.append(["noise", subject, "1", span, noise[0].unit, "ok"])
        return ["test", "of", "claimed", "measured", "in", ""], rows
