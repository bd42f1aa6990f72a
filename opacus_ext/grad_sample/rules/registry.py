"""Rules: what an op or a layer says about its gradients, once, for every mode.

A rule is given the data and the gradient of what was made of them, both arranged by
sample, and returns the factors of the gradient of each parameter. It knows nothing of
modes, clipping, batches that are flattened, or parameters that are shared. What has no
rule is exact too: it is computed with a copy of the parameter for each sample.

All of them are in one :class:`Table`, which states the order in which it is asked.
"""

from __future__ import annotations

from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    Union,
)

import torch
from torch import nn
from torch._C._functorch import is_batchedtensor

from opacus_ext.grad_sample.factors import Factor

Factors = Dict[nn.Parameter, Tuple[Factor, ...]]


class Op(NamedTuple):
    """
    What the rule of an op says of one call.

    Attributes:
        params: the arguments that may be made of parameters; None for one left out
        saved: the data that the factors need, as samples see them
        factors: ``(backprops, *saved)``, each ``[B, T, *event]``, to one tuple of
            factors for each of ``params``
        event_dims: how many trailing dims of the output belong to one row
        saved_dims: the same of each of ``saved``
        whole: ``(params, *saved)`` to the output, for all samples side by side: the op
            itself, where it is given ``[B, *rows, *event]`` as well as one sample's
    """

    params: Tuple[Optional[torch.Tensor], ...]
    saved: Tuple[Optional[torch.Tensor], ...]
    factors: Callable[..., Sequence[Tuple[Factor, ...]]]
    event_dims: int
    saved_dims: Tuple[int, ...]
    whole: Optional[Callable[..., torch.Tensor]] = None


OpRule = Callable[..., Optional[Op]]


def register_op(*functions: Callable) -> Callable[[OpRule], OpRule]:
    """
    Registers the decorated function as the rule of some functions of torch. It is
    called with their arguments and returns an :class:`Op`, or None where it does not
    hold: then each sample is given a copy of the parameters.
    """

    def decorator(rule: OpRule) -> OpRule:
        for function in functions:
            TABLE.ops[function] = rule
        return rule

    return decorator


def is_shared(x: object) -> bool:
    """Whether an argument is a tensor that all samples share."""
    return isinstance(x, torch.Tensor) and not is_batchedtensor(x)


RuleFn = Callable[[nn.Module, torch.Tensor, torch.Tensor], Factors]


class Rule(NamedTuple):
    """A registered rule; see :func:`register_rule`."""

    fn: RuleFn
    row_dims: Callable[[nn.Module, torch.Tensor], int]
    refuse: Callable[[nn.Module], Optional[str]] = lambda layer: None
    all_inputs: bool = False


def register_rule(
    *layers: Union[type, str],
    event_dims: Union[int, None, Callable[[nn.Module], Optional[int]]] = 1,
    refuse: Callable[[nn.Module], Optional[str]] = lambda layer: None,
    all_inputs: bool = False,
) -> Callable[[RuleFn], RuleFn]:
    """
    Registers the decorated function as the rule of one or more layer types, in every
    mode. Subclasses that keep the layer's ``forward`` are covered too.

    The function is called as ``rule(layer, activations, backprops)`` with

    - ``activations``: the layer's first input, ``[B, T, *event]``
    - ``backprops``: the gradient of the sum of the per-sample losses with respect to
      the layer's output, ``[B, T, *event]``

    and returns for each parameter one factor an axis, left to right: dense rows
    ``[B, T', width]`` or a :class:`~opacus_ext.grad_sample.factors.OneHot`.

    Args:
        layers: types, or names ("package.module.Class") of types whose package is
            not imported for their sake
        event_dims: how many trailing dims of the output belong to one row; all dims
            before them only say which row it is. None: all but the first
        refuse: returns the reason why a layer, as configured, can't be handled
        all_inputs: pass as ``activations`` a dict of all tensor arguments by name;
            those without the output's rows come as they are

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus_ext import register_rule
        >>> class Scale(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.weight = nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return self.weight * x
        >>> @register_rule(Scale)
        ... def scale(layer, activations, backprops):
        ...     return {layer.weight: (backprops * activations,)}
    """

    def row_dims(layer: nn.Module, output: torch.Tensor) -> int:
        event = event_dims(layer) if callable(event_dims) else event_dims
        return min(1, output.dim()) if event is None else output.dim() - event

    def decorator(fn: RuleFn) -> RuleFn:
        for layer in layers:
            TABLE.add_rule(layer, Rule(fn, row_dims, refuse, all_inputs))
        return fn

    return decorator


Activations = Union[torch.Tensor, Tuple[torch.Tensor, ...], None]


class Record(Protocol):
    """What a stand-in (:func:`register_forward`) notes uses of parameters with."""

    def value(self, param: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """What to compute with in the place of ``param``."""

    def __call__(
        self,
        output: torch.Tensor,
        activations: Activations,
        params: Iterable[Optional[nn.Parameter]],
        factors: Callable[[Any, torch.Tensor], Factors],
        event_dims: int = 1,
    ) -> torch.Tensor:
        """
        Notes that ``output`` was computed from ``params``, each used once.

        Args:
            output: ``[*rows, *event]``
            activations: what the factors need beside the gradient, ``[*rows, ...]``;
                several as a tuple
            params: parameters, None for one that the layer does not have
            factors: called as ``factors(activations, backprops)``, both by sample
                ``[B, T, ...]``; returns what a rule returns
            event_dims: how many trailing dims of ``output`` belong to one row

        Returns:
            The output, to be used in its place.
        """


StandIn = Callable[..., Any]
Finder = Callable[[nn.Module], Optional[Callable]]


def register_forward(*layers: type) -> Callable[[StandIn], StandIn]:
    """
    Registers the decorated function as what stands in for the ``forward`` of a layer
    that computes with its parameters in several steps, or in a fused kernel that shows
    no gradient of what is inside. It is called as ``fn(layer, record, *inputs)``,
    computes what ``forward`` computes, and passes what comes out of a parameter to
    ``record`` (:class:`Record`). The layer, its parameters and its state dict stay; out
    of training (``eval()`` without gradients) the layer's own ``forward`` runs.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from opacus_ext import register_forward
        >>> class TwoSlopes(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.up = nn.Parameter(torch.ones(width))
        ...         self.down = nn.Parameter(torch.ones(width))
        ...     def forward(self, x):
        ...         return self.up * x.relu() - self.down * (-x).relu()
        >>> @register_forward(TwoSlopes)
        ... def two_slopes(layer, record, x):
        ...     def scale(x, w):
        ...         return record(w * x, x, [w], lambda x, g: {w: (g * x,)})
        ...     return scale(x.relu(), layer.up) - scale((-x).relu(), layer.down)
    """

    def decorator(fn: StandIn) -> StandIn:
        for layer in layers:
            TABLE.forwards[layer] = fn
        return fn

    return decorator


def register_substitute(find: Finder) -> Finder:
    """
    Registers a function that is asked what runs in the place of a layer's ``forward``,
    sample by sample, as ``fn(layer, *inputs)``: for layers that are known by what they
    offer, and whose own ``forward`` branches on what the samples say. It returns None
    for other layers.
    """
    TABLE.substitutes.append(find)
    return find


def own_parameters(layer: nn.Module) -> Dict[str, nn.Parameter]:
    """The trainable parameters that belong to ``layer`` itself, by name."""
    own = layer._parameters.items()
    return {n: p for n, p in own if p is not None and p.requires_grad}


# -- the table -------------------------------------------------------------------------


class Table:
    """
    All rules, in the order in which they are asked.

    For a layer, the first of

    1. a stand-in for its ``forward`` (:func:`register_forward`), by type;
    2. a rule (:func:`register_rule`), by type or by name, if the layer has trainable
       parameters of its own;
    3. a grad sampler that was registered with Opacus (``register_grad_sampler``), as a
       rule; see opacus_ext/registry.py;
    4. a substitute (:func:`register_substitute`), by what the layer offers;
    5. that it is native (:func:`~opacus_ext.register_native`), by its very type;
    6. nothing: its own ``forward`` runs, and the functions in it are asked about.

    Of 1 and 2 the nearest type along the layer's ``__mro__`` counts, and only where the
    layer keeps that type's ``forward``. A layer with a ``forward`` of its own on the
    instance has none of 1 to 4.

    For a function of torch, the rule of :func:`register_op`; where it has none, or that
    returns None, the general rule: a copy of the parameter for each sample. (How a
    function *runs* on samples side by side is not said here but in samplewise.)

    What is registered later counts from the next model that is made private on, in all
    modes, and with Opacus's own tables from there on.

    Attributes:
        ops: by function
        forwards: by type
        rules: by type, or "package.module.Class"
        samplers: asked in turn, as are ``substitutes``
        native: types of modules and of autograd functions
        listeners: called with the type or name of each rule that is added
    """

    def __init__(self) -> None:
        self.ops: Dict[Callable, OpRule] = {}
        self.forwards: Dict[type, StandIn] = {}
        self.rules: Dict[Union[type, str], Rule] = {}
        self.samplers: List[Callable[[nn.Module], Optional[Rule]]] = []
        self.substitutes: List[Finder] = []
        self.native: Dict[type, bool] = {}
        self.listeners: List[Callable[[Union[type, str]], None]] = []

    def add_rule(self, layer: Union[type, str], rule: Rule) -> None:
        """Adds a rule, or puts it in the place of an earlier one."""
        self.rules[layer] = rule
        for listener in self.listeners:
            listener(layer)

    def forward_of(self, layer: Any) -> Optional[StandIn]:
        """What stands in for the ``forward`` of a layer, or None."""
        if "forward" in vars(layer):
            return None
        for cls in type(layer).__mro__:
            if cls in self.forwards:
                same = type(layer).forward is cls.forward
                return self.forwards[cls] if same else None
        return None

    def rule_of(self, layer: Any, samplers: bool = True) -> Optional[Rule]:
        """
        The rule of a layer, or None.

        Args:
            samplers: whether those made of samplers of Opacus count
        """
        if "forward" in vars(layer):
            return None
        for cls in type(layer).__mro__:
            name = f"{cls.__module__}.{cls.__qualname__}"
            rule = self.rules.get(cls) or self.rules.get(name)
            if rule is not None:
                return rule if type(layer).forward is cls.forward else None
        found = (find(layer) for find in self.samplers if samplers)
        return next(filter(None, found), None)

    def substitute_of(self, layer: nn.Module) -> Optional[Callable]:
        """What is called as ``fn(layer, *inputs)`` in place of ``forward``, or None."""
        if "forward" in vars(layer):
            return None
        return next(filter(None, (find(layer) for find in self.substitutes)), None)


TABLE = Table()
OPS = TABLE.ops  # looked into at each call of a function
NATIVE = TABLE.native
find_forward = TABLE.forward_of
find_rule = TABLE.rule_of
find_substitute = TABLE.substitute_of
