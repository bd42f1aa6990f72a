"""Rules of error propagation, by kind of operation. Importing this registers all."""

from opacus_ext.re_attention.rules import arithmetic, joins, layers, moves  # noqa: F401
from opacus_ext.re_attention.rules.registry import RULES, Call, register_propagation

__all__ = ["RULES", "Call", "register_propagation"]
