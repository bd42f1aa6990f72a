"""The table of rules, by the names PyTorch has for operations."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Sequence, Tuple, Union

from torch import Tensor

from opacus_ext.re_attention.moments import Moments
from opacus_ext.re_attention.variances import Lost, Variance, wide


class Call(NamedTuple):
    """An operation that was carried out, as a rule sees it."""

    name: str
    func: Callable
    args: Tuple[Any, ...]
    kwargs: Dict[str, Any]
    out: Any
    mode: Any  # the Propagation

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or name."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def named(self, names: str) -> Tuple[Any, ...]:
        """The first arguments, by position or these names; None for what is absent."""
        return tuple(self.arg(i, name) for i, name in enumerate(names.split()))

    def variance(self, x: Any) -> Union[None, Variance, Lost]:
        """Looks up an argument's variance; None for an argument without error."""
        return self.mode.of(x)

    def token(self, x: Any) -> Optional[Tensor]:
        """The variance ``[*, 1]`` of an argument; None for a known argument."""
        known = self.variance(x)
        return None if known is None else known.token()

    def moments(self, x: Tensor) -> Moments:
        """Value and variance of an argument."""
        variance, x = self.token(x), wide(x)
        return Moments(x, x.new_zeros((1,) * x.dim()) if variance is None else variance)


Result = Union[None, Variance, Lost, Sequence[Optional[Variance]]]
PropagationRule = Callable[[Call], Result]
RULES: Dict[str, PropagationRule] = {}


def register_propagation(*names: str) -> Callable[[PropagationRule], PropagationRule]:
    """
    Registers how errors pass operations, by the names PyTorch has for them.

    Trailing underscores and those of operators don't count ("add" is ``x + y`` and
    ``x.add_(y)`` as well). A rule gets the :class:`Call` and returns a
    :class:`Variance` for the output, a sequence of them for several, or None where no
    error is left.

    Args:
        names: such as "threshold"

    Example:
        >>> @register_propagation("threshold")  # as if it had a slope of 1
        ... def threshold(call):
        ...     return Variance(call.token(call.args[0]))
        >>> _ = RULES.pop("threshold")
    """

    def add(rule: PropagationRule) -> PropagationRule:
        for name in names:
            RULES[name] = rule
        return rule

    return add
