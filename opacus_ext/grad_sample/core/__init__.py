"""The core: samples in groups, uses of parameters, gradients, clipped sums."""
