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
import re
import sys
from pathlib import Path
from typing import Any, Callable, Iterator, NoReturn, Optional, Sequence, Tuple

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
  opacus-ext recommend --data ratings.csv --epsilon 8 --save model.pt

Each command tells more: opacus-ext plan --help""",
    "plan": """examples:
  a rule of thumb, without a loss; for masked language models the paper's law
    opacus-ext plan --users 1M --epsilon 4 --flops 1e19
    opacus-ext plan --users 1M --epsilon 4 --gpu 8xh100 --hours 24 --law paper
  by the measurements of the package, or yours; of a configuration of yours
    opacus-ext plan --users 1e5,1e6 --epsilon 1,4,16 --measurements example --json
    opacus-ext plan --users 1e7 --epsilon 4 --measurements runs.jsonl \\
        --parameters 4e5 --batch-size 256 --steps 700
  an adapter, other ranks, what it costs; its loss, by a run without noise
    opacus-ext plan --users 50k --epsilon 8 --delta 1e-6 --parameters 6.7B \\
        --trainable 4.2M --rank 8 --gpu a100 --hours 24 --price 2.5 \\
        --noise-free run.csv
  which noise a run of yours should take, independent or correlated
    opacus-ext plan --noise --users 50k --epsilon 8 --batch-size 50 --steps 5000 \\
        --momentum 0.9 --parameters 10M --plot noise.svg

The plan is the cheapest whose loss is within 1 % of the best one's. Numbers may be
written as 50k, 1.5M, 2B, 1e6 or 50,000. Where "lists" is said several are separated by
commas (1,4,16); a bound is LOW:HIGH, or one number.
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
  opacus-ext audit ./my-model                   a folder of transformers
  opacus-ext audit ./my-adapter                 of peft; its base model is a folder, too
  opacus-ext audit out/checkpoint-500           of PrivateTrainer: with its settings
  opacus-ext audit my_package.my_module:case --mode ghost

Single steps are tested, and one fresh short run of the architecture, on random records.
The status is 0 if nothing contradicts the claims, else 1.""",
    "statement": """examples:
  opacus-ext statement run.pt                   of engine.save_checkpoint
  opacus-ext statement out                      of PrivateTrainer: the last checkpoint
  opacus-ext statement out/model                of its save_model
  opacus-ext statement last.ckpt                of Lightning with PrivacyCallback

The status is 1 if no guarantee is known, as with poisson_sampling=False.""",
    "recommend": """examples:
  synthetic data; a table of user, item and timestamp, with or without a header
    opacus-ext recommend
    opacus-ext recommend --data ratings.csv --epsilon 8 --save model.pt
  nothing is trained: which item follows which is released once, in seconds
    opacus-ext recommend --data ratings.csv --model transitions --train-share 0
  a run that can be cut off, and goes on
    opacus-ext recommend --data ratings.csv --checkpoint run.pt --time-limit 3000
    opacus-ext recommend --data ratings.csv --checkpoint run.pt --resume
  what a user may like, by a model that was saved
    opacus-ext recommend --load model.pt --data ratings.csv --recommend-to alice

The guarantee covers the weights, after any number of epochs, and all that is released,
for adding or removing one user. It does not cover the loss, NDCG and HIT, which are
computed on the users' own data, nor a choice of options by looking at them, nor the
names of the items: they are those of the data, unless --items gives a list. The seed
and the checkpoint determine the noise: keep both secret.""",
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
    "recommend": ("recommend", "train a recommender with user-level privacy"),
}

_BUDGET = """
--users!               numbers 1 1e15    ; N, people; lists
--epsilon!             numbers >0 1e6    ; of the whole run; lists
--delta                number 1e-100 0.5 ; of the whole run; about 1 / users^1.1
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
--gpu,--device-flops   gpu               ; "h100", "8xh100" or its FLOP/s: tells hours
--gpus,--devices       whole 1 1e9       ; that share the work
--hours                numbers >0 1e9    ; of the GPUs, in place of --flops; lists
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
--utilization          number >0 1      ; share of the peak that is used, or 0.3
--price                number >0 1e9     ; of a device hour: tells what a run costs
--trials               whole 2 1e4       ; tells the noise if the best of them is chosen
--noise                flag              ; of one run: tells which noise to take
--momentum             number 0 0.9999   ; of SGD, or Adam's first beta, for --noise
--code=engine          {engine,trainer}  ; to print: of make_private or PrivateTrainer
--plot[FILE]           text              ; draws plans, or --noise (.png, .pdf, .svg)
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
--flops!               numbers 1e12 1e30 ; C, operations in all; lists
""",
    "check": """
target                 text              ; a folder of transformers, or module:function
--modes=hooks,ghost,ghost_bk words       ; grad_sample_modes
--batch-size=3         whole 1 64        ; samples
--length=12            whole 2           ; tokens
--float32              flag              ; compare in float32, not in float64
""",
    "audit": """
target                 text              ; a folder of a model, an adapter or a run, \
or module:function
--mode                 text              ; grad_sample_mode; of the run, or ghost_bk
--noise-multiplier     number >0         ; of steps; of the run, or 0.5
--max-grad-norm        number >0         ; C; of the run, or 1
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
    "recommend": """
--data[FILE]           text              ; user,item,timestamp; else synthetic data
--columns              words             ; the header's names of user, item and time
--items[FILE]          text              ; names of all items, public, a line each
--users                whole 1           ; of --data, take only so many
--min-actions=5        whole 3           ; users and items of fewer are left out
--epsilon=8            number 1e-12      ; privacy budget of the whole run
--delta                number 1e-300 0.5 ; 1e-5, or 1 / users^1.1 if less
--epochs               whole 1           ; passes over the users; 5, with --data 20
--batch-size           whole 1           ; expected users a step; 256, with --data 1024
--physical-batch-size=64 whole 1         ; users in memory at once
--lr                   number 1e-12      ; peak, of Adam; 3e-3, with --data 9e-3
--weight-decay=1e-5    number 0          ; of Adam
--warmup=0.2           number 0 1        ; share of the steps, then linear decay
--max-len              whole 1           ; latest items of a user that count; 30, \
with --data 50, of transitions 100
--width=64             whole 1           ; model dimension
--depth=2              whole 1           ; transformer blocks
--heads=1              whole 1           ; attention heads
--dropout=0.2          number 0 1        ; dropout probability
--model=dpformer       {dpformer,transformer,transformer-untied,gru,lstm,transitions} \
; what is trained
--shares=private       {private,exact}   ; of items; exact: outside of the guarantee
--prior=transitions    {transitions,popularity,none} ; that the model adds to
--top                  whole 1           ; items with embeddings; those that stand out
--popularity-share     number 0 1        ; of the budget; 0.0225, with transitions \
below epsilon 2 0.1
--train-share          number 0 1        ; of the budget; 0.5, with --data 0.05
--where=logits         {logits,scores}   ; Re-Attention acts there
--cap=1                number 0          ; of keys' variances, by their squares; 0: none
--grad-sample-mode=ghost_bk {ghost_bk,ghost,hooks} ; how gradients are clipped
--clipping=automatic   text              ; flat, automatic or normalized
--max-grad-norm=1      number 1e-12      ; norm of a user's clipped gradient
--ema=0                number 0 1        ; decay of the average of weights; 0: none
--once                 yes-no            ; nobody has an item twice, so own items \
come last; by default if --data has ratings
--validate             flag              ; measure on the last items but one
--seed                 whole 0 9.223372036854775808e18 ; of weights, batches and \
noise: a secret; drawn, of synthetic data 0
--device=cpu           text              ; such as cuda
--threads=1            whole 1           ; CPU threads
--checkpoint[FILE]     text              ; is written after each epoch
--resume               flag              ; go on from --checkpoint
--repeat-noise         flag              ; go on bit for bit, once from a checkpoint
--stop-after-epochs    whole 1           ; stop early, to be resumed
--time-limit           number 1e-12      ; seconds; stop at the last epoch that fits
--evaluate-every       whole 1           ; epochs, for the curve of --json
--save[FILE]           text              ; the model with the names of its items
--statement[FILE]      text              ; the privacy statement, in Markdown
--load[FILE]           text              ; a saved model: nothing is trained
--recommend-to[USER]   append            ; of --data; prints ten items for each
--no-progress          flag              ; no progress
""",
}

#: Of "recommend", where they are not given: on synthetic data, and on --data.
SYNTHETIC = {"epochs": 5, "batch_size": 256, "max_len": 30, "lr": 3e-3}
SYNTHETIC |= {"train_share": 0.5, "seed": 0}
REAL = {"epochs": 20, "batch_size": 1024, "max_len": 50, "lr": 9e-3}
REAL |= {"train_share": 0.05}


def _fill_recommend(args: argparse.Namespace) -> None:
    """Fills in the options whose default depends on others."""
    defaults = dict(REAL if args.data else SYNTHETIC)
    if args.data and args.model == "transitions":
        defaults["max_len"] = 100
    # Of a small budget popularity needs more, to say which items stand out.
    small = args.epsilon < 2 and args.prior == "transitions"
    defaults["popularity_share"] = 0.1 if small else 0.0225
    for name, value in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def _problems_of_recommend(args: argparse.Namespace) -> Iterator[str]:
    if args.recommend_to and not args.data:
        yield "--recommend-to needs --data, which has the histories"
    if args.load:
        if not args.recommend_to:
            yield "--load needs --recommend-to USER"
        if args.checkpoint or args.save or args.statement:
            yield "--load trains nothing: leave out --checkpoint, --save, --statement"


#: Peak FLOP/s of GPUs, dense, in bfloat16 (float16 where they have none).
GPUS = {
    "t4": 65e12,
    "v100": 125e12,
    "a10": 125e12,
    "a10g": 70e12,
    "a40": 150e12,
    "a100": 312e12,
    "l4": 121e12,
    "l40s": 362e12,
    "h100": 989e12,
    "h200": 989e12,
    "b200": 2250e12,
    "3090": 71e12,
    "4090": 165e12,
    "5090": 210e12,
    "mi250x": 383e12,
    "mi300x": 1307e12,
}
_SUFFIXES = {"k": "e3", "m": "e6", "b": "e9", "t": "e12"}
_THOUSANDS = re.compile(r"\d{1,3}(,\d{3})+")


def _gpu(text: str) -> Tuple[int, float]:
    """A number of GPUs and the peak of one: "h100", "8xh100", "3e14"."""
    many, name = re.findall(r"^(?:(\d+)\s*x)?(.*)$", text.lower().strip())[0]
    name = re.sub("nvidia|geforce|rtx|amd|[ _-]", "", name)
    try:
        peak = GPUS.get(name) or _numbers("number", "1e6", "1e30")(name)
        return _numbers("whole", "1", "1e9")(many or "1"), peak
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is none of {', '.join(GPUS)}, nor its peak in FLOP/s, as 3e14"
        ) from None


def _split(text: str) -> Sequence[str]:
    """The parts of a list; commas of thousands, as in 50,000, separate none."""
    parts = text.split(",")
    zeros = [part.startswith("0") for part in parts[1:]]
    if not _THOUSANDS.fullmatch(text) or not any(zeros):
        return parts
    if not all(zeros):
        raise argparse.ArgumentTypeError(
            f"{text!r} may be one number or several: write it without commas of "
            "thousands, as 1500000 or 1.5M"
        )
    return [text]


def _numbers(kind: str, low: str = "0", high: str = "inf") -> Callable[[str], Any]:
    """A reader of a number ("1e6", "50k", "50,000"), of a list or a range of them."""
    whole, above = kind.startswith("whole"), low.startswith(">")
    least, most = float(low.strip(">")), float(high)
    wanted = "a whole number" if whole else "a number"
    wanted += f", above {least:g}" if above else f", {least:g} or more"
    wanted += "" if most == math.inf else f", at most {most:g}"

    def one(text: str) -> float:
        plain = text.strip()
        if _THOUSANDS.fullmatch(plain):
            plain = plain.replace(",", "")
        suffix = _SUFFIXES.get(plain[-1:].lower(), "")
        try:
            value = float(plain[:-1] + suffix if suffix else plain)
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
        return [one(part) for part in _split(text)]

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
    elif kind == "yes-no":
        settings["action"] = argparse.BooleanOptionalAction
    elif kind == "append":
        settings |= dict(action="append", default=[])
    elif kind == "gpu":
        settings["type"] = _gpu
    elif kind == "hold-out":
        settings |= dict(type=_hold_out, action="append", default=[])
    elif kind == "words":
        settings["type"] = lambda text: list(filter(None, text.split(",")))
    elif kind != "text":
        settings["type"] = _numbers(kind, *bounds)
    command.add_argument(*name.strip("!").split(","), **settings)


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are short, and end with an example."""

    def error(self, message: str) -> NoReturn:
        example = re.search(r"^ *(opacus-ext .*?)(  |$)", self.epilog or "", re.M)
        lines = [f"{self.prog}: error: {message}"]
        if example:
            lines.append(f"For example: {example[1]}")
        self.exit(2, "\n".join([*lines, f"All options: {self.prog} --help\n"]))


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``opacus-ext``; parsed arguments name their command."""
    raw: Any = dict(formatter_class=argparse.RawDescriptionHelpFormatter)
    parser = _Parser(prog="opacus-ext", epilog=EPILOG[None], **raw)
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
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
    parser = build_parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        parser.exit(2)
    for problem in _problems(args):
        args.parser.error(problem)
    if args.command == "recommend":
        _fill_recommend(args)
    return args


def until_nobody_reads(command: Callable[[], int]) -> int:
    """Runs a command whose output may be cut off, as by ``| head``, and flushes it."""
    try:
        try:
            return command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # What is left in the buffer would be reported when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def needs_torch(args: argparse.Namespace) -> bool:
    """True if a command trains or reads a model."""
    commands = ("measure", "recommend")
    return args.command in commands or COMMANDS[args.command][0] == "check"


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
        yield from _problems_of_noise(args)
    if args.command == "recommend":
        yield from _problems_of_recommend(args)
    files = ["measurements", "noise_free", "text", "items", "load"]
    if args.command == "statement":
        files.append("checkpoint")
    for name in files:
        path = getattr(args, name, None)
        if path and path != "example" and not os.path.exists(path):
            yield f"there is no {path}"
    target = getattr(args, "target", None)
    if target and ":" not in target and not os.path.isdir(target):
        yield f"target {target!r} is neither a folder nor module:function"


# Options of "plan" that the choice of a noise does not know.
_WITHOUT_NOISE = (
    "gpu gpus hours tokens measurements law rank noise_free utilization price trials"
).split()


def _problems_of_noise(args: argparse.Namespace) -> Iterator[str]:
    if not args.noise:
        if args.momentum is not None:
            yield "--momentum goes with --noise"
        return
    for name in ("users", "epsilon", "batch_size", "steps"):
        if len(set(getattr(args, name) or ())) != 1:
            yield f"--noise is of one run: give one --{name.replace('_', '-')}"
    if args.sampling == "records" or args.amplification == "none":
        yield "--noise is of Poisson samples of users"
    for name in _WITHOUT_NOISE:
        if getattr(args, name):
            yield f"--noise asks no law: leave out --{name.replace('_', '-')}"
    if args.flops != [math.inf]:
        yield "--noise asks no law: leave out --flops"


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
    if args.gpu is None and (args.hours or args.price or args.gpus or args.utilization):
        yield "--hours, --gpus, --price and --utilization need --gpu, such as h100"
    elif args.gpu and args.gpu[0] > 1 and args.gpus:
        yield "--gpu and --gpus both tell a number of GPUs"
    if args.hours and args.flops != [math.inf]:
        yield "--hours and --flops both bound the compute: give one of them"
    fixed = args.amplification == "none"
    if args.code == "trainer" and (fixed or args.sampling == "records"):
        yield "--code trainer is of Poisson samples of users, not of records"
    if law and bool(fitted) == (law in ("paper", "rule")):
        yield (
            "--law surface, L1 and L2 are fitted to --measurements, paper and rule go "
            "without"
        )
