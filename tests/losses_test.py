"""One loss a sample, from the model's own code, in every mode.

The oracle of a loss is the model's own number for each sample alone; that of a step is
the gradient of each sample (or record) alone.
"""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opacus_ext
from opacus_ext.losses import PerSample, RecordModel, cross_entropy, model_losses
from tests.common import (
    MODES,
    assert_same,
    check,
    clipped_sum,
    half_clipped,
    layer_modes,
    make_private,
    net,
    oracle,
    square_loss,
    trainable,
    wrapped_or_not,
)

transformers = pytest.importorskip("transformers")
from tests import tiny  # noqa: E402

V = tiny.V


def build(task, family, cls, **kwargs):
    return tiny.build(task, family, cls, **kwargs).double()


def gpt2():
    return build("causal-lm", "gpt2", "GPT2LMHeadModel")


def llama():
    return build("causal-lm", "llama", "LlamaForCausalLM")


def bert(head="MaskedLM", num_labels=2):
    config = tiny.config_of(transformers.BertConfig, "bert")
    config.num_labels = num_labels
    return getattr(transformers, f"BertFor{head}")(config).double().train()


def t5():
    model = build("seq2seq-lm", "t5", "T5ForConditionalGeneration")
    model.config.decoder_start_token_id = 0
    return model


def mixtral():
    return build("causal-lm", "mixtral", "MixtralForCausalLM")


def tokens(*shape, labels=True):
    """Ids, and labels of other lengths; the second sample has none at all."""
    batch = {"input_ids": torch.randint(3, V, shape)}
    if labels:
        batch["labels"] = batch["input_ids"].clone()
        batch["labels"][0, ..., shape[-1] // 2 :] = -100
        if shape[0] > 2:
            batch["labels"][1] = -100
    return batch


def alone(model, batch):
    """The model's own loss of each sample; nan for one without labels."""
    size = len(next(iter(batch.values())))
    rows = [{n: x[b : b + 1] for n, x in batch.items()} for b in range(size)]
    return torch.stack([model(**row)["loss"] for row in rows]).double()


def check_losses(model, batch, rtol=1e-6):
    """Their values are the model's own, and a step takes them; returns the values."""
    losses, own = model_losses(model, batch).double(), alone(model, batch)
    fine = ~own.isnan()
    assert fine.any() and torch.allclose(losses[fine], own[fine], rtol=rtol)
    check("ghost_bk", True, model, batch, model_losses, tolerance=100 * rtol)
    return losses


sequence_models = pytest.mark.parametrize(
    "build", [gpt2, llama, bert, t5], ids=lambda build: build.__name__
)


@layer_modes
@sequence_models
@pytest.mark.parametrize(
    "shape", [(3, 6), (4, 4), (1, 5), (3, 2, 6), (4, 4, 4), (1, 3, 5)]
)
def test_every_mode(build, mode, shape):
    """Of samples, and of records of several sequences, the last of which is empty."""
    torch.manual_seed(1)
    model, batch = build(), tokens(*shape)
    if len(shape) > 2:
        model = RecordModel(model)
        batch["labels"][-1, -1] = -100
    wrap, tolerance = shape[0] > 1, 1e-8 if build is bert else 1e-6  # float32
    check(mode, wrap, model, batch, model_losses, tolerance=tolerance)


class TestCrossEntropy:
    @pytest.mark.parametrize("shape", [(1, 4), (4, 4), (3,), (2, 3, 2)])
    def test_is_that_of_each_sample(self, shape):
        logits = torch.randn(*shape, V).double().requires_grad_()
        labels = torch.randint(V, shape)
        if len(shape) > 1:
            labels[0, 1:] = -100
        weight = torch.rand(V).double() + 0.1
        choices = (None, weight), (0.0, 0.2), ("mean", "sum")
        for weight, smoothing, reduction in itertools.product(*choices):
            given = {"weight": weight, "label_smoothing": smoothing}
            given["reduction"] = reduction
            losses = cross_entropy(logits, labels, **given)
            assert losses.shape == shape[:1]
            for b in range(shape[0]):
                rows = logits[b].reshape(-1, V), labels[b].reshape(-1)
                assert torch.allclose(losses[b], F.cross_entropy(*rows, **given))

    def test_without_labels_and_samples_and_in_half_precision(self):
        logits = torch.randn(2, 3, V, requires_grad=True)
        losses = cross_entropy(logits, torch.tensor([[1, 2, 3], [-100] * 3]))
        losses.sum().backward()
        assert losses[1] == 0 and logits.grad[1].abs().max() == 0 < losses[0]
        none = cross_entropy(torch.randn(0, 3, V), torch.zeros(0, 3).long())
        assert none.shape == (0,)
        half = cross_entropy(logits.bfloat16(), torch.ones(2, 3).long())
        assert half.dtype == torch.float32

    def test_refused(self):
        with pytest.raises(ValueError, match=r"shapes \(2, 3, 4\) and \(2, 4\)"):
            cross_entropy(torch.randn(2, 3, 4), torch.zeros(2, 4).long())
        with pytest.raises(ValueError, match="reduction"):
            cross_entropy(torch.randn(2, 4), torch.ones(2).long(), reduction="none")


class TestPerSample:
    def test_weights(self):
        losses, weights = torch.tensor([1.0, 3.0]), torch.tensor([1.0, 0.5])
        assert PerSample()(losses, weights) == 1.25
        assert PerSample("sum")(losses, weights) == 2.5

    def test_refused(self):
        for losses in (torch.ones(()), torch.ones(2, 3)):
            with pytest.raises(ValueError, match=r"model_losses\(model, batch\)"):
                PerSample()(losses)
        for weights in (torch.ones(3), torch.ones(2, requires_grad=True)):
            with pytest.raises(ValueError, match="weights"):
                PerSample()(torch.ones(2), weights)

    @layer_modes
    def test_weights_apply_before_clipping(self, mode):
        batch = torch.randn(4, 3).double()
        weights = torch.tensor([0.0, 0.1, 1.0, 30.0]).double()

        def loss(model, batch):
            return model(batch).square().sum(1)

        model = nn.Linear(3, 2).double()
        grads = {
            name: torch.einsum("b,b...->b...", weights, g)
            for name, g in oracle(model, batch, loss).items()
        }
        private = make_private(model, mode, batch_size=4)
        criterion = private.criterion or PerSample()
        criterion(loss(private.module, batch), weights).backward()
        private.optimizer.step()
        got = {name: 4 * p.grad for name, p in trainable(model).items()}
        assert_same(got, clipped_sum(grads))


class Criterion(nn.Module):
    """The user's own, by the kind of what it does."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.reduction = kind, "mean"

    def forward(self, logits, y):
        losses = F.cross_entropy(logits, y, reduction="none")
        if self.kind == "focal":
            losses = (1 - (-losses).exp()).square() * losses
        if self.kind == "branch" and float(logits.sum()) > 0:
            losses = 2 * losses
        if self.kind == "largest":
            losses = losses / losses.max().detach()
        if self.kind == "weights":
            counts = torch.bincount(y, minlength=logits.shape[1]).to(logits)
            losses = losses * (1 / (1 + counts))[y]
        if self.kind == "negatives":
            similar = logits @ logits.detach().T
            losses = similar.logsumexp(1) - similar.diag()
        return losses if self.reduction == "none" else losses.mean()


def token_mean(logits, y):
    return F.cross_entropy(logits, y)  # of the whole batch's labels that count


ghost_modes = pytest.mark.parametrize("mode", ["ghost_bk", "scan"])


class TestCriterion:
    """In the ghost modes a criterion runs sample by sample."""

    def private(self, mode, criterion, *shape):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.x, self.y = torch.randn(*shape, 4).double(), torch.randint(3, shape)
        return make_private(
            copy.deepcopy(self.model),
            mode,
            batch_size=shape[0],
            criterion=criterion,
            max_grad_norm=0.3,
        )

    def check(self, private, call, criterion):
        """The update is the clipped sum of the gradients of samples alone."""
        before = {n: p.detach().clone() for n, p in trainable(private.module).items()}
        call(private.criterion, private.module(self.x), self.y).backward()
        private.optimizer.step()

        def alone(model, batch):
            return call(criterion, model(batch[0]), batch[1])[None]

        grads = oracle(self.model, (self.x, self.y), alone)
        expected = clipped_sum(grads, "flat", 0.3).values()
        got = trainable(private.module).items()
        for (name, p), e in zip(got, expected):
            assert torch.allclose((before[name] - p) * len(self.x), e)

    @ghost_modes
    @pytest.mark.parametrize("kind", ["focal", "branch", "function"])
    def test_exact(self, mode, kind):
        criterion = token_mean if kind == "function" else Criterion(kind)
        private = self.private(mode, criterion, 5)
        self.check(private, lambda c, *batch: c(*batch), criterion)

    @pytest.mark.parametrize("kind", ["largest", "weights", "negatives", "tokens"])
    def test_refused(self, kind):
        """A mean over the tokens of all samples is one that mixes them, too."""
        criterion = token_mean if kind == "tokens" else Criterion(kind)
        private = self.private("ghost_bk", criterion, 5)
        self.y[0] = -100 if kind == "tokens" else self.y[0]
        numbers = r"mixes samples: it gives \d.* for the batch, and the mean of .* \d"
        if kind == "tokens":
            numbers = "it gives .* for the batch, and the mean"
        with pytest.raises(ValueError, match=numbers):
            private.criterion(private.module(self.x), self.y)

    @ghost_modes
    @pytest.mark.parametrize("kind", ["mean", "order", "centred"])
    def test_what_mixes_between_model_and_criterion_is_refused(self, mode, kind):
        private = self.private(mode, PerSample(), 5)
        y = private.module(self.x)
        y = y - y.mean(0) if kind == "centred" else y
        losses = F.cross_entropy(y, self.y, reduction="none")
        losses = losses - losses.mean() if kind == "mean" else losses
        losses = losses.sort().values if kind == "order" else losses
        with pytest.raises(ValueError, match="depends on the outputs of others"):
            private.criterion(losses).backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_what_mixes_a_little_is_refused_whatever_comes_between(self, dtype):
        """A batch of one, of which nothing can be told; a sample of large gradients."""
        private = self.private("ghost_bk", PerSample(), 4)
        private.module.to(dtype)
        for size, refused in ((4, True), (1, False), (4, True), (4, True)):
            y = private.module(self.x[:size].to(dtype)).float()
            losses = y.square().sum(1) * 1e3 ** (torch.arange(size) == 0)
            loss = private.criterion(losses + 0.05 * losses.roll(1))
            if not refused:
                loss.backward()
                private.optimizer.step()
                private.optimizer.zero_grad()
                continue
            with pytest.raises(ValueError, match="depends on the outputs of others"):
                loss.backward()

    @ghost_modes
    @pytest.mark.parametrize("kind", [nn.MSELoss, nn.L1Loss, nn.HuberLoss])
    def test_shapes_that_broadcast_are_told(self, mode, kind):
        """[B, 1] and [B] give [B, B] for the batch, and what is meant for a sample."""
        private = self.private(mode, kind(), 4)
        y, target = private.module(self.x)[:, :1], torch.tensor([-2.0, 2, -2, 2])
        with pytest.warns(UserWarning, match="alone.*it gives.*compare the shapes"):
            loss = private.criterion(y, target)
        assert torch.allclose(loss.detach(), kind()(y[:, 0], target))

    @pytest.mark.parametrize("criterion", [nn.MultiMarginLoss(), nn.CrossEntropyLoss()])
    def test_evaluation_on_batches_of_other_sizes(self, criterion):
        """It gives the value, and training goes on sample by sample."""
        private = self.private("ghost_bk", criterion, 4)
        for _ in range(4):
            self.model.load_state_dict(private.module._module.state_dict())
            self.check(private, lambda c, *batch: c(*batch), criterion)
            private.optimizer.zero_grad()
            with torch.no_grad():
                y, labels = private.module(torch.randn(7, 4).double()), torch.ones(7)
                value = private.criterion(y, labels.long())
                assert torch.allclose(value, criterion(y, labels.long()))

    @ghost_modes
    def test_weights_of_as_many_entries_as_samples(self, mode):
        class Weighted(nn.Module):
            reduction = "mean"

            def forward(self, output, target, weight):
                losses = ((output - target[:, None]) ** 2 * weight).sum(1)
                return losses if self.reduction == "none" else losses.mean()

        weight = torch.arange(3.0).double()
        private = self.private(mode, Weighted(), 4)
        call = lambda c, *batch: c(*batch, weight)  # noqa: E731
        self.check(private, call, Weighted())
        self.model = copy.deepcopy(private.module)
        self.model = getattr(self.model, "_module", self.model)
        self.x, self.y = self.x[:3], self.y[:3]
        private.optimizer.zero_grad()
        criterion = private.criterion(private.module(self.x), self.y, weight)
        alone = ((private.module(self.x) - self.y[:, None]) ** 2 * weight).sum(1)
        assert torch.allclose(criterion.loss_per_sample, alone)


class TestModelLosses:
    @sequence_models
    def test_is_the_models_own_loss(self, build):
        torch.manual_seed(1)
        losses = check_losses(build(), tokens(3, 6))
        assert losses[1] == 0

    @pytest.mark.parametrize(
        "head, labels",
        [
            ("SequenceClassification", torch.tensor([0, 2, 1])),
            ("SequenceClassification", torch.rand(3).double()),
            ("SequenceClassification", torch.rand(3, 2).double()),
            ("TokenClassification", "tokens"),
            ("NextSentencePrediction", torch.tensor([0, 1, 1])),
            ("QuestionAnswering", "positions"),
            ("PreTraining", "both"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_heads(self, head, labels):
        torch.manual_seed(1)
        batch, classes = tokens(3, 6, labels=isinstance(labels, str)), 2
        if isinstance(labels, torch.Tensor):
            batch["labels"] = labels
            classes = labels.shape[1] if labels.dim() > 1 else int(labels.max()) + 1
        elif labels == "positions":
            del batch["labels"]
            batch["start_positions"] = torch.tensor([0, 2, 9])  # one is outside
            batch["end_positions"] = torch.tensor([3, 9, 5])
        else:
            batch["labels"][1, 2] = 3
            classes = V if labels == "tokens" else 2
        if labels == "both":
            batch["next_sentence_label"] = torch.tensor([0, 1, 1])
        # A start outside has no loss here, and is no number for the model alone.
        check_losses(bert(head, classes), batch, 1e-10)

    def test_ctc(self):
        def speech(m, x, labels):
            lengths = (labels >= 0).sum(-1)
            rows = m.last(x).log_softmax(-1).transpose(0, 1)
            sizes = torch.full((len(x),), x.shape[1])
            flat = labels[labels >= 0]
            return {"loss": F.ctc_loss(rows, flat, sizes, lengths)}

        torch.manual_seed(0)
        labels = torch.tensor([[1, 2, 3], [4, -100, -100], [2, 1, -100]])
        batch = {"x": torch.randn(3, 7, 4).double(), "labels": labels}
        check_losses(net(speech, last=(4, 5))().double(), batch, 1e-10)

    @layer_modes
    def test_empty_batch(self, mode):
        none = torch.zeros(0, 6).long()
        batch = {"input_ids": none, "labels": none}
        check(mode, True, gpt2(), batch, model_losses)

    def test_evaluation_with_a_mask_of_ones(self):
        """It may be of the samples, or of all of them: that gives the same."""

        def masked(m, x, mask):
            scores = x @ x.mT
            if not bool(mask.all()):
                scores = scores.masked_fill(~mask, -1e9)
            return {"loss": m.last(scores.softmax(-1) @ x).square().mean()}

        model, x = net(masked, last=(3, 2))(), torch.randn(4, 4, 3)
        ones = torch.ones(4, 4).bool()
        with torch.no_grad():
            losses = model_losses(model, {"x": x, "mask": ones})
            own = [model(s[None], ones)["loss"] for s in x]
        assert torch.allclose(losses, torch.stack(own))

    def test_no_leaks(self):
        batch = tokens(4, 6)
        assert opacus_ext.find_leaks(gpt2(), batch, model_losses) == []

    def test_balancing_loss_of_each_sample(self):
        model, batch = mixtral().float(), tokens(3, 6)
        batch["labels"][1] = batch["input_ids"][1]
        without = model_losses(model, batch)
        model.config.output_router_logits = True
        assert (check_losses(model, batch) - without).abs().min() > 1e-4
        check("hooks", True, model, batch, model_losses, tolerance=1e-4)

    def test_refused(self):
        batch = dict(tokens(3, 6), num_items_in_batch=torch.tensor(7))
        with pytest.raises(ValueError, match="num_items_in_batch"):
            model_losses(gpt2(), batch)
        with pytest.raises(
            ValueError, match="GPT2LMHeadModel returned no loss for a sample of input"
        ):
            model_losses(gpt2(), tokens(3, 6, labels=False))

    @pytest.mark.parametrize(
        "how",
        ["selected", "turned", "other", "whole", "soft", "float32", "rows", "none"],
    )
    def test_losses_of_all_kinds(self, how):
        """Whatever a model does to get its loss; refused is what is not one number."""

        def forward(m, ids, labels):
            y = m.embedding(ids)
            flat = y.flatten(0, 1), labels.flatten()
            if how == "selected":
                kept = labels >= 3
                flat = y[kept], labels[kept]
            if how == "turned":
                flat = y.transpose(0, 1).flatten(0, 1), labels.T.flatten()
            if how == "float32":  # of constants of the model, as angles are
                y = y * (labels[..., None].float() @ m.ones.float())
                flat = y.flatten(0, 1), flat[1]
            if how == "soft":
                flat = flat[0], F.one_hot(flat[1], 9).to(y)
            rows = "none" if how == "rows" else "mean"
            loss = F.cross_entropy(*flat, reduction=rows)
            if how == "other":
                loss = y.log_softmax(-1)[..., 0].mean()
            if how == "whole":
                loss = loss + y.mean()
            return {"loss": None if how == "none" else loss, "logits": y}

        torch.manual_seed(0)
        labels = torch.tensor([[3, 4, 1, 0], [5, 1, 2, 0], [6, 7, 8, 0]])
        model = net(forward, embedding=lambda: nn.Embedding(9, 9))().double()
        model.register_buffer("ones", torch.ones(1, 9))
        batch = {"ids": labels, "labels": labels}
        if how not in ("rows", "none"):
            check_losses(model, batch, 1e-10)
            return
        match = dict(rows=r"a loss of shape \(\d+,\)", none="returned no loss")[how]
        for mode in ("hooks", None):
            module = mode and make_private(model, mode, batch_size=3).module
            with pytest.raises(ValueError, match=match):
                model_losses(module or model, batch)


def with_class_token(m, input_ids):
    """A model with a parameter of its own, as one for images has."""
    token = m.token.expand(len(input_ids), -1, -1)
    return m.out(torch.cat([token, m.words(input_ids)], 1).tanh())


def small_images():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(36, 3)).double()


def loss_of_views(model, batch):
    (views,), label = batch
    return torch.stack([F.cross_entropy(model(x[None]), label) for x in views]).mean(
        dim=0, keepdim=True
    )


class TestRecordModel:
    def test_padding_adds_nothing(self):
        """Sequences without labels, and an attention mask of ones."""
        logits = RecordModel(gpt2())(**tokens(2, 3, 6, labels=False)).logits
        assert logits.shape == (2, 3, 6, V)
        torch.manual_seed(1)
        model, batch = RecordModel(gpt2()), tokens(3, 2, 6)
        batch["attention_mask"] = torch.ones(3, 2, 6).long()
        losses = model_losses(model, batch)
        fill = {"input_ids": 0, "labels": -100, "attention_mask": 1}
        longer = {
            n: torch.cat([x, torch.full_like(x[:, :1], fill[n])], 1)
            for n, x in batch.items()
        }
        assert torch.allclose(model_losses(model, longer), losses)

    def test_mean_over_all_labels_of_a_record(self):
        torch.manual_seed(1)
        model, batch = gpt2(), tokens(2, 3, 6)
        rows = {n: x.flatten(0, 1) for n, x in batch.items()}
        counts = (batch["labels"][..., 1:] != -100).sum(2)
        sums = (model_losses(model, rows).view(2, 3) * counts).sum(1)
        got = model_losses(RecordModel(model), batch)
        assert torch.allclose(got, sums / counts.sum(1))

    @layer_modes
    @pytest.mark.parametrize("shape", [(3, 2, 5), (2, 2, 2)])
    def test_a_model_with_parameters_of_its_own(self, mode, shape):
        torch.manual_seed(0)
        model = net(
            with_class_token,
            words=lambda: nn.Embedding(V, 4),
            out=(4, 3),
            token=lambda: torch.randn(1, 1, 4),
        )
        batch = {"input_ids": torch.randint(V, shape)}
        check(mode, True, RecordModel(model()).double(), batch, square_loss)

    @pytest.mark.parametrize("mode", [*MODES, "scan", "auto"])
    def test_views_of_images(self, mode):
        """Their mean gradient is clipped, of batches of any size, none included."""
        model, private = small_images(), None
        for size in (0, 3, 1, 2):
            x = torch.randn(size, 4, 1, 8, 8).double()
            y = torch.randint(3, (size,))
            # Each view alone, by the plain model.
            clean = small_images()
            clean.load_state_dict(model.state_dict())
            before = copy.deepcopy(clean.state_dict())
            expected = clipped_sum(oracle(clean, (x, y), loss_of_views), "flat", 0.2)
            private = private or make_private(
                RecordModel(model), mode, batch_size=2, max_grad_norm=0.2
            )

            def loss(model, batch):
                labels = batch[1][:, None].expand(-1, 4)
                return cross_entropy(model(input=batch[0]), labels)

            private.step((x, y), loss)
            after = model.state_dict()
            got = {n: 2 * (before[n] - after[n]) for n in before}
            assert_same(got, expected, message=f"{size}")

    def test_refused(self):
        model = RecordModel(gpt2())
        with pytest.raises(ValueError, match=r"\[R, S, ...\].*labels \(2,\)"):
            model(**dict(tokens(2, 3, 6), labels=torch.ones(2)))
        with pytest.raises(ValueError, match="got none"):
            model()


class TestOwnLoss:
    """The model's own number for the batch is the mean over samples."""

    @wrapped_or_not
    @pytest.mark.parametrize(
        "mode, build",
        [("hooks", gpt2), ("hooks", bert), ("hooks", t5)]
        + [("ghost", gpt2), ("ghost_bk", gpt2), ("scan", gpt2)],
    )
    def test_mean_of_the_samples_own(self, mode, build, wrap):
        """Samples have more labels or fewer."""
        model = build()
        plain, batch = copy.deepcopy(model), tokens(3, 6)
        batch["labels"][1, :2] = batch["input_ids"][1, :2]  # one without has no mean
        grads = oracle(plain, batch, lambda m, one: m(**one).loss[None])
        c = half_clipped(grads)
        private = make_private(model, mode, wrap, batch_size=3, max_grad_norm=c)
        loss = private.module(**batch).loss
        assert torch.allclose(loss.detach().double(), alone(plain, batch).mean())
        loss.backward()
        private.optimizer.step()
        got = {n: 3 * p.grad for n, p in trainable(model).items()}
        assert_same(got, clipped_sum(grads, "flat", c), 1e-6)  # its loss is in float32

    @pytest.mark.parametrize("mode", ["ghost", "ghost_bk"])
    def test_criterion_takes_no_number(self, mode):
        private = make_private(gpt2(), mode, batch_size=3)
        with pytest.raises(ValueError, match="loss.backward.*model_losses"):
            private.criterion(private.module(**tokens(3, 6)).loss)

    @pytest.mark.parametrize("mode", [*MODES, "scan", "auto"])
    def test_in_a_tuple(self, mode):
        """Beside outputs, and a second loss that is added to it."""

        def forward(m, x, y):
            out = m.layer(x)
            return F.mse_loss(out, y), out, out.pow(2).mean(), 3

        def own(m, batch):
            loss, _, penalty, _ = m(*batch)
            return (loss + 0.1 * penalty)[None]

        torch.manual_seed(0)
        model = net(forward, layer=(3, 2))().double()
        batch = torch.randn(4, 3).double(), torch.randn(4, 2).double()
        grads = oracle(model, batch, own)
        c = half_clipped(grads)
        private = make_private(model, mode, batch_size=4, max_grad_norm=c)
        loss, out, penalty, number = private.module(*batch)
        assert out.shape == (4, 2) and number == 3
        (loss + 0.1 * penalty).backward()
        private.optimizer.step()
        got = {n: 4 * p.grad for n, p in trainable(model).items()}
        assert_same(got, clipped_sum(grads, "flat", c), 1e-8)

    def test_labels_that_do_not_count(self):
        """A sample without a label has no loss, and adds nothing."""
        model = bert("SequenceClassification", num_labels=3)
        private = make_private(model, "hooks", batch_size=3)
        batch = tokens(3, 6, labels=False)
        batch["labels"] = torch.tensor([0, -100, 1])
        private.module(**batch).loss.backward()
        private.optimizer.step()
        assert all(p.isfinite().all() for p in model.parameters())


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
