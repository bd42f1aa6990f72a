"""The rule and the test that CONTRIBUTING.md gives as a template."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULE, TEST = re.findall(
    r"^```python\n(.*?)^```$", (ROOT / "CONTRIBUTING.md").read_text(), re.M | re.S
)
FACTORS = "backprops * activations"


def run(folder, rule, *options):
    path = folder / "template_test.py"
    path.write_text(f"{rule}\n\n{TEST}", encoding="utf-8")
    command = "-m pytest -q -p no:cacheprovider -p tests.conftest -c /dev/null".split()
    return subprocess.run(
        [sys.executable, *command, *options, "--rootdir", folder, path],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


def test_template(tmp_path):
    done = run(tmp_path, RULE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed" in done.stdout


def test_template_fails_for_a_wrong_rule(tmp_path):
    assert RULE.count(FACTORS) == 1
    done = run(tmp_path, RULE.replace(FACTORS, f"-{FACTORS}"), "-x")
    assert done.returncode == 1
    assert "FAILED template_test.py::test_shapes" in done.stdout
