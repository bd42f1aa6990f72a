"""Privacy audits: lower bounds of epsilon by attacks, compared with the claim.

An accountant bounds epsilon from above, provided that the code does what it claims. An
audit bounds epsilon from below by attacks, and so finds code that does not.
"""

from opacus_ext.audit.bounds import epsilon_one_run, f_dp_p_value, guess
from opacus_ext.audit.canaries import WithCanaries, loss_scores
from opacus_ext.audit.report import Audit, Finding
from opacus_ext.audit.steps import PrivateStep, audit_model, audit_steps
from opacus_ext.audit.training import audit_scores, audit_training

__all__ = [
    "Audit",
    "Finding",
    "PrivateStep",
    "WithCanaries",
    "audit_model",
    "audit_scores",
    "audit_steps",
    "audit_training",
    "epsilon_one_run",
    "f_dp_p_value",
    "guess",
    "loss_scores",
]
