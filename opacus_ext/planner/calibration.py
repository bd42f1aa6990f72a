"""The functions of :mod:`opacus_ext.accountants.calibration`, under their old name."""

from opacus_ext.accountants.calibration import (
    Calibration,
    calibrate,
    delta,
    epsilon,
    gaussian_noise_multiplier,
    noise_batch_ratio,
    noise_multiplier,
)

__all__ = [
    "Calibration",
    "calibrate",
    "delta",
    "epsilon",
    "gaussian_noise_multiplier",
    "noise_batch_ratio",
    "noise_multiplier",
]
