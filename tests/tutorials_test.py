"""Every notebook in tutorials/ runs from top to bottom."""

import json
from pathlib import Path

import pytest

import opacus_ext

NOTEBOOKS = sorted((Path(__file__).parents[1] / "tutorials").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path, tmp_path, monkeypatch, capsys):
    """All code cells, one after the other in one namespace, as Jupyter runs them."""
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert cells
    namespace = {"__name__": "__main__"}
    try:
        for number, cell in enumerate(cells, start=1):
            source = "".join(cell["source"])
            exec(compile(source, f"{path.name}, code cell {number}", "exec"), namespace)
    finally:
        opacus_ext.register()  # in case a cell stopped halfway
    assert capsys.readouterr().out
    assert not list(tmp_path.iterdir()), "a tutorial leaves no files behind"
