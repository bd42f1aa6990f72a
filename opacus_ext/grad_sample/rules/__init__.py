"""Rules, one file a family of functions; importing this package registers them.

How to write one: :func:`register_rule`. A function that is computed in another way for
samples that run at once has a handler, :func:`handles`.
"""

from opacus_ext.grad_sample.rules import (  # noqa: F401
    attention,
    conv,
    embedding,
    experts,
    linear,
    recurrent,
)
from opacus_ext.grad_sample.rules.registry import (  # noqa: F401
    HANDLERS,
    RULES,
    NotAtOnce,
    Op,
    as_op,
    handles,
    register_rule,
)
