"""The check that users run: what it finds, what it says, and what it leaves alone.

``RIGHT`` holds models and losses that every mode gets right, ``WRONG`` those that no
per-sample clipping is valid for, with the words of the finding.
"""

import copy
from collections import UserDict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import opacus_ext
from opacus_ext import check_per_sample_gradients
from tests.common import MODES, make_private, next_token_loss, square_loss

CE = nn.CrossEntropyLoss


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def batch_of(B=5):
    return torch.randn(B, 4), torch.randint(0, 3, (B,))


def run(model, batch, loss_fn, **kwargs):
    return check_per_sample_gradients(model, batch, loss_fn, verbose=False, **kwargs)


class Model(nn.Module):
    """A linear layer, and a function of it, its input and its output."""

    def __init__(self, function, width=3):
        super().__init__()
        self.layer, self.function = nn.Linear(4, width), function
        self.attention_dropout, self.drop = 0.5, nn.Dropout(0.5)
        self.last = 0.0

    def forward(self, x):
        return self.function(self, self.layer(x))


class OverSelf(nn.Module):
    """Holds a function over itself, which a deep copy leaves over the original."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, 4), nn.Linear(4, 4)
        inner = lambda h: h @ self.embedding.weight.t()  # noqa: E731
        self.head = lambda h: inner(h).mean(1)

    def forward(self, x):
        return self.head(self.layer(self.embedding(x)))


class Tied(nn.Module):
    """A shared parameter, a frozen layer, and one that is not used."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids):
        return self.head(self.frozen(self.embedding(ids)))


class ByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, *, x, scale):
        return self.fc(x) * scale


class Norm(nn.Module):
    """Computes in float32, as most norms of transformers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4))

    def forward(self, x):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Inputs(UserDict):
    """As transformers' BatchEncoding: a mapping with attributes."""

    def __getattr__(self, name):
        if name == "data":
            raise AttributeError(name)
        return self.data[name]


def by_tokens(model, batch):
    return next_token_loss(model(**batch).logits, batch.input_ids)


def own_rates(self, y):
    y = F.dropout(y, p=self.attention_dropout, training=self.training)
    return F.dropout(self.drop(y), p=self.drop.p, training=self.training)


def in_place(model, x):
    losses = square_loss(model, x.clone())
    x.add_(1.0)
    return losses


def ce(output, target):
    return F.cross_entropy(output, target, reduction="none")


@dataclass
class Case:
    model: Any
    batch: Any
    loss: Any = field(default_factory=CE)
    options: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float64


torch.manual_seed(0)
X, Y = torch.randn(5, 4), torch.randint(0, 3, (5,))
XY = X, Y
IDS = torch.randint(0, 7, (4, 5))
SEQUENCES = torch.randn(5, 4, 6), torch.randint(0, 3, (5, 6))
TOKENS = transformers.BatchEncoding({"input_ids": torch.randint(3, 11, (4, 5))})
GPT2 = transformers.GPT2Config(
    vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8
)
RIGHT = {
    "mlp": Case(mlp(), XY),
    "one sample": Case(mlp(), (X[:1], Y[:1])),
    "evaluation mode": Case(mlp().eval(), XY),
    "rates of dropout": Case(Model(own_rates), XY),
    "spectral norm": Case(nn.utils.spectral_norm(nn.Linear(4, 3)), X, square_loss),
    "tied, frozen, unused": Case(Tied(), IDS, square_loss),
    "inputs by name": Case(ByName(), ({"x": X, "scale": torch.tensor(2.0)}, Y)),
    "sequences": Case(nn.Conv1d(4, 3, 1), SEQUENCES, CE(weight=torch.rand(3))),
    "sum": Case(nn.Conv1d(4, 3, 1), SEQUENCES, CE(reduction="sum")),
    "mapping": Case(mlp(), Inputs(x=X, y=Y), lambda m, b: ce(m(b.x), b.y)),
    "nested": Case(
        mlp(),
        [(X, [X, "text", None]), {"y": Y}],
        lambda m, b: ce(m(b[0][1][0]), b[1]["y"]),
    ),
    "inputs changed in place": Case(nn.Linear(4, 2), X, in_place),
    "float32 only": Case(
        nn.Sequential(Model(lambda self, y: y).float(), nn.Tanh()),
        XY,
        options=dict(dtype=None),
        dtype=torch.float32,
    ),
    "parts in float32": Case(
        nn.Sequential(nn.Linear(4, 4), Norm(), nn.Linear(4, 3)),
        XY,
        dtype=torch.float32,
    ),
    "GPT2": Case(transformers.GPT2LMHeadModel(GPT2), TOKENS, by_tokens),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    case = RIGHT[name]
    before = copy.deepcopy(case.model.state_dict())
    report = run(case.model, case.batch, case.loss, **case.options)
    assert report.ok, str(report)
    assert report.modes == MODES and report.dtype is case.dtype
    assert not report.differing and not report.refused and not report.findings
    assert report.tolerance == (1e-8 if case.dtype is torch.float64 else 1e-4)
    trained = [n for n, p in case.model.named_parameters() if p.requires_grad]
    assert list(report.cells) == trained
    for row in report.cells.values():
        for cell in row.values():
            assert max(cell.own, cell.clipped) <= report.tolerance
    after = case.model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def test_where_float64_does_not_run():
    class Float(nn.Linear):
        def forward(self, x):
            return super().forward(x.float())

    report = run(Float(4, 3), XY, CE())
    assert report.ok and report.dtype is torch.float32


def test_a_function_over_the_model_is_refused():
    """A deep copy leaves it over the original, whose parameters are not the copy's."""
    report = run(OverSelf(), (IDS[:, :3], IDS[:, 0]), CE())
    assert not report.ok and list(report.refused) == list(MODES)


def keeps(self, y):
    y, self.last = y + self.last, y.detach().mean()
    return y


def closure():
    seen = []

    def loss(model, x):
        seen.append(x.detach().mean())
        return square_loss(model, x) * (1 + sum(seen))

    return loss


def by_the_largest(model, x):
    losses = square_loss(model, x)
    return losses / losses.max()


def gradient_only(model, x):
    losses = square_loss(model, x)
    return losses + losses.mean() - losses.mean().detach()


def capacity(model, x):
    return square_loss(model, x) * (torch.arange(len(x)) < 3).to(x)


ALL = [0, 1, 2, 3, 4]
# Its model, its loss, words of the finding, and the samples that are named.
WRONG = {
    "mean": (Model(lambda m, y: y - y.mean(0) / 2), square_loss, "other samples", ALL),
    "gradient": (nn.Linear(4, 2), gradient_only, "other samples in the", ALL),
    "capacity": (nn.Linear(4, 2), capacity, "samples 3, 4 changes", [3, 4]),
    "batch norm": (nn.BatchNorm1d(4), square_loss, "no per-sample clipping", None),
    "largest": (nn.Linear(4, 3), by_the_largest, "other samples", None),
    "random": (Model(lambda m, y: F.dropout(y)), square_loss, "is random", []),
    "closure": (nn.Linear(4, 3), closure(), "a global, a closure", []),
    "attribute": (Model(keeps), square_loss, "the batch before", []),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong(name):
    model, loss, words, samples = WRONG[name]
    report = run(model, X, loss, modes=["hooks"])
    assert not report.ok and report.random == (name in ("random", "closure"))
    assert any(words in finding for finding in report.findings), report
    assert samples is None or report.cross_sample == samples
    assert all(finding in str(report) for finding in report.findings)


@pytest.fixture
def stock():
    """Opacus as it is shipped, which is wrong about padding_idx."""
    opacus_ext.unregister()
    yield
    opacus_ext.register()


def test_names_the_parameter_that_differs(stock):
    """Only the cause is named, though its norm spoils every clipping factor."""
    layers = nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)
    ids = torch.tensor([[0, 1, 2], [0, 0, 3], [1, 2, 3], [4, 5, 6]])
    batch = ids, torch.randint(0, 3, (4,))
    report = run(nn.Sequential(*layers), batch, CE(), modes=["hooks", "ghost"])
    assert not report.ok
    assert report.cells["0.weight"]["hooks"].status == "differs"
    assert report.cells["2.weight"]["hooks"].status == "factor"
    # Stock "ghost" clips by no norm but the whole one: the cause can't be told there.
    assert {row["ghost"].status for row in report.cells.values()} == {"differs"}
    assert "0.weight" in report.differing
    assert "differs" in str(report) and "factor" in str(report)
    report = run(nn.Sequential(*layers), batch, CE(), modes=["hooks"])
    assert report.differing == ["0.weight"]


def test_refused_is_reported():
    report = run(mlp(), XY, CE(), modes=["hooks", "nonsense"])
    assert not report.ok and list(report.refused) == ["nonsense"]
    assert "grad_sample_mode" in report.refused["nonsense"]
    statuses = [report.cells["0.weight"][mode].status for mode in report.modes]
    assert statuses == ["ok", "refused"] and report.differing == []
    assert "! nonsense refused" in str(report)


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
    batch, criterion = batch_of(), CE()
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    model[2].eval()
    model[0].bias.requires_grad = False
    gradients = [(p, p.grad, p.grad.clone()) for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    inputs, state = copy.deepcopy(batch), torch.get_rng_state()

    def broken(model, batch):
        torch.rand(3)
        return criterion(model(batch[0]), batch[1], "too many arguments")

    if fails:
        with pytest.raises(TypeError):
            run(model, batch, broken)
    else:
        run(model, batch, criterion)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    for p, grad, value in gradients:
        assert p.grad is grad and torch.equal(grad, value)
        assert not hasattr(p, "grad_sample") and not hasattr(p, "summed_grad")
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert all(map(torch.equal, batch, inputs))
    assert [m.training for m in model] == [True, True, False, True]
    assert criterion.reduction == "mean"


def test_verbose_prints_the_table(capsys):
    report = check_per_sample_gradients(mlp(), XY, CE(), modes=["hooks"])
    printed = capsys.readouterr().out
    assert printed.strip() == str(report)
    assert "0.weight" in printed and "hooks" in printed
    run(mlp(), XY, CE(), modes=["hooks"])
    assert capsys.readouterr().out == ""


# Its model, its loss, and words of the error.
REFUSED = {
    "mean": (nn.Linear(4, 3), lambda m, b: m(b[0]).mean(), "one loss per sample"),
    "matrix": (nn.Linear(4, 3), lambda m, b: m(b[0]), "one loss per sample"),
    "number": (nn.Linear(4, 3), lambda m, b: 0.0, "one loss per sample"),
    "twice": (nn.Linear(4, 3), lambda m, b: m(b[0])[:, 0].repeat(2), "one loss per s"),
    "frozen": (mlp().requires_grad_(False), CE(), "no trainable parameter"),
    "its own error": (nn.Linear(5, 3), CE(), "mat1 and mat2|must match|shape"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    model, loss, words = REFUSED[name]
    with pytest.raises((ValueError, RuntimeError), match=words):
        run(model, XY, loss)


@pytest.mark.parametrize("mode, wrap", [("hooks", False), ("ghost_bk", True)])
def test_private_model(mode, wrap):
    private = make_private(mlp(), mode, wrap, batch_size=4)
    with pytest.raises(ValueError, match="private already"):
        run(private.module, XY, CE())
