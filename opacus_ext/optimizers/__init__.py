"""Clipping functions, and optimizers whose noise matches their sensitivity."""
