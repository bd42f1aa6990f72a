"""Models whose errors are tracked: exact in every mode, and a state that survives.

The oracle is each sample alone through plain autograd, in a copy of the model whose
errors are tracked with the same noise: a copy of a tracked model is tracked.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel as DPDDP
from opacus.validators import ModuleValidator
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import opacus_ext
from opacus_ext.layers import SelfAttention
from opacus_ext.models import DPFormer
from opacus_ext.re_attention import Propagating, Uncertain
from opacus_ext.re_attention.tracking import tracker_of
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
)
from tests.re_attention.common import (
    D,
    dpformer,
    sequences,
    some_shares,
    track,
)
from tests.re_attention.propagation_test import Residual, Tanh

# Samples run at once, all that is tracked included.
pytestmark = pytest.mark.filterwarnings("error:.*run one sample after the other")
EMBEDDED = {"embedding.weight": some_shares()}


# Made by the code of version 1, which followed every operation.
REFERENCES = [
    (0.25705210191337, None, {}),
    (0.2734187334767544, {}, {}),
    (0.27126126644432436, dict(where="scores"), {}),
    (0.2776557181426611, {}, dict(heads=2)),
    (0.2568562450865528, dict(cap=0.1), {}),
    (0.2600835964695314, dict(noise=3.0, cap=None), {}),
    (-0.0225507176318831, dict(cap=None), dict(depth=3, heads=4)),
]


@pytest.mark.parametrize("expected, options, sizes", REFERENCES)
def test_reference_numbers(expected, options, sizes):
    model = DPFormer(9, 6, width=8, dropout=0.0, **sizes).double()
    for k, p in enumerate(model.parameters(), 1):
        values = torch.arange(p.numel(), dtype=D) * (1 + k / 7) + k
        with torch.no_grad():
            p.copy_(values.sin().view_as(p) * (0.8 if p.dim() > 1 else 1.0))
    ids = torch.tensor([[3, 1, 7, 2, 9], [5, 5, 8, 0, 0], [4, 9, 1, 6, 3]])
    if options is not None:
        track(model, **{"shares": EMBEDDED, **options})
    out = model(ids).detach().flatten()
    got = float(out @ torch.arange(len(out), dtype=D).sin())
    assert got == pytest.approx(expected, rel=1e-9)


def in_mode(
    mode, wrap, model, batch, c, noise, shares=None, loss=square_loss, **options
):
    """The clipped sums of a mode, with errors tracked."""
    model, size = copy.deepcopy(model), max(size_of(batch), 1)
    settings = dict(max_grad_norm=c, noise_multiplier=noise * size / c)
    private = make_private(model, mode, wrap, batch_size=size, **settings)
    opacus_ext.track_errors(private.module, private.optimizer, shares, **options)

    def add():
        """The noise is known to the tracker, but not added."""
        for p in private.optimizer.params:
            p.grad = p.summed_grad.view_as(p).to(p.dtype)

    private.optimizer.add_noise = add
    private.step(batch, loss)
    return {name: p.grad.detach() * size for name, p in trainable(model).items()}


def check(mode, wrap, model, batch, shares=None, noise=0.1, **options):
    """A step equals the oracle, and is another one than without the correction."""
    plain = oracle(model, batch, square_loss)
    c = half_clipped(plain)
    same = copy.deepcopy(model)
    track(same, shares, noise, **options)
    grads = oracle(same, batch, square_loss)
    got = in_mode(mode, wrap, model, batch, c, noise, shares, **options)
    assert_same(got, clipped_sum(grads, "flat", c), 1e-8, mode)
    before = torch.cat([g.flatten() for g in plain.values()])
    after = torch.cat([g.flatten() for g in grads.values()])
    assert float((after - before).norm() / before.norm()) > 1e-3


class Own(Propagating):
    """A user's model: features and a mask, branches, modules and attentions."""

    def __init__(self):
        super().__init__()
        self.start = nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.RMSNorm(8))
        self.first, self.second = SelfAttention(8, 2), SelfAttention(8, causal=True)
        self.tanh, self.head = Residual(Tanh()), nn.Linear(8, 3)

    def propagate(self, x, mask):
        positive = bool((x.value.sum() > 0).any())
        x = x.through(self.start)
        if positive:  # samples take different branches
            x = x.moved(lambda tokens: tokens.flip(1)).through(self.tanh)
        x = x + x.through(self.first, mask)

        def again(value, variance):
            out = Uncertain(value, variance, x.errors).through(self.second)
            return out.value, out.variance

        # It is recomputed with its correction.
        kept = checkpoint(again, x.value, x.variance, use_reentrant=False)
        return (x + Uncertain(*kept, x.errors)).through(self.head)


def frozen():
    model = dpformer()
    model.embedding.requires_grad_(False)
    return dict(model=model, shares=None)


def own():
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 1, 1, 1]]).bool()
    batch = torch.randn(3, 4, 5, dtype=D), mask
    return dict(model=Own().double(), batch=batch, shares=None, noise=0.3)


CASES = {
    "logits": lambda: {},
    "scores": lambda: dict(where="scores"),
    "heads": lambda: dict(model=dpformer(heads=2)),
    "no shares": lambda: dict(shares=None),
    "no cap": lambda: dict(cap=None),
    "small cap": lambda: dict(cap=0.1),
    "loud": lambda: dict(noise=3.0),
    "positions too": lambda: dict(
        shares={**EMBEDDED, "position.weight": torch.linspace(1, 0.1, 4)}
    ),
    "as many samples as tokens": lambda: dict(batch=sequences(4, 4)),
    "embedding frozen": frozen,
    "own model": own,
}
WAYS = [*((mode, True) for mode in (*MODES, "scan", "auto")), ("ghost_bk", False)]


@pytest.mark.parametrize("mode, wrap", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_exact(mode, wrap, case):
    torch.manual_seed(0)
    options = {"model": dpformer(), "batch": sequences(), "shares": some_shares()}
    options["batch"][1, 2:] = 0  # padding
    check(mode, wrap, **{**options, **CASES[case]()})


@every_mode
def test_empty_batch(mode):
    grads = in_mode(mode, True, dpformer(), sequences(0), 1.0, 0.1)
    assert not any(g.any() for g in grads.values())


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
    rest = 1e3, 0.1, {"embedding.weight": some_shares()}
    got = in_mode(mode, True, copy.deepcopy(model).to(dtype), ids, *rest, loss=loss)
    wide = in_mode(mode, True, model, ids, *rest)
    for name, g in got.items():
        assert g.dtype == dtype
        gap = (g.double() - wide[name]).norm() / wide[name].norm()
        assert float(gap) < 0.15, name


def test_processes(tmp_path):
    """As alone in a distributed wrapper; shards are refused."""
    meet = f"file://{tmp_path}/meet"
    dist.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    try:
        model, ids = dpformer(), sequences()
        alone = copy.deepcopy(model)
        track(alone, some_shares())
        tracker = track(DPDDP(model), some_shares())
        assert torch.equal(model(ids), alone(ids))
        tracker.detach()
        fully_shard(model)
        with pytest.raises(Refused, match="sharded by fully_shard"):
            track(model)
    finally:
        dist.destroy_process_group()


# Copies and state


def test_state_dict(tmp_path):
    model, ids = dpformer(), sequences()
    names = set(model.state_dict())
    tracker = track(model, some_shares(), where="scores")
    state = model.state_dict()
    added = {"re_attention.noise", "re_attention.shares.embedding.weight"}
    assert set(state) - names == added and not list(model.buffers())
    torch.save(state, tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)

    # to evaluate: no optimizer, the noise is that of the state
    other = dpformer()
    opacus_ext.track_errors(other, where="scores")
    with pytest.raises(RuntimeError, match="No noise is known"):
        other(ids)
    other.load_state_dict(state)
    assert torch.equal(other(ids), model(ids))
    errors = tracker_of(other).errors()
    assert torch.equal(errors["embedding.weight"], tracker.errors()["embedding.weight"])
    other.requires_grad_(False)  # then it is not known what was trained
    with pytest.raises(Refused, match="parameters are all frozen"):
        other(ids)
    other.requires_grad_(True)
    # to train: shares come from the state, the noise from the optimizer
    third = dpformer()
    track(third, where="scores")
    third.load_state_dict(other.state_dict())
    assert torch.equal(third(ids), model(ids))

    # an untracked model is another function
    with pytest.raises(RuntimeError, match="re_attention.noise"):
        dpformer().load_state_dict(state)
    with pytest.raises(Refused, match="save its state_dict"):
        torch.save(third, tmp_path / "model.pt")
    # what was saved untracked can be loaded by who tracks
    tracker.detach()
    third.load_state_dict(model.state_dict())


@every_mode
def test_resume(mode, tmp_path):
    """Training goes on from a checkpoint as if it had not been interrupted."""

    def training(seeds, path=None):
        model = dpformer()
        settings = dict(batch_size=4, dataset=TensorDataset(sequences(8)))
        private = make_private(model, mode, **settings, noise_multiplier=0.5)
        parts = dict(module=private.module, optimizer=private.optimizer)
        opacus_ext.track_errors(*parts.values(), some_shares())
        if path:
            nn.init.zeros_(model.position.weight)  # what is loaded replaces it
            private.engine.load_checkpoint(path=path, repeat_noise=True, **parts)
        for seed in seeds:
            torch.manual_seed(seed)
            private.step(sequences(4), square_loss)
        return private.engine, parts, model

    *_, model = training(range(4))
    engine, parts, _ = training(range(2))
    engine.save_checkpoint(path=tmp_path / "c.pt", **parts)
    *_, resumed = training(range(2, 4), tmp_path / "c.pt")
    for (name, p), q in zip(model.named_parameters(), resumed.parameters()):
        assert torch.equal(p, q), name


# When it acts


def test_evaluation():
    model, ids = dpformer(), sequences()
    before = [set(vars(part)) for part in model.modules()]
    plain = model(ids)
    tracker = track(model, some_shares())
    out, again = model(ids), copy.deepcopy(model)
    assert torch.equal(model.head(model.encode(ids)), out)
    assert ModuleValidator.validate(model, strict=True) == []
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(model.eval()(ids), out, rtol=1e-12, atol=0)
    tracker.evaluate = False
    assert torch.equal(model(ids), plain)
    assert torch.equal(again(ids), out) and not torch.equal(out, plain)
    # A copy follows the tracker, and stays as it is where the model is detached.
    tracker.enabled = False
    assert torch.equal(again(ids), plain)
    tracker.enabled = True
    tracker.detach()
    assert torch.equal(model.train()(ids), plain) and torch.equal(again(ids), out)
    assert [set(vars(part)) for part in model.modules()] == before


@every_mode
def test_noise_is_followed(mode):
    """A schedule of the noise multiplier or the clipping norm; none is none."""
    model, ids = dpformer(), sequences()
    plain = model(ids).detach()
    private = make_private(model, mode, batch_size=4, noise_multiplier=1.0)
    tracker = opacus_ext.track_errors(private.module, private.optimizer, EMBEDDED)
    assert tracker_of(private.module) is tracker_of(model) is tracker
    for noise in (1.0, 0.5, 0.0):
        private.optimizer.noise_multiplier = noise
        error = float(tracker.errors()["position.weight"])
        assert error == noise / 4 == float(model.state_dict()["re_attention.noise"])
        gap = float((model(ids) - plain).detach().abs().max())
        assert gap > 1e-6 if noise else gap < 1e-12
    private.optimizer.noise_multiplier = 1.0
    model.requires_grad_(False)  # what is frozen later errs no more
    assert not any(e.any() for e in tracker.errors().values())
    torch.testing.assert_close(model(ids), plain, rtol=1e-12, atol=1e-12)


def test_other_parameters():
    """Compiled, and with parameters from elsewhere, it is the same function."""
    model, ids = dpformer(), sequences()
    compiled = torch.compile(model, backend="eager")
    track(compiled, EMBEDDED)
    out = model(ids)
    detached = {name: p.detach() for name, p in model.named_parameters()}
    assert torch.equal(functional_call(model, detached, (ids,)), out)
    assert torch.equal(compiled(ids), out)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
    assert torch.equal(model(ids), out)


# Refusals


BAD = [
    ({"where": "keys"}, "where must be one of"),
    ({"cap": 0.0}, "cap must be positive or None"),
    ({"shares": torch.ones(7)}, "7 shares belong to one embedding"),
    ({"model": nn.Sequential()}, "Sequential: it does not state how errors pass it"),
]


@pytest.mark.parametrize("options, message", BAD)
def test_bad_arguments(options, message):
    model = options.get("model", dpformer())
    with pytest.raises(ValueError, match=message):
        track(**{"model": model, **options})
    assert tracker_of(model) is None  # it can be tried again


class Forgets(Propagating):
    """Its method is not what it runs, or loses the errors."""

    def __init__(self, uses):
        super().__init__()
        self.layer, self.uses = SelfAttention(8), uses

    def propagate(self, x):
        return Uncertain(x.through(self.layer).value)

    def forward(self, x):
        return super().forward(x) if self.uses else x


@pytest.mark.parametrize(
    "uses, said",
    [(True, "propagate must return an Uncertain"), (False, "does not use its method")],
)
def test_no_pass_without_correction(uses, said):
    model, x = Forgets(uses), torch.randn(1, 3, 8)
    plain = model(x)
    tracker = track(model)
    with pytest.raises(Refused, match=said):
        model(x)
    tracker.detach()
    assert torch.equal(model(x), plain)


def test_refused():
    model, x = Residual(SelfAttention(8)), torch.randn(1, 3, 8)
    plain = model.layer(x)
    with pytest.raises(Refused, match="SGD adds no noise"):
        opacus_ext.track_errors(model, torch.optim.SGD(model.parameters(), lr=0.1))
    tracker = track(model)
    with pytest.raises(ValueError, match="tracked already"):
        track(model)
    # By itself a part does not know the errors.
    with pytest.raises(Refused, match="SelfAttention: it is called outside"):
        model.layer(x)
    tracker.enabled = False
    assert torch.equal(model.layer(x), plain)
    tracker.detach()
    model.layer = nn.Linear(8, 8)
    track(model)
    with pytest.raises(Refused, match="Residual: .* no attention that is corrected"):
        model(x)
