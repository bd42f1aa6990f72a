"""The settings of ``torch.compile`` on a model, read from private names of torch."""

from __future__ import annotations

from functools import partial
from logging import Logger
from types import FunctionType
from typing import Any, Callable, NamedTuple

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo import config
from torch._dynamo.decorators import skip  # noqa: F401
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

#: Sets the compiler of code that runs next, or None; returns the one before.
set_compiler: Callable[[Any], Any] = set_eval_frame


# The last two are those of transformers.
_LOGGING = "debug", "info", "warning", "error", "info_once", "warning_once"


class Settings(NamedTuple):
    """Arguments of ``torch.compile``."""

    backend: Callable  # called with a graph and its inputs
    fullgraph: bool  # True if a graph break is an error
    most: int = 64  # the most programs of one model, for its batch sizes and lengths


def settings_of(module: nn.Module) -> Settings | None:
    """Returns the settings of ``torch.compile(model)`` or ``model.compile()``."""
    if isinstance(module, OptimizedModule):
        return settings_from(module.dynamo_ctx.callback)
    call = vars(module).get("_compiled_call_impl")
    for cell in getattr(call, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return settings_from(cell.cell_contents.callback)
    return None


def settings_from(compiler: Any) -> Settings | None:
    """Returns the settings of a compiler, see :data:`set_compiler`."""
    whole, backend = False, compiler
    while callable(backend):
        whole = whole or "Assert" in type(backend).__name__  # ConvertFrameAssert
        names = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
        inner = next((x for n in names if (x := getattr(backend, n, None))), None)
        if inner is None:
            break
        backend = inner
    found = callable(compiler) and backend is not compiler
    return Settings(backend, whole) if found else None


def compile_whole(function: Callable, backend: Callable, most: int) -> Callable:
    """
    Compiles a function without graph breaks, into at most ``most`` programs. What it
    logs is left out: it was logged where the function ran eagerly.
    """
    changes: dict[str, Any] = {"recompile_limit": most}
    if hasattr(config, "ignore_logger_methods"):
        names = filter(partial(hasattr, Logger), _LOGGING)
        changes["ignore_logger_methods"] = {getattr(Logger, name) for name in names}
    given: Any = dict(backend=backend, fullgraph=True, dynamic=False)
    return config.patch(changes)(torch.compile(_copy(function), **given))


def leave_out(op: Callable) -> None:
    """Makes Inductor return the first argument of an op in its place."""
    from torch._inductor import decomposition

    if op not in decomposition.decompositions:
        decomposition.decompositions[op] = lambda x, *others: x
        decomposition.fast_random_decomps.cache_clear()  # a copy, made before perhaps


def _copy(function: Any) -> Callable:
    """Copies a function with its code: programs are kept and counted by code."""
    code, name = function.__code__.replace(), function.__name__
    return FunctionType(code, function.__globals__, name, None, function.__closure__)


def count_a_frame() -> None:
    """Calls a function that can be compiled, as ``fullgraph=True`` expects one."""
    _frame(torch.zeros(()))


def _frame(x: torch.Tensor) -> torch.Tensor:
    return x + 1
