"""The ratchet of types: what it counts, and what it refuses."""

import doctest
import subprocess
import sys
from pathlib import Path

import pytest

from tools import typed

ROOT = Path(__file__).parents[1]


def test_docstring_examples():
    failed, found = doctest.testmod(typed)
    assert found and not failed


def test_files_in_the_list_are_there():
    """Or a file that was moved would keep its old errors under the new name."""
    allowed = typed.read_allowed(typed.ALLOWED.read_text())
    assert [path for path in allowed if not (ROOT / path).exists()] == []
    assert all(number > 0 for number in allowed.values())


@pytest.mark.parametrize("errors, status", [(2, 0), (1, 0), (3, 1)])
def test_errors_may_only_become_fewer(errors, status, tmp_path, monkeypatch, capsys):
    allowed = tmp_path / "typed.txt"
    allowed.write_text("2 a.py\n")
    monkeypatch.setattr(typed, "ALLOWED", allowed)
    lines = [f"a.py:{i + 1}: error: no  [misc]" for i in range(errors)]
    done = subprocess.CompletedProcess([], 1, "\n".join(lines), "")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    assert typed.main([]) == status
    assert ("3 errors, 2 allowed" in capsys.readouterr().out) == bool(status)
    assert typed.main(["--update"]) == status
    assert allowed.read_text() == ("2 a.py\n" if status else f"{errors} a.py\n")
    assert typed.main(["--rewrite"]) == 0
    assert allowed.read_text() == f"{errors} a.py\n"


def test_a_mypy_that_fails_is_no_success(tmp_path, monkeypatch):
    code = "import sys; sys.exit(2)"
    failed = subprocess.run([sys.executable, "-c", code], capture_output=True)
    failed.stdout, failed.stderr = "", "mypy: no such file"
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: failed)
    assert typed.main([]) == 2
