"""The noise of a run that has what others left of a budget."""

import pytest
from opacus.accountants import PRVAccountant, RDPAccountant

from opacus_ext import Refused
from opacus_ext.accountants import PRVBoundsAccountant, noise_left


@pytest.mark.parametrize("kind", [RDPAccountant, PRVAccountant, PRVBoundsAccountant])
def test_together_they_spend_the_budget(kind):
    accountant = kind()
    accountant.history = [(5.0, 1.0, 1)]
    noise = noise_left(accountant, 4.0, 1e-5, 0.05, 60)
    assert accountant.history == [(5.0, 1.0, 1)]
    accountant.history.append((noise, 0.05, 60))
    assert 3.98 < accountant.get_epsilon(1e-5) <= 4.0
    # More noise than if nothing had been spent.
    assert noise_left(kind(), 4.0, 1e-5, 0.05, 60) < noise


def test_nothing_left():
    accountant = RDPAccountant()
    accountant.history = [(0.5, 1.0, 1)]
    with pytest.raises(Refused, match="epsilon=1 is spent") as caught:
        noise_left(accountant, 1.0, 1e-5, 0.05, 60)
    assert caught.value.parameter == "epsilon"
