"""The examples in the docstrings of all modules give what they say."""

import doctest
import importlib
import pkgutil

import pytest

import opacus_ext

MODULES = ["opacus_ext"] + [
    module.name
    for module in pkgutil.walk_packages(opacus_ext.__path__, "opacus_ext.")
    if not module.name.endswith(".__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # examples may write files
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert not failed


def test_examples_are_found():
    """Or the test above would pass on nothing."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = {
        test.name
        for name in MODULES
        for test in finder.find(importlib.import_module(name))
        if test.examples
    }
    for public in ("GradSample", "workspace"):
        assert f"opacus_ext.grad_sample.factors.{public}" in found
    assert "opacus_ext.checks.check_per_sample_gradients" in found
