"""``opacus-ext measure``: train a grid of small models, and fit a law to them."""

from __future__ import annotations

import argparse
from typing import Any, Dict

from opacus_ext.planner.commands.fit import fit_surface
from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.families import find_family
from opacus_ext.planner.measure import measure
from opacus_ext.refused import Refused

_OPTIONS = "sizes ratios learning_rates steps every batch_size warmup".split()


def run(args: argparse.Namespace) -> int:
    """Trains a grid of models, and fits a surface to the losses."""
    measured = measure(
        find_family(args.family, args.text),
        args.out,
        **{name: getattr(args, name) for name in _OPTIONS},
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        progress=not args.no_progress,
    )
    last = measured.select(measured.steps == measured.steps.max())
    names = "parameters", "ratio", "learning_rate", "steps", "loss"
    columns = zip(*(getattr(last, name) for name in names))
    rows = [dict(zip(names, row)) for row in columns]
    summary: Dict[str, Any] = {"runs": len(measured), "file": args.out, "last": rows}
    try:
        summary["fit"] = fit_surface(measured, [])
    except Refused as error:
        summary["fit"] = {"refused": str(error)}
    print_result(summary, args.json)
    return 0
