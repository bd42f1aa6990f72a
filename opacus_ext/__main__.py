"""``python -m opacus_ext``, as the command ``opacus-ext``."""

import sys

from opacus_ext.planner.commands.main import main

sys.exit(main())
