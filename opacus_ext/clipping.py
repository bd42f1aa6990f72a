"""Clipping functions: from the norms of per-sample gradients to their factors.

Each states its sensitivity, the most that one record can change the clipped sum. The
standard deviation of the noise is the noise multiplier times the sensitivity.
"""

from __future__ import annotations

import math
import numbers
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Union

import torch

from opacus_ext.refused import Refused, check_argument

__all__ = [
    "Clipping",
    "ClippingFunction",
    "find_clipping",
    "register_clipping",
]

Bound = Union[float, List[float]]


# How many of the largest clipped gradients the sums of two neighbors differ by. One
# data set has one more record, has another record in the place of one, or has a record
# whose gradient is zero instead.
_RELATIONS = {"add_or_remove_one": 1, "replace_one": 2, "replace_special": 1}


def _length(bound: Bound) -> float:
    """The largest norm of a gradient whose norm, or whose parts' norms, have bounds."""
    return math.hypot(*bound) if isinstance(bound, (list, tuple)) else bound


class Clipping(NamedTuple):
    """
    A kind of clipping, the same for all modes; :meth:`at` gives it a bound.

    Attributes:
        name: as passed to ``make_private(clipping=...)``
        factors: ``(norms [B], max_grad_norm)`` to factors ``[B]``; both
            ``[parameters, B]`` if ``per_parameter``. The factor of a sample must depend
            on that sample's norms only
        largest_norm: ``max_grad_norm`` to the largest norm of a clipped gradient; by
            default ``max_grad_norm`` itself, or the norm of the list
        per_parameter: whether every parameter has its own factor and bound
    """

    name: str
    factors: Callable[[torch.Tensor, Bound], torch.Tensor]
    largest_norm: Callable[[Bound], float] = _length
    per_parameter: bool = False

    def at(self, bound: Bound) -> ClippingFunction:
        """
        The clipping function with this ``max_grad_norm``.

        Raises:
            Refused: for a bound that is no positive number, or, if the clipping is by
                parameter, no list of positive numbers
        """
        # Compiled code can't ask a number that changes for its attributes.
        if not isinstance(bound, float) and hasattr(bound, "tolist"):
            bound = bound.tolist()
        if isinstance(bound, (list, tuple)):
            bound = [b.item() if hasattr(b, "item") else b for b in bound]
        check_bound(self, bound)
        return ClippingFunction(self, bound)


class ClippingFunction(NamedTuple):
    """
    A clipping function: called with norms it gives the factors of the gradients.

    Args:
        clipping: which kind
        bound: ``max_grad_norm``; a list if it is by parameter

    Example:
        >>> clip = find_clipping("flat").at(1.0)
        >>> clip(torch.tensor([0.5, 2.0]))
        tensor([1.0000, 0.5000])
        >>> clip.sensitivity("replace_one")
        2.0
    """

    clipping: Clipping
    bound: Bound

    @property
    def per_parameter(self) -> bool:
        """True if norms and factors are ``[parameters, B]`` instead of ``[B]``."""
        return self.clipping.per_parameter

    def __call__(self, norms: torch.Tensor) -> torch.Tensor:
        """The factors of gradients with these norms."""
        return self.clipping.factors(norms, self.bound)

    def sensitivity(self, relation: Any = "add_or_remove_one") -> float:
        """
        The most that the clipped sums of neighbors differ, in L2 norm.

        Args:
            relation: "add_or_remove_one", "replace_one" or "replace_special" (against a
                gradient of zero), or dp-accounting's member of such a name
        """
        name = str(getattr(relation, "name", relation)).lower()
        if name not in _RELATIONS:
            raise Refused(
                f"Unknown neighboring relation {relation!r}.",
                parameter="relation",
                remedy=f"Known: {', '.join(_RELATIONS)}.",
            )
        return _RELATIONS[name] * float(self.clipping.largest_norm(self.bound))


def check_bound(
    clipping: Clipping, bound: Bound, parameters: Optional[int] = None
) -> None:
    """
    Refuses a bound that does not fit the clipping, or the number of parameters. A bound
    that is broadcast to several parameters would make the sensitivity larger than
    stated.
    """
    several = isinstance(bound, (list, tuple))
    bounds: Any = bound if several else [bound]
    fits = several == clipping.per_parameter
    if several and parameters is not None:
        fits = fits and len(bounds) == parameters
    for b in bounds:
        number = isinstance(b, numbers.Real) and not isinstance(b, bool)
        fits = fits and number and 0 < b < math.inf
    if not fits:
        _refuse_bound(clipping.name, clipping.per_parameter, bound, parameters)


@torch.compiler.assume_constant_result  # compiled code would hide what it raises
def _refuse_bound(
    name: str, per_parameter: bool, bound: Any, parameters: Optional[int]
) -> None:
    takes, count = "one positive number", "" if parameters is None else f"{parameters} "
    if per_parameter:
        takes = (
            f"a list with one positive number for each of the {count}trained parameter "
            "tensors, in their order"
        )
    remedy = "Give that: it sets the sensitivity, to which the noise is scaled."
    if per_parameter and type(bound) in (int, float) and 0 < bound < math.inf:
        remedy = (
            "For the sensitivity of one bound give n = sum(p.requires_grad for p in "
            f"model.parameters()) bounds: max_grad_norm=[{bound} / n**0.5] * n."
        )
    several = isinstance(bound, (list, tuple))
    raise Refused(
        f'clipping="{name}" takes as max_grad_norm {takes}; got '
        f"{f'{len(bound)} of them: ' if several else ''}{bound}.",
        parameter="max_grad_norm",
        remedy=remedy,
    )


def check_parameters(clipping: Any, parameters: int) -> None:
    """Refuses a clipping function with bounds for another number of parameters."""
    if isinstance(clipping, ClippingFunction):
        check_bound(clipping.clipping, clipping.bound, parameters)


def as_clipping_function(clipping: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """
    Makes a clipping function of what :func:`~opacus_ext.clipped_grads` was given.

    Args:
        clipping: a number C for flat clipping at C, or a function of norms with a
            method ``sensitivity(relation)``

    Raises:
        Refused: for anything else, and for a sensitivity that is no positive number
    """
    if isinstance(clipping, numbers.Real) and not isinstance(clipping, bool):
        clipping = CLIPPINGS["flat"].at(float(clipping))
    if not callable(clipping) or not callable(getattr(clipping, "sensitivity", None)):
        raise Refused(
            f"clipping={clipping!r} is neither a number nor a function of norms with a "
            "method sensitivity(relation).",
            parameter="clipping",
            remedy="Give the bound C as a number for flat clipping, or "
            'opacus_ext.clipping.find_clipping("automatic").at(1.0).',
        )
    largest = clipping.sensitivity("add_or_remove_one")
    if not (isinstance(largest, numbers.Real) and 0 < largest < math.inf):
        raise Refused(
            f"The sensitivity of {clipping!r} is {largest!r}.",
            parameter="clipping",
            remedy="It must be a positive number, to which the noise is scaled.",
        )
    return clipping


CLIPPINGS: Dict[str, Clipping] = {}


def register_clipping(clipping: Clipping) -> Clipping:
    """
    Registers a kind of clipping by its name, for all modes, and returns it.

    Example:
        >>> from opacus_ext import Clipping, register_clipping
        >>> def sign(norms, bound):
        ...     return bound / norms.clamp(min=1e-12)
        >>> _ = register_clipping(Clipping("sign", sign))
        >>> import opacus_ext.clipping
        >>> _ = opacus_ext.clipping.CLIPPINGS.pop("sign")
    """
    check_argument(
        "clipping",
        clipping,
        isinstance(clipping, Clipping),
        "a Clipping",
        'Give opacus_ext.Clipping("name", factors), where factors(norms, bound) is a '
        "function.",
    )
    CLIPPINGS[clipping.name] = clipping
    return clipping


def find_clipping(clipping: Union[str, Clipping]) -> Clipping:
    """
    Returns the clipping that is registered by a name. A :class:`Clipping` is returned
    as it is.

    Raises:
        Refused: for a name that is not registered

    Example:
        >>> clipping = find_clipping("flat").at(2.0)
        >>> clipping(torch.tensor([1.0, 8.0])), clipping.sensitivity("replace_one")
        (tensor([1.0000, 0.2500]), 4.0)
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


def _flat(norms: torch.Tensor, bound: float) -> torch.Tensor:
    """The factors of gradients that are made no longer than the bound."""
    return (bound / (norms + 1e-6)).clamp(max=1.0)


def _per_layer(norms: torch.Tensor, bound: List[float]) -> torch.Tensor:
    """The same for each parameter separately."""
    bounds = torch.as_tensor(bound, dtype=norms.dtype, device=norms.device)
    return (bounds[:, None] / (norms + 1e-6)).clamp(max=1.0)


register_clipping(Clipping("flat", _flat))
# Bu et al. 2022, AUTO-S: every gradient is scaled to just below C.
register_clipping(Clipping("automatic", lambda n, bound: bound / (n + 0.01)))
# De et al. 2022: clipped to C and divided by C, so that the learning rate does not
# depend on C.
register_clipping(
    Clipping("normalized", lambda n, bound: _flat(n, bound) / bound, lambda bound: 1.0)
)
register_clipping(Clipping("per_layer", _per_layer, per_parameter=True))
_BUILT_IN = tuple(CLIPPINGS.values())


def is_built_in(clipping: Any) -> bool:
    """Returns True for this package's clipping functions, whose factors are proven."""
    kind = getattr(clipping, "clipping", None)
    return type(clipping) is ClippingFunction and any(kind is own for own in _BUILT_IN)
