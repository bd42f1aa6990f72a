"""``opacus-ext fit``: fit a scaling law, and predict what was held out."""

from __future__ import annotations

import argparse
from typing import Any, Dict, Sequence, Tuple

from opacus_ext.planner.commands.output import print_result
from opacus_ext.planner.laws import LAWS, Law, private_rows
from opacus_ext.planner.measurements import EXAMPLE, Measurements, read_table
from opacus_ext.planner.surface import (
    HoldOut,
    Surface,
    continued,
    hold_out,
    scaled_options,
)
from opacus_ext.refused import Refused

#: The paper's names of the laws of private training.
PRIVATE_LAWS = {"L1": "private", "L2": "private_sigmoid"}


def run(args: argparse.Namespace) -> int:
    """Fits a law to measurements, and predicts what was held out."""
    name = PRIVATE_LAWS.get(args.law, args.law)
    if name == "surface":
        measured = read_measurements(args.measurements)
        result = fit_surface(measured, args.hold_out)
    else:
        result = _fit(args, name)
    print_result(result, args.json)
    return 0


def _fit(args: argparse.Namespace, name: str) -> Dict[str, Any]:
    if name not in LAWS:
        names = ", ".join(["surface", *PRIVATE_LAWS, *LAWS])
        raise Refused(f"--law {args.law!r} is none of {names}.", parameter="--law")
    if args.hold_out:
        raise Refused("--hold-out is for --law surface.", parameter="--hold-out")
    inputs: Dict[str, Any]
    law = LAWS[name]
    if name.startswith("private"):
        loss, inputs, _ = private_rows(read_measurements(args.measurements))
    else:
        loss, inputs = _columns(args.measurements, law)
    found = law.fit(loss, **inputs)
    result = dict(law=name, rows=found.rows, objective=found.objective)
    result |= found.parameters
    result["warnings"] = list(found.warnings)
    return result


def _columns(path: str, law: Law) -> Tuple[Any, Dict[str, Any]]:
    """A law's inputs from a table, by their names or those of Chinchilla's data."""
    aliases = {"Model Size": "parameters", "Training FLOP": "flops"}
    table = {aliases.get(name, name): x for name, x in read_table(path).items()}
    if "tokens" not in table and {"parameters", "flops"} <= table.keys():
        table["tokens"] = table["flops"] / (6 * table["parameters"])
    missing = [n for n in (law.target, *law.inputs) if n not in table]
    if missing:
        raise Refused(
            f"{path} has no column of numbers {', '.join(missing)}.",
            parameter="measurements",
            remedy=f"{law.name} needs {law.target} and {', '.join(law.inputs)}.",
        )
    return table[law.target], {name: table[name] for name in law.inputs}


def read_measurements(name: str) -> Measurements:
    """The measurements of a file, or of the package."""
    return Measurements.read(EXAMPLE if name == "example" else name)


def fit_surface(
    measured: Measurements, left_out: Sequence[Tuple[str, float]]
) -> Dict[str, Any]:
    """Ranges, errors and warnings of a surface, by name."""

    def errors(found: HoldOut) -> Dict[str, Any]:
        names = "mean error", "worst error", "readings"
        return dict(zip(names, (found.mean, found.worst, len(found.measured))))

    options: Any = scaled_options(measured)
    surface = Surface.fit(measured, **options)
    result: Dict[str, Any] = dict(law="surface", runs=len(measured))
    result |= {name: list(ends) for name, ends in surface.ranges.items()}
    held = continued(measured, **options)
    if held is not None:
        result["first quarter continued"] = errors(held)
    result["warnings"] = list(surface.warnings)
    for name, value in left_out:
        left: Any = {name: value, **options}
        result[f"without {name}={value:g}"] = errors(hold_out(measured, **left))
    return result
