"""Re-Attention in models of transformers: "re_attention" among their attentions.

Imported when transformers is (opacus_ext/registry.py), so that
``model.set_attn_implementation("re_attention")`` works after ``import opacus_ext``.
"""

from __future__ import annotations

from functools import wraps
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from opacus_ext.re_attention.attention import attend, errors_of
from opacus_ext.re_attention.propagation import Propagation
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
        ValueError: for what it can't do (``UNKNOWN``)
    """
    for name in UNKNOWN:
        if kwargs.get(name) is not None:
            raise Refused(
                f"{type(module).__name__} passes {name} to its attention, which "
                '"re_attention" does not know. Use "eager" and do without track_errors.'
            )
    errors = errors_of(key, module)
    if errors is None:
        if position_bias is not None:
            kwargs["position_bias"] = position_bias
        return sdpa_attention_forward(
            *(module, query, key, value, attention_mask),
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


def _with_errors(plain: Callable) -> Callable:
    """What changes a cache between forward passes moves the errors as well."""

    @wraps(plain)
    def changed(self: Cache, *args: Any, **kwargs: Any) -> Any:
        with Propagation({}):
            return plain(self, *args, **kwargs)

    return changed


def re_attention_mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """
    A mask that says all, causality included, as the one of "eager".

    With that of "sdpa" a model without a mask is causal if its attention says so, and
    not all attentions of transformers say what is right.
    """
    kwargs["allow_is_causal_skip"] = False
    return sdpa_mask(*args, **kwargs)


_NAME = "re_attention"
_CHANGES = ("reorder_cache", "crop", "batch_repeat_interleave", "batch_select_indices")


def register() -> Callable[[], None]:
    """
    Adds "re_attention" to the attentions and masks of transformers, and lets the errors
    of cached keys follow the changes that are made to a cache between forward passes.

    Returns:
        A function that leaves transformers as it was.
    """
    AttentionInterface.register(_NAME, re_attention_forward)
    AttentionMaskInterface.register(_NAME, re_attention_mask)
    plain = {name: vars(Cache)[name] for name in _CHANGES if name in vars(Cache)}
    for name, method in plain.items():
        setattr(Cache, name, _with_errors(method))

    def undo() -> None:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME, None)
        for name, method in plain.items():
            setattr(Cache, name, method)

    return undo
