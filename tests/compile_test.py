"""torch.compile, of the model or parts of it, before make_private or after.

The tape's hooks run between compiled parts, and autograd's graph shows what compiled
parts use: exact, or refused. What is compiled matters here, not what compiles it, so
the backends that need no C++ compiler serve for all but one test.
"""

import copy
import shutil

import pytest
import torch
from torch import nn

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
        h = self.first(x) + self.positions(torch.arange(x.shape[1])[None])
        h = self.twice(torch.tanh(self.twice(self.norm(h)))) * self.scale
        return torch.relu(h).mean(1) * self.scale


class Recurrent(nn.Module):
    """A layer with a stand-in."""

    def __init__(self):
        super().__init__()
        self.cells = nn.LSTM(4, 5, batch_first=True)
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.cells(x)[0]).mean(1)


class Foreign(nn.Module):
    """A weight that another module reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        h = torch.tanh(self.first(x)) @ self.last.weight
        return self.last(h).mean(1)


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


@every_mode
def test_compiled_and_used_before(mode):
    """Code that was compiled without hooks must not be taken for code with them."""
    wrap = mode != "ghost"
    compare(mode, wrap, Net, lambda m: of_model(m, "aot_eager"), used=True, steps=2)


@pytest.mark.parametrize("mode", ["hooks", "ghost_bk"])
def test_compiled_after(mode):
    way = of_model if mode == "hooks" else in_place
    compare(mode, True, Net, after=lambda m: way(m, "eager"), steps=2)


@every_mode
def test_stand_in(mode):
    compare(mode, True, Recurrent, lambda m: of_model(m, "eager"))


@every_mode
@pytest.mark.parametrize("used", [False, True])
def test_weight_read_by_another_module(mode, used):
    """One compiled function may hide both uses, and then it is run by samples."""
    try:
        compare(mode, True, Foreign, lambda m: of_model(m, "aot_eager"), used=used)
    except RuntimeError as error:
        assert "last.weight of shape (8, 8) has 2 use(s)" in str(error)


@every_mode
def test_whole_graph(mode):
    """``fullgraph`` leaves no place for samples, and torch.compile says so."""
    whole = lambda m: torch.compile(m, backend="eager", fullgraph=True)  # noqa: E731
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compare(mode, True, Net, whole)


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
