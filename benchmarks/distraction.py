"""Attention distraction: how much attention noisy tokens attract; for notebooks."""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Iterator, List, NamedTuple, Optional
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from opacus_ext.re_attention import attention
from opacus_ext.re_attention.effective import innermost
from opacus_ext.re_attention.tracking import tracker_of
from opacus_ext.refused import Refused


def attention_mass(
    model: nn.Module,
    ids: Tensor,
    marked: Tensor,
    forward: Optional[Callable[[nn.Module, Tensor], Any]] = None,
) -> List[Tensor]:
    """
    The share of its attention that each position gives to marked positions.

    Attention is linear in the values, so the share is what comes out of the same
    attention with a value of 1 where marked and 0 elsewhere. It is asked of every
    ``scaled_dot_product_attention`` of the model, corrected ones included.

    Args:
        model: any whose attention is PyTorch's or Re-Attention
        ids: the model's input ``[B, T]``
        marked: ``[B, T]`` of bools, such as the positions of rare tokens
        forward: how to call the model, by default ``model(ids)``

    Returns:
        For each attention in the order of the calls, ``[B, T]``, the mean over heads.

    Raises:
        Refused: if ``marked`` has another shape than the keys of an attention, or
            the model computes attention in another way

    Example:
        >>> from opacus_ext.models import DPFormer
        >>> model = DPFormer(num_items=5, max_len=3, dropout=0.0)
        >>> ids = torch.tensor([[1, 2, 3]])
        >>> first, second = attention_mass(model, ids, ids == 1)
        >>> first[0, 0]  # the first position sees only itself
        tensor(1.)
    """
    found: List[Tensor] = []
    with torch.no_grad(), _measured(marked, found):
        model(ids) if forward is None else forward(model, ids)
    if not found:
        raise Refused(
            f"{type(model).__name__} calls no scaled_dot_product_attention.",
            module=type(model).__name__,
            remedy="Models of transformers do after "
            'set_attn_implementation("sdpa").',
        )
    return found


@contextmanager
def _measured(marked: Tensor, found: List[Tensor]) -> Iterator[None]:
    """Attention appends what marked positions get, mean over heads, ``[B, T]``."""
    inside = False

    def measure(function: Callable) -> Callable:
        """Wraps a function that computes attention."""

        def call(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any):
            nonlocal inside
            if inside:  # corrected attention calls the plain one
                return function(query, key, value, *args, **kwargs)
            if marked.shape != (key.size(0), key.size(-2)):
                raise Refused(
                    f"marked is {list(marked.shape)}, the keys are {list(key.shape)}.",
                    parameter="marked",
                    remedy="Mark the positions of the keys, [B, U].",
                )
            ones = marked[:, None, :, None].to(value.dtype)
            ones = ones.expand(*value.shape[:-1], 1)
            inside = True
            try:
                mass = function(query, key, ones, *args, **kwargs)
                found.append(mass.squeeze(-1).mean(1))
                return function(query, key, value, *args, **kwargs)
            finally:
                inside = False

        return call

    with ExitStack() as patches:
        for module, name in (
            (F, "scaled_dot_product_attention"),
            (attention, "corrected_attention"),
        ):
            wrapped = measure(getattr(module, name))
            patches.enter_context(patch.object(module, name, wrapped))
        yield


class Distraction(NamedTuple):
    """
    Attention that goes to marked tokens, one number an attention layer.

    Attributes:
        noise_free: of the model as it is
        noisy: the mean over draws of noise
        corrected: the same with Re-Attention
        uniform: if every visible token got the same
    """

    noise_free: Tensor
    noisy: Tensor
    corrected: Tensor
    uniform: float


def distraction(
    model: nn.Module,
    ids: Tensor,
    tokens: Tensor,
    draws: int = 20,
    padding_idx: Optional[int] = 0,
    generator: Optional[torch.Generator] = None,
) -> Distraction:
    """
    Attention distraction, which the paper asserts (section 5.1) and does not show.

    The model, which stands for the one without noise, is copied; Gaussian noise with
    the effective errors that its tracker knows is added to the parameters, time and
    again; and the attention that goes to the marked tokens is averaged over the draws,
    with the correction and without. Equation 5.2 says that noise raises it where a
    token should get little attention, and that the correction takes that back.

    Args:
        model: tracked by :func:`~opacus_ext.re_attention.track_errors`, or the wrapper
            that
            ``make_private`` returned; it is not changed
        ids: input of the model ``[B, T]``
        tokens: which tokens of the vocabulary count, ``[V]`` of bools, such as those
            with the smallest shares
        draws: of the noise
        padding_idx: a token that asks for no attention; None if there is none
        generator: for the noise

    Raises:
        Refused: if the model is not tracked

    Example:
        >>> from opacus.optimizers import DPOptimizer
        >>> from opacus_ext.re_attention import track_errors
        >>> from opacus_ext.models import DPFormer
        >>> model = DPFormer(num_items=5, max_len=8, dropout=0.0)
        >>> private = DPOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=1.0), noise_multiplier=1.0,
        ...     max_grad_norm=1.0, expected_batch_size=100,
        ... )
        >>> shares = torch.tensor([0.0, 0.9, 0.9, 0.9, 0.9, 0.01])
        >>> tracker = track_errors(model, private, shares)
        >>> rare = torch.tensor([False] * 5 + [True])
        >>> distraction(model, torch.tensor([[1, 2, 5, 3]]), rare).corrected.shape
        torch.Size([2])
    """
    tracker = tracker_of(model)
    if tracker is None:
        raise Refused(
            f"The errors of {type(model).__name__} are not tracked.",
            module=type(model).__name__,
            remedy="Call opacus_ext.track_errors(model, optimizer) first.",
        )
    model = innermost(model)
    errors = tracker.errors()  # by the names of the model inside
    before = tracker.enabled, tracker.evaluate
    noisy = copy.deepcopy(model).eval()
    originals = {n: p.detach().clone() for n, p in noisy.named_parameters()}
    marked = tokens.to(ids.device)[ids]
    asking = torch.ones_like(marked) if padding_idx is None else ids != padding_idx

    def mass(enabled: bool) -> Tensor:
        tracker.enabled = enabled
        found = attention_mass(noisy, ids, marked)
        return torch.stack([x[asking].double().mean() for x in found])

    try:
        tracker.evaluate = True
        noise_free = mass(False)
        total = torch.zeros(2, len(noise_free), dtype=torch.float64)
        for _ in range(draws):
            with torch.no_grad():
                for name, p in noisy.named_parameters():
                    std = errors[name].to(p.device)
                    std = std[:, None] if std.dim() else std
                    noise = torch.randn(p.shape, generator=generator, dtype=p.dtype)
                    p.copy_(originals[name] + std * noise.to(p.device))
            total += torch.stack([mass(False), mass(True)]).cpu()
    finally:
        tracker.enabled, tracker.evaluate = before
    seen = asking.double().cumsum(-1)
    uniform = (marked & asking).double().cumsum(-1) / seen.clamp(min=1)
    mean = total / max(draws, 1)
    return Distraction(noise_free.cpu(), *mean, float(uniform[asking].mean()))
