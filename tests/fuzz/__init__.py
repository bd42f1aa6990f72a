"""Random small models in random training loops, compared with single samples.

``python -m tests.fuzz --minutes 5 --seed 1`` runs them one after the other. Each case
is made from one number, which is printed if the case fails.
"""
