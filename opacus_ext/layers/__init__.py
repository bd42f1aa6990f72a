"""Layers to build models with, which train in every mode."""

from opacus_ext.layers.moe import (
    Experts,
    SwitchFeedForward,
    TopKFeedForward,
    balancing_loss,
    freeze_routers,
    load_entropy,
)
from opacus_ext.re_attention.attention import (
    SelfAttention,
    corrected_attention,
    re_attention,
)

__all__ = [
    "Experts",
    "SelfAttention",
    "SwitchFeedForward",
    "TopKFeedForward",
    "balancing_loss",
    "corrected_attention",
    "freeze_routers",
    "load_entropy",
    "re_attention",
]
