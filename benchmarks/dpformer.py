"""The experiments of the DPFormer paper: one JSON line a run, resumable.

    python benchmarks/dpformer.py table1 --data ml-1m.txt --out table1.jsonl
    python benchmarks/dpformer.py figure2 --data ml-1m.txt --out figure2.jsonl
    python benchmarks/dpformer.py figure6 --data ml-1m.txt --out figure6.jsonl
    python benchmarks/dpformer.py table2 --data Video.txt --out table2.jsonl
    python benchmarks/dpformer.py paper --data ml-1m.txt --out paper.jsonl

A run that is in the file already is not made again, and one that was cut off goes on
from its last epoch (checkpoints lie in OUT.d and are deleted when the run is done):
after an interruption give the same command. ``--jobs 8`` makes eight runs at a time,
each in a process of its own, on one GPU or on the cores of a CPU; several machines
share the work by ``--seeds`` or ``--epsilons``. ``--list`` says which runs are done and
which are left, and makes none. ``dpformer_report.py`` draws tables and figures.

- table1, table2: GRU, LSTM, Transformer without sharing, Transformer, DPFormer at
  epsilon 5, 8 and 10, several seeds.
- figure2: Transformer with sharing, without, and without at half the width, at epsilon
  5, over batch sizes and learning rates.
- figure7: Transformer and DPFormer over the same, at epsilon 8, for Amazon Games.
- releases: what is released once, and no training, at epsilon 1, 2, 5, 8 and 10.
- paper: Transformer and DPFormer at the paper's settings, 100 epochs of 200 items,
  three seeds, on top of nothing and of what is released once. On a CPU it takes days;
  on a GPU: ``paper --jobs 8 ... -- --device cuda --physical-batch-size 1024``. With
  another physical batch size a run counts as the same one: it differs by what dropout
  draws, and by rounding.
- figure6: the curves of NDCG over the epochs, Transformer and DPFormer.

Everything can be set (``--models``, ``--epsilons``, ``--seeds``, ``--batch-sizes``,
``--lrs``); what follows after ``--`` goes to ``opacus-ext recommend``, such as
``-- --epochs 20 --threads 2``.
"""

import argparse
import hashlib
import itertools
import json
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Dict, Iterator, List

sys.path.insert(0, str(Path(__file__).parents[1]))
from opacus_ext.planner.commands.options import parse  # noqa: E402
from opacus_ext.recommend import releasing, training  # noqa: E402

NAMES = {
    "gru": "GRU",
    "lstm": "LSTM",
    "transformer-untied": "Transformer w/o PS",
    "transformer-untied-half": "Transformer w/o PS, half width",
    "transformer": "Transformer",
    "dpformer": "DPFormer",
    "transitions": "Transitions, not trained",
}
# The paper's models, which start from popularity.
TABLE: Dict[str, Any] = {
    "models": ["gru", "lstm", "transformer-untied", "transformer", "dpformer"],
    "epsilons": [5.0, 8.0, 10.0],
    "seeds": [0, 1, 2],
    "batch_sizes": [2048],
    "lrs": [9e-3],
    "more": ["--prior", "popularity"],
}
# The paper's grid of settings.
GRID: Dict[str, Any] = {
    "seeds": [0],
    "batch_sizes": [256, 512, 1024, 2048, 4096],
    "lrs": [1e-3, 3e-3, 5e-3, 7e-3, 9e-3],
}
EXPERIMENTS: Dict[str, Dict[str, Any]] = {
    "table1": TABLE,
    "table2": {**TABLE, "more": [*TABLE["more"], "--dropout", "0.5"]},
    "figure2": {
        **GRID,
        "models": ["transformer", "transformer-untied", "transformer-untied-half"],
        "epsilons": [5.0],
        "more": ["--prior", "popularity"],
    },
    "figure7": {
        **GRID,
        "models": ["transformer", "dpformer"],
        "epsilons": [8.0],
        "more": ["--prior", "popularity", "--dropout", "0.5"],
    },
    "figure6": {
        "models": ["transformer", "dpformer"],
        "epsilons": [5.0, 8.0, 10.0],
        "seeds": [0],
        "batch_sizes": [2048],
        "lrs": [9e-3],
        "more": ["--prior", "popularity", "--evaluate-every", "5"],
    },
    "paper": {
        **TABLE,
        "models": ["transformer", "dpformer"],
        "priors": ["none", "transitions"],
        "more": [
            *("--epochs", "100", "--max-len", "200", "--clipping", "normalized"),
            *("--evaluate-every", "10"),
        ],
    },
    "releases": {
        "models": ["transitions"],
        "epsilons": [1.0, 2.0, 5.0, 8.0, 10.0],
        "seeds": list(range(10)),
        "batch_sizes": [2048],
        "lrs": [9e-3],
        "more": ["--train-share", "0"],
    },
}


def runs(args: argparse.Namespace, rest: List[str]) -> Iterator[List[str]]:
    """The arguments of each run, seeds last, so that all settings come early."""
    grid = itertools.product(
        args.seeds, args.epsilons, args.batch_sizes, args.lrs, args.priors, args.models
    )
    for seed, epsilon, batch_size, lr, prior, model in grid:
        half = model.endswith("-half")
        argv = [
            *("--data", args.data, "--model", model.removesuffix("-half")),
            *("--epsilon", str(epsilon), "--delta", "1e-5", "--seed", str(seed)),
            *("--lr", str(lr)),
            *("--batch-size", str(batch_size)),
            *(("--width", "32") if half else ()),
            *(("--prior", prior) if prior is not None else ()),
        ]
        yield [*argv, *EXPERIMENTS[args.experiment].get("more", []), *rest]


def key(argv: List[str]) -> str:
    """What tells runs apart, whatever does not change them."""
    config = {
        k: v
        for k, v in vars(parse(["recommend", *argv])).items()
        if k not in training.FREE
    }
    config["data"] = Path(parse(["recommend", *argv]).data).name
    # As runs have it that were measured. How many users are in memory at once doesn't
    # matter.
    config["physical_batch_size"] = 1024
    if config["clipping"] == "normalized":
        config["clipping"] = "normalised"
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]


def make(name: str, todo: Dict[str, List[str]], args: argparse.Namespace) -> None:
    """Makes or resumes one run, and writes its line."""
    run, number = todo[name], list(todo).index(name) + 1
    checkpoint = Path(f"{args.out}.d") / f"{name}.pt"
    if parse(["recommend", *run]).train_share:  # else nothing is trained, or resumed
        run = [*run, "--checkpoint", str(checkpoint)]
    if checkpoint.exists():
        run.append("--resume")
    parsed = parse(["recommend", *run])
    print(f"run {number} of {len(todo)}: {' '.join(run)}", flush=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Opacus on how noise is drawn
        summary = training.train(parsed, training.read_data(parsed)).summary
    if summary["epochs"] < summary["epochs_planned"]:
        return  # stopped by --time-limit or --stop-after-epochs
    config = {k: v for k, v in vars(parsed).items() if k not in training.FREE}
    line = {"key": name, "experiment": args.experiment, **config, **summary}
    with args.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    checkpoint.unlink(missing_ok=True)
    print(training.summary_table(summary), flush=True)


def in_process(argv: List[str], name: str) -> str:
    """Makes one run in a process of its own; returns its error, or nothing."""
    command = [sys.executable, __file__, "--only", name, *argv]
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, end="", flush=True)
    return done.stderr if done.returncode else ""


def main(argv: List[str]) -> None:
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("experiment", choices=list(EXPERIMENTS))
    parser.add_argument("--data", required=True, help="SASRec text or ratings.dat")
    parser.add_argument("--out", required=True, type=Path, help="file of JSON lines")
    parser.add_argument("--models", nargs="+", choices=list(NAMES))
    parser.add_argument("--epsilons", nargs="+", type=float)
    parser.add_argument("--seeds", nargs="+", type=int)
    parser.add_argument("--batch-sizes", nargs="+", type=int)
    parser.add_argument("--lrs", nargs="+", type=float)
    parser.add_argument("--priors", nargs="+", choices=releasing.PRIORS)
    parser.add_argument("--jobs", type=int, default=1, help="so many runs at a time")
    parser.add_argument("--list", action="store_true", help="make no run; say which")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # the key of one run
    args = parser.parse_args(argv[:split])
    for name, value in EXPERIMENTS[args.experiment].items():
        if getattr(args, name, ...) is None:
            setattr(args, name, value)
    args.priors = args.priors or [None]  # that of the experiment

    todo = {key(run): run for run in runs(args, argv[split + 1 :])}
    if args.only:
        return make(args.only, todo, args)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {json.loads(line)["key"] for line in lines}
    left = [name for name in todo if name not in done]
    if args.list:
        for name, run in todo.items():
            print("left" if name in left else "done", *run)
        return print(f"{len(todo) - len(left)} done, {len(left)} left")
    checkpoints = Path(f"{args.out}.d")
    checkpoints.mkdir(parents=True, exist_ok=True)
    errors = []
    if args.jobs > 1:
        with ThreadPoolExecutor(args.jobs) as pool:
            errors = [*filter(None, pool.map(partial(in_process, argv), left))]
    else:
        for name in left:
            make(name, todo, args)
    if not any(checkpoints.iterdir()):
        checkpoints.rmdir()
    if errors:
        raise SystemExit(
            f"{errors[0]}\n{len(errors)} of {len(left)} runs have ended in an error, "
            "of which this is the first. The same command tries them again."
        )


if __name__ == "__main__":
    main(sys.argv[1:])
