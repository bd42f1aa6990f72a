"""SST-2 and MNLI of GLUE, read from their TSV files as text-to-text examples."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, List, NamedTuple, Sequence, Tuple, Union

import torch

from opacus_ext.refused import Refused


class Task(NamedTuple):
    """
    How a row of a file becomes a text to read and a class to name.

    Attributes:
        prompt: the text, with the names of columns in braces
        label: the column of the class
        classes: how the file writes the classes; their order numbers them
        words: what the model is to answer for each class
        train: file to train on
        dev: file to measure on
        also: other headers of a column than the one GLUE gives it
    """

    prompt: str
    label: str
    classes: Tuple[str, ...]
    words: Tuple[str, ...]
    train: str
    dev: str
    also: Dict[str, str] = {}


_NLI = ("entailment", "neutral", "contradiction")
TASKS = {
    "sst2": Task(
        prompt="sst2 sentence: {sentence}",
        label="label",
        classes=("0", "1"),
        words=("negative", "positive"),
        train="train.tsv",
        dev="dev.tsv",
        also={"content": "sentence"},
    ),
    "mnli": Task(
        prompt="mnli premise: {sentence1} hypothesis: {sentence2}",
        label="gold_label",
        classes=_NLI,
        words=_NLI,
        train="train.tsv",
        dev="dev_matched.tsv",
    ),
}


@dataclass(frozen=True)
class Examples:
    """
    The rows of a file; a row is a sample, and so the unit of privacy.

    Attributes:
        texts: what the model reads, the task's prompt included
        classes: ``[rows]``, numbered as in ``Task.classes``
    """

    texts: List[str]
    classes: torch.Tensor

    def fingerprint(self) -> str:
        """A digest that changes whenever a text or a class does."""
        digest = hashlib.sha256(self.classes.numpy().tobytes())
        for text in self.texts:
            digest.update(text.encode() + b"\n")
        return digest.hexdigest()[:16]


def read_glue(path: Union[str, Path], task: str) -> Examples:
    """
    Reads a file in the form GLUE has them: a header, tabs between columns, no quoting.

    Columns are found by their name, in any order. Rows of MNLI on whose label its
    annotators did not agree ("-") are left out.

    Args:
        path: the file
        task: "sst2" or "mnli"

    Raises:
        OSError: if the file can't be read
        Refused: if the file is not UTF-8, a column is missing, a row has another number
            of columns than the header, a class is unknown (test files have none), or
            there is no row; the message names the line

    Example:
        >>> from pathlib import Path
        >>> _ = Path("dev.tsv").write_text("sentence\\tlabel\\na fine film\\t1\\n")
        >>> read_glue("dev.tsv", "sst2")
        Examples(texts=['sst2 sentence: a fine film'], classes=tensor([1]))
    """
    form = TASKS[task]
    number = {name: i for i, name in enumerate(form.classes)}
    texts, classes = [], []
    first, *lines = _lines(path)
    header = _cells(first)
    names = [form.also.get(name, name) for name in header]
    missing = [name for name in _needed(form) if name not in names]
    if missing:
        raise Refused(
            f"{path}: no column {' or '.join(missing)} in its first line, which "
            f"has {', '.join(header)[:200]!r}.",
            parameter="path",
            remedy=f"{task} needs the files of GLUE that have labels.",
        )
    for line, text in enumerate(lines, start=2):
        if not text.strip():
            continue
        cells = _cells(text)
        if len(cells) != len(names):
            raise Refused(
                f"{path}, line {line}: {len(cells)} columns, but the first line "
                f"has {len(names)}.",
                parameter="path",
                remedy="Mend the line, or leave it out.",
            )
        row = dict(zip(names, cells))
        if row[form.label] == "-":
            continue
        if row[form.label] not in number:
            raise Refused(
                f"{path}, line {line}: {form.label} is {row[form.label][:40]!r}, "
                f"not one of {', '.join(form.classes)}.",
                parameter="path",
                remedy="Mend the line, or leave it out.",
            )
        texts.append(form.prompt.format_map(row))
        classes.append(number[row[form.label]])
    if not texts:
        raise Refused(
            f"{path}: no rows.", parameter="path", remedy="Give a file with some."
        )
    return Examples(texts, torch.tensor(classes))


def _lines(path: Union[str, Path]) -> List[str]:
    """The lines of a file, at least one; other characters that end lines do not."""
    try:
        # A mark at the start, as some editors write it, is no part of a name.
        return Path(path).read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise Refused(
            f"{path} is not UTF-8 text ({error}).",
            parameter="path",
            remedy="Save it as UTF-8.",
        ) from error


def _cells(line: str) -> Sequence[str]:
    return [cell.strip() for cell in line.rstrip("\r\n").split("\t")]


def _needed(form: Task) -> List[str]:
    columns = [part.split("}")[0] for part in form.prompt.split("{")[1:]]
    return [*columns, form.label]
