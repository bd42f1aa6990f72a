"""``opacus-ext statement``: what may be said of the privacy of a checkpoint."""

from __future__ import annotations

import argparse

from opacus_ext.statement import read_statement


def run(args: argparse.Namespace) -> int:
    """Prints it; 1 if no guarantee is known."""
    statement = read_statement(args.checkpoint, args.delta, unit=args.unit)
    print(statement.json() if args.json else statement.text.rstrip("\n"))
    return int(statement.content["holds"] == "no")
