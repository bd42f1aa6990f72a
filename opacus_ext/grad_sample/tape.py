"""The tape: from a layer's call in the forward pass to its factors in the backward.

A forward hook puts a record (calls.py) behind the output of every layer that owns
trainable parameters, or of every part of a layer that has a stand-in (stand_in.py). All
records hang on one scalar, the anchor: asking autograd for its gradient runs every
record and computes no weight gradient.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from contextlib import contextmanager
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Optional,
    Set,
    Tuple,
)

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_flatten, tree_structure, tree_unflatten
from torch.utils.checkpoint import CheckpointFunction

from opacus_ext.grad_sample import adapters, graph, replay
from opacus_ext.grad_sample.batchless import (
    Source,
    Undecided,
    decided,
    plain,
    seems_shared,
    settled,
    shared,
)
from opacus_ext.grad_sample.calls import (
    Call,
    Collector,
    MarkCall,
    RecordNode,
    ReplayCall,
    RuleCall,
    UnknownLayout,
    Uses,
    arguments,
    named_inputs,
    packed_in,
    tensors_in,
)
from opacus_ext.grad_sample.independence import (
    RandomState,
    again,
    dependent_sample,
    replace,
    runtime_changes,
)
from opacus_ext.grad_sample.layout import (
    Evidence,
    Key,
    Layout,
    Root,
    code_weights,
    relation,
)
from opacus_ext.grad_sample.leaks import (
    Leak,
    Trace,
    begins_in,
    is_number,
    kept_numbers,
    mixed_numbers,
    module_leak,
    named_tensors,
    number_leak,
    over_tokens,
)
from opacus_ext.grad_sample.parallel import spread_over, world_of
from opacus_ext.grad_sample.randomness import Drawn, draws
from opacus_ext.grad_sample.rms_norm import scale_rule
from opacus_ext.grad_sample.routing import Routing, read_routing
from opacus_ext.grad_sample.rules import (
    Rule,
    find_forward,
    find_rule,
    own_parameters,
)
from opacus_ext.grad_sample.stand_in import StandInForward


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
        self._guessed: List[str] = []  # those with an input that may be an expert's
        self.names = {p: n for n, p in module.named_parameters()}
        self._layers = list(module.named_modules())
        self._parametrized = {m for _, m in self._layers if is_parametrized(m)}
        # Of each layer, those inside it that own parameters; and those recorded.
        self._owners: Dict[nn.Module, List[Tuple[str, nn.Module]]] = {
            layer: [(n, m) for n, m in layer.named_modules() if m._parameters and n]
            for _, layer in self._layers
        }
        self._met: Set[nn.Module] = set()
        self._held: Dict[nn.Module, Undecided] = {}  # inputs of layers being called
        self._drawing: List[Tuple[nn.Module, Drawn]] = []
        self._drawn: Dict[nn.Module, List[torch.Tensor]] = {}  # by those just called
        self._once: Set[nn.Module] = set()  # those that need not be run again
        self._draws: Dict[Tuple[nn.Module, bool], bool] = {}  # in training or not
        self.world = world_of([layer for _, layer in self._layers])
        self._anchor = torch.zeros((), requires_grad=True)
        self._layouts: Dict[tuple, Dict[Key, Layout]] = {}
        self._steps: Counter = Counter()  # by signature
        self._forwards = 0
        self._state: Optional[RandomState] = None
        self._mixed: Set[str] = set()  # names of outputs and attributes that do so
        self._trained: Set[str] = set()  # of numbers that must be looked at each step
        self._keeps = False  # whether modules keep numbers as attributes
        self._graded = False  # whether the model was called with gradients
        # Layers with trainable parameters that checkpoints ran without gradients since
        # then, and have not run again in the backward pass.
        self._dark: Dict[nn.Module, str] = {}
        self._depth = 0  # of calls of the model inside each other
        self._current: Dict[Key, Layout] = {}
        self._late: Counter = Counter()
        self._storages: set = set()
        self._inputs: tuple = ()
        self._buffers: list = []
        self._remembered: Dict[str, bool] = {}
        self._scales: Dict[nn.Module, Optional[Rule]] = {}
        self.replays: Dict[tuple, tuple] = {}  # how layers were run again (replay.py)
        self.refuse(module)
        self.handles = list(self._attach())

    # -- forward -------------------------------------------------------------------

    @staticmethod
    def refuse(module: nn.Module) -> None:
        """
        Raises:
            ValueError: if ``module`` holds a layer that can't be trained privately
        """
        adapters.refuse(module)
        for name, p in module.named_parameters():
            if p.requires_grad and (p._backward_hooks or p._post_accumulate_grad_hooks):
                raise ValueError(
                    f"Parameter {name} has a hook (register_hook or "
                    "register_post_accumulate_grad_hook), which would change or use "
                    "its gradient before it is private. Remove the hook, or freeze "
                    "the parameter."
                )
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
        yield root.register_forward_pre_hook(Untraced(self._begin), with_kwargs=True)
        yield from adapters.watch(root)
        for name, layer in root.named_modules():
            forward = find_forward(layer)
            if forward is not None and any(True for _ in layer.parameters()):
                yield StandInForward(self, name or "the model", layer, forward)
            elif own_parameters(layer) and find_rule(layer) is None:
                # Opacus's mark of a layer whose gradients come from functorch.
                layer.ft_compute_sample_grad = replay.uses
            if own_parameters(layer) and find_rule(layer) is not None:
                yield layer.register_forward_pre_hook(Untraced(self._hold))
            if layer._parameters or self._owners[layer]:
                # First, so that a user's own hook on the layer counts as what follows.
                hook = Untraced(functools.partial(self._on_call, name or "the model"))
                yield layer.register_forward_hook(hook, with_kwargs=True, prepend=True)
                if find_rule(layer) is None and forward is None:
                    yield layer.register_forward_pre_hook(Untraced(self._draw))
                    hook = Untraced(self._drew)
                    yield layer.register_forward_hook(
                        hook, prepend=True, always_call=True
                    )
        yield root.register_forward_hook(Untraced(self._end), with_kwargs=True)
        yield root.register_forward_hook(Untraced(self._leave), always_call=True)

    def _begin(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._depth += 1
        self._graded = self.enabled and torch.is_grad_enabled()
        if not self.enabled or not torch.is_grad_enabled():
            return
        self._state = None
        self._met.clear()
        if not _in_backward():
            self._dark.clear()
        self._held.clear()
        self._drawn.clear()
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
        self._guessed = []
        if self.world is not None and not _in_backward():
            if self.batch_size is None:
                raise RuntimeError(
                    "The model was called without a tensor, so the batch size is "
                    "unknown. Pass its inputs as tensors with a batch dimension."
                )
            self.world.begin(self.batch_size, self.module_device())
        several = self.batch_size is not None and self.batch_size > 1
        if (several or self.world is not None) and not _in_backward():
            self._forwards += 1
            # At growing intervals.
            if self._trained or self._forwards & (self._forwards - 1) == 0:
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
        if not any(x.requires_grad for x in tensors_in(output)):
            self.refuse_dark()
        looked = self._state is not None
        self._check_independence((args, kwargs), output)
        self._guard_numbers(output, tensors_in((args, kwargs)), looked)
        if self.on_forward is not None:
            self.on_forward(output)
        return output

    def _check_independence(self, inputs: Tuple[tuple, dict], output: Any) -> None:
        state, self._state, world = self._state, None, self.world
        if state is None or self.packed:
            return
        with self.paused():
            sample = dependent_sample(
                *(self.module, inputs, tensors_in(output), self.batch_size),
                *(self.batch_dim, state, tensors_in),
                rank=None if world is None else world.rank,
            )
            if world is not None:
                world.agree(0, sample is not None, self.module_device())
            if sample is not None:
                where = ""
                if world is None:
                    where = f" It begins in {self._leak(inputs, state)}"
                raise RuntimeError(
                    f"The output for sample {sample} changes with another sample of "
                    "the batch (BatchNorm, a statistic over the batch, an expert's "
                    "capacity shared by the batch?). Clipping each sample bounds "
                    f"nothing then.{where} opacus_ext.find_leaks(model, batch, "
                    "loss_fn) tells more."
                )
            numbers = [x for _, x in named_tensors(output) if self._is_number(x)]
            self._keeps = bool(kept_numbers(self.module))
            if (numbers or self._keeps) and self.batch_size > 1 and world is None:
                self._mixed.update(self._mixed_numbers(inputs, state))

    def _traces(self, inputs: Tuple[tuple, dict], state: RandomState) -> Iterator:
        """The model's calls with its inputs, and with other samples among them."""
        for change in runtime_changes(self.batch_size):
            given = self.batch_size, self.batch_dim, change, _is_labels
            other = replace(inputs, *given)
            if other is None:
                continue
            traces = []
            for args, kwargs in (inputs, other):
                with Trace(self.module, attributes=True) as trace:
                    run = functools.partial(self.module, *args, **kwargs)
                    again(self.module, run, state, dropout=False)
                traces.append(trace)
            yield (*traces, self.batch_size, change.keep)

    def _leak(self, inputs: Tuple[tuple, dict], state: RandomState) -> Leak:
        """Where a model that mixes samples does so."""
        found = [begins_in(*traces) for traces in self._traces(inputs, state)]
        return next(filter(None, found), module_leak("", self.module))

    def _mixed_numbers(self, inputs: Any, state: RandomState) -> Iterator[str]:
        for traces in self._traces(inputs, state):
            yield from mixed_numbers(*traces)

    def _guard_numbers(
        self, output: Any, inputs: List[torch.Tensor], looked: bool
    ) -> None:
        """A number of the model's that mixes samples must not be trained on."""
        for name, x in named_tensors(output):
            if not self._is_number(x):
                continue
            mixed = name in self._mixed or self.world is not None
            if not mixed and x.numel() == 1 and (self.batch_size or 1) > 1:
                mixed = over_tokens(x, inputs, self.batch_size)
                if mixed is None:
                    note = functools.partial(self._note_number, name, looked)
                    x.register_hook(note)
            if mixed:
                x.register_hook(functools.partial(self._refuse_number, name))
        kept = kept_numbers(self.module) if self._keeps and self._mixed else {}
        for name in self._mixed & kept.keys():
            kept[name].register_hook(functools.partial(self._refuse_number, name))

    def _is_number(self, x: torch.Tensor) -> bool:
        return is_number(x, self.batch_size or 1)

    def _refuse_number(self, name: str, grad: torch.Tensor) -> None:
        if self.enabled and self.batch_size != 1:
            raise RuntimeError(str(number_leak(f"The model's output {name}")))

    def _note_number(self, name: str, looked: bool, grad: torch.Tensor) -> None:
        """From now on every step looks at whether it mixes samples."""
        self._trained.add(name)
        if self.enabled and not looked:
            raise RuntimeError(
                f"The model's output {name} is a number for the whole batch, and this "
                "step did not look at whether it mixes samples, as it was not trained "
                "on before. Run the step again, from the model's forward: it is "
                "looked at from now on. Or compute one loss a sample, "
                "opacus_ext.losses.model_losses(model, batch)."
            )

    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        self._graded = self._graded and self._depth > 0
        error = sys.exc_info()[1]
        if self._depth == 0 and output is None and isinstance(error, RuntimeError):
            names = ", ".join(self._guessed)
            if names:
                error.args = (
                    f"{error} (Before that, the output of {names} was expanded to the "
                    "batch: its input needs no gradient, so it looked like a value for "
                    "all samples. If its rows are an expert's tokens, train something "
                    "below it, such as a norm.)",
                )

    def _hold(self, layer: nn.Module, args: tuple) -> Optional[tuple]:
        """A value that meets no batch in a layer is not decided by it."""
        if not self._records() or len(args) != 1 or not seems_shared(args[0]):
            return None
        self._held[layer] = args[0]
        return (plain(args[0]),)

    def _draw(self, layer: nn.Module, args: tuple) -> None:
        """What a layer draws is kept if it may have to be run again."""
        if layer in self._once or not self._records():
            return
        key = layer, layer.training
        if key not in self._draws:
            self._draws[key] = draws(layer)
        if self._draws[key]:
            self._drawing.append((layer, Drawn().__enter__()))

    def _drew(self, layer: nn.Module, args: tuple, output: Any) -> None:
        if self._drawing and self._drawing[-1][0] is layer:
            drawn = self._drawing.pop()[1]
            drawn.__exit__(None, None, None)
            self._drawn[layer] = drawn.kept

    def _on_call(
        self, name: str, layer: nn.Module, args: tuple, kwargs: dict, output: Any
    ) -> Any:
        if not self.enabled:
            return output
        if self._dark and _in_backward():
            self._dark.pop(layer, None)
        if not torch.is_grad_enabled():
            if self._graded and own_parameters(layer) and _in_checkpoint():
                self._dark[layer] = name
            return output
        params = own_parameters(layer)
        stands_in = isinstance(vars(layer).get("forward"), StandInForward)
        if stands_in and not is_parametrized(layer):
            self._met.update((layer, *(m for _, m in self._owners[layer])))
        # A module that was not called may have lent its parameters to this one.
        for prefix, owner in self._owners[layer]:
            if owner not in self._met:
                lent = own_parameters(owner).items()
                params.update((f"{prefix}.{n}", p) for n, p in lent)
        if not params:
            self._once.add(layer)
            return output
        routing = self._routing(arguments((args, kwargs)))
        if not self._records(routing):
            return output
        return self._record(name, layer, params, (args, kwargs), output, routing)

    def _records(self, routing: Optional[Routing] = None) -> bool:
        if not self.enabled or not torch.is_grad_enabled():
            return False
        dealt = routing is not None and routing.batch_size is not None
        if self.batch_size == 0 and not dealt:
            return False
        # A layer called by itself: if that counts, it is refused.
        return self._depth > 0 or _in_backward()

    def _record(
        self,
        name: str,
        layer: nn.Module,
        params: Dict[str, nn.Parameter],
        inputs: Any,
        output: Any,
        routing: Optional[Routing],
    ) -> Any:
        held, drawn = self._held.pop(layer, None), self._drawn.pop(layer, [])
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
        args = [settled(x) for x in arguments(inputs)]
        rule = self._rule(layer, args) if own_parameters(layer) else None
        used = Counter() if rule else self._uses(layer, params, args, raw)
        met = bool(used) and any(isinstance(y, Undecided) for y in raw)
        seen = raw
        if met or rule is not None:
            raw = [settled(y) for y in raw]
        if met:
            used = self._uses(layer, params, args, raw)
        if rule is not None or not used:
            self._once.add(layer)
        if rule is None and (not used or self._lends_weights(layer)):
            # Its parameters are used by modules inside it, or it is a part of what
            # another layer around it computes.
            return output
        if rule is None and len(raw) > 1 and _of_weights_alone(args, raw):
            return output  # what the layer around it makes of these may be a batch
        self._met.add(layer)
        params = {n: p for n, p in params.items() if id(p) in used}

        def record(*outputs: torch.Tensor) -> Tuple[torch.Tensor, ...]:
            expanded = outputs[0].dim() > raw[0].dim()
            self.expanded = self.expanded or expanded
            if expanded and any(x.is_floating_point() for x in tensors_in(args)):
                self._guessed.append(name)
            call: Call
            if rule is not None:
                given = named_inputs(layer, args, inputs) if rule.all_inputs else {}
                x = args[0]
                if held is not None:
                    x, *outputs = self._again(layer, rule, held, not expanded)
                elif expanded:
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
                    params=params,
                    positions=where,
                    shared=expanded,
                    used=used,
                    drawn=drawn,
                )
            if not type(layer).__module__.startswith("torch.nn."):
                owned = [p for p in self.names if id(p) in call.claims]
                call.inside = graph.leading_to(outputs, _nodes_of(args), owned)
            if routing is not None and len(outputs[0]) == len(routing.samples):
                call.routing = routing
            return RecordNode.apply(self._anchor, call, *outputs)

        unseen = not met and self._saw_no_sample(args, rule is not None)
        unseen = unseen or held is not None
        if unseen and len(raw) > 1:
            # Taken for a batch if it may be one, which the gradients check.
            if any(y.dim() == 0 or len(y) % self.batch_size for y in raw):
                raise RuntimeError(
                    f"{name}: returns several outputs and saw no sample. Give it an "
                    "input with a batch dimension."
                )
            unseen = False
        if unseen:
            # One copy for each row that a sample has inside (losses.PerRecord).
            rows = self.batch_size * getattr(self.module, "rows_per_sample", 1)
            source = Source(
                *(raw[0], lambda y: record(y)[0], rows, name),
                remembered=self._remembered,
            )
            leaves[where[0]] = Undecided.of(source, self._anchor)
        else:
            for i, x, y in zip(where, seen, record(*raw)):
                # The model goes on with the shape that it computed.
                copies = isinstance(x, Undecided) and y.dim() > x.dim()
                leaves[i] = shared(y, x, x.source) if copies else y
        return leaves[0] if simple else tree_unflatten(leaves, spec)

    def _again(
        self, layer: nn.Module, rule: Rule, held: Undecided, batched: bool
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """A layer's input and output, now that it is known what the input is."""
        x = decided(held, batched)
        if batched:
            return x, layer.forward(x)
        rows = rule.row_dims(layer, layer.forward(x[0]))
        if rows == 0:
            return x, layer.forward(x)
        y = layer.forward(x.flatten(0, 1))  # some layers know one batch dim only
        return x, y.unflatten(0, x.shape[:2])

    def _routing(self, args: List[Any]) -> Optional[Routing]:
        """Which samples the rows of an input were gathered from, if they were."""
        x = next((x for x in args if isinstance(x, torch.Tensor)), None)
        several = self.batch_size is not None and self.batch_size > 1
        if x is None or not x.dim() or not (several or self.world is not None):
            return None
        return read_routing(x, self.batch_size or 0)

    def _rule(self, layer: nn.Module, inputs: List[Any]) -> Optional[Rule]:
        rule = find_rule(layer)
        if rule is None and len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
            if layer not in self._scales:
                with self.paused():
                    self._scales[layer] = scale_rule(layer, inputs[0])
            rule = self._scales[layer]
        return rule

    def _uses(
        self,
        layer: nn.Module,
        params: Dict[str, nn.Parameter],
        inputs: List[Any],
        outputs: List[torch.Tensor],
    ) -> Counter:
        """
        How often the layer uses each of ``params`` between inputs and outputs where no
        record is; never those of a module inside it whose use another layer has
        recorded, as running this layer again would run that use again too.
        """
        inner = graph.read(outputs, _nodes_of(inputs))
        counts = Counter({id(p): len(ops) for p, ops in inner.uses.items()})
        for call in inner.records:
            counts.subtract(call.claims)
        recorded = {
            (m, claim)
            for call in inner.records
            if call.layer is not layer
            for m in (call.layer, *(m for _, m in self._owners[call.layer]))
            for claim in call.claims
        }
        owners = {"": layer, **dict(self._owners[layer])}
        own = {
            id(p)
            for name, p in params.items()
            if (owners[name.rpartition(".")[0]], id(p)) not in recorded
        }
        return Counter({p: n for p, n in counts.items() if p in own and n > 0})

    def _lends_weights(self, layer: nn.Module) -> bool:
        """Whether a module around ``layer`` has put other weights in it for a call."""
        return any(
            is_parametrized(m) and m not in self._parametrized for m in layer.modules()
        )

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

    def refuse_dark(self) -> None:
        """
        To be called where the checkpoints of a step have run their layers again.

        Raises:
            RuntimeError: for a layer that none has run again
        """
        for layer, name in self._dark.items():
            raise RuntimeError(
                f"{name} ({type(layer).__name__}): is in a block checkpointed with "
                "use_reentrant=True that no gradient reaches, as none of its inputs "
                "requires gradients: its trainable parameters would get noise alone. "
                "Use use_reentrant=False, or model.enable_input_require_grads()."
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
        tensors = [root.tensor for root in roots]
        found = graph.read(tensors, batch_size=batch_size, params=self.names)
        found.packed = found.packed or self.packed
        claims: Counter = Counter()
        for call in found.records:
            claims.update(call.claims)
        # Where a process has no sample, only experts that others send rows to.
        uses = [p for p in self.names if batch_size or spread_over(p)]
        names = {id(p): self.names[p] for p in uses}
        problem = graph.unclaimed(found, claims, names)
        for p in found.uses if problem is None else ():
            if isinstance(p, nn.Parameter) and p not in self.names:
                problem = (
                    f"A parameter of shape {tuple(p.shape)} takes part that the model "
                    "did not have at make_private, such as that of an adapter added "
                    "later. Change the model before make_private."
                )
        if problem is None and found.undecided:
            problem = (
                f"{found.undecided[0]}: saw no sample, and its output reaches the loss "
                "through an op that can't be followed (a custom autograd function, or "
                "an argument of a checkpointed block). Expand its input to [B, ...]."
            )
        around = graph.escaped(found, tensors) if problem is None else None
        if around is not None:
            owned = [n for p, n in self.names.items() if id(p) in around.claims]
            problem = (
                f"{around.name} ({type(around.layer).__name__}): something that it "
                f"computes with its parameters ({', '.join(owned)}) reaches the loss "
                "by another way than its output, such as an attribute, where the "
                "gradient of each sample can't be seen. Return it among the layer's "
                "outputs."
            )
        if problem is None and self.world is not None:
            problem = self._refuse_spread(found, batch_size)
        if problem is not None:
            if self.world is not None:
                self.world.agree(0, True, self.module_device())
            raise RuntimeError(problem)
        counts: Counter = Counter()
        for call in found.records:
            call.batch_size = batch_size
            call.number = f"{counts[call.name]}"
            counts[call.name] += 1
        keys = [key for call in found.records for key in call.keys(batch_size)]
        if found.reentrant:  # of the calls it hides, the inputs' shapes must tell
            keys += [("", "", relation(s, batch_size)) for s in self._inputs]
        self._signature = (found.structure, tuple(keys))
        again = 0
        if batch_size > 1 or self.world is not None:
            # What a step did not show (gradients of zero) a later one may: look again
            # at growing intervals.
            count = self._steps[self._signature] = self._steps[self._signature] + 1
            routings = [c.routing.indices for c in found.records if c.routing]
            known = set().union(*routings)
            moves = any(not (index & known) for index in found.moves)
            again = moves or count & (count - 1) == 0
            again = again or self._signature not in self._layouts
            if self.world is not None:  # all processes, or none
                again = self.world.agree(again, False, self.module_device())
            if again:
                evidence = self._look_at(roots, batch_size, found)
            else:
                self._current = self._layouts[self._signature]
        with self._together(bool(again)):
            if again:
                self._decide(*evidence)
            for call in found.records:
                call.layouts = self._find_layouts(call, batch_size)
                if isinstance(call, MarkCall):
                    _refuse_other_orders(call)
        return found

    @contextmanager
    def _together(self, active: bool) -> Iterator[None]:
        """What one of the processes refuses inside, all refuse."""
        refuses = True
        try:
            yield
            refuses = False
        finally:
            if active and self.world is not None:
                self.world.agree(0, refuses, self.module_device())

    def _refuse_spread(self, found: graph.Graph, batch_size: int) -> Optional[str]:
        """Why a step of experts that are spread over processes can't be taken."""
        if found.reentrant:
            return (
                "Experts spread over processes can't be checkpointed with "
                "use_reentrant=True. Use use_reentrant=False."
            )
        own = self.world.batch_sizes[self.world.rank]
        if batch_size != own:
            return (
                f"The model gives {batch_size} samples where its inputs look like "
                f"{own}. Where experts are spread over processes, pass the inputs with "
                "the batch dimension first among the arguments."
            )
        spread = {id(p): spread_over(p) is not None for p in self.names}
        for call in found.records:
            dealt = call.size(-1) >= 0
            if any(
                n > 0 and spread.get(p, dealt) != dealt for p, n in call.claims.items()
            ):
                return (
                    f"{call.name} ({type(call.layer).__name__}): is used by experts "
                    "that are spread over processes, or is a part of them, in a way in "
                    "which the samples of its rows can't be followed. Let experts "
                    "consist of layers that compute each row by itself, without moving "
                    "rows, and that nothing else uses."
                )
        return None

    def module_device(self) -> torch.device:
        """Where the model's parameters are."""
        device = next((p.device for p in self.names), None)
        return torch.device("cpu") if device is None else device

    def probe(self, roots: List[Root], batch_size: int, found: graph.Graph) -> None:
        """
        Finds and checks all layouts by a few more backward passes (layout.py).

        Raises:
            ValueError: for rows that can't be assigned to samples
        """
        self._decide(*self._look_at(roots, batch_size, found))

    def _look_at(
        self, roots: List[Root], batch_size: int, found: graph.Graph
    ) -> Tuple[Dict[Key, Evidence], List[torch.Tensor]]:
        """What a few more backward passes show, and the weights of the samples."""
        if batch_size > 0:
            roots = [root for root in roots if root.samples is not None]
        seen: Dict[Key, Evidence] = {}

        def look(call: Call, grads: tuple, ctx: Any = None) -> None:
            self._look(call, grads, seen, batch_size, found.packed)

        for call in found.records:
            look(call, ())
        device = roots[0].tensor.device if roots else torch.device("cpu")
        codes = code_weights(batch_size, torch.float64, device)
        passes = len(codes)
        if self.world is not None:
            (passes,) = self.world.largest(passes, device=self.module_device())
        tensors = [root.tensor for root in roots]
        for i in range(passes):
            # A process with fewer samples than another one needs fewer passes.
            code = codes[min(i, len(codes) - 1)]
            grads = [root.cotangent(code.to(root.tensor.device)) for root in roots]
            look_now = look if i < len(codes) and batch_size > 1 else _look_away
            self.backward(tensors, grads, look_now, found, retain_graph=True)
        return seen, codes

    def _decide(self, seen: Dict[Key, Evidence], codes: List[torch.Tensor]) -> None:
        known, sure = {}, True
        for key, evidence in seen.items():
            layout, unique = evidence.decide(codes)
            if layout is not None:
                known[key] = layout
            sure = sure and (unique or not evidence.seen)
        for key, evidence in seen.items():
            if evidence.above is None or known.get(key, _NONE).kind != "routed":
                continue
            # Rows gathered from another order may fit now and not in the next step.
            for above in evidence.above.keys(len(codes[0])):
                sure = sure and known.get(above, _NONE).sample_major
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
        if batch_size < 2 or call.size(-1) >= 0:
            return  # there is nothing to be found out
        for i, key in enumerate(call.keys(batch_size)):
            if key not in seen:
                where = f"{call.name} ({type(call.layer).__name__})"
                seen[key] = Evidence(
                    *(where, call.shapes[i], call.row_dims[i], packed),
                    None if call.routing is None else call.routing.samples,
                )
                seen[key].above = call.routing and call.routing.above
            if i < len(grads) and grads[i] is not None:
                seen[key].add(grads[i])

    def _number(self, call: Call) -> None:
        """Numbers a call that a recomputation has made during the backward pass."""
        if call.number is None:
            call.number = f"late {self._late[call.name]}"
            self._late[call.name] += 1

    def _find_layouts(self, call: Call, batch_size: int) -> List[Optional[Layout]]:
        """The layouts of the outputs; None where no gradient has told yet."""
        if call.size(-1) >= 0:  # its rows come from all processes
            return [Layout(0, "routed", call.routing.samples) for _ in call.shapes]
        if batch_size < 2:
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
        batch_size = call.size(batch_size)
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


_NONE = Layout(-2, "")


def _nodes_of(inputs: List[Any]) -> List[Any]:
    tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
    return [x.grad_fn for x in tensors if x.grad_fn is not None]


class Untraced:
    """A hook as torch.compile leaves it: run as it is, never traced."""

    def __init__(self, hook: Callable):
        self.hook = hook  # not in a closure: a copied model takes its own tape along

    @functools.partial(torch.compiler.disable, reason="it notes per-sample gradients")
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.hook(*args, **kwargs)


def _of_weights_alone(inputs: List[Any], outputs: List[torch.Tensor]) -> bool:
    """
    Whether a layer that was given weights (DoRA gives a layer of its own another's) and
    no activation returns things that can't all be rows of a batch.
    """
    shapes = {(y.dim(), y.shape[:1]) for y in outputs}
    tracked = [x for x in inputs if isinstance(x, torch.Tensor) and x.requires_grad]
    return len(shapes) > 1 and all(graph.only_weights(x) for x in tracked)


def _is_labels(first: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether a tensor beside the first input goes with it: its mask, its labels."""
    whole = not x.is_floating_point() and x.dtype != torch.bool
    return whole and (x.shape == first.shape[: x.dim()] or x.dim() == 1)


def _look_away(call: Call, grads: tuple, ctx: Any = None) -> None:
    """A collector that notes nothing."""


def _refuse_other_orders(call: Call) -> None:
    """Rows are dealt out as those of one sample after the other."""
    layout = call.layouts[0]
    known = layout is None or layout.dim == -1 or call.size(-1) >= 0
    if not known and (layout.dim != 0 or layout.kind not in ("plain", "outer")):
        raise RuntimeError(
            f"{call.name} ({type(call.layer).__name__}): the tokens it is given are "
            "not those of one sample after the other, as experts spread over processes "
            "need them. Flatten [B, T, width] to [B * T, width] before them."
        )


def _in_backward() -> bool:
    """Whether autograd is at work, so that a forward is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def _in_checkpoint() -> bool:
    """Whether a checkpoint with ``use_reentrant=True`` runs its block a first time."""
    frame = None if torch.is_grad_enabled() else sys._getframe(1)
    while frame is not None and frame.f_code is not CheckpointFunction.forward.__code__:
        frame = frame.f_back
    return frame is not None


class _Paused:
    def __init__(self, tape: Tape):
        self.tape = tape

    def __enter__(self) -> None:
        self.before, self.tape.enabled = self.tape.enabled, False

    def __exit__(self, *exc: Any) -> None:
        self.tape.enabled = self.before
