"""Scaling laws under differential privacy, and the planner that rests on them."""

from opacus_ext.planner import laws
from opacus_ext.planner.budget import Budget
from opacus_ext.planner.laws import CHINCHILLA, KAPLAN, Fit, Law
from opacus_ext.planner.loss_model import LossModel
from opacus_ext.planner.measure import Family, byte_transformers
from opacus_ext.planner.measurements import Measurements
from opacus_ext.planner.plan import Candidates, Plan
from opacus_ext.planner.surface import Surface, hold_out, scaled_options

__all__ = [
    "CHINCHILLA",
    "KAPLAN",
    "Budget",
    "Candidates",
    "Family",
    "Fit",
    "Law",
    "LossModel",
    "Measurements",
    "Plan",
    "Surface",
    "byte_transformers",
    "hold_out",
    "laws",
    "scaled_options",
]
