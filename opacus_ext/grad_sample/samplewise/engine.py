"""A model's forward, run one sample at a time, all at once where that can be had.

In the order in which it is tried:

1. all samples under vmap (run.py);
2. split by what they say, where they take different branches on data;
3. one sample after the other by ordinary autograd (scan.py), for what vmap can't run.

All three are exact for every model that runs on a batch of one. The first time that a
kind of input is met, the outputs are compared with those of the model on the batch: if
they differ, its samples are not independent, and it is refused (compare.py).
"""

from __future__ import annotations

import functools
import inspect
import traceback
import types
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterator,
    List,
    Optional,
    Tuple,
)

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from opacus_ext.grad_sample.parallel import Elsewhere
from opacus_ext.grad_sample.samplewise.batch import Diverge, Leave
from opacus_ext.grad_sample.samplewise.calm import calmly, hook_tables
from opacus_ext.grad_sample.samplewise.checkpoint import checkpointed
from opacus_ext.grad_sample.samplewise.compare import (
    HELP,
    ONLY,
    Join,
    NewOutput,
    first_mixing,
    joins_of,
    kind_of,
)
from opacus_ext.grad_sample.samplewise.compiled.programs import CompiledRun, Programs
from opacus_ext.grad_sample.samplewise.compiled.settings import (
    Settings,
    are_compiled,
    eagerly,
    is_off,
    settings_for,
    settings_in_force,
    settings_of,
    skip,
    uncompiled,
)
from opacus_ext.grad_sample.samplewise.compiled.trace import Changed, NotCompiled
from opacus_ext.grad_sample.samplewise.functions import by_itself
from opacus_ext.grad_sample.samplewise.functorch import become, is_batched
from opacus_ext.grad_sample.samplewise.hooks import (
    BACKWARD_HOOK,
    Again,
    Seen,
    deliver,
    of_all,
    shown,
)
from opacus_ext.grad_sample.samplewise.inputs import Inputs, read_inputs
from opacus_ext.grad_sample.samplewise.packed import agreed, of_batch, unpacked
from opacus_ext.grad_sample.samplewise.run import Run
from opacus_ext.grad_sample.samplewise.scan import ScanRun
from opacus_ext.grad_sample.samplewise.states import (
    LeftBehind,
    States,
    carries,
    data_in_buffers,
)
from opacus_ext.grad_sample.samplewise.uses import Use
from opacus_ext.grad_sample.samplewise.walk import (
    leaves_in,
    map_tensors,
    named_leaves,
    tensors_in,
)
from opacus_ext.refused import Refused

_APART = (
    "Where experts are spread over processes all samples must run at once, as all "
    "processes must send tokens at the same time. Train it without expert_parallel."
)


class Engine:
    """
    Stands in the place of a model's ``forward`` while it is private.

    Args:
        module: the user's model
        batch_first: whether dim 0 (else dim 1) of the inputs is the batch
        attached: whether gradients of the whole batch will be asked for as well
        take: ``take(inputs, i)`` gives sample ``i`` as a batch of one
        shared: names of inputs that all samples share
        scan: whether to run one sample after the other from the start
    """

    def __init__(
        self,
        module: nn.Module,
        batch_first: bool = True,
        attached: bool = False,
        take: Optional[Callable[[Any, int], Any]] = None,
        shared: Tuple[str, ...] = (),
        scan: bool = False,
    ):
        self.module = module
        self.batch_dim = 0 if batch_first else 1
        self.attached, self.take, self.shared, self.scan = attached, take, shared, scan
        self.enabled = True
        self.joins = True  # whether outputs are compared with the model's own
        self.current: Optional[Run] = None
        self.collector: Any = None  # who is shown gradients
        self._anchor: Optional[torch.Tensor] = None
        self.kinds: Dict[tuple, Dict[str, Any]] = {}  # what is known of each kind
        self.left = LeftBehind()  # what runs have made of data
        # Calls the model's own forward where numbers are asked for one a sample.
        self.each: Optional[Callable] = None
        self.listed = False  # whether items of lists are samples
        self.returning: set = set()  # hooks of the user that change what they see
        self._own_backward = False
        self.world: Any = None  # the processes that experts are spread over
        self._runs: List[weakref.ref] = []
        self._params: Dict[int, nn.Parameter] = {}
        self._modules: Optional[Tuple[List[str], List[nn.Module]]] = None
        self.half = False  # whether parts of the model are in half precision
        self.names: Dict[nn.Parameter, str] = {}
        self.own: Optional[Callable] = None
        self._before: Optional[Callable] = None  # what the user had put in its place
        self._in_place: Optional[Callable] = None
        self._parts_compiled = False
        # Makes what clips in a program, of ``(engine, leaves, probe)``; None:
        # nothing is compiled.
        self.step: Optional[Callable] = None
        self.compiled: Optional[Settings] = None  # by the user
        self.chooser: Any = None  # whether samples run at once (modes/auto.py)
        self.natives: List[str] = []  # of stand-ins in the place of layers
        self._programs: List[Programs] = []
        self._program: Optional[Programs] = None

    # -- attached to the model -----------------------------------------------------

    def attach(self) -> None:
        """Takes the place of the model's ``forward``."""
        self._before = vars(self.module).get("forward")
        self.own = uncompiled(self.module) or self._before
        self.__signature__ = inspect.signature(self.module.forward)
        self.module.forward = self
        self.compiled = settings_of(self.module)
        # What the user has compiled in place would compile the engine.
        self._in_place = vars(self.module).pop("_compiled_call_impl", None)
        vars(self.module)["compile"] = self._compile
        self.learn()

    def _compile(self, **arguments: Any) -> None:
        """``model.compile()``: the next forward passes are compiled."""
        self.compiled = settings_for(**arguments)

    def detach(self) -> None:
        """Gives the model its own ``forward`` back."""
        self.enabled = False  # where somebody has wrapped it meanwhile
        vars(self.module).pop("compile", None)
        if vars(self.module).get("forward") is self:
            del self.module.forward
            if self._before is not None:
                self.module.forward = self._before
            if self._in_place is not None:
                self.module._compiled_call_impl = self._in_place

    def __getstate__(self) -> dict:
        state = dict(vars(self))
        for name in ("_runs", "left", "current", "_params", "kinds", "_anchor"):
            state.pop(name, None)
        programs = {"compiled": None, "_programs": [], "_program": None, "step": None}
        return {**state, "_modules": None, **programs}

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        self._runs, self.left, self.current = [], LeftBehind(), None
        self._params, self.kinds, self._anchor = {}, {}, None

    @property
    def anchor(self) -> torch.Tensor:
        """
        A leaf that all captures hang on. Its gradient is asked for in place of those of
        parameters, and a ``backward()`` has passed all captures when it comes to it.
        """
        if self._anchor is None:
            device = next((p.device for p in self.module.parameters()), None)
            self._anchor = torch.zeros((), device=device, requires_grad=True)
            complete = getattr(self.collector, "complete", None)
            if complete is not None:
                self._anchor.register_hook(complete)
        return self._anchor

    @property
    def modules(self) -> Tuple[List[str], List[nn.Module]]:
        """The names and the modules of the model, as one forward pass finds them."""
        if self._modules is None:
            found = dict(self.module.named_modules())
            self._modules = list(found), list(found.values())
        return self._modules

    def hook_tables(self) -> Iterator[Dict[int, Callable]]:
        """
        Of forward hooks on the model's parts: those of the model itself are outside.

        Raises:
            Refused: if there is a hook on a part's backward pass
        """
        parts = self.modules[1][1:]
        for m in parts:
            if m._backward_hooks or m._backward_pre_hooks:
                raise Refused(f"{self.name_of(m)} {BACKWARD_HOOK}")
        return hook_tables(parts)

    def name_of(self, module: nn.Module) -> str:
        """A module, in an error's words."""
        names = (n for n, m in self.module.named_modules() if m is module)
        return f"{next(names, '?') or 'the model'} ({type(module).__name__})"

    def describe(self) -> str:
        """The model, in an error's words."""
        return type(uncompiled(self.module) or self.module).__name__

    def learn(self) -> None:
        """Looks which parameters the model has."""
        self.names = {p: n for n, p in self.module.named_parameters()}
        self._params = {id(p): p for p in self.names}
        self._parts_compiled = are_compiled(list(self.module.modules())[1:])
        self.half = any(
            x.is_floating_point() and x.itemsize < 4
            for x in (*self.module.parameters(), *self.module.buffers())
        )

    @property
    def in_half(self) -> bool:
        """Whether parts of the model are computed in half precision now."""
        return self.half or any(map(torch.is_autocast_enabled, ("cpu", "cuda")))

    @property
    def params(self) -> Dict[int, nn.Parameter]:
        """The trainable parameters, by id."""
        if not self._params:
            self.learn()
        return {i: p for i, p in self._params.items() if p.requires_grad}

    def knows(self, p: nn.Parameter) -> bool:
        """Whether the model had this parameter when it was made private."""
        if not self._params:
            self.learn()
        return id(p) in self._params

    # -- forward -------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own ``forward``."""
        own = self.own or functools.partial(type(self.module).forward, self.module)
        if self.each is not None:
            own = functools.partial(self.each, own)
        with eagerly() if self._parts_compiled and self.current else nullcontext():
            return own(*args, **kwargs)

    def plain_forward(self) -> Callable:
        """The model's own ``forward``, of which the compiler reads the code."""
        module = uncompiled(self.module) or self.module
        if module is self.module and self.own is not None:
            return self.own
        return types.MethodType(type(module).forward, module)

    @skip
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's ``forward``, sample by sample where gradients are asked for."""
        if not self.enabled or self.current is not None or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        return self._private(args, kwargs, settings_in_force())

    @torch.compiler.disable
    def _private(
        self, args: tuple, kwargs: dict, settings: Optional[Settings] = None
    ) -> Any:
        self._program = self._programs_of(settings or self.compiled)
        if self._program is None:
            self._modules = None
        with self._together():
            inputs = self._inputs(args, kwargs)
            for _ in range(8):
                known = self._known(inputs)
                try:
                    return self._run_all(inputs, known)
                except NewOutput:
                    self._compare(inputs, known)
                except Again:
                    pass  # now with a hook that changes what the model computes
            raise Refused(
                f"{self.describe()}: its forward gives outputs of another structure at "
                "each call, so that they can't be put together. Return the same from "
                "each."
            )

    def _inputs(self, args: tuple, kwargs: dict) -> Inputs:
        """The arguments, with lists of samples told from others."""
        inputs = read_inputs(self, args, kwargs)
        if self.listed or self.world is not None or not inputs.lists:
            return inputs
        failure = None
        try:
            joins = self._known(inputs).get("joins", {}).values()
            if not any(
                j.how in ("mean", "sum", "number") for each in joins for j in each
            ):
                return inputs
        except Exception as error:
            failure = error
        self.listed = True
        listed = read_inputs(self, args, kwargs)
        try:
            self._known(listed)
            return listed
        except Exception:
            self.listed = False
        if failure is not None:
            raise failure
        return inputs

    def _together(self) -> ContextManager:
        """What one process refuses within, all do."""
        if self.world is None:
            return nullcontext()
        return self.world.together(self.anchor.device)

    def _known(self, inputs: Inputs) -> Dict[str, Any]:
        kind = (inputs.kind, self.module.training, self.each is None, inputs.size > 1)
        known = self.kinds.get(kind)
        # Nothing can be told of one sample, but where experts see those of others.
        least = 2 if self.world is None else 1
        look = known is None and self.joins and inputs.size >= least
        if self.world is not None:
            look = self.world.begin(inputs.size, look, self.anchor.device)
        if known is None and not look:
            # What is known of larger batches.
            return dict(self.kinds.get((*kind[:-1], True), {"scan": self.scan}))
        if look:
            known = self.kinds[kind] = {"scan": self.scan, "joins": {}}
            try:
                self._compare(inputs, known)
            except BaseException:
                del self.kinds[kind]
                raise
        return known

    def _compare(self, inputs: Inputs, known: Dict[str, Any]) -> None:
        def copied(x: torch.Tensor) -> torch.Tensor:
            return x.detach().clone().requires_grad_(x.requires_grad)

        def again() -> Inputs:  # a model may change its inputs in place
            return read_inputs(self, *map_tensors(copied, (inputs.args, inputs.kwargs)))

        hooks: Any = self.returning
        try:
            own = self._calm_outputs(again(), hooks)
        except Exception:
            # A forward may need what hooks keep: no trace is left in what can be seen.
            hooks = {h for table in self.hook_tables() for h in table.values()}
            own = self._calm_outputs(again(), hooks)
        with calmly(self.module, hooks):
            known["met"] = set()
            try:
                raw = self._run_all(again(), known, raw=True)
            except (Refused, Elsewhere):
                raise
            except Exception as error:
                where = None
                if self.world is None:
                    where = first_mixing(self, again())
                raise Refused(
                    f"{self.describe()} runs on the batch, and not on one sample. "
                    f"{where or f'{type(error).__name__}: {error}. {HELP}'}"
                ) from error
            if inputs.size:  # an empty batch takes part where others look
                joins = joins_of(self, again(), own, raw)
                for kind in known["met"]:
                    known["joins"][kind] = joins

    def _calm_outputs(
        self, inputs: Inputs, hooks: Any
    ) -> List[Tuple[str, torch.Tensor]]:
        """Those of the model on the batch, and their names."""
        with calmly(self.module, hooks):
            found = self._plain(inputs)
            return [(name, unpacked(x).detach()) for name, x in named_leaves(found)]

    def joins_for(
        self,
        known: Dict[str, Any],
        output: Any,
        size: int,
        shape: Callable = lambda x: x.shape,
    ) -> Optional[List[Join]]:
        """
        How the tensors of an output are put together.

        Args:
            output: as samples give it
            size: of the batch
            shape: of a tensor, as samples give it

        Raises:
            NewOutput: if it has to be compared first
        """
        if size == 1:
            return [ONLY] * sum(1 for _ in tensors_in(output))
        if "joins" not in known:
            return None
        found = known["joins"].get(kind_of(output, shape))
        if self.world is not None and known["joins"] and found is None:
            found = next(iter(known["joins"].values()))  # others would not look again
        if found is None and size:
            raise NewOutput()
        return found

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The model is as it was, within."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before

    def _plain(self, inputs: Inputs) -> Any:
        with self.paused():
            return self.forward(*inputs.args, **inputs.kwargs)

    def _run_all(self, inputs: Inputs, known: Dict[str, Any], raw: bool = False) -> Any:
        """
        Args:
            raw: return the tensors of the output as samples give them, ``[B, *shape]``,
                or without the first dim where they are shared
        """
        parts: List[Tuple[Optional[torch.Tensor], Any]] = []
        todo = list(inputs.parts())
        whole = len(todo) == 1 and todo[0][0] is None
        if self.world is not None and len(todo) > 1:
            raise Refused(f"{self.describe()}: samples of several shapes. {_APART}")
        self._new: List[Any] = []
        self.left.sweep()
        if whole and not raw and self._program is not None:
            try:
                return self._by_program(todo[0][1], known, inputs.kind)
            except Changed:
                self._programs.remove(self._program)
                self._program = self._programs_of(self._program.settings)
                return self._run_all(inputs, known)
            except NotCompiled as error:
                program, self._program, self._modules = self._program, None, None
                program.tell(error)
        chooser = None if raw or self.world is not None else self.chooser
        scan = known["scan"] or (chooser is not None and chooser.begin(inputs))
        # Of a batch that is known to run in parts more has to be put back.
        states = States(self, values=scan or known.get("split", not whole))
        while todo:
            rows, part = todo.pop(0)
            run = self._scan if scan else self._at_once
            # Hooks that have been shown a batch can't be shown it in parts.
            at_once = rows is None and "split" not in known
            if parts:
                states.back()
            try:
                found = run(part, known, raw, inputs.size, at_once)
            except Diverge as diverge:
                if self.world is not None:
                    raise Refused(
                        f"{self.describe()}: its samples take different branches on "
                        f"data. {_APART}"
                    ) from None
                known["split"], whole = True, False
                states.back()
                for value in range(int(diverge.groups.max()) + 1):
                    some = (diverge.groups == value).nonzero()[:, 0]
                    if len(some):
                        new = some if rows is None else rows[some]
                        todo.append((new, part.select(some)))
                continue
            except (Refused, Elsewhere, NewOutput):
                states.back()
                raise
            except Exception as error:
                states.back()
                if scan and not known["scan"]:  # a choice, and others are left
                    chooser.give_up()
                    scan = False
                    todo.insert(0, (rows, part))
                    continue
                if scan:
                    raise
                if self.world is not None:
                    raise Refused(
                        f"{self.describe()}: vmap can't run it ({error}). {_APART}"
                    ) from error
                try:
                    found = self._scan(part, known, raw, inputs.size, False)
                except Exception as own:
                    raise own from None
                if part.size:  # else vmap may know the ops for some samples
                    known["scan"] = scan = True
                    self._tell(error)
            if not whole:
                states.end()
            parts.append((rows, found))
        if raw:
            return parts[0][1] if whole else inputs.join_raw(parts)
        self._runs = [r for r in self._runs if r() is not None]
        for run, (rows, _) in zip(self._new, parts):
            run.batch, run.rows = inputs.size, rows
            self._runs.append(weakref.ref(run))
        seen = [run.seen for run in self._new]
        if whole:
            output, calls = parts[0][1], seen[0]
        else:
            output, calls = self._put_together(inputs, parts, seen, states)
        self._new = []
        for x in tensors_in((output, [call.values for call in calls])):
            self.left.add(x)
        states.check()
        deliver(self, calls)
        if chooser is not None:
            chooser.end()
        return output

    def _put_together(
        self,
        inputs: Inputs,
        parts: List[Tuple[torch.Tensor, Any]],
        seen: List[List[Seen]],
        states: States,
    ) -> Tuple[Any, List[Seen]]:
        """Of what parts of the batch gave, left and showed to hooks, that of all."""
        left, seen = states.common(), of_all(self, seen)
        all_ = [(r, (x, y, z)) for (r, x), y, z in zip(parts, seen, left)]
        inputs.join(all_, self._new[0].joins, self)
        states.put(left[0])
        return parts[0][1], seen[0]

    def _tell(self, error: Exception) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        own = [
            f
            for f in frames
            if "/torch/" not in f.filename and "opacus_ext/grad_s" not in f.filename
        ]
        where = f"{own[-1].filename}:{own[-1].lineno}: {own[-1].line}" if own else ""
        reason = str(error).strip().split("\n")[0]
        warnings.warn(
            f"{self.describe()} is run one sample after the other: vmap can't run "
            f"{where or 'an op'} ({type(error).__name__}: {reason}). That is exact, "
            "and "
            "slower where samples are small. Replace that op by one that vmap knows, "
            "or declare its function or module with opacus_ext.register_native if it "
            "treats samples independently.",
            stacklevel=6,
        )

    def _at_once(
        self, part: Any, known: Dict[str, Any], raw: bool, size: int, whole: bool
    ) -> Any:
        run = Run(self, part.size, self.attached)
        self.current = run
        try:
            with run.level:
                args, kwargs = part.samples(run)
                try:
                    with self._around(run, whole), run:
                        output = self.forward(*args, **kwargs)
                    if not raw:
                        run.joins = self.joins_for(known, output, size)
                except BaseException:
                    run.abandoned = True
                    self._let_go(run, None)
                    raise
                del args, kwargs
                if raw:
                    known["met"].add(kind_of(output))
                    with run.unseen():
                        leaves = [unpacked(agreed(run, x)) for x in leaves_in(output)]
                    found = [
                        (
                            (run.level.unwrap(x).detach(), True)
                            if is_batched(x)
                            else (x.detach(), False)
                        )
                        for x in leaves
                    ]
                    del leaves
                    self._let_go(run, None)
                    return found
                self._let_go(run, output)
        finally:
            self.current = None
            run.end()
        self._new.append(run)
        return output

    def _programs_of(self, settings: Optional[Settings]) -> Optional[Programs]:
        if settings is None or is_off() or self.world is not None:
            return None
        if self.step is None:
            if settings.fullgraph:
                raise Refused(
                    f"{self.describe()}: torch.compile(fullgraph=True) is for modes "
                    '"ghost" and "ghost_bk" and one process. Leave fullgraph out.'
                )
            return None
        forward = self.plain_forward()
        each = getattr(self.each, "key", None) or self.each
        key = getattr(forward, "__func__", forward), each, self.step.key
        for known in self._programs:
            if known.settings == settings and known.key == key:
                return known
        self._programs = [p for p in self._programs if p.key[1] != each]
        self._programs.append(Programs(self, settings, key))
        return self._programs[-1]

    def _by_program(self, part: Any, known: Dict[str, Any], kind: tuple) -> Any:
        """The output of a compiled program."""
        program = self._program
        self.current = self  # the model's own forward within
        try:
            output, run = program.forward(part, (kind, self.module.training))
        finally:
            self.current = None
        run.joins = self.joins_for(known, output, part.size, program.shape)
        leaves = list(leaves_in(output))
        for x, join in zip(leaves, run.joins or ()):
            raw = program.raw(x)
            if raw is not None and join != Join(name=join.name):
                one = join.how and self.each is None
                y = join(raw, self)
                one = one and (join.how != "only" or not y.dim())
                become(x, self.let_go(run, y, None if one else join.dim or 0))
        self._runs = [r for r in self._runs if r() is not None]
        self._runs.append(weakref.ref(run))
        for x in tensors_in(output):
            if not isinstance(x, nn.Parameter):
                self.left.add(x)
        program.forget()
        for name in data_in_buffers(self):
            raise carries(self, name)
        return output

    def let_go(
        self, run: CompiledRun, x: torch.Tensor, dim: Optional[int] = -1
    ) -> torch.Tensor:
        """
        A tensor on its way out of a program.

        Args:
            dim: of the samples; -1: as samples give it, ``[B, *shape]``
        """
        if dim == -1:
            x, dim = x.flatten(0, 1) if x.dim() > 1 else x, 0
        if x.requires_grad:
            x = Leave.apply(x, self.anchor, run, dim)
        self.left.add(x)
        return x

    def for_trace(
        self, leaves: Dict[str, torch.Tensor], probe: torch.Tensor
    ) -> Tuple["Engine", Any]:
        """
        What runs the samples of a program, and what clips their gradients.

        Args:
            leaves: what stands for the parameters, by name
            probe: whose gradient are the norms
        """
        traced = object.__new__(Engine)
        vars(traced).update(vars(self))
        traced.left, traced.kinds, traced._runs = LeftBehind(), {}, []
        traced.attached = False  # gradients of the whole batch are not asked for
        traced.names = {x: name for name, x in leaves.items()}
        traced._params = {id(x): x for x in leaves.values()}
        traced.collector = step = self.step(traced, leaves, probe)
        return traced, step

    @contextmanager
    def _around(self, run: Any, whole: bool) -> Iterator[None]:
        """What is arranged for the samples' code."""
        with shown(run, whole), checkpointed(run), by_itself(run):
            yield

    def _let_go(self, run: Run, output: Any) -> None:
        """What is left of the samples becomes tensors of the batch."""
        with run.outside():
            self._let_all_go(run, output)

    def _let_all_go(self, run: Run, output: Any) -> None:
        run.handed.clear()
        ordinary, done = [], set()
        if output is not None:
            leaves = list(leaves_in(output))
            for x, join in zip(leaves, run.joins or [None] * len(leaves)):
                if isinstance(x, PackedSequence):
                    pairs = zip(x, of_batch(run, x))
                    ordinary += [(a, b) for a, b in pairs if id(a) not in done]
                    done.update(map(id, x))
                    continue
                done.add(id(x))
                new = self._joined(run, x, join)
                if new is not x:
                    ordinary.append((x, new))
            del leaves
        for x in run.survivors():
            if id(x) not in done:
                ordinary.append((x, run.leave(x)))
        for x, new in ordinary:
            if x is not new:
                become(x, new)
                self.left.add(x)

    def _joined(self, run: Run, x: torch.Tensor, join: Optional[Join]) -> torch.Tensor:
        if not is_batched(x) and (join is None or join.how in ("shared", "only")):
            return x  # it may be a parameter or a buffer
        if join is None or join == Join(name=join.name):
            return run.leave(x) if is_batched(x) else join(run.inner(x), self)
        y = join(run.inner(x), self)
        one = join.how and self.each is None and (join.how != "only" or not y.dim())
        return run.let_go(y, None if one else join.dim or 0)

    def _scan(
        self, part: Any, known: Dict[str, Any], raw: bool, size: int, whole: bool
    ) -> Any:
        run = ScanRun(self, part.size)
        self.current = run
        try:
            output = run.forward(part, known, raw, size)
        finally:
            self.current = None
        if not raw:
            self._new.append(run)
        return output

    # -- backward ------------------------------------------------------------------

    @property
    def in_own_backward(self) -> bool:
        """Whether gradients that reach parameters are known to be those of samples."""
        return self._own_backward

    def runs(self) -> List[Any]:
        """The runs whose outputs somebody has, and whose gradients nobody took."""
        alive = [r() for r in self._runs]
        return [run for run in alive if run is not None and not run.done]

    def deliver(self, use: Use, grad: torch.Tensor, saved: tuple) -> None:
        """Called by autograd, for each use of a parameter that it passes."""
        if self.collector is not None and self.enabled:
            self.collector.use(use, grad, saved)

    def deliver_sample(
        self, run: ScanRun, b: int, grads: Dict[nn.Parameter, Optional[torch.Tensor]]
    ) -> None:
        """The gradients of sample ``b`` of a scan."""
        if self.collector is not None and self.enabled:
            with torch.no_grad():
                self.collector.sample(run, b, grads)

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Gradients that reach parameters within are known to be those of samples."""
        before, self._own_backward = self._own_backward, True
        try:
            yield
        finally:
            self._own_backward = before
