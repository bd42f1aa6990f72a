"""
The options of ``opacus-ext``: the parser, its help and the table of the documentation
(tools/options.py) are made of what stands here.

opacus_ext_command.py loads this file by its path, so that help and wrong arguments are
answered at once. Therefore it imports nothing but the standard library.
"""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Sequence

EPILOG = {
    None: """examples:
  opacus-ext plan --users 1e6 --epsilon 4 --flops 1e19
  opacus-ext calibrate --users 1e6 --epsilon 1,4,16 --batch-size 4096 --steps 10000
  opacus-ext measure --text input.txt --out runs.jsonl
  opacus-ext fit runs.jsonl
  opacus-ext optimal --flops 1e19,1e21
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
  opacus-ext fit results.csv                    of the authors of the paper
  opacus-ext fit chinchilla.csv --law chinchilla --drop 5""",
    "optimal": """examples:
  opacus-ext optimal --flops 1e19,1e21

Training without privacy, by the published laws of Kaplan et al. and of Hoffmann et al.
(Chinchilla); "plan" is for private training.""",
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
  opacus-ext statement out                      of PrivateTrainer: the last checkpoint
  opacus-ext statement out/model                of its save_model
  opacus-ext statement last.ckpt                of Lightning with PrivacyCallback

The status is 1 if no guarantee is known, as with poisson_sampling=False.""",
}

#: Each command is a function of this name, in the file beside this one that is named.
COMMANDS = {
    "plan": ("plan", "model size, batch size, steps and noise for a budget"),
    "calibrate": ("fit", "noise for a privacy budget"),
    "measure": ("fit", "train a grid of small models with noise"),
    "fit": ("fit", "fit a scaling law to measurements"),
    "optimal": ("fit", "best size and tokens without privacy, by published laws"),
    "check": ("check", "compare per-sample gradients with autograd"),
    "audit": ("check", "attack private training, and compare with what it claims"),
    "statement": ("check", "the privacy statement of a checkpoint"),
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
--family=bytes         text              ; "bytes", "masked", or module:function
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
--drop                 whole 1           ; leaves out so many runs of fewest tokens a \
parameter
""",
    "optimal": """
--flops!               numbers >0        ; C; lists
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
checkpoint             text              ; a file, or a folder of PrivateTrainer
--delta                number >0 1       ; of the guarantee; that of the noise
--unit                 text              ; what a record is, as user; that of the data
""",
}


def _numbers(kind: str, low: str = "0", high: str = "inf") -> Callable[[str], Any]:
    """A reader of a number, as "4", "1e6" or "inf", of a list or a range of them."""
    whole, above = kind.startswith("whole"), low.startswith(">")
    least, most = float(low.strip(">")), float(high)
    wanted = "a whole number" if whole else "a number"
    wanted += f", above {least:g}" if above else f", {least:g} or more"
    wanted += "" if most == math.inf else f", at most {most:g}"

    def one(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        fits = least <= value <= most and not (above and value == least)
        if not fits or whole and not value.is_integer():
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(value) if whole else value

    def ends(text: str) -> Sequence[float]:
        parts = [one(part) for part in text.split(":")]
        if len(parts) > 2 or parts[0] > parts[-1]:
            raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH")
        return parts[0], parts[-1]

    def several(text: str) -> Sequence[float]:
        return [one(part) for part in text.split(",")]

    if kind.endswith("range"):
        return ends
    return several if kind.endswith("s") else one


def _hold_out(text: str) -> Sequence[Any]:
    name, _, value = text.partition("=")
    if name not in ("parameters", "ratio", "steps"):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not parameters=..., ratio=... or steps=..."
        )
    return name, _numbers("number")(value)


def _add(command: argparse.ArgumentParser, line: str) -> None:
    """Adds an option, a line of :data:`OPTIONS`, to the parser of a command."""
    spec, _, text = line.partition(";")
    name, kind, *bounds = spec.split()
    name, _, metavar = name.partition("[")
    name, _, default = name.partition("=")
    settings: Any = {"help": " ".join(text.split())}
    if default:
        settings["default"] = default
        settings["help"] += f" (default {default})"
    if metavar:
        settings["metavar"] = metavar.strip("]")
    if name.endswith("!"):
        settings["required"] = True
    if kind.startswith("{"):
        settings["choices"] = kind.strip("{}").split(",")
    elif kind == "flag":
        settings["action"] = "store_true"
    elif kind == "hold-out":
        settings |= dict(type=_hold_out, action="append", default=[])
    elif kind == "words":
        settings["type"] = lambda text: list(filter(None, text.split(",")))
    elif kind != "text":
        settings["type"] = _numbers(kind, *bounds)
    command.add_argument(*name.strip("!").split(","), **settings)


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``; parsed arguments name their command."""
    raw: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = argparse.ArgumentParser(prog="opacus-ext", epilog=EPILOG[None], **raw)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (_, text) in COMMANDS.items():
        about: Any = dict(help=text, description=text, epilog=EPILOG[name])
        command = commands.add_parser(name, **about, **raw)
        for line in filter(None, OPTIONS[name].splitlines()):
            _add(command, line)
        command.add_argument("--json", action="store_true", help="print JSON")
        command.set_defaults(parser=command)
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
    return args.command == "measure" or COMMANDS[args.command][0] == "check"


def _problems(args: argparse.Namespace) -> Iterator[str]:
    """The reasons why arguments don't fit, found before anything is imported."""
    if args.command in ("plan", "calibrate"):
        examples = int(min(args.users))
        if args.sampling == "records":
            examples *= args.records_per_user
        batches = args.batch_size or [1]
        least = batches[0] if args.command == "plan" else max(batches)
        if least > examples:
            yield f"batch_size must be at most {examples}, all examples; got {least:g}"
    if args.command == "plan":
        yield from _problems_of_plan(args)
    for name in ("measurements", "noise_free", "text", "checkpoint"):
        path = getattr(args, name, None)
        if path and path != "example" and not os.path.exists(path):
            yield f"there is no {path}"
    target = getattr(args, "target", None)
    if target and ":" not in target and not os.path.isdir(target):
        yield f"target {target!r} is neither a folder nor module:function"


def _problems_of_plan(args: argparse.Namespace) -> Iterator[str]:
    law, fitted = args.law, args.measurements
    if max(args.epsilon) > 100:
        yield f"epsilon={max(args.epsilon):g} is above 100: that is no privacy"
    if args.trainable is not None and (fitted or law not in (None, "rule")):
        yield "--trainable goes without --measurements and --law"
    if args.noise_free and (fitted or law):
        yield "--noise-free goes without --measurements and --law"
    if args.rank and args.trainable is None:
        yield "--rank needs --trainable, the parameters of adapters of this rank"
    cost = args.price or args.devices > 1 or args.utilization
    if cost and args.device_flops is None:
        yield "--price, --devices and --utilization need --device-flops"
    if law and bool(fitted) == (law in ("paper", "rule")):
        yield (
            "--law surface, L1 and L2 are fitted to --measurements, paper and rule go "
            "without"
        )
