"""
Runs a measurement, lists all of them, or writes the tables of docs/ from results.

    python -m benchmarks                  # the list
    python -m benchmarks step_time --help
    python -m benchmarks tables           # the tables of docs/, from benchmarks/results
"""

import ast
import runpy
import sys
from pathlib import Path
from typing import List, Optional

FOLDER = Path(__file__).parent


def main(argv: Optional[List[str]] = None) -> int:
    """Runs the measurement that the first argument names; returns the exit status."""
    name, *rest = argv or sys.argv[1:] or [""]
    path = FOLDER / f"{name}.py"
    if name.startswith("_") or not path.is_file():
        for script in sorted(FOLDER.glob("[a-z]*.py")):
            text = ast.get_docstring(ast.parse(script.read_text("utf-8"))) or ""
            print(f"{script.stem:<20}{text.split(chr(10))[0]}")
        return int(bool(name))
    sys.argv = [str(path), *rest]
    sys.path.insert(0, str(FOLDER))  # scripts import each other by their bare names
    runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
