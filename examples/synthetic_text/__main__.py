"""Writes synthetic texts from private ones: docs/how-to/synthetic-text.md explains it.

    python -m examples.synthetic_text --data reviews.csv --model PATH --epsilon 8 \\
        --out synthetic.jsonl
"""

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import List, Optional

import torch

from examples.options import bounded_number, option
from examples.synthetic_text.report import report
from examples.synthetic_text.tables import is_held_out, read_table
from examples.synthetic_text.writer import Writer
from opacus_ext.refused import Refused

STATEMENT = """{}

## The texts

This model wrote the {} texts of {}, and what is guaranteed for its weights is
so for them. Not covered are the names of columns and labels ({}), and report.md,
which is not to be published.
"""


def parse_args(argv: Optional[List[str]] = None) -> argparse.Namespace:
    """The command line, or a list such as ``["--epsilon", "5"]``."""
    parser = argparse.ArgumentParser(
        "python -m examples.synthetic_text",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = functools.partial(option, parser)
    positive, count = bounded_number(float, 1e-12), bounded_number(int, 1)
    some, share = bounded_number(int, 0), bounded_number(float, 0, 1)
    add("--data", None, str, "table: .csv, .tsv or .jsonl", required=True)
    add("--model", None, str, "causal language model: a folder or name", required=True)
    add("--out", None, str, "file of texts to write, .jsonl", required=True)
    add("--epsilon", None, positive, "of the whole run", required=True)
    add(
        "--delta",
        None,
        bounded_number(float, 1e-300, 0.5),
        "of it (default: 1 / records^1.1)",
    )
    add("--text", None, str, "column of texts (default: one of a usual name)")
    add("--label", None, str, "column of labels (default: one of a usual name)")
    add("--user", None, str, "column of users: one record is then all texts of a user")
    text = "all labels, and their names in prompts (default: those of the table)"
    add("--labels", None, str, text, nargs="+", metavar="LABEL[=NAME]")
    text = "template; {label} stands for the name (default: the name, in a line)"
    parser.add_argument("--prompt", default="{label}\n", help=text)
    add("--texts", 100, count, "to write for each label")
    add("--temperature", 1.0, positive, "of sampling")
    add("--top-p", 0.95, bounded_number(float, 1e-6, 1), "of sampling")
    add("--max-tokens", 128, count, "of a prompt and its text; the rest is cut off")
    add("--lora-rank", 16, some, "of adapters; 0 tunes all weights")
    add("--epochs", 10, count, "passes over the records")
    add("--batch-size", 256, count, "records in a step, expected")
    add("--physical-batch-size", 16, count, "records, or new texts, in memory at once")
    add("--lr", 1e-3, positive, "learning rate; for all weights take a tenth")
    add("--held-out", 0.1, share, "share of records that are not trained on")
    add("--canaries", 0, some, "random texts to train on, too, and to look for")
    add("--seed", 0, int, "of all but noise and batches")
    text = "noise and batches by random numbers of the operating system"
    parser.add_argument("--secure-mode", action="store_true", help=text)
    add("--save", None, str, "folder for the tuned model")
    return parser.parse_args(argv)


def synthesize(args: argparse.Namespace) -> None:
    """Runs what the arguments describe."""
    out = Path(args.out)
    beside = "statement.json", "statement.md", "report.md"
    as_json, as_text, private = map(out.with_name, beside)
    if out.name in beside:
        reason = f"{out.name} is the name of another file that is written beside it."
        raise Refused(reason, remedy="Name it synthetic.jsonl, say.")
    files = [out, as_json, as_text, private, *([Path(args.save)] if args.save else [])]
    if there := [path for path in files if path.exists()]:
        reason = f"{there[0]} is there already, and each run spends an epsilon."
        raise Refused(reason, remedy="Give another folder.")
    rows, labels, columns = read_table(args.data, args.text, args.label, args.user)
    names = dict.fromkeys(labels, "")
    if args.labels:
        names = {x.partition("=")[0]: x.partition("=")[2] for x in args.labels}
    if other := labels.keys() - names.keys():
        reason = f"The table has rows of another label, {min(other)!r}."
        raise Refused(reason, remedy="Add it to --labels, or leave its rows out.")
    if len(labels) > 50 and not args.labels:
        reason = f"The column {columns['label']!r} has {len(labels)} different values."
        raise Refused(reason, remedy="Give all by --labels, or another --label.")
    unit = f"all texts of one {args.user!r}" if args.user else "one text (see --user)"
    print(
        f"{args.data}: {len(rows)} texts in the column {columns['text']!r}.\n"
        f"Taken as public: the labels in {columns['label']!r} ({', '.join(names)}).\n"
        f"One record, which epsilon protects, is {unit}."
    )
    held_out = [row for row in rows if is_held_out(row, args.seed, args.held_out)]
    training = [row for row in rows if not is_held_out(row, args.seed, args.held_out)]
    if not training:
        reason = f"All {len(rows)} rows would be held out."
        raise Refused(reason, remedy="Give a smaller --held-out.")
    torch.manual_seed(args.seed)
    writer = Writer(args, names)
    canaries = writer.canaries(args.canaries, "trained on")
    out.parent.mkdir(parents=True, exist_ok=True)  # what fails, fails before training
    trainer = writer.train([*writer.records(training), *canaries])
    if args.save:
        trainer.save_model(args.save)
    torch.manual_seed(args.seed)
    synthetic = [row for label in names for row in writer.write(label)]

    with out.open("w", encoding="utf-8") as file:
        for row in synthetic:
            # As in the table would tell which of the list's labels no text has.
            label = row.label if args.labels else labels[row.label]
            line = {columns["text"]: row.text, columns["label"]: label}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    statement = trainer.privacy_statement()
    as_json.write_text(statement.json() + "\n", encoding="utf-8")
    count, public = len(synthetic), ", ".join(names)
    text = STATEMENT.format(statement, count, out.name, public)
    as_text.write_text(text, encoding="utf-8")
    fresh = writer.canaries(1000 if canaries else 0, "fresh")
    losses = writer.losses(canaries), writer.losses(fresh)
    text = report(training, held_out, synthetic, *losses)
    private.write_text(text, encoding="utf-8")
    print(statement.text.splitlines()[2])
    print(f"{out}: {count} texts, which {as_text.name} goes with.")
    print(f"{private}: NOT private, for the owner of {args.data} only.")


def main(argv: Optional[List[str]] = None) -> int:
    """The exit status; 2 for files and arguments that can't be used."""
    try:
        synthesize(parse_args(argv))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
