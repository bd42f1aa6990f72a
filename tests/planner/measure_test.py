import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from opacus_ext import check_per_sample_gradients
from opacus_ext.planner import measure as module
from opacus_ext.planner.measure import (
    Family,
    byte_transformers,
    find_family,
    masked_transformers,
    measure,
)
from opacus_ext.planner.measurements import Measurements

TEXT = b"To be, or not to be: that is the question. " * 20
GRID = dict(ratios=[0, 0.1], steps=4, every=2, batch_size=4, progress=False)


def family(sizes=("8x1", "16x1")):
    return byte_transformers(TEXT, 8, sizes)


def test_every_cell_is_measured_at_several_steps(tmp_path):
    runs = measure(
        family(), tmp_path / "runs.jsonl", learning_rates=[0.01, 0.1], **GRID
    )
    assert len(runs) == 2 * 2 * 2
    np.testing.assert_array_equal(np.unique(runs.steps), [2, 4])
    expected = [
        sum(p.numel() for p in family().build(s).parameters()) for s in family().sizes
    ]
    np.testing.assert_array_equal(runs.sizes, expected)
    assert runs.tokens == 8 and runs.batch_size == 4
    assert (runs.loss < 7).all()  # log 257 is 5.5


def test_what_cannot_be_written_is_not_trained(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "train", lambda *_: pytest.fail("trained"))
    with pytest.raises(OSError):
        measure(family(), tmp_path / "nowhere" / "runs.jsonl", **GRID)


def test_stopped_it_goes_on_where_it_was(tmp_path, monkeypatch):
    path = tmp_path / "runs.jsonl"
    whole = measure(family(), path, **GRID)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n")
    trained = []
    real = module.train

    def counted(family, run, bar):
        trained.append((run["size"], run["ratio"]))
        real(family, run, bar)

    monkeypatch.setattr(module, "train", counted)
    again = measure(family(), path, **GRID)
    assert trained == [("16x1", 0.1)]
    np.testing.assert_allclose(again.loss, whole.loss)  # a seed fixes a run
    measure(family(), path, **GRID)
    assert len(trained) == 1
    measure(family(), path, **{**GRID, "seed": 1})
    assert len(trained) == 5  # another seed makes other runs
    other = byte_transformers(TEXT[::-1], 8, family().sizes)
    measure(other, path, **GRID)
    assert len(trained) == 9  # and so does another text
    same = {"cpu_seconds"}
    for old, new in zip(lines, path.read_text().splitlines()):
        old, new = json.loads(old), json.loads(new)
        assert all(old[k] == new[k] for k in old if k not in same)


class Nothing(nn.Module):
    """Its loss has no gradient: what a step sees is noise."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(100, 200)

    def forward(self, x):
        return 0.0 * self.head(x)


class Total(nn.Module):
    reduction = "mean"

    def forward(self, outputs, targets):
        loss = 1.0 + outputs.sum(1) + targets
        return loss.mean() if self.reduction == "mean" else loss


def test_the_ratio_is_the_std_of_the_noise_in_the_mean_gradient(tmp_path, monkeypatch):
    data = TensorDataset(torch.randn(19, 100), torch.zeros(19))
    quiet = Family("nothing", ["only"], lambda size: Nothing(), data, Total(), 1)
    seen = []
    step = torch.optim.Adam.step

    def watched(self, *args, **kwargs):
        seen.append(self.param_groups[0]["params"][0].grad.std().item())
        return step(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    settings = dict(steps=2, every=1, progress=False)
    for batch_size, bound in ((4, 0.1), (8, 5.0)):
        seen.clear()
        given = dict(batch_size=batch_size, max_grad_norm=bound, **settings)
        measure(quiet, tmp_path / f"{batch_size}.jsonl", ratios=[0.25], **given)
        # 20,000 numbers: their std is known to half a percent.
        np.testing.assert_allclose(seen, 0.25, rtol=0.03)


def test_a_run_that_diverges_has_what_came_before(tmp_path):
    targets = torch.zeros(400)
    targets[0] = torch.nan  # of a batch somewhere within
    data = TensorDataset(torch.randn(400, 100), targets)
    ends = Family("ends", ["only"], lambda size: Nothing(), data, Total(), 1)
    grid = dict(ratios=[0], steps=100, every=2, batch_size=4, progress=False)
    runs = measure(ends, tmp_path / "runs.jsonl", **grid)
    assert 0 < len(runs.loss) < 50 and (runs.planned == 100).all()


def own_family(text=None):
    return family(("8x1",))


def test_families_are_found_by_name(tmp_path):
    here = "tests.planner.measure_test"
    assert find_family(f"{here}:own_family").sizes == ("8x1",)
    text = tmp_path / "text"
    text.write_bytes(TEXT)
    inputs, targets = find_family("bytes", str(text)).dataset[0]
    assert bytes((inputs - 1).tolist()) == TEXT[:64]
    assert bytes((targets - 1).tolist()) == TEXT[1:65]


def test_hidden_bytes_are_guessed_from_both_sides(tmp_path):
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 250)
    inputs, targets = find_family("masked", str(text)).dataset.tensors
    whole = torch.arange(256).repeat(250).view(-1, 64) + 1
    chosen = targets != -100
    assert len(inputs) == 1000 and (chosen.sum(1) == 10).all()  # 15 % of 64
    assert (inputs == whole)[~chosen].all() and (targets == whole)[chosen].all()
    hidden, left = (inputs[chosen] == 257), inputs[chosen] == targets[chosen]
    assert (
        abs(hidden.float().mean() - 0.8) < 0.02
        and abs(left.float().mean() - 0.1) < 0.01
    )

    small = masked_transformers(TEXT, 20, ["8x1"])
    model, (inputs, targets) = small.build("8x1").eval(), small.dataset[:5]
    changed = inputs.clone()
    changed[:, -1] = 1
    assert (model(inputs) != model(changed)).flatten(1, 2).any(1).all()
    assert (model(inputs)[:, 0] != model(changed)[:, 0]).any()
    report = check_per_sample_gradients(
        model, (inputs, targets), small.criterion, ["ghost_bk"], verbose=False
    )
    assert report.ok
    # The loss of an example is that of its hidden bytes alone.
    chosen = targets[0] >= 0
    alone = nn.functional.cross_entropy(
        model(inputs[:1])[0][chosen], targets[0][chosen]
    )
    torch.testing.assert_close(small.criterion(model(inputs[:1]), targets[:1]), alone)


def run(**changed):
    made = dict(family="bytes", size="8x1", ratio=0.5, learning_rate=0.01)
    made |= dict(batch_size=4, tokens=8, parameters=1000, steps=[2, 4], loss=[5.0, 4.0])
    return {**made, **changed}


def test_runs_become_rows(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in (run(), run(ratio=0))))
    measured = Measurements.read(path)
    assert len(measured) == 2
    np.testing.assert_array_equal(measured.ratio, [0.5, 0.5, 0, 0])
    np.testing.assert_array_equal(measured.steps, [2, 4, 2, 4])
    np.testing.assert_array_equal(measured.ratios, [0, 0.5])
    assert (measured.family, measured.tokens, measured.batch_size) == ("bytes", 8, 4)
    half = measured.select(measured.ratio > 0)
    assert len(half) == 1 and half.tokens == 8


def test_a_table_is_read(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text("parameters,steps,ratio,loss\n1e3,10,0,5\n1e3,20,0,4\n")
    measured = Measurements.read(path)
    assert len(measured) == 1  # one size, ratio and learning rate: one run
    np.testing.assert_array_equal(measured.loss, [5, 4])
