"""Noise: Gaussian, of the right std in each parameter, independent of other noise.

The gradient of an empty batch is noise alone. Its std must be the one that the
accountant has recorded. statistics.py says how often a test fails for no reason.
"""

import itertools
from dataclasses import dataclass, field
from typing import Any, Dict

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from opacus_ext.monitor import Monitor
from opacus_ext.optimizers import Banded
from tests.common import make_private, square_loss
from tests.zoo import EVERY_MODE

from .statistics import are_independent, has_variance_one, is_normal, repeats_nothing

LARGE = 2**16 + 100  # entries: more than are drawn together
BATCH = 7  # the expected size
STEPS = 6


class Net(nn.Module):
    """Two parameters of equal shape, a small one, and two drawn each by itself."""

    def __init__(self, large=LARGE):
        super().__init__()
        self.first, self.second = nn.Linear(40, 40), nn.Linear(40, 40)
        self.table = nn.Parameter(torch.zeros(large))
        self.other = nn.Parameter(torch.zeros(large))
        self.scale = nn.Parameter(torch.ones(50))

    def forward(self, x):
        x = self.second(self.first(x).tanh())
        return x.sum(1, keepdim=True) * self.scale + self.table[:50] + self.other[:50]


@dataclass
class Setting:
    """The setting of a run: the arguments of make_private, and other choices."""

    mode: str = "ghost_bk"
    given: Dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    large: int = LARGE
    monitor: bool = False
    reseeded: bool = False  # torch.manual_seed in the loop

    def make(self):
        torch.seed()  # fresh entropy
        model = Net(self.large).to(self.dtype)
        given = {"noise_multiplier": 1.3, "max_grad_norm": 0.7, **self.given}
        private = make_private(model, self.mode, batch_size=BATCH, lr=0.0, **given)
        if self.monitor:
            Monitor(private.engine, private.optimizer, share=0.3)
        return private

    def noise(self, private, steps=STEPS):
        """The noise of each parameter ``[steps, entries]``, over its recorded std."""
        found = []
        for _ in range(steps):
            if self.reseeded:
                torch.manual_seed(3)
            private.step(torch.zeros(0, 40, dtype=self.dtype), square_loss)
            multiplier = private.engine.accountant.history[-1][0]
            std = multiplier * private.optimizer.sensitivity
            if self.monitor:
                std /= 0.7**0.5  # the histogram takes its share of the budget
            if self.given.get("loss_reduction") != "sum":
                std /= BATCH
            found.append(
                [p.grad.double().flatten() / std for p in private.optimizer.params]
            )
        names = dict(Net(1).named_parameters())
        return {n: torch.stack(x).numpy() for n, x in zip(names, zip(*found))}


PER_LAYER = {
    "clipping": "per_layer",
    "max_grad_norm": [0.3, 0.1, 0.7, 2.0, 0.5, 1.0, 0.4],
}
SETTINGS = {
    **{mode: Setting(mode) for mode in EVERY_MODE},
    "per_layer": Setting(given=PER_LAYER),
    "automatic": Setting("ghost", {"clipping": "automatic"}),
    "normalized": Setting("ghost", {"clipping": "normalized"}),
    "sum": Setting("hooks", {"loss_reduction": "sum", "clipping": "normalized"}),
    "double": Setting("scan", dtype=torch.float64),
    "bfloat16": Setting(dtype=torch.bfloat16),
    "monitor": Setting(monitor=True),
    "small ones alone": Setting(large=900),
    "seeded in the loop": Setting(reseeded=True),
    "a generator": Setting("auto", {"noise_generator": torch.Generator}),
}


def check(noise):
    """Checks that all parameters and steps have independent standard normals."""
    for name, x in noise.items():
        has_variance_one(x, name)
        is_normal(x.ravel()[:20_000], name)
    rows = {f"{name} at {t}": r for name, x in noise.items() for t, r in enumerate(x)}
    for (one, x), (other, y) in itertools.combinations(rows.items(), 2):
        are_independent(x, y, f"{one}, {other}")
    for x in itertools.islice(zip(*noise.values()), 3):
        repeats_nothing(np.concatenate(x))


THOROUGH = {"functorch": pytest.mark.thorough}  # it is "hooks", and takes as long


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=THOROUGH.get(x, ())) for x in SETTINGS]
)
def test_noise_is_what_the_accountant_has_recorded(name):
    setting = SETTINGS[name]
    if "noise_generator" in setting.given:
        generator = torch.Generator()
        generator.seed()
        setting = Setting(setting.mode, {"noise_generator": generator})
    private = setting.make()
    check(setting.noise(private))
    assert sum(n for *_, n in private.engine.accountant.history) == STEPS


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_correlated_noise_is_that_of_its_matrix(mode):
    """C times the noise of all steps is independent: sum of c[i] xi[t - i]."""
    data = TensorDataset(torch.zeros(4 * BATCH, 40))
    given = {"noise": Banded(3, STEPS), "poisson_sampling": True, "dataset": data}
    private = Setting(mode, given).make()
    c, noise = private.optimizer.correlated.strategy.coefficients(), Setting(
        mode
    ).noise(private)
    check(
        {
            n: sum(ci * np.pad(x, ((i, 0), (0, 0)))[: len(x)] for i, ci in enumerate(c))
            for n, x in noise.items()
        }
    )
    assert abs(np.corrcoef(noise["table"][0], noise["table"][1])[0, 1]) > 0.3


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
@pytest.mark.parametrize("given", [False, True], ids=["ours", "generator"])
def test_runs_that_go_on_from_one_checkpoint(mode, given, tmp_path):
    """They and the saved run have independent noise, in spite of one seed."""
    seed = int(torch.randint(2**60, ()))

    def make():
        generator = torch.Generator().manual_seed(seed) if given else None
        setting = Setting(mode, {"noise_generator": generator})
        private = setting.make()
        return setting, private

    setting, private = make()
    path, noise = tmp_path / "run.pt", {}
    noise["before"] = setting.noise(private, 3)
    saved = {"path": path, "module": private.handle, "optimizer": private.optimizer}
    private.engine.save_checkpoint(**saved)
    noise["after"] = setting.noise(private, 3)
    for run in ("first", "second"):
        torch.manual_seed(0)
        setting, private = make()
        private.engine.load_checkpoint(
            path=path, module=private.handle, optimizer=private.optimizer
        )
        noise[run] = setting.noise(private, 3)
        assert sum(n for *_, n in private.engine.accountant.history) == 6
    check({n: np.concatenate([x[n] for x in noise.values()]) for n in noise["first"]})


def test_what_is_tested_is_seen():
    """Noise does not pass if one parameter has half of it, or if it is used twice."""
    right = {n: np.random.default_rng().normal(size=(6, 600)) for n in "ab"}
    check(right)
    broken = {
        "half": {**right, "b": right["b"] / 2},
        "of another parameter": {**right, "b": right["a"]},
        "of the step before": {**right, "b": right["b"][[0, 1, 2, 3, 4, 4]]},
        "no Gaussian": {**right, "b": np.sign(right["b"])},
    }
    for x in broken.values():
        with pytest.raises(AssertionError):
            check(x)
    shifted = np.random.default_rng().normal(size=5000)
    shifted[3000:] = shifted[100:2100]
    with pytest.raises(AssertionError):
        repeats_nothing(shifted)
