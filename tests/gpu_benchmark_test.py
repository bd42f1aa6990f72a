"""``make gpu``, rehearsed on a CPU: each way on tiny models, and going on when cut."""

import importlib
import json
import subprocess
import sys
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

ROOT = Path(__file__).parents[1]
NOT_HERE = ("Opacus", "fastDP", "Opake")


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_every_way_is_measured_or_says_why_not(gpu, tmp_path):
    """But for what was measured before the run was cut off."""
    out, case = tmp_path / "rows.jsonl", next(gpu.rehearsed())
    before = json.dumps({"case": case.key, "way": "scan", "largest": 8})
    out.write_text(f"{before}\n{before[:40]}")
    command = [sys.executable, "-m", "benchmarks", "gpu", "--rehearse", "--out", out]
    subprocess.run(command, cwd=ROOT, check=True)
    first, *lines = out.read_text().splitlines()
    rows = list(map(json.loads, lines))
    assert first == before and len({row["case"] for row in rows}) == 6
    ways = {row["way"] for row in rows}
    assert ways == {w for w in gpu.WAYS if "CUDA" not in w} - {"scan"}
    for row in rows:
        if row["way"].startswith(NOT_HERE) or "largest" in row:
            continue
        assert "refused" not in row and row["device"] == "cpu", row
        assert row["ms"] >= row["host_ms"] > 0 and row["calls"] > row["busy_ms"] > 0
        assert ("compiled" in row["ran"]) == ("compiled" in row["way"]), row


def test_what_runs_on_the_device_counts_once(gpu):
    spans = {"gemm": (0, 2), "add": (1, 3), "Memcpy": (5, 6), "launch": (0, 9)}
    events = []
    for name, (start, end) in {**spans, "marked": (0, 9)}.items():
        events.append(FunctionEvent(0, name, 0, 1e3 * start, 1e3 * end))
        events[-1].device_type = DeviceType.CUDA
    events[3].device_type, events[4].is_user_annotation = DeviceType.CPU, True
    assert gpu.of_device(events, DeviceType.CUDA) == {"busy_ms": 4, "kernels": 2}


def test_large_models_are_built_on_the_device(gpu, monkeypatch):
    """At their real size, where there is no memory for them."""
    way = gpu.Way(lambda model, data, mode: model, ours=True)
    monkeypatch.setitem(gpu.WAYS, "model", way)
    for case in gpu.CASES[1:8]:
        model = gpu.step_of("model", case, "meta", False)
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_what_is_ready_is_measured_first(gpu, tmp_path, monkeypatch):
    """In place of processes: "ghost" dies, and "hooks" needs the memory of others."""
    asked, compiling, died = [], Future(), Future()
    died.set_exception(BrokenProcessPool())

    def submit(function, case, way="", *on):
        if function is gpu.compile_only:
            return compiling
        answer, found = Future(), {"largest": 1}
        asked.append(way)
        if way == "scan":
            compiling.set_result(None)
        if way == "hooks" and not compiling.done():
            found["refused"] = "OutOfMemoryError"
        answer.set_result(found)
        return died if way == "ghost" else answer

    fake = SimpleNamespace(submit=submit, shutdown=dict)
    monkeypatch.setattr(gpu, "pool", lambda *args: fake)
    case = gpu.Case("A", 1, 1, "bf16", ["auto", "hooks", "ghost", "scan"])
    args = SimpleNamespace(rehearse=True, out=tmp_path / "rows.jsonl", compilers=1)
    largest = case._replace(ways=["plain"], largest=True)
    gpu.run_cases([largest, case], args, float("inf"))
    # Then the largest batch, and the way that was compiled.
    assert asked == ["", "hooks", "ghost", "scan", "plain", "auto", "hooks"]
    rows = gpu.known(args.out)
    assert [way for _, way in rows if "refused" in rows[_, way]] == ["ghost"]
