"""What Dynamo has read of a model, traced as the step of all samples."""

from __future__ import annotations

import operator
import threading
import weakref
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import nn
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator

from opacus_ext.grad_sample.samplewise.at_once import sample_scope
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.compiled.programs import Programs

T = torch.Tensor

# What Dynamo makes of a checkpoint does what is inside, and tells what to recompute.
_TRACED = {tag_activation_checkpoint}


class NotCompiled(Exception):
    """Why a model, or one kind of its inputs, is run as if it were not compiled."""


class Changed(Exception):
    """A program has met other parameters than it was made for."""


_now = threading.local()


@torch.compiler.allow_in_graph
def one_sample(x: T, dim: int) -> T:
    """One sample of a batch; all of them, as each sees itself, where a run is on."""
    run = getattr(_now, "run", None)
    if run is None:
        return x.narrow(dim, 0, 1)
    return run.track(run.level.wrap(x.movedim(dim, 0).unsqueeze(dim + 1)))


@torch.compiler.allow_in_graph
def backward_settings(probe: T) -> T:
    """Whose gradient are the settings of the backward pass."""
    run = getattr(_now, "run", None)
    return probe.sum() if run is None else run.settings


class Collect(torch.autograd.Function):
    """
    In front of all captures: its backward pass is run when they have all been shown
    their gradients. To autograd the clipped sums are the gradients of the parameters,
    and the norms that of ``probe``.
    """

    @staticmethod
    def forward(ctx, step, probe, *params):
        ctx.step = step
        settings = probe.new_zeros(step.settings, dtype=torch.float64)
        return probe.new_zeros(()), settings

    @staticmethod
    def backward(ctx, _, settings):
        norms, sums = ctx.step.finish(settings)
        return (None, norms, *sums)


class Program:
    """What Dynamo has read, and what the user's compiler has made of it."""

    def __init__(
        self, programs: Programs, graph: torch.fx.GraphModule, inputs: Sequence[Any]
    ):
        self.programs, self.graph = programs, graph
        self.sampled: List[bool] = []  # of each output, whether samples have their own
        names = programs.engine.names
        nodes = [n for n in graph.graph.nodes if n.op == "placeholder"]
        given = [getattr(n.meta.get("grapharg"), "example", None) for n in nodes]
        trained = [isinstance(x, nn.Parameter) and x.requires_grad for x in given]
        self.names = [names.get(x) if t else None for x, t in zip(given, trained)]
        self.params = [weakref.ref(x) if t else None for x, t in zip(given, trained)]
        (self.probe,) = (
            i for i, n in enumerate(nodes) if _is_used_by(n, backward_settings)
        )
        for x, known, t in zip(given, self.names, trained):
            if t and known is None:
                raise NotCompiled(
                    f"it uses a trainable parameter of shape {tuple(x.shape)} that it "
                    "did not have at make_private"
                )
        self.trained = trained
        for node in graph.graph.nodes:
            kept = node.op == "call_function" and node.target in _TRACED
            if isinstance(node.target, HigherOrderOperator) and not kept:
                raise NotCompiled(
                    f"it has a part that the compiler can't look into "
                    f"({node.target.__name__}){_line_of(node)}"
                )
        # What is neither a parameter nor of the batch may have been left by an earlier
        # one.
        self.others = [
            i
            for i, n in enumerate(nodes)
            if not trained[i]
            and isinstance(given[i], T)
            and not _is_used_by(n, one_sample)
        ]
        self.run = programs.settings.backend(self._outer(nodes), inputs)

    def _outer(self, nodes: List[torch.fx.Node]) -> torch.fx.GraphModule:
        """A graph with the same inputs and outputs, of one call."""
        graph = torch.fx.Graph()
        inputs = []
        for node in nodes:
            new = graph.node_copy(node)
            new.meta = node.meta
            for name, value in vars(node).items():
                if name.startswith("_dynamo"):
                    setattr(new, name, value)
            inputs.append(new)

        def samplewise(*inputs: Any) -> Tuple[T, ...]:
            return self.trace(*inputs)

        made = graph.call_function(samplewise, tuple(inputs))
        (last,) = (n for n in self.graph.graph.nodes if n.op == "output")
        self.count = len(last.args[0])
        graph.output(
            tuple(
                graph.call_function(operator.getitem, (made, i))
                for i in range(self.count)
            )
        )
        return torch.fx.GraphModule({}, graph)

    def trace(self, *inputs: Any) -> Tuple[T, ...]:
        """What is compiled: all samples under vmap, and what becomes of gradients."""
        engine, given = self.programs.engine, list(inputs)
        leaves: Dict[str, T] = {}
        for i, (x, name) in enumerate(zip(inputs, self.names)):
            if name is not None:
                leaves[name] = given[i] = x.detach().requires_grad_()
            elif isinstance(x, T) and x.requires_grad and i != self.probe:
                raise NotCompiled(
                    f"it uses a tensor of shape {tuple(x.shape)} that requires a "
                    "gradient and is no parameter of it"
                )
        probe = inputs[self.probe]
        traced, step = engine.for_trace(leaves, probe)
        before = [x for x, t in zip(inputs, self.trained) if t]
        traced._anchor, settings = Collect.apply(step, probe, *before)
        run = Run(traced, probe.shape[1])
        run.settings = settings
        with run.level:
            each = self.programs.per_sample or nullcontext()
            with _running(run), sample_scope(run, False), run, each:
                outputs = self.graph(*given)
            found, self.sampled = [], []
            for x in outputs:
                sampled = is_batched(x)
                if not sampled and isinstance(x, T) and x is not settings:
                    if x.requires_grad:
                        raise NotCompiled(
                            "it returns something made of parameters alone"
                        )
                self.sampled.append(sampled)
                found.append(run.level.unwrap(x) if sampled else x)
            del outputs, x
        run.end()
        traced._anchor = None  # a circle through autograd, which nobody finds
        return tuple(found)

    def __call__(self, *inputs: Any) -> List[Any]:
        programs = self.programs
        engine, run = programs.engine, programs._run
        for x, p in zip(inputs, self.params):
            if p is not None and p() is not x:
                raise Changed()
        for i in self.others:
            if engine.made_of_data.holds(inputs[i]):
                raise Refused(
                    f"{engine.describe()}: reads a value of shape "
                    f"{tuple(inputs[i].shape)} that was computed from an earlier "
                    "batch. It would carry private data from batch to batch, without "
                    "noise:",
                    module=engine.describe(),
                    remedy="do not keep it, or reset it before each call.",
                )
        found = []
        for x, sampled in zip(self.run(*inputs), self.sampled):
            if sampled:
                raw = x[: run.size] if x.shape[0] != run.size else x
                x = run.release(raw)
                programs._raw[id(x)] = x, raw
            found.append(x)
        return found


def _line_of(node: torch.fx.Node) -> str:
    lines = (node.meta.get("stack_trace") or "").strip().splitlines()
    return f" at {' '.join(x.strip() for x in lines[-2:])}" if lines else ""


def _is_used_by(node: torch.fx.Node, function: Callable) -> bool:
    return any(user.target is function for user in node.users)


@contextmanager
def _running(run: Run) -> Iterator[None]:
    before = getattr(_now, "run", None)
    _now.run = run
    try:
        yield
    finally:
        _now.run = before
