"""``opacus-ext fit``, ``measure``, ``calibrate`` and ``optimal``."""

from __future__ import annotations

import argparse
from itertools import product
from typing import Any, Dict, Sequence, Tuple

import numpy as np

from opacus_ext.accountants.calibration import calibrate as calibrated
from opacus_ext.data.sampling import Poisson
from opacus_ext.planner.budget import default_delta
from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.laws import LAWS, Law, private_rows
from opacus_ext.planner.measurements import EXAMPLE, Measurements, read_table
from opacus_ext.planner.noise import six_digits, verified_noise
from opacus_ext.planner.optimum import optima
from opacus_ext.planner.surface import (
    HoldOut,
    Surface,
    continued,
    hold_out,
    scaled_options,
)
from opacus_ext.progress import progress
from opacus_ext.refused import Refused

#: The paper's names of the laws of private training.
PRIVATE_LAWS = {"L1": "private", "L2": "private_sigmoid"}


def calibrate(args: argparse.Namespace) -> int:
    """Prints the noise for each budget, batch size and number of steps."""
    rows = []
    examples = args.records_per_user if args.sampling == "records" else 1
    cells = list(product(args.users, args.epsilon, args.batch_size, args.steps))
    for users, epsilon, batch, steps in progress(cells, "calibrating noise"):
        delta = args.delta or default_delta(users)
        found = calibrated(
            epsilon,
            delta,
            steps,
            batch,
            users,
            amplification=args.amplification,
            records_per_user=args.records_per_user,
            sampling=args.sampling,
        )
        noise = float(found.noise_multiplier)
        if found.amplified and noise and args.sampling == "users":
            spent = steps, epsilon, delta
            drawn = Poisson(expected_batch_size=batch, steps=steps)
            noise = verified_noise(noise, drawn, int(users), *spent)
        noise = six_digits(noise)
        cell = dict(users=users, epsilon=epsilon, delta=delta)
        cell |= dict(batch_size=batch, steps=steps)
        cell["sample_rate"] = batch / (users * examples)
        cell["noise_multiplier"] = noise if args.json else repr(noise)
        rows.append({**cell, "ratio": noise / batch, "amplified": found.amplified})
    print_result(rows, args.json)
    return 0


def measure(args: argparse.Namespace) -> int:
    """Trains a grid of models, and fits a surface to the losses."""
    from opacus_ext.planner import measure as module  # with torch

    names = (
        "sizes ratios learning_rates steps every batch_size warmup max_grad_norm seed"
    )
    measured = module.measure(
        module.find_family(args.family, args.text),
        args.out,
        **{name: getattr(args, name) for name in names.split()},
        progress=not args.no_progress,
    )
    last = measured.select(measured.steps == measured.steps.max())
    columns = "parameters ratio learning_rate steps loss".split()
    values = zip(*(getattr(last, name) for name in columns))
    rows = [dict(zip(columns, row)) for row in values]
    summary: Dict[str, Any] = {"runs": len(measured), "file": args.out, "last": rows}
    try:
        summary["fit"] = _fit_surface(measured)
    except Refused as error:
        summary["fit"] = {"refused": str(error)}
    print_result(summary, args.json)
    return 0


def fit(args: argparse.Namespace) -> int:
    """Fits a law to measurements, and predicts what was held out."""
    name = PRIVATE_LAWS.get(args.law, args.law)
    if args.drop and (name == "surface" or name in PRIVATE_LAWS.values()):
        raise Refused("--drop is for laws without noise.", parameter="--drop")
    if name == "surface":
        result = _fit_surface(read_measurements(args.measurements), args.hold_out)
    elif name not in LAWS:
        names = ", ".join(["surface", *PRIVATE_LAWS, *LAWS])
        raise Refused(f"--law {args.law!r} is none of {names}.", parameter="--law")
    elif args.hold_out:
        raise Refused("--hold-out is for --law surface.", parameter="--hold-out")
    else:
        law = LAWS[name]
        loss, inputs = _rows(args.measurements, law, args.drop or 0)
        found = law.fit(loss, **inputs)
        error = abs(found.predict(**inputs) / loss - 1)
        result = dict(law=name, rows=found.rows, objective=found.objective)
        result |= {"mean error": error.mean(), "worst error": error.max()}
        result |= {**found.parameters, "warnings": found.warnings}
    print_result(result, args.json)
    return 0


def optimal(args: argparse.Namespace) -> int:
    """Prints the best size and tokens for a compute by each published law."""
    rows = []
    for flops in args.flops:
        for law, best in optima(flops).items():
            row = {name: float(value) for name, value in best._asdict().items()}
            row["tokens_per_parameter"] = row["tokens"] / row["parameters"]
            rows.append({"flops": flops, "law": law, **row})
    print_result(rows, args.json)
    return 0


def _rows(path: str, law: Law, drop: int = 0) -> Tuple[Any, Dict[str, Any]]:
    """
    A law's target and inputs; of tables, by their names or Chinchilla's data's, without
    the runs of fewest tokens a parameter to be dropped.
    """
    if "ratio" in law.inputs:
        return private_rows(read_measurements(path))
    aliases = {"Model Size": "parameters", "Training FLOP": "flops"}
    table = {aliases.get(name, name): x for name, x in read_table(path).items()}
    if "tokens" not in table and {"parameters", "flops"} <= table.keys():
        table["tokens"] = table["flops"] / (6 * table["parameters"])
    missing = {law.target, *law.inputs} - table.keys()
    if missing:
        raise Refused(
            f"{path} has no column of numbers {', '.join(sorted(missing))}.",
            parameter="measurements",
            remedy=f"{law.name} needs {law.target} and {', '.join(law.inputs)}.",
        )
    kept = slice(None)
    if drop:
        kept = _all_but_fewest_tokens(path, table, drop)
    return table[law.target][kept], {name: table[name][kept] for name in law.inputs}


def _all_but_fewest_tokens(path: str, table: Dict[str, Any], drop: int) -> Any:
    """The rows of a table but for those of fewest tokens a parameter."""
    if not {"parameters", "tokens"} <= table.keys():
        raise Refused(
            f"{path} has no columns parameters and tokens, by which runs are dropped.",
            parameter="--drop",
            remedy="Fit without --drop.",
        )
    if drop >= len(table["tokens"]):
        raise Refused(
            f"--drop {drop} leaves none of the {len(table['tokens'])} rows of {path}.",
            parameter="--drop",
            remedy="Drop fewer.",
        )
    return np.sort(np.argsort(table["tokens"] / table["parameters"])[drop:])


def read_measurements(name: str) -> Measurements:
    """The measurements of a file, or of the package."""
    return Measurements.read(EXAMPLE if name == "example" else name)


def _fit_surface(
    measured: Measurements, left_out: Sequence[Tuple[str, float]] = ()
) -> Dict[str, Any]:
    """Ranges, errors and warnings of a surface, by name."""

    def errors(held: HoldOut) -> Dict[str, Any]:
        values = held.mean, held.worst, len(held.measured)
        return dict(zip(("mean error", "worst error", "readings"), values))

    options: Any = scaled_options(measured)
    surface = Surface.fit(measured, **options)
    result: Dict[str, Any] = dict(law="surface", runs=len(measured), **surface.ranges)
    held = continued(measured, **options)
    if held is not None:
        result["first quarter continued"] = errors(held)
    result["warnings"] = surface.warnings
    for name, value in left_out:
        held = hold_out(measured, **{name: value, **options})
        result[f"without {name}={value:g}"] = errors(held)
    return result
