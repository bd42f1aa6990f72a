"""The command ``opacus-ext``: plan, calibrate, measure, fit, check.

What a command needs is imported when it runs: ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from itertools import product
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Tuple

from opacus_ext.refused import Refused

EPILOG = {
    None: """examples:
  opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
  opacus-ext calibrate --users 1e6 --epsilon 1,4,16 --batch-size 4096 --steps 10000
  opacus-ext measure --text input.txt --out runs.jsonl
  opacus-ext fit runs.jsonl
  opacus-ext check ./my-checkpoint

Each command tells more: opacus-ext plan --help""",
    "plan": """examples:
  no private run was measured: noise, and a bound on the loss
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
  by the measurements that come with the package (tiny models of bytes)
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e15 --measurements example
  by your own; a table over budgets, for a program
    opacus-ext plan --users 1e5:1e7:3 --epsilon 1,4,16 --measurements runs.jsonl --json
  what a choice that someone made would lose
    opacus-ext plan --users 1e7 --epsilon 4 --flops 1e15 --measurements example \\
        --baseline 1e6,256,700

A number is a list (1,4,16) or a range (1:64:4, four values from 1 to 64 in equal
ratios), where "ranges" is said; a bound is LOW:HIGH, or one number.""",
    "calibrate": """examples:
  opacus-ext calibrate --users 1e6 --epsilon 4 --batch-size 4096 --steps 10000
  opacus-ext calibrate --users 1e5,1e6 --epsilon 1:64:4 --batch-size 1e3:1e5:3 \\
      --steps 16000 --delta 1e-8 --json""",
    "measure": """examples:
  opacus-ext measure --text input.txt --out runs.jsonl
  opacus-ext measure --text input.txt --out runs.jsonl --sizes 16x2,64x2 \\
      --ratios 0,0.001,0.03 --learning-rates 0.003,0.01 --steps 700
  opacus-ext measure --family my_package.my_module:family --out runs.jsonl

Stopped, the same command goes on. The runs are not private in the text.""",
    "fit": """examples:
  opacus-ext fit example
  opacus-ext fit runs.jsonl --hold-out parameters=366336 --hold-out ratio=0.0625
  opacus-ext fit runs.jsonl --law L2 --bootstrap 100
  opacus-ext fit chinchilla.csv --law chinchilla --drop 5""",
    "check": """examples:
  opacus-ext check ./my-checkpoint              a folder of transformers
  opacus-ext check my_package.my_module:case    returns model, batch, loss_fn

The status is 0 if every mode is exact, else 1.""",
}


# The paper's names of the laws of private training.
PRIVATE = {"L1": "private", "L2": "private_sigmoid"}

# -- arguments ---------------------------------------------------------------------


def number(
    low: float = 0, high: float = math.inf, *, whole: bool = False, above: bool = False
) -> Callable[[str], float]:
    """
    A type for argparse: a number of a range, as "4", "1e6" or "inf".

    Args:
        low, high: the range, with its ends
        whole: only whole numbers
        above: without its low end

    Example:
        >>> number(1, whole=True)("1e6")
        1000000
    """

    def parse(text: str) -> float:
        kind = "a whole number" if whole else "a number"
        least = f"above {low:g}" if above else f"{low:g} or more"
        most = "" if high == math.inf else f", at most {high:g}"
        message = f"{text!r} is not {kind}, {least}{most}"
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(message) from None
        fits = low < value <= high if above else low <= value <= high
        if not fits or (whole and (value == math.inf or value != int(value))):
            raise argparse.ArgumentTypeError(message)
        return int(value) if whole else value

    return parse


def numbers(*args: Any, **kwargs: Any) -> Callable[[str], List[float]]:
    """
    A type for argparse: several numbers, as "1,4,16" or "LOW:HIGH:COUNT".

    Example:
        >>> numbers()("1:64:4")
        [1.0, 4.0, 16.0, 64.0]
    """
    one = number(*args, **kwargs)

    def parse(text: str) -> List[float]:
        if ":" not in text:
            return [one(part) for part in text.split(",")]
        parts = text.split(":")
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH:COUNT")
        low, high = one(parts[0]), one(parts[1])
        count = int(number(2, 1000, whole=True)(parts[2]))
        if not 0 < low < high < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} does not go from low to high")
        ratio = (high / low) ** (1 / (count - 1))
        values = [low * ratio**i for i in range(count - 1)] + [high]
        rounded = [float(f"{v:.6g}") for v in values]
        return [one(str(round(v) if kwargs.get("whole") else v)) for v in rounded]

    return parse


def bounds(*args: Any, **kwargs: Any) -> Callable[[str], Tuple[float, float]]:
    """
    A type for argparse: LOW:HIGH, or one number for both.

    Example:
        >>> bounds()("1e3:1e5"), bounds()("7")
        ((1000.0, 100000.0), (7.0, 7.0))
    """
    one = number(*args, **kwargs)

    def parse(text: str) -> Tuple[float, float]:
        parts = [one(part) for part in text.split(":")]
        if len(parts) > 2 or parts[0] > parts[-1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
        return parts[0], parts[-1]

    return parse


def _words(text: str) -> List[str]:
    return [word for word in text.split(",") if word]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``."""
    parser = _parser(argparse.ArgumentParser, None, prog="opacus-ext")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text, add, run in (
        ("plan", "model size, batch size, steps and noise for a budget", _plan, plan),
        ("calibrate", "noise for a privacy budget", _calibrate, calibrate),
        ("measure", "train a grid of small models with noise", _measure, measure),
        ("fit", "fit a scaling law to measurements", _fit, fit),
        ("check", "compare per-sample gradients with autograd", _check, check),
    ):
        sub = _parser(commands.add_parser, name, name=name, help=text, description=text)
        add(sub.add_argument)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(run=run, parser=sub)
    return parser


def _parser(make: Callable, command: Optional[str], **kwargs: Any) -> Any:
    args = [kwargs.pop("name")] if "name" in kwargs else []
    return make(
        *args,
        epilog=EPILOG[command],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **kwargs,
    )


def _budget(add: Callable) -> None:
    add("--users", required=True, type=numbers(1, 1e15), help="N, people; ranges")
    add(
        "--epsilon",
        required=True,
        type=numbers(0, 1e6, above=True),
        help="of the whole run; ranges",
    )
    add(
        "--delta",
        default=1e-8,
        type=number(0, 0.5, above=True),
        help="of the whole run (default 1e-8)",
    )
    add(
        "--records-per-user",
        default=1,
        type=number(1, whole=True),
        help="examples that a user has (default 1)",
    )
    add(
        "--sampling",
        default="users",
        choices=("users", "records"),
        help="what a step draws; with records, users are protected in all of theirs",
    )
    add(
        "--amplification",
        default="lower",
        choices=("lower", "poisson", "none"),
        help="Poisson batches, fixed ones, or the lower noise of both (default)",
    )


def _plan(add: Callable) -> None:
    _budget(add)
    add(
        "--flops",
        default=[math.inf],
        type=numbers(0, above=True),
        help="C, of the whole training; ranges (default: as much as helps)",
    )
    add(
        "--tokens",
        type=number(1, whole=True),
        help="S, tokens of an example (default: of the measurements, or 512)",
    )
    add(
        "--measurements",
        metavar="FILE",
        help='of private runs, by "measure"; "example": those of the package',
    )
    add(
        "--law",
        default="surface",
        choices=("surface", "L1", "L2"),
        help="what is fitted to them (default surface)",
    )
    add(
        "--bootstrap",
        default=0,
        type=number(0, 10000, whole=True),
        help="resamples for a 95 %% interval of the loss (surface; default 0: none)",
    )
    add("--parameters", type=bounds(1), help="M, bounds of the model size")
    add("--batch-size", type=bounds(1, whole=True), help="B, bounds, in examples")
    add("--steps", type=bounds(1, whole=True), help="T, bounds")
    add(
        "--noise-norm",
        default=0.2,
        type=number(0, above=True),
        help="without measurements: largest norm of the noise in the mean of clipped "
        "gradients, whose norm is 1 at most (default 0.2)",
    )
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="M,B,T",
        type=_baseline,
        help="a configuration to compare with; may be repeated",
    )
    add("--seconds", type=number(0, above=True), help="bound on time, on this machine")
    add("--memory", type=number(0, above=True), help="bound on bytes, on this machine")
    add("--family", default="bytes", help="what to time: module:function")
    add("--text", help="what to time byte transformers on")
    add("--device", default="cpu", help="where to time (default cpu)")


def _baseline(text: str) -> Tuple[float, ...]:
    values = tuple(number(1)(part) for part in text.split(","))
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not PARAMETERS,BATCH_SIZE,STEPS")
    return values


def _calibrate(add: Callable) -> None:
    _budget(add)
    add(
        "--batch-size",
        required=True,
        type=numbers(1),
        help="B, expected, at most all users; ranges",
    )
    add("--steps", required=True, type=numbers(1, 1e9, whole=True), help="T; ranges")


def _measure(add: Callable) -> None:
    add("--out", required=True, metavar="FILE", help="runs are appended, one a line")
    add("--text", help="the text of byte transformers")
    add("--family", default="bytes", help='"bytes", or module:function')
    add("--sizes", type=_words, help="names of sizes (default: all of the family)")
    add(
        "--ratios",
        default=[0.0] + [2.0**-k for k in (12, 10, 8, 6, 4, 2)],
        type=numbers(0, 1e6),
        help="noise-batch ratios, 0 for noise-free (default 0, 2^-12, 2^-10 ... 2^-2)",
    )
    add(
        "--learning-rates",
        default=[0.003],
        type=numbers(0, 10, above=True),
        help="of Adam (default 0.003)",
    )
    for flag, default, text in (
        ("--steps", 1000, "T of a run"),
        ("--every", 20, "steps between two readings"),
        ("--batch-size", 32, "the physical batch"),
        ("--warmup", 20, "steps until the learning rate is reached"),
    ):
        kind = number(1, whole=True)
        add(flag, default=default, type=kind, help=f"{text} (default {default})")
    add(
        "--max-grad-norm",
        default=0.1,
        type=number(0, 1e6, above=True),
        help="(default .1)",
    )
    add("--seed", default=0, type=number(0, 2**63, whole=True), help="(default 0)")
    add("--no-progress", action="store_true", help="no progress bar")


def _fit(add: Callable) -> None:
    add("measurements", help='a file of "measure", a table (CSV), or "example"')
    add(
        "--law",
        default="surface",
        help="surface (default), L1, L2 of private training; chinchilla, "
        "kaplan_parameters_tokens and the others of opacus_ext.planner.laws",
    )
    add(
        "--hold-out",
        action="append",
        default=[],
        type=_held_out,
        metavar="NAME=VALUE",
        help="fit without a model size (parameters) or ratio, and predict it",
    )
    add(
        "--bootstrap",
        default=0,
        type=number(0, 10000, whole=True),
        help="resamples for 95 %% intervals (default 0: none)",
    )
    add(
        "--drop",
        default=0,
        type=number(0, whole=True),
        help="leave out so many rows of the fewest tokens a parameter (default 0)",
    )


def _held_out(text: str) -> Tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in ("parameters", "ratio"):
        raise argparse.ArgumentTypeError(f"{text!r} is not parameters=... or ratio=...")
    return name, number(0)(value)


def _check(add: Callable) -> None:
    add("target", help="a folder of transformers, or module:function")
    add(
        "--modes",
        default=["hooks", "ghost", "ghost_bk"],
        type=_words,
        help="of hooks, ghost, ghost_bk (default all)",
    )
    add("--batch-size", default=3, type=number(1, 64, whole=True), help="(default 3)")
    add("--length", default=12, type=number(2, whole=True), help="tokens (default 12)")
    add("--float32", action="store_true", help="compare in float32, not in float64")


# -- commands ----------------------------------------------------------------------


def plan(args: argparse.Namespace) -> int:
    """Plans each budget of a grid of budgets."""
    from opacus_ext.planner.plan import Budget, Candidates

    law, notes = _law(args)
    probed = _probe(args)
    tokens = args.tokens or law.tokens or 512
    rows: List[Dict[str, Any]] = []
    for users, epsilon in product(args.users, args.epsilon):
        budget = Budget(
            users,
            epsilon,
            args.delta,
            math.inf,
            tokens,
            args.parameters,
            args.batch_size,
            args.steps,
            args.seconds or math.inf,
            args.memory or math.inf,
            args.records_per_user,
            args.sampling,
            args.amplification,
        )
        table = Candidates(budget, law, probed)
        rows += [_planned(args, table, flops) for flops in args.flops]
    if args.delta * max(args.users) > 1:
        notes.append(
            f"delta={args.delta:g} is more than one in {max(args.users):g} users; a "
            "smaller one is usual."
        )
    if any(row["steps"] > law.measured_steps for row in rows):
        notes.append(
            f"Runs were measured for {law.measured_steps:g} steps; what is beyond is "
            "extrapolated. Measure longer, or bound --steps."
        )
    if not law.private and any(r["noise_norm"] > args.noise_norm for r in rows):
        notes.append(
            "Where the noise norm is more than --noise-norm, no configuration has less "
            "noise: the model will learn little. More epsilon, users or compute help."
        )
    if args.json:
        _print_json({"law": law.source, "notes": notes, "plans": rows})
    elif len(rows) == 1:
        print(_one_plan(rows[0], law, notes))
    else:
        print(_many_plans(rows, law, notes))
    return 0


def _law(args: argparse.Namespace) -> Tuple[Any, List[str]]:
    from opacus_ext.planner.laws import CHINCHILLA, LAWS, private_rows
    from opacus_ext.planner.plan import LossModel
    from opacus_ext.planner.surface import Surface, scaled_options

    if args.measurements is None:
        law = LossModel.bound(CHINCHILLA, args.tokens or 512, args.noise_norm)
        return law, [
            "No private training of your family of models was measured. The loss "
            "below is a bound: what is known of training without privacy, at a size "
            "whose noise stays small. How much worse it is, only measuring tells: "
            "opacus-ext measure --help"
        ]
    measured = _read(args.measurements)
    source = f"{args.measurements}, {len(measured)} runs of {measured.family!r}"
    meta = measured.tokens, measured.batch_size
    if args.law == "surface":
        options = scaled_options(measured)
        surface = Surface.fit(measured, bootstrap=args.bootstrap, **options)
        return LossModel.of_surface(surface, source, *meta), []
    loss, inputs, groups = private_rows(measured)
    fitted = LAWS[PRIVATE[args.law]].fit(loss, groups=groups, **inputs)
    sizes = measured.sizes[0], measured.sizes[-1]
    steps = measured.steps.min(), measured.steps.max()
    return LossModel.of_fit(fitted, sizes, steps, *meta), list(fitted.warnings)


def _read(name: str) -> Any:
    from opacus_ext.planner.measurements import EXAMPLE, Measurements

    return Measurements.read(EXAMPLE if name == "example" else name)


def _probe(args: argparse.Namespace) -> Any:
    if args.seconds is None and args.memory is None and args.text is None:
        return None
    from opacus_ext.planner.families import find_family
    from opacus_ext.planner.probe import probe

    return probe(find_family(args.family, args.text), device=args.device)


def _planned(args: argparse.Namespace, table: Any, flops: float) -> Dict[str, Any]:
    """A plan and what belongs to it, as JSON has it."""
    from dataclasses import replace

    from opacus_ext.planner.plan import doubled_loss, doubled_noise

    found = table.best(flops)
    near = table.near(flops)
    saturating = table.saturating()
    budget = replace(table.budget, flops=flops)
    about = table.by_batch_size(flops, within=0.05, most=9)
    row = found.as_dict()
    row["near_optimal"] = near._asdict()
    row["saturating"] = {
        name: getattr(saturating, name)
        for name in ("flops", "loss", "parameters", "batch_size", "steps")
    }
    row["doubling"] = {
        "loss": doubled_loss(budget, table.law, table.probe)[1]._asdict(),
        "noise_batch_ratio": doubled_noise(found),
    }
    without = table.not_private(found.flops)
    row["not_private"] = without and without._asdict()
    row["same_epsilon"] = [
        {
            name: getattr(p, name)
            for name in ("parameters", "batch_size", "steps", "loss", "advantage")
        }
        for p in about
    ]
    row["baselines"] = [
        dict(zip(("parameters", "batch_size", "steps"), b))
        | (saved := table.savings(*b))._asdict()
        | {"saved": saved.share}
        for b in args.baseline
    ]
    return row


def calibrate(args: argparse.Namespace) -> int:
    """Noise for each budget, batch size and number of steps."""
    from opacus_ext.planner import calibration

    rows = []
    examples = args.records_per_user if args.sampling == "records" else 1
    for users, epsilon, batch, steps in product(
        args.users, args.epsilon, args.batch_size, args.steps
    ):
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
    if args.json:
        _print_json(rows)
    else:
        print(_table(rows))
    return 0


def measure(args: argparse.Namespace) -> int:
    """Trains a grid of models, and fits a law to the losses."""
    from opacus_ext.planner.families import find_family
    from opacus_ext.planner.measure import measure as run

    measured = run(
        find_family(args.family, args.text),
        args.out,
        sizes=args.sizes,
        ratios=args.ratios,
        learning_rates=args.learning_rates,
        steps=args.steps,
        every=args.every,
        batch_size=args.batch_size,
        warmup=args.warmup,
        max_grad_norm=args.max_grad_norm,
        seed=args.seed,
        progress=not args.no_progress,
    )
    last = measured.select(measured.steps == measured.steps.max())
    rows = [
        dict(parameters=m, ratio=r, learning_rate=rate, steps=t, loss=loss)
        for m, r, rate, t, loss in zip(
            last.parameters, last.ratio, last.learning_rate, last.steps, last.loss
        )
    ]
    summary: Dict[str, Any] = {"runs": len(measured), "file": args.out, "last": rows}
    try:
        summary["fit"] = _fitted_surface(measured, [])
    except ValueError as error:
        summary["fit"] = {"refused": str(error)}
    if args.json:
        _print_json(summary)
    else:
        print(_table(rows))
        print(_pairs(summary["fit"]))
        print(f"Plan by them: opacus-ext plan --measurements {args.out} ...")
    return 0


def fit(args: argparse.Namespace) -> int:
    """Fits a law to measurements, and predicts what was held out."""
    name = PRIVATE.get(args.law, args.law)
    if name == "surface":
        result = _fitted_surface(
            _read(args.measurements), args.hold_out, args.bootstrap
        )
    else:
        from opacus_ext.planner.laws import LAWS, private_rows

        if name not in LAWS:
            raise Refused(
                f"--law {args.law!r} is none of "
                f"{', '.join(['surface', *PRIVATE, *LAWS])}."
            )
        law = LAWS[name]
        if args.hold_out:
            raise Refused("--hold-out is for --law surface.")
        if name.startswith("private"):
            loss, inputs, groups = private_rows(_read(args.measurements))
        else:
            loss, inputs = _columns(args.measurements, law, args.drop)
            groups = None
        found = law.fit(loss, bootstrap=args.bootstrap, groups=groups, **inputs)
        result = dict(law=name, rows=found.rows, objective=found.objective)
        result |= found.parameters
        if args.bootstrap:
            result["intervals"] = found.intervals()
        result["warnings"] = list(found.warnings)
    if args.json:
        _print_json(result)
    else:
        print(_pairs(result))
    return 0


def _fitted_surface(
    measured: Any, held: Sequence[Tuple[str, float]], bootstrap: int = 0
) -> Dict[str, Any]:
    from opacus_ext.planner.surface import Surface, hold_out, scaled_options

    options = scaled_options(measured)
    surface = Surface.fit(measured, bootstrap=bootstrap, **options)
    result: Dict[str, Any] = dict(law="surface", runs=len(measured))
    result |= {name: list(ends) for name, ends in surface.ranges.items()}
    if bootstrap:
        last = surface.ranges["measured_steps"][1]
        at = surface.parameters[:, None], last, surface.ratio
        low, high = surface.interval(*at)
        width = (high - low) / surface.loss(*at) / 2
        result["95 % interval"] = (
            f"+-{width.mean():.2%} of the loss in the mean, +-{width.max():.2%} at "
            f"most (after {last:g} steps, of {surface.resampled})"
        )
    for name, value in held:
        found = hold_out(measured, **{name: value}, **options)
        result[f"without {name}={value:g}"] = {
            "mean error": found.mean,
            "worst error": found.worst,
            "readings": len(found.measured),
        }
    return result


def _columns(path: str, law: Any, drop: int) -> Tuple[Any, Dict[str, Any]]:
    """A law's inputs from a table: by their names, or those of Chinchilla's data."""
    import csv

    import numpy as np

    with Path(path).open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        raise Refused(f"{path} has no rows.")
    aliases = {"Model Size": "parameters", "Training FLOP": "flops"}
    table = {}
    for name in rows[0]:
        try:
            table[aliases.get(name, name)] = np.array([float(r[name]) for r in rows])
        except (TypeError, ValueError):
            continue  # a column of words
    if "tokens" not in table and {"parameters", "flops"} <= table.keys():
        table["tokens"] = table["flops"] / (6 * table["parameters"])
    missing = [n for n in (law.target, *law.inputs) if n not in table]
    if missing:
        raise Refused(
            f"{path} has no column of numbers {', '.join(missing)}; {law.name} takes "
            f"{law.target} and {', '.join(law.inputs)}."
        )
    keep = slice(None)
    if drop:
        if not {"tokens", "parameters"} <= table.keys() or drop >= len(rows):
            raise Refused(f"--drop {drop}: not so many rows of tokens a parameter.")
        keep = np.argsort(table["tokens"] / table["parameters"])[drop:]
    inputs = {name: table[name][keep] for name in law.inputs}
    return table[law.target][keep], inputs


def check(args: argparse.Namespace) -> int:
    """Per-sample gradients of a model against single samples; what mixes samples."""
    import torch

    from opacus_ext import check_per_sample_gradients, find_leaks

    path = Path(args.target)
    if path.is_dir():
        model, batch, loss = _checkpoint(path, args.batch_size, args.length)
    elif ":" in args.target:
        model, batch, loss = _case(args.target)
    else:
        raise Refused(
            f"target {args.target!r} is neither a folder nor module:function."
        )
    report = check_per_sample_gradients(
        model,
        batch,
        loss,
        modes=tuple(args.modes),
        dtype=torch.float32 if args.float32 else torch.float64,
        verbose=False,
    )
    leaks = find_leaks(
        model, batch, None if isinstance(loss, torch.nn.Module) else loss
    )
    if args.json:
        cells = {
            name: {mode: str(cell) for mode, cell in row.items()}
            for name, row in report.cells.items()
        }
        _print_json(
            dict(
                ok=report.ok and not leaks,
                parameters=cells,
                refused=report.refused,
                findings=report.findings,
                leaks=[str(leak) for leak in leaks],
            )
        )
    else:
        print(report)
        for leak in leaks:
            print(f"! {leak}")
    return 0 if report.ok and not leaks else 1


def _case(name: str) -> Tuple[Any, Any, Any]:
    from importlib import import_module

    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        case = getattr(import_module(module), function)()
    except (ImportError, AttributeError, TypeError) as error:
        raise Refused(f"target {name!r} is not to be had: {error}.") from error
    finally:
        sys.path.remove("")
    if not isinstance(case, Iterable) or len(case := list(case)) != 3:
        raise Refused(f"target {name!r} must return a model, a batch and a loss_fn.")
    return tuple(case)


def _checkpoint(path: Path, batch_size: int, length: int) -> Tuple[Any, Any, Any]:
    """A model of transformers from a folder, and random tokens of several lengths."""
    import torch
    import transformers

    from opacus_ext.losses import model_losses

    config = transformers.AutoConfig.from_pretrained(path)
    names = config.architectures or []
    found = [getattr(transformers, n) for n in names if hasattr(transformers, n)]
    if not found:
        raise Refused(
            f"target {path}: its config names no class of transformers under "
            f"architectures ({names})."
        )
    model = found[0].from_pretrained(path)
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (batch_size, length))
    if hasattr(model, "score") or "Classification" in names[0]:
        labels = torch.arange(batch_size) % config.num_labels
    else:
        labels = ids.clone()
        labels[-1, length // 2 :] = -100
    batch = {"input_ids": ids, "labels": labels}
    return model, batch, lambda model, batch: model_losses(model, batch)


# -- output ------------------------------------------------------------------------


def _print_json(content: Any) -> None:
    def plain(x: Any) -> Any:
        if isinstance(x, dict):
            return {str(k): plain(v) for k, v in x.items()}
        if isinstance(x, (list, tuple)):
            return [plain(v) for v in x]
        if hasattr(x, "item"):
            x = x.item()
        if isinstance(x, float) and not math.isfinite(x):
            return None  # JSON has no inf and no nan
        return x

    print(json.dumps(plain(content), indent=2))


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple)):
        return " to ".join(map(_show, value)) if len(value) == 2 else str(list(value))
    if isinstance(value, dict):
        return ", ".join(f"{k} {_show(v)}" for k, v in value.items())
    if not isinstance(value, (int, float)):
        return "-" if value is None else str(value)
    if not math.isfinite(value):
        return "-"
    if float(value).is_integer() and abs(value) < 1e6:
        return f"{int(value):,}"
    return f"{value:.4g}"


def _pairs(values: Dict[str, Any]) -> str:
    width = max(map(len, values)) + 2
    return "\n".join(f"{name:{width}}{_show(v)}" for name, v in values.items())


def _table(rows: Sequence[Dict[str, Any]]) -> str:
    if not rows:
        return ""
    lines = [list(rows[0])] + [[_show(v) for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths))
        for line in lines
    )


def _one_plan(row: Dict[str, Any], law: Any, notes: Sequence[str]) -> str:
    budget, near, more = row["budget"], row["near_optimal"], row["doubling"]
    sampling = (
        "Poisson samples" if row["amplified"] else "fixed, every one once an epoch"
    )
    least = "" if row["private_law"] else "at least "
    interval = f", 95 %: {_show(row['interval'])}" if row["interval"] else ""
    sections: List[str] = [
        _pairs(
            {
                "budget": f"{_show(budget['users'])} users, epsilon "
                f"{_show(budget['epsilon'])}, delta {_show(budget['delta'])}, "
                + (f"{budget['flops']:.3g} FLOPs" if budget["flops"] else "any compute")
                + f", {budget['tokens']} tokens an example",
                "law": law.source,
            }
        ),
        *(f"! {note}" for note in notes),
        "",
        _pairs(
            {
                "parameters": f"{row['parameters']:,}",
                "batch size": f"{row['batch_size']:,} ({sampling})",
                "steps": f"{row['steps']:,}",
                "compute": f"{row['flops']:.3g} FLOPs",
                "tokens a parameter": _show(row["tokens_per_parameter"]),
                "noise multiplier": _show(row["noise_multiplier"]),
                "noise-batch ratio": _show(row["ratio"])
                + f" (norm of the noise {_show(row['noise_norm'])})",
                "loss": (
                    f"{least}{_show(row['loss'])} nats a token{interval}"
                    if row["loss"] < math.inf
                    else "not to be told: too much noise"
                ),
                "membership advantage": f"{_show(row['advantage'])} at most",
                "learning rate": _show(row["learning_rate"]),
            }
            | ({"time here": f"{row['seconds']:.3g} s"} if row["seconds"] else {})
        ),
        "",
        _pairs(
            {
                "about as good (1 %)": f"parameters {_show(near['parameters'])}, batch "
                f"size {_show(near['batch_size'])}, steps {_show(near['steps'])}",
                "compute that helps": f"{row['saturating']['flops']:.3g} FLOPs reach "
                f"{_show(row['saturating']['loss'])}, within 1 % of what any do",
                "loss with double the": _show(
                    {
                        k: "-" if math.isnan(v) else f"{-100 * v:.2g} %"
                        for k, v in more["loss"].items()
                    }
                ),
                "noise with double the": _show(
                    {
                        k: f"1/{1 + v:.3g}"
                        for k, v in more["noise_batch_ratio"].items()
                        if v == v  # no batch holds more than all
                    }
                ),
            }
            | (
                {"without privacy": _show(row["not_private"])}
                if row["not_private"]
                else {}
            )
        ),
        "",
        "equal epsilon, other batch sizes, same compute:",
        _table(row["same_epsilon"]),
    ]
    if row["baselines"]:
        sections += ["", "baselines:", _table(row["baselines"])]
    settings = "".join(
        f"\n    {name}={value!r}," for name, value in row["make_private"].items()
    )
    sections += [
        "",
        *(f"# {note}" for note in row["notes"]),
        f"examples = Subset(dataset, range({row['examples']}))",
        f"loader = DataLoader(examples, batch_size={row['batch_size']})"
        f"  # {row['steps']} steps in all",
        'engine = PrivacyEngine(accountant="prv_bounds")',
        "model, optimizer, criterion, loader = engine.make_private(\n"
        "    module=model,\n    optimizer=optimizer,\n    criterion=criterion,\n"
        f"    data_loader=loader,{settings}\n)",
    ]
    return "\n".join(sections)


def _many_plans(rows: Sequence[Dict[str, Any]], law: Any, notes: Sequence[str]) -> str:
    bound = "loss" if law.private else "loss >="
    shown = [
        {
            "users": row["budget"]["users"],
            "epsilon": row["budget"]["epsilon"],
            "FLOPs": f"{row['flops']:.2g}",
            "parameters": row["parameters"],
            "batch size": row["batch_size"],
            "steps": row["steps"],
            "noise": row["make_private"]["noise_multiplier"],
            "noise norm": row["noise_norm"],
            bound: row["loss"],
            "tokens/param": row["tokens_per_parameter"],
            "advantage": row["advantage"],
            "Poisson": row["amplified"],
        }
        for row in rows
    ]
    return "\n".join(
        [f"law  {law.source}", *(f"! {n}" for n in notes), "", _table(shown)]
    )


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Runs the command; the exit status: 2 for arguments that can't be."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except (OSError, ValueError, ArithmeticError) as error:
        args.parser.exit(2, f"{args.parser.prog}: error: {error}\n")


if __name__ == "__main__":
    sys.exit(main())
