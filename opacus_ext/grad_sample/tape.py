"""The tape: from a layer's call in the forward pass to its factors in the backward.

A forward hook puts a :class:`_Record` node behind the output of every layer that owns
trainable parameters. The node keeps the layer's input as autograd keeps activations,
and hands the gradient of the output, unchanged, to the layer's rule when the backward
pass comes by. All records hang on one scalar, the anchor: asking autograd for its
gradient runs every record and computes no weight gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections import Counter
from contextlib import nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    Optional,
    Tuple,
)

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.rnn import PackedSequence
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import (
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_structure,
    tree_unflatten,
)

from opacus_ext.grad_sample import graph, replay
from opacus_ext.grad_sample.batchless import Source, Undecided, settled
from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.independence import RandomState, dependent_sample
from opacus_ext.grad_sample.layout import (
    Evidence,
    Key,
    Layout,
    Root,
    arrange,
    code_weights,
    relation,
)
from opacus_ext.grad_sample.rms_norm import scale_rule
from opacus_ext.grad_sample.routing import Routing, read_routing
from opacus_ext.grad_sample.rules import (
    STAND_INS,
    Activations,
    Factors,
    Rule,
    StandIn,
    find_forward,
    find_rule,
    own_parameters,
)

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
        self.routing: Optional[Routing] = None
        self._keys: Optional[Tuple[tuple, List[Key]]] = None

    def keys(self, batch_size: int) -> List[Key]:
        """What the layouts of the outputs are remembered under."""
        given = (batch_size, self.number)
        if self._keys is None or self._keys[0] != given:
            # Of routed rows the number says nothing.
            keys = [
                (
                    f"{self.name}[{i}]",
                    str(self.number),
                    relation(shape[self.routing is not None :], batch_size),
                )
                for i, shape in enumerate(self.shapes)
            ]
            self._keys = given, keys
        return self._keys[1]

    def uses(
        self,
        activations: Tuple[torch.Tensor, ...],
        backprops: Tuple[Optional[torch.Tensor], ...],
        batch_size: int,
    ) -> Uses:
        """The factors of this call's parameters, once its layouts are known."""
        raise NotImplementedError(type(self).__name__)


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

        def by_sample(x: torch.Tensor) -> torch.Tensor:
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
        return [(p, factors[p]) for p in self.params]


class ReplayCall(Call):
    """A call of a layer without a rule; see replay.py."""

    def __init__(
        self,
        *args: Any,
        inputs: Any,
        outputs: List[torch.Tensor],
        positions: List[int],
        shared: bool,
        used: Counter,
    ):
        super().__init__(*args)
        leaves, self._spec = tree_flatten(inputs)
        self._where = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.saved = [leaves[i] for i in self._where]
        self._constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.shapes = [x.shape for x in outputs]
        self.row_dims = [min(1, x.dim()) for x in outputs]
        self.digests = [replay.digest(x.detach(), min(1, x.dim())) for x in outputs]
        self.positions = positions
        self.shared = shared  # one call for all samples
        self.claims.update(used)

    def inputs(self, activations: Tuple[torch.Tensor, ...]) -> Any:
        """The arguments ``(args, kwargs)`` of the call."""
        leaves = list(self._constants)
        for i, x in zip(self._where, activations):
            leaves[i] = x
        return tree_unflatten(leaves, self._spec)

    def uses(self, activations, backprops, batch_size) -> Uses:
        return replay.uses(self, activations, backprops, batch_size)


class _Record(torch.autograd.Function):
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


class Tape:
    """
    Records the calls of all layers of a module that own trainable parameters.

    Args:
        module: the user's model
        batch_first: whether dim 0 (else dim 1) of the model's inputs is the batch

    Raises:
        ValueError: for a layer that can't be trained privately; nothing is attached
    """

    def __init__(self, module: nn.Module, batch_first: bool = True):
        self.module = module
        self.batch_dim = 0 if batch_first else 1
        self.enabled = True
        self.collector: Optional[Collector] = None
        self.on_forward: Optional[Callable[[Any], None]] = None
        self.batch_size: Optional[int] = None
        self.sizes: Counter = Counter()  # of the inputs' batch dims
        self.packed = False  # whether the model's input is a packed sequence
        self.expanded = False  # whether a layer that saw no sample was expanded
        self.names = {p: n for n, p in module.named_parameters()}
        self._layers = list(module.named_modules())
        self._anchor = torch.zeros((), requires_grad=True)
        self._layouts: Dict[tuple, Dict[Key, Layout]] = {}
        self._steps: Counter = Counter()  # by signature
        self._forwards = 0
        self._state: Optional[RandomState] = None
        self._depth = 0  # of calls of the model inside each other
        self._current: Dict[Key, Layout] = {}
        self._late: Counter = Counter()
        self._storages: set = set()
        self._inputs: tuple = ()
        self._buffers: list = []
        self._remembered: Dict[str, bool] = {}
        self._scales: Dict[nn.Module, Optional[Rule]] = {}
        self.refuse(module)
        self.handles = list(self._attach())

    # -- forward -------------------------------------------------------------------

    @staticmethod
    def refuse(module: nn.Module) -> None:
        """
        Raises:
            ValueError: if ``module`` holds a layer that can't be trained privately
        """
        for name, layer in module.named_modules():
            what = f"{name or 'the model'} ({type(layer).__name__})"
            trainable = any(p.requires_grad for p in layer.parameters())
            if trainable and is_parametrized(layer):
                raise ValueError(
                    f"{what} computes its parameters from others (torch.nn.utils."
                    "parametrize). Their per-sample gradients aren't known: remove the "
                    "parametrization (remove_parametrizations) before make_private."
                )
            if trainable and any(
                isinstance(hook, (WeightNorm, SpectralNorm))
                for hook in layer._forward_pre_hooks.values()
            ):
                raise ValueError(
                    f"{what} computes its weight from others (weight_norm or "
                    "spectral_norm). Call remove_weight_norm or remove_spectral_norm "
                    "before make_private."
                )
            if trainable and any(
                isinstance(hook, BasePruningMethod)
                for hook in layer._forward_pre_hooks.values()
            ):
                raise ValueError(
                    f"{what} is pruned (torch.nn.utils.prune) and computes its weight "
                    "from another one. Make that permanent with prune.remove before "
                    "make_private."
                )
            rule = find_rule(layer) if own_parameters(layer) else None
            known = rule is not None or find_forward(layer) is not None
            if known and any(p.is_complex() for p in own_parameters(layer).values()):
                raise ValueError(
                    f"{what} has complex parameters, for which its rule does not hold. "
                    "Use one real layer for the real and one for the imaginary part, "
                    "or freeze it."
                )
            reason = rule.refuse(layer) if rule is not None else None
            if reason is not None:
                raise ValueError(f"{what}: {reason}.")

    def _attach(self) -> Iterator[Any]:
        root = self.module
        yield root.register_forward_pre_hook(self._begin, with_kwargs=True)
        for name, layer in root.named_modules():
            forward = find_forward(layer)
            if forward is not None and any(True for _ in layer.parameters()):
                yield _StandIn(self, name or "the model", layer, forward)
            elif own_parameters(layer) and find_rule(layer) is None:
                # Opacus's mark of a layer whose gradients come from functorch.
                layer.ft_compute_sample_grad = replay.uses
            if layer._parameters:
                # First, so that a user's own hook on the layer counts as what follows.
                hook = functools.partial(self._on_call, name or "the model")
                yield layer.register_forward_hook(hook, with_kwargs=True, prepend=True)
        yield root.register_forward_hook(self._end, with_kwargs=True)
        yield root.register_forward_hook(self._leave, always_call=True)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._depth += 1
        if not self.enabled or not torch.is_grad_enabled():
            return
        self._state = None
        tensors, dim = tensors_in((args, kwargs)), self.batch_dim
        self.sizes = Counter(x.shape[dim] for x in tensors if x.dim() > dim)
        packed = packed_in((args, kwargs))
        self.packed = bool(packed)
        if packed:
            self.sizes = Counter(int(x.batch_sizes[0]) for x in packed)
        common = self.sizes.most_common(1)
        self.batch_size = common[0][0] if common else None
        self._storages = {
            x.untyped_storage().data_ptr()
            for x in tensors
            if packed or (x.dim() > dim and x.shape[dim] == self.batch_size)
        }
        self._inputs = tuple(x.shape for x in tensors)
        self.expanded = False
        if self.batch_size and self.batch_size > 1 and not _in_backward():
            self._forwards += 1
            if self._forwards & (self._forwards - 1) == 0:  # at growing intervals
                device = next((x.device for x in tensors if x.is_cuda), None)
                self._state = RandomState(device or torch.device("cpu"))
        self._buffers = [
            (name, layer, key, buffer, buffer._version)
            for name, layer in self._layers
            for key, buffer in layer._buffers.items()
            if buffer is not None
        ]

    def _end(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if not self.enabled or not torch.is_grad_enabled():
            return output
        for name, layer, key, buffer, version in self._buffers:
            if buffer._version != version or layer.get_buffer(key) is not buffer:
                raise RuntimeError(
                    f"{name} ({type(layer).__name__}): its forward changes its buffer "
                    f"{key}, which would carry data from the batch without noise. "
                    "Replace the layer by one that keeps no running state, or put it "
                    "in evaluation mode if that leaves the buffer alone."
                )
        leaves, spec = tree_flatten(output)
        if any(isinstance(x, Undecided) for x in leaves):
            output = tree_unflatten([settled(x) for x in leaves], spec)
        if _in_backward():
            return output
        self._check_independence((args, kwargs), output)
        if self.on_forward is not None:
            self.on_forward(output)
        return output

    def _check_independence(self, inputs: Tuple[tuple, dict], output: Any) -> None:
        state, self._state = self._state, None
        if state is None or self.packed:
            return
        with self.paused():
            sample = dependent_sample(
                *(self.module, inputs, tensors_in(output), self.batch_size),
                *(self.batch_dim, state, tensors_in),
            )
        if sample is not None:
            raise RuntimeError(
                f"The output for sample {sample} changes with another sample of the "
                "batch (BatchNorm, a statistic over the batch, an expert's capacity "
                "shared by the batch?). Clipping each sample bounds nothing then. "
                "opacus_ext.check_per_sample_gradients(model, batch, loss_fn) tells "
                "more; make the model compute each sample by itself."
            )

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)

    def _on_call(
        self, name: str, layer: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Any:
        if not self._records() or not own_parameters(layer):
            return output
        return self._record(name, layer, (args, kwargs), output)

    def _records(self) -> bool:
        if not self.enabled or not torch.is_grad_enabled() or self.batch_size == 0:
            return False
        # A layer called by itself: if that counts, it is refused.
        return self._depth > 0 or _in_backward()

    def _record(self, name: str, layer: nn.Module, inputs: Any, output: Any) -> Any:
        simple = isinstance(output, torch.Tensor)
        leaves, spec = ([output], None) if simple else tree_flatten(output)
        where = [
            i
            for i, x in enumerate(leaves)
            if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        if not where:
            return output
        raw = [leaves[i] for i in where]
        args = [settled(x) for x in _arguments(inputs)]
        rule = self._rule(layer, args)
        used = Counter() if rule else self._uses(layer, args, raw)
        if rule is None and not used:
            return output  # its parameters are used by modules inside it, if at all

        def record(*outputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
            expanded = outputs[0].dim() > raw[0].dim()
            self.expanded = self.expanded or expanded
            call: Call
            if rule is not None:
                given = _named_inputs(layer, args, inputs) if rule.all_inputs else {}
                x = args[0]
                if expanded:
                    x = x.expand(len(outputs[0]), *x.shape)
                call = RuleCall(
                    *(self, layer, name),
                    rule=rule,
                    inputs=given or {"input": x},
                    output=outputs[0],
                    params=own_parameters(layer).values(),
                    expanded=expanded,
                )
            else:
                call = ReplayCall(
                    *(self, layer, name),
                    inputs=tree_unflatten(args, tree_structure(inputs)),
                    outputs=list(outputs),
                    positions=where,
                    shared=expanded,
                    used=used,
                )
            self._route(call, args, outputs)
            return _Record.apply(self._anchor, call, *outputs)

        if self._saw_no_sample(args, rule is not None):
            if len(raw) > 1:
                raise RuntimeError(
                    f"{name}: returns several outputs and saw no sample. Give it an "
                    "input with a batch dimension."
                )
            source = Source(
                *(raw[0], lambda y: record(y)[0], self.batch_size, name),
                remembered=self._remembered,
            )
            leaves[where[0]] = Undecided.of(source, self._anchor)
        else:
            for i, y in zip(where, record(*raw)):
                leaves[i] = y
        return leaves[0] if simple else tree_unflatten(leaves, spec)

    def _route(self, call: Call, args: List[Any], outputs: tuple) -> None:
        """Notes which samples the rows of a call were gathered from, if they were."""
        x = next((x for x in args if isinstance(x, torch.Tensor)), None)
        if self.batch_size and self.batch_size > 1 and x is not None and x.dim():
            routing = read_routing(x, self.batch_size)
            if routing is not None and len(outputs[0]) == len(routing.samples):
                call.routing = routing

    def _rule(self, layer: nn.Module, inputs: List[Any]) -> Optional[Rule]:
        rule = find_rule(layer)
        if rule is None and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            if layer not in self._scales:
                with self.paused():
                    self._scales[layer] = scale_rule(layer, inputs[0])
            rule = self._scales[layer]
        return rule

    def _uses(
        self, layer: nn.Module, inputs: List[Any], outputs: List[torch.Tensor]
    ) -> Counter:
        """How often each parameter of ``layer`` is used between inputs and outputs."""
        stop = [
            x.grad_fn
            for x in inputs
            if isinstance(x, torch.Tensor) and x.grad_fn is not None
        ]
        inner = graph.read(outputs, stop)
        counts = Counter({id(p): len(ops) for p, ops in inner.uses.items()})
        for call in inner.records:
            counts.subtract(call.claims)
        own = {id(p) for p in own_parameters(layer).values()}
        return Counter({p: n for p, n in counts.items() if p in own and n > 0})

    def _saw_no_sample(self, inputs: List[Any], has_rule: bool) -> bool:
        """Whether nothing shows that an output's rows are those of the batch."""
        if self.batch_size is None or self.batch_size < 2 or self.packed:
            return False
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        if any(x.requires_grad for x in tensors):
            return False
        # What a layer without a rule does with its input is not known.
        return not has_rule or not any(
            x.untyped_storage().data_ptr() in self._storages for x in tensors
        )

    def paused(self) -> "_Paused":
        """A context in which nothing is recorded."""
        return _Paused(self)

    # -- backward ------------------------------------------------------------------

    def prepare(self, roots: List[Root], batch_size: int) -> graph.Graph:
        """
        Reads the graph of a step, refuses what it can't follow, and makes sure that
        the layout of every call is known.

        Args:
            roots: per-sample losses ``[B]``, or outputs of the model
            batch_size: ``B``

        Raises:
            RuntimeError: for a parameter used where no rule sees it
            ValueError: for rows that can't be assigned to samples
        """
        found = graph.read(root.tensor for root in roots)
        found.packed = found.packed or self.packed
        claims: Counter = Counter()
        for call in found.records:
            claims.update(call.claims)
        names = {id(p): n for p, n in self.names.items()}
        problem = graph.unclaimed(found, claims, names)
        if problem is not None:
            raise RuntimeError(problem)
        if found.undecided:
            raise RuntimeError(
                f"{found.undecided[0]}: saw no sample, and its output reaches the loss "
                "through an op that can't be followed (a custom autograd function, or "
                "an argument of a checkpointed block). Expand its input to [B, ...]."
            )
        counts: Counter = Counter()
        for call in found.records:
            call.batch_size = batch_size
            call.number = f"{counts[call.name]}"
            counts[call.name] += 1
        keys = [key for call in found.records for key in call.keys(batch_size)]
        if found.reentrant:  # of the calls it hides, the inputs' shapes must tell
            keys += [("", "", relation(s, batch_size)) for s in self._inputs]
        self._signature = (found.structure, tuple(keys))
        if batch_size > 1:
            # What a step did not show (gradients of zero) a later one may: look again
            # at growing intervals.
            count = self._steps[self._signature] = self._steps[self._signature] + 1
            routings = [c.routing.indices for c in found.records if c.routing]
            known = set().union(*routings)
            moves = any(not (index & known) for index in found.moves)
            again = moves or count & (count - 1) == 0
            if self._signature in self._layouts and not again:
                self._current = self._layouts[self._signature]
            else:
                self.probe(roots, batch_size, found)
        for call in found.records:
            call.layouts = self._find_layouts(call, batch_size)
        return found

    def probe(self, roots: List[Root], batch_size: int, found: graph.Graph) -> None:
        """
        Finds and checks all layouts by a few more backward passes (layout.py).

        Raises:
            ValueError: for rows that can't be assigned to samples
        """
        roots = [root for root in roots if root.samples is not None]
        seen: Dict[Key, Evidence] = {}

        def look(call: Call, grads: tuple, ctx: Any = None) -> None:
            self._look(call, grads, seen, batch_size, found.packed)

        for call in found.records:
            look(call, ())
        device = roots[0].tensor.device if roots else torch.device("cpu")
        codes = code_weights(batch_size, torch.float64, device)
        for code in codes:
            grads = [root.cotangent(code.to(root.tensor.device)) for root in roots]
            tensors = [root.tensor for root in roots]
            self.backward(tensors, grads, look, found, retain_graph=True)
        known, sure = {}, True
        for key, evidence in seen.items():
            layout, unique = evidence.decide(codes)
            if layout is not None:
                known[key] = layout
            sure = sure and (unique or not evidence.seen)
        self._current = known
        if sure:
            self._layouts[self._signature] = known

    def _look(
        self,
        call: Call,
        grads: tuple,
        seen: Dict[Key, Evidence],
        batch_size: int,
        packed: bool,
    ) -> None:
        self._number(call)
        for i, key in enumerate(call.keys(batch_size)):
            if key not in seen:
                where = f"{call.name} ({type(call.layer).__name__})"
                seen[key] = Evidence(
                    *(where, call.shapes[i], call.row_dims[i], packed),
                    None if call.routing is None else call.routing.samples,
                )
            if i < len(grads) and grads[i] is not None:
                seen[key].add(grads[i])

    def _number(self, call: Call) -> None:
        """Numbers a call that a recomputation has made during the backward pass."""
        if call.number is None:
            call.number = f"late {self._late[call.name]}"
            self._late[call.name] += 1

    def _find_layouts(self, call: Call, batch_size: int) -> List[Optional[Layout]]:
        """The layouts of the outputs; None where no gradient has told yet."""
        if batch_size == 1:
            return [
                Layout(0 if rows and shape[0] == 1 else -1, "plain")
                for shape, rows in zip(call.shapes, call.row_dims)
            ]
        layouts = [self._current.get(key) for key in call.keys(batch_size)]
        if call.routing is not None:  # the samples of this step
            layouts = [
                (
                    Layout(0, "routed", call.routing.samples)
                    if x is not None and x.kind == "routed"
                    else x
                )
                for x in layouts
            ]
        return layouts

    def begin_backward(self) -> None:
        """Recomputed calls are numbered in the order of one backward pass."""
        self._late.clear()

    def backward(
        self,
        roots: List[torch.Tensor],
        grads: List[torch.Tensor],
        collector: Optional[Collector],
        found: graph.Graph,
        retain_graph: bool = False,
    ) -> Dict[nn.Parameter, Optional[torch.Tensor]]:
        """
        One backward pass that computes gradients of activations only and shows every
        recorded call to ``collector``.

        Returns:
            Autograd's own gradient of each parameter, where reentrant checkpointing
            has computed it on the way; else an empty dict.
        """
        before, self.collector = self.collector, collector
        self.begin_backward()
        params = [p for p in self.names if p.requires_grad]
        kept = [p.grad for p in params]
        try:
            for p in params:
                p.grad = None
            if not roots:
                return {}
            if found.reentrant:
                # It only works with .backward(), which accumulates into p.grad.
                torch.autograd.backward(roots, grads, retain_graph)
                return {p: p.grad for p in params}
            torch.autograd.grad(
                roots, self._anchor, grads, retain_graph, allow_unused=True
            )
            moved = [self.names[p] for p in params if p.grad is not None]
            if moved:
                raise RuntimeError(
                    f"A custom autograd function computes the gradient of {moved[0]} "
                    "by itself, where the gradient of each sample can't be seen. Use "
                    "torch.utils.checkpoint or plain modules instead."
                )
            return {}
        finally:
            self.collector = before
            for p, grad in zip(params, kept):
                p.grad = grad

    def collect(self, call: Call, grads: tuple, ctx: Any, batch_size: int) -> Uses:
        """The factors of a call, given the gradients of its outputs."""
        if all(g is None for g in grads):
            return []
        try:
            activations = ctx.saved_tensors
        except RuntimeError as error:
            raise RuntimeError(
                f"{call.name} ({type(call.layer).__name__}): its input was changed in "
                "place after the layer used it. Replace the in-place op that follows "
                f"by one that returns a new tensor. ({error})"
            ) from error
        if call.layouts is None:
            self._number(call)
            call.layouts = self._find_layouts(call, batch_size)
        for layout, grad in zip(call.layouts, grads):
            if grad is None:
                continue
            # Of "read" layouts: rows that had no gradient when it was read off them.
            if layout is None or (
                layout.kind == "read" and bool((grad[layout.samples < 0] != 0).any())
            ):
                raise UnknownLayout(call)
        return call.uses(activations, grads, batch_size)

    def remove(self) -> None:
        """Removes all hooks."""
        while self.handles:
            self.handles.pop().remove()


def _arguments(inputs: Tuple[tuple, dict]) -> List[Any]:
    """The leaves of ``(args, kwargs)``."""
    args, kwargs = inputs
    if not kwargs and all(isinstance(x, torch.Tensor) for x in args):
        return list(args)
    return tree_flatten(inputs)[0]


def _named_inputs(
    layer: nn.Module, leaves: List[Any], inputs: Tuple[tuple, dict]
) -> Dict[str, torch.Tensor]:
    """The tensor arguments of a call by their names in ``forward``."""
    args, kwargs = tree_unflatten(leaves, tree_structure(inputs))
    bound = inspect.signature(type(layer).forward).bind(layer, *args, **kwargs)
    named = bound.arguments.items()
    return {n: x for n, x in named if isinstance(x, torch.Tensor)}


def _in_backward() -> bool:
    """Whether autograd is at work, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


class _StandIn:
    """
    A layer's ``forward`` replaced by one whose parts are recorded (rules.py), for as
    long as the tape is attached.
    """

    def __init__(self, tape: Tape, name: str, layer: nn.Module, forward: StandIn):
        self.tape, self.name = tape, name
        self.layer, self.forward = layer, forward
        self._checked: set = set()
        layer.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        trained = any(p.requires_grad for p in layer.parameters())
        if not trained or not (torch.is_grad_enabled() or layer.training):
            return type(layer).forward(layer, *args, **kwargs)
        inputs = tree_map(settled, (args, kwargs))
        try:
            expected = self._expected(inputs)
            output = self.forward(layer, self._record, *inputs[0], **inputs[1])
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
        if torch._C._are_functorch_transforms_active():
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
    ) -> torch.Tensor:
        trained = [p for p in params if p is not None and p.requires_grad]
        if not trained or not self.tape._records():
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
            ),
            inputs={str(i): x for i, x in enumerate(given)},
            output=output,
            params=trained,
        )
        return _Record.apply(self.tape._anchor, call, output)[0]

    def remove(self) -> None:
        """Gives the layer its own ``forward`` back."""
        vars(self.layer).pop("forward", None)


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


class _Paused:
    def __init__(self, tape: Tape):
        self.tape = tape

    def __enter__(self) -> None:
        self.before, self.tape.enabled = self.tape.enabled, False

    def __exit__(self, *exc: Any) -> None:
        self.tape.enabled = self.before
