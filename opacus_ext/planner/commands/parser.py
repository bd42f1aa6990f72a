"""
The arguments of ``opacus-ext`` and their help.

opacus_ext_command.py loads this file by its path, so that help and wrong arguments are
answered at once. Therefore it imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

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
  a rule of thumb, without a loss; for masked language models the paper's law
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
    opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19 --law paper
  by the measurements of the package, or yours; of a configuration of yours
    opacus-ext plan --users 1e5,1e6 --epsilon 1,4,16 --measurements example --json
    opacus-ext plan --users 1e7 --epsilon 4 --measurements runs.jsonl \\
        --parameters 4e5 --batch-size 256 --steps 700
  an adapter, other ranks, what it costs; its loss, by a run without noise
    opacus-ext plan --users 50000 --epsilon 8 --delta 1e-6 --parameters 6.7e9 \\
        --trainable 4.2e6 --rank 8 --flops 1e19 --device-flops 3e14 --price 2.5 \\
        --noise-free run.csv

A number is a list (1,4,16) where "lists" is said; a bound is LOW:HIGH, or one number.
A configuration of yours is planned where --parameters, --batch-size and --steps are one
number each.""",
    "calibrate": """examples:
  opacus-ext calibrate --users 1e6 --epsilon 4 --batch-size 4096 --steps 10000
  opacus-ext calibrate --users 1e5,1e6 --epsilon 1,4,16 --batch-size 1e3,1e4 \\
      --steps 16000 --delta 1e-8 --json""",
    "measure": """examples:
  opacus-ext measure --text input.txt --out runs.jsonl --sizes 16x2,64x2
  opacus-ext measure --family my_package.my_module:family --out runs.jsonl

Stopped, the same command goes on. The runs are not private in the text.""",
    "fit": """examples:
  opacus-ext fit example
  opacus-ext fit runs.jsonl --hold-out parameters=366336 --hold-out ratio=0.0625
  opacus-ext fit runs.jsonl --law L2
  opacus-ext fit chinchilla.csv --law chinchilla""",
    "check": """examples:
  opacus-ext check ./my-checkpoint              a folder of transformers
  opacus-ext check my_package.my_module:case    returns model, batch, loss_fn

The status is 0 if every mode is exact, else 1.""",
    "audit": """examples:
  opacus-ext audit ./my-checkpoint              a folder of transformers
  opacus-ext audit my_package.my_module:case --mode ghost

Single steps are tested with the noise multiplier given, and one short run. The status
is 0 if nothing contradicts the claims, else 1.""",
    "statement": """examples:
  opacus-ext statement run.pt                   of engine.save_checkpoint
  opacus-ext statement out/checkpoint-500       of PrivateTrainer

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
--users!               numbers 1 1e15    ; N, people; lists
--epsilon!             numbers >0 1e6    ; of the whole run; lists
--delta=1e-8           number 1e-100 0.5 ; of the whole run
--records-per-user=1   whole 1           ; examples that a user has
--sampling=users       {users,records}   ; what a step draws; users are always protected
--amplification=lower  {lower,poisson,none} ; Poisson batches, fixed ones, or the better
"""

#: The options of each command, a line each: the name, "!" if it is required or "=" and
#: its default, [metavar]; its type, with bounds; its help, to which the default is
#: added.
OPTIONS = {
    "plan": _BUDGET
    + """
--flops=inf            numbers >0        ; C, of the whole training; lists
--tokens               whole 1 1e9       ; S of an example; of the measurements, or 512
--measurements[FILE]   text              ; of "measure"; "example": of the package
--law                  {surface,L1,L2,paper,rule} ; fitted to measurements, or without
--parameters           range 1 1e18      ; M, bounds of the model size
--trainable            whole 1           ; m of M parameters, if others are frozen
--rank                 whole 1           ; of adapters of m parameters: tells others
--noise-free[FILE]     text              ; losses of a run without noise, from its start
--batch-size           whole-range 1     ; B, bounds, in examples
--physical-batch-size=32 whole 1         ; examples that fit into memory at once
--steps                whole-range 1     ; T, bounds
--device-flops         number 1 1e30     ; FLOP/s of a device at its peak: tells hours
--utilization          number >0 1      ; share of it that private training has, or 0.3
--price                number >0 1e9     ; of a device hour: tells what a run costs
--devices=1            whole 1 1e9       ; that share the work
--trials               whole 2 1e4       ; tells the noise if the best of them is chosen
""",
    "calibrate": _BUDGET
    + """
--batch-size!          numbers 1         ; B, expected, at most all users; lists
--steps!               wholes 1 1e9      ; T; lists
""",
    "measure": """
--out![FILE]           text              ; runs are appended, one a line
--text                 text              ; the text of byte transformers
--family=bytes         text              ; "bytes", or module:function
--sizes                words             ; names of sizes; all of the family
--ratios=0,0.000244140625,0.0009765625,0.00390625,0.015625,0.0625,0.25 numbers 0 1e6 ; \
noise-batch ratios, 0 for noise-free
--learning-rates=0.003 numbers >0 10     ; of Adam
--steps=1000           whole 1           ; T of a run
--every=20             whole 1           ; steps between two readings
--batch-size=32        whole 1           ; the physical batch
--warmup=20            whole 1           ; steps until the learning rate is reached
--max-grad-norm=0.1    number >0 1e6     ; bound of a clipped gradient
--seed=0               whole 0 9.223372036854775808e18 ; of weights, order and noise
--no-progress          flag              ; no progress bar
""",
    "fit": """
measurements           text              ; of "measure", a table (CSV), or "example"
--law=surface          text              ; surface, L1, L2 or one of planner.laws
--hold-out[NAME=VALUE] hold-out          ; parameters, ratio or steps, to be predicted
""",
    "check": """
target                 text              ; a folder of transformers, or module:function
--modes=hooks,ghost,ghost_bk words       ; grad_sample_modes
--batch-size=3         whole 1 64        ; samples
--length=12            whole 2           ; tokens
--float32              flag              ; compare in float32, not in float64
""",
    "audit": """
target                 text              ; a folder of transformers, or module:function
--mode=ghost_bk        text              ; grad_sample_mode
--noise-multiplier=0.5 number >0         ; of single steps
--max-grad-norm=1      number >0         ; C
--trials=200           whole 16          ; single steps of each of three kinds
--canaries=2000        whole 20          ; of the run; at most the model's entries
--delta=1e-5           number >0 1       ; of the epsilons
--confidence=0.95      number 0.5 0.999999 ; of each of both audits
--batch-size=8         whole 2 64        ; random records of a folder's model
--length=8             whole 2 512       ; of these, in tokens
""",
    "statement": """
checkpoint             text              ; a file, or PrivateTrainer's folder
--delta                number >0 1       ; of the guarantee; that of the noise
--unit=record          text              ; what a record is, as user
""",
}

Parse = Callable[[str], Any]  # a type for argparse


def _number(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """A number, as "4", "1e6" or "inf"; with a low bound ">0" only above it."""
    above, least, most = low[0] == ">", float(low.strip(">")), float(high)
    wanted = "a whole number" if whole else "a number"
    wanted += f", above {least:g}" if above else f", {least:g} or more"
    wanted += "" if most == math.inf else f", at most {most:g}"

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = least < value <= most if above else least <= value <= most
        if not fits or whole and not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(value) if whole else value

    return parse


def _numbers(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """Several numbers, as "1,4,16"."""
    one = _number(low, high, whole)
    return lambda text: [one(part) for part in text.split(",")]


def _range(low: str = "0", high: str = "inf", whole: bool = False) -> Parse:
    """LOW:HIGH, or one number for both."""
    one = _number(low, high, whole)

    def parse(text: str) -> Tuple[float, float]:
        parts = [one(part) for part in text.split(":")]
        if len(parts) > 2 or parts[0] > parts[-1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
        return parts[0], parts[-1]

    return parse


def _words(text: str) -> List[str]:
    return [word for word in text.split(",") if word]


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
        given["help"] += f" (default {default})"
    if flags.endswith("!"):
        given["required"] = True
    if kind[0] == "{":
        given["choices"] = kind.strip("{}").split(",")
    elif kind == "flag":
        given["action"] = "store_true"
    else:
        given["type"] = _TYPES[kind](*bounds)
    if kind == "hold-out":
        given |= {"action": "append", "default": []}
    add(*flags.strip("!").split(","), **given)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``; parsed arguments name their command."""
    raw: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="opacus-ext", epilog=EPILOG[None], **raw)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in COMMANDS.items():
        about: Any = dict(help=text, description=text, epilog=EPILOG[name])
        sub = commands.add_parser(name, **about, **raw)
        for option in OPTIONS[name].splitlines():
            if option:
                _add_option(sub.add_argument, option)
        sub.add_argument("--json", action="store_true", help="print JSON")
        sub.set_defaults(parser=sub)
    return parser


def _version() -> str:
    """The version of the package, read from its text."""
    text = Path(__file__).parents[2].joinpath("__init__.py").read_text(encoding="utf-8")
    return "opacus-ext " + text.split('__version__ = "')[1].split('"')[0]


def parse(argv: Optional[Sequence[str]] = None) -> argparse.Namespace:
    """The arguments of a command, or an exit with help (0) or an error (2)."""
    args = build_parser().parse_args(argv)
    for problem in _problems(args):
        args.parser.error(problem)
    return args


def needs_torch(args: argparse.Namespace) -> bool:
    """True if a command trains or reads a model."""
    return args.command in ("measure", "check", "audit", "statement")


def _problems(args: argparse.Namespace) -> Iterator[str]:
    """The reasons why arguments don't fit, found before anything is imported."""
    given = vars(args)
    if args.command in ("plan", "calibrate"):
        each = args.records_per_user if args.sampling == "records" else 1
        fewest, batches = int(min(args.users)) * each, args.batch_size or [1]
        least = batches[0] if args.command == "plan" else max(batches)
        if least > fewest:
            yield f"batch_size must be at most {fewest}, all examples; got {least:g}"
    if args.command == "plan":
        yield from _problems_of_plan(args)
    for name in ("measurements", "noise_free", "text", "checkpoint"):
        path = given.get(name)
        if path and path != "example" and not os.path.exists(path):
            yield f"there is no {path}"
    target = given.get("target")
    if target and ":" not in target and not os.path.isdir(target):
        yield f"target {target!r} is neither a folder nor module:function"


def _problems_of_plan(args: argparse.Namespace) -> Iterator[str]:
    if max(args.epsilon) > 100:
        yield f"epsilon={max(args.epsilon):g} is above 100: that is no privacy"
    for name in ("trainable", "noise_free"):
        flag = "--" + name.replace("_", "-")
        if getattr(args, name) is None:
            continue
        if args.measurements or args.law not in (None, "rule"):
            yield f"{flag} goes without --measurements and --law"
    if args.noise_free and args.law:
        yield "--noise-free goes without --law"
    if args.rank and args.trainable is None:
        yield "--rank needs --trainable, the parameters of adapters of this rank"
    cost = args.price or args.devices > 1 or args.utilization
    if cost and args.device_flops is None:
        yield "--price, --devices and --utilization need --device-flops"
    if args.law and bool(args.measurements) == (args.law in ("paper", "rule")):
        yield (
            "--law surface, L1 and L2 are fitted to --measurements, paper and rule go "
            "without"
        )
