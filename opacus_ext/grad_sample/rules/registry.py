"""Rules: the per-sample gradients of an op, stated once for all modes.

A rule gets the arguments of a call. It returns the parameters among them, the data
that their gradients need, and a function of these and of the backprops that gives
factors (factors/). It does not depend on modes or clipping. An op without a rule is
exact, too: it is computed with one copy of the parameter for each sample.
"""

from __future__ import annotations

import functools
from typing import (
    Any,
    Callable,
    ContextManager,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
)

import torch
from torch.overrides import handle_torch_function, has_torch_function

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.rules.mistakes import check_function, check_rule


class Op(NamedTuple):
    """
    The result of a rule for one call.

    Attributes:
        params: the arguments that may be parameters, or computed from some; None for
            one that is left out. The rule is used only if the first is trained.
        data: the data that the factors need, as a sample sees them
        factors: maps ``(backprops, *data)``, each ``[B, T, *event]``, to one tuple of
            factors for each of ``params``; it must not write to these tensors
        event_dims: number of trailing dims of the output that belong to one row; all
            dims before them become rows
        data_dims: the same for each of ``data``
        run_all: maps ``(params, *data)``, with data ``[B, *shape]``, to the output of
            all samples ``[B, *rows, *event]``; None to run the op itself under vmap
    """

    params: tuple[Optional[torch.Tensor], ...]
    data: tuple[torch.Tensor, ...]
    factors: Callable[..., Sequence[tuple[Factor, ...]]]
    event_dims: int = 1
    data_dims: tuple[int, ...] = (1,)
    run_all: Callable[..., torch.Tensor] | None = None


Rule = Callable[..., Optional[Op]]

#: By function of torch, or one marked by :func:`as_op`; the first that applies is used.
RULES: dict[Callable, tuple[Rule, ...]] = {}


def register_rule(*functions: Callable) -> Callable[[Rule], Rule]:
    """
    Registers the decorated function as the rule of some functions of torch, or of
    functions marked by :func:`as_op`. It is called with their arguments and returns an
    :class:`Op`, or None if it does not apply.

    A rule only saves time and memory: its gradients must equal those of one copy of the
    parameter for each sample.

    Raises:
        Refused: for a function whose calls are not seen, or a rule that can't be called
            with the function's arguments

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

    for function in functions:
        check_function(function)

    def decorator(rule: Rule) -> Rule:
        for function in functions:
            check_rule(function, rule)
        for function in functions:
            RULES[function] = (rule, *RULES.get(function, ()))
        return rule

    return decorator


def as_op(function: Callable) -> Callable:
    """
    Marks a function so that its calls are intercepted as one op, like torch's own.

    Example: see :func:`register_rule`.
    """

    @functools.wraps(function)
    def op(*args: Any, **kwargs: Any) -> Any:
        tensors = [value for value in args if isinstance(value, torch.Tensor)]
        if has_torch_function(tensors):
            return handle_torch_function(op, tensors, *args, **kwargs)
        return function(*args, **kwargs)

    op.is_op = True  # type: ignore[attr-defined]
    return op


# -- functions that are computed differently -------------------------------------------

Handler = Callable[..., Any]


class Group(ContextManager, Protocol):
    """
    What handlers use of a group of samples, which is :class:`~core.group.SampleGroup`.
    In a ``with`` block it intercepts each op.
    """

    def is_batched(self, tensor: Any) -> bool:
        """Returns True for a tensor of one sample among several."""

    def call(
        self,
        func: Callable,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Calls a function by its rule, if it has one."""

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns per-sample copies of a parameter; any other tensor as it is."""

    def inner(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the values of all samples ``[B, *shape]``."""

    def outside(self) -> ContextManager:
        """Leaves the vmap level for a block, where tensors hold all samples."""

    def wrap(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns ``[B, *shape]`` as a tensor of one sample."""


#: By function of torch: the function that a group of samples calls instead,
#: ``handler(group, function, *args, **kwargs)``.
HANDLERS: dict[Callable, Handler] = {}


def handles(*functions: Callable) -> Callable[[Handler], Handler]:
    """Registers the handler of some functions."""

    def decorator(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return decorator


# -- functions that run as one op of all samples ---------------------------------------

#: By function, what runs it for all samples with the same arguments: each tensor is
#: ``[B, *shape]``, or ``[1, *shape]`` if samples share it, and so is its output. It
#: returns NotImplemented for what it leaves to vmap.
OF_ALL: dict[Callable, Callable] = {}
#: By function, what is called instead in compiled code, which can't leave the vmap
#: level. It comes before a handler, and its rules before those of the function.
IN_COMPILED: dict[Callable, Callable] = {}


def of_all(function: Callable) -> Callable[[Callable], Callable]:
    """Registers what runs a function for all samples, see :data:`OF_ALL`."""

    def decorator(run: Callable) -> Callable:
        OF_ALL[function] = run
        return run

    return decorator


_library = torch.library.Library("opacus_ext", "FRAGMENT")


def library_op(schema: str, function: Callable, run: Callable) -> Callable:
    """
    Returns an op that is made of torch's, for compiled code, whose vmap rule calls
    ``run``, see :data:`OF_ALL`.
    """
    name = schema.partition("(")[0]

    def rule(
        info: Any,
        in_dims: tuple,
        *args: Any,
    ) -> tuple[torch.Tensor, int]:
        values = list(args)
        for position, dim in enumerate(in_dims):
            value = args[position]
            if isinstance(value, torch.Tensor):
                # A tensor that samples share is one row, as in :data:`OF_ALL`.
                if dim is None:
                    values[position] = value.unsqueeze(0)
                else:
                    values[position] = value.movedim(dim, 0)
        return run(*values), 0

    _library.define(schema)
    _library.impl(name, function, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"opacus_ext::{name}", rule, lib=_library)
    return getattr(torch.ops.opacus_ext, name)


class NotAtOnce(Exception):
    """Raised if samples can't run together; they run one by one then."""
