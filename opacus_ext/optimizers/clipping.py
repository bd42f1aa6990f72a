"""Clipping functions: from the norms of per-sample gradients to their factors.

Each states its sensitivity, the largest norm that one sample's clipped gradient can
have; the noise is the noise multiplier times that.
"""

from __future__ import annotations

import math
import warnings
from typing import (
    TYPE_CHECKING,
    Callable,
    Dict,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import torch

from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.parallel.group import ExpertGroup

Bound = Union[float, List[float]]


class Clipping(NamedTuple):
    """
    A clipping function, the same for all modes.

    Attributes:
        name: as passed to ``make_private(clipping=...)``
        factors: ``(norms [parameters, B], max_grad_norm)`` to factors ``[B]``, or
            ``[parameters, B]`` if ``per_parameter``. Where experts are sharded over
            processes the norms are those over all parameters ``[1, B]``
        sensitivity: ``max_grad_norm`` to the largest norm of a clipped gradient
        per_parameter: whether every parameter has its own factor and bound
    """

    name: str
    factors: Callable[[torch.Tensor, Bound], torch.Tensor]
    sensitivity: Callable[[Bound], float] = lambda bound: bound
    per_parameter: bool = False


CLIPPINGS: Dict[str, Clipping] = {}


def clipping_factors(
    clipping: Clipping,
    bound: Bound,
    norms: Union[torch.Tensor, List[torch.Tensor]],
    groups: Sequence[Optional[ExpertGroup]],
) -> Tuple[List[torch.Tensor], Optional[torch.Tensor]]:
    """
    The factors of one step, also where a part of the parameters is sharded over
    processes: then what a sample's gradients amount to is found by one all-reduce of
    squared norms, and clipping by parameter needs none.

    Args:
        norms: for each parameter (or for several together, where clipping is not by
            parameter), of this process's samples ``[B]``; of a parameter that is
            sharded, of the samples of all processes
        groups: for each parameter, the processes it is sharded over; None if it is not

    Returns:
        Factors for each parameter, as long as its norms, and the norms over all
        parameters of this process's samples ``[B]``; None where it would take an
        all-reduce that clipping by parameter does without.
    """
    group = next((w for w in groups if w is not None), None)
    if group is None:
        norms = norms if isinstance(norms, torch.Tensor) else torch.stack(norms)
        factors = clipping.factors(norms, bound)
        each = list(factors) if factors.dim() > 1 else [factors] * len(groups)
        return each, _total(norms)
    if clipping.per_parameter:
        pairs = zip(norms, bound)
        return [clipping.factors(n[None], [c])[0] for n, c in pairs], None
    squares = norms[0].new_zeros(group.batch_size)
    for n, own in zip(norms, groups):
        (squares[group.own_samples] if own is None else squares).add_(
            n.to(squares) ** 2
        )
    total = group.sum(squares).sqrt()
    factors = clipping.factors(total[None], bound)
    each = [factors[group.own_samples] if w is None else factors for w in groups]
    return each, total[group.own_samples]


def not_finite(
    norms: Union[torch.Tensor, List[torch.Tensor]],
) -> Optional[torch.Tensor]:
    """
    Args:
        norms: for each parameter, of the samples' gradients ``[B]``

    Returns:
        which samples have a gradient that is not finite, ``[B]``; None if none has
    """
    if not len(norms):
        return None
    if not isinstance(norms, torch.Tensor):
        norms = torch.stack([n.to(norms[0]) for n in norms])
    finite = norms.isfinite().all(0)
    return None if bool(finite.all()) else ~finite


def report_not_finite(
    norms: List[torch.Tensor],
    names: Sequence[str],
    on_nonfinite: str = "drop",
    sample: Optional[int] = None,
) -> None:
    """
    A sample whose gradient is not finite adds nothing to the sum.

    Args:
        norms: for each parameter, of the samples' gradients ``[B]``
        names: of the parameters
        on_nonfinite: "drop" or "raise"
        sample: the number of the sample, if ``norms`` are of one

    Warns:
        RuntimeWarning: with the first parameter that has one

    Raises:
        Refused: with "raise"
    """
    pairs = ((k, x) for k, x in zip(names, norms) if not x.isfinite().all())
    name, n = next(pairs, ("its parameters", norms[0] * math.nan))
    number = int((~n.isfinite()).nonzero()[0]) if sample is None else sample
    advice = (
        "Look for a division by zero or a log of zero in the model or the loss, and "
        "where float16 overflows use bfloat16, or a smaller scale in "
        "loss.backward(scale=...)."
    )
    if on_nonfinite == "raise":
        raise Refused(
            f"The gradient of sample {number} by {name} is not finite, so that it "
            f"can't be clipped. Nothing was changed.",
            parameter=name,
            remedy=advice,
        )
    warnings.warn(
        f"A sample's gradient by {name} is not finite. Such samples are clipped to "
        f'zero; make_private(on_nonfinite="raise") makes it an error. {advice}',
        RuntimeWarning,
        stacklevel=4,
    )


def register_clipping(clipping: Clipping) -> Clipping:
    """
    Makes a clipping function known by its name, to all modes.

    Example:
        >>> from opacus_ext import Clipping, register_clipping
        >>> def sign(norms, bound):
        ...     return bound / norms.norm(dim=0).clamp(min=1e-12)
        >>> _ = register_clipping(Clipping("sign", sign))
        >>> import opacus_ext.optimizers.clipping as clipping
        >>> _ = clipping.CLIPPINGS.pop("sign")
    """
    CLIPPINGS[clipping.name] = clipping
    return clipping


def find_clipping(clipping: Union[str, Clipping]) -> Clipping:
    """
    Raises:
        Refused: for a name that is not registered, with those that are
    """
    if isinstance(clipping, Clipping):
        return clipping
    if clipping not in CLIPPINGS:
        raise Refused(
            f"Unknown clipping {clipping!r}.",
            parameter="clipping",
            remedy=f"Known: {', '.join(sorted(CLIPPINGS))}.",
        )
    return CLIPPINGS[clipping]


def _total(norms: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(norms, dim=0)


def _flat(norms: torch.Tensor, bound: float) -> torch.Tensor:
    return (bound / (_total(norms) + 1e-6)).clamp(max=1.0)


def automatic(gamma: float = 0.01) -> Clipping:
    """
    AUTO-S: every gradient is scaled to just below ``max_grad_norm``, with factor
    ``C / (norm + gamma)``. Source: Bu et al. 2022, "Automatic Clipping".

    Args:
        gamma: keeps small gradients small; in the units of a gradient norm

    Raises:
        Refused: if gamma is not positive

    Example:
        >>> from opacus_ext import automatic
        >>> automatic(gamma=0.1).name
        'automatic'
    """
    if not gamma > 0:
        raise Refused(f"gamma must be positive, got {gamma}.", parameter="gamma")
    return Clipping("automatic", lambda norms, bound: bound / (_total(norms) + gamma))


def _per_layer(norms: torch.Tensor, bound: List[float]) -> torch.Tensor:
    bounds = torch.as_tensor(bound, dtype=norms.dtype, device=norms.device)
    return (bounds[:, None] / (norms + 1e-6)).clamp(max=1.0)


register_clipping(Clipping("flat", _flat))
register_clipping(automatic())
# De et al. 2022: clipped to C and divided by C, so that the learning rate does not
# depend on C.
register_clipping(
    Clipping("normalised", lambda n, bound: _flat(n, bound) / bound, lambda bound: 1.0)
)
CLIPPINGS["normalized"] = CLIPPINGS["normalised"]
register_clipping(
    Clipping("per_layer", _per_layer, lambda bound: math.hypot(*bound), True)
)
