"""Mixtures of experts in which each sample is computed by itself.

A mixture of experts is hard to train privately if its samples affect each other. A
capacity that is counted over the batch drops tokens of one sample because of the tokens
of another, and a balancing loss over the batch mixes all samples. Here capacity is
counted in each sequence, and the balancing loss is a sum of one term per sample.
"""

from __future__ import annotations

import math
import numbers
from fractions import Fraction
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from opacus_ext.grad_sample.core.traced import forgets
from opacus_ext.grad_sample.parallel.sharding import is_experts
from opacus_ext.grad_sample.rules.experts import experts_interface
from opacus_ext.refused import Refused

T = torch.Tensor
#: How the tokens of all samples are sent to the experts: a product for each expert, or
#: one of all experts, for which the tokens of each are padded to the most that one has.
DISPATCHES = ("gathered", "padded")


class Experts(nn.Module):
    """
    Feed-forward networks, their weights stacked in one parameter each.

    Args:
        width: features of a token
        hidden: features inside an expert
        num_experts: number of experts
        gated: ``activation(gate x) * (up x)`` inside, instead of ``activation(up x)``
        bias: whether the linear maps have one
        activation: applied inside an expert
        dispatch: one of :data:`DISPATCHES`, which compute the same

    Raises:
        Refused: if dispatch is neither of them
    """

    has_post_expert_norm = is_transposed = False
    is_concatenated = True
    dispatch = "gathered"

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        gated: bool = False,
        bias: bool = False,
        activation: Callable[[T], T] = F.gelu,
        dispatch: str = "gathered",
    ):
        super().__init__()
        if dispatch not in DISPATCHES:
            raise Refused(
                f"dispatch must be one of {DISPATCHES}, got {dispatch!r}.",
                parameter="dispatch",
            )
        self.dispatch = dispatch
        self.num_experts, self.has_gate, self.has_bias = num_experts, gated, bias
        self.act_fn = activation
        name, inner = ("gate_up_proj", 2 * hidden) if gated else ("up_proj", hidden)
        for key, out, into in ((name, inner, width), ("down_proj", width, hidden)):
            bound = 1 / math.sqrt(into)
            weight = torch.empty(num_experts, out, into).uniform_(-bound, bound)
            setattr(self, key, nn.Parameter(weight))
            if bias:
                setattr(
                    self, f"{key}_bias", nn.Parameter(torch.zeros(num_experts, out))
                )

    def _apply_gate(self, x: T) -> T:
        gate, up = x.chunk(2, dim=-1)
        return self.act_fn(gate) * up

    def forward(self, x: T, index: T, weights: T) -> T:
        """
        Args:
            x: ``[tokens, width]``, or ``[B, T, width]``
            index: the experts of each token, ``[tokens, choices]`` or ``[B, T,
                choices]``; ``num_experts`` for none
            weights: of the same shape

        Returns:
            A tensor of the shape of ``x``
        """
        rows = (y.flatten(0, -2) for y in (x, index, weights))
        return experts_interface(self, *rows).view(x.shape)


def _one_hot(index: T, size: int) -> T:
    """As torch's, but of booleans, and without a look at the data: vmap has none."""
    return index.unsqueeze(-1) == torch.arange(size, device=index.device)


def balancing_loss(probabilities: T, index: T, mask: T | None = None) -> T:
    """
    Measures how unevenly each sample uses the experts, from 1 to their number.
    There is one term per sample, so that it can be added to the per-sample losses. The
    paper leaves this open (DP mixture of experts, "Per-sample balancing loss").

    Its formula is equation 1 of the paper over the tokens of one sample instead of the
    batch: ``N * sum_i f_i * P_i`` with ``f_i`` the share of tokens sent to expert i and
    ``P_i`` the router's mean probability for it.

    Args:
        probabilities: of the router, ``[B, T, experts]``
        index: chosen experts, ``[B, T, choices]``
        mask: which tokens count, ``[B, T]``; all if None

    Returns:
        ``[B]``; zero for a sample without a token that counts.

    Example:
        >>> import torch
        >>> p = torch.full((2, 4, 4), 0.25)
        >>> balancing_loss(p, torch.arange(4).expand(2, 4)[..., None])
        tensor([1., 1.])
    """
    size = probabilities.shape[-1]
    keep = probabilities.new_ones(probabilities.shape[:2]) if mask is None else mask
    keep = keep.to(probabilities)[..., None]
    count = keep.sum(1).clamp(min=1)
    # An index of ``size`` stands for a dropped token.
    chosen = _one_hot(index, size).to(probabilities).mean(2)
    share = (chosen * keep).sum(1) / count
    return size * (share * (probabilities * keep).sum(1) / count).sum(1)


def load_entropy(index: T, num_experts: int) -> T:
    """
    Entropy, in nats, of the share of tokens that each expert gets: ``log(num_experts)``
    if all experts get the same number of tokens, 0 if one expert gets all of them. So
    it falls when routing collapses. It is a statistic over all samples, and private if
    the data are: look at it, but train on :func:`balancing_loss`.

    Args:
        index: chosen experts, of any shape, as in ``chosen`` of a layer;
            ``num_experts`` for none
        num_experts: number of experts

    Returns:
        A scalar; zero if no token chose an expert.

    Example:
        >>> import torch
        >>> load_entropy(torch.tensor([0, 1, 2, 3]), 4) == torch.tensor(4.0).log()
        tensor(True)
        >>> load_entropy(torch.tensor([2, 2, 2, 2]), 4)
        tensor(0.)
    """
    counts = torch.bincount(index.flatten(), minlength=num_experts)[:num_experts]
    load = counts / counts.sum().clamp(min=1)
    return torch.special.entr(load).sum()


class _FeedForward(nn.Module):
    """
    A router and its experts, ``[B, T, width]`` -> ``[B, T, width]``.

    After each call ``balancing`` holds :func:`balancing_loss` ``[B]`` of that call, and
    ``chosen`` the experts that the router chose, ``[B, T, choices]``, before a capacity
    drops tokens; an index equal to the number of experts means no expert. They are
    meant for the forward of the surrounding model, which may return them. In private
    training they are None after that forward. Copies and files leave both out.
    """

    # Attributes that a forward sets for what is around it, and that it never reads.
    transient = ("balancing", "chosen")
    capacity: Optional[int] = None
    # The share of a sequence's tokens that an expert takes: numerator and denominator.
    share: Optional[Tuple[int, int]] = None

    def __init__(self, width: int, experts: Experts, top_k: int):
        super().__init__()
        if not 1 <= top_k <= experts.num_experts:
            raise Refused(
                f"top_k must be in 1 ... {experts.num_experts}, got {top_k}.",
                parameter="top_k",
            )
        self.router = nn.Linear(width, experts.num_experts, bias=False)
        self.experts, self.top_k = experts, top_k
        self.balancing: T | None = None
        self.chosen: T | None = None

    def __getstate__(self) -> Dict[str, Any]:
        # A tensor of autograd's graph can't be copied.
        return {**self.__dict__, "balancing": None, "chosen": None}

    def route(self, x: T) -> T:
        """Router probabilities ``[B, T, experts]``, in float32 or wider."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        return self.router(x).softmax(-1, dtype=dtype)

    def weigh(self, chosen: T) -> T:
        """Weights of experts with probabilities ``[B, T, choices]``."""
        return chosen

    def bound(self, index: T) -> T | int | None:
        """Most tokens of a sequence that an expert takes; by sequence ``[B, 1, 1]``."""
        if self.share is None:
            return self.capacity
        tokens = (index[..., :1] < self.experts.num_experts).sum(1, keepdim=True)
        numerator, denominator = self.share
        return -(-tokens * numerator // denominator)  # rounded up

    def run(self, x: T, index: T, weights: T) -> T:
        """Sends ``x`` through the experts ``index`` ``[B, T, choices]``."""
        return self.experts(x, index, weights.to(x))

    def forward(self, x: T, mask: T | None = None) -> T:
        """
        Args:
            x: ``[B, T, width]``
            mask: which tokens are real, ``[B, T]``; others take no capacity and get
                zero
        """
        probabilities, size = self.route(x), self.experts.num_experts
        chosen, index = probabilities.topk(self.top_k, dim=-1)
        if mask is not None:
            index = index.masked_fill(~mask.bool()[..., None], size)
        forgets(self)
        self.chosen = index
        self.balancing = balancing_loss(probabilities, index, mask)
        bound = self.bound(index)
        if bound is not None:
            first = _one_hot(index[..., 0], size + 1)
            place = first.cumsum(dim=1).gather(2, index)
            index = index.masked_fill(place > bound, size)
        return self.run(x, index, self.weigh(chosen))


class SwitchFeedForward(_FeedForward):
    """
    Switch Transformer's layer: every token goes to one expert.

    Args:
        width: features of a token
        hidden: features inside an expert
        num_experts: number of experts
        capacity: most tokens of one sequence that an expert takes; the later ones are
            dropped (their output is zero). None: no bound. It is counted in each
            sequence: counted over the batch, one sample would drop another's tokens
        capacity_factor: the same as a share, ``capacity_factor * tokens / num_experts``
            rounded up, of the tokens that the sequence has, without masked ones
        dispatch: "gathered" for one product for each expert, or "padded" for one of all
            of them, padded to the most tokens that one expert gets of the batch. Both
            compute the same; neither drops a token because of other samples

    Raises:
        Refused: if capacity, capacity_factor or dispatch is out of range, or if both
            bounds are given

    Source:
        Fedus, Zoph, Shazeer 2022, as in DP mixture of experts.

    Example:
        >>> import torch
        >>> layer = SwitchFeedForward(8, 16, num_experts=4, capacity=3)
        >>> layer(torch.randn(2, 5, 8)).shape, layer.balancing.shape
        (torch.Size([2, 5, 8]), torch.Size([2]))
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        capacity: Optional[int] = None,
        capacity_factor: Optional[float] = None,
        dispatch: str = "gathered",
    ):
        experts = Experts(
            width, hidden, num_experts, activation=F.relu, dispatch=dispatch
        )
        super().__init__(width, experts, 1)
        if capacity is not None and not capacity >= 1:
            raise Refused(
                f"capacity must be positive or None, got {capacity}.",
                parameter="capacity",
            )
        self.capacity = capacity
        if capacity_factor is None:
            return
        if capacity is not None:
            raise Refused(
                f"capacity={capacity} and capacity_factor={capacity_factor} are both "
                "given.",
                parameter="capacity_factor",
                remedy="Give one of them.",
            )
        is_number = isinstance(capacity_factor, numbers.Real)
        if not is_number or not capacity_factor >= 1e-6:
            raise Refused(
                f"capacity_factor must be a number of 1e-6 or more, or None, got "
                f"{capacity_factor!r}.",
                parameter="capacity_factor",
            )
        # A fraction: in floating point 1.1 * 50 is above 55.
        factor = Fraction(float(min(capacity_factor, num_experts)))
        share = factor.limit_denominator(10**6) / num_experts
        self.share = share.numerator, share.denominator


class TopKFeedForward(_FeedForward):
    """
    Every token goes to the ``top_k`` gated experts of highest probability, weighted
    with their probabilities, which are made to sum to one (Mixtral's layer).

    Args:
        width: features of a token
        hidden: features inside an expert
        num_experts: number of experts
        top_k: number of experts for each token
        dispatch: see :class:`SwitchFeedForward`

    Raises:
        Refused: if top_k or dispatch is out of range

    Example:
        >>> import torch
        >>> layer = TopKFeedForward(8, 16, num_experts=4, top_k=2)
        >>> layer(torch.randn(2, 5, 8)).shape
        torch.Size([2, 5, 8])
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        num_experts: int,
        top_k: int = 2,
        dispatch: str = "gathered",
    ):
        experts = Experts(
            width, hidden, num_experts, True, activation=F.silu, dispatch=dispatch
        )
        super().__init__(width, experts, top_k)

    def weigh(self, chosen: T) -> T:
        """Weights of experts with probabilities ``[B, T, choices]``."""
        return chosen / chosen.sum(-1, keepdim=True)


def freeze_routers(model: nn.Module) -> List[str]:
    """
    Freezes the routers, which are children named "router" or "gate" beside experts.
    This is the paper's other method to keep experts from collapsing.

    Returns:
        The names of the parameters that were frozen.

    Raises:
        Refused: if no router was found

    Example:
        >>> freeze_routers(SwitchFeedForward(8, 16, num_experts=4))
        ['router.weight']
    """
    routers = []
    for module in model.modules():
        children = dict(module.named_children())
        if "experts" in children or any(is_experts(c) for c in children.values()):
            routers += [children[n] for n in ("router", "gate") if n in children]
    frozen = {p for router in routers for p in router.parameters()}
    if not frozen:
        raise Refused(
            "No router found: none of the modules has a child named router or gate "
            "beside experts.",
            remedy="Freeze it yourself with requires_grad_(False).",
        )
    for p in frozen:
        p.requires_grad_(False)
    return sorted(name for name, p in model.named_parameters() if p in frozen)
