"""Runs notebooks and stores what they print and draw.

    python tools/notebooks.py                            # all of tutorials/
    python tools/notebooks.py tutorials/dpformer.ipynb   # some

`make notebooks` makes the environment that it needs, with nbclient and ipykernel. The
kernel is the Python that runs this, on one thread, as in the tests, in an empty folder,
and with the data that need no download. What would differ on another machine or day is
left out: times, warnings, the state of widgets, the kernel's version. So a notebook
that hasn't changed is stored as it was, but for times that it prints itself.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Sequence

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))
#: Environment variables by which a reader gives a notebook data or a model.
PARAMETERS = ("CHINCHILLA", "MNIST", "MODEL", "SEQUENCES", "SST2", "TEXT", "TEXTS")
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
#: What a cell's own metadata may say; the rest is left by editors.
KEPT = ("tags", "tolerance")
#: Small pictures keep a notebook below 300 kB.
PLOTS = "figure.dpi: 72\n"
LARGEST = 300_000  # bytes of a notebook


def environment(folder: Path) -> Dict[str, str]:
    """The variables of the kernel: this checkout, one thread, small pictures."""
    (folder / "matplotlibrc").write_text(PLOTS, encoding="utf-8")
    own = {k: v for k, v in os.environ.items() if k not in (*PARAMETERS, "MPLBACKEND")}
    fixed = {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MATPLOTLIBRC": str(folder / "matplotlibrc"),
        "PYTHONWARNINGS": "ignore",
    }
    return {**own, **fixed}


def run(notebook: Any, folder: Path) -> None:
    """Runs all cells; an error stops it, and names the cell."""
    from nbclient import NotebookClient

    empty = folder / "empty"
    empty.mkdir()
    resources = {"metadata": {"path": str(empty)}}
    client = NotebookClient(
        notebook,
        resources=resources,
        kernel_name="python3",
        timeout=None,
        record_timing=False,
        store_widget_state=False,
    )
    client.execute(env=environment(folder))
    left = [path.name for path in empty.iterdir()]
    if left:
        raise SystemExit(f"The notebook leaves files behind: {', '.join(left)}.")


def small(picture: str) -> str:
    """A picture in base64, with 256 colors instead of all: half as large, or less."""
    from PIL import Image

    file = io.BytesIO()
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    image.quantize(256, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def outputs(found: Sequence[Dict[str, Any]]) -> List[Dict[str, Any]]:
    """What a cell printed, as one output, and what it showed, in the order of time."""
    kept: List[Dict[str, Any]] = []
    for output in found:
        if output["output_type"] == "stream":
            if output["name"] == "stderr":  # warnings, with paths of this machine
                continue
            if kept and kept[-1]["output_type"] == "stream":
                kept[-1]["text"] += output["text"]
                continue
        elif "image/png" in output.get("data", {}):
            text = {"text/plain": "<Figure>"}  # its size depends on the dpi
            output["data"] = {"image/png": small(output["data"]["image/png"]), **text}
            output["metadata"] = {}
        kept.append(output)
    return kept


def tidy(notebook: Any) -> None:
    """Takes out what depends on the machine or the editor."""
    notebook["metadata"] = dict(METADATA)
    for cell in notebook["cells"]:
        cell["metadata"] = {k: v for k, v in cell["metadata"].items() if k in KEPT}
        if cell["cell_type"] == "code":
            cell["outputs"] = outputs(cell["outputs"])


def store(path: Path) -> None:
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        run(notebook, Path(folder))
    tidy(notebook)
    text = json.dumps(
        json.loads(nbformat.writes(notebook)), indent=1, ensure_ascii=False
    )
    path.write_text(text + "\n", encoding="utf-8")
    size = path.stat().st_size
    print(f"{path.name}: {size / 1000:.0f} kB")
    if size > LARGEST:
        raise SystemExit(f"{path.name} is larger than {LARGEST / 1000:.0f} kB.")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Runs notebooks, stores outputs.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    for path in parser.parse_args(arguments).files or NOTEBOOKS:
        store(path.resolve())


if __name__ == "__main__":
    main(sys.argv[1:])
