"""Classes of transformers' registry, drawn by number, and the table of all of them.

``-m slow`` checks each one as the table's script does.
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
        assert read_table()[1][DRAWN[i]][0].startswith(result), reason
    assert result in ("exact", "refused", "not tried"), reason


@pytest.mark.parametrize(
    "job, how",
    [
        # Other layers for short sequences, made in the forward.
        (("masked-lm", "big_bird", "BigBirdForMaskedLM"), "at once"),
        # The last state of a scan stays on a module, and is read by decoding alone.
        (("causal-lm", "recurrent_gemma", "RecurrentGemmaForCausalLM"), "one by one"),
    ],
)
def test_what_forwards_leave(job, how):
    result, reason, way = check_class(*job, kinds=("T=B",))
    assert (result, reason) == ("exact", "") and way.startswith(how)


@pytest.mark.slow
@pytest.mark.parametrize("job", CLASSES, ids=[f"{t}-{f}-{c}" for t, f, c in CLASSES])
def test_every_class(job):
    result, reason, _ = check_class(*job)
    assert result in ("exact", "refused", "not tried"), reason


def test_table():
    """Complete for its version of transformers; few are run one by one."""
    version, found = read_table()
    if version == transformers.__version__:
        assert list(found) == CLASSES
    results = [result.partition(":")[0] for result, _ in found.values()]
    assert sum("make_private refuses" in result for result, _ in found.values()) <= 8
    assert set(results) <= {"exact", "refused", "not tried"}
    assert results.count("exact") >= 421
    ways = [way for result, way in found.values() if result.startswith("exact")]
    assert sum(way.startswith("one by one") for way in ways) <= 40
    assert all(
        result.partition(": ")[2] for result, _ in found.values() if result != "exact"
    ), f"reasons are missing in {TABLE}"
