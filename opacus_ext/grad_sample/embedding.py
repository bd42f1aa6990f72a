"""Embedding and EmbeddingBag: rows of a table, looked up by index."""

from typing import Dict, Optional, Union

import torch
from torch import nn

from opacus_ext.grad_sample.factors import OneHot
from opacus_ext.grad_sample.rules import Factors, register_rule


def _refuse(layer: Union[nn.Embedding, nn.EmbeddingBag]) -> Optional[str]:
    if layer.max_norm is not None:
        return (
            "max_norm rescales rows in place in the forward pass, by which tokens the "
            "batch holds: that step is not private. Set max_norm=None"
        )
    if layer.scale_grad_by_freq:
        return (
            "scale_grad_by_freq divides a sample's gradient by how often the other "
            "samples use its tokens. Set scale_grad_by_freq=False"
        )
    if layer.sparse:
        return (
            "sparse=True gives a gradient whose pattern shows which tokens the batch "
            "holds, and the noise is dense anyway. Set sparse=False"
        )
    return None


@register_rule(nn.Embedding, refuse=_refuse)
def embedding(
    layer: nn.Embedding, activations: torch.Tensor, backprops: torch.Tensor
) -> Factors:
    """
    Rule of ``nn.Embedding``. Rows at ``padding_idx`` get no gradient.

    Args:
        activations: indices, ``[B, T]``
        backprops: ``[B, T, embedding_dim]``
    """
    if layer.padding_idx is not None:
        padding = (activations == layer.padding_idx).unsqueeze(-1)
        backprops = backprops.masked_fill(padding, 0)
    return {layer.weight: (OneHot(activations.long(), layer.num_embeddings), backprops)}


def _refuse_bag(layer: nn.EmbeddingBag) -> Optional[str]:
    if layer.mode == "max":
        return 'mode="max" has no rule. Use mode="sum" or "mean"'
    if layer.include_last_offset:
        return "include_last_offset=True has no rule. Leave the last offset out"
    return _refuse(layer)


@register_rule(nn.EmbeddingBag, refuse=_refuse_bag, all_inputs=True)
def embedding_bag(
    layer: nn.EmbeddingBag,
    activations: Dict[str, torch.Tensor],
    backprops: torch.Tensor,
) -> Factors:
    """
    Rule of ``nn.EmbeddingBag``, one or more bags a sample.

    Args:
        activations: "input" is ``[B, T, L]``, or ``[N]`` with "offsets" ``[B, T]``;
            "per_sample_weights" as "input"
        backprops: ``[B, T, embedding_dim]``
    """
    index = activations["input"]
    weights = activations.get("per_sample_weights")
    if "offsets" not in activations:
        mask = torch.ones_like(index)
    else:
        start, index = activations["offsets"], index.flatten()
        first = start.flatten()
        length = torch.diff(first, append=first.new_tensor([len(index)]))
        if bool((length < 0).any()):
            raise RuntimeError(
                "EmbeddingBag: the bags of one sample must be neighbours. Order the "
                "offsets sample by sample."
            )
        step = torch.arange(int(length.max()), device=index.device)
        mask = (step < length[:, None]).unflatten(0, start.shape)
        where = (start[:, :, None] + step).clamp(max=max(len(index) - 1, 0))
        index = index[where]
        weights = None if weights is None else weights.flatten()[where]
    mask = mask.to(backprops.dtype)
    if layer.padding_idx is not None:
        mask = mask * (index != layer.padding_idx)
    if layer.mode == "mean":
        mask = mask / mask.sum(2, keepdim=True).clamp(min=1)
    if weights is not None:
        mask = mask * weights
    rows = (mask[..., None] * backprops[:, :, None]).flatten(1, 2)
    index = index.flatten(1).long()
    return {layer.weight: (OneHot(index, layer.num_embeddings), rows)}
