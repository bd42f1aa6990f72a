"""What lets one sample's loss depend on another's is found, named and refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    MixtralForCausalLM,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from opacus_ext import find_leaks
from opacus_ext.layers import SwitchFeedForward, TopKFeedForward, balancing_loss
from tests.common import check, every_mode, make_private, next_token_loss, square_loss


def tokens(B=4, T=6):
    ids = torch.randint(1, 32, (B, T))
    mask = torch.ones_like(ids)
    mask[0, T - 2 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100),
    }


def mixtral(**kwargs):
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_local_experts=4,
            max_position_embeddings=32,
            **kwargs,
        )
    )


class OverTheBatch(nn.Module):
    """A Switch layer whose capacity is counted over the batch."""

    def __init__(self, capacity=6):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.moe = SwitchFeedForward(4, 8, num_experts=3)
        self.capacity = capacity
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        y = self.moe(x.flatten(0, 1)[None])  # the batch as one sequence
        return self.last(x + y.view_as(x))

    def limit(self):
        self.moe.capacity = self.capacity
        return self


def statistics(position):
    layers = [nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)]
    layers.insert(position, nn.BatchNorm1d(4))
    return nn.Sequential(*layers)


class TestFound:
    @pytest.mark.parametrize("position", [0, 1, 2])
    def test_batch_norm(self, position):
        (leak,) = find_leaks(statistics(position), torch.randn(5, 4))
        assert leak.where == f"{position} (BatchNorm1d)"
        assert "GroupNorm" in leak.fix

    def test_batch_norm_in_evaluation_does_not_leak(self):
        assert find_leaks(statistics(1).eval(), torch.randn(5, 4)) == []

    def test_capacity_over_the_batch(self):
        (leak,) = find_leaks(OverTheBatch().limit(), torch.randn(4, 5, 4))
        assert "moe" in leak.where and "capacity" in leak.fix
        assert find_leaks(OverTheBatch(), torch.randn(4, 5, 4)) == []

    def test_models_own_loss_and_balancing_loss(self):
        model = mixtral(output_router_logits=True)
        found = find_leaks(model, tokens())
        assert {leak.where for leak in found} == {
            "output['loss']",
            "output['aux_loss']",
        }
        assert all("balancing_loss" in leak.fix for leak in found)

    @pytest.mark.parametrize("weight", [1e-3, 1.0])
    def test_balancing_loss_over_the_batch(self, weight):
        def loss(model, batch):
            out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
            own = next_token_loss(out.logits, batch["input_ids"])
            return own + weight * out.aux_loss

        (leak,) = find_leaks(mixtral(output_router_logits=True), tokens(), loss)
        assert leak.where == "loss_fn"

    def test_balancing_loss_by_sample(self):
        def loss(model, batch):
            out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
            p = torch.stack(out.router_logits).softmax(-1)  # [layers, B * T, experts]
            p = p.unflatten(1, batch["input_ids"].shape).transpose(0, 1).flatten(1, 2)
            extra = balancing_loss(p, p.topk(2).indices)
            return next_token_loss(out.logits, batch["input_ids"]) + extra

        assert find_leaks(mixtral(output_router_logits=True), tokens(), loss) == []

    def test_hidden_in_the_gradient(self):
        """The losses of the others stay; only their gradients change."""

        def loss(model, x):
            y = model(x).square().sum(1)
            scale = y.mean().detach()
            return y * (scale / scale.clone()) + (y - y.detach()) * scale

        (leak,) = find_leaks(nn.Linear(4, 2), torch.randn(5, 4), loss)
        assert leak.where == "loss_fn"

    def test_scalar_loss(self):
        (leak,) = find_leaks(
            nn.Linear(4, 2), torch.randn(5, 4), lambda m, x: m(x).mean()
        )
        assert leak.where == "loss_fn" and "shape ()" in leak.reason

    @pytest.mark.parametrize(
        "model", [SwitchFeedForward(4, 8, 3, capacity=2), TopKFeedForward(4, 8, 3)]
    )
    def test_our_layers_do_not_leak(self, model):
        def loss(model, x):
            return model(x).square().sum((1, 2)) + model.balancing

        assert find_leaks(model, torch.randn(4, 5, 4), loss) == []

    def test_switch_of_transformers_does_not_leak(self):
        model = SwitchTransformersForConditionalGeneration(
            SwitchTransformersConfig(
                vocab_size=32,
                d_model=16,
                d_kv=8,
                d_ff=16,
                num_heads=2,
                num_layers=2,
                num_decoder_layers=2,
                num_sparse_encoder_layers=1,
                num_sparse_decoder_layers=1,
                num_experts=4,
                expert_capacity=2,
            )
        )
        batch = tokens()
        batch["decoder_input_ids"] = batch.pop("labels").clamp(min=0)
        assert find_leaks(model, batch) == []

    @pytest.mark.parametrize("p", [0.0, 0.3])
    def test_dropout_with_a_rate_of_its_own(self, p):
        """No attribute holds the rate, and experts draw as many numbers as tokens."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.router, self.last = nn.Linear(4, 3), nn.Linear(4, 4)
                self.first = nn.Linear(4, 4)
                self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

            def forward(self, x):
                flat = self.first(x).flatten(0, 1)
                chosen, out = self.router(flat).argmax(-1), torch.zeros_like(flat)
                for i, expert in enumerate(self.experts):
                    (token,) = torch.where(chosen == i)
                    y = F.dropout(expert(flat[token]), p, self.training)
                    out = out.index_add(0, token, y)
                q = out.view_as(x)[:, None]
                rows = F.scaled_dot_product_attention(q, q, q, None, p, False)
                return self.last(rows[:, 0])

        x = torch.randn(5, 6, 4)
        assert find_leaks(Model(), x) == []
        private = make_private(Model(), "ghost_bk", batch_size=5)
        private.step(x, square_loss)

    def test_nothing_is_changed(self):
        model = statistics(1)
        before = {n: x.clone() for n, x in model.state_dict().items()}
        state = torch.get_rng_state()
        find_leaks(model, torch.randn(5, 4, generator=torch.Generator()))
        assert torch.equal(state, torch.get_rng_state())
        for name, x in model.state_dict().items():
            assert torch.equal(x, before[name])
        assert all(p.grad is None for p in model.parameters())
        assert not model._forward_hooks

    @pytest.mark.parametrize("x", [torch.randn(1, 4), torch.ones(3, 4)])
    def test_needs_two_different_samples(self, x):
        with pytest.raises(ValueError, match="two samples"):
            find_leaks(nn.Linear(4, 2), x)


class TestRefused:
    @every_mode
    def test_capacity_is_that_of_the_sample(self, mode):
        """In training each sample is a batch of one."""
        torch.manual_seed(0)
        model, x = OverTheBatch().limit().double(), torch.randn(4, 5, 4).double()
        check(mode, True, model, x, square_loss)

    @every_mode
    @pytest.mark.parametrize("wrap", [True, False])
    def test_number_that_mixes_samples(self, mode, wrap):
        model = mixtral(output_router_logits=True)
        batch = tokens()
        private = make_private(model, mode, wrap, batch_size=4)

        def loss(extra):
            def fn(model, batch):
                out = model(batch["input_ids"], attention_mask=batch["attention_mask"])
                own = next_token_loss(out.logits, batch["input_ids"])
                return own + 0.01 * out.aux_loss if extra else own

            return fn

        private.step(batch, loss(False))
        before = [p.detach().clone() for p in model.parameters()]
        if mode == "hooks":  # a mean of means is one
            private.step(batch, loss(True))
            return
        with pytest.raises(RuntimeError, match="depends on the outputs of others"):
            private.step(batch, loss(True))
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before))
        private.step(batch, loss(False))

    @every_mode
    @pytest.mark.parametrize("how", ["attribute", "list", 3, 4, 8])
    def test_numbers_in_other_places(self, mode, how):
        """A balancing loss over the batch that is kept, or given in a vector."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.router = nn.Linear(4, 4), nn.Linear(4, 3)

            def forward(self, x):
                x = self.first(x)
                p = self.router(x).softmax(-1)
                share = F.one_hot(p.argmax(-1), 3).to(p).mean((0, 1))
                balancing = (share * p.mean((0, 1))).sum()
                out = x * p.max(-1, keepdim=True).values
                if how == "attribute":
                    self.kept = balancing
                elif how == "list":
                    self.kept = [balancing]
                else:  # one a layer, also as many as samples
                    return out, torch.stack([balancing] * how)
                return out

        def loss(model, x):
            found = model(x)
            if isinstance(found, tuple):
                return square_loss(lambda x: found[0], x) + found[1].sum()
            kept = getattr(model, "_module", model).kept
            own = kept[0] if isinstance(kept, list) else kept
            return square_loss(lambda x: found, x) + own

        torch.manual_seed(0)
        x = torch.randn(4, 5, 4).double()
        private = make_private(Model().double(), mode, batch_size=4)
        what = "changes kept" if isinstance(how, str) else r"output\[1\] has shape"
        with pytest.raises(RuntimeError, match=what):
            private.step(x, loss)

    @every_mode
    def test_losses_of_flattened_tokens(self, mode):
        """``[B * T]``: which rows are whose can't be told."""

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.last = nn.Linear(4, 2)

            def forward(self, x):
                return self.last(x).square().sum(-1).flatten()

        def loss(model, x):
            return model(x).unflatten(0, x.shape[:2]).sum(1)

        private = make_private(Model().double(), mode, batch_size=4)
        with pytest.raises(RuntimeError, match=r"Model: output has shape \(5,\)"):
            private.step(torch.randn(4, 5, 4).double(), loss)

    def test_mean_over_samples_is_trained_on(self):
        """The way of Opacus's tutorial: the loss that the model computes."""
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=32,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = BertForSequenceClassification(config).double()
        batch = tokens()
        batch["labels"] = torch.tensor([0, 1, 1, 0])
        private = make_private(model, "hooks", batch_size=4)
        private.module(**batch).loss.backward()
        got = {n: p.grad_sample for n, p in model.named_parameters()}

        def loss(model, batch):
            logits = model(batch["input_ids"], batch["attention_mask"]).logits
            return F.cross_entropy(logits, batch["labels"], reduction="none")

        private.optimizer.zero_grad()
        loss(private.module, batch).mean().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(got[name], p.grad_sample)

    @every_mode
    def test_numbers_beside_do_no_harm(self, mode):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.last = nn.Linear(4, 2)

            def forward(self, x):
                y = self.last(x)
                return y, y.std()

        def loss(model, x):
            return model(x)[0].square().sum(1)

        check(mode, False, Model().double(), torch.randn(4, 4).double(), loss)
