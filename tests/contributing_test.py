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


def test_template(tmp_path):
    """It is right; and its test fails for a rule with another sign."""
    assert RULE.count(FACTORS) == 1
    wrong = RULE.replace(FACTORS, f"-{FACTORS}")
    for name, rule in {"right": RULE, "wrong": wrong}.items():
        path = tmp_path / f"{name}_test.py"
        path.write_text(f"{rule}\n\n{TEST}", encoding="utf-8")
    command = "-m pytest -q -p no:cacheprovider -p tests.conftest -c /dev/null".split()
    done = subprocess.run(
        [sys.executable, *command, "--rootdir", tmp_path, *sorted(tmp_path.iterdir())],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said
    assert "FAILED wrong_test.py::TestScale::test_sizes" in said
    assert "FAILED right_test.py" not in said
    assert re.search(r"^\.{7}", done.stdout), said  # those of right_test.py
