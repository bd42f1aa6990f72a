"""Builds the wheel and the source distribution into dist/, and tries both.

    make dist                          # in the environment of make lint
    python tools/release.py --keep     # tries what dist/ has already

It needs the packages build and twine, and torch and Opacus in the same environment.
The status is 1, with the reason, if a file is missing, PyPI would refuse README.md, or
something that was installed or unpacked does not run. Nothing is uploaded.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path
from typing import Any, Iterable, Set

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
INSTALLED = """
import sys, opacus_ext
assert opacus_ext.__file__.startswith(sys.prefix), opacus_ext.__file__
assert "transformers" not in sys.modules, "importing transformers takes seconds"
print(opacus_ext.__version__)
"""
#: Quick tests that run in what was unpacked; `make test` there runs all.
TESTS = "tests/grad_samples/linear_test.py tests/losses_test.py tests/release_test.py"


def version() -> str:
    """The version, from the one line that has it."""
    text = (ROOT / "opacus_ext" / "__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.M)[0]


def run(*command: Any, folder: Path = ROOT, **environment: str) -> str:
    """The output of a command, or an exit that shows it."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}\nstatus 1")
    return done.stdout


def expect(names: Iterable[str], archive: Path, there: Set[str]) -> None:
    """An exit that names the files that an archive lacks."""
    missing = sorted(set(names) - there)
    if missing:
        sys.exit(f"{archive.name} lacks {', '.join(missing)}: see MANIFEST.in")


def check_contents(sdist: Path, wheel: Path) -> None:
    """The source distribution has what git tracks, the wheel the package alone."""
    tracked = run("git", "ls-files").splitlines()
    tracked = [name for name in tracked if (ROOT / name).exists()]
    with tarfile.open(sdist) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    expect(tracked, sdist, names)
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    expect((x for x in tracked if x.startswith("opacus_ext")), wheel, names)
    beside = {x.split("/")[0] for x in names if not x.startswith("opacus_ext")}
    if beside:
        sys.exit(f"{wheel.name} has {', '.join(sorted(beside))} beside the package")


def try_wheel(wheel: Path, folder: Path) -> None:
    """
    Installs the wheel into a fresh environment, and runs it there.

    What it requires is that of this environment, behind the fresh one's own packages.
    """
    venv.create(folder / "venv", with_pip=True)
    scripts = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(run(scripts / "python", "-c", find).strip())
    (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n", "utf-8")
    install = "-m pip install --quiet --no-deps --force-reinstall".split()
    run(scripts / "python", *install, wheel)
    for command in (
        (scripts / "python", "-W", "ignore", "-c", INSTALLED),
        (scripts / "opacus-ext", "--version"),
        (scripts / "python", "-W", "ignore", "-m", "opacus_ext", "--version"),
    ):
        output = run(*command, folder=folder, PYTHONPATH="")
        if version() not in output.split():
            sys.exit(f"{' '.join(map(str, command))} prints {output!r}")
    budget = "calibrate --users 1e6 --epsilon 4 --batch-size 4096 --steps 10000"
    run(scripts / "opacus-ext", *budget.split(), folder=folder, PYTHONPATH="")


def try_sdist(sdist: Path, folder: Path) -> None:
    """Unpacks the source distribution, and runs some tests there."""
    with tarfile.open(sdist) as files:
        files.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-m", "pytest", "-q", *TESTS.split(), folder=unpacked)


def main(arguments: Iterable[str]) -> None:
    """Builds, unless told to keep what there is, and tries all of it."""
    if "--keep" not in arguments:
        for path in DIST.glob("opacus_ext-*"):
            path.unlink()
        run(sys.executable, "-m", "build", "--outdir", DIST)
    sdist = DIST / f"opacus_ext-{version()}.tar.gz"
    wheel = DIST / f"opacus_ext-{version()}-py3-none-any.whl"
    check_contents(sdist, wheel)
    run(sys.executable, "-m", "twine", "check", "--strict", sdist, wheel)
    with tempfile.TemporaryDirectory(prefix="with spaces ") as folder:
        try_wheel(wheel, Path(folder))
        try_sdist(sdist, Path(folder))
    print(f"{wheel.name} and {sdist.name} are complete, install and run")


if __name__ == "__main__":
    main(sys.argv[1:])
