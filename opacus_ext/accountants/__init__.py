"""Privacy accounting beside Opacus's: bounds on both sides, other mechanisms."""

from opacus_ext.accountants.calibration import noise_left
from opacus_ext.accountants.numerical import Bounds
from opacus_ext.accountants.prv import PRVBoundsAccountant

__all__ = ["Bounds", "PRVBoundsAccountant", "noise_left"]
