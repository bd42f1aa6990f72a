"""The check that users run: what it finds, what it says, and what it leaves alone.

``RIGHT`` holds models and losses that every mode gets right, ``WRONG`` those that no
per-sample clipping is valid for, with the words of the finding.
"""

import copy

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional as F

import opacus_ext
from opacus_ext import check_per_sample_gradients
from tests.common import MODES, Net, make_private, next_token_loss, square_loss

CE, ce = nn.CrossEntropyLoss, nn.CrossEntropyLoss(reduction="none")


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))


def run(model, batch, loss_fn, **options):
    return check_per_sample_gradients(model, batch, loss_fn, verbose=False, **options)


def over(function, **parts):
    """A linear layer, and a function of the model and the layer's output."""
    parts = dict(layer=nn.Linear(4, 3), attention_dropout=0.5, last=0.0, **parts)
    return Net(lambda m, x: function(m, m.layer(x)), drop=nn.Dropout(0.5), **parts)


def over_itself():
    """Holds a function over itself, which a deep copy leaves over the original."""
    m = Net(lambda m, x: m.head(m.layer(m.embedding(x))), layer=nn.Linear(4, 4))
    m.embedding = nn.Embedding(7, 4)
    m.head = lambda h: (h @ m.embedding.weight.t()).mean(1)
    return m


def tied():
    """A shared parameter, a frozen layer, and one that is not used."""
    m = Net(lambda m, ids: m.head(m.frozen(m.embedding(ids))), head=nn.Linear(4, 7))
    m.embedding, m.unused = nn.Embedding(7, 4), nn.Linear(2, 2)
    m.frozen = nn.Linear(4, 4).requires_grad_(False)
    m.head.weight = m.embedding.weight
    return m


def norm(m, y):
    """Computes in float32, as most norms of transformers."""
    h = y.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
    return m.scale * h.to(y.dtype)


def by_tokens(model, batch):
    return next_token_loss(model(**batch).logits, batch.input_ids)


def own_rates(m, y):
    y = F.dropout(y, p=m.attention_dropout, training=m.training)
    return F.dropout(m.drop(y), p=m.drop.p, training=m.training)


def in_place(model, x):
    losses = square_loss(model, x.clone())
    x.add_(1.0)
    return losses


torch.manual_seed(0)
X, Y = torch.randn(5, 4), torch.randint(0, 3, (5,))
XY = X, Y
IDS = torch.randint(0, 7, (4, 5))
SEQUENCES = torch.randn(5, 4, 6), torch.randint(0, 3, (5, 6))
TOKENS = transformers.BatchEncoding({"input_ids": torch.randint(3, 11, (4, 5))})
GPT2 = transformers.GPT2Config(
    vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_positions=8
)
BY_NAME = {"x": X, "scale": torch.tensor(2.0)}, Y
NESTED = [(X, [X, "text", None]), {"y": Y}]
RIGHT = {
    "mlp": (mlp(), XY, CE()),
    "one sample": (mlp(), (X[:1], Y[:1]), CE()),
    "evaluation mode": (mlp().eval(), XY, CE()),
    "rates of dropout": (over(own_rates), XY, CE()),
    "spectral norm": (nn.utils.spectral_norm(nn.Linear(4, 3)), X, square_loss),
    "tied, frozen, unused": (tied(), IDS, square_loss),
    "inputs by name": (
        *(Net(lambda m, *, x, scale: m.fc(x) * scale, fc=nn.Linear(4, 3)), BY_NAME),
        CE(),
    ),
    "sequences": (nn.Conv1d(4, 3, 1), SEQUENCES, CE(weight=torch.rand(3))),
    "sum": (nn.Conv1d(4, 3, 1), SEQUENCES, CE(reduction="sum")),
    "nested": (mlp(), NESTED, lambda m, b: ce(m(b[0][1][0]), b[1]["y"])),
    "inputs changed in place": (nn.Linear(4, 2), X, in_place),
    "float32 only": (over(lambda m, y: y), XY, CE(), None),
    "no float64": (
        *(Net(lambda m, x: m.fc(x.float()), fc=nn.Linear(4, 3)), XY, CE()),
        torch.float64,
    ),
    "parts in float32": (over(norm, scale=torch.rand(3)), XY, CE(), torch.float64),
    "GPT2": (transformers.GPT2LMHeadModel(GPT2), TOKENS, by_tokens),
}


@pytest.mark.parametrize("name", RIGHT)
def test_right(name):
    model, batch, loss, *dtype = RIGHT[name]
    before = copy.deepcopy(model.state_dict())
    report = run(model, batch, loss, **(dict(dtype=dtype[0]) if dtype else {}))
    assert report.ok, str(report)
    computed = torch.float32 if dtype else torch.float64
    assert report.modes == MODES and report.dtype is computed
    assert not (report.differing or report.refused or report.findings)
    assert report.tolerance == (1e-4 if dtype else 1e-8)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert list(report.cells) == trained
    cells = [cell for row in report.cells.values() for cell in row.values()]
    assert max(max(cell.own, cell.clipped) for cell in cells) <= report.tolerance
    after = model.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())


def keeps(m, y):
    y, m.last = y + m.last, y.detach().mean()
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


# Its model, its loss, words of the finding, and the samples that are named.
WRONG = {
    "gradient": (
        nn.Linear(4, 2),
        gradient_only,
        "other samples in the",
        [0, 1, 2, 3, 4],
    ),
    "capacity": (nn.Linear(4, 2), capacity, "samples 3, 4 changes", [3, 4]),
    "batch norm": (nn.BatchNorm1d(4), square_loss, "no per-sample clipping", [0]),
    "largest": (nn.Linear(4, 3), by_the_largest, "other samples", None),
    "random": (over(lambda m, y: F.dropout(y)), square_loss, "is random", []),
    "closure": (nn.Linear(4, 3), closure(), "a global, a closure", []),
    "attribute": (over(keeps), square_loss, "the batch before", []),
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
    ids = torch.tensor([[0, 1, 2], [0, 0, 3], [1, 2, 3], [4, 5, 6]])
    layers = nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 3)
    given = nn.Sequential(*layers), (ids, torch.arange(4) % 3), CE()
    report = run(*given, modes=["hooks", "ghost"])
    hooks, ghost = ([row[x].status for row in report.cells.values()] for x in MODES[:2])
    assert hooks == ["differs", "factor", "factor"]
    # Stock "ghost" clips by no norm but the whole one: the cause can't be told there.
    assert ghost == ["differs"] * 3 and "0.weight" in report.differing
    assert "differs" in str(report) and "factor" in str(report)
    assert run(*given, modes=["hooks"]).differing == ["0.weight"]


def test_refused_is_reported_and_printed(capsys):
    report = check_per_sample_gradients(mlp(), XY, CE(), modes=["hooks", "nonsense"])
    assert not report.ok and list(report.refused) == ["nonsense"]
    assert "grad_sample_mode" in report.refused["nonsense"]
    statuses = [report.cells["0.weight"][mode].status for mode in report.modes]
    assert statuses == ["ok", "refused"] and report.differing == []
    printed = capsys.readouterr().out
    assert printed.strip() == str(report)
    assert all(x in printed for x in ("0.weight", "hooks", "! nonsense refused"))
    # A deep copy leaves a function over the original: its parameters are others.
    report = run(over_itself(), (IDS[:, :3], IDS[:, 0]), CE())
    assert not report.ok and list(report.refused) == list(MODES)
    assert capsys.readouterr().out == ""


def counts(m, x):
    m.calls += 1
    return x


@pytest.mark.parametrize("fails", [False, True])
def test_leaves_everything_alone(fails):
    model = nn.Sequential(nn.Linear(4, 8), Net(counts), nn.Dropout(), nn.Linear(8, 3))
    model[1].register_buffer("calls", torch.zeros(()))
    criterion = CE()
    criterion(model(X), Y).backward()
    model[2].eval()
    model[0].bias.requires_grad = False
    gradients = [(p, p.grad, p.grad.clone()) for p in model.parameters()]
    before = copy.deepcopy([model.state_dict(), XY])
    state = torch.get_rng_state()

    def broken(model, batch):
        torch.rand(3)
        return criterion(model(batch[0]), batch[1], "too many arguments")

    if fails:
        with pytest.raises(TypeError):
            run(model, XY, broken)
    else:
        run(model, XY, criterion)
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close([dict(model.state_dict()), XY], before, rtol=0, atol=0)
    for p, grad, value in gradients:
        assert p.grad is grad and torch.equal(grad, value)
        assert not hasattr(p, "grad_sample") and not hasattr(p, "summed_grad")
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())
    assert [m.training for m in model] == [True, True, False, True]
    assert criterion.reduction == "mean"


LINEAR, ONE_LOSS = nn.Linear(4, 3), "one loss per sample"
# Its model, its loss, and words of the error.
REFUSED = [
    (LINEAR, lambda m, b: m(b[0]).mean(), ONE_LOSS),
    (LINEAR, lambda m, b: m(b[0]), ONE_LOSS),
    (LINEAR, lambda m, b: 0.0, ONE_LOSS),
    (LINEAR, lambda m, b: m(b[0])[:, 0].repeat(2), "no tensor of the batch has"),
    (mlp().requires_grad_(False), CE(), "no trainable parameter"),
    (nn.Linear(5, 3), CE(), "mat1 and mat2|must match|shape"),
]


@pytest.mark.parametrize("model, loss, words", REFUSED)
def test_refused(model, loss, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        run(model, XY, loss)


@pytest.mark.parametrize("mode, wrap", [("hooks", False), ("ghost_bk", True)])
def test_private_model(mode, wrap):
    private = make_private(mlp(), mode, wrap, batch_size=4)
    with pytest.raises(ValueError, match="private already"):
        run(private.module, XY, CE())
