"""Error propagation by modules: each says how errors pass it.

Source: "DPFormer: Learning Differentially Private Transformer on Long-Tailed Data",
section 5.2.2. A module that states its propagation has a method ``propagate``, which is
its forward pass with an :class:`Uncertain` value in the place of a tensor: the variance
of the error goes beside the value. The formulas are those of ``moments``. Operands are
taken to err independently, those of residual sums included.

In private training each sample runs by itself, and so do its variances.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from opacus_ext.private_torch import DisableTorchFunction
from opacus_ext.re_attention import moments
from opacus_ext.re_attention.moments import Moments, token
from opacus_ext.refused import Refused

#: The attributes of a model whose errors are tracked, and of its parts.
TRACKER, PART = "_opacus_ext_errors", "_opacus_ext_errors_around"
STATE = (
    "Derive it from opacus_ext.re_attention.Propagating and write its forward pass as "
    "the method propagate (docs/how-to/re-attention.md), or detach the tracker."
)
HOOK = (
    "Remove the hook (keep what register_forward_hook returns, and call its remove), "
    "or detach the tracker."
)


def refused(module: nn.Module, what: str, remedy: str) -> Refused:
    """Makes an error about a module."""
    name = type(module).__name__
    return Refused(f"{name}: {what}.", module=name, remedy=remedy)


@dataclass
class Errors:
    """
    What one forward pass knows of errors.

    Attributes:
        variances: those of the parameters' errors, by ``id``: a scalar or ``[rows, 1]``
        where, cap: see :func:`opacus_ext.track_errors`
        corrected: how many attentions have been corrected
    """

    variances: Mapping[int, Tensor]
    where: str
    cap: float | None
    corrected: int = 0

    def of(self, module: nn.Module, name: str) -> Any:
        """
        Looks up the variance of a parameter; None if the module has none.

        Raises:
            Refused: for a tensor that is no parameter of the tracked model
        """
        parameter = getattr(module, name, None)
        if parameter is None:
            return None
        if id(parameter) not in self.variances:
            what = f"its {name} {list(parameter.shape)} is no parameter of the model"
            raise refused(module, f"{what} whose errors are tracked", STATE)
        return self.variances[id(parameter)]


@dataclass
class Uncertain:
    """
    A tensor, and the variance of its error.

    Attributes:
        value: as the forward pass computes it, with its gradient ``[*, width]``
        variance: of the errors, ``[*, 1]`` or ``[*, width]``; None where no errors are
            tracked
        errors: those of the parameters; None where no errors are tracked

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> noise = {id(p): torch.tensor(0.01) for p in layer.parameters()}
        >>> errors = Errors(noise, where="logits", cap=None)
        >>> x = Uncertain(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 1), errors)
        >>> x.through(layer).variance  # 0.01 * (3^2 + 4^2 + 1)
        tensor([[0.2600]])
    """

    value: Tensor
    variance: Tensor | None = None
    errors: Errors | None = None

    def __post_init__(self) -> None:
        if (self.variance is None) != (self.errors is None):
            raise Refused(
                "An Uncertain has a variance and errors, or neither of them.",
                remedy="Make it as Uncertain(value, variance, x.errors), with a "
                "variance wherever x has one.",
            )
        if self.variance is None:
            return
        width, shape = self.value.shape[-1:], self.variance.shape
        if len(shape) != self.value.dim() or shape[-1:] not in (width, (1,)):
            raise Refused(
                f"A variance of shape {[*shape]} does not belong to a value of shape "
                f"{[*self.value.shape]}.",
                remedy="It has the dimensions of the value, the last of them as "
                "wide, or 1.",
            )

    def same_pass(self, *others: Any) -> None:
        """
        Refuses what errors were lost of, or left over from another forward pass.

        Raises:
            Refused: for a tensor, or a value with other errors
        """
        for other in others:
            if not isinstance(other, Uncertain):
                raise Refused(
                    f"An Uncertain was combined with a {type(other).__name__}.",
                    remedy="Wrap what has no error as x.known(tensor).",
                )
            if other.errors is not self.errors:
                raise Refused(
                    "The errors of one of two values that are combined were lost.",
                    remedy="Make each value as Uncertain(value, variance, x.errors), "
                    "in the forward pass that uses it.",
                )

    def known(self, value: Tensor) -> Uncertain:
        """Returns a value without an error, for the same forward pass."""
        return _known(value, self.errors)

    def through(self, module: nn.Module, *args: Any, **kwargs: Any) -> Uncertain:
        """
        Calls a module: what it returns, and the variance of that.

        Raises:
            Refused: for a module that does not state how errors pass it, if they are
                tracked
        """
        if self.errors is None:
            return Uncertain(module(self.value, *args, **kwargs))
        if isinstance(module, Propagating):
            return module(self, *args, **kwargs)  # its hooks run
        if type(module) is nn.Sequential:
            if _has_hooks(module):
                raise refused(module, "its hooks would not run", HOOK)
            return functools.reduce(Uncertain.through, module, self)
        rule = _rule_of(module)
        with _unchanged_by_hooks(module):
            value = module(self.value, *args, **kwargs)
        with quietly(value):
            variance = rule(module, self.moments(), self.errors)
        return Uncertain(value, variance, self.errors)

    def moments(self) -> Moments:
        """Value and variance, one number a token ``[*, 1]``; errors are tracked."""
        assert self.variance is not None
        return Moments(self.value, token(self.variance))

    def moved(self, move: Callable) -> Uncertain:
        """
        Applies a function that moves elements and changes none, to value and variance.

        Example:
            >>> x = Uncertain(torch.zeros(2, 3, 8))
            >>> x.moved(lambda tensor: tensor.transpose(0, 1)).value.shape
            torch.Size([3, 2, 8])
        """
        return self.parts(lambda tensor: [move(tensor)])[0]

    def parts(self, split: Callable) -> list[Uncertain]:
        """Takes value and variance apart, as by ``chunk``."""
        if self.variance is None:
            return [Uncertain(value) for value in split(self.value)]
        both = split(self.value), split(self.variance.expand(self.value.shape))
        return [Uncertain(*pair, self.errors) for pair in zip(*both)]

    def __add__(self, other: Any) -> Uncertain:
        """Adds another uncertain value: their errors are taken to be independent."""
        self.same_pass(other)
        if self.variance is None:
            return Uncertain(self.value + other.value)
        variance = token(self.variance) + token(other.variance)
        return Uncertain(self.value + other.value, variance, self.errors)

    def __mul__(self, number: Any) -> Uncertain:
        """Multiplies by a number that is known."""
        if isinstance(number, Uncertain):
            raise Refused(
                "Two uncertain values were multiplied.",
                remedy="Compute the variance of their product, and make it as "
                "Uncertain(value, variance, x.errors).",
            )
        if self.variance is None:
            return Uncertain(self.value * number)
        return Uncertain(self.value * number, self.variance * number**2, self.errors)

    __rmul__ = __mul__


def _known(value: Tensor, errors: Errors | None) -> Uncertain:
    if errors is None:
        return Uncertain(value)
    dtype = torch.promote_types(value.dtype, torch.float32)
    zeros = value.new_zeros((1,) * value.dim(), dtype=dtype)
    return Uncertain(value, zeros, errors)


@contextmanager
def quietly(value: Tensor) -> Iterator[None]:
    """
    A context for variances: without gradients, autocast, and the function mode that
    records each use of a parameter, as this one has no gradient.
    """
    kind = value.device.type
    with DisableTorchFunction(), torch.no_grad(), torch.autocast(kind, enabled=False):
        yield


# -- the layers of torch ---------------------------------------------------------------


def _linear(layer: nn.Linear, x: Moments, errors: Errors) -> Tensor:
    noise = errors.of(layer, "weight")
    return moments.linear(x, layer.weight, noise, errors.of(layer, "bias"))


def _embedding(layer: nn.Embedding, ids: Moments, errors: Errors) -> Tensor:
    rows = errors.of(layer, "weight").expand(layer.num_embeddings, 1)
    return nn.functional.embedding(ids.mean, rows)


def _norm(layer: Any, x: Moments, errors: Errors) -> Tensor:
    if len(layer.normalized_shape) != 1:
        raise refused(
            layer,
            f"errors can't be tracked through a norm of {layer.normalized_shape}",
            "Flatten these dimensions, or detach the tracker.",
        )
    noise, bias_noise = errors.of(layer, "weight"), errors.of(layer, "bias")
    centered = isinstance(layer, nn.LayerNorm)
    return moments.norm(x, layer.weight, layer.eps, noise, bias_noise, centered)


def _dropout(layer: nn.Dropout, x: Moments, errors: Errors) -> Tensor:
    # The draw is made, and no part of the error. This is the mean over draws.
    return x.variance / (1 - layer.p if layer.training and layer.p < 1 else 1)


#: The variance behind a layer, from its input's moments and the parameters' errors.
RULES: dict[type[nn.Module], Callable] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _norm,
    nn.RMSNorm: _norm,
    nn.Dropout: _dropout,
    nn.ReLU: lambda layer, x, errors: moments.relu(x),
    nn.GELU: lambda layer, x, errors: moments.gelu(x),
}


def _rule_of(module: nn.Module) -> Callable:
    """Finds the rule of a layer of torch, also of a subclass with the same forward."""
    for kind, rule in RULES.items():
        same = type(module).forward is kind.forward and "forward" not in vars(module)
        if isinstance(module, kind) and same:
            return rule
    raise refused(module, "it does not state how errors pass it", STATE)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


@contextmanager
def _unchanged_by_hooks(module: nn.Module) -> Iterator[None]:
    """
    A context for the call of a layer, whose hooks may look at tensors.

    Raises:
        Refused: where they replace one, as its rule would not know of it
    """
    if not _has_hooks(module):
        yield
        return
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, *out: Any) -> None:
        seen.append(out[0] if out else args[0])

    # Before the hooks of the module, and behind them.
    handles = [
        register(note, prepend=prepend)
        for register in (module.register_forward_pre_hook, module.register_forward_hook)
        for prepend in (True, False)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
    if not (seen[0] is seen[1] and seen[2] is seen[3]):
        raise refused(
            module,
            "a hook replaces its input or its output, where errors are tracked",
            HOOK,
        )


# -- modules that state their propagation ----------------------------------------------


class Propagating(nn.Module):
    """
    A module that states how errors pass it: ``propagate`` is its forward pass.

    The same code runs where no errors are tracked, with tensors alone.

    Example:
        >>> class Residual(Propagating):
        ...     def __init__(self, layer):
        ...         super().__init__()
        ...         self.layer = layer
        ...
        ...     def propagate(self, x):
        ...         return x + x.through(self.layer)
        >>> Residual(nn.ReLU())(torch.tensor([-1.0, 2.0]))
        tensor([-1.,  4.])
    """

    def propagate(self, x: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
        """Computes the output and the variance of its error; a subclass defines it."""
        raise NotImplementedError

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """Computes an output tensor of a tensor; see :meth:`Uncertain.through`."""
        if isinstance(x, Uncertain):
            return self.propagate(x, *args, **kwargs)
        return propagated(self, x, *args, **kwargs)


def propagated(module: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """
    Runs ``module.propagate`` on a tensor that is known, and returns a tensor.

    It is the forward pass of a :class:`Propagating` module, and may be a part of that
    of another one. Errors are tracked in it if they are of this module.

    Raises:
        Refused: for a part of a tracked model, by itself: the errors are not known
    """
    tracker, around = (getattr(module, name, None) for name in (TRACKER, PART))
    if tracker is not None and tracker.acts(module.training):
        return _tracked(tracker, module, x, *args, **kwargs)
    if around is not None and around.acts(module.training):
        raise refused(
            module,
            "it is called outside of the model whose errors are tracked",
            "Call that model, or detach its tracker.",
        )
    return _propagate(module, Uncertain(x), *args, **kwargs).value


def _propagate(module: Any, start: Uncertain, *args: Any, **kwargs: Any) -> Uncertain:
    """Calls ``module.propagate``, which returns a value with the errors of the pass."""
    out = module.propagate(start, *args, **kwargs)
    if not (isinstance(out, Uncertain) and out.errors is start.errors):
        raise refused(
            module,
            "its method propagate must return an Uncertain with the errors of its "
            f"input, and returned {type(out).__name__} without them",
            "Make each value as Uncertain(value, variance, x.errors).",
        )
    return out


@torch.compiler.disable  # the noise changes from step to step
def _tracked(tracker: Any, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    errors = tracker.start(module)
    out = _propagate(module, _known(x, errors), *args, **kwargs)
    if not errors.corrected:
        raise refused(
            module,
            "its errors are tracked, and it has no attention that is corrected",
            "Use opacus_ext.layers.SelfAttention or re_attention in its method "
            "propagate, or detach the tracker.",
        )
    return out.value
