"""The check that users run: what it finds, what it says, and what it leaves alone."""

import copy
import doctest
from collections import UserDict

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import opacus_ext.checks.check
from opacus_ext import check_per_sample_gradients, find_leaks
from tests.common import MODES, make_private, next_token_loss, square_loss


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def batch_of(B=5):
    return torch.randn(B, 4), torch.randint(0, 3, (B,))


def run(model, batch, loss_fn, **kwargs):
    return check_per_sample_gradients(model, batch, loss_fn, verbose=False, **kwargs)


def test_ok():
    report = run(mlp(), batch_of(), nn.CrossEntropyLoss())
    assert report.ok, str(report)
    assert report.modes == MODES
    assert list(report.cells) == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert report.differing == [] and not report.refused and not report.findings
    assert report.dtype is torch.float64 and report.tolerance == 1e-8
    for row in report.cells.values():
        for cell in row.values():
            assert cell.status == "ok"
            assert cell.own < 1e-12 and cell.clipped < 1e-12


@pytest.mark.parametrize("wrap_model", [True, False])
@pytest.mark.parametrize("B", [1, 2, 4])
def test_batch_sizes_and_styles(wrap_model, B):
    report = run(mlp(), batch_of(B), nn.CrossEntropyLoss(), wrap_model=wrap_model)
    assert report.ok, str(report)


class OverSelf(nn.Module):
    """Holds a function over itself, which a deep copy leaves over the original."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        inner = lambda h: h @ self.embedding.weight.t()  # noqa: E731
        self.head = lambda h: inner(h).mean(1)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


def test_a_function_over_the_model():
    model, batch = OverSelf(), (torch.randint(0, 7, (4, 3)), torch.randint(0, 7, (4,)))
    before = copy.deepcopy(model.state_dict())
    report = run(model, batch, nn.CrossEntropyLoss())
    assert report.ok, str(report)
    assert find_leaks(model, batch[0]) == []
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_criterion(reduction):
    """Each reduction, left as it was; a sequence target is averaged per sample."""
    criterion = nn.CrossEntropyLoss(weight=torch.rand(3), reduction=reduction)
    model = nn.Conv1d(4, 3, 1)
    batch = torch.randn(5, 4, 6), torch.randint(0, 3, (5, 6))
    report = run(model, batch, criterion, modes=["hooks"])
    assert report.ok, str(report)
    assert criterion.reduction == reduction and criterion.weight.dtype == torch.float32


class Inputs(UserDict):
    """As transformers' BatchEncoding: a mapping with attributes."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize("kind", ["dict", "mapping", "list", "nested"])
def test_batches_of_any_form(kind):
    x, y = batch_of()
    model = mlp()

    def loss(output, target):
        return F.cross_entropy(output, target, reduction="none")

    batches = {
        "dict": ({"x": x, "y": y}, lambda m, b: loss(m(b["x"]), b["y"])),
        "mapping": (Inputs(x=x, y=y), lambda m, b: loss(m(b.x), b.y)),
        "list": ([x, y, "text", 7, None], lambda m, b: loss(m(b[0]), b[1])),
        "nested": (((x, [x]), {"y": y}), lambda m, b: loss(m(b[0][1][0]), b[1]["y"])),
    }
    batch, loss_fn = batches[kind]
    report = run(model, batch, loss_fn)
    assert report.ok, str(report)


def test_criterion_with_keyword_inputs():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, *, x, scale):
            return self.fc(x) * scale

    x, y = batch_of()
    batch = {"x": x, "scale": torch.tensor(2.0)}, y
    report = run(Model(), batch, nn.CrossEntropyLoss())
    assert report.ok, str(report)


@pytest.fixture
def stock():
    """Opacus as it is shipped, which is wrong about padding_idx."""
    opacus_ext.unregister()
    yield
    opacus_ext.register()


def test_names_the_parameter_that_differs(stock):
    """Only the cause is named, though its norm spoils every clipping factor."""
    model = nn.Sequential(
        nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)
    )
    ids = torch.tensor([[0, 1, 2], [0, 0, 3], [1, 2, 3], [4, 5, 6]])
    batch = ids, torch.randint(0, 3, (4,))
    report = run(model, batch, nn.CrossEntropyLoss(), modes=["hooks", "ghost"])
    assert not report.ok
    assert report.cells["0.weight"]["hooks"].status == "differs"
    assert report.cells["2.weight"]["hooks"].status == "factor"
    # Stock "ghost" clips by no norm but the whole one: the cause can't be told there.
    assert {row["ghost"].status for row in report.cells.values()} == {"differs"}
    assert "0.weight" in report.differing
    assert "differs" in str(report) and "factor" in str(report)

    report = run(model, batch, nn.CrossEntropyLoss(), modes=["hooks"])
    assert report.differing == ["0.weight"]


def test_refused_is_reported():
    report = run(mlp(), batch_of(), nn.CrossEntropyLoss(), modes=["hooks", "nonsense"])
    assert not report.ok and list(report.refused) == ["nonsense"]
    assert "grad_sample_mode" in report.refused["nonsense"]
    assert report.cells["0.weight"]["nonsense"].status == "refused"
    assert report.cells["0.weight"]["hooks"].status == "ok"
    assert "! nonsense refused" in str(report)
    assert report.differing == []


class Normalised(nn.Module):
    """Subtracts the batch's mean, as BatchNorm in small."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x):
        h = self.fc(x)
        return h - 0.5 * h.mean(dim=0)


def test_cross_sample_model():
    report = run(Normalised(), batch_of(), nn.CrossEntropyLoss())
    assert not report.ok
    assert report.cross_sample == [0, 1, 2, 3, 4]
    assert "other samples in the batch" in str(report)


def test_cross_sample_gradient_only():
    """The loss has the same value alone and in the batch, its gradient has not."""

    def loss_fn(model, batch):
        losses = square_loss(model, batch)
        average = losses.mean()
        return losses + average - average.detach()

    def fair(model, batch):
        return square_loss(model, batch)

    x = torch.randn(4, 3)
    assert run(nn.Linear(3, 2), x, fair).ok
    report = run(nn.Linear(3, 2), x, loss_fn)
    assert report.cross_sample == [0, 1, 2, 3] and not report.ok


def test_cross_sample_names_the_samples():
    """A capacity of three: only the sample that finds no room is affected."""

    def loss_fn(model, x):
        kept = (torch.arange(len(x)) < 3).to(x)
        return square_loss(model, x) * kept

    report = run(nn.Linear(3, 2), torch.randn(4, 3), loss_fn)
    assert report.cross_sample == [3]


@pytest.mark.parametrize("dims", [(), (6,)])
def test_batch_norm(dims):
    layers = [nn.BatchNorm1d(4), nn.Flatten(), nn.LazyLinear(3)]
    model = nn.Sequential(*layers)
    x = torch.randn(5, 4, *dims)
    model(x)
    report = run(model, (x, torch.randint(0, 3, (5,))), nn.CrossEntropyLoss())
    assert not report.ok and report.cross_sample and report.findings
    assert "no per-sample clipping is valid" in str(report)


def test_random_model():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return F.dropout(self.fc(x), 0.5, training=True)

    report = run(Model(), batch_of(), nn.CrossEntropyLoss())
    assert report.random and not report.ok and "random" in str(report)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_switched_off_on_the_copy(training):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.attention_dropout = 0.5
            self.drop = nn.Dropout(0.5)

        def forward(self, x):
            p = self.attention_dropout
            x = F.dropout(self.fc(x), p=p, training=self.training)
            return F.dropout(self.drop(x), p=self.drop.p, training=self.training)

    model = Model().train(training)
    report = run(model, batch_of(), nn.CrossEntropyLoss())
    assert report.ok, str(report)
    assert model.attention_dropout == 0.5 and model.drop.p == 0.5
    assert model.drop.training is training and model.training is training


def _untouched(model, before, gradients):
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), before))
    for p, g in zip(model.parameters(), gradients):
        assert p.grad is g
        assert not hasattr(p, "grad_sample") and not hasattr(p, "summed_grad")
    for module in model.modules():
        assert not module._forward_hooks and not module._backward_hooks


class Counts(nn.Module):
    """A buffer that each forward changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_alone(fails):
    model = nn.Sequential(nn.Linear(4, 8), Counts(), nn.Dropout(0.5), nn.Linear(8, 3))
    batch = batch_of()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model[2].eval()
    model[0].bias.requires_grad = False
    gradients = [p.grad for p in model.parameters()]
    values = [g.clone() for g in gradients]
    before = [v.clone() for v in model.state_dict().values()]
    inputs = copy.deepcopy(batch)
    state = torch.get_rng_state()
    criterion = nn.CrossEntropyLoss()

    def broken(model, batch):
        torch.rand(3)
        return criterion(model(batch[0]), batch[1], "too many arguments")

    if fails:
        with pytest.raises(TypeError):
            run(model, batch, broken)
    else:
        run(model, batch, criterion)
    assert torch.equal(torch.get_rng_state(), state)
    _untouched(model, before, gradients)
    assert all(torch.equal(g, v) for g, v in zip(gradients, values))
    assert all(torch.equal(a, b) for a, b in zip(batch, inputs))
    assert [m.training for m in model] == [True, True, False, True]
    assert criterion.reduction == "mean"


def test_inputs_changed_in_place_by_the_model():
    def loss_fn(model, x):
        losses = square_loss(model, x.clone())
        x.add_(1.0)
        return losses

    x = torch.randn(4, 3)
    before = x.clone()
    assert run(nn.Linear(3, 2), x, loss_fn).ok
    assert torch.equal(x, before)


def test_float32_where_float64_does_not_run():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, x):
            return self.fc(x.float())

    report = run(Model(), batch_of(), nn.CrossEntropyLoss())
    assert report.ok and report.dtype is torch.float32 and report.tolerance == 1e-4
    assert run(mlp(), batch_of(), nn.CrossEntropyLoss(), dtype=None).dtype is (
        torch.float32
    )


def test_parts_in_float32():
    """As most norms of transformers: its rounding is no fault, a wrong mode is."""

    class Norm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(4))

        def forward(self, x):
            h = x.float()
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            return self.weight * h.to(x.dtype)

    model = nn.Sequential(nn.Linear(4, 4), Norm(), nn.Linear(4, 3))
    report = run(model, batch_of(3), nn.CrossEntropyLoss())
    assert report.ok, str(report)
    assert report.dtype is torch.float32 and report.tolerance == 1e-4
    assert any(cell.clipped > 1e-8 for cell in report.cells["0.weight"].values())
    assert not run(model, batch_of(3), nn.CrossEntropyLoss(), tolerance=1e-8).ok


def test_max_grad_norm():
    for c in (1e-3, 1e3):
        report = run(mlp(), batch_of(), nn.CrossEntropyLoss(), max_grad_norm=c)
        assert report.ok and report.max_grad_norm == c


def test_frozen_and_shared_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(7, 4)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)
            self.head = nn.Linear(4, 7)
            self.head.weight = self.embedding.weight
            self.unused = nn.Linear(2, 2)

        def forward(self, ids):
            return self.head(self.frozen(self.embedding(ids)))

    report = run(Tied(), torch.randint(0, 7, (4, 5)), square_loss)
    assert report.ok, str(report)
    assert list(report.cells) == [
        "embedding.weight",
        "head.bias",
        "unused.weight",
        "unused.bias",
    ]


def test_take_sample():
    """A table of shape [T] where T = B, which is not a batch."""
    x, table = torch.randn(4, 3), torch.randn(4)

    def loss_fn(model, batch):
        return square_loss(model, batch[0]) * batch[1].sum()

    def take(batch, b):
        return batch[0][b : b + 1], batch[1]

    assert run(nn.Linear(3, 2), (x, table), loss_fn).cross_sample
    report = run(nn.Linear(3, 2), (x, table), loss_fn, take_sample=take)
    assert report.ok, str(report)


def test_verbose_prints_the_table(capsys):
    batch, criterion = batch_of(), nn.CrossEntropyLoss()
    report = check_per_sample_gradients(mlp(), batch, criterion, modes=["hooks"])
    printed = capsys.readouterr().out
    assert printed.strip() == str(report)
    assert "0.weight" in printed and "hooks" in printed
    run(mlp(), batch, criterion, modes=["hooks"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "loss_fn",
    [
        lambda m, b: square_loss(m, b).mean(),
        lambda m, b: square_loss(m, b).unsqueeze(1),
        lambda m, b: 0.0,
        lambda m, b: square_loss(m, b).repeat(2),
    ],
)
def test_loss_that_is_not_per_sample(loss_fn):
    with pytest.raises(ValueError, match="one loss per sample"):
        run(nn.Linear(3, 2), torch.randn(4, 3), loss_fn)


def test_nothing_to_train():
    with pytest.raises(ValueError, match="no trainable parameter"):
        run(mlp().requires_grad_(False), batch_of(), nn.CrossEntropyLoss())


@pytest.mark.parametrize("wrap", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_private_model(mode, wrap):
    private = make_private(mlp(), mode, wrap, batch_size=4)
    with pytest.raises(ValueError, match="private already"):
        run(private.module, batch_of(), nn.CrossEntropyLoss())


def test_error_of_the_model_is_raised():
    with pytest.raises(RuntimeError, match="mat1 and mat2|must match|shape"):
        run(
            mlp(), (torch.randn(5, 3), torch.randint(0, 3, (5,))), nn.CrossEntropyLoss()
        )


def test_public_name():
    assert opacus_ext.check_per_sample_gradients is check_per_sample_gradients


def test_example_in_the_docstring():
    assert doctest.testmod(opacus_ext.checks.check).failed == 0


@pytest.mark.parametrize("kind", ["GPT2", "OPT"])
def test_transformers_model_with_its_dropout(kind):
    """Attention gets its dropout as a number; a BatchEncoding is a mapping."""
    transformers = pytest.importorskip("transformers")
    small = {
        "GPT2": dict(n_embd=8, n_layer=1, n_head=2, n_positions=8),
        "OPT": dict(hidden_size=8, word_embed_proj_dim=8, ffn_dim=8),
    }[kind]
    if kind == "OPT":
        small.update(num_hidden_layers=1, num_attention_heads=2)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=11, bos_token_id=1, eos_token_id=2, pad_token_id=0, **small
    )
    model = transformers.AutoModelForCausalLM.from_config(config)
    ids = torch.randint(3, 11, (4, 5))
    batch = transformers.BatchEncoding({"input_ids": ids})

    def loss_fn(model, batch):
        return next_token_loss(model(**batch).logits, batch.input_ids)

    before = model.config.to_dict()
    report = run(model, batch, loss_fn)
    assert report.ok, str(report)
    assert model.config.to_dict() == before


# -- two batches that share a sample ---------------------------------------------------


class Keeps(nn.Module):
    """Adds what it has seen of the batch before."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 3), 0.0

    def forward(self, x):
        y = self.layer(x) + self.last
        self.last = x.detach().mean()
        return y


def closure():
    seen = []

    def loss(model, batch):
        seen.append(batch[0].detach().mean())
        return square_loss(model, batch[0]) * (1 + sum(seen))

    return nn.Linear(4, 3), loss


def by_the_largest(model, batch):
    losses = square_loss(model, batch[0])
    return losses / losses.max()


@pytest.mark.parametrize(
    "model, loss, words",
    [
        (*closure(), "a global, a closure"),
        (Keeps(), lambda model, x: square_loss(model, x[0]), "the batch before"),
        (nn.Linear(4, 3), by_the_largest, "changes with the other samples"),
    ],
    ids=["closure", "attribute", "largest"],
)
def test_what_reaches_a_sample_from_others(model, loss, words):
    batch = (torch.randn(5, 4),)
    report = check_per_sample_gradients(
        model, batch, loss, modes=["hooks"], verbose=False
    )
    assert not report.ok
    assert any(words in finding for finding in report.findings), report


def test_what_is_made_of_parameters_may_change():
    """From call to call, as the vectors of a spectral norm do."""
    model = nn.utils.spectral_norm(nn.Linear(4, 3))
    report = check_per_sample_gradients(
        model,
        (torch.randn(5, 4),),
        lambda m, x: square_loss(m, x[0]),
        modes=[],
        verbose=False,
    )
    assert not report.findings, report
