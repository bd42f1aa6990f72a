"""Runs the command ``opacus-ext`` for ``python -m opacus_ext``."""

import sys

from opacus_ext.planner.commands.main import main

sys.exit(main())
