"""Forward and backward pass of all samples as one program, where the user compiles.

``torch.compile`` of a private model is taken over: Dynamo reads the model's code as one
sample sees it, a batch of one, and guards it as ever. What it has read runs under vmap
(run.py) while the compiler looks on, and so do norms, clipping factors and clipped
sums: to autograd they are the gradients of the parameters (:class:`Collect`). So the
compiler that the user has chosen gets the whole step, but for the criterion between
the passes and the noise, for any batch size.
"""

from __future__ import annotations

import operator
import threading
import types
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.convert_frame import ConvertFrameAssert
from torch._dynamo.decorators import skip
from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._higher_order_ops.wrap import tag_activation_checkpoint
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_unflatten

from opacus_ext.grad_sample.samplewise.calm import is_own_hook
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.inputs import Part
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

T = torch.Tensor
# What Dynamo makes of a checkpoint does what is inside, and tells what to recompute.
_TRACED = {tag_activation_checkpoint}


class NotCompiled(Exception):
    """Why a model, or one kind of its inputs, is run as if it were not compiled."""


class Changed(Exception):
    """A program has met other parameters than it was made for."""


class Settings(NamedTuple):
    """
    What ``torch.compile`` was given.

    Attributes:
        backend: called with a graph and its inputs
        fullgraph: whether what can't be compiled is an error
        dynamic: see ``torch.compile``
    """

    backend: Callable
    fullgraph: bool
    dynamic: Optional[bool]


def settings_of(module: nn.Module) -> Optional[Settings]:
    """How a model was compiled, by ``torch.compile(model)`` or ``model.compile()``."""
    if isinstance(module, OptimizedModule):
        return _of_context(module.dynamo_ctx)
    call = getattr(module, "_compiled_call_impl", None)
    for cell in getattr(call, "__closure__", None) or ():
        if isinstance(cell.cell_contents, OptimizeContext):
            return _of_context(cell.cell_contents)
    return None


def uncompiled(module: nn.Module) -> Optional[Callable]:
    """What ``torch.compile(module)`` would call; None if that is its own forward."""
    return module._orig_mod if isinstance(module, OptimizedModule) else None


def are_compiled(modules: Iterable[nn.Module]) -> bool:
    """Whether ``torch.compile`` was used on some modules."""
    return any(map(settings_of, modules))


def is_off() -> bool:
    """Whether ``torch.compiler.set_stance`` asks for what is not compiled."""
    return torch._dynamo.eval_frame._stance.stance.startswith(("force_eager", "eager"))


def eagerly() -> ContextManager:
    """What ``torch.compile`` was used on is run as if it were not, within."""
    return torch.compiler.set_stance("force_eager")


def settings_for(**arguments: Any) -> Settings:
    """How ``torch.compile`` with these arguments would compile."""
    return _of_context(torch.compile(nn.Identity(), **arguments).dynamo_ctx)


@skip
def settings_in_force() -> Optional[Settings]:
    """How the caller is being compiled, if it is."""
    callback = set_eval_frame(None)  # nothing of this is
    try:
        return _of_callback(callback, None) if callable(callback) else None
    finally:
        set_eval_frame(callback)


def _of_context(context: Any) -> Optional[Settings]:
    callback = getattr(context, "callback", None)
    if not callable(callback):
        return None
    return _of_callback(callback, getattr(context, "_dynamic", None))


def _of_callback(callback: Any, dynamic: Optional[bool]) -> Optional[Settings]:
    whole, backend = False, callback
    while True:  # frames, then the backend
        whole = whole or isinstance(backend, ConvertFrameAssert)
        names = "_torchdynamo_orig_backend", "_torchdynamo_orig_callable"
        inner = next((x for n in names if (x := getattr(backend, n, None))), None)
        if inner is None:
            break
        backend = inner
    if backend is callback:
        return None
    return Settings(backend, whole, dynamic)


# -- what Dynamo finds in the code that it reads ---------------------------------------

_now = threading.local()


@torch.compiler.allow_in_graph
def _sample(x: T, dim: int) -> T:
    """One sample of a batch; all of them, as each sees itself, where a run is on."""
    run = getattr(_now, "run", None)
    if run is None:
        return x.narrow(dim, 0, 1)
    return run.track(run.level.wrap(x.movedim(dim, 0).unsqueeze(dim + 1)))


@torch.compiler.allow_in_graph
def _settings(probe: T) -> T:
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


class CompiledRun:
    """
    What is known of a forward pass by a program, as of a :class:`Run`.

    Args:
        probe: whose gradient are the norms, ``[parameters + 1, B]``
    """

    def __init__(self, engine: "Engine", size: int, probe: T):
        self.engine, self.size, self.batch, self.probe = engine, size, size, probe
        self.rows: Optional[T] = None
        self.joins: Optional[List[Any]] = None
        self.half = engine.in_half
        self.abandoned = self.done = False
        self.closed = True  # to gradients, but in a backward pass that clips them
        self.settings: Optional[T] = None

    def end(self) -> None:
        """Lets go of the graph."""
        self.settings = None


class Programs:
    """
    The programs of a model: one for each kind of input, made when it is met.

    Args:
        engine: of the model
        settings: of ``torch.compile``
        key: of the code and of how it is clipped, which other programs differ in
    """

    def __init__(self, engine: "Engine", settings: Settings, key: tuple):
        self.engine, self.settings, self.key = engine, settings, key
        self.failed: Dict[tuple, str] = {}  # why, by kind of input
        self.told: set = set()
        self.count = 0  # of programs
        forward, self.each = engine.plain_forward(), engine.each

        def read(leaves: List[Any], spec: Any, dims: Tuple, probe: T) -> Any:
            leaves = [
                x if dim is None else _sample(x, dim) for x, dim in zip(leaves, dims)
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(*args, **kwargs), _settings(probe)

        # A code object of its own: Dynamo counts what it has compiled by these.
        own = types.FunctionType(
            *(read.__code__.replace(), globals(), read.__name__, None),
            read.__closure__,
        )
        self._read = torch.compile(
            own, backend=self._backend, fullgraph=True, dynamic=settings.dynamic
        )
        self._run: Optional[CompiledRun] = None
        self._raw: Dict[int, Tuple[T, T]] = {}  # outputs, as samples give them

    def forward(self, part: Part, kind: tuple) -> Tuple[Any, CompiledRun]:
        """
        The model's output for some samples.

        Args:
            kind: of the inputs

        Raises:
            NotCompiled: where that can't be had
            Changed: if parameters have taken the places of others
        """
        engine = self.engine
        if kind in self.failed:
            raise NotCompiled(self.failed[kind])
        if reason := getattr(engine.own, "not_compiled", None):
            raise NotCompiled(reason)
        if type(part) is not Part:
            raise NotCompiled("its inputs are taken apart sample by sample")
        if any(isinstance(x, T) and x.requires_grad for x in part.leaves):
            raise NotCompiled("gradients of its inputs are asked for")
        if self.each is not None and not getattr(self.each, "key", None):
            raise NotCompiled("its loss is computed in chunks of the sequence")
        if engine.natives:
            raise NotCompiled(f"{engine.natives[0]} runs natively, on the whole batch")
        self._refuse_hooks()
        size = part.size
        if size < 2:  # so that one program serves all sizes; autograd gives zeros
            part = _two_of(part)
        leaves = part.leaves
        params = engine.params.values()
        wide = any(p.dtype == torch.float64 for p in params)
        probe = torch.zeros(
            *(len(params) + 1, part.size),
            dtype=torch.float64 if wide else torch.float32,
            device=engine.anchor.device,
            requires_grad=True,
        )
        run = CompiledRun(engine, size, probe)
        torch._dynamo.maybe_mark_dynamic(probe, 1)
        leaves = [
            x if dim is None else _marked(x, dim)
            for x, dim in zip(leaves, part.batched)
        ]
        self._run, self._raw = run, {}
        try:
            output, settings = self._read(leaves, part.spec, tuple(part.batched), probe)
        except (NotCompiled, Changed):
            raise
        except Exception as error:
            self.failed[kind] = _reason(error)
            raise NotCompiled(self.failed[kind]) from error
        finally:
            self._run = None
        run.settings = settings
        return output, run

    def forget(self) -> None:
        """What the samples gave."""
        self._raw = {}

    def raw(self, x: T) -> Optional[T]:
        """What the samples gave for a tensor of the output, ``[B, *shape]``."""
        found = self._raw.get(id(x))
        return found[1] if found is not None and found[0] is x else None

    def shape(self, x: T) -> torch.Size:
        """Of a tensor of the output, as one sample gives it."""
        raw = self.raw(x)
        return x.shape if raw is None else raw.shape[1:]

    def _backend(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable:
        self.count += 1
        self.engine._modules = None  # there may be others now
        self._refuse_hooks()
        return _Program(self, graph, inputs)

    def _refuse_hooks(self) -> None:
        tables = self.engine.hook_tables()
        if not all(is_own_hook(h) for table in tables for h in table.values()):
            raise NotCompiled("there are forward hooks on its parts")

    def tell(self, error: NotCompiled) -> None:
        """
        Raises:
            Refused: with ``fullgraph=True``; else it is a warning, once
        """
        reason = str(error)
        name = self.engine.describe()
        if self.settings.fullgraph:
            raise Refused(
                f"{name} can't be compiled as a whole (fullgraph=True): {reason}. "
                "Leave fullgraph out, and it is trained exactly without being "
                "compiled."
            ) from error.__cause__
        if reason not in self.told:
            self.told.add(reason)
            warnings.warn(
                f"{name} is trained exactly, and not compiled: {reason}.",
                stacklevel=8,
            )


class _Program:
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
        (self.probe,) = (i for i, n in enumerate(nodes) if _is_used_by(n, _settings))
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
            and not _is_used_by(n, _sample)
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
            each = self.programs.each or nullcontext()
            with _running(run), traced._around(run, False), run, each:
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
            if engine.left.holds(inputs[i]):
                raise Refused(
                    f"{engine.describe()}: reads a value of shape "
                    f"{tuple(inputs[i].shape)} that was computed from an earlier "
                    "batch. It would carry private data from batch to batch, without "
                    "noise: do not keep it, or reset it before each call."
                )
        found = []
        for x, sampled in zip(self.run(*inputs), self.sampled):
            if sampled:
                raw = x[: run.size] if x.shape[0] != run.size else x
                x = engine.let_go(run, raw)
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


def _two_of(part: Part) -> Part:
    """Two samples in the place of one, or of none."""
    if part.size:
        return part.select(torch.zeros(2, dtype=torch.long))
    leaves = list(part.leaves)
    for i, dim in enumerate(part.batched):
        if dim is not None:
            x = leaves[i]
            leaves[i] = x.new_zeros(*x.shape[:dim], 2, *x.shape[dim + 1 :])
    return Part(leaves, part.spec, part.batched, 2)


def _marked(x: T, dim: int) -> T:
    """The same tensor to Dynamo, of any size."""
    x = x.detach()
    torch._dynamo.maybe_mark_dynamic(x, dim)
    return x


def _reason(error: BaseException) -> str:
    """An error of the compiler, in a line, with the line of the user's code."""
    while isinstance(getattr(error, "inner_exception", None), BaseException):
        error = error.inner_exception
    if isinstance(error, (NotCompiled, Refused)):
        return str(error).rstrip(".")
    if isinstance(error, FailOnRecompileLimitHit):
        return (
            "it would have to be compiled again at each step, as something that its "
            "code depends on changes (TORCH_LOGS=recompiles says what; "
            "torch._dynamo.config.recompile_limit is the number of times)"
        )
    text = next((x for x in str(error).splitlines() if x.strip()), "")
    frames = list(getattr(error, "real_stack", None) or ())
    own = [f for f in frames if "/torch/" not in f.filename]
    own = [f for f in own if "opacus_ext/grad_s" not in f.filename]
    where = f" at {own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
    return f"{type(error).__name__}{where} ({text.strip().rstrip('.')})"
