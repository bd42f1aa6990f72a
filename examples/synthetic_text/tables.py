"""Tables of labeled texts: CSV, TSV or JSON lines."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Tuple

from opacus_ext.refused import Refused

USUAL = {
    "text": "text sentence content review body comment message".split(),
    "label": "label class category sentiment rating stars target".split(),
}


class Row(NamedTuple):
    text: str
    label: str
    user: Any = None


def read_table(
    path: str, text: Optional[str], label: Optional[str], user: Optional[str]
) -> Tuple[List[Row], Dict[str, Any], Dict[str, str]]:
    """
    Reads the rows, what the file has for each label, and the columns of "text", "label"
    and, if it is named, "user". The first two are guessed if they are not named.
    """
    rows: List[Row] = []
    labels: Dict[str, Any] = {}
    columns: Dict[str, str] = {}
    for number, cells in _lines(path):
        named = {"text": text, "label": label} | ({"user": user} if user else {})
        columns = columns or _columns(path, list(cells), named)
        row = {what: cells.get(name) for what, name in columns.items()}
        for what, cell in row.items():
            if cell is None or cell != cell or not str(cell).strip():  # or NaN
                reason = f"{path}, line {number}: {columns[what]!r} is empty."
                raise Refused(reason, remedy="Fill it in, or leave the row out.")
        labels[str(row["label"])] = row["label"]
        rows.append(Row(str(row["text"]), str(row["label"]), row.get("user")))
    if len(labels) < 2:
        reason = f"{path}: {len(rows)} rows with {len(labels)} label(s)."
        raise Refused(reason, remedy="Give texts of two labels or more.")
    return rows, {name: labels[name] for name in sorted(labels)}, columns


def is_held_out(row: Row, seed: int, share: float) -> bool:
    """
    Whether a row is kept from training. It depends on the row's user, or its text, and
    on no other row: one row more in the table moves no other row.
    """
    unit = row.text if row.user is None else row.user
    digest = hashlib.sha256(f"{seed} {unit}".encode(errors="replace")).digest()
    return int.from_bytes(digest[:6], "big") < share * 256**6


def _lines(path: str) -> Iterator[Tuple[int, Dict[Any, Any]]]:
    """Numbers of lines, and their cells by the names of columns."""
    kind, number = Path(path).suffix.lower(), 0
    try:
        file = io.StringIO(Path(path).read_bytes().decode("utf-8-sig"), newline="")
        delimiter = "," if kind == ".csv" else "\t"
        if kind == ".csv" and "," not in (head := file.readline()) and ";" in head:
            raise ValueError("columns are separated by semicolons, not commas")
        file.seek(0)
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        for cells in reader if kind in (".csv", ".tsv") else ():
            if None in cells or None in cells.values():
                raise ValueError("more or fewer cells than columns")
            number = reader.line_num
            yield number, cells
        for number, line in enumerate(file):  # a table was read above
            cells = json.loads(line) if line.strip() else {}
            if not isinstance(cells, dict):
                raise ValueError("no JSON object")
            if re.search("[\ud800-\udfff]", " ".join(map(str, cells.values()))):
                raise ValueError("half a character, an escaped surrogate")
            if cells:
                yield number + 1, cells
    except (ValueError, csv.Error) as error:
        reason = f"{path} can't be read after line {number}: {error}."
        remedy = (
            "Save it in UTF-8 as .jsonl, a JSON object in each line, or as .csv or "
        )
        remedy += '.tsv, with texts in quotes and "" for a quote in a text.'
        raise Refused(reason, remedy=remedy) from error


def _columns(
    path: str, names: List[str], named: Dict[str, Optional[str]]
) -> Dict[str, str]:
    """The columns that are named, or the only ones that have usual names."""
    columns = {}
    for what, name in named.items():
        fitting = [each for each in names if each == name]
        if name is None:
            fitting = [each for each in names if each.lower() in USUAL[what]]
        if len(fitting) != 1:
            reason = f"{path} has the columns {', '.join(names)}: "
            reason += f"which has the {what}" + (f", if not {name!r}?" if name else "?")
            raise Refused(reason, remedy=f"Name it: --{what} COLUMN.")
        columns[what] = fitting[0]
    return columns
