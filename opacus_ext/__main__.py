"""Runs the command ``opacus-ext`` for ``python -m opacus_ext``."""

import sys

from opacus_ext.planner.commands.main import main
from opacus_ext.planner.commands.options import until_nobody_reads

if __name__ == "__main__":
    sys.exit(until_nobody_reads(main))
