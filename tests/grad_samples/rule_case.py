"""What every rule must fulfil: :class:`RuleTests`, over a table of :class:`RuleCase`.

A rule's test inherits :class:`RuleTests` and lists its layers. The oracle is each
sample alone through plain autograd.
"""

from dataclasses import dataclass
from typing import Any, Callable, Dict, Tuple

import pytest
import torch
from torch import nn
from torch.func import functional_call

from opacus_ext import clipped_grads, per_sample_grads, workspace
from opacus_ext.grad_sample.rules import RULES
from tests.common import (
    Net,
    check,
    clipped_sum,
    half_clipped,
    make_private,
    net,
    norms_of,
    oracle,
    run_mode,
    square_loss,
    squares,
    trainable,
)

# A rule gives factors, of which "ghost_bk" takes norms and sums, and "hooks" all of the
# gradients; factors_test.py shows that they agree, modes_test.py what modes are.
MODE = "ghost_bk", True
BOTH = MODE, ("hooks", False)


def exact(model, batch, loss_fn, modes=(MODE,), batched=None, grads=None, **kwargs):
    """Checks steps of some modes by one oracle; see :func:`tests.common.check`."""
    if grads is None:
        grads = oracle(model, batch, loss_fn, batched)
    for mode in modes:
        check(*mode, model, batch, loss_fn, batched, grads=grads, **kwargs)


def first_output(layer, *inputs):
    """The output, or the first of several."""
    output = layer(*inputs)
    return output[0] if isinstance(output, tuple) else output


@dataclass(frozen=True)
class RuleCase:
    """A layer and its batches.

    Attributes:
        make: makes the layer, of any type
        batch: ``(B, T)`` to an input ``[B, ...]`` of the layer, or a tuple of inputs
        call: ``(layer, *inputs)`` to an output ``[B, ...]``
        without: names of tests and uses that do not apply
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    call: Callable = first_output
    without: Tuple[str, ...] = ()

    def layer(self):
        """The layer in float64; no parameter keeps its zeros or ones."""
        layer = self.make().double()
        with torch.no_grad():
            for p in layer.parameters():
                p += 0.3 * torch.randn_like(p)
        return layer

    def inputs(self, B, T):
        """The inputs in float64, always a tuple."""
        batch = self.batch(B, T)
        batch = batch if isinstance(batch, tuple) else (batch,)
        return tuple(x.double() if x.is_floating_point() else x for x in batch)


def rows(*shape):
    """Inputs ``[B, T, *shape]``."""
    return lambda B, T: torch.randn(B, T, *shape)


def op(function, *shapes):
    """Makes a function of inputs and of parameters of some shapes."""
    return net(
        lambda m, *inputs: function(*inputs, *m.weights),
        weights=lambda: nn.ParameterList(torch.zeros(shape) for shape in shapes),
    )


def as_model(layer, call):
    return Net(lambda m, *inputs: call(m.layer, *inputs), layer=layer)


class Model(nn.Module):
    """A model that uses the layer of a case in some way, and has another unused one."""

    def __init__(self, case, use, table=()):
        super().__init__()
        self.layer, self.other, self.unused = case.layer(), case.layer(), case.layer()
        self.gain = nn.Parameter(torch.tensor(0.7).double())
        self.call, self.use = case.call, use
        for number, value in enumerate(table):
            self.register_buffer(f"table{number}", value)

    def forward(self, *inputs):
        return self.use(self, *inputs)

    def run(self, *inputs):
        return self.call(self.layer, *inputs)


def of_rows(output):
    """``[B, n]``, where a sample may be a number."""
    return output.reshape(len(output), -1)


def weighted(output):
    """A loss [B] whose gradient does not vanish with the output."""
    rows = of_rows(output)
    return (rows * torch.linspace(1, 2, rows.size(1)).to(rows)).sum(1)


def by(factor, inputs):
    return [x * factor if x.is_floating_point() else x for x in inputs]


def inside(model, *inputs):
    """Layers before and after it are trained."""
    return (model.gain * model.run(*by(model.gain, inputs))).tanh()


def twice(model, *inputs):
    """Two uses of one layer, of which the second sees the samples' rows turned."""
    turned = [x.flip(1) if x.dim() > 1 else x for x in by(0.5, inputs)]
    return torch.cat([of_rows(model.run(*each)) for each in (inputs, turned)], 1)


def flattened(model, *inputs):
    """Rows ``[B * k, ...]``, k of each sample."""
    rows = (x.flatten(0, 1) for x in by(model.gain, inputs))
    return model.run(*rows).unflatten(0, inputs[0].shape[:2])


def constant(model, *inputs):
    """A table without samples, ``[1, ...]``, goes through the layer as well."""
    table = [x for name, x in model.named_buffers() if name.startswith("table")]
    return model.run(*table) + model.call(model.other, *inputs)


def strided(model, *inputs):
    """Inputs that are not contiguous."""
    return model.run(*(torch.stack([x, x], -1)[..., 0] for x in inputs))


def cancelling(model, *inputs):
    """Two uses of one layer whose gradients add up to zero."""
    gone = model.run(*inputs) - model.run(*(x.clone() for x in inputs))
    other = model.call(model.other, *inputs)
    return torch.cat([of_rows(gone), of_rows(other)], 1)


USES = (inside, twice, constant, strided)

# -- parameters that are made of others ------------------------------------------------


def as_it_is(p):
    return p, lambda p: p


def transposed(p):
    """The parameter is the transpose of what the layer uses."""
    return (p.mT.contiguous(), lambda p: p.mT) if p.dim() > 1 else as_it_is(p)


def part(p):
    """What the layer uses is a slice of the parameter."""
    if not p.dim():
        return as_it_is(p)
    return torch.cat([p[:1], p, p[-1:], p[-1:]]), lambda p: p[1:-2]


def flat(p):
    shape = p.shape
    return p.flatten(), lambda p: p.view(shape)


def cast(p):
    """The parameter is in float32."""
    return p.float(), lambda p: p.double()


def computed(p):
    return p, lambda p: p.sin() * 2


def overlapping(p):
    """Windows of one row: its entries occur in the view more than once."""
    if p.dim() != 2:
        return as_it_is(p)
    width, row = p.shape[1], torch.linspace(-1, 1, sum(p.shape) - 1).double()
    return row, lambda p: p.unfold(0, width, 1)


def complex_of(p):
    return p, lambda p: torch.complex(p, p.cos())


WAYS = (transposed, part, flat, cast, computed, overlapping)


def check_way(case, way, dtype=torch.float64):
    """Clipped sums, norms and gradients of parameters that are made in some way."""
    layer, inputs = case.layer(), [x for x in case.inputs(3, 5)]
    if dtype.is_complex:
        inputs = [x.to(dtype) if x.is_floating_point() else x for x in inputs]
    made = {n: way(p.detach()) for n, p in layer.named_parameters()}
    params = {n: p.clone().requires_grad_() for n, (p, _) in made.items()}

    def loss(sample):
        used = {n: of(params[n]) for n, (_, of) in made.items()}
        alone = as_model(layer, case.call)
        output = functional_call(
            alone, {f"layer.{n}": p for n, p in used.items()}, tuple(sample)
        )
        if output.is_complex():
            output = torch.view_as_real(output)
        return squares(output).sum()

    expected = {n: torch.zeros(3, *p.shape).to(p) for n, p in params.items()}
    for b in range(3):
        value = loss([x[b : b + 1] for x in inputs])
        grads = torch.autograd.grad(value, list(params.values()), allow_unused=True)
        for name, g in zip(params, grads):
            if g is not None:
                expected[name][b] = g
    bound = half_clipped(expected)
    found = clipped_grads(loss, params, tuple(inputs), bound)
    tolerance = 1e-4 if way is cast else 1e-8
    same(found.norms, norms_of(expected), tolerance)
    whole = per_sample_grads(loss, params, tuple(inputs)).grads
    for name, total in clipped_sum(expected, "flat", bound).items():
        same(found.sums[name], total, tolerance)
        same(whole[name], expected[name], tolerance)


def same(got, expected, tolerance):
    assert got.shape == expected.shape
    gap = float((got - expected).abs().max())
    assert gap <= tolerance * max(1.0, float(expected.abs().max())), gap


class RuleTests:
    """Tests of the layers in ``cases``, by name, and of the rules of ``ops``."""

    cases: Dict[str, RuleCase] = {}
    ops: Tuple[Callable, ...] = ()

    def pytest_generate_tests(self, metafunc):
        if "case" not in metafunc.fixturenames:
            return
        name, given = metafunc.function.__name__, self.cases
        chosen = [k for k, case in given.items() if name not in case.without]
        metafunc.parametrize("case", [given[k] for k in chosen], ids=chosen)

    def test_sizes(self, case, monkeypatch):
        """The layer is the model; B = 0, B = 1, T = B. Its rule is used."""
        called = []

        def noted(rule):
            return lambda *args, **kwargs: called.append(rule) or rule(*args, **kwargs)

        for op in self.ops:
            monkeypatch.setitem(RULES, op, tuple(noted(rule) for rule in RULES[op]))
        for B, T in ((3, 5), (4, 4), (1, 4), (0, 3)):
            if B or "empty" not in case.without:
                model = as_model(case.layer(), case.call)
                exact(model, case.inputs(B, T), square_loss, BOTH)
        assert called or not self.ops, "or all would pass without it, by copies"

    @pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
    def test_uses(self, case, use):
        if use.__name__ in case.without:
            pytest.skip("does not apply")
        B, T = (3, 5) if use is twice else (4, 4)
        model = Model(case, use, case.inputs(1, T) if use is constant else ())
        with workspace(200 if use is twice else 2**27):
            exact(model, case.inputs(B, T), square_loss)

    def test_flattened(self, case):
        for B, k in ((4, 4), (2, 4)):
            rows = tuple(x.unflatten(0, (B, k)) for x in case.inputs(B * k, 4))
            exact(Model(case, flattened), rows, square_loss)

    def test_frozen(self, case):
        """One parameter after the other, and then the whole layer."""
        names = [n for n, _ in case.layer().named_parameters()]
        for frozen in [*([n] for n in names[:: 1 + len(names) // 4]), names]:
            model = Model(case, inside)
            for name, p in model.layer.named_parameters():
                p.requires_grad = name not in frozen
            exact(model, case.inputs(3, 5), square_loss)

    def test_padded(self, case):
        """Rows and samples without a loss, and a batch of nothing else."""

        def loss_fn(model, batch):
            *inputs, share = batch
            rows = of_rows(model(*inputs))
            kept = torch.arange(rows.shape[1]) < share[:, None] * rows.shape[1]
            return squares(rows * kept)

        for shares in ([0.0, 1.0, 0.0, 0.5], [0.0] * 4):
            batch = *case.inputs(4, 4), torch.tensor(shares)
            exact(Model(case, inside), batch, loss_fn)

    def test_cancelling(self, case):
        """A squared norm of zero, or a little below: never NaN."""
        batch = case.inputs(4, 5)

        def loss_fn(m, batch):
            return weighted(m(*batch))

        exact(Model(case, cancelling), batch, loss_fn)
        model = Model(case, cancelling).float()
        model.other.requires_grad_(False)
        batch = tuple(x.float() if x.is_floating_point() else x for x in batch)
        for total in run_mode(*MODE, model, batch, loss_fn).values():
            assert total.isfinite().all() and total.abs().max() < 1e-2

    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
    def test_ways(self, case, way):
        """The parameters are views, casts or functions of others."""
        check_way(case, way)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_types(self, case, dtype):
        """Norms and sums in float32, from activations of the layer's type."""
        model, inputs = Model(case, inside).to(dtype), case.inputs(4, 5)
        batch = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)

        def loss_fn(m, batch):
            return squares(m(*batch).float())

        grads = {n: g.float() for n, g in oracle(model, batch, loss_fn).items()}
        bound = half_clipped(grads)
        private = make_private(model, *MODE, batch_size=4, max_grad_norm=bound, lr=0.0)
        private.step(batch, loss_fn)
        got = {n: 4 * p.grad.float() for n, p in trainable(model).items()}
        expected = clipped_sum(grads, "flat", bound)
        gap = norms_of({n: (got[n] - e)[None] for n, e in expected.items()})
        size = norms_of({n: e[None] for n, e in expected.items()})
        assert gap <= (1e-4 if dtype is torch.float32 else 0.03) * size
