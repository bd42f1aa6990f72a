"""Scaling laws under differential privacy, and the planner that rests on them."""
