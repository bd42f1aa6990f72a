"""DPFormer's backbone; most oracles are the model itself on changed input."""

import unittest

import torch
from torch.nn import functional as F

from opacus_ext.models import DPFormer, RecurrentModel


def tiny_model() -> DPFormer:
    torch.manual_seed(0)
    return DPFormer(num_items=12, max_len=8, width=8, heads=2).double().eval()


class DPFormerTest(unittest.TestCase):
    def test_shapes_and_defaults(self):
        model = DPFormer(num_items=12, max_len=8)
        ids = torch.randint(1, 13, (3, 5))
        self.assertEqual(model(ids).shape, (3, 5, 13))
        self.assertEqual(model.score(ids).shape, (3, 13))
        self.assertEqual(len(model.blocks), 2)
        # Appendix E: width 64, 2 blocks, learned positions, embedding shared.
        block = 4 * 64 * 64 + 4 * 64 + 8 * 64 * 64 + 5 * 64 + 4 * 64
        expected = (13 + 8) * 64 + 2 * block
        self.assertEqual(sum(p.numel() for p in model.parameters()), expected)

    def test_embedding_is_tied(self):
        model = tiny_model()
        self.assertIs(model.head.weight, model.embedding.weight)
        ids = torch.randint(1, 13, (3, 5))
        expected = model.encode(ids) @ model.embedding.weight.T
        torch.testing.assert_close(model(ids), expected)

    def test_causal(self):
        """A later item changes no earlier logit, and does change its own."""
        model = tiny_model()
        ids = torch.randint(1, 13, (2, 8))
        changed = ids.clone()
        changed[:, 5] = changed[:, 5] % 12 + 1
        before, after = model(ids), model(changed)
        torch.testing.assert_close(before[:, :5], after[:, :5])
        self.assertGreater((before[:, 5:] - after[:, 5:]).abs().amax(-1).min(), 1e-6)

    def test_padding_has_no_influence(self):
        model = tiny_model()
        ids = torch.randint(1, 13, (2, 5))
        padded = F.pad(ids, (0, 3))
        torch.testing.assert_close(model(padded)[:, :5], model(ids))
        torch.testing.assert_close(model.score(padded), model(ids)[:, -1])
        self.assertTrue(model(torch.zeros(2, 8, dtype=torch.long)).isfinite().all())

    def test_samples_are_independent(self):
        model = tiny_model()
        ids = torch.randint(1, 13, (4, 8))
        alone = torch.cat([model(row[None]) for row in ids])
        torch.testing.assert_close(model(ids), alone)

    def test_no_samples_one_position_and_not_tied(self):
        model, ids = tiny_model(), torch.randint(1, 13, (3, 5))
        self.assertEqual(model(ids[:0]).shape, (0, 5, 13))
        at = torch.tensor([4, 0, 2])
        torch.testing.assert_close(model(ids, at), model(ids)[range(3), at])
        model = DPFormer(num_items=12, max_len=8, width=8, tied=False)
        self.assertIsNot(model.head.weight, model.embedding.weight)

    def test_prior(self):
        """A model that knows nothing else ranks by popularity; it is not trained."""
        model = tiny_model()
        shares = torch.tensor([0.0, 0.0, 0.5, *[0.1] * 9, 0.7])
        ids = torch.randint(1, 13, (3, 5))
        plain = model(ids)
        model.set_prior(shares)
        trained = [name for name, _ in model.named_parameters() if "prior" in name]
        self.assertFalse(trained)
        expected = shares.clamp(min=0.1).log().double()
        torch.testing.assert_close(model(ids), plain + expected)
        model.set_prior(torch.zeros(13))
        torch.testing.assert_close(model(ids), plain)
        self.assertIn("prior.logits", model.state_dict())

    def test_rows_for_some_items_alone(self):
        """As a model of all items whose others have one row, and no logits."""
        items = torch.tensor([7, 2, 11])
        model = DPFormer(12, max_len=8, width=8, items=items).double().eval()
        whole = DPFormer(12, max_len=8, width=8, tied=False).double().eval()
        state = {k: v for k, v in model.state_dict().items() if "." in k}
        rows = state["embedding.weight"][model.row]
        state["embedding.weight"] = rows
        state["head.weight"] = torch.zeros_like(rows)
        state["head.weight"][items] = rows[items]
        whole.load_state_dict(state)
        ids = torch.randint(0, 13, (3, 5))
        torch.testing.assert_close(model(ids), whole(ids))
        shares = torch.tensor([0.0, *[0.1] * 12])
        expected = torch.tensor([0, 0.1, 0.1, 0.1, 0.9])
        torch.testing.assert_close(model.shares_of_rows(shares), expected)

    def test_errors(self):
        with self.assertRaisesRegex(ValueError, "heads=3 must divide width=64"):
            DPFormer(num_items=12, max_len=8, heads=3)
        with self.assertRaisesRegex(ValueError, "9 items is longer than max_len=8"):
            tiny_model()(torch.ones(2, 9, dtype=torch.long))


class RecurrentModelTest(unittest.TestCase):
    def test_causal_padded_and_tied(self):
        ids = torch.randint(1, 13, (2, 8))
        changed = ids.clone()
        changed[:, 5] = changed[:, 5] % 12 + 1
        for cell in ("gru", "lstm"):
            torch.manual_seed(0)
            model = RecurrentModel(12, cell, width=8, depth=2).double().eval()
            before, after = model(ids), model(changed)
            torch.testing.assert_close(before[:, :5], after[:, :5])
            self.assertGreater((before[:, 5:] - after[:, 5:]).abs().max(), 1e-6)
            padded = F.pad(ids, (0, 3))
            torch.testing.assert_close(model.score(padded), model(ids)[:, -1])
            self.assertIs(model.head.weight, model.embedding.weight)
        model = RecurrentModel(12, width=8, tied=False)
        self.assertIsNot(model.head.weight, model.embedding.weight)
        with self.assertRaisesRegex(ValueError, "'rnn'"):
            RecurrentModel(12, "rnn")
