"""What errors and warnings name works when it is pasted after ``import opacus_ext``."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import opacus_ext

ROOT = Path(opacus_ext.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Names that stand by themselves are arguments, methods and what the user has imported.
OF_USER = {"PrivacyArguments", "PrivacyEngine", "PrivateTrainer", "TrainingArguments"}
DOTTED = re.compile(r"\b(?:opacus_ext|opacus|torch)(?:\.[A-Za-z_]\w*)+")
# CamelCase, or called.
BARE = re.compile(r"(?<![\w.\"'])([A-Z]\w*[a-z]\w*[A-Z]\w+|[a-z]\w*(?=\())")


def texts(node):
    """All strings in a piece of code, parts of one text put together."""
    if isinstance(node, ast.JoinedStr):
        parts = (v.value if isinstance(v, ast.Constant) else "{}" for v in node.values)
        yield "".join(parts)
        return
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    for child in ast.iter_child_nodes(node):
        yield from texts(child)


def documented(tree):
    """The docstrings, which are not told."""
    for node in ast.walk(tree):
        first = node.body[0] if isinstance(getattr(node, "body", None), list) else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            yield first.value.value


def remedies():
    """What is passed or assigned as a remedy."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            named = [getattr(node, "arg", None)]
            named += [getattr(x, "id", None) for x in getattr(node, "targets", ())]
            if "remedy" in named and getattr(node, "value", None) is not None:
                for text in texts(node.value):
                    yield f"{path.name}:{node.value.lineno}", text


def test_names_with_dots():
    """Evaluated in a new process, in which nothing else was imported."""
    names = set()
    for path in FILES:
        tree = ast.parse(path.read_text("utf-8"))
        told = set(texts(tree)) - set(documented(tree))
        names.update(name for text in told for name in DOTTED.findall(text))
    assert len(names) > 20
    code = (
        "import importlib, json, sys, opacus_ext, opacus, torch\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    try:\n"
        "        eval(name)\n"
        "    except AttributeError:\n"
        "        importlib.import_module(name)\n"  # a module, which is imported
    )
    given = [sys.executable, "-c", code, json.dumps(sorted(names))]
    done = subprocess.run(given, capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_names_without_dots():
    """What this package or Opacus has is named by where it is."""
    public = {*opacus_ext.__all__, "BatchMemoryManager", "expert_parallel"}
    public |= {"ModuleValidator", "DifferentiallyPrivateDistributedDataParallel"}
    for part in ("data", "layers", "losses", "optimizers"):
        public.update(getattr(opacus_ext, part).__all__)
    found = [
        f"{where}: {name}"
        for where, text in remedies()
        for name in BARE.findall(text)
        if name in public - OF_USER
    ]
    assert not found


@pytest.mark.parametrize("name", ["losses", "trainer", "planner", "audit"])
def test_parts_of_the_package(name):
    assert getattr(opacus_ext, name).__name__ == f"opacus_ext.{name}"


def test_no_part_of_the_package():
    assert not hasattr(opacus_ext, "nothing")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        opacus_ext.nothing
