"""The arguments of ``opacus-ext`` and their help.

The script ``opacus-ext`` loads this file by its path, so that help and wrong arguments
are answered at once: it must import nothing but the standard library.
"""

from __future__ import annotations

import argparse
import math
import os
from typing import Any, Callable, List, Optional, Sequence, Tuple

EPILOG = {
    None: """examples:
  opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
  opacus-ext calibrate --users 1e6 --epsilon 1,4,16 --batch-size 4096 --steps 10000
  opacus-ext measure --text input.txt --out runs.jsonl
  opacus-ext fit runs.jsonl
  opacus-ext check ./my-checkpoint
  opacus-ext audit ./my-checkpoint
  opacus-ext statement run.pt

Each command tells more: opacus-ext plan --help""",
    "plan": """examples:
  no private run was measured: a rule of thumb, without a loss
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
  masked language models like BERT: the paper's law
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19 --law paper
  by the measurements that come with the package (tiny models of bytes)
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e15 --measurements example
  by your own; a table over budgets, for a program
    opacus-ext plan --users 1e5:1e7:3 --epsilon 1,4,16 --measurements runs.jsonl --json
  an adapter of 4.2 million parameters, and other ranks; what it costs
    opacus-ext plan --users 50000 --epsilon 8 --delta 1e-6 --parameters 6.7e9 \\
        --trainable 4.2e6 --rank 8 --flops 1e19 --device-flops 3e14 --price 2.5
  its loss too, from the losses of one run without noise (columns steps, loss)
    opacus-ext plan --users 50000 --epsilon 8 --delta 1e-6 --parameters 6.7e9 \\
        --trainable 4.2e6 --noise-free run.csv
  what a choice that someone made would lose
    opacus-ext plan --users 1e7 --epsilon 4 --flops 1e15 --measurements example \\
        --baseline 4e5,256,700

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
    "audit": """examples:
  opacus-ext audit ./my-checkpoint              a folder of transformers
  opacus-ext audit my_package.my_module:case    returns model, batch, loss_fn
  opacus-ext audit my_package.my_module:case --mode ghost --plot audit.png

Single steps are tested with the noise multiplier given, and one short run. The status
is 0 if nothing contradicts the claims, else 1.""",
    "statement": """examples:
  opacus-ext statement run.pt                   of engine.save_checkpoint
  opacus-ext statement out/checkpoint-500       of PrivateTrainer
  opacus-ext statement run.pt --delta 1e-6 --unit user --json

The status is 1 if no guarantee is known, as with poisson_sampling=False.""",
}

#: Each command is a file beside this one, with a function ``run(args) -> int``.
COMMANDS = {
    "plan": "model size, batch size, steps and noise for a budget",
    "calibrate": "noise for a privacy budget",
    "measure": "train a grid of small models with noise",
    "fit": "fit a scaling law to measurements",
    "check": "compare per-sample gradients with autograd",
    "audit": "attack private training, and compare with what it claims",
    "statement": "the privacy statement of a checkpoint",
}


def _bounded_number(
    low: float = 0, high: float = math.inf, *, whole: bool = False, above: bool = False
) -> Callable[[str], float]:
    """
    A type for argparse: a number of a range, as "4", "1e6" or "inf".

    Args:
        low, high: the range, with its ends
        whole: only whole numbers
        above: without its low end

    Example:
        >>> _bounded_number(1, whole=True)("1e6")
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


def _number_list(*args: Any, **kwargs: Any) -> Callable[[str], List[float]]:
    """
    A type for argparse: several numbers, as "1,4,16" or "LOW:HIGH:COUNT".

    Example:
        >>> _number_list()("1:64:4")
        [1.0, 4.0, 16.0, 64.0]
    """
    one = _bounded_number(*args, **kwargs)

    def parse(text: str) -> List[float]:
        if ":" not in text:
            return [one(part) for part in text.split(",")]
        parts = text.split(":")
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH:COUNT")
        low, high = one(parts[0]), one(parts[1])
        count = int(_bounded_number(2, 1000, whole=True)(parts[2]))
        if not 0 < low < high < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} does not go from low to high")
        ratio = (high / low) ** (1 / (count - 1))
        values = [low * ratio**i for i in range(count - 1)] + [high]
        rounded = [float(f"{v:.6g}") for v in values]
        return [one(str(round(v) if kwargs.get("whole") else v)) for v in rounded]

    return parse


def _number_range(*args: Any, **kwargs: Any) -> Callable[[str], Tuple[float, float]]:
    """
    A type for argparse: LOW:HIGH, or one number for both.

    Example:
        >>> _number_range()("1e3:1e5"), _number_range()("7")
        ((1000.0, 100000.0), (7.0, 7.0))
    """
    one = _bounded_number(*args, **kwargs)

    def parse(text: str) -> Tuple[float, float]:
        parts = [one(part) for part in text.split(":")]
        if len(parts) > 2 or parts[0] > parts[-1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
        return parts[0], parts[-1]

    return parse


def _words(text: str) -> List[str]:
    return [word for word in text.split(",") if word]


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``; parsed arguments name their command."""
    parser = argparse.ArgumentParser(
        prog="opacus-ext",
        epilog=EPILOG[None],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add in (
        ("plan", _plan),
        ("calibrate", _calibrate),
        ("measure", _measure),
        ("fit", _fit),
        ("check", _check),
        ("audit", _audit),
        ("statement", _statement),
    ):
        sub = commands.add_parser(
            name,
            help=COMMANDS[name],
            description=COMMANDS[name],
            epilog=EPILOG[name],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add(sub.add_argument)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(parser=sub)
    return parser


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The arguments of a command, or an exit with help (0) or an error (2)."""
    args = build_parser().parse_args(argv)
    problem = _problem(args)
    if problem:
        args.parser.error(problem)
    return args


def needs_torch(args: argparse.Namespace) -> bool:
    """Whether a command trains or reads a model; a plan does if it is to be timed."""
    return args.command in ("measure", "check", "audit", "statement") or _timed(args)


def _timed(args: argparse.Namespace) -> bool:
    return args.command == "plan" and bool(args.seconds or args.memory or args.text)


def _problem(args: argparse.Namespace) -> Optional[str]:
    """What can be said before anything is imported, of arguments that don't fit."""
    given = vars(args)
    if args.command in ("plan", "calibrate"):
        each = args.records_per_user if args.sampling == "records" else 1
        fewest, batches = int(min(args.users)) * each, args.batch_size or [1]
        least = batches[0] if args.command == "plan" else max(batches)
        if least > fewest:
            return f"batch_size must be at most {fewest}, all examples; got {least:g}"
    if args.command == "plan" and max(args.epsilon) > 100:
        return f"epsilon={max(args.epsilon):g} is above 100: that is no privacy"
    if args.command == "plan" and (problem := _problem_of_tuning(args)):
        return problem
    if args.command == "plan" and args.law:
        if bool(args.measurements) == (args.law in ("paper", "rule")):
            return (
                f"--law {args.law} {'takes no' if args.measurements else 'needs'} "
                "measurements; surface, L1 and L2 are fitted to --measurements, paper "
                "and rule go without"
            )
    if (_timed(args) or args.command == "measure") and not args.text:
        if args.family == "bytes":
            return "the family of byte transformers needs a text: --text FILE"
    for name in ("measurements", "noise_free", "text", "checkpoint"):
        path = given.get(name)
        if path and path != "example" and not os.path.exists(path):
            return f"there is no {path}"
    target = given.get("target")
    if target and ":" not in target and not os.path.isdir(target):
        return f"target {target!r} is neither a folder nor module:function"
    return None


def _problem_of_tuning(args: argparse.Namespace) -> Optional[str]:
    one = args.parameters and args.parameters[0] == args.parameters[1]
    for name in ("trainable", "noise_free"):
        flag = "--" + name.replace("_", "-")
        if getattr(args, name) is None:
            continue
        if not one:
            return f"{flag} is of one model: --parameters is its size, one number"
        if args.measurements or args.law not in (None, "rule"):
            return f"{flag} goes without --measurements and --law"
        if args.seconds or args.memory or args.text:
            return f"{flag} goes without --seconds, --memory and --text"
    if args.noise_free and args.law:
        return "--noise-free goes without --law"
    if args.trainable and args.trainable > args.parameters[0]:
        return f"--trainable is at most {args.parameters[0]:g}, the model's parameters"
    if args.rank and args.trainable is None:
        return "--rank needs --trainable, the parameters of adapters of this rank"
    if args.device_flops is None and (
        args.price or args.devices > 1 or args.utilization
    ):
        return "--price, --devices and --utilization need --device-flops"
    if args.bootstrap and (
        args.measurements is None or args.law not in (None, "surface")
    ):
        return "--bootstrap is of the surface, which is fitted to --measurements"
    return None


def _budget(add: Callable) -> None:
    add("--users", required=True, type=_number_list(1, 1e15), help="N, people; ranges")
    add(
        "--epsilon",
        required=True,
        type=_number_list(0, 1e6, above=True),
        help="of the whole run; ranges",
    )
    add(
        "--delta",
        default=1e-8,
        type=_bounded_number(1e-100, 0.5),
        help="of the whole run (default 1e-8)",
    )
    add(
        "--records-per-user",
        default=1,
        type=_bounded_number(1, whole=True),
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
        type=_number_list(0, above=True),
        help="C, of the whole training; ranges (default: as much as helps)",
    )
    add(
        "--tokens",
        type=_bounded_number(1, 1e9, whole=True),
        help="S, tokens of an example (default: of the measurements, or 512)",
    )
    add(
        "--measurements",
        metavar="FILE",
        help='of private runs, by "measure"; "example": those of the package',
    )
    add(
        "--law",
        choices=("surface", "L1", "L2", "paper", "rule"),
        help="with measurements: surface (default), L1 or L2 is fitted; without: rule "
        "of thumb, no loss (default), or paper, for masked language models",
    )
    add(
        "--bootstrap",
        default=0,
        type=_bounded_number(0, 10000, whole=True),
        help="resamples for a 95 %% interval of the loss (surface; default 0: none)",
    )
    add(
        "--parameters",
        type=_number_range(1, 1e18),
        help="M, bounds of the model size",
    )
    add(
        "--trainable",
        type=_bounded_number(1, whole=True),
        help="m, if a model of M parameters is fine-tuned and the others are frozen",
    )
    add(
        "--rank",
        type=_bounded_number(1, whole=True),
        help="of the adapters that have these m parameters: tells what others cost",
    )
    add(
        "--noise-free",
        metavar="FILE",
        help="losses of one run of this model without noise, from its start, in nats a "
        "token, or a record with --tokens 1 (a classifier's); no accuracies: a table "
        '(CSV) with columns steps and loss, or a file of "measure"',
    )
    add(
        "--batch-size", type=_number_range(1, whole=True), help="B, bounds, in examples"
    )
    add(
        "--max-batch-size",
        type=_bounded_number(8, whole=True),
        help="examples of a batch at most, where memory is fixed: larger samples are "
        "cut (default: no bound)",
    )
    add(
        "--physical-batch-size",
        default=32,
        type=_bounded_number(1, whole=True),
        help="examples that fit into memory at once (default 32)",
    )
    add("--steps", type=_number_range(1, whole=True), help="T, bounds")
    add(
        "--device-flops",
        type=_bounded_number(1, 1e30),
        help="FLOP/s of a device at its peak: tells device hours",
    )
    add(
        "--utilization",
        "--utilisation",
        type=_bounded_number(0, 1, above=True),
        help="share of it that private training reaches (default 0.3)",
    )
    add(
        "--price",
        type=_bounded_number(0, 1e9, above=True),
        help="of a device hour: tells what a run costs",
    )
    add(
        "--devices",
        default=1,
        type=_bounded_number(1, 1e9, whole=True),
        help="that share the work (default 1)",
    )
    add(
        "--trials",
        type=_bounded_number(2, 1e4, whole=True),
        help="tell the noise of each run, if the best of so many is chosen",
    )
    add(
        "--baseline",
        action="append",
        default=[],
        metavar="M,B,T",
        type=_baseline,
        help="a configuration to compare with; may be repeated",
    )
    add(
        "--seconds",
        type=_bounded_number(0, above=True),
        help="bound on time, on this machine",
    )
    add(
        "--memory",
        type=_bounded_number(0, above=True),
        help="bound on bytes, on this machine",
    )
    add("--family", default="bytes", help="what to time: module:function")
    add("--text", help="what to time byte transformers on")
    add("--device", default="cpu", help="where to time (default cpu)")


def _baseline(text: str) -> Tuple[float, ...]:
    values = tuple(_bounded_number(1, 1e18)(part) for part in text.split(","))
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not PARAMETERS,BATCH_SIZE,STEPS")
    return values


def _calibrate(add: Callable) -> None:
    _budget(add)
    add(
        "--batch-size",
        required=True,
        type=_number_list(1),
        help="B, expected, at most all users; ranges",
    )
    add(
        "--steps",
        required=True,
        type=_number_list(1, 1e9, whole=True),
        help="T; ranges",
    )


def _measure(add: Callable) -> None:
    add("--out", required=True, metavar="FILE", help="runs are appended, one a line")
    add("--text", help="the text of byte transformers")
    add("--family", default="bytes", help='"bytes", or module:function')
    add("--sizes", type=_words, help="names of sizes (default: all of the family)")
    add(
        "--ratios",
        default=[0.0] + [2.0**-k for k in (12, 10, 8, 6, 4, 2)],
        type=_number_list(0, 1e6),
        help="noise-batch ratios, 0 for noise-free (default 0, 2^-12, 2^-10 ... 2^-2)",
    )
    add(
        "--learning-rates",
        default=[0.003],
        type=_number_list(0, 10, above=True),
        help="of Adam (default 0.003)",
    )
    for flag, default, text in (
        ("--steps", 1000, "T of a run"),
        ("--every", 20, "steps between two readings"),
        ("--batch-size", 32, "the physical batch"),
        ("--warmup", 20, "steps until the learning rate is reached"),
    ):
        kind = _bounded_number(1, whole=True)
        add(flag, default=default, type=kind, help=f"{text} (default {default})")
    add(
        "--max-grad-norm",
        default=0.1,
        type=_bounded_number(0, 1e6, above=True),
        help="(default .1)",
    )
    add(
        "--seed",
        default=0,
        type=_bounded_number(0, 2**63, whole=True),
        help="(default 0)",
    )
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
        type=_hold_out,
        metavar="NAME=VALUE",
        help="fit without a model size (parameters), a ratio or later steps, and "
        "predict them",
    )
    add(
        "--bootstrap",
        default=0,
        type=_bounded_number(0, 10000, whole=True),
        help="resamples for 95 %% intervals (default 0: none)",
    )
    add(
        "--drop",
        default=0,
        type=_bounded_number(0, whole=True),
        help="leave out so many rows of the fewest tokens a parameter (default 0)",
    )


def _hold_out(text: str) -> Tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in ("parameters", "ratio", "steps"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not parameters=..., ratio=... or steps=..."
        )
    return name, _bounded_number(0)(value)


def _check(add: Callable) -> None:
    add("target", help="a folder of transformers, or module:function")
    add(
        "--modes",
        default=["hooks", "ghost", "ghost_bk"],
        type=_words,
        help="of hooks, ghost, ghost_bk (default all)",
    )
    add(
        "--batch-size",
        default=3,
        type=_bounded_number(1, 64, whole=True),
        help="(default 3)",
    )
    add(
        "--length",
        default=12,
        type=_bounded_number(2, whole=True),
        help="tokens (default 12)",
    )
    add("--float32", action="store_true", help="compare in float32, not in float64")


def _audit(add: Callable) -> None:
    add("target", help="a folder of transformers, or module:function")
    add("--mode", default="ghost_bk", help="grad_sample_mode (default ghost_bk)")
    add(
        "--noise-multiplier",
        default=0.5,
        type=_bounded_number(0, above=True),
        help="of single steps (default 0.5)",
    )
    add(
        "--max-grad-norm",
        default=1.0,
        type=_bounded_number(0, above=True),
        help="C (default 1)",
    )
    add(
        "--trials",
        default=200,
        type=_bounded_number(16, whole=True),
        help="single steps of each of three kinds (default 200)",
    )
    add(
        "--canaries",
        default=2000,
        type=_bounded_number(20, whole=True),
        help="of the run; at most the model's entries (default 2000)",
    )
    add(
        "--delta",
        default=1e-5,
        type=_bounded_number(0, 1, above=True),
        help="of the epsilons (default 1e-5)",
    )
    add(
        "--confidence",
        default=0.95,
        type=_bounded_number(0.5, 0.999999),
        help="of each of both audits (default 0.95)",
    )
    add(
        "--batch-size",
        default=8,
        type=_bounded_number(2, 64, whole=True),
        help="records of a folder's model, random tokens (default 8)",
    )
    add(
        "--length",
        default=8,
        type=_bounded_number(2, 512, whole=True),
        help="of these, in tokens (default 8)",
    )
    add("--plot", metavar="FILE", help="a picture of it; takes matplotlib")


def _statement(add: Callable) -> None:
    add("checkpoint", help="a file of save_checkpoint, or PrivateTrainer's folder")
    add(
        "--delta",
        type=_bounded_number(0, 1, above=True),
        help="of the guarantee (default: the one that the noise was chosen for)",
    )
    add("--unit", default="record", help="what a record is, as user (default record)")
