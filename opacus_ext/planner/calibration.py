"""The old name of :mod:`opacus_ext.accountants.calibration`."""

from opacus_ext.accountants.calibration import *  # noqa: F401,F403
