"""What a run knows of parameters: what was made of them, and which ops used it."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Dict, List, MutableMapping, Optional, Sequence, Tuple

import torch
from torch import nn

from opacus_ext.grad_sample.rules.registry import Op
from opacus_ext.grad_sample.samplewise import functorch
from opacus_ext.grad_sample.samplewise.batch import Batch
from opacus_ext.grad_sample.samplewise.uses import Capture, FactorsFn, Root, Use
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from opacus_ext.grad_sample.samplewise.engine import Engine

Tensors = Sequence[Optional[torch.Tensor]]


class Recording(Batch):
    """
    The samples of a run, and the uses of parameters that are noted.

    Args:
        engine: of the model
        size: number of samples
        attached: whether gradients of the whole batch will be asked for
    """

    def __init__(self, engine: "Engine", size: int, attached: bool = False):
        super().__init__(engine, size)
        self.attached = attached
        self.roots: MutableMapping[int, Root] = {}
        self.pending: Counter = Counter()  # uses of each root, by id
        self._same: Dict[Tuple[int, int], Tuple[torch.Tensor, torch.Tensor]] = {}
        self._recipes: Dict[Tuple[int, int], Tuple[torch.Tensor, Op]] = {}
        self._capture = functorch.apply_outside(self.level, Capture)

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
                f"{tuple(leaf.shape)} that the model did not have at make_private.",
                module=self.engine.describe(),
                remedy="Add adapters and layers before make_private.",
            )

    def _roots_of(self, op: Op) -> Tuple[Optional[Root], ...]:
        return tuple(
            self.root(p) if p is not None and p.requires_grad else None
            for p in op.params
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
            copy = self._copies[id(root)] = self.level.wrap(
                self.note_whole(wide, use, ())
            )
            self.pin(copy)
        return copy

    def _copied(self, x: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        if x is None or not x.requires_grad:
            return x
        return self.copy(self.root(x))

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
        return self.level.wrap(self.note_whole(inner, use, kept))

    def note_whole(self, inner: torch.Tensor, use: Use, saved: Tensors) -> torch.Tensor:
        if not self._recomputing:
            for root in use.roots:
                if root is not None:
                    self.pending[id(root)] += 1
        self.half = self.half or inner.dtype.itemsize < 4
        if self._table is not None:
            use = use._replace(table=self._table)
        kept = [x.detach() if x.requires_grad else x for x in saved]
        return self._capture(inner, self.engine.anchor, use, *kept)

    def end(self) -> None:
        """
        Lets go of all that has a graph. Its captures refer to the run, and Python does
        not find circles that go through autograd.
        """
        for kept in (self._copies, self._recipes, self._same, self.shown_to_hooks):
            kept.clear()
        self.roots = weakref.WeakValueDictionary(self.roots)


def _whole(backprops: torch.Tensor) -> List[Tuple[torch.Tensor]]:
    """The gradient of a copy for each sample, ``[B, 1, *shape]``."""
    return [(backprops.flatten(2) if backprops.dim() > 2 else backprops[..., None],)]
