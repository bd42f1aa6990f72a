"""Classes of transformers' registry, drawn by number, and the table of all of them.

``-m slow`` checks each one in every mode; the table's script does the same.
"""

import pytest

transformers = pytest.importorskip("transformers")

from tests import tiny  # noqa: E402
from tests.common import MODES  # noqa: E402
from tests.compatibility import (  # noqa: E402
    BATCHES,
    FORMS,
    TABLE,
    check_class,
    read_table,
)

CLASSES = list(tiny.classes())
DRAWN = CLASSES[4::17]


@pytest.mark.parametrize("i", range(len(DRAWN)), ids=[job[2] for job in DRAWN])
def test_drawn(i):
    """Each in one mode, form and kind of batch; never wrong, never a crash."""
    form = FORMS[i // 2 % len(FORMS)]
    if form == "LoRA":
        pytest.importorskip("peft")
    kind = list(BATCHES)[i % 2]
    given = dict(modes=(MODES[i % 3],), wraps=(i % 4 < 2,), kinds=(kind,))
    result, reason, _ = check_class(*DRAWN[i], form, **given)
    if form == "whole" and transformers.__version__ == read_table()[0]:
        assert read_table()[1][DRAWN[i]].startswith(result), reason
    assert result in ("exact", "refused", "not tried"), reason


@pytest.mark.slow
@pytest.mark.parametrize("job", CLASSES, ids=[f"{t}-{f}-{c}" for t, f, c in CLASSES])
def test_every_class(job):
    result, reason, _ = check_class(*job)
    assert result in ("exact", "refused", "not tried"), reason


def test_table():
    """Complete for its version of transformers, and nine in ten are exact."""
    version, found = read_table()
    if version == transformers.__version__:
        assert list(found) == CLASSES
    results = [result.partition(":")[0] for result in found.values()]
    assert set(results) <= {"exact", "refused", "not tried"}
    assert results.count("exact") >= 0.93 * len(results)
    assert all(
        result.partition(": ")[2] for result in found.values() if result != "exact"
    ), f"reasons are missing in {TABLE}"
