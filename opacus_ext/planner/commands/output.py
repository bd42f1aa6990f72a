"""Output of commands: JSON for programs, columns for people."""

from __future__ import annotations

import json
import math
from typing import Any, Dict, List, Sequence

from opacus_ext.tables import text_table


def strict_json(content: Any, **options: Any) -> str:
    """
    JSON with numbers of numpy as plain ones, and null for those that are not finite.

    Args:
        **options: of ``json.dumps``

    Example:
        >>> strict_json({"loss": float("nan"), "steps": [1, 2]})
        '{"loss": null, "steps": [1, 2]}'
    """

    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        if hasattr(x, "tolist"):
            return plain(x.tolist())
        return None if isinstance(x, float) and not math.isfinite(x) else x

    return json.dumps(plain(content), allow_nan=False, **options)


def print_result(content: Any, as_json: bool) -> None:
    """Prints what a command found, as JSON or for people."""
    print(strict_json(content, indent=2) if as_json else show_all(content))


def show_all(content: Any) -> str:
    """A dict for people, a line for each value that is known; lists as tables."""
    if not isinstance(content, dict):
        return show_table(content)
    lines: List[str] = []
    known = {k: v for k, v in content.items() if _is_known(v)}
    width = max(len(k) for k, v in known.items() if not isinstance(v, list)) + 2
    for name, value in known.items():
        if name in ("notes", "warnings"):
            lines += [f"! {note}" for note in value]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines += ["", f"{name}:", show_table(value)]
        elif isinstance(value, str) and "\n" in value:
            lines += ["", value]
        else:
            lines.append(f"{name:{width}}{show(value)}")
    return "\n".join(lines)


def _is_known(value: Any) -> bool:
    return bool(value) if isinstance(value, (list, dict)) else value is not None


def show(value: Any) -> str:
    """A value for people, in a few characters."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return (" to " if len(value) == 2 else ", ").join(map(show, value))
    if isinstance(value, dict):
        known = {k: v for k, v in value.items() if v not in (None, {})}
        return ", ".join(f"{k} {show(v)}" for k, v in known.items())
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "-"
    if isinstance(value, int) or value.is_integer() and abs(value) < 1e9:
        return f"{int(value):,}"
    return f"{value:.4g}"


def show_table(rows: Sequence[Dict[str, Any]]) -> str:
    """Rows of equal keys, a column for each key of which any value is known."""
    if not rows:
        return ""
    known = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    shown = [[show(row[name]) for name in known] for row in rows]
    return text_table(known, shown, right=True)
