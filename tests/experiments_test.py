"""The DPFormer paper's experiments: resumable, one line a run, and their report."""

import doctest
import importlib
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import opacus_ext
from opacus_ext.recommend import synthetic_sequences

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = (
    "--epochs 2 --batch-size 32 --max-len 8 --width 8 --depth 1 --no-progress".split()
)


@pytest.mark.parametrize("name", ["glue", "hashed_words", "labels", "options"])
def test_docstring_examples(name, tmp_path, monkeypatch):
    """Those of the training programs in examples/."""
    monkeypatch.chdir(tmp_path)  # examples may write files
    failed, found = doctest.testmod(importlib.import_module(f"examples.{name}"))
    assert found and not failed


@pytest.fixture
def data(tmp_path):
    """Sequences in SASRec's form."""
    made = synthetic_sequences(num_users=60, num_items=20, num_genres=4, length=8)
    lines = [
        f"{user} {item}"
        for user, (items, last) in enumerate(zip(made.histories, made.held_out))
        for item in [*items.tolist(), int(last)]
    ]
    path = tmp_path / "few.txt"
    path.write_text("\n".join(lines))
    return path


def run(script, *args):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", FOLDER / script, *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(FOLDER.parent), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.thorough
def test_runs_share_a_device_are_made_once_and_reported(data, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    main = importlib.import_module("dpformer").main
    out = tmp_path / "runs.jsonl"
    few = "--epsilons 8 --seeds 0 --priors none --jobs 2".split()
    common = ["paper", "--data", str(data), "--out", str(out), *few]
    tiny = ["--", *TINY, "--evaluate-every", "1"]

    # Cut off after an epoch of the second run.
    main([*common, "--models", "dpformer", *tiny, "--stop-after-epochs", "1"])
    (checkpoint,) = Path(f"{out}.d").iterdir()
    assert not out.exists()
    text = run("attention_of.py", checkpoint, "--data", data)
    assert "after 1 of 2 epochs" in text and "layer 1: logits" in text
    main([*common, *tiny])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["model"] for row in rows} == {"transformer", "dpformer"}
    assert all(row["epochs"] == 2 and row["epsilon_spent"] <= 8 for row in rows)
    assert not Path(f"{out}.d").exists()
    with pytest.raises(SystemExit, match="2 of 2 runs have ended in an error"):
        main([*common, *tiny, "--device", "nowhere"])

    text = run("dpformer_report.py", out, "--figures", tmp_path)
    assert f"{rows[0]['ndcg_at_10']:.2f}" in text and "DPFormer against" in text
    assert "own items last" in text
    assert (tmp_path / "figure6-paper.png").exists()


@pytest.mark.thorough
@pytest.mark.parametrize("script", ["unequal_keys.py", "attention_of.py"])
def test_commands_start_as_pasted(script):
    """Where nothing but the script's own folder is on the path."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    command = [sys.executable, FOLDER / script, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert not done.returncode and "usage" in done.stdout, done.stderr


@pytest.mark.parametrize("size", ["512", "1024"])
def test_what_is_left_of_the_papers_runs(size, capsys, monkeypatch):
    """Whatever the physical batch size, runs that are stored are not made again."""
    monkeypatch.syspath_prepend(str(FOLDER))
    out = FOLDER / "results" / "dpformer-paper-h100.jsonl"
    given = ["--", "--device", "cuda", "--physical-batch-size", size]
    few = ["paper", "--data", "ml-1m.txt", "--out", str(out), "--list"]
    importlib.import_module("dpformer").main([*few, *given])
    *lines, last = capsys.readouterr().out.splitlines()
    done = len(out.read_text().splitlines())
    assert last == f"{done} done, {36 - done} left"
    assert [line.split()[0] for line in lines].count("done") == done
    assert not Path(f"{out}.d").exists()


def made_up(experiment, seed=0, **more):
    """A line that ``dpformer.py`` might have written."""
    row = {
        **dict(experiment=experiment, model="dpformer", epsilon=8.0, seed=seed),
        **dict(width=64, lr=0.001, batch_size=256, prior="popularity", once=False),
        **dict(data="Video.txt", curve=[], ndcg_at_10=1.25, hit_at_10=2.5),
        **more,
    }
    return {**row, "key": json.dumps(row)}


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("dpformer_report")


ROWS = {
    "figure7": [
        made_up("figure7", lr=lr, batch_size=size, model=model, ndcg_at_10=score)
        for model in ("transformer", "dpformer")
        for lr, size, score in ((1e-3, 256, 0.5), (9e-3, 256, 1.25), (9e-3, 4096, 2.0))
    ],
    "figure6": [
        made_up("figure6", seed, curve=[[5, 1.0 + seed, 2.0], [10, 2.0 + seed, 4.0]])
        for seed in (0, 1)
    ],
}


def test_figure_7_is_a_grid(report):
    """Of learning rates by batch sizes for each model; and drawn with its numbers."""
    text = report.grid(ROWS["figure7"]).splitlines()
    assert [line.split() for line in text[1:4]] == [
        ["0.001", "0.009"],
        ["256", "0.50", "1.25"],
        ["4096", "--", "2.00"],
    ]
    assert text[0].startswith("Transformer:") and text[4].startswith("DPFormer:")
    panels = report.draw_grid(ROWS["figure7"]).axes
    assert [panel.get_title() for panel in panels] == ["Transformer", "DPFormer"]
    assert [x.get_text() for x in panels[0].texts] == ["0.50", "1.25", "--", "2.00"]


def test_figure_6_has_both_measures(report):
    """The mean over seeds by the epoch."""
    ndcg, hit = report.draw_curves(ROWS["figure6"]).axes
    assert ndcg.get_title() == "Video.txt, epsilon 8"
    assert ndcg.lines[0].get_xydata().tolist() == [[5, 1.5], [10, 2.5]]
    assert hit.lines[0].get_xydata().tolist() == [[5, 2.0], [10, 4.0]]


def test_figures_are_drawn_by_the_command(tmp_path, report):
    lines = [json.dumps(row) for rows in ROWS.values() for row in rows]
    (tmp_path / "runs.jsonl").write_text("\n".join(lines))
    report.main([str(tmp_path / "runs.jsonl"), "--figures", str(tmp_path)])
    assert {path.stem for path in tmp_path.glob("*.png")} == set(ROWS)


def test_figure_5_has_the_long_tail(data, tmp_path, capsys):
    """Items, the most popular first, held-out actions among them."""
    from benchmarks import long_tail

    long_tail.main([str(data), str(data), "--plot", str(tmp_path / "figure5.png")])
    name, users, items, actions, sparse, *_, half = (
        cell.strip()
        for cell in capsys.readouterr().out.splitlines()[-1].split("|")[1:-1]
    )
    pairs = [line.split() for line in data.read_text().splitlines()]
    counts = sorted(Counter(item for _, item in pairs).values())
    assert (name, int(users), int(items), int(actions)) == (
        *("few.txt", 60, len(counts), len(pairs)),
    )
    assert sparse == f"{1 - len(pairs) / (60 * len(counts)):.2%}"
    top = sum(counts[-round(len(counts) / 2) :]) / len(pairs)
    assert half == f"{top:.1%}"
    assert (tmp_path / "figure5.png").stat().st_size


@pytest.mark.slow
def test_releases_without_training(data, tmp_path):
    """No checkpoint, of which there is nothing to keep."""
    out = tmp_path / "runs.jsonl"
    run("dpformer.py", "releases", "--data", data, "--out", out, "--seeds", 0)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["epsilon"] for row in rows] == [1.0, 2.0, 5.0, 8.0, 10.0]
    text = run("dpformer_report.py", out)
    assert f"{rows[0]['own_last_ndcg_at_10']:.2f}" in text


@pytest.fixture
def fast_clipping(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("fast_clipping")


@pytest.mark.parametrize("architecture", ["MLP", "ResNet-18"])
def test_a_step_of_fast_clipping_is_that_of_each_sample(fast_clipping, architecture):
    """In double precision; BatchNorm stays frozen, and so mixes no samples."""
    try:
        rows = list(fast_clipping.check((architecture,)))
    finally:
        opacus_ext.register()  # Opacus's own modes ran without
    assert {row["mode"] for row in rows} == set(fast_clipping.CHECKED)
    assert all(row["deviation"] < 1e-8 for row in rows)


def test_claims_of_fast_clipping(fast_clipping):
    """Those that are stored hold, and are those of the stored times."""
    path = FOLDER / "results" / "fast_clipping-cpu.jsonl"
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    stored = [row for row in rows if row["experiment"] == "claims"]
    found = list(fast_clipping.claims([r for r in rows if r not in stored]))
    assert stored and all(row["holds"] for row in stored)
    assert [row["value"] for row in found] == [row["value"] for row in stored]
    slower = [
        {**row, "min_ms": 99 * row["min_ms"]}
        for row in rows
        if row.get("mode") in fast_clipping.OURS and "min_ms" in row
    ]
    others = [row for row in rows if row.get("mode") not in fast_clipping.OURS]
    others = [row for row in others if row not in stored]
    assert not all(row["holds"] for row in fast_clipping.claims(others + slower))
