"""Losses of training runs at several sizes, steps and noise-batch ratios."""

from __future__ import annotations

import csv
import json
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Dict, Iterable, List, Union

import numpy as np

from opacus_ext.accountants.solver import checked
from opacus_ext.refused import Refused

EXAMPLE = Path(__file__).parent / "data" / "tinyshakespeare.jsonl"
_META = "family tokens batch_size".split()
_SETTINGS = "parameters ratio learning_rate".split()


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

    def __post_init__(self) -> None:
        rows = len(checked("loss", self.loss, above=0))
        columns = {name: getattr(self, name) for name in _COLUMNS}
        for name in ("learning_rate", "planned"):
            if columns[name] is None:
                columns[name] = np.full(rows, np.nan)
        if self.run is None:
            cells = [*zip(*(map(str, columns[name]) for name in _SETTINGS))]
            kinds = [*dict.fromkeys(cells)]
            columns["run"] = [kinds.index(cell) for cell in cells]
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
                ratio and loss, and may have learning_rate, run and planned. The default
                are the runs that come with the package: byte-level transformers on
                Shakespeare

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
        table = read_table(path, "parameters", "steps", "ratio", "loss")
        columns: Any = {name: table[name] for name in _COLUMNS if name in table}
        return cls(**columns, family=path.stem)


_COLUMNS = [f.name for f in fields(Measurements) if f.name not in _META]


def read_table(path: Union[str, Path], *needed: str) -> Dict[str, np.ndarray]:
    """
    The columns of numbers of a table (CSV) by their names in its first line; refuses
    one without those that are needed.
    """
    columns = {}
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        for name, *values in zip(*filter(None, csv.reader(file))):
            with suppress(ValueError):  # a column of words
                columns[name.strip()] = np.array(values, dtype=float)
    missing = [name for name in needed if not len(columns.get(name, ()))]
    if missing:
        raise Refused(
            f"{path} has no column of numbers {', '.join(missing)}.",
            parameter="measurements",
            remedy="Name the columns in its first line. A loss is the cross-entropy in "
            "nats, no accuracy.",
        )
    return columns


def read_runs(path: Union[str, Path]) -> List[Dict[str, Any]]:
    """The runs of a file, one JSON object a line."""
    runs = []
    names = "family tokens batch_size parameters ratio learning_rate loss steps".split()
    for number, line in enumerate(
        Path(path).read_text(errors="replace").splitlines(), 1
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
