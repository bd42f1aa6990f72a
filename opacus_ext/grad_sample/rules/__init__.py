"""
Rules, one file a family of functions or layers; importing this package registers them.

How to write one: :func:`register_rule` and :func:`register_op`. In which order they are
asked: :class:`Table`.
"""

from opacus_ext.grad_sample.rules import (  # noqa: F401
    conv,
    embedding,
    experts,
    linear,
    norms,
    recurrent,
)
from opacus_ext.grad_sample.rules.registry import (
    TABLE,
    Op,
    Rule,
    Table,
    register_forward,
    register_op,
    register_rule,
    register_substitute,
)

__all__ = [
    "TABLE",
    "Op",
    "Rule",
    "Table",
    "register_forward",
    "register_op",
    "register_rule",
    "register_substitute",
]
