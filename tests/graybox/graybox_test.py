"""Runs on two data sets, of which one has one record more: what differs has noise."""

import pytest
import torch

from .fronts import FRONTS, RATE, pair
from .recorder import Records, compare

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = {
    "random": 1.0,
    "huge": 1e20,
    "too large": 1e38,
    "tiny": 1e-30,
    "not a number": torch.nan,
    "infinite": torch.inf,
}
QUICK = "ghost_bk", "hooks", "adaptive", "monitor", "per_layer", "secure", "trainer"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "front",
    [
        *QUICK,
        *(
            pytest.param(x, marks=pytest.mark.thorough)
            for x in FRONTS
            if x not in QUICK
        ),
    ],
)
def test_one_record(front, kind, tmp_path):
    one, two = pair(FRONTS[front], Records(KINDS[kind]), Records(None), tmp_path)
    assert (one.error, two.error) == ("", "")
    assert compare(one, two, RATE) == set()
