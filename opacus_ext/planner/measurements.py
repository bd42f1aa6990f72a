"""Losses of training runs at several sizes, steps and noise-batch ratios."""

from __future__ import annotations

import csv
import json
import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

import numpy as np

from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused

EXAMPLE = Path(__file__).parent / "data" / "tinyshakespeare.jsonl"
_META = "family tokens batch_size".split()
_SETTINGS = "parameters ratio learning_rate".split()

#: Names of models and columns of results.csv, the measurements of the paper's authors.
BERT = {
    "BertTiny": 4.5e6,
    "BertMini": 11.4e6,
    "BertSmall": 29e6,
    "BertMedium": 41e6,
    "BertBase": 109e6,
    "BertLarge": 335e6,
    "BertMega": 778e6,
}
# The loss of guessing tokens by their frequency. BERT's pretraining that fails stays
# there (github.com/huggingface/transformers/issues/3983), and the paper's row of the
# least epsilon and users has 7.28.
BERT_UNIGRAM = 7.3
_OF_AUTHORS = {
    "Model": "parameters",
    "Iterations": "steps",
    "Noise Batch Ratio": "ratio",
    "Cross Entropy": "loss",
    "Learning Rate": "learning_rate",
}


@dataclass(frozen=True)
class Measurements:
    """
    Measured losses, one a row. A run has a row for each of its readings.

    Attributes:
        parameters: M, trainable parameters of the model, ``[rows]``
        steps: T, the optimizer's steps so far, ``[rows]``
        ratio: noise-batch ratio, the std of the noise in the mean gradient of
            clipped gradients of norm at most 1, ``[rows]``; 0 is noise-free
        loss: in nats a token, the mean over the steps since the row before, ``[rows]``
        learning_rate: ``[rows]``; nan where unknown
        run: number of the row's run, ``[rows]``
        planned: steps that the run was to have, ``[rows]``; nan where unknown. The loss
            of a run that ended before was not finite any more
        family: name of the models; planning for another family is guessing
        tokens: S, tokens of an example
        batch_size: the physical batch size of the runs; 0 where unknown
        may_lack_ratios: True if a ratio that a size lacks was never run, so that it may
            be interpolated; else runs that failed may be missing, and it is refused
        unigram: the loss of guessing each token by its frequency; inf where unknown

    Raises:
        Refused: for arrays of different lengths, none at all, and values that are
            not positive and finite (a ratio may be 0)

    Example:
        >>> runs = Measurements([1e4, 1e4], [10, 20], [0, 0], [5.0, 4.0])
        >>> len(runs), runs.select(runs.steps > 10).loss
        (1, array([4.]))
    """

    parameters: np.ndarray
    steps: np.ndarray
    ratio: np.ndarray
    loss: np.ndarray
    learning_rate: Any = None
    run: Any = None
    planned: Any = None
    family: str = ""
    tokens: int = 0
    batch_size: int = 0
    may_lack_ratios: bool = False
    unigram: float = math.inf

    def __post_init__(self) -> None:
        rows = len(checked("loss", self.loss, above=0))
        columns = {name: getattr(self, name) for name in _COLUMNS}
        for name in ("learning_rate", "planned"):
            if columns[name] is None:
                columns[name] = np.full(rows, np.nan)
        if self.run is None:
            cells = [*zip(*(map(str, columns[name]) for name in _SETTINGS))]
            numbers: Dict[Any, int] = {}
            columns["run"] = [numbers.setdefault(c, len(numbers)) for c in cells]
        for name, values in columns.items():
            if name in ("parameters", "steps"):
                checked(name, values, above=0)
            elif name == "ratio":
                checked(name, values, at_least=0)
            values = np.asarray(values, dtype=float)
            if values.shape != (rows,):
                raise Refused(
                    f"{name} has shape {values.shape}; loss has {rows} rows.",
                    parameter=name,
                )
            object.__setattr__(self, name, values)

    def __len__(self) -> int:
        """Number of runs."""
        return len(np.unique(self.run))

    @property
    def sizes(self) -> np.ndarray:
        """The model sizes, ascending."""
        return np.unique(self.parameters)

    @property
    def ratios(self) -> np.ndarray:
        """The noise-batch ratios, ascending."""
        return np.unique(self.ratio)

    def select(self, rows: Any) -> Measurements:
        """The measurements of some rows: a mask or indices."""
        return replace(self, **{name: getattr(self, name)[rows] for name in _COLUMNS})

    @classmethod
    def of_runs(cls, runs: Iterable[Dict[str, Any]]) -> Measurements:
        """
        The measurements of runs as :func:`opacus_ext.planner.measure.measure` writes
        them; refuses different families, lengths or batch sizes.
        """

        def cell(run: Dict[str, Any]) -> List[float]:
            return [run[name] for name in _SETTINGS]

        runs = list(runs)
        # The other seeds of a run without any loss don't count: they'd look too good.
        lost = [cell(run) for run in runs if not run["loss"]]
        runs = [run for run in runs if cell(run) not in lost]
        if not runs:
            raise Refused("No run has a loss.", parameter="measurements")
        common: Any = {}
        for name in _META:
            common[name], *others = dict.fromkeys(run[name] for run in runs)
            if others:
                raise Refused(
                    f"Runs of different {name} don't belong together: "
                    f"{common[name]!r} and {others[0]!r}.",
                    parameter=name,
                )
        common["unigram"] = min(run.get("unigram") or math.inf for run in runs)
        numbered = [
            {**run, "run": number, "planned": run.get("total_steps", np.nan)}
            for number, run in enumerate(runs)
        ]
        for name in _COLUMNS:
            columns = [np.broadcast_to(x[name], len(x["loss"])) for x in numbered]
            common[name] = np.concatenate(columns)
        return cls(**common)

    @classmethod
    def read(cls, path: Union[str, Path] = EXAMPLE) -> Measurements:
        """
        Reads runs (JSON, one a line) or a table with a header (CSV).

        Args:
            path: a file whose name ends in .csv has the columns parameters, steps,
                ratio and loss, and may have learning_rate, run and planned; or it is
                results.csv of the authors of "Scaling laws for differentially private
                language models", as it is. The default are the runs that come with the
                package: byte-level transformers on Shakespeare

        Raises:
            OSError: if the file can't be read
            Refused: if it has another form; the message says what is missing

        Example:
            >>> runs = Measurements.read()
            >>> runs.family
            'bytes'
        """
        path = Path(path)
        if path.suffix != ".csv":
            return cls.of_runs(read_runs(path))
        texts = read_texts(path)
        if _OF_AUTHORS.keys() <= texts.keys():
            return cls._of_authors(path, texts)
        table = read_table(path, "parameters", "steps", "ratio", "loss")
        columns: Any = {name: table[name] for name in _COLUMNS if name in table}
        return cls(**columns, family=path.stem)

    @classmethod
    def _of_authors(cls, path: Path, texts: Dict[str, List[str]]) -> Measurements:
        """BERT models of the paper, by name, at physical batches of 1,024."""
        unknown = sorted({*texts["Model"]} - BERT.keys())
        if unknown:
            raise Refused(
                f"{path} has models of unknown size: {', '.join(unknown)}.",
                parameter="measurements",
                remedy=f"Known are {', '.join(BERT)}.",
            )
        texts = {**texts, "Model": [str(BERT[name]) for name in texts["Model"]]}
        columns: Any = {
            ours: _numbers(path, texts, name) for name, ours in _OF_AUTHORS.items()
        }
        about: Any = dict(family="BERT", tokens=512, batch_size=1024)
        about |= dict(may_lack_ratios=True, unigram=BERT_UNIGRAM)
        return cls(**columns, **about)


_COLUMNS = [
    field.name
    for field in fields(Measurements)
    if field.name not in (*_META, "may_lack_ratios", "unigram")
]


def read_table(path: Union[str, Path], *needed: str) -> Dict[str, np.ndarray]:
    """
    The columns of numbers of a table (CSV) by their names in its first line; refuses
    one without those that are needed.
    """
    columns = {}
    for name, values in read_texts(path).items():
        with suppress(ValueError):  # a column of words
            columns[name] = np.array(values, dtype=float)
    missing = [name for name in needed if not len(columns.get(name, ()))]
    if missing:
        raise Refused(
            f"{path} has no column of numbers {', '.join(missing)}.",
            parameter="measurements",
            remedy="Name the columns in its first line, separate them by ',', and "
            "give a number in each line. A loss is the cross-entropy in nats, no "
            "accuracy.",
        )
    return columns


def read_texts(path: Union[str, Path]) -> Dict[str, List[str]]:
    """The columns of a table (CSV) by their names in its first line."""
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        try:
            rows = [*filter(None, csv.reader(file))]
        except (UnicodeError, csv.Error) as error:
            raise Refused(
                f"{path} is no table of text (CSV): {error}.", parameter="measurements"
            ) from error
    if len(rows) < 2:
        raise Refused(
            f"{path} has {len(rows)} lines: names of columns and a run are the least.",
            parameter="measurements",
        )
    columns = zip_longest(*rows, fillvalue="")  # a cell that is missing is no number
    return {name.strip(): values for name, *values in columns}


def _numbers(path: Path, texts: Dict[str, List[str]], name: str) -> np.ndarray:
    """A column of a table, all of it finite numbers."""
    try:
        column = np.array(texts[name], dtype=float)
        if not np.isfinite(column).all():
            raise ValueError(f"{np.sum(~np.isfinite(column))} of them not finite")
        return column
    except ValueError as error:
        raise Refused(
            f"{path}, column {name}: {error}.",
            parameter="measurements",
            remedy="Remove the lines that have no finite number there.",
        ) from error


def read_runs(path: Union[str, Path]) -> List[Dict[str, Any]]:
    """The runs of a file, one JSON object a line."""
    runs = []
    names = "family tokens batch_size parameters ratio learning_rate loss steps".split()
    for number, line in enumerate(
        Path(path).read_text("utf-8", errors="replace").splitlines(), 1
    ):
        try:
            run = json.loads(line)
            *_, loss, steps = (run[name] for name in names)
            if len(np.array(loss, float)) != len(np.array(steps, float)):
                raise ValueError("loss and steps differ in length")
        except (ValueError, KeyError, TypeError) as e:
            raise Refused(
                f"{path}, line {number}, is no run: {e!r}.",
                parameter="measurements",
                remedy="Remove the line, or pass a file that opacus-ext measure wrote.",
            ) from e
        runs.append(run)
    return runs
