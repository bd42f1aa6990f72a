"""Twelve kinds of violations, as audits of libraries have found them, each planted.

The kinds are those of Cebere et al. 2026 (see recorder.py): each is a fault of the
package, or of a loop around it, and the recorder must tell it from its releases alone.
"""

import contextlib

import pytest
import torch
from torch.nn import functional as F

from opacus_ext.grad_sample.core.clip import ClippedSum
from opacus_ext.optimizers import noise
from opacus_ext.optimizers.optimizer import ClippingOptimizer, GhostDPOptimizer

from .fronts import RATE, STEPS, Classifier, Loop, pair
from .recorder import RECORD, Records, compare

pytestmark = pytest.mark.filterwarnings("ignore")
HUGE, LAST_LABEL = 1e4, 24  # of a row, and a label that no other record has


def half_sensitivity(patch):
    """The sensitivity is half of what a record can move."""
    stock = GhostDPOptimizer.sensitivity.fget
    half = property(lambda self: 0.5 * stock(self))
    patch.setattr(GhostDPOptimizer, "sensitivity", half, raising=False)


def half_noise(patch):
    """The noise is half of what is stated."""
    stock = noise._normal
    patch.setattr(
        noise, "_normal", lambda like, shape, std, g: stock(like, shape, std / 2, g)
    )


def no_noise_of_small(patch):
    """One parameter is released without noise."""
    stock = noise._normal

    def normal(like, shape, std, generator):
        found = stock(like, shape, std, generator)
        found[: Classifier().first.weight.numel()] = 0
        return found

    patch.setattr(noise, "_normal", normal)


def same_noise(patch):
    """Each step draws from a generator with the same seed."""

    def generator_for(self, device):
        return torch.Generator(device).manual_seed(1)

    patch.setattr(noise.NoisyOptimizer, "_generator_for", generator_for)
    patch.setattr(noise.NoisyOptimizer, "_state_of_noise", lambda self: None)


def not_a_number_passes(patch):
    """A comparison with a number that is none is False, so that it is not clipped."""

    def check_finite(self, norms, rows):
        return torch.where(norms > 0, norms, 0.0), None

    patch.setattr(ClippedSum, "_check_finite", check_finite)


def not_counted(patch):
    """Some steps are not counted."""
    stock = ClippingOptimizer.step_hook.fget

    def hook(self):
        self.steps = getattr(self, "steps", 0) + 1
        return None if self.steps % 2 else stock(self)

    patch.setattr(
        ClippingOptimizer,
        "step_hook",
        property(hook, ClippingOptimizer.step_hook.fset),
    )


class Watched(Loop):
    """A loop that does something with private data in each step."""

    def __init__(self, look, **arguments):
        super().__init__("ghost_bk", **arguments)
        self.look = look

    def __call__(self, trace, data, folder):
        stock = ClippingOptimizer.pre_step
        look = self.look

        def pre_step(optimizer, closure=None):
            look(trace, optimizer)
            return stock(optimizer, closure)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ClippingOptimizer, "pre_step", pre_step)
            super().__call__(trace, data, folder)


def bound_of_data(trace, optimizer):
    """The bound of the next step is a quantile of norms, without noise."""
    norms = optimizer._taken_norms
    optimizer.noise_multiplier = 1.5 + float(norms.max() > 10)


def divided_by_drawn(trace, optimizer):
    """The mean is over the records that were drawn."""
    optimizer.expected_batch_size = max(len(optimizer._taken_norms), 1)


def stops(trace, optimizer):
    """Training ends when a gradient is large."""
    if float(optimizer._taken_norms.max()) > 10:
        raise KeyboardInterrupt


def published(trace, optimizer):
    """The largest norm is shown."""
    trace.public["norm"] = float(optimizer._taken_norms.max())


def kept(trace, optimizer):
    """A statistic of the batch is kept with the weights."""
    module = optimizer.mode._module
    value = optimizer._taken_norms.sum()
    module.register_buffer("statistic", value.detach().clone())


class Stopped(Watched):
    """It ends early, quietly."""

    def __call__(self, trace, data, folder):
        with contextlib.suppress(KeyboardInterrupt):
            super().__call__(trace, data, folder)


def classes_of_data(trace, data, folder):
    """The number of classes is read from the labels."""
    labels = [int(data.y[i]) for i in range(len(data)) if i != RECORD]
    if not data.absent:
        labels.append(int(data.y[RECORD]))
    trace.public["weights"] = torch.zeros(max(labels) + 1, 16)


def by_labels(trace, data, folder):
    """What is published is a count of a label, with noise of another one."""
    Loop("ghost_bk")(trace, data, folder)
    count = F.one_hot(data.y, 25)[int(data.absent) :].sum(0)
    trace.public["labels"] = count


PLAIN = Loop("ghost_bk")
# What is planted, by whom it is run, the record, and how the recorder calls it.
PLANTED = {
    "sensitivity that is too small": (half_sensitivity, PLAIN, HUGE, "sensitivity"),
    "noise that is too small": (half_noise, PLAIN, HUGE, "noise"),
    "a release without noise": (no_noise_of_small, PLAIN, HUGE, "noise"),
    "a seed that comes back": (same_noise, PLAIN, HUGE, "noise comes back"),
    "numbers that are none": (not_a_number_passes, PLAIN, torch.nan, "sensitivity"),
    "steps that are not counted": (not_counted, PLAIN, HUGE, "accounting"),
    "an error that tells of a record": (
        None,
        Loop("ghost_bk", on_nonfinite="raise"),
        torch.nan,
        "error",
    ),
    "noise by the data": (None, Watched(bound_of_data), HUGE, "scale"),
    "a private divisor": (None, Watched(divided_by_drawn), HUGE, "scale"),
    "a run that ends by the data": (None, Stopped(stops), HUGE, "control flow"),
    "a number without noise": (None, Watched(published), HUGE, "public: norm"),
    "state of a batch": (None, Watched(kept), HUGE, "public: weights"),
    "categories from the data": (None, classes_of_data, 1.0, "public: weights"),
    "a histogram without noise": (None, by_labels, 1.0, "public: labels"),
    "batches of one size": (
        None,
        Loop("ghost_bk", poisson_sampling=False),
        HUGE,
        "sampling",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name, tmp_path, monkeypatch):
    plant, front, row, kind = PLANTED[name]
    if plant is not None:
        plant(monkeypatch)
    one, two = Records(row, LAST_LABEL), Records(None, LAST_LABEL)
    first, second = pair(front, one, two, tmp_path)
    assert kind in compare(first, second, RATE)


def test_without_a_fault_nothing_is_found(tmp_path):
    one, two = Records(HUGE, LAST_LABEL), Records(None, LAST_LABEL)
    first, second = pair(Watched(lambda *_: None), one, two, tmp_path)
    assert compare(first, second, RATE) == set() and len(first.releases) == STEPS
