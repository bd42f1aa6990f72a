"""Re-Attention in models of transformers: "re_attention" among their attentions.

``import opacus_ext`` calls :func:`register` if transformers has been imported before;
else ``make_private`` does, or ``import opacus_ext.transformers``. This file itself does
not import transformers.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional, Tuple

import torch
from torch import Tensor, nn

from opacus_ext.re_attention.attention import attend, errors_of
from opacus_ext.refused import Refused

# Soft caps of logits, attention sinks, attention to chosen tokens, paged caches.
UNKNOWN = ("softcap", "s_aux", "sinks", "indices", "block_indices", "cache")


def re_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    is_causal: Optional[bool] = None,
    position_bias: Optional[Tensor] = None,
    **kwargs: Any,
) -> Tuple[Tensor, None]:
    """
    "re_attention" among the attention functions of transformers.

    Raises:
        Refused: for what it can't do (``UNKNOWN``)
    """
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise Refused(
                f"{type(module).__name__} passes {name} to its attention, which "
                '"re_attention" does not know.',
                module=type(module).__name__,
                remedy='Use "eager" and do without track_errors.',
            )
    errors = errors_of(key, module)
    if errors is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=bool(is_causal),
            **kwargs,
        )
    mask = attention_mask
    if position_bias is not None:
        mask = position_bias
        if attention_mask is not None and attention_mask.dtype == torch.bool:
            low = torch.finfo(query.dtype).min
            mask = position_bias.masked_fill(~attention_mask, low)
        elif attention_mask is not None:
            mask = position_bias + attention_mask
    causal = bool(is_causal) and mask is None and query.size(2) > 1
    out = attend(query, key, value, mask, dropout, causal, scaling, errors)
    return out.transpose(1, 2).contiguous(), None


def re_attention_mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """
    A mask that says all, causality included, as the one of "eager".

    With that of "sdpa" a model without a mask is causal if its attention says so, and
    not all attentions of transformers say what is right.
    """
    from transformers.masking_utils import sdpa_mask

    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


def register(add: Callable[[Dict[str, Any], str, Any], None]) -> None:
    """Adds "re_attention" to the attentions and masks of transformers by ``add``."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    name = "re_attention"
    add(AttentionInterface._global_mapping, name, re_attention_forward)
    add(AttentionMaskInterface._global_mapping, name, re_attention_mask)
