"""One forward pass of all samples at once, each by itself, and what it uses.

The model runs under vmap, so that every value is known to be one a sample or shared by
all. A :class:`Run` is the mode that sees each op in which something made of parameters
meets data, whichever module calls it. What an op makes of them is passed through a node
of autograd, :class:`Capture`, that keeps the data and is shown the gradient: together
they are the factors of the per-sample gradients (factors.py). An op without a rule is
given a copy of the parameter for each sample instead, whose gradient is the answer.
"""

from __future__ import annotations

import weakref
from collections import Counter
from contextlib import contextmanager
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterable,
    Iterator,
    List,
    MutableMapping,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.factors import Factor
from opacus_ext.grad_sample.rules.experts import by_table
from opacus_ext.grad_sample.rules.registry import OPS, Op
from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.beside import BESIDE
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

Tensors = Sequence[Optional[torch.Tensor]]


class Diverge(Exception):
    """
    The samples take different branches.

    Args:
        groups: for each sample what it says, ``[B]``
    """

    def __init__(self, groups: torch.Tensor):
        super().__init__("the samples take different branches")
        self.groups = groups


class Root:
    """
    Something made of parameters, as a run has met it: a parameter, a view of one or
    what was computed of some.

    Args:
        tensor: with its graph
        attached: whether gradients of the whole batch will be asked for
    """

    def __init__(self, tensor: torch.Tensor, attached: bool):
        self.tensor, self.version = tensor, tensor._version
        # Of what is changed in place later, as it is now.
        self.edge = None if tensor.is_leaf else get_gradient_edge(tensor)
        self.shape = tensor.shape
        self.shared = tensor.detach()
        if attached:
            self.shared.requires_grad_()
        self.recipe: Optional[Tuple[Op, Tuple[Optional[Root], ...]]] = None
        self.same: Optional["Root"] = None  # whose entries it has


FactorsFn = Callable[..., Sequence[Optional[Tuple[Factor, ...]]]]


class Use(NamedTuple):
    """
    How an op used roots.

    Attributes:
        roots: in the order of the factors
        factors: ``(backprops, *saved)``, all ``[B, T, *event]``, to one tuple of
            factors a root
        rows: how many dims of the output, behind that of the samples, are rows
        saved_rows: the same of each saved tensor
        table: of rows that were dealt out (:meth:`Run.dealt`) the sample of each, and
            the number of samples
    """

    run: "Run"
    roots: Tuple[Optional[Root], ...]
    factors: FactorsFn
    rows: int
    saved_rows: Tuple[int, ...]
    table: Optional[Tuple[torch.Tensor, int]] = None

    @property
    def size(self) -> int:
        """The number of samples that are told apart."""
        return self.run.size if self.table is None else self.table[1]

    def uses(
        self, backprops: torch.Tensor, saved: Sequence[torch.Tensor]
    ) -> List[Tuple[Root, Tuple[Factor, ...]]]:
        """The factors of each root's per-sample gradients."""
        arranged = [by_sample(x, n) for x, n in zip(saved, self.saved_rows)]
        found = self.factors(by_sample(backprops, self.rows), *arranged)
        if self.table is not None:
            found = [f if f is None else by_table(f, *self.table) for f in found]
        return [(r, f) for r, f in zip(self.roots, found) if r is not None]


def by_sample(x: torch.Tensor, rows: int) -> torch.Tensor:
    """``[B, *rows, *event]`` -> ``[B, T, *event]``"""
    if rows == 1:
        return x
    return x.unsqueeze(1) if rows == 0 else x.flatten(1, rows)


class Capture(torch.autograd.Function):
    """Behind what an op made: keeps the data, shows the gradient to the run."""

    @staticmethod
    def forward(ctx, y, anchor, use, *saved):
        ctx.use = use
        # Kept as any activation: checkpointing may drop it, and a later change in
        # place is noticed.
        ctx.save_for_backward(*saved)
        return y.detach()

    @staticmethod
    def backward(ctx, grad):
        saved = ctx.saved_tensors
        use = ctx.use
        use.run.engine.deliver(use, grad, saved)
        return (grad, None, None) + (None,) * len(saved)


class Leave(torch.autograd.Function):
    """
    Where a value leaves the run: what is outside of it is no longer by sample.
    ``dim`` is that of the samples in it; None: they share it.
    """

    @staticmethod
    def forward(ctx, x, anchor, run, dim):
        ctx.run, ctx.dim = run, dim
        ctx.anchor_like = anchor.new_zeros(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        if torch.is_grad_enabled():
            raise Refused(
                f"{ctx.run.engine.describe()}: gradients of its gradients were asked "
                "for (create_graph=True) outside of its forward, where they can't be "
                "told apart by sample. Compute them inside the forward."
            )
        if ctx.run.abandoned:
            raise Refused(
                f"{ctx.run.engine.describe()}: the loss uses an activation that was "
                "kept from a forward pass that had to be begun again, as its samples "
                "take different branches. Return it from the forward instead."
            )
        if getattr(ctx.run, "closed", False):
            raise Refused(
                f"{ctx.run.engine.describe()}: gradients of what a compiled model "
                "gives are those of samples, clipped. Call backward() of the loss that "
                "the criterion returned by make_private gives, or train the model "
                "without torch.compile."
            )
        if ctx.run.engine.collector is not None:
            ctx.run.engine.collector.touch(ctx.run)
        return grad, ctx.anchor_like, None, None


class Run(TorchFunctionMode):
    """
    The mode under which the samples run.

    Args:
        engine: of the model
        level: of vmap
        attached: whether gradients of the whole batch will be asked for
    """

    def __init__(self, engine: "Engine", size: int, attached: bool = False):
        super().__init__()
        self.engine, self.left = engine, engine.left
        self.level = functorch.Level(size)
        self.size = size
        self.attached = attached
        self.roots: MutableMapping[int, Root] = {}
        self.pending: Counter = Counter()  # uses of each root, by id
        self.batch = size  # samples of all runs of one forward pass
        self.rows: Optional[torch.Tensor] = None  # which of these are here; None: all
        self.joins: Optional[List[Any]] = None  # of its outputs
        self.seen: List[Any] = []  # calls of hooks, to come
        # What was handed to hooks as of the batch, and what it is to the samples.
        self.handed: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
        self.abandoned = False
        self.half = engine.in_half  # whether something is computed in half precision
        self.done = False  # whether its gradients have been taken
        self._same: Dict[Tuple[int, int], Tuple[torch.Tensor, torch.Tensor]] = {}
        self._recipes: Dict[Tuple[int, int], Tuple[torch.Tensor, Op]] = {}
        self._made: List[weakref.ref] = []
        self._pinned: Dict[int, weakref.ref] = {}
        self._copies: Dict[int, torch.Tensor] = {}  # of roots, by id
        self._table: Optional[Tuple[torch.Tensor, int]] = None
        self._away = 0
        self._quiet = 0  # in a recomputation uses are known already
        self._capture = functorch.apply_outside(self.level, Capture)

    # -- what the samples see ------------------------------------------------------

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: Any = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if func in _TELLS_NOTHING or self._away:
            return func(*args, **kwargs)
        if self.handed:
            swap = {i: x for i, (_, x) in self.handed.items()}
            args, kwargs = _swapped(args, swap), _swapped_dict(kwargs, swap)
        handler = HANDLERS.get(func)
        try:
            if handler is not None:
                out = handler(self, func, *args, **kwargs)
            else:
                out = self.call(func, *args, **kwargs)
        except RuntimeError:
            x = args[0] if args else kwargs.get("tensor")
            if not _writes(func) or not isinstance(x, torch.Tensor) or is_batched(x):
                raise
            if isinstance(x, nn.Parameter) and not _look(args, []):
                with self.outside():  # of a module that the forward makes for all
                    return func(*args, **kwargs)
            if not self.widen(x):
                raise
            return self.__torch_function__(func, types, args, kwargs)
        if isinstance(out, torch.Tensor):
            if is_batched(out) or not any(out is x for x in args):
                self._made.append(weakref.ref(out))
        elif isinstance(out, (tuple, list)):
            self._made += [weakref.ref(x) for x in out if isinstance(x, torch.Tensor)]
        return out

    def call(self, func: Callable, *args: Any, **kwargs: Any) -> Any:
        """An op on what samples see, as the mode takes it."""
        roots: List[torch.Tensor] = []
        batched = _look(args, roots)
        if kwargs:
            batched |= _look(kwargs.values(), roots)
        if self.left:
            refuse_carried(self.engine, args)
            refuse_carried(self.engine, kwargs.values())
        if not roots or not torch.is_grad_enabled():
            if batched and self.traced:
                return self._beside(func, args, kwargs)
            return func(*args, **kwargs)
        rule = OPS.get(func)
        if rule is not None:
            op = rule(*args, **kwargs)
            if op is not None:
                return self._by_rule(func, op, args, kwargs, batched)
        if batched:
            if self.traced and func in BESIDE:
                return self._by_copies(func, roots, args, kwargs)
            if functorch.is_composite(func):
                with self:
                    return functorch.descend(func)(*args, **kwargs)
            return self._by_copies(func, roots, args, kwargs)
        if func in _DRAWS:
            return self._by_copies(func, roots, args, kwargs)
        made = func(*args, **kwargs)
        if _look((made,), []):  # random numbers were drawn
            return self._by_copies(func, roots, args, kwargs)
        if func in _KEEPS_ENTRIES and isinstance(made, torch.Tensor):
            if made is not roots[0] and made.shape == roots[0].shape:
                self._same[id(made), made._version] = (made, roots[0])
        return made

    def _by_rule(
        self, func: Callable, op: Op, args: tuple, kwargs: dict, batched: bool
    ) -> Any:
        if op.saved:
            batched = _look(op.saved, [])
        if not batched:
            made = func(*args, **kwargs)
            if not any(x is not None and x.requires_grad for x in op.saved):
                self._recipes[id(made), made._version] = (made, op)
            return made
        roots = self._roots_of(op)
        if op.whole is not None and self._directly(op.saved):
            return self._on_whole(op, roots)
        swap = {id(r.tensor): r.shared for r in roots if r is not None}
        # A root among the data is given a copy for each sample.
        saved = op.saved
        if any(x is not None and x.requires_grad for x in saved):
            saved = tuple(self._copied(x) for x in saved)
            swap.update((id(x), y) for x, y in zip(op.saved, saved) if y is not x)
        args, kwargs = _swapped(args, swap), _swapped_dict(kwargs, swap)
        y = self._beside(func, args, kwargs) if self.traced else func(*args, **kwargs)
        return self.note(y, roots, op.factors, op.event_dims, saved, op.saved_dims)

    def _directly(self, saved: Tensors) -> bool:
        """Whether all data is the samples', and no other transform is at work."""
        return self.level.innermost and all(map(self.level.owns, saved))

    def _on_whole(self, op: Op, roots: Tuple[Optional[Root], ...]) -> torch.Tensor:
        """The op on all samples side by side, which costs less than through vmap."""
        level = self.level
        inner = [carry(x, level.unwrap(x), self.inner) for x in op.saved]
        rows = tuple(x.dim() - 1 - n for x, n in zip(inner, op.saved_dims))
        params = [p if r is None else r.shared for p, r in zip(op.params, roots)]
        with level.outside():
            y = op.whole(params, *inner)
            use = Use(self, roots, op.factors, y.dim() - 1 - op.event_dims, rows)
            noted = self._note(y, use, inner)
        return carry(y, level.wrap(noted), level.wrap)

    def _roots_of(self, op: Op) -> Tuple[Optional[Root], ...]:
        return tuple(
            self.root(p) if p is not None and p.requires_grad else None
            for p in op.params
        )

    def _copied(self, x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if x is None or not x.requires_grad:
            return x
        return self.copy(self.root(x))

    def _by_copies(
        self, func: Callable, roots: List[torch.Tensor], args: tuple, kwargs: dict
    ) -> Any:
        swap = {id(x): self.copy(self.root(x)) for x in roots}
        args, kwargs = _swapped(args, swap), _swapped_dict(kwargs, swap)
        return (
            self._beside(func, args, kwargs) if self.traced else func(*args, **kwargs)
        )

    @property
    def traced(self) -> bool:
        """Whether a compiler looks on, for any number of samples."""
        return isinstance(self.size, torch.SymInt)

    def _beside(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        """An op that made no use of parameters, on whole batches if need be."""
        how = BESIDE.get(func)
        if how is not None and self.level.innermost:
            out = how(self._outside_of, func, *args, **kwargs)
            if out is not None:
                return out
        return func(*args, **kwargs)

    def _outside_of(self, function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
        inner = [self.inner(x) for x in tensors]
        with self.level.outside():
            y = function(*inner)
        return self.level.wrap(y)

    def widen(self, x: torch.Tensor) -> bool:
        """
        Makes of a tensor that samples share one of each, for what they write into it.
        It must have been made in this run, so that nobody else finds data in it.

        Returns:
            whether it could be done
        """
        made = {id(y): y for y in (ref() for ref in self._made) if y is not None}
        memory = x.untyped_storage()._cdata
        same = [
            y
            for y in made.values()
            if not is_batched(y) and y.untyped_storage()._cdata == memory
        ]
        if id(x) not in made:
            return False
        if x.requires_grad:
            if x.is_leaf or x._base is not None or len(same) > 1:
                return False
            root = self.root(x)
            inner = self.level.unwrap(self.copy(root))
            with self.outside():
                wide = self.level.wrap(inner.clone())
            functorch.become(x, wide)
            root.tensor = wide  # as it was, under the object that is left
            self.roots[id(root)] = self.roots.pop(id(x))
            return True
        if not functorch.is_memory_of(x, same):
            return False
        with self.outside():
            flat = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)
            flat = flat.expand(self.size, -1).clone()
            for y in same:
                strides = (flat.shape[1], *y.stride())
                own = flat.as_strided(
                    (self.size, *y.shape), strides, y.storage_offset()
                )
                functorch.become(y, self.level.wrap(own))
        return True

    # -- parameters ----------------------------------------------------------------

    def root(self, tensor: torch.Tensor) -> Root:
        """What is known of something made of parameters."""
        found = self.roots.get(id(tensor))
        if found is not None and found.version != tensor._version:
            self.roots[id(found)] = found  # written to since: what it was is kept
            found = None
        if found is None or found.tensor is not tensor:
            if self.attached:
                with self.level.outside():
                    found = Root(tensor, True)
            else:
                found = Root(tensor, False)
            self.roots[id(tensor)] = found
            if tensor.is_leaf:
                self._refuse_unknown(tensor)
                return found
            key = id(tensor), tensor._version
            same = self._same.get(key)
            if same is not None and same[0] is tensor:
                found.same = self.root(same[1])
            recipe = self._recipes.get(key)
            if recipe is not None and recipe[0] is tensor:
                found.recipe = recipe[1], self._roots_of(recipe[1])
        return found

    def _refuse_unknown(self, leaf: torch.Tensor) -> None:
        if isinstance(leaf, nn.Parameter) and not self.engine.knows(leaf):
            raise Refused(
                f"{self.engine.describe()}: uses a trainable parameter of shape "
                f"{tuple(leaf.shape)} that the model did not have at make_private. Add "
                "adapters and layers before make_private."
            )

    def recipe(self, root: Root) -> Tuple[Use, List[torch.Tensor]]:
        """How an op that no sample's data went into has made a root, and of what."""
        op, roots = root.recipe
        rows = len(root.shape) - op.event_dims
        saved_rows = tuple(x.dim() - n for x, n in zip(op.saved, op.saved_dims))
        use = Use(self, roots, op.factors, rows, saved_rows)
        return use, [x.expand(self.size, *x.shape) for x in op.saved]

    def copy(self, root: Root) -> torch.Tensor:
        """One copy of it for each sample, without memory; what they see of it."""
        copy = self._copies.get(id(root))
        if copy is None:
            wide = root.shared.expand(self.size, *root.shape)
            use = Use(self, (root,), _whole, 0, ())
            copy = self._copies[id(root)] = self.level.wrap(self._note(wide, use, ()))
            self.pin(copy)
        return copy

    def note(
        self,
        y: torch.Tensor,
        roots: Tuple[Optional[Root], ...],
        factors: FactorsFn,
        event_dims: int,
        saved: Tensors,
        saved_dims: Sequence[int],
    ) -> torch.Tensor:
        """What samples see of an op's output, captured."""
        inner = self.level.unwrap(y)
        kept = [self.inner(x) for x in saved]
        rows = tuple(x.dim() - 1 - n for x, n in zip(kept, saved_dims))
        use = Use(self, roots, factors, inner.dim() - 1 - event_dims, rows)
        return self.level.wrap(self._note(inner, use, kept))

    def _note(self, inner: torch.Tensor, use: Use, saved: Tensors) -> torch.Tensor:
        if not self._quiet:
            for root in use.roots:
                if root is not None:
                    self.pending[id(root)] += 1
        self.half = self.half or inner.dtype.itemsize < 4
        if self._table is not None:
            use = use._replace(table=self._table)
        kept = [x.detach() if x.requires_grad else x for x in saved]
        return self._capture(inner, self.engine.anchor, use, *kept)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """The samples' values side by side, ``[B, *shape]``, shared ones too."""
        if is_batched(x):
            return self.level.unwrap(x)
        return x.expand(self.size, *x.shape)

    # -- whole batches -------------------------------------------------------------

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Whole batches within, unseen by the mode."""
        self._away += 1
        try:
            with self.level.outside():
                yield
        finally:
            self._away -= 1

    @contextmanager
    def entered_again(self, recomputed: bool) -> Iterator[functorch.Level]:
        """
        Samples within again, from outside.

        Args:
            recomputed: whether that is for the backward pass, when all is known
        """
        before = self.level, self._away, self._quiet, self.engine.current
        copies = self._copies
        self.level, self._away = functorch.Level(self.size), 0
        try:
            with self.level:
                if not recomputed:
                    yield self.level
                    return
                self._quiet, self.engine.current, self._copies = 1, self, {}
                with self:
                    yield self.level
        finally:
            self.level, self._away, self._quiet, self.engine.current = before
            self._copies = copies

    @contextmanager
    def dealt(self, samples: torch.Tensor, size: int) -> Iterator[functorch.Level]:
        """
        Rows within, each by itself, from outside: an expert is given some of each
        sample, of samples of other processes too.

        Args:
            samples: of each row, ``[rows]``
            size: how many samples these are numbers of
        """
        names = "level", "size", "_away", "_table", "_copies", "_made"
        before = {name: getattr(self, name) for name in names}
        self.level, self.size = functorch.Level(len(samples)), len(samples)
        self._away, self._table, self._copies = 0, (samples, size), {}
        self._made = []
        try:
            with self.level, self:
                yield self.level
            for x in self.survivors():
                functorch.become(x, self.leave(x))
        finally:
            vars(self).update(before)

    @property
    def dealing(self) -> bool:
        """Whether rows are at work, not samples."""
        return self._table is not None

    @property
    def away(self) -> bool:
        """Whether whole batches are at work, or nothing is noted."""
        return self._away > 0

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Ops within are those of the samples, but their parameters are not noted."""
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """
        The one value of all samples, in a branch on data.

        Raises:
            Diverge: if the samples do not have the same
        """
        if not is_batched(x):
            return x
        if not self.level.owns(x):
            raise NotImplementedError("a branch on data inside of another transform")
        inner = self.level.unwrap(x).detach()
        with self.outside():
            if not len(inner):
                return inner.new_zeros(inner.shape[1:])
            flat = inner.reshape(len(inner), -1)
            if bool((flat == flat[:1]).all()):
                return inner[0]
            _, groups = torch.unique(flat, dim=0, return_inverse=True)
            if int(groups.max()) == 0:  # that can't be: not a number
                groups = torch.arange(len(flat))
        if self.dealing:
            raise NotImplementedError("an expert's rows take different branches")
        raise Diverge(groups)

    # -- what stays ----------------------------------------------------------------

    def track(self, x: torch.Tensor) -> torch.Tensor:
        """Makes the run see to it that ``x`` is an ordinary tensor in the end."""
        self._made.append(weakref.ref(x))
        return x

    def pin(self, x: torch.Tensor) -> None:
        """A value that is needed as samples see it when the run is over."""
        self._pinned[id(x)] = weakref.ref(x)

    def survivors(self) -> List[torch.Tensor]:
        """What somebody still refers to of all that the samples have made."""
        found = {}
        for ref in self._made:
            x = ref()
            if x is None or not is_batched(x):
                continue
            pinned = self._pinned.get(id(x))
            if pinned is None or pinned() is not x:
                found[id(x)] = x
        self._made = []
        return list(found.values())

    def end(self) -> None:
        """
        Lets go of all that has a graph. Its captures refer to the run, and Python does
        not find circles that go through autograd.
        """
        for kept in (self._copies, self._recipes, self._same, self.handed):
            kept.clear()
        self.roots = weakref.WeakValueDictionary(self.roots)

    def leave(self, x: torch.Tensor, dim: Optional[int] = None) -> torch.Tensor:
        """
        A value of the samples as the whole batch has it.

        Args:
            dim: of the samples in it; None: the first, if it has one
        """
        inner = self.level.unwrap(x)
        if dim is None:
            y = inner.flatten(0, 1) if inner.dim() > 1 else inner.view_as(inner)
        else:
            y = inner.movedim(0, dim).flatten(dim, dim + 1)
        return self.let_go(y, dim or 0)

    def let_go(self, y: torch.Tensor, dim: Optional[int]) -> torch.Tensor:
        """A tensor on its way out of the run, with the samples along ``dim``."""
        if y.requires_grad:
            y = Leave.apply(y, self.engine.anchor, self, dim)
        return y


# Where a value goes on as another tensor, ``carried(x, move(x), move)`` may take along
# what is noted on it.
CARRIED: List[Callable[[torch.Tensor, torch.Tensor, Callable], None]] = []


def carry(
    x: torch.Tensor, y: torch.Tensor, move: Callable = lambda x: x
) -> torch.Tensor:
    """``y``, which is ``move(x)``, with what is noted on ``x``."""
    for carried in CARRIED:
        carried(x, y, move)
    return y


def _whole(backprops: torch.Tensor) -> List[Tuple[torch.Tensor]]:
    """The gradient of a copy for each sample, ``[B, 1, *shape]``."""
    return [(backprops.flatten(2) if backprops.dim() > 2 else backprops[..., None],)]


# -- arguments -----------------------------------------------------------------------


def refuse_carried(engine: "Engine", args: Iterable) -> None:
    """
    Raises:
        Refused: if what an earlier batch has left is among the arguments of an op
    """
    for x in args:
        if isinstance(x, torch.Tensor):
            if engine.left.holds(x) and not is_batched(x):
                raise Refused(
                    f"{engine.describe()}: reads a value of shape {tuple(x.shape)} "
                    "that was computed from an earlier batch, or by a hook of the "
                    "user from all samples of this one. It would carry private data "
                    "from batch to batch, or from sample to sample, without noise: do "
                    "not keep it, or reset it before each call; a state is given to "
                    "the model as an argument."
                )
        elif type(x) in (list, tuple):
            refuse_carried(engine, x)


def _look(args: Any, roots: List[torch.Tensor]) -> bool:
    """
    Adds what is made of parameters to ``roots``: what is shared by the samples and
    requires a gradient. Returns whether samples are among the arguments.
    """
    batched = False
    for x in args:
        if isinstance(x, torch.Tensor):
            # What samples see does not say that it requires a gradient.
            if is_batched(x):
                batched = True
            elif x.requires_grad:
                roots.append(x)
        elif type(x) in _NESTED:
            batched |= _look(x, roots)
    return batched


_NESTED = (list, tuple)


def _swapped(args: Any, swap: Dict[int, torch.Tensor]) -> Any:
    return type(args)(
        [
            (
                swap.get(id(x), x)
                if isinstance(x, torch.Tensor)
                else _swapped(x, swap) if type(x) in _NESTED else x
            )
            for x in args
        ]
    )


def _swapped_dict(kwargs: dict, swap: Dict[int, torch.Tensor]) -> dict:
    if not kwargs:
        return kwargs
    return dict(zip(kwargs, _swapped(list(kwargs.values()), swap)))


def _writes(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in _WRITES or (name[-1:] == "_" and name[-2:] != "__")


# -- tables --------------------------------------------------------------------------

Handler = Callable[..., Any]
HANDLERS: Dict[Callable, Handler] = {}  # called as handler(run, func, *args, **kwargs)


def handles(*functions: Callable) -> Callable[[Handler], Handler]:
    """Registers what a run does in the place of some functions of torch."""

    def decorator(handler: Handler) -> Handler:
        for function in functions:
            HANDLERS[function] = handler
        return handler

    return decorator


def _getters(*names: str) -> Iterator[Callable]:
    for name in names:
        if hasattr(torch.Tensor, name):
            yield getattr(torch.Tensor, name).__get__


T = torch.Tensor
_TELLS_NOTHING = {
    *_getters("shape", "dtype", "device", "ndim", "layout", "is_leaf", "grad_fn"),
    *_getters("is_cuda", "is_sparse", "names", "is_nested", "is_quantized", "is_meta"),
    *_getters("is_mkldnn", "is_cpu", "itemsize", "nbytes", "_version", "_base"),
    *(T.dim, T.size, T.numel, T.stride, T.is_floating_point, T.is_complex),
    *(T.is_contiguous, T.__len__, T.__hash__, T.get_device, T.storage_offset),
    *(T.element_size, T.ndimension, T.nelement, T.is_signed),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_tensor),
}
_WRITES = {
    *("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__"),
    *("__ifloordiv__", "__imod__", "__iand__", "__ior__", "__ixor__"),
}
_KEEPS_ENTRIES = {
    *(T.to, T.float, T.half, T.bfloat16, T.double, T.type, T.type_as),
    *(T.contiguous, T.clone, torch.clone, T.cuda, T.cpu),
}
_DRAWS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout),
    *(F.feature_alpha_dropout, torch.dropout, torch.feature_dropout),
}
