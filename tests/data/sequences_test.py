"""Readers and the synthetic set. Files are written by the tests themselves."""

import os
import tempfile
import unittest
from pathlib import Path

import torch

from opacus_ext.data import SequenceData, read_sequences, synthetic_sequences

ML1M = os.environ.get("OPACUS_EXT_ML1M")

# Two users over the same six items, in time order.
SEQUENCES = {1: [4, 9, 2, 7, 5, 1], 2: [1, 4, 9, 2, 7]}


def sasrec_form() -> str:
    return "".join(f"{u} {i}\n" for u, seq in SEQUENCES.items() for i in seq)


class SequencesTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = Path(folder.name) / "actions"

    def read(self, text: str, **kwargs) -> SequenceData:
        self.path.write_text(text)
        return read_sequences(self.path, **kwargs)

    def test_sasrec_form(self):
        data = self.read(sasrec_form())
        self.assertEqual(data.num_items, 6)
        # Items numbered by appearance: 4, 9, 2, 7, 5, 1 become 1 to 6.
        self.assertEqual(
            [h.tolist() for h in data.histories], [[1, 2, 3, 4, 5], [6, 1, 2, 3]]
        )
        self.assertEqual(data.held_out.tolist(), [6, 4])
        data = self.read(sasrec_form(), max_users=1)
        self.assertEqual([h.tolist() for h in data.histories], [[1, 2, 3, 4, 5]])
        self.assertEqual((data.held_out.tolist(), data.num_items), ([6], 6))

    def test_both_forms_give_the_same_sequences(self):
        """Ten pairs of users, so that every item has its five actions."""
        users = {u: SEQUENCES[1 + u % 2] for u in range(20)}
        sasrec = "".join(f"{u} {i}\n" for u, seq in users.items() for i in seq)
        # All users interleaved, users and times descending.
        raw = "".join(
            f"{u}::{users[u][t]}::3.5::{1000 + t}\n"
            for t in reversed(range(6))
            for u in reversed(users)
            if t < len(users[u])
        )
        one, two = self.read(sasrec), self.read(raw)
        self.assertEqual(len(one.histories), 20)
        self.assertEqual(one.fingerprint(), two.fingerprint())

    def test_equal_timestamps_keep_the_order_of_the_file(self):
        items = [3, 1, 2, 5, 4]
        raw = "".join(f"{u}::{i}::1::7\n" for u in range(5) for i in items)
        data = self.read(raw)
        self.assertEqual(data.histories[0].tolist(), [1, 2, 3, 4])

    def test_rare_users_and_items_are_dropped(self):
        common = "".join(f"{u}::{i}::1::{i}\n" for u in range(5) for i in range(5))
        rare_item = "0::77::1::99\n"
        rare_user = "".join(f"9::{i}::1::{i}\n" for i in range(4))
        data = self.read(common + rare_item + rare_user)
        self.assertEqual((len(data.histories), data.num_items), (5, 5))
        # SASRec's form is filtered for items already; users are looked at again.
        data = self.read(sasrec_form() + "3 1\n3 2\n3 4\n3 9\n")
        self.assertEqual((len(data.histories), data.num_items), (2, 6))

    def test_bad_lines_are_named(self):
        table = [
            ("1 2\n1 3 4\n", "line 2: expected 'user item' .* found '1 3 4'"),
            ("1 2\n\n1 x\n", "line 3: expected 'user item' .* found '1 x'"),
            ("userId,movieId\n", "line 1: .* found 'userId,movieId'"),
            ("1::2::3::4\n1 2\n", "line 2: expected 'user::item::rating::timestamp'"),
            ("1::2::3\n", "line 1: expected 'user::item::rating::timestamp'"),
            ("", "no user has 5 actions"),
            ("1 2\n1 3\n", "no user has 5 actions"),
        ]
        for text, message in table:
            with self.subTest(text), self.assertRaisesRegex(ValueError, message):
                self.read(text)
        with self.assertRaisesRegex(ValueError, "at least 3"):
            self.read(sasrec_form(), min_actions=2)
        with self.assertRaises(OSError):
            read_sequences(self.path / "missing")

    def test_training_set(self):
        data = self.read(sasrec_form())
        inputs, targets = data.training_set(max_len=4).tensors
        # Shorter users come first; the held-out item appears nowhere.
        self.assertEqual(inputs.tolist(), [[6, 1, 2, 0], [1, 2, 3, 4]])
        self.assertEqual(targets.tolist(), [[1, 2, 3, 0], [2, 3, 4, 5]])
        # Of a long history the end is used.
        inputs, targets = data.training_set(max_len=2).tensors
        self.assertEqual(inputs.tolist(), [[1, 2], [3, 4]])
        self.assertEqual(targets.tolist(), [[2, 3], [4, 5]])

    def test_contexts_and_popularity(self):
        data = self.read(sasrec_form())
        expected = [[2, 3, 4, 5], [6, 1, 2, 3]]
        self.assertEqual(data.contexts(max_len=4).tolist(), expected)
        self.assertEqual(data.popularity().tolist(), [0, 2, 2, 2, 1, 1, 1])

    def test_synthetic(self):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        data = synthetic_sequences(num_users=2000)
        self.assertTrue(torch.equal(state, torch.get_rng_state()))
        again = synthetic_sequences(num_users=2000)
        other = synthetic_sequences(num_users=2000, seed=1)
        self.assertEqual(data.fingerprint(), again.fingerprint())
        self.assertNotEqual(data.fingerprint(), other.fingerprint())

        lengths = [len(h) + 1 for h in data.histories]
        self.assertTrue(10 <= min(lengths) and max(lengths) <= 30)
        counts = data.popularity()[1:].sort(descending=True).values
        # A long tail: the most frequent tenth of the items beats the rarer half.
        self.assertGreater(counts[:40].sum(), counts[200:].sum())
        with self.assertRaisesRegex(ValueError, "can't share"):
            synthetic_sequences(num_items=41, num_genres=40)

    @unittest.skipUnless(ML1M, "OPACUS_EXT_ML1M names no file")
    def test_movielens(self):
        data = read_sequences(ML1M)
        self.assertEqual((len(data.histories), data.num_items), (6040, 3416))
        actions = sum(map(len, data.histories)) + len(data.held_out)
        self.assertEqual(actions, 999611)
