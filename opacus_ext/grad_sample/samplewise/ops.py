"""What a run knows of torch's functions: who handles them, what their arguments are."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Dict, Iterable, Iterator, List

import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

Handler = Callable[..., Any]
HANDLERS: Dict[Callable, Handler] = {}  # called as handler(run, func, *args, **kwargs)


def handles(*functions: Callable) -> Callable[[Handler], Handler]:
    """Registers what a run does in the place of some functions of torch."""

    def decorator(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return decorator


# Where a value goes on as another tensor, ``carried(x, move(x), move)`` may take along
# what is noted on it.
CARRIED: List[Callable[[torch.Tensor, torch.Tensor, Callable], None]] = []


def carry(
    x: torch.Tensor, y: torch.Tensor, move: Callable = lambda x: x
) -> torch.Tensor:
    """``y``, which is ``move(x)``, with what is noted on ``x``."""
    for carried in CARRIED:
        carried(x, y, move)
    return y


# -- arguments -----------------------------------------------------------------------


def refuse_carried(engine: "Engine", args: Iterable) -> None:
    """
    Raises:
        Refused: if what an earlier batch has left is among the arguments of an op
    """
    for x in args:
        if isinstance(x, torch.Tensor):
            if engine.made_of_data.holds(x) and not is_batched(x):
                raise Refused(
                    f"{engine.describe()}: reads a value of shape {tuple(x.shape)} "
                    "that was computed from an earlier batch, or by a hook of the "
                    "user from all samples of this one. It would carry private data "
                    "from batch to batch, or from sample to sample, without noise:",
                    module=engine.describe(),
                    remedy=(
                        "do not keep it, or reset it before each call; a state is "
                        "given to the model as an argument."
                    ),
                )
        elif type(x) in (list, tuple):
            refuse_carried(engine, x)


def look(args: Any, roots: List[torch.Tensor]) -> bool:
    """
    Adds what is made of parameters to ``roots``: what is shared by the samples and
    requires a gradient. Returns whether samples are among the arguments.
    """
    batched = False
    for x in args:
        if isinstance(x, torch.Tensor):
            # What samples see does not say that it requires a gradient.
            if is_batched(x):
                batched = True
            elif x.requires_grad:
                roots.append(x)
        elif type(x) in _NESTED:
            batched |= look(x, roots)
    return batched


_NESTED = (list, tuple)


def swapped(args: Any, swap: Dict[int, torch.Tensor]) -> Any:
    return type(args)(
        [
            (
                swap.get(id(x), x)
                if isinstance(x, torch.Tensor)
                else swapped(x, swap) if type(x) in _NESTED else x
            )
            for x in args
        ]
    )


def swapped_dict(kwargs: dict, swap: Dict[int, torch.Tensor]) -> dict:
    if not kwargs:
        return kwargs
    return dict(zip(kwargs, swapped(list(kwargs.values()), swap)))


def writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name[-1:] == "_" and name[-2:] != "__")


# -- tables --------------------------------------------------------------------------


def _getters(*names: str) -> Iterator[Callable]:
    for name in names:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__


T = torch.Tensor
TELLS_NOTHING = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_leaf", "grad_fn"),
    *_getters("is_cuda", "is_sparse", "names", "is_nested", "is_quantized", "is_meta"),
    *_getters("is_mkldnn", "is_cpu", "itemsize", "nbytes", "_version", "_base"),
    T.dim,
    T.size,
    T.numel,
    T.stride,
    T.is_floating_point,
    T.is_complex,
    T.is_contiguous,
    T.__len__,
    T.__hash__,
    T.get_device,
    T.storage_offset,
    T.element_size,
    T.ndimension,
    T.nelement,
    T.is_signed,
    torch.is_floating_point,
    torch.is_complex,
    torch.numel,
    torch.is_tensor,
}
_WRITES = {
    "__setitem__",
    "__iadd__",
    "__isub__",
    "__imul__",
    "__itruediv__",
    "__ipow__",
    "__ifloordiv__",
    "__imod__",
    "__iand__",
    "__ior__",
    "__ixor__",
}
KEEPS_ENTRIES = {
    T.to,
    T.float,
    T.half,
    T.bfloat16,
    T.double,
    T.type,
    T.type_as,
    T.contiguous,
    T.clone,
    torch.clone,
    T.cuda,
    T.cpu,
}
DRAWS = {
    F.dropout,
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    F.alpha_dropout,
    F.feature_alpha_dropout,
    torch.dropout,
    torch.feature_dropout,
}
