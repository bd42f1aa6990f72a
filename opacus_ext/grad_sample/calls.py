"""One call of a layer, noted in the forward pass and met again in the backward.

The node :class:`RecordNode` keeps the layer's input as autograd keeps activations, and
hands the gradient of the output, unchanged, to who collects (tape.py) when the backward
pass comes by.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections import Counter
from contextlib import nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    List,
    Optional,
    Set,
    Tuple,
    Union,
)

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_structure,
    tree_unflatten,
)

from opacus_ext.grad_sample import replay
from opacus_ext.grad_sample.factors import Factor, Ragged
from opacus_ext.grad_sample.layout import Key, Layout, arrange, relation
from opacus_ext.grad_sample.routing import Routing, expert_batching
from opacus_ext.grad_sample.rules import Rule

if TYPE_CHECKING:
    from opacus_ext.grad_sample.tape import Tape

Uses = List[Tuple[nn.Parameter, Tuple[Factor, ...]]]
Collector = Callable[["Call", Tuple[Optional[torch.Tensor], ...], Any], None]


def tensors_in(value: Any) -> List[torch.Tensor]:
    """The tensors in nested containers, dataclasses included."""
    found: List[torch.Tensor] = []
    for x in tree_leaves(value):
        if isinstance(x, torch.Tensor):
            found.append(x)
        elif dataclasses.is_dataclass(x) and not isinstance(x, type):
            found += tensors_in([getattr(x, f.name) for f in dataclasses.fields(x)])
    return found


def packed_in(value: Any) -> List[PackedSequence]:
    """The packed sequences in nested containers."""
    leaves = tree_leaves(value, is_leaf=lambda x: isinstance(x, PackedSequence))
    return [x for x in leaves if isinstance(x, PackedSequence)]


class Call:
    """One call of a layer, on its way from the forward to the backward pass."""

    def __init__(self, tape: "Tape", layer: nn.Module, name: str):
        self.tape = tape
        self.layer = layer
        self.name = name
        self.number: Optional[str] = None
        self.batch_size = tape.batch_size
        self.layouts: Optional[List[Optional[Layout]]] = None
        self.claims: Counter = Counter()
        self.shapes: List[torch.Size] = []
        self.row_dims: List[int] = []
        self.saved: List[torch.Tensor] = []
        self.inside: Set[Any] = set()  # nodes that must be met through this call only
        self.routing: Optional[Routing] = None
        self._keys: Optional[Tuple[tuple, List[Key]]] = None

    def keys(self, batch_size: int) -> List[Key]:
        """What the layouts of the outputs are remembered under."""
        given = (batch_size, self.number)
        if self._keys is None or self._keys[0] != given:
            batch_size = max(batch_size, 1)
            keys = [
                (
                    f"{self.name}[{i}]",
                    str(self.number),
                    self._relation(shape, batch_size),
                )
                for i, shape in enumerate(self.shapes)
            ]
            self._keys = given, keys
        return self._keys[1]

    def size(self, batch_size: int) -> int:
        """How many samples its rows belong to, of ``batch_size`` in this process."""
        known = self.routing is not None and self.routing.batch_size is not None
        return self.routing.batch_size if known else batch_size

    def _relation(self, shape: torch.Size, batch_size: int) -> Tuple[str, ...]:
        if self.routing is None:
            return relation(shape, batch_size)
        # Of routed rows the number says nothing.
        return ("routed", *relation(shape[1:], batch_size))

    def uses(
        self,
        activations: Tuple[torch.Tensor, ...],
        backprops: Tuple[Optional[torch.Tensor], ...],
        batch_size: int,
    ) -> Uses:
        """The factors of this call's parameters, once its layouts are known."""
        raise NotImplementedError(type(self).__name__)


class MarkCall(Call):
    """Rows whose samples matter though no parameter has met them yet."""

    def __init__(self, *args: Any, rows: torch.Tensor, routing: Optional[Routing]):
        super().__init__(*args)
        self.shapes, self.row_dims = [rows.shape], [rows.dim() - 1]
        self.routing = routing

    def uses(self, activations, backprops, batch_size) -> Uses:
        return []


class RuleCall(Call):
    """A call of a layer that has a rule."""

    def __init__(
        self,
        *args: Any,
        rule: Rule,
        inputs: Dict[str, torch.Tensor],
        output: torch.Tensor,
        params: Iterable[nn.Parameter],
        expanded: bool = False,
    ):
        super().__init__(*args)
        self.rule = rule
        self.params = list(params)
        self.shapes = [output.shape]
        single = output[0] if expanded else output
        self.row_dims = [rule.row_dims(self.layer, single) + expanded]
        self.input_names = list(inputs)
        self.saved = list(inputs.values())
        self.claims.update(id(p) for p in self.params)

    def uses(self, activations, backprops, batch_size) -> Uses:
        rows, layout = self.row_dims[0], self.layouts[0]

        gathered = layout.samples is not None and expert_batching() == "gathered"
        ragged = self._ragged(rows, layout) if gathered and self.rule.by_row else None

        def by_sample(x: torch.Tensor) -> torch.Tensor:
            if ragged is not None:
                return x.flatten(0, rows - 1)[ragged[1]][None]
            return arrange(x, rows, layout, batch_size)

        def has_rows(x: torch.Tensor) -> bool:
            shape, dim = self.shapes[0], layout.dim
            if dim == -1:
                return x.shape[:rows] == shape[:rows]
            return x.dim() >= rows and x.shape[dim] == shape[dim]

        if self.rule.all_inputs:
            given: Any = {
                name: by_sample(x) if has_rows(x) else x
                for name, x in zip(self.input_names, activations)
            }
        else:
            given = by_sample(activations[0])
        factors = self.rule.fn(self.layer, given, by_sample(backprops[0]))
        missing = [self.tape.names[p] for p in self.params if p not in factors]
        if missing:
            raise RuntimeError(
                f"The rule for {self.name} ({type(self.layer).__name__}) gives no "
                f"gradient for its trainable parameter(s) {', '.join(missing)}. "
                "Complete the rule, or freeze the parameter."
            )
        lead = () if ragged is None else (Ragged(ragged[0]),)
        return [(p, (*lead, *factors[p])) for p in self.params]

    def _ragged(
        self, rows: int, layout: Layout
    ) -> Tuple[torch.Tensor, Union[slice, torch.Tensor]]:
        """The sample of each row that has one, and which rows these are."""
        repeats = math.prod(self.shapes[0][1:rows])
        samples = layout.samples.repeat_interleave(repeats)
        if layout.kind == "routed":
            return samples, slice(None)
        return samples[samples >= 0], samples >= 0


class ReplayCall(Call):
    """A call of a layer without a rule; see replay.py."""

    def __init__(
        self,
        *args: Any,
        inputs: Any,
        outputs: List[torch.Tensor],
        params: Dict[str, nn.Parameter],
        positions: List[int],
        shared: bool,
        used: Counter,
        drawn: List[torch.Tensor],
    ):
        super().__init__(*args)
        leaves, self._spec = tree_flatten(inputs)
        self._where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.saved = [leaves[i] for i in self._where] + drawn
        self.given = len(self._where)  # of what is saved, as arguments
        self.tracked = [x.requires_grad for x in self.saved]
        # A cache of keys and values has grown by this very call: a replay goes without.
        # If it was not empty before, the outputs tell.
        self._constants = [
            None if isinstance(x, torch.Tensor) or hasattr(x, "get_seq_length") else x
            for x in leaves
        ]
        self.shapes = [x.shape for x in outputs]
        # The samples may be second: time first, or several streams of them.
        self.row_dims = [min(x.dim(), 2 if x.dim() > 2 else 1) for x in outputs]
        self.digests = [
            replay.digest(x.detach(), rows) for x, rows in zip(outputs, self.row_dims)
        ]
        self.params = params  # by name in the layer; those that modules in it lend too
        self.positions = positions
        self.shared = shared  # one call for all samples
        device = outputs[0].device.type
        self.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
            "cache_enabled": False,  # what is kept would belong to another replay
        }
        self.claims.update(used)

    @property
    def told(self) -> bool:
        """Whether an argument may be the batch size."""
        return any(type(x) is int and x == self.batch_size for x in self._constants)

    def inputs(self, activations: Tuple[torch.Tensor, ...], alone: bool = False) -> Any:
        """
        The arguments ``(args, kwargs)`` of the call; with ``alone``, an argument that
        may be the batch size is one.
        """
        leaves = list(self._constants)
        if alone:
            size = self.batch_size
            leaves = [1 if type(x) is int and x == size else x for x in leaves]
        for i, x in zip(self._where, activations):
            leaves[i] = x
        return tree_unflatten(leaves, self._spec)

    def uses(self, activations, backprops, batch_size) -> Uses:
        return replay.uses(self, activations, backprops, batch_size)


class RecordNode(torch.autograd.Function):
    """Behind a layer's output: keeps its inputs, shows the gradients to the tape."""

    @staticmethod
    def forward(ctx, anchor, call, *outputs):
        ctx.record = call
        ctx.set_materialize_grads(False)
        # Saved like any activation: checkpointing may drop it, and a later change in
        # place is noticed.
        ctx.save_for_backward(*(x.detach() for x in call.saved))
        call.saved = []
        return tuple(x.detach() for x in outputs)

    @staticmethod
    def backward(ctx, *grads):
        call = ctx.record
        if call.tape.collector is not None:
            with torch.no_grad(), _autocast_off(grads):
                call.tape.collector(call, grads, ctx)
        return (None, None, *grads)


def _autocast_off(grads: Tuple[Optional[torch.Tensor], ...]) -> ContextManager:
    device = next((g.device.type for g in grads if g is not None), "cpu")
    if not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


class UnknownLayout(RuntimeError):
    """A call was met whose layout no probe has seen."""

    def __init__(self, call: Call):
        super().__init__(
            f"{call.name} ({type(call.layer).__name__}): can't tell which rows of its "
            f"output of shape {tuple(call.shapes[0])} belong to which sample: the "
            "model's output does not lead to it with one entry a sample. Let the model "
            "return a tensor with a batch dimension that depends on it, or use "
            'grad_sample_mode="ghost_bk".'
        )


def arguments(inputs: Tuple[tuple, dict]) -> List[Any]:
    """The leaves of ``(args, kwargs)``."""
    args, kwargs = inputs
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return list(args)
    return tree_flatten(inputs)[0]


def named_inputs(
    layer: nn.Module, leaves: List[Any], inputs: Tuple[tuple, dict]
) -> Dict[str, torch.Tensor]:
    """The tensor arguments of a call by their names in ``forward``."""
    args, kwargs = tree_unflatten(leaves, tree_structure(inputs))
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    named = bound.arguments.items()
    return {n: x for n, x in named if isinstance(x, torch.Tensor)}
