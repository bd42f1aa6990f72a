"""Rules, one file for each family of functions; importing this package registers them.

:func:`register_rule` says how to write one. A function that is computed differently for
samples that run together has a handler, :func:`handles`.
"""

from opacus_ext.grad_sample.rules import (  # noqa: F401
    attention,
    conv,
    embedding,
    experts,
    linear,
    losses,
    recurrent,
)
from opacus_ext.grad_sample.rules.registry import (  # noqa: F401
    HANDLERS,
    IN_COMPILED,
    OF_ALL,
    RULES,
    NotAtOnce,
    Op,
    Rule,
    as_op,
    handles,
    register_rule,
)
