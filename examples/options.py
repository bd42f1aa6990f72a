"""Options of the training programs."""

from __future__ import annotations

import argparse
import math
from typing import Any, Callable


def bounded_number(
    kind: type, low: float, high: float = math.inf
) -> Callable[[str], Any]:
    """
    A type for argparse: a number in ``[low, high]``.

    Example:
        >>> bounded_number(int, 1)("3")
        3
    """

    def parse(text: str) -> Any:
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not in [{low}, {high}]")
        return value

    parse.__name__ = kind.__name__
    return parse


def option(
    parser: argparse.ArgumentParser,
    flag: str,
    default: Any,
    kind: Any,
    text: str,
    **kwargs: Any,
) -> None:
    """Adds an option whose help ends with its default."""
    shown = "" if default is None else f" (default {default})"
    parser.add_argument(flag, default=default, type=kind, help=text + shown, **kwargs)
