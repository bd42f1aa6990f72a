"""Tables of what users did: a line for each action, read from files of many forms."""

from __future__ import annotations

import csv
import math
import re
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import (
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    TextIO,
    Tuple,
    Union,
)

from opacus_ext.refused import Refused

#: What a header may call each column, in small letters and digits alone.
NAMES: Dict[str, Sequence[str]] = {
    "user": "user userid username customer customerid reviewerid memberid uid".split(),
    "item": (
        "item itemid itemname movie movieid product productid asin parentasin isbn "
        "book bookid track trackid song songid artist artistid article articleid iid"
    ).split(),
    "time": "timestamp time date datetime unixreviewtime createdat ts".split(),
    "rating": "rating ratings score stars".split(),
}
#: The columns of a file without a header, by their number.
WITHOUT_HEADER = {
    2: ("user", "item"),
    3: ("user", "item", "time"),
    4: ("user", "item", "rating", "time"),
}
Time = Union[int, float]


class Actions(NamedTuple):
    """
    Columns of equal length, an entry for each action, in the order of the file.

    Attributes:
        times: None if the file has none: each user's lines are in order of time
        rated: whether the file has a column of ratings
    """

    users: List[str]
    items: List[str]
    times: Optional[List[Time]]
    rated: bool


class _Table(NamedTuple):
    """The fields of a file by column; each line has as many, and its number."""

    lines: Sequence[int]
    columns: List[List[str]]


def read_actions(
    path: Union[str, Path], columns: Optional[Sequence[str]] = None
) -> Actions:
    """
    Reads a table of users, items and times. Users and items are any texts.

    Fields are separated by commas, semicolons, tabs, ``::`` or spaces. A header may
    name the columns in any order, others among them (:data:`NAMES`). Without a header
    they are ``user item``, ``user item time`` or ``user item rating time``. Times are
    numbers or ISO dates. pandas reads the file where it is installed.

    Args:
        path: of a text file in UTF-8
        columns: the header's names of the user's, the item's and, if there is one, the
            time's column, for a header with other names

    Raises:
        OSError: if the file can't be read
        Refused: for a file of another form; the line and the column are named
    """
    path = Path(path)
    try:
        separator = _separator(path)
        by_pandas = _by_pandas(path, separator)
        if by_pandas is not None:
            # What is refused is read again by Python's own reader, which knows the
            # number of the line.
            with suppress(Refused):
                return _actions(path, by_pandas, columns)
        return _actions(path, _by_line(path, separator), columns)
    except UnicodeDecodeError:
        what, remedy = "this is no text in UTF-8", "Save the file as UTF-8."
        raise _refused(path, 0, what, remedy) from None


def _actions(path: Path, table: _Table, named: Optional[Sequence[str]]) -> Actions:
    """The columns that are needed, checked."""
    if not table.columns:
        return Actions([], [], None, False)
    header = [column[0] for column in table.columns]
    places, start = _places(path, header, named), 1
    if places is None:
        places, start = _places_without_header(path, table), 0
    lines = table.lines[start:]
    chosen = {kind: table.columns[i][start:] for kind, i in places.items()}
    titles = {
        kind: repr(header[i]) if start else f"{i + 1} ({kind})"
        for kind, i in places.items()
    }
    for kind in ("user", "item"):
        if "" in chosen[kind]:
            line = lines[chosen[kind].index("")]
            remedy = "Fill it in, or leave the line out."
            raise _refused(path, line, "it is empty", remedy, titles[kind])
    times = None
    if "time" in chosen:
        times = _times(path, lines, chosen["time"], titles["time"])
    return Actions(chosen["user"], chosen["item"], times, "rating" in places)


def _refused(
    path: Path, line: int, what: str, remedy: str, column: str = ""
) -> Refused:
    at = f", line {line}" if line else ""
    at += f", column {column}" if column else ""
    return Refused(f"{path}{at}: {what}.", parameter="path", remedy=remedy)


def _separator(path: Path) -> str:
    """What separates fields, by the first line: a character, or a pattern."""
    with path.open(encoding="utf-8-sig") as file:
        first = next((line for line in file if line.strip()), "")
    if "::" in first:
        return "::"
    counts = {
        separator: len(next(csv.reader([first], delimiter=separator)))
        for separator in ("\t", ";", ",")
    }
    best = max(counts, key=lambda separator: counts[separator])
    return best if counts[best] > 1 else r"\s+"


def _by_pandas(path: Path, separator: str) -> Optional[_Table]:
    """The fields if pandas is installed and finds as many in each line, else None."""
    try:
        import pandas
    except ImportError:
        return None
    # Quotation marks that are not closed are no errors to pandas.
    if len(separator) > 1 or _has_quotes(path):
        return None
    options: Any = dict(header=None, dtype=str, keep_default_na=False)
    try:
        frame = pandas.read_csv(path, sep=separator, encoding="utf-8-sig", **options)
    except ValueError:  # such as all errors of its parser
        return None
    if frame.isna().any(axis=None):
        return None
    columns = [frame[name].str.strip().tolist() for name in frame]
    return _Table(range(1, len(frame) + 1), columns)


def _has_quotes(path: Path) -> bool:
    with path.open("rb") as file:
        return any(b'"' in line for line in file)


def _by_line(path: Path, separator: str) -> _Table:
    """The fields by Python's own reader."""
    lines: List[int] = []
    rows: List[List[str]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for line, row in _split(path, file, separator):
            row = [field.strip() for field in row]
            if not any(row):
                continue
            if rows and len(row) != len(rows[0]):
                what = f"{len(row)} fields {row}, but {len(rows[0])} in the first line"
                remedy = "Mend the line, or leave it out."
                raise _refused(path, line, what, remedy)
            lines.append(line)
            rows.append(row)
    return _Table(lines, [list(column) for column in zip(*rows)])


def _split(path: Path, file: TextIO, separator: str) -> Iterator[Tuple[int, List[str]]]:
    """Yields the number and the fields of each line."""
    if len(separator) > 1:
        for number, line in enumerate(file, 1):
            yield number, re.split(separator, line.strip())
        return
    reader = csv.reader(file, delimiter=separator, strict=True)
    try:
        for row in reader:
            yield reader.line_num, row
    except csv.Error as error:
        remedy = "Mend its quotation marks."
        raise _refused(path, reader.line_num, str(error), remedy) from None


def _plain(name: str) -> str:
    """The name of a column without what differs between files: "User_ID:token"."""
    return re.sub(r"[^a-z0-9]", "", name.partition(":")[0].lower())


def _places(
    path: Path, header: List[str], named: Optional[Sequence[str]]
) -> Optional[Dict[str, int]]:
    """Where a header has each kind of column; None if the first line is none."""
    kinds = dict(NAMES)
    if named is not None:
        if not 2 <= len(named) <= 3:
            what = f"{len(named)} columns are named: {', '.join(named)}."
            remedy = "Name the user's, the item's and the time's column."
            raise Refused(what, parameter="columns", remedy=remedy)
        kinds = {"rating": NAMES["rating"]}
        kinds |= {kind: [_plain(name)] for kind, name in zip(NAMES, named)}
    plain = [_plain(name) for name in header]
    places: Dict[str, int] = {}
    for i, name in enumerate(plain):
        for kind, known in kinds.items():
            if name in known:
                places.setdefault(kind, i)
    if named is None and not places.keys() & {"user", "item"}:
        return None
    needed = {"user", "item"} if named is None else kinds.keys() - {"rating"}
    for kind in sorted(needed - places.keys()):
        known = ", ".join([*kinds[kind]][:4])
        what = f"none of the columns {header} is known as the {kind}'s ({known})"
        remedy = "Rename it, or name all: --columns USER,ITEM,TIME."
        raise _refused(path, 1, what, remedy)
    return places


def _places_without_header(path: Path, table: _Table) -> Dict[str, int]:
    count = len(table.columns)
    if count not in WITHOUT_HEADER:
        shown = [column[0] for column in table.columns]
        what = f"{count} fields without a header that is known: {shown}"
        remedy = "Give the file a header, such as user,item,timestamp."
        raise _refused(path, table.lines[0], what, remedy)
    places = {kind: i for i, kind in enumerate(WITHOUT_HEADER[count])}
    if count == 3 and len({*table.columns[2]}) <= 11:
        try:
            ratings = all(0 <= float(x) <= 10 for x in {*table.columns[2]})
        except ValueError:
            return places
        if ratings and len(table.lines) > 11:
            what = "the third column looks like ratings, not like times"
            remedy = "Give the file a header, such as user,item,rating,timestamp."
            raise _refused(path, table.lines[0], what, remedy)
    return places


def _times(
    path: Path, lines: Sequence[int], texts: List[str], title: str
) -> List[Time]:
    """Numbers of a column of times, in which all are numbers or all are dates."""
    if not texts:
        return []
    try:
        _number(texts[0])
        read: Callable[[str], Time] = _number
    except ValueError:
        read = _seconds
    times: List[Time] = []
    for line, text in zip(lines, texts):
        try:
            times.append(read(text))
        except ValueError:
            kind = "number" if read is _number else "ISO date (2024-05-01 12:30:00)"
            remedy = "All times are numbers, or all are ISO dates."
            if line == lines[0] and not title.startswith("'"):
                remedy += " Of a header, name the columns: --columns USER,ITEM,TIME."
            what = f"{text[:80]!r} is no {kind}"
            raise _refused(path, line, what, remedy, title) from None
    return times


def _number(text: str) -> Time:
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _seconds(text: str) -> Time:
    """Seconds since 1970 of an ISO date; without a zone it is in UTC."""
    # Python 3.10 reads no Z.
    date = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return date.timestamp()
