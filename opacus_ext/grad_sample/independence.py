"""Whether a model computes each sample by itself.

Gradients show a dependence between samples only where they flow. A batch mean that is
detached, a normalisation of the raw input or a gate that is still zero leave them
clean, and yet no clipping bounds what one sample adds. So the forward pass is run again
with one sample replaced by another: the outputs of all others must stay.
"""

from __future__ import annotations

import warnings
from typing import Any, Callable, List, Optional, Set, Tuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten


class RandomState:
    """The random state of the CPU and of one device, to be gone back to."""

    def __init__(self, device: torch.device):
        self.device = device
        self.cpu = torch.get_rng_state()
        self.cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def unchanged(self) -> bool:
        """Whether no random number was drawn since."""
        same = torch.equal(self.cpu, torch.get_rng_state())
        if self.cuda is not None:
            same = same and torch.equal(
                self.cuda, torch.cuda.get_rng_state(self.device)
            )
        return same

    def restore(self) -> None:
        """Goes back to the state at construction."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None:
            torch.cuda.set_rng_state(self.cuda, self.device)


def replace_one(inputs: Any, batch_size: int, dim: int, which: int) -> Optional[Any]:
    """
    ``inputs`` with the first or last sample (``which`` is 0 or -1) of the first batched
    tensor replaced by the other of them; None if there is none, or that changes
    nothing.
    """
    leaves, spec = tree_flatten(inputs)
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and x.dim() > dim:
            if x.shape[dim] != batch_size:
                continue
            if torch.equal(x.select(dim, 0), x.select(dim, -1)):
                return None
            leaves[i] = x.detach().clone()
            leaves[i].select(dim, which).copy_(x.select(dim, -1 - which))
            return tree_unflatten(leaves, spec)
    return None


def _repeat_first(inputs: Any, dim: int) -> Optional[Any]:
    """
    ``inputs`` of one sample with the first batched tensor replaced by its first entry
    in the next dim (a token), over and over; None if there is none.
    """
    leaves, spec = tree_flatten(inputs)
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor) and x.dim() > dim + 1 and x.shape[dim] == 1:
            leaves[i] = x.detach().narrow(1 - dim, 0, 1).expand_as(x).clone()
            return tree_unflatten(leaves, spec)
    return None


def dependent_sample(
    module: nn.Module,
    inputs: Tuple[tuple, dict],
    outputs: List[torch.Tensor],
    batch_size: int,
    dim: int,
    state: RandomState,
    tensors_in: Callable[[Any], List[torch.Tensor]],
    rank: Optional[int] = None,
) -> Optional[int]:
    """
    Runs the model twice more, with its last sample replaced and with its first: a
    count that runs along the batch (an expert's capacity) is felt only by later ones.

    Args:
        inputs: ``(args, kwargs)`` of the model's call
        outputs: the tensors it returned
        batch_size: ``B``
        dim: the batch dim of inputs and outputs
        state: the random state before that call
        tensors_in: finds the tensors in what the model returns
        rank: of this process among those that share the experts: it runs twice in any
            case, as the others wait for it, and samples there count as others

    Returns:
        The first of the other samples whose output changed, or None.
    """
    # What computed in the coarsest type rounds as coarsely.
    floats = [x for x in (*outputs, *module.parameters()) if x.is_floating_point()]
    eps = max((torch.finfo(x.dtype).eps for x in floats), default=0.0)
    found = None
    for turn, which in enumerate((-1, 0)):
        changed = None
        if batch_size > 1:
            changed = replace_one(inputs, batch_size, dim, which)
        elif rank is not None and batch_size == 1 and rank % 2 == turn:
            changed = _repeat_first(inputs, dim)
        if changed is None and rank is None:
            return None
        given = inputs if changed is None else changed
        again = tensors_in(_run_again(module, given, state))
        if found is not None or batch_size == 0:
            continue
        others = set(range(batch_size))
        if changed is not None:
            others -= {which % batch_size}
        found = _changed(outputs, again, batch_size, dim, others, eps)
        if found is not None and rank is None:
            break
    return found


@torch.no_grad()
def _run_again(
    module: nn.Module, inputs: Tuple[tuple, dict], state: RandomState
) -> Any:
    after = RandomState(state.device)
    # What the forward keeps count of must not notice either.
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in module.modules()]
    state.restore()
    # Without gradients torch's encoder would take another path, with other padding.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return module(*inputs[0], **inputs[1])
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        after.restore()
        for m, attributes, buffers in kept:
            vars(m).clear()
            vars(m).update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)


@torch.no_grad()
def _changed(
    outputs: List[torch.Tensor],
    again: List[torch.Tensor],
    batch_size: int,
    dim: int,
    samples: Set[int],
    eps: float,
) -> Optional[int]:
    for old, new in zip(outputs, again):
        if old.shape != new.shape or old.dim() <= dim or old.shape[dim] != batch_size:
            continue
        if not old.is_floating_point():
            continue
        # Another dim of this size may be the batch: sequence first, T = B.
        dims = [dim, *(d for d, n in enumerate(old.shape) if n == batch_size)]
        found = [_first_changed(old, new, d, samples, eps) for d in dims]
        if all(i is not None for i in found):
            return found[0]
    return None


def _first_changed(
    old: torch.Tensor, new: torch.Tensor, dim: int, samples: Set[int], eps: float
) -> Optional[int]:
    # Sample by sample: the logits of a large vocabulary are most of the memory.
    parts = old.unbind(dim)
    scale = max(_largest(a, ignore_inf=True) for a in parts)
    allowed = max(1e3 * eps, 1e-9) * max(scale, 1e-30)
    for i in sorted(samples):
        b = new.select(dim, i)
        if not torch.equal(parts[i], b) and _largest(parts[i] - b) > allowed:
            return i
    return None


def _largest(x: torch.Tensor, ignore_inf: bool = False) -> float:
    """The largest magnitude; not-a-number (two infinite masks' difference) is zero."""
    inf = 0.0 if ignore_inf else None
    x = x.nan_to_num(0.0, inf, inf if inf is None else -inf).abs()
    return float(x.max()) if x.numel() else 0.0
