"""Random numbers drawn inside a layer, so that it can be run again with the same.

A layer without a rule is run again for each sample (replay.py), and must then drop the
very entries that it had dropped for the batch. What its call draws is kept, one tensor
for each op that draws; autograd would keep the masks of dropout anyway.
"""

from __future__ import annotations

from typing import Any, Callable, Iterable, List, Optional

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.batchless import Undecided, settled, shared

_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout),
    *(F.feature_alpha_dropout, torch.dropout, torch.feature_dropout),
}
_DRAWS = {
    *(torch.rand, torch.rand_like, torch.randn, torch.randn_like, torch.randint),
    *(torch.bernoulli, torch.Tensor.bernoulli, torch.Tensor.bernoulli_),
    *(torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.exponential_),
}


def draws(layer: nn.Module) -> bool:
    """Whether a layer looks as if its forward drops entries at random."""
    return layer.training and any(map(_drops, layer.modules()))


def _drops(part: nn.Module) -> bool:
    kind = "Dropout" in type(part).__name__
    return any(
        isinstance(value, (int, float))
        and value > 0
        and ("drop" in name.lower() or (kind and name == "p"))
        for name, value in vars(part).items()
    )


class Drawn(TorchFunctionMode):
    """
    Keeps what is drawn within it, or gives again what was drawn before.

    Args:
        given: what was drawn before; None for a first run

    Raises:
        RuntimeError: if something else is drawn the second time

    Example:
        >>> x = torch.ones(3, 4)
        >>> with Drawn() as drawn:
        ...     first = F.dropout(x)
        >>> with Drawn(drawn.kept):
        ...     bool((F.dropout(x) == first).all())
        True
    """

    def __init__(self, given: Optional[Iterable[torch.Tensor]] = None):
        super().__init__()
        self.kept: List[torch.Tensor] = []
        self._given = None if given is None else iter(given)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DROPOUTS:
            return self._drop(func, *args, **kwargs)
        if func in _DRAWS:
            return self._keep(lambda: func(*args, **kwargs).clone())
        return func(*args, **kwargs)

    def _keep(self, draw: Callable[[], torch.Tensor]) -> torch.Tensor:
        if self._given is None:
            self.kept.append(draw())
            return self.kept[-1]
        again = next(self._given, None)
        if again is None:
            raise RuntimeError("it draws more random numbers than before")
        return again

    def _drop(
        self,
        func: Callable,
        input: torch.Tensor,
        p: float = 0.5,
        training: bool = True,
        *rest: Any,
        train: bool = True,
        inplace: bool = False,
    ) -> torch.Tensor:
        if not (training and train) or p == 0:
            return input
        x = settled(input)
        if "alpha" in func.__name__:  # no factor: it shifts the entries it drops
            return func(x, p, training)
        mask = self._keep(lambda: func(torch.ones_like(x), p, training))
        if mask.shape != x.shape:
            raise RuntimeError(f"it drops entries of {tuple(x.shape)} now")
        y = x.mul_(mask) if inplace or (rest and rest[0]) else x * mask
        copies = isinstance(input, Undecided) and y.dim() > input.dim()
        return shared(y, input, input.source) if copies else y
