"""Modules for people who build models: they train in every mode."""

from opacus_ext.layers.moe import (
    Experts,
    SwitchFeedForward,
    TopKFeedForward,
    balancing_loss,
    freeze_routers,
    load_entropy,
)

__all__ = [
    "Experts",
    "SwitchFeedForward",
    "TopKFeedForward",
    "balancing_loss",
    "freeze_routers",
    "load_entropy",
]
