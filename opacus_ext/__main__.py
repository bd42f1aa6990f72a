"""Runs the command ``opacus-ext`` for ``python -m opacus_ext``."""

import sys

from opacus_ext.planner.commands.main import main

if __name__ == "__main__":
    sys.exit(main())
