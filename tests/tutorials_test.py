"""Every notebook in tutorials/ runs from top to bottom."""

import gzip
import json
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
import pytest
import torch

import opacus_ext

TUTORIALS = Path(__file__).parents[1] / "tutorials"
NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    """An empty folder, no screen, and the data that need no download."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    for parameter in ("MNIST", "SEQUENCES", "MODEL", "TEXTS", "SST2"):
        monkeypatch.delenv(parameter, raising=False)


def run(path, count=None):
    """
    The first code cells, by default all, one after the other in one namespace, as
    Jupyter runs them.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells
    namespace = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(cells[:count], start=1):
            source = "".join(cell["source"])
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
    finally:
        opacus_ext.register()  # in case a cell stopped halfway
    return namespace


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, capsys):
    """What a notebook claims about its results, it asserts itself."""
    run(path)
    assert capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a tutorial leaves no files behind"


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


def test_own_texts_are_read(tmp_path, monkeypatch, capsys):
    """A record a line, shuffled; none of them is printed."""
    path, lines = tmp_path / "texts.txt", [f"secret {i}" for i in range(9)]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    monkeypatch.setenv("TEXTS", str(path))
    found = run(TUTORIALS / "finetune_causal_lm.ipynb", count=2)
    assert sorted(found["private"]) == lines != found["private"]
    assert "secret" not in capsys.readouterr().out


def test_sst2_is_read(tmp_path, monkeypatch, capsys):
    path = tmp_path / "train.tsv"
    path.write_text("sentence\tlabel\na fine film \t1\ndull \t0\n", encoding="utf-8")
    monkeypatch.setenv("SST2", str(path))
    found = run(TUTORIALS / "classify_bert.ipynb", count=2)
    assert sorted(found["private"]) == [("a fine film", 1), ("dull", 0)]
    assert "dull" not in capsys.readouterr().out


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
