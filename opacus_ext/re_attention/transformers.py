"""Re-Attention in models of transformers: "re_attention" among their attentions.

opacus_ext/registry.py calls :func:`register` when transformers is imported, so that
``model.set_attn_implementation("re_attention")`` works after ``import opacus_ext``.
This file itself does not import it.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import Tensor, nn

from opacus_ext.re_attention.attention import attend, errors_of
from opacus_ext.re_attention.propagation import Propagation
from opacus_ext.re_attention.table import all_tables
from opacus_ext.refused import Refused

if TYPE_CHECKING:
    from transformers.cache_utils import Cache

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


@contextmanager
def _followed() -> Iterator[None]:
    """Errors of tensors that earlier forward passes have left move with the tensors."""
    with ExitStack() as modes:
        for table in all_tables():
            modes.enter_context(Propagation({}, table))
        yield


def _with_errors(plain: Callable) -> Callable:
    """What changes a cache between forward passes moves the errors as well."""

    @wraps(plain)
    def changed(self: Cache, *args: Any, **kwargs: Any) -> Any:
        with _followed():
            return plain(self, *args, **kwargs)

    return changed


def _deepcopy(self: Cache, memo: Dict[int, Any]) -> Cache:
    """As ``copy.deepcopy`` does it, with the errors of what is copied."""
    copied = memo[id(self)] = type(self).__new__(type(self))
    with _followed():
        vars(copied).update(copy.deepcopy(vars(self), memo))
    return copied


def re_attention_mask(*args: Any, **kwargs: Any) -> Optional[Tensor]:
    """
    A mask that says all, causality included, as the one of "eager".

    With that of "sdpa" a model without a mask is causal if its attention says so, and
    not all attentions of transformers say what is right.
    """
    from transformers.masking_utils import sdpa_mask

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
    from transformers.cache_utils import Cache
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(_NAME, re_attention_forward)
    AttentionMaskInterface.register(_NAME, re_attention_mask)
    plain = {name: vars(Cache)[name] for name in _CHANGES if name in vars(Cache)}
    for name, method in plain.items():
        setattr(Cache, name, _with_errors(method))
    own_copies = hasattr(Cache, "__deepcopy__")
    if not own_copies:
        Cache.__deepcopy__ = _deepcopy

    def undo() -> None:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(_NAME, None)
        for name, method in plain.items():
            setattr(Cache, name, method)
        if not own_copies:
            del Cache.__deepcopy__

    return undo
