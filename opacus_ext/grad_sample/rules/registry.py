"""Rules: what an op says about its gradients, once, for every mode.

A rule is given the arguments of a call and says what is made of parameters, what data
the gradient needs, and which factors (factors/) the two make with the gradient of the
output. It knows nothing of modes, clipping, or parameters that are shared. An op that
has no rule is exact too: it is computed with a copy of the parameter for each sample.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple, Optional, Sequence

import torch
from torch.overrides import handle_torch_function, has_torch_function

from opacus_ext.grad_sample.factors import Factor


class Op(NamedTuple):
    """
    What a rule says of one call.

    Attributes:
        params: the arguments that may be made of parameters; None for one left out.
            Where the first is not trained the rule is not taken: others need no data.
        data: what the factors need beside the gradient, as a sample sees it
        factors: ``(backprops, *data)``, each ``[B, T, *event]``, to one tuple of
            factors for each of ``params``
        event_dims: how many trailing dims of the output belong to one row; the dims
            before them only say which row it is
        data_dims: the same of each of ``data``
        whole: ``(params, *data)`` to the output, for all samples side by side
            ``[B, *rows, *event]``; None: the op itself under vmap
    """

    params: tuple[Optional[torch.Tensor], ...]
    data: tuple[torch.Tensor, ...]
    factors: Callable[..., Sequence[tuple[Factor, ...]]]
    event_dims: int = 1
    data_dims: tuple[int, ...] = (1,)
    whole: Callable[..., torch.Tensor] | None = None


Rule = Callable[..., Optional[Op]]

#: By function of torch, or one marked by :func:`as_op`; the first that holds counts.
RULES: dict[Callable, tuple[Rule, ...]] = {}


def register_rule(*functions: Callable) -> Callable[[Rule], Rule]:
    """
    Registers the decorated function as the rule of some functions of torch, or of ones
    marked by :func:`as_op`. It is called with their arguments and returns an
    :class:`Op`, or None where it does not hold.

    A rule is there for speed and memory alone: it must equal what a copy of the
    parameter for each sample gives.

    Example:
        >>> import torch
        >>> from opacus_ext import Op, as_op, register_rule
        >>> @as_op
        ... def scale(x, weight):
        ...     return weight * x
        >>> @register_rule(scale)
        ... def of_scale(x, weight):
        ...     return Op((weight,), (x,), lambda backprops, x: [(backprops * x,)])
    """

    def decorator(rule: Rule) -> Rule:
        RULES.update((f, (rule, *RULES.get(f, ()))) for f in functions)
        return rule

    return decorator


def as_op(function: Callable) -> Callable:
    """
    Marks a function so that modes see its calls as one op, as they see torch's own.

    Example: see :func:`register_rule`.
    """

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(op, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    return op


# -- functions that are computed in another way ----------------------------------------

Handler = Callable[..., Any]

#: By function of torch: what a group of samples calls in its place, as
#: ``handler(group, function, *args, **kwargs)``.
HANDLERS: dict[Callable, Handler] = {}


def handles(*functions: Callable) -> Callable[[Handler], Handler]:
    """Registers what a group of samples calls in the place of some functions."""

    def decorator(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return decorator


class NotAtOnce(Exception):
    """Raised for what samples can't do at once, so that they run one by one."""
