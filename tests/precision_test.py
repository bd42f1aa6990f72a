"""Half precision, loss scaling, gradients that are not finite, and recomputation.

In half precision the oracle computes in it too, and the two are as near as it is.
"""

import contextlib
import copy
import math
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from opacus_ext import clipped_grads, workspace
from opacus_ext.grad_sample.factors import grad_sample, rows
from tests import common
from tests.common import (
    assert_same,
    clipped_sum,
    every_mode,
    half_clipped,
    make_private,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    trainable,
)


@pytest.mark.parametrize("amp", [False, True], ids=["bf16", "amp"])
@pytest.mark.parametrize(
    "mode, size",
    [("ghost_bk", 32), ("ghost_bk", 256), ("ghost", 32), ("hooks", 256)],
)
def test_sums_are_not_rounded_before_the_noise(mode, amp, size):
    """One record of many would move what is rounded by 4 C, or by 1.2 C in one sum."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    batch = torch.randn(256, 64) + 3 * torch.randn(64)
    if not amp:
        model, batch = model.bfloat16(), batch.bfloat16()

    def loss(model, part):
        with torch.autocast("cpu", torch.bfloat16, enabled=amp):
            return square_loss(model, part)

    def released(batch):
        private = make_private(copy.deepcopy(model), mode, batch_size=1)
        parts = batch.split(size)
        for part in parts:
            private.optimizer.signal_skip_step(part is not parts[-1])
            private.step(part, loss)
        return [p.summed_grad.flatten() for p in private.optimizer.params]

    change = torch.cat(released(batch)) - torch.cat(released(batch[1:]))
    # Opacus's mean over samples is rounded in another way for another number of them.
    assert change.norm() < (1.06 if mode == "hooks" else 1.0001)


ghost_modes = pytest.mark.parametrize("mode", ["ghost", "ghost_bk", "scan"])
HALVES = [torch.bfloat16, torch.float16]
half = pytest.mark.parametrize("dtype", HALVES, ids=["bf16", "fp16"])


def forward(m, x):
    """A norm, a bare parameter, and a layer that is used twice."""
    return m.last(m.twice(torch.tanh(m.twice(m.norm(m.first(x))))) * m.scale)


def net(dtype=torch.float64):
    torch.manual_seed(1)
    parts = dict(first=(4, 8), norm=lambda: nn.LayerNorm(8), twice=(8, 8), last=(8, 3))
    return common.net(forward, **parts, scale=lambda: torch.ones(8))().to(dtype)


def batch_of(dtype=torch.float64, B=4, T=5):
    torch.manual_seed(2)
    return torch.randn(B, T, 4).to(dtype)


@contextlib.contextmanager
def unchanged(model):
    before = copy.deepcopy(model.state_dict())
    yield
    for name, x in model.state_dict().items():
        assert torch.equal(x, before[name])


def wide_loss(model, batch):
    return squares(model(batch).float())


# -- half precision ----------------------------------------------------------------


@every_mode
@half
@pytest.mark.parametrize("autocast", [False, True])
def test_half(mode, dtype, autocast):
    model = net(torch.float32 if autocast else dtype)
    batch = batch_of(torch.float32 if autocast else dtype)

    def loss_fn(model, batch):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            return wide_loss(model, batch)

    grads = oracle(model, batch, loss_fn)
    c = half_clipped({n: g.float() for n, g in grads.items()})
    got = run_mode(mode, True, model, batch, loss_fn, "flat", c)
    expected = clipped_sum({n: g.double() for n, g in grads.items()}, "flat", c)
    assert_same({n: g.double() for n, g in got.items()}, expected, 0.1, mode)


# -- loss scaling ------------------------------------------------------------------


def scaled_sums(mode, model, batch, loss_fn, scale, **kwargs):
    """What ``backward(scale)`` leaves in ``p.grad``, and the norms."""
    model = copy.deepcopy(model)
    private = make_private(model, mode, batch_size=len(batch), **kwargs)
    losses = loss_fn(private.module, batch)
    private.criterion(losses, None).backward(scale=scale)
    sums = {n: p.grad.clone() for n, p in trainable(model).items()}
    return sums, private.module.get_norm_sample()


@ghost_modes
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_scale_is_undone(mode, clipping):
    model, batch = net(), batch_of()
    count = len(trainable(model))
    c = [0.5] * count if clipping == "per_layer" else 0.5
    options = dict(clipping=clipping, max_grad_norm=c)
    plain = scaled_sums(mode, model, batch, square_loss, 1.0, **options)
    scaled = scaled_sums(mode, model, batch, square_loss, 2.0**10, **options)
    assert_same(scaled[0], plain[0], 1e-12)
    torch.testing.assert_close(scaled[1], plain[1])


@ghost_modes
@pytest.mark.parametrize("reentrant", [True, False])
def test_scale_of_checkpoints(mode, reentrant):
    model, batch = recomputes(reentrant).double().train(), batch_of()
    plain, _ = scaled_sums(mode, model, batch, square_loss, 1.0)
    assert_same(scaled_sums(mode, model, batch, square_loss, 64.0)[0], plain, 1e-12)


@ghost_modes
def test_small_gradients_in_float16(mode):
    """Lost without a scale, and with one as near to float32's as float16 is."""
    model, batch = net(torch.float32), batch_of(torch.float32)
    loss_fn = lambda model, x: 1e-8 * wide_loss(model, x)  # noqa: E731
    expected = clipped_sum(oracle(model, batch, loss_fn), "flat", 1.0)
    model, batch = model.half(), batch.half()
    lost, _ = scaled_sums(mode, model, batch, loss_fn, 1.0)
    assert not any(g.any() for g in lost.values())
    # p.grad has the parameter's type, in which they vanish: clipped to 1 they do not.
    _, norms = scaled_sums(mode, model, batch, loss_fn, 2.0**22)
    grads = oracle(net(torch.float32), batch.float(), loss_fn)
    torch.testing.assert_close(norms, norms_of(grads).to(norms), rtol=0.02, atol=0)
    c = 100.0
    options = dict(clipping="automatic", max_grad_norm=c)
    got, _ = scaled_sums(mode, model, batch, loss_fn, 2.0**22, **options)
    factors = c / (norms_of(grads) + 0.01)
    expected = {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}
    assert_same({n: g.float() for n, g in got.items()}, expected, 0.05)


@ghost_modes
@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
def test_scale_must_be_positive(mode, scale):
    with pytest.raises(ValueError, match="scale must be a positive number"):
        scaled_sums(mode, net(), batch_of(), square_loss, scale)


@every_mode
def test_grad_scaler(mode):
    """Refused before anything is changed; one that is switched off is let through."""
    model, batch = net(torch.float32), batch_of(torch.float32)
    private = make_private(model, mode, batch_size=4)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    losses = square_loss(private.module, batch)
    given = mode != "hooks"
    loss = private.criterion(losses, None) if given else losses.mean()
    scaler.scale(loss).backward()
    with unchanged(model), pytest.raises(RuntimeError, match="GradScaler.*bfloat16"):
        scaler.step(private.optimizer)
    private.optimizer.zero_grad()
    private.backward(batch, square_loss)
    torch.amp.GradScaler("cpu", enabled=False).step(private.optimizer)


# -- gradients that are not finite -------------------------------------------------


def poisoned(model, batch):
    """One sample's gradient would poison all parameters."""
    x, poison = batch
    return square_loss(model, x) * (1 + poison)


def poison(bad):
    return batch_of(), torch.tensor([0.0, 0.0, bad, 0.0])


@every_mode
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clipping", ["flat", "automatic", "per_layer"])
def test_not_finite(mode, bad, clipping):
    """It adds nothing."""
    model = net()
    c = [1.0] * len(trainable(model)) if clipping == "per_layer" else 1.0
    grads = oracle(model, poison(0.0), poisoned)
    good = {n: g[[0, 1, 3]] for n, g in grads.items()}
    given = dict(clipping=clipping, max_grad_norm=c)
    private = make_private(model, mode, batch_size=4, **given)
    with pytest.warns(RuntimeWarning, match="not finite"):
        private.step(poison(bad), poisoned)
    got = {n: p.grad * 4 for n, p in trainable(model).items()}
    assert_same(got, clipped_sum(good, clipping, c))


@every_mode
def test_not_finite_may_raise(mode):
    """As an exception that depends on one person's data: nothing is changed."""
    model = net()
    private = make_private(model, mode, batch_size=4, on_nonfinite="raise")
    with unchanged(model), pytest.raises(RuntimeError, match="sample 2 .* not finite"):
        private.step(poison(math.inf), poisoned)
    private.step(poison(0.0), poisoned)
    assert all(x.isfinite().all() for x in model.state_dict().values())


# -- activation checkpointing ------------------------------------------------------


def recomputes(reentrant, dropout=0.0, width=16):
    """Blocks under torch.utils.checkpoint, with a frozen part and dropout."""
    torch.manual_seed(3)

    def then(m, x):
        x = m.first(x)
        for block in m.blocks:
            again = (checkpoint, dict(use_reentrant=reentrant))
            call, given = again if reentrant is not None else (nn.Module.__call__, {})
            x = x + call(block, x, **given)
        return m.last(x)

    def block():
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        return nn.Sequential(up, nn.GELU(), nn.Dropout(dropout), down)

    blocks = nn.ModuleList(block() for _ in range(4))
    blocks[1].requires_grad_(False)
    return common.Net(
        then, first=nn.Linear(4, width), blocks=blocks, last=nn.Linear(width, 3)
    )


@every_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_with_dropout(mode, reentrant):
    """The recomputation draws what was drawn; so the sum is autograd's."""
    model, batch = recomputes(reentrant, dropout=0.5).double().train(), batch_of()
    batch = batch[:1]  # more of them run, and draw, one by one
    alone = copy.deepcopy(model)
    torch.manual_seed(5)
    torch.randint(2**63 - 1, ())  # the seed of the noise
    square_loss(alone, batch).sum().backward()
    expected = {n: p.grad for n, p in trainable(alone).items()}
    torch.manual_seed(5)
    got = run_mode(mode, True, model, batch, square_loss, "flat", 1e9)
    assert_same(got, expected, 1e-8)


@contextlib.contextmanager
def kept_bytes(model):
    """How many bytes of activations a forward pass keeps for the backward."""
    kept, params = {}, {p.data_ptr() for p in model.parameters()}

    def pack(x):
        if x.data_ptr() not in params:
            kept[x.data_ptr()] = x.untyped_storage().nbytes()
        return x

    found = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield found
    found.append(sum(kept.values()))


@every_mode
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_keep_their_saving(mode, reentrant):
    size = {}
    for kind in (None, reentrant):
        model, batch = recomputes(kind).train(), batch_of(torch.float32, 8, 16)
        private = make_private(model, mode, batch_size=8)
        for _ in range(2):  # the first ones are run again, to look at layouts
            private.step(batch, square_loss)
        with kept_bytes(model) as found:
            out = private.module(batch)
        size[kind] = found[0]
        del out
    assert size[reentrant] < 0.5 * size[None]


# -- products on a GPU -----------------------------------------------------------------


@pytest.fixture
def wide_sums(monkeypatch):
    """Multiplies bfloat16 with float32 sums on a CPU, as GPUs do."""
    calls, bmm = [], torch.bmm

    def wide(left, right, *, out_dtype=None):
        if out_dtype is None:
            return bmm(left, right)
        assert left.dtype == right.dtype == torch.bfloat16
        calls.append(torch.get_float32_matmul_precision())
        with _disable_current_modes():  # which would see the copies
            return bmm(left.to(out_dtype), right.to(out_dtype))

    monkeypatch.setattr(rows, "_WIDE_SUMS", {"cpu"})
    monkeypatch.setattr(torch, "bmm", wide)
    return calls


def loss_of(weight):
    return lambda x: (x[0] @ weight).float().tanh().square().sum()


@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("num_bytes", [100, 2**20])  # the latter keeps gradients
def test_bfloat16_products_are_exact(num_bytes, T, cancels, wide_sums):
    """A released gradient is the sample's, and never longer than the bound."""
    torch.manual_seed(T)
    weight = (torch.randn(6, 9) / 3).bfloat16().requires_grad_()
    x = torch.randn(8, 1, T, 6).bfloat16()
    if cancels:  # large rows that cancel but for a small rest
        x = torch.cat([1e3 * x, -1e3 * x, x], dim=2)
    bound = 1e-2
    for row in x:
        batch = row.expand(2, *row.shape)
        with workspace(num_bytes):
            found = clipped_grads(loss_of(weight), {"w": weight}, batch, bound)
        y = (row[0] @ weight.detach()).requires_grad_()
        (backprops,) = torch.autograd.grad(y.float().tanh().square().sum(), y)
        left, right = row[0].double(), backprops.double()
        grad = left.mT @ right
        size = (left.norm(dim=1) * right.norm(dim=1)).sum()  # what float32 sums add up
        norm = float(found.norms[0])
        assert abs(norm - grad.norm()) <= 1e-6 * grad.norm() + 1e-3 * size
        factor = min(1.0, bound / (norm + 1e-6))
        total = found.sums["w"].double() / 2
        own = float((total * grad).sum() / grad.square().sum())
        slack = 1e-6 * factor * float(size / grad.norm())
        assert factor * (1 - 2**-7) - slack <= own <= factor + slack
        assert (total - own * grad).norm() <= slack * grad.norm()
    assert {*wide_sums} == {"highest"}


def random_rows(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("num_bytes", [100, 2**12, 2**26])
@pytest.mark.parametrize("widths", [(6, 29), (29, 6), (16, 8), (13, 13)])
def test_rows_that_are_not_aligned(widths, num_bytes, wide_sums, monkeypatch):
    """Blocks of columns, of which the last is padded: Gram matrices and sums."""
    monkeypatch.setattr(rows, "_WIDE_ROWS", 1)
    torch.manual_seed(0)
    left, right = (random_rows(3, 128, width) for width in widths)
    weights = rows.rounded_down(torch.rand(3)).bfloat16()
    term = grad_sample.OuterProducts(left, right)
    with torch.no_grad(), workspace(num_bytes):
        total = term.weighted_sum(weights, torch.float32)
        grams = [rows._gram(x, x, torch.float32) for x in (left, right)]
        other = random_rows(3, 200, widths[0])
        pair = rows._gram(left, other, torch.float32)
    exact = torch.einsum("b,bti,btj->ij", *(x.double() for x in (weights, left, right)))
    torch.testing.assert_close(total.double(), exact, rtol=1e-5, atol=1e-4)
    assert total.is_contiguous()
    pairs = (left, left), (right, right), (left, other)
    for gram, (x, y) in zip([*grams, pair], pairs):
        exact = x.double() @ y.double().mT
        torch.testing.assert_close(gram.double(), exact, rtol=1e-5, atol=1e-4)


def test_blocks_are_aligned():
    """Rows start at multiples of 16 bytes; aligned and narrow ones are not copied."""
    found = {}
    for width in (50, 2**10 + 3, 2**10 + 8):
        x = random_rows(2, 4, width)
        with torch.no_grad(), workspace(2**10):
            blocks = [(c, b) for c, (b,) in rows.column_blocks(x)]
        whole = torch.cat([block[..., : c.stop - c.start] for c, block in blocks], 2)
        assert torch.equal(whole, x) and not blocks[-1][1][..., width:].any()
        assert len(blocks) == 1 or all(b.stride(1) % 8 == 0 for _, b in blocks)
        found[width] = len(blocks), blocks[0][1] is x
    assert found == {50: (1, True), 1027: (17, False), 1032: (1, True)}
    with torch.no_grad(), workspace(2**12):  # 128 bytes are made of each column
        blocks = [rows for _, (rows,) in rows.column_blocks(x, made=128)]
    assert len(blocks) == 33 and all(block._base is x for block in blocks)


class NoCasts(TorchDispatchMode):
    """Leaves casts to bfloat16 out, as a compiler does inside a kernel."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if (kwargs or {}).get("dtype") == torch.bfloat16:
            return args[0]
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("compiled", [False, True])
def test_weighted_rows_are_exact(compiled, monkeypatch):
    torch.manual_seed(0)
    x, weights = random_rows(3, 5, 7), random_rows(3).abs()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiled)
    with torch.no_grad(), NoCasts() if compiled else contextlib.nullcontext():
        both = rows.weighted_halves(x, weights)
    upper, excess = both.double().chunk(2, dim=2)
    assert torch.equal(both.bfloat16().double(), both.double()) and excess.any()
    assert torch.equal(upper - excess, x.double() * weights.double()[:, None, None])


@pytest.mark.parametrize("cast", [False, True], ids=["bf16", "amp"])
def test_rows_are_not_copied_to_be_summed(cast, wide_sums):
    """A layer's factors as its products take them: no copies in a wider type."""
    copies = Counter()

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            if func is torch.ops.aten._to_copy.default and args[0].numel() >= size:
                copies[f"{args[0].dtype} {out.dtype}"] += 1
            return out

    torch.manual_seed(0)
    model, batch = nn.Linear(32, 48), torch.randn(8, 40, 32)
    size = batch.numel()
    if not cast:
        model, batch = model.bfloat16(), batch.bfloat16()

    def loss(model, batch):
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return model(batch).sum((1, 2))

    private = make_private(model, "ghost_bk", batch_size=8)
    for _ in range(4):  # of which some compare gradients
        private.step(batch, loss)
    with Copies():
        private.step(batch, loss)
    assert copies == ({"torch.float32 torch.bfloat16": 1} if cast else {})


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [100, 2**20])
def test_on_a_gpu(num_bytes):
    torch.manual_seed(0)
    weight = (torch.randn(64, 96) / 8).bfloat16().cuda().requires_grad_()
    for row in torch.randn(8, 1, 40, 64).bfloat16().cuda():
        with workspace(num_bytes):
            found = clipped_grads(loss_of(weight), {"w": weight}, row[None], 1e-2)
            pair = row.expand(2, *row.shape)
            several = clipped_grads(loss_of(weight), {"w": weight}, pair, 1e-2)
        (grad,) = torch.autograd.grad(loss_of(weight)(row), weight)
        assert torch.allclose(several.norms, grad.float().norm(), rtol=0.02)
        total = several.sums["w"] / 2
        assert 1e-2 * (1 - 2**-7 - 1e-4) <= float(total.norm()) <= 1e-2 * (1 + 1e-4)
        assert (
            torch.cosine_similarity(total.flatten(), found.sums["w"].flatten(), 0)
            > 0.99
        )


class Large(nn.Module):
    """One parameter of 8.4e6 entries; samples may have to run one by one."""

    def __init__(self, alone):
        super().__init__()
        self.weight, self.alone = nn.Parameter(torch.rand(2049, 4099)), alone

    def forward(self, x):
        if self.alone and x.sum() < 0:
            return x
        return (self.weight * x[:, :1, None]).tanh()


@pytest.mark.parametrize(
    "mode, alone", [("hooks", False), ("ghost_bk", False), ("ghost_bk", True)]
)
def test_norms_of_large_gradients(mode, alone):
    """torch's norm of so many float32 numbers is 0.03 % too small on a CPU."""
    torch.manual_seed(0)
    model, batch = Large(alone), torch.tensor([[0.5, 1.0], [1.5, 1.0]])
    scale = batch[:, :1].double()
    slopes = [1 - (model.weight.detach().double() * s).tanh() ** 2 for s in scale]
    expected = torch.stack([(s * g).norm() for s, g in zip(scale, slopes)])
    private = make_private(model, mode, batch_size=2)
    private.step(batch, lambda model, x: model(x).sum((1, 2)))
    norms = torch.cat([*private.optimizer.norms]).double()
    torch.testing.assert_close(norms, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("n", [4097, 70_001])
def test_norms_of_equal_entries(n):
    """Contiguous and strided rows, which torch's kernel adds one after another."""
    for c in (0.3, 0.7, 1.1):
        for x in (torch.full((2, n), c), torch.full((n, 2), c).mT, torch.zeros(0, n)):
            norms, expected = rows.sample_norms(x), x.double().norm(dim=1)
            torch.testing.assert_close(norms.double(), expected, rtol=7e-5, atol=0)


def by_legacy_name(value):
    torch.set_float32_matmul_precision({"tf32": "high", "ieee": "highest"}[value])


def of_one_backend(value):
    torch.backends.cuda.matmul.fp32_precision = value


@pytest.mark.parametrize("setting", [by_legacy_name, of_one_backend])
def test_norms_and_sums_are_not_rounded_to_tf32(setting, monkeypatch):
    matmul = torch.backends.cuda.matmul
    if not hasattr(matmul, "fp32_precision"):
        pytest.skip("torch < 2.9")
    weight = torch.randn(6, 9, requires_grad=True)
    seen, times = [], grad_sample.times

    def noted(left, right, dtype):
        seen.append(matmul.fp32_precision)
        return times(left, right, dtype)

    monkeypatch.setattr(rows, "times", noted)
    monkeypatch.setattr(grad_sample, "times", noted)
    step = partial(clipped_grads, loss_of(weight), {"w": weight}, clipping=1.0)
    batch = torch.randn(4, 1, 30, 6)
    setting("tf32")
    try:
        step(batch)
        assert matmul.fp32_precision == "tf32" and {*seen} == {"ieee"}
        with pytest.raises(Exception, match="would round norms and clipped sums"):
            torch.compile(step, backend="eager", fullgraph=True)(batch)
    finally:
        setting("ieee")
    assert torch.get_float32_matmul_precision() == "highest"
