"""Breaks the package in one place at a time, and looks whether the tests find it.

Run as ``python -m tests.mutations [--third 0|1|2] [NUMBER ...]``: each mutation of
``mutations.txt`` is made in a copy of the package, and its tests are run there. One
that they do not find, whose text is in no file, or whose tests do not run, has failed.

In ``mutations.txt`` tests stand after ``@``; those that they must find follow, each
with its name after ``#`` and the lines that are taken out, ``-``, and put in, ``+``.
The text is changed in the first file of the package that has it.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Iterator, NamedTuple, Tuple

ROOT = Path(__file__).resolve().parents[1]
# Faults must not wait for the thorough tests, unless the selection names a marker.
PYTEST = "-m pytest -qx -W ignore -p no:cacheprovider".split()
QUICK = ["-m", "not slow and not thorough and not examples"]


class Mutation(NamedTuple):
    """A fault: its name, the tests that must see it, and the text before and after."""

    name: str
    tests: str
    before: str
    after: str


def read(path: Path) -> Iterator[Mutation]:
    """The mutations of a file."""
    _, *groups = re.split(r"^@ (.*)\n", path.read_text(), flags=re.M)
    for tests, group in zip(groups[::2], groups[1::2]):
        for block in re.split(r"^# ", group, flags=re.M)[1:]:
            name, *lines = block.splitlines()
            before, after = (
                "\n".join(line[2:] for line in lines if line[0] == mark)
                for mark in "-+"
            )
            yield Mutation(name, tests, before, after)


MUTATIONS = list(read(Path(__file__).with_suffix(".txt")))


def outcome(mutation: Mutation, root: Path) -> Tuple[bool, str]:
    """True if the tests see the mutation in the copy, and which one, or what failed."""
    files = sorted(root.glob("opacus_ext/**/*.py"))
    places = [p for p in files if mutation.before in p.read_text()]
    if not places:
        return False, f"text not found: {mutation.before!r}"
    right = places[0].read_text()
    places[0].write_text(right.replace(mutation.before, mutation.after))
    try:
        done = subprocess.run(
            [sys.executable, *PYTEST, *QUICK, *shlex.split(mutation.tests)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)},
        )
    finally:
        places[0].write_text(right)
    seen = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    if done.returncode == 1 and seen:
        return True, seen[0].partition(" - ")[0]
    said = "not seen" if not done.returncode else done.stdout[-1500:]
    return False, f"{said} ({mutation.tests})"


def main() -> int:
    """Tries some mutations, or all; the status is 1 if one is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--third", type=int, choices=range(3), help="one in three")
    parser.add_argument("--processes", type=int, choices=(1, 2), default=2)
    parser.add_argument("numbers", type=int, nargs="*")
    args = parser.parse_args()
    chosen = range(len(MUTATIONS))[args.third or 0 :: 1 if args.third is None else 3]
    numbers = args.numbers or list(chosen)
    copies: "SimpleQueue[Path]" = SimpleQueue()

    def tried(number: int) -> bool:
        root, start = copies.get(), time.monotonic()
        found, said = outcome(MUTATIONS[number], root)
        copies.put(root)
        took = f"{time.monotonic() - start:.0f} s"
        print(f"{number} {MUTATIONS[number].name}: {said}, {took}", flush=True)
        return found

    with tempfile.TemporaryDirectory() as folder:
        skipped = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "out")
        for process in range(args.processes):
            root = Path(folder) / str(process)
            shutil.copytree(ROOT, root, ignore=skipped)
            copies.put(root)
        with ThreadPoolExecutor(args.processes) as pool:
            results = list(pool.map(tried, numbers))
    print(f"{sum(results)} of {len(results)} were found")
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())
