"""Training from the command line's arguments, on tiny synthetic data."""

import io
import json
import math
import os
import tempfile
import unittest
import warnings
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from unittest.mock import patch

import torch
from opacus import PrivacyEngine

from examples import ranking, recommender, runs, train
from examples.sequences import read_sequences, synthetic_sequences
from opacus_ext.accountants import noise_left

ML1M = os.environ.get("OPACUS_EXT_ML1M")


def tiny_data():
    return synthetic_sequences(num_users=60, num_items=20, num_genres=4, length=8)


class MetricsTest(unittest.TestCase):
    def test_against_brute_force(self):
        """Sort each user's items and look for the held-out one."""
        torch.manual_seed(0)
        scores, items = torch.randn(200, 31), torch.randint(1, 31, (200,))
        scores[:, 0] = 99  # padding takes no part
        ndcg = hit = 0.0
        for row, item in zip(scores, items.tolist()):
            order = sorted(range(1, 31), key=lambda i: -row[i])
            if item in order[:10]:
                hit += 1 / 200
                ndcg += 1 / math.log2(order.index(item) + 2) / 200
        found = ranking.ndcg_and_hit(ranking.ranks(scores, items))
        self.assertAlmostEqual(found[0], 100 * ndcg)
        self.assertAlmostEqual(found[1], 100 * hit)

    def test_useless_scores_rank_last(self):
        for value in (0.0, math.nan):
            rank = ranking.ranks(torch.full((2, 31), value), torch.tensor([1, 30]))
            self.assertEqual(rank.tolist(), [29, 29])

    def test_own_items_last(self):
        """All items are ranked, also those after a held-out item that is one's own."""
        torch.manual_seed(0)
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
        self.assertIn(19, last)
        for own_last, expected in ((False, ranked), (True, last)):
            found = ranking.evaluate(model, data, 4, own_last)
            self.assertEqual(found, ranking.ndcg_and_hit(torch.tensor(expected)))

    @unittest.skipUnless(ML1M, "OPACUS_EXT_ML1M names no file")
    def test_popularity_on_movielens(self):
        data = read_sequences(ML1M)
        scores = data.popularity().expand(len(data.histories), -1)
        ndcg, hit = ranking.ndcg_and_hit(ranking.ranks(scores, data.held_out))
        self.assertAlmostEqual(ndcg, 0.79, places=2)
        self.assertAlmostEqual(hit, 1.62, places=2)


class LearningRateTest(unittest.TestCase):
    def test_rises_then_falls(self):
        rates = [train.learning_rate(s, 10, 1.0, 0.2) for s in range(10)]
        expected = [1 / 2, 1, 8 / 9, 7 / 9, 6 / 9, 5 / 9, 4 / 9, 3 / 9, 2 / 9, 1 / 9]
        torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected))
        for warmup in (0.0, 1.0):
            rates = [train.learning_rate(s, 10, 1.0, warmup) for s in range(10)]
            self.assertTrue(0 < min(rates) and max(rates) == 1.0)


POPULARITY, NO_PRIOR = ("--prior", "popularity"), ("--prior", "none")


class TrainTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        fake = patch.object(train, "synthetic_sequences", tiny_data)
        fake.start()
        self.addCleanup(fake.stop)
        # No budget is asked for it, as that takes seconds; see the test of the budget.
        noise = patch.object(runs, "noise_left", return_value=1.0)
        noise.start()
        self.addCleanup(noise.stop)

    def arguments(self, *more: str):
        tiny = "--epochs 3 --batch-size 20 --physical-batch-size 8 --max-len 8"
        small = "--width 8 --depth 1 --no-progress"
        return [*tiny.split(), *small.split(), *more]

    def run_training(self, *more: str):
        return train.train(train.parse_args(self.arguments(*more)))

    def weights(self, name: str):
        checkpoint = torch.load(self.folder / name, weights_only=True)
        return checkpoint["module_state_dict"]

    def test_every_mode_and_the_budget(self):
        for mode in ("ghost_bk", "hooks"):
            calibrated = patch.object(runs, "noise_left", noise_left)
            with self.subTest(mode), calibrated:
                summary = self.run_training("--grad-sample-mode", mode)
                self.assertEqual((summary["epochs"], summary["steps"]), (3, 9))
                # Calibrated to within 0.01 below the budget of 8.
                self.assertLessEqual(summary["epsilon_spent"], 8.0)
                self.assertGreater(summary["epsilon_spent"], 7.9)

    def test_releases_are_made_once(self):
        for model, items in (("dpformer", "prior.items"), ("transitions", "items")):
            path = str(self.folder / model)
            more = ("--checkpoint", path, "--model", model, "--ema", "0.5")
            self.run_training(*more, "--stop-after-epochs", "1")
            before = self.weights(model)
            with patch.object(recommender, "release_popularity", None):
                after = self.run_training(*more, "--resume")
            self.assertEqual(after["top"], len(before[items]))
            whole = self.run_training("--model", model, "--ema", "0.5")
            self.assertEqual(whole["ndcg_at_10"], after["ndcg_at_10"])
            for name, saved in self.weights(model).items():
                if "prior" in name or "re_attention.shares" in name:
                    self.assertTrue(torch.equal(saved, before[name]), name)
            saved = torch.load(path, weights_only=True)
            steps = saved["privacy_accountant_state_dict"]["history"]
            self.assertEqual([s for *_, s in steps], [1, 1, 9])

    def test_nothing_is_trained(self):
        """All of the budget is spent on the releases; and on other held-out items."""
        more = ("--model", "transitions", "--train-share", "0")
        summary = self.run_training(*more)
        self.assertAlmostEqual(summary["epsilon_spent"], 8.0, places=4)
        self.assertEqual(summary["steps"], 0)
        other = self.run_training(*more, "--validate")
        self.assertNotEqual(other["actions"], summary["actions"])
        for change in (("--model", "gru"), ("--checkpoint", "run")):
            with self.assertRaisesRegex(ValueError, "trains nothing"):
                self.run_training(*more, *change)
        with self.assertRaisesRegex(ValueError, "leave nothing"):
            self.run_training("--train-share", "0.99")
        with self.assertRaisesRegex(ValueError, "--prior popularity"):
            self.run_training("--model", "transitions", "--prior", "popularity")

    def test_whether_own_items_are_last_is_asked_of_no_record(self):
        """--once, or the form of the file; the other ranking is told, and why."""
        more = ("--model", "transitions", "--train-share", "0")
        found = [
            self.run_training(*more, *m) for m in ((), ("--once",), ("--no-once",))
        ]
        both = [k for k in found[0] if k.startswith("own_")]
        for summary, name in zip(found, ("own_ranked", "own_last", "own_ranked")):
            self.assertEqual([summary[k] for k in both], [found[0][k] for k in both])
            for of in ("ndcg_at_10", "hit_at_10"):
                self.assertEqual(summary[of], summary[f"{name}_{of}"])
            text = train.summary_table(summary)
            self.assertIn(train.WHY_ONCE if summary["once"] else train.WHY_NOT, text)
            this = next(x for x in text.splitlines() if "this model" in x)
            self.assertIn(f"{summary['ndcg_at_10']:.2f}%", this)
        self.assertNotEqual(found[0]["ndcg_at_10"], found[1]["ndcg_at_10"])
        path = self.folder / "ratings.dat"
        lines = [f"{u}::{i % 7}::5::{i}\n" for u in range(9) for i in range(u, u + 9)]
        path.write_text("".join(lines))  # with repetitions
        for change, expected in (((), True), (("--no-once",), False)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                summary = self.run_training(*more, "--data", str(path), *change)
            self.assertEqual(summary["once"], expected)

    def test_defaults_of_a_budget(self):
        for arguments, share, length in (
            ("--epsilon 1", 0.1, 50),
            ("--epsilon 1 --prior popularity", 0.0225, 50),
            ("--epsilon 2 --model transitions", 0.0225, 100),
            ("--epsilon 1 --popularity-share 0.05 --max-len 9", 0.05, 9),
        ):
            args = train.parse_args(["--data", "x", *arguments.split()])
            self.assertEqual((args.popularity_share, args.max_len), (share, length))

    def test_output_where_there_is_no_terminal(self):
        """A line an epoch, and no warning that says nothing of the run."""
        out, errors = io.StringIO(), io.StringIO()
        arguments = [x for x in self.arguments() if x != "--no-progress"]
        with redirect_stdout(out), redirect_stderr(errors):
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                self.assertEqual(train.main(arguments), 0)
        first, *epochs = errors.getvalue().splitlines()
        self.assertRegex(first, "^training 3 epochs of 3 steps, noise multiplier ")
        self.assertEqual(len(epochs), 3)
        for i, line in enumerate(epochs, 1):
            self.assertRegex(line, rf"^epoch {i} of 3, loss \d\.\d{{3}}, \d+ s$")
        self.assertIn("epsilon", out.getvalue())

    def test_no_step_is_forgotten_in_what_is_left(self):
        """3 / (1 / 75) is a little less than 225."""
        engine = PrivacyEngine(accountant="rdp")
        engine.accountant.step(noise_multiplier=20.0, sample_rate=1.0)
        net = torch.nn.Linear(2, 1)
        rows = torch.utils.data.TensorDataset(torch.zeros(75, 2))
        with patch.object(runs, "noise_left", return_value=1.0) as asked:
            runs.make_private(
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
        self.assertEqual(asked.call_args.args[-1], 225)

    def test_resumed_is_bit_identical(self):
        """Stopped after each epoch and resumed, against one run in one piece."""
        whole, parts = (str(self.folder / name) for name in ("whole", "parts"))
        expected = self.run_training("--checkpoint", whole)
        pause = ("--checkpoint", parts, "--stop-after-epochs", "1")
        first = self.run_training(*pause)
        torch.rand(7)  # whatever happens in between
        second = self.run_training(*pause, "--resume", "--repeat-noise")
        third = self.run_training("--checkpoint", parts, "--resume", "--repeat-noise")

        self.assertEqual([s["epochs"] for s in (first, second, third)], [1, 2, 3])
        self.assertLess(first["epsilon_spent"], second["epsilon_spent"])
        for key in expected.keys() - {"seconds"}:
            self.assertEqual(expected[key], third[key], key)
        one, two = self.weights("whole"), self.weights("parts")
        self.assertTrue(all(torch.equal(one[key], two[key]) for key in one))
        # Resuming a finished run spends nothing.
        again = self.run_training("--checkpoint", parts, "--resume", "--repeat-noise")
        self.assertEqual(again["epsilon_spent"], expected["epsilon_spent"])

    def test_cut_off_between_checkpoints(self):
        """A crash within epoch 2: its steps are drawn again, and counted once."""
        whole, parts = (str(self.folder / name) for name in ("whole", "parts"))
        expected = self.run_training("--checkpoint", whole)
        calls = []

        def fail(*args):
            calls.append(args[0])
            if calls[-1] == 4:  # the second step of epoch 2
                raise KeyboardInterrupt
            return original(*args)

        original = train.learning_rate
        with patch.object(train, "learning_rate", fail):
            with self.assertRaises(KeyboardInterrupt):
                self.run_training("--checkpoint", parts)
        found = self.run_training("--checkpoint", parts, "--resume", "--repeat-noise")
        self.assertEqual(found["epsilon_spent"], expected["epsilon_spent"])
        one, two = self.weights("whole"), self.weights("parts")
        self.assertTrue(all(torch.equal(one[key], two[key]) for key in one))

    def test_refusals(self):
        path = str(self.folder / "run")
        self.run_training("--checkpoint", path, "--stop-after-epochs", "1")
        table = [
            ((), "Add --resume"),
            (("--resume", "--epsilon", "9"), "epsilon: 8.0 there, 9.0 here"),
            (("--resume", "--lr", "1", "--epochs", "9"), "epochs: 3 .* lr: 0.003"),
        ]
        for more, message in table:
            with self.subTest(more), self.assertRaisesRegex(ValueError, message):
                self.run_training("--checkpoint", path, *more)
        with self.assertRaisesRegex(ValueError, "--users needs --data"):
            self.run_training("--users", "5")
        with self.assertRaisesRegex(ValueError, "--resume needs --checkpoint"):
            self.run_training("--resume")
        with self.assertRaises(OSError):
            self.run_training("--resume", "--checkpoint", path + "-missing")
        with self.assertWarnsRegex(UserWarning, "not below 1/60 users"):
            self.run_training("--delta", "0.1")

    def test_command_line(self):
        path = self.folder / "summary.json"
        self.assertEqual(train.main(self.arguments("--json", str(path))), 0)
        self.assertEqual(json.loads(path.read_text())["users"], 60)
        missing = str(self.folder / "missing")
        self.assertEqual(train.main(self.arguments("--data", missing)), 2)
        with self.assertRaises(SystemExit):
            train.parse_args(["--epochs", "0"])
