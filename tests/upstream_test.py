"""The patches for Opacus in upstream/: numbers, texts, and that they apply."""

import ast
import os
import re
import shutil
import subprocess
from importlib.metadata import version
from pathlib import Path

import opacus
import pytest

UPSTREAM = Path(__file__).parents[1] / "upstream"
PATCHES = sorted(UPSTREAM.glob("*.patch"))
each = pytest.mark.parametrize("patch", PATCHES, ids=lambda path: path.stem)


def apply(patch, place, *options):
    """What ``git apply`` says; git takes no repository around the place for its own."""
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place.parent)}
    command = ["git", "apply", *options, str(patch)]
    done = subprocess.run(command, cwd=place, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_numbers():
    names = [path.name[:3] for path in PATCHES]
    assert names == [f"{i:02}-" for i in range(1, len(PATCHES) + 1)] != []


@each
def test_text(patch):
    """Each has one, with a script that parses, and files of Opacus with tests."""
    text = patch.with_suffix(".md").read_text(encoding="utf-8")
    scripts = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    assert scripts and all(map(ast.parse, scripts))
    assert patch.name in text
    changed = re.findall(r"^diff --git a/(\S+) b/\1$", patch.read_text(), re.M)
    assert all(name.startswith("opacus/") for name in changed)
    assert any(name.startswith("opacus/tests/") for name in changed)
    new = patch.read_text().count("new file mode")
    assert patch.read_text().count("+# Licensed under the Apache License") == new


@pytest.mark.skipif(version("opacus") != "1.6.0", reason="they are for Opacus 1.6.0")
def test_patches_apply(tmp_path):
    """Each alone, and all together, to the Opacus that is installed."""
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(Path(opacus.__file__).parent, tmp_path / "opacus", ignore=ignore)
    for patch in PATCHES:
        apply(patch, tmp_path, "--check")
    for patch in PATCHES:
        apply(patch, tmp_path)


def test_pages():
    """Their scripts parse, and their links lead somewhere."""
    for page in UPSTREAM.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for script in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S):
            ast.parse(script)
        text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
        for link in re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", text):
            assert (page.parent / link).exists(), (page, link)
