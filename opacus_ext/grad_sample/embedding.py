"""Embedding: rows of a table, looked up by index."""

from typing import Optional

import torch
from torch import nn

from opacus_ext.grad_sample.factors import OneHot
from opacus_ext.grad_sample.rules import Factors, register_rule


def _refuse(layer: nn.Embedding) -> Optional[str]:
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
