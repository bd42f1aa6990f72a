"""Tables in plain text and for notebooks, and objects in a line, for people."""

from __future__ import annotations

import html
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


def html_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str] = ()
) -> str:
    """
    The same table as :func:`text_table` makes, for ``_repr_html_`` of notebooks.

    Args:
        header: a cell for each column
        rows: as many cells each
        notes: lines below the table

    Example:
        >>> html_table(["mode"], [["hooks"]], ["a < b"]).count("<tr>")
        2
    """

    def line(kind: str, cells: Sequence[str]) -> str:
        inner = "".join(f"<{kind}>{html.escape(cell)}</{kind}>" for cell in cells)
        return f"<tr>{inner}</tr>"

    lines = [line("th", header), *(line("td", row) for row in rows)]
    below = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"<table>{''.join(lines)}</table>{below}"


def in_short(value: object) -> str:
    """
    Example:
        >>> in_short(0.1 + 0.2), in_short(64), in_short("measured")
        ('0.3', '64', 'measured')
    """
    return f"{value:g}" if isinstance(value, float) else str(value)


def in_a_line(value: object, *first: str, **fields: object) -> str:
    """
    Describes an object for its ``__repr__``: its class, and its most important values.

    Args:
        value: the object
        first: what needs no name
        fields: values by name; None is left out

    Example:
        >>> in_a_line([], "of two", size=32, bound=0.1 + 0.2, delta=None)
        'list(of two, size=32, bound=0.3)'
    """
    parts = list(first)
    for name, field in fields.items():
        if field is not None:
            parts.append(f"{name}={in_short(field)}")
    return f"{type(value).__name__}({', '.join(parts)})"
