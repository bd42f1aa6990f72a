import sys

from opacus_ext.cli import main

sys.exit(main())
