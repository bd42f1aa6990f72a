"""Measurements behind the pages of docs/; ``python -m benchmarks`` lists them."""
