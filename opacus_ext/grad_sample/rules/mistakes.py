"""Mistakes of those who write a rule, told in words that name it."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any, Callable, Sequence

from torch import nn

from opacus_ext.refused import Refused


def name_of(function: object) -> str:
    """Returns the name of a function, with the module that it is in."""
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    module = getattr(function, "__module__", None)
    return name if module in (None, "__main__") else f"{module}.{name}"


def check_function(function: object) -> None:
    """Refuses a rule for what is no function, or one whose calls are not seen."""
    is_plain = isinstance(function, FunctionType) and not hasattr(function, "is_op")
    module = getattr(function, "__module__", None) or ""
    if is_plain and not module.startswith("torch."):
        raise Refused(
            f"{name_of(function)} is no op: its calls are not seen, so its rule would "
            "never be asked.",
            remedy="Mark it by @opacus_ext.as_op. If it is the rule itself, say which "
            "op it is for: @opacus_ext.register_rule(scale).",
        )
    is_class = isinstance(function, type) and issubclass(function, nn.Module)
    if is_class or isinstance(function, nn.Module) or not callable(function):
        raise Refused(
            f"{name_of(function)} is no function, so it can't have a rule.",
            remedy="Register the rule for the function that forward() calls, such as "
            "torch.nn.functional.linear, or one that you mark by @opacus_ext.as_op.",
        )


def check_rule(function: Callable, rule: Callable) -> None:
    """Refuses a rule that can't be called with the arguments of its function."""
    if not hasattr(function, "is_op"):
        # Many functions of torch do not tell their parameters.
        return
    parameters = inspect.signature(function).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if kinds != {inspect.Parameter.POSITIONAL_OR_KEYWORD}:
        return
    try:
        inspect.signature(rule).bind(*parameters)
    except TypeError as error:
        raise Refused(
            f"The rule {name_of(rule)} can't be called with the arguments of "
            f"{name_of(function)}: {error}.",
            remedy="Give it the same parameters.",
        ) from None


def check_op(function: Callable, rule: Callable, op: object) -> None:
    """Refuses what a rule has returned, if it is no Op with all that is needed."""
    problem = remedy = ""
    fields: list[Any] = [
        getattr(op, name, None) for name in ("params", "data", "data_dims")
    ]
    kinds = [type(field).__name__ for field in fields]
    if fields == [None] * 3:
        problem = f"returned a {type(op).__name__}"
        remedy = "Return an opacus_ext.Op, or None for a call that it does not cover."
    elif not {*kinds} <= {"tuple", "list"}:
        problem = "gives a {} as params, a {} as data, a {} as data_dims".format(*kinds)
        remedy = "Give tuples: params=(weight,), data=(x,), data_dims=(1,)."
    elif not fields[1]:
        problem = "gives no data"
        remedy = "Give the op's input, data=(x,), even if the factors do not need it."
    elif len(fields[1]) != len(fields[2]):
        problem = f"gives data_dims={tuple(fields[2])} for {len(fields[1])} data"
        ones = (1,) * len(fields[1])
        remedy = (
            "Say of each how many of its trailing dims belong to one row, as in "
            f"data_dims={ones}."
        )
    if problem:
        names = f"{name_of(rule)} of {name_of(function)}"
        raise Refused(f"The rule {names} {problem}.", remedy=remedy)


def check_factors(function: Callable, terms: object, values: Sequence) -> None:
    """
    Refuses what a function of factors has returned, if it is not one tuple of factors
    for each parameter. Those that are None at the end need none.
    """
    problem = ""
    if not isinstance(terms, (tuple, list)):
        problem = f"a {type(terms).__name__}"
    elif len(terms) > len(values) or any(x is not None for x in values[len(terms) :]):
        problem = f"{len(terms)} entries for {len(values)} params"
    else:
        for factors in terms:
            if type(factors) not in (tuple, list):
                problem = f"a list with a {type(factors).__name__}"
    if problem:
        raise Refused(
            f"{name_of(function)}, which gives the factors of a rule, returned "
            f"{problem}.",
            remedy="Return a list with one tuple of factors for each of the Op's "
            "params, such as [(backprops, activations)] for one.",
        )


def of_rule(error: Refused, function: Callable) -> Refused:
    """Makes an error of factors name the function that has given them."""
    reason = f"{name_of(function)} gives wrong factors for a rule. {error.reason}"
    return Refused(reason, remedy=error.remedy)
