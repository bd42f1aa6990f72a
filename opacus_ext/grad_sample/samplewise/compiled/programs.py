"""The programs of a compiled model: one for each kind of input, made when it is met."""

from __future__ import annotations

import types
import warnings
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.utils._pytree import tree_unflatten

from opacus_ext.grad_sample.samplewise.batch import LeaveRun
from opacus_ext.grad_sample.samplewise.compiled.settings import Settings
from opacus_ext.grad_sample.samplewise.compiled.trace import (
    Changed,
    NotCompiled,
    Program,
    T,
    backward_settings,
    one_sample,
)
from opacus_ext.grad_sample.samplewise.inputs import Part
from opacus_ext.grad_sample.samplewise.sandbox import is_own_hook
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


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
        self.fed_by: List[Any] = []  # nodes of autograd that have made the inputs
        self.half = engine.in_half
        self.abandoned = self.done = False
        self.closed = True  # to gradients, but in a backward pass that clips them
        self.settings: Optional[T] = None

    def release(self, x: T, dim: Optional[int] = -1) -> T:
        """
        A tensor on its way out of a program.

        Args:
            dim: of the samples; -1: as samples give it, ``[B, *shape]``
        """
        if dim == -1:
            x, dim = x.flatten(0, 1) if x.dim() > 1 else x, 0
        if x.requires_grad:
            x = LeaveRun.apply(x, self.engine.anchor, self, dim)
        self.engine.made_of_data.add(x)
        return x

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
        self.reported: set = set()
        self.count = 0  # of programs
        forward, self.per_sample = engine.plain_forward(), engine.per_sample

        def read(leaves: List[Any], spec: Any, dims: Tuple, probe: T) -> Any:
            leaves = [
                x if dim is None else one_sample(x, dim) for x, dim in zip(leaves, dims)
            ]
            args, kwargs = tree_unflatten(leaves, spec)
            return forward(*args, **kwargs), backward_settings(probe)

        # A code object of its own: Dynamo counts what it has compiled by these.
        own = types.FunctionType(
            read.__code__.replace(),
            globals(),
            read.__name__,
            None,
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
        if self.per_sample is not None and not getattr(self.per_sample, "key", None):
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
            len(params) + 1,
            part.size,
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
        self.engine.forget_modules()
        self._refuse_hooks()
        return Program(self, graph, inputs)

    def _refuse_hooks(self) -> None:
        tables = self.engine.hook_tables()
        if not all(is_own_hook(h) for table in tables for h in table.values()):
            raise NotCompiled("there are forward hooks on its parts")

    def report(self, error: NotCompiled) -> None:
        """
        Raises:
            Refused: with ``fullgraph=True``; else it is a warning, once
        """
        reason = str(error)
        name = self.engine.describe()
        if self.settings.fullgraph:
            raise Refused(
                f"{name} can't be compiled as a whole (fullgraph=True): {reason}.",
                remedy=(
                    "Leave fullgraph out, and it is trained exactly without being "
                    "compiled."
                ),
            ) from error.__cause__
        if reason not in self.reported:
            self.reported.add(reason)
            warnings.warn(
                f"{name} is trained exactly, and not compiled: {reason}.",
                stacklevel=7,
            )


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
