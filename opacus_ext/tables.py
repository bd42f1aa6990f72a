"""Tables in plain text, for people."""

from __future__ import annotations

from typing import Sequence


def text_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    rule: bool = False,
    right: bool = False,
) -> str:
    """
    A table of columns that are as wide as their widest cell, two spaces apart.

    Args:
        header: a cell for each column
        rows: as many cells each
        rule: True for dashes under the header
        right: True for cells aligned to the right, as for numbers

    Example:
        >>> print(text_table(["mode", "error"], [["hooks", "1e-15"]], rule=True))
        mode   error
        -----  -----
        hooks  1e-15
    """
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    if rule:
        lines.insert(1, ["-" * width for width in widths])
    put = str.rjust if right else str.ljust
    return "\n".join("  ".join(map(put, line, widths)).rstrip() for line in lines)
