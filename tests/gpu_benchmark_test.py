"""``make gpu``, rehearsed on a CPU: each way on tiny models, and going on when cut."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_HERE = ("fastDP", "Opake")


def rehearse(out):
    command = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse"]
    done = subprocess.run(
        [*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return done.stdout.splitlines(), out.read_text().splitlines()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return rehearse(tmp_path_factory.mktemp("gpu") / "whole.jsonl")


def test_every_way_is_measured_or_says_why_not(whole):
    device, *rows = map(json.loads, whole[1])
    assert device["device"] == "cpu" and len(whole[0]) == len(rows)
    assert len({row["case"] for row in rows}) == 9
    for row in rows:
        if not row["way"].startswith(("Opacus", *NOT_HERE)):
            assert "refused" not in row, row
        if "refused" not in row:
            assert row.get("largest", row.get("ms")) > 0


def test_it_goes_on_after_a_cut(whole, tmp_path):
    """A line that was cut off is measured again, and nothing else."""
    out, lines = tmp_path / "cut.jsonl", whole[1]
    kept = [*lines[:5], *lines[6:], lines[5][:40]]
    out.write_text("\n".join(kept) + "\n")
    printed, found = rehearse(out)
    assert len(printed) == 1 and found[:-1] == kept
    assert json.loads(found[-1])["way"] == json.loads(lines[5])["way"]
