"""torch.compile, of the model or parts of it, before make_private or after.

In the ghost modes a whole step is compiled, for any batch size, and where it can't be
the model is trained as if it were not. What is compiled matters here, not what compiles
it, so the backends that need no C++ compiler serve for all but one test.
"""

import copy
import gc
import math
import re
import shutil
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from opacus_ext.grad_sample.core.clip import (
    GroupNorms,
    norms_and_sums,
    safe_norms_and_sums,
)
from opacus_ext.grad_sample.factors import GradSample, grad_sample
from opacus_ext.grad_sample.modes.common import private_model_of
from opacus_ext.layers import Experts, SwitchFeedForward
from opacus_ext.losses import model_losses
from opacus_ext.models.dpformer import DPFormer
from opacus_ext.monitor import Monitor
from opacus_ext.re_attention import track_errors
from tests import common, tiny
from tests.common import (
    MODES,
    assert_same,
    clipped_sum,
    half_clipped,
    make_private,
    net,
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


def of_two(then, one=(4, 4), two=(4, 4), **parts):
    """Two layers, and a forward ``then(model, x)``."""
    return net(then, one=one, two=two, **parts)


RECURRENT = net(
    lambda m, x: m.last(m.cells(x)[0]).mean(1),
    cells=lambda: nn.LSTM(4, 5, batch_first=True),
    last=(5, 3),
)


def model_of(build):
    torch.manual_seed(1)
    return build().double().train()


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


ANOTHERS = of_two(
    lambda m, x: m.two(torch.tanh(m.one(x)) @ m.two.weight).mean(1), (4, 8), (8, 8)
)
USED = dict(backend="aot_eager", used=True)
# Code that was compiled without hooks must not be taken for code with them.
COMPARED = {
    **{mode: dict(mode=mode) for mode in MODES},
    **{way.__name__: dict(wrap=False, way=way) for way in WAYS[1:]},
    "used, hooks": dict(mode="hooks", steps=2, **USED),
    "used, ghost": dict(mode="ghost", wrap=False, steps=2, **USED),
    "after, hooks": dict(mode="hooks", after=True, steps=2),
    "after, ghost_bk": dict(way=in_place, after=True, steps=2),
    **{f"kernel, {mode}": dict(mode=mode, build=RECURRENT) for mode in MODES},
    "another's weight": dict(build=ANOTHERS, **USED),
    "another's weight, hooks": dict(mode="hooks", build=ANOTHERS, **USED),
    "another's weight, ghost": dict(mode="ghost", build=ANOTHERS, backend="aot_eager"),
    "inductor": dict(backend="inductor", steps=2),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == "inductor")) for n in COMPARED],
)
def test_compiled(name):
    """The model or a part of it, before make_private or after."""
    if name == "inductor" and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    compare(**COMPARED[name])


def compare(
    mode="ghost_bk",
    wrap=True,
    build=Net,
    way=of_model,
    backend="eager",
    after=False,
    used=False,
    steps=1,
):
    """
    Args:
        after: compiled after make_private
        used: has run before, so that compiled code without the tape's hooks is kept
    """
    batch = batch_of()
    grads = oracle(model_of(build), batch, square_loss)
    c = half_clipped(grads)
    plain = model_of(build)
    model = plain if after else way(plain, backend)
    for _ in range(2 * used):
        square_loss(model, batch).sum().backward()
    model.zero_grad()
    private = make_private(model, mode, wrap, batch_size=4, max_grad_norm=c, lr=0.0)
    if after:
        private.module = way(private.module, backend)
    for _ in range(steps):
        private.step(batch, square_loss)
        got = {
            n.replace("_orig_mod.", ""): 4 * p.grad for n, p in trainable(plain).items()
        }
        assert_same(got, clipped_sum(grads, "flat", c), 1e-8, mode)


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
    compiled = private_model_of(model)._compiled.get(type(None))
    return 0 if compiled is None else compiled.programs


def train(
    model,
    batches,
    loss_fn=square_loss,
    mode="ghost_bk",
    how=None,
    max_grad_norm=0.3,
    clipping="flat",
    tolerance=1e-8,
    batched=None,
    change=lambda model, step: None,
    **backward,
):
    """
    Compares compiled steps with the oracle; returns warnings on compilation.

    Args:
        batched: which tensors of a batch have samples
        change: what is done to a model, and its plain copy, before a step
    """
    plain, c = copy.deepcopy(model), max_grad_norm
    if clipping == "per_layer":
        c = [c] * len(trainable(model))
    private = compiled(model, mode, how, max_grad_norm=c, clipping=clipping, lr=0.1)
    told = []
    for step, batch in enumerate(batches):
        for each in (model, plain):
            change(each, step)
        plain.load_state_dict(model.state_dict())
        expected = clipped_sum(oracle(plain, batch, loss_fn, batched), clipping, c)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = grads_of(private, model, batch, loss_fn, **backward)
        told += [str(w.message) for w in caught if "not compiled" in str(w.message)]
        assert_same(got, expected, tolerance, mode)
        private.optimizer.step()
    return told


def heads(m, x):
    """A method of tensors that is written in Python."""
    h = m.first(x).unflatten(-1, (2, -1)).transpose(1, 2)
    return m.norm(h.transpose(1, 2).flatten(2)).mean(1)


def windows(m, x):
    """Time first, and windows along it: the first dim of a sample is not the batch."""
    h = m.one(x).permute(1, 0, 2)[..., None]
    return h.unfold(0, 3, 1).square().sum((0, 2, 3, 4))[:, None]


def biases(m, x):
    """Linear layers of which a bias alone is trained, or one for all outputs."""
    h = F.linear(m.one(x), x.new_ones(4, 4), m.shift)
    return F.linear(h + m.one(x.mean(1))[:, None], m.weight, m.single).mean(1)


def layer_norms(m, x):
    """Layer norms over two dims, of one shift alone, twice, and of a parameter."""
    h = m.pairs(m.one(x).unflatten(-1, (2, 2))).flatten(2)
    h = F.layer_norm(input=h.tanh(), normalized_shape=(4,), bias=m.shift, eps=0.1)
    return m.norm(m.norm(h) + m.one(h)).mean(1) + m.norm(m.shift)


def mixed(m, x):
    """Ops that vmap knows for one number of samples, and parameters in them."""
    h = F.max_pool1d(m.norm(m.first(x.mT)), 2).mT
    h = torch.cat((m.token.expand(len(x), -1, -1), h), 1)
    q, k, v = (F.linear(h, w) for w in m.packed.chunk(3))
    h = F.scaled_dot_product_attention(q, k, v) @ (m.adapter @ m.adapter.t())
    return F.layer_norm(h, (6,)).gather(1, h.argmax(1, keepdim=True)).flatten(1)


MIXED = net(
    mixed,
    first=lambda: nn.Conv1d(4, 6, 3, padding=1),
    norm=lambda: nn.GroupNorm(2, 6),
    token=lambda: torch.ones(1, 1, 6) * 0.3,
    packed=lambda: torch.linspace(-1, 1, 108).view(18, 6),
    adapter=lambda: torch.linspace(-1, 1, 12).view(6, 2),
    unused=(2, 2),
)


def normed(m, x):
    layer, group = m.norms
    return group(layer(m.one(x)).mT).flatten(1)[:, ::3]


def frozen_norms():
    norms = nn.ModuleList([nn.LayerNorm(4), nn.GroupNorm(2, 4)]).requires_grad_(False)
    for p in norms.parameters():
        p.data.uniform_(-1, 1)
    return net(normed, one=(4, 4), norms=lambda: norms)()


def llama():
    model = tiny.build("causal-lm", "llama", "LlamaForCausalLM", use_cache=False)
    model.set_attn_implementation("sdpa")
    return model


def adapters():
    """Most parameters are frozen."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"])
    return peft.get_peft_model(llama(), config)


def words(size):
    return torch.randint(1, tiny.V, (size, 6))


def labeled(size):
    """One sample has no label."""
    ids = words(size)
    labels = ids.masked_fill(torch.rand(size, 6) < 0.3, -100)
    labels[0] = -100
    return {"input_ids": ids, "labels": labels}


def logits_loss(model, ids):
    return model(input_ids=ids).logits.square().mean((1, 2))


def shifted(size):
    """With a tensor that all samples share, another one in each step."""
    return batch_of(size)[:, 0], torch.randn(1, 4).double()


def sizes(*given):
    return [batch_of(*size) for size in given]


FOUND = dict(tolerance=1e-6)  # rotary embeddings are in float32
# By name: the model, what makes batches, how many programs serve them, and options.
TRAINED = {
    "ghost": (Net, lambda: sizes((2,), (1,)), 1, dict(mode="ghost")),
    "sizes": (  # programs of 2, 4 and 6
        Net,
        lambda: sizes((4,), (6,), (1,), (5,), (2,), (4,)),
        3,
        {},
    ),
    "lengths": (Net, lambda: sizes((2, 5), (1, 7), (4, 4)), None, {}),
    "biases": (
        net(
            biases,
            one=(4, 4),
            shift=lambda: torch.linspace(-1, 1, 4),
            weight=lambda: torch.linspace(-1, 1, 12).view(3, 4),
            single=lambda: torch.ones(1),
        ),
        lambda: sizes((2,), (4,)),
        2,
        {},
    ),
    "layer norms": (
        net(
            layer_norms,
            one=(4, 4),
            pairs=lambda: nn.LayerNorm((2, 2), bias=False),
            shift=lambda: torch.linspace(-1, 1, 4),
            norm=lambda: nn.LayerNorm(4),
        ),
        lambda: sizes((4,), (1,)),
        None,
        {},
    ),
    "heads": (
        net(heads, first=(4, 8), norm=lambda: nn.LayerNorm(8)),
        lambda: sizes((4,)),
        1,
        {},
    ),
    "frozen norms": (frozen_norms, lambda: sizes((4,)), 1, {}),
    "kinds of parameters": (MIXED, lambda: sizes((4,), (2,), (1,)), None, {}),
    "windows": (of_two(windows), lambda: sizes((2, 6), (2, 6)), None, {}),
    "normalized": (
        Net,
        lambda: sizes((2,), (1,)),
        None,
        dict(clipping="normalized", scale=64.0),  # of the backward pass alone
    ),
    "per_layer": (
        Net,
        lambda: sizes((2,), (1,)),
        None,
        dict(clipping="per_layer"),
    ),
    "shared input": (
        net(lambda m, x, shift: m.one(x + shift), one=(4, 3)),
        lambda: [shifted(4) for _ in range(4)],
        1,
        dict(batched=(0,)),
    ),
    "losses of the model": (
        llama,
        lambda: [labeled(size) for size in (2, 1, 2)],
        None,
        dict(loss_fn=model_losses, max_grad_norm=0.1, **FOUND),
    ),
    "adapters": (
        adapters,
        lambda: [words(3)],
        1,
        dict(loss_fn=logits_loss, max_grad_norm=0.1, **FOUND),
    ),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=[pytest.mark.thorough] * (n == "adapters"))
        for n in TRAINED
    ],
)
def test_trained(name):
    """Poisson draws another batch size at each step: few programs serve them all."""
    build, batches, programs, given = TRAINED[name]
    how = dict(fullgraph=programs is not None, **AOT)
    model = model_of(build)
    told = train(model, batches(), how=how, **given)
    assert not told or name == "windows"
    assert programs_of(model) == programs or programs is None


def test_frozen_norms():
    """Beside vmap as the model has them, rounded once in half precision."""
    plain = model_of(frozen_norms).bfloat16()
    model = copy.deepcopy(plain)
    x = batch_of(3).bfloat16()
    out = compiled(model).module(x)
    assert programs_of(model) == 1
    torch.testing.assert_close(out, plain(x), rtol=0, atol=0.02)


class Mixture(nn.Module):
    """Stacked experts with biases, and a layer that drops tokens."""

    def __init__(self):
        super().__init__()
        self.first, self.router = nn.Linear(4, 6), nn.Linear(6, 5)
        self.switch = SwitchFeedForward(6, 8, num_experts=7, capacity=2)
        self.experts = Experts(6, 8, num_experts=5, gated=True, bias=True)

    def forward(self, x):
        x = self.first(x)
        x = x + self.switch(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        rows = (y.flatten(0, 1) for y in (x, chosen, weights))
        return self.experts(*rows).view_as(x) + self.switch.balancing[:, None, None]


class Opaque(torch.autograd.Function):
    """A function that vmap can't run."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def plain(m, x):
    return m.one(x)


def branch(m, x):
    return m.one(x) if x.sum() > 0 else -m.one(x)


FEW = dict(backend="eager")  # the compiler's other parts take longer
RAN = {
    "eager": ("ghost_bk", plain, None, 3, "eager at once"),
    "compiled": ("ghost", plain, FEW, 2, "compiled"),
    "hooks": ("hooks", plain, FEW, 3, "not compiled .it is for .*., eager at once"),
    "branch": ("ghost_bk", branch, FEW, 3, "not compiled .*branch.*, eager at once"),
    "vmap": (
        "ghost",
        lambda m, x: m.one(Opaque.apply(x)),
        None,
        3,
        "one by one .*Op.*",
    ),
    "mode": ("scan", plain, None, 3, "one by one .by the mode."),
    "one": ("ghost_bk", plain, None, 1, "one by one .alone in its batch or branch."),
}


@pytest.mark.parametrize("name", RAN)
def test_how_a_step_ran(name):
    mode, then, how, size, line = RAN[name]
    private = make_private(net(then, one=(4, 2))(), mode, batch_size=4)
    monitor = Monitor(private.engine, private.optimizer)
    assert monitor.ran == "Last step: none"
    if how is not None:
        private.module = torch.compile(private.module, **how)
    x = torch.randn(size, 4).abs()
    for batch in (x[:1], x):
        private.step(batch, square_loss)
    told = monitor.ran
    assert re.fullmatch(f"Last step: {line}", told)
    assert repr(private.handle).endswith(told)
    for made in (private.optimizer, monitor):
        assert told.removeprefix("Last step: ") in repr(made)


class OpaqueLoss(nn.MSELoss):
    def forward(self, output, target):
        return super().forward(Opaque.apply(output), target)


def test_a_criterion_that_runs_one_by_one():
    model = net(plain, one=(4, 2))()
    private = make_private(model, "ghost_bk", batch_size=4, criterion=OpaqueLoss())
    private.criterion(private.module(torch.randn(4, 4)), torch.zeros(4, 2)).backward()
    line = "Last step: eager at once, the criterion one by one .*Opaque.*"
    assert re.fullmatch(line, private.optimizer.ran)


@pytest.mark.parametrize("few, clipping", [(0, "flat"), (2**26, "per_layer")])
def test_experts(few, clipping, monkeypatch):
    """Norms by the rows of an expert, or all pairs: routes make no new programs."""
    monkeypatch.setattr(grad_sample, "_FEW", few)
    model, given = model_of(Mixture), dict(how=dict(fullgraph=True, **AOT))
    batches = [3 * torch.randn(B, 5, 4).double() for B in (2, 2, 1)]
    assert not train(model, batches, clipping=clipping, **given)
    assert programs_of(model) == 1


class Stateful(common.Net):
    """Has buffers."""

    def __init__(self, then):
        parts = dict(one=nn.Linear(4, 4), two=nn.Linear(4, 4))
        super().__init__(then, **parts, first=True, last=None)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(4))


def counts(m, x):
    """Python decides, by a number that changes from step to step."""
    m.steps += 1
    h = m.one(x) if m.first else m.two(x)
    return {"out": h.mean(1), "norm": h.norm(dim=-1), "width": 4}


def test_state_in_python():
    model = model_of(lambda: Stateful(counts))

    def loss_fn(m, x):
        out = m(x)
        return out["out"].pow(2).sum(-1) + out["norm"].sum(-1)

    def change(m, step):
        m.first = step % 2 == 0
        assert m is not model or int(m.steps) == step

    train(model, [batch_of(4)] * 4, loss_fn, change=change)
    assert int(model.steps) == 4 and programs_of(model) == 2


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
        (of_two(branches), "x.abs().max() < 99"),
        (of_two(checkpoints), "Net"),
        (RECURRENT, "recurrent kernel"),
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
            told += [str(w.message) for w in caught if "not compiled" in str(w.message)]
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


def test_autocast():
    """In bfloat16, whose rounding alone differs."""
    batches = [batch_of(B).float() for B in (4, 4)]
    build = of_two(lambda m, x: m.two(m.one(x).tanh()).mean(1), (4, 6), (6, 3))
    model, told = beside(build, batches, square_loss, amp=True, tol=0.02)
    assert programs_of(model) == 1 and not told


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_of_linear_layers_that_vmap_takes_apart(compiles):
    """They give bfloat16, as alone: with a frozen weight, or one made of data."""

    def forward(m, x):
        y = m.one(x)
        return y, F.linear(x, m.one.weight * x.mean(), m.one.bias)

    model = of_two(forward, (4, 6), (6, 3))().float()
    model.one.weight.requires_grad_(False)
    private = make_private(model, "ghost", batch_size=4)
    if compiles:
        private.module = torch.compile(private.module, **AOT)
    with torch.autocast("cpu", torch.bfloat16):
        found = private.module(batch_of(4).float())
    assert [y.dtype for y in found] == [torch.bfloat16] * 2


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
    """Sums with a part of it are known to be of no use."""
    p = torch.zeros(2)
    norms = GroupNorms([p], 2)
    rows = torch.tensor([[1.0, 1.0], [math.nan, 0.0]])
    norms.finish({id(p): GradSample(p.shape, 2, rows)})
    own = torch.tensor([True, False])
    found, _ = norms_and_sums(norms, torch.ones_like, counts=own)
    assert not found.isfinite().all()
    _, (total,) = safe_norms_and_sums(norms, torch.ones_like)
    assert total.tolist() == [1, 1]


class Cache:
    def __init__(self, rows):
        self.rows = rows


def test_outputs_of_other_kinds():
    """An object may hold samples, and refuses any use, as where samples run eagerly."""

    def named(m, x):
        rows = m.layer(x) * x
        given = {"none": None, "length": x.shape[1], "cache": Cache(rows)}
        return {"y": rows, **given}

    def loss_fn(model, batch):
        return model(batch)["y"].flatten(1).square().sum(1)

    model = net(named, layer=(3, 3))().double()
    private = make_private(model, "ghost_bk", batch_size=4)
    private.module.compile(backend="eager", fullgraph=True)
    for size in (4, 3, 0, 1, 2):
        batch = torch.randn(size, 4, 3).double()
        private.step(batch, loss_fn)
    assert programs_of(model)
    out = private.module(batch)
    assert out["none"] is None and out["length"] == 4
    with pytest.raises(TypeError, match="output is a Cache, which may hold values"):
        out["cache"].rows


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


@pytest.mark.thorough
def test_parameters_that_change_places():
    """A program is made for parameters, and not for their places."""
    model, plain = model_of(Net), model_of(Net)
    bounds = [0.1 * (i + 1) for i in range(len(trainable(model)))]
    private = compiled(model, max_grad_norm=bounds, clipping="per_layer")
    by_parameter = dict(zip(model.parameters(), bounds))
    for changed in (False, True):
        for norm in (model.norm, plain.norm) if changed else ():
            norm.weight, norm.bias = norm.bias, norm.weight
        bounds = [by_parameter[p] for p in model.parameters()]
        grads = oracle(plain, batch_of(), square_loss)
        expected = clipped_sum(grads, "per_layer", bounds)
        assert_same(grads_of(private, model, batch_of()), expected, 1e-8)
    model.twice.weight = nn.Parameter(model.twice.weight.detach().clone())
    with pytest.raises(RuntimeError, match="did not have at make_private"):
        grads_of(private, model, batch_of())


@pytest.mark.thorough
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


@pytest.mark.thorough
def test_nothing_is_kept():
    model = model_of(Net)
    private = compiled(model)
    for size in (4, 3):
        private.step(batch_of(size), square_loss)
    kept = weakref.ref(model), weakref.ref(private_model_of(model))
    del model, private
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
        train(model_of(lambda: Stateful(remembers)), [batch_of(), batch_of()])
    model = model_of(lambda: Stateful(writes))
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


def physical_batches(device, **how):
    """Sums of several of a program's runs, which must not share their memory."""
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(8, 5, 4, device=device).double())
    model = model_of(Net).to(device)
    grads = oracle(model, data[:][0], square_loss)
    c = half_clipped(grads)
    given = dict(batch_size=8, max_grad_norm=c, dataset=data, lr=0.0)
    private = make_private(model, "ghost_bk", **given)
    private.module = torch.compile(private.module, **how)
    with private.parts(3) as loader:
        for (batch,) in loader:
            private.step(batch, square_loss)
    got = {n: 8 * p.grad for n, p in trainable(model).items()}
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
