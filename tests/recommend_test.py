"""Recommenders as they are used: the command, the saved model, the names of items."""

import pytest
import torch

from opacus_ext.planner.commands.main import main
from opacus_ext.planner.commands.options import parse
from opacus_ext.recommend import Recommender, training
from tests.train_test import (  # noqa: F401
    NOTHING,
    arguments,
    tiny,
    tiny_data,
    trained,
)


@pytest.mark.parametrize("more", [(), ("--model", "gru", "--once"), NOTHING])
def test_a_saved_model_recommends_the_same(more, tmp_path):
    """By names, from a file without the noise, the seed and the records."""
    found, path = trained(*more).recommender, tmp_path / "model.pt"
    found.save(path)
    again, history = Recommender.load(path), tiny_data().history("7")
    items = found.recommend(history, 6)
    assert again.recommend([*history, "unknown"], 6) == items
    assert len(items) == 6 and set(items) <= {*tiny_data().items}
    assert found.settings["once"] == ("--once" in more)
    assert not (found.settings["once"] and {*items} & {*history})
    assert "for one user" in again.statement
    kept = torch.load(path, weights_only=True)
    assert kept.keys() == {"recommender", "items", "statement", "weights"}
    with pytest.raises(ValueError, match="knows none of these items: .'x'."):
        again.recommend(["x"])
    torch.save({"weights": 1}, path)
    with pytest.raises(ValueError, match="no file of Recommender.save"):
        Recommender.load(path)


@pytest.mark.parametrize("model", [("dpformer",), ("transitions", *NOTHING[2:])])
def test_what_is_counted_without_noise_has_no_guarantee(model):
    """Neither in the table nor in the statement of the saved model."""
    found = trained("--model", *model, "--shares", "exact")
    assert not found.summary["private"]
    assert "No guarantee is known" in found.recommender.statement
    table = training.summary_table(found.summary)
    assert "no guarantee" in table and "spent" not in table
    # Without Re-Attention and prior no popularity is asked for.
    assert trained("--model", "gru", "--prior", "none", "--shares", "exact").summary[
        "private"
    ]


def test_a_statement_tells_whose_the_names_of_items_are(tmp_path):
    """Of the data, or of a list; a run without training is no run without records."""
    rows = [f"u{u},film {(u + i) % 9},{i}" for u in range(60) for i in range(8)]
    (tmp_path / "a.csv").write_text("\n".join(["user,item,time", *rows]))
    (tmp_path / "items").write_text("\n".join(f"film {i}" for i in range(9)))
    data = ["--data", str(tmp_path / "a.csv"), *NOTHING]
    text = trained(*data).recommender.statement
    assert "only one user brought in" in text
    assert "if every batch" not in text and "a sum over all users" in text
    text = trained(*data, "--items", str(tmp_path / "items")).recommender.statement
    assert "only one user brought in" not in text and "names of all items" in text


def test_the_seed_is_drawn_where_data_are_real(monkeypatch):
    """One that is known tells the noise."""
    assert parse(["recommend", "--data", "x"]).seed is None
    drawn = []
    monkeypatch.setattr(torch, "manual_seed", drawn.append)
    for seed in (None, None, 7):
        args = parse(["recommend", *arguments(*NOTHING)])
        args.seed = seed
        training.train(args, tiny_data())
    assert len({*drawn}) == 3 and drawn[2] == 7 and min(drawn[:2]) > 1e6


def test_the_command(tmp_path, capsys):
    """From a table of names to recommendations, and what is refused."""
    titles = [f'Film "{i}", The' for i in range(8)]
    rows = ["when,movieId,user"]
    for user in range(30):
        for day in range(1, 8):
            title = titles[(user + day) % 8].replace('"', '""')
            rows.append(f'2024-01-0{day},"{title}",anna{user}')
    data, model, statement = (str(tmp_path / x) for x in ("a.csv", "m.pt", "s.md"))
    (tmp_path / "a.csv").write_text("\n".join(rows))
    given = ["recommend", "--data", data, "--columns", "user,movieId,when"]
    files = ["--save", model, "--statement", statement]
    assert main([*given, *arguments(*NOTHING), *files]) == 0
    out = capsys.readouterr().out
    assert "30 users, 8 items" in out and "seed drawn" in out
    assert "for one user" in (tmp_path / "s.md").read_text()
    again = [*given, "--load", model, "--recommend-to", "anna3"]
    assert main(again) == 0
    first, *items = capsys.readouterr().out.strip().splitlines()
    assert first == "recommended to anna3"
    assert sorted(x.strip() for x in items) == titles
    for more, message in (
        (["--load", model], "--load needs --recommend-to USER"),
        ([*again[5:], "--save", model], "leave out --checkpoint, --save"),
        ([*again[5:], "--recommend-to", "bob"], "a.csv: no user 'bob'"),
        (["--columns", "a,b"], "none of the columns"),
        (["--data", data + "-missing"], "missing"),
    ):
        with pytest.raises(SystemExit) as left:
            main([*given, *more])
        assert left.value.code == 2
        assert message in capsys.readouterr().err
