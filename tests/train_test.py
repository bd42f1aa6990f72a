"""Training from the command line's arguments, on tiny synthetic data; runs that go on,
and what is refused, in example_runs_test.py."""

import io
import math
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout
from unittest.mock import patch

import pytest
import torch
from opacus import PrivacyEngine

from opacus_ext.accountants import noise_left
from opacus_ext.planner.commands.main import main
from opacus_ext.planner.commands.options import parse
from opacus_ext.recommend import (
    loop,
    ranking,
    read_sequences,
    releasing,
    synthetic_sequences,
    training,
)

ML1M = os.environ.get("OPACUS_EXT_ML1M")


def tiny_data():
    return synthetic_sequences(num_users=60, num_items=20, num_genres=4, length=8)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """No budget is asked for its noise, which takes seconds; see the test of it."""
    monkeypatch.setattr(training, "synthetic_sequences", tiny_data)
    monkeypatch.setattr(loop, "noise_left", lambda *args: 1.0)


def arguments(*more):
    small = "--epochs 3 --batch-size 20 --physical-batch-size 8 --max-len 8"
    return [*small.split(), *"--width 8 --depth 1 --no-progress".split(), *more]


def trained(*more):
    args = parse(["recommend", *arguments(*more)])
    return training.train(args, training.read_data(args))


def run(*more):
    return trained(*more).summary


def weights(path, which="module_state_dict"):
    return torch.load(path, weights_only=True)[which]


# -- metrics -----------------------------------------------------------------------


def test_metrics_against_brute_force():
    """Sort each user's items and look for the held-out one."""
    scores, items = torch.randn(200, 31), torch.randint(1, 31, (200,))
    scores[:, 0] = 99  # padding takes no part
    ndcg = hit = 0.0
    for row, item in zip(scores, items.tolist()):
        order = sorted(range(1, 31), key=lambda i: -row[i])
        if item in order[:10]:
            hit += 1 / 200
            ndcg += 1 / math.log2(order.index(item) + 2) / 200
    found = ranking.ndcg_and_hit(ranking.ranks(scores, items))
    assert found == pytest.approx((100 * ndcg, 100 * hit))


@pytest.mark.parametrize("value", [0.0, math.nan])
def test_useless_scores_rank_last(value):
    rank = ranking.ranks(torch.full((2, 31), value), torch.tensor([1, 30]))
    assert rank.tolist() == [29, 29]


def test_own_items_last():
    """All items are ranked, also those after a held-out item that is one's own."""
    data = tiny_data()

    class Model(torch.nn.Linear):
        def score(self, ids):
            return self.weight.T[ids].sum(dim=1)

    model = Model(21, 21)
    ranked, last = [], []
    for user, target in enumerate(data.held_out.tolist()):
        history = data.histories[user]
        scores = model.score(data.contexts(4)[user : user + 1])[0]
        order = scores[1:].argsort(descending=True) + 1
        ranked.append((order == target).nonzero().item())
        others = [i for i in order.tolist() if i not in history]
        last.append(others.index(target) if target in others else 19)
    assert 19 in last
    for own_last, expected in ((False, ranked), (True, last)):
        found = ranking.evaluate(model, data, 4, own_last)
        assert found == ranking.ndcg_and_hit(torch.tensor(expected))


@pytest.mark.skipif(not ML1M, reason="OPACUS_EXT_ML1M names no file")
def test_popularity_on_movielens():
    data = read_sequences(ML1M)
    scores = data.popularity().expand(len(data.histories), -1)
    found = ranking.ndcg_and_hit(ranking.ranks(scores, data.held_out))
    assert found == pytest.approx((0.79, 1.62), abs=5e-3)


def test_learning_rate_rises_then_falls():
    rates = [loop.learning_rate(s, 10, 1.0, 0.2) for s in range(10)]
    assert rates == pytest.approx([1 / 2, 1, *(i / 9 for i in range(8, 0, -1))])
    for warmup in (0.0, 1.0):
        rates = [loop.learning_rate(s, 10, 1.0, warmup) for s in range(10)]
        assert 0 < min(rates) and max(rates) == 1.0


# -- training ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["ghost_bk", "hooks"])
def test_every_mode_and_the_budget(mode, monkeypatch):
    monkeypatch.setattr(loop, "noise_left", noise_left)
    summary = run("--grad-sample-mode", mode)
    assert (summary["epochs"], summary["steps"]) == (3, 9)
    assert 7.9 < summary["epsilon_spent"] <= 8.0


@pytest.mark.parametrize(
    "model, items", [("dpformer", "prior.items"), ("transitions", "items")]
)
def test_releases_are_made_once(model, items, tmp_path):
    path, given = str(tmp_path / model), ("--model", model, "--ema", "0.5")
    run(*given, "--checkpoint", path, "--stop-after-epochs", "1")
    before = weights(path)
    with patch.object(releasing, "release_popularity", None):
        after = run(*given, "--checkpoint", path, "--resume")
    assert after["top"] == len(before[items])
    assert run(*given)["ndcg_at_10"] == after["ndcg_at_10"]
    for name, saved in weights(path).items():
        if "prior" in name or "re_attention.shares" in name:
            assert torch.equal(saved, before[name]), name
    history = weights(path, "privacy_accountant_state_dict")["history"]
    assert [steps for *_, steps in history] == [1, 1, 9]


NOTHING = ("--model", "transitions", "--train-share", "0")


def test_nothing_is_trained():
    """All of the budget is spent on the releases; and on other held-out items."""
    summary = run(*NOTHING)
    assert summary["epsilon_spent"] == pytest.approx(8.0, abs=5e-5)
    assert summary["steps"] == 0
    assert run(*NOTHING, "--validate")["actions"] != summary["actions"]
    for more, message in (
        ((*NOTHING, "--model", "gru"), "trains nothing"),
        ((*NOTHING, "--checkpoint", "run"), "trains nothing"),
        (("--train-share", "0.99"), "leave nothing"),
        (("--model", "transitions", "--prior", "popularity"), "--prior popularity"),
    ):
        with pytest.raises(ValueError, match=message):
            run(*more)


@pytest.mark.filterwarnings("ignore")
def test_whether_own_items_are_last_is_asked_of_no_record(tmp_path):
    """--once, or the form of the file; the other ranking is told, and why."""
    found = [run(*NOTHING, *more) for more in ((), ("--once",), ("--no-once",))]
    both = [k for k in found[0] if k.startswith("own_")]
    for summary, name in zip(found, ("own_ranked", "own_last", "own_ranked")):
        assert [summary[k] for k in both] == [found[0][k] for k in both]
        for of in ("ndcg_at_10", "hit_at_10"):
            assert summary[of] == summary[f"{name}_{of}"]
        text = training.summary_table(summary)
        assert (training.WHY_ONCE if summary["once"] else training.WHY_NOT) in text
        this = next(x for x in text.splitlines() if "this model" in x)
        assert f"{summary['ndcg_at_10']:.2f}%" in this
    assert found[0]["ndcg_at_10"] != found[1]["ndcg_at_10"]
    path = tmp_path / "ratings.dat"
    lines = [f"{u}::{i % 7}::5::{i}\n" for u in range(9) for i in range(u, u + 9)]
    path.write_text("".join(lines))  # with repetitions
    for change, expected in (((), True), (("--no-once",), False)):
        assert run(*NOTHING, "--data", str(path), *change)["once"] == expected


@pytest.mark.parametrize(
    "given, share, length",
    [
        ("--epsilon 1", 0.1, 50),
        ("--epsilon 1 --prior popularity", 0.0225, 50),
        ("--epsilon 2 --model transitions", 0.0225, 100),
        ("--epsilon 1 --popularity-share 0.05 --max-len 9", 0.05, 9),
    ],
)
def test_defaults_of_a_budget(given, share, length):
    args = parse(["recommend", "--data", "x", *given.split()])
    assert (args.popularity_share, args.max_len) == (share, length)


def test_output_where_there_is_no_terminal():
    """A line an epoch, and no warning that says nothing of the run."""
    out, errors = io.StringIO(), io.StringIO()
    given = [x for x in arguments() if x != "--no-progress"]
    with redirect_stdout(out), redirect_stderr(errors), warnings.catch_warnings():
        warnings.simplefilter("always")
        assert main(["recommend", *given]) == 0
    first, *epochs = errors.getvalue().splitlines()
    assert first.startswith("training 3 epochs of 3 steps, noise multiplier ")
    for i, line in enumerate(epochs, 1):
        assert line.startswith(f"epoch {i} of 3, loss ") and line.endswith(" s")
    assert len(epochs) == 3 and "epsilon" in out.getvalue()


def test_no_step_is_forgotten_in_what_is_left():
    """3 / (1 / 75) is a little less than 225."""
    engine = PrivacyEngine(accountant="rdp")
    engine.accountant.step(noise_multiplier=20.0, sample_rate=1.0)
    net = torch.nn.Linear(2, 1)
    rows = torch.utils.data.TensorDataset(torch.zeros(75, 2))
    with patch.object(loop, "noise_left", return_value=1.0) as asked:
        loop.make_private(
            engine,
            None,
            epsilon=5.0,
            delta=1e-5,
            epochs=3,
            module=net,
            optimizer=torch.optim.SGD(net.parameters(), lr=0.1),
            data_loader=torch.utils.data.DataLoader(rows),
            criterion=torch.nn.MSELoss(),
            max_grad_norm=1.0,
        )
    assert asked.call_args.args[-1] == 225
