"""What a step asks of a device: the oracle is a count by hand of a few ops."""

import ctypes
import importlib
import json
import math
import shutil
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import opacus_ext
from opacus_ext.grad_sample import factors
from tests.common import make_private, net, square_loss

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def cost(monkeypatch):
    """The script as a module; it unregisters opacus_ext for others' modes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("device_cost")
    opacus_ext.register()


def ones(*shape, kind=torch.float32):
    return torch.ones(*shape, dtype=kind)


def test_linear_layer_is_one_op(cost):
    """y = x W^T + b: 2 x 3 numbers of 4 products; W, x, b are read and y is written."""
    layer, x = nn.Linear(4, 3), ones(2, 4)
    with torch.no_grad(), cost.Count() as count:
        layer(x)
    assert count.launches == [cost.Launch("addmm", 2 * 6 * 4, 4 * (12 + 8 + 3 + 6))]
    assert count.peak == 4 * 6 and not count.syncs


def test_backward_pass_is_counted(cost):
    layer, x = nn.Linear(4, 3, bias=False), ones(2, 4)
    with cost.Count() as count:
        layer(x).sum().backward()
    assert [each.op for each in count.launches] == ["mm", "sum", "ones_like", "mm"]
    # The gradient [3, 4] is one number expanded to [2, 3], times x [2, 4].
    assert count.launches[-1].flops == 2 * 12 * 2
    assert count.launches[-1].moved == 4 * (1 + 8 + 12)


ids, row, rows = torch.tensor([0, 2, 2]), ones(1, 8), ones(3, 8)
BYTES = {  # an op on x = ones(10, 8), and the bytes it moves
    "view": (lambda x: x.t()[1:].unsqueeze(0), 0),
    "reshaped": (lambda x: x.reshape(80).detach(), 0),
    "allocation": (lambda x: torch.empty_like(x), 0),
    "nothing": (lambda x: x[:0] * 2, 0),
    "in place": (lambda x: x.mul_(2), 2 * 320),
    "overwritten": (lambda x: x.zero_(), 320),
    "copy": (lambda x: x.copy_(row), 320 + 32),
    "shape only": (lambda x: torch.zeros_like(x), 320),
    "twice the same": (lambda x: x * x, 2 * 320),
    "expanded": (lambda x: x + row.expand(10, 8), 320 + 32 + 320),
    "out": (lambda x: torch.exp(x, out=torch.empty(10, 8)), 2 * 320),
    "several": (lambda x: torch._foreach_mul([x, row], 2.0), 2 * (320 + 32)),
    "gather": (lambda x: nn.functional.embedding(ids, x), 24 + 2 * 96),
    "scatter": (lambda x: x.index_add_(0, ids, rows), 24 + 96 + 2 * 96),
}


def test_bytes(cost):
    """Each of these is one kernel, or none."""
    x, found = ones(10, 8), {}
    with cost.Count() as count:
        for name, (op, _) in BYTES.items():
            before = len(count.launches)
            op(x)
            found[name] = [each.moved for each in count.launches[before:]]
    assert found == {name: [size] if size else [] for name, (_, size) in BYTES.items()}


twos = torch.tensor([1, 2])
SYNCS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "repeat_interleave": lambda x: twos.repeat_interleave(twos),
}
NO_SYNCS = {
    "indices": lambda x: x[twos],
    "fill": lambda x: x.masked_fill_(x > 0, 0.0),
    "known size": lambda x: twos.repeat_interleave(twos, output_size=3),
    "ops": lambda x: (x * 2).sum(),
}


def test_syncs(cost):
    x, found = ones(4), {}
    with cost.Count() as count:
        for name, op in (SYNCS | NO_SYNCS).items():
            before = sum(count.syncs.values())
            op(x)
            found[name] = sum(count.syncs.values()) - before
    assert found == dict.fromkeys(SYNCS, 1) | dict.fromkeys(NO_SYNCS, 0)
    total = sum(count.syncs.values())
    x.tolist()  # as it was before
    assert sum(count.syncs.values()) == total


def test_peak_is_of_what_is_alive_at_once(cost):
    x = ones(256)
    with cost.Count() as count:
        y = x * 2
        del x  # of before the step
        z = y * 2
        view = y[1:]
        del y
        z = z * 2
        del view
        assert count.bytes == z.nbytes == 1024
    assert count.peak == 3 * 1024


def test_roofline(cost):
    gpu = cost.Gpu(flops=1e12, bandwidth=1e9, launch=1e-3)
    assert gpu == cost.Gpu.parse("1e12,1e9,1e-3")
    assert cost.Gpu.parse("A100") is cost.GPUS["A100"]
    assert gpu.seconds(5e12, 1e9) == 5  # bound by FLOPs
    assert gpu.seconds(1e12, 3e9) == 3  # by bytes
    assert gpu.seconds(1, 1) == 1e-3  # by the launch
    count = cost.Count()
    count.launches = [cost.Launch("mm", 5e12, 1e9), cost.Launch("add", 0, 8)]
    assert count.seconds(gpu) == 5 + 1e-3


KERNEL = """
extern "C"  void  kernel(float* in_out_ptr0,
                       const int64_t* in_ptr0,
                       const float* in_ptr1,
                       float* out_ptr0)
{
    auto tmp0 = in_ptr0[static_cast<int64_t>(x0)];
    auto tmp4 = Vectorized<float>::loadu(in_ptr1 + static_cast<int64_t>(x1 + 8L*tmp0));
    in_out_ptr0[static_cast<int64_t>(x0)] = tmp4;
    out_ptr0[static_cast<int64_t>(x0)] = tmp4;
}
"""


def test_generated_kernel(cost):
    """2 ids choose rows of a [10, 8] table; a buffer is read and written in place."""
    args = ones(2, 8), ones(2, kind=torch.int64), ones(10, 8), ones(2, 8)
    count = cost.Count()
    count.kernel(*cost.Signature.parse(KERNEL).accesses(args))
    reads, writes = 64 + 16 + 64, 64 + 64
    assert count.launches == [cost.Launch("generated", 0, reads + writes)]
    with pytest.raises(cost.NotCounted):
        cost.Signature.parse("void other()")


def test_table(cost, capsys, monkeypatch, tmp_path):
    path = tmp_path / "cost.json"
    tiny = "--shapes 1,8,16,4,2 --tied --compiled --modes ghost_bk --gpu 1e9,1e9,0"
    monkeypatch.setattr(sys, "argv", ["", *tiny.split(), "--json", str(path)])
    cost.main()
    text = capsys.readouterr().out
    assert "counted, not timed" in text and "Counted, not timed" in text
    assert "| non-private | " in text and "| ghost_bk | " in text
    plain, ghost_bk = json.loads(path.read_text())["counted"]
    assert plain["ops_ratio"] == plain["roofline_ms_ratio"] == 1
    assert plain["syncs"] == 0 and plain["by_op"]["addmm"] == 6
    assert ghost_bk["gflop_ratio"] >= 1 and ghost_bk["peak_mib"] > 0


def test_a_step_starts_few_ops_and_moves_few_bytes(cost):
    """A Gram matrix of backprops and one of inputs for each of 13 linear layers."""
    shape = cost.Shape.parse("2,256,100,64,8")
    plain, private = (
        cost.as_row(cost.count_mode(name, shape, False), cost.GPUS["H100"], None)
        for name in ("non-private", "ghost_bk")
    )
    ops = private["by_op"]
    assert ops["bmm"] == 2 * (2 * 6 + 1) + 2
    assert private["ops"] < 1.6 * plain["ops"] and private["mb"] < 1.45 * plain["mb"]


@pytest.fixture
def wide_sums(monkeypatch):
    """Products of bfloat16 with float32 sums are ops of a CPU, as they are of a GPU."""

    def product(left, right, out_dtype):
        return torch.bmm(left.to(out_dtype), right.to(out_dtype))

    library = torch.library.Library("aten", "IMPL")
    library.impl("bmm.dtype", product, "CPU")
    monkeypatch.setattr(factors.rows, "_WIDE_SUMS", {"cpu"})
    monkeypatch.setattr(factors.rows, "_MOST", math.inf)  # only CPUs cut long rows
    yield
    library._destroy()


@pytest.mark.parametrize(
    "mode, copies, moved", [("ghost_bk", 0.9, 1.45), ("ghost", 1.3, 1.9)]
)
def test_a_step_in_bfloat16_copies_little(
    mode, copies, moved, cost, wide_sums, monkeypatch
):
    """Autocast casts as much in the plain step as in a private one."""

    class Cast(cost.step_time.LanguageModel):
        def forward(self, ids):
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(ids).float()

    monkeypatch.setattr(cost.step_time, "LanguageModel", Cast)
    shape = cost.Shape.parse("1,256,4096,192,4")
    found = {}
    for name in ("non-private", mode):
        launches = cost.count_mode(name, shape, False).launches
        cast = sum(x.moved for x in launches if x.op in ("_to_copy", "copy_"))
        found[name] = cast, sum(x.moved for x in launches)
    (cast, all_moved), (plain_cast, plain_moved) = found[mode], found["non-private"]
    assert cast < copies * plain_cast and all_moved < moved * plain_moved


def test_one_wait(cost):
    """A step waits for its norms, not for each buffer or each write in place."""

    def then(m, x):
        places = torch.zeros(4)
        places += m.places
        return m.layer(x + places)

    opacus_ext.register()
    model = net(then, layer=(4, 2))()
    model.register_buffer("places", torch.arange(4.0))
    private = make_private(model, "ghost_bk", batch_size=3)
    for _ in range(5):
        with cost.Count() as count:
            private.step(torch.randn(3, 5, 4), square_loss)
    assert count.syncs == {"_local_scalar_dense": 1}


def test_counting_leaves_a_step_as_it_is(cost, monkeypatch):
    """The same noise and the same update with and without it."""
    models = []

    class Kept(cost.step_time.LanguageModel):
        def __init__(self, *args):
            super().__init__(*args)
            models.append(self)

    monkeypatch.setattr(cost.step_time, "LanguageModel", Kept)
    shape = cost.Shape.parse("1,8,16,4,2")
    for context in (nullcontext(), cost.Count()):
        step = cost.step_time.build("ghost_bk", shape, False, "cpu")
        torch.manual_seed(1)
        with context:
            step()
    torch.testing.assert_close(*(m.state_dict() for m in models), rtol=0, atol=0)


def test_what_cannot_be_seen_is_not_counted(cost, capsys, monkeypatch):
    """Inductor changes: the row says so, and the others are printed."""
    from torch._inductor.async_compile import AsyncCompile

    monkeypatch.delattr(AsyncCompile, "cpp_pybinding")
    shape = cost.Shape.parse("1,8,16,4,2")
    names = ["non-private", "non-private, compiled"]
    rows = cost.count_modes(shape, False, names, cost.GPUS["H100"])
    assert rows[0]["ops"] and rows[1]["refused"].startswith("not counted")
    assert "| non-private, compiled | not counted" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:dynamo_pgo")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled(cost):
    """A product, and all that follows it as one kernel, which reads h and writes y."""

    def forward(x, w):
        return torch.exp(torch.tanh(x @ w) * 2) + 1

    torch.compiler.reset()
    x, w = ones(8, 4), ones(4, 16)
    with cost.generated_kernels_counted():
        fused = torch.compile(forward)
        count = cost.count_step(lambda: fused(x, w))
    torch.testing.assert_close(fused(x, w), forward(x, w))
    product, rest = count.launches
    assert product == cost.Launch("mm", 2 * 8 * 16 * 4, 4 * (32 + 64 + 128))
    assert rest == cost.Launch("generated", 0, 4 * 2 * 128)
    assert count.peak == 4 * 128  # in place


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_a_compiled_step_starts_few_kernels(cost, monkeypatch):
    """
    Also if Inductor has compiled something before the private model. The kernels are
    not compiled, which takes a minute, and write zeros.
    """
    from torch._inductor.async_compile import AsyncCompile

    def load(self, types, source):
        names = cost.Signature.parse(source).names

        def kernel(*args):
            for name, x in zip(names, args):
                if name.startswith("out_ptr"):
                    ctypes.memset(x.data_ptr(), 0, x.nbytes)

        return kernel

    monkeypatch.setattr(AsyncCompile, "cpp_pybinding", load)
    torch.compiler.reset()
    shape = cost.Shape.parse("1,16,20,40,4")
    plain, private = (
        cost.count_mode(f"{name}, compiled", shape, False)
        for name in ("non-private", "ghost_bk")
    )
    assert len(private.launches) < 0.94 * len(plain.launches)
    assert not any(x.op == "attach" for x in private.launches)
