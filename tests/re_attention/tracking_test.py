"""Models whose errors are tracked: exact in every mode, and a state that survives.

The oracle is each sample alone through plain autograd, in a copy of the model whose
errors are tracked with the same noise: a copy of a tracked model is tracked.
"""

import copy
import gc
import threading
import weakref

import pytest
import torch
from opacus.validators import ModuleValidator
from torch import nn
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import opacus_ext
from opacus_ext.layers import (
    SelfAttention,
    SwitchFeedForward,
    TopKFeedForward,
    re_attention,
)
from opacus_ext.models import DPFormer
from opacus_ext.re_attention import passes, tracking
from opacus_ext.refused import Refused
from tests.common import (
    MODES,
    assert_same,
    clipped_sum,
    every_mode,
    half_clipped,
    make_private,
    oracle,
    size_of,
    square_loss,
    trainable,
    wrapped_or_not,
)
from tests.re_attention.common import optimizer_of, track

D = torch.float64
# Samples run at once, all that is tracked included.
pytestmark = pytest.mark.filterwarnings("error:.*run one sample after the other")
every_place = pytest.mark.parametrize("where", ["logits", "scores"])


@pytest.fixture(autouse=True)
def nothing_stays_active():
    yield
    gc.enable()
    assert passes.active() is None and not _get_current_function_mode_stack()


def dpformer(heads=1, length=4, dropout=0.0):
    torch.manual_seed(0)
    model = DPFormer(9, length, width=8, heads=heads, dropout=dropout).double()
    nn.init.normal_(model.embedding.weight)
    return model


def sequences(batch=3, length=4):
    return torch.randint(1, 10, (batch, length))


def some_shares(rows=10):
    """From common to never seen."""
    shares = torch.linspace(1.0, 0.05, rows)
    shares[0] = shares[3] = 0.0
    return shares


def without_noise(optimizer):
    """The noise is known to the tracker, but not added."""

    def add():
        for p in optimizer.params:
            p.grad = p.summed_grad.view_as(p).to(p.dtype)

    optimizer.add_noise = add


def in_mode(mode, wrap, model, batch, loss_fn, c, noise, shares=None, **options):
    """The clipped sums of a mode, with errors tracked."""
    model, size = copy.deepcopy(model), max(size_of(batch), 1)
    private = make_private(
        *(model, mode, wrap),
        batch_size=size,
        max_grad_norm=c,
        noise_multiplier=noise * size / c,
    )
    opacus_ext.track_errors(private.module, private.optimizer, shares, **options)
    without_noise(private.optimizer)
    private.step(batch, loss_fn)
    return {name: p.grad.detach() * size for name, p in trainable(model).items()}


def check(mode, wrap, model, batch, loss_fn, shares=None, noise=0.1, **options):
    """A step equals the oracle, and is another one than without the correction."""
    tolerance = options.pop("tolerance", 1e-8)
    acts = options.pop("acts", True)
    plain = oracle(model, batch, loss_fn)
    c = half_clipped(plain)
    size = max(size_of(batch), 1)
    same = copy.deepcopy(model)
    optimizer = optimizer_of(same, noise, c, size)
    opacus_ext.track_errors(same, optimizer, shares, **options)
    grads = oracle(same, batch, loss_fn)
    got = in_mode(mode, wrap, model, batch, loss_fn, c, noise, shares, **options)
    assert_same(got, clipped_sum(grads, "flat", c), tolerance, mode)
    if acts:
        before = torch.cat([g.flatten() for g in plain.values()])
        after = torch.cat([g.flatten() for g in grads.values()])
        assert float((after - before).norm() / before.norm()) > 1e-3


# Exact in every mode


@every_place
@pytest.mark.parametrize("mode", (*MODES, "scan"))
@wrapped_or_not
def test_exact(mode, wrap, where):
    ids = sequences()
    ids[1, 2:] = 0  # padding
    check(mode, wrap, dpformer(), ids, square_loss, some_shares(), where=where)


class Splitting(nn.Module):
    """Samples take different branches, and are changed in place."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.first, self.second = SelfAttention(8, 2), SelfAttention(8)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.first(x)
        if bool((ids == 1).any()):
            x.masked_fill_((ids == 1).unsqueeze(-1), 0.0)
        x[:, 0] = 2 * x[:, 1]
        return self.head(self.second(x))


class Mixed(nn.Module):
    """Tokens from features, two attentions in parallel, and a gate for each sample."""

    def __init__(self):
        super().__init__()
        self.start = nn.Linear(5, 8)
        self.left, self.right = SelfAttention(8, 2), SelfAttention(8, 1, causal=True)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, 3)

    def forward(self, x, mask=None):
        x = F.gelu(self.start(x))
        gate = torch.sigmoid(x.mean((1, 2)))[:, None, None]
        x = x + gate * self.left(x, mask) + (1 - gate) * self.right(x)
        return self.head(self.left(self.norm(x), mask))


class Routed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.first, self.second = SelfAttention(8, 2), SelfAttention(8)
        self.experts, self.head = layer, nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.first(x)
        out = self.experts(x)
        x = x + (out[0] if isinstance(out, tuple) else out)
        return self.head(self.second(x))


class WithoutBatch(nn.Module):
    """Values that have errors and no batch, changed in place around the attention."""

    def __init__(self):
        super().__init__()
        self.start, self.attention = nn.Linear(4, 4), SelfAttention(4)
        self.scale = nn.Parameter(torch.rand(4) + 0.5)
        self.register_buffer("known", torch.rand(4))

    def forward(self, x):
        x = self.start(x)
        total = self.start.weight.sum(0)
        total.mul_(0.5)
        x = x + self.attention(x + total)
        scale = self.scale * 2.0
        scale.add_(0.5)
        scale[0] = 1.0
        total += scale
        offset = torch.ones_like(self.known).mul_(self.known)
        offset += total
        rows = torch.zeros_like(x)
        rows += offset
        return x * scale + 0.1 * rows


def frozen(*names):
    model = dpformer()
    for name in names:
        model.get_submodule(name).requires_grad_(False)
    return model


def routed(layer):
    return Routed(layer(8, 12, num_experts=3)).double()


EMBEDDED = {"embedding.weight": some_shares()}
# Keys of both blocks are known exactly.
ALL_BUT_THE_END = ("embedding", "position", "blocks.0", "blocks.1.attention")
CASES = {
    "heads": lambda: dict(model=dpformer(heads=2)),
    "no shares": lambda: dict(shares=None),
    "no cap": lambda: dict(cap=None),
    "small cap": lambda: dict(cap=0.1),
    "loud": lambda: dict(noise=3.0),
    "positions too": lambda: dict(
        shares={**EMBEDDED, "position.weight": torch.linspace(1, 0.1, 4)}
    ),
    "one token": lambda: dict(batch=sequences(3, 1), acts=False),
    "as many samples as tokens": lambda: dict(batch=sequences(4, 4)),
    "padding only": lambda: dict(
        batch=torch.cat([sequences(2), torch.zeros(1, 4).long()])
    ),
    "embedding frozen": lambda: dict(model=frozen("embedding"), shares=None),
    "all but the end frozen": lambda: dict(
        model=frozen(*ALL_BUT_THE_END), shares=None, acts=False
    ),
    "branches": lambda: dict(
        model=Splitting().double(),
        batch=torch.tensor([[5, 6, 7], [1, 2, 6], [9, 5, 8], [1, 1, 3]]),
        shares=EMBEDDED,
    ),
    "features and masks": lambda: dict(
        model=Mixed().double(),
        batch=(
            torch.randn(3, 4, 5, dtype=D),
            torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool(),
        ),
        shares=None,
    ),
    "one expert a token": lambda: dict(model=routed(SwitchFeedForward)),
    "two experts a token": lambda: dict(model=routed(TopKFeedForward)),
    "without a batch": lambda: dict(
        model=WithoutBatch().double(),
        batch=torch.randn(3, 5, 4, dtype=D),
        **dict(shares=None, noise=1.0, cap=None),
    ),
}


@every_mode
@pytest.mark.parametrize("case", CASES)
def test_exact_cases(mode, case):
    torch.manual_seed(0)
    options = {"model": dpformer(), "batch": sequences(), "shares": some_shares()}
    options.update(CASES[case]())
    args = (options.pop(name) for name in ("model", "batch"))
    check(mode, options.pop("wrap", True), *args, square_loss, **options)


@every_mode
@wrapped_or_not
def test_empty_batch(mode, wrap):
    args = sequences(0), square_loss, 1.0, 0.1, some_shares()
    got = in_mode(mode, wrap, dpformer(), *args)
    assert all(not g.any() for g in got.values())


@every_mode
@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16(mode, autocast):
    """The correction costs no precision, as variances are in float32."""

    def loss(model, ids):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out = model(ids)
        return square_loss(lambda _: out.double() if autocast else out, ids)

    model, ids = dpformer(), sequences()
    dtype = torch.float32 if autocast else torch.bfloat16
    rest = 1e3, 0.1, some_shares()
    got = in_mode(mode, True, copy.deepcopy(model).to(dtype), ids, loss, *rest)
    wide = in_mode(mode, True, model, ids, square_loss, *rest)
    for name, g in got.items():
        assert g.dtype == dtype
        gap = (g.double() - wide[name]).norm() / wide[name].norm()
        assert float(gap) < 0.15, name


# Activation checkpointing


class Deep(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(8, 3)
        self.attention, self.reentrant = SelfAttention(8, 2), reentrant

    def forward(self, ids):
        x = self.embedding(ids)
        x = checkpoint(self.attention, x, use_reentrant=self.reentrant)
        return self.head(x)


@every_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_is_refused(mode, reentrant):
    """The attention would be computed again without its correction."""
    model, args = Deep(reentrant).double(), (square_loss, 0.5, 0.1, some_shares())
    with pytest.raises(Refused, match="under activation checkpointing"):
        in_mode(mode, True, model, sequences(), *args)


def test_attention_outside_of_the_model():
    """Errors are not known there: it is refused, and plain for the untracked."""
    model, x = dpformer(), torch.randn(2, 4, 8, dtype=D)
    attention = model.blocks[0].attention
    plain = attention(x)
    tracker = track(model, some_shares())
    model(sequences())
    with pytest.raises(Refused, match="outside of the model's forward pass"):
        attention(x)
    tracker.detach()
    assert torch.equal(attention(x), plain)


# Copies and state


def test_copy_is_tracked():
    model, ids = dpformer(), sequences()
    plain = model(ids)
    tracker = track(model, some_shares())
    out = model(ids)
    again = copy.deepcopy(model)
    assert torch.equal(again(ids), out) and not torch.equal(out, plain)
    tracker.enabled = False
    assert torch.equal(again(ids), plain) and torch.equal(model(ids), plain)
    tracker.enabled = True
    tracker.detach()
    assert torch.equal(model(ids), plain)
    track(model, some_shares())
    again, gone = copy.deepcopy(model), weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None  # the tracker does not keep it
    assert torch.equal(again(ids), out)


def test_state_dict(tmp_path):
    model, ids = dpformer(), sequences()
    names = set(model.state_dict())
    tracker = track(model, some_shares(), where="scores")
    state = model.state_dict()
    added = {"re_attention.noise", "re_attention.shares.embedding.weight"}
    assert set(state) - names == added
    assert not list(model.buffers())

    # to evaluate: no optimizer, the noise is that of the state
    other = dpformer()
    nn.init.normal_(other.embedding.weight)
    opacus_ext.track_errors(other, where="scores")
    with pytest.raises(RuntimeError, match="No noise is known"):
        other(ids)
    other.load_state_dict(state)
    assert torch.equal(other(ids), model(ids))
    # to train: shares come from the state, the noise from the optimizer
    third = dpformer()
    track(third, noise=0.1, where="scores").evaluate = False
    third.load_state_dict(state)
    assert torch.equal(third(ids), model(ids))
    # and again
    fourth = dpformer()
    opacus_ext.track_errors(fourth, where="scores")
    fourth.load_state_dict(other.state_dict())
    assert torch.equal(fourth(ids), model(ids))

    # an untracked model is another function
    with pytest.raises(RuntimeError, match="re_attention.noise"):
        dpformer().load_state_dict(state)
    tracker.detach()
    assert set(model.state_dict()) == names
    dpformer().load_state_dict(model.state_dict())
    # what was saved untracked can be loaded by who tracks
    third.load_state_dict(model.state_dict())
    # the output has nothing of it, and files have the state alone
    torch.save(out := third(ids), tmp_path / "out.pt")
    assert torch.equal(torch.load(tmp_path / "out.pt", weights_only=True), out)
    torch.save(third.state_dict(), tmp_path / "state.pt")
    fourth.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(fourth(ids), out)
    with pytest.raises(Refused, match="save its state_dict"):
        torch.save(third, tmp_path / "model.pt")


@every_mode
@wrapped_or_not
def test_resume(mode, wrap, tmp_path):
    """Training goes on from a checkpoint as if it had not been interrupted."""

    def training(seeds, shift=0.0, **load):
        model = dpformer()
        private = make_private(
            *(model, mode, wrap),
            batch_size=4,
            noise_multiplier=0.5,
            dataset=TensorDataset(sequences(8)),
            optimizer=torch.optim.Adam(model.parameters(), lr=0.05),
        )
        parts = dict(module=private.module, optimizer=private.optimizer)
        opacus_ext.track_errors(*parts.values(), some_shares())
        with torch.no_grad():
            for p in model.parameters():
                p.add_(shift)
        if load:
            private.engine.load_checkpoint(**parts, **load)
        for seed in seeds:
            torch.manual_seed(seed)
            private.step(sequences(4), square_loss)
        return private.engine, parts, model

    *_, model = training(range(4))
    engine, parts, _ = training(range(2))
    path = tmp_path / "c.pt"
    engine.save_checkpoint(path=path, **parts)
    *_, resumed = training(range(2, 4), 1.0, path=path, repeat_noise=True)
    for (name, p), q in zip(model.named_parameters(), resumed.parameters()):
        assert torch.equal(p, q), name


# When it acts


def test_evaluation():
    model, ids = dpformer(), sequences()
    before, plain = set(vars(model)), model(ids)
    tracker = track(model, some_shares())
    out = model(ids)
    assert ModuleValidator.validate(model, strict=True) == []
    model.eval()
    assert torch.equal(model(ids), out)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model(ids), out, rtol=1e-12, atol=1e-12)
    tracker.evaluate = False
    assert torch.equal(model(ids), plain)
    model.train()
    assert torch.equal(model(ids), out)
    tracker.enabled = False
    assert torch.equal(model(ids), plain)
    tracker.enabled = tracker.evaluate = True
    assert torch.equal(model.eval()(ids), out)
    tracker.where = "scores"
    assert not torch.allclose(model(ids), out, rtol=1e-6)
    tracker.detach()
    assert torch.equal(model(ids), plain) and set(vars(model)) == before
    track(model, some_shares())
    assert torch.equal(model(ids), out)


def test_the_first_pass_is_as_all_others():
    """
    Beside the first pass with gradients the model runs without dropout, to be compared;
    of that nothing stays.
    """
    model = dpformer(dropout=0.3)
    private = make_private(model, "ghost_bk", batch_size=3)
    private.optimizer.noise_multiplier = 0.3
    tracker = opacus_ext.track_errors(private.module, private.optimizer, some_shares())
    ids = sequences()

    def outputs():
        torch.manual_seed(1)  # of the masks
        return private.module(ids).detach()

    first = outputs()
    assert torch.equal(outputs(), first)
    with torch.no_grad():  # of the batch at once
        torch.testing.assert_close(outputs(), first, rtol=0, atol=1e-10)
    tracker.enabled = False
    assert float((outputs() - first).abs().max()) > 1e-3


@every_mode
def test_noise_is_followed(mode):
    """A schedule of the noise multiplier or the clipping norm; none is none."""
    model, ids = dpformer(), sequences()
    plain = model(ids).detach()
    private = make_private(
        model, mode, batch_size=4, noise_multiplier=1.0, max_grad_norm=1.0
    )
    tracker = opacus_ext.track_errors(private.module, private.optimizer, some_shares())
    outs = []
    for noise in (1.0, 0.5, 0.0, 1.0):
        private.optimizer.noise_multiplier = noise
        outs.append(model(ids).detach())
        error = float(tracker.errors()["position.weight"])
        assert error == pytest.approx(noise / 4)
        assert float(model.state_dict()["re_attention.noise"]) == noise / 4
    assert torch.equal(outs[0], outs[3]) and not torch.equal(outs[0], outs[1])
    torch.testing.assert_close(outs[2], plain, rtol=1e-12, atol=1e-12)
    model.requires_grad_(False)  # what is frozen later errs no more
    assert not any(e.any() for e in tracker.errors().values())
    torch.testing.assert_close(model(ids), plain, rtol=1e-12, atol=1e-12)
    model.requires_grad_(True)
    assert torch.equal(model(ids), outs[0])


# Refusals


def test_bad_arguments():
    model = dpformer()
    for options, message in (
        ({"where": "keys"}, "where must be one of"),
        ({"cap": 0.0}, "cap must be positive or None"),
        ({"shares": torch.ones(7)}, "7 shares belong to one embedding"),
        ({"shares": torch.zeros(10)}, "No share of embedding.weight is positive"),
        ({"shares": {"embed": torch.ones(10)}}, r"shares for \['embed'\]"),
        ({"shares": {"embedding.weight": torch.ones(3)}}, "needs 10 shares"),
    ):
        with pytest.raises(ValueError, match=message):
            track(model, **options)
        assert tracking.tracker_of(model) is None  # it can be tried again
    with pytest.raises(Refused, match="SGD adds no noise"):
        opacus_ext.track_errors(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = track(model)
    with pytest.raises(ValueError, match="tracked already"):
        track(model)
    tracker.detach()
    # two embeddings of as many rows
    model = dpformer(length=10)
    with pytest.raises(ValueError, match="the model has 2.*position.weight"):
        track(model, some_shares())


def test_lost_errors_are_refused():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Linear(4, 4)

        def forward(self, x):
            x = self.start(x)
            return re_attention(
                x, torch.fft.ifft(torch.fft.fft(x)).real, x, module=self
            )

    model = Odd()
    track(model)
    with pytest.raises(RuntimeError, match="Odd: .* by the operation 'fft_fft'"):
        model(torch.randn(2, 1, 3, 4))


# Around the forward pass


class Failing(nn.Module):
    def __init__(self, inner, error=None):
        super().__init__()
        self.inner, self.error = inner, error

    def forward(self, ids):
        out = self.inner(ids)
        if self.error is not None:
            raise self.error
        return out


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_failing_forward(error):
    model, ids = Failing(dpformer()), sequences()
    track(model, {"inner.embedding.weight": some_shares()})
    out = model(ids)
    model.error = error()
    with pytest.raises(error):
        model(ids)
    assert passes.active() is None and not _get_current_function_mode_stack()
    model.error = None
    assert torch.equal(model(ids), out)


def test_a_tracked_model_in_another_is_refused():
    """Unless one of them is switched off."""
    model, ids = Failing(dpformer()), sequences()
    outer = track(model, {"inner.embedding.weight": some_shares()})
    out = model(ids)
    inner = track(model.inner, some_shares(), noise=0.3)
    with pytest.raises(Refused, match="DPFormer is tracked, and so is a model around"):
        model(ids)
    alone = model.inner(ids)
    outer.enabled = False
    assert torch.equal(model(ids), alone) and not torch.equal(alone, out)
    outer.enabled = True
    inner.detach()
    assert torch.equal(model(ids), out)


def test_two_models():
    """One after the other, in turns, and in threads."""
    ids = sequences()
    models = [dpformer(), dpformer()]
    for model, noise in zip(models, (0.1, 0.5)):
        track(model, some_shares(), noise=noise)
    one, two = (model(ids) for model in models)
    assert not torch.equal(one, two)
    assert torch.equal(models[0](ids), one) and torch.equal(models[1](ids), two)
    outs = {}

    def run(i):
        outs[i] = [models[i](ids) for _ in range(5)]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, out in ((0, one), (1, two)):
        assert all(torch.equal(x, out) for x in outs[i])


class Several(nn.Module):
    """It returns several tensors."""

    def __init__(self, kind):
        super().__init__()
        self.inner, self.kind = Mixed(), kind

    def forward(self, x):
        y = self.inner(x)
        return self.kind({"a": y, "b": y * 2}.items())


@pytest.mark.parametrize("kind", [dict, lambda pairs: tuple(x for _, x in pairs)])
def test_values_of_one_pass_do_not_stay(kind):
    """Notes of a forward pass go with it: parameters, inputs and outputs are clean."""
    model, x = Several(kind).double(), torch.randn(2, 4, 5, dtype=D)
    tracker = track(model)
    gc.collect()
    gc.disable()  # there are no cycles
    out = model(x)
    outs = list(out.values() if isinstance(out, dict) else out)
    for y in (x, *outs, *model.parameters()):
        assert tracker._table.get(y) is None
    y.sum().backward()
    del out, outs, y
    gc.enable()
    assert not tracker._table._notes  # and with its output all that it has computed


def test_several_in_data_parallel_wrappers():
    """The name of a wrapper is no part of a parameter's."""
    model, ids = dpformer(), sequences()
    private = make_private(model, "hooks", batch_size=3, noise_multiplier=1.0)
    tracker = opacus_ext.track_errors(
        private.module, private.optimizer, {"embedding.weight": some_shares()}
    )
    assert tracking.tracker_of(private.module) is tracker
    assert tracking.tracker_of(model) is tracker
    assert set(tracker.errors()) == {n for n, _ in model.named_parameters()}
    state = private.module.state_dict()
    assert "_module.re_attention.noise" in state
    private.module.load_state_dict(state)
    assert torch.equal(private.module(ids), model(ids))


class Keeping(nn.Module):
    """It keeps a tensor from call to call, and changes it behind its attention."""

    def __init__(self):
        super().__init__()
        self.start, self.layer = nn.Linear(8, 8), SelfAttention(8, heads=2)
        self.kept = None

    def forward(self, x, change):
        new = self.start(x)
        old, self.kept = self.kept, new
        y = self.layer(new if old is None else new + old)
        change(self.kept)
        return y


@pytest.mark.parametrize("change", [lambda x: x, lambda x: x.mul_(0.5)])
def test_tensors_of_earlier_passes_have_their_errors(change):
    """They count as tensors of this pass do."""
    model, x = Keeping(), torch.randn(2, 5, 8)
    track(model, cap=None)

    def twice(x):
        one, other = start(x), start(x)
        change(other)
        return one + other

    with torch.no_grad():
        model(x, change)
        got = model(x, change)
        start = model.start.forward
        model.kept, model.start.forward = None, twice
        assert torch.equal(model(x, lambda x: x), got)
        model(x, lambda x: x[:, 0].mul_(0.5))
        with pytest.raises(Refused, match="'mul in place'"):
            model(x, change)
