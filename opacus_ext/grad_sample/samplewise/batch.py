"""The samples of a run side by side: steps out of vmap and back, and what stays.

Within the level of vmap each sample is by itself; outside of it the whole batch is at
hand. What somebody still refers to when the run is over becomes a tensor of the batch.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Tuple

import torch
from torch.overrides import TorchFunctionMode

from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.functorch import is_batched
from opacus_ext.grad_sample.samplewise.uses import RowTable
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine


class BranchesDiffer(Exception):
    """
    The samples take different branches.

    Args:
        groups: for each sample what it says, ``[B]``
    """

    def __init__(self, groups: torch.Tensor):
        super().__init__("the samples take different branches")
        self.groups = groups


class LeaveRun(torch.autograd.Function):
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
                "told apart by sample.",
                module=ctx.run.engine.describe(),
                remedy="Compute them inside the forward.",
            )
        if ctx.run.abandoned:
            raise Refused(
                f"{ctx.run.engine.describe()}: the loss uses an activation that was "
                "kept from a forward pass that had to be begun again, as its samples "
                "take different branches.",
                module=ctx.run.engine.describe(),
                remedy="Return it from the forward instead.",
            )
        if getattr(ctx.run, "closed", False):
            raise Refused(
                f"{ctx.run.engine.describe()}: gradients of what a compiled model "
                "gives are those of samples, clipped.",
                module=ctx.run.engine.describe(),
                remedy=(
                    "Call backward() of the loss that the criterion returned by "
                    "make_private gives, or train the model without torch.compile."
                ),
            )
        if ctx.run.engine.collector is not None:
            ctx.run.engine.collector.note_run(ctx.run)
        return grad, ctx.anchor_like, None, None


class Batch(TorchFunctionMode):
    """
    The samples of a run.

    Args:
        engine: of the model
        size: number of samples
    """

    def __init__(self, engine: "Engine", size: int):
        super().__init__()
        self.engine, self.size = engine, size
        self.level = functorch.Level(size)
        self.batch = size  # samples of all runs of one forward pass
        self.rows: Optional[torch.Tensor] = None  # which of these are here; None: all
        self.joins: Optional[List[Any]] = None  # of its outputs
        self.fed_by: List[Any] = []  # nodes of autograd that have made the inputs
        self.hook_calls: List[Any] = []  # calls of hooks, to come
        # What was handed to hooks as of the batch, and what it is to the samples.
        self.shown_to_hooks: Dict[int, Tuple[torch.Tensor, torch.Tensor]] = {}
        self.abandoned = False
        self.half = engine.in_half  # whether something is computed in half precision
        self.done = False  # whether its gradients have been taken
        self._created: List[weakref.ref] = []
        self._pinned: Dict[int, weakref.ref] = {}
        self._copies: Dict[int, torch.Tensor] = {}  # of roots, by id
        self._table: Optional[RowTable] = None
        self._inactive = 0
        self._recomputing = 0  # in a recomputation uses are known already

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """The samples' values side by side, ``[B, *shape]``, shared ones too."""
        if is_batched(x):
            return self.level.unwrap(x)
        return x.expand(self.size, *x.shape)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Whole batches within, unrecorded by the mode."""
        self._inactive += 1
        try:
            with self.level.outside():
                yield
        finally:
            self._inactive -= 1

    @property
    def inactive(self) -> bool:
        """Whether whole batches are at work, or nothing is noted."""
        return self._inactive > 0

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Ops within are those of the samples, but their parameters are not noted."""
        self._inactive += 1
        try:
            yield
        finally:
            self._inactive -= 1

    @contextmanager
    def reentered(self, recomputed: bool) -> Iterator[functorch.Level]:
        """
        Samples within again, from outside.

        Args:
            recomputed: whether that is for the backward pass, when all is known
        """
        before = self.level, self._inactive, self._recomputing, self.engine.current
        copies = self._copies
        self.level, self._inactive = functorch.Level(self.size), 0
        try:
            with self.level:
                if not recomputed:
                    yield self.level
                    return
                self._recomputing, self.engine.current, self._copies = 1, self, {}
                with self:
                    yield self.level
        finally:
            self.level, self._inactive, self._recomputing, self.engine.current = before
            self._copies = copies

    @contextmanager
    def dispatched(self, table: RowTable) -> Iterator[functorch.Level]:
        """
        Rows within, each by itself, from outside: an expert is given some of each
        sample, of samples of other processes too.

        Args:
            table: whose they are
        """
        rows = len(table.samples)
        names = "level", "size", "_inactive", "_table", "_copies", "_created"
        before = {name: getattr(self, name) for name in names}
        self.level, self.size = functorch.Level(rows), rows
        self._inactive, self._table, self._copies = 0, table, {}
        self._created = []
        try:
            with self.level, self:
                yield self.level
            for x in self.survivors():
                functorch.replace_tensor(x, self.as_batch(x))
        finally:
            vars(self).update(before)

    @property
    def dispatching(self) -> bool:
        """Whether rows are at work, not samples."""
        return self._table is not None

    def agree(self, x: torch.Tensor) -> torch.Tensor:
        """
        The one value of all samples, in a branch on data.

        Raises:
            BranchesDiffer: if the samples do not have the same
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
        if self.dispatching:
            raise NotImplementedError("an expert's rows take different branches")
        raise BranchesDiffer(groups)

    # -- what stays ----------------------------------------------------------------

    def track(self, x: torch.Tensor) -> torch.Tensor:
        """Makes the run see to it that ``x`` is an ordinary tensor in the end."""
        self._created.append(weakref.ref(x))
        return x

    def pin(self, x: torch.Tensor) -> None:
        """A value that is needed as samples see it when the run is over."""
        self._pinned[id(x)] = weakref.ref(x)

    def survivors(self) -> List[torch.Tensor]:
        """What somebody still refers to of all that the samples have made."""
        found = {}
        for ref in self._created:
            x = ref()
            if x is None or not is_batched(x):
                continue
            pinned = self._pinned.get(id(x))
            if pinned is None or pinned() is not x:
                found[id(x)] = x
        self._created = []
        return list(found.values())

    def as_batch(self, x: torch.Tensor, dim: Optional[int] = None) -> torch.Tensor:
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
        return self.release(y, dim or 0)

    def release(self, y: torch.Tensor, dim: Optional[int]) -> torch.Tensor:
        """A tensor on its way out of the run, with the samples along ``dim``."""
        if y.requires_grad:
            y = LeaveRun.apply(y, self.engine.anchor, self, dim)
        return y
