"""A layer's ``forward`` replaced by one whose parts are recorded; see rules.py."""

from __future__ import annotations

from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    Optional,
    Tuple,
)

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from opacus_ext.grad_sample.batchless import Undecided, settled
from opacus_ext.grad_sample.calls import MarkCall, RecordNode, RuleCall, tensors_in
from opacus_ext.grad_sample.independence import RandomState
from opacus_ext.grad_sample.parallel import spread_over
from opacus_ext.grad_sample.routing import Routing, pointers
from opacus_ext.grad_sample.rules import (
    STAND_INS,
    Activations,
    Factors,
    Rule,
    StandIn,
)

if TYPE_CHECKING:
    from opacus_ext.grad_sample.tape import Tape


class StandInForward:
    """
    A layer's ``forward`` replaced by one whose parts are recorded (rules.py), for as
    long as the tape is attached.
    """

    def __init__(self, tape: Tape, name: str, layer: nn.Module, forward: StandIn):
        self.tape, self.name = tape, name
        self.layer, self.forward = layer, forward
        self._checked: set = set()
        layer.forward = self

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        trained = any(p.requires_grad for p in layer.parameters()) or self._spread
        # Weights that a module around it computes (parametrize) are that module's.
        lent = is_parametrized(layer)
        if not trained or lent or not (torch.is_grad_enabled() or layer.training):
            return type(layer).forward(layer, *args, **kwargs)
        inputs = tree_map(settled, (args, kwargs))
        try:
            expected = self._expected(inputs)
            output = self.forward(layer, Recorder(self), *inputs[0], **inputs[1])
        except Exception as error:
            leaves = tree_leaves((args, kwargs))
            names = {x.source.name for x in leaves if isinstance(x, Undecided)}
            if not names:
                raise
            raise RuntimeError(
                f"{self.name} ({type(layer).__name__}): the output of "
                f"{', '.join(sorted(names))}, which saw no sample, can't be expanded "
                f"to the batch here ({error}). Expand its input to [B, ...]."
            ) from error
        if expected is not None and not self._agrees(tensors_in(output), expected):
            raise RuntimeError(
                f"{self.name} ({type(layer).__name__}): what stands in for its forward "
                "gives something else than the layer itself for inputs of shapes "
                f"{[tuple(x.shape) for x in tensors_in(inputs)]}. Please report it."
            )
        return output

    def _agrees(self, got: List[torch.Tensor], expected: List[torch.Tensor]) -> bool:
        if [x.shape for x in got] != [x.shape for x in expected]:
            return False
        # What is known by its type needs no comparison of numbers, and a recurrent
        # layer may blow up the difference of two roundings.
        known = any(cls in STAND_INS for cls in type(self.layer).__mro__)
        return known or _alike(got, expected)

    @torch.no_grad()
    def _expected(self, inputs: Tuple[tuple, dict]) -> Optional[List[torch.Tensor]]:
        """
        What the layer's own forward gives, for the first inputs of each kind: so that
        it refuses what it always did, and the stand-in is compared with it. None where
        that was done, or random numbers are in it.
        """
        if torch._C._are_functorch_transforms_active() or self._spread:
            return None
        if any(x.is_nested or x.numel() == 0 for x in tensors_in(inputs)):
            return None  # refused, or an empty batch, which some kernels can't take
        kind = _kind(inputs)
        if kind in self._checked or len(self._checked) >= 64:
            return None
        device = next((x.device for x in tensors_in(inputs) if x.is_cuda), None)
        state = RandomState(device or torch.device("cpu"))
        args, kwargs = inputs
        try:
            output = type(self.layer).forward(self.layer, *args, **kwargs)
            drawn = not state.unchanged()
        finally:
            state.restore()
        self._checked.add(kind)
        return None if drawn else tensors_in(output)

    def _record(
        self,
        output: torch.Tensor,
        activations: Activations,
        params: Iterable[Optional[nn.Parameter]],
        factors: Callable[[Any, torch.Tensor], Factors],
        event_dims: int = 1,
        by_row: bool = False,
        routing: Optional[Routing] = None,
    ) -> torch.Tensor:
        trained = [p for p in params if p is not None and p.requires_grad]
        if not trained or not self.tape._records(routing):
            return output
        several = isinstance(activations, tuple)
        given = activations if several else [activations]
        given = [x for x in given if x is not None]

        def rule(layer: nn.Module, inputs: Dict, backprops: torch.Tensor) -> Factors:
            arranged = tuple(inputs.values())
            if several:
                return factors(arranged, backprops)
            return factors(arranged[0] if arranged else None, backprops)

        call = RuleCall(
            *(self.tape, self.layer, self.name),
            rule=Rule(
                rule,
                lambda layer, output: output.dim() - event_dims,
                all_inputs=True,
                by_row=by_row,
            ),
            inputs={str(i): x for i, x in enumerate(given)},
            output=output,
            params=trained,
        )
        call.routing = routing
        return RecordNode.apply(self.tape._anchor, call, output)[0]

    @property
    def _spread(self) -> bool:
        """Whether the layer's experts are spread over processes (parallel.py)."""
        return spread_over(self.layer) is not None

    def remove(self) -> None:
        """Gives the layer its own ``forward`` back."""
        vars(self.layer).pop("forward", None)


class Recorder:
    """What a stand-in is given as ``record``; see :class:`~rules.Record`."""

    def __init__(self, stand_in: StandInForward, routing: Optional[Routing] = None):
        self._stand_in, self._routing = stand_in, routing

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._stand_in._record(*args, routing=self._routing, **kwargs)

    def dealt(self, samples: torch.Tensor, index: torch.Tensor) -> "Recorder":
        """
        For rows of these samples, counted through the samples of all processes.
        ``index`` is one that rows are moved by where the samples are known.
        """
        size = self._stand_in.layer.world.batch_size
        return Recorder(self._stand_in, Routing(samples, pointers([index]), size))

    def mark(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows ``[*rows, width]`` of which the tape will know the samples."""
        tape = self._stand_in.tape
        if not (tape.enabled and torch.is_grad_enabled()):
            return rows
        where = tape, self._stand_in.layer, self._stand_in.name
        call = MarkCall(*where, rows=rows, routing=self._routing)
        return RecordNode.apply(tape._anchor, call, rows)[0]


def _kind(inputs: Tuple[tuple, dict]) -> tuple:
    """Shapes, types and settings of a call, and which arguments are the same."""
    leaves, spec = tree_flatten(inputs)
    seen = [id(x) for x in leaves]
    return str(spec), tuple(
        (
            (tuple(x.shape), x.dtype, seen.index(id(x)))
            if isinstance(x, torch.Tensor)
            else (
                (tuple(x.data.shape[1:]), int(x.batch_sizes[0]))
                if isinstance(x, PackedSequence)
                else repr(x)
            )
        )
        for x in leaves
    )


def _alike(got: List[torch.Tensor], expected: List[torch.Tensor]) -> bool:
    for a, b in zip(got, expected):
        a, b = a.detach().double(), b.double()
        finite = b[b.isfinite()].abs()
        scale = float(finite.max()) if finite.numel() else 0.0
        half = min(x.dtype.itemsize for x in expected + got) < 4
        if not torch.allclose(a, b, 0, (0.1 if half else 1e-3) * scale, True):
            return False
    return True
