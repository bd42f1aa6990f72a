"""Whether a model computes each sample by itself.

Gradients show a dependence between samples only where they flow. A batch mean that is
detached, a normalisation of the raw input or a gate that is still zero leave them
clean, and yet no clipping bounds what one sample adds. So the forward pass is run again
with other samples in the place of some: the outputs of those that stayed must stay.
"""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from contextlib import contextmanager, nullcontext
from typing import (
    Any,
    Callable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Set,
    Tuple,
)

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
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


class Change(NamedTuple):
    """Samples ``keep`` stay, all others become copies of sample ``source``."""

    keep: List[int]
    source: int


def changes(batch_size: int, samples: Sequence[int]) -> Iterator[Change]:
    """
    Two for each of ``samples``: it among copies of itself, which is felt most by what
    is shared out over the batch unless it had nothing of that before; and all others
    without it.
    """
    for i in samples:
        yield Change([i], i)
        yield Change([j for j in range(batch_size) if j != i], (i + 1) % batch_size)


def replace(
    inputs: Any,
    batch_size: int,
    dim: int,
    change: Change,
    beside: Callable[[torch.Tensor, torch.Tensor], bool] = lambda first, x: False,
) -> Optional[Any]:
    """
    ``inputs`` with the samples of the first batched tensor changed; None if there is
    none, or that changes nothing.

    Args:
        beside: ``beside(first, x)`` says of another tensor, one whose shape may be a
            batch's by accident, whether its samples are replaced too
    """
    leaves, spec = tree_flatten(inputs)
    first, changed = None, False
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor) or x.dim() <= dim:
            continue
        if x.shape[dim] != batch_size or (first is not None and not beside(first, x)):
            continue
        first = x if first is None else first
        x = x.detach()
        keep = torch.tensor(change.keep, device=x.device)
        new = x.narrow(dim, change.source, 1).expand_as(x).clone()
        leaves[i] = new.index_copy_(dim, keep, x.index_select(dim, keep))
        changed |= not torch.equal(leaves[i], x)
    return tree_unflatten(leaves, spec) if changed else None


def runtime_changes(batch_size: int) -> List[Change]:
    """The changes that training looks at: two, as each is one more forward pass."""
    if not batch_size:
        return [Change([], 0)] * 2
    among, _ = changes(batch_size, [batch_size - 1])
    _, without = changes(batch_size, [0])
    return [among, without._replace(source=batch_size - 1)]


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
    Runs the model twice more (or, if that shows something, five times), with the last
    sample among copies of itself and, as what runs along the batch is felt by later
    samples, without the first.

    Args:
        inputs: ``(args, kwargs)`` of the model's call
        outputs: the tensors it returned
        batch_size: ``B``
        dim: the batch dim of inputs and outputs
        state: the random state before that call
        tensors_in: finds the tensors in what the model returns
        rank: of this process among those that share the experts: it runs as often in
            any case, as the others wait for it, and samples there count as others

    Returns:
        A sample whose output changed, or None.
    """
    # What computed in the coarsest type rounds as coarsely.
    floats = [x for x in (*outputs, *module.parameters()) if x.is_floating_point()]
    eps = max((torch.finfo(x.dtype).eps for x in floats), default=0.0)

    @torch.no_grad()
    def run(given: Tuple[tuple, dict], dropout: bool) -> List[torch.Tensor]:
        call = functools.partial(module, *given[0], **given[1])
        return tensors_in(again(module, call, state, dropout))

    def look(outputs: List[torch.Tensor], dropout: bool) -> Optional[int]:
        found = None
        for turn, change in enumerate(runtime_changes(batch_size)):
            changed, keep = None, set(change.keep)
            if batch_size > 1:
                changed = replace(inputs, batch_size, dim, change)
            elif rank is not None and batch_size == 1 and rank % 2 == turn:
                changed, keep = _repeat_first(inputs, dim), set()
            if changed is None and rank is None:
                continue
            now = None  # the logits of a large vocabulary take most of the memory
            now = run(inputs if changed is None else changed, dropout)
            if found is not None or batch_size == 0:
                continue
            if changed is None:  # samples of other processes were
                keep = set(range(batch_size))
            found = _changed(outputs, now, batch_size, dim, keep, eps)
            if found is not None and rank is None:
                break
        return found

    # Dropout inside an expert draws as many numbers as it was given tokens, and the
    # next layer draws others. So what changes counts if it does without dropout.
    if rank is None and look(outputs, dropout=True) is None:
        return None
    return look(run(inputs, dropout=False), dropout=False)


def no_dropout(model: nn.Module) -> None:
    """Switches dropout of any usual kind off, in a model that is not used otherwise."""
    for module in model.modules():
        is_dropout = "drop" in type(module).__name__.lower()
        if is_dropout:
            module.training = False
        # transformers hands module.dropout or module.dropout.p to functional attention
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "drop" in name.lower() or (is_dropout and name == "p")
            ):
                setattr(module, name, 0.0)


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=0, **rest):
    """The arguments of ``scaled_dot_product_attention``."""


class NoDropout(TorchFunctionMode):
    """Within it functional dropout, whoever calls it, does nothing."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0] if args else kwargs["input"]
        if name == "scaled_dot_product_attention":
            given = inspect.signature(_attention).bind(*args, **kwargs).arguments
            args, kwargs = (), {**given.pop("rest", {}), **given, "dropout_p": 0.0}
        return func(*args, **kwargs)


@contextmanager
def keeping(module: nn.Module) -> Iterator[None]:
    """What a forward keeps (attributes, counts, statistics) is afterwards as it was."""
    kept = [(m, dict(vars(m)), dict(m._buffers)) for m in module.modules()]
    values = [
        x for _, found, _ in kept for name, x in found.items() if name not in _OWN
    ]
    lists = [(x, copy.copy(x)) for x in values if type(x) in (list, dict, set)]
    try:
        yield
    finally:
        for m, attributes, buffers in kept:
            vars(m).clear()
            vars(m).update(attributes)
            m._buffers.clear()
            m._buffers.update(buffers)
        for x, before in lists:
            x.clear()
            x.extend(before) if isinstance(x, list) else x.update(before)


_OWN = vars(nn.Module())


def again(
    module: nn.Module,
    run: Callable[[], Any],
    state: RandomState,
    dropout: bool = True,
) -> Any:
    """
    What ``run`` gives, from the random state ``state``; afterwards neither the random
    state nor anything that ``module`` keeps shows that it ran.

    Args:
        dropout: whether it is left on
    """
    after = RandomState(state.device)
    state.restore()
    # Without gradients torch's encoder would take another path, with other padding.
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with keeping(module), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not dropout:
                no_dropout(module)
            with nullcontext() if dropout else NoDropout():
                return run()
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        after.restore()


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
