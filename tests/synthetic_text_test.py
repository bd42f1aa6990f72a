"""examples/synthetic_text: from a table of private texts to synthetic ones."""

import csv
import json
import math
import re
from itertools import cycle

import numpy as np
import pytest
import torch

from examples import tiny
from examples.synthetic_text import __main__ as command
from examples.synthetic_text import report
from examples.synthetic_text.tables import Row, is_held_out, read_table
from examples.synthetic_text.writer import Writer
from opacus_ext.losses import model_losses
from opacus_ext.refused import Refused

TEXTS = ['she said "no",\nand left', "Grüße, 日本 🙂", "a\ttab; 'quotes'", "3"]


# -- tables ------------------------------------------------------------------------


def write_table(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        if path.suffix == ".jsonl":
            file.write("\n".join(json.dumps(row) for row in rows) + "\n\n")
        else:
            delimiter = "," if path.suffix == ".csv" else "\t"
            table = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
            table.writeheader()
            table.writerows(rows)
    return str(path)


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl"])
def test_table(kind, tmp_path):
    """With columns that are guessed, and labels as the file has them."""
    rows = [{"Id": i, "Body": x, "STARS": i % 3} for i, x in enumerate(TEXTS)]
    path = write_table(tmp_path / f"table.{kind}", rows)
    read, labels, columns = read_table(path, None, None, None)
    assert read == [Row(x, str(i % 3)) for i, x in enumerate(TEXTS)]
    assert labels == {x: int(x) if kind == "jsonl" else x for x in "012"}
    assert columns == {"text": "Body", "label": "STARS"}
    read, _, columns = read_table(path, "Id", "Body", "STARS")
    assert [row.text for row in read] == list("0123")
    assert [str(row.user) for row in read] == list("0120")
    assert columns == {"text": "Id", "label": "Body", "user": "STARS"}


WRONG_TABLES = {
    "not UTF-8": ("t.csv", "text,label\nGrüße,1\n".encode("latin1"), "UTF-8"),
    "no rows": ("t.csv", b"text,label\n", "0 rows"),
    "nothing": ("t.jsonl", b"", "0 rows"),
    "a label": ("t.csv", b"text,label\na,1\nb,1\n", r"2 rows with 1 label"),
    "no text": ("t.csv", b"text,label\na,1\n ,2\n", "line 3: 'text' is empty"),
    "null": ("t.jsonl", b'{"text": "a", "label": null}', "'label' is empty"),
    "no column": ("t.csv", b"a,label\nb,1\n", "columns a, label: .*--text COLUMN"),
    "two": ("t.csv", b"text,body,label\na,b,1\n", "text, body, label: .*--text"),
    "a quote": ("t.csv", b'text,label\n"a" b,1\n', "after line .*in quotes"),
    "a comma": ("t.csv", b"text,label\na,b,1\n", "more or fewer cells"),
    "a cell": ("t.csv", b"text,label\na\n", "more or fewer cells"),
    "no object": ("t.json", b'[{"text": "a", "label": 1}]', "no JSON object"),
    "NaN": ("t.jsonl", b'{"text": NaN, "label": 1}', "line 1: 'text' is empty"),
    "half": ("t.jsonl", b'{"text": "\\ud800", "label": 1}', "half a character"),
    "semicolons": ("t.csv", b"text;label\na, b;1\n", "separated by semicolons"),
    "a workbook": ("t.xlsx", b"PK\x03\x04\x00", "Save it in UTF-8"),
}


@pytest.mark.parametrize("name", WRONG_TABLES)
def test_table_is_refused(name, tmp_path):
    file, content, message = WRONG_TABLES[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(Refused, match=message):
        read_table(str(tmp_path / file), None, None, None)


def test_who_is_held_out_depends_on_no_other_row():
    rows = [Row(f"text {i}", "a") for i in range(2000)]
    users = [Row(f"text {i}", "a", f"user {i % 50}") for i in range(200)]
    held = [is_held_out(row, 0, 0.1) for row in rows]
    assert 150 < sum(held) < 250
    assert not any(is_held_out(row, 0, 0) for row in rows)
    assert all(is_held_out(row, 0, 1) for row in rows)
    assert held != [is_held_out(row, 1, 0.1) for row in rows]
    parts = {row.user: set() for row in users}
    for row in users:
        parts[row.user].add(is_held_out(row, 0, 0.5))
    assert all(len(part) == 1 for part in parts.values())
    assert set.union(*parts.values()) == {True, False}


# -- the model ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    return tiny.pretrained(str(tmp_path_factory.mktemp("model")))


def arguments(folder, out, *more):
    return [
        *(
            "--data",
            str(out / "reviews.csv"),
            "--out",
            str(out / "new" / "texts.jsonl"),
        ),
        *("--model", folder, "--epsilon", "8", "--epochs", "1", "--texts", "3"),
        *("--max-tokens", "24", "--batch-size", "50", *more),
    ]


@pytest.fixture
def parsed(folder, tmp_path):
    return command.parse_args(arguments(folder, tmp_path))


LABELS = {"0": "boring", "1": "lovely"}


def test_record_is_a_prompt_and_a_text(parsed):
    """The loss is that of the text and its end, after the prompt of its label."""
    torch.manual_seed(0)
    writer = Writer(parsed, LABELS)
    (record,) = writer.records([Row("the cat sees a dog", "1")])
    decode = writer.tokenizer.decode
    assert decode(record["input_ids"]) == "[BOS] lovely the cat sees a dog [EOS]"
    counted = [x for x in record["labels"] if x != -100]
    assert decode(counted) == "the cat sees a dog [EOS]"
    assert record["input_ids"][: len(writer.prompts["1"])] == writer.prompts["1"]
    batch = {k: torch.tensor([v]) for k, v in record.items()}
    mean = model_losses(writer.model.eval(), batch).item()
    assert writer.losses([record]) == [pytest.approx(mean * len(counted), rel=1e-5)]
    (long,) = writer.records([Row("cat " * 99, "0")])
    assert len(long["input_ids"]) == 24 and long["labels"][-1] != 3  # no end


def test_prompts_and_positions(folder, tmp_path):
    more = ("--prompt", "a {label} the", "--max-tokens", "999", "--lora-rank", "0")
    args = command.parse_args(arguments(folder, tmp_path, *more))
    writer = Writer(args, {"0": "", "lovely": ""})
    decoded = [writer.tokenizer.decode(ids) for ids in writer.prompts.values()]
    assert decoded == ["[BOS] a [UNK] the", "[BOS] a lovely the"]
    assert writer.max_tokens == 128  # the model's


WRONG_LABELS = {
    "unknown words": (("--prompt", "{label} ", "--labels", "0", "1"), "the same"),
    "no label": (("--prompt", "the"), "two prompts are the same"),
    "no room": (("--max-tokens", "2"), "Of 2 tokens"),
}


@pytest.mark.parametrize("name", WRONG_LABELS)
def test_prompts_are_refused(name, folder, tmp_path):
    more, message = WRONG_LABELS[name]
    args = command.parse_args(arguments(folder, tmp_path, *more))
    labels = dict.fromkeys(args.labels, "") if args.labels else LABELS
    with pytest.raises(Refused, match=message):
        Writer(args, labels)


@pytest.mark.parametrize("decoded", [["", " ", "a"], ["", "\n"]])
def test_empty_texts_are_written_anew(decoded, parsed, monkeypatch):
    writer, calls, texts = Writer(parsed, LABELS), [], cycle(decoded)

    def batch_decode(ids, **kwargs):
        calls.append(len(ids))
        return [next(texts) for _ in ids]

    def generate(input_ids, **kwargs):
        return input_ids

    monkeypatch.setattr(writer.tokenizer, "batch_decode", batch_decode)
    monkeypatch.setattr(writer.model, "generate", generate)
    rows = writer.write("1")
    assert rows == [Row("a", "1")] * (3 if "a" in decoded else 0)
    assert calls == ([3, 2, 2, 1, 1] if "a" in decoded else [3] * 30)


# -- the command -------------------------------------------------------------------


@pytest.fixture
def reviews(tmp_path):
    rows = tiny.reviews(200)
    for number, row in enumerate(rows):
        row["author"] = f"author {number % 40}"
    write_table(tmp_path / "reviews.csv", rows)
    return rows


def trained_on(monkeypatch):
    """The records that a run trains on."""
    records, original = [], Writer.train

    def train(self, given):
        records.extend(given)
        return original(self, given)

    monkeypatch.setattr(Writer, "train", train)
    return records


UNITS = {"record": (), "user": ("--user", "author", "--canaries", "2")}


@pytest.mark.parametrize("unit", UNITS)
def test_command(unit, folder, reviews, tmp_path, monkeypatch, capsys):
    records = trained_on(monkeypatch)
    names = ("--labels", "0=boring", "1=lovely", "2=dull")
    more = (*names, *UNITS[unit], "--save", str(tmp_path / "tuned"))
    assert command.main(arguments(folder, tmp_path, *more)) == 0
    new = tmp_path / "new"
    lines = (new / "texts.jsonl").read_text(encoding="utf-8").splitlines()
    written = [json.loads(line) for line in lines]
    assert all(set(line) == {"sentence", "label"} for line in written)
    assert [line["label"] for line in written] == list("000111222")
    assert all(line["sentence"].strip() for line in written)

    users = sorted({row["author"] for row in reviews})
    keys = users if unit == "user" else [row["sentence"] for row in reviews]
    held_out = [is_held_out(Row(key, "", key), 0, 0.1) for key in keys]
    count = len(held_out) - sum(held_out) + 2 * (unit == "user")
    statement = json.loads((new / "statement.json").read_text())
    assert statement["unit"] == unit and statement["records"] == count
    assert 0 < statement["epsilon"] <= 8 and statement["holds"] == "yes"
    text = (new / "statement.md").read_text(encoding="utf-8")
    assert f"-differentially private for one {unit}." in text
    assert "This model wrote the 9 texts of texts.jsonl" in text
    if unit == "user":
        trained = {record["user"] for record in records}
        assert trained & set(users) == {
            user for user, held in zip(users, held_out) if not held
        }
    else:
        assert len(records) == count

    private = (new / "report.md").read_text(encoding="utf-8")
    assert private.startswith("**This report is not private")
    assert ("2 random texts were trained on" in private) == (unit == "user")
    out = capsys.readouterr().out
    assert "NOT private" in out and "Taken as public" in out
    assert f"for one {unit}." in out
    assert (tmp_path / "tuned" / "privacy.json").exists()


def test_the_seed_does_not_give_the_noise(folder, reviews, tmp_path, monkeypatch):
    args = command.parse_args(arguments(folder, tmp_path))
    weights = []
    for _ in range(2):
        torch.manual_seed(args.seed)
        writer = Writer(args, LABELS)
        writer.train(writer.records([Row("the cat", "0"), Row("a dog", "1")]))
        trained = [p for p in writer.model.parameters() if p.requires_grad]
        weights.append(torch.cat([p.detach().flatten() for p in trained]))
    assert not torch.equal(*weights)


REFUSED = {
    "a label": (("--labels", "1=lovely"), "another label, '0'"),
    "labels": (("--label", "sentence"), "different values"),
    "all": (("--held-out", "1"), "a smaller --held-out"),
    "no model": (("--model", "no/such/model"), "no/such/model"),
    "no file": (("--data", "missing.csv"), "missing.csv"),
    "no user": (("--user", "who"), "if not 'who'. Name it: --user"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_command_refuses(name, folder, reviews, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Writer, "train", None)  # nothing is spent
    more, message = REFUSED[name]
    assert command.main(arguments(folder, tmp_path, *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error or all(part in error for part in message.split(". "))


@pytest.mark.parametrize("name", ["texts.jsonl", "report.md", "statement.json"])
def test_files_that_are_there_stay(name, folder, reviews, tmp_path, capsys):
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / name).write_text("paid for")
    assert command.main(arguments(folder, tmp_path)) == 2
    assert f"{name} is there already" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "new").iterdir()] == [name]


def test_the_files_do_not_tell_which_labels_the_table_has(
    folder, tmp_path, monkeypatch
):
    """A label that is in the list, and that one text or none has, is written alike."""
    monkeypatch.setattr(Writer, "write", lambda self, label: [Row("a dog", label)])
    names, written = ("--labels", "0=boring", "1=lovely", "2=dull"), []
    rows = [{"text": row["sentence"], "label": row["label"]} for row in tiny.reviews(9)]
    for more in [], [{"text": "a cat", "label": 2}]:
        out = tmp_path / str(len(more))
        out.mkdir()
        table = write_table(out / "reviews.jsonl", rows + more)
        given = arguments(folder, out, *names, "--data", table)
        assert command.main(given) == 0
        written.append((out / "new" / "texts.jsonl").read_text())
    assert written[0] == written[1]


@pytest.mark.parametrize("name", ["report.md", "statement.md", "statement.json"])
def test_texts_are_no_other_file(name, folder, reviews, tmp_path, capsys):
    """The private report would stand where the texts are to be published from."""
    given = arguments(folder, tmp_path, "--out", str(tmp_path / name))
    assert command.main(given) == 2
    assert f"{name} is the name of another file" in capsys.readouterr().err


def test_paths_that_fail_do_so_before_training(
    folder, reviews, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(Writer, "train", None)  # nothing is spent
    names = ("--labels", "0=boring", "1=lovely")
    table = str(tmp_path / "reviews.csv")
    given = arguments(folder, tmp_path, *names, "--save", folder)
    assert command.main(given) == 2
    assert f"{folder} is there already" in capsys.readouterr().err
    given = arguments(folder, tmp_path, *names, "--out", table + "/texts.jsonl")
    assert command.main(given) == 2
    assert "reviews.csv" in capsys.readouterr().err


# -- the report --------------------------------------------------------------------


def test_exposures():
    """By rank: the lowest loss of 1,001 is 10 bits, the highest none."""
    fresh = np.arange(1000.0)
    bits = report.exposures([-1.0, 499.5, 2000.0], fresh)
    assert bits == pytest.approx([math.log2(1001), math.log2(1001 / 501), 0])
    rng = np.random.default_rng(0)
    random = report.exposures(rng.random(4000), rng.random(1000))
    assert random.mean() == pytest.approx(1.44, abs=0.1)


def test_nearest():
    texts = ["a b c d e f", "the cat sat on the mat .", "short"]
    others = [Row(text, "") for text in texts]
    rows = [Row(text, "") for text in ("The cat sat on a mat.", "short", "x y z w v")]
    rows.append(Row("a b c d e f", ""))
    found = {
        text: (share, other) for share, text, other in report.nearest(rows, others)
    }
    assert found["a b c d e f"] == (1, "a b c d e f")
    assert found["short"] == (1, "short")
    assert found["The cat sat on a mat."] == (1 / 4, texts[1])
    assert found["x y z w v"][0] == 0


def test_report():
    """On synthetic texts that are copies, and on ones that have nothing to teach."""
    texts = [Row(row["sentence"], str(row["label"])) for row in tiny.reviews(200)]
    training, held_out = texts[:150], texts[150:]
    copies = report.report(training, held_out, training[:40], [0.0], [1.0] * 15)
    assert "| synthetic | 40 | 100% | 100% | 100% |" in copies
    assert f"- 100% of {sorted(r.text for r in training[:40])[-1]!r}" in copies
    learned = re.search(r"\| synthetic texts \| 40 \| (.*)% \|", copies)
    assert float(learned[1]) > 80
    assert "| private texts | 150 | 100.0% |" in copies
    assert "exposure is 4.00 bits on average" in copies
    noise = [Row(f"zero one {i}", label) for i in range(5) for label in "01"]
    other = report.report(training, [], noise, [], [])
    assert "| synthetic | 10 | 0% | 0% | 0% |" in other
    assert "not measured" in other and "\n- " not in other


@pytest.mark.parametrize("wrong", ["--epsilon=0", "--top-p=2", "--delta=0"])
def test_arguments_out_of_range(wrong, folder, tmp_path):
    with pytest.raises(SystemExit):
        command.parse_args(arguments(folder, tmp_path, wrong))
