"""Reading GLUE's files, on small files written here; and SST-2 itself where it lies."""

import os
import zlib
from pathlib import Path

import pytest

from examples.glue import read_glue
from examples.hashed_words import HashedWords
from opacus_ext.refused import Refused

SST2 = os.environ.get("OPACUS_EXT_SST2")  # the folder


def write(tmp_path, text):
    path = tmp_path / "file.tsv"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text",
    [
        "sentence\tlabel\na fine film \t1\nno 'plot\" at all\t0\n",  # GLUE's order
        "label\tsentence\n1\ta fine film\n0\tno 'plot\" at all",
        "\ufeffsentence\tlabel\na fine film\t1\nno 'plot\" at all\t0\n",
        "label\tcontent\r\n1\ta fine film\r\n\r\n0\tno 'plot\" at all\r\n",
    ],
)
def test_sst2(tmp_path, text):
    """Columns by name, quotes as they are, blank lines and spaces at ends dropped."""
    found = read_glue(write(tmp_path, text), "sst2")
    assert found.texts == [
        "sst2 sentence: a fine film",
        "sst2 sentence: no 'plot\" at all",
    ]
    assert found.classes.tolist() == [1, 0]


def test_mnli(tmp_path):
    """GLUE's columns, a brace in a text, and no agreement on a row."""
    text = (
        "index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\tfiction\tIt {rains}.\tThe sky\u2028is wet.\tneutral\tentailment\n"
        "1\tfiction\tIt rains.\tWho knows?\tneutral\t-\n"
        "2\ttravel\tIt rains.\tThe sun shines.\tneutral\tcontradiction\n"
    )
    found = read_glue(write(tmp_path, text), "mnli")
    assert found.texts == [
        "mnli premise: It {rains}. hypothesis: The sky\u2028is wet.",
        "mnli premise: It rains. hypothesis: The sun shines.",
    ]
    assert found.classes.tolist() == [0, 2]


@pytest.mark.parametrize(
    "task, text, message",
    [
        ("sst2", "", "no column sentence or label"),
        ("sst2", "index\tsentence\n0\tfine\n", "no column label .*files of GLUE"),
        ("sst2", "a fine film\t1\n", "no column sentence or label"),
        ("sst2", "sentence\tlabel\n", "no rows"),
        ("sst2", "sentence\tlabel\nfine\t1\nbad\n", "line 3: 1 columns.* has 2"),
        ("sst2", "sentence\tlabel\nfine\t2\n", "line 2: label is '2', not one of 0, 1"),
        ("mnli", "sentence1\tgold_label\n", "no column sentence2"),
        (
            "mnli",
            "sentence1\tsentence2\tgold_label\na\tb\thidden\n",
            "line 2: gold_label is 'hidden', not one of entailment",
        ),
    ],
)
def test_refused(tmp_path, task, text, message):
    with pytest.raises(ValueError, match=message):
        read_glue(write(tmp_path, text), task)


def test_not_utf8(tmp_path):
    path = tmp_path / "file.tsv"
    path.write_bytes("sentence\tlabel\nein schöner Film\t1\n".encode("latin-1"))
    with pytest.raises(Refused, match="file.tsv is not UTF-8.* Save it as UTF-8"):
        read_glue(path, "sst2")


def test_fingerprint(tmp_path):
    texts = ["a\t1\nb\t0", "a\t1\nb\t1", "a\t1\nc\t0", "b\t0\na\t1", "a\t1\nb\t0"]
    found = [
        read_glue(write(tmp_path, f"sentence\tlabel\n{text}\n"), "sst2").fingerprint()
        for text in texts
    ]
    assert found[0] == found[4] and len(set(found)) == 4


@pytest.mark.skipif(not SST2, reason="OPACUS_EXT_SST2 names no folder")
def test_sst2_itself():
    for name, rows, positive in (("train", 67349, 37569), ("dev", 872, 444)):
        found = read_glue(Path(SST2) / f"{name}.tsv", "sst2")
        assert (len(found.texts), int(found.classes.sum())) == (rows, positive)


def test_words_are_hashed(tmp_path):
    """Not by the process (as Python's own hash), case or what stands around."""
    from transformers import AutoTokenizer

    tokenizer = HashedWords(1000)
    words = ["it", "isn't", "good", ";", "good", ",", "it's", "!"]
    expected = [3 + zlib.crc32(word.encode()) % 1000 for word in words]
    ids = tokenizer("It isn't GOOD; good, it's!").input_ids
    assert ids == [*expected, tokenizer.eos_token_id]
    small = HashedWords(buckets=5)
    assert sorted(small.get_vocab().values()) == list(range(8))
    for text in ("", "a longer text, with </s> and <pad> in it", "é 東 \t x"):
        ids = small(text).input_ids
        assert ids[-1] == 1 and max(ids) < small.vocab_size == 8
    cut = small("one two three four", truncation=True, max_length=3).input_ids
    assert len(cut) == 3 and cut[-1] == 1
    small.save_pretrained(tmp_path)
    found = AutoTokenizer.from_pretrained(tmp_path)
    assert type(found) is HashedWords and found.buckets == 5
    with pytest.raises(ValueError, match="buckets must be positive, got 0"):
        HashedWords(buckets=0)
