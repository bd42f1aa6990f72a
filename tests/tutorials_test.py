"""Every notebook in tutorials/ runs from top to bottom, and prints what it stores."""

import gzip
import json
import math
import re
import sys
from base64 import b64encode
from contextlib import redirect_stdout
from importlib.machinery import PathFinder
from io import BytesIO, StringIO
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

import opacus_ext
from tools.notebooks import LARGEST, METADATA, PARAMETERS, tidy

TUTORIALS = Path(__file__).parents[1] / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[-+]?\d+)?|\d+")
ROUNDING = 1e-6  # smaller numbers are errors of float32


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty folder, no screen, and the data that need no download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for parameter in PARAMETERS:
        monkeypatch.delenv(parameter, raising=False)


def code_cells(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells
    return cells


def run(path, count=None, after=lambda cell, printed, drawn: None):
    """
    The first code cells, by default all, one after the other in one namespace, as
    Jupyter runs them.

    Args:
        after: called after each cell with the cell, what it printed, and how many
            figures it drew
    """
    namespace = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(code_cells(path)[:count], start=1):
            code = "".join(cell["source"])
            with redirect_stdout(StringIO()) as printed:
                exec(
                    compile(code, f"{path.name}, code cell {number}", "exec"), namespace
                )
            after(cell, printed.getvalue(), len(plt.get_fignums()))
            plt.close("all")
    finally:
        opacus_ext.register()  # in case a cell stopped halfway
    return namespace


def stored(cell):
    """What is stored of a cell: the text that it printed, and how many figures."""
    texts = ["".join(output.get("text", "")) for output in cell["outputs"]]
    figures = ["image/png" in output.get("data", {}) for output in cell["outputs"]]
    return "".join(texts), sum(figures)


def last_place(number):
    """What one more in the last digit of a printed number is; 0 of a whole one."""
    mantissa, _, exponent = number.partition("e")
    _, point, decimals = mantissa.partition(".")
    return 10.0 ** (int(exponent or 0) - len(decimals)) if point or exponent else 0.0


def near(found, wanted, tolerance):
    """Whether two printed numbers agree, but for rounding."""
    values = [float(number.replace(",", "")) for number in (found, wanted)]
    least = max(ROUNDING, *map(last_place, (found, wanted)))
    return math.isclose(*values, rel_tol=tolerance, abs_tol=1.001 * least)


def differences(found, wanted, tolerance):
    """Where two texts differ: in words, or in numbers by more than a tolerance."""
    words = [NUMBER.sub("#", text).split() for text in (found, wanted)]
    if words[0] != words[1]:
        return [f"other words in {found!r} than in {wanted!r}"]
    pairs = zip(NUMBER.findall(found), NUMBER.findall(wanted))
    return [f"{f} for {w}" for f, w in pairs if not near(f, w, tolerance)]


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path):
    """
    What a notebook claims about its results, it asserts itself. What it prints and
    draws is stored in it: the same where a cell says so, by the tag "compared" and,
    unless 2 % are right, by "tolerance".
    """
    stale, compared = {}, 0

    def compare(cell, printed, drawn):
        nonlocal compared
        text, figures = stored(cell)
        found = []
        if (bool(printed.strip()), drawn) != (bool(text.strip()), figures):
            found = [f"it prints {printed!r} and draws {drawn}; stored: {figures}"]
        elif "compared" in cell["metadata"].get("tags", ()):
            tolerance = cell["metadata"].get("tolerance", 0.02)
            found = differences(printed, text, tolerance)
            compared += 1
        if found:
            stale[cell["id"]] = found

    run(path, after=compare)
    assert not stale, f"if this is right: python tools/notebooks.py {path}"
    assert compared, "one cell's output has to be compared"
    assert path.stat().st_size <= LARGEST
    assert not list(tmp_path.iterdir()), "a tutorial leaves no files behind"


@pytest.mark.parametrize(
    ("found", "wanted", "agree"),
    [
        ("loss 2.55 in 1,234 steps", "loss  2.56\nin 1,230 steps", True),
        ("loss 2.55", "loss 2.65", False),
        ("epsilon 0.07", "epsilon 0.08", True),  # by rounding
        ("epsilon 0.07", "epsilon 0.09", False),
        ("12 layers", "13 layers", False),
        ("ok 2e-07", "ok 9e-16", True),
        ("ok 2e-07", "WRONG 2e-07", False),
        ("ratio 3.1e-05", "ratio 6.2e-05", False),
        ("-1.5", "1.5", False),
        ("layer1: 3, 4", "layer2: 3, 4", False),
        ("[3, 4]", "[3, 4, 5]", False),
    ],
)
def test_what_agrees(found, wanted, agree):
    assert (not differences(found, wanted, tolerance=0.02)) == agree


def test_what_is_stored():
    """Neither warnings nor times; prints in one piece, and small pictures."""
    picture = BytesIO()
    plt.imsave(picture, np.random.default_rng(0).random((90, 90, 3)), format="png")
    data = {"image/png": b64encode(picture.getvalue()).decode(), "text/plain": "<720>"}
    stream = {"output_type": "stream", "name": "stdout", "text": "1\n"}
    found = [stream, {**stream, "name": "stderr", "text": "/home/me: a warning"}]
    found += [{**stream, "text": "2\n"}, {"output_type": "display_data", "data": data}]
    metadata = {"tags": ["compared"], "execution": {"iopub.status.busy": "2026"}}
    cell = {"cell_type": "code", "metadata": metadata, "outputs": found}
    notebook = {"metadata": {"widgets": {}}, "cells": [cell]}
    tidy(notebook)
    assert notebook["metadata"] == METADATA
    assert cell["metadata"] == {"tags": ["compared"]}
    text, shown = cell["outputs"]
    assert text["text"] == "1\n2\n"
    assert shown["data"]["text/plain"] == "<Figure>"
    assert len(shown["data"]["image/png"]) < 0.6 * len(picture.getvalue()) * 4 / 3


@pytest.mark.parametrize("folder", [TUTORIALS.parent, TUTORIALS], ids=["root", "own"])
def test_examples_are_found(folder, monkeypatch):
    """By the notebooks that take them, wherever Jupyter was started."""
    monkeypatch.chdir(folder)
    found = 0
    for path in NOTEBOOKS:
        source = path.read_text(encoding="utf-8")
        if "from examples" not in source:
            continue
        cells = json.loads(source)["cells"]
        lines = [s for cell in cells for s in cell["source"] if "sys.path" in s]
        monkeypatch.setattr(sys, "path", [])
        exec("".join(lines), {"sys": sys})
        places = [str(Path(place).resolve()) for place in sys.path]
        spec = PathFinder.find_spec("examples", places)
        assert spec and Path(spec.origin).parents[1] == TUTORIALS.parent, path.name
        found += 1
    assert found


def test_mnist_is_read(tmp_path, monkeypatch):
    """Idx files of known values, packed or not, the test set held out."""
    values = np.random.default_rng(0)
    images = values.integers(256, size=(70, 6, 5), dtype=np.uint8)
    labels = values.integers(10, size=70, dtype=np.uint8)

    def idx(array):
        header = bytes([0, 0, 8, array.ndim])
        return header + np.array(array.shape, ">i4").tobytes() + array.tobytes()

    train, test = slice(None, 60), slice(60, None)
    for name, content in {
        "t10k-images-idx3-ubyte": idx(images[test]),
        "t10k-labels-idx1-ubyte.gz": gzip.compress(idx(labels[test])),
        "train-images-idx3-ubyte": idx(images[train]),
        "train-images-idx3-ubyte.gz": gzip.compress(idx(images[train])),
        "train-labels-idx1-ubyte.gz": gzip.compress(idx(labels[train])),
    }.items():
        (tmp_path / name).write_bytes(content)
    monkeypatch.setenv("MNIST", str(tmp_path))
    found = run(TUTORIALS / "images_lstm_cnn.ipynb", count=2)

    wanted = torch.tensor(images / 127.5 - 1, dtype=torch.float32)
    inputs, targets = found["train_set"].tensors
    inputs = torch.cat([inputs, found["test_inputs"]])
    torch.testing.assert_close(inputs, wanted.unsqueeze(1))
    assert torch.cat([targets, found["test_targets"]]).tolist() == labels.tolist()
    assert len(found["test_targets"]) == 10


def test_sequences_are_read(tmp_path, monkeypatch):
    """The recommender's own data, in the order of time."""
    path = tmp_path / "actions.txt"
    path.write_text("".join(f"{user} {item}\n" for user in (1, 2) for item in range(9)))
    monkeypatch.setenv("SEQUENCES", str(path))
    found = run(TUTORIALS / "dpformer.ipynb", count=2)
    assert [h.tolist() for h in found["data"].histories] == [[*range(1, 9)]] * 2
    assert found["data"].held_out.tolist() == [9, 9]


def test_own_texts_are_read(tmp_path, monkeypatch):
    """A record a line, shuffled; none of them is printed."""
    path, lines = tmp_path / "texts.txt", [f"secret {i}" for i in range(9)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("TEXTS", str(path))
    texts = []
    found = run(
        TUTORIALS / "finetune_causal_lm.ipynb", 2, lambda *x: texts.append(x[1])
    )
    assert sorted(found["private"]) == lines != found["private"]
    assert any(texts) and "secret" not in "".join(texts)


def test_sst2_is_read(tmp_path, monkeypatch):
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\na fine film \t1\ndull \t0\n", encoding="utf-8")
    monkeypatch.setenv("SST2", str(path))
    texts = []
    found = run(TUTORIALS / "classify_bert.ipynb", 2, lambda *x: texts.append(x[1]))
    assert sorted(found["private"]) == [("a fine film", 1), ("dull", 0)]
    assert any(texts) and "dull" not in "".join(texts)


@pytest.mark.parametrize("name", ["finetune_causal_lm", "classify_bert"])
def test_model_is_read(name, monkeypatch):
    """From a folder, instead of the tiny one that is made."""
    path = TUTORIALS / f"{name}.ipynb"
    tiny = run(path, count=3)
    monkeypatch.setenv("MODEL", str(tiny["SOURCE"]))
    found = run(path, count=3)
    assert found["SOURCE"] == str(tiny["SOURCE"])
    assert not list(found["FOLDER"].iterdir())
    pairs = zip(found["pretrained"]().parameters(), tiny["pretrained"]().parameters())
    assert all(torch.equal(p, q) for p, q in pairs)
