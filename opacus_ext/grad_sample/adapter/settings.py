"""The settings with which a user has called ``torch.compile``, and Dynamo's for us."""

from __future__ import annotations

from logging import Logger, LogRecord, getLogger
from typing import Any, Callable, NamedTuple

import torch
from torch import nn

from opacus_ext.private_torch import OptimizeContext, OptimizedModule
from opacus_ext.private_torch import dynamo_config as config

T = torch.Tensor
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
    compiled = vars(module).get("_compiled_call_impl")
    # The context of the compiler is in the closure of what nn.Module calls.
    for cell in getattr(compiled, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return settings_from(cell.cell_contents.callback)
    return None


def settings_from(compiler: object) -> Settings | None:
    """Returns the settings of a compiler, see ``set_compiler`` of private_torch.py."""
    fullgraph, backend = False, compiler
    # The compiler is wrapped several times, with one wrapper that asserts fullgraph.
    while callable(backend):
        fullgraph = fullgraph or "Assert" in type(backend).__name__
        inner = getattr(backend, "_torchdynamo_orig_callable", None)
        inner = getattr(backend, "_torchdynamo_orig_backend", inner)
        if inner is None:
            break
        backend = inner
    if backend is compiler or not callable(backend):
        return None
    return Settings(backend, fullgraph)


def changed_config() -> dict[str, Any]:
    """
    Returns Dynamo's settings for our functions: programs are counted by model, and what
    code logs was logged where it ran eagerly.
    """
    limits = "recompile_limit", "accumulated_recompile_limit"
    changes: dict[str, Any] = dict.fromkeys(limits, 2**30)
    if hasattr(config, "ignore_logger_methods"):
        methods = [getattr(Logger, name, None) for name in _LOGGING]
        changes["ignore_logger_methods"] = set(methods) - {None}
        # torch 2.11 logs an error for each program: functions can't be written as JSON.
        if torch.__version__ < "2.12":
            getLogger("torch._dynamo.metrics_context").addFilter(_is_no_metric)
    return changes


def _is_no_metric(record: LogRecord) -> bool:
    return "logging compilation metrics" not in record.getMessage()


def frame_to_count(x: T) -> T:
    """Can be compiled: ``fullgraph=True`` expects one such function."""
    return x + 1
