"""Runs one program, and saves the weights that it has trained."""

import argparse
import sys

import torch

from tests.clients import PROGRAMS_BY_NAME


def reseed_after_make_private():
    """Both processes draw the same samples: the package's noise takes a seed first."""
    from opacus import PrivacyEngine

    theirs = PrivacyEngine.make_private

    def make_private(*args, **kwargs):
        private = theirs(*args, **kwargs)
        torch.manual_seed(1)
        return private

    PrivacyEngine.make_private = make_private


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.clients")
    parser.add_argument("name", choices=sorted(PROGRAMS_BY_NAME))
    parser.add_argument("--with-opacus-ext", action="store_true")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.with_opacus_ext:
        import opacus_ext  # noqa: F401  (importing it is what is tested)
    reseed_after_make_private()
    torch.manual_seed(0)
    before, after = PROGRAMS_BY_NAME[options.name]()
    assert ("opacus_ext" in sys.modules) is options.with_opacus_ext
    torch.save({"before": before, "after": after}, options.out)


if __name__ == "__main__":
    main()
