"""Rules, one file a family; importing this package registers them."""

from opacus_ext.grad_sample.rules import (  # noqa: F401
    conv,
    embedding,
    experts,
    linear,
    norms,
    recurrent,
)
