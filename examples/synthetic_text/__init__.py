"""Private texts in, synthetic texts out: ``python -m examples.synthetic_text``."""
