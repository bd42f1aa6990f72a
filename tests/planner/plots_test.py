"""The figures of the scaling laws' paper, and the runs at equal noise-batch ratios."""

import importlib
import json
from itertools import product

import numpy as np
import pytest
import torch

from benchmarks import noise_batch_ratio

TEXT = b"To be, or not to be: that is the question. " * 20
GRID = "--sizes 8x1 --batches 2 4 --ratios 0.25 --steps 20".split()


@pytest.fixture
def runs(tmp_path):
    """Measurements of a law: three sizes, three ratios and two learning rates."""
    path, steps = tmp_path / "runs.jsonl", [20 * k for k in range(1, 41)]
    common = dict(family="bytes", batch_size=32, tokens=64, total_steps=800, seed=0)
    lines = []
    for size, ratio, rate in product((1e4, 1e5, 1e6), (0, 2**-8, 2**-4), (0.01, 0.001)):
        noise = 40 * size**-0.3 + 5 * ratio**0.5 + abs(np.log(rate / 0.003)) / 10
        loss = [2 + noise + 9 * step**-0.5 for step in steps]
        cell = dict(parameters=size, ratio=ratio, learning_rate=rate)
        lines.append(json.dumps({**common, **cell, "steps": steps, "loss": loss}))
    path.write_text("\n".join(lines))
    return path


def equal_ratios(folder, *more):
    text, out = folder / "text", folder / "ratio.jsonl"
    text.write_bytes(TEXT)
    noise_batch_ratio.main(["--text", str(text), "--out", str(out), *GRID, *more])
    return out


def test_runs_at_equal_ratios(tmp_path, capsys):
    out = equal_ratios(tmp_path, "--seeds", "0", "1")
    lines = out.read_text()
    equal_ratios(tmp_path, "--seeds", "1", "0")
    assert out.read_text() == lines  # nothing is run again
    shown = capsys.readouterr().out
    found = noise_batch_ratio.cells(noise_batch_ratio.read_runs(out))
    assert [(c.batch_size, c.seeds) for c in found] == [(2, 2), (4, 2)]
    made = [json.loads(line) for line in lines.splitlines()]
    for cell in found:
        ends = [r["loss"][0] for r in made if r["batch_size"] == cell.batch_size]
        assert cell.last == pytest.approx(np.mean(ends))
        assert cell.spread == pytest.approx(abs(ends[0] - ends[1]) / 2)
        assert f"{cell.last:.3f} +- {cell.spread:.3f} ({cell.evaluated:.3f})" in shown
    assert f"{found[1].last / found[0].last - 1:+.1%}" in shown


def test_the_best_learning_rate_is_reported():
    pytest.importorskip("matplotlib")
    run = dict(size="a", ratio=0.5, batch_size=8, total_steps=4, steps=[2, 4])
    rates = (0.1, [3, 1]), (0.2, [1, 2]), (0.3, [0, 0])
    made = [
        dict(run, seed=0, evaluated=1.0, learning_rate=rate, loss=loss)
        for rate, loss in rates
    ]
    made[2]["steps"] = [2]  # it diverged
    cells = noise_batch_ratio.cells(made)
    (best,) = noise_batch_ratio.best(cells)
    assert best.learning_rate == 0.1
    (tuned,) = importlib.import_module("examples.planner_plots").tuned(cells)
    assert tuned.loss.tolist() == [1, 1]


def test_the_loss_on_the_text_is_that_of_the_trained_model():
    from opacus_ext.planner.measure import byte_transformers

    family = byte_transformers(TEXT, 64, ["8x1"])
    inputs, targets = family.dataset.tensors
    model = family.build("8x1")
    logits = model(inputs).transpose(1, 2)
    expected = torch.nn.functional.cross_entropy(logits, targets)
    found = noise_batch_ratio.loss_on_text(model, family)
    assert found == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.slow
def test_one_command_draws_every_figure(runs, tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib").use("Agg")
    plots = importlib.import_module("examples.planner_plots")
    ((first, x), (second, y), rest), *_ = plots.PLANES
    few = [((first, x[::3]), (second, y[::3]), rest)]
    real = plots.synergy
    monkeypatch.setattr(plots, "synergy", lambda: real(planes=few))
    ratios = equal_ratios(tmp_path, "--seeds", "0", "--learning-rates", "0.01", "0.1")
    capsys.readouterr()
    out = tmp_path / "figures"
    budget = "--users 1e5 --epsilons 2 8 --flops 1e11 1e13".split()
    plots.main([str(runs), "--out", str(out), "--ratio-runs", str(ratios), *budget])
    numbers = [1, 3, 4, 5, 6, 7, 8, 14, 15, 16, 17, 18, 19, "c7"]
    assert {p.name for p in out.iterdir()} == {f"figure{n}.png" for n in numbers}
    assert all(p.stat().st_size > 5000 for p in out.iterdir())
    assert "| all | 360 |" in capsys.readouterr().out
