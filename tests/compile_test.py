"""torch.compile, of the model or parts of it, before make_private or after.

In the ghost modes a whole step is compiled, for any batch size, and where it can't be
the model is trained as if it were not. What is compiled matters here, not what compiles
it, so the backends that need no C++ compiler serve for all but one test.
"""

import copy
import gc
import math
import shutil
import warnings
import weakref
from unittest import mock

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from opacus_ext.grad_sample.core.clip import GroupNorms, norms_and_sums
from opacus_ext.grad_sample.factors import GradSample
from opacus_ext.grad_sample.modes.common import private_model_of
from opacus_ext.losses import model_losses
from opacus_ext.models.dpformer import DPFormer
from opacus_ext.re_attention import track_errors
from tests.common import (
    assert_same,
    clipped_sum,
    every_mode,
    half_clipped,
    make_private,
    oracle,
    square_loss,
    trainable,
)

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A bare parameter, a layer used twice, positions without a batch dim."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.positions = nn.Embedding(9, 8)
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8) * 0.7)

    def forward(self, x):
        places = torch.arange(x.shape[1], device=x.device)
        h = self.first(x) + self.positions(places[None])
        h = self.twice(torch.tanh(self.twice(self.norm(h)))) * self.scale
        return torch.relu(h).mean(1) * self.scale


class Two(nn.Module):
    """Two layers, and a forward ``then(self, x)``."""

    def __init__(self, then, one=(4, 4), two=(4, 4)):
        super().__init__()
        self.one, self.two = nn.Linear(*one), nn.Linear(*two)
        self.then, self.first, self.last = then, True, None
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x):
        return self.then(self, x)


def two(*args, **kwargs):
    return lambda: Two(*args, **kwargs)


class Recurrent(nn.Module):
    """A recurrent kernel."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(4, 5, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.cells(x)[0]).mean(1)


def reads_another_weight(m, x):
    return m.two(torch.tanh(m.one(x)) @ m.two.weight).mean(1)


def model_of(cls):
    torch.manual_seed(1)
    return cls().double().train()


def batch_of(B=4, T=5):
    torch.manual_seed(2)
    return torch.randn(B, T, 4).double()


def of_model(model, backend):
    return torch.compile(model, backend=backend)


def in_place(model, backend):
    model.compile(backend=backend)
    return model


def of_part(model, backend):
    name, part = list(model.named_children())[-1]
    setattr(model, name, torch.compile(part, backend=backend))
    return model


def part_in_place(model, backend):
    list(model.children())[-1].compile(backend=backend)
    return model


AOT = dict(backend="aot_eager")
WAYS = [of_model, in_place, of_part, part_in_place]


def compare(mode, wrap, cls, before=None, after=None, used=False, steps=1):
    """
    ``before`` and ``after`` make_private the model is compiled; ``used`` says whether
    it has run between, so that compiled code without the tape's hooks is kept.
    """
    batch = batch_of()
    grads = oracle(model_of(cls), batch, square_loss)
    c = half_clipped(grads)
    expected = clipped_sum(grads, "flat", c)
    model = model_of(cls)
    plain = model
    if before is not None:
        model = before(model)
    if used:
        for _ in range(2):
            square_loss(model, batch).sum().backward()
        model.zero_grad()
    private = make_private(model, mode, wrap, batch_size=4, max_grad_norm=c)
    if after is not None:
        private.module = after(private.module)
    start = copy.deepcopy(plain.state_dict())
    for _ in range(steps):
        plain.load_state_dict(start)
        old = {n: p.detach().clone() for n, p in trainable(plain).items()}
        private.step(batch, square_loss)
        new = trainable(plain)
        got = {n: (x - new[n].detach()) * 4 for n, x in old.items()}
        names = [n.replace("_orig_mod.", "") for n in got]
        assert_same(dict(zip(names, got.values())), expected, 1e-8, mode)


@every_mode
def test_compiled_before(mode):
    compare(mode, True, Net, lambda m: of_model(m, "eager"))


@pytest.mark.parametrize("way", WAYS[1:], ids=lambda way: way.__name__)
def test_ways_to_compile(way):
    compare("ghost_bk", False, Net, lambda m: way(m, "eager"))


@pytest.mark.parametrize("mode, wrap", [("hooks", True), ("ghost", False)])
def test_compiled_and_used_before(mode, wrap):
    """Code that was compiled without hooks must not be taken for code with them."""
    compare(mode, wrap, Net, lambda m: of_model(m, "aot_eager"), used=True, steps=2)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_compiled_after(mode):
    way = of_model if mode == "hooks" else in_place
    compare(mode, True, Net, after=lambda m: way(m, "eager"), steps=2)


@every_mode
def test_stand_in(mode):
    compare(mode, True, Recurrent, lambda m: of_model(m, "eager"))


@pytest.mark.parametrize(
    "mode, used", [("hooks", True), ("ghost", False), ("ghost_bk", True)]
)
def test_weight_read_by_another_module(mode, used):
    build = two(reads_another_weight, (4, 8), (8, 8))
    compare(mode, True, build, lambda m: of_model(m, "aot_eager"), used=used)


def compiled(model, mode="ghost_bk", how=None, **kwargs):
    """A private model whose calls are compiled."""
    private = make_private(model, mode, batch_size=4, **kwargs)
    private.module = torch.compile(private.module, **(how or AOT))
    return private


def grads_of(private, model, batch, loss_fn=square_loss, **backward):
    """The clipped sums of a batch, before the step."""
    private.optimizer.zero_grad()
    private.criterion(loss_fn(private.module, batch)).backward(**backward)
    return {n: p.grad for n, p in trainable(model).items()}


def programs_of(model):
    """How many programs were made of a private model."""
    compiled = private_model_of(model)._compiled
    return 0 if compiled is None else compiled.programs


def train(model, batches, loss_fn=square_loss, mode="ghost_bk", how=None, **kwargs):
    """Compares compiled steps with the oracle; returns warnings on compilation."""
    c = kwargs.pop("max_grad_norm", 0.3)
    clipping = kwargs.get("clipping", "flat")
    if clipping == "per_layer":
        c = [c] * len(trainable(model))
    plain = copy.deepcopy(model)
    private = compiled(model, mode, how, max_grad_norm=c, lr=0.1, **kwargs)
    told = []
    for batch in batches:
        plain.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(plain, batch, loss_fn), clipping, c)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = grads_of(private, model, batch, loss_fn)
        told += [str(w.message) for w in caught if "compiled" in str(w.message)]
        assert_same(got, expected, 1e-8, mode)
        private.optimizer.step()
    return told


@pytest.mark.parametrize(
    "mode, sizes, programs",
    [("ghost", (2, 1), 1), ("ghost_bk", (4, 6, 1, 9, 10, 2, 4), 4)],
)
def test_sizes(mode, sizes, programs):
    """Poisson draws another batch size at each step: few programs serve them all."""
    model, how = model_of(Net), dict(fullgraph=True, **AOT)
    told = train(model, map(batch_of, sizes), mode=mode, how=how)
    assert programs_of(model) == programs and not told  # of 2, 4, 6, and 10 samples


class Heads(Net):
    """A method of tensors that is written in Python."""

    def forward(self, x):
        heads = self.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.norm(heads.transpose(1, 2).flatten(2)).mean(1)


def test_heads():
    assert not train(model_of(Heads), map(batch_of, (4, 2)))


def test_lengths():
    sizes = (2, 5), (1, 7), (4, 4)
    assert not train(model_of(Net), [batch_of(*size) for size in sizes])


@pytest.mark.parametrize("clipping", ["normalized", "per_layer"])
def test_clippings(clipping):
    train(model_of(Net), map(batch_of, (2, 1)), clipping=clipping)


class Mixed(nn.Module):
    """Ops that vmap knows for one number of samples, and parameters in them."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(4, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.token = nn.Parameter(torch.ones(1, 1, 6) * 0.3)
        self.packed = nn.Parameter(torch.linspace(-1, 1, 108).view(18, 6))
        self.adapter = nn.Parameter(torch.linspace(-1, 1, 12).view(6, 2))
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        h = F.max_pool1d(self.norm(self.first(x.mT)), 2).mT
        h = torch.cat((self.token.expand(len(x), -1, -1), h), 1)
        q, k, v = (F.linear(h, w) for w in self.packed.chunk(3))
        h = F.scaled_dot_product_attention(q, k, v) @ (self.adapter @ self.adapter.t())
        return F.layer_norm(h, (6,)).gather(1, h.argmax(1, keepdim=True)).flatten(1)


def test_parameters_of_all_kinds():
    model = model_of(Mixed)
    assert not train(model, [batch_of(B) for B in (4, 2, 1)])
    assert programs_of(model)


def windows(m, x):
    """Time first, and windows along it: the first dim of a sample is not the batch."""
    h = m.one(x).permute(1, 0, 2)[..., None]
    return h.unfold(0, 3, 1).square().sum((0, 2, 3, 4))[:, None]


def test_windows_along_the_first_dim():
    train(model_of(two(windows)), [batch_of(2, 6), batch_of(2, 6)])


class FrozenNorms(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4)])
        for p in self.norms.parameters():
            p.data.uniform_(-1, 1)
            p.requires_grad_(False)

    def forward(self, x):
        layer, group = self.norms
        return group(layer(self.one(x)).mT).flatten(1)[:, ::3]


def test_frozen_norms():
    """Beside vmap as the model has them, rounded once in half precision."""
    model = model_of(FrozenNorms)
    train(model, [batch_of(4)])
    assert programs_of(model) == 1
    plain = model_of(FrozenNorms).bfloat16()
    model = copy.deepcopy(plain)
    x = batch_of(3).bfloat16()
    out = compiled(model).module(x)
    assert programs_of(model) == 1
    torch.testing.assert_close(out, plain(x), rtol=0, atol=0.02)


def counts(m, x):
    """Python decides, by a number that changes from step to step."""
    m.steps += 1
    h = m.one(x) if m.first else m.two(x)
    return {"out": h.mean(1), "norm": h.norm(dim=-1), "width": 4}


def test_state_in_python():
    model = model_of(two(counts))

    def loss_fn(m, x):
        out = m(x)
        return out["out"].pow(2).sum(-1) + out["norm"].sum(-1)

    plain = copy.deepcopy(model)
    private = compiled(model, max_grad_norm=0.3)
    for step in range(4):
        model.first = plain.first = step % 2 == 0
        batch, before = batch_of(4), int(model.steps)
        expected = clipped_sum(oracle(plain, batch, loss_fn), "flat", 0.3)
        assert_same(grads_of(private, model, batch, loss_fn), expected, 1e-8)
        assert int(model.steps) == before + 1
    assert programs_of(model) == 2


def branches(m, x):
    if x.abs().max() < 99:
        return m.one(x).mean(1)
    return m.two(x).mean(1)


def checkpoints(m, x):
    block = lambda h: torch.tanh(m.two(h))  # noqa: E731
    return checkpoint(block, m.one(x), use_reentrant=False).mean(1)


@pytest.mark.parametrize(
    "build, reason",
    [
        (two(branches), "x.abs().max() < 99"),
        (two(checkpoints), "Two"),
        (Recurrent, "recurrent kernel"),
    ],
)
def test_what_is_not_compiled(build, reason):
    """Trained exactly all the same, with one warning that says why."""
    told = train(model_of(build), map(batch_of, (4, 5, 4)))
    assert len(told) == 1 and reason in told[0], told
    with pytest.raises(RuntimeError, match="fullgraph=True") as error:
        train(model_of(build), [batch_of()], how=dict(fullgraph=True, **AOT))
    assert reason in str(error.value)


def beside(build, batches, loss_fn, amp=False, track=False, tol=1e-6):
    """Compiled and not, step by step: the same sums; and what the compiler told."""
    torch.manual_seed(1)
    models = [build().train()]
    models.append(copy.deepcopy(models[0]))
    privates = [
        make_private(m, "ghost_bk", batch_size=4, max_grad_norm=0.3, lr=0.1)
        for m in models
    ]
    for private in privates if track else ():
        private.optimizer.noise_multiplier = 0.5
        track_errors(private.module, private.optimizer)
    modules = privates[0].module, torch.compile(privates[1].module, **AOT)
    told = []
    for i, batch in enumerate(batches):
        for module, private in zip(modules, privates):
            private.optimizer.zero_grad()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with torch.autocast("cpu", torch.bfloat16, enabled=amp):
                    losses = loss_fn(module, batch)
                private.criterion(losses).backward()
            told += [str(w.message) for w in caught if "compiled" in str(w.message)]
        want, got = ({n: p.grad for n, p in trainable(m).items()} for m in models)
        assert_same(got, want, tol, "ghost_bk")
        for private in privates:
            private.optimizer.generator = torch.Generator().manual_seed(i)
            private.optimizer.step()
    return models[1], told


@pytest.mark.parametrize("track", [False, True])
def test_re_attention(track):
    """Compiled until errors are tracked, as those can't be followed in a program."""

    def loss_fn(model, ids):
        return F.cross_entropy(model(ids).transpose(1, 2), ids, reduction="none").mean(
            1
        )

    torch.manual_seed(3)
    batches = [torch.randint(1, 12, (B, 6)) for B in (2, 1, 2)]

    def build():
        return DPFormer(11, 8, width=8, depth=1, dropout=0.0).double()

    model, told = beside(build, batches, loss_fn, track=track)
    assert bool(programs_of(model)) == (not track)
    assert bool(told) == track


class Rounded(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x):
        return super().forward(x).mean(1)


def test_autocast():
    """In bfloat16, whose rounding alone differs."""
    batches = [batch_of(B).float() for B in (4, 4)]
    model, told = beside(Rounded, batches, square_loss, amp=True, tol=0.02)
    assert programs_of(model) == 1 and not told


def test_scale_of_the_loss():
    """It applies to the backward pass alone: norms and sums are unscaled."""
    model = model_of(Net)
    grads = oracle(model, batch_of(), square_loss)
    c = half_clipped(grads)
    private = compiled(model, max_grad_norm=c)
    got = grads_of(private, model, batch_of(), scale=64.0)
    assert_same(got, clipped_sum(grads, "flat", c), 1e-8)


def test_samples_that_are_not_finite(recwarn):
    model = model_of(Net)
    private, batch = compiled(model, max_grad_norm=0.3), batch_of(5)
    rest = batch[[0, 2, 3, 4]]
    batch[1, 0, 0] = math.inf
    expected = clipped_sum(oracle(model_of(Net), rest, square_loss), "flat", 0.3)
    assert_same(grads_of(private, model, batch), expected, 1e-8)
    assert any("not finite" in str(w.message) for w in recwarn)
    model = nn.Linear(4, 4).double()
    private = compiled(model, on_nonfinite="raise")
    with pytest.raises(RuntimeError, match="not finite"):
        grads_of(private, model, batch)


def test_what_fills_up_a_program_is_looked_at():
    """Sums that did not drop it are known to be of no use."""
    p = torch.zeros(2)
    norms = GroupNorms([p], 2)
    rows = torch.tensor([[1.0, 1.0], [math.nan, 0.0]])
    norms.finish({id(p): GradSample(p.shape, 2, rows)})
    own = torch.tensor([True, False])
    found, _ = norms_and_sums(norms, torch.ones_like, own=own, drop=False)
    assert not found.isfinite().all()
    _, (total,) = norms_and_sums(norms, torch.ones_like, own=own)
    assert total.tolist() == [1, 1]


def test_outputs_that_are_none():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x):
            return {"y": self.layer(x) * x, "none": None, "length": x.shape[1]}

    def loss_fn(model, batch):
        return model(batch)["y"].flatten(1).square().sum(1)

    private = make_private(Named().double(), "ghost_bk", batch_size=4)
    private.module.compile(backend="eager")
    for size in (3, 0, 1, 2):
        private.step(torch.randn(size, 4, 3).double(), loss_fn)


def test_refused():
    """What a program can't tell apart is not guessed."""
    model = model_of(Net)
    private, batch = compiled(model), batch_of()
    losses = square_loss(private.module, batch) + model.scale.pow(2).sum()
    with pytest.raises(RuntimeError, match="outside of the model's forward"):
        private.criterion(losses).backward()
    loss = private.criterion(square_loss(private.module, batch))
    loss.backward()
    private.optimizer.step()
    with pytest.raises(RuntimeError, match="second time|Call the model again"):
        loss.backward()
    private.step(batch[:0], square_loss)  # Poisson may draw none
    with torch.compiler.set_stance("force_eager"):
        private.step(batch, square_loss)
    model.scale.register_hook(lambda grad: 2 * grad)
    with pytest.raises(RuntimeError, match="scale has a hook"):
        grads_of(private, model, batch)


def test_parameters_that_change_places():
    """A program is made for parameters, and not for their places."""
    model = model_of(Net)
    c = [0.1 * (i + 1) for i in range(len(trainable(model)))]
    private = compiled(model, max_grad_norm=c, clipping="per_layer")

    def grads():
        grads_of(private, model, batch_of())
        return {p: p.grad for p in model.parameters()}

    grads()
    first, twice = model.norm, model.twice
    first.weight, first.bias = first.bias, first.weight
    found = grads()
    expected = clipped_by_bound(model, batch_of(), dict(zip(found, c)))
    for p, e in expected.items():
        torch.testing.assert_close(found[p], e, rtol=0, atol=1e-9)
    twice.weight = nn.Parameter(twice.weight.detach().clone())
    with pytest.raises(RuntimeError, match="did not have at make_private"):
        grads()


def test_parameter_that_the_optimizer_lets_go():
    model, plain = model_of(Net), model_of(Net)
    private = compiled(model, max_grad_norm=0.3)
    private.step(batch_of(), square_loss)
    (group,) = private.optimizer.param_groups
    group["params"] = [p for p in group["params"] if p is not model.scale]
    plain.load_state_dict(model.state_dict())
    plain.scale.requires_grad_(False)
    expected = clipped_sum(oracle(plain, batch_of(3), square_loss), "flat", 0.3)
    got = grads_of(private, model, batch_of(3))
    del got["scale"]
    assert_same(got, expected, 1e-8)


def clipped_by_bound(model, batch, bounds):
    """Clipped sums of single samples, each parameter by its own bound."""
    total = {p: torch.zeros_like(p) for p in bounds}
    engine = private_model_of(model)
    for b in range(len(batch)):
        with mock.patch.object(engine, "enabled", False):
            loss = square_loss(model, batch[b : b + 1]).sum()
        for p, g in zip(bounds, torch.autograd.grad(loss, list(bounds))):
            total[p] += g * min(1.0, bounds[p] / (float(g.norm()) + 1e-6))
    return total


def test_model_losses():
    """A loss of the model's own, where one sample has no label."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **dict(vocab_size=23, hidden_size=16, intermediate_size=24, use_cache=False),
        **dict(num_hidden_layers=1, num_attention_heads=2),
    )
    torch.manual_seed(1)
    plain = transformers.LlamaForCausalLM(config).double().train()
    model = copy.deepcopy(plain)
    private = compiled(model, max_grad_norm=0.1)

    def loss_fn(m, batch):
        ids, labels = batch
        found = {"input_ids": ids, "labels": labels}
        return model_losses(m, found)

    for size in (2, 1, 2):
        ids = torch.randint(1, 23, (size, 6))
        labels = ids.masked_fill(torch.rand(size, 6) < 0.3, -100)
        labels[0] = -100
        expected = clipped_sum(oracle(plain, (ids, labels), loss_fn), "flat", 0.1)
        got = grads_of(private, model, (ids, labels), loss_fn)
        assert_same(got, expected, 1e-6)  # it rotates in float32


def test_nothing_is_kept():
    model = model_of(Net)
    private = compiled(model)
    for size in (4, 3):
        private.step(batch_of(size), square_loss)
    kept = weakref.ref(model), weakref.ref(private_model_of(model))
    del model, private
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def test_output_of_a_program_that_nobody_used():
    """It is alive, and the loss of a batch that is run eagerly is not its."""
    model, batch = model_of(Net), batch_of(4)
    private = make_private(model, "ghost", batch_size=4, max_grad_norm=0.3)
    kept = torch.compile(private.module, **AOT)(batch)
    expected = clipped_sum(oracle(model_of(Net), batch, square_loss), "flat", 0.3)
    assert_same(grads_of(private, model, batch), expected, 1e-8)
    assert kept.grad_fn is not None


def remembers(m, x):
    h, old = m.one(x).mean(1), m.last
    m.last = h.detach()
    return h if old is None else h + old.mean(0)


def writes(m, x):
    h = m.one(x).mean(1)
    if not m.first:
        m.seen = h.detach().sum(0)
    return h


def test_data_in_state():
    """Refused in the step that puts them there, and not before."""
    with pytest.raises(RuntimeError, match="changes last"):
        train(model_of(two(remembers)), [batch_of(), batch_of()])
    model = model_of(two(writes))
    private = compiled(model)
    square_loss(private.module, batch_of())
    model.first = False
    with pytest.raises(RuntimeError, match="seen"):
        square_loss(private.module, batch_of())


def test_dropout_draws_for_each_sample():
    model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)).double().train()
    private = compiled(model)
    batch = batch_of(1, 1)[:, 0].expand(6, 4).clone()
    masks = [private.module(batch) == 0 for _ in range(2)]
    rows = torch.cat(masks).unique(dim=0)
    assert len(rows) == 12 and 0.3 < rows.double().mean() < 0.7


def test_evaluation_between():
    model = model_of(Net)
    private = compiled(model)
    for _ in range(2):
        private.step(batch_of(), square_loss)
        private.module.eval()
        with torch.no_grad():
            torch.testing.assert_close(private.module(batch_of()), model(batch_of()))
        private.module.train()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@every_mode
def test_inductor(mode):
    compare(mode, True, Net, lambda m: of_model(m, "inductor"), steps=2)


@pytest.mark.slow
@every_mode
@pytest.mark.parametrize("family", ["gpt2", "lora"])
def test_transformers(mode, family):
    transformers = pytest.importorskip("transformers")
    if family == "gpt2":
        quiet = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        config = transformers.GPT2Config(
            vocab_size=23, n_positions=16, n_embd=16, n_layer=1, n_head=2, **quiet
        )
        build = lambda: transformers.GPT2LMHeadModel(config)  # noqa: E731
    else:
        peft = pytest.importorskip("peft")
        config = transformers.LlamaConfig(
            **dict(vocab_size=23, hidden_size=16, intermediate_size=24),
            **dict(num_hidden_layers=1, num_attention_heads=2),
        )
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        build = lambda: peft.get_peft_model(  # noqa: E731
            transformers.LlamaForCausalLM(config), lora
        )
    torch.manual_seed(1)
    model = build().double().train()
    ids = torch.randint(0, 23, (4, 6))

    def loss_fn(model, ids):
        return square_loss(lambda x: model(input_ids=x).logits, ids)

    grads = oracle(model, ids, loss_fn)
    c = half_clipped(grads)
    old = {n: p.detach().clone() for n, p in trainable(model).items()}
    model.compile(backend="aot_eager")
    private = make_private(model, mode, batch_size=4, max_grad_norm=c)
    private.step(ids, loss_fn)
    got = {n: (old[n] - p.detach()) * 4 for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 1e-6, mode)


def physical_batches(device, **how):
    """Sums of several of a program's runs, which must not share their memory."""
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(8, 5, 4, device=device).double())
    model = model_of(Net).to(device)
    grads = oracle(model, data[:][0], square_loss)
    c = half_clipped(grads)
    old = {n: p.detach().clone() for n, p in trainable(model).items()}
    private = make_private(
        model, "ghost_bk", batch_size=8, max_grad_norm=c, dataset=data, lr=8.0
    )
    private.module = torch.compile(private.module, **how)
    with BatchMemoryManager(
        data_loader=private.loader,
        max_physical_batch_size=3,
        optimizer=private.optimizer,
    ) as loader:
        for (batch,) in loader:
            private.step(batch, square_loss)
    got = {n: old[n] - p.detach() for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(grads, "flat", c), 1e-8, "ghost_bk")
    assert programs_of(model) == 2  # of three samples, and of the two that are left


def test_physical_batches():
    physical_batches("cpu", backend="aot_eager")


on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["default", "reduce-overhead"])
def test_physical_batches_on_a_gpu(kind):
    physical_batches("cuda", mode=kind)


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("kind", ["default", "reduce-overhead"])
def test_on_a_gpu(kind):
    """Several steps, so that CUDA graphs are recorded and replayed."""
    model = model_of(Net).cuda()
    batches = [batch_of(B).cuda() for B in (4, 4, 4, 6, 4)]
    assert not train(model, batches, how=dict(mode=kind))
    assert programs_of(model) == 1
