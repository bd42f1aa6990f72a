"""Tests the patches for Opacus in this folder: each alone, then all together.

    python upstream/run.py        # the test files that a patch touches
    python upstream/run.py --all  # all of Opacus's tests, without patches, too

Opacus's source distribution is fetched by pip, in the version that is installed here.
Patched copies stay in build/upstream. The status is 1 if a patch does not apply, or if
a test fails that does not fail without patches.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import version
from pathlib import Path
from typing import Dict, List, Sequence, Set

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent / "build" / "upstream"
# No file of settings of ours; torchvision loads though it was built for another torch.
PYTEST = "-m pytest -q -rfE -c /dev/null -p no:cacheprovider -p tests.vision -W ignore"
FAILED = re.compile(r"^(?:FAILED|ERROR|SUBFAILED).*?(opacus/tests/\S+)", re.M)


def python(copy: Path, arguments: Sequence[str]) -> subprocess.CompletedProcess:
    """Runs Python where ``opacus`` is the copy."""
    path = [str(copy), os.environ.get("PYTHONPATH", ""), str(HERE.parent)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, text=True)


def fetch() -> Path:
    """The source distribution, fetched if it is not there."""
    name = f"opacus-{version('opacus')}"
    source = BUILD / f"{name}.tar.gz"
    if not source.exists():
        command = f"-m pip download -q --no-deps --no-binary opacus -d {BUILD}"
        wanted = f"opacus=={version('opacus')}"
        subprocess.run([sys.executable, *command.split(), wanted], check=True)
    return source


def patched(source: Path, name: str, patches: Sequence[Path]) -> Path:
    """A new copy of Opacus with some patches, which must fit to the line."""
    place = BUILD / name
    shutil.rmtree(place, ignore_errors=True)
    with tarfile.open(source) as archive:
        archive.extractall(place, filter="data")
    copy = place / source.name[: -len(".tar.gz")]
    # git would leave out what is not below it in the repository around the copy.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(place)}
    for patch in patches:
        command = ["git", "apply", "--whitespace=error-all", str(patch)]
        subprocess.run(command, cwd=copy, env=env, check=True)
    found = python(copy, ["-c", "import opacus; print(opacus.__file__)"]).stdout
    if Path(found.strip()) != copy / "opacus" / "__init__.py":
        raise SystemExit(f"{found.strip()} is imported, not {copy}")
    return copy


def touched(patches: Sequence[Path]) -> List[str]:
    """The test files that patches touch."""
    text = "".join(patch.read_text(encoding="utf-8") for patch in patches)
    return sorted({*re.findall(r"^\+\+\+ b/(\S+_test\.py)$", text, re.M)})


def failures(copy: Path, tests: Sequence[str], known: Set[str]) -> Set[str]:
    """Runs tests, prints how that went, and returns which of them fail."""
    done = python(copy, [*PYTEST.split(), "--rootdir", str(copy), *tests])
    failed = {*FAILED.findall(done.stdout)}
    if done.returncode != bool(failed):  # of another kind: no tests, or a crash
        failed.add(f"pytest (exit status {done.returncode})")
    last = [*done.stdout.strip().splitlines(), done.stderr.strip()[-500:]][-2:]
    print(f"{copy.parent.name:<34}{' '.join(last).strip()}", flush=True)
    for name in sorted(failed):
        print(f"    {name}{' (without patches, too)' * (name in known)}", flush=True)
    if failed - known:
        print(done.stdout, done.stderr, file=sys.stderr)
    return failed


def main(arguments: Sequence[str]) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("patches", nargs="*", help="their numbers; all without")
    parser.add_argument("--all", action="store_true", help="all of Opacus's tests")
    given = parser.parse_args(arguments)
    patches = sorted(HERE.glob("[0-9][0-9]-*.patch"))
    runs: Dict[str, List[Path]] = {p.stem: [p] for p in patches}
    runs["together"] = patches
    if given.patches:
        runs = {k: v for k, v in runs.items() if k[:2] in given.patches}
    if not patches or not runs:
        raise SystemExit(f"There are no such patches in {HERE}.")
    BUILD.mkdir(parents=True, exist_ok=True)
    source = fetch()
    suite = ["-n", "auto", "--maxprocesses", "8", "opacus/tests"]
    known, new = set(), set()
    if given.all:
        known = failures(patched(source, "unpatched", []), suite, set())
    for name, some in runs.items():
        copy = patched(source, name, some)
        tests = suite if given.all else touched(some)
        new |= failures(copy, tests, known) - known
    return int(bool(new))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
