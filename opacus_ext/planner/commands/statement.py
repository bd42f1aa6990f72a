"""``opacus-ext statement``: the privacy statement of a checkpoint."""

from __future__ import annotations

import argparse

from opacus_ext.statement import read_statement


def run(args: argparse.Namespace) -> int:
    """Prints the statement; 1 if no guarantee is known."""
    statement = read_statement(args.checkpoint, args.delta, unit=args.unit)
    print(statement.json() if args.json else statement.text.rstrip("\n"))
    return int(statement.content["holds"] == "no")
