"""Runs a command of ``opacus-ext``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Optional, Sequence

from opacus_ext.planner.commands.options import COMMANDS, parse


def run(args: argparse.Namespace) -> int:
    """Runs a parsed command; 2 is for wrong arguments, 3 for a hopeless budget."""
    file = COMMANDS[args.command][0]
    module = import_module(f"opacus_ext.planner.commands.{file}")
    try:
        return getattr(module, args.command)(args)
    except BrokenPipeError:
        raise
    except (OSError, ValueError, ArithmeticError) as error:
        print(f"{args.parser.prog}: error: {error}", file=sys.stderr)
        raise SystemExit(getattr(error, "status", 2)) from error


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs ``opacus-ext`` with these arguments, by default those of the process."""
    return run(parse(argv))
