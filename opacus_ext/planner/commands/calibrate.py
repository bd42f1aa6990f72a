"""``opacus-ext calibrate``: the noise of a privacy budget."""

from __future__ import annotations

import argparse
from itertools import product

from opacus_ext.accountants import calibration
from opacus_ext.planner.commands.output import print_result
from opacus_ext.progress import progress


def run(args: argparse.Namespace) -> int:
    """Prints the noise for each budget, batch size and number of steps."""
    rows = []
    examples = args.records_per_user if args.sampling == "records" else 1
    cells = list(product(args.users, args.epsilon, args.batch_size, args.steps))
    for users, epsilon, batch, steps in progress(cells, "calibrating noise"):
        found = calibration.calibrate(
            epsilon,
            args.delta,
            steps,
            batch,
            users,
            amplification=args.amplification,
            records_per_user=args.records_per_user,
            sampling=args.sampling,
        )
        rows.append(
            dict(
                users=users,
                epsilon=epsilon,
                delta=args.delta,
                batch_size=batch,
                steps=steps,
                sample_rate=batch / (users * examples),
                noise_multiplier=float(found.noise_multiplier),
                ratio=float(found.ratio),
                amplified=bool(found.amplified),
            )
        )
    print_result(rows, args.json)
    return 0
