"""How the user has compiled a model: what ``torch.compile`` was given."""

from __future__ import annotations

from typing import Any, Callable, ContextManager, Iterable, NamedTuple, Optional

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.decorators import skip
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule


class Settings(NamedTuple):
    """
    What ``torch.compile`` was given.

    Attributes:
        backend: called with a graph and its inputs
        fullgraph: whether what can't be compiled is an error
        dynamic: see ``torch.compile``
    """

    backend: Callable
    fullgraph: bool
    dynamic: Optional[bool]


def settings_of(module: nn.Module) -> Optional[Settings]:
    """How a model was compiled, by ``torch.compile(model)`` or ``model.compile()``."""
    if isinstance(module, OptimizedModule):
        return _of_context(module.dynamo_ctx)
    call = getattr(module, "_compiled_call_impl", None)
    for cell in getattr(call, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return _of_context(cell.cell_contents)
    return None


def uncompiled(module: nn.Module) -> Optional[Callable]:
    """What ``torch.compile(module)`` would call; None if that is its own forward."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def are_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether ``torch.compile`` was used on some modules."""
    return any(map(settings_of, modules))


def is_off() -> bool:
    """Whether ``torch.compiler.set_stance`` asks for what is not compiled."""
    return torch._dynamo.eval_frame._stance.stance.startswith(("force_eager", "eager"))


def eagerly() -> ContextManager:
    """What ``torch.compile`` was used on is run as if it were not, within."""
    return torch.compiler.set_stance("force_eager")


def settings_for(**arguments: Any) -> Settings:
    """How ``torch.compile`` with these arguments would compile."""
    return _of_context(torch.compile(nn.Identity(), **arguments).dynamo_ctx)


@skip
def settings_in_force() -> Optional[Settings]:
    """How the caller is being compiled, if it is."""
    callback = set_eval_frame(None)  # nothing of this is
    try:
        return _of_callback(callback, None) if callable(callback) else None
    finally:
        set_eval_frame(callback)


def _of_context(context: Any) -> Optional[Settings]:
    callback = getattr(context, "callback", None)
    if not callable(callback):
        return None
    return _of_callback(callback, getattr(context, "_dynamic", None))


def _of_callback(callback: Any, dynamic: Optional[bool]) -> Optional[Settings]:
    whole, backend = False, callback
    while True:  # frames, then the backend
        whole = whole or isinstance(backend, ConvertFrameAssert)
        names = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
        inner = next((x for n in names if (x := getattr(backend, n, None))), None)
        if inner is None:
            break
        backend = inner
    if backend is callback:
        return None
    return Settings(backend, whole, dynamic)
