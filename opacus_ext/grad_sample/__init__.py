"""Per-sample gradients: factors, rules, the core, and the modes of DP-SGD."""
