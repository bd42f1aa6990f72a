"""Random models in random loops; see ``python -m tests.fuzz --help``."""

import argparse
import json
import logging
import sys
import time
from dataclasses import asdict

import torch

from tests import conftest  # noqa: F401  (as pytest imports it first)
from tests.fuzz.loops import Case, attempt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--stride", type=int, default=1, help="from case to case")
    parser.add_argument("--keep", help="file that failures are added to, as JSON lines")
    parser.add_argument("--only", type=int, help="run one case, with its traceback")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # failed compilations
    if args.only is not None:
        case = Case(args.only)
        print(case.describe())
        case.run()
        return 0
    end, seed = time.monotonic() + 60 * args.minutes, args.seed
    cases = unfit = failures = 0
    while time.monotonic() < end:
        found = attempt(seed)
        if found == "unfit":
            unfit += 1
        elif found is not None:
            failures += 1
            print(f"{found.kind}: seed {seed}: {found.what}\n    {found.error}")
            sys.stdout.flush()
            if args.keep:
                with open(args.keep, "a") as file:
                    file.write(json.dumps(asdict(found)) + "\n")
        cases += 1
        seed += args.stride
    print(f"{cases} cases from seed {args.seed}, {unfit} unfit, {failures} failures")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
