"""The DPFormer paper's experiments: resumable, one line a run, and their report."""

import doctest
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import opacus_ext
from examples.sequences import synthetic_sequences

FOLDER = Path(__file__).parents[1] / "benchmarks"
TINY = (
    "--epochs 2 --batch-size 32 --max-len 8 --width 8 --depth 1 --no-progress".split()
)


@pytest.mark.parametrize("name", ["glue", "hashed_words", "labels", "ranking", "runs"])
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
    assert not out.exists() and len(list(Path(f"{out}.d").iterdir())) == 1
    main([*common, *tiny])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert {row["model"] for row in rows} == {"transformer", "dpformer"}
    assert all(row["epochs"] == 2 and row["epsilon_spent"] <= 8 for row in rows)
    assert not Path(f"{out}.d").exists()
    with pytest.raises(SystemExit, match="2 of 2 runs have ended in an error"):
        main([*common, *tiny, "--device", "nowhere"])

    text = run("dpformer_report.py", out, "--figures", tmp_path)
    assert f"{rows[0]['ndcg_at_10']:.2f}" in text and "DPFormer against" in text
    assert (tmp_path / "figure6.png").exists()


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
