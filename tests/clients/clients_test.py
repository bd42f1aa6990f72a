"""Oracle: the same program without the package, in a process of its own."""

import os
import subprocess
import sys

import pytest
import torch

from tests.clients import PROGRAMS_BY_NAME

pytestmark = pytest.mark.clients


# What is refused with the package, by the words that tell what to do.
REFUSED = {"imdb": r"squeeze\(-1\)"}


def trained(name, folder, *options):
    out = folder / f"{name}{len(options)}.pt"
    command = [sys.executable, "-W", "ignore", "-m", "tests.clients", name, *options]
    offline = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(out)], capture_output=True, text=True, env=offline
    )
    assert not done.returncode, done.stderr[-3000:]
    return torch.load(out)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name, tmp_path):
    trained(name, tmp_path)
    with pytest.raises(AssertionError, match=REFUSED[name]):
        trained(name, tmp_path, "--with-opacus-ext")


@pytest.mark.parametrize("name", [x for x in PROGRAMS_BY_NAME if x not in REFUSED])
def test_trains_the_same(name, tmp_path):
    alone = trained(name, tmp_path)
    beside = trained(name, tmp_path, "--with-opacus-ext")
    before, after = alone["before"], alone["after"]
    assert after.keys() == beside["after"].keys()
    if before is not None:  # a program that trains nothing compares nothing
        assert any(
            not torch.equal(old, new)
            for old, new in zip(before.values(), after.values())
        )
    for weight, expected in after.items():
        torch.testing.assert_close(
            beside["after"][weight], expected, rtol=1e-4, atol=1e-5, msg=weight
        )
