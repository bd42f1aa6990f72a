"""
The arguments of ``opacus-ext`` and their help.

The script ``opacus-ext`` loads this file by its path, so that help and wrong arguments
are answered at once: it must import nothing but the standard library.
"""

from __future__ import annotations

import argparse
import math
import os
import re
from functools import partial
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

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
  opacus-ext audit my_package.my_module:case --mode ghost

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

_BUDGET = """
--users!               numbers 1 1e15    ; N, people; ranges
--epsilon!             numbers >0 1e6    ; of the whole run; ranges
--delta=1e-8           number 1e-100 0.5 ; of the whole run (default 1e-8)
--records-per-user=1   whole 1           ; examples that a user has (default 1)
--sampling=users       {users,records}   ; what a step draws; with records, users are
                       protected in all of theirs
--amplification=lower  {lower,poisson,none} ; Poisson batches, fixed ones, or the lower
                       noise of both (default)
"""

#: The options of each command, an entry each: the name, "!" if it is required or "="
#: and its default, [metavar]; its type, with bounds; its help.
OPTIONS = {
    "plan": _BUDGET
    + """
--flops=inf            numbers >0        ; C, of the whole training; ranges (default: as
                       much as helps)
--tokens               whole 1 1e9       ; S, tokens of an example (default: of the
                       measurements, or 512)
--measurements[FILE]   text              ; of private runs, by "measure"; "example":
                       those of the package
--law                  {surface,L1,L2,paper,rule} ; with measurements: surface
                       (default), L1 or L2 is fitted; without: rule of thumb, no loss
                       (default), or paper, for masked language models
--bootstrap=0          whole 0 10000     ; resamples for a 95 %% interval of the loss
                       (surface; default 0: none)
--parameters           range 1 1e18      ; M, bounds of the model size
--trainable            whole 1           ; m, if a model of M parameters is fine-tuned
                       and the others are frozen
--rank                 whole 1           ; of the adapters that have these m parameters:
                       tells what others cost
--noise-free[FILE]     text              ; losses of one run of this model without
                       noise, from its start, in nats a token, or a record with --tokens
                       1 (a classifier's); no accuracies: a table (CSV) with columns
                       steps and loss, or a file of "measure"
--batch-size           whole-range 1     ; B, bounds, in examples
--max-batch-size       whole 8           ; examples of a batch at most, where memory is
                       fixed: larger samples are cut (default: no bound)
--physical-batch-size=32 whole 1         ; examples that fit into memory at once
                       (default 32)
--steps                whole-range 1     ; T, bounds
--device-flops         number 1 1e30     ; FLOP/s of a device at its peak: tells device
                       hours
--utilization,--utilisation number >0 1  ; share of it that private training reaches
                       (default 0.3)
--price                number >0 1e9     ; of a device hour: tells what a run costs
--devices=1            whole 1 1e9       ; that share the work (default 1)
--trials               whole 2 1e4       ; tell the noise of each run, if the best of so
                       many is chosen
--baseline[M,B,T]      baseline          ; a configuration to compare with; may be
                       repeated
--seconds              number >0         ; bound on time, on this machine
--memory               number >0         ; bound on bytes, on this machine
--family=bytes         text              ; what to time: module:function
--text                 text              ; what to time byte transformers on
--device=cpu           text              ; where to time (default cpu)
""",
    "calibrate": _BUDGET
    + """
--batch-size!          numbers 1         ; B, expected, at most all users; ranges
--steps!               wholes 1 1e9      ; T; ranges
""",
    "measure": """
--out![FILE]           text              ; runs are appended, one a line
--text                 text              ; the text of byte transformers
--family=bytes         text              ; "bytes", or module:function
--sizes                words             ; names of sizes (default: all of the family)
--ratios=0,0.000244140625,0.0009765625,0.00390625,0.015625,0.0625,0.25
                       numbers 0 1e6     ; noise-batch ratios, 0 for noise-free (default
                       0, 2^-12, 2^-10 ... 2^-2)
--learning-rates=0.003 numbers >0 10     ; of Adam (default 0.003)
--steps=1000           whole 1           ; T of a run (default 1000)
--every=20             whole 1           ; steps between two readings (default 20)
--batch-size=32        whole 1           ; the physical batch (default 32)
--warmup=20            whole 1           ; steps until the learning rate is reached
                       (default 20)
--max-grad-norm=0.1    number >0 1e6     ; (default .1)
--seed=0               whole 0 9.223372036854775808e18 ; (default 0)
--no-progress          flag              ; no progress bar
""",
    "fit": """
measurements           text              ; a file of "measure", a table (CSV), or
                       "example"
--law=surface          text              ; surface (default), L1, L2 of private
                       training; chinchilla, kaplan_parameters_tokens and the others of
                       opacus_ext.planner.laws
--hold-out[NAME=VALUE] hold-out          ; fit without a model size (parameters), a
                       ratio or later steps, and predict them
--bootstrap=0          whole 0 10000     ; resamples for 95 %% intervals (default 0:
                       none)
--drop=0               whole 0           ; leave out so many rows of the fewest tokens a
                       parameter (default 0)
""",
    "check": """
target                 text              ; a folder of transformers, or module:function
--modes=hooks,ghost,ghost_bk words       ; of hooks, ghost, ghost_bk (default all)
--batch-size=3         whole 1 64        ; (default 3)
--length=12            whole 2           ; tokens (default 12)
--float32              flag              ; compare in float32, not in float64
""",
    "audit": """
target                 text              ; a folder of transformers, or module:function
--mode=ghost_bk        text              ; grad_sample_mode (default ghost_bk)
--noise-multiplier=0.5 number >0         ; of single steps (default 0.5)
--max-grad-norm=1      number >0         ; C (default 1)
--trials=200           whole 16          ; single steps of each of three kinds (default
                       200)
--canaries=2000        whole 20          ; of the run; at most the model's entries
                       (default 2000)
--delta=1e-5           number >0 1       ; of the epsilons (default 1e-5)
--confidence=0.95      number 0.5 0.999999 ; of each of both audits (default 0.95)
--batch-size=8         whole 2 64        ; records of a folder's model, random tokens
                       (default 8)
--length=8             whole 2 512       ; of these, in tokens (default 8)
""",
    "statement": """
checkpoint             text              ; a file of save_checkpoint, or
                       PrivateTrainer's folder
--delta                number >0 1       ; of the guarantee (default: the one that the
                       noise was chosen for)
--unit=record          text              ; what a record is, as user (default record)
""",
}

Parse = Callable[[str], Any]


def _number(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """
    A type for argparse: a number between two bounds, as "4", "1e6" or "inf"; with a
    low bound ">0" only above it.

    Example:
        >>> _number("1", whole=True)("1e6")
        1000000
    """
    above, least, most = low[0] == ">", float(low.strip(">")), float(high)

    def parse(text: str) -> float:
        kind = "a whole number" if whole else "a number"
        message = f"{text!r} is not {kind}, " + (
            f"above {least:g}" if above else f"{least:g} or more"
        )
        message += "" if most == math.inf else f", at most {most:g}"
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(message) from None
        fits = least < value <= most if above else least <= value <= most
        if not fits or (whole and (value == math.inf or value != int(value))):
            raise argparse.ArgumentTypeError(message)
        return int(value) if whole else value

    return parse


def _numbers(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """
    A type for argparse: several numbers, as "1,4,16" or "LOW:HIGH:COUNT".

    Example:
        >>> _numbers()("1:64:4")
        [1.0, 4.0, 16.0, 64.0]
    """
    one = _number(low, high, whole)

    def parse(text: str) -> List[float]:
        if ":" not in text:
            return [one(part) for part in text.split(",")]
        parts = text.split(":")
        if len(parts) != 3:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH:COUNT")
        first, last = one(parts[0]), one(parts[1])
        count = int(_number("2", "1000", whole=True)(parts[2]))
        if not 0 < first < last < math.inf:
            raise argparse.ArgumentTypeError(f"{text!r} does not go from low to high")
        ratio = (last / first) ** (1 / (count - 1))
        values = [first * ratio**i for i in range(count - 1)] + [last]
        rounded = [float(f"{v:.6g}") for v in values]
        return [one(str(round(v) if whole else v)) for v in rounded]

    return parse


def _range(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """
    A type for argparse: LOW:HIGH, or one number for both.

    Example:
        >>> _range()("1e3:1e5"), _range()("7")
        ((1000.0, 100000.0), (7.0, 7.0))
    """
    one = _number(low, high, whole)

    def parse(text: str) -> Tuple[float, float]:
        parts = [one(part) for part in text.split(":")]
        if len(parts) > 2 or parts[0] > parts[-1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
        return parts[0], parts[-1]

    return parse


def _words(text: str) -> List[str]:
    return [word for word in text.split(",") if word]


def _baseline(text: str) -> Tuple[float, ...]:
    values = tuple(_number("1", "1e18")(part) for part in text.split(","))
    if len(values) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} is not PARAMETERS,BATCH_SIZE,STEPS")
    return values


def _hold_out(text: str) -> Tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in ("parameters", "ratio", "steps"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not parameters=..., ratio=... or steps=..."
        )
    return name, _number()(value)


_TYPES: Dict[str, Callable[..., Parse]] = {
    "number": _number,
    "whole": partial(_number, whole=True),
    "numbers": _numbers,
    "wholes": partial(_numbers, whole=True),
    "range": _range,
    "whole-range": partial(_range, whole=True),
    "text": lambda: str,
    "words": lambda: _words,
    "baseline": lambda: _baseline,
    "hold-out": lambda: _hold_out,
}


def _add_option(add: Callable, option: str) -> None:
    """Adds an entry of :data:`OPTIONS` to a parser."""
    spec, _, text = option.partition(";")
    name, kind, *bounds = spec.split()
    given: Dict[str, Any] = {"help": " ".join(text.split())}
    if "[" in name:
        name, _, metavar = name.partition("[")
        given["metavar"] = metavar.strip("]")
    flags, has_default, default = name.partition("=")
    if has_default:
        given["default"] = default
    if flags.endswith("!"):
        given["required"] = True
    if kind[0] == "{":
        given["choices"] = kind.strip("{}").split(",")
    elif kind == "flag":
        given["action"] = "store_true"
    else:
        given["type"] = _TYPES[kind](*bounds)
    if kind in ("baseline", "hold-out"):
        given |= {"action": "append", "default": []}
    add(*flags.strip("!").split(","), **given)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``; parsed arguments name their command."""
    raw: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="opacus-ext", epilog=EPILOG[None], **raw)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        about: Any = dict(help=text, description=text, epilog=EPILOG[name])
        sub = commands.add_parser(name, **about, **raw)
        for option in re.split(r"\n(?! )", OPTIONS[name].strip()):
            if option:
                _add_option(sub.add_argument, option)
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
    """True if a command trains or reads a model; a plan does if it is to be timed."""
    return args.command in ("measure", "check", "audit", "statement") or _timed(args)


def _timed(args: argparse.Namespace) -> bool:
    return args.command == "plan" and bool(args.seconds or args.memory or args.text)


def _problem(args: argparse.Namespace) -> Optional[str]:
    """The reason why arguments don't fit, found before anything is imported."""
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
