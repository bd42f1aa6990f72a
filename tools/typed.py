"""Types: mypy's errors of each file may only become fewer.

    python tools/typed.py             # what `make lint` runs
    python tools/typed.py --update    # after errors were mended: lowers the numbers
    python tools/typed.py --rewrite   # after files were moved; look at the difference

tools/typed.txt has the number of errors that a file of the package still has; files
that it leaves out have none, and new ones must have none.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Dict, List

ALLOWED = Path(__file__).with_suffix(".txt")
ERROR = re.compile(r"^(\S+?\.py):\d+: error: ")


def count_errors(lines: List[str]) -> Dict[str, int]:
    """
    mypy's errors a file.

    Example:
        >>> count_errors(["a.py:3: error: no", "a.py:9: error: no", "b.py:1: note: -"])
        {'a.py': 2}
    """
    return dict(Counter(m[1].replace("\\", "/") for m in map(ERROR.match, lines) if m))


def read_allowed(text: str) -> Dict[str, int]:
    """
    Example:
        >>> read_allowed("2 a.py\\n")
        {'a.py': 2}
    """
    rows = (line.split() for line in text.splitlines())
    return {path: int(number) for number, path in rows}


def grown(found: Dict[str, int], allowed: Dict[str, int]) -> List[str]:
    """
    Files with more errors than they may have.

    Example:
        >>> grown({"a.py": 2, "new.py": 1}, {"a.py": 3})
        ['new.py']
    """
    return sorted(path for path in found if found[path] > allowed.get(path, 0))


def main(argv: List[str]) -> int:
    """The exit status."""
    command = [sys.executable, "-m", "mypy"]
    run = subprocess.run(command, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    if run.returncode not in (0, 1) or (run.returncode and not count_errors(lines)):
        print(run.stdout, run.stderr, sep="\n", file=sys.stderr)
        return 2
    found = count_errors(lines)
    allowed = read_allowed(ALLOWED.read_text("utf-8")) if ALLOWED.exists() else found
    worse = [] if "--rewrite" in argv else grown(found, allowed)
    for line in lines:
        match = ERROR.match(line)
        if match and match[1] in worse:
            print(line)
    for path in worse:
        print(f"{path}: {found[path]} errors, {allowed.get(path, 0)} allowed")
    if worse:
        return 1
    fewer = sum(allowed.values()) - sum(found.values())
    if "--update" in argv or "--rewrite" in argv:
        rows = [f"{found[path]} {path}\n" for path in sorted(found)]
        ALLOWED.write_text("".join(rows), "utf-8")
    elif fewer:
        print(f"{fewer} errors fewer than allowed: python tools/typed.py --update")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
