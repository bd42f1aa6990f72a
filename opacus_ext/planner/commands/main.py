"""Runs a command of ``opacus-ext``."""

from __future__ import annotations

import argparse
from importlib import import_module
from typing import Optional, Sequence

from opacus_ext.planner.commands.parser import parse


def run(args: argparse.Namespace) -> int:
    """Runs a parsed command; the exit status: 2 for arguments that can't be."""
    command = import_module(f"opacus_ext.planner.commands.{args.command}")
    try:
        return command.run(args)
    except (OSError, ValueError, ArithmeticError) as error:
        args.parser.exit(2, f"{args.parser.prog}: error: {error}\n")


def main(argv: Optional[Sequence[str]] = None) -> int:
    """``opacus-ext`` with these arguments, by default those of the process."""
    return run(parse(argv))
